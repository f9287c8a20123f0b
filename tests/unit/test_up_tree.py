"""``up`` and ``uninstall`` on a directory tree: what is there afterwards, whatever happens in between."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Optional

import pytest

from stratum.bundle.oci import Platform
from stratum.errors import ExitCode, StratumError
from stratum.system import Host
from tests.bundles import AMD64, ARM64, Bundle, Entry, Part, Publisher, directory, flipped, snapshot, symlink
from tests.fakes import Desk, FaultHost, Killed, make_tree, node_publisher, relative
from tests.unit.conftest import interpreters


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    (tmp_path / "desk").mkdir()
    return Desk(tmp_path / "desk")


@pytest.fixture
def good(desk: Desk) -> Path:
    return desk.bundle(node_publisher().build())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "root")


def fast(root: Path, dies_at: Optional[int] = None) -> FaultHost:
    return FaultHost(str(root), environ={}, dies_at=dies_at)


def content(root: Path) -> dict[str, Any]:
    """The tree, without times and without what differs by chance: the journal's identifier, the receipt's order."""
    without = ("/var/lib/stratum/journal.json", "/var/lib/stratum/receipt.json")
    found = {
        name: (mode, owner, group, extra)
        for name, (mode, owner, group, _, extra) in relative(root, snapshot(root), without).items()
    }
    journal = json.loads((root / without[0][1:]).read_text())
    receipt = json.loads((root / without[1][1:]).read_text())
    found["journal"] = journal["state"] in ("done", "rolled-back")
    found["receipt"] = sorted(json.dumps(entry) for entry in receipt["entries"])
    return found


# -- what up makes --------------------------------------------------------------------------------------


def test_a_tree_becomes_a_node_that_starts_at_boot(desk: Desk, root: Path, good: Path) -> None:
    assert desk.up(Host(str(root), {}), good).status == ExitCode.DONE
    current = root / "opt/stratum/node/current"
    assert os.readlink(current) == "1.0.0"
    assert (current / "bin/containerd").read_bytes().startswith(b"#!/bin/sh")
    wants = root / "etc/systemd/system/multi-user.target.wants/stratum.service"
    assert os.readlink(wants) == "/etc/systemd/system/stratum.service"
    for name in ("stratum.service", "stratum-containerd.service"):
        path = root / "etc/systemd/system" / name
        assert path.is_file() and not path.is_symlink()  # row 26: not into a file system that may be mounted late
    link = os.readlink(root / "usr/local/bin/stratum")
    assert (root / link[1:]).read_bytes() == desk.archive.read_bytes()
    assert os.access(root / link[1:], os.X_OK)
    assert not list((root / "run").rglob("*"))
    assert not (root / "opt/stratum/.staging").exists()


def test_a_second_up_changes_nothing_and_says_so(desk: Desk, root: Path, good: Path) -> None:
    desk.up(fast(root), good)
    before = snapshot(root)
    ran = desk.up(fast(root), good)
    assert ran.status == ExitCode.DONE
    assert ran.text == "nothing to do\n"
    assert snapshot(root) == before


def test_a_dry_run_changes_nothing_and_lists_what_the_real_run_does(desk: Desk, root: Path, good: Path) -> None:
    before = snapshot(root)
    dry = desk.up(fast(root), good, "--dry-run", "--output", "json")
    assert snapshot(root) == before
    real = desk.up(fast(root), good, "--output", "json")
    planned, done = json.loads(dry.text), json.loads(real.text)
    assert planned["kind"] == "Plan" and done["kind"] == "Result"
    assert planned["steps"] == done["steps"]


@pytest.mark.parametrize("mask", [0o077, 0o000, 0o777], ids=oct)
def test_the_umask_of_the_caller_changes_no_mode(desk: Desk, tmp_path: Path, good: Path, mask: int) -> None:
    usual, other = make_tree(tmp_path / "usual"), make_tree(tmp_path / "other")
    desk.up(fast(usual), good)
    os.umask(mask)
    try:
        desk.up(fast(other), good)
        os.umask(0o022)
        assert content(other) == content(usual)
    finally:
        os.umask(0o022)
    # Row 28: everything that another user has to enter or read can be entered and read.
    node = usual / "opt/stratum"
    for path in [node, *node.rglob("*")]:
        if not path.is_symlink():
            bits = stat.S_IMODE(path.stat().st_mode)
            assert bits & 0o055 == 0o055 if path.is_dir() or bits & 0o100 else bits & 0o044 == 0o044, path
            assert bits & 0o7022 == 0, path
    for name in ("var/lib/stratum/receipt.json", "var/lib/stratum/journal.json"):
        assert stat.S_IMODE((usual / name).stat().st_mode) == 0o600


def test_links_in_the_tree_are_not_followed_out_of_it(desk: Desk, root: Path, good: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "opt/other").rmdir()
    (root / "opt").rmdir()
    (root / "opt").symlink_to(outside)  # an absolute link means the tree's own root
    with pytest.raises((StratumError, OSError)):
        desk.up(fast(root), good)
    assert not list(outside.iterdir())
    (root / str(outside)[1:]).mkdir(parents=True)
    before = snapshot(root)
    desk.up(fast(root), good)
    assert not list(outside.iterdir())
    assert desk.run(fast(root), "uninstall").status == ExitCode.DONE
    assert snapshot(root) == before


# -- and takes away -------------------------------------------------------------------------------------


def test_uninstall_gives_the_tree_back(desk: Desk, root: Path, good: Path) -> None:
    before = snapshot(root)
    desk.up(fast(root), good)
    ran = desk.run(fast(root), "uninstall")
    assert ran.status == ExitCode.DONE
    assert "left:" not in ran.text
    assert snapshot(root) == before


def test_uninstall_gives_an_empty_tree_back(desk: Desk, tmp_path: Path, good: Path) -> None:
    root = tmp_path / "empty"
    root.mkdir()
    desk.up(fast(root), good)
    assert desk.run(fast(root), "uninstall").status == ExitCode.DONE
    assert os.listdir(root) == []


def test_uninstalling_twice_or_where_nothing_is_does_nothing(desk: Desk, root: Path, good: Path) -> None:
    before = snapshot(root)
    for _ in range(2):
        ran = desk.run(fast(root), "uninstall")
        assert ran.status == ExitCode.DONE
        assert "nothing to remove" in ran.text
    assert snapshot(root) == before


def test_what_uninstall_lists_dry_is_what_it_does(desk: Desk, root: Path, good: Path) -> None:
    desk.up(fast(root), good)
    before = snapshot(root)
    dry = json.loads(desk.run(fast(root), "uninstall", "--dry-run", "--output", "json").text)
    assert snapshot(root) == before
    done = json.loads(desk.run(fast(root), "uninstall", "--output", "json").text)
    assert dry["steps"] == done["steps"]
    named = {action["subject"] for step in dry["steps"] for action in step["actions"]}
    for path in ("/etc/systemd/system/stratum.service", "/usr/local/bin/stratum", "/opt/stratum"):
        assert path in named


CHANGES: dict[str, Callable[[Path], None]] = {
    "a configuration edited": lambda root: _append(root / "etc/stratum/containerd/config.toml"),
    "a unit edited": lambda root: _append(root / "etc/systemd/system/stratum-containerd.service"),
    "a unit masked": lambda root: _relink(root / "etc/systemd/system/stratum.service", "/dev/null"),
    "the command replaced": lambda root: _replace(root / "usr/local/bin/stratum"),
    "a plugin replaced": lambda root: _replace(root / "opt/cni/bin/bridge"),
    "a plugin pointed elsewhere": lambda root: _relink(root / "opt/cni/bin/bridge", "/usr/lib/cni/bridge"),
    "a program replaced": lambda root: _replace(root / "opt/stratum/node/1.0.0/bin/ctr"),
    "a file where a directory was": lambda root: (shutil.rmtree(root / "opt/cni"), _append(root / "opt/cni")),
}


def _append(path: Path) -> None:
    with open(path, "a") as file:
        file.write("# changed by the admin\n")


def _replace(path: Path) -> None:
    path.unlink()
    path.write_text("the admin's own\n")


def _relink(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_uninstall_leaves_and_names_what_somebody_changed(
    desk: Desk, root: Path, good: Path, change: Callable[[Path], None]
) -> None:
    untouched = set(relative(root, snapshot(root)))
    desk.up(fast(root), good)
    unchanged = snapshot(root)
    change(root)
    after = snapshot(root)
    theirs = {name: value for name, value in after.items() if unchanged.get(name) != value and not name.endswith("/.")}
    ran = desk.run(fast(root), "uninstall")
    assert ran.status == ExitCode.DONE
    final = snapshot(root)
    kept = [name for name in theirs if not Path(name).is_dir() or Path(name).is_symlink()]
    assert kept
    for name in kept:
        assert final[name] == theirs[name]
        assert f"left: {name[len(str(root)) :]}: " in ran.text
    # Beside it only the directories that lead to it are left.
    extra = set(relative(root, final)) - untouched
    for name in extra:
        assert any(item[len(str(root)) :].startswith(name) for item in kept), name


def test_files_that_others_put_into_our_directories_stay(desk: Desk, root: Path, good: Path) -> None:
    desk.up(fast(root), good)
    theirs = [
        "opt/cni/bin/flannel",
        "etc/systemd/system/stratum-containerd.service.d/50-mine.conf",
        "opt/stratum/node/notes.txt",
        "opt/stratum/node/1.0.0/bin/extra",
        "var/lib/stratum/bundles/kept.tar",
    ]
    for name in theirs:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("theirs\n")
    ran = desk.run(fast(root), "uninstall")
    for name in theirs:
        assert (root / name).read_text() == "theirs\n"
    for name in ("opt/cni/bin", "opt/stratum/node/1.0.0/bin", "var/lib/stratum"):
        assert f"left: /{name}: holds what is not Stratum's" in ran.text
    assert not (root / "var/lib/stratum/receipt.json").exists()
    assert not (root / "opt/stratum/node/1.0.0/bin/ctr").exists()


@pytest.mark.parametrize("when", ["before", "after"])
def test_drop_ins_of_the_admin_stay_and_are_named(desk: Desk, root: Path, good: Path, when: str) -> None:
    """Whoever made their directory: that of the supervisor's unit is never ours."""
    places = [f"/etc/systemd/system/{unit}.service.d" for unit in ("stratum", "stratum-containerd")]

    def write() -> None:
        for place in places:
            (root / place[1:]).mkdir(parents=True, exist_ok=True)
            (root / place[1:] / "50-mine.conf").write_text("[Service]\nNice=1\n")

    if when == "before":
        write()
    before = snapshot(root)
    desk.up(fast(root), good)
    if when == "after":
        write()
    dry = json.loads(desk.run(fast(root), "uninstall", "--dry-run", "--output", "json").text)
    expected = dict.fromkeys(places, "holds what is not Stratum's: 50-mine.conf")
    assert {item["path"]: item["why"] for item in dry["left"]} == expected
    text = desk.run(fast(root), "uninstall").text
    assert {line for line in text.splitlines() if line.startswith("left")} == {
        f"left: {path}: {why}" for path, why in expected.items()
    }
    if when == "before":
        assert snapshot(root) == before
    for place in places:
        assert (root / place[1:] / "50-mine.conf").read_text() == "[Service]\nNice=1\n"


