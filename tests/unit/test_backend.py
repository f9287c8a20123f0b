"""The backend's operations, each in the order of its contract, with every step of them failing in turn."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import pytest

from stratum.errors import BundleNotFoundError, ExitCode, StratumError
from stratum.journal import Journal
from stratum.node import cni
from stratum.node.backend import Backend, Hooks, UpgradeError
from stratum.node.containerd import ADDRESS
from stratum.node.layout import Layout, VersionActiveError
from stratum.node.units import (
    SYSTEMD_DIR,
    UNIT_CONTAINERD,
    UNIT_KUBELET,
    UNIT_KUBELET_LAUNCH_CHECK,
    UNIT_LOCALDNS,
    UNIT_LOCALDNS_NETWORK,
    UnitSpec,
    render_units,
    stack_units,
)
from stratum.receipt import Receipt
from stratum.steps import Work
from stratum.system import HostPath
from tests.fakes import Killed, Unit, make_tree
from tests.faults import FaultyMachine

BASE = HostPath("/opt/stratum/node")
SHORT = {UNIT_LOCALDNS: "dns", UNIT_CONTAINERD: "containerd", UNIT_KUBELET: "kubelet"}
SHIM, CONTAINER = 4242, 4243


@dataclass
class Story(FaultyMachine):
    """A machine that tells what happens to its units, link, unit files and processes, in order."""

    told: list[str] = field(default_factory=list)

    def mutation(self, what: str) -> None:
        super().mutation(what)
        verb, *words = what.split()
        if verb == "run" and words[0] == "systemctl" and words[1] in ("start", "stop", "restart", "disable"):
            self.tell(f"{words[1]} {SHORT.get(words[-1], words[-1])}")
        elif what == "run systemctl daemon-reload":
            self.tell("reload")
        elif verb == "rename" and words[1] == f"{BASE}/current":
            self.tell(f"link {self.readlink(words[0])}")
        elif verb == "rename" and words[1].startswith(f"{SYSTEMD_DIR}/"):
            self.tell("write units")
        elif verb == "unlink" and words[0].startswith(f"{SYSTEMD_DIR}/") and not words[0].endswith(".tmp"):
            self.tell("remove units")
        elif verb in ("kill", "control"):
            self.tell("end pods")

    def tell(self, what: str) -> None:
        if self.told[-1:] != [what]:
            self.told.append(what)

    def take(self) -> list[str]:
        told, self.told = self.told, []
        return told


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Story]:
    (tmp_path / "graveyard").mkdir()
    root = make_tree(tmp_path / "root", live=True)
    machine = Story(str(root), environ={}, graveyard=tmp_path / "graveyard")
    yield machine
    machine.close()


def spec(**more: Any) -> UnitSpec:
    values = {"kubelet": True, "localdns": f"{BASE}/current/libexec/localdns", **more}
    return UnitSpec(BASE / "current/bin", **values)


@dataclass
class Node:
    """A backend with a hook at every place, each telling the machine's story."""

    machine: Story
    faults: dict[str, BaseException] = field(default_factory=dict)

    def hook(self, name: str) -> Callable[..., None]:
        def call(*words: str) -> None:
            self.machine.tell(" ".join([name, *words]))
            if name in self.faults:
                raise self.faults[name]

        return call

    def backend(self, **changes: Any) -> Backend:
        gates = {unit: self.hook(f"gate {name}") for unit, name in SHORT.items()}
        again = {unit: self.hook(f"gate again {name}") for unit, name in SHORT.items()}
        hooks = Hooks(
            install=self.hook("install"),
            before_start=self.hook("before start"),
            after_start=gates,
            after_restart=again,
            before_upgrade_start=self.hook("configure new"),
            before_rollback_start=self.hook("configure old"),
        )
        work = Work(self.machine, Receipt.load(self.machine), Journal(self.machine))
        return Backend(work, Layout(self.machine), **{"spec": spec(), "hooks": hooks, **changes})

    def ready(self) -> None:
        self.hook("ready")()

    def place(self, version: str, program: bytes = b"works") -> None:
        """The programs of a version, as an install hook would place them."""
        directory = Path(self.machine.root, str(BASE / version)[1:])
        for name in ("bin/containerd", "bin/kubelet", "libexec/localdns"):
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(version.encode() + b" " + program)
            path.chmod(0o755)

    def run_version(self, version: str, **changes: Any) -> Backend:
        """A node that runs ``version``, with a container, and whose story starts now."""
        self.machine.makedirs("/var/lib/stratum")
        self.place(version)
        backend = self.backend(**changes)
        backend.prepare(version)
        backend.activate(version)
        backend.start()
        self.add_pods()
        self.machine.take()
        return backend

    def add_pods(self) -> None:
        unit = f"/system.slice/{UNIT_CONTAINERD}"
        self.process(SHIM, ["/x/containerd-shim-runc-v2", "-address", str(ADDRESS)], 1, unit)
        self.process(CONTAINER, ["sleep", "infinity"], SHIM, "/default/one")
        self.process(77, ["/x/containerd-shim-runc-v2", "-address", "/run/containerd/containerd.sock"], 1, "/docker")
        self.process(78, ["postgres"], 77, "/docker/db")
        for group in ("default/one", "docker/db"):
            place = Path(self.machine.root, "sys/fs/cgroup", group)
            place.mkdir(parents=True, exist_ok=True)
            place.joinpath("cgroup.kill").write_text("")

    def process(self, pid: int, argv: list[str], parent: int, group: str) -> None:
        place = Path(self.machine.root, "proc", str(pid))
        place.mkdir(parents=True, exist_ok=True)
        place.joinpath("stat").write_text(f"{pid} (x y) S {parent} " + "0 " * 17 + f"{pid} 0\n")
        place.joinpath("cmdline").write_bytes(b"\0".join(word.encode() for word in argv) + b"\0")
        place.joinpath("cgroup").write_text(f"0::{group}\n")

    def pods(self) -> set[str]:
        return {name for name in self.machine.listdir("/proc") if name.isdigit()}

    def runs(self) -> dict[str, str]:
        """The version of each unit that is active, from the program that it was started with."""
        found = {}
        for unit, name in SHORT.items():
            if self.machine.active(unit):
                found[name] = self.machine.running[unit][0].split()[0].decode()
        return found


