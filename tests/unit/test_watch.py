"""The supervisor's watch: what it looks at, what it says, and what it puts right."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stratum.errors import ExitCode
from stratum.host.notify import Watchdog
from stratum.lock import hold_lock
from stratum.node.layout import Layout
from stratum.node.stack import Stack
from stratum.output import Output
from stratum.scripts import supervise
from stratum.scripts.context import Context
from stratum.scripts.watch import Watch
from tests.bundles import Entry, Part
from tests.fakes import Desk, MachineHost, make_tree, node_publisher

CONTAINERD, SUPERVISOR = "stratum-containerd.service", "stratum.service"


@dataclass
class LivingHost(MachineHost):
    """A machine whose units have processes in its /proc."""

    pids: dict[str, int] = field(default_factory=dict)
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
        return super()._show(name).replace("MainPID=0", f"MainPID={self.pids.get(name, 0)}")


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


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    known = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in known.items():
        signal.signal(number, handler)


@pytest.fixture
def memory() -> Iterator[Path]:
    path = tempfile.mkdtemp(prefix="stratum-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    yield Path(path)
    shutil.rmtree(path)


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
