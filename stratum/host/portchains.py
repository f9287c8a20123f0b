"""The chains that the CNI portmap plugin shares between all containers, and leaves behind after the last one.

The plugin (iptables backend) makes three chains in the table nat when a container first publishes a port, and its DEL
takes away the container's own chain only. Any CNI user on the host has the same three. So they are taken away only
where none was there before our containers of this boot, nobody else uses CNI, and what is in them is to the letter
what the plugin puts there for everybody; and in one transaction that fails as a whole when a rule has come meanwhile.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import BinaryIO

from stratum import atomicfile
from stratum.steps import Action, Call
from stratum.system import Host, HostPath

__all__ = ["PREFIX", "find_chains", "plan_remember", "plan_removal"]

PREFIX = "CNI-HOSTPORT-"
# Chains end with a boot, so what is known of them does.
REMEMBERED = HostPath("/run/stratum/hostport-chains.json")
_TOOLS = ("iptables", "ip6tables")
_TIMEOUT = 30.0
_CHAINS = ("CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ")
# plugins/meta/portmap of the CNI plugins 0.8 to 1.6, as iptables-save prints it.
_RULES = (
    "-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT",
    "-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT",
    '-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ',
    '-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000',
    "-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE",
)


def find_chains(host: Host) -> dict[str, list[str]]:
    """By program, the lines of the table nat that name a shared chain; without those that have none."""
    found = {}
    for tool in _TOOLS:
        if host.which(tool) is None:
            continue
        done = host.run([tool, "--wait", "10", "--table", "nat", "--list-rules"], timeout=_TIMEOUT, check=False)
        lines = [line.strip() for line in done.text.splitlines() if PREFIX in line] if done.status == 0 else []
        if lines:
            found[tool] = lines
    return found


def _remembered(host: Host) -> dict[str, bool]:
    """By program, whether there were chains before our containers; empty when nobody looked in this boot."""
    try:
        value = json.loads(host.read_bytes(REMEMBERED))
        return {tool: bool(value[tool]) for tool in _TOOLS if tool in value}
    except (OSError, ValueError, TypeError):
        return {}


def plan_remember(host: Host) -> list[Action]:
    """Note whose chains are there already, once in a boot and before the first container of ours."""
    if host.exists(REMEMBERED) or not any(host.which(tool) for tool in _TOOLS):
        return []

    def note() -> None:
        found = find_chains(host)
        value = {tool: tool in found for tool in _TOOLS if host.which(tool)}
        host.makedirs(REMEMBERED.parent)
        atomicfile.write_file(host, REMEMBERED, json.dumps(value).encode() + b"\n")

    return [Call("note", "which chains for published ports are there", note)]


def _of_network(lines: Sequence[str], network: str) -> list[str]:
    """The lines of ``network``'s containers, which go with those: the jump to a container's chain, and its marks."""
    jump = re.compile(
        rf'-A CNI-HOSTPORT-DNAT .*--comment "dnat name: \\"{re.escape(network)}\\" id: .* -j (CNI-DN-[0-9a-f]+)'
    )
    chains = {match[1] for match in map(jump.fullmatch, lines) if match}
    return [
        line
        for line in lines
        if jump.fullmatch(line) or (line.split()[1] in chains and line.endswith("-j CNI-HOSTPORT-SETMARK"))
    ]


def plan_removal(host: Host, network: str, *, shared: bool) -> tuple[list[Action], list[str]]:
    """What takes the chains away once the containers of ``network`` are gone; and what stays, each with its reason.

    ``shared`` says that others use CNI on this host. Chains that were there before are nothing of ours and are not
    named.
    """
    before = _remembered(host)
    actions: list[Action] = []
    left: list[str] = []
    for tool, lines in find_chains(host).items():
        if before.get(tool):
            continue
        expected = {*_RULES, *(f"-N {chain}" for chain in _CHAINS), *_of_network(lines, network)}
        why = ""
        if tool not in before:
            why = "it is not known who made them"
        elif shared:
            why = "others use CNI on this host"
        elif set(lines) - expected:
            why = "there are rules of others in them or to them"
        elif host.which(f"{tool}-restore") is None:
            why = f"{tool}-restore is not installed"
        if why:
            left.append(f"chains for published ports in the table nat of {tool}: {why}")
        else:
            what = f"{PREFIX}* in the table nat of {tool}"
            actions.append(Call("remove firewall chains", what, functools.partial(_remove, host, tool)))
    return actions, left


def render_removal(lines: Sequence[str]) -> bytes:
    """The transaction for ``iptables-restore --noflush``. Nothing is flushed: a chain that is not empty stops it."""
    rules = [f"-D{line[2:]}" for line in lines if line in _RULES]
    chains = [f"-X {chain}" for chain in _CHAINS if f"-N {chain}" in lines]
    return "\n".join(["*nat", *rules, *chains, "COMMIT", ""]).encode()


def _remove(host: Host, tool: str) -> None:
    data = render_removal(find_chains(host).get(tool, []))

    def feed(pipe: BinaryIO) -> None:
        pipe.write(data)

    # Whoever published a port just now keeps everything, and uninstall says that it stays: no reason to stop it.
    host.run([f"{tool}-restore", "--noflush", "--wait", "10"], timeout=_TIMEOUT, check=False, feed=feed)
