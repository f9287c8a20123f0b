"""Decompression of layers: streaming, bounded, and strict about where a stream ends.

zstd is RFC 8878 (several frames in a row and skippable frames are one stream), gzip is RFC 1952 (several
members are one stream). A stream that ends early, bytes after its end and output beyond the expected size are
errors. What is in a blob is told from its first bytes; a media type that says something else is reported.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Optional, Protocol

from stratum import boot
from stratum.bundle.oci import LAYER_GZIP, LAYER_TAR, LAYER_ZSTD
from stratum.bundle.tarstream import BLOCK, Readable
from stratum.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WINDOW_LIMIT", "FrameScanner", "LayerReader", "check_media_type", "identify"]

# The decoder's buffer for one frame: zstd(1) itself needs --long=N to go beyond 128 MiB when decompressing.
WINDOW_LIMIT = 128 << 20
_INPUT = 128 << 10  # compressed bytes at a time; a zstd block is no longer than that

_CODECS = {LAYER_TAR: "tar", LAYER_GZIP: "gzip", LAYER_ZSTD: "zstd"}
_MAGICS = (
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x1f\x8b", "gzip"),
    (b"\xfd7zXZ\0", "xz"),
    (b"PK\x03\x04", "zip"),
    (b"\x04\x22\x4d\x18", "lz4"),
)


def identify(start: bytes) -> Optional[str]:
    """What begins with ``start`` (512 bytes tell most): a codec's name, ``tar``, or None."""
    for magic, name in _MAGICS:
        if start.startswith(magic):
            return name
    # A skippable frame, RFC 8878 section 3.1.2: pzstd and seekable zstd begin with one.
    if len(start) >= 4 and start[1:4] == b"\x2a\x4d\x18" and start[0] & 0xF0 == 0x50:
        return "zstd"
    if start[:3] == b"BZh" and start[4:10] == b"1AY&SY":
        return "bzip2"
    if start[257:262] == b"ustar" or (len(start) >= BLOCK and not any(start[:BLOCK])):
        return "tar"
    return None


def check_media_type(media_type: str, where: str) -> str:
    """The codec of a layer's media type: ``tar``, ``gzip`` or ``zstd``; raises :class:`BundleError`."""
    try:
        return _CODECS[media_type]
    except KeyError:
        known = ", ".join(_CODECS)
        raise BundleError(
            "unknown-media-type",
            f"{where}: media type {ascii(media_type)[1:-1][:200]} is not known (known: {known})",
            hint="a newer stratum may know it",
        ) from None


class _Decoder(Protocol):
    def read(self, size: int, /) -> bytes: ...


class LayerReader:
    """The uncompressed bytes of a layer: ``read(n)`` gives at most ``n`` bytes, none at the end.

    ``limit`` is the size that the bundle's description declares: output beyond it is a :class:`BundleError`
    before it is handed out. The end is reached only when the stream ended where it should.
    """

    def __init__(self, stream: Readable, media_type: str, limit: int, where: str) -> None:
        codec = check_media_type(media_type, where)
        source = _Peeked(stream)
        found = identify(source.peek(BLOCK))
        if found is None and codec != "tar":
            raise _broken(where, f"typed {media_type}, but it does not begin like {codec}")
        if found is not None and found != codec:
            raise BundleError(
                "media-type-mismatch",
                f"{where}: typed {media_type}, but holds {found}",
                hint="the bundle was put together wrongly: build it again",
            )
        self._where = where
        self._limit = limit
        self.size = 0
        self._decoder: _Decoder = source
        if codec == "gzip":
            self._decoder = _Gzip(source, where)
        elif codec == "zstd":
            self._decoder = _zstd(source, where)

    def read(self, size: int) -> bytes:
        """The next bytes; raises :class:`BundleError`."""
        # One byte beyond the limit is asked for, so that too much is told from just enough.
        data = self._decoder.read(min(size, self._limit - self.size + 1))
        self.size += len(data)
        if self.size > self._limit:
            raise BundleError(
                "too-large",
                f"{self._where}: unpacks to more than the {self._limit} bytes that the bundle declares",
                hint="the bundle was put together wrongly, or to do harm: do not use it",
            )
        return data


def _broken(where: str, why: str) -> BundleError:
    return BundleError("bad-compression", f"{where}: {why}", hint="build or copy the bundle again")