def test_a_directory_turned_into_a_link_is_not_followed(desk: Desk, root: Path, good: Path) -> None:
    desk.up(fast(root), good)
    shutil.move(str(root / "opt/stratum/node"), str(root / "srv"))
    (root / "opt/stratum/node").symlink_to("/srv")
    before = relative(root / "srv", snapshot(root / "srv"))
    ran = desk.run(fast(root), "uninstall")
    assert relative(root / "srv", snapshot(root / "srv")) == before
    assert os.readlink(root / "opt/stratum/node") == "/srv"
    assert "left: /opt/stratum/node: " in ran.text


def test_keep_data_leaves_the_data_and_a_later_uninstall_takes_it(desk: Desk, root: Path, good: Path) -> None:
    before = snapshot(root)
    desk.up(fast(root), good)
    data = root / "var/lib/stratum/containerd/io.containerd.content.v1.content/blob"
    data.parent.mkdir(parents=True)
    data.write_text("data")
    ran = desk.run(fast(root), "uninstall", "--keep-data")
    assert data.read_text() == "data"
    assert "left: /var/lib/stratum/containerd: kept, as asked" in ran.text
    assert not (root / "opt/stratum").exists()
    assert not (root / "usr/local/bin/stratum").exists()
    desk.up(fast(root), good)
    assert data.read_text() == "data"
    desk.run(fast(root), "uninstall", "--keep-data")
    desk.run(fast(root), "uninstall")
    assert snapshot(root) == before


