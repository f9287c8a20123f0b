"""The gate behind the kubelet: it answers, and a worker's has its certificate; and why it does not.

Only what can be seen on the node without rights in the cluster. Nothing here goes through a proxy.
"""

from __future__ import annotations

import re
from typing import Optional

from stratum import systemd
from stratum.config import WORKER
from stratum.errors import StratumError
from stratum.node.kubelet import why_not_joined
from stratum.node.kubeletconfig import HEALTHZ_PORT, uses_token
from stratum.node.launchcheck import last_words, read_launch_check, refusal
from stratum.node.settings import Settings
from stratum.node.units import UNIT_KUBELET, UNIT_KUBELET_LAUNCH_CHECK
from stratum.system import Host

__all__ = ["KUBELET_TIMEOUT", "explain", "kubelet_answers", "wait_kubelet"]

KUBELET_TIMEOUT = 180.0  # seconds for the first answer, and a worker's certificate
_POLL = 0.5
_ASK_TIMEOUT = 5.0
_LINES = 40

_NEW_TOKEN = "make a new token (kubeadm token create) and run: stratum up --token-file FILE"  # noqa: S105
_UNREACHABLE = (
    r"connection refused|no route to host|i/o timeout|no such host|network is unreachable|Client\.Timeout"
    r"|context deadline exceeded|TLS handshake timeout"
)
# What kubelets write when a join fails (client-go, crypto/x509, net): what it means, and what to do.
_CAUSES = (
    (
        r"certificate has expired or is not yet valid|not yet valid",
        "a certificate is not valid at the time that this clock shows",
        "compare the clock (timedatectl) with that of the API server; if it is right, the server's certificate is old",
    ),
    (
        r"certificate signed by unknown authority|certificate is not trusted",
        "the API server's certificate is not signed by the CA that was given",
        "give the cluster's CA (spec.cluster.caFile) and run: stratum up --token-file FILE",
    ),
    (
        r"certificate is (?:not )?valid for",
        "the API server's certificate is not for the name or address in spec.cluster.server",
        "use the name that the certificate has",
    ),
    (
        r"Unauthorized|the server has asked for the client to provide credentials",
        "the token is expired or wrong",
        _NEW_TOKEN,
    ),
    (
        r"is forbidden|Forbidden",
        "the API server refuses what the kubelet asks for",
        "let the token's group make certificate requests: ClusterRoleBinding of system:node-bootstrapper",
    ),
    (
        _UNREACHABLE,
        "the API server cannot be reached",
        "see that the address in spec.cluster.server answers from this host",
    ),
    (
        r"unable to load bootstrap kubeconfig",
        "the node has no certificate that is valid, and no token",
        _NEW_TOKEN,
    ),
    (r"[Ss]wap", "swap is on", "run: stratum up, which switches it off"),
)


def kubelet_answers(host: Host, port: int = HEALTHZ_PORT) -> Optional[str]:
    """Why the kubelet does not answer well now; None when its healthz says ``ok``."""
    try:
        status, body = host.get_local(port, "/healthz", _ASK_TIMEOUT)
    except OSError as error:
        return f"127.0.0.1:{port}: {error.strerror or error}"
    if status != 200 or body.strip() != b"ok":
        return f"healthz says {status}: {body[:200].decode('utf-8', 'backslashreplace').strip()}"
    return None


def wait_kubelet(host: Host, settings: Settings, timeout: float = KUBELET_TIMEOUT, *, port: int = HEALTHZ_PORT) -> None:
    """Wait up to ``timeout`` seconds until the kubelet is ready; raises :class:`StratumError` that says why it is not.

    Ready is: healthz answers ``ok``, and a worker that joined by a token has its own certificate, valid now.
    """
    deadline = host.monotonic() + timeout
    while True:
        why = kubelet_answers(host, port)
        if why is None and settings.spec.role == WORKER and uses_token(settings.spec):
            why = why_not_joined(host, settings)
        if why is None:
            return
        if settings.spec.kubelet.launch_check and read_launch_check(host).refused:
            raise refusal(host)
        if host.monotonic() >= deadline:
            raise explain(host, why, timeout)
        host.sleep(_POLL)


def explain(host: Host, why: str, timeout: float) -> StratumError:
    """The error for a kubelet that is not ready: the cause as far as its journal tells, and its own words."""
    if read_launch_check(host).trying:
        return StratumError(
            "launch-check-failing",
            f"{UNIT_KUBELET_LAUNCH_CHECK}: the launch check does not agree and is tried again: {last_words(host)}",
            hint="settle what it says; the kubelet then starts by itself",
        )
    tail = [_plain(line) for line in systemd.journal_tail(host, UNIT_KUBELET, _LINES)]
    for pattern, cause, hint in _CAUSES:
        # The last of them: earlier lines are of earlier tries.
        line = next((line for line in reversed(tail) if re.search(pattern, line)), None)
        if line is not None:
            return StratumError("kubelet-not-ready", f"{UNIT_KUBELET}: {cause}: {line}", hint=hint)
    said = f": {tail[-1]}" if tail else ""
    return StratumError(
        "kubelet-not-ready",
        f"{UNIT_KUBELET}: not ready within {timeout:g} s: {why}{said}",
        hint=f"read all of it: journalctl --boot --unit {UNIT_KUBELET}",
    )


def _plain(line: str) -> str:
    """A line of klog without its head (``E1130 10:00:00.000000    1 run.go:72] ``), and not longer than a screen."""
    return re.sub(r"^[IWEF]\d{4} [\d:.]+ +\d+ [\w./-]+:\d+\] ", "", line)[:400]
