"""Files that are replaced whole or not at all, whatever fails on the way."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from stratum.atomicfile import NotDurableError, StrayCopyError, create_exclusively, replace_link, write_file
from stratum.errors import StratumError
from stratum.system import Host, PathLike
from tests.fakes import FaultHost, Killed


class Tracing(Host):
    """Writes down what is done, in order; ``failing`` says what fails and with which error."""

    def __init__(self, root: str, failing: dict[str, int] | None = None) -> None:
        super().__init__(root, {})
        self.trace: list[str] = []
        self.failing = failing or {}

    def _note(self, what: str) -> None:
        self.trace.append(what)
        if what in self.failing:
            raise OSError(self.failing[what], os.strerror(self.failing[what]))

    def open_new(self, path, mode):  # type: ignore[no-untyped-def]
        self._note("create")
        return super().open_new(path, mode)

    def fsync(self, file) -> None:  # type: ignore[no-untyped-def]
        file.flush()
        self.size = os.fstat(file.fileno()).st_size
        self.mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        self._note("sync file")

    def rename(self, source: PathLike, target: PathLike) -> None:
        self._note("rename")
        super().rename(source, target)

    def link(self, source: PathLike, target: PathLike) -> None:
        self._note("link")
        super().link(source, target)

    def unlink(self, path: PathLike) -> None:
        self._note("unlink")
        super().unlink(path)

    def symlink(self, target: str, path: PathLike) -> None:
        self._note("symlink")
        super().symlink(target, path)

    def fsync_dir(self, path: PathLike) -> None:
        self._note("sync directory")


WRITERS: list[Callable[[Host, str, bytes], None]] = [write_file, create_exclusively]


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def test_the_order_is_content_mode_sync_rename_sync_of_the_directory(tmp_path: Path) -> None:
    host = Tracing(str(tmp_path))
    write_file(host, "/file", b"content", 0o640)
    assert host.trace == ["create", "sync file", "rename", "sync directory"]
    assert (host.size, host.mode) == (7, 0o640), "the sync must cover content and mode"
    assert (tmp_path / "file").read_bytes() == b"content"


def test_a_file_that_must_be_new_is_linked_into_place_and_never_renamed(tmp_path: Path) -> None:
    host = Tracing(str(tmp_path))
    create_exclusively(host, "/key", b"secret")
    assert host.trace == ["create", "sync file", "link", "unlink", "sync directory"]
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert names(tmp_path) == ["key"]


def test_a_link_is_turned_by_one_rename(tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to("old")
    host = Tracing(str(tmp_path))
    replace_link(host, "/current", "new")
    assert host.trace == ["symlink", "rename", "sync directory"]
    assert os.readlink(tmp_path / "current") == "new"
    assert names(tmp_path) == ["current"]


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777], ids=oct)
@pytest.mark.parametrize("bits", [0o644, 0o600, 0o755])
def test_the_mode_is_the_one_asked_for_under_every_umask(tmp_path: Path, mask: int, bits: int) -> None:
    before = os.umask(mask)
    try:
        write_file(Host(str(tmp_path)), "/file", b"x", bits)
        create_exclusively(Host(str(tmp_path)), "/new", b"x", bits)
    finally:
        os.umask(before)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "new")} == {bits}


def test_a_link_at_the_path_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("kept")
    (tmp_path / "file").symlink_to("target")
    write_file(Host(str(tmp_path)), "/file", b"new")
    assert (tmp_path / "target").read_text() == "kept"
    assert not (tmp_path / "file").is_symlink()


def test_a_reader_of_the_old_file_keeps_it_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old" * 1000)
    with open(tmp_path / "file", "rb") as reader:
        reader.read(10)
        write_file(Host(str(tmp_path)), "/file", b"new")
        assert reader.read() == (b"old" * 1000)[10:]


@pytest.mark.parametrize("kind", ["file", "dangling link", "directory"])
def test_what_exists_is_never_replaced_by_a_file_that_must_be_new(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key"
    if kind == "file":
        path.write_text("theirs")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        create_exclusively(Host(str(tmp_path)), "/key", b"ours")
    assert names(tmp_path) == ["key"]
    assert kind != "file" or path.read_text() == "theirs"


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("step", ["create", "sync file", "rename", "link"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_failure_before_the_file_is_in_place_changes_nothing(
    tmp_path: Path, write: Callable[[Host, str, bytes], None], step: str, number: int
) -> None:
    if step == ("link" if write is write_file else "rename"):
        return  # the other one's step
    if write is write_file:
        (tmp_path / "file").write_text("old")
    host = Tracing(str(tmp_path), {step: number})
    with pytest.raises(OSError) as caught:
        write(host, "/file", b"new")
    assert caught.value.errno == number
    assert names(tmp_path) == (["file"] if write is write_file else [])
    assert write is not write_file or (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("write", [*WRITERS, lambda host, path, data: replace_link(host, path, data.decode())])
def test_a_directory_that_cannot_be_synced_says_that_the_change_may_be_lost(
    tmp_path: Path, write: Callable[[Host, str, bytes], None]
) -> None:
    with pytest.raises(NotDurableError) as caught:
        write(Tracing(str(tmp_path), {"sync directory": errno.EIO}), "/file", b"new")
    assert caught.value.reference == "not-durable"
    assert "/file" in caught.value.message and os.strerror(errno.EIO) in caught.value.message
    assert names(tmp_path) == ["file"], "the file is in place all the same"


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_copy_that_cannot_be_removed_is_named(tmp_path: Path, write: Callable[[Host, str, bytes], None]) -> None:
    failing = {"sync file": errno.EIO, "unlink": errno.EPERM}
    with pytest.raises(StrayCopyError) as caught:
        write(Tracing(str(tmp_path), failing), "/file", b"secret")
    (left,) = names(tmp_path)
    assert f"/{left}" in caught.value.message and f"/{left}" in str(caught.value.hint)


def test_a_new_key_whose_copy_cannot_be_removed_is_an_error_though_it_is_in_place(tmp_path: Path) -> None:
    with pytest.raises(StrayCopyError):
        create_exclusively(Tracing(str(tmp_path), {"unlink": errno.EPERM}), "/key", b"secret")
    assert (tmp_path / "key").read_bytes() == b"secret"


def test_a_directory_at_the_path_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "file/inside").mkdir(parents=True)
    host = Host(str(tmp_path))
    with pytest.raises(OSError):
        write_file(host, "/file", b"x")
    with pytest.raises(OSError):
        replace_link(host, "/file", "x")
    assert names(tmp_path) == ["file"]


def test_a_missing_directory_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    for write in WRITERS:
        with pytest.raises(FileNotFoundError):
            write(Host(str(tmp_path)), "/no/file", b"x")
    assert names(tmp_path) == []


@pytest.mark.parametrize("old", [None, b"old content"])
def test_a_process_killed_at_any_change_leaves_the_old_or_the_new_file(tmp_path: Path, old: bytes | None) -> None:
    for number in range(10):
        root = tmp_path / str(number)
        root.mkdir()
        if old is not None:
            (root / "file").write_bytes(old)
        host = FaultHost(str(root), {}, number)
        try:
            write_file(host, "/file", b"new content")
        except Killed:
            found = (root / "file").read_bytes() if (root / "file").exists() else None
            assert found in (old, b"new content")
            assert len(names(root)) <= (1 if old is None else 2)
            for name in names(root):
                assert name == "file" or Host.temporary_of(name) == "file", "what is left can be told and removed"
        else:
            assert number == len(host.mutations) == 3
            assert (root / "file").read_bytes() == b"new content"
            return
    pytest.fail("it never came to an end")


def test_an_interrupt_removes_the_copy(tmp_path: Path) -> None:
    class Interrupted(Tracing):
        def fsync(self, file) -> None:  # type: ignore[no-untyped-def]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(Interrupted(str(tmp_path)), "/file", b"x")
    assert names(tmp_path) == []


def test_the_errors_of_this_module_are_errors_that_a_user_can_read() -> None:
    for error in (NotDurableError("/f", OSError(5, "I/O")), StrayCopyError("/f", "/.f.tmp", OSError(1, "no"))):
        assert isinstance(error, StratumError)
        assert error.hint