def test_keeping_data_that_was_never_there_leaves_nothing(desk: Desk, root: Path, good: Path) -> None:
    before = snapshot(root)
    desk.up(fast(root), good)
    desk.run(fast(root), "uninstall", "--keep-data")
    assert snapshot(root) == before


# -- what is in the way ---------------------------------------------------------------------------------

FOREIGN = [
    "etc/systemd/system/stratum.service",
    "etc/systemd/system/stratum-containerd.service",
    "etc/systemd/system/stratum-containerd.service.d/10-path.conf",
    "etc/stratum/containerd/config.toml",
    "etc/cni/net.d/10-stratum.conflist",
    "usr/local/bin/stratum",
    "etc/systemd/system/multi-user.target.wants/stratum.service",
    "opt/stratum/node/1.0.0",
]


@pytest.mark.parametrize("kind", ["file", "link", "dangling", "directory"])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_entry_at_a_path_of_ours_is_refused_and_kept(
    desk: Desk, root: Path, good: Path, name: str, kind: str
) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    (root / "etc/theirs").write_text("theirs\n")
    if kind == "file":
        path.write_text("theirs\n")
    elif kind == "directory":
        (path / "inside").mkdir(parents=True)
    else:
        path.symlink_to("/etc/theirs" if kind == "link" else "/dev/null")
    before = snapshot(root)
    with pytest.raises(StratumError) as caught:
        desk.up(fast(root), good)
    assert f"/{name}" in caught.value.message
    assert caught.value.hint
    assert caught.value.state == "nothing was changed"
    assert snapshot(root) == before


