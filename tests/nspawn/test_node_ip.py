"""The node's address on real interfaces: each test has a network namespace of its own inside a machine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.lab.nspawn import NspawnMachine
from tests.sources import sources_zip

# What a start does: read the tables, decide; the answer or the refusal as JSON.
DECIDE = """
import json, sys
from stratum.errors import StratumError
from stratum.host import addresses, detection, nodeip
from stratum.system import Host

cidrs, flag, state, environment = json.loads(sys.argv[1])
network = addresses.read_network(Host())
try:
    families = detection.families_of(cidrs)
    choice = nodeip.resolve_node_ip(
        flag, state, "", environment, lambda: detection.detect_node_ips(network, families)
    )
    nodeip.check_node_ip(choice.ip, families)
    if state and not flag:
        nodeip.check_pinned(state, network)
    answer = {"ip": choice.ip, "source": choice.source, "warnings": choice.warnings}
except StratumError as error:
    answer = {"error": error.reference, "message": error.message, "hint": error.hint}
print(json.dumps(answer))
"""

# A NIC is one end of a pair; the other end is the cable. Two of them, both up, without addresses.
NICS = """
ip link set lo up
for name in eth0 eth1; do
    ip link add "$name" type veth peer name "to-$name"
    ip link set "$name" up
    ip link set "to-$name" up
