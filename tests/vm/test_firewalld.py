"""Real firewalld and NetworkManager: `up` gets the container network through both, and `uninstall` gives it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Machines
from tests.lab import demo, roots
from tests.lab.image import Image
from tests.lab.inside import PLACE, SOURCES, ask
from tests.lab.machine import Machine, Result, wait_until
from tests.lab.packages import Package
from tests.lab.qemu import STEADY_CLOCK, QemuMachine
from tests.pyz import built_pyz, default_cache

IMPORTS = "from stratum.host import firewalld, hostports"
BRIDGE_ADDRESS = "10.215.0.1"
LISTENER = f"systemd-run --quiet --unit listener python3 -m http.server 8099 --bind {BRIDGE_ADDRESS} --directory /run"

# The plugin that is in the bundle, called as containerd's CRI part calls it for a pod with a published port.
PORT = {
    "cniVersion": "1.0.0", "name": "stratum", "type": "portmap", "capabilities": {"portMappings": True},
    "runtimeConfig": {"portMappings": [{"hostPort": 8088, "containerPort": 80, "protocol": "tcp"}]},
}
PUBLISH = """
export CNI_COMMAND=ADD CNI_CONTAINERID=published CNI_NETNS=/proc/$1/ns/net CNI_IFNAME=eth0 CNI_PATH=/opt/cni/bin
/opt/cni/bin/portmap
"""
REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 20).close()
except OSError as error:
    print(error.strerror or error)
else:
    print("reached")
"""
# What becomes of a connection.
REACHED, REJECTED, NOBODY = "reached", "No route to host", "Connection refused"
TRUST = 'perform(lambda work: firewalld.plan_trust(work, ["stratum0"], warnings.append))'
UNTRUST = "perform(firewalld.plan_untrust)"


@pytest.fixture(scope="module")
def host(
    module_machines: Machines, debian_packages: dict[str, Package], demo_image: Image
) -> QemuMachine:
    """A machine with firewalld and NetworkManager, both running; the stick's content and a trusted key."""
    pyz = built_pyz(default_cache())
    publisher, bundle = demo.cached_bundle(pyz, debian_packages, [demo_image])
    files: dict[str, Path] = {
        "/root/usb/stratum.pyz": pyz,
        "/root/usb/demo.tar": bundle,
        "/etc/stratum/trust.d/publisher.pub": publisher.public,
        PLACE: SOURCES,
    }
    disk = roots.root_disk(roots.FIREWALLD)
    machine = module_machines.boot(QemuMachine(disk, "firewalld", files=files, options=STEADY_CLOCK))
    machine.sh("chmod 0755 /root/usb/stratum.pyz; chmod 0644 /etc/stratum/trust.d/publisher.pub")
    return machine


def call(host: Machine, value: str) -> Any:
    return ask(host, IMPORTS, value, timeout=600)


def up(host: Machine) -> Result:
    return host.run(["./stratum.pyz", "up", "--quiet"], cwd="/root/usb", timeout=900)


def uninstall(host: Machine) -> None:
    done = host.run(["stratum", "uninstall", "--quiet"], timeout=900)
    assert "left:" not in done.stdout, done.describe()
    assert done.stderr == "", done.describe()


def firewall(host: Machine, *words: str) -> Result:
    return host.run(["firewall-cmd", *words], timeout=300)


def zone(host: Machine, *, permanent: bool) -> str:
    """The zone of the bridge in one of the two configurations, empty when it is in none."""
    words = ["firewall-cmd", *(["--permanent"] if permanent else []), "--get-zone-of-interface=stratum0"]
    done = host.run(words, check=False, timeout=300)
    assert done.status in (0, 2), done.describe()
    return done.stdout.strip() if done.status == 0 else ""


def configuration(host: Machine) -> str:
    """Every file of firewalld's and NetworkManager's configuration."""
    return host.sh("find /etc/firewalld /etc/NetworkManager -type f | sort | xargs sha256sum").stdout


def mark(host: Machine) -> None:
    """Leave something in the firewall that a reload of firewalld throws away."""
    host.run(["iptables", "-t", "nat", "-N", "LAB-MARK"])


def is_marked(host: Machine) -> bool:
    return host.run(["iptables", "-t", "nat", "-S", "LAB-MARK"], check=False).status == 0


def start_container(host: Machine, image: Image) -> str:
    """Start a web server in a container, and a listener on the bridge; return the server's process id."""
    command = ["ctr", "run", "--detach", "--cni", image.reference, "web", "httpd", "-f", "-p", "80", "-h", "/etc"]
    host.run(["stratum", "exec", *command], timeout=300)
    host.sh(LISTENER)
    wait_until("the listener listens", lambda: connect(host, BRIDGE_ADDRESS, 8099) == REACHED, 120)
    return host.run(["pgrep", "-f", "^httpd -f"]).stdout.strip()


def connect(host: Machine, address: str, port: int, *, by: str = "1") -> str:
    """What becomes of a connection that a process makes in its own network."""
    argv = ["nsenter", "--target", by, "--net", "python3", "-c", REACH, address, str(port)]
    return host.run(argv, timeout=120).stdout.strip()


def states(host: Machine) -> dict[str, str]:
    """What NetworkManager does with each interface."""
    return dict(line.split(":") for line in host.run(["nmcli", "-t", "-f", "DEVICE,STATE", "device"]).lines)


