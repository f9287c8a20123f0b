"""The host's interfaces, addresses and default routes, as the kernel has them now."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Optional, Union

from stratum.host.rtnetlink import attributes, dump
from stratum.system import Host

__all__ = ["Address", "DefaultRoute", "IPAddress", "Link", "Network", "read_network"]

IPAddress = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]

# Numbers of linux/rtnetlink.h, linux/if_link.h and linux/if_addr.h.
_GETLINK, _GETADDR, _GETROUTE = 18, 22, 26
_IFLA_IFNAME, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 10, 18, 1
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
_RTA_OIF, _RTA_GATEWAY, _RTA_PRIORITY, _RTA_PREFSRC, _RTA_MULTIPATH, _RTA_TABLE = 4, 5, 6, 7, 9, 15
_TABLE_MAIN = 254
_UNICAST = 1  # and not blackhole, unreachable, prohibit

_SCOPE_LINK = 253  # and host, which is above it
SECONDARY, DEPRECATED, TENTATIVE, PERMANENT = 0x01, 0x20, 0x40, 0x80
_OPTIMISTIC, _DAD_FAILED = 0x04, 0x08

_LINK = struct.Struct("=BxHiII")  # family, type, index, flags, change
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, index
_ROUTE = struct.Struct("=BBBBBBBBI")  # family, dst_len, src_len, tos, table, protocol, scope, type, flags
_NEXT_HOP = struct.Struct("=HBBi")  # length, flags, weight, index


@dataclass(frozen=True)
class Link:
    """An interface. ``kind`` is the driver's name of a virtual one (``bridge``, ``veth``), empty for hardware."""

    index: int
    name: str
    up: bool = True
    loopback: bool = False
    kind: str = ""
    master: int = 0  # the index of the bridge or bond that it belongs to


@dataclass(frozen=True)
class Address:
    """An address of this host, with the kernel's scope (0 is global) and flags."""

    ip: IPAddress
    prefix: int
    link: int
    scope: int = 0
    flags: int = PERMANENT
    peer: Optional[IPAddress] = None  # the other end of a point-to-point link

    @property
    def is_local(self) -> bool:
        """Whether the kernel says that it is valid on its link or this host only."""
        return self.scope >= _SCOPE_LINK

    @property
    def is_secondary(self) -> bool:
        """IPv4: a second address in the subnet of another one. IPv6: a temporary one, for privacy."""
        return bool(self.flags & SECONDARY)

    @property
    def is_deprecated(self) -> bool:
        """Whether new connections should not use it."""
        return bool(self.flags & DEPRECATED)

    @property
    def is_unproven(self) -> bool:
        """IPv6: not known yet to be unique in its network, or known not to be."""
        tentative = self.flags & TENTATIVE and not self.flags & _OPTIMISTIC
        return bool(tentative or self.flags & _DAD_FAILED)

    @property
    def is_permanent(self) -> bool:
        """Whether somebody set it by hand; one of DHCP or router advertisements has a lifetime."""
        return bool(self.flags & PERMANENT)

    @property
    def is_whole(self) -> bool:
        """Whether its prefix covers nothing but itself."""
        return self.prefix == self.ip.max_prefixlen

    @property
    def network(self) -> Union[ipaddress.IPv4Network, ipaddress.IPv6Network]:
        """The network that the address is in; for a point-to-point link, the other end's."""
        return ipaddress.ip_network((self.peer or self.ip, self.prefix), strict=False)


@dataclass(frozen=True)
class DefaultRoute:
    """A default route of the main table. ``source`` is the address that it prescribes for packets of ours."""

    family: int  # 4 or 6
    link: int
    gateway: Optional[IPAddress] = None
    source: Optional[IPAddress] = None
    metric: int = 0