@pytest.fixture
def node(machine: Story) -> Node:
    return Node(machine)


EVERYTHING = {"dns": "1.0", "containerd": "1.0", "kubelet": "1.0"}
STOPS = ["stop kubelet", "stop containerd", "stop dns"]
STARTS = ["before start"] + [
    f"{verb} {name}" for name in ("dns", "containerd", "kubelet") for verb in ("start", "gate")
]
BOOM = StratumError("boom", "it went wrong", hint="think")


def fails(line: str) -> Callable[[Node], None]:
    def prepare(node: Node) -> None:
        node.machine.failing[line] = 1

    return prepare


def raises(name: str) -> Callable[[Node], None]:
    def prepare(node: Node) -> None:
        node.faults[name] = BOOM

    return prepare


# -- preparing ------------------------------------------------------------------------------------------


def test_preparing_makes_the_version_then_installs_then_writes_the_units_and_leaves_the_link(node: Node) -> None:
    machine = node.machine
    machine.makedirs("/var/lib/stratum")

    def install(version: str) -> None:
        machine.tell(f"install {version}")
        assert machine.is_dir(BASE / version / "bin")
        assert not machine.exists(SYSTEMD_DIR / UNIT_CONTAINERD)

    backend = node.backend(hooks=Hooks(install=install))
    assert backend.prepare("1.0") == BASE / "1.0"
    assert machine.take() == ["install 1.0", "write units", "reload"]
    assert not machine.lexists(BASE / "current")
    for unit in render_units(spec()):
        assert machine.read_bytes(unit.path) == unit.content
        assert backend.work.receipt.owns(unit.path)


def test_preparing_again_writes_nothing_and_reloads_nothing(node: Node) -> None:
    backend = node.run_version("1.0")
    backend.prepare("1.0")
    assert node.machine.take() == ["install 1.0"]


def test_only_the_unit_files_that_differ_are_written(node: Node) -> None:
    backend = node.run_version("1.0")
    node.machine.mutations.clear()
    dataclasses.replace(backend, spec=spec(kubelet_config=HostPath("/etc/other.yaml"))).prepare("1.0")
    written = {what.split()[2] for what in node.machine.mutations if what.startswith("rename")}
    assert {path for path in written if path.startswith(str(SYSTEMD_DIR))} == {str(SYSTEMD_DIR / UNIT_KUBELET)}


def test_a_unit_file_is_never_half_written(node: Node) -> None:
    machine = node.machine
    machine.makedirs("/var/lib/stratum")
    backend = node.backend()
    whole = {str(unit.path): unit.content for unit in render_units(spec())}
    for number in range(200):
        machine.arm(number)
        try:
            backend.prepare("1.0")
        except Killed:
            pass
        for path, content in whole.items():
            assert not machine.exists(path) or machine.read_bytes(path) == content
        if not machine.dead:
            break
        machine.revive()
        for path in whole:
            if machine.lexists(path):
                machine.unlink(path)
    else:
        raise AssertionError("it never came to an end")
    assert number > 20


def test_an_installation_that_fails_leaves_units_and_link_alone(node: Node) -> None:
    node.run_version("1.0")
    node.faults["install"] = BOOM
    with pytest.raises(StratumError, match="it went wrong"):
        node.backend(spec=spec(localdns="")).prepare("2.0")
    assert node.machine.take() == ["install 2.0"]
    assert Layout(node.machine).current() == "1.0"


def test_preparing_a_version_touches_no_unit_of_a_running_node(node: Node) -> None:
    node.run_version("1.0")
    before = node.runs()
    backend = node.backend(spec=spec(localdns="", kubelet=False))
    assert backend.prepare_version("2.0") == BASE / "2.0"
    assert node.machine.take() == ["install 2.0"]
    assert node.runs() == before == EVERYTHING
    assert Layout(node.machine).current() == "1.0"


def test_a_localdns_that_is_no_longer_configured_is_stopped_before_its_file_goes(node: Node) -> None:
    node.run_version("1.0")
    backend = node.backend(spec=spec(localdns=""))
    backend.prepare("1.0")
    told = node.machine.take()
    assert told == ["install 1.0", "stop dns", "remove units", "reload"]
    left = [name for name in node.machine.listdir(SYSTEMD_DIR) if "localdns" in name]
    assert left == []
    assert node.machine.listdir(SYSTEMD_DIR / f"{UNIT_KUBELET}.d") == ["10-path.conf"]


