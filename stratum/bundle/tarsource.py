"""A bundle in a tar: a file, which is indexed by its headers, or a pipe, which comes once."""

from __future__ import annotations

import os
import re
from typing import Callable, Optional

from stratum.bundle.blobs import (
    INDEX_NAME,
    LAYOUT_LIMIT,
    LAYOUT_NAME,
    SIGNATURE_LIMIT,
    SIGNATURES_MOST,
    Blob,
    BundleSource,
    Wanted,
    check_layout,
    no_layout,
    reading,
)
from stratum.bundle.compression import identify
from stratum.bundle.document import malformed
from stratum.bundle.oci import INDEX_LIMIT, Descriptor
from stratum.bundle.tarstream import BLOCK, CHUNK, Member, Readable, TarReader, shown
from stratum.errors import BundleError

__all__ = ["SIGNATURE_NAME", "Pipe", "TarFile"]

MEMBERS_MOST = 65536
BLOB_NAME = re.compile(r"blobs/sha256/([0-9a-f]{64})\Z")
SIGNATURE_NAME = re.compile(r"index\.json(?:\.[0-9A-F]{16})?\.minisig\Z")


class _Layout:
    """What has been met of a layout's members in a tar: the small files, and that no name comes twice."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.files: dict[str, bytes] = {}
        self.signatures: dict[str, bytes] = {}
        self.nested: Optional[str] = None
        self._names: set[str] = set()

    def take(self, member: Member, reader: TarReader) -> Optional[str]:
        """Note one member, read it when it is small; the digest when it is a blob."""
        name = self._check(member)
        blob = BLOB_NAME.match(name)
        if blob and member.kind == "file":
            return "sha256:" + blob.group(1)
        if member.kind == "file":
            if name == LAYOUT_NAME:
                self.files[name] = self._read(member, reader, LAYOUT_LIMIT)
            elif name == INDEX_NAME:
                self.files[name] = self._read(member, reader, INDEX_LIMIT)
            elif SIGNATURE_NAME.match(name):
                if len(self.signatures) >= SIGNATURES_MOST:
                    raise malformed(self.where, f"more than {SIGNATURES_MOST} signatures")
                self.signatures[name] = self._read(member, reader, SIGNATURE_LIMIT)
            elif name.endswith("/" + LAYOUT_NAME) and self.nested is None:
                self.nested = name[: -len(LAYOUT_NAME) - 1]
        return None

    def _check(self, member: Member) -> str:
        name = member.name
        if member.kind not in ("file", "directory"):
            raise malformed(self.where, f"{shown(name)} is a {member.kind}; a bundle holds files and directories only")
        while name.startswith("./"):
            name = name[2:]
        if member.kind == "directory":
            name = name.rstrip("/")
        if name in ("", "."):
            return ""
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise malformed(self.where, f"{shown(member.name)} is no clean relative name")
        if name in self._names:
            raise malformed(self.where, f"{shown(name)} stands twice in the archive")
        if len(self._names) >= MEMBERS_MOST:
            raise malformed(self.where, f"more than {MEMBERS_MOST} members")
        self._names.add(name)
        return name

    def _read(self, member: Member, reader: TarReader, limit: int) -> bytes:
        if member.size > limit:
            raise malformed(self.where, f"{shown(member.name)} has {member.size} bytes; at most {limit} are read")
        parts: list[bytes] = []
        while True:
            part = reader.read(CHUNK)
            if not part:
                return b"".join(parts)
            parts.append(bytes(part))

    def check(self) -> None:
        """Raise :class:`BundleError` unless the files that make a layout were met."""
        if LAYOUT_NAME not in self.files:
            raise no_layout(self.where, self.nested)
        check_layout(self.files[LAYOUT_NAME], self.where)
        if INDEX_NAME not in self.files:
            raise malformed(self.where, f"no {INDEX_NAME}")


class TarFile(BundleSource):
    """A layout in a tar file, found through its headers; blobs are read by position, also by several threads."""

    def __init__(self, file: int, name: str) -> None:
        super().__init__(name)
        self._file = file
        self._size = os.fstat(file).st_size
        self._blobs: dict[str, tuple[int, int]] = {}
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        _check_start(self._pread(0, BLOCK), self.name)
        cursor = _Cursor(self._pread, self._size, self.name)
        reader = TarReader(cursor, self.name, chunk=16 << 10, skip=cursor.skip)
        layout = _Layout(self.name)
        for member in reader:
            digest = layout.take(member, reader)
            if digest:
                self._blobs[digest] = (member.offset, member.size)
        layout.check()
        self.index_bytes = layout.files[INDEX_NAME]
        self.signatures = [layout.signatures[item] for item in sorted(layout.signatures)]

    def _pread(self, offset: int, size: int) -> bytes:
        try:
            return os.pread(self._file, size, offset)
        except OSError as error:
            raise BundleError(
                "unreadable", f"{self.name}: cannot be read: {error.strerror}", hint="check the medium"
            ) from None

    def open_blob(self, descriptor: Descriptor) -> Blob:
        """See :meth:`BundleSource.open_blob`."""
        found = self._blobs.get(descriptor.digest)
        if found is None:
            raise self._missing(descriptor)
        offset, size = found
        if size != descriptor.size:
            raise self._wrong_size(descriptor, size)
        return Blob(_Cursor(self._pread, offset + size, self.name, offset).read, descriptor, self.name)

    def finish(self) -> None:
        """The end was seen when the headers were."""

    def close(self) -> None:
        """Close what was opened."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _Cursor:
    """A place in a file that only goes forward."""

    def __init__(self, pread: Callable[[int, int], bytes], end: int, where: str, start: int = 0) -> None:
        self._pread = pread
        self._end = end
        self._where = where
        self._position = start

    def read(self, size: int, /) -> bytes:
        data = self._pread(self._position, min(size, self._end - self._position))
        self._position += len(data)
        return data

    def skip(self, size: int) -> None:
        self._position += size
        if self._position > self._end:
            raise BundleError(
                "cut-short",
                f"{self._where}: the archive ends at byte {self._end}, in the middle of a member",
                hint="the copy is not complete: copy the bundle again",
            )


