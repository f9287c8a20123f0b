"""Unpacking a layer: what the description says and nothing else, and never outside of the staging directory."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Optional, Union

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratum.bundle.blobs import Blob
from stratum.bundle.oci import (
    LAYER_GZIP,
    LAYER_TAR,
    LAYER_ZSTD,
    Component,
    Descriptor,
    FileEntry,
    digest_of,
)
from stratum.bundle.paths import DEPTH_MOST
from stratum.bundle.source import open_bundle
from stratum.bundle.unpack import required_space, unpack_layer
from stratum.bundle.verify import open_verified
from stratum.errors import BundleError, DigestMismatchError, ExitCode, StratumError
from stratum.system import Host, HostPath, PathLike
from tests.bundles import (
    COMPRESSIONS,
    EVERY_BYTE,
    Entry,
    Publisher,
    directory,
    flipped,
    hard_link,
    header,
    key_pair,
    listing,
    pax,
    snapshot,
    symlink,
    tar,
    zstd,
)

Entries = Sequence[Union[Entry, bytes]]
STAGING = HostPath("/opt/staging")
GOOD: list[Union[Entry, bytes]] = [
    directory("bin"),
    Entry("bin/tool", b"#!/bin/sh\n"),
    Entry("bin/large", bytes(range(256)) * 9000, mode=0o755),
    symlink("bin/alias", "tool"),
    directory("share/doc", 0o555),
    Entry("share/doc/secret", b"x", mode=0o600),
    directory("other"),
    symlink("other/s", "../share/doc"),
    hard_link("bin/twin", "bin/tool"),
    Entry("share/empty", b"", mode=0o644),
]


def files(items: list[dict[str, Any]]) -> tuple[FileEntry, ...]:
    """A file list as it is, without the description's own checks: unpacking must stand by itself."""
    return tuple(
        FileEntry(
            item["path"],
            item["type"],
            int(item.get("mode", "0"), 8),
            item.get("size", 0),
            item.get("digest"),
            item.get("target"),
        )
        for item in items
    )


class Layer:
    """A layer and the component that describes it."""

    def __init__(
        self,
        entries: Entries = (),
        *,
        listed: Optional[Entries] = None,
        archive: Optional[bytes] = None,
        media_type: str = LAYER_ZSTD,
        compress: Optional[Callable[[bytes], bytes]] = None,
        size: Optional[int] = None,
    ) -> None:
        self.archive = tar(entries) if archive is None else archive
        self.media_type = media_type
        self.data = (compress or COMPRESSIONS[media_type])(self.archive)
        self.component = Component(
            "tool",
            "1.0",
            digest_of(self.data),
            digest_of(self.archive),
            len(self.archive) if size is None else size,
            files(listing(entries if listed is None else listed)),
        )

    def blob(self) -> Blob:
        descriptor = Descriptor(self.media_type, self.component.layer, len(self.data))
        return Blob(io.BytesIO(self.data).read, descriptor, "test.tar")


