"""``upgrade``, ``rollback``, ``prune`` and ``remove`` on a machine that plays systemd, and all that can go wrong."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest

from stratum import cli, lock
from stratum.errors import ExitCode
from stratum.journal import Journal
from stratum.node.layout import Layout
from stratum.node.units import SYSTEMD_DIR, UNIT_CONTAINERD
from stratum.node.versions import read_record
from stratum.receipt import Receipt
from stratum.system import HostPath, PathLike
from tests.bundles import snapshot
from tests.fakes import Killed
from tests.faults import FaultyMachine
from tests.nodes import NEW, Lab, boot, bundle_of, check_whole, find_strays, node_lab, tree_of

BASE = HostPath("/opt/stratum/node")
COMPONENTS = HostPath("/opt/stratum/components")
BLOBS = HostPath("/var/lib/stratum/images/blobs/sha256")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with node_lab() as lab:
        for program in ("dies", "silent", "broken"):
            lab.desk.bundle(bundle_of(*NEW, program=program.encode()), f"{program}.tar")
        lab.desk.bundle(bundle_of("2.0", 2, "3.0.0"), "unknown.tar")
        lab.desk.bundle(bundle_of("3.0", 3, "2.1.3"), "newest.tar")
        with lab.machine("old") as machine:
            assert lab.run(machine, "upgrade", "--bundle", "new.tar", "--prepare-only") == 0
            lab.keep("prepared", machine)
        with lab.machine("new") as machine:
            assert lab.run(machine, "upgrade", "--bundle", "newest.tar") == 0
            lab.keep("newest", machine)
        yield lab


@pytest.fixture
def old(lab: Lab) -> Iterator[FaultyMachine]:
    with lab.machine("old") as machine:
        machine.arm(None)
        yield machine


@pytest.fixture
def new(lab: Lab) -> Iterator[FaultyMachine]:
    with lab.machine("new") as machine:
        machine.arm(None)
        yield machine


@pytest.fixture
def prepared(lab: Lab) -> Iterator[FaultyMachine]:
    with lab.machine("prepared") as machine:
        machine.arm(None)
        yield machine


@pytest.fixture
def newest(lab: Lab) -> Iterator[FaultyMachine]:
    with lab.machine("newest") as machine:
        machine.arm(None)
        yield machine


UPGRADE = ("upgrade", "--bundle", "new.tar")
CHANGING = ("create", "write", "mkdir", "link", "symlink", "rename")


def stops(machine: FaultyMachine) -> list[str]:
    return [line for line in machine.commands if line.startswith(("systemctl stop", "systemctl restart"))]


def place(machine: FaultyMachine, path: PathLike) -> Path:
    return Path(machine.root, str(path)[1:])


# -- the way there and back -----------------------------------------------------------------------------


def test_an_upgrade_and_a_rollback_switch_everything(lab: Lab, old: FaultyMachine) -> None:
    answer = lab.ask(old, *UPGRADE)
    assert answer.status == 0
    assert "running: demo 2.0" in answer.text
    assert check_whole(old, ("2.0",)) == "2.0"
    assert lab.run(old, "rollback") == 0
    assert check_whole(old, ("1.0",)) == "1.0"
    assert lab.run(old, "rollback") == 0
    assert check_whole(old, ("2.0",)) == "2.0"


def test_an_upgrade_to_what_runs_already_does_nothing(lab: Lab, new: FaultyMachine) -> None:
    assert lab.run(new, *UPGRADE) == 0
    assert stops(new) == []
    assert not any(what.startswith(CHANGING) for what in new.mutations)


def test_while_a_version_is_prepared_nothing_that_runs_is_touched(lab: Lab, old: FaultyMachine) -> None:
    before = dict(old.running)
    assert lab.run(old, *UPGRADE, "--prepare-only") == 0
    assert stops(old) == []
    assert old.running == before
    assert check_whole(old, ("1.0",)) == "1.0"
    assert Layout(old).versions() == ["1.0", "2.0"]


def test_a_prepared_version_is_switched_to_without_its_bundle(lab: Lab, prepared: FaultyMachine) -> None:
    assert lab.run(prepared, "upgrade", "--to", "2.0") == 0
    assert check_whole(prepared, ("2.0",)) == "2.0"
    unpacked = [what for what in prepared.mutations if what.startswith("create") and "/opt/stratum" in what]
    assert unpacked == []


def test_only_the_components_that_changed_are_written(lab: Lab, old: FaultyMachine) -> None:
    assert lab.run(old, *UPGRADE) == 0
    written = {what.rpartition("/")[2] for what in old.mutations if what.startswith("create /opt/stratum/.staging")}
    assert "runc" not in written
    assert {"containerd", "ctr", "tuning"} < written
    one, other = (old.stat(BASE / version / "bin/runc") for version in ("1.0", "2.0"))
    assert one.st_ino == other.st_ino


def test_a_dry_run_of_a_switch_changes_nothing(lab: Lab, old: FaultyMachine, new: FaultyMachine) -> None:
    for machine, command in (
        (old, UPGRADE),
        (new, ("rollback",)),
        (new, ("prune", "--keep", "1")),
        (new, ("remove", "1.0")),
    ):
        before = snapshot(Path(machine.root))
        answer = lab.ask(machine, *command, "--dry-run")
        assert answer.status == 0
        assert answer.text
        assert snapshot(Path(machine.root)) == before
        assert stops(machine) == []


# -- directions -----------------------------------------------------------------------------------------


def test_a_downgrade_is_refused_unless_it_is_allowed(lab: Lab, new: FaultyMachine) -> None:
    for command in (("upgrade", "--bundle", "old.tar"), ("upgrade", "--to", "1.0")):
        answer = lab.ask(new, *command)
        assert answer.status == ExitCode.FAILED
        assert answer.error is not None
        assert answer.error.reference == "downgrade"
        assert "--allow-downgrade" in str(answer.error.hint)
        assert check_whole(new, ("2.0",)) == "2.0"
    assert stops(new) == []
    assert lab.run(new, "upgrade", "--bundle", "old.tar", "--allow-downgrade") == 0
    assert check_whole(new, ("1.0",)) == "1.0"


def test_another_bundle_of_the_version_that_runs_is_refused(lab: Lab, new: FaultyMachine) -> None:
    answer = lab.ask(new, "upgrade", "--bundle", "dies.tar")
    assert answer.error is not None
    assert answer.error.reference == "version-differs"
    assert stops(new) == []


@pytest.mark.parametrize("command", [("rollback", "9.9"), ("upgrade", "--to", "9.9"), ("remove", "9.9")])
def test_a_version_that_is_not_installed_is_not_found(lab: Lab, new: FaultyMachine, command: tuple[str, ...]) -> None:
    answer = lab.ask(new, *command)
    assert answer.status == ExitCode.NOT_FOUND
    assert answer.error is not None
    assert answer.error.reference == "version-missing"
    assert check_whole(new, ("2.0",)) == "2.0"
    assert stops(new) == []


def test_without_an_earlier_version_there_is_nothing_to_go_back_to(lab: Lab, old: FaultyMachine) -> None:
    answer = lab.ask(old, "rollback")
    assert answer.status == ExitCode.NOT_FOUND
    assert answer.error is not None
    assert answer.error.reference == "no-previous-version"
    assert check_whole(old, ("1.0",)) == "1.0"


def test_an_earlier_version_whose_directory_is_gone_is_no_version_to_go_back_to(lab: Lab, new: FaultyMachine) -> None:
    place(new, BASE / "1.0").rename(place(new, "/1.0"))
    answer = lab.ask(new, "rollback")
    assert answer.status == ExitCode.NOT_FOUND
    assert stops(new) == []
    assert Layout(new).current() == "2.0"


def test_the_version_that_ran_last_is_gone_back_to_and_not_one_that_was_only_prepared(
    lab: Lab, prepared: FaultyMachine
) -> None:
    assert lab.run(prepared, "upgrade", "--bundle", "newest.tar") == 0
    assert lab.run(prepared, "rollback") == 0
    assert check_whole(prepared, ("1.0",)) == "1.0"


def test_a_version_that_failed_is_not_gone_back_to(lab: Lab, new: FaultyMachine) -> None:
    lab.desk.bundle(bundle_of("4.0", 4, "2.1.3", program=b"refuses"), "four.tar")
    assert lab.run(new, "upgrade", "--bundle", "four.tar") == ExitCode.ROLLED_BACK
    assert lab.run(new, "rollback") == 0
    assert check_whole(new, ("1.0",)) == "1.0"


# -- a new version that does not work -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bundle", "reference", "words"),
    [
        ("bad.tar", "unit-failed", f"{UNIT_CONTAINERD} says: I refuse"),
        ("dies.tar", "containerd-silent", f"{UNIT_CONTAINERD} says: I die"),
        ("silent.tar", "containerd-silent", "did not answer within 120 s"),
    ],
)
def test_a_version_that_does_not_get_ready_is_left_again_and_the_unit_says_why(
    lab: Lab, old: FaultyMachine, bundle: str, reference: str, words: str
) -> None:
    answer = lab.ask(old, "upgrade", "--bundle", bundle)
    assert answer.status == ExitCode.ROLLED_BACK == 20
    assert answer.error is not None
    assert answer.error.reference == reference
    assert words in answer.error.message
    assert answer.error.state == "version 1.0 runs again"
    assert check_whole(old, ("1.0",)) == "1.0"
    last = Journal(old).read()
    assert last is not None
    assert (last.name, last.state) == ("upgrade", "rolled-back")
    assert words in str(last.error)


def test_a_version_that_dies_after_its_first_answer_is_left_again(lab: Lab, old: FaultyMachine) -> None:
    """It is seen to go on for a while before it counts as ready."""
    started = old.clock

    def die(seconds: float) -> None:
        old.clock += seconds
        if Layout(old).current() == "2.0" and old.active(UNIT_CONTAINERD) and old.clock > started + 1:
            del old.running[UNIT_CONTAINERD]
            old.units[UNIT_CONTAINERD].active = "failed"

    old.sleep = die  # type: ignore[method-assign]
    answer = lab.ask(old, *UPGRADE)
    assert answer.status == ExitCode.ROLLED_BACK
    assert answer.error is not None
    assert answer.error.reference == "unit-unsteady"
    assert check_whole(old, ("1.0",)) == "1.0"


def test_a_version_whose_programs_do_not_run_here_is_refused_before_anything_stops(
    lab: Lab, old: FaultyMachine
) -> None:
    answer = lab.ask(old, "upgrade", "--bundle", "broken.tar")
    assert answer.status == ExitCode.FAILED
    assert answer.error is not None
    assert answer.error.reference == "program-broken"
    assert stops(old) == []
    assert old.active(UNIT_CONTAINERD)
    assert Layout(old).current() == "1.0"
    assert lab.run(old, *UPGRADE) == 0
    assert check_whole(old, ("2.0",)) == "2.0"


def test_a_containerd_of_an_unknown_release_leaves_the_old_version_running(lab: Lab, old: FaultyMachine) -> None:
    assert lab.run(old, "upgrade", "--bundle", "unknown.tar") != 0
    assert check_whole(old, ("1.0",)) == "1.0"


@pytest.mark.parametrize("command", [UPGRADE, ("upgrade", "--to", "1.0", "--allow-downgrade"), ("rollback",)])
@pytest.mark.parametrize("unit", [UNIT_CONTAINERD, "stratum.service"])
def test_a_masked_unit_is_found_before_anything_stops_and_stays_masked(
    lab: Lab, old: FaultyMachine, new: FaultyMachine, command: tuple[str, ...], unit: str
) -> None:
    machine, version = (old, "1.0") if command == UPGRADE else (new, "2.0")
    mask = place(machine, f"/run/systemd/system/{unit}")
    mask.symlink_to("/dev/null")
    answer = lab.ask(machine, *command)
    assert answer.status == ExitCode.HOST_REFUSED
    assert f"systemctl unmask {unit}" in str(answer.error.hint if answer.error else "")
    assert stops(machine) == []
    assert mask.is_symlink()
    assert check_whole(machine, (version,)) == version


def test_a_unit_that_is_masked_in_the_middle_is_an_error_and_not_written_through(lab: Lab, old: FaultyMachine) -> None:
    unit = place(old, SYSTEMD_DIR / UNIT_CONTAINERD)

    def mask() -> None:
        unit.unlink(missing_ok=True)
        unit.symlink_to("/dev/null")

    old.hooks[f"systemctl start {UNIT_CONTAINERD}"] = mask
    assert lab.run(old, *UPGRADE) == ExitCode.ROLLBACK_FAILED
    assert not os.path.lexists(place(old, "/dev/null"))
    assert lab.ask(old, "status").error is None


# -- a way back that fails ------------------------------------------------------------------------------


def test_a_rollback_that_fails_too_has_an_exit_status_of_its_own_and_is_tried_again(
    lab: Lab, old: FaultyMachine
) -> None:
    old.failing[f"systemctl start {UNIT_CONTAINERD}"] = 2
    answer = lab.ask(old, *UPGRADE)
    assert answer.status == ExitCode.ROLLBACK_FAILED == 21
    assert answer.error is not None
    assert str(answer.error.state).startswith("going back to 1.0 failed too: ")
    status = lab.ask(old, "status")
    assert status.status == ExitCode.FAILED
    assert "unfinished upgrade" in status.text
    assert "ready      no" in status.text
    assert boot(lab, old)
    assert check_whole(old, ("1.0",)) == "1.0"
    assert lab.run(old, *UPGRADE) == 0
    assert check_whole(old, ("2.0",)) == "2.0"


@pytest.mark.parametrize("command", ["start", "restart", "up", "rollback", "prune"])
def test_each_command_first_brings_what_was_cut_off_to_an_end(lab: Lab, old: FaultyMachine, command: str) -> None:
    old.failing[f"systemctl start {UNIT_CONTAINERD}"] = 2
    assert lab.run(old, *UPGRADE) == ExitCode.ROLLBACK_FAILED
    answer = lab.ask(old, command)
    assert answer.status == (ExitCode.NOT_FOUND if command == "rollback" else 0)
    assert check_whole(old, ("1.0",)) == "1.0"


def test_a_node_that_cannot_go_back_can_still_be_taken_away(lab: Lab, old: FaultyMachine) -> None:
    old.failing[f"systemctl start {UNIT_CONTAINERD}"] = 1000
    assert lab.run(old, *UPGRADE) == ExitCode.ROLLBACK_FAILED
    assert lab.run(old, "uninstall") == 0
    assert tree_of(Path(old.root)) == lab.original


def test_a_node_that_cannot_go_back_can_be_upgraded_to_a_version_that_works(lab: Lab, old: FaultyMachine) -> None:
    old.failing[f"systemctl start {UNIT_CONTAINERD}"] = 3
    assert lab.run(old, *UPGRADE) == ExitCode.ROLLBACK_FAILED
    assert lab.run(old, "upgrade", "--bundle", "newest.tar") == 0
    assert check_whole(old, ("3.0",)) == "3.0"


@pytest.mark.parametrize("command", [(), ("up",), ("upgrade", "--to", "2.0")], ids=["a boot", "up", "upgrade"])
def test_when_the_old_version_is_gone_the_way_is_forward(
    lab: Lab, old: FaultyMachine, command: tuple[str, ...]
) -> None:
    old.failing[f"systemctl start {UNIT_CONTAINERD}"] = 2
    assert lab.run(old, *UPGRADE) == ExitCode.ROLLBACK_FAILED
    place(old, BASE / "1.0").rename(place(old, "/1.0"))
    if command:
        assert lab.run(old, *command) == 0
    else:
        assert boot(lab, old)
    assert check_whole(old, ("2.0",)) == "2.0"


def test_status_shows_an_operation_in_progress(lab: Lab, old: FaultyMachine) -> None:
    seen = []
    old.hooks[f"systemctl start {UNIT_CONTAINERD}"] = lambda: seen.append(lab.ask(old, "status"))
    assert lab.run(old, *UPGRADE) == 0
    assert "unfinished upgrade to 2.0 at step start" in seen[0].text
    assert seen[0].status == ExitCode.FAILED


# -- the link -------------------------------------------------------------------------------------------


def a_file(path: Path) -> None:
    path.write_text("1.0\n")


def a_directory(path: Path) -> None:
    path.mkdir()


def dangling(path: Path) -> None:
    path.symlink_to("0.9")


def outside(path: Path) -> None:
    path.symlink_to("../../other")


LINKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file": (a_file, "current-not-a-link"),
    "a directory": (a_directory, "current-not-a-link"),
    "dangling": (dangling, "current-dangles"),
    "outside": (outside, "current-outside"),
}


@pytest.mark.parametrize("kind", list(LINKS))
@pytest.mark.parametrize("command", [UPGRADE, ("upgrade", "--to", "1.0"), ("rollback",), ("prune",), ("remove", "1.0")])
def test_a_link_that_is_none_of_ours_stops_a_command_before_it_changes_anything(
    lab: Lab, new: FaultyMachine, command: tuple[str, ...], kind: str
) -> None:
    bend, reference = LINKS[kind]
    link = place(new, BASE / "current")
    link.unlink()
    bend(link)
    before = tree_of(Path(new.root))
    answer = lab.ask(new, *command)
    assert answer.error is not None
    assert (answer.status, answer.error.reference) == (ExitCode.FAILED, reference)
    assert tree_of(Path(new.root)) == before
    assert stops(new) == []


@pytest.mark.parametrize("kind", list(LINKS))
def test_what_the_error_about_the_link_advises_helps(lab: Lab, new: FaultyMachine, kind: str) -> None:
    link = place(new, BASE / "current")
    link.unlink()
    LINKS[kind][0](link)
    assert "then run" in str(getattr(lab.ask(new, "up", "--bundle", "new.tar").error, "hint", ""))
    link.rename(place(new, "/moved-away"))
    assert lab.run(new, "up", "--bundle", "new.tar") == 0
    assert check_whole(new, ("2.0",)) == "2.0"


# -- changed and missing files --------------------------------------------------------------------------


def delete(path: Path) -> None:
    path.unlink()


def replace_file(path: Path) -> None:
    path.unlink()
    path.write_text("somebody else's\n")


@pytest.mark.parametrize("damage", [delete, replace_file], ids=["deleted", "replaced"])
@pytest.mark.parametrize("command", [("rollback",), ("upgrade", "--to", "1.0", "--allow-downgrade")])
def test_a_version_that_somebody_changed_is_put_right_before_it_runs(
    lab: Lab, new: FaultyMachine, command: tuple[str, ...], damage: Callable[[Path], None]
) -> None:
    damage(place(new, BASE / "1.0/bin/containerd"))
    assert lab.run(new, *command) == 0
    assert check_whole(new, ("1.0",)) == "1.0"


@pytest.mark.parametrize("command", [("rollback",), ("upgrade", "--to", "1.0", "--allow-downgrade")])
def test_a_program_that_somebody_edited_is_not_started(lab: Lab, new: FaultyMachine, command: tuple[str, ...]) -> None:
    """The component is the same file, so there is nothing to put it right from."""
    with place(new, BASE / "1.0/bin/containerd").open("a") as file:
        file.write("# edited\n")
    answer = lab.ask(new, *command)
    assert answer.status == ExitCode.FAILED
    assert "stratum up --bundle" in str(answer.error.hint if answer.error else "")
    assert stops(new) == []
    assert check_whole(new, ("2.0",)) == "2.0"


def test_an_edited_configuration_is_named_before_a_switch_writes_it_anew(lab: Lab, new: FaultyMachine) -> None:
    path = place(new, "/etc/stratum/containerd/config.toml")
    with path.open("a") as file:
        file.write("# edited\n")
    for words in (("rollback", "--dry-run"), ("rollback",)):
        (warning,) = [line for line in lab.ask(new, *words).said.splitlines() if "warning" in line]
        assert "/etc/stratum/containerd/config.toml: somebody changed it" in warning
    assert "# edited" not in path.read_text()
    assert "warning" not in lab.ask(new, *UPGRADE).said


def test_status_shows_a_mode_that_somebody_changed_and_up_puts_it_back(lab: Lab, new: FaultyMachine) -> None:
    path = place(new, BASE / "2.0/bin/containerd")
    mode = path.stat().st_mode & 0o7777
    path.chmod(0o600)
    line = f"drift      {BASE}/2.0/bin/containerd: mode 0600, was {mode:04o}"
    assert line in lab.ask(new, "status").text.splitlines()
    assert lab.run(new, "up") == 0
    assert path.stat().st_mode & 0o7777 == mode
    assert "drift" not in lab.ask(new, "status").text


def test_a_version_without_its_description_is_not_switched_to(lab: Lab, new: FaultyMachine) -> None:
    place(new, BASE / "1.0/bundle.json").unlink()
    answer = lab.ask(new, "rollback")
    assert answer.status == ExitCode.FAILED
    assert answer.error is not None
    assert answer.error.reference == "version-unreadable"
    assert stops(new) == []


def test_a_program_that_was_replaced_runs_no_more_after_up_put_it_right(lab: Lab, new: FaultyMachine) -> None:
    replace_file(place(new, BASE / "2.0/bin/containerd"))
    assert lab.run(new, "restart") == 0
    assert lab.run(new, "up", "--bundle", "new.tar") == 0
    assert check_whole(new, ("2.0",)) == "2.0"


def test_a_command_line_that_was_replaced_runs_no_more_after_up_put_it_right(lab: Lab, new: FaultyMachine) -> None:
    unit = place(new, SYSTEMD_DIR / UNIT_CONTAINERD)
    unit.write_text(unit.read_text() + "Environment=OTHER=1\n")
    new.run(["systemctl", "daemon-reload"], timeout=1)
    assert lab.run(new, "restart") == 0
    assert lab.run(new, "up", "--bundle", "new.tar") == 0
    assert b"OTHER" not in new.running[UNIT_CONTAINERD][2]


@pytest.mark.parametrize("words", [("up",), UPGRADE], ids=["up", "upgrade"])
def test_the_supervisor_goes_on_with_a_newer_program_and_is_left_alone_otherwise(
    lab: Lab, old: FaultyMachine, words: tuple[str, ...]
) -> None:
    def restarts() -> int:
        return sum("restart --no-block stratum.service" in line for line in old.commands)

    assert lab.run(old, "up") == 0
    assert restarts() == 0
    before = lab.desk.archive.read_bytes()
    lab.desk.archive.write_bytes(before + b"newer")
    try:
        assert lab.run(old, *words) == 0
    finally:
        lab.desk.archive.write_bytes(before)
    assert restarts() == 1


def test_files_that_somebody_added_to_a_version_do_not_matter(lab: Lab, new: FaultyMachine) -> None:
    place(new, BASE / "1.0/bin/mine").write_text("mine\n")
    assert lab.run(new, "rollback") == 0
    assert check_whole(new, ("1.0",)) == "1.0"


# -- two at once, a full disk, a signal -----------------------------------------------------------------


def test_two_upgrades_at_once_are_one_upgrade_and_one_refusal(lab: Lab, old: FaultyMachine) -> None:
    answers = []
    old.hooks[f"systemctl stop {UNIT_CONTAINERD}"] = lambda: answers.append(lab.ask(old, *UPGRADE))
    assert lab.run(old, *UPGRADE) == 0
    assert [answer.status for answer in answers] == [ExitCode.LOCKED]
    assert check_whole(old, ("2.0",)) == "2.0"


@pytest.mark.parametrize("command", [UPGRADE, ("rollback",), ("prune",), ("remove", "1.0")])
def test_a_live_runs_staging_is_left_to_it(lab: Lab, new: FaultyMachine, command: tuple[str, ...]) -> None:
    staged = place(new, "/opt/stratum/.staging/0123456789abcdef/file")
    with lock.hold_lock(new, "up"):
        staged.parent.mkdir(parents=True)
        staged.write_text("in the making")
        assert lab.run(new, *command) == ExitCode.LOCKED
        assert staged.exists()
    assert lab.run(new, "prune", "--keep", "9") == 0
    assert find_strays(new) == []


def fill_disk(machine: FaultyMachine, number: int) -> None:
    """The change ``number`` that needs room and all that come after it find none, until something is removed."""
    count = 0
    mutation = machine.mutation
    full = False

    def changed(what: str) -> None:
        nonlocal count, full
        mutation(what)
        if what.startswith(("create", "write", "mkdir", "link", "symlink")):
            count += 1
            full = full or count == number
            if full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), what.split()[1])
        elif full and what.startswith(("unlink", "rmdir")):
            full = False

    machine.mutation = changed  # type: ignore[method-assign]


def test_a_disk_that_is_full_at_any_moment_of_preparing_disturbs_nothing(lab: Lab) -> None:
    with lab.machine("old") as machine:
        machine.arm(None)
        assert lab.run(machine, *UPGRADE) == 0
        needs = [what for what in machine.mutations if what.startswith(("create", "write", "mkdir", "link", "symlink"))]
        stop = machine.mutations.index(f"run systemctl stop {UNIT_CONTAINERD}")
        preparing = sum(what in needs for what in machine.mutations[:stop])
    assert preparing > 40
    for number in range(1, preparing - 4):  # the last ones belong to the journal of the switch
        with lab.machine("old") as machine:
            machine.arm(None)
            fill_disk(machine, number)
            answer = lab.ask(machine, *UPGRADE)
            assert answer.status == ExitCode.FAILED, number
            assert "No space left" in str(answer.error), number
            del machine.mutation  # type: ignore[attr-defined]
            assert stops(machine) == []
            assert machine.active(UNIT_CONTAINERD)
            assert Layout(machine).current() == "1.0"
            assert lab.run(machine, *UPGRADE) == 0
            assert check_whole(machine, ("2.0",)) == "2.0"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_at_any_moment_leaves_a_whole_node_and_the_command_can_be_repeated(lab: Lab, number: int) -> None:
    handlers = {item: signal.getsignal(item) for item in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    before = 0
    while True:
        with lab.machine("old") as machine:
            machine.arm(None)
            mutation, count = machine.mutation, 0

            before += 1
            moments = (before, before + 7)  # and again, while it goes back

            def interrupt(
                what: str, mutation: Callable[[str], None] = mutation, moments: tuple[int, int] = moments
            ) -> None:
                nonlocal count
                mutation(what)
                count += 1
                if count in moments:
                    signal.raise_signal(number)

            machine.mutation = interrupt  # type: ignore[method-assign]
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, cli._on_signal)
            signal.signal(signal.SIGHUP, cli._on_signal)
            try:
                lab.run(machine, *UPGRADE)
                cut_off = False
            except (KeyboardInterrupt, cli.Terminated):
                cut_off = True
            finally:
                for item, handler in handlers.items():
                    signal.signal(item, handler)
            if count < before:
                break
            machine.mutation = mutation  # type: ignore[method-assign]
            where = f"at {before}: {machine.mutations[before - 1]}"
            if not lab.is_new(machine, "interrupted", cut_off):
                continue
            if Layout(machine).current() == "2.0" and Journal(machine).unfinished() is None:
                assert check_whole(machine, ("2.0",)) == "2.0", where
            assert machine.active(UNIT_CONTAINERD), where
            assert lab.run(machine, *UPGRADE) == 0, where
            assert check_whole(machine, ("2.0",)) == "2.0", where
    assert before > 120


# -- removing -------------------------------------------------------------------------------------------


def components_of(machine: FaultyMachine, version: str) -> set[str]:
    record = read_record(Layout(machine), version)
    assert record is not None
    return {layer.replace(":", "-") for _, _, layer in record.components}


def test_removing_a_version_frees_what_no_other_uses_and_nothing_else(lab: Lab, newest: FaultyMachine) -> None:
    mine = components_of(newest, "1.0")
    others = components_of(newest, "2.0") | components_of(newest, "3.0")
    assert mine & others
    blobs = set(newest.listdir(BLOBS))
    assert lab.run(newest, "remove", "1.0") == 0
    assert Layout(newest).versions() == ["2.0", "3.0"]
    assert set(newest.listdir(COMPONENTS)) == others
    gone = blobs - set(newest.listdir(BLOBS))
    assert gone
    assert not [entry.path for entry in Receipt.load(newest) if BASE / "1.0" in (entry.path, *entry.path.parents)]
    assert check_whole(newest, ("3.0",)) == "3.0"
    assert lab.run(newest, "rollback") == 0
    assert check_whole(newest, ("2.0",)) == "2.0"


def test_the_active_version_is_not_removed(lab: Lab, new: FaultyMachine) -> None:
    answer = lab.ask(new, "remove", "2.0")
    assert answer.status == ExitCode.FAILED
    assert answer.error is not None
    assert answer.error.reference == "version-active"
    assert check_whole(new, ("2.0",)) == "2.0"


@pytest.mark.parametrize(("keep", "left"), [("1", ["3.0"]), ("2", ["2.0", "3.0"]), ("3", ["1.0", "2.0", "3.0"])])
def test_pruning_keeps_the_active_version_and_those_that_ran_last(
    lab: Lab, newest: FaultyMachine, keep: str, left: list[str]
) -> None:
    assert lab.run(newest, "prune", "--keep", keep) == 0
    assert Layout(newest).versions() == left
    assert set(newest.listdir(COMPONENTS)) == set().union(*(components_of(newest, version) for version in left))
    assert check_whole(newest, ("3.0",)) == "3.0"


def test_pruning_never_takes_the_active_version_however_old_it_is(lab: Lab, newest: FaultyMachine) -> None:
    assert lab.run(newest, "rollback", "1.0") == 0
    assert lab.run(newest, "prune", "--keep", "1") == 0
    assert Layout(newest).versions() == ["1.0"]
    assert check_whole(newest, ("1.0",)) == "1.0"


def test_keeping_no_version_is_a_usage_error(lab: Lab, new: FaultyMachine) -> None:
    assert lab.run(new, "prune", "--keep", "0") == ExitCode.USAGE


def test_a_version_whose_needs_are_not_known_stops_pruning(lab: Lab, newest: FaultyMachine) -> None:
    place(newest, BASE / "2.0/bundle.json").unlink()
    answer = lab.ask(newest, "prune", "--keep", "2")
    assert answer.status == ExitCode.FAILED
    assert Layout(newest).versions() == ["1.0", "2.0", "3.0"]
    assert components_of(newest, "1.0") <= set(newest.listdir(COMPONENTS))


def test_after_everything_uninstall_leaves_the_machine_as_it_was(lab: Lab, newest: FaultyMachine) -> None:
    for command in (("rollback",), ("prune", "--keep", "2"), ("upgrade", "--bundle", "newest.tar"), ("remove", "2.0")):
        lab.run(newest, *command)
    assert lab.run(newest, "uninstall") == 0
    assert tree_of(Path(newest.root)) == lab.original


# -- reports from the field -----------------------------------------------------------------------------


def test_unit_files_are_real_files_beside_no_link_into_opt(new: FaultyMachine) -> None:
    """/opt may be a file system of its own, which is not there yet when systemd reads its units."""
    found = [
        path for path in place(new, SYSTEMD_DIR).rglob("stratum*") if path.parent.name != "multi-user.target.wants"
    ]
    assert len(found) >= 3
    for path in found:
        assert not path.is_symlink()
    wants = place(new, SYSTEMD_DIR / "multi-user.target.wants/stratum.service")
    assert str(wants.readlink()) == str(SYSTEMD_DIR / "stratum.service")
    assert "RequiresMountsFor=/opt/stratum" in place(new, SYSTEMD_DIR / UNIT_CONTAINERD).read_text()


def test_leftovers_of_killed_runs_do_not_pile_up(lab: Lab, old: FaultyMachine) -> None:
    for _ in range(3):
        old.arm(60)
        with pytest.raises(Killed):
            lab.run(old, *UPGRADE)
        old.revive()
        assert len(find_strays(old)) <= 2
    assert lab.run(old, *UPGRADE) == 0
    assert find_strays(old) == []


# -- exec and logs --------------------------------------------------------------------------------------


class Became(Exception):
    """The process would be another program now."""


def test_exec_runs_a_command_on_the_host_with_the_active_version_first(
    lab: Lab, new: FaultyMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def become(program: str, argv: list[str], environ: dict[str, str]) -> None:
        raise Became(program, argv, environ)

    monkeypatch.setattr(os, "execve", become)
    monkeypatch.setattr("stratum.commands.exec.Host", lambda environ: type(new)(new.root, environ))
    with pytest.raises(Became) as caught:
        lab.run(new, "exec", "--", "ctr", "images", "list")
    program, argv, environ = caught.value.args
    assert program == f"{BASE}/current/bin/ctr"
    assert argv == ["ctr", "images", "list"]
    assert environ["PATH"].startswith(f"{BASE}/current/bin:")
    assert environ["CONTAINERD_ADDRESS"] == "/run/stratum/containerd/containerd.sock"
    assert lab.run(new, "exec", "no-such-program") == ExitCode.NOT_FOUND


@pytest.mark.parametrize(
    ("words", "units"),
    [
        ((), [UNIT_CONTAINERD, "stratum.service"]),
        (("containerd",), [UNIT_CONTAINERD]),
        ((UNIT_CONTAINERD,), [UNIT_CONTAINERD]),
        (("stratum",), ["stratum.service"]),
    ],
)
def test_logs_show_one_unit_or_all_of_ours(
    lab: Lab, new: FaultyMachine, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], units: list[str]
) -> None:
    def become(program: str, argv: list[str]) -> None:
        raise Became(argv)

    monkeypatch.setattr(os, "execv", become)
    with pytest.raises(Became) as caught:
        lab.run(new, "logs", *words)
    assert [word for word in caught.value.args[0] if word.startswith("--unit")] == [f"--unit={unit}" for unit in units]


def test_logs_of_a_unit_that_is_not_ours_are_a_usage_error(lab: Lab, new: FaultyMachine) -> None:
    assert lab.run(new, "logs", "sshd") == ExitCode.USAGE


def test_status_shows_drop_ins_of_the_users_and_none_of_ours(lab: Lab, new: FaultyMachine) -> None:
    theirs = f"{SYSTEMD_DIR}/{UNIT_CONTAINERD}.d/10-mine.conf"
    ours = f"{SYSTEMD_DIR}/{UNIT_CONTAINERD}.d/10-path.conf"
    show = new._show

    def with_drop_ins(name: str) -> str:
        found = f"{ours} {theirs}" if name == UNIT_CONTAINERD else ""
        return show(name).replace("DropInPaths=", f"DropInPaths={found}")

    new._show = with_drop_ins  # type: ignore[method-assign]
    text = lab.ask(new, "status").text
    assert f"drop-in of yours: {theirs}" in text
    assert ours not in text
    units = json.loads(lab.ask(new, "status", "--output", "json").text)["units"]
    assert {unit: value["dropIns"] for unit, value in units.items()} == {
        UNIT_CONTAINERD: [theirs],
        "stratum.service": [],
    }