def test_a_plugin_of_somebody_else_is_left_alone(desk: Desk, root: Path, good: Path) -> None:
    (root / "opt/cni/bin").mkdir(parents=True)
    (root / "opt/cni/bin/bridge").write_text("theirs\n")
    before = snapshot(root)
    desk.up(fast(root), good)
    assert (root / "opt/cni/bin/bridge").read_text() == "theirs\n"
    assert os.readlink(root / "opt/cni/bin/portmap") == "/opt/stratum/node/current/cni/bin/portmap"
    assert desk.up(fast(root), good).text == "nothing to do\n"
    desk.run(fast(root), "uninstall")
    assert snapshot(root) == before


# -- bundles that are not to be used --------------------------------------------------------------------


def _evil(entries: list[Any], **part: Any) -> Bundle:
    publisher = node_publisher()
    publisher.parts = [Part("containerd", [directory("bin"), *entries], version="1.7.1", **part)]
    return publisher.build()


def _spoiled(what: str) -> Bundle:
    bundle = node_publisher().build()
    if what == "index":
        bundle.index = flipped(bundle.index, 1000)
    elif what == "signature":
        bundle.signatures["index.json.minisig"] = flipped(bundle.signatures["index.json.minisig"], 900)
    elif what == "unsigned":
        bundle.signatures = {}
    elif what == "another key":
        bundle.signatures = {}
        bundle.sign("stranger")
    elif what == "another bundle":
        bundle.signatures = node_publisher(name="other").build().signatures
    else:
        kinds = {"manifest": 0, "description": 1, "first layer": 2, "last layer": 3}
        digest = list(bundle.blobs)[kinds[what]] if what in kinds else list(bundle.blobs)[-1]
        bundle.spoil(digest, 333)
    return bundle


BAD: dict[str, tuple[Callable[[], Bundle], ExitCode]] = {
    **{
        f"a bit of the {what}": (lambda what=what: _spoiled(what), ExitCode.BUNDLE_MALFORMED)  # type: ignore[misc]
        for what in ("manifest", "description", "first layer", "last layer", "image")
    },
    **{
        what: (lambda what=what: _spoiled(what), ExitCode.NOT_TRUSTED)  # type: ignore[misc]
        for what in ("index", "signature", "unsigned", "another key", "another bundle")
    },
    "climbing": (lambda: _evil([Entry("../../../etc/hostname", b"x")]), ExitCode.BUNDLE_MALFORMED),
    "absolute": (lambda: _evil([Entry("/etc/hostname", b"x")]), ExitCode.BUNDLE_MALFORMED),
    "through a link": (
        lambda: _evil([symlink("bin/out", "/etc"), Entry("bin/out/hostname", b"x")]),
        ExitCode.BUNDLE_MALFORMED,
    ),
    "set-id": (lambda: _evil([Entry("bin/su", b"x", mode=0o4755)]), ExitCode.BUNDLE_MALFORMED),
    "a device": (lambda: _evil([Entry("bin/null", flag=b"3")], files=[]), ExitCode.BUNDLE_MALFORMED),
    "twice the same name": (lambda: _evil([Entry("bin/x", b"1"), Entry("bin/x", b"2")]), ExitCode.BUNDLE_MALFORMED),
    "no platform of ours": (lambda: node_publisher(platforms=()).build(), ExitCode.BUNDLE_MALFORMED),
    "another machine": (
        lambda: node_publisher(platforms=tuple({AMD64, ARM64} - {Platform.of_machine(Host().machine())})).build(),
        ExitCode.HOST_REFUSED,
    ),
    "no containerd": (
        lambda: node_publisher(parts=[Part("tool", [directory("bin"), Entry("bin/tool", b"x")])]).build(),
        ExitCode.BUNDLE_MALFORMED,
    ),
    "a containerd too old": (
        lambda: node_publisher(parts=[Part("containerd", [Entry("bin/containerd", b"x")], version="1.5.0")]).build(),
        ExitCode.BUNDLE_MALFORMED,
    ),
    **{
        f"version {version[:9]!r}": (
            lambda version=version: node_publisher(version=version).build(),  # type: ignore[misc]
            ExitCode.BUNDLE_MALFORMED,
        )
        for version in ("current", "..", ".", "", "a/b", ".hidden", "x" * 300, "a\nb")
    },
    "one file from two components": (
        lambda: node_publisher(
            parts=[
                Part("containerd", [Entry("bin/containerd", b"1")], version="1.7.1"),
                Part("other", [Entry("bin/containerd", b"2")]),
            ]
        ).build(),
        ExitCode.BUNDLE_MALFORMED,
    ),
    "a file over the version's own record": (
        lambda: node_publisher(
            parts=[Part("containerd", [Entry("bundle.json", b"{}"), Entry("bin/containerd", b"1")], version="1.7.1")]
        ).build(),
        ExitCode.BUNDLE_MALFORMED,
    ),
    "a file where the version has a directory": (
        lambda: node_publisher(parts=[Part("containerd", [Entry("libexec", b"x")], version="1.7.1")]).build(),
        ExitCode.BUNDLE_MALFORMED,
    ),
}


