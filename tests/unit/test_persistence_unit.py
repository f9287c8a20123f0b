"""The reboot-persistence unit: what is written, asked and undone, and where nothing is to be done."""

from __future__ import annotations

import argparse
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import pytest

from stratum.cli import build_parser
from stratum.errors import CommandError, StratumError
from stratum.host import persistence
from stratum.host.persistence import ENABLEMENT, OVERRIDE, STEADY_FLAGS, UNIT, UNIT_PATH
from stratum.host.program import supervisor_argv
from stratum.host.unitfile import UnitMissingError
from stratum.journal import Journal
from stratum.receipt import STATE_DIRECTORY, Receipt
from stratum.steps import Action, Work
from stratum.system import Completed, Host, PathLike
from tests.fakes import MachineHost, make_tree

ARGV = ["/usr/bin/python3", "-IS", "/opt/stratum/pyz/current/stratum.pyz", "up", "--supervise"]


class Machine(MachineHost):
    """Says the state of enablement in words, as systemctl does."""

    def _systemctl(self, argv: list[str], data: bytes) -> tuple[int, str]:
        status, text = super()._systemctl(argv, data)
        if argv[0] == "is-enabled":
            text = "masked\n" if persistence.masked(self) else "enabled\n" if status == 0 else "disabled\n"
        return status, text


@pytest.fixture
def host(tmp_path: Path) -> MachineHost:
    host = Machine(str(make_tree(tmp_path / "root", live=True)), {})
    host.makedirs(STATE_DIRECTORY)
    return host


def work_on(host: Host) -> Work:
    return Work(host, Receipt.load(host), Journal(host))


def install(host: Host) -> list[Action]:
    work = work_on(host)
    done: list[Action] = []
    for plan in (lambda: persistence.plan_unit(work, ARGV), lambda: persistence.plan_enablement(work)):
        for action in plan():
            action.perform(work)
            done.append(action)
    return done


def mask(host: Host) -> None:
    Path(host.real(UNIT_PATH)).symlink_to("/dev/null")


# -- writing it -------------------------------------------------------------------------------------------


def test_the_unit_that_is_installed_runs_the_steady_command_line_and_starts_at_boot(host: MachineHost) -> None:
    assert install(host)
    assert persistence.unit_argv(host) == tuple(ARGV)
    assert persistence.unit_exec_path(host) == "/usr/bin/python3"
    assert persistence.unit_enabled(host)
    assert install(host) == [], "a second time there is nothing to do"
    assert work_on(host).receipt.owns(UNIT_PATH) and work_on(host).receipt.owns(ENABLEMENT)


def test_an_enablement_that_failed_before_is_done_again(host: MachineHost) -> None:
    install(host)
    host.unlink(ENABLEMENT)
    assert [action.subject for action in install(host)] == [f"{ENABLEMENT} -> {UNIT_PATH}"]


def test_a_masked_unit_is_left_masked_and_the_mask_is_not_written_through(host: MachineHost) -> None:
    mask(host)
    assert install(host) == []
    assert os.readlink(host.real(UNIT_PATH)) == "/dev/null"
    assert not host.lexists(ENABLEMENT)
    persistence.enable(host)
    assert persistence.masked(host)
    assert not persistence.unit_enabled(host)
    with pytest.raises(UnitMissingError):
        persistence.unit_argv(host)
    with pytest.raises(UnitMissingError):
        persistence.unit_exec_path(host)


def test_a_unit_that_was_masked_after_the_installation_is_not_unmasked(host: MachineHost) -> None:
    install(host)
    host.unlink(UNIT_PATH)
    mask(host)
    assert install(host) == []
    assert persistence.masked(host)


def test_a_tree_gets_the_unit_and_its_enablement_and_no_command_is_run(tmp_path: Path) -> None:
    tree = Host(str(make_tree(tmp_path / "root")), {})
    tree.makedirs(STATE_DIRECTORY)
    assert install(tree)
    assert tree.readlink(ENABLEMENT) == str(UNIT_PATH)
    for ask in (persistence.disable, persistence.enable, persistence.stop, persistence.restart, persistence.reload,
                persistence.suppress_restart, persistence.allow_restart, persistence.start_later):  # fmt: skip
        ask(tree)  # a command would be a RuntimeError
    assert not persistence.systemd_available(tree)
    assert not persistence.unit_enabled(tree)
    assert persistence.main_pid(tree) == 0


# -- the steady command line ------------------------------------------------------------------------------


def up_options() -> list[str]:
    (commands,) = (action for action in build_parser("up")._actions if isinstance(action, argparse._SubParsersAction))
    return [name for action in commands.choices["up"]._actions for name in action.option_strings]