class Sandbox:
    """A host tree with something outside of the staging directory, that must never change."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.host = Host(str(top))
        self.staging = top / "opt/staging"
        self.staging.mkdir(parents=True)
        outside = top / "outside"
        outside.mkdir()
        (outside / "victim").write_bytes(b"precious")
        (outside / "victim").chmod(0o640)
        os.utime(outside / "victim", (1, 1))
        (top / "opt/victim").write_bytes(b"precious too")
        self.before = self.outside()

    def outside(self) -> dict[str, tuple[Any, ...]]:
        return {path: facts for path, facts in snapshot(self.top).items() if "/opt/staging" not in path}

    def unpack(self, layer: Layer, host: Optional[Host] = None, **options: Any) -> None:
        unpack_layer(host or self.host, layer.blob(), layer.media_type, layer.component, STAGING, **options)

    def refusal(self, layer: Layer, **options: Any) -> str:
        """The error of a layer that must not unpack; nothing outside has changed, the rest can be removed."""
        with pytest.raises(StratumError) as caught:
            self.unpack(layer, **options)
        assert self.outside() == self.before
        shutil.rmtree(self.staging)
        self.staging.mkdir()
        assert caught.value.message.isascii()
        assert "\n" not in caught.value.message
        assert caught.value.hint
        if isinstance(caught.value, BundleError):
            assert caught.value.exit_code == ExitCode.BUNDLE_MALFORMED
        return f"[{caught.value.reference}] {caught.value.message}"

    def tree(self) -> dict[str, tuple[Any, ...]]:
        return {os.path.relpath(path, self.staging): facts for path, facts in snapshot(self.staging).items()}


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


# -- what is good ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("media_type", [LAYER_ZSTD, LAYER_GZIP, LAYER_TAR])
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
def test_a_good_layer_is_unpacked_with_exact_modes(sandbox: Sandbox, media_type: str, umask: int) -> None:
    old = os.umask(umask)
    try:
        sandbox.unpack(Layer(GOOD, media_type=media_type))
    finally:
        os.umask(old)
    top = sandbox.staging
    assert (top / "bin/large").read_bytes() == bytes(range(256)) * 9000
    modes = {name: (top / name).stat().st_mode & 0o7777 for name in ("bin", "bin/tool", "share", "share/doc")}
    assert modes == {"bin": 0o755, "bin/tool": 0o755, "share": 0o755, "share/doc": 0o555}
    assert (top / "share/doc/secret").stat().st_mode & 0o7777 == 0o600
    assert os.readlink(top / "bin/alias") == "tool"
    assert os.readlink(top / "other/s") == "../share/doc"
    assert (top / "bin/twin").samefile(top / "bin/tool")
    for path in [top / "bin/tool", top / "bin/alias", top / "bin", top / "share/doc"]:
        assert path.lstat().st_mtime == 1_700_000_000
    assert (top / "share").stat().st_mtime == 0  # no member names it
    assert all((facts[1], facts[2]) == (os.geteuid(), os.getegid()) for facts in sandbox.tree().values())
    assert sandbox.outside() == sandbox.before


def test_files_belong_to_root_whatever_the_archive_and_the_parent_say(sandbox: Sandbox) -> None:
    if os.geteuid() != 0:
        return  # another user's files are its own
    os.chown(sandbox.staging, 0, 12345)
    sandbox.staging.chmod(0o2755)
    block = bytearray(header(b"tool", size=0))
    block[108:124] = b"0001750\0" * 2
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    entries: Entries = [directory("d"), Entry("tool", b""), symlink("s", "tool")]
    sandbox.unpack(Layer(entries, archive=tar([directory("d"), bytes(block), symlink("s", "tool")])))
    for name in ("d", "tool", "s"):
        info = (sandbox.staging / name).lstat()
        assert (info.st_uid, info.st_gid) == (0, 0)
        assert not info.st_mode & 0o7000


def test_names_may_begin_with_a_dot(sandbox: Sandbox) -> None:
    entries: Entries = [directory("."), directory("./bin"), Entry("./bin/a", b"x"), hard_link("./bin/b", "./bin/a")]
    listed: Entries = [directory("bin"), Entry("bin/a", b"x"), Entry("bin/b", b"x")]
    sandbox.unpack(Layer(entries, listed=listed))
    assert (sandbox.staging / "bin/b").samefile(sandbox.staging / "bin/a")


def test_progress_counts_compressed_bytes(sandbox: Sandbox) -> None:
    seen: list[int] = []
    layer = Layer(GOOD)
    sandbox.unpack(layer, progress=seen.append)
    assert sum(seen) == len(layer.data)


def test_members_may_come_in_any_order_that_has_link_targets_first(sandbox: Sandbox) -> None:
    entries: Entries = [Entry("d/e/f", b"x"), directory("d/e", 0o700), directory("d", 0o711)]
    sandbox.unpack(Layer(entries))
    assert [(sandbox.staging / name).stat().st_mode & 0o777 for name in ("d", "d/e")] == [0o711, 0o700]


def test_a_path_may_be_deep_but_not_without_end(sandbox: Sandbox) -> None:
    for depth in (DEPTH_MOST, DEPTH_MOST + 1):
        name = "d/" * (depth - 1) + "f"
        layer = Layer([pax({"path": name}), Entry("f", b"x")], listed=[Entry(name, b"x")])
        if depth == DEPTH_MOST:
            sandbox.unpack(layer)
            assert (sandbox.staging / name).read_bytes() == b"x"
            shutil.rmtree(sandbox.staging / "d")
        else:
            assert f"more than {DEPTH_MOST} directories deep" in sandbox.refusal(layer)


def test_an_empty_component_is_no_error(sandbox: Sandbox) -> None:
    sandbox.unpack(Layer([]))
    sandbox.unpack(Layer([pax({"comment": "x"}, flag=b"g")]))  # CPython issue 149578
    assert list(sandbox.staging.iterdir()) == []


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONIOENCODING": "iso-8859-1"}])
def test_names_keep_their_bytes_where_the_locale_is_not_utf8(sandbox: Sandbox, locale: dict[str, str]) -> None:
    # CPython issue 133890, pip issue 10219.
    script = """
        import os, sys
        assert sys.getfilesystemencoding() != "utf-8", sys.getfilesystemencoding()
        from pathlib import Path
        from tests.unit.test_unpack import Layer, Sandbox
        from tests.bundles import Entry, symlink
        box = Sandbox(Path(sys.argv[1]))
        box.unpack(Layer([Entry("caf\\u00e9.txt", b"x"), symlink("\\u00fc", "caf\\u00e9.txt")]))
        assert sorted(os.listdir(os.fsencode(box.staging))) == ["caf\\u00e9.txt".encode(), "\\u00fc".encode()]
        assert os.readlink(os.fsencode(box.staging / os.fsdecode("\\u00fc".encode()))) == "caf\\u00e9.txt".encode()
        print(box.refusal(Layer([Entry("caf\\u00e9.txt", b"x")], listed=[])))
        print(box.refusal(Layer([Entry(b"caf\\xe9.txt", b"x")], listed=[])))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(sandbox.top / "inner")],
        env={"PATH": os.environ["PATH"], "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", **locale},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert rb"caf\xe9.txt is not in the component's list" in run.stdout
    assert rb"caf\xe9.txt: a name that is not UTF-8" in run.stdout


