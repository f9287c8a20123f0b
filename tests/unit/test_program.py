"""Stratum's own copy on the host: versioned, behind one link, and what runs it at boot."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stratum import __version__
from stratum.errors import StratumError
from stratum.host import program
from stratum.host.program import CopyProgram, plan_program, plan_prune, supervisor_argv, why_no_link
from stratum.journal import Journal
from stratum.receipt import Receipt
from stratum.steps import Action, Work
from stratum.system import Host, HostPath, PathLike
from tests.bundles import snapshot
from tests.fakes import FaultHost, Killed, MachineHost, make_tree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = make_tree(tmp_path / "root")
    (root / "var/lib/stratum").mkdir()
    return root


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "usb.pyz"
    path.write_bytes(b"#!/usr/bin/env python3\n" + bytes(3_000_000))
    path.chmod(0o644)
    return path


def make_work(root: Path, dies_at: int | None = None) -> Work:
    host = FaultHost(str(root), {}, dies_at)
    return Work(host, Receipt.load(host), Journal(host))


def install(work: Work, archive: Path) -> list[Action]:
    actions = plan_program(work, str(archive))
    for action in actions:
        action.perform(work)
    return actions


def installed(root: Path) -> Path:
    """The copy that the unit runs and, through the same link, the command on PATH."""
    chosen = root / "opt/stratum/pyz/current"
    assert "/" not in os.readlink(chosen), "a relative link holds in a tree as well"
    assert os.readlink(root / "usr/local/bin/stratum") == "/opt/stratum/pyz/current/stratum.pyz"
    return chosen.parent / os.readlink(chosen) / "stratum.pyz"


def test_the_copy_is_whole_executable_and_behind_the_link(root: Path, archive: Path) -> None:
    install(make_work(root), archive)
    path = installed(root)
    assert path.read_bytes() == archive.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert path.parent.name.startswith(f"{__version__}-")
    assert not path.is_symlink() and path.stat().st_ino != archive.stat().st_ino


def test_installing_the_same_again_does_nothing(root: Path, archive: Path) -> None:
    install(make_work(root), archive)
    before = snapshot(root)
    assert install(make_work(root), archive) == []
    assert install(make_work(root), installed(root)) == [], "also when the installed one runs"
    assert snapshot(root) == before


def test_another_build_gets_a_place_of_its_own_and_the_link_turns(root: Path, archive: Path) -> None:
    work = make_work(root)
    install(work, archive)
    old = installed(root)
    archive.write_bytes(b"another build")
    install(work, archive)
    assert installed(root) != old
    assert old.exists(), "an upgrade of Stratum can go back too"


@pytest.mark.parametrize("damage", ["cut", "gone", "a link"])
def test_a_damaged_copy_is_put_back(root: Path, archive: Path, damage: str) -> None:
    install(make_work(root), archive)
    path = installed(root)
    if damage == "cut":
        os.truncate(path, 100)
    else:
        path.unlink()
        if damage == "a link":
            path.symlink_to("/etc/hostname")
    install(make_work(root), archive)
    assert path.read_bytes() == archive.read_bytes()
    assert not path.is_symlink()
    assert (root / "etc/hostname").read_text() == "node\n"


def read_only(host: FaultHost, place: str) -> None:
    """Let ``place`` look as if it were mounted read-only, and refuse what is written there."""
    real = host.statvfs

    def statvfs(path: PathLike) -> os.statvfs_result:
        if HostPath(place) in (HostPath(str(path)), *HostPath(str(path)).parents):
            return SimpleNamespace(f_flag=os.ST_RDONLY)  # type: ignore[return-value]
        return real(path)

    host.statvfs = statvfs  # type: ignore[method-assign]


def test_with_a_read_only_usr_all_is_made_but_the_command_and_a_later_run_makes_that(root: Path, archive: Path) -> None:
    work = make_work(root)
    assert isinstance(work.host, FaultHost)
    read_only(work.host, "/usr")
    install(work, archive)
    assert why_no_link(work.host) == "on a read-only file system"
    assert not (root / "usr/local/bin/stratum").exists()
    assert work.receipt.get("/usr/local/bin/stratum") is None
    assert (root / supervisor_argv(work.host)[2][1:]).read_bytes() == archive.read_bytes()
    assert install(work, archive) == []

    work = make_work(root)
    (action,) = install(work, archive)
    assert action.describe() == "link /usr/local/bin/stratum -> /opt/stratum/pyz/current/stratum.pyz"
    assert installed(root).read_bytes() == archive.read_bytes()
    assert why_no_link(work.host) == ""


def test_a_usr_that_became_read_only_takes_a_newer_program_all_the_same(root: Path, archive: Path) -> None:
    install(make_work(root), archive)
    archive.write_bytes(b"another build")
    work = make_work(root)
    assert isinstance(work.host, FaultHost)
    read_only(work.host, "/usr")
    assert why_no_link(work.host) == ""
    install(work, archive)
    assert (root / os.readlink(root / "usr/local/bin/stratum")[1:]).read_bytes() == b"another build"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_command_of_that_name_that_is_not_ours_is_refused(root: Path, archive: Path, kind: str) -> None:
    path = root / "usr/local/bin/stratum"
    path.write_text("theirs") if kind == "file" else path.symlink_to("/opt/theirs/stratum")
    before = snapshot(root)
    with pytest.raises(StratumError) as caught:
        plan_program(make_work(root), str(archive))
    assert caught.value.reference == "foreign-file"
    assert snapshot(root) == before


def test_at_every_moment_the_link_leads_to_a_whole_program(root: Path, archive: Path) -> None:
    install(make_work(root), archive)
    wholes = {archive.read_bytes(), b"another build"}
    archive.write_bytes(b"another build")
    for number in range(100):
        try:
            install(make_work(root, number), archive)
        except Killed:
            assert installed(root).read_bytes() in wholes
            continue
        assert number > 5
        return
    pytest.fail("it never came to an end")


def test_a_copy_that_fails_leaves_no_part_of_itself(root: Path, archive: Path) -> None:
    work = make_work(root)
    host = work.host
    assert isinstance(host, FaultHost)

    def full(file: object) -> None:
        raise OSError(28, "No space left on device")

    host.fsync = full  # type: ignore[method-assign, assignment]
    with pytest.raises(OSError):
        install(work, archive)
    assert [path for path in root.rglob("*") if path.name.endswith(".tmp") or path.name == "stratum.pyz"] == []


def test_an_archive_that_changes_between_plan_and_copy_is_not_installed(root: Path, archive: Path) -> None:
    """The USB stick was swapped: what is recorded would not be what is there."""
    work = make_work(root)
    actions = plan_program(work, str(archive))
    archive.write_bytes(b"something else")
    with pytest.raises(StratumError) as caught:
        for action in actions:
            action.perform(work)
    assert caught.value.reference == "program-changed"
    assert [path for path in root.rglob("*") if path.is_file() and b"something else" in path.read_bytes()] == []


def test_the_plan_names_both_ends(root: Path, archive: Path) -> None:
    actions = plan_program(make_work(root), str(archive))
    copies = [action for action in actions if isinstance(action, CopyProgram)]
    assert [action.describe() for action in copies] == [f"copy {archive} -> {copies[0].path}"]


# -- old ones -------------------------------------------------------------------------------------------


def install_builds(work: Work, archive: Path, builds: str) -> list[Path]:
    """Install a build for each letter, one after the other and without pruning; where each is."""
    found = []
    for letter in builds:
        archive.write_text(f"build {letter}")
        install(work, archive)
        found.append(installed(Path(work.host.root)))
    return found


def prune(work: Work, archive: Path) -> list[Action]:
    actions = plan_prune(work, str(archive))
    for action in actions:
        action.perform(work)
    return actions


@pytest.mark.parametrize(
    ("builds", "kept"),
    [("a", "a"), ("ab", "ab"), ("abc", "bc"), ("abcd", "cd"), ("aba", "ab"), ("abcb", "bc"), ("abca", "ac")],
)
def test_the_copy_in_use_and_the_one_before_it_stay(root: Path, archive: Path, builds: str, kept: str) -> None:
    work = make_work(root)
    places = dict(zip(builds, install_builds(work, archive, builds)))
    planned = {action.describe() for action in plan_prune(make_work(root), str(archive))}
    assert planned == {f"remove program /opt/stratum/pyz/{places[it].parent.name}" for it in set(builds) - set(kept)}
    prune(work, archive)
    assert {letter for letter, path in places.items() if path.exists()} == set(kept)
    assert installed(root).read_text() == f"build {builds[-1]}"
    names = {path.name for path in (root / "opt/stratum/pyz").iterdir()}
    assert names == {"current", *(places[letter].parent.name for letter in kept)}
    recorded = {entry.path.parent.name for entry in Receipt.load(work.host) if entry.path.name == "stratum.pyz"}
    assert recorded == names - {"current"}
    assert prune(make_work(root), archive) == []


def test_the_plan_before_a_newer_copy_is_installed_is_what_is_done_after_it(root: Path, archive: Path) -> None:
    work = make_work(root)
    install_builds(work, archive, "ab")
    archive.write_text("build c")
    before = [action.describe() for action in plan_prune(work, str(archive))]
    install(work, archive)
    assert [action.describe() for action in plan_prune(work, str(archive))] == before != []


def test_an_old_copy_that_somebody_changed_and_files_beside_one_stay(root: Path, archive: Path) -> None:
    work = make_work(root)
    first, second, *_ = install_builds(work, archive, "abcd")
    first.write_text("mine")
    (second.parent / "notes").write_text("mine")
    prune(work, archive)
    assert first.read_text() == "mine"
    assert (second.parent / "notes").read_text() == "mine" and not second.exists()
    assert work.receipt.get(f"/opt/stratum/pyz/{first.parent.name}/stratum.pyz") is not None


def test_a_copy_that_the_command_still_leads_to_stays(root: Path, archive: Path) -> None:
    """An earlier release made that link, and /usr is read-only by now."""
    work = make_work(root)
    first, *_ = install_builds(work, archive, "abc")
    link = root / "usr/local/bin/stratum"
    link.unlink()
    link.symlink_to(f"/opt/stratum/pyz/{first.parent.name}/stratum.pyz")
    prune(work, archive)
    assert first.exists()


def test_pruning_that_is_killed_at_any_change_is_finished_by_the_next(root: Path, archive: Path) -> None:
    work = make_work(root)
    install_builds(work, archive, "ab")
    for number in range(100):
        archive.write_text(f"build {number}")
        install(make_work(root), archive)
        killed = make_work(root, number)
        try:
            prune(killed, archive)
        except Killed:
            prune(make_work(root), archive)
            assert len(list((root / "opt/stratum/pyz").iterdir())) == 3
            assert all(killed.host.lexists(entry.path) for entry in Receipt.load(Host(str(root), {})))
            continue
        assert number > 2
        return
    pytest.fail("it never came to an end")


# -- what runs it ---------------------------------------------------------------------------------------


def test_a_tree_is_started_by_its_own_python(root: Path) -> None:
    assert supervisor_argv(Host(str(root), {})) == [
        "/usr/bin/python3",
        "-IS",
        "/opt/stratum/pyz/current/stratum.pyz",
        "up",
        "--supervise",
    ]


def test_a_machine_is_started_by_its_python_when_that_is_the_same_release(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "root", live=True)
    host = MachineHost(str(root), {})
    same = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for name, expected in ((same, program.SYSTEM_PYTHON), ("python3.5", os.path.realpath(sys.executable))):
        (root / "usr/bin" / name).write_text("#!/bin/sh\n")
        (root / "usr/bin/python3").unlink()
        (root / "usr/bin/python3").symlink_to(name)
        if name == same or os.path.realpath("/usr/bin/python3") != os.path.realpath(sys.executable):
            assert supervisor_argv(host)[0] == expected
    (root / "usr/bin/python3").unlink()
    assert supervisor_argv(host)[0] == os.path.realpath(sys.executable)


def test_no_flag_of_one_run_is_in_the_steady_state_command_line(root: Path) -> None:
    argv = supervisor_argv(Host(str(root), {}))
    assert "--bundle" not in argv and not any("insecure" in word for word in argv)
    assert argv[-1] == "--supervise"
