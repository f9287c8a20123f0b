"""The reboot-persistence unit (seed 004, InstallUnit and its neighbours): each call, on each kind of host."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stratum.errors import CommandError, StratumError
from stratum.host import notify as notify_module
from stratum.host import persistence
from stratum.journal import Journal
from stratum.receipt import Receipt
from stratum.steps import Work
from stratum.system import Host
from tests.bundles import snapshot
from tests.fakes import FaultHost, MachineHost, make_tree

OVERRIDE = Path(str(persistence.OVERRIDE).lstrip("/"))
WANTS = Path("etc/systemd/system/multi-user.target.wants/stratum.service")
ARGV = ["/usr/bin/python3", "-IS", "/opt/stratum/pyz/current/stratum.pyz", "up", "--supervise"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = make_tree(tmp_path / "root", live=True)
    (root / "var/lib/stratum").mkdir()
    return root


@pytest.fixture
def machine(root: Path) -> MachineHost:
    return MachineHost(str(root), {})


@pytest.fixture
def unit(root: Path, machine: MachineHost) -> MachineHost:
    """A machine with the unit installed, enabled and running."""
    work = Work(machine, Receipt.load(machine), Journal(machine))
    for action in [*persistence.plan_unit(work, ARGV), *persistence.plan_enablement(work)]:
        action.perform(work)
    machine.run(["systemctl", "start", persistence.UNIT], timeout=1)
    machine.commands.clear()
    return machine


CALLS: dict[str, Callable[[Host], object]] = {
    "disable": persistence.disable,
    "enable": persistence.enable,
    "suppress": persistence.suppress_restart,
    "stop": persistence.stop,
    "start later": persistence.start_later,
    "restart": persistence.restart,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_without_the_unit_there_is_nothing_to_do(
    root: Path, machine: MachineHost, call: Callable[[Host], object]
) -> None:
    before = snapshot(root)
    call(machine)
    assert machine.commands == []
    assert snapshot(root) == before, "not even an empty directory under /run"


def test_starting_without_the_unit_is_an_error_with_a_way_out(machine: MachineHost) -> None:
    with pytest.raises(StratumError) as caught:
        persistence.start(machine)
    assert caught.value.hint == "run: stratum up"


def test_the_unit_runs_the_steady_state_command_line(root: Path, unit: MachineHost) -> None:
    text = (root / "etc/systemd/system/stratum.service").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    assert line == "ExecStart=/usr/bin/python3 -IS /opt/stratum/pyz/current/stratum.pyz up --supervise"
    for flag in ("--bundle", "--trust", "--insecure", "--dry-run"):
        assert flag not in text, "a flag of one run must not come back at each boot"


def test_it_is_enabled_by_the_link_that_systemctl_would_make_in_a_tree_too(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "image")
    (root / "var/lib/stratum").mkdir()
    host = FaultHost(str(root), {})
    work = Work(host, Receipt.load(host), Journal(host))
    for action in [*persistence.plan_unit(work, ARGV), *persistence.plan_enablement(work)]:
        action.perform(work)
    assert os.readlink(root / WANTS) == "/etc/systemd/system/stratum.service"
    assert persistence.plan_unit(work, ARGV) == [] == persistence.plan_enablement(work)


def test_disabling_leaves_the_running_unit_and_its_file_alone(root: Path, unit: MachineHost) -> None:
    before = (root / "etc/systemd/system/stratum.service").read_bytes()
    persistence.disable(unit)
    assert not (root / WANTS).is_symlink()
    assert unit.active(persistence.UNIT)
    assert (root / "etc/systemd/system/stratum.service").read_bytes() == before
    persistence.enable(unit)
    assert (root / WANTS).is_symlink()


def test_a_suppressed_restart_is_under_run_and_loaded(root: Path, unit: MachineHost) -> None:
    persistence.suppress_restart(unit)
    assert (root / OVERRIDE).read_text() == "[Service]\nRestart=no\n"
    assert unit.commands == ["systemctl daemon-reload"]
    persistence.suppress_restart(unit)
    persistence.allow_restart(unit)
    assert not (root / OVERRIDE).parent.exists()
    assert unit.commands[-1] == "systemctl daemon-reload"


def test_taking_it_back_reloads_even_when_the_override_is_gone(unit: MachineHost) -> None:
    """An earlier call may have removed the file and failed in the reload: systemd still knows the override."""
    persistence.suppress_restart(unit)
    unit.failing = {"systemctl daemon-reload": 1}
    with pytest.raises(CommandError):
        persistence.allow_restart(unit)
    unit.commands.clear()
    persistence.allow_restart(unit)
    assert unit.commands == ["systemctl daemon-reload"]


def test_somebody_elses_runtime_drop_in_stays(root: Path, unit: MachineHost) -> None:
    persistence.suppress_restart(unit)
    other = root / OVERRIDE.parent / "50-theirs.conf"
    other.write_text("[Service]\n")
    persistence.allow_restart(unit)
    assert other.exists()


def test_a_failing_systemctl_is_not_swallowed(unit: MachineHost) -> None:
    for name in ("disable", "suppress", "stop", "enable", "start later", "restart"):
        unit.failing = {"systemctl": 1}
        with pytest.raises(CommandError):
            CALLS[name](unit)


def test_forgetting_takes_the_override_and_failures_away_and_does_not_mind_unknown_units(
    root: Path, unit: MachineHost
) -> None:
    persistence.suppress_restart(unit)
    (root / "etc/systemd/system/stratum.service").unlink()
    unit.commands.clear()
    unit.failing = {"systemctl reset-failed": 1}
    persistence.forget(unit, ["stratum-containerd.service"])
    assert unit.commands == [
        "systemctl daemon-reload",
        "systemctl reset-failed stratum.service stratum-containerd.service",
    ]
    assert not (root / OVERRIDE).parent.exists()


def test_the_supervisor_is_started_without_waiting_for_it(unit: MachineHost) -> None:
    """It waits for the lock of the run that starts it: waiting would never end."""
    persistence.start_later(unit)
    persistence.restart(unit)
    assert unit.commands == [
        "systemctl start --no-block stratum.service",
        "systemctl restart --no-block stratum.service",
    ]


# -- telling systemd ------------------------------------------------------------------------------------


@pytest.mark.parametrize("abstract", [False, True])
def test_readiness_is_said_to_the_socket_that_systemd_names(tmp_path: Path, abstract: bool) -> None:
    name = f"@stratum-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind("\0" + name[1:] if abstract else name)
        server.settimeout(5)
        notify_module.notify(Host("/", {"NOTIFY_SOCKET": name}), "READY=1\nSTATUS=läuft")
        assert server.recv(1000).decode() == "READY=1\nSTATUS=läuft"


def test_without_a_manager_nothing_is_said() -> None:
    notify_module.notify(Host("/", {}), "READY=1")
    notify_module.notify(Host("/", {"NOTIFY_SOCKET": ""}), "READY=1")


@contextlib.contextmanager
def manager(path: Path, **environ: str) -> Iterator[tuple[Host, socket.socket]]:
    """A stand-in for systemd's end of the socket, and a host that was started with it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(path))
        server.setblocking(False)
        yield Host("/", {"NOTIFY_SOCKET": str(path), **environ}), server