# -- hostile archives -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hostile", "why"),
    [
        ([Entry("../victim", b"x")], "not a normal relative path"),
        ([Entry("bin/../../victim", b"x")], "not a normal relative path"),
        ([Entry("..", b"x")], "not a normal relative path"),
        ([directory("..")], "not a normal relative path"),
        ([Entry("/outside/victim", b"x")], "absolute"),
        ([Entry("//outside/victim", b"x")], "absolute"),
        ([directory("/")], "absolute"),
        ([Entry("./../victim", b"x")], "not a normal relative path"),
        ([Entry(".//outside", b"x")], "is not in the component's list"),
        ([pax({"path": "../victim"}), Entry("harmless", b"x")], "not a normal relative path"),
        ([Entry("L", b"../victim\0", flag=b"L"), Entry("harmless", b"x")], "not a normal relative path"),
        ([Entry("victim", b"x", prefix=b"..")], "not a normal relative path"),
        ([pax({"path": "a\0b"}), Entry("a", b"x")], "a NUL"),
        ([Entry("a\nb", b"x")], "control character"),
        ([Entry("a\x1b[31mb", b"x")], "control character"),
        ([Entry("a\\b", b"x")], "backslash"),
        ([Entry(b"caf\xe9", b"x")], "not UTF-8"),
        ([Entry("x" * 50 + "/" + "y" * 49, b"", prefix=b"z" * 150)], "is not in the component's list"),
        ([pax({"path": "x" * 256}), Entry("a", b"")], "too long"),
        ([Entry("dev", flag=b"3")], "is a character device"),
        ([Entry("dev", flag=b"4")], "is a block device"),
        ([Entry("fifo", flag=b"6")], "is a fifo"),
        ([Entry("sparse", flag=b"S")], "sparse"),
        ([Entry("bin/suid", b"x", mode=0o4755)], "mode 4755; set-id"),
        ([Entry("bin/sgid", b"x", mode=0o2755)], "mode 2755; set-id"),
        ([Entry("bin/sticky", b"x", mode=0o1755)], "mode 1755; set-id"),
        ([directory("tmp", 0o1777)], "mode 1777; set-id"),
        ([Entry("caps", b"x"), pax({"SCHILY.xattr.security.capability": b"\1"}), Entry("b")], "not in the component"),
        ([pax({"SCHILY.xattr.security.capability": b"\1"}), Entry("bin/new")], "file capabilities"),
        ([Entry("bin/tool", b"#!/bin/sh\n")], "stands twice"),
        ([Entry("./bin/tool", b"#!/bin/sh\n")], "stands twice"),
        ([directory("bin")], "stands twice"),
        ([symlink("bin/tool", "alias")], "stands twice"),
        ([Entry("extra", b"x")], "is not in the component's list"),
    ],
)
def test_a_hostile_member_is_refused(sandbox: Sandbox, hostile: Entries, why: str) -> None:
    assert why in sandbox.refusal(Layer([*GOOD, *hostile], listed=GOOD))


