"""A crash at every single change of each command, the process dying or the power going: the node stays whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import pytest

from stratum.errors import StratumError
from tests.fakes import Killed
from tests.faults import FaultyMachine, Loss
from tests.nodes import Lab, boot, check_whole, node_lab, tree_of


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with node_lab() as lab:
        yield lab


@dataclass(frozen=True)
class Case:
    """A command on a machine in a state: what it comes to, and what may be after a crash in it."""

    before: str
    command: tuple[str, ...]
    status: int = 0
    after: Optional[str] = None  # the version that runs when it is through; None: none
    between: tuple[str, ...] = ()  # versions that may run after the next boot


CASES = {
    "up": Case("bare", ("up", "--bundle", "old.tar"), 0, "1.0", ("1.0",)),
    "upgrade": Case("old", ("upgrade", "--bundle", "new.tar"), 0, "2.0", ("1.0", "2.0")),
    "upgrade to a version that does not start": Case("old", ("upgrade", "--bundle", "bad.tar"), 20, "1.0", ("1.0",)),
    "rollback": Case("new", ("rollback", "1.0"), 0, "1.0", ("1.0", "2.0")),
    "prune": Case("new", ("prune", "--keep", "1"), 0, "2.0", ("2.0",)),
    "uninstall": Case("new", ("uninstall",), 0, None, ("2.0",)),
}


def count_changes(lab: Lab, case: Case, loss: Optional[Loss]) -> list[str]:
    with lab.machine(case.before) as machine:
        machine.arm(None, loss)
        assert lab.run(machine, *case.command) == case.status
        finish(lab, machine, case)
        return list(machine.mutations)


def finish(lab: Lab, machine: FaultyMachine, case: Case) -> None:
    if case.after is None:
        assert tree_of(Path(machine.root)) == lab.original
    else:
        assert check_whole(machine, (case.after,)) == case.after


def survive(lab: Lab, case: Case, dies_at: int, loss: Optional[Loss]) -> bool:
    """Crash, go on, take everything away; whether there was a change to crash at."""
    command = case.command
    with lab.machine(case.before) as machine:
        machine.arm(dies_at, loss)
        try:
            lab.run(machine, *command)
        except Killed:
            pass
        if not machine.dead:
            return False
        where = f"before {machine.mutations[-1:]}, change {dies_at}"
        try:
            if loss is not None:
                where += f", lost: {machine.lose_power()}"
            machine.revive()
            if lab.is_new(machine, "crashed", command, loss is None):
                if loss is not None:
                    after_boot(lab, machine, case)
                assert lab.run(machine, *command) == case.status
                finish(lab, machine, case)
                if lab.is_new(machine, "finished"):
                    assert lab.run(machine, "uninstall") == 0
                    assert tree_of(Path(machine.root)) == lab.original
        except BaseException as error:
            error.add_note(where) if hasattr(error, "add_note") else None
            raise AssertionError(f"{where}: {error!r}") from error
    return True


def after_boot(lab: Lab, machine: FaultyMachine, case: Case) -> None:
    """The node comes up by itself, whole; or it is gone, or says that it is being removed."""
    try:
        started = boot(lab, machine)
    except StratumError as error:
        assert (case.command[0], error.reference) == ("uninstall", "uninstall-unfinished")
        return
    if started:
        check_whole(machine, case.between)
    else:
        assert case.command[0] in ("up", "uninstall")


@pytest.mark.parametrize("form", ["the process dies", "the power goes", "the power goes, some is kept"])
@pytest.mark.parametrize("name", list(CASES))
def test_a_crash_before_any_change_leaves_a_whole_node_and_the_command_finishes(lab: Lab, name: str, form: str) -> None:
    case = CASES[name]

    def loss(number: int) -> Optional[Loss]:
        return {"the process dies": None, "the power goes": Loss()}.get(form, Loss(number))

    total = len(count_changes(lab, case, loss(0)))
    assert total > 10
    crashed = 0
    while survive(lab, case, crashed, loss(crashed)):
        crashed += 1
    assert crashed >= total