def test_a_drop_in_of_the_users_is_kept_whatever_is_written(node: Node) -> None:
    theirs = SYSTEMD_DIR / f"{UNIT_LOCALDNS}.d" / "50-mine.conf"
    backend = node.run_version("1.0")
    with node.machine.open_new(theirs, 0o644) as file:
        file.write(b"[Service]\nNice=1\n")
    dataclasses.replace(backend, spec=spec(localdns="")).prepare("1.0")
    assert node.machine.read_bytes(theirs) == b"[Service]\nNice=1\n"
    backend.destroy()
    assert node.machine.exists(theirs)


def test_a_grant_of_gpus_demands_their_tools_before_anything_is_made(node: Node) -> None:
    tools = (HostPath("/usr/bin/nvidia-ctk"), HostPath("/usr/bin/systemctl"))
    with pytest.raises(StratumError, match="/usr/bin/nvidia-ctk: needed") as caught:
        node.backend(gpu=True, gpu_host_paths=tools).prepare("1.0")
    assert caught.value.reference == "gpu-tools-missing"
    assert not node.machine.exists(BASE)
    node.backend(gpu=False, gpu_host_paths=tools).prepare_version("1.0")
    node.backend(gpu=True, gpu_host_paths=tools[1:]).prepare_version("1.0")
    node.backend(gpu=True).prepare_version("1.0")


def test_nothing_is_written_below_usr(node: Node) -> None:
    node.place("2.0")
    node.run_version("1.0").upgrade("2.0", node.ready)
    assert [what for what in node.machine.mutations if " /usr" in what and not what.startswith("run")] == []


# -- activating -----------------------------------------------------------------------------------------


def test_activating_returns_the_version_that_was_replaced_and_runs_no_command(node: Node) -> None:
    node.place("1.0")
    node.place("2.0")
    node.machine.makedirs("/var/lib/stratum")
    backend = node.backend()
    assert backend.activate("1.0") is None
    assert backend.activate("2.0") == "1.0"
    assert backend.activate("2.0") == "2.0"
    assert node.machine.commands == []
    assert backend.work.receipt.owns(BASE / "current")


def test_a_version_that_is_not_installed_cannot_be_activated(node: Node) -> None:
    backend = node.run_version("1.0")
    with pytest.raises(BundleNotFoundError, match=r"2\.0: not installed"):
        backend.activate("2.0")
    assert Layout(node.machine).current() == "1.0"


def test_the_active_version_is_refused_by_remove_with_an_error_of_its_own(node: Node) -> None:
    node.run_version("1.0")
    with pytest.raises(VersionActiveError):
        Layout(node.machine).remove("1.0")


# -- starting and stopping ------------------------------------------------------------------------------


def stopped(node: Node) -> Backend:
    backend = node.run_version("1.0")
    backend.stop()
    node.machine.take()
    return backend


def test_starting_goes_in_order_and_through_each_gate_before_the_next_unit(node: Node) -> None:
    backend = stopped(node)
    backend.start()
    assert node.machine.take() == STARTS
    assert node.runs() == EVERYTHING


def test_a_failure_before_the_start_touches_no_unit(node: Node) -> None:
    backend = stopped(node)
    node.faults["before start"] = BOOM
    for operation in (backend.start, backend.restart):
        with pytest.raises(StratumError, match="it went wrong"):
            operation()
    assert node.machine.take() == ["before start"]


@pytest.mark.parametrize("name", ["dns", "containerd", "kubelet"])
def test_a_gate_that_fails_stops_the_start_there(node: Node, name: str) -> None:
    backend = stopped(node)
    node.faults[f"gate {name}"] = BOOM
    with pytest.raises(StratumError, match="it went wrong"):
        backend.start()
    assert node.machine.take() == STARTS[: STARTS.index(f"gate {name}") + 1]


@pytest.mark.parametrize("unit", list(SHORT))
def test_a_unit_that_does_not_start_is_named_with_its_last_words_and_ends_the_start(node: Node, unit: str) -> None:
    backend = stopped(node)
    node.machine.failing[f"systemctl start {unit}"] = 1
    node.machine.journals[unit] = ["reading the configuration", "line 7: nonsense"]
    with pytest.raises(StratumError, match="line 7: nonsense") as caught:
        backend.start()
    assert unit in caught.value.message
    assert caught.value.hint == f"read all of it: journalctl --boot --unit {unit}"
    assert node.machine.take() == STARTS[: STARTS.index(f"start {SHORT[unit]}") + 1]


def test_a_unit_that_hit_its_start_limit_is_given_another_try(node: Node) -> None:
    backend = stopped(node)
    node.machine.commands.clear()
    backend.start()
    lines = node.machine.commands
    for unit in SHORT:
        assert lines.index(f"systemctl reset-failed {unit}") < lines.index(f"systemctl start {unit}")


def test_stopping_goes_in_reverse_order_and_leaves_the_containers(node: Node) -> None:
    node.run_version("1.0").stop()
    assert node.machine.take() == STOPS
    assert node.runs() == {}
    assert node.pods() == {str(SHIM), str(CONTAINER), "77", "78"}


