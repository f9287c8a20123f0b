"""The reboot-persistence unit (seed 004, InstallUnit and its neighbours): each call, on each kind of host."""

from __future__ import annotations

import os
from collections.abc import Callable
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
    import socket

    name = f"@stratum-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind("\0" + name[1:] if abstract else name)
        server.settimeout(5)
        notify_module.notify(Host("/", {"NOTIFY_SOCKET": name}), "READY=1\nSTATUS=läuft")
        assert server.recv(1000).decode() == "READY=1\nSTATUS=läuft"


def test_without_a_manager_nothing_is_said() -> None:
    notify_module.notify(Host("/", {}), "READY=1")
    notify_module.notify(Host("/", {"NOTIFY_SOCKET": ""}), "READY=1")
