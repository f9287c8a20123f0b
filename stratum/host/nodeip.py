"""The node's address: one precedence for every start, and what can never be one (seed 004, ResolveNodeIP).

1. ``--node-ip`` of this invocation
2. the address that this node was brought up with
3. the configuration
4. ``$NODE_IP``
5. detection

What is recorded outranks the configuration: the unit's command line never has ``--node-ip``, and an edit of the
configuration, made for the next node, must not give this one another address at its next boot than the one that
its certificates name. ``--node-ip`` outranks the record, to move a node on purpose.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable

from stratum.errors import HostRefusedError, UsageError
from stratum.host.addresses import IPAddress, Network
from stratum.host.detection import Detected, is_present
from stratum.host.reachability import unmapped, unreachable_kind

__all__ = [
    "NodeIPChoice",
    "check_argument",
    "check_node_ip",
    "check_pinned",
    "node_ips",
    "primary",
    "resolve_node_ip",
    "resolve_without_config",
]

VARIABLE = "NODE_IP"

FLAG = "--node-ip"
RECORDED = "the address that this node was brought up with"
CONFIGURED = "network.nodeIP in the configuration"
ENVIRONMENT = f"${VARIABLE}"

Detect = Callable[[], Detected]


@dataclass(frozen=True)
class NodeIPChoice:
    """The node IP that a start settled on: ``v4``, ``v6`` or ``v4,v6``, where it is from, what to warn of."""

    ip: str
    source: str
    warnings: tuple[str, ...] = ()


def primary(node_ip: str) -> str:
    """The first address of a node IP, where only one can stand."""
    return node_ip.partition(",")[0]


def resolve_node_ip(flag: str, state: str, config: str, environment: Mapping[str, str], detect: Detect) -> NodeIPChoice:
    """The node IP by the one precedence. Explicit sources are used as they are; ``detect`` is called only when all
    of them are empty, so a node with a pinned address needs no route. Raises what ``detect`` raises.
    """
    sources = ((FLAG, flag), (RECORDED, state), (CONFIGURED, config), (ENVIRONMENT, environment.get(VARIABLE, "")))
    return _resolve(sources, detect)


def resolve_without_config(flag: str, state: str, environment: Mapping[str, str], detect: Detect) -> NodeIPChoice:
    """:func:`resolve_node_ip` for a start that reads no configuration; no hint of it names one."""
    return _resolve(((FLAG, flag), (RECORDED, state), (ENVIRONMENT, environment.get(VARIABLE, ""))), detect)


def node_ips(environment: Mapping[str, str], detect: Detect) -> NodeIPChoice:
    """``$NODE_IP`` or detection, for what knows nothing of a node (seed 004, NodeIP and NodeIPs)."""
    return _resolve(((ENVIRONMENT, environment.get(VARIABLE, "")),), detect)


def _resolve(sources: Sequence[tuple[str, str]], detect: Detect) -> NodeIPChoice:
    for name, value in sources:
        if value:
            return NodeIPChoice(value, name)
    try:
        found = detect()
    except HostRefusedError as error:
        # What was recorded is nothing that somebody can give.
        places = " or ".join(name for name, _ in sources if name != RECORDED)
        raise HostRefusedError(error.reference, error.message, hint=f"give the address: {places}") from None
    return NodeIPChoice(found.ip, f"detected: {found.how}", found.warnings)


# -- refusals ---------------------------------------------------------------------------------------------


def check_argument(value: str) -> None:
    """Refuse what is no node IP for any node, while the command line is read; raises :class:`UsageError`."""
    parts = value.split(",")
    if len(parts) > 2:
        raise _malformed(value, "has more than two addresses")
    for part in parts:
        _parse(part)


def check_node_ip(value: str, families: Sequence[int] = (4,)) -> None:
    """Refuse a node IP that kubelet could not register for a node of ``families`` (seed 004, CheckNodeIP).

    One address of the one family, or a pair, IPv4 first. Whether the host has it is left to
    :func:`check_pinned` and kubelet. Raises :class:`UsageError`.
    """
    parts = value.split(",")
    wanted = " and ".join(f"an IPv{family} address" for family in families)
    found = [_parse(part) for part in parts]
    if tuple(address.version for address in found) != tuple(families):
        order = ", in that order with a comma between them" if len(families) > 1 else " alone"
        raise UsageError(
            "node-ip-family", f"node IP {value!r}: this node needs {wanted}{order}", hint=f"change what {FLAG} says"
        )


def _malformed(value: str, why: str) -> UsageError:
    return UsageError("node-ip-malformed", f"node IP {value!r} {why}", hint="write it as 192.0.2.10 or 2001:db8::10")


def _parse(text: str) -> IPAddress:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise _malformed(text, "is not an IP address") from None
    kind = unreachable_kind(address)
    if kind:
        raise UsageError(
            "node-ip-unreachable",
            f"node IP {text!r} is {kind}: no other host can reach a node by it",
            hint="give an address of this host that others reach",
        )
    if "%" in text:
        raise _malformed(text, "has a zone, which means nothing on other hosts")
    if unmapped(address) != address:
        raise _malformed(text, f"is an IPv4-mapped IPv6 address; write {unmapped(address)}")
    # The oldest Python that we run on takes 010.0.0.1 for 10.0.0.1; other programs take it for 8.0.0.1.
    if address.version == 4 and str(address) != text:
        raise _malformed(text, "has leading zeros")
    return address


def check_pinned(value: str, network: Network) -> None:
    """The recorded node IP is still on this host; another is never chosen silently.

    Raises :class:`HostRefusedError`. An interface that comes up late may bring it: the caller waits for that.
    """
    gone = [part for part in value.split(",") if not is_present(network, ipaddress.ip_address(part))]
    if not gone:
        return
    there = [f"{item.ip} ({network.name(item.link)})" for item in network.addresses if not unreachable_kind(item.ip)]
    raise HostRefusedError(
        "node-ip-gone",
        f"this node was brought up as {value}, and {' and '.join(gone)} is not on this host any more; "
        f"it has {', '.join(there) or 'no other address'}",
        hint=f"bring the address back, or move the node on purpose with {FLAG}",
    )