def test_no_flag_of_up_gets_into_the_unit_but_the_steady_ones(host: MachineHost) -> None:
    options = up_options()
    assert {"--bundle", "--supervise", "--dry-run"} <= set(options), "this test looks at the parser itself"
    for option in options:
        for words in ([option], [option, "value"], [f"{option}=value"]):
            argv = [*ARGV[:4], *words]
            if words == [option] and option in STEADY_FLAGS:
                persistence.plan_unit(work_on(host), argv)
                continue
            with pytest.raises(StratumError) as caught:
                persistence.plan_unit(work_on(host), argv)
            assert caught.value.reference == "one-shot-flag"
    assert not host.lexists(UNIT_PATH)


@pytest.mark.parametrize(
    "words", [["--bun", "x"], ["--trust", "k"], ["--token", "secret"], ["--join=https://x"], ["x"]]
)
def test_abbreviations_tokens_and_bare_words_do_not_get_in_either(host: MachineHost, words: list[str]) -> None:
    with pytest.raises(StratumError) as caught:
        persistence.plan_unit(work_on(host), [*ARGV, *words])
    assert "secret" not in str(caught.value) and "https" not in str(caught.value), "a secret is not repeated"


def test_every_steady_flag_is_one_that_up_knows() -> None:
    assert set(STEADY_FLAGS) <= set(up_options())


def test_the_command_line_that_up_puts_into_the_unit_is_steady(host: MachineHost) -> None:
    persistence.check_steady(supervisor_argv(host))


# -- a host without systemd, a host without the unit -----------------------------------------------------

CALLS = (
    persistence.disable, persistence.enable, persistence.stop, persistence.restart, persistence.start_later,
    persistence.suppress_restart,
)  # fmt: skip


@pytest.mark.parametrize(
    "call", [*CALLS, persistence.reload, persistence.allow_restart], ids=lambda call: call.__name__
)
def test_without_systemd_nothing_is_asked_and_nothing_is_an_error(host: MachineHost, call) -> None:  # type: ignore[no-untyped-def]
    install(host)
    os.rmdir(host.real("/run/systemd/system"))
    host.commands.clear()
    call(host)
    assert host.commands == []
    assert not host.lexists("/run/systemd/system")
    assert not persistence.unit_enabled(host)
    assert persistence.main_pid(host) == 0
    persistence.forget(host, ["stratum-containerd.service"])
    assert host.commands == []


def test_without_systemd_no_unit_is_written(host: MachineHost) -> None:
    os.rmdir(host.real("/run/systemd/system"))
    assert install(host) == []


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_missing_unit_is_no_error_and_leaves_nothing(host: MachineHost, call) -> None:  # type: ignore[no-untyped-def]
    call(host)
    assert host.commands == []
    assert host.listdir("/run/systemd/system") == []


def test_starting_a_missing_unit_says_what_to_do(host: MachineHost) -> None:
    with pytest.raises(UnitMissingError) as caught:
        persistence.start(host)
    assert caught.value.hint == "run: stratum up"


# -- enablement -------------------------------------------------------------------------------------------


@dataclass
class Answering(MachineHost):
    """systemctl is-enabled says ``answer``."""

    answer: Optional[Completed] = None

    def run(self, argv, **options):  # type: ignore[no-untyped-def]
        return self.answer if "is-enabled" in argv else super().run(argv, **options)


@pytest.mark.parametrize(
    ("status", "out", "err", "enabled"),
    [
        (0, "enabled\n", "", True),
        (0, "enabled-runtime\n", "", False),  # gone at the next boot
        (1, "disabled\n", "", False),
        (1, "masked\n", "", False),
        (0, "static\n", "", False),
        (4, "not-found\n", "", False),
        (1, "", "Failed to get unit file state for stratum.service: No such file or directory\n", False),
        (1, "", "Failed to connect to bus: Connection refused\n", None),
        (1, "", "Failed to connect to bus: No such file or directory\n", None),
        (-9, "", "", None),
    ],
)
def test_enablement_is_what_systemd_says_and_no_answer_is_an_error(
    tmp_path: Path, status: int, out: str, err: str, enabled: bool | None
) -> None:
    host = Answering(str(make_tree(tmp_path / "root", live=True)), {})
    host.makedirs(STATE_DIRECTORY)
    install(host)
    host.answer = Completed(("systemctl", "is-enabled", UNIT), status, out.encode(), err.encode())
    if enabled is None:
        with pytest.raises(CommandError, match="is-enabled"):
            persistence.unit_enabled(host)
    else:
        assert persistence.unit_enabled(host) is enabled


