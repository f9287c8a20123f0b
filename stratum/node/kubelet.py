"""The kubelet's files: configuration, credentials, its own directory; and the end of a join.

A standalone node runs pods from files and has a CA of its own for the one client that may ask its kubelet. A worker
joins a cluster: with a bootstrap token, which leaves the disk once the node has its own certificate, or with a
credential that the configuration names.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from stratum import systemd
from stratum.config import WORKER, Secret
from stratum.errors import StratumError
from stratum.node.kubeconfig import Join, exec_user, kubeconfig, make_join
from stratum.node.kubeletconfig import (
    BOOTSTRAP,
    CA_FILE,
    CLIENT_CERTIFICATE,
    DIRECTORY,
    GIVEN_KUBECONFIG,
    JOINED_KUBECONFIG,
    MANIFESTS,
    PKI,
    VOLUME_PLUGINS,
    KubeletFacts,
    kubelet_arguments,
    read_facts,
    render_kubelet_config,
    uses_token,
)
from stratum.node.kubeletroot import plan_kubelet_root
from stratum.node.settings import Settings
from stratum.node.units import KUBELET_CONFIG, UNIT_KUBELET
from stratum.receipt import STATE_DIRECTORY, content_digest
from stratum.steps import Action, Call, RemoveFile, Work, WriteFile, foreign_file, plan_directory, plan_file, withdraw
from stratum.system import Host, HostPath
from stratum.trust import certificates

__all__ = [
    "ADMIN_CERTIFICATE",
    "ADMIN_KEY",
    "BOOTSTRAP",
    "CLIENT_CERTIFICATE",
    "Join",
    "KubeletFacts",
    "client_name",
    "kubelet_arguments",
    "kubelet_inputs",
    "leaves_cluster",
    "make_join",
    "plan_finish_join",
    "plan_kubelet",
    "plan_without_kubelet",
    "read_facts",
    "why_not_joined",
]

SERVING_CERTIFICATE, SERVING_KEY = PKI / "kubelet.crt", PKI / "kubelet.key"
GIVEN_CERTIFICATE, GIVEN_KEY = DIRECTORY / "client.crt", DIRECTORY / "client.key"
ADMIN_CERTIFICATE, ADMIN_KEY = STATE_DIRECTORY / "pki/admin.crt", STATE_DIRECTORY / "pki/admin.key"
JOIN_RECORD = STATE_DIRECTORY / "join.json"
_ADMIN, _ADMINS = "stratum-admin", "stratum-admins"
_TOKEN_HINT = "make a new token (kubeadm token create) and run: stratum up --token-file FILE"  # noqa: S105


def client_name(settings: Settings) -> str:
    """The user that a node's certificate names: the Node authorizer's ``system:node:`` and the node's name."""
    return f"system:node:{settings.node_name}"


def kubelet_inputs(settings: Settings) -> tuple[HostPath, ...]:
    """The files that a running kubelet depends on: when one of them changed, it must be restarted.

    The bootstrap kubeconfig is not among them: that it goes changes nothing for a kubelet that has joined.
    """
    if settings.spec.role != WORKER:
        return (KUBELET_CONFIG, CA_FILE)
    if uses_token(settings.spec):
        return (KUBELET_CONFIG, CA_FILE, JOIN_RECORD)
    return (KUBELET_CONFIG, CA_FILE, GIVEN_KUBECONFIG, GIVEN_CERTIFICATE, GIVEN_KEY)


# -- plans --------------------------------------------------------------------------------------------


def plan_kubelet(work: Work, settings: Settings, facts: KubeletFacts, join: Optional[Join] = None) -> list[Action]:
    """Everything on the disk that the kubelet needs before it starts; nothing when all is there.

    ``join`` is given by the run that joins; at each later start the node lives on what it has. Raises
    :class:`StratumError` for a configuration that the kubelet would not take, and for a worker without a way in.
    """
    config = render_kubelet_config(settings, facts)
    actions = plan_kubelet_root(work)
    for directory in (MANIFESTS, VOLUME_PLUGINS):
        actions += plan_directory(work.host, directory)
    if settings.spec.role == WORKER:
        actions += _plan_worker(work, settings, join)
    else:
        # A node that leaves its cluster keeps no credential of it.
        actions += _plan_forget(work) if work.receipt.get(JOIN_RECORD) else []
        actions += _plan_withdrawal(work, (BOOTSTRAP, GIVEN_KUBECONFIG, GIVEN_CERTIFICATE, GIVEN_KEY, JOIN_RECORD))
        actions += _plan_authority(work)
    actions += plan_file(work, KUBELET_CONFIG, config, 0o600 if settings.has_private_kubelet else 0o644)
    actions += _plan_serving(work)
    return list(dict.fromkeys(actions))


