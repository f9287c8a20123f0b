"""What was decided when the node was brought up, and holds at each later start (seed 004, ResolveNodeIP).

The unit's command line never repeats an option and the supervisor does not read the configuration file, so what is in
force must be on the disk. A node on which everything is as it comes has no such file.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stratum.config import Network, NodeSpec
from stratum.configcodec import spec_from_json, spec_to_json
from stratum.configvalues import has_password
from stratum.errors import StratumError
from stratum.receipt import STATE_DIRECTORY
from stratum.steps import Action, Call, MakeDirectory, Work, plan_file, withdraw
from stratum.system import Host, HostPath

__all__ = [
    "EARLIER_PATH",
    "FROM_BEFORE",
    "SETTINGS_PATH",
    "Settings",
    "forget_earlier",
    "keep_earlier",
    "plan_settings",
    "read_earlier",
    "read_settings",
]

SETTINGS_PATH = STATE_DIRECTORY / "settings.json"
# While a switch of versions is under way: the settings to go back to.
EARLIER_PATH = STATE_DIRECTORY / "settings.earlier.json"
#: The source of a value that an older release recorded without one.
FROM_BEFORE = "recorded"
_FORMAT = 2
_DEFAULT = NodeSpec()


@dataclass(frozen=True)
class Settings:
    """What is in force on a node: the configuration that the last ``up`` or ``upgrade`` took, and what was resolved.

    ``node_ip`` is empty until the node has one (``v4``, ``v6`` or ``v4,v6``), and so is ``node_name``. ``sources`` says
    where a value came from that is not a default: by the field's path in ``spec`` (``network.clusterCIDRs``), or by
    ``nodeIP`` or ``nodeName`` for what was resolved. ``spec`` never has what a node joins with.
    """

    spec: NodeSpec = _DEFAULT
    node_ip: str = ""
    node_name: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def profile(self) -> str:
        """The profile's name."""
        return self.spec.profile

    @property
    def cluster_cidrs(self) -> tuple[str, ...]:
        """The networks of pods and services."""
        return self.spec.network.cluster_cidrs

    @property
    def selinux(self) -> bool:
        """Whether files get labels where SELinux is on."""
        return self.spec.selinux

    @property
    def has_private_kubelet(self) -> bool:
        """Whether a field of the kubelet's may hold a password: the headers with which it asks for static pods."""
        return "staticPodURLHeader" in self.spec.kubelet.config

    @property
    def is_private(self) -> bool:
        """Whether a value is nobody's business but root's: a password of a proxy, the environment of a program."""
        urls = [url for url in (self.spec.proxy.http, self.spec.proxy.https) if url]
        credential = self.spec.cluster.exec
        return any(map(has_password, urls)) or bool(credential and credential.env) or self.has_private_kubelet

    def to_json(self) -> dict[str, object]:
        """The form on the disk."""
        return {
            "format": _FORMAT,
            "spec": spec_to_json(self.spec),
            "nodeIP": self.node_ip,
            "nodeName": self.node_name,
            "sources": dict(self.sources),
        }


def _from_json(value: Any) -> Settings:
    """The settings of either format; raises ValueError, TypeError or KeyError."""
    if value["format"] == 1:
        return _from_first_format(value)
    if value["format"] != _FORMAT:
        raise ValueError(f"format {value['format']!r} is not {_FORMAT}")
    sources = {str(path): str(source) for path, source in value["sources"].items()}
    return Settings(spec_from_json(value["spec"]), str(value["nodeIP"]), str(value["nodeName"]), sources)


def _from_first_format(value: Any) -> Settings:
    # That release took a network with bits set behind its prefix.
    cidrs = tuple(str(ipaddress.ip_network(item, strict=False)) for item in value["clusterCIDRs"])
    spec = NodeSpec(profile=str(value["profile"]), selinux=bool(value["selinux"]), network=Network(cluster_cidrs=cidrs))
    changed = {
        "profile": spec.profile != _DEFAULT.profile,
        "selinux": spec.selinux != _DEFAULT.selinux,
        "network.clusterCIDRs": bool(cidrs),
        "nodeIP": bool(value["nodeIP"]),
    }
    return Settings(spec, str(value["nodeIP"]), "", {path: FROM_BEFORE for path, holds in changed.items() if holds})


def read_settings(host: Host) -> Settings:
    """The recorded settings; the defaults without a record. Raises :class:`StratumError` when it cannot be read.

    It is never passed over: a node would get another address than the one that others know it by.
    """
    return _read(host, SETTINGS_PATH)


def _read(host: Host, path: HostPath) -> Settings:
    try:
        return _from_json(json.loads(host.read_bytes(path)))
    except FileNotFoundError:
        return Settings()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StratumError(
            "settings-unreadable",
            f"{path}: not settings that this version reads: {error}",
            hint=f"remove {path}, then run: stratum up --node-ip ADDRESS, with the address that the node had",
        ) from None


def plan_settings(work: Work, settings: Settings) -> list[Action]:
    """What records ``settings``; nothing when they are recorded, or are those of a node without a record."""
    if settings == Settings() and not work.host.lexists(SETTINGS_PATH):
        return []
    if settings == Settings() and work.receipt.owns(SETTINGS_PATH):
        return [Call("remove", str(SETTINGS_PATH), lambda: withdraw(work, SETTINGS_PATH))]
    return _plan_write(work, SETTINGS_PATH, settings)


def _plan_write(work: Work, path: HostPath, settings: Settings) -> list[Action]:
    content = json.dumps(settings.to_json(), indent=1, sort_keys=True).encode() + b"\n"
    mode = 0o600 if settings.is_private else 0o644
    # The state directory is made with the journal, before the first change of any run.
    return [action for action in plan_file(work, path, content, mode) if not isinstance(action, MakeDirectory)]


def keep_earlier(work: Work, settings: Settings) -> None:
    """Keep what is in force before a switch to ``settings``, as long as it is under way. Raises OSError."""
    now = read_settings(work.host)
    if now != settings and not work.host.exists(EARLIER_PATH):
        for action in _plan_write(work, EARLIER_PATH, now):
            action.perform(work)


def read_earlier(host: Host) -> Settings:
    """The settings that a switch goes back to: those kept, else those in force. Raises :class:`StratumError`."""
    return _read(host, EARLIER_PATH) if host.exists(EARLIER_PATH) else read_settings(host)


def forget_earlier(work: Work) -> None:
    """The switch is over, one way or the other. Raises OSError."""
    if work.receipt.get(EARLIER_PATH) is not None:
        withdraw(work, EARLIER_PATH)
