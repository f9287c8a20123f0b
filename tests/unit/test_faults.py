"""A crash at every single change of each command, the process dying or the power going: the node stays whole."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

import pytest

from stratum import atomicfile
from stratum.errors import StratumError
from stratum.node.containerd import CONFIG_PATH
from stratum.node.units import SYSTEMD_DIR, UNIT_CONTAINERD
from stratum.steps import remove_tree
from stratum.system import HostPath
from tests.fakes import Killed, make_tree
from tests.faults import FaultyMachine, Loss, faulty_machine
from tests.nodes import Lab, boot, check_whole, node_lab, tree_of


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with node_lab() as lab:
        with lab.machine("old") as machine:
            for path in ("/opt/stratum/node/1.0/bin/ctr", "/opt/stratum/components", CONFIG_PATH):
                remove_tree(machine, HostPath(str(path)))
            atomicfile.write_file(machine, SYSTEMD_DIR / UNIT_CONTAINERD, b"[Service]\nExecStart=/bin/other\n")
            lab.keep("damaged", machine)
        yield lab


@dataclass(frozen=True)
class Case:
    """A command on a machine in a state: what it comes to, and what may be after a crash in it."""

    before: str
    command: tuple[str, ...]
    status: int = 0
    after: Optional[str] = None  # the version that runs when it is through; None: none
    between: tuple[str, ...] = ()  # versions that may run after the next boot; none: it was not whole to begin with


CASES = {
    "up": Case("bare", ("up", "--bundle", "old.tar"), 0, "1.0", ("1.0",)),
    "upgrade": Case("old", ("upgrade", "--bundle", "new.tar"), 0, "2.0", ("1.0", "2.0")),
    "upgrade to a version that does not start": Case("old", ("upgrade", "--bundle", "bad.tar"), 20, "1.0", ("1.0",)),
    "rollback": Case("new", ("rollback", "1.0"), 0, "1.0", ("1.0", "2.0")),
    "repair": Case("damaged", ("up", "--bundle", "old.tar"), 0, "1.0"),
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
        where = lab.crash(machine, command, dies_at, loss)
        if where is None:
            return False
        try:
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
        # A node that was damaged before need not come up.
        assert not case.between or (case.command[0], error.reference) == ("uninstall", "uninstall-unfinished")
        return
    if started and case.between:
        check_whole(machine, case.between)
    elif not started:
        assert case.command[0] in ("up", "uninstall")


ALL_KEPT = "the power goes, all is kept"
FORMS: dict[str, Callable[[int], Optional[Loss]]] = {
    "the process dies": lambda _: None,
    "the power goes": lambda _: Loss(),
    "the power goes, some is kept": Loss,
    ALL_KEPT: lambda number: Loss(number, 0.0),
}
# The boot after a crash in a switch is tried with everything on the disk, too: as if only the machine had stopped.
SWITCHES = ("upgrade", "rollback")


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name in CASES for form in FORMS if name in SWITCHES or form != ALL_KEPT]
)
def test_a_crash_before_any_change_leaves_a_whole_node_and_the_command_finishes(lab: Lab, name: str, form: str) -> None:
    case = CASES[name]
    loss = FORMS[form]
    total = len(count_changes(lab, case, loss(0)))
    assert total > 10
    crashed = 0
    while survive(lab, case, crashed, loss(crashed)):
        crashed += 1
    assert crashed >= total


@pytest.mark.parametrize("form", [form for form in FORMS if form != ALL_KEPT])
@pytest.mark.parametrize("point", [f"run systemctl start {UNIT_CONTAINERD}", f"run systemctl stop {UNIT_CONTAINERD}"])
def test_a_crash_in_the_middle_of_going_back_is_gone_back_from_too(lab: Lab, point: str, form: str) -> None:
    with lab.machine("old") as machine:
        machine.arm(None, Loss())
        assert lab.run(machine, "upgrade", "--bundle", "new.tar") == 0
        moment = machine.mutations.index(point)
    for number in itertools.count():
        with lab.machine("old") as machine:
            machine.arm(moment + 1, Loss())
            with pytest.raises(Killed):
                lab.run(machine, "upgrade", "--bundle", "new.tar")
            machine.lose_power()
            loss = FORMS[form](number)
            machine.arm(number, loss)
            with contextlib.suppress(Killed):
                boot(lab, machine)
            if not machine.dead:
                break
            if loss is not None:
                machine.lose_power()
            machine.revive()
            if lab.is_new(machine, "again", loss is None):
                assert boot(lab, machine)
                assert check_whole(machine, ("1.0",)) == "1.0"
    assert number > 10


# -- the faults themselves ------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[FaultyMachine]:
    root = make_tree(tmp_path / "root", live=True)
    with faulty_machine(root, tmp_path / "graveyard") as machine:
        machine.makedirs("/d/e")
        write(machine, "/d/old", b"old", sync=True)
        machine.arm(None, Loss())
        yield machine


def write(machine: FaultyMachine, path: str, content: bytes, *, sync: bool) -> None:
    with machine.open_new(path, 0o644) as file:
        file.write(content)
        if sync:
            machine.fsync(file)


def test_content_that_was_not_synced_is_gone_wherever_its_file_was_renamed_to(machine: FaultyMachine) -> None:
    write(machine, "/d/new", b"content", sync=False)
    machine.rename("/d/new", "/d/old")
    machine.fsync_dir("/d")
    machine.lose_power()
    assert machine.read_bytes("/d/old") == b""


def test_what_was_synced_is_there(machine: FaultyMachine) -> None:
    write(machine, "/d/new", b"content", sync=True)
    machine.rename("/d/new", "/d/old")
    machine.fsync_dir("/d")
    assert machine.lose_power() == []
    assert machine.read_bytes("/d/old") == b"content"


def test_entries_of_a_directory_that_was_not_synced_are_as_before(machine: FaultyMachine) -> None:
    write(machine, "/d/new", b"content", sync=True)
    machine.link("/d/new", "/d/another")
    machine.symlink("new", "/d/link")
    machine.mkdir("/d/made")
    write(machine, "/d/made/inside", b"x", sync=True)
    machine.unlink("/d/old")
    machine.rmdir("/d/e")
    machine.lose_power()
    assert machine.listdir("/d") == ["e", "old"]
    assert machine.read_bytes("/d/old") == b"old"


def test_a_rename_that_was_not_synced_brings_back_what_it_replaced(machine: FaultyMachine) -> None:
    write(machine, "/d/new", b"content", sync=True)
    machine.fsync_dir("/d")
    machine.rename("/d/new", "/d/old")
    machine.lose_power()
    assert (machine.read_bytes("/d/old"), machine.read_bytes("/d/new")) == (b"old", b"content")


def test_a_directory_that_moved_takes_what_happened_in_it_along(machine: FaultyMachine) -> None:
    machine.mkdir("/d/staged")
    write(machine, "/d/staged/one", b"1", sync=True)
    machine.fsync_dir("/d/staged")
    write(machine, "/d/staged/two", b"2", sync=True)
    machine.rename("/d/staged", "/d/e/whole")
    machine.fsync_dir("/d/e")
    machine.lose_power()
    assert machine.listdir("/d") == ["e", "old"]
    assert machine.listdir("/d/e/whole") == ["one"]


def test_a_mode_is_on_the_disk_when_the_directory_is(machine: FaultyMachine) -> None:
    machine.chmod("/d/e", 0o700)
    machine.chmod("/d", 0o711)
    machine.fsync_dir("/d")
    machine.lose_power()
    assert machine.stat("/d").st_mode & 0o777 == 0o711
    assert machine.stat("/d/e").st_mode & 0o777 == 0o755


def test_a_sync_of_the_file_system_keeps_everything(machine: FaultyMachine) -> None:
    write(machine, "/d/new", b"content", sync=False)
    machine.unlink("/d/old")
    machine.syncfs("/d")
    assert machine.lose_power() == []
    assert (machine.listdir("/d"), machine.read_bytes("/d/new")) == (["e", "new"], b"content")


@pytest.mark.parametrize("seed", range(40))
def test_what_a_seed_keeps_never_lacks_what_it_needs(machine: FaultyMachine, seed: int) -> None:
    machine.arm(None, Loss(seed))
    machine.mkdir("/d/a")
    write(machine, "/d/a/f", b"0123456789", sync=False)
    machine.rename("/d/a", "/d/b")
    machine.rename("/d/b/f", "/d/old")
    machine.lose_power()
    found = machine.listdir("/d")
    if "b" in found:
        assert "a" not in found
    content = machine.read_bytes("/d/old")
    assert content == b"old" or b"0123456789".startswith(content)


def test_a_seed_draws_the_same_again_and_another_one_something_else(tmp_path: Path) -> None:
    def lost(number: int, seed: int) -> list[str]:
        root = make_tree(tmp_path / f"root{number}", live=True)
        with faulty_machine(root, tmp_path / f"graveyard{number}") as machine:
            machine.arm(None, Loss(seed))
            for name in range(20):
                machine.mkdir(f"/opt/{name}")
            return machine.lose_power()

    assert lost(1, 5) == lost(2, 5)
    assert lost(3, 5) != lost(4, 6)


def test_a_process_that_died_changes_nothing_any_more(machine: FaultyMachine) -> None:
    machine.arm(1)
    with pytest.raises(Killed), machine.open_new("/d/new", 0o644) as file:
        file.write(b"content")
    assert machine.read_bytes("/d/new") == b"con"
    for change in (lambda: machine.unlink("/d/old"), lambda: machine.run(["systemctl", "show", "x"], timeout=1)):
        with pytest.raises(Killed):
            change()
    assert machine.exists("/d/old")


@pytest.mark.parametrize("loss", [None, Loss(), Loss(1), Loss(2), Loss(3)])
def test_a_file_written_whole_is_the_old_or_the_new_one_whenever_it_is_cut_off(
    machine: FaultyMachine, loss: Optional[Loss]
) -> None:
    seen = set()
    for number in itertools.count():
        machine.arm(number, loss)
        with contextlib.suppress(Killed):
            atomicfile.write_file(machine, "/d/old", b"new content")
        if not machine.dead:
            break
        if loss is not None:
            machine.lose_power()
        machine.revive()
        seen.add(machine.read_bytes("/d/old"))
        machine.unlink("/d/old")
        write(machine, "/d/old", b"old", sync=True)
    assert {b"old"} <= seen <= {b"old", b"new content"}


def test_a_file_written_without_a_sync_would_be_found_out(machine: FaultyMachine) -> None:
    write(machine, "/d/careless", b"new content", sync=False)
    machine.rename("/d/careless", "/d/old")
    machine.fsync_dir("/d")
    machine.lose_power()
    assert machine.read_bytes("/d/old") not in (b"old", b"new content")
