"""The host's real DNS servers, read past whatever stub is before them."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.errors import StratumError
from stratum.host import resolvers
from stratum.host.resolvers import RESOLVED, Resolvers
from stratum.system import Host, HostPath
from tests.unit.hosting import link, put

OWN = ("169.254.20.10",)
NETWORK_MANAGER = "/run/NetworkManager/no-stub-resolv.conf"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(str(tmp_path), {})


def servers(host: Host) -> tuple[str, ...]:
    found = resolvers.find_upstreams(host, OWN)
    return found.servers if found else ()


def test_the_servers_of_a_plain_host_are_those_of_its_file_in_their_order(host: Host) -> None:
    put(host, "/etc/resolv.conf", "nameserver 192.0.2.54\nnameserver 192.0.2.53\nsearch a.example b.example\n")
    assert resolvers.find_upstreams(host, OWN) == Resolvers(("192.0.2.54", "192.0.2.53"), ("a.example", "b.example"))
    assert resolvers.kubelet_resolv_conf(host, OWN) == HostPath("/etc/resolv.conf")


@pytest.mark.parametrize("stub", ["127.0.0.53", "127.0.0.54", "127.0.0.1", "::1", "127.9.9.9", "0.0.0.0", "::",
                                  "::ffff:127.0.0.53", "169.254.20.10", "::ffff:169.254.20.10"])  # fmt: skip
@pytest.mark.parametrize(
    "behind", [str(RESOLVED), NETWORK_MANAGER, "/run/dnsmasq/resolv.conf", "/run/resolvconf/resolv.conf"]
)
def test_a_stub_is_never_asked_and_the_file_behind_it_counts(host: Host, stub: str, behind: str) -> None:
    """Row 39: resolv.conf with only 127.0.0.53 and the upstream 192.0.2.53 beside it."""
    put(host, "/etc/resolv.conf", f"nameserver {stub}\noptions edns0 trust-ad\nsearch .\n")
    put(host, behind, "nameserver 192.0.2.53\nsearch lan.example\n")
    found = resolvers.read_upstreams(host, OWN)
    assert (found.servers, found.search, str(found.source)) == (("192.0.2.53",), ("lan.example",), behind)
    assert str(resolvers.kubelet_resolv_conf(host, OWN)) == behind


def test_a_stub_among_real_servers_is_left_out(host: Host) -> None:
    put(host, "/etc/resolv.conf", "nameserver 127.0.0.1\nnameserver 192.0.2.53\nnameserver 169.254.20.10\n")
    assert servers(host) == ("192.0.2.53",)


def test_a_link_local_server_that_is_not_ours_is_one(host: Host) -> None:
    """Clouds have theirs there: 169.254.169.253."""
    put(host, "/etc/resolv.conf", "nameserver 169.254.169.253\n")
    assert servers(host) == ("169.254.169.253",)


def test_what_systemd_resolved_left_behind_when_it_stopped_counts_last(host: Host) -> None:
    put(host, "/etc/resolv.conf", "nameserver 127.0.0.1\n")
    put(host, str(RESOLVED), "nameserver 192.0.2.1\n")
    put(host, "/run/dnsmasq/resolv.conf", "nameserver 192.0.2.2\n")
    assert servers(host) == ("192.0.2.2",)
    put(host, "/etc/resolv.conf", "nameserver 127.0.0.53\n")
    assert servers(host) == ("192.0.2.1",)


def test_a_file_with_nothing_but_stubs_behind_a_stub_is_passed_over_too(host: Host) -> None:
    put(host, "/etc/resolv.conf", "nameserver 127.0.0.53\n")
    put(host, str(RESOLVED), "# No DNS servers known.\nnameserver 127.0.0.1\n")
    put(host, NETWORK_MANAGER, "nameserver 192.0.2.53\n")
    assert servers(host) == ("192.0.2.53",)


@pytest.mark.parametrize("text", [None, "", "# nothing\n", "nameserver 127.0.0.53\n", "nameserver\nnameserver x\n"])
def test_a_host_without_a_real_server_is_told_what_to_set(host: Host, text: str | None) -> None:
    if text is not None:
        put(host, "/etc/resolv.conf", text)
    with pytest.raises(StratumError) as caught:
        resolvers.read_upstreams(host, OWN)
    assert caught.value.reference == "no-upstream-dns"
    assert "spec.localDNS.upstream" in str(caught.value.hint)
    expected = HostPath("/etc/resolv.conf") if text is not None else None
    assert resolvers.kubelet_resolv_conf(host, OWN) == expected


@pytest.mark.parametrize("target", ["../run/systemd/resolve/resolv.conf", "/run/systemd/resolve/resolv.conf"])
def test_a_link_is_followed_within_the_host(host: Host, target: str) -> None:
    link(host, "/etc/resolv.conf", target)
    put(host, str(RESOLVED), "nameserver 192.0.2.53\n")
    assert servers(host) == ("192.0.2.53",)


@pytest.mark.parametrize("target", ["/etc/resolv.conf", "/run/gone", "/etc"])
def test_a_link_that_leads_nowhere_is_no_file(host: Host, target: str) -> None:
    link(host, "/etc/resolv.conf", target)
    assert servers(host) == ()
    put(host, NETWORK_MANAGER, "nameserver 192.0.2.53\n")
    assert servers(host) == ("192.0.2.53",)


def test_comments_tabs_carriage_returns_and_case_are_read_as_the_resolver_reads_them() -> None:
    text = (
        "; old\r\n# nameserver 192.0.2.1\r\nnameserver\t192.0.2.2   # the second\r\n\tnameserver  192.0.2.3;x\r\n"
        "nameserver 192.0.2.2\r\nnameservers 192.0.2.4\r\nNAMESERVER 192.0.2.5\r\n"
        "domain one.example\r\nsearch two.example\tthree.example two.example .\r\noptions ndots:3 rotate ndots:x\r\n"
    )
    found = resolvers.parse_resolv_conf(text)
    assert found.servers == ("192.0.2.2", "192.0.2.3")
    assert found.search == ("two.example", "three.example")
    assert found.ndots == 3


def test_the_last_of_domain_and_search_counts() -> None:
    assert resolvers.parse_resolv_conf("search a b\ndomain c\n").search == ("c",)


def test_an_address_with_a_zone_keeps_it(host: Host) -> None:
    put(host, "/etc/resolv.conf", "nameserver fe80::1%eth0\nnameserver fe80::1%2\nnameserver 2001:db8::53\n")
    assert servers(host) == ("fe80::1%eth0", "fe80::1%2", "2001:db8::53")


def test_no_more_servers_are_given_than_coredns_takes(host: Host) -> None:
    put(host, "/etc/resolv.conf", "".join(f"nameserver 192.0.2.{number}\n" for number in range(1, 40)))
    assert servers(host) == tuple(f"192.0.2.{number}" for number in range(1, 16))


@pytest.mark.parametrize(
    ("text", "meant"),
    [("192.0.2.53", "192.0.2.53"), ("192.0.2.53:5353", "192.0.2.53:5353"), ("2001:db8::53", "2001:db8::53"),
     ("[2001:db8::53]", "2001:db8::53"), ("[2001:db8::53]:53", "[2001:db8::53]:53"), ("fe80::1%eth0", "fe80::1%eth0"),
     ("127.0.0.1:5353", "127.0.0.1:5353")],
)  # fmt: skip
def test_a_configured_server_is_an_address_with_or_without_a_port(text: str, meant: str) -> None:
    assert resolvers.check_server(text, OWN) == meant


@pytest.mark.parametrize("text", ["127.0.0.53", "127.0.0.1:53", "[::1]:53", "::1", "169.254.20.10",
                                  "169.254.20.10:5353", "0.0.0.0", "[::]:53"])  # fmt: skip
def test_a_configured_server_that_is_this_host_is_refused_as_a_loop(text: str) -> None:
    with pytest.raises(StratumError) as caught:
        resolvers.check_server(text, OWN)
    assert caught.value.reference == "upstream-dns-loop" and text in caught.value.message


@pytest.mark.parametrize("text", ["", "dns.example", "192.0.2.53:", "192.0.2.53:0", "192.0.2.53:99999", "192.0.2.53:x",
                                  "[192.0.2.53", "192.0.2.53 {", "192.0.2.1\n}", "tls://192.0.2.1"])  # fmt: skip
def test_a_configured_server_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(StratumError) as caught:
        resolvers.check_server(text, OWN)
    assert caught.value.reference == "bad-upstream-dns"
    assert "\n" not in caught.value.message


ADDRESSES = st.one_of(st.ip_addresses(), st.ip_addresses(network="127.0.0.0/8"), st.just(ipaddress.ip_address("::1")))
LINES = st.one_of(
    st.text(max_size=30),
    ADDRESSES.map(lambda address: f"nameserver {address}"),
    st.sampled_from(["options ndots:999999999999", "options ndots:٣", "search", "domain", "nameserver fe80::1%"]),
)


@given(st.lists(LINES, max_size=12), st.sampled_from(["\n", "\r\n", "\r"]))
def test_whatever_the_file_says_no_server_is_this_host(lines: list[str], end: str) -> None:
    found = resolvers.parse_resolv_conf(end.join(lines))
    for server in found.servers:
        address = ipaddress.ip_address(server)
        if not resolvers.is_local(server, OWN):
            assert not address.is_loopback and not address.is_unspecified and str(address) not in OWN
    assert len(set(found.servers)) == len(found.servers)
    assert found.ndots is None or 0 <= found.ndots <= 15


@given(st.lists(st.ip_addresses().filter(lambda address: not resolvers.is_local(str(address))), min_size=1, max_size=5,
                unique=True))  # fmt: skip
def test_every_real_server_is_found_in_order(addresses: list[ipaddress.IPv4Address]) -> None:
    text = "".join(f"nameserver {address}\n" for address in addresses)
    assert resolvers.parse_resolv_conf(text).servers == tuple(map(str, addresses))