def heard(server: socket.socket) -> list[str]:
    said = []
    with contextlib.suppress(BlockingIOError):
        while True:
            said.append(server.recv(1000).decode())
    return said


@pytest.mark.parametrize(
    ("usec", "pid", "watched"),
    [
        ("3000000", None, True),
        ("3000000", "ours", True),
        ("3000000", "1", False),
        ("0", None, False),
        (None, None, False),
        ("", None, False),
        ("-5", None, False),
        ("soon", None, False),
        ("\u0663", None, False),
    ],
)
def test_the_watchdog_is_fed_when_it_is_meant_for_this_process(
    tmp_path: Path, usec: str | None, pid: str | None, watched: bool
) -> None:
    environ = {"WATCHDOG_USEC": usec, "WATCHDOG_PID": str(os.getpid()) if pid == "ours" else pid}
    given = {name: value for name, value in environ.items() if value is not None}
    with manager(tmp_path / "notify", **given) as (host, server):
        watchdog = notify_module.watchdog_of(host)
        watchdog.alive()
        with watchdog.patience(60):
            pass
        said = heard(server)
    assert bool(said) is watched
    assert watchdog.shorten(15) == (1.5 if watched else 15)


def test_something_that_takes_long_is_announced_and_the_old_time_counts_from_its_end(tmp_path: Path) -> None:
    with manager(tmp_path / "notify", WATCHDOG_USEC="3000000") as (host, server):
        watchdog = notify_module.watchdog_of(host)
        with pytest.raises(ZeroDivisionError), watchdog.patience(60):
            assert heard(server) == ["WATCHDOG=1\nWATCHDOG_USEC=60000000"]
            raise ZeroDivisionError
        assert heard(server) == ["WATCHDOG=1\nWATCHDOG_USEC=3000000"]
        with watchdog.patience(1):
            assert heard(server) == ["WATCHDOG=1\nWATCHDOG_USEC=3000000"], "never less than the unit gives"


def test_the_end_of_a_long_part_does_not_bring_the_short_time_back_for_the_whole(tmp_path: Path) -> None:
    with manager(tmp_path / "notify", WATCHDOG_USEC="3000000") as (host, server):
        watchdog = notify_module.watchdog_of(host)
        with watchdog.patience(60):
            with watchdog.patience(60):
                pass
            assert heard(server) == ["WATCHDOG=1\nWATCHDOG_USEC=60000000"]
        assert heard(server) == ["WATCHDOG=1\nWATCHDOG_USEC=3000000"]


def test_a_start_that_takes_long_asks_for_its_time(tmp_path: Path) -> None:
    with manager(tmp_path / "notify") as (host, server):
        notify_module.extend_start(host, 90.5)
        assert heard(server) == ["EXTEND_TIMEOUT_USEC=90500000"]


def test_the_unit_has_a_watchdog(root: Path, unit: MachineHost) -> None:
    assert "\nWatchdogSec=3min\n" in (root / "etc/systemd/system/stratum.service").read_text()
