"""A directory of compiled modules that only its owner can have filled: made once, checked at each start.

What is loaded from here runs with our rights, so the question is always who could have written it. The answer is
made by the directories: each one from ``/`` down belongs to root (or, for a user, to root or that user) and is not
writable by its group or by others. An access control list that lets anyone else write shows as the group's write
bit, so the mode covers it. In such a place no one else can plant, replace or rename anything, also not between
the check and the use; all work is done through descriptors of the directories that were checked. The digests then
answer a different question: whether the bytes are still those of the pyz, after a power cut or a bad disk.

This runs before there is a ``Host``; a directory tree given with ``--root`` has no part in it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Optional

__all__ = [
    "Part",
    "Place",
    "UnusableError",
    "find_unpacked",
    "mount_of",
    "open_trusted",
    "prune_beside",
    "remove_tree",
    "unpack",
]

LIST_NAME = "list"
STALE_SECONDS = 1.0

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A directory above may be one that we can pass through but not list, such as /home with mode 0711.
_PASS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class UnusableError(Exception):
    """A place cannot serve, and why; the next one is tried."""


@dataclass(frozen=True)
class Part:
    """A compiled module: its dotted name, its member in the pyz, and the bytes that it must have."""

    module: str
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        """Its name in the directory; the import system takes the module's name from elsewhere."""
        return self.module + ".so"


@dataclass(frozen=True)
class Place:
    """A directory that may hold directories of compiled parts.

    ``mode`` is that of the directories which are made in it. ``base`` is the one that must be there already: a
    user's home or a tmpfs of the session is never made by us.
    """

    path: str
    mode: int
    base: str = "/"


def render_list(parts: Sequence[Part]) -> bytes:
    """Return the text of the list file; its hash names the directory."""
    lines = sorted(f"{part.sha256}  {part.size} {part.file_name}\n" for part in parts)
    return "".join(lines).encode("ascii")


def directory_name(key: str, parts: Sequence[Part]) -> str:
    """Return the name of the directory for the set ``key``, such as ``cp311-x86_64-<hash>``."""
    return f"{key}-{hashlib.sha256(render_list(parts)).hexdigest()[:32]}"


def open_trusted(place: Place, owners: frozenset[int], *, create: bool, created: list[str]) -> int:
    """Return a descriptor of the place's directory after checking it and every directory above it.

    With ``create``, what is missing below the place's base is made and appended to ``created``. Raises
    UnusableError with the first directory that fails and why, OSError (FileNotFoundError if it is not there).
    """
    # Links on the way are resolved first: an admin may keep /var/lib/stratum on another disk. The walk then follows
    # none, so a link that changes meanwhile leads to an error.
    real = os.path.realpath(place.path)
    base = os.path.realpath(place.base)
    fd = os.open("/", _PASS)
    walked = ""
    try:
        _check_directory(fd, "/", owners)
        for name in real.strip("/").split("/"):
            parent, walked = fd, f"{walked}/{name}"
            may_create = create and _is_below(walked, base)
            fd = _open_or_make(parent, name, place.mode, walked, created if may_create else None)
            os.close(parent)
            _check_directory(fd, walked, owners)
        return os.open(".", _DIRECTORY, dir_fd=fd)
    except NotADirectoryError:
        raise UnusableError(f"{walked} is not a directory") from None
    finally:
        os.close(fd)


def _is_below(path: str, base: str) -> bool:
    return path != base and path.startswith(base.rstrip("/") + "/")


def _open_or_make(parent: int, name: str, mode: int, path: str, created: Optional[list[str]]) -> int:
    # On an error the caller still owns ``parent``, which it closes.
    try:
        return os.open(name, _PASS, dir_fd=parent)
    except FileNotFoundError:
        if created is None:
            raise
    try:
        os.mkdir(name, mode, dir_fd=parent)
    except FileExistsError:  # another process was faster
        return os.open(name, _PASS, dir_fd=parent)
    created.append(path)
    # mkdir takes the umask away from the mode. Nobody else can write in ``parent``, so the name is still ours.
    os.chmod(name, mode, dir_fd=parent)
    return os.open(name, _PASS, dir_fd=parent)


