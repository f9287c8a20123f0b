"""The supervisor's watch: what it looks at, what it says, and what it puts right."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stratum.errors import ExitCode
from stratum.host import sysctls
from stratum.host.notify import Watchdog
from stratum.host.sysctlfiles import Assignment
from stratum.lock import hold_lock
from stratum.node.layout import Layout
from stratum.node.settings import read_settings
from stratum.node.stack import Stack
from stratum.node.units import UNIT_KUBELET, UNIT_KUBELET_LAUNCH_CHECK
from stratum.output import Output
from stratum.scripts import supervise
from stratum.scripts.context import Context
from stratum.scripts.watch import Watch
from stratum.system import Host
from tests.bundles import Entry, Part
from tests.fakes import Desk, MachineHost, Unit, make_tree, node_publisher
from tests.unit import test_prerequisites
from tests.unit.test_firewalld import FirewallHost
from tests.unit.test_prerequisites import KubernetesHost, bundle_of

kubernetes_host = test_prerequisites.host  # the fixture under another name

CONTAINERD, SUPERVISOR = "stratum-containerd.service", "stratum.service"


@dataclass
class LivingHost(MachineHost):
    """A machine whose units have processes in its /proc."""

    pids: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)  # of the last process of a unit
    last_pid: int = 100

    def begin(self, unit: str) -> None:
        self.last_pid += 1
        self.pids[unit] = self.last_pid
        place = Path(self.root, "proc", str(self.last_pid))
        place.mkdir(parents=True)
        fields = ["S", "1", *["0"] * 17, str(self.last_pid * 7), "0"]
        (place / "stat").write_text(f"{self.last_pid} (a program) {' '.join(fields)}\n")
        (place / "cmdline").write_bytes(b"program\0")

    def die(self, unit: str, active: str = "failed") -> None:
        shutil.rmtree(Path(self.root, "proc", str(self.pids.pop(unit))))
        self.units[unit].active = active

    def _systemctl(self, argv: list[str], data: bytes) -> tuple[int, str]:
        answer = super()._systemctl(argv, data)
        unit = argv[-1]
        if argv[0] in ("start", "restart") and self.active(unit) and unit not in self.pids:
            self.begin(unit)
        return answer

    def _show(self, name: str) -> str:
        text = super()._show(name).replace("MainPID=0", f"MainPID={self.pids.get(name, 0)}")
        return f"{text}ExecMainStatus={self.statuses.get(name, 0)}\n"


@dataclass
class Post:
    """A watch, and what it says to the journal."""

    host: LivingHost
    err: io.StringIO
    watch: Watch

    def look(self) -> str:
        return self.watch.look()

    def said(self) -> list[str]:
        """What was said since the last call, without the notes of steps."""
        lines = [line for line in self.err.getvalue().splitlines() if line.startswith(("stratum: ", "hint: "))]
        self.err.seek(0)
        self.err.truncate()
        return lines


@pytest.fixture
def desk(memory: Path) -> Desk:
    (memory / "desk").mkdir()
    return Desk(memory / "desk")


@pytest.fixture
def root(memory: Path) -> Path:
    return make_tree(memory / "root", live=True)


def bring(desk: Desk, host: LivingHost, **changes: Any) -> LivingHost:
    """A node that is up."""
    program = b"#!/bin/sh\n"
    parts = [
        Part("containerd", [Entry("bin/containerd", program), Entry("bin/ctr", program)], version="1.7.24"),
        Part("cni-plugins", [Entry("cni/bin/bridge", program)]),
    ]
    bundle = desk.bundle(node_publisher(**{"parts": parts, **changes}).build())
    assert desk.up(host, bundle).status == ExitCode.DONE
    host.units[SUPERVISOR].active = "active"
    host.commands.clear()
    return host


@pytest.fixture
def node(desk: Desk, root: Path) -> LivingHost:
    return bring(desk, LivingHost(str(root), {}))


def post(host: LivingHost, watchdog: Watchdog | None = None) -> Post:
    err = io.StringIO()
    context, stack = Context(host, Output(stdout=io.StringIO(), stderr=err), None, None), Stack(Layout(host))
    watch = Watch(
        context,
        stack,
        lambda: supervise.bring_up(context, stack),
        lambda: supervise.put_right(context, stack),
        watchdog or Watchdog(host),
    )
    return Post(host, err, watch)


def at_rest(host: LivingHost) -> Post:
    """A watch that has asked all that it asks at its beginning."""
    made = post(host)
    for _ in range(3):
        assert made.look() == "version 1.0.0 is running"
        host.clock += 60
    assert made.said() == []
    host.commands.clear()
    return made


# -- units ----------------------------------------------------------------------------------------------


def test_at_rest_a_look_starts_no_program_and_changes_nothing(node: LivingHost) -> None:
    watch = at_rest(node)
    node.mutations.clear()
    for _ in range(5):
        assert watch.look() == "version 1.0.0 is running"
    assert (node.commands, node.mutations, watch.said()) == ([], [], [])


@pytest.mark.parametrize("state", ["failed", "inactive"])
def test_a_unit_that_died_for_good_is_started_again_and_said_once(node: LivingHost, state: str) -> None:
    watch = at_rest(node)
    node.die(CONTAINERD, state)
    assert watch.look() == f"version 1.0.0; {CONTAINERD} had to be started again"
    assert node.active(CONTAINERD)
    assert watch.said() == [f"stratum: warning: {CONTAINERD} was down and has been started again"]
    assert watch.look() == "version 1.0.0 is running"
    node.commands.clear()
    watch.look()
    assert (node.commands, watch.said()) == ([], []), "the new process is the one that is looked at"


def test_a_process_that_has_the_number_of_a_dead_one_is_not_taken_for_it(node: LivingHost) -> None:
    watch = at_rest(node)
    pid = node.pids[CONTAINERD]
    node.die(CONTAINERD)
    node.last_pid = pid - 1
    node.begin("other.service")
    stat = Path(node.root, "proc", str(pid), "stat")
    stat.write_text(stat.read_text().replace(f" {pid * 7} ", " 99999 "))
    watch.look()
    assert node.active(CONTAINERD)


def test_a_unit_that_systemd_restarted_by_itself_is_asked_about_once(node: LivingHost) -> None:
    watch = at_rest(node)
    node.die(CONTAINERD, "active")
    node.begin(CONTAINERD)
    assert watch.look() == "version 1.0.0 is running"
    asked = len(node.commands)
    watch.look()
    assert (asked, len(node.commands), watch.said()) == (1, 1, [])


def test_a_unit_that_does_not_come_to_an_end_of_its_restarts_is_said_once(node: LivingHost) -> None:
    watch = at_rest(node)
    node.die(CONTAINERD, "activating")
    words = f"{CONTAINERD} is activating (x)"
    assert watch.look() == f"version 1.0.0; {words}"
    assert watch.said() == [], "a restart is nothing to speak of"
    assert [watch.look() for _ in range(3)] == [f"version 1.0.0; {words}"] * 3
    assert watch.said() == [f"stratum: warning: {words}"]


def test_nothing_is_started_while_another_run_is_at_work(node: LivingHost) -> None:
    watch = at_rest(node)
    node.die(CONTAINERD)
    with hold_lock(node, "upgrade"):
        assert watch.look() == f"version 1.0.0; {CONTAINERD} down while another run is at work"
    assert not node.active(CONTAINERD)
    assert watch.said() == []
    watch.look()
    assert node.active(CONTAINERD)


def test_a_start_that_fails_is_an_error_once_and_stands_in_the_status(node: LivingHost) -> None:
    watch = at_rest(node)
    node.die(CONTAINERD)
    node.failing = {f"systemctl start {CONTAINERD}": 3}
    found = [watch.look() for _ in range(3)]
    assert len(set(found)) == 1 and f"{CONTAINERD}: did not start" in found[0]
    errors = [line for line in watch.said() if "error[unit-failed]" in line]
    assert len(errors) == 1
    assert "had to be started again" in watch.look()
    node.die(CONTAINERD)
    node.failing = {f"systemctl start {CONTAINERD}": 1}
    watch.look()
    assert [line for line in watch.said() if "error[" in line], "a failure after a success is a new one"


# -- the host -------------------------------------------------------------------------------------------


@dataclass
class NodeHost(LivingHost, KubernetesHost, FirewallHost):
    """The same with swap, kernel settings, addresses and firewalld."""


@pytest.fixture
def kubernetes(desk: Desk, kubernetes_host: KubernetesHost) -> NodeHost:
    """A Kubernetes node of profile cis; the kubelet is a stand-in."""
    host = NodeHost(kubernetes_host.root, {}, on=kubernetes_host.on)
    bundle = bundle_of(desk, kubelet=True, version="1.0.0")
    assert desk.up(host, bundle, "--profile", "cis").status == ExitCode.DONE
    host.commands.clear()
    return host


def control(host: MachineHost, key: str, value: str) -> None:
    Path(host.root, "proc/sys", key).write_text(f"{value}\n")


def test_on_a_kubernetes_node_at_rest_a_look_starts_no_program_either(kubernetes: NodeHost) -> None:
    watch = at_rest(kubernetes)
    kubernetes.mutations.clear()
    for _ in range(50):
        watch.look()
        kubernetes.clock += 15
    assert (kubernetes.commands, kubernetes.mutations, watch.said()) == ([], [], [])


@pytest.mark.parametrize(
    ("active", "status", "words"),
    [("failed", 78, "refused this node for good"), ("activating", 1, "waits for its launch check to agree")],
)
def test_a_kubelet_whose_launch_check_does_not_agree_is_said_once_and_not_started(
    kubernetes: NodeHost, active: str, status: int, words: str
) -> None:
    here = at_rest(kubernetes)
    kubernetes.units[UNIT_KUBELET_LAUNCH_CHECK] = Unit(active)
    kubernetes.statuses[UNIT_KUBELET_LAUNCH_CHECK] = status
    kubernetes.die(UNIT_KUBELET, "inactive")
    kubernetes.commands.clear()
    said = [line for _ in range(4) for line in (here.look(), *here.said())]
    assert sum(line.startswith("stratum: ") and words in line for line in said) == 1
    assert words in here.look()
    assert not [line for line in kubernetes.commands if " start " in line or " restart " in line]
    kubernetes.units[UNIT_KUBELET_LAUNCH_CHECK] = Unit("inactive")
    here.look()
    assert kubernetes.active(UNIT_KUBELET), "any other kubelet that is down is started"


def test_swap_that_is_on_again_goes_off_and_is_said_once(kubernetes: NodeHost) -> None:
    watch = at_rest(kubernetes)
    kubernetes.switch_on("/dev/sda7")
    status = watch.look()
    assert kubernetes.on == {}
    (line,) = watch.said()
    assert line.startswith("stratum: warning: swap is on: /dev/sda7 (") and line.endswith(": put right")
    assert status == f"version 1.0.0; {line.removeprefix('stratum: warning: ')}"
    assert watch.look() == "version 1.0.0 is running"
    assert watch.said() == []


def test_swap_of_a_container_host_is_the_admins_matter(desk: Desk, kubernetes_host: KubernetesHost) -> None:
    host = NodeHost(kubernetes_host.root, {}, on=kubernetes_host.on)
    desk.up(host, bundle_of(desk, kubelet=False, version="1.0.0"))
    watch = at_rest(host)
    host.switch_on("/dev/sda7")
    control(host, "vm/overcommit_memory", "2")
    assert watch.look() == "version 1.0.0 is running"
    assert set(host.on) == {"/swap.img", "/dev/sda7"}


def test_a_kernel_setting_that_differs_is_put_right_with_the_file_that_sets_it(
    kubernetes: NodeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans: list[str] = []
    scan = sysctls.read_assignments

    def counted(host: Host) -> list[Assignment]:
        scans.append(host.root)
        return scan(host)

    watch = at_rest(kubernetes)
    monkeypatch.setattr(sysctls, "read_assignments", counted)
    watch.look()
    assert scans == [], "the directories are read only when a live value differs"
    Path(kubernetes.root, "etc/sysctl.d/99-zz.conf").write_text("kernel.panic=3\n")
    control(kubernetes, "kernel/panic", "3")
    control(kubernetes, "net/ipv4/ip_forward", "0")
    watch.look()
    assert (kubernetes.sysctl("kernel/panic"), kubernetes.sysctl("net/ipv4/ip_forward")) == ("10", "1")
    said = watch.said()
    assert "stratum: warning: net.ipv4.ip_forward is 0 and must be 1: put right" in said
    assert (
        "stratum: warning: kernel.panic is 3 and must be 10; /etc/sysctl.d/99-zz.conf line 1 sets it: put right" in said
    )
    assert watch.look() == "version 1.0.0 is running"


def test_forwarding_of_a_container_host_is_switched_on_again(node: LivingHost) -> None:
    Path(node.root, "proc/sys/net/ipv4").mkdir(parents=True)
    control(node, "net/ipv4/ip_forward", "1")
    watch = at_rest(node)
    control(node, "net/ipv4/ip_forward", "0")
    assert watch.look() == "version 1.0.0; net.ipv4.ip_forward is 0, so that containers cannot reach out: put right"
    assert Path(node.root, "proc/sys/net/ipv4/ip_forward").read_text() == "1\n"


def test_what_cannot_be_put_right_is_said_once_and_keeps_nothing_else_from_it(kubernetes: NodeHost) -> None:
    watch = at_rest(kubernetes)
    kubernetes.stuck.add("/proc/sys/kernel/panic")
    control(kubernetes, "kernel/panic", "3")
    kubernetes.switch_on("/dev/sda7")
    found = []
    for _ in range(20):
        found.append(watch.look())
        kubernetes.clock += 15
    assert kubernetes.on == {}, "swap comes behind the kernel settings"
    said = watch.said()
    assert [line for line in said if "error[" in line] == [line for line in said if "sysctl-not-applied" in line]
    assert len([line for line in said if "sysctl-not-applied" in line]) == 1
    assert len([line for line in said if line.startswith("stratum: warning: kernel.panic is 3")]) == 1
    assert all("kernel.panic is 3 and must be 10" in status for status in found)
    kubernetes.clock += 3600
    kubernetes.stuck.clear()
    watch.look()
    assert kubernetes.sysctl("kernel/panic") == "10", "an hour later it is tried again"


def test_what_comes_back_again_and_again_is_put_right_three_times_an_hour(kubernetes: NodeHost) -> None:
    watch = at_rest(kubernetes)
    for _ in range(10):
        control(kubernetes, "kernel/panic", "3")
        status = watch.look()
        kubernetes.clock += 15
    said = watch.said()
    assert len([line for line in said if line.endswith("kernel.panic is 3 and must be 10: put right")]) == 3
    (left,) = [line for line in said if not line.endswith(": put right")]
    assert "find out who changed it" in left
    assert status == "version 1.0.0; kernel.panic is 3 and must be 10"


def test_nothing_is_said_or_put_right_while_another_run_is_at_work(kubernetes: NodeHost) -> None:
    watch = at_rest(kubernetes)
    kubernetes.switch_on("/dev/sda7")
    with hold_lock(kubernetes, "uninstall"):
        info = os.stat(kubernetes.real("/run/stratum/lock"))
        name = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
        locks = f"1: FLOCK  ADVISORY  WRITE 7 {name} 0 EOF"
        for text in (locks, ""):  # seen in the kernel's list; taken between that look and ours
            Path(kubernetes.root, "proc/locks").write_text(text)
            assert watch.look().startswith("version 1.0.0; swap is on: /dev/sda7")
        assert (watch.said(), set(kubernetes.on)) == ([], {"/dev/sda7"})
    watch.look()
    assert kubernetes.on == {}


def test_an_address_that_is_gone_is_said_once_and_no_other_is_taken(kubernetes: NodeHost) -> None:
    watch = at_rest(kubernetes)
    kubernetes.addresses = {"eth0": ["192.0.2.77/24"]}
    kubernetes.commands.clear()
    found = []
    for _ in range(10):
        kubernetes.clock += 15
        found.append(watch.look())
    words = "this node was brought up as 192.0.2.10, and 192.0.2.10 is not on this host any more; it has 192.0.2.77"
    assert found[-1].startswith(f"version 1.0.0; {words}")
    (line,) = watch.said()
    assert words in line and "--node-ip" in line
    assert read_settings(kubernetes).node_ip == "192.0.2.10"
    assert kubernetes.commands == []
    kubernetes.addresses = {"eth0": ["192.0.2.10/24"]}
    kubernetes.clock += 60
    assert watch.look() == "version 1.0.0 is running"


# -- the firewall ---------------------------------------------------------------------------------------


def changed(host: MachineHost) -> None:
    """Somebody changed rules, some time after the last look."""
    host.generation += 1
    host.clock += 60


def test_our_rule_is_made_again_when_somebody_cleared_the_firewall(node: LivingHost) -> None:
    watch = at_rest(node)
    node.chains.clear()
    changed(node)
    status = watch.look()
    assert "10.215.0.0/16" in str(node.chains["STRATUM-POSTROUTING"])
    assert len(watch.said()) == 1 and status.endswith(": put right")
    node.clock += 60
    assert watch.look() == "version 1.0.0 is running"


def test_rules_that_change_all_the_time_are_looked_at_now_and_then(node: LivingHost) -> None:
    watch = at_rest(node)
    for _ in range(40):
        node.generation += 1
        node.clock += 15
        watch.look()
    assert 15 <= len([line for line in node.commands if line.endswith("--list-rules STRATUM-POSTROUTING")]) <= 21


def test_where_the_kernel_does_not_say_that_rules_changed_they_are_looked_at_every_five_minutes(
    node: LivingHost,
) -> None:
    Path(node.root, "proc/modules").write_text("ip_tables 1 0 - Live 0x0\n")  # and no nf_tables
    watch = at_rest(node)
    for _ in range(41):
        node.clock += 15
        watch.look()
    assert len([line for line in node.commands if line.endswith("--list-rules STRATUM-POSTROUTING")]) == 2


def test_a_binding_that_firewalld_lost_is_made_again(kubernetes: NodeHost) -> None:
    kubernetes.install()
    kubernetes.runtime = {}
    changed(kubernetes)
    context = Context(kubernetes, Output(stdout=io.StringIO(), stderr=io.StringIO()), None, None)
    supervise.bring_up(context, Stack(Layout(kubernetes)))
    assert kubernetes.runtime == {"stratum0": "trusted"}
    watch = at_rest(kubernetes)
    kubernetes.runtime = {}
    changed(kubernetes)
    status = watch.look()
    assert kubernetes.runtime == {"stratum0": "trusted"}
    (line,) = watch.said()
    assert "stratum0 in firewalld's zone trusted (runtime), which was lost: put right" in line
    assert line.endswith(status.partition("; ")[2])


def test_an_admins_other_zone_for_our_bridge_is_said_once_and_left(kubernetes: NodeHost) -> None:
    watch = at_rest(kubernetes)
    kubernetes.install()
    kubernetes.runtime = {"stratum0": "public"}
    Path(kubernetes.root, "etc/firewalld/zones/trusted.xml").write_text(
        '<zone target="ACCEPT">\n<interface name="stratum0"/>\n</zone>\n'
    )
    for _ in range(4):
        changed(kubernetes)
        status = watch.look()
    assert "stratum0 is in zone public (runtime)" in status
    assert len(watch.said()) == 1
    assert kubernetes.runtime == {"stratum0": "public"}


def attach(host: MachineHost, container: str, **capabilities: object) -> None:
    """libcni's record of a container in our network."""
    configuration = {"cniVersion": "1.0.0", "name": "stratum", "plugins": [{"type": "bridge"}]}
    value = {
        "kind": "cniCacheV1",
        "containerId": container,
        "config": base64.b64encode(json.dumps(configuration).encode()).decode(),
        "ifName": "eth0",
        "networkName": "stratum",
        "capabilityArgs": capabilities,
    }
    path = Path(host.root, f"var/lib/cni/results/stratum-{container}-eth0")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_published_ports_that_a_reload_of_firewalld_killed_are_said_with_their_containers(node: LivingHost) -> None:
    attach(node, "web", portMappings=[{"hostPort": 80, "containerPort": 80, "protocol": "tcp"}])
    attach(node, "database")
    node.chains["CNI-HOSTPORT-DNAT"] = []
    watch = at_rest(node)
    del node.chains["CNI-HOSTPORT-DNAT"]
    changed(node)
    status = watch.look()
    words = "published ports are dead, their rules were taken out of the firewall: container web"
    assert status == f"version 1.0.0; {words}"
    (line,) = watch.said()
    assert f"{words}; stop, delete and start it again" in line and "database" not in line
    changed(node)
    assert (watch.look(), watch.said()) == (status, [])
    node.chains["CNI-HOSTPORT-DNAT"] = []  # as the plugin does when the container is started again
    changed(node)
    assert watch.look() == "version 1.0.0 is running"