done
"""


@pytest.fixture(scope="module")
def box(shared_machine: NspawnMachine) -> Iterator[NspawnMachine]:
    """A machine that has the sources."""
    shared_machine.write("/root/sources.zip", sources_zip())
    shared_machine.write("/root/decide.py", DECIDE)
    yield shared_machine
    shared_machine.run(["rm", "/root/sources.zip", "/root/decide.py"])


def decide(
    box: NspawnMachine,
    setup: str,
    *,
    cidrs: tuple[str, ...] = (),
    flag: str = "",
    state: str = "",
    environment: dict[str, str] | None = None,
    nics: str = NICS,
) -> dict[str, object]:
    """The decision in a new network namespace that ``setup`` fills; it goes with the command."""
    script = f'{nics}\n{setup}\nPYTHONPATH=/root/sources.zip exec python3 -S /root/decide.py "$1"'
    asked = json.dumps([cidrs, flag, state, environment or {}])
    done = box.run(["unshare", "--net", "sh", "-euc", script, "sh", asked])
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def ip(answer: dict[str, object]) -> object:
    assert "ip" in answer, answer
    return answer["ip"]


def test_one_nic_with_a_connected_route_only_is_enough(box: NspawnMachine) -> None:
    answer = decide(box, "ip addr add 192.0.2.10/24 dev eth0")
    assert ip(answer) == "192.0.2.10"
    assert answer["source"] == "detected: the only global IPv4 address, on eth0"
    assert "no default route" in str(answer["warnings"])


def test_two_nics_without_a_default_route_are_refused_with_both_and_the_flag(box: NspawnMachine) -> None:
    answer = decide(box, "ip addr add 192.0.2.10/24 dev eth0; ip addr add 198.51.100.7/24 dev eth1")
    assert answer["error"] == "node-ip-ambiguous"
    assert "192.0.2.10 (eth0), 198.51.100.7 (eth1)" in str(answer["message"])
    assert "--node-ip" in str(answer["hint"])


def test_the_default_route_decides_and_there_is_no_warning(box: NspawnMachine) -> None:
    answer = decide(
        box,
        """
        ip addr add 192.0.2.10/24 dev eth0
        ip addr add 198.51.100.7/24 dev eth1
        ip route add default via 198.51.100.1 dev eth1 metric 10
        ip route add default via 192.0.2.1 dev eth0 metric 20
        ip route add default via 192.0.2.1 dev eth0 table 100
        ip route add unreachable default metric 1
        """,
    )
    assert ip(answer) == "198.51.100.7"
    assert answer["source"] == "detected: the source address of the default route, on eth1"
    assert answer["warnings"] == []


def test_a_virtual_address_is_not_taken_in_either_order(box: NspawnMachine) -> None:
    own, virtual = "ip addr add 192.0.2.51/24 dev eth0", "ip addr add 192.0.2.59/32 dev eth0"
    for route in ("true", "ip route add default via 192.0.2.1", "ip route add default dev eth0"):
        for first, second in ((own, virtual), (virtual, own)):
            assert ip(decide(box, f"{first}; {second}; {route}")) == "192.0.2.51"


def test_a_secondary_address_is_not_taken(box: NspawnMachine) -> None:
    assert ip(decide(box, "ip addr add 192.0.2.51/24 dev eth0; ip addr add 192.0.2.52/24 dev eth0")) == "192.0.2.51"


def test_a_deprecated_address_is_not_taken(box: NspawnMachine) -> None:
    setup = """
    ip addr add 192.0.2.59/24 dev eth0 preferred_lft 0
    ip addr add 198.51.100.7/24 dev eth1
    ip addr add 2001:db8::9/64 dev eth0 preferred_lft 0 nodad
    ip addr add 2001:db8:1::7/64 dev eth1 nodad
    """
    assert ip(decide(box, setup)) == "198.51.100.7"
    assert ip(decide(box, setup, cidrs=("fd00::/48",))) == "2001:db8:1::7"


def test_a_tentative_address_is_not_taken(box: NspawnMachine) -> None:
    # Without carrier the proof that an address is unique never starts.
    answer = decide(box, "ip link set to-eth0 down; ip addr add 2001:db8::9/64 dev eth0", cidrs=("fd00::/48",))
    assert answer["error"] == "node-ip-none"
    assert "2001:db8::9 (eth0: not proven to be unique in its network)" in str(answer["message"])


def test_the_end_of_a_point_to_point_link_is_taken_only_when_it_is_alone(box: NspawnMachine) -> None:
    tunnel = "ip addr add 10.8.0.6 peer 10.8.0.5/32 dev eth1"
    assert ip(decide(box, f"{tunnel}; ip addr add 192.0.2.10/24 dev eth0")) == "192.0.2.10"
    assert ip(decide(box, tunnel)) == "10.8.0.6"
    assert ip(decide(box, f"{tunnel}; ip route add default dev eth1")) == "10.8.0.6"


def test_a_host_address_with_a_route_to_its_gateway_is_taken(box: NspawnMachine) -> None:
    # As some clouds do it: a /32, and a gateway outside of it.
    setup = """
    ip addr add 203.0.113.7/32 dev eth0
    ip route add 172.31.1.1 dev eth0
    ip route add default via 172.31.1.1 dev eth0
    ip addr add 192.0.2.10/24 dev eth1
    """
    assert ip(decide(box, setup)) == "203.0.113.7"


def test_the_source_of_the_default_route_is_taken_from_the_loopback_interface(box: NspawnMachine) -> None:
    setup = """
    ip addr add 192.0.2.10/24 dev eth0
    ip addr add 203.0.113.7/32 dev lo
    ip route add default via 192.0.2.1 dev eth0 src 203.0.113.7
    """
    assert ip(decide(box, setup)) == "203.0.113.7"


def test_addresses_on_lo_and_on_an_interface_that_is_down_do_not_count(box: NspawnMachine) -> None:
    setup = (
        "ip addr add 192.0.2.10/24 dev eth0; ip addr add 203.0.113.7/32 dev lo; ip addr add 198.51.100.7/24 dev eth1"
    )
    assert ip(decide(box, f"{setup}; ip link set eth1 down")) == "192.0.2.10"


def test_the_interfaces_of_containers_and_overlays_do_not_count(box: NspawnMachine) -> None:
    setup = """
    ip link add docker0 type bridge; ip link set docker0 up; ip addr add 172.17.0.1/16 dev docker0
    ip link add veth1 type veth peer name inner1; ip link set veth1 master docker0 up
    ip link add flannel.1 type vxlan id 1 dstport 8472 dev eth0
    ip link set flannel.1 up; ip addr add 10.42.0.0/32 dev flannel.1
    ip addr add 192.0.2.10/24 dev eth0
    """
    assert ip(decide(box, setup)) == "192.0.2.10"


def test_an_ipv6_cluster_does_not_pick_a_stray_ipv4_address(box: NspawnMachine) -> None:
    setup = """
    ip addr add 2001:db8::10/64 dev eth0 nodad
    ip addr add 10.0.2.15/24 dev eth0
    ip route add default via 10.0.2.2
    """
    assert ip(decide(box, setup, cidrs=("fd00:10::/56", "fd00:20::/112"))) == "2001:db8::10"
    assert ip(decide(box, setup, cidrs=("10.42.0.0/16", "fd00:10::/56"))) == "10.0.2.15,2001:db8::10"
    assert ip(decide(box, setup)) == "10.0.2.15"


def test_a_host_with_ipv6_only_has_no_address_for_an_ipv4_cluster(box: NspawnMachine) -> None:
    answer = decide(box, "ip addr add 2001:db8::10/64 dev eth0 nodad")
    assert answer["error"] == "node-ip-none"
    assert "no IPv4 address" in str(answer["message"])
    six = decide(box, "ip addr add 2001:db8::10/64 dev eth0 nodad", cidrs=("fd00::/48",))
    assert ip(six) == "2001:db8::10"


def test_a_second_family_that_is_missing_is_refused(box: NspawnMachine) -> None:
    answer = decide(box, "ip addr add 192.0.2.10/24 dev eth0", cidrs=("10.42.0.0/16", "fd00::/48"))
    assert answer["error"] == "node-ip-none"
    assert "no IPv6 address" in str(answer["message"])


def test_an_address_given_by_the_flag_needs_no_network_at_all(box: NspawnMachine) -> None:
    answer = decide(box, "true", flag="192.0.2.77", nics="")
    assert (ip(answer), answer["source"]) == ("192.0.2.77", "--node-ip")
    answer = decide(box, "true", environment={"NODE_IP": "192.0.2.78"}, nics="")
    assert (ip(answer), answer["source"]) == ("192.0.2.78", "$NODE_IP")


def test_what_a_load_balancer_adds_does_not_move_a_node_that_was_brought_up(box: NspawnMachine) -> None:
    setup = """
    ip addr add 203.0.113.1/32 dev lo; ip addr add 203.0.113.2/32 dev eth0
    ip addr add 198.51.100.7/24 dev eth1
    ip addr add 192.0.2.10/24 dev eth0
    ip route add default via 198.51.100.1
    """
    answer = decide(box, setup, state="192.0.2.10")
    assert (ip(answer), answer["source"]) == ("192.0.2.10", "the address that this node was brought up with")


def test_a_pinned_address_that_is_gone_is_an_error(box: NspawnMachine) -> None:
    answer = decide(box, "ip addr add 192.0.2.11/24 dev eth0", state="192.0.2.10")
    assert answer["error"] == "node-ip-gone"
    assert "192.0.2.11 (eth0)" in str(answer["message"])


def test_a_thousand_addresses_are_read_whole(box: NspawnMachine) -> None:
    setup = """
    for i in 1 2 3 4; do for j in $(seq 1 250); do echo "addr add 10.9.$i.$j/32 dev eth0"; done; done | ip -batch -
    ip addr add 192.0.2.10/24 dev eth0
    """
    assert ip(decide(box, setup)) == "192.0.2.10"
