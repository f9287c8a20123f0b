"""Real firewalld and NetworkManager: the container bridge is let through, by both, and given back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Machines
from tests.lab import roots
from tests.lab.inside import PLACE, SOURCES, ask, python
from tests.lab.machine import Machine
from tests.lab.qemu import QemuMachine

IMPORTS = "from stratum.host import firewalld, hostports, masquerade, netmanagers"
TRUST = 'perform(lambda work: firewalld.plan_trust(work, ["stratum0"], warnings.append))'
UNTRUST = "perform(firewalld.plan_untrust)"
SUBNET = "10.215.0.0/24"

# A container, as the bridge plugin makes it: a veth whose other end is in a network namespace.
CONTAINER = """
ip link add stratum0 type bridge
ip addr add 10.215.0.1/24 dev stratum0
ip link set stratum0 up
ip netns add inside
ip link add veth1a2b3c4d type veth peer name eth0 netns inside
ip link set veth1a2b3c4d master stratum0 up
ip -n inside addr add 10.215.0.2/24 dev eth0
ip -n inside link set eth0 up
systemd-run --quiet --unit listener python3 -m http.server 8099 --bind 10.215.0.1 --directory /run
"""
REACH = """
import socket, sys
try:
    socket.create_connection(("10.215.0.1", 8099), 20).close()
except OSError as error:
    print(error.strerror or error)
else:
    print("reached")
"""


@pytest.fixture(scope="module")
def host(module_machines: Machines) -> QemuMachine:
    """A machine with firewalld and NetworkManager, both running."""
    machine = QemuMachine(roots.root_disk(roots.FIREWALLD), "firewalld", files={PLACE: SOURCES})
    return module_machines.boot(machine)


def call(host: Machine, value: str) -> Any:
    return ask(host, IMPORTS, value, timeout=600)


def reached(host: Machine) -> bool:
    said = host.run(["ip", "netns", "exec", "inside", "python3", "-c", REACH], timeout=120).stdout.strip()
    assert said == "reached" or "No route to host" in said, said
    return said == "reached"


def zones(host: Machine) -> str:
    """Every file of firewalld's configuration."""
    return host.sh("cd /etc/firewalld; find . -type f | sort | xargs sha256sum").stdout


def test_networkmanager_keeps_off_the_bridge_and_the_veths_from_the_first_moment(host: QemuMachine) -> None:
    files = host.sh("find /etc/NetworkManager | sort").stdout
    done = call(host, 'perform(lambda work: netmanagers.plan_unmanaged(work, "stratum0", warnings.append)) + warnings')
    assert done[-1] == "reload NetworkManager"
    host.sh(CONTAINER)
    host.run(["ip", "link", "add", "vethlan", "type", "veth", "peer", "name", "vethlan-peer"])
    states = dict(line.split(":") for line in host.run(["nmcli", "-t", "-f", "DEVICE,STATE", "device"]).lines)
    assert states["stratum0"] == states["veth1a2b3c4d"] == "unmanaged"
    config = host.run(["NetworkManager", "--print-config"]).stdout
    assert "[device-stratum]" in config

    # Our file goes, and only it.
    code = f"{IMPORTS}\nwork = work_on()\nhost.unlink(netmanagers.NETWORK_MANAGER.path)\n"
    code += "[action.perform(work) for action in netmanagers.plan_forget(work, warnings.append)]\nprint(warnings)"
    assert python(host, code).stdout == "[]\n"
    assert host.sh("find /etc/NetworkManager | sort").stdout == files
    assert "[device-stratum]" not in host.run(["NetworkManager", "--print-config"]).stdout


def test_the_whole_life_of_a_binding(host: QemuMachine) -> None:
    """One test, for each question to firewalld costs seconds here."""
    before = zones(host)
    assert not reached(host), "firewalld keeps containers from the host at first"
    call(host, f'[action.perform(None) for action in masquerade.plan_masquerade(host, "{SUBNET}")]')
    stamp = call(host, "firewalld.firewall_stamp(host)")
    host.sh("iptables -t nat -N CNI-HOSTPORT-DNAT; iptables -t nat -A PREROUTING -j CNI-HOSTPORT-DNAT")

    # Bound, in both configurations, by its effect; a second time there is nothing to do.
    assert call(host, f"{TRUST} + warnings") == ["trust stratum0 in firewalld's zone trusted (permanent and runtime)"]
    assert reached(host)
    assert call(host, f"{TRUST} + warnings") == []
    assert call(host, "firewalld.firewall_stamp(host)") != stamp
    assert call(host, "[item.interface for item in firewalld.owned_interfaces(host)]") == ["stratum0"]

    # An admin reloads: the binding and our own table stay. The rules of the portmap plugin go, and it is seen.
    assert call(host, "hostports.rules_present(host)") is True
    host.run(["firewall-cmd", "--reload"], timeout=300)
    assert reached(host)
    assert call(host, f'len(masquerade.plan_masquerade(host, "{SUBNET}"))') == 0
    assert call(host, "hostports.rules_present(host)") is False

    # A restart, and a binding that somebody took away: found and made again.
    host.run(["systemctl", "restart", "firewalld"], timeout=300)
    assert reached(host)
    host.run(["firewall-cmd", "--zone=trusted", "--remove-interface=stratum0"], timeout=300)
    assert not reached(host)
    lost = call(host, f"{TRUST} + warnings")
    assert lost == ["trust stratum0 in firewalld's zone trusted (runtime), which was lost"]
    assert reached(host)

    # Taken back while firewalld is stopped: it does not come back with it, and not one file is different.
    host.run(["systemctl", "stop", "firewalld"], timeout=300)
    assert call(host, UNTRUST) == ["remove stratum0 from firewalld's zone trusted (permanent and runtime)"]
    assert zones(host) == before

    # A firewalld that is stopped and starts at boot gets the permanent part, offline.
    assert call(host, f"{TRUST} + warnings") == ["trust stratum0 in firewalld's zone trusted (permanent)"]
    host.run(["systemctl", "start", "firewalld"], timeout=300)
    assert reached(host)

    # Taken back while it runs.
    call(host, UNTRUST)
    assert zones(host) == before
    assert not host.exists("/var/lib/stratum/firewalld.json")
    assert host.run(["firewall-cmd", "--get-zone-of-interface=stratum0"], check=False, timeout=300).status == 2


def test_what_an_admin_bound_is_theirs(host: QemuMachine) -> None:
    before = zones(host)
    host.run(["firewall-cmd", "--permanent", "--zone=public", "--add-interface=stratum0"], timeout=300)
    warned = call(host, f"[{TRUST}, warnings]")
    assert len(warned[1]) == 1
    assert warned[1][0].endswith("run: firewall-cmd --permanent --zone=trusted --change-interface=stratum0")
    call(host, UNTRUST)
    named = host.run(["firewall-cmd", "--permanent", "--get-zone-of-interface=stratum0"], timeout=300)
    assert named.stdout == "public\n"
    host.run(["firewall-cmd", "--permanent", "--zone=public", "--remove-interface=stratum0"], timeout=300)
    assert before