@pytest.mark.parametrize(("make", "code"), BAD.values(), ids=BAD.keys())
def test_a_bad_bundle_leaves_the_tree_as_it_was(
    desk: Desk, root: Path, make: Callable[[], Bundle], code: ExitCode
) -> None:
    before = snapshot(root)
    with pytest.raises(StratumError) as caught:
        desk.up(fast(root), desk.bundle(make(), "bad.tar"))
    assert caught.value.exit_code == code, caught.value
    assert "\n" not in caught.value.message
    assert snapshot(root) == before


@pytest.mark.parametrize(("make", "code"), BAD.values(), ids=BAD.keys())
def test_a_bad_bundle_leaves_an_installed_node_as_it_was(
    desk: Desk, root: Path, good: Path, make: Callable[[], Bundle], code: ExitCode
) -> None:
    desk.up(fast(root), good)
    before = {name: value for name, value in snapshot(root).items() if not name.endswith(("journal.json",))}
    try:
        # The same description, and everything that it lists is there: nothing of the bundle is used.
        assert desk.up(fast(root), desk.bundle(make(), "bad.tar")).text == "nothing to do\n"
    except StratumError as error:
        assert error.exit_code in (code, ExitCode.FAILED)
    after = {name: value for name, value in snapshot(root).items() if not name.endswith(("journal.json",))}
    assert after == before
    assert desk.up(fast(root), good).status == ExitCode.DONE
    assert json.loads((root / "var/lib/stratum/journal.json").read_text())["state"] == "done"


@pytest.mark.parametrize("share", [0, 1, 511, 512, 0.1, 0.5, 0.9, -1024, -1, "empty index"])
def test_a_bundle_cut_short_leaves_the_tree_as_it_was(desk: Desk, root: Path, good: Path, share: Any) -> None:
    data = good.read_bytes()
    if share == "empty index":
        bundle = node_publisher().build()
        bundle.index = b""
        data = bundle.tar()
    else:
        size = int(len(data) * share) if isinstance(share, float) else share if share >= 0 else len(data) + share
        data = data[:size]
    good.write_bytes(data)
    before = snapshot(root)
    if share in (-1024, -1):  # only the end marker is missing: nothing that is used is
        try:
            desk.up(fast(root), good)
        except StratumError as error:
            assert error.exit_code == ExitCode.BUNDLE_MALFORMED
            assert snapshot(root) == before
        return
    with pytest.raises(StratumError) as caught:
        desk.up(fast(root), good)
    assert caught.value.exit_code in (ExitCode.BUNDLE_MALFORMED, ExitCode.NOT_TRUSTED, ExitCode.NOT_FOUND)
    assert snapshot(root) == before


def test_skipping_the_signature_is_said_loudly_and_still_checks_digests(desk: Desk, root: Path) -> None:
    bundle = desk.bundle(_spoiled("unsigned"))
    ran = desk.run(fast(root), "up", "--bundle", str(bundle), "--insecure-skip-verify")
    assert ran.status == ExitCode.DONE
    assert "warning" in ran.err.getvalue() and "NOT checked" in ran.err.getvalue()
    desk.run(fast(root), "uninstall")
    spoiled = _spoiled("first layer")
    spoiled.signatures = {}
    with pytest.raises(StratumError) as caught:
        desk.run(fast(root), "up", "--bundle", str(desk.bundle(spoiled)), "--insecure-skip-verify")
    assert caught.value.exit_code == ExitCode.BUNDLE_MALFORMED


