"""Which of the host's own addresses is the node's, when nobody has said (seed 004, DetectNodeIPs).

The default route's source address, else the only global one; two that are as good as each other are refused and
never chosen between. Deciding is pure: a :class:`~stratum.host.addresses.Network` in, an address out.

What is no candidate: addresses that cannot name a node at all (loopback, link-local …), secondary, temporary,
deprecated and tentative ones, those of an interface that is down. What is one only where there is no better:
an address with a host's prefix length that was set by hand (a virtual address of keepalived or a load balancer),
and those of container networks and of the loopback interface.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from stratum.errors import HostRefusedError, UsageError
from stratum.host.addresses import Address, DefaultRoute, IPAddress, Link, Network
from stratum.host.reachability import unreachable_kind

__all__ = ["Detected", "detect_node_ips", "families_of"]

# Kinds of interfaces that container networks and overlays are made of; a node's own address is not on them.
_CONTAINER_KINDS = frozenset(
    {"dummy", "vxlan", "geneve", "ipip", "ip6tnl", "sit", "gre", "gretap", "ip6gre", "erspan", "ifb", "nlmon"}
)
_UNIQUE_LOCAL = ipaddress.IPv6Network("fc00::/7")


@dataclass(frozen=True)
class Detected:
    """An address, or two with a comma between them, with how it was found and what to warn of."""

    ip: str
    how: str
    warnings: tuple[str, ...] = ()


def families_of(cidrs: Sequence[str]) -> tuple[int, ...]:
    """The address families (4, 6) of the cluster's pod and service networks; IPv4 without any.

    Raises :class:`UsageError` for what is not a network.
    """
    families = set()
    for cidr in cidrs:
        try:
            families.add(ipaddress.ip_network(cidr, strict=False).version)
        except ValueError as error:
            raise UsageError("cidr-malformed", f"{cidr!r} is not a network: {error}") from None
    return tuple(sorted(families)) or (4,)


def detect_node_ips(network: Network, families: Sequence[int] = (4,)) -> Detected:
    """The node's address in each of ``families``, IPv4 first; raises :class:`HostRefusedError`.

    A node that is to have both and has one is refused: it would not register the other.
    """
    addresses: list[Address] = []
    ways: list[str] = []
    warnings: list[str] = []
    for family in families:
        near = addresses[0].link if addresses else None
        address, way = _detect(network, family, near)
        addresses.append(address)
        ways.append(way)
        if not _default_routes(network, family):
            warnings.append(
                f"there is no default route for IPv{family}: the node's address needs none, but packets to service "
                f"addresses do (a route to a dummy interface is enough)"
            )
    return Detected(",".join(str(address.ip) for address in addresses), "; ".join(ways), tuple(warnings))


def _detect(network: Network, family: int, near: Optional[int]) -> tuple[Address, str]:
    best = _by_default_route(network, family)
    way = "the source address of the default route"
    if not best:
        candidates = [item for item in network.addresses if _is_candidate(network, item, family)]
        # The second family belongs on the interface of the first, where that has it.
        beside = [item for item in candidates if item.link == near]
        best = _best(network, beside or candidates)
        way = f"the only global IPv{family} address"
    if not best:
        raise HostRefusedError(
            "node-ip-none", f"no IPv{family} address of this host can be the node's: {_describe_all(network, family)}"
        )
    if len(best) > 1:
        names = ", ".join(f"{item.ip} ({network.name(item.link)})" for item in best)
        raise HostRefusedError("node-ip-ambiguous", f"more than one IPv{family} address can be the node's: {names}")
    return best[0], f"{way}, on {network.name(best[0].link)}"


# -- by the default route ---------------------------------------------------------------------------------


def _default_routes(network: Network, family: int) -> list[DefaultRoute]:
    """The default routes over interfaces that are up, the one that is used first."""
    routes = [route for route in network.routes if route.family == family]
    return sorted(
        (route for route in routes if (network.link(route.link) or Link(0, "", up=False)).up),
        key=lambda route: route.metric,
    )


def _by_default_route(network: Network, family: int) -> list[Address]:
    """The addresses that packets over the default route may have; none without a route or where its interface has none.

    IPv4 gives one at most: the kernel takes the first in its order. Between IPv6 addresses it weighs more than is
    seen here.
    """
    routes = _default_routes(network, family)
    if not routes:
        return []
    route = routes[0]
    if route.source is not None:
        # Somebody's decision, whatever the address looks like; it may even be on the loopback interface.
        return [item for item in network.addresses if item.ip == route.source and not unreachable_kind(item.ip)][:1]
    candidates = [
        item for item in network.addresses if item.link == route.link and _is_candidate(network, item, family)
    ]
    beside = [item for item in candidates if not item.is_whole and route.gateway and route.gateway in item.network]
    best = _best(network, beside or candidates)
    return best[:1] if family == 4 else best


# -- candidates -------------------------------------------------------------------------------------------


def _is_candidate(network: Network, address: Address, family: int) -> bool:
    return address.ip.version == family and not _why_not(network, address)


def _best(network: Network, candidates: Sequence[Address]) -> list[Address]:
    """Those of ``candidates`` that no other one is better than."""
    if not candidates:
        return []
    ranks = {id(item): _rank(network, item) for item in candidates}
    top = min(ranks.values())
    return [item for item in candidates if ranks[id(item)] == top]


def _rank(network: Network, address: Address) -> tuple[int, int, int]:
    """The lower the better: the interface, then whether it is an ordinary address, then IPv6's ways to get one."""
    kind = 0
    if address.peer is not None:
        kind = 1  # a tunnel's end
    elif address.is_whole and address.is_permanent:
        kind = 2  # as keepalived and load balancers add them; DHCP gives whole ones too, with a lifetime
    way = 0
    if address.ip.version == 6:
        # A unique local address beside a global one; then set by hand, given by DHCPv6 (always /128), made by itself.
        made = 0 if address.is_permanent else 1 if address.is_whole else 2
        way = made + (3 if address.ip in _UNIQUE_LOCAL else 0)
    return _link_rank(network, network.link(address.link)), kind, way


def _link_rank(network: Network, link: Optional[Link]) -> int:
    if link is None or link.loopback:
        return 2
    if link.kind in _CONTAINER_KINDS:
        return 1
    if link.kind == "bridge":
        # A bridge is the host's when something leads out of it; docker0 has the ends of containers only.
        ports = [port for port in network.links if port.master == link.index]
        return 0 if any(port.kind not in ("veth", "tun") and _link_rank(network, port) == 0 for port in ports) else 1
    return 0


def _describe_all(network: Network, family: int) -> str:
    """Every address of the family, each with why it is none."""
    words = [
        f"{item.ip} ({network.name(item.link)}: {_why_not(network, item)})"
        for item in network.addresses
        if item.ip.version == family
    ]
    return ", ".join(words) or "it has none"


def _why_not(network: Network, address: Address) -> str:
    """Why the address is no candidate; empty when it is one."""
    link = network.link(address.link)
    kind = unreachable_kind(address.ip)
    reasons = (
        (bool(kind), kind),
        (address.is_local, "not valid beyond its link"),
        (link is None or not link.up, "the interface is down"),
        (address.is_secondary, "temporary" if address.ip.version == 6 else "secondary"),
        (address.is_deprecated, "deprecated"),
        (address.is_unproven, "not proven to be unique in its network"),
    )
    return next((words for holds, words in reasons if holds), "")


def is_present(network: Network, ip: IPAddress) -> bool:
    """Whether ``ip`` is on one of the interfaces, in whatever state."""
    return any(item.ip == ip for item in network.addresses)
