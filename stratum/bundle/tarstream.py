"""A strict, streaming tar reader, for archives from people who may want to harm the reader.

It is our own because the standard library's cannot be relied on here: Debian 12's Python 3.11.2 has no
``tarfile.data_filter``, releases that have it differ in what they refuse and had ways around it, and ``tarfile``
reads a pax header of any claimed size into memory, calls an archive of global headers unreadable, and loses
the members after a sparse file with a pax size. A second parser with opinions of its own would also decide
differently from ours what a member is called.

Format: POSIX ustar and pax (POSIX.1-2017, pax, "ustar Interchange Format" and "pax Extended Header"), GNU long
names and base-256 numbers (GNU tar manual, "Basic Tar Format"). What two readers could understand in two
ways is refused: sparse files, a size on a link, pax and GNU names on one member, a pax record that stands
twice. No allocation is larger than a chunk or a limit below, whatever the archive claims.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Callable, Optional, Protocol

from stratum.errors import BundleError

__all__ = ["BLOCK", "CHUNK", "Member", "Readable", "TarReader", "shown"]

BLOCK = 512
CHUNK = 1 << 20
PAX_LIMIT = 1 << 20
LONG_NAME_LIMIT = 8192  # twice PATH_MAX of Linux
PADDING_LIMIT = 16 << 20  # zeros after the end marker: a record of GNU tar is 10 KiB, a tape's may be larger
_SIZE_LIMIT = 1 << 62

_OCTAL = re.compile(rb" *([0-7]*)[ \0]*\Z")
_RECORD_LENGTH = re.compile(rb"([1-9][0-9]{0,6}) ")
_DECIMAL = re.compile(rb"[0-9]{1,19}\Z")
_TIME = re.compile(rb"(-?)([0-9]{1,18})(?:\.[0-9]*)?\Z")

_KINDS = {
    b"0": "file",
    b"\0": "file",
    b"1": "hard link",
    b"2": "symlink",
    b"3": "character device",
    b"4": "block device",
    b"5": "directory",
    b"6": "fifo",
}
_REFUSED = {
    b"7": "contiguous file",
    b"D": "GNU directory dump",
    b"M": "GNU multi-volume part",
    b"N": "old GNU long name",
    b"S": "GNU sparse file",
    b"V": "GNU volume label",
}
_CAPABILITY = b"SCHILY.xattr.security.capability"


class Readable(Protocol):
    """What archives are read from: at most ``size`` bytes, none at the end."""

    def read(self, size: int, /) -> bytes:
        """The next bytes."""


def shown(name: object) -> str:
    """``name`` for a message: ASCII only, everything else escaped, so that any terminal can print it."""
    try:
        text = ascii(name.decode("utf-8") if isinstance(name, bytes) else str(name))[1:-1]
    except UnicodeDecodeError:
        text = repr(name)[2:-1]
    return text if len(text) <= 300 else f"{text[:300]}..."


@dataclass(frozen=True)
class Member:
    """One entry of an archive, not yet checked for safety. ``mode`` has the special bits, ``mtime`` is in seconds."""

    name: str
    kind: str
    mode: int
    size: int
    mtime: int
    link: str
    offset: int  # of the content, from where the reader began


@dataclass
class _Extension:
    """What extension headers say about the member that follows them."""

    pax: Optional[dict[bytes, bytes]] = None
    name: Optional[bytes] = None
    link: Optional[bytes] = None

    def __bool__(self) -> bool:
        return self.pax is not None or self.name is not None or self.link is not None


class TarReader:
    """Iterates over the members of an archive; ``read`` gives the content of the one just met.

    ``where`` names the archive in errors. ``skip`` moves the stream forward without reading, where it can.
    Every error is a :class:`BundleError`; the iteration ends only after the end marker was seen and nothing but
    zeros came after it.
    """

    def __init__(
        self, stream: Readable, where: str, *, chunk: int = CHUNK, skip: Optional[Callable[[int], object]] = None
    ) -> None:
        self._stream = stream
        self._where = where
        self._chunk = chunk
        self._seek = skip
        self._buffer = memoryview(b"")
        self._position = 0
        self._content = 0
        self._padding = 0

    # -- bytes --------------------------------------------------------------------------------------

    def _error(self, why: str) -> BundleError:
        return BundleError("bad-archive", f"{self._where}: {why}", hint="build or copy the bundle again")

    def _cut(self) -> BundleError:
        return BundleError(
            "cut-short",
            f"{self._where}: the archive ends at byte {self._position}, before its end marker",
            hint="the copy is not complete: copy the bundle again",
        )

    def _some(self, most: int) -> memoryview:
        """Up to ``most`` bytes, none only at the end of the stream."""
        if not self._buffer:
            self._buffer = memoryview(self._stream.read(self._chunk) or b"")
        part, self._buffer = self._buffer[:most], self._buffer[most:]
        self._position += len(part)
        return part

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._some(size)
            if not part:
                raise self._cut()
            size -= len(part)
            parts.append(bytes(part))
        return b"".join(parts)

    def _pass_over(self, size: int) -> None:
        if self._seek is not None and size > len(self._buffer):
            beyond = size - len(self._buffer)
            self._buffer = memoryview(b"")
            self._seek(beyond)
            self._position += size
            return
        while size:
            part = self._some(size)
            if not part:
                raise self._cut()
            size -= len(part)

    def read(self, most: int) -> memoryview:
        """Up to ``most`` bytes of the current member's content, none when it is all read."""
        if not self._content or not most:
            return memoryview(b"")
        part = self._some(min(most, self._content))
        if not part:
            raise self._cut()
        self._content -= len(part)
        return part

    # -- members ------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Member]:
        while True:
            member = self.next()
            if member is None:
                return
            yield member

    def next(self) -> Optional[Member]:
        """The next member, what is left of the last one's content passed over; None after the end."""
        self._pass_over(self._content + self._padding)
        self._content = self._padding = 0
        extension = _Extension()
        while True:
            start = self._position
            header = self._exactly(BLOCK)
            if not any(header):
                if extension:
                    raise self._error("an extension header without a member at the end")
                self._check_end()
                return None
            kind = self._check_header(header, start)
            size = self._number(header[124:136], "size", start)
            if kind == b"g":
                self._check_global(self._records(size, start))
            elif kind in (b"x", b"L", b"K"):
                self._extend(extension, kind, size, start)
            else:
                return self._member(header, kind, size, extension, start)

    def _check_end(self) -> None:
        if any(self._exactly(BLOCK)):
            raise self._error("a single empty block, followed by data")
        padding = 0
        while True:
            part = self._some(self._chunk)
            if not part:
                break
            padding += len(part)
            if padding > PADDING_LIMIT or any(part):
                raise self._error("more data after the end of the archive")
        if padding % BLOCK:
            raise self._cut()

    def _check_header(self, header: bytes, start: int) -> bytes:
        magic = header[257:265]
        if magic not in (b"ustar\x0000", b"ustar  \0"):
            raise self._error(f"no tar header at byte {start}")
        stored = self._number(header[148:156], "checksum", start)
        if stored != sum(header) - sum(header[148:156]) + 8 * ord(" "):
            raise self._error(f"the header at byte {start} has a wrong checksum")
        kind = header[156:157]
        if kind in _REFUSED:
            raise self._error(f"{shown(self._text(header[:100]))}: a {_REFUSED[kind]}, which is not supported")
        if kind not in _KINDS and kind not in b"gxLK":
            raise self._error(f"{shown(self._text(header[:100]))}: unknown type {shown(kind)}")
        return kind

    def _extend(self, extension: _Extension, kind: bytes, size: int, start: int) -> None:
        # GNU tar writes its own headers or pax ones, never both on one member.
        mixed = extension.pax is not None or (kind == b"x" and bool(extension))
        again = extension.name is not None if kind == b"L" else kind == b"K" and extension.link is not None
        if mixed or again:
            raise self._error(f"several extension headers for one member at byte {start}")
        if kind == b"x":
            extension.pax = self._records(size, start)
            return
        if size > LONG_NAME_LIMIT:
            raise self._error(f"a name of {size} bytes at byte {start}; at most {LONG_NAME_LIMIT} are read")
        name = self._padded(size).rstrip(b"\0")
        if kind == b"L":
            extension.name = name
        else:
            extension.link = name

    def _padded(self, size: int) -> bytes:
        data = self._exactly(size)
        self._pass_over(-size % BLOCK)
        return data

    def _records(self, size: int, start: int) -> dict[bytes, bytes]:
        if size > PAX_LIMIT:
            raise self._error(f"a pax header of {size} bytes at byte {start}; at most {PAX_LIMIT} are read")
        data = self._padded(size)
        records: dict[bytes, bytes] = {}
        position = 0
        while position < len(data):
            found = _RECORD_LENGTH.match(data, position)
            end = position + int(found.group(1)) if found else 0
            record = data[found.end() : end] if found else b""
            key, equals, value = record[:-1].partition(b"=")
            if end > len(data) or record[-1:] != b"\n" or not key or not equals:
                raise self._error(f"a malformed pax record at byte {start}")
            if key in records:
                raise self._error(f"the pax record {shown(key)} stands twice at byte {start}")
            if key.startswith(b"GNU.sparse."):
                raise self._error(f"a sparse file at byte {start}, which is not supported")
            records[key] = value
            position = end
        return records

    def _check_global(self, records: dict[bytes, bytes]) -> None:
        for key in (b"path", b"linkpath", b"size", _CAPABILITY):
            if key in records:
                raise self._error(f"a global pax header sets {shown(key)} for all members")

    def _member(self, header: bytes, flag: bytes, size: int, extension: _Extension, start: int) -> Member:
        pax = extension.pax or {}
        kind = _KINDS[flag]
        name = self._name(pax.get(b"path") or extension.name or self._header_name(header, start), start)
        if _CAPABILITY in pax:
            raise self._error(f"{shown(name)}: has file capabilities, which are not supported")
        link = b""
        if kind in ("hard link", "symlink"):
            link = pax.get(b"linkpath") or extension.link or self._text(header[157:257])
            if not link:
                raise self._error(f"{shown(name)}: a link to nowhere")
        if pax.get(b"size"):
            size = self._decimal(pax[b"size"], start)
        if size and kind != "file":
            raise self._error(f"{shown(name)}: a {kind} with content")
        if kind == "file" and name.endswith("/"):
            raise self._error(f"{shown(name)}: a file with the name of a directory")
        self._content, self._padding = size, -size % BLOCK
        return Member(
            name,
            kind,
            self._number(header[100:108], "mode", start) & 0o7777,
            size,
            self._mtime(header, pax, start),
            self._name(link, start) if link else "",
            self._position,
        )

    # -- fields -------------------------------------------------------------------------------------

    @staticmethod
    def _text(field: bytes) -> bytes:
        return field.partition(b"\0")[0]

    def _header_name(self, header: bytes, start: int) -> bytes:
        name = self._text(header[:100])
        if header[257:263] == b"ustar\0":
            prefix = self._text(header[345:500])
            return prefix + b"/" + name if prefix else name
        if any(header[345:500]):
            raise self._error(f"{shown(name)}: an incremental GNU header at byte {start}, which is not supported")
        return name

    def _name(self, raw: bytes, start: int) -> str:
        if not raw or b"\0" in raw:
            raise self._error(f"an empty name, or one with a NUL, at byte {start}")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"{shown(raw)}: a name that is not UTF-8") from None

    def _number(self, field: bytes, what: str, start: int) -> int:
        if field[0] == 0x80:
            value = int.from_bytes(field[1:], "big")
        else:
            found = _OCTAL.match(field)
            if not found:
                raise self._error(f"a malformed {what} in the header at byte {start}")
            value = int(found.group(1) or b"0", 8)
        if value >= _SIZE_LIMIT:
            raise self._error(f"a {what} out of range in the header at byte {start}")
        return value

    def _decimal(self, value: bytes, start: int) -> int:
        if not _DECIMAL.match(value) or int(value) >= _SIZE_LIMIT:
            raise self._error(f"a malformed pax size at byte {start}")
        return int(value)

    def _mtime(self, header: bytes, pax: dict[bytes, bytes], start: int) -> int:
        field = header[136:148]
        value = -1 if field[0] == 0xFF else self._number(field, "time", start)
        if pax.get(b"mtime"):
            found = _TIME.match(pax[b"mtime"])
            if not found:
                raise self._error(f"a malformed pax time at byte {start}")
            value = -1 if found.group(1) else int(found.group(2))
        # Times before 1970 and after 2514 are not kept: file systems differ in what they can store.
        return value if 0 <= value < 1 << 34 else 0
