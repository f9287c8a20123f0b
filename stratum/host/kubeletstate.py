"""Another kubelet on the host: an identity that would be taken for the node's, and a port that ours could not have.

Not every kubelet runs under that name: k3s, RKE2's server and MicroK8s have it in a program of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

from stratum.host.finding import REJECT, Finding
from stratum.receipt import STATE_DIRECTORY, Receipt
from stratum.system import Host, HostPath

__all__ = ["check_kubelet_port", "check_kubelet_state"]

_ROOT = HostPath("/var/lib/kubelet")
# What kubeadm, k0s, MicroK8s and a kubelet itself leave there of a node's identity.
_IDENTITY = ("pki", "kubeconfig", "config.yaml", "bootstrap-kubeconfig", "kubeadm-flags.env")
# Written before our first start; names what was there by then (stratum.node.kubeletroot).
_BEFORE = STATE_DIRECTORY / "kubelet-before.json"

_LISTENING = "0A"


def check_kubelet_state(host: Host, receipt: Receipt) -> list[Finding]:
    """No identity of another kubelet is in the kubelet's directory. On a node of ours it is our own."""
    if _had_ours(receipt) or not host.is_dir(_ROOT):
        return []
    found = [str(_ROOT / name) for name in _IDENTITY if host.lexists(_ROOT / name)]
    if not found:
        return []
    return [
        Finding(
            "kubelet-state",
            REJECT,
            f"another kubelet was or is on this host: {', '.join(found)}",
            f"take it off with its own tool (kubeadm reset), or move it away: mv {_ROOT} {_ROOT}.saved",
        )
    ]


def check_kubelet_port(host: Host, receipt: Receipt, ports: Sequence[int]) -> list[Finding]:
    """Nobody listens on ``ports``, on any address (proc(5), ``/proc/net``), before our kubelet first starts."""
    if _had_ours(receipt):
        return []
    listening: set[int] = set()
    for protocol in ("tcp", "tcp6"):
        try:
            lines = host.read_text(f"/proc/net/{protocol}").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            port = fields[1].rpartition(":")[2] if len(fields) > 3 and fields[3] == _LISTENING else ""
            if len(port) == 4:
                listening.add(int(port, 16))
    return [
        Finding(
            "kubelet-port",
            REJECT,
            f"port {port} is taken, which the kubelet needs: another kubelet may run here (k3s, RKE2, MicroK8s)",
            f"find the program with: ss -lntp 'sport = :{port}'; take it off with its own tool",
        )
        for port in ports
        if port in listening
    ]


def _had_ours(receipt: Receipt) -> bool:
    return receipt.get(_ROOT) is not None or receipt.get(_BEFORE) is not None