def plan_without_kubelet(work: Work) -> list[Action]:
    """On a container host that was a node, or began to be one: no token, and no configuration.

    What a version with a kubelet would live on is kept, for a rollback to it.
    """
    return _plan_withdrawal(work, (BOOTSTRAP, KUBELET_CONFIG))


def _plan_withdrawal(work: Work, paths: Sequence[HostPath]) -> list[Action]:
    """Take away files of ours that this kind of node has no use for."""
    return [
        Call("remove", str(path), functools.partial(withdraw, work, path)) for path in paths if work.receipt.get(path)
    ]


def _read(host: Host, path: HostPath) -> bytes:
    """The content of a file; empty when it is not there. Raises OSError."""
    try:
        return host.read_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        return b""


# -- standalone ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _MakeAuthority(Action):
    """Make the node's CA and its only client."""

    why: str
    verb = "make"

    @property
    def subject(self) -> str:
        return f"{CA_FILE} and {ADMIN_CERTIFICATE}: {self.why}"

    def perform(self, work: Work) -> None:
        """Key and certificate first: what is cut off before the CA is written is made anew by the next run."""
        made = certificates.make_authority(work.host.now(), _ADMIN, _ADMINS)
        for path, content, mode in (
            (ADMIN_KEY, made.key, 0o600),
            (ADMIN_CERTIFICATE, made.certificate, 0o644),
            (CA_FILE, made.ca, 0o644),
        ):
            WriteFile(path, content, mode).perform(work)


def _plan_authority(work: Work) -> list[Action]:
    host = work.host
    ca, certificate, key = _read(host, CA_FILE), _read(host, ADMIN_CERTIFICATE), _read(host, ADMIN_KEY)
    if ca and certificate and key:
        why = certificates.why_unusable(ca, host.now()) or certificates.why_unusable(certificate, host.now(), _ADMIN)
        if why is None and not (certificates.issued_by(certificate, ca) and certificates.matches_key(certificate, key)):
            why = "they do not belong together"
        if why is None:
            # Their modes are put right where they changed.
            return [
                *plan_file(work, ADMIN_KEY, key, 0o600),
                *plan_file(work, ADMIN_CERTIFICATE, certificate),
                *plan_file(work, CA_FILE, ca),
            ]
    else:
        why = "there are none"
    foreign = [path for path in (CA_FILE, ADMIN_CERTIFICATE, ADMIN_KEY) if host.lexists(path)]
    foreign = [path for path in foreign if work.receipt.get(path) is None]
    if foreign:
        raise foreign_file(foreign[0])
    return [
        *plan_directory(host, ADMIN_KEY.parent, 0o700),
        *plan_directory(host, CA_FILE.parent),
        _MakeAuthority(why),
    ]


# -- worker -------------------------------------------------------------------------------------------


def _join_record(settings: Settings, join: Join) -> bytes:
    """What was joined, without a secret: it tells whether the certificate on the disk is one of this cluster."""
    value = {"format": 1, "server": join.server, "ca": content_digest(join.ca), "node": settings.node_name}
    return json.dumps(value, sort_keys=True).encode() + b"\n"


def leaves_cluster(work: Work, before: Settings, settings: Settings, join: Optional[Join]) -> bool:
    """Whether a node would have another role, or be in another cluster: its certificate would be forgotten."""
    if before.spec.role != settings.spec.role:
        return True
    if settings.spec.role != WORKER or join is None:
        return False
    return _read(work.host, JOIN_RECORD) != _join_record(settings, join)


def _plan_worker(work: Work, settings: Settings, join: Optional[Join]) -> list[Action]:
    if join is None:
        return _plan_joined(work, settings)
    actions = [*_plan_close(work, join), *plan_file(work, CA_FILE, join.ca)]
    if join.token is not None:
        return [
            *actions,
            *_plan_withdrawal(work, (GIVEN_KUBECONFIG, GIVEN_CERTIFICATE, GIVEN_KEY)),
            *_plan_token(work, settings, join, join.token),
        ]
    user: dict[str, object] = {}
    if join.exec is not None:
        user = exec_user(join.exec)
        actions += _plan_withdrawal(work, (GIVEN_CERTIFICATE, GIVEN_KEY))
    elif join.client_key is not None:
        why = certificates.why_unusable(join.client_certificate, work.host.now())
        if why:
            raise StratumError(
                "client-certificate-unusable",
                f"{settings.spec.cluster.client_certificate_file}: {why}",
                hint="give a certificate that is valid now, or set the clock",
            )
        actions += plan_file(work, GIVEN_CERTIFICATE, join.client_certificate)
        actions += plan_file(work, GIVEN_KEY, join.client_key.value.encode(), 0o600)
        user = {"client-certificate": str(GIVEN_CERTIFICATE), "client-key": str(GIVEN_KEY)}
    content = kubeconfig(join.server, CA_FILE, user)
    actions += plan_file(work, GIVEN_KUBECONFIG, content, 0o600)
    record = _join_record(settings, join)
    if work.receipt.get(JOIN_RECORD) and _read(work.host, JOIN_RECORD) != record:
        actions += _plan_forget(work)
    return [*actions, *_plan_withdrawal(work, (BOOTSTRAP,)), *plan_file(work, JOIN_RECORD, record)]


