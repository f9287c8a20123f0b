"""The node's address when nobody has said: by the default route, else the only one, else a refusal."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from itertools import permutations
from typing import Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.errors import HostRefusedError, UsageError
from stratum.host.addresses import DEPRECATED, PERMANENT, SECONDARY, TENTATIVE, Address, DefaultRoute, Link, Network
from stratum.host.detection import detect_node_ips, families_of

LO = Link(1, "lo", loopback=True)
ETH0, ETH1 = Link(2, "eth0"), Link(3, "eth1")
LINKS = (LO, ETH0, ETH1)
OWN = Address(ipaddress.ip_address("127.0.0.1"), 8, 1, scope=254)
DYNAMIC = 0


def address(text: str, link: Link = ETH0, flags: int = PERMANENT, peer: str = "", scope: int = 0) -> Address:
    interface = ipaddress.ip_interface(text)
    other = ipaddress.ip_address(peer) if peer else None
    return Address(interface.ip, interface.network.prefixlen, link.index, scope, flags, other)


def route(link: Link = ETH0, gateway: str = "", source: str = "", metric: int = 0, family: int = 4) -> DefaultRoute:
    def parse(text: str) -> Optional[ipaddress.IPv4Address | ipaddress.IPv6Address]:
        return ipaddress.ip_address(text) if text else None

    return DefaultRoute(family, link.index, parse(gateway), parse(source), metric)


def detect(
    addresses: Sequence[Address],
    routes: Sequence[DefaultRoute] = (),
    families: Sequence[int] = (4,),
    links: Sequence[Link] = LINKS,
) -> str:
    return detect_node_ips(Network(links, [OWN, *addresses], routes), families).ip


def refusal(
    addresses: Sequence[Address], families: Sequence[int] = (4,), routes: Sequence[DefaultRoute] = ()
) -> HostRefusedError:
    with pytest.raises(HostRefusedError) as caught:
        detect(addresses, routes, families)
    return caught.value


# -- without a route --------------------------------------------------------------------------------------


def test_the_only_global_address_is_chosen_without_a_gateway_and_there_is_a_warning() -> None:
    found = detect_node_ips(Network(LINKS, [OWN, address("192.0.2.10/24")], []))
    assert found.ip == "192.0.2.10"
    assert found.how == "the only global IPv4 address, on eth0"
    assert len(found.warnings) == 1
    assert "no default route for IPv4" in found.warnings[0]


def test_two_candidates_are_refused_and_both_named() -> None:
    error = refusal([address("192.0.2.10/24"), address("198.51.100.7/24", ETH1)])
    assert error.reference == "node-ip-ambiguous"
    assert "192.0.2.10 (eth0), 198.51.100.7 (eth1)" in error.message


def test_two_candidates_on_one_interface_are_refused_too() -> None:
    assert refusal([address("192.0.2.10/24"), address("198.51.100.7/24")]).reference == "node-ip-ambiguous"


def test_no_candidate_is_refused_with_why_each_address_is_none() -> None:
    error = refusal([address("169.254.1.1/16"), address("192.0.2.9/24", flags=DEPRECATED | PERMANENT)])
    assert error.reference == "node-ip-none"
    assert "127.0.0.1 (lo: a loopback address)" in error.message
    assert "169.254.1.1 (eth0: a link-local address)" in error.message
    assert "192.0.2.9 (eth0: deprecated)" in error.message
    assert "it has none" in refusal([], (6,)).message


def test_a_virtual_address_is_not_taken_in_any_order() -> None:
    for order in permutations([address("192.0.2.51/24"), address("192.0.2.59/32"), address("192.0.2.60/32")]):
        assert detect(order) == "192.0.2.51"
        assert detect(order, [route(gateway="192.0.2.1")]) == "192.0.2.51"
        assert detect(order, [route()]) == "192.0.2.51"


@pytest.mark.parametrize(
    "other",
    [
        address("192.0.2.59/24", flags=PERMANENT | SECONDARY),
        address("192.0.2.59/24", flags=PERMANENT | DEPRECATED),
        address("192.0.2.59/24", flags=PERMANENT | TENTATIVE),
        address("192.0.2.59/24", scope=253),
        address("192.0.2.59/32", peer="192.0.2.99"),
        address("192.0.2.59/32", LO),
        address("198.51.100.1/24", LO),
        address("169.254.7.7/16", ETH1),
    ],
    ids=[
        "secondary",
        "deprecated",
        "tentative",
        "of link scope",
        "point-to-point",
        "on lo",
        "on lo, wide",
        "link-local",
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_an_address_that_is_not_ordinary_is_not_taken_in_either_order(other: Address, first: bool) -> None:
    ordinary = address("192.0.2.51/24")
    assert detect([other, ordinary] if first else [ordinary, other]) == "192.0.2.51"


@pytest.mark.parametrize(
    "only",
    [
        address("192.0.2.51/32"),
        address("192.0.2.51/32", flags=DYNAMIC),
        address("192.0.2.51/32", peer="192.0.2.99"),
        address("192.0.2.51/32", LO),
    ],
)
def test_an_address_that_is_not_ordinary_is_taken_when_it_is_the_only_one(only: Address) -> None:
    # Clouds give a /32 by DHCP, some hosters by hand; routers have theirs on the loopback interface.
    assert detect([only]) == "192.0.2.51"


def test_a_whole_address_of_dhcp_is_ordinary() -> None:
    assert detect([address("192.0.2.59/32"), address("192.0.2.51/32", flags=DYNAMIC)]) == "192.0.2.51"


def test_the_addresses_of_an_interface_that_is_down_do_not_count() -> None:
    down = Link(3, "eth1", up=False)
    assert detect([address("192.0.2.51/24"), address("198.51.100.7/24", down)], links=(LO, ETH0, down)) == "192.0.2.51"


@pytest.mark.parametrize("kind", ["dummy", "vxlan", "ipip", "bridge"])
def test_the_interfaces_of_container_networks_do_not_count(kind: str) -> None:
    inner = Link(9, "inner0", kind=kind)
    end = Link(10, "veth1", kind="veth", master=9)
    links = (LO, ETH0, inner, end)
    assert detect([address("172.17.0.1/16", inner), address("192.0.2.51/24")], links=links) == "192.0.2.51"
    assert detect([address("172.17.0.1/16", inner)], links=links) == "172.17.0.1"


@pytest.mark.parametrize("kind", ["", "bond", "vlan"])
def test_a_bridge_over_the_hosts_own_interface_counts(kind: str) -> None:
    bridge, port = Link(9, "br0", kind="bridge"), Link(2, "eth0", kind=kind, master=9)
    links = (LO, bridge, port, ETH1)
    assert detect([address("192.0.2.51/24", bridge)], links=links) == "192.0.2.51"
    with pytest.raises(HostRefusedError):
        detect([address("192.0.2.51/24", bridge), address("198.51.100.7/24", ETH1)], links=links)


def test_an_interface_that_is_one_end_of_a_pair_counts() -> None:
    # In a container that is the only kind of interface.
    pair = Link(2, "eth0", kind="veth")
    assert detect([address("192.0.2.51/24", pair)], links=(LO, pair)) == "192.0.2.51"


# -- by the default route ---------------------------------------------------------------------------------


def test_the_default_route_decides_between_interfaces() -> None:
    both = [address("192.0.2.10/24"), address("198.51.100.7/24", ETH1)]
    found = detect_node_ips(Network(LINKS, [OWN, *both], [route(ETH1, "198.51.100.1")]))
    assert found.ip == "198.51.100.7"
    assert found.how == "the source address of the default route, on eth1"
    assert found.warnings == ()


def test_the_route_with_the_lowest_metric_counts() -> None:
    both = [address("192.0.2.10/24"), address("198.51.100.7/24", ETH1)]
    routes = [route(ETH1, metric=200), route(ETH0, metric=100)]
    assert detect(both, routes) == detect(both, routes[::-1]) == "192.0.2.10"


def test_a_route_over_an_interface_that_is_down_does_not_count() -> None:
    down = Link(3, "eth1", up=False)
    both = [address("192.0.2.10/24"), address("198.51.100.7/24", down)]
    assert detect(both, [route(down), route(ETH0, metric=5)], links=(LO, ETH0, down)) == "192.0.2.10"


def test_the_source_that_a_route_prescribes_is_taken_whatever_it_is() -> None:
    addresses = [address("192.0.2.10/24"), address("192.0.2.59/32", LO)]
    assert detect(addresses, [route(gateway="192.0.2.1", source="192.0.2.59")]) == "192.0.2.59"


def test_a_prescribed_source_that_is_not_there_is_not_taken() -> None:
    assert detect([address("192.0.2.10/24")], [route(source="192.0.2.77")]) == "192.0.2.10"


def test_a_prescribed_source_that_can_name_no_node_is_not_taken() -> None:
    addresses = [address("169.254.7.7/16"), address("192.0.2.10/24")]
    assert detect(addresses, [route(source="169.254.7.7")]) == "192.0.2.10"


def test_the_address_in_the_gateways_network_is_taken() -> None:
    addresses = [address("10.9.9.9/24"), address("192.0.2.10/24")]
    assert detect(addresses, [route(gateway="192.0.2.1")]) == "192.0.2.10"


def test_without_a_gateway_the_first_address_is_taken_as_the_kernel_does() -> None:
    addresses = [address("10.9.9.9/24"), address("192.0.2.10/24")]
    assert detect(addresses, [route()]) == "10.9.9.9"


def test_an_interface_without_an_address_falls_back_to_the_only_one() -> None:
    assert detect([address("192.0.2.10/24")], [route(ETH1)]) == "192.0.2.10"
    both = [address("192.0.2.10/24"), address("198.51.100.7/24")]
    assert refusal(both, routes=[route(ETH1)]).reference == "node-ip-ambiguous"


# -- IPv6 and both ----------------------------------------------------------------------------------------


def test_an_ipv6_cluster_does_not_pick_a_stray_ipv4_address() -> None:
    addresses = [address("2001:db8::10/64"), address("10.0.2.15/24")]
    routes = [route(gateway="10.0.2.2")]
    families = families_of(["fd00:10::/56", "fd00:20::/112"])
    assert detect(addresses, routes, families) == "2001:db8::10"
    assert detect(addresses, routes, families_of(["10.42.0.0/16"])) == "10.0.2.15"
    assert detect(addresses, routes, families_of(["10.42.0.0/16", "fd00:10::/56"])) == "10.0.2.15,2001:db8::10"


def test_a_cluster_without_networks_is_an_ipv4_one() -> None:
    assert families_of([]) == (4,)


def test_what_is_no_network_is_refused() -> None:
    with pytest.raises(UsageError):
        families_of(["10.42.0.0/40"])


def test_ipv4_comes_first_whatever_the_order_of_the_networks() -> None:
    assert families_of(["fd00:10::/56", "10.42.0.0/16"]) == (4, 6)


@pytest.mark.parametrize("missing", [4, 6])
def test_a_node_of_both_families_with_one_is_refused(missing: int) -> None:
    have = address("2001:db8::10/64") if missing == 4 else address("192.0.2.10/24")
    error = refusal([have, address("fe80::1/64", scope=253)], (4, 6))
    assert error.reference == "node-ip-none"
    assert f"no IPv{missing} address" in error.message


@pytest.mark.parametrize(
    "other",
    [
        address("2001:db8::a/64", flags=SECONDARY),
        address("2001:db8::a/64", flags=DEPRECATED),
        address("2001:db8::a/64", flags=PERMANENT | TENTATIVE),
        address("2001:db8::a/64", flags=PERMANENT | 0x08),
        address("2001:db8::a/128"),
        address("2001:db8::a/64", flags=DYNAMIC),
        address("fd00::a/64"),
        address("fe80::a/64", scope=253),
    ],
    ids=[
        "temporary",
        "deprecated",
        "tentative",
        "duplicate",
        "virtual",
        "of advertisements",
        "unique local",
        "link-local",
    ],
)
def test_an_ipv6_address_set_by_hand_is_better(other: Address) -> None:
    own = address("2001:db8::10/64")
    for routes in ([], [route(gateway="fe80::ff", family=6)]):
        assert detect([other, own], routes, (6,)) == detect([own, other], routes, (6,)) == "2001:db8::10"


def test_an_optimistic_address_can_be_used() -> None:
    assert detect([address("2001:db8::10/64", flags=TENTATIVE | 0x04)], (), (6,)) == "2001:db8::10"


def test_dhcp_is_better_than_what_a_host_makes_itself() -> None:
    made, given = address("2001:db8::a/64", flags=DYNAMIC), address("2001:db8::10/128", flags=DYNAMIC)
    assert detect([made, given], [route(gateway="fe80::ff", family=6)], (6,)) == "2001:db8::10"


def test_ipv6_addresses_as_good_as_each_other_are_refused_on_the_routes_interface_too() -> None:
    pair = [address("2001:db8::1/64", flags=DYNAMIC), address("2001:db8:1::1/64", flags=DYNAMIC)]
    better_elsewhere = address("2001:db8:2::1/64", ETH1)
    error = refusal([*pair, better_elsewhere], (6,), [route(gateway="fe80::ff", family=6)])
    assert error.reference == "node-ip-ambiguous"
    assert "2001:db8:2::1" not in error.message


def test_the_second_family_is_looked_for_on_the_interface_of_the_first() -> None:
    addresses = [address("192.0.2.10/24", ETH1), address("2001:db8::1/64", ETH0), address("2001:db8:1::1/64", ETH1)]
    assert detect(addresses, [], (4, 6)) == "192.0.2.10,2001:db8:1::1"
    assert detect(addresses[:2], [], (4, 6)) == "192.0.2.10,2001:db8::1"


def test_the_default_route_of_the_second_family_counts_more_than_the_first_ones_interface() -> None:
    addresses = [address("192.0.2.10/24", ETH1), address("2001:db8::1/64", ETH0), address("2001:db8:1::1/64", ETH1)]
    assert detect(addresses, [route(ETH0, "fe80::1", family=6)], (4, 6)) == "192.0.2.10,2001:db8::1"


# -- any network ------------------------------------------------------------------------------------------

ADDRESSES = st.builds(
    address,
    st.sampled_from(
        ["192.0.2.10/24", "192.0.2.59/32", "10.0.0.1/8", "127.0.0.2/8", "169.254.0.1/16", "2001:db8::1/64"]
    ),
    st.sampled_from([LO, ETH0, ETH1, Link(99, "gone")]),
    st.sampled_from([PERMANENT, DYNAMIC, PERMANENT | SECONDARY, DEPRECATED, TENTATIVE]),
    scope=st.sampled_from([0, 253, 254]),
)
ROUTES = st.builds(route, st.sampled_from([ETH0, ETH1]), st.sampled_from(["", "192.0.2.1"]), metric=st.integers(0, 2))


@given(st.lists(ADDRESSES, max_size=5), st.lists(ROUTES, max_size=2))
def test_for_any_network_an_address_of_the_host_is_chosen_or_it_is_refused(
    addresses: list[Address], routes: list[DefaultRoute]
) -> None:
    network = Network(LINKS, addresses, routes)
    try:
        ip = detect_node_ips(network).ip
    except HostRefusedError as error:
        assert error.reference in ("node-ip-none", "node-ip-ambiguous")
        return
    (chosen, *_) = [item for item in addresses if str(item.ip) == ip]
    assert chosen.ip.version == 4
    assert not chosen.ip.is_loopback
    assert not chosen.ip.is_link_local


@given(st.permutations([address("192.0.2.51/24"), address("192.0.2.59/32"), address("172.17.0.1/16", Link(9, "d"))]))
def test_without_a_route_the_order_of_addresses_does_not_matter(addresses: list[Address]) -> None:
    links = (*LINKS, Link(9, "d", kind="bridge"))
    assert detect(addresses, links=links) == "192.0.2.51"