def test_stopping_tries_every_unit_and_hides_no_error(node: Node) -> None:
    backend = node.run_version("1.0")
    node.machine.failing |= {f"systemctl stop {UNIT_KUBELET}": 1, f"systemctl stop {UNIT_LOCALDNS}": 1}
    with pytest.raises(StratumError) as caught:
        backend.stop()
    assert node.machine.take() == STOPS
    assert UNIT_KUBELET in caught.value.message
    assert UNIT_LOCALDNS in caught.value.message
    assert not node.machine.active(UNIT_CONTAINERD)


@pytest.mark.parametrize(
    ("active", "end"), [("activating", None), ("inactive", "unit-failed"), ("failed", "unit-failed")]
)
def test_a_kubelet_whose_launch_check_goes_on_trying_is_waited_for_and_any_other_failure_ends_the_start(
    node: Node, active: str, end: str | None
) -> None:
    backend = stopped(node)
    node.machine.units[UNIT_KUBELET_LAUNCH_CHECK] = Unit(active)
    node.machine.failing = {f"systemctl start {UNIT_KUBELET}": 1}
    if end is None:
        backend.start()
        assert node.machine.take()[-2:] == ["start kubelet", "gate kubelet"]
    else:
        with pytest.raises(StratumError) as caught:
            backend.start()
        assert (caught.value.reference, node.machine.take()[-1]) == (end, "start kubelet")


def test_a_start_that_fails_and_has_no_gate_is_never_taken_for_a_good_one(node: Node) -> None:
    stopped(node)
    node.machine.units[UNIT_KUBELET_LAUNCH_CHECK] = Unit("activating")
    node.machine.failing = {f"systemctl start {UNIT_KUBELET}": 1}
    with pytest.raises(StratumError, match="did not start"):
        node.backend(hooks=Hooks()).start()


def test_restarting_goes_in_start_order_through_gates_of_its_own_and_leaves_the_containers(node: Node) -> None:
    backend = node.run_version("1.0")
    node.machine.commands.clear()
    backend.restart()
    assert {line.split()[1] for line in node.machine.commands} == {"reset-failed", "restart"}  # no reboot, no stop
    words = [f"{verb} {name}" for name in ("dns", "containerd", "kubelet") for verb in ("restart", "gate again")]
    assert node.machine.take() == ["before start", *words]
    assert node.pods() == {str(SHIM), str(CONTAINER), "77", "78"}


def test_what_systemd_restarts_along_with_localdns_is_waited_for(node: Node) -> None:
    backend = node.run_version("1.0")
    for action in backend.plan_bring_up([], [UNIT_LOCALDNS]):
        action.perform(backend.work)
    waits = ["gate again containerd", "gate again kubelet"]
    assert node.machine.take() == ["before start", "restart dns", "gate again dns", *waits]


@pytest.mark.parametrize("name", ["dns", "containerd", "kubelet"])
def test_a_gate_that_fails_stops_the_restart_there(node: Node, name: str) -> None:
    backend = node.run_version("1.0")
    node.faults[f"gate again {name}"] = BOOM
    with pytest.raises(StratumError, match="it went wrong"):
        backend.restart()
    assert node.machine.take()[-1] == f"gate again {name}"


@pytest.mark.parametrize("unit", list(SHORT))
def test_the_node_runs_only_when_every_unit_is_active(node: Node, unit: str) -> None:
    backend = node.run_version("1.0")
    assert backend.status() is True
    node.machine.units[unit].active = "failed"
    assert backend.status() is False


def test_units_that_run_are_left_alone_by_a_start_of_what_does_not(node: Node) -> None:
    backend = node.run_version("1.0")
    node.machine.units[UNIT_KUBELET].active = "failed"
    for action in backend.start_steps()[0].plan():
        action.perform(backend.work)
    assert node.machine.take() == ["before start", "start kubelet", "gate kubelet"]


# -- upgrading ------------------------------------------------------------------------------------------


def upgrading(node: Node, program: bytes = b"works", **changes: Any) -> Backend:
    """Version 1.0 runs, and 2.0 is prepared with another configuration of the kubelet."""
    node.run_version("1.0")
    node.place("2.0", program)
    wanted = spec(kubelet_config=HostPath("/etc/new.yaml"))
    return node.backend(**{"spec": wanted, "rollback_spec": spec(), **changes})


SWITCH = [*STOPS, "end pods", "link 2.0", "write units", "reload", "configure new", *STARTS, "ready"]
BACK = [*STOPS, "end pods", "link 1.0", "write units", "reload", "configure old", *STARTS]


def test_an_upgrade_goes_in_the_contracts_order(node: Node) -> None:
    upgrading(node).upgrade("2.0", node.ready)
    assert node.machine.take() == SWITCH
    assert node.runs() == dict.fromkeys(EVERYTHING, "2.0")
    assert Layout(node.machine).current() == "2.0"
    assert b"/etc/new.yaml" in node.machine.read_bytes(SYSTEMD_DIR / UNIT_KUBELET)


def test_an_upgrade_ends_our_containers_and_nobody_elses(node: Node) -> None:
    upgrading(node).upgrade("2.0", node.ready)
    assert node.pods() == {"77", "78"}
    assert node.machine.read_bytes("/sys/fs/cgroup/default/one/cgroup.kill") == b"1"
    assert node.machine.read_bytes("/sys/fs/cgroup/docker/db/cgroup.kill") == b""


