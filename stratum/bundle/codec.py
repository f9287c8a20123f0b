"""The plain bytes of source archives, whatever compresses them: gzip, zstd, xz, bzip2 or nothing.

The codec is told by the first bytes and never by a name (NVIDIA/enroot#153 shows what happens otherwise). gzip
and zstd are those of :mod:`stratum.bundle.compression`, with its limits; xz and bzip2 occur in sources only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, Callable

from stratum.bundle.compression import WINDOW_LIMIT, LayerReader, identify
from stratum.bundle.oci import LAYER_GZIP, LAYER_ZSTD
from stratum.errors import BundleError

__all__ = ["codec_of", "plain_chunks"]

CHUNK = 1 << 20
HEAD = 512


def codec_of(file: BinaryIO) -> str:
    """``gzip``, ``zstd``, ``xz``, ``bzip2`` or ``plain``. ``file`` stands at its start, before and after."""
    found = identify(file.read(HEAD))
    file.seek(0)
    return found if found in ("gzip", "zstd", "xz", "bzip2") else "plain"


def plain_chunks(file: BinaryIO, subject: str, *, limit: int) -> Iterator[bytes]:
    """The plain bytes of ``file`` in chunks; ``subject`` is what errors call it.

    Raises :class:`BundleError` when the stream is cut short, damaged, followed by other bytes, needs a window over
    128 MiB, or unfolds to more than ``limit`` bytes.
    """
    codec = codec_of(file)
    read: Callable[[int], bytes]
    if codec == "gzip":
        read = LayerReader(file, LAYER_GZIP, limit, subject).read
    elif codec == "zstd":
        read = LayerReader(file, LAYER_ZSTD, limit, subject).read
    elif codec == "plain":
        read = file.read
    else:
        yield from _library(file, subject, codec, limit)
        return
    yield from iter(lambda: read(CHUNK), b"")


def _library(file: BinaryIO, subject: str, codec: str, limit: int) -> Iterator[bytes]:
    new, failure = _decoder(codec)
    data, total = file.read(CHUNK), 0
    while data:
        decoder = new()
        try:
            while not decoder.eof:
                if decoder.needs_input and not data:
                    raise _malformed(subject, codec, "it is cut short")
                chunk = decoder.decompress(data, CHUNK)
                total += len(chunk)
                if total > limit:
                    raise BundleError("too-large", f"{subject}: unfolds to more than {limit} bytes")
                if chunk:
                    yield chunk
                data = file.read(CHUNK) if decoder.needs_input and not decoder.eof else b""
        except failure as error:
            raise _malformed(subject, codec, str(error)) from None
        data = decoder.unused_data or file.read(CHUNK)


def _decoder(codec: str) -> tuple[Callable[[], Any], type[Exception]]:
    # Both are optional parts of a Python build; without them the archive must come in another form.
    if codec == "bzip2":
        import bz2

        return bz2.BZ2Decompressor, OSError
    import lzma

    return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=WINDOW_LIMIT + (16 << 20)), lzma.LZMAError


def _malformed(subject: str, codec: str, why: str) -> BundleError:
    return BundleError("bad-compression", f"{subject}: not a sound {codec} stream: {why}", hint="get the file again")
