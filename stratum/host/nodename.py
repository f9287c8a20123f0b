"""The name that the node registers with (report rows 9 and 10): chosen once, then kept.

The host's own name is read and never changed. It is what kubelet would take (lower-cased), unless the name is
configured; one that Kubernetes would never accept is refused here, where it can be said, and not minutes later by a
node that does not appear.
"""

from __future__ import annotations

from dataclasses import dataclass

from stratum.errors import HostRefusedError, UsageError
from stratum.kubenames import propose_name, why_no_node_name
from stratum.system import Host, HostPath

__all__ = ["FLAG", "NodeName", "check_name", "choose_node_name", "read_host_name"]

FLAG = "--node-name"
RECORDED = "the name that this node was brought up with"
CONFIGURED = "nodeName"
HOST_NAME = "the host's name"
_HOST_NAME = HostPath("/proc/sys/kernel/hostname")


@dataclass(frozen=True)
class NodeName:
    """The node's name, where it is from, and what to say about it."""

    name: str
    source: str
    note: str = ""


def read_host_name(host: Host) -> str:
    """The host's name as the kernel has it, without white space around it; empty where it cannot be read."""
    try:
        return host.read_text(_HOST_NAME).strip()
    except OSError:
        return ""


def choose_node_name(host: Host, configured: str, recorded: str) -> NodeName:
    """The node's name. What is recorded wins over the host's name of now: a node never gets a new identity by itself.

    Raises :class:`UsageError` when another name is configured than the recorded one, or one that is no name;
    :class:`HostRefusedError` when the host's own name is none that a node can have.
    """
    if configured:
        check_name(configured)
    if recorded:
        if configured and configured != recorded:
            raise UsageError(
                "node-name-differs",
                f"this node was brought up as {recorded}, and the configured name is {configured}",
                hint=f"keep {recorded}; to give the node another name on purpose: stratum uninstall, then join again",
            )
        return NodeName(recorded, RECORDED)
    if configured:
        return NodeName(configured, CONFIGURED)
    found = read_host_name(host)
    name = found.lower()
    why = why_no_node_name(name)
    if why:
        raise HostRefusedError(
            "node-name", f"the host's name {found!r} cannot be the node's: it {why}", hint=_hint(found)
        )
    note = f"the node's name is {name}: the host's name {found} in lower case" if name != found else ""
    return NodeName(name, HOST_NAME, note)


def check_name(name: str) -> None:
    """Refuse a configured name that no node can have; raises :class:`UsageError`."""
    why = why_no_node_name(name)
    if why:
        raise UsageError("node-name", f"node name {name!r} {why}", hint=_hint(name))


def _hint(name: str) -> str:
    return f"give the node a name: {FLAG} {propose_name(name) or 'NAME'} (the host keeps its own)"