@pytest.mark.timeout(2400)  # seconds; a loaded machine is several times slower
def test_up_is_let_through_a_reload_keeps_it_and_uninstall_takes_it_back_from_a_firewalld_that_is_stopped(
    host: QemuMachine, demo_image: Image
) -> None:
    """One test, for each question to firewalld costs seconds here."""
    before = configuration(host)
    mark(host)
    done = up(host)
    assert done.stderr == "", done.describe()
    assert (zone(host, permanent=True), zone(host, permanent=False)) == ("trusted", "trusted")
    assert firewall(host, "--zone=trusted", "--list-sources").stdout.strip() == "", "no range of addresses"

    # NetworkManager has left all of it alone from the first moment.
    process = start_container(host, demo_image)
    seen = states(host)
    ours = {name: state for name, state in seen.items() if name == "stratum0" or name.startswith("veth")}
    assert len(ours) == 2 and set(ours.values()) == {"unmanaged"}, seen

    # Containers reach the host, and published ports are reached. None of it took a reload.
    host.run(["sh", "-euc", PUBLISH, "sh", process], input=port_configuration(host, process))
    assert connect(host, BRIDGE_ADDRESS, 8099, by=process) == REACHED
    assert connect(host, BRIDGE_ADDRESS, 8088) == REACHED
    assert call(host, "hostports.rules_present(host)") is True
    assert is_marked(host)

    # An admin reloads: the binding stays. The rules of the portmap plugin are gone, and that is seen.
    firewall(host, "--reload")
    assert not is_marked(host)
    assert zone(host, permanent=False) == "trusted"
    assert connect(host, BRIDGE_ADDRESS, 8099, by=process) == REACHED
    assert connect(host, BRIDGE_ADDRESS, 8088) == NOBODY
    assert call(host, "hostports.rules_present(host)") is False
    mark(host)

    # A binding that somebody took away while no supervisor ran is made again at its next start.
    host.run(["systemctl", "stop", "stratum.service"], timeout=300)
    firewall(host, "--zone=trusted", "--remove-interface=stratum0")
    assert connect(host, BRIDGE_ADDRESS, 8099, by=process) == REJECTED
    host.run(["systemctl", "start", "stratum.service"], timeout=600)
    assert connect(host, BRIDGE_ADDRESS, 8099, by=process) == REACHED
    journal = host.run(["journalctl", "--boot", "--unit", "stratum.service", "--output", "cat"]).stdout
    assert "firewall: let the container network through firewalld" in journal

    # The dry run discloses it. Taken back while firewalld is stopped, it does not come back with it.
    listed = host.run(["stratum", "uninstall", "--dry-run"], timeout=300).stdout
    assert "remove stratum0 from firewalld's zone trusted (permanent and runtime)" in listed
    assert "reload NetworkManager" in listed
    host.run(["systemctl", "stop", "firewalld", "listener"], timeout=300)
    uninstall(host)
    assert configuration(host) == before
    assert "stratum" not in host.run(["NetworkManager", "--print-config"]).stdout
    host.run(["systemctl", "start", "firewalld"], timeout=300)
    assert (zone(host, permanent=True), zone(host, permanent=False)) == ("", "")


def test_a_firewalld_that_is_stopped_gets_the_permanent_part_and_a_running_one_gives_it_back_without_a_reload(
    host: QemuMachine,
) -> None:
    before = configuration(host)
    host.run(["systemctl", "stop", "firewalld"], timeout=300)
    assert call(host, f"{TRUST} + warnings") == ["trust stratum0 in firewalld's zone trusted (permanent)"]
    host.run(["systemctl", "start", "firewalld"], timeout=300)
    assert (zone(host, permanent=True), zone(host, permanent=False)) == ("trusted", "trusted")

    mark(host)
    assert call(host, f"{UNTRUST} + warnings") == [
        "remove stratum0 from firewalld's zone trusted (permanent and runtime)"
    ]
    assert is_marked(host)
    assert configuration(host) == before
    assert (zone(host, permanent=True), zone(host, permanent=False)) == ("", "")


def test_what_an_admin_bound_is_theirs(host: QemuMachine) -> None:
    firewall(host, "--permanent", "--zone=public", "--add-interface=stratum0")
    done, warned = call(host, f"[{TRUST}, warnings]")
    assert done == ["trust stratum0 in firewalld's zone trusted (runtime)"]
    assert [line.rpartition("run: ")[2] for line in warned] == [
        "firewall-cmd --permanent --zone=trusted --change-interface=stratum0"
    ]
    assert call(host, UNTRUST) == ["remove stratum0 from firewalld's zone trusted (runtime)"]
    assert (zone(host, permanent=True), zone(host, permanent=False)) == ("public", "")


def port_configuration(host: Machine, process: str) -> str:
    """What the plugin gets: its part of the network's configuration, and what the bridge plugin had done."""
    shown = json.loads(host.run(["nsenter", "--target", process, "--net", "ip", "-j", "-4", "addr"]).stdout)
    address = next(item["addr_info"][0]["local"] for item in shown if item["ifname"] == "eth0")
    result = {
        "cniVersion": "1.0.0", "interfaces": [{"name": "eth0", "sandbox": f"/proc/{process}/ns/net"}],
        "ips": [{"address": f"{address}/16", "gateway": BRIDGE_ADDRESS, "interface": 0}],
    }
    return json.dumps({**PORT, "prevResult": result})