@pytest.mark.parametrize("target", ["/outside", "/outside/victim", "../../outside", "..", "x/../../..", "", "a\nb"])
def test_a_link_out_of_the_tree_is_refused_even_when_listed(sandbox: Sandbox, target: str) -> None:
    layer = Layer([symlink("s", target)])
    assert "bad-layer" in sandbox.refusal(layer) or target == ""


@pytest.mark.parametrize("target", ["../../outside/victim", "/outside/victim", "absent", "s", "d", "../opt/staging/a"])
def test_a_hard_link_leads_only_to_a_file_of_the_layer(sandbox: Sandbox, target: str) -> None:
    # CPython issues 151558, 157190, 151987: through a link to a link, what lies outside got mode and time.
    entries: Entries = [directory("d"), Entry("a", b"precious"), symlink("s", "a"), hard_link("h", target)]
    listed: Entries = [directory("d"), Entry("a", b"precious"), symlink("s", "a"), Entry("h", b"precious")]
    assert "is a hard link to" in sandbox.refusal(Layer(entries, listed=listed))


def test_a_hard_link_to_a_link_to_the_outside_is_refused(sandbox: Sandbox) -> None:
    entries: Entries = [symlink("s", "../../outside/victim"), hard_link("h", "s", mode=0o777)]
    listed: Entries = [symlink("s", "../../outside/victim"), Entry("h", b"precious", mode=0o777)]
    assert "leads out" in sandbox.refusal(Layer(entries, listed=listed))


def test_a_whiteout_in_a_component_is_refused_in_either_order(sandbox: Sandbox) -> None:
    # Row 59: a component is one layer, so there is nothing that a whiteout could hide.
    opaque, link = Entry("d/.wh..wh..opq"), symlink("d/a", "b")
    for entries in ([opaque, link], [link, opaque]):
        assert "is a whiteout" in sandbox.refusal(Layer(list(entries), listed=[link]))


def test_a_hard_link_before_its_target_is_refused(sandbox: Sandbox) -> None:
    entries: Entries = [hard_link("h", "a"), Entry("a", b"x")]
    assert "no file before it" in sandbox.refusal(Layer(entries, listed=[Entry("h", b"x"), Entry("a", b"x")]))


def test_a_hard_link_that_is_listed_as_another_file_is_refused(sandbox: Sandbox) -> None:
    for other in (Entry("h", b"y"), Entry("h", b"x", mode=0o700), Entry("h", b"xx")):
        layer = Layer([Entry("a", b"x"), hard_link("h", "a", other.mode)], listed=[Entry("a", b"x"), other])
        assert "listed as another file" in sandbox.refusal(layer)


@pytest.mark.parametrize("target", ["../../outside", "/outside", "d", "."])
def test_nothing_is_written_through_a_link(sandbox: Sandbox, target: str) -> None:
    entries: Entries = [directory("d"), symlink("d/l", target), Entry("d/l/victim", b"x")]
    assert "bad-layer" in sandbox.refusal(Layer(entries))


def test_nothing_is_placed_below_a_file(sandbox: Sandbox) -> None:
    assert "lies below a, which is no directory" in sandbox.refusal(Layer([Entry("a", b"x"), Entry("a/b", b"y")]))


def test_a_directory_does_not_replace_a_link(sandbox: Sandbox) -> None:
    entries: Entries = [symlink("l", "d"), directory("l"), Entry("l/x", b"x")]
    assert "bad-layer" in sandbox.refusal(Layer(entries, listed=[symlink("l", "d"), Entry("l/x", b"x")]))


