"""The gate behind the kubelet: it answers, and a worker's has its certificate; and why it does not.

Only what can be seen on the node without rights in the cluster. Nothing here goes through a proxy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
_ENDS = 4  # restarts in one gate, five seconds apart: what stays so after them is not a matter of time
_ENDS_EVERY = 2.0

_NEW_TOKEN = "make a new token (kubeadm token create) and run: stratum up --token-file FILE"  # noqa: S105
_UNREACHABLE = (
    r"connection refused|no route to host|i/o timeout|no such host|network is unreachable|Client\.Timeout"
    r"|context deadline exceeded|TLS handshake timeout"
)
# How a kubelet says why it ends (cmd/kubelet/app, run.go), and what may be over by its next start.
_LAST_WORDS = r"command failed|failed to run Kubelet"
_PASSING = (
    rf"{_UNREACHABLE}|timed out waiting for the condition|unable to handle the request|ServiceUnavailable"
    r"|connection reset|\bEOF\b"
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

    A kubelet that ends again and again is not waited for, unless what it blames may pass.
    Ready is: healthz answers ``ok``, and a worker that joined by a token has its own certificate, valid now.
    """
    begun = host.monotonic()
    ends = _Ends(host)
    while True:
        why = kubelet_answers(host, port)
        answers = why is None
        if why is None and settings.spec.role == WORKER and uses_token(settings.spec):
            why = why_not_joined(host, settings)
        if why is None:
            return
        if settings.spec.kubelet.launch_check and read_launch_check(host).refused:
            raise refusal(host)
        passed = host.monotonic() - begun
        if passed >= timeout:
            raise explain(host, why, timeout)
        if not answers and ends.in_vain():
            raise explain(host, f"it ended {_ENDS} times since its start", passed)
        host.sleep(_POLL)


class _Ends:
    """Whether a kubelet ends again and again for a reason that no waiting takes away."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._before: Optional[int] = None
        self._asked = host.monotonic()

    def in_vain(self) -> bool:
        """Asks systemd every few seconds."""
        if self._before is not None and self._host.monotonic() - self._asked < _ENDS_EVERY:
            return False
        self._asked = self._host.monotonic()
        restarts = systemd.read_restarts(self._host, UNIT_KUBELET)
        if self._before is None or restarts < self._before:
            self._before = restarts
        return restarts - self._before >= _ENDS and not _is_passing(self._host)


def _is_passing(host: Host) -> bool:
    """Whether the kubelet's journal blames what may pass: the network, an API server that starts, a certificate that
    it waits for. The words with which it ended count, else all of them."""
    tail = systemd.journal_tail(host, UNIT_KUBELET, _LINES)
    return any(re.search(_PASSING, line) for line in _last_words(tail) or tail)


def _last_words(tail: Sequence[str]) -> list[str]:
    """The line with which the kubelet ended last, if there is one."""
    return [line for line in tail if re.search(_LAST_WORDS, line)][-1:]


def explain(host: Host, why: str, timeout: float) -> StratumError:
    """The error for a kubelet that is not ready: the cause as far as its journal tells, and its own words."""
    if read_launch_check(host).trying:
        return StratumError(
            "launch-check-failing",
            f"{UNIT_KUBELET_LAUNCH_CHECK}: the launch check does not agree and is tried again: {last_words(host)}",
            hint="settle what it says; the kubelet then starts by itself",
        )
    tail = [_plain(line) for line in systemd.journal_tail(host, UNIT_KUBELET, _LINES)]
    last = _last_words(tail)
    # With which it ended, or else any; the last of them: earlier lines are of earlier tries.
    for pattern, cause, hint in _CAUSES:
        line = next((line for line in reversed(last or tail) if re.search(pattern, line)), None)
        if line is not None:
            return StratumError("kubelet-not-ready", f"{UNIT_KUBELET}: {cause}: {line}", hint=hint)
    said = f": {(last or tail)[-1]}" if tail else ""
    return StratumError(
        "kubelet-not-ready",
        f"{UNIT_KUBELET}: not ready within {timeout:g} s: {why}{said}",
        hint=f"read all of it: journalctl --boot --unit {UNIT_KUBELET}",
    )


def _plain(line: str) -> str:
    """A line of klog without its head (``E1130 10:00:00.000000    1 run.go:72] ``), and not longer than a screen."""
    return re.sub(r"^[IWEF]\d{4} [\d:.]+ +\d+ [\w./-]+:\d+\] ", "", line)[:400]