def test_each_step_of_an_upgrade_is_in_the_journal_before_it_starts(node: Node) -> None:
    backend = upgrading(node)
    backend.work.journal.begin("upgrade", source="1.0", target="2.0")
    seen = []

    def look(step: Any, _: Any) -> None:
        seen.append(step.name)
        operation = Journal(node.machine).unfinished()
        assert operation is not None
        assert (operation.step, operation.source, operation.target) == (step.name, "1.0", "2.0")

    backend.upgrade("2.0", node.ready, on_step=look)
    assert seen == ["stop", "end-pods", "activate", "units", "configure", "start", "ready"]


FAULTS: dict[str, tuple[Callable[[Node], None], str]] = {
    "the units' files": (lambda node: node.machine.failing.update({"systemctl daemon-reload": 1}), "reload"),
    "the new configuration": (raises("configure new"), "configure new"),
    "what is before the start": (raises("before start"), "before start"),
    "the start of dns": (fails(f"systemctl start {UNIT_LOCALDNS}"), "start dns"),
    "the gate of dns": (raises("gate dns"), "gate dns"),
    "the start of containerd": (fails(f"systemctl start {UNIT_CONTAINERD}"), "start containerd"),
    "the gate of containerd": (raises("gate containerd"), "gate containerd"),
    "the start of kubelet": (fails(f"systemctl start {UNIT_KUBELET}"), "start kubelet"),
    "the gate of kubelet": (raises("gate kubelet"), "gate kubelet"),
    "the last look": (raises("ready"), "ready"),
}


def only_once(node: Node) -> None:
    """A hook that fails in the new version works in the old one."""
    plain = Node.hook

    def hook(self: Node, name: str) -> Callable[..., None]:
        call = plain(self, name)

        def once(*words: str) -> None:
            try:
                call(*words)
            finally:
                self.faults.pop(name, None)

        return once

    node.hook = hook.__get__(node)  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_failure_past_the_flip_brings_the_old_version_back(node: Node, fault: str) -> None:
    prepare, last = FAULTS[fault]
    only_once(node)
    backend = upgrading(node)
    prepare(node)
    with pytest.raises(UpgradeError) as caught:
        backend.upgrade("2.0", node.ready)
    told = node.machine.take()
    # The containers ended with the old version; no new ones were started.
    assert told == SWITCH[: SWITCH.index(last) + 1] + [item for item in BACK if item != "end pods"]
    assert caught.value.exit_code == ExitCode.ROLLED_BACK
    assert caught.value.rolled_back
    assert caught.value.state == "version 1.0 runs again"
    assert node.runs() == EVERYTHING
    assert Layout(node.machine).current() == "1.0"
    assert b"/etc/new.yaml" not in node.machine.read_bytes(SYSTEMD_DIR / UNIT_KUBELET)


def test_going_back_ends_the_containers_that_the_new_version_started(node: Node) -> None:
    backend = upgrading(node)

    def ready() -> None:
        node.add_pods()
        raise BOOM

    with pytest.raises(UpgradeError):
        backend.upgrade("2.0", ready)
    told = node.machine.take()
    assert told[len(SWITCH) - 1 :] == BACK
    assert node.pods() == {"77", "78"}


@pytest.mark.parametrize(
    ("fault", "last"),
    [
        (fails(f"systemctl stop {UNIT_KUBELET}"), STOPS),
        (fails(f"systemctl stop {UNIT_LOCALDNS}"), STOPS),
        (
            lambda node: (node.machine.unlink("/sys/fs/cgroup/default/one/cgroup.kill"), stuck(node)),
            [*STOPS, "end pods"],
        ),
        (lambda node: remove_version(node, "2.0"), [*STOPS, "end pods"]),
    ],
    ids=["the stop of the first unit", "the stop of the last unit", "the end of the pods", "the activation"],
)
def test_a_failure_before_the_flip_starts_the_old_version_again_without_one(
    node: Node, fault: Callable[[Node], object], last: list[str]
) -> None:
    backend = upgrading(node)
    fault(node)
    with pytest.raises(UpgradeError) as caught:
        backend.upgrade("2.0", node.ready)
    assert caught.value.exit_code == ExitCode.ROLLED_BACK
    assert node.machine.take() == [*last, "configure old", *STARTS]
    assert node.runs() == EVERYTHING
    assert Layout(node.machine).current() == "1.0"


def stuck(node: Node) -> None:
    """A container's process that no signal ends."""
    kill = node.machine.kill

    def survive(pid: int, still_the_same: Callable[[], bool]) -> None:
        if pid != CONTAINER:
            kill(pid, still_the_same)

    node.machine.kill = survive  # type: ignore[method-assign]


def remove_version(node: Node, version: str) -> None:
    for path, _ in list(node.machine.walk(BASE / version)):
        node.machine.rmdir(path) if node.machine.is_dir(path) else node.machine.unlink(path)
    node.machine.rmdir(BASE / version)