def test_without_published_ports_nobody_misses_their_rules(node: LivingHost) -> None:
    attach(node, "web", portMappings=[])
    watch = at_rest(node)
    changed(node)
    assert watch.look() == "version 1.0.0 is running"


# -- errors ---------------------------------------------------------------------------------------------


def test_settings_that_cannot_be_read_are_an_error_once(node: LivingHost) -> None:
    watch = at_rest(node)
    Path(node.root, "var/lib/stratum/settings.json").write_text("{")
    found = {watch.look() for _ in range(3)}
    assert len(found) == 1 and "not settings that this version reads" in found.pop()
    assert len([line for line in watch.said() if "error[settings-unreadable]" in line]) == 1


def test_a_node_whose_version_went_away_says_what_to_do(node: LivingHost) -> None:
    watch = at_rest(node)
    Path(node.root, "opt/stratum/node/current").unlink()
    watch.look()
    assert [line for line in watch.said() if "no version is active; run: stratum up --bundle FILE" in line]


# -- the watchdog ---------------------------------------------------------------------------------------


@dataclass
class Manager:
    """A stand-in for systemd's end of the notification socket."""

    server: socket.socket

    def heard(self) -> list[str]:
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found.append(self.server.recv(4096).decode())
        return found


@pytest.fixture
def manager(memory: Path) -> Iterator[Manager]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(memory / "notify"))
        server.setblocking(False)
        yield Manager(server)


