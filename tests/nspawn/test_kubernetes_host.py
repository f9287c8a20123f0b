"""The node IP of a Kubernetes node on real interfaces, as `up` sees it before it writes anything.

Each run is a dry one, or one that is refused: a machine of this tier shares swap and kernel with the outer one.
The kubelet in the bundle is a stand-in.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lab.demo import Publisher, cached_bundle
from tests.lab.machine import Result
from tests.lab.node import PYZ, Node, refusal
from tests.lab.nspawn import NspawnMachine
from tests.lab.packages import Package
from tests.lab.snapshot import check_same, snapshot
from tests.nspawn.test_node_ip import NICS

MachineNode = Node[NspawnMachine]

BUNDLE = "/root/kubernetes/node.tar"


@pytest.fixture(scope="module")
def bare_host(bare: MachineNode, pyz: Path, debian_packages: dict[str, Package]) -> MachineNode:
    """A machine with a bundle that has a kubelet, and the key for it."""
    publisher: Publisher
    publisher, bundle = cached_bundle(pyz, debian_packages, [], kubelet=True)
    bare.machine.copy_in(bundle, BUNDLE)
    bare.machine.copy_in(publisher.public, "/etc/stratum/trust.d/kubernetes.pub")
    return bare


def run(host: MachineNode, setup: str, *words: str) -> Result:
    """``stratum up`` in a network namespace that ``setup`` fills."""
    script = f'{NICS}\n{setup}\nexec "$@"'
    argv = ["unshare", "--net", "sh", "-euc", script, "sh", PYZ, "up", "--bundle", BUNDLE, *words]
    return host.machine.run(argv, check=False)


def chosen(done: Result) -> str:
    assert done.status == 0, done.describe()
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("node IP ")]
    return line.split()[2]


def test_one_nic_without_a_default_route_is_enough_and_the_route_is_spoken_of(bare_host: MachineNode) -> None:
    done = run(bare_host, "ip addr add 192.0.2.10/24 dev eth0", "--dry-run")
    assert chosen(done) == "192.0.2.10"
    assert "default route" in done.stderr


def test_two_nics_without_a_default_route_stop_up_before_the_first_write(bare_host: MachineNode) -> None:
    before = snapshot(bare_host.machine)
    setup = "ip addr add 192.0.2.10/24 dev eth0; ip addr add 198.51.100.7/24 dev eth1"
    done = run(bare_host, setup)
    assert (done.status, refusal(done)) == (10, "host-refused"), done.describe()
    assert all(word in done.stderr for word in ("192.0.2.10", "198.51.100.7", "--node-ip")), done.describe()
    assert "\nstate: nothing was changed\n" in f"\n{done.stderr}"
    check_same(before, snapshot(bare_host.machine))
    assert run(bare_host, setup, "--dry-run", "--node-ip", "198.51.100.7").status == 0


@pytest.mark.parametrize("order", [("192.0.2.51/24", "192.0.2.59/32"), ("192.0.2.59/32", "192.0.2.51/24")])
def test_a_virtual_address_is_not_taken_for_the_nodes(bare_host: MachineNode, order: tuple[str, str]) -> None:
    setup = "\n".join(f"ip addr add {address} dev eth0" for address in order)
    assert chosen(run(bare_host, setup, "--dry-run")) == "192.0.2.51"


def test_the_family_follows_the_networks_of_the_cluster(bare_host: MachineNode) -> None:
    setup = "ip addr add 10.0.2.15/24 dev eth0; ip addr add 2001:db8::10/64 dev eth0 nodad"
    done = run(bare_host, setup, "--dry-run", "--cluster-cidr", "fd00:1::/56,fd00:2::/112")
    assert chosen(done) == "2001:db8::10"
    both = run(bare_host, setup, "--dry-run", "--cluster-cidr", "10.1.0.0/16,fd00:1::/56")
    assert chosen(both) == "10.0.2.15,2001:db8::10"


@pytest.mark.parametrize(
    ("address", "kind"),
    [("fe80::1", "link-local"), ("127.0.0.1", "loopback"), ("169.254.1.1", "link-local"), ("ff02::1", "multicast")],
)
def test_an_address_that_no_other_host_reaches_is_refused_while_arguments_are_read(
    bare_host: MachineNode, address: str, kind: str
) -> None:
    done = run(bare_host, "", "--node-ip", address)
    assert (done.status, refusal(done)) == (2, "node-ip-unreachable"), done.describe()
    assert kind in done.stderr


def test_preflight_names_the_address_beside_everything_else(bare_host: MachineNode) -> None:
    setup = "ip addr add 192.0.2.10/24 dev eth0; ip addr add 198.51.100.7/24 dev eth1"
    script = f'{NICS}\n{setup}\nexec "$@"'
    argv = ["unshare", "--net", "sh", "-euc", script, "sh", PYZ, "preflight", "--bundle", BUNDLE, "--output", "json"]
    done = bare_host.machine.run(argv, check=False)
    assert done.status == 10
    assert "node-ip" in [finding["check"] for finding in json.loads(done.stdout)["findings"]]
