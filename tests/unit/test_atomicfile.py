"""Files that are replaced whole or not at all, whatever fails on the way."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stratum.atomicfile import (
    NotDurableError,
    StrayCopyError,
    create_exclusively,
    remove_created,
    replace_link,
    write_file,
)
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


def test_the_order_is_mode_content_sync_rename_sync_of_the_directory(tmp_path: Path) -> None:
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


# -- what a failure leaves, to the last call --------------------------------------------------------------


class Labelled(Tracing):
    """A machine with SELinux: labels are kept beside the files, for this machine has none."""

    def __init__(
        self,
        root: str,
        failing: dict[str, int] | None = None,
        wanted: str | None = "u:r:wanted_t:s0",
        enforce: str = "1",
    ) -> None:
        super().__init__(root, failing)
        (Path(root) / "sys/fs/selinux").mkdir(parents=True, exist_ok=True)
        (Path(root) / "sys/fs/selinux/enforce").write_text(enforce)
        self.labels: dict[int, bytes] = {}
        self.wanted = wanted
        self.asked: list[str] = []

    @property
    def live(self) -> bool:
        return True

    @property
    def euid(self) -> int:
        return 0

    def real(self, path: PathLike, *, follow: bool = False) -> str:
        return self._resolve(str(path), follow)

    def open_new(self, path, mode):  # type: ignore[no-untyped-def]
        file = super().open_new(path, mode)
        self.labels.pop(os.fstat(file.fileno()).st_ino, None)  # a number that another file had before
        return file

    def policy_label(self, path: PathLike, mode: int) -> str | None:
        self.asked.append(f"{path} {stat.S_IFMT(mode):o}")
        return self.wanted

    def getxattr(self, path: PathLike, name: str) -> bytes | None:
        return self.labels.get(self.lstat(path).st_ino)

    def setxattr(self, path: PathLike, name: str, value: bytes) -> None:
        self._note("label")
        assert name == "security.selinux"
        self.labels[self.lstat(path).st_ino] = value

    def label(self, path: str) -> bytes | None:
        return self.getxattr(path, "security.selinux")


@pytest.mark.parametrize("write", [*WRITERS, lambda host, path, data: replace_link(host, path, data.decode())])
def test_the_label_is_the_one_of_the_final_path_and_is_there_before_the_rename(
    tmp_path: Path, write: Callable[[Host, str, bytes], object]
) -> None:
    host = Labelled(str(tmp_path))
    write(host, "/file", b"content")
    assert host.label("/file") == b"u:r:wanted_t:s0\0"
    kind = stat.S_IFMT((tmp_path / "file").lstat().st_mode)
    assert host.asked == [f"/file {kind:o}"], "the policy is asked about the final path, not the temporary one"
    place = host.trace.index("rename" if "rename" in host.trace else "link")
    assert host.trace.index("label") < place
    assert "sync file" not in host.trace or host.trace.index("label") < host.trace.index("sync file")


def test_a_policy_that_cannot_be_asked_keeps_the_label_of_the_file_that_is_replaced(tmp_path: Path) -> None:
    host = Labelled(str(tmp_path), wanted=None)
    (tmp_path / "file").write_text("old")
    host.labels[(tmp_path / "file").stat().st_ino] = b"u:r:theirs_t:s0\0"
    write_file(host, "/file", b"new")
    assert host.label("/file") == b"u:r:theirs_t:s0\0"
    write_file(host, "/fresh", b"new")
    assert host.label("/fresh") is None, "where nothing is known the kernel's own choice stays"


def test_a_label_that_is_right_already_is_not_set(tmp_path: Path) -> None:
    class Inherited(Labelled):
        def open_new(self, path, mode):  # type: ignore[no-untyped-def]
            file = super().open_new(path, mode)
            self.labels[os.fstat(file.fileno()).st_ino] = b"u:r:wanted_t:s0\0"
            return file

    host = Inherited(str(tmp_path))
    write_file(host, "/file", b"new")
    assert "label" not in host.trace


@pytest.mark.parametrize(
    ("number", "enforce", "fails"),
    [(errno.EACCES, "1", True), (errno.EINVAL, "1", True), (errno.EACCES, "0", False), (errno.ENOTSUP, "1", False)],
)
def test_a_label_that_cannot_be_set_fails_the_write_only_where_it_counts(
    tmp_path: Path, number: int, enforce: str, fails: bool
) -> None:
    host = Labelled(str(tmp_path), {"label": number}, enforce=enforce)
    (tmp_path / "file").write_text("old")
    if fails:
        with pytest.raises(OSError) as caught:
            write_file(host, "/file", b"new")
        assert caught.value.errno == number
    else:
        write_file(host, "/file", b"new")
    assert (tmp_path / "file").read_text() == ("old" if fails else "new")
    assert names(tmp_path) == ["file", "sys"]


def test_somebody_who_is_not_root_is_not_stopped_by_a_label(tmp_path: Path) -> None:
    class User(Labelled):
        @property
        def euid(self) -> int:
            return 1000

    write_file(User(str(tmp_path), {"label": errno.EPERM}), "/file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_tree_and_a_container_with_a_read_only_selinuxfs_get_no_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Contained(Labelled):
        def statvfs(self, path: PathLike) -> os.statvfs_result:
            fields = list(os.statvfs("/"))
            fields[8] |= os.ST_RDONLY
            return os.statvfs_result(fields)

    for host in (Contained(str(tmp_path)), Tracing(str(tmp_path))):
        write_file(host, "/file", b"new")
        assert "label" not in host.trace


class FullDisk(Tracing):
    def open_new(self, path, mode):  # type: ignore[no-untyped-def]
        file = super().open_new(path, mode)
        full = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(full, file.fileno(), inheritable=False)
        os.close(full)
        return file


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_full_disk_in_the_middle_of_the_content_changes_nothing(
    tmp_path: Path, write: Callable[[Host, str, bytes], object]
) -> None:
    with pytest.raises(OSError) as caught:
        write(FullDisk(str(tmp_path)), "/file", b"x" * 1_000_000)
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == []


@pytest.mark.parametrize("step", ["sync file", "rename", "link", "label"])
def test_a_stray_copy_tells_first_why_the_write_failed(tmp_path: Path, step: str) -> None:
    host = Labelled(str(tmp_path), {step: errno.EIO, "unlink": errno.EROFS})
    write = create_exclusively if step == "link" else write_file
    with pytest.raises(StrayCopyError) as caught:
        write(host, "/file", b"secret")
    assert caught.value.message.startswith(f"/file: {os.strerror(errno.EIO)}; and the temporary copy")
    assert os.strerror(errno.EROFS) in caught.value.message
    assert caught.value.created is None
    assert isinstance(caught.value.because, OSError)
    assert host.read_bytes(caught.value.temporary) in (b"secret", b"")


def test_a_link_whose_copy_cannot_be_removed_is_named(tmp_path: Path) -> None:
    with pytest.raises(StrayCopyError) as caught:
        replace_link(Tracing(str(tmp_path), {"rename": errno.EIO, "unlink": errno.EROFS}), "/current", "new")
    assert os.readlink(tmp_path / caught.value.temporary.name) == "new"


def test_the_stat_of_a_new_file_is_its_own(tmp_path: Path) -> None:
    created = create_exclusively(Host(str(tmp_path)), "/key", b"secret")
    assert (created.st_ino, created.st_size) == ((tmp_path / "key").stat().st_ino, 6)


@pytest.mark.parametrize(
    ("failing", "kind"),
    [
        ({"sync directory": errno.EIO}, NotDurableError),
        ({"unlink": errno.EPERM}, StrayCopyError),
        ({"unlink": errno.EPERM, "sync directory": errno.EIO}, StrayCopyError),
    ],
)
def test_a_new_file_that_is_in_its_place_comes_with_its_stat_whatever_fails_then(
    tmp_path: Path, failing: dict[str, int], kind: type[StrayCopyError | NotDurableError]
) -> None:
    with pytest.raises(kind) as caught:
        create_exclusively(Tracing(str(tmp_path), failing), "/key", b"secret")
    created = caught.value.created
    assert created is not None and created.st_ino == (tmp_path / "key").stat().st_ino
    assert ("could not be synced" in caught.value.message) == ("sync directory" in failing)


def test_what_was_created_is_taken_back_and_what_replaced_it_is_not(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    created = create_exclusively(host, "/key", b"ours")
    assert remove_created(host, "/key", created)
    assert names(tmp_path) == []
    assert not remove_created(host, "/key", created), "it is gone already"
    created = create_exclusively(host, "/key", b"ours")
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "theirs").rename(tmp_path / "key")
    assert not remove_created(host, "/key", created)
    assert (tmp_path / "key").read_text() == "theirs"


def test_two_writers_at_once_never_share_a_copy_and_one_of_them_wins(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    contents = [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda data: write_file(host, "/file", data), contents * 5))
    assert (tmp_path / "file").read_bytes() in contents
    assert names(tmp_path) == ["file"]


def test_of_many_that_create_one_file_exactly_one_succeeds(tmp_path: Path) -> None:
    host = Host(str(tmp_path))

    def attempt(number: int) -> bool:
        try:
            create_exclusively(host, "/key", b"%d" % number)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = [number for number, done in enumerate(pool.map(attempt, range(16))) if done]
    assert len(won) == 1
    assert (tmp_path / "key").read_bytes() == b"%d" % won[0]
    assert names(tmp_path) == ["key"]