def test_disable_and_enable_do_not_touch_the_file_or_the_running_unit(host: MachineHost) -> None:
    install(host)
    before = host.read_bytes(UNIT_PATH)
    persistence.start(host)
    persistence.disable(host)
    assert not persistence.unit_enabled(host)
    persistence.enable(host)
    assert persistence.unit_enabled(host)
    assert host.read_bytes(UNIT_PATH) == before
    assert host.active(UNIT)


@pytest.mark.parametrize("verb", ["disable", "enable", "stop", "restart"])
def test_a_failure_of_systemctl_is_passed_on(host: MachineHost, verb: str) -> None:
    install(host)
    host.failing[f"systemctl {verb}"] = 1
    with pytest.raises(CommandError):
        getattr(persistence, verb)(host)


# -- restart suppressed and allowed -----------------------------------------------------------------------


def loaded(host: MachineHost) -> bytes:
    return host.units[UNIT].loaded or b""


def test_a_suppressed_restart_is_in_force_at_once_and_taken_back_without_a_trace(host: MachineHost) -> None:
    install(host)
    persistence.start(host)
    persistence.suppress_restart(host)
    assert loaded(host).endswith(b"[Service]\nRestart=no\n")
    assert b"Restart=always" in host.read_bytes(UNIT_PATH), "the unit file stays as it is"
    persistence.allow_restart(host)
    assert b"Restart=no" not in loaded(host)
    assert host.listdir("/run/systemd/system") == []


def test_the_override_sorts_behind_the_drop_ins_of_an_admin() -> None:
    assert all(f"{name}.conf" < OVERRIDE.name for name in ("override", "99-restart", "zz-mine", "z"))


def test_the_reload_is_done_although_the_override_is_gone_already(host: MachineHost) -> None:
    install(host)
    persistence.start(host)
    persistence.suppress_restart(host)
    host.failing["systemctl daemon-reload"] = 1
    with pytest.raises(CommandError):
        persistence.allow_restart(host)
    assert b"Restart=no" in loaded(host), "the file is gone and systemd still has it"
    assert not host.lexists(OVERRIDE)
    persistence.allow_restart(host)
    assert b"Restart=no" not in loaded(host)


def test_allowing_what_was_never_suppressed_is_no_error(host: MachineHost) -> None:
    persistence.allow_restart(host)
    assert host.commands == ["systemctl daemon-reload"]


def test_a_reload_that_fails_while_suppressing_is_an_error_that_allowing_puts_right(host: MachineHost) -> None:
    install(host)
    host.failing["systemctl daemon-reload"] = 1
    with pytest.raises(CommandError):
        persistence.suppress_restart(host)
    persistence.allow_restart(host)
    assert host.listdir("/run/systemd/system") == []


def test_an_override_that_cannot_be_written_leaves_no_directory(tmp_path: Path) -> None:
    class Full(MachineHost):
        def open_new(self, path: PathLike, mode: int):  # type: ignore[no-untyped-def]
            if str(path).startswith("/run/systemd"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().open_new(path, mode)

    host = Full(str(make_tree(tmp_path / "root", live=True)), {})
    host.makedirs(STATE_DIRECTORY)
    install(host)
    with pytest.raises(OSError):
        persistence.suppress_restart(host)
    assert host.listdir("/run/systemd/system") == []


def test_a_runtime_drop_in_of_somebody_else_stays(host: MachineHost) -> None:
    install(host)
    host.makedirs(OVERRIDE.parent)
    theirs = Path(host.real(OVERRIDE.parent / "theirs.conf"))
    theirs.write_text("[Service]\nNice=1\n")
    persistence.suppress_restart(host)
    persistence.allow_restart(host)
    assert theirs.exists()
    assert host.listdir(OVERRIDE.parent) == ["theirs.conf"]


def test_deleted_units_are_forgotten_with_the_override(host: MachineHost) -> None:
    install(host)
    persistence.suppress_restart(host)
    host.unlink(UNIT_PATH)
    host.commands.clear()
    persistence.forget(host, ["stratum-containerd.service"])
    assert not host.lexists(OVERRIDE.parent)
    assert host.commands == [
        "systemctl daemon-reload", f"systemctl reset-failed {UNIT} stratum-containerd.service",
    ]  # fmt: skip


# -- the process ------------------------------------------------------------------------------------------


def test_the_main_pid_is_that_of_systemd_and_0_when_it_runs_none(host: MachineHost) -> None:
    class Running(MachineHost):
        def _show(self, name: str) -> str:
            return super()._show(name).replace("MainPID=0", "MainPID=4242")

    assert persistence.main_pid(host) == 0
    install(host)
    assert persistence.main_pid(host) == 0
    assert persistence.main_pid(Running(host.root, {})) == 4242