@dataclass(frozen=True)
class Network:
    """What :func:`read_network` found, each in the kernel's order."""

    links: Sequence[Link] = ()
    addresses: Sequence[Address] = ()
    routes: Sequence[DefaultRoute] = ()

    def link(self, index: int) -> Optional[Link]:
        """The interface with that number."""
        return next((link for link in self.links if link.index == index), None)

    def name(self, index: int) -> str:
        """The name of the interface with that number."""
        link = self.link(index)
        return link.name if link else f"interface {index}"


def read_network(host: Host) -> Network:
    """Read the three tables; raises OSError."""
    links = [link for body in dump(host, _GETLINK, bytes(_LINK.size)) for link in _parse_link(body)]
    addresses = [item for body in dump(host, _GETADDR, bytes(_ADDRESS.size)) for item in _parse_address(body)]
    routes: list[DefaultRoute] = []
    for family in (socket.AF_INET, socket.AF_INET6):
        request = _ROUTE.pack(family, *bytes(8))
        routes += [route for body in dump(host, _GETROUTE, request) for route in _parse_route(body)]
    return Network(links, addresses, routes)


def _parse_link(body: bytes) -> Iterator[Link]:
    _, _, index, flags, _ = _LINK.unpack_from(body)
    found = dict(attributes(body[_LINK.size :]))
    if _IFLA_IFNAME not in found:
        return
    info = dict(attributes(found.get(_IFLA_LINKINFO, b"")))
    yield Link(
        index,
        _text(found[_IFLA_IFNAME]),
        bool(flags & _IFF_UP),
        bool(flags & _IFF_LOOPBACK),
        _text(info.get(_IFLA_INFO_KIND, b"")),
        _number(found.get(_IFLA_MASTER)),
    )


def _parse_address(body: bytes) -> Iterator[Address]:
    family, prefix, flags, scope, index = _ADDRESS.unpack_from(body)
    found = dict(attributes(body[_ADDRESS.size :]))
    # IPv4 has both: LOCAL is ours, ADDRESS the other end's on a point-to-point link. IPv6 has LOCAL only there.
    other = _ip(family, found.get(_IFA_ADDRESS))
    ours = _ip(family, found.get(_IFA_LOCAL)) or other
    if ours is not None:
        peer = other if other != ours else None
        yield Address(ours, prefix, index, scope, _number(found.get(_IFA_FLAGS), flags), peer)


def _parse_route(body: bytes) -> Iterator[DefaultRoute]:
    family, length, _, _, table, _, _, kind, _ = _ROUTE.unpack_from(body)
    data = body[_ROUTE.size :]
    found = dict(attributes(data))
    if length or kind != _UNICAST or _number(found.get(_RTA_TABLE), table) != _TABLE_MAIN:
        return
    number = 4 if family == socket.AF_INET else 6
    source, metric = _ip(family, found.get(_RTA_PREFSRC)), _number(found.get(_RTA_PRIORITY))
    if _RTA_OIF in found:
        yield DefaultRoute(number, _number(found[_RTA_OIF]), _ip(family, found.get(_RTA_GATEWAY)), source, metric)
    rest = found.get(_RTA_MULTIPATH, b"")
    while len(rest) >= _NEXT_HOP.size:
        size, _, _, index = _NEXT_HOP.unpack_from(rest)
        if size < _NEXT_HOP.size:
            return
        hop = dict(attributes(rest[_NEXT_HOP.size : size]))
        yield DefaultRoute(number, index, _ip(family, hop.get(_RTA_GATEWAY)), source, metric)
        rest = rest[(size + 3) & ~3 :]


def _ip(family: int, value: Optional[bytes]) -> Optional[IPAddress]:
    if value is None:
        return None
    if family == socket.AF_INET and len(value) == 4:
        return ipaddress.IPv4Address(value)
    return ipaddress.IPv6Address(value) if family == socket.AF_INET6 and len(value) == 16 else None


def _number(value: Optional[bytes], default: int = 0) -> int:
    return int(struct.unpack_from("=I", value)[0]) if value and len(value) >= 4 else default


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode("utf-8", "surrogateescape")
