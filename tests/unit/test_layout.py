"""Versions in directories and the link that chooses one (seed 000, type Layout)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stratum.errors import BundleNotFoundError, StratumError
from stratum.node.layout import DEFAULT_BASE, Layout, VersionActiveError, make_traversable
from stratum.system import Host, HostPath, PathLike
from tests.bundles import snapshot
from tests.fakes import FaultHost

MASKS = [0o000, 0o027, 0o077, 0o777]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/opt").mkdir(parents=True)
    return tmp_path / "root"


@pytest.fixture
def layout(root: Path) -> Layout:
    return Layout(Host(str(root), {}))


def base(root: Path) -> Path:
    return root / "opt/stratum/node"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", MASKS, ids=oct)
def test_version_directories_can_be_entered_by_every_user_under_every_umask(
    layout: Layout, root: Path, mask: int
) -> None:
    before = os.umask(mask)
    try:
        assert layout.ensure("1.0") == HostPath("/opt/stratum/node/1.0")
    finally:
        os.umask(before)
    for name in ("opt/stratum", "opt/stratum/node", "opt/stratum/node/1.0", "opt/stratum/node/1.0/bin"):
        assert mode(root / name) == 0o755, name


def test_a_parent_that_was_there_keeps_its_mode_and_the_directory_itself_does_not(root: Path) -> None:
    (root / "opt").chmod(0o711)
    (root / "opt/stratum").mkdir(mode=0o700)
    (root / "opt/stratum/node").mkdir(mode=0o750)
    host = Host(str(root), {})
    assert make_traversable(host, DEFAULT_BASE) == []
    assert [mode(root / name) for name in ("opt", "opt/stratum", "opt/stratum/node")] == [0o711, 0o700, 0o755]
    assert make_traversable(host, DEFAULT_BASE / "1.0") == [DEFAULT_BASE / "1.0"]


def test_ensuring_twice_changes_nothing(layout: Layout, root: Path) -> None:
    layout.ensure("1.0")
    before = snapshot(root)
    layout.ensure("1.0")
    assert snapshot(root) == before


def test_without_a_link_no_version_is_active(layout: Layout) -> None:
    assert layout.current() is None
    assert layout.versions() == []
    layout.ensure("1.0")
    assert layout.current() is None
    assert layout.versions() == ["1.0"]


def test_a_flip_returns_what_was_active(layout: Layout, root: Path) -> None:
    for version in ("1.0", "2.0"):
        layout.ensure(version)
    assert layout.flip("1.0") is None
    assert layout.flip("2.0") == "1.0"
    assert layout.flip("2.0") == "2.0"
    assert layout.current() == "2.0"
    assert os.readlink(base(root) / "current") == "2.0", "relative: it is right at another mount point too"


def test_a_flip_has_no_moment_without_a_link(root: Path) -> None:
    seen: list[str | None] = []

    class Watching(FaultHost):
        def mutation(self, what: str) -> None:
            super().mutation(what)
            link = base(root) / "current"
            seen.append(os.readlink(link) if link.is_symlink() else None)

    Layout(Host(str(root), {})).ensure("1.0")
    Layout(Host(str(root), {})).ensure("2.0")
    Layout(Host(str(root), {})).flip("1.0")
    layout = Layout(Watching(str(root), {}))
    layout.flip("2.0")
    assert len(seen) >= 2
    assert set(seen) == {"1.0"}
    assert layout.current() == "2.0"


@pytest.mark.parametrize("version", ["2.0", "current", "..", ".", "", "../..", "/etc", "1.0/bin", "1.0/../1.0"])
def test_only_an_installed_version_can_become_active_or_be_removed(layout: Layout, root: Path, version: str) -> None:
    layout.ensure("1.0")
    layout.flip("1.0")
    before = snapshot(root)
    with pytest.raises(BundleNotFoundError):
        layout.flip(version)
    with pytest.raises(StratumError):
        layout.remove(version)
    assert snapshot(root) == before


def test_what_is_no_directory_of_its_own_is_no_version(layout: Layout, root: Path) -> None:
    layout.ensure("1.0")
    layout.flip("1.0")
    (base(root) / "file").touch()
    (base(root) / ".hidden").mkdir()
    (base(root) / "linked").symlink_to("1.0")
    (base(root) / "elsewhere").symlink_to("/opt")
    assert layout.versions() == ["1.0"]


@pytest.mark.parametrize(
    ("target", "reference"),
    [
        ("gone", "current-dangles"),
        ("/opt/stratum/node/gone", "current-dangles"),
        ("..", "current-outside"),
        (".", "current-outside"),
        ("/etc", "current-outside"),
        ("../node/1.0", "current-outside"),
        ("1.0/bin", "current-outside"),
        ("/opt/stratum/node", "current-outside"),
        ("current", "current-outside"),
        ("linked", "current-outside"),
        ("/", "current-outside"),
        ("file", "current-dangles"),
    ],
)
def test_a_link_that_names_no_version_is_an_error_with_a_way_out(
    layout: Layout, root: Path, target: str, reference: str
) -> None:
    layout.ensure("1.0")
    (root / "srv").mkdir()
    (base(root) / "linked").symlink_to("/srv")
    (base(root) / "file").touch()
    (base(root) / "current").symlink_to(target)
    with pytest.raises(StratumError) as caught:
        layout.current()
    assert caught.value.reference == reference
    assert "/opt/stratum/node/current" in str(caught.value.hint)
    with pytest.raises(StratumError):
        layout.remove("1.0")
    assert (base(root) / "1.0/bin").is_dir()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_something_else_in_place_of_the_link_is_an_error_and_stays(layout: Layout, root: Path, kind: str) -> None:
    layout.ensure("1.0")
    path = base(root) / "current"
    path.write_text("x") if kind == "file" else path.mkdir()
    with pytest.raises(StratumError) as caught:
        layout.flip("1.0")
    assert caught.value.reference == "current-not-a-link"
    assert path.is_file() or path.is_dir()


def test_an_absolute_link_into_the_base_names_its_version(layout: Layout, root: Path) -> None:
    layout.ensure("1.0")
    (base(root) / "current").symlink_to("/opt/stratum/node/1.0")
    assert layout.current() == "1.0"


def test_the_active_version_cannot_be_removed(layout: Layout, root: Path) -> None:
    for version in ("1.0", "2.0"):
        layout.ensure(version)
    layout.flip("1.0")
    with pytest.raises(VersionActiveError) as caught:
        layout.remove("1.0")
    assert caught.value.reference == "version-active"
    layout.remove("2.0")
    assert layout.versions() == ["1.0"]


def test_removing_follows_no_link_and_takes_nothing_else(layout: Layout, root: Path) -> None:
    (root / "srv").mkdir()
    (root / "srv/canary").touch()
    layout.ensure("1.0")
    layout.ensure("1.0.1")
    (base(root) / "1.0/bin/out").symlink_to("/srv")
    os.link(root / "srv/canary", base(root) / "1.0/bin/hard")
    layout.remove("1.0")
    assert layout.versions() == ["1.0.1"]
    assert (root / "srv/canary").exists()


def test_a_removal_that_is_cut_off_leaves_no_half_version(root: Path) -> None:
    """What is left of it must not look like a version that can be activated."""
    from tests.fakes import Killed

    for number in range(20):
        layout = Layout(FaultHost(str(root), {}))
        layout.ensure("1.0")
        (base(root) / "1.0/bin/containerd").write_text("program")
        (base(root) / "1.0/bundle.json").write_text("{}")
        before = {path.name for path in (base(root) / "1.0").rglob("*")}
        dying = Layout(FaultHost(str(root), {}, number))
        try:
            dying.remove("1.0")
        except Killed:
            if "1.0" in layout.versions():
                assert {path.name for path in (base(root) / "1.0").rglob("*")} == before
            continue
        assert number > 3
        assert layout.versions() == []
        return
    pytest.fail("it never came to an end")


def test_removing_all_takes_the_active_version_too(layout: Layout, root: Path) -> None:
    layout.ensure("1.0")
    layout.flip("1.0")
    layout.remove_all()
    assert not base(root).exists()
    layout.remove_all()


class Versions(RuleBasedStateMachine):
    """Any order of operations agrees with a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.directory = tempfile.TemporaryDirectory(prefix="stratum-test-")
        self.layout = Layout(Host(self.directory.name, {}))
        self.known: set[str] = set()
        self.active: str | None = None

    def teardown(self) -> None:
        self.directory.cleanup()

    names = st.sampled_from(["1.0", "1.0.1", "2.0-rc1", "3"])

    @rule(version=names)
    def ensure(self, version: str) -> None:
        self.layout.ensure(version)
        self.known.add(version)

    @rule(version=names)
    def flip(self, version: str) -> None:
        if version in self.known:
            assert self.layout.flip(version) == self.active
            self.active = version
        else:
            with pytest.raises(BundleNotFoundError):
                self.layout.flip(version)

    @rule(version=names)
    def remove(self, version: str) -> None:
        if version == self.active:
            with pytest.raises(VersionActiveError):
                self.layout.remove(version)
        elif version in self.known:
            self.layout.remove(version)
            self.known.remove(version)
        else:
            with pytest.raises(BundleNotFoundError):
                self.layout.remove(version)

    @rule()
    def remove_all(self) -> None:
        self.layout.remove_all()
        self.known, self.active = set(), None

    @invariant()
    def agrees(self) -> None:
        assert self.layout.versions() == sorted(self.known)
        assert self.layout.current() == self.active
        path: PathLike = self.layout.bin_dir
        assert self.active is None or self.layout.host.is_dir(path)


TestVersions = Versions.TestCase
TestVersions.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)
