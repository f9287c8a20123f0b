"""What a supervisor sees of real firewalld: what a reload throws away, and a binding that is taken away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Machines
from tests.lab import roots
from tests.lab.demo import Publisher
from tests.lab.machine import wait_until
from tests.lab.node import IMAGE, Node, bring
from tests.lab.nspawn import NspawnMachine
from tests.nspawn.test_supervisor import DROP_IN, QUICK, at_rest, cursor, said, show

RESULT = "/var/lib/cni/results/stratum-default-web-eth0"
PORTS = [{"hostPort": 8088, "containerPort": 80, "protocol": "tcp"}]
# The plugin of the bundle, called as containerd's CRI part calls it for a pod with a published port.
PUBLISH = """
export CNI_COMMAND=ADD CNI_CONTAINERID=default-web CNI_NETNS=/proc/$1/ns/net CNI_IFNAME=eth0 CNI_PATH=/opt/cni/bin
/opt/cni/bin/portmap
"""


@pytest.fixture(scope="module")
def node(module_machines: Machines, pyz: Path, shipped: tuple[Publisher, Path]) -> Node[NspawnMachine]:
    """A node behind firewalld, with a supervisor that looks often."""
    machine = module_machines.boot(NspawnMachine(roots.root_directory(roots.FIREWALLD), "firewalld"))
    made = bring(machine, pyz, shipped[0].public, shipped[1])
    wait_until("firewalld runs", lambda: machine.run(["firewall-cmd", "--state"], check=False).status == 0, 60)
    made.stratum("up", "--quiet")
    machine.write(DROP_IN, QUICK)
    machine.sh("systemctl daemon-reload; systemctl restart stratum")
    at_rest(made)
    return made


def publish(node: Node[NspawnMachine]) -> None:
    """Publish a port of the container. ``ctr`` has no option for it: what CRI would do is done by hand."""
    known = json.loads(node.machine.read(RESULT))
    request = {
        "cniVersion": "1.0.0",
        "name": "stratum",
        "type": "portmap",
        "capabilities": {"portMappings": True},
        "runtimeConfig": {"portMappings": PORTS},
        "prevResult": known["result"],
    }
    pid = node.ctr("tasks", "list").lines[1].split()[1]
    node.machine.run(["sh", "-euc", PUBLISH, "sh", pid], input=json.dumps(request))
    node.machine.write(RESULT, json.dumps({**known, "capabilityArgs": {"portMappings": PORTS}}))


def test_a_binding_that_was_taken_away_is_made_again(node: Node[NspawnMachine]) -> None:
    before = cursor(node)
    ask = ["firewall-cmd", "--get-zone-of-interface=stratum0"]
    assert node.machine.run(ask).stdout == "trusted\n"
    node.machine.run(["firewall-cmd", "--zone=trusted", "--remove-interface=stratum0"])
    wait_until("it is back", lambda: node.machine.run(ask, check=False).stdout == "trusted\n", 90, pause=0.5)
    wait_until("it is said", lambda: said(node, before) != [], 30, pause=0.2)
    (line,) = said(node, before)
    assert "stratum0 in firewalld's zone trusted (runtime), which was lost: put right" in line
    at_rest(node)


def test_published_ports_that_a_reload_kills_are_said_until_they_are_back(node: Node[NspawnMachine]) -> None:
    node.ctr("run", "--detach", "--cni", "--cpu-shares", "0", IMAGE, "web", "sleep", "5000")
    publish(node)
    before = cursor(node)
    node.machine.run(["firewall-cmd", "--reload"])
    words = "published ports are dead, their rules were taken out of the firewall: container default-web"
    wait_until("it is said", lambda: said(node, before) != [], 90, pause=0.5)
    (line,) = said(node, before)
    assert words in line
    assert show(node, "StatusText") == f"version 1.0; {words}"
    publish(node)
    at_rest(node)