def _plan_close(work: Work, join: Join) -> list[Action]:
    """Stop a kubelet that allows its clients everything before it is given another CA.

    It reads a changed file at once (k8s.io/apiserver, dynamiccertificates), and until its restart every client of the
    cluster would be one that a standalone node has made for itself.
    """
    host = work.host
    if not host.live or _read(host, CA_FILE) in (b"", join.ca) or b'"AlwaysAllow"' not in _read(host, KUBELET_CONFIG):
        return []
    if systemd.read_units(host, [UNIT_KUBELET])[UNIT_KUBELET].stopped:
        return []
    return [Call("stop", UNIT_KUBELET, functools.partial(systemd.stop_unit, host, UNIT_KUBELET))]


def _plan_token(work: Work, settings: Settings, join: Join, token: Secret) -> list[Action]:
    """The bootstrap kubeconfig, unless the node has its certificate of this very cluster already."""
    record = _join_record(settings, join)
    same = _read(work.host, JOIN_RECORD) == record
    held = _read(work.host, CLIENT_CERTIFICATE)
    if same and held and certificates.why_unusable(held, work.host.now(), client_name(settings)) is None:
        return plan_finish_join(work, settings)
    content = kubeconfig(join.server, CA_FILE, {"token": token.value})
    # With a certificate of another cluster, or one that ran out, the kubelet would not ask for a new one.
    stale = _plan_forget(work) if held or not same else []
    return [*stale, *plan_file(work, BOOTSTRAP, content, 0o600), *plan_file(work, JOIN_RECORD, record)]


def _plan_forget(work: Work) -> list[Action]:
    """Remove the identity that a kubelet got: kubeconfig, certificates and the key of a request under way."""
    host = work.host
    found = [JOINED_KUBECONFIG] if host.lexists(JOINED_KUBECONFIG) else []
    if host.is_dir(PKI):
        found += [PKI / name for name in host.listdir(PKI) if name.startswith("kubelet-client")]
    return [RemoveFile(path) for path in found]


def _plan_joined(work: Work, settings: Settings) -> list[Action]:
    """A start without a join: the node must have a way in already."""
    if not uses_token(settings.spec):
        if work.host.exists(GIVEN_KUBECONFIG):
            return []
        raise StratumError(
            "join-missing", f"{GIVEN_KUBECONFIG}: is not there", hint="run: stratum up, with the configuration"
        )
    why = why_not_joined(work.host, settings)
    if why is None:
        return plan_finish_join(work, settings)
    if work.host.exists(BOOTSTRAP):
        return []  # the join goes on
    if _read(work.host, CLIENT_CERTIFICATE):
        raise StratumError("node-certificate", f"the certificate of this node: {why}", hint=_clock_or_token(why))
    raise StratumError("join-missing", f"this node has not joined a cluster: {why}", hint=_TOKEN_HINT)


def _clock_or_token(why: str) -> str:
    if why.startswith("not valid before"):
        return "set the clock (timedatectl), then run: stratum up"
    return _TOKEN_HINT


def why_not_joined(host: Host, settings: Settings) -> Optional[str]:
    """Why the node has no certificate of its own that it can use now; None when it has one."""
    held = _read(host, CLIENT_CERTIFICATE)
    if not held:
        return f"there is no {CLIENT_CERTIFICATE} yet"
    return certificates.why_unusable(held, host.now(), client_name(settings))


def plan_finish_join(work: Work, settings: Settings) -> list[Action]:
    """The token leaves the disk when the node has its own certificate; nothing before, and nothing after.

    Called behind the gate of the kubelet and at each later start: a crash in between leaves the token no longer.
    """
    if not work.host.lexists(BOOTSTRAP) or why_not_joined(work.host, settings) is not None:
        return []
    return [Call("remove", str(BOOTSTRAP), functools.partial(withdraw, work, BOOTSTRAP))]


# -- the kubelet's own serving certificate --------------------------------------------------------------


def _plan_serving(work: Work) -> list[Action]:
    """Remove the pair that the kubelet signed itself when it cannot be used now: it makes a new one at its start.

    It never looks at their dates, and would serve with a certificate of the future, or one that ran out after its year.
    """
    held = _read(work.host, SERVING_CERTIFICATE)
    why = certificates.why_unusable(held, work.host.now()) if held else None
    if why is None:
        return []

    def remove() -> None:
        for path in (SERVING_CERTIFICATE, SERVING_KEY):
            RemoveFile(path).perform(work)

    return [Call("remove", f"{SERVING_CERTIFICATE} and its key, which the kubelet makes anew: {why}", remove)]
