"""State of a kubelet that is not ours: its identity would be taken for the node's, and breaks a join."""

from __future__ import annotations

from stratum.host.finding import REJECT, Finding
from stratum.receipt import STATE_DIRECTORY, Receipt
from stratum.system import Host, HostPath

__all__ = ["check_kubelet_state"]

_ROOT = HostPath("/var/lib/kubelet")
# What kubeadm, k0s, MicroK8s and a kubelet itself leave there of a node's identity.
_IDENTITY = ("pki", "kubeconfig", "config.yaml", "bootstrap-kubeconfig", "kubeadm-flags.env")
# Written before our first start; names what was there by then (stratum.node.kubeletroot).
_BEFORE = STATE_DIRECTORY / "kubelet-before.json"


def check_kubelet_state(host: Host, receipt: Receipt) -> list[Finding]:
    """No identity of another kubelet is in the kubelet's directory. On a node of ours it is our own."""
    if receipt.get(_ROOT) is not None or receipt.get(_BEFORE) is not None or not host.is_dir(_ROOT):
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