# -- repair ---------------------------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[Path], object]] = {
    "a program cut short": lambda root: _cut(root / "opt/stratum/node/1.0.0/bin/containerd"),
    "a program gone": lambda root: (root / "opt/stratum/node/1.0.0/bin/ctr").unlink(),
    "a link turned": lambda root: _relink(root / "opt/stratum/node/1.0.0/cni/bin/portmap", "/bin/sh"),
    "an empty directory gone": lambda root: (root / "opt/stratum/node/1.0.0/libexec").rmdir(),
    "a directory gone": lambda root: shutil.rmtree(root / "opt/stratum/node/1.0.0/cni"),
    "the record gone": lambda root: (root / "opt/stratum/node/1.0.0/bundle.json").unlink(),
    "the record cut short": lambda root: _cut(root / "opt/stratum/node/1.0.0/bundle.json"),
    "a component gone": lambda root: [shutil.rmtree(path) for path in (root / "opt/stratum/components").iterdir()],
    "the version gone": lambda root: (
        (root / "opt/stratum/node/current").unlink(),
        shutil.rmtree(root / "opt/stratum/node/1.0.0"),
    ),
    "the configuration gone": lambda root: (root / "etc/stratum/containerd/config.toml").unlink(),
    "a unit edited": lambda root: _append(root / "etc/systemd/system/stratum.service"),
    "the command gone": lambda root: (root / "usr/local/bin/stratum").unlink(),
    "the link for the boot gone": lambda root: (
        root / "etc/systemd/system/multi-user.target.wants/stratum.service"
    ).unlink(),
    "an image blob cut short": lambda root: _cut(max((root / "var/lib/stratum/images/blobs/sha256").iterdir())),
    "the images gone": lambda root: shutil.rmtree(root / "var/lib/stratum/images"),
    "a mode changed": lambda root: (root / "etc/systemd/system/stratum.service").chmod(0o600),
    "the mode of a program changed": lambda root: (root / "opt/stratum/node/1.0.0/bin/ctr").chmod(0o4644),
    "the mode of the version's record changed": lambda root: (root / "opt/stratum/node/1.0.0/bundle.json").chmod(0o600),
    "the mode of the pyz changed": lambda root: next(root.glob("opt/stratum/pyz/*-*/stratum.pyz")).chmod(0),
}


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_up_puts_back_what_is_missing_or_damaged(
    desk: Desk, root: Path, good: Path, damage: Callable[[Path], object]
) -> None:
    desk.up(fast(root), good)
    whole = content(root)
    damage(root)
    assert content(root) != whole
    ran = desk.up(fast(root), good)
    assert "nothing to do" not in ran.text
    assert content(root) == whole
    assert desk.up(fast(root), good).text == "nothing to do\n"


OURS = {
    "/etc/stratum/containerd/config.toml": _append,
    "/etc/systemd/system/stratum.service": _append,
    "/etc/systemd/system/stratum-containerd.service.d/10-path.conf": _append,
    "/etc/cni/net.d/10-stratum.conflist": _append,
    "/usr/local/bin/stratum": _replace,
    "/opt/stratum/node/1.0.0/bin/ctr": _replace,
    "/etc/systemd/system/stratum-containerd.service": lambda path: path.chmod(0o600),
    "/opt/stratum/node/1.0.0/bin/containerd": lambda path: path.chmod(0o700),
}


@pytest.mark.parametrize("name", OURS)
def test_a_file_of_ours_that_somebody_changed_is_named_before_it_is_put_right(
    desk: Desk, root: Path, good: Path, name: str
) -> None:
    desk.up(fast(root), good)
    whole = content(root)
    OURS[name](root / name[1:])
    changed = snapshot(root)
    dry = desk.up(fast(root), good, "--dry-run").err.getvalue()
    assert snapshot(root) == changed
    real = desk.up(fast(root), good).err.getvalue()
    for said in (dry, real):
        (warning,) = [line for line in said.splitlines() if "warning" in line]
        assert f"{name}: somebody changed" in warning and "put back" in warning
    assert content(root) == whole
    assert "warning" not in desk.up(fast(root), good).err.getvalue()


def test_a_file_of_ours_that_is_only_missing_is_put_back_without_a_warning(desk: Desk, root: Path, good: Path) -> None:
    desk.up(fast(root), good)
    (root / "etc/stratum/containerd/config.toml").unlink()
    assert "warning" not in desk.up(fast(root), good).err.getvalue()


def test_a_mode_that_somebody_changed_is_put_back_without_the_bundle(desk: Desk, root: Path, good: Path) -> None:
    desk.up(fast(root), good)
    good.unlink()
    program = root / "opt/stratum/node/1.0.0/bin/containerd"
    before = program.stat()
    program.chmod(0o600)
    assert "set the mode of" in desk.run(fast(root), "up", "--dry-run").text
    assert desk.run(fast(root), "up").status == ExitCode.DONE
    after = program.stat()
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino), "the very file, as it may be running"