def test_an_upgrade_says_what_failed_with_the_units_last_words(node: Node) -> None:
    backend = upgrading(node, b"refuses")
    with pytest.raises(UpgradeError) as caught:
        backend.upgrade("2.0", node.ready)
    assert f"{UNIT_LOCALDNS} says: I refuse" in caught.value.message
    assert caught.value.reference == "unit-failed"
    assert node.runs() == EVERYTHING


def test_a_failure_of_the_hook_on_the_way_back_is_reported_and_stops_nothing(node: Node) -> None:
    backend = upgrading(node)
    node.faults |= {"ready": BOOM, "configure old": StratumError("old", "the old configuration is gone")}
    with pytest.raises(UpgradeError) as caught:
        backend.upgrade("2.0", node.ready)
    assert caught.value.exit_code == ExitCode.ROLLBACK_FAILED
    assert caught.value.message == "it went wrong"
    assert "the old configuration is gone" in str(caught.value.state)
    assert node.machine.take()[-len(STARTS) :] == STARTS
    assert node.runs() == EVERYTHING


def test_whatever_a_hook_does_wrong_on_the_way_back_the_old_version_starts(node: Node) -> None:
    backend = upgrading(node)
    node.faults |= {"ready": BOOM, "configure old": KeyError("nobody thought of that")}
    with pytest.raises(UpgradeError) as caught:
        backend.upgrade("2.0", node.ready)
    assert "nobody thought of that" in str(caught.value.state)
    assert node.runs() == EVERYTHING


