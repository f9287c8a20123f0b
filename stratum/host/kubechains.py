"""The firewall chains that a kubelet makes and leaves behind.

A kubelet of 1.31 or later makes, with ``makeIPTablesUtilChains``: in the table mangle KUBE-IPTABLES-HINT, in filter
KUBE-FIREWALL with a jump from INPUT and one from OUTPUT, and in each of mangle, nat and filter the empty chain
KUBE-KUBELET-CANARY (pkg/kubelet/kubelet_network_linux.go). They are its alone. The chains of kube-proxy and of network
plugins were made by pods of the cluster and are nothing of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import BinaryIO

from stratum.steps import Action, Call
from stratum.system import Host

__all__ = ["find_chains", "find_others", "plan_removal"]

_TOOLS = ("iptables", "ip6tables")
_TABLES = ("mangle", "nat", "filter")
_CHAINS = ("KUBE-KUBELET-CANARY", "KUBE-IPTABLES-HINT", "KUBE-FIREWALL")
_PREFIX = "KUBE-"
_TIMEOUT = 30.0


def _list(host: Host, tool: str, table: str) -> list[str]:
    if host.which(tool) is None:
        return []
    done = host.run([tool, "--wait", "10", "--table", table, "--list-rules"], timeout=_TIMEOUT, check=False)
    return done.text.splitlines() if done.status == 0 else []


def find_chains(host: Host) -> dict[tuple[str, str], list[str]]:
    """By program and table, the kubelet's chains that are there and the rules that jump to them, as listed."""
    found = {}
    for tool in _TOOLS:
        for table in _TABLES:
            lines = [line for line in _list(host, tool, table) if _makes(line) or _jumps(line)]
            if any(map(_makes, lines)):
                found[tool, table] = lines
    return found


def find_others(host: Host) -> list[str]:
    """Chains that pods of the cluster made (kube-proxy), which stay: each as ``chain in the table T of TOOL``."""
    return [
        f"{line.split()[1]} in the table {table} of {tool}"
        for tool in _TOOLS
        for table in _TABLES
        for line in _list(host, tool, table)
        if line.startswith(f"-N {_PREFIX}") and not _makes(line)
    ]


def _makes(line: str) -> bool:
    words = line.split()
    return len(words) == 2 and words[0] == "-N" and words[1] in _CHAINS


def _jumps(line: str) -> bool:
    words = line.split()
    return words[:1] == ["-A"] and words[-2:-1] == ["-j"] and words[-1] in _CHAINS


def render_removal(table: str, lines: Sequence[str]) -> bytes:
    """The transaction for ``iptables-restore --noflush``: the jumps, then the chains with what is in them."""
    jumps = [f"-D{line[2:]}" for line in lines if _jumps(line)]
    chains = [line.split()[1] for line in lines if _makes(line)]
    clears = [*(f"-F {chain}" for chain in chains), *(f"-X {chain}" for chain in chains)]
    return "\n".join([f"*{table}", *jumps, *clears, "COMMIT", ""]).encode()


def plan_removal(host: Host) -> list[Action]:
    """What takes the kubelet's chains away, once it has stopped; other chains and rules are not touched."""
    return [
        Call(
            "remove firewall chains",
            f"of the kubelet in the table {table} of {tool}",
            functools.partial(_remove, host, tool, table),
        )
        for tool, table in find_chains(host)
    ]


def _remove(host: Host, tool: str, table: str) -> None:
    data = render_removal(table, find_chains(host).get((tool, table), []))

    def feed(pipe: BinaryIO) -> None:
        pipe.write(data)

    host.run([f"{tool}-restore", "--noflush", "--wait", "10"], timeout=_TIMEOUT, feed=feed)