def test_a_file_whose_mode_somebody_changed_goes_with_an_uninstall(desk: Desk, root: Path, good: Path) -> None:
    before = snapshot(root)
    desk.up(fast(root), good)
    (root / "etc/systemd/system/stratum.service").chmod(0o600)
    (root / "opt/stratum/node/1.0.0/bin/containerd").chmod(0o600)
    assert "left" not in desk.run(fast(root), "uninstall").text
    assert snapshot(root) == before


def test_up_by_a_newer_program_installs_it_and_leaves_only_the_one_before(desk: Desk, root: Path, good: Path) -> None:
    for number in range(4):
        desk.archive.write_text(f"build {number}")
        dry = json.loads(desk.up(fast(root), good, "--dry-run", "--output", "json").text)
        real = json.loads(desk.up(fast(root), good, "--output", "json").text)
        assert real["changed"] and dry["steps"] == real["steps"]
        found = {path.read_text() for path in root.glob("opt/stratum/pyz/*-*/stratum.pyz")}
        assert found == {f"build {item}" for item in (number - 1, number) if item >= 0}
        assert desk.up(fast(root), good).text == "nothing to do\n"


# -- a process that dies --------------------------------------------------------------------------------


def _small() -> Publisher:
    publisher = node_publisher()
    publisher.parts = [
        Part("containerd", [Entry("bin/containerd", b"program")], version="1.7.24"),
        Part("cni-plugins", [Entry("cni/bin/bridge", b"plugin")]),
    ]
    return publisher


def _survey(desk: Desk, root: Path, bundle: Path) -> FaultHost:
    host = fast(root)
    desk.up(host, bundle)
    return host


def _points(host: FaultHost) -> list[int]:
    """The changes to die at: all, but of the many times that receipt and journal are replaced only the first ones
    from inside; later ones from before."""
    chosen, seen = [], 0
    for number, what in enumerate(host.mutations):
        inside = what.startswith(("write", "rename")) and ("/.receipt.json." in what or "/.journal.json." in what)
        seen += inside
        if not inside or seen <= 8:
            chosen.append(number)
    return chosen


def _kill(desk: Desk, root: Path, number: int, run: Callable[[FaultHost], object]) -> str:
    host = fast(root, number)
    with pytest.raises(Killed):
        run(host)
    return f"killed at change {number}, after: {host.mutations[-3:]}"


def test_a_run_killed_at_any_change_is_finished_by_the_next_one(desk: Desk, memory: Path) -> None:
    bundle = desk.bundle(_small().build())
    survey = _survey(desk, make_tree(memory / "whole"), bundle)
    assert len(survey.mutations) > 150
    whole = content(memory / "whole")
    for number in _points(survey)[::2]:  # the others are in the next test
        root = make_tree(memory / "killed")
        what = _kill(desk, root, number, lambda host: desk.up(host, bundle))
        assert desk.up(fast(root), bundle).status == ExitCode.DONE, what
        assert content(root) == whole, what
        shutil.rmtree(root)


def test_a_run_killed_at_any_change_can_be_uninstalled(desk: Desk, memory: Path) -> None:
    bundle = desk.bundle(_small().build())
    survey = _survey(desk, make_tree(memory / "whole"), bundle)
    root = make_tree(memory / "killed")
    before = snapshot(root)
    for number in _points(survey)[1::2]:
        what = _kill(desk, root, number, lambda host: desk.up(host, bundle))
        assert desk.run(fast(root), "uninstall").status == ExitCode.DONE, what
        assert snapshot(root) == before, what


def test_an_uninstall_killed_at_any_change_is_finished_by_the_next_one(desk: Desk, memory: Path) -> None:
    bundle = desk.bundle(_small().build())
    root = make_tree(memory / "root")
    before = snapshot(root)
    desk.up(fast(root), bundle)
    shutil.copytree(root, memory / "installed", symlinks=True)
    survey = fast(root)
    desk.run(survey, "uninstall")
    assert len(survey.mutations) > 50
    for number in _points(survey):
        shutil.rmtree(root)
        shutil.copytree(memory / "installed", root, symlinks=True)
        what = _kill(desk, root, number, lambda host: desk.run(host, "uninstall"))
        assert desk.run(fast(root), "uninstall").status == ExitCode.DONE, what
        assert snapshot(root) == before, what


def test_up_after_an_uninstall_that_was_killed_makes_the_node_whole(desk: Desk, memory: Path) -> None:
    bundle = desk.bundle(_small().build())
    root = make_tree(memory / "root")
    desk.up(fast(root), bundle)
    whole = content(root)
    shutil.copytree(root, memory / "installed", symlinks=True)
    survey = fast(root)
    desk.run(survey, "uninstall")
    for number in _points(survey)[::3]:
        shutil.rmtree(root)
        shutil.copytree(memory / "installed", root, symlinks=True)
        what = _kill(desk, root, number, lambda host: desk.run(host, "uninstall"))
        assert desk.up(fast(root), bundle).status == ExitCode.DONE, what
        assert content(root) == whole, what