def test_a_layer_that_is_no_tar_is_refused(sandbox: Sandbox) -> None:
    assert "bad-archive" in sandbox.refusal(Layer([], archive=b"hello" * 500, compress=zstd))


def test_one_header_that_claims_a_gigabyte_allocates_nothing(sandbox: Sandbox) -> None:
    layer = Layer([], archive=header(b"x", flag=b"x", size=1 << 30) + bytes(1024))
    tracemalloc.start()
    try:
        sandbox.refusal(layer)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


# -- what is not as described ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "listed", "why"),
    [
        (Entry("a", b"x"), directory("a"), "is a file, listed as directory"),
        (directory("a"), Entry("a", b""), "is a directory, listed as file"),
        (symlink("a", "b"), Entry("a", b""), "is a symlink, listed as file"),
        (Entry("a", b"x"), symlink("a", "b"), "is a file, listed as symlink"),
        (hard_link("a", "b"), directory("a"), "is a hard link, listed as directory"),
        (Entry("a", b"x", mode=0o644), Entry("a", b"x"), "mode 0644, listed as 0755"),
        (directory("a", 0o777), directory("a"), "mode 0777, listed as 0755"),
        (Entry("a", b"xy"), Entry("a", b"x"), "has 2 bytes, listed as 1"),
        (Entry("a", b""), Entry("a", b"x"), "has 0 bytes, listed as 1"),
        (Entry("a", b"x"), Entry("a", b"y"), "digest-mismatch"),
        (symlink("a", "b"), symlink("a", "c"), "leads to b, listed as c"),
    ],
)
def test_a_member_that_differs_from_the_list_is_refused(
    sandbox: Sandbox, entry: Entry, listed: Entry, why: str
) -> None:
    assert why in sandbox.refusal(Layer([Entry("first", b""), entry], listed=[Entry("first", b""), listed]))


def test_what_is_listed_and_does_not_come_is_named(sandbox: Sandbox) -> None:
    said = sandbox.refusal(Layer([Entry("a", b"x")], listed=[Entry("a", b"x"), Entry("bin/b", b"y")]))
    assert "bin/b is listed, but not in the archive" in said


def test_the_digest_of_the_uncompressed_archive_is_proved(sandbox: Sandbox) -> None:
    layer = Layer(GOOD)
    layer.component = replace(layer.component, diff_id=digest_of(b"other"))
    assert "digest-mismatch" in sandbox.refusal(layer)


def test_the_digest_of_the_layer_is_proved(sandbox: Sandbox) -> None:
    layer = Layer(GOOD, media_type=LAYER_TAR)
    other = Layer([*GOOD[:-1], replace(GOOD[-1], mtime=5)], media_type=LAYER_TAR)  # type: ignore[type-var]
    layer.component = replace(layer.component, diff_id=other.component.diff_id)
    layer.data = other.data
    assert "digest-mismatch" in sandbox.refusal(layer)


@pytest.mark.parametrize("difference", [-1, -512, 1, 1 << 40])
def test_the_declared_size_is_that_of_the_archive(sandbox: Sandbox, difference: int) -> None:
    layer = Layer(GOOD)
    layer.component = replace(layer.component, size=layer.component.size + difference)
    said = sandbox.refusal(layer)
    assert ("too-large" if difference < 0 else "unpacks to") in said


def test_a_damaged_copy_is_told_as_such_and_not_as_what_it_looks_like(sandbox: Sandbox) -> None:
    layer = Layer(GOOD)
    good = layer.data
    for bit in range(0, len(good) * 8, 8 if EVERY_BYTE else 1009):
        layer.data = flipped(good, bit)
        assert "digest-mismatch" in sandbox.refusal(layer)


def test_a_layer_cut_at_any_byte_is_refused(sandbox: Sandbox) -> None:
    layer = Layer(GOOD)
    good = layer.data
    for length in range(0, len(good), 1 if EVERY_BYTE else 211):
        layer.data = good[:length]
        blob = Blob(io.BytesIO(layer.data).read, Descriptor(LAYER_ZSTD, layer.component.layer, len(good)), "test.tar")
        with pytest.raises(BundleError, match="cut-short"):
            unpack_layer(sandbox.host, blob, LAYER_ZSTD, layer.component, STAGING)
        shutil.rmtree(sandbox.staging)
        sandbox.staging.mkdir()
    assert sandbox.outside() == sandbox.before


