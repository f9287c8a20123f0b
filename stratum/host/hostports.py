"""The published ports of containers: whether the portmap plugin's rules are still there.

firewalld drops all rules of iptables when an admin reloads it (``FlushAllOnReload``), those of the CNI plugins too.
Nothing is told of it; the containers run on and their ports are dead.
"""

from __future__ import annotations

from stratum.system import Host

__all__ = ["rules_present"]

# The chain and the table of the portmap plugin's two backends.
_CHAIN = "CNI-HOSTPORT-DNAT"
_TABLE = "cni_hostport"
_TIMEOUT = 30.0


def rules_present(host: Host) -> bool:
    """Whether the plugin's rules are in the kernel; raises CommandError when a program cannot be run.

    Ask it only when a container has published ports: before the first one there are none.
    """
    questions = (
        ["iptables", "--wait", "10", "--table", "nat", "--list-rules", _CHAIN],
        ["ip6tables", "--wait", "10", "--table", "nat", "--list-rules", _CHAIN],
        ["nft", "list", "table", "ip", _TABLE],
        ["nft", "list", "table", "inet", _TABLE],
    )
    return any(
        host.run(question, timeout=_TIMEOUT, check=False).status == 0
        for question in questions
        if host.which(question[0]) is not None
    )