class _Peeked:
    """A stream whose first bytes can be looked at."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._start = b""

    def peek(self, size: int) -> bytes:
        while len(self._start) < size:
            more = self._stream.read(size - len(self._start))
            if not more:
                break
            self._start += more
        return self._start

    def read(self, size: int, /) -> bytes:
        if self._start:
            part, self._start = self._start[:size], self._start[size:]
            return part
        return self._stream.read(size)


class _Gzip:
    """gzip members, one after the other, each with its checksum proved by zlib."""

    def __init__(self, stream: Readable, where: str) -> None:
        self._stream = stream
        self._where = where
        self._pending = b""
        self._member = zlib.decompressobj(31)
        self._begun = False

    def read(self, size: int, /) -> bytes:
        while True:
            if not self._pending:
                self._pending = self._stream.read(_INPUT)
                if not self._pending:
                    if self._begun:
                        raise _broken(self._where, "the gzip stream is cut short")
                    return b""
            try:
                data = self._member.decompress(self._pending, size)
            except zlib.error as error:
                raise _broken(self._where, f"not a sound gzip stream: {error}") from None
            self._begun = True
            self._pending = self._member.unconsumed_tail
            if self._member.eof:
                self._pending = self._member.unused_data
                self._member, self._begun = zlib.decompressobj(31), False
            if data:
                return data


def _zstd(stream: Readable, where: str) -> _Decoder:
    boot.require_compiled(persist=False)
    import zstandard

    scanner = FrameScanner(stream, where)
    reader = zstandard.ZstdDecompressor(max_window_size=WINDOW_LIMIT).stream_reader(
        scanner,  # type: ignore[arg-type]  # it only calls read()
        read_size=_INPUT,
        read_across_frames=True,
        closefd=False,
    )
    return _Zstd(reader.read, where, zstandard.ZstdError)


class _Zstd:
    def __init__(self, read: Callable[[int], bytes], where: str, error: type[Exception]) -> None:
        self._read = read
        self._where = where
        self._error = error

    def read(self, size: int, /) -> bytes:
        try:
            return self._read(size)
        except self._error as error:
            raise _broken(self._where, f"not a sound zstd stream: {error}") from None


class FrameScanner:
    """Passes a zstd stream through and follows its frames, RFC 8878 section 3.1.

    The decoder sees no frame whose window is over :data:`WINDOW_LIMIT`, and the end of the stream is an error
    inside a frame: the library takes a cut for an end. Both are told before any memory is asked for.
    """

    def __init__(self, stream: Readable, where: str) -> None:
        self._stream = stream
        self._where = where
        self._held = b""  # the beginning of a header that is not complete yet
        self._skip = 0  # bytes until the next header
        self._next = self._frame
        self._checksum = False
        self._inside = False

    def read(self, size: int = -1, /) -> bytes:
        """The next compressed bytes, unchanged; raises :class:`BundleError`."""
        data = self._stream.read(_INPUT if size < 0 else size)
        if not data and (self._held or self._skip or self._inside):
            raise _broken(self._where, "the zstd stream is cut short")
        self._scan(data)
        return data

    def _scan(self, data: bytes) -> None:
        position = 0
        while position < len(data):
            if self._skip:
                step = min(self._skip, len(data) - position)
                self._skip -= step
                position += step
                continue
            # The longest header is 18 bytes: magic, descriptor, window, dictionary id, content size.
            window = self._held + data[position : position + 18]
            used = self._next(window)
            if not used:
                self._held = window
                return
            position += used - len(self._held)
            self._held = b""

    def _frame(self, data: bytes) -> int:
        """Read a frame header; how long it is, or 0 when more bytes are needed."""
        if len(data) < 5:
            return 0
        if data[1:4] == b"\x2a\x4d\x18" and data[0] & 0xF0 == 0x50:
            if len(data) < 8:
                return 0
            self._skip = int.from_bytes(data[4:8], "little")
            return 8
        if data[:4] != b"\x28\xb5\x2f\xfd":
            raise _broken(self._where, "bytes after the end of the zstd stream that are no frame")
        flags = data[4]
        single = bool(flags & 0x20)
        dictionary = (0, 1, 2, 4)[flags & 3]
        content = (int(single), 2, 4, 8)[flags >> 6]
        length = 5 + (not single) + dictionary + content
        if len(data) < length:
            return 0
        if single:
            # Without a window descriptor the whole content is the window.
            size = int.from_bytes(data[length - content : length], "little") + (256 if content == 2 else 0)
        else:
            exponent, mantissa = data[5] >> 3, data[5] & 7
            size = (1 << 10 + exponent) // 8 * (8 + mantissa)
        if size > WINDOW_LIMIT:
            raise BundleError(
                "window-too-large",
                f"{self._where}: a zstd frame with a window of {size} bytes; at most {WINDOW_LIMIT} are read",
                hint="compress it without --long, or with --long=27 at most",
            )
        self._checksum = bool(flags & 4)
        self._inside = True
        self._next = self._block
        return length

    def _block(self, data: bytes) -> int:
        if len(data) < 3:
            return 0
        header = int.from_bytes(data[:3], "little")
        kind, size = header >> 1 & 3, header >> 3
        self._skip = 1 if kind == 1 else size  # an RLE block is one byte, repeated
        if header & 1:
            self._skip += 4 if self._checksum else 0
            self._inside = False
            self._next = self._frame
        return 3