def test_a_bomb_of_4_gib_writes_no_more_than_is_listed(sandbox: Sandbox) -> None:
    block = b"\x28\xb5\x2f\xfd\x00\x50" + (1 << 1 | (1 << 17) << 3).to_bytes(3, "little") + b"\0"
    zeros = block[:6] + block[6:] * 32767 + (3 | (1 << 17) << 3).to_bytes(3, "little") + b"\0"
    packed = zstd(header(b"zero", size=1 << 32)) + zeros + zstd(bytes(1024))
    assert len(packed) < 1 << 20
    layer = Layer([Entry("zero", b"x")], archive=b"", compress=lambda _: packed, size=10 << 20)
    tracemalloc.start()
    try:
        assert "has 4294967296 bytes, listed as 1" in sandbox.refusal(layer)
        layer.component = replace(layer.component, files=(FileEntry("zero", "file", 0o755, 1 << 32, digest_of(b"")),))
        assert "too-large" in sandbox.refusal(layer)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_large_layer_is_unpacked_in_little_memory(sandbox: Sandbox) -> None:
    layer = Layer([Entry("big", bytes(80 << 20))])
    tracemalloc.start()
    try:
        sandbox.unpack(layer)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


# -- the disk -------------------------------------------------------------------------------------------


class FullDisk(Host):
    """Fails the mutation ``number`` with ``code``; a file fails at its first write or its close."""

    def __init__(self, root: str, number: int, code: int) -> None:
        super().__init__(root)
        self.left = number
        self.code = code

    def _count(self, path: PathLike) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(self.code, os.strerror(self.code), str(path))

    def mkdir(self, path: PathLike, mode: int = 0o755) -> None:
        self._count(path)
        super().mkdir(path, mode)

    def symlink(self, target: str, path: PathLike) -> None:
        self._count(path)
        super().symlink(target, path)

    def link(self, source: PathLike, target: PathLike) -> None:
        self._count(target)
        super().link(source, target)

    def chmod(self, path: PathLike, mode: int) -> None:
        self._count(path)
        super().chmod(path, mode)

    def open_new(self, path: PathLike, mode: int) -> BinaryIO:
        self._count(path)
        file = super().open_new(path, mode)
        if self.left == 0:
            file.close()
            return open("/dev/full", "wb")
        return file


@pytest.mark.parametrize(
    ("code", "reference"), [(errno.ENOSPC, "disk-full"), (errno.EDQUOT, "disk-full"), (errno.EIO, "unpack-failed")]
)
def test_a_disk_that_fails_anywhere_gives_one_clear_error(sandbox: Sandbox, code: int, reference: str) -> None:
    failures = 0
    for number in range(40):
        try:
            sandbox.unpack(Layer(GOOD), FullDisk(str(sandbox.top), number, code))
        except StratumError as error:
            failures += 1
            assert error.reference in (reference, "disk-full")
            assert error.exit_code == ExitCode.FAILED
        shutil.rmtree(sandbox.staging)
        sandbox.staging.mkdir()
    assert len(GOOD) <= failures < 40
    assert sandbox.outside() == sandbox.before


def test_a_staging_directory_that_is_not_empty_is_not_overwritten(sandbox: Sandbox) -> None:
    (sandbox.staging / "bin").mkdir()
    (sandbox.staging / "bin/tool").symlink_to(sandbox.top / "outside/victim")
    assert "unpack-failed" in sandbox.refusal(Layer(GOOD))


def test_what_others_lie_below_cannot_be_another_thing_than_a_directory(sandbox: Sandbox) -> None:
    above = [Entry("d/d", flag=b"2", link="../a"), Entry("d", flag=b"2", link="a")]
    assert "d is a symlink, and others lie below it" in sandbox.refusal(Layer(above))


# -- fuzzing --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    yield Sandbox(tmp_path_factory.mktemp("fuzz"))


names = st.sampled_from(
    ["a", "b", "d", "d/a", "d/b", "d/d", "../x", "/x", ".", "..", "d/..", "./a", "d/", "a/b", "é", "a\\"]
)
targets = st.sampled_from(["a", "d", "../a", "../../outside/victim", "/outside/victim", "d/a", "..", ".", "./d/../a"])


