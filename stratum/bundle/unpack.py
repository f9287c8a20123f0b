"""Unpacking one layer into a staging directory, every member checked before anything of it is written.

A layer is unpacked only to what the signed description says: each member must be in the component's file list
with its type, mode, size and digest, and everything in the list must have come. Whatever a tar can do beyond
placing files, directories and links inside the tree is refused: names that climb out, links that lead out,
devices, set-id bits, names twice. Nothing is written through a link, because a link is never a parent.

Files are not synced one by one. The caller syncs the file system of the staging directory once
(``host.syncfs``) before it renames it into place; until then a crash leaves only a staging directory.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import posixpath
from collections.abc import Iterable
from typing import Callable, Optional

from stratum.bundle.blobs import Blob
from stratum.bundle.compression import LayerReader
from stratum.bundle.oci import Component, Descriptor, FileEntry
from stratum.bundle.paths import safe_relative, unsafe_target
from stratum.bundle.tarstream import CHUNK, Member, TarReader, shown
from stratum.errors import BundleError, DigestMismatchError, StratumError
from stratum.system import Host, HostPath

__all__ = ["disk_failure", "required_space", "unpack_layer"]

_TYPES = {"file": "file", "hard link": "file", "directory": "directory", "symlink": "symlink"}
_FS_BLOCK = 4096
_DIRECTORY_MODE = 0o755  # of directories that no member names, and of all until the end


def unpack_layer(
    host: Host,
    blob: Blob,
    media_type: str,
    component: Component,
    target: HostPath,
    *,
    progress: Optional[Callable[[int], None]] = None,
) -> None:
    """Unpack the layer ``blob`` of ``component`` into ``target``, an empty directory of our own.

    Files get the listed mode, the archive's time and, for root, root as owner. Proves the digest of the layer,
    of the uncompressed archive and of each file. ``progress`` is told of compressed bytes. Raises
    :class:`BundleError`, :class:`DigestMismatchError`, and :class:`StratumError` when the disk fails; ``target``
    is then half full and for the caller to remove.
    """
    where = f"layer of {component.name} ({blob.where})"
    try:
        _unpack(host, _Counted(blob, progress), media_type, component, target, where)
        blob.finish()
    except OSError as error:
        raise disk_failure(target, error) from error
    except BundleError:
        # A damaged copy looks like anything at all once it is decompressed. Whether it is one comes first.
        blob.finish()
        raise


def _unpack(host: Host, blob: _Counted, media_type: str, component: Component, target: HostPath, where: str) -> None:
    plain = _Hashed(LayerReader(blob, media_type, component.size, where))
    tree = _Tree(host, component, target, where)
    reader = TarReader(plain, where)
    for member in reader:
        tree.place(member, reader)
    tree.finish()
    if plain.size != component.size:
        raise tree.error(f"unpacks to {plain.size} bytes instead of {component.size}")
    if plain.digest != component.diff_id:
        raise DigestMismatchError(f"{where}, uncompressed", component.diff_id, plain.digest)


def disk_failure(target: HostPath, error: OSError) -> StratumError:
    """The error for a disk that is full or broken, while ``target`` was being filled."""
    path = error.filename or target
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StratumError(
            "disk-full",
            f"{shown(path)}: {os.strerror(error.errno)}",
            hint="free space or inodes on that file system, then run the command again",
        )
    return StratumError("unpack-failed", f"{shown(path)}: {error.strerror}", hint="check the disk (dmesg)")


class _Counted:
    """A blob that reports what is read of it."""

    def __init__(self, blob: Blob, progress: Optional[Callable[[int], None]]) -> None:
        self._blob = blob
        self._progress = progress

    def read(self, size: int, /) -> bytes:
        data = self._blob.read(size)
        if self._progress:
            self._progress(len(data))
        return data


class _Hashed:
    """The uncompressed archive, hashed on the way."""

    def __init__(self, reader: LayerReader) -> None:
        self._reader = reader
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()

    def read(self, size: int, /) -> bytes:
        data = self._reader.read(size)
        self._hash.update(data)
        self.size += len(data)
        return data


class _Tree:
    """The staging directory while it fills."""

    def __init__(self, host: Host, component: Component, target: HostPath, where: str) -> None:
        self._host = host
        self._target = target
        self._where = where
        self._missing = {entry.path: entry for entry in component.files}
        self._placed: dict[str, FileEntry] = {}
        self._directories: dict[str, tuple[int, int]] = {}  # path: mode and time that it gets at the end

    def error(self, why: str) -> BundleError:
        """The error for what this layer must not have."""
        return BundleError(
            "bad-layer", f"{self._where}: {why}", hint="do not use this bundle; ask its publisher for a good one"
        )

    def place(self, member: Member, reader: TarReader) -> None:
        """Check one member, then write it."""
        path = self._check_name(member)
        if not path:
            return
        entry = self._check_entry(path, member)
        if path in self._directories and member.kind != "directory":
            raise self.error(f"{shown(path)} is a {member.kind}, and others lie below it")
        self._make_parents(path)
        if member.kind == "directory":
            self._make_directory(path, entry.mode, member.mtime)
        elif member.kind == "symlink":
            self._host.symlink(_on_disk(member.link), self._at(path))
            self._own(self._at(path), member.mtime)
        elif member.kind == "hard link":
            self._link(path, entry, member)
        else:
            self._write(path, entry, member, reader)
        self._placed[path] = entry
        del self._missing[path]

    def finish(self) -> None:
        """Give directories their modes and times, once nothing is written into them any more."""
        if self._missing:
            raise self.error(f"{shown(min(self._missing))} is listed, but not in the archive")
        for path in sorted(self._directories, reverse=True):
            mode, mtime = self._directories[path]
            if mode != _DIRECTORY_MODE:
                self._host.chmod(self._at(path), mode)
            self._own(self._at(path), mtime)

    # -- checks -------------------------------------------------------------------------------------

    def _check_name(self, member: Member) -> str:
        """The member's path, empty for the top directory itself."""
        path, name = member.name, shown(member.name)
        while path.startswith("./"):
            path = path[2:].lstrip("/")
        if member.kind == "directory":
            path = path.rstrip("/") if path != "." else ""
            if not path and not member.name.startswith("/"):
                return ""
        why = safe_relative(path)
        if why:
            raise self.error(f"member {name}: {why}")
        if member.kind not in _TYPES:
            raise self.error(f"{name} is a {member.kind}; a component holds files, directories and links")
        if member.mode & 0o7000 and member.kind != "symlink":
            raise self.error(f"{name} has the mode {member.mode:04o}; set-id and sticky bits are refused")
        return path

    def _check_entry(self, path: str, member: Member) -> FileEntry:
        name = shown(path)
        if path in self._placed:
            raise self.error(f"{name} stands twice in the archive")
        entry = self._missing.get(path)
        if entry is None:
            raise self.error(f"{name} is not in the component's list of files")
        if _TYPES[member.kind] != entry.type:
            raise self.error(f"{name} is a {member.kind}, listed as {entry.type}")
        if entry.type != "symlink" and member.mode != entry.mode:
            raise self.error(f"{name} has the mode {member.mode:04o}, listed as {entry.mode:04o}")
        if member.kind == "file" and member.size != entry.size:
            raise self.error(f"{name} has {member.size} bytes, listed as {entry.size}")
        if member.kind == "symlink":
            why = unsafe_target(path, member.link)
            if why:
                raise self.error(f"link {name} to {shown(member.link)}: {why}")
            if member.link != entry.target:
                raise self.error(f"{name} leads to {shown(member.link)}, listed as {shown(entry.target)}")
        return entry

    # -- writing ------------------------------------------------------------------------------------

    def _at(self, path: str) -> HostPath:
        return self._target / _on_disk(path)

    def _make_parents(self, path: str) -> None:
        for parent in itertools.accumulate(path.split("/")[:-1], posixpath.join):
            if parent in self._directories:
                continue
            if parent in self._placed:
                raise self.error(f"{shown(path)} lies below {shown(parent)}, which is no directory")
            self._make_directory(parent, _DIRECTORY_MODE, 0)

    def _make_directory(self, path: str, mode: int, mtime: int) -> None:
        if path not in self._directories:
            self._host.mkdir(self._at(path), _DIRECTORY_MODE)
        self._directories[path] = (mode, mtime)

    def _write(self, path: str, entry: FileEntry, member: Member, reader: TarReader) -> None:
        digest = hashlib.sha256()
        with self._host.open_new(self._at(path), entry.mode) as file:
            while True:
                data = reader.read(CHUNK)
                if not data:
                    break
                digest.update(data)
                file.write(data)
        actual = "sha256:" + digest.hexdigest()
        if actual != entry.digest:
            raise DigestMismatchError(f"{shown(path)} in the {self._where}", str(entry.digest), actual)
        self._own(self._at(path), member.mtime)

    def _link(self, path: str, entry: FileEntry, member: Member) -> None:
        # Only to a file of this layer: a link to a symbolic link could change what lies outside.
        old = member.link[2:] if member.link.startswith("./") else member.link
        other = self._placed.get(old)
        if other is None or other.type != "file":
            raise self.error(f"{shown(path)} is a hard link to {shown(member.link)}, which is no file before it")
        if (other.mode, other.size, other.digest) != (entry.mode, entry.size, entry.digest):
            raise self.error(f"{shown(path)} is a hard link to {shown(old)}, but is listed as another file")
        self._host.link(self._at(old), self._at(path))

    def _own(self, path: HostPath, mtime: int) -> None:
        # Not what the archive says: a set-group-id parent or root's own group would show through otherwise.
        if self._host.euid == 0:
            self._host.chown(path, 0, 0)
        self._host.utime(path, mtime)


def _on_disk(path: str) -> str:
    # Names are UTF-8 whatever the locale says: fsdecode gives the string that the system turns into these bytes.
    return os.fsdecode(path.encode("utf-8"))


def required_space(components: Iterable[Component], images: Iterable[Descriptor] = ()) -> tuple[int, int]:
    """Bytes and inodes that unpacking takes: the files of ``components``, and the blobs ``images``.

    Rounded up to whole blocks of 4 KiB, directories counted too, so that it can be compared with statvfs(3).
    """
    size = inodes = 0
    for component in components:
        for entry in component.files:
            inodes += 1
            size += _blocks(entry.size if entry.type == "file" else 1)
        listed = {entry.path for entry in component.files}
        implied = {str(up) for entry in component.files for up in HostPath(entry.path).parents} - listed
        inodes += len(implied)
        size += _FS_BLOCK * len(implied)
    for blob in {item.digest: item for item in images}.values():
        inodes += 1
        size += _blocks(blob.size)
    return size, inodes


def _blocks(size: int) -> int:
    return -(-size // _FS_BLOCK) * _FS_BLOCK
