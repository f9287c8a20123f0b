"""Sources: from what a definition says to bytes that were hashed, and the entries that an archive holds.

A source is a file (downloaded or local) or a local directory. Its digest is known before anything of it is used,
and must be the one of the definition, of the checksum file and of the lock, whichever there are.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Callable, Optional, cast

from stratum.bundle.checksumfile import SIZE_LIMIT as CHECKSUM_LIMIT
from stratum.bundle.checksumfile import find_checksum
from stratum.bundle.codec import HEAD, codec_of, plain_chunks
from stratum.bundle.compression import identify
from stratum.bundle.definition import Source
from stratum.bundle.fetch import SIZE_LIMIT, Fetcher, hash_file
from stratum.bundle.lock import Lock, LockMismatchError
from stratum.bundle.tarstream import Member, TarReader
from stratum.errors import BundleError, DigestMismatchError, StratumError
from stratum.system import Host, HostPath

__all__ = ["Entry", "Located", "SourceFinder", "open_entries"]

_ENTRIES_LIMIT = 200_000


@dataclass(frozen=True)
class Located:
    """A source on this machine. ``sha256`` and ``size`` are None for a directory."""

    source: Source
    path: HostPath
    sha256: Optional[str] = None
    size: Optional[int] = None


@dataclass(frozen=True)
class Entry:
    """What a source holds under one path: ``kind`` is file, symlink or other (which nothing can be made of)."""

    path: str
    kind: str
    executable: bool = False
    size: int = 0
    target: str = ""
    open: Optional[Callable[[], BinaryIO]] = None


@dataclass
class SourceFinder:
    """Finds the sources of one definition. ``base`` is its directory; ``lock`` None on the first build."""

    host: Host
    base: HostPath
    fetcher: Fetcher
    lock: Optional[Lock]

    def find(self, source: Source) -> Located:
        """The bytes of ``source`` (its placeholders are filled in), hashed and compared. Raises StratumError."""
        if source.kind == "directory":
            path = self._local(source.location)
            if not self.host.is_dir(path):
                raise source.place.error(f"{path}: no such directory")
            return Located(source, path)
        locked = self._locked(source)
        if source.kind == "url":
            expected = source.expected or locked or self._published(source)
            found = self.fetcher.fetch(source.location, expected)
            return Located(source, found.path, found.sha256, found.size)
        path = self._local(source.location)
        if not self.host.exists(path) or not stat.S_ISREG(self.host.stat(path).st_mode):
            raise source.place.error(f"{path}: no such file")
        sha256, size = hash_file(self.host, path)
        self._compare_file(source, path, sha256, locked)
        return Located(source, path, sha256, size)

    def _local(self, location: str) -> HostPath:
        # A definition is UTF-8 whatever the locale, and so are the names that it means.
        return HostPath(posixpath.normpath(self.base / os.fsdecode(location.encode("utf-8"))))

    def _locked(self, source: Source) -> Optional[str]:
        if self.lock is None:
            return None
        locked = str(self.lock.source(source.location)["sha256"])
        if source.expected and source.expected != locked:
            raise LockMismatchError(
                f"source {source.location}", f"sha256:{locked}", f"sha256:{source.expected} in {source.place}"
            )
        return locked

    def _published(self, source: Source) -> Optional[str]:
        checksums = source.checksums
        if checksums is None:
            return None
        if checksums.url:
            data = self.fetcher.text(checksums.url, limit=CHECKSUM_LIMIT)
        else:
            path = self._local(checksums.location)
            try:
                data = self.host.read_bytes(path)
            except OSError as error:
                raise checksums.place.error(f"{path}: {error.strerror}") from None
        return find_checksum(data, checksums.name or source.file_name, checksums.location).sha256

    def _compare_file(self, source: Source, path: HostPath, sha256: str, locked: Optional[str]) -> None:
        if locked and sha256 != locked:
            raise LockMismatchError(f"source {source.location}", f"sha256:{locked}", f"sha256:{sha256}")
        expected = source.expected or (None if locked else self._published(source))
        if expected and sha256 != expected:
            raise DigestMismatchError(
                f"{path} ({source.place})",
                f"sha256:{expected}",
                f"sha256:{sha256}",
                hint="the file is not the one whose checksum was given",
            )


class FilePart(io.RawIOBase):
    """A stretch of an open file, read by position: any number of them share one file, in any thread."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._descriptor = file.fileno()
        self._offset = offset
        self._left = size

    def readable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes, as many as asked for unless the stretch or the file ends."""
        parts = []
        wanted = self._left if size < 0 else min(size, self._left)
        while wanted:
            part = os.pread(self._descriptor, wanted, self._offset)
            if not part:
                break
            parts.append(part)
            wanted -= len(part)
            self._offset += len(part)
            self._left -= len(part)
        return b"".join(parts)


@contextlib.contextmanager
def open_entries(host: Host, located: Located, scratch: HostPath) -> Iterator[Mapping[str, Entry]]:
    """What a directory or an archive holds, by path. A compressed archive is unpacked to a file in ``scratch``.

    Raises :class:`BundleError` when it is no archive, or a damaged one.
    """
    if located.sha256 is None:
        yield _directory_entries(host, located.path)
        return
    subject = located.source.location
    with plain_file(host, located.path, subject, scratch) as plain:
        yield tar_entries(plain, subject)


@contextlib.contextmanager
def plain_file(host: Host, path: HostPath, subject: str, scratch: HostPath) -> Iterator[BinaryIO]:
    """The file at ``path`` without compression, seekable; unpacked to a nameless file in ``scratch`` if need be."""
    with host.open(path) as file:
        if codec_of(file) == "plain":
            yield file
            return
        name = host.temporary_name(scratch / "plain")
        with host.open_new(name, 0o600) as output:
            unpacked = host.open(name)
            host.unlink(name)
            with unpacked:
                for chunk in plain_chunks(file, subject, limit=SIZE_LIMIT):
                    output.write(chunk)
                output.flush()
                yield unpacked


# -- directories ------------------------------------------------------------------------------------


def _directory_entries(host: Host, top: HostPath) -> dict[str, Entry]:
    found: dict[str, Entry] = {}

    def add(path: HostPath, info: os.stat_result, relative: str) -> None:
        if stat.S_ISLNK(info.st_mode):
            found[relative] = Entry(relative, "symlink", target=_as_utf8(host.readlink(path)))
        elif stat.S_ISREG(info.st_mode):
            found[relative] = Entry(
                relative, "file", bool(info.st_mode & 0o111), info.st_size, open=lambda: host.open(path)
            )
        else:
            found[relative] = Entry(relative, "other")

    def walk(path: HostPath, prefix: str) -> None:
        for name in host.listdir(path):
            info = host.lstat(path / name)
            if stat.S_ISDIR(info.st_mode):
                walk(path / name, f"{prefix}{_as_utf8(name)}/")
            else:
                add(path / name, info, prefix + _as_utf8(name))
            if len(found) > _ENTRIES_LIMIT:
                raise StratumError("directory-too-large", f"{top}: more than {_ENTRIES_LIMIT} entries")

    walk(top, "")
    return found


def _as_utf8(name: str) -> str:
    # The bytes count: in another locale the same name would come out as other text, and go into another bundle.
    return os.fsencode(name).decode("utf-8", "surrogateescape")


# -- tar --------------------------------------------------------------------------------------------


def tar_entries(file: BinaryIO, subject: str) -> dict[str, Entry]:
    """The entries of an uncompressed, seekable tar; raises :class:`BundleError`."""
    size = os.fstat(file.fileno()).st_size
    members: dict[str, Member] = {}
    _check_is_tar(file, subject)

    def skip(amount: int) -> None:
        file.seek(amount, os.SEEK_CUR)

    reader = TarReader(file, subject, chunk=64 << 10, skip=skip)
    try:
        for member in reader:
            # An archive of `.` has `./` before each name.
            if member.kind != "directory":
                # As for an unpacking tar, a later member with the same name replaces an earlier one.
                members[posixpath.normpath(member.name)] = member
            if member.offset + member.size > size:
                raise BundleError("cut-short", f"{subject}: the archive ends within {member.name!r}")
            if len(members) > _ENTRIES_LIMIT:
                raise BundleError("bad-archive", f"{subject}: more than {_ENTRIES_LIMIT} members")
    except BundleError as error:
        raise BundleError(error.reference, error.message, hint="get or make the archive again") from None
    return {name: _tar_entry(file, name, member, members) for name, member in members.items()}


def _check_is_tar(file: BinaryIO, subject: str) -> None:
    head = file.read(HEAD)
    file.seek(0)
    if identify(head) != "tar":
        kind = "a program" if head.startswith(b"\x7fELF") else identify(head) or "something else"
        raise BundleError(
            "not-an-archive",
            f"{subject}: not a tar archive but {kind}",
            hint="to place the file itself, leave out `from`",
        )


def _tar_entry(file: BinaryIO, name: str, member: Member, members: Mapping[str, Member]) -> Entry:
    if member.kind == "symlink":
        return Entry(name, "symlink", target=member.link)
    content: Optional[Member] = member
    if member.kind == "hard link":
        # A hard link is the file that it names, and nothing else: never a link to a link (python/cpython#151558).
        content = members.get(posixpath.normpath(member.link))
    if content is None or content.kind != "file":
        return Entry(name, "other")
    offset, size = content.offset, content.size
    return Entry(
        name,
        "file",
        bool(content.mode & 0o111),
        size,
        open=lambda: cast(BinaryIO, FilePart(file, offset, size)),
    )