@st.composite
def any_entry(draw: st.DrawFn) -> Entry:
    flag = draw(st.sampled_from([b"0", b"0", b"1", b"2", b"5", b"6"]))
    return Entry(
        draw(names),
        draw(st.binary(max_size=20)) if flag == b"0" else b"",
        mode=draw(st.sampled_from([0o755, 0o644, 0o4755])),
        flag=flag,
        link=draw(targets) if flag in (b"1", b"2") else b"",
    )


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(any_entry(), min_size=1, max_size=6), st.booleans())
def test_no_mixture_of_members_gets_out(shared: Sandbox, entries: list[Entry], honest: bool) -> None:
    layer = Layer(entries, listed=entries if honest else entries[:-1])
    try:
        shared.unpack(layer)
    except BundleError:
        pass
    else:
        # What was taken is what was listed: names of tar and list agree, and nothing else is there.
        placed = {name for name in shared.tree() if name != "." and not name.endswith("/.")}
        listed = {item.path for item in layer.component.files}
        assert listed <= placed
        for path in shared.staging.rglob("*"):
            if path.is_symlink():
                assert os.path.realpath(path).startswith(str(shared.staging))
    assert shared.outside() == shared.before
    shutil.rmtree(shared.staging)
    shared.staging.mkdir()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_archives_raise_nothing_but_our_errors(shared: Sandbox, data: st.DataObject) -> None:
    archive = bytearray(tar([entry for entry in GOOD if isinstance(entry, bytes) or entry.name != "bin/large"]))
    for _ in range(data.draw(st.integers(1, 5))):
        position = data.draw(st.integers(0, len(archive) - 1))
        archive[position] = data.draw(st.integers(0, 255))
    try:
        shared.unpack(Layer([], listed=GOOD, archive=bytes(archive)))
    except BundleError:
        pass
    assert shared.outside() == shared.before
    shutil.rmtree(shared.staging)
    shared.staging.mkdir()


@pytest.mark.parametrize("form", ["pipe", "file"])
def test_a_bundle_cut_anywhere_gives_no_component_that_is_not_whole(
    form: str, sandbox: Sandbox, tmp_path: Path
) -> None:
    whole = Publisher.of([Entry(f"bin/{number}", bytes([number]) * 3000) for number in range(5)], media_type=LAYER_TAR)
    data = whole.build().tar()
    for length in range(0, len(data), 1 if EVERY_BYTE else 701):
        (tmp_path / "b.tar").write_bytes(data[:length])
        with pytest.raises(BundleError):
            stdin = io.BytesIO(data[:length])
            with open_bundle("-" if form == "pipe" else str(tmp_path / "b.tar"), stdin=stdin) as source:
                bundle = open_verified(source, [key_pair()[1]])
                for descriptor, blob in source.stream_blobs(bundle.manifest.layers):
                    component = bundle.description.components[0]
                    unpack_layer(sandbox.host, blob, descriptor.media_type, component, STAGING)
                source.finish()
        shutil.rmtree(sandbox.staging)
        sandbox.staging.mkdir()
    (tmp_path / "b.tar").unlink()
    assert sandbox.outside() == sandbox.before


# -- how much room it takes -----------------------------------------------------------------------------


def test_the_room_needed_is_told_before_anything_is_written(sandbox: Sandbox) -> None:
    layer = Layer(GOOD)
    size, inodes = required_space([layer.component])
    sandbox.unpack(layer)
    entries = list(sandbox.staging.rglob("*"))
    used = sum(path.lstat().st_blocks * 512 for path in entries)
    assert used <= size <= used + 4096 * (len(entries) + 8)
    assert len(entries) <= inodes <= len(entries) + 2


def test_image_blobs_count_once() -> None:
    blob = Descriptor("x", digest_of(b"x"), 5000)
    assert required_space([], [blob, blob]) == (8192, 1)


def test_a_mismatch_names_blob_and_component(sandbox: Sandbox) -> None:
    layer = Layer(GOOD)
    layer.data = flipped(layer.data, 999)
    with pytest.raises(DigestMismatchError, match=layer.component.layer):
        sandbox.unpack(layer)
