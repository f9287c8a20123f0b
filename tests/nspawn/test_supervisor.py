"""The supervisor on real systemd: what it watches, systemd's watch over it, and its end."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.lab.machine import wait_until
from tests.lab.node import IMAGE, Node
from tests.lab.nspawn import NspawnMachine

MachineNode = Node[NspawnMachine]

CONTAINERD, SUPERVISOR = "stratum-containerd.service", "stratum.service"
DROP_IN = f"/etc/systemd/system/{SUPERVISOR}.d/quick.conf"
# The watch looks every half of the watchdog's time, so that a test need not wait for 15 seconds. A look that comes late
# on a busy machine must not be the end of it, so it is not shorter.
QUICK = "[Service]\nWatchdogSec=5s\nRestartSec=100ms\n"


def show(node: MachineNode, name: str, unit: str = SUPERVISOR) -> str:
    return node.machine.run(["systemctl", "show", "-P", name, unit]).stdout.strip()


def said(node: MachineNode, cursor: str) -> list[str]:
    """What the supervisor said since then."""
    argv = ["journalctl", "--unit", SUPERVISOR, "--output", "cat", "--no-pager", "--after-cursor", cursor]
    return [line for line in node.machine.run(argv).lines if line.startswith(("stratum: ", "hint: "))]


def cursor(node: MachineNode) -> str:
    """The last entry of the supervisor itself: behind any other one journalctl leaves the first out."""
    node.machine.run(["journalctl", "--sync"])
    argv = ["journalctl", "--unit", SUPERVISOR, "--lines", "1", "--show-cursor", "--no-pager"]
    return node.machine.run(argv).stdout.rpartition("-- cursor: ")[2].strip()


def at_rest(node: MachineNode) -> None:
    wait_until("nothing is wrong", lambda: show(node, "StatusText") == "version 1.0 is running", 60, pause=0.2)


@pytest.fixture(scope="module")
def watched(running: MachineNode) -> MachineNode:
    """A node that is up, with a supervisor that looks often."""
    running.machine.write(DROP_IN, QUICK)
    running.machine.sh("systemctl daemon-reload; systemctl restart stratum")
    return running


@pytest.fixture
def node(watched: MachineNode) -> Iterator[MachineNode]:
    at_rest(watched)
    yield watched
    at_rest(watched)


def tasks(node: MachineNode) -> list[str]:
    return node.ctr("tasks", "list").lines[1:]


@pytest.fixture(scope="module")
def container(watched: MachineNode) -> list[str]:
    """A container that runs; it ends with the machine."""
    watched.ctr("run", "--detach", "--cni", "--cpu-shares", "0", IMAGE, "alive", "sleep", "5000")
    return tasks(watched)


def test_a_unit_that_was_killed_for_good_comes_back_and_is_said_once(node: MachineNode) -> None:
    before, pid = cursor(node), show(node, "MainPID", CONTAINERD)
    node.machine.write(f"/run/systemd/system/{CONTAINERD}.d/mortal.conf", "[Service]\nRestart=no\n")
    node.machine.sh(f"systemctl daemon-reload; kill -9 {pid}")
    try:
        wait_until("it runs again", lambda: show(node, "MainPID", CONTAINERD) not in ("0", pid), 60, pause=0.2)
        wait_until("its gate is open", lambda: said(node, before) != [], 60, pause=0.2)
    finally:
        node.machine.sh(f"rm -r /run/systemd/system/{CONTAINERD}.d; systemctl daemon-reload")
    assert said(node, before) == [f"stratum: warning: {CONTAINERD} was down and has been started again"]
    at_rest(node)


def test_containerd_that_died_is_missed_although_a_container_keeps_its_cgroup(
    node: MachineNode, container: list[str]
) -> None:
    before = cursor(node)
    node.machine.run(["systemctl", "stop", CONTAINERD])
    wait_until("it runs again", lambda: said(node, before) != [], 60, pause=0.2)
    at_rest(node)
    assert tasks(node) == container
    shims = node.machine.run(["pgrep", "-f", "containerd-shim"]).stdout.split()
    groups = [node.machine.read(f"/proc/{pid}/cgroup") for pid in shims]
    assert groups and all(CONTAINERD in group for group in groups), "which is why the cgroup tells nothing"


def test_a_supervisor_that_hangs_is_killed_by_the_watchdog_and_the_containers_live_through_it(
    node: MachineNode, container: list[str]
) -> None:
    pid, containerd = show(node, "MainPID"), show(node, "MainPID", CONTAINERD)
    node.machine.run(["kill", "-STOP", pid])
    wait_until("another supervisor", lambda: show(node, "MainPID") not in ("0", pid), 60, pause=0.2)
    assert not node.machine.exists(f"/proc/{pid}")
    at_rest(node)
    assert (tasks(node), show(node, "MainPID", CONTAINERD)) == (container, containerd)


def test_a_bring_up_that_takes_longer_than_the_watchdog_is_left_alone(node: MachineNode) -> None:
    pid, restarts = show(node, "MainPID"), show(node, "NRestarts")
    slow = "[Service]\nRestart=no\nExecStartPre=/bin/sleep 7\n"
    node.machine.write(f"/run/systemd/system/{CONTAINERD}.d/slow.conf", slow)
    node.machine.sh(f"systemctl daemon-reload; systemctl stop {CONTAINERD}")
    try:
        wait_until("it runs again", lambda: show(node, "ActiveState", CONTAINERD) == "active", 60, pause=0.2)
        at_rest(node)
    finally:
        node.machine.sh(f"rm -r /run/systemd/system/{CONTAINERD}.d; systemctl daemon-reload")
    assert (show(node, "MainPID"), show(node, "NRestarts")) == (pid, restarts)
    assert show(node, "WatchdogUSec") == "5s"


def test_a_kernel_setting_and_a_rule_that_somebody_takes_away_are_put_back_and_said(node: MachineNode) -> None:
    before = cursor(node)
    node.machine.sh("echo 0 >/proc/sys/net/ipv4/ip_forward; nft delete table ip stratum")
    wait_until(
        "both are back",
        lambda: node.machine.run(["nft", "list", "table", "ip", "stratum"], check=False).status == 0
        and node.machine.read("/proc/sys/net/ipv4/ip_forward") == "1\n",
        60,
        pause=0.2,
    )
    at_rest(node)
    lines = said(node, before)
    assert "stratum: warning: net.ipv4.ip_forward is 0, so that containers cannot reach out: put right" in lines
    assert [line for line in lines if re.search(r"in the table stratum of nft: put right$", line)]
    assert len(lines) == 2, lines


def test_an_image_of_the_bundle_that_somebody_removes_comes_back_and_is_said(node: MachineNode) -> None:
    before, digest = cursor(node), node.ctr("images", "list").stdout.partition(IMAGE)[2].split()[1]
    node.ctr("images", "rm", "--sync", IMAGE)
    # containerd is asked once a minute at most.
    wait_until("it is back", lambda: IMAGE in node.ctr("images", "list", "--quiet").lines, 120, pause=1)
    at_rest(node)
    assert node.ctr("images", "list").stdout.partition(IMAGE)[2].split()[1] == digest
    (line,) = said(node, before)
    assert IMAGE in line and line.endswith(": put right")


def test_a_stop_is_no_failure_and_takes_no_unit_along(node: MachineNode) -> None:
    containerd = show(node, "MainPID", CONTAINERD)
    node.machine.run(["systemctl", "stop", SUPERVISOR])
    found = [show(node, name) for name in ("ActiveState", "Result", "ExecMainStatus")]
    assert found == ["inactive", "success", "143"]
    assert show(node, "MainPID", CONTAINERD) == containerd
    node.machine.run(["systemctl", "start", SUPERVISOR])
