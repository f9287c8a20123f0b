"""Messages of the kernel's network tables, rtnetlink(7) and nf_tables, as a kernel would answer with them."""

from __future__ import annotations

import ipaddress
import socket
import struct

from stratum.host.addresses import PERMANENT

GETLINK, GETADDR, GETROUTE = 18, 22, 26
NETFILTER = 12  # the protocol of nf_tables


def attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + bytes(-length % 4)


def message(kind: int, body: bytes, flags: int = 2) -> bytes:
    length = 16 + len(body)
    return struct.pack("=IHHII", length, kind, flags, 1, 0) + body + bytes(-length % 4)


DONE = message(3, bytes(4))


def number(value: int) -> bytes:
    return struct.pack("=I", value)


def packed(text: str) -> bytes:
    return ipaddress.ip_address(text).packed


def link_body(index: int, name: str, flags: int = 1, more: bytes = b"") -> bytes:
    return struct.pack("=BxHiII", 0, 1, index, flags, 0) + attribute(3, name.encode() + b"\0") + more


def address_body(family: int, prefix: int, index: int, more: bytes, flags: int = PERMANENT, scope: int = 0) -> bytes:
    return struct.pack("=BBBBI", family, prefix, flags, scope, index) + more


def route_body(family: int, more: bytes, length: int = 0, table: int = 254, kind: int = 1) -> bytes:
    return struct.pack("=BBBBBBBBI", family, length, 0, 0, table, 3, 0, kind, 0) + more


def answer(kind: int, addresses: dict[str, list[str]]) -> list[bytes]:
    """What a kernel answers whose interfaces have ``addresses`` (with prefix), all up, and that has no route."""
    found = b""
    for index, (name, texts) in enumerate(addresses.items(), 1):
        if kind == GETLINK:
            found += message(16, link_body(index, name, 0x1043))
        if kind == GETADDR:
            for text in texts:
                interface = ipaddress.ip_interface(text)
                family = socket.AF_INET if interface.version == 4 else socket.AF_INET6
                ip = attribute(1, interface.ip.packed) + attribute(2, interface.ip.packed)
                found += message(20, address_body(family, interface.network.prefixlen, index, ip))
    return [found, DONE] if found else [DONE]


def generation(value: int) -> bytes:
    """What nf_tables answers when it is asked for the number of its ruleset."""
    return message(10 << 8 | 15, bytes(4) + attribute(1, value.to_bytes(4, "big")) + attribute(2, b"\0\0\0\1"))
