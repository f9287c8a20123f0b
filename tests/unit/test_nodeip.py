"""The node's address: the precedence of its sources and what is refused."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.errors import ExitCode, HostRefusedError, UsageError
from stratum.host.addresses import Address, Link, Network
from stratum.host.detection import Detected
from stratum.host.nodeip import (
    NodeIPChoice,
    check_argument,
    check_node_ip,
    check_pinned,
    node_ips,
    primary,
    resolve_node_ip,
    resolve_without_config,
)
from stratum.host.reachability import unreachable_kind

FLAG, STATE, CONFIG, VARIABLE = "192.0.2.1", "192.0.2.2", "192.0.2.3", {"NODE_IP": "192.0.2.4"}


def found() -> Detected:
    return Detected("192.0.2.5", "the only global IPv4 address, on eth0", ("there is no default route",))


def never() -> Detected:
    raise AssertionError("detection was asked although there is an address")


def nothing() -> Detected:
    raise HostRefusedError("node-ip-none", "no IPv4 address of this host can be the node's: it has none")


# -- the precedence ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "state", "config", "environment", "ip", "source"),
    [
        (FLAG, STATE, CONFIG, VARIABLE, FLAG, "--node-ip"),
        ("", STATE, CONFIG, VARIABLE, STATE, "the address that this node was brought up with"),
        ("", "", CONFIG, VARIABLE, CONFIG, "network.nodeIP in the configuration"),
        ("", "", "", VARIABLE, "192.0.2.4", "$NODE_IP"),
    ],
)
def test_the_first_source_that_says_something_wins_and_is_named(
    flag: str, state: str, config: str, environment: dict[str, str], ip: str, source: str
) -> None:
    assert resolve_node_ip(flag, state, config, environment, never) == NodeIPChoice(ip, source)


def test_detection_is_last_and_its_warnings_are_kept() -> None:
    for choice in (resolve_node_ip("", "", "", {}, found), resolve_without_config("", "", {}, found)):
        assert choice.ip == "192.0.2.5"
        assert choice.source == "detected: the only global IPv4 address, on eth0"
        assert choice.warnings == ("there is no default route",)


def test_a_start_without_configuration_skips_only_that() -> None:
    assert resolve_without_config(FLAG, STATE, VARIABLE, never).ip == FLAG
    assert resolve_without_config("", STATE, VARIABLE, never).ip == STATE
    assert resolve_without_config("", "", VARIABLE, never).ip == "192.0.2.4"


@pytest.mark.parametrize("value", ["192.0.2.4,2001:db8::4", " odd ", "not-an-address"])
def test_explicit_sources_are_used_as_they_are(value: str) -> None:
    assert resolve_node_ip(value, "", "", {}, never).ip == value
    assert resolve_node_ip("", value, "", {}, never).ip == value
    assert resolve_node_ip("", "", value, {}, never).ip == value
    assert node_ips({"NODE_IP": value}, never).ip == value


def test_an_empty_variable_says_nothing() -> None:
    assert node_ips({"NODE_IP": ""}, found).ip == "192.0.2.5"


def test_a_failed_detection_names_only_the_sources_that_the_start_reads() -> None:
    with pytest.raises(HostRefusedError) as whole:
        resolve_node_ip("", "", "", {}, nothing)
    with pytest.raises(HostRefusedError) as without:
        resolve_without_config("", "", {}, nothing)
    with pytest.raises(HostRefusedError) as bare:
        node_ips({}, nothing)
    assert whole.value.hint == "give the address: --node-ip or network.nodeIP in the configuration or $NODE_IP"
    assert without.value.hint == "give the address: --node-ip or $NODE_IP"
    assert bare.value.hint == "give the address: $NODE_IP"
    assert whole.value.reference == "node-ip-none"
    assert whole.value.exit_code == ExitCode.HOST_REFUSED


@given(st.lists(st.sampled_from(["", "192.0.2.1", "192.0.2.2"]), min_size=4, max_size=4))
def test_for_any_sources_the_first_that_is_not_empty_wins(values: list[str]) -> None:
    flag, state, config, variable = values
    choice = resolve_node_ip(flag, state, config, {"NODE_IP": variable}, found)
    assert choice.ip == next((value for value in values if value), "192.0.2.5")


@pytest.mark.parametrize(
    ("value", "first"), [("192.0.2.1,2001:db8::1", "192.0.2.1"), ("2001:db8::1", "2001:db8::1"), ("", "")]
)
def test_the_primary_address_is_the_first(value: str, first: str) -> None:
    assert primary(value) == first


# -- kinds that no node can have --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("127.0.0.1", "a loopback address"),
        ("127.255.255.255", "a loopback address"),
        ("::1", "a loopback address"),
        ("0.0.0.0", "the all-zeros address"),
        ("::", "the all-zeros address"),
        ("224.0.0.1", "a multicast address"),
        ("239.1.2.3", "a multicast address"),
        ("ff02::1", "a multicast address"),
        ("ff0e::1", "a multicast address"),
        ("169.254.1.1", "a link-local address"),
        ("fe80::1", "a link-local address"),
        ("febf::1", "a link-local address"),
        ("255.255.255.255", "the broadcast address"),
        ("::ffff:127.0.0.1", "a loopback address"),
        ("::ffff:0.0.0.0", "the all-zeros address"),
        ("::ffff:169.254.1.1", "a link-local address"),
        ("::ffff:224.0.0.1", "a multicast address"),
        ("::ffff:255.255.255.255", "the broadcast address"),
        ("fe80::1%eth0", "a link-local address"),
        ("192.0.2.10", ""),
        ("10.0.0.255", ""),
        ("::ffff:192.0.2.10", ""),
        ("2001:db8::1", ""),
        ("fd00::1", ""),
        ("fec0::1", ""),
        ("2001:db8::1%eth0", ""),
        ("0.0.0.1", ""),
        ("240.0.0.1", ""),
    ],
)
def test_addresses_that_name_no_node_have_a_kind(address: str, kind: str) -> None:
    assert unreachable_kind(ipaddress.ip_address(address)) == kind


@pytest.mark.parametrize("value", ["fe80::1", "127.0.0.1", "169.254.1.1", "ff02::1", "0.0.0.0", "255.255.255.255"])
def test_such_an_address_is_refused_while_arguments_are_read_and_says_why(value: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_argument(value)
    assert caught.value.reference == "node-ip-unreachable"
    assert caught.value.message == (
        f"node IP {value!r} is {unreachable_kind(ipaddress.ip_address(value))}: no other host can reach a node by it"
    )
    with pytest.raises(UsageError):
        check_argument(f"192.0.2.10,{value}")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("", "is not an IP address"),
        ("node-1", "is not an IP address"),
        ("192.0.2.10/24", "is not an IP address"),
        ("192.0.2.10, 2001:db8::1", "is not an IP address"),
        ("192.0.2.10,", "is not an IP address"),
        ("192.0.2.256", "is not an IP address"),
        ("2001:db8::1%eth0", "has a zone"),
        ("::ffff:192.0.2.10", "is an IPv4-mapped IPv6 address; write 192.0.2.10"),
        ("192.0.2.1,192.0.2.2,192.0.2.3", "has more than two addresses"),
    ],
)
def test_what_is_no_plain_address_is_refused(value: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_argument(value)
    assert caught.value.reference == "node-ip-malformed"
    assert why in caught.value.message


def test_leading_zeros_are_refused_by_every_python() -> None:
    with pytest.raises(UsageError):
        check_argument("192.0.2.010")


# -- families ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "families"),
    [
        ("192.0.2.10", (4,)),
        ("2001:db8::10", (6,)),
        ("2001:DB8::10", (6,)),
        ("192.0.2.10,2001:db8::10", (4, 6)),
    ],
)
def test_a_node_ip_of_the_nodes_families_is_fine(value: str, families: Sequence[int]) -> None:
    check_node_ip(value, families)
    check_argument(value)


@pytest.mark.parametrize(
    ("value", "families"),
    [
        ("2001:db8::10", (4,)),
        ("192.0.2.10", (6,)),
        ("192.0.2.10,2001:db8::10", (4,)),
        ("192.0.2.10,192.0.2.11", (4,)),
        ("192.0.2.10", (4, 6)),
        ("2001:db8::10", (4, 6)),
        ("2001:db8::10,192.0.2.10", (4, 6)),
        ("192.0.2.10,192.0.2.11", (4, 6)),
        ("192.0.2.10,2001:db8::10,2001:db8::11", (4, 6)),
    ],
)
def test_one_family_too_few_too_many_or_in_the_wrong_order_is_refused(value: str, families: Sequence[int]) -> None:
    with pytest.raises(UsageError) as caught:
        check_node_ip(value, families)
    assert caught.value.reference == "node-ip-family"
    assert all(f"an IPv{family} address" in caught.value.message for family in families)


def test_a_worker_is_refused_an_address_of_no_use_before_it_is_saved() -> None:
    for value in ("127.0.0.1", "node-1", "::ffff:192.0.2.10", "192.0.2.10,fe80::1"):
        with pytest.raises(UsageError):
            check_node_ip(value, (4, 6) if "," in value else (4,))


# -- the pinned address -----------------------------------------------------------------------------------

NETWORK = Network(
    [Link(1, "lo", loopback=True), Link(2, "eth0")],
    [
        Address(ipaddress.ip_address("127.0.0.1"), 8, 1, scope=254),
        Address(ipaddress.ip_address("192.0.2.10"), 24, 2),
        Address(ipaddress.ip_address("2001:db8::10"), 64, 2),
    ],
)


@pytest.mark.parametrize("value", ["192.0.2.10", "192.0.2.10,2001:db8::10", "2001:DB8:0::10"])
def test_a_pinned_address_that_is_there_is_fine(value: str) -> None:
    check_pinned(value, NETWORK)


def test_a_pinned_address_that_is_gone_is_an_error_and_no_new_choice() -> None:
    with pytest.raises(HostRefusedError) as caught:
        check_pinned("192.0.2.11,2001:db8::10", NETWORK)
    assert caught.value.reference == "node-ip-gone"
    assert "brought up as 192.0.2.11,2001:db8::10, and 192.0.2.11 is not on this host any more" in caught.value.message
    assert "it has 192.0.2.10 (eth0), 2001:db8::10 (eth0)" in caught.value.message
    assert caught.value.hint is not None
    assert "--node-ip" in caught.value.hint


def test_a_host_without_any_address_says_so() -> None:
    with pytest.raises(HostRefusedError, match="it has no other address"):
        check_pinned("192.0.2.11", Network())
