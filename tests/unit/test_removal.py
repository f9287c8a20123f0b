"""Taking away exactly what the receipt lists, in the state in which Stratum left it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stratum.journal import JOURNAL_PATH, Journal
from stratum.receipt import RECEIPT_PATH, STATE_DIRECTORY, Entry, Receipt, content_digest
from stratum.removal import Removal, plan_removal
from stratum.steps import MakeDirectory, PlaceLink, RemoveTree, Work, WriteFile
from stratum.system import Host, HostPath, PathLike
from tests.bundles import snapshot
from tests.fakes import FaultHost


class MountedHost(FaultHost):
    """A host with mounts that are not there: a bind of the same file system shows in the mount table alone."""

    mounted: tuple[str, ...] = ()

    def mount_points(self) -> list[str]:
        return [self.root + name for name in self.mounted]


def make_work(root: Path, host: Host | None = None) -> Work:
    host = host or FaultHost(str(root), {})
    return Work(host, Receipt.load(host), Journal(host))


def remove(work: Work, **options: object) -> Removal:
    removal = plan_removal(work, **options)  # type: ignore[arg-type]
    for action in [*removal.actions, *removal.closing]:
        action.perform(work)
    return removal


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/var/lib/stratum").mkdir(parents=True)
    (tmp_path / "root/opt").mkdir()
    return tmp_path / "root"


@pytest.fixture
def work(root: Path) -> Work:
    work = make_work(root)
    work.receipt.record(Entry(STATE_DIRECTORY, "directory"))
    work.journal.begin("up")
    for path in ("/opt/ours", "/opt/ours/sub"):
        MakeDirectory(HostPath(path)).perform(work)
    WriteFile(HostPath("/opt/ours/sub/file"), b"ours").perform(work)
    PlaceLink(HostPath("/opt/ours/link"), "sub/file").perform(work)
    work.receipt.record(Entry(HostPath("/opt/data"), "tree"))
    (root / "opt/data/deep").mkdir(parents=True)
    (root / "opt/data/deep/anything").write_text("whatever")
    return work


def why(removal: Removal) -> dict[str, str]:
    return {str(left.path): left.why for left in removal.left}


def test_everything_of_ours_goes_and_the_record_last(work: Work, root: Path) -> None:
    removal = remove(work)
    assert removal.left == []
    assert sorted(path.name for path in root.rglob("*")) == ["lib", "opt", "var"]
    assert isinstance(work.host, FaultHost)
    removals = [line for line in work.host.mutations if line.startswith(("unlink", "rmdir"))]
    record = removals.index(f"unlink {RECEIPT_PATH}")
    assert removals[record:] == [f"unlink {RECEIPT_PATH}", f"rmdir {STATE_DIRECTORY}"]


def test_planning_changes_nothing(work: Work, root: Path) -> None:
    before = snapshot(root)
    plan_removal(work)
    assert snapshot(root) == before


def test_a_changed_file_stays_with_the_directories_above_it(work: Work, root: Path) -> None:
    (root / "opt/ours/sub/file").write_text("theirs")
    removal = remove(work)
    assert why(removal) == {
        "/opt/ours/sub/file": "changed since Stratum wrote it",
        "/opt/ours/sub": "holds what is not Stratum's: file",
        "/opt/ours": "holds what is not Stratum's: sub",
    }
    assert (root / "opt/ours/sub/file").read_text() == "theirs"
    assert not (root / "opt/ours/link").is_symlink()


def test_a_file_that_others_put_into_our_directory_stays(work: Work, root: Path) -> None:
    (root / "opt/ours/sub/.hidden").touch()
    removal = remove(work)
    assert why(removal)["/opt/ours/sub"] == "holds what is not Stratum's: .hidden"
    assert os.listdir(root / "opt/ours/sub") == [".hidden"]


def test_a_tree_goes_with_all_that_is_in_it_but_no_link_is_followed(work: Work, root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/canary").touch()
    (root / "opt/canary").touch()
    (root / "opt/data/out").symlink_to(tmp_path / "outside")
    (root / "opt/data/up").symlink_to("..")
    os.link(root / "opt/canary", root / "opt/data/hard")
    remove(work)
    assert not (root / "opt/data").exists()
    assert (tmp_path / "outside/canary").exists()
    assert (root / "opt/canary").exists()


@pytest.mark.parametrize("what", ["data", "ours"])
def test_a_directory_that_is_a_link_now_is_left_with_all_behind_it(work: Work, root: Path, what: str) -> None:
    shutil.move(str(root / "opt" / what), str(root / "srv"))
    (root / "opt" / what).symlink_to("/srv")
    before = snapshot(root / "srv")
    removal = remove(work)
    assert snapshot(root / "srv") == before
    assert why(removal)[f"/opt/{what}"] == "was a directory of Stratum's and is something else now"
    assert os.readlink(root / "opt" / what) == "/srv"


@pytest.mark.parametrize("mount", ["/opt/data", "/opt/data/deep", "/opt/data/deep/anything"])
def test_a_tree_with_a_mount_in_it_is_left_whole(root: Path, work: Work, mount: str) -> None:
    host = MountedHost(str(root), {})
    host.mounted = (mount,)
    removal = remove(make_work(root, host))
    assert why(removal) == {"/opt/data": f"a file system is mounted at {root}{mount}"}
    assert (root / "opt/data/deep/anything").read_text() == "whatever"
    assert not (root / "opt/ours").exists()


def test_a_mount_that_appears_after_the_plan_stops_the_removal_before_its_first_file(root: Path, work: Work) -> None:
    host = MountedHost(str(root), {})
    (root / "opt/data/another").touch()
    late = make_work(root, host)
    removal = plan_removal(late)
    host.mounted = ("/opt/data/deep",)
    before = snapshot(root / "opt/data")
    with pytest.raises(Exception, match="mounted at"):
        for action in removal.actions:
            action.perform(late)
    assert snapshot(root / "opt/data") == before
    assert (root / "var/lib/stratum/receipt.json").exists(), "the record is kept for the next try"


def test_a_directory_of_ours_that_is_a_mount_point_is_left(root: Path, work: Work) -> None:
    host = MountedHost(str(root), {})
    host.mounted = ("/opt/ours", "/var/lib/stratum")
    removal = remove(make_work(root, host))
    assert why(removal) == {
        "/opt/ours": "a file system is mounted there",
        "/var/lib/stratum": "a file system is mounted there",
    }
    assert os.listdir(root / "opt/ours") == []
    assert os.listdir(root / "var/lib/stratum") == []


def test_a_mount_beside_a_tree_of_ours_is_no_mount_in_it(root: Path, work: Work) -> None:
    host = MountedHost(str(root), {})
    (root / "opt/data2").mkdir()
    host.mounted = ("/opt/data2", "/opt")
    assert remove(make_work(root, host)).left == []


def test_what_somebody_puts_there_after_the_plan_keeps_its_directory(work: Work, root: Path) -> None:
    removal = plan_removal(work)
    (root / "opt/ours/sub/late").touch()
    for action in [*removal.actions, *removal.closing]:
        action.perform(work)
    assert os.listdir(root / "opt/ours/sub") == ["late"]
    assert not (root / "var/lib/stratum").exists()


def test_kept_trees_stay_with_a_receipt_that_still_knows_them(work: Work, root: Path) -> None:
    removal = remove(work, keep=(HostPath("/opt/data"),))
    assert why(removal) == {"/opt/data": "kept, as asked"}
    assert (root / "opt/data/deep/anything").exists()
    assert {str(entry.path) for entry in Receipt.load(work.host)} == {"/opt/data", str(STATE_DIRECTORY)}
    assert not work.host.lexists(JOURNAL_PATH)
    assert remove(make_work(root)).left == []
    assert sorted(os.listdir(root)) == ["opt", "var"]
    assert os.listdir(root / "opt") == []


def test_what_is_in_the_way_of_the_lock_stays_until_the_end(root: Path) -> None:
    work = make_work(root)
    work.receipt.record(Entry(STATE_DIRECTORY, "directory"), Entry(HostPath("/run/stratum"), "tree"))
    work.receipt.record(Entry(HostPath("/etc/late"), "file", (content_digest(b"x"),)))
    (root / "run/stratum/containerd").mkdir(parents=True)
    (root / "run/stratum/lock").touch()
    (root / "etc").mkdir()
    (root / "etc/late").write_bytes(b"x")
    removal = remove(work)
    assert os.listdir(root / "run/stratum") == ["lock"]
    assert removal.closing[-1] == RemoveTree(HostPath("/run/stratum"), spare="lock")
    assert not (root / "etc/late").exists()


def test_a_removal_can_be_repeated_from_the_middle(root: Path, work: Work) -> None:
    shutil.copytree(root, root.parent / "copy", symlinks=True)
    count = len(plan_removal(work).actions)
    for number in range(count + 1):
        shutil.rmtree(root)
        shutil.copytree(root.parent / "copy", root, symlinks=True)
        first = make_work(root)
        for action in plan_removal(first).actions[:number]:
            action.perform(first)
        assert remove(make_work(root)).left == []
        assert sorted(path.name for path in root.rglob("*")) == ["lib", "opt", "var"]


# -- any tree, any changes ------------------------------------------------------------------------------

NAMES = ["a", "b", "a/x", "a/y", "b/x", "a/x/p", "a/x/q"]
OURS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["file", "directory", "link", "tree"]), max_size=7)
THEIRS = st.lists(
    st.tuples(
        st.sampled_from([*NAMES, "c", "a/z", "b/x/own"]),
        st.sampled_from(["write", "edit", "remove", "mkdir", "link out", "link in"]),
    ),
    max_size=6,
)


def _make_ours(work: Work, ours: dict[str, str]) -> None:
    for name in sorted(ours):
        path = HostPath("/opt") / name
        if not work.host.is_dir(path.parent) or work.host.is_link(path.parent):
            continue
        if ours[name] == "file":
            WriteFile(path, name.encode()).perform(work)
        elif ours[name] == "link":
            PlaceLink(path, "/somewhere").perform(work)
        else:
            work.receipt.record(Entry(path, ours[name]))
            work.host.mkdir(path)


def _change(root: Path, name: str, what: str, made: set[Path]) -> None:
    path = root / "opt" / name
    try:
        if what in ("write", "edit"):
            if path.is_symlink() or path.is_dir() or path.exists() != (what == "edit"):
                return
            path.write_text(f"theirs {name}")
        elif what == "remove":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            return
        elif what == "mkdir":
            path.mkdir()
        else:
            path.symlink_to("/outside" if what == "link out" else "..")
    except OSError:
        return
    made.add(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ours=OURS, theirs=THEIRS)
def test_nothing_that_others_made_or_changed_is_ever_removed(
    tmp_path_factory: pytest.TempPathFactory, ours: dict[str, str], theirs: list[tuple[str, str]]
) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "var/lib/stratum").mkdir(parents=True)
    (root / "opt").mkdir()
    (root / "outside").mkdir()
    (root / "outside/canary").write_text("outside")
    work = make_work(root)
    work.receipt.record(Entry(STATE_DIRECTORY, "directory"))
    _make_ours(work, ours)
    pristine = snapshot(root)
    made: set[Path] = set()
    for name, what in theirs:
        _change(root, name, what, made)
    trees = [root / "opt" / name for name, kind in ours.items() if kind == "tree"]
    before = snapshot(root)
    removal = remove(make_work(root))
    after = snapshot(root)
    assert (root / "outside/canary").read_text() == "outside"
    for path in made:
        inside = any(tree in path.parents and tree.is_dir() is False for tree in trees)
        if not path.is_dir() and not inside and str(path) in before and before[str(path)] != pristine.get(str(path)):
            assert after.get(str(path)) == before[str(path)], path
    left = {root / str(item.path)[1:] for item in removal.left}
    for entry in ours:
        path = root / "opt" / entry
        # What is recorded is gone, or named, or below what is named, or what the others made.
        if os.path.lexists(path) and not (left & {path, *path.parents}) and path not in made:
            pytest.fail(f"{entry} stays and nobody says so")
    if not made and not theirs:
        assert os.listdir(root / "opt") == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ours=OURS)
def test_what_nobody_touched_goes_without_a_trace(
    tmp_path_factory: pytest.TempPathFactory, ours: dict[str, str]
) -> None:
    assume(ours)
    root = tmp_path_factory.mktemp("root")
    (root / "var/lib/stratum").mkdir(parents=True)
    (root / "opt").mkdir()
    before = set(snapshot(root)) - {str(root / "var/lib/stratum/."), str(root / "var/lib/stratum")}
    work = make_work(root)
    work.receipt.record(Entry(STATE_DIRECTORY, "directory"))
    _make_ours(work, ours)
    assert remove(make_work(root)).left == []
    assert set(snapshot(root)) == before


def test_a_path_is_plain_text_for_everybody(work: Work) -> None:
    removal = plan_removal(work, keep=(HostPath("/opt/data"),))
    assert removal.left[0].to_json() == {"path": "/opt/data", "why": "kept, as asked"}
    path: PathLike = removal.left[0].path
    assert str(path) == "/opt/data"