class Pipe(BundleSource):
    """A layout in a tar that comes once, in order."""

    random_access = False

    def __init__(self, stream: Readable, name: str, close: Optional[Callable[[], None]] = None) -> None:
        super().__init__(name)
        self._close = close
        self._passed: set[str] = set()
        self._ahead: Optional[tuple[str, Member]] = None
        self._ended = False
        first = _Started(stream, name)
        try:
            _check_start(first.start, name)
            self._reader = TarReader(first, name)
            self._layout = _Layout(name)
            self._ahead = self._next_blob()
            if self._ahead and INDEX_NAME not in self._layout.files:
                raise _out_of_order(name, f"a blob comes before {INDEX_NAME}")
            self._layout.check()
        except BaseException:
            self.close()
            raise
        self.index_bytes = self._layout.files[INDEX_NAME]
        self.signatures = [self._layout.signatures[item] for item in sorted(self._layout.signatures)]
        self._known = set(self._layout.files) | set(self._layout.signatures)

    def _next_blob(self) -> Optional[tuple[str, Member]]:
        """Go to the next blob; None at the end of the archive."""
        if self._ahead is not None:
            found, self._ahead = self._ahead, None
            return found
        if self._ended:
            return None
        for member in self._reader:
            digest = self._layout.take(member, self._reader)
            if digest:
                return digest, member
            late = set(self._layout.files) | set(self._layout.signatures)
            if self.index_bytes and late != self._known:
                raise _out_of_order(self.name, f"{shown(member.name)} comes after blobs")
        self._ended = True
        return None

    def open_blob(self, descriptor: Descriptor) -> Blob:
        """See :meth:`BundleSource.open_blob`."""
        return self._next_of(Wanted([descriptor]))[1]

    def _next_of(self, queue: Wanted) -> tuple[Descriptor, Blob]:
        for item in queue.waiting():
            if item.digest in self._passed:
                raise _out_of_order(self.name, f"blob {item.digest} comes before the blob that names it")
        while True:
            found = self._next_blob()
            if found is None:
                raise self._missing(queue.waiting()[0])
            digest, member = found
            self._passed.add(digest)
            descriptor = queue.take(digest)
            if descriptor is None:
                continue
            if member.size != descriptor.size:
                raise self._wrong_size(descriptor, member.size)
            return descriptor, Blob(lambda size: bytes(self._reader.read(size)), descriptor, self.name)

    def has_passed(self, descriptor: Descriptor) -> bool:
        """Whether the blob has gone by."""
        return descriptor.digest in self._passed

    def finish(self) -> None:
        """Read to the end of the archive; raises :class:`BundleError` when it is cut short."""
        while self._next_blob() is not None:
            pass

    def close(self) -> None:
        """Close what was opened."""
        if self._close:
            self._close()
            self._close = None


def _out_of_order(where: str, why: str) -> BundleError:
    return BundleError(
        "out-of-order",
        f"{where}: {why}; a pipe can be read only once",
        hint="save it to a file and use --bundle FILE, or build it again with: stratum bundle build",
    )


class _Started:
    """A pipe whose first block was looked at."""

    def __init__(self, stream: Readable, where: str) -> None:
        # read1 gives what has arrived; read would wait until a whole chunk has.
        self._read = reading(_Once(stream), where)
        self.start = b""
        while len(self.start) < BLOCK:
            more = self._read(BLOCK - len(self.start))
            if not more:
                break
            self.start += more
        self._held = self.start

    def read(self, size: int, /) -> bytes:
        if self._held:
            part, self._held = self._held[:size], self._held[size:]
            return part
        return self._read(size)


class _Once:
    def __init__(self, stream: Readable) -> None:
        self.read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)


def _check_start(start: bytes, where: str) -> None:
    """Raise :class:`BundleError` for what is plainly not a tar, saying what it is."""
    if not start:
        raise malformed(where, "is empty")
    found = identify(start)
    if found in ("gzip", "zstd", "xz", "bzip2", "lz4"):
        command = {"gzip": "gzip -dc", "zstd": "zstd -dc", "xz": "xz -dc", "bzip2": "bzip2 -dc", "lz4": "lz4 -dc"}[
            found
        ]
        raise malformed(
            where,
            f"is compressed with {found}; a bundle is a plain tar (its layers are compressed already)",
            hint=f"run: {command} {shown(where)} > BUNDLE.tar",
        )
    if found != "tar":
        what = "a zip file" if found == "zip" else "no tar archive"
        raise malformed(where, f"is {what}", hint="a bundle is a tar file or a directory with an OCI image layout")