@pytest.mark.parametrize("error", [28, 5], ids=["full disk", "broken disk"])
def test_an_error_at_any_change_of_the_first_run_is_taken_back(desk: Desk, memory: Path, error: int) -> None:
    bundle = desk.bundle(_small().build())
    survey = _survey(desk, make_tree(memory / "whole"), bundle)

    class Failing(FaultHost):
        """One change fails; what follows works."""

        def mutation(self, what: str) -> None:
            number = len(self.mutations)
            self.mutations.append(what)
            if number == self.dies_at:
                raise OSError(error, os.strerror(error), what)

    root = make_tree(memory / "root")
    before = snapshot(root)
    for number in _points(survey)[error % 2 :: 2]:
        what = f"error at change {number}: {survey.mutations[number]}"
        with contextlib.suppress(OSError, StratumError):
            desk.up(Failing(str(root), {}, number), bundle)
        if (root / "opt/stratum/node/current").is_symlink():
            assert desk.up(fast(root), bundle).status == ExitCode.DONE, what
            desk.run(fast(root), "uninstall")
        assert snapshot(root) == before, what


def test_a_journal_without_a_receipt_goes_with_an_uninstall(desk: Desk, root: Path, good: Path) -> None:
    """A power cut may take back the removal of the one and not of the other."""
    before = snapshot(root)
    desk.up(fast(root), good)
    journal = (root / "var/lib/stratum/journal.json").read_bytes()
    desk.run(fast(root), "uninstall")
    (root / "var/lib/stratum").mkdir()
    (root / "var/lib/stratum/journal.json").write_bytes(journal)
    assert desk.run(fast(root), "uninstall").status == ExitCode.DONE
    assert snapshot(root) == before


# -- the file that ships --------------------------------------------------------------------------------

FITTING = sorted(
    (tuple(map(int, version.split("."))), path)
    for version, path in interpreters().items()
    if tuple(map(int, version.split("."))) >= (3, 9, 2)
)
ENDS = {".".join(map(str, version)): path for version, path in (FITTING[0], FITTING[-1])}  # oldest and newest


@pytest.mark.parametrize("python", ENDS.values(), ids=ENDS.keys())
def test_the_pyz_prepares_and_clears_a_tree_as_cloud_init_runs_it(
    pyz: Path, desk: Desk, root: Path, good: Path, python: str
) -> None:
    """Rows 28 and 35: no environment, no HOME, closed streams, umask 077."""
    before = snapshot(root)
    code = (
        "import os, sys\n"
        "os.umask(0o077)\n"
        "for number in (0, 1, 2): os.close(number)\n"
        "os.execve(sys.argv[1], sys.argv[1:], {})\n"
    )

    def run(*words: str) -> int:
        argv = [python, "-I", "-S", "-c", code, python, "-I", "-S", *words, "--root", str(root)]
        return subprocess.run(argv, env={}, cwd="/", timeout=120, check=False).returncode

    up = ("up", "--bundle", str(good), "--trust", str(desk.key))
    assert run(str(pyz), *up) == ExitCode.DONE
    installed = root / os.readlink(root / "usr/local/bin/stratum")[1:]
    assert installed.read_bytes() == pyz.read_bytes()
    assert stat.S_IMODE((root / "opt/stratum/node/1.0.0/bin").stat().st_mode) == 0o755
    after = snapshot(root)
    assert run(str(installed), *up) == ExitCode.DONE
    assert snapshot(root) == after
    assert run(str(installed), "uninstall", "--dry-run") == ExitCode.DONE
    assert snapshot(root) == after
    assert run(str(installed), "uninstall") == ExitCode.DONE
    assert snapshot(root) == before


def test_the_pyz_says_a_bad_bundle_in_one_line_and_with_its_code(pyz: Path, desk: Desk, root: Path) -> None:
    bundle = desk.bundle(_spoiled("first layer"))
    before = snapshot(root)
    argv = [sys.executable, "-I", "-S", str(pyz), "up", "--root", str(root), "--bundle", str(bundle)]
    done = subprocess.run([*argv, "--trust", str(desk.key)], capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitCode.BUNDLE_MALFORMED
    lines = done.stderr.splitlines()
    assert [line.partition("[")[0] for line in lines if line.startswith("stratum:")] == ["stratum: error"]
    assert "state: nothing was changed" in lines
    assert snapshot(root) == before
