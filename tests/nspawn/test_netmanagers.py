"""Real systemd-networkd keeps off the container network."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Machines
from tests.lab.inside import PLACE, SOURCES, ask
from tests.lab.machine import wait_until
from tests.lab.nspawn import NspawnMachine

IMPORTS = "from stratum.host import netmanagers"
PLAN = 'perform(lambda work: netmanagers.plan_unmanaged(work, "stratum0", warnings.append)) + warnings'
# What an admin writes who means each network card of the host.
GREEDY = "[Match]\nName=*\n\n[Network]\nDHCP=yes\nLinkLocalAddressing=ipv4\n"


def states(machine: NspawnMachine) -> dict[str, str]:
    lines = machine.run(["networkctl", "--no-legend", "--no-pager", "list"]).lines
    return {fields[1]: fields[4] for fields in (line.split() for line in lines)}


def test_networkd_takes_every_new_interface_but_ours(machines: Machines, lab_root: Path) -> None:
    machine = machines.boot(NspawnMachine(lab_root))
    machine.copy_tree_in(SOURCES, PLACE)
    assert ask(machine, IMPORTS, PLAN) == [], "a networkd that only comes with systemd is not in use"

    machine.write("/etc/systemd/network/10-all.network", GREEDY)
    machine.run(["systemctl", "enable", "--now", "systemd-networkd"])
    assert ask(machine, IMPORTS, PLAN)[-1] == "reload systemd-networkd"
    machine.sh(
        "ip link add stratum0 type bridge; ip link set stratum0 up;"
        "ip link add veth1a2b3c4d type veth peer name vethlan;"
        "ip link set veth1a2b3c4d master stratum0 up; ip link set vethlan up"
    )
    wait_until("networkd has seen them", lambda: states(machine).get("vethlan") in ("configuring", "configured"), 60)
    assert states(machine)["stratum0"] == states(machine)["veth1a2b3c4d"] == "unmanaged"
