"""Interfaces, addresses and routes as rtnetlink gives them."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.host.addresses import PERMANENT, SECONDARY, Address, DefaultRoute, Link, read_network
from stratum.host.rtnetlink import attributes, dump
from stratum.system import Host
from tests.netlink import (
    DONE,
    GETADDR,
    GETLINK,
    GETROUTE,
    address_body,
    attribute,
    link_body,
    message,
    number,
    packed,
    route_body,
)
from tests.unit.hosting import TreeMachine


class Kernel(TreeMachine):
    """Answers with messages that a test makes; each request takes the next answer of its kind, the last one stays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.answers: dict[int, list[list[bytes]]] = {}
        self.asked: list[int] = []

    def tell(self, kind: int, *answers: Sequence[bytes]) -> None:
        self.answers[kind] = [list(answer) for answer in answers]

    def ask_rtnetlink(self, request: bytes, is_last: Callable[[bytes], bool]) -> list[bytes]:
        length, kind, flags, _, _ = struct.unpack_from("=IHHII", request)
        assert length == len(request)
        assert flags == 0x301
        self.asked.append(kind)
        known = self.answers.get(kind, [[DONE]])
        datagrams = known.pop(0) if len(known) > 1 else known[0]
        assert [is_last(item) for item in datagrams] == [False] * (len(datagrams) - 1) + [True]
        return datagrams


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(str(tmp_path))


def test_links_are_read_with_kind_and_master(kernel: Kernel) -> None:
    info = attribute(18 | 0x8000, attribute(1, b"bridge\0") + attribute(2, b"x" * 9))
    kernel.tell(
        GETLINK,
        [
            message(16, link_body(1, "lo", 0x9)) + message(16, link_body(2, "eth0", 0x11043, attribute(10, number(7)))),
            message(16, link_body(7, "br0", 0, info)),
            DONE,
        ],
    )
    assert read_network(kernel).links == [
        Link(1, "lo", up=True, loopback=True),
        Link(2, "eth0", up=True, master=7),
        Link(7, "br0", up=False, kind="bridge"),
    ]


def test_addresses_are_read_with_flags_and_the_other_end(kernel: Kernel) -> None:
    plain = attribute(1, packed("192.0.2.10")) + attribute(2, packed("192.0.2.10")) + attribute(8, number(SECONDARY))
    tunnel = attribute(1, packed("10.8.0.5")) + attribute(2, packed("10.8.0.6"))
    six = attribute(1, packed("2001:db8::10")) + attribute(6, bytes(16)) + attribute(8, number(0x300))
    six_tunnel = attribute(1, packed("fd00::2")) + attribute(2, packed("fd00::1"))
    kernel.tell(
        GETADDR,
        [
            message(20, address_body(socket.AF_INET, 24, 2, plain))
            + message(20, address_body(socket.AF_INET, 32, 3, tunnel))
            + message(20, address_body(socket.AF_INET6, 64, 2, six))
            + message(20, address_body(socket.AF_INET6, 128, 3, six_tunnel, scope=253))
            + DONE
        ],
    )
    ip = ipaddress.ip_address
    assert read_network(kernel).addresses == [
        Address(ip("192.0.2.10"), 24, 2, 0, SECONDARY),
        Address(ip("10.8.0.6"), 32, 3, 0, PERMANENT, ip("10.8.0.5")),
        Address(ip("2001:db8::10"), 64, 2, 0, 0x300),
        Address(ip("fd00::1"), 128, 3, 253, PERMANENT, ip("fd00::2")),
    ]


def test_only_unicast_default_routes_of_the_main_table_are_read(kernel: Kernel) -> None:
    oif = attribute(4, number(2))
    gateway, source, metric = attribute(5, packed("192.0.2.1")), attribute(7, packed("192.0.2.10")), number(100)
    hop = struct.pack("=HBBi", 8, 0, 0, 3)
    hop_via = struct.pack("=HBBi", 16, 0, 0, 4) + attribute(5, packed("192.0.2.2"))
    kernel.tell(
        GETROUTE,
        [
            message(24, route_body(socket.AF_INET, oif + gateway + source + attribute(6, metric)))
            + message(24, route_body(socket.AF_INET, oif, length=8))
            + message(24, route_body(socket.AF_INET, oif, table=100))
            + message(24, route_body(socket.AF_INET, oif + attribute(15, number(1000)), table=252))
            + message(24, route_body(socket.AF_INET, oif, kind=7))
            + message(24, route_body(socket.AF_INET, attribute(9, hop + hop_via)))
            + DONE
        ],
        [DONE],
    )
    ip = ipaddress.ip_address
    assert read_network(kernel).routes == [
        DefaultRoute(4, 2, ip("192.0.2.1"), ip("192.0.2.10"), 100),
        DefaultRoute(4, 3),
        DefaultRoute(4, 4, ip("192.0.2.2")),
    ]


def test_a_table_that_changes_while_it_is_read_is_read_again(kernel: Kernel) -> None:
    half = message(16, link_body(1, "lo"), flags=0x12)
    kernel.tell(GETLINK, [half, DONE], [message(16, link_body(1, "lo")), message(16, link_body(2, "eth0")), DONE])
    assert [link.name for link in read_network(kernel).links] == ["lo", "eth0"]
    assert kernel.asked.count(GETLINK) == 2


def test_a_refusal_of_the_kernel_is_an_oserror(kernel: Kernel) -> None:
    kernel.tell(GETADDR, [message(2, struct.pack("=i", -1) + bytes(16))])
    with pytest.raises(PermissionError):
        read_network(kernel)


def test_the_tables_of_this_machine_can_be_read() -> None:
    network = read_network(Host())
    (loopback,) = [link for link in network.links if link.loopback]
    assert loopback.name == "lo"
    assert {link.name for link in network.links} == {name for _, name in socket.if_nameindex()}


def test_a_directory_tree_has_no_network(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        read_network(Host(str(tmp_path)))


@given(st.binary(max_size=80))
def test_no_bytes_make_the_attribute_reader_fail_or_loop(data: bytes) -> None:
    assert len(list(attributes(data))) <= len(data) // 4


@given(st.lists(st.tuples(st.integers(0, 0x3FFF), st.binary(max_size=9)), max_size=6))
def test_attributes_are_read_as_they_were_written(pairs: list[tuple[int, bytes]]) -> None:
    assert list(attributes(b"".join(attribute(kind, value) for kind, value in pairs))) == pairs


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_a_dump_is_the_bodies_in_order(bodies: list[bytes]) -> None:
    class Fixed(Host):
        def ask_rtnetlink(self, request: bytes, is_last: Callable[[bytes], bool]) -> list[bytes]:
            return [b"".join(message(16, body) for body in bodies), DONE]

    assert dump(Fixed(), GETLINK, b"") == bodies