@pytest.mark.parametrize("signal", [KeyboardInterrupt(), Killed("SIGTERM")], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("place", ["configure new", "before start", "gate dns", "gate kubelet", "ready"])
def test_a_signal_in_a_switch_brings_the_old_version_back_and_goes_on_its_way(
    node: Node, place: str, signal: BaseException
) -> None:
    only_once(node)
    backend = upgrading(node)
    node.faults[place] = signal
    heard: list[BaseException] = []
    with pytest.raises(type(signal)):
        backend.upgrade("2.0", node.ready, on_failure=heard.append)
    assert heard == [signal]
    assert node.runs() == EVERYTHING
    assert Layout(node.machine).current() == "1.0"


def test_a_version_that_never_ran_before_has_nothing_to_go_back_to(node: Node) -> None:
    node.machine.makedirs("/var/lib/stratum")
    node.place("1.0")
    backend = node.backend()
    backend.prepare("1.0")
    node.faults["ready"] = BOOM
    with pytest.raises(StratumError, match="it went wrong") as caught:
        backend.upgrade("1.0", node.ready)
    assert not isinstance(caught.value, UpgradeError)


def test_a_unit_that_only_the_old_version_has_is_stopped_and_comes_back_with_it(node: Node) -> None:
    only_once(node)
    backend = upgrading(node, spec=spec(localdns=""))
    node.faults["ready"] = BOOM
    with pytest.raises(UpgradeError):
        backend.upgrade("2.0", node.ready)
    told = node.machine.take()
    assert told[:3] == STOPS
    assert "start dns" not in told[: told.index("ready")]
    assert told[-len(STARTS) :] == STARTS
    assert node.runs() == EVERYTHING
    backend.upgrade("2.0", node.ready)
    assert node.runs() == {"containerd": "2.0", "kubelet": "2.0"}
    assert not node.machine.exists(SYSTEMD_DIR / UNIT_LOCALDNS)


def test_a_unit_that_only_the_new_version_has_is_no_trouble_for_the_stop(node: Node) -> None:
    node.run_version("1.0", spec=spec(localdns="", kubelet=False))
    node.place("2.0")
    node.backend(rollback_spec=spec(localdns="", kubelet=False)).upgrade("2.0", node.ready)
    assert node.machine.take()[0] == "stop containerd"
    assert node.runs() == dict.fromkeys(EVERYTHING, "2.0")


def test_a_unit_whose_file_somebody_deleted_does_not_run_on_through_a_switch(node: Node) -> None:
    backend = upgrading(node)
    Path(node.machine.root, str(SYSTEMD_DIR)[1:], UNIT_KUBELET).unlink()
    node.machine.run(["systemctl", "daemon-reload"], timeout=1)
    node.machine.take()
    backend.upgrade("2.0", node.ready)
    assert node.machine.take()[:3] == STOPS
    assert node.runs() == dict.fromkeys(EVERYTHING, "2.0")


def test_without_a_specification_to_go_back_to_the_unit_files_stay_as_they_are(node: Node) -> None:
    backend = upgrading(node, spec=spec(), rollback_spec=None)
    node.machine.failing[f"systemctl start {UNIT_KUBELET}"] = 1
    with pytest.raises(UpgradeError):
        backend.upgrade("2.0", node.ready)
    assert "write units" not in node.machine.take()
    assert node.runs() == EVERYTHING


def test_a_disk_that_is_full_by_now_does_not_keep_the_old_version_down(node: Node) -> None:
    backend = upgrading(node, spec=spec(), rollback_spec=None)
    backend.work.journal.begin("upgrade", source="1.0", target="2.0")

    def full(path: object, mode: int) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def ready() -> None:
        node.machine.open_new = full  # type: ignore[method-assign]
        raise BOOM

    with pytest.raises(UpgradeError) as caught:
        backend.upgrade("2.0", ready)
    assert "journal" in str(caught.value.state)
    assert Layout(node.machine).current() == "1.0"
    assert node.runs() == EVERYTHING


# -- going back -----------------------------------------------------------------------------------------


def test_a_rollback_goes_in_the_contracts_order(node: Node) -> None:
    backend = upgrading(node)
    backend.upgrade("2.0", node.ready)
    node.add_pods()
    node.machine.take()
    backend.rollback("1.0")
    assert node.machine.take() == BACK
    assert node.runs() == EVERYTHING


def test_a_rollback_tries_every_step_and_joins_what_failed(node: Node) -> None:
    backend = upgrading(node)
    backend.upgrade("2.0", node.ready)
    node.machine.take()
    node.machine.failing |= {f"systemctl stop {UNIT_KUBELET}": 1, "systemctl daemon-reload": 1}
    node.faults["configure old"] = StratumError("old", "the old configuration is gone")
    with pytest.raises(StratumError) as caught:
        backend.rollback("1.0")
    for word in (f"systemctl stop {UNIT_KUBELET}", "systemctl daemon-reload", "the old configuration is gone"):
        assert word in caught.value.message
    assert node.machine.take() == [item for item in BACK if item != "end pods"]
    assert node.runs() == EVERYTHING


def test_a_rollback_finishes_an_upgrade_that_a_power_cut_stopped(node: Node) -> None:
    backend = upgrading(node)
    backend.activate("2.0")
    node.machine.reboot()
    node.machine.take()
    backend.rollback("1.0")
    assert node.runs() == EVERYTHING


@pytest.mark.parametrize("target", ["gone", "../elsewhere", "/somewhere/1.0"])
def test_a_rollback_mends_a_link_that_leads_nowhere(node: Node, target: str) -> None:
    backend = upgrading(node)
    node.machine.unlink(BASE / "current")
    node.machine.symlink(target, BASE / "current")
    backend.rollback("1.0")
    assert Layout(node.machine).current() == "1.0"
    assert node.runs() == EVERYTHING


def test_a_rollback_to_a_version_that_is_gone_says_so_and_still_tries_the_rest(node: Node) -> None:
    backend = upgrading(node)
    backend.upgrade("2.0", node.ready)
    remove_version(node, "1.0")
    node.machine.take()
    with pytest.raises(StratumError, match=r"1\.0: not installed"):
        backend.rollback("1.0")
    told = node.machine.take()
    assert "link 1.0" not in told
    assert told[-len(STARTS) :] == STARTS
    assert node.runs() == dict.fromkeys(EVERYTHING, "2.0")


# -- the end --------------------------------------------------------------------------------------------


def test_destroying_stops_disables_ends_the_pods_and_removes_everything_of_ours(node: Node) -> None:
    node.run_version("1.0", spec=spec(launch_check="/bin/check", gpu_setup=(("/bin/gpu",),))).destroy()
    disabled = [f"disable {name}" for name in ("kubelet", "containerd", "dns", UNIT_KUBELET_LAUNCH_CHECK)]
    told = node.machine.take()
    assert told == [*STOPS, f"stop {UNIT_KUBELET_LAUNCH_CHECK}", *disabled, "end pods", "remove units", "reload"]
    assert node.runs() == {}
    assert node.pods() == {"77", "78"}
    assert not node.machine.exists(BASE)
    assert [name for name in node.machine.listdir(SYSTEMD_DIR) if name.startswith("stratum")] == []


def test_destroying_skips_units_that_were_never_installed(node: Node) -> None:
    machine = node.machine
    machine.makedirs("/var/lib/stratum")
    backend = node.backend(spec=spec(localdns="", kubelet=False))
    backend.prepare("1.0")
    machine.take()
    backend.destroy()
    assert machine.take() == ["stop containerd", "disable containerd", "remove units", "reload"]
    assert not machine.exists(BASE)


def test_destroying_a_host_on_which_nothing_is_installed_completes(node: Node) -> None:
    node.machine.makedirs("/var/lib/stratum")
    node.backend().destroy()
    assert node.machine.take() == ["reload"]


def test_destroying_finds_units_that_the_configuration_no_longer_has(node: Node) -> None:
    node.run_version("1.0")
    node.backend(spec=spec(localdns="", kubelet=False)).destroy()
    assert node.machine.take()[:3] == STOPS
    assert not node.machine.exists(SYSTEMD_DIR / UNIT_LOCALDNS)


def test_destroying_tries_every_step_and_joins_what_failed(node: Node) -> None:
    backend = node.run_version("1.0")
    stuck(node)
    node.machine.failing |= {
        f"systemctl stop {UNIT_KUBELET}": 1,
        f"systemctl disable --quiet {UNIT_CONTAINERD}": 1,
        "systemctl daemon-reload": 1,
    }
    with pytest.raises(StratumError) as caught:
        backend.destroy()
    for word in ("systemctl stop", "systemctl disable", f"process {CONTAINER}", "daemon-reload"):
        assert word in caught.value.message
    assert not node.machine.exists(BASE)
    assert [name for name in node.machine.listdir(SYSTEMD_DIR) if name.startswith("stratum")] == []


def test_destroying_goes_on_when_systemd_does_not_say_what_is_installed(node: Node) -> None:
    backend = node.run_version("1.0")
    node.machine.failing["systemctl show"] = 1
    with pytest.raises(StratumError, match=UNIT_KUBELET_LAUNCH_CHECK):
        backend.destroy()
    assert node.runs() == {}
    assert not node.machine.exists(BASE)


def test_a_unit_that_somebody_changed_is_not_removed(node: Node) -> None:
    backend = node.run_version("1.0")
    path = Path(node.machine.root, str(SYSTEMD_DIR)[1:], UNIT_KUBELET)
    path.write_text("[Service]\nExecStart=/bin/mine\n")
    backend.destroy()
    assert path.read_text() == "[Service]\nExecStart=/bin/mine\n"


# -- CNI plugins ----------------------------------------------------------------------------------------


def with_plugins(node: Node, *names: str) -> Backend:
    backend = node.run_version("1.0")
    for name in names:
        path = Path(node.machine.root, str(BASE)[1:], "1.0/cni/bin", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return backend


def test_plugins_are_linked_through_current_so_a_flip_switches_them(node: Node) -> None:
    backend = with_plugins(node, "bridge", "host-local")
    backend.link_cni_plugins("1.0")
    assert node.machine.listdir(cni.HOST_BIN_DIR) == ["bridge", "host-local"]
    for name in ("bridge", "host-local"):
        assert node.machine.readlink(cni.HOST_BIN_DIR / name) == f"{BASE}/current/cni/bin/{name}"
    before = len(node.machine.mutations)
    backend.link_cni_plugins("1.0")
    assert len(node.machine.mutations) == before


def test_files_and_links_of_others_among_the_plugins_are_left_alone(node: Node) -> None:
    backend = with_plugins(node, "bridge", "host-local", "portmap")
    theirs = Path(node.machine.root, "opt/cni/bin")
    theirs.mkdir(parents=True)
    (theirs / "bridge").write_text("a cluster's own")
    (theirs / "host-local").symlink_to("/opt/other/host-local")
    (theirs / "unbounded").write_text("another plugin")
    (theirs / "portmap").symlink_to(f"{BASE}/0.9/cni/bin/portmap")
    backend.link_cni_plugins("1.0")
    assert (theirs / "bridge").read_text() == "a cluster's own"
    assert str((theirs / "host-local").readlink()) == "/opt/other/host-local"
    assert str((theirs / "portmap").readlink()) == f"{BASE}/current/cni/bin/portmap"
    backend.unlink_cni_plugins()
    assert sorted(path.name for path in theirs.iterdir()) == ["bridge", "host-local", "unbounded"]


def test_the_plugin_directory_goes_when_it_is_empty(node: Node) -> None:
    backend = with_plugins(node, "bridge")
    backend.link_cni_plugins("1.0")
    backend.unlink_cni_plugins()
    assert not node.machine.exists(cni.HOST_BIN_DIR)
    assert not backend.work.receipt.get(cni.HOST_BIN_DIR / "bridge")
    backend.unlink_cni_plugins()


# -- LocalDNS -------------------------------------------------------------------------------------------


def test_the_network_unit_of_localdns_is_waited_for_and_never_written(node: Node) -> None:
    node.run_version("1.0")
    unit = node.machine.read_text(SYSTEMD_DIR / UNIT_LOCALDNS).splitlines()
    for word in ("After=", "Requires="):
        assert any(line.startswith(word) and UNIT_LOCALDNS_NETWORK in line for line in unit)
    assert not node.machine.exists(SYSTEMD_DIR / UNIT_LOCALDNS_NETWORK)
    theirs = Path(node.machine.root, str(SYSTEMD_DIR)[1:], UNIT_LOCALDNS_NETWORK)
    theirs.write_text("[Service]\n")
    node.backend().destroy()
    assert theirs.exists()


def test_localdns_runs_the_supervisor_of_the_version_as_a_dynamic_user(node: Node) -> None:
    node.run_version("1.0")
    unit = node.machine.read_text(SYSTEMD_DIR / UNIT_LOCALDNS).splitlines()
    assert f"ExecStart={BASE}/current/libexec/localdns" in unit
    assert "DynamicUser=yes" in unit


# -- odds and ends --------------------------------------------------------------------------------------


def test_the_stack_is_what_the_specification_has() -> None:
    assert stack_units(spec()) == (UNIT_LOCALDNS, UNIT_CONTAINERD, UNIT_KUBELET)
    assert stack_units(spec(localdns="")) == (UNIT_CONTAINERD, UNIT_KUBELET)
    assert stack_units(spec(localdns="", kubelet=False)) == (UNIT_CONTAINERD,)


def test_a_backend_without_hooks_installs_nothing_and_waits_for_nothing(node: Node) -> None:
    node.machine.makedirs("/var/lib/stratum")
    node.place("1.0")
    backend = node.backend(hooks=Hooks())
    backend.prepare("1.0")
    backend.activate("1.0")
    backend.start()
    backend.restart()
    assert backend.status()
    assert node.machine.listdir(BASE / "1.0") == ["bin", "libexec"]


def test_directories_of_a_version_can_be_entered_by_a_dynamic_user(node: Node) -> None:
    node.backend(hooks=Hooks()).prepare_version("1.0")
    for path in (BASE, BASE / "1.0", BASE / "1.0/bin"):
        assert stat.S_IMODE(node.machine.stat(path).st_mode) == 0o755