def _check_directory(fd: int, path: str, owners: frozenset[int]) -> None:
    info = os.fstat(fd)
    if info.st_uid not in owners:
        raise UnusableError(f"{path} belongs to user {info.st_uid}")
    if info.st_mode & 0o022:
        raise UnusableError(f"{path} is writable by others than its owner (mode {stat.S_IMODE(info.st_mode):04o})")


def find_unpacked(place: Place, name: str, parts: Sequence[Part], owners: frozenset[int]) -> Optional[str]:
    """Return the path of the directory ``name`` in ``place`` if it holds just these parts, unchanged; else None.

    Changes nothing. Raises UnusableError when the place itself cannot be trusted, or the directory is there and
    is not what it should be; OSError when it cannot be read.
    """
    try:
        parent = open_trusted(place, owners, create=False, created=[])
    except FileNotFoundError:
        return None
    path = os.path.join(os.path.realpath(place.path), name)
    try:
        return path if _verify(parent, name, path, parts, owners) else None
    finally:
        os.close(parent)


def _verify(parent: int, name: str, path: str, parts: Sequence[Part], owners: frozenset[int]) -> bool:
    """Check the directory ``name`` in ``parent``; False if there is none. Raises UnusableError if it is wrong."""
    try:
        directory = os.open(name, _DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UnusableError(f"{path}: {os.strerror(error.errno or 0)}") from None
    try:
        _check_directory(directory, path, owners)
        text = render_list(parts)
        expected = {part.file_name: (part.size, part.sha256) for part in parts}
        expected[LIST_NAME] = (len(text), hashlib.sha256(text).hexdigest())
        present = set(os.listdir(directory))
        if present != set(expected):
            different = sorted(present.symmetric_difference(expected))[0]
            raise UnusableError(f"{path}: {different} is missing or does not belong there")
        for file_name, (size, digest) in expected.items():
            _verify_file(directory, file_name, f"{path}/{file_name}", size, digest, owners)
    finally:
        os.close(directory)
    return True


def _verify_file(directory: int, name: str, path: str, size: int, digest: str, owners: frozenset[int]) -> None:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        raise UnusableError(f"{path}: {os.strerror(error.errno or 0)}") from None
    with open(fd, "rb") as stream:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid not in owners or info.st_mode & 0o022:
            raise UnusableError(f"{path} is not a file that only its owner can write")
        # The whole file, not only the list, and at each start: some 10 ms for 13 MB, little beside the import.
        if info.st_size != size or hashlib.sha256(stream.read()).hexdigest() != digest:
            raise UnusableError(f"{path} was changed after it was unpacked")


def unpack(
    place: Place,
    name: str,
    parts: Sequence[Part],
    owners: frozenset[int],
    *,
    read: Callable[[str], bytes],
    created: list[str],
) -> str:
    """Unpack ``parts`` into the directory ``name`` in ``place`` and return its path.

    A sibling is filled and synced, then renamed: the name only ever stands for a complete directory. A process that
    loses the race uses the winner's. A directory that is there and is wrong is replaced. What is made is appended
    to ``created``. Raises UnusableError or OSError; the sibling is then gone again.
    """
    parent = open_trusted(place, owners, create=True, created=created)
    try:
        path = os.path.join(os.path.realpath(place.path), name)
        _remove_stale(parent, owners)
        # The prefix hides it; the random part keeps two processes and two containers with the same ids apart.
        staging = f".{name}.{os.urandom(4).hex()}"
        os.mkdir(staging, 0o700, dir_fd=parent)
        try:
            directory = os.open(staging, _DIRECTORY, dir_fd=parent)
            try:
                # Tells a process that cleans up that this one is still being filled. Mode 0700: nobody else can lock.
                fcntl.flock(directory, fcntl.LOCK_EX)
                _fill(directory, place, parts, read)
                if _move_into_place(parent, staging, name, path, parts, owners):
                    created.append(path)
            finally:
                os.close(directory)
        finally:
            remove_tree(parent, staging)
        return path
    finally:
        os.close(parent)


def _fill(directory: int, place: Place, parts: Sequence[Part], read: Callable[[str], bytes]) -> None:
    file_mode = place.mode & 0o666
    for part in sorted(parts, key=lambda part: part.size):
        data = read(part.member)
        if len(data) != part.size or hashlib.sha256(data).hexdigest() != part.sha256:
            raise UnusableError(f"{part.member} in the pyz is damaged")
        _write_file(directory, part.file_name, data, file_mode, probe=place.path)
    _write_file(directory, LIST_NAME, render_list(parts), file_mode, probe=None)
    os.fchmod(directory, place.mode)
    os.fsync(directory)


def _write_file(directory: int, name: str, data: bytes, mode: int, *, probe: Optional[str]) -> None:
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    with open(fd, "r+b", buffering=0) as stream:
        view = memoryview(data)
        while view:
            view = view[stream.write(view) or 0 :]
        os.fchmod(fd, mode)
        os.fsync(fd)
        if probe is not None:
            _check_executable(fd, probe)


def _check_executable(fd: int, path: str) -> None:
    """Map the file as the dynamic linker does, before the large ones are written; noexec forbids just that."""
    try:
        mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as error:
        raise UnusableError(f"{path}: cannot load code from it{_because(path)}: {error.strerror}") from None


def _because(path: str) -> str:
    point, options = mount_of(path)
    return f", {point} is mounted noexec" if "noexec" in options else ""


def mount_of(path: str) -> tuple[str, Sequence[str]]:
    """Return the mount point that ``path`` is on and its options, from /proc/self/mountinfo (proc(5))."""
    real = os.path.realpath(path)
    best: tuple[str, Sequence[str]] = ("/", ())
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
            for line in stream:
                fields = line.split(" ")
                point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
                # The last one that fits as well hides those before it.
                if len(point) >= len(best[0]) and (real == point or _is_below(real, point)):
                    best = (point, fields[5].split(","))
    except OSError:
        pass
    return best


def _move_into_place(
    parent: int, staging: str, name: str, path: str, parts: Sequence[Part], owners: frozenset[int]
) -> bool:
    """Rename ``staging`` to ``name``; False when another process was there first with the same content."""
    # A rename can lose to another process that repairs the same directory; more than a few times is no race.
    for _ in range(5):
        try:
            if _verify(parent, name, path, parts, owners):
                return False
        except UnusableError:
            aside = f".{name}.{os.urandom(4).hex()}"
            os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=parent)
            remove_tree(parent, aside)
        try:
            os.rename(staging, name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            continue
        os.fsync(parent)
        return True
    raise UnusableError(f"{path}: another process keeps replacing it")


def remove_tree(parent: int, name: str) -> None:
    """Remove ``name`` in the directory ``parent`` with all in it, following no link; nothing if it is not there."""
    try:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISDIR(info.st_mode):
            os.unlink(name, dir_fd=parent)
            return
        directory = os.open(name, _DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        return
    try:
        for entry in os.listdir(directory):
            remove_tree(directory, entry)
    finally:
        os.close(directory)
    os.rmdir(name, dir_fd=parent)


def _remove_stale(parent: int, owners: frozenset[int]) -> list[str]:
    """Remove siblings that a crash left half filled; return their names."""
    removed = []
    for name in os.listdir(parent):
        if not name.startswith(".cp"):
            continue
        try:
            directory = os.open(name, _DIRECTORY, dir_fd=parent)
        except OSError:
            continue
        try:
            info = os.fstat(directory)
            # The age covers the moment between a process's mkdir and its lock.
            if info.st_uid in owners and abs(time.time() - info.st_mtime) > STALE_SECONDS:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(parent, name)
                removed.append(name)
        except OSError:
            pass  # it is being filled, or cannot go: a leftover is no reason to fail
        finally:
            os.close(directory)
    return removed


def prune_beside(path: str, owners: frozenset[int]) -> list[str]:
    """Remove the directories of other builds and stale siblings beside ``path``; return what was removed."""
    place, keep = os.path.split(path)
    parent = open_trusted(Place(place, 0), owners, create=False, created=[])
    try:
        removed = _remove_stale(parent, owners)
        for name in sorted(os.listdir(parent)):
            if name != keep and name.startswith("cp"):
                remove_tree(parent, name)
                removed.append(name)
    finally:
        os.close(parent)
    return [os.path.join(place, name) for name in removed]