def test_a_bring_up_has_all_the_time_that_it_needs(node: LivingHost, manager: Manager, memory: Path) -> None:
    node.environ = {"NOTIFY_SOCKET": str(memory / "notify")}
    watch = post(node, Watchdog(node, 3_000_000))
    watch.look()
    node.die(CONTAINERD)
    manager.heard()
    node.hooks[f"systemctl start {CONTAINERD}"] = lambda: heard.extend(manager.heard())
    heard: list[str] = []
    watch.look()
    assert heard == ["WATCHDOG=1\nWATCHDOG_USEC=7200000000"]
    assert manager.heard() == ["WATCHDOG=1\nWATCHDOG_USEC=3000000"]


class Stop(Exception):
    """The end of a supervisor that a test runs."""


def test_the_supervisor_is_ready_when_the_node_is_up_and_then_speaks_often_enough(
    node: LivingHost, manager: Manager, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.environ = {"NOTIFY_SOCKET": str(memory / "notify"), "WATCHDOG_USEC": "6000000"}
    node.die(CONTAINERD)
    waits: list[float] = []
    said: list[str] = []

    def sleep(seconds: float) -> None:
        said.extend(manager.heard())  # the queue of a socket is short
        if any(line.startswith("READY=1") for line in said):
            waits.append(seconds)
        if len(waits) == 3:
            raise Stop

    monkeypatch.setattr(node, "sleep", sleep)
    with pytest.raises(Stop):
        supervise.run(Context(node, Output(stdout=io.StringIO(), stderr=io.StringIO()), None, None))
    ready = said.index("READY=1\nSTATUS=version 1.0.0 is running")
    assert said[0] == "STATUS=starting the node"
    assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in said[:ready])
    assert said[ready + 1 :].count("WATCHDOG=1") == 3
    assert said[-1] == "WATCHDOG=1"
    assert waits == [3.0] * 3, "twice in the time that systemd waits"
    assert node.active(CONTAINERD)
