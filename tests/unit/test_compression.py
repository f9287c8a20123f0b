"""Decompression: several frames, limits on window and output, exact ends, and codecs told by their first bytes."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from stratum.bundle.compression import WINDOW_LIMIT, FrameScanner, LayerReader, identify
from stratum.bundle.oci import LAYER_GZIP, LAYER_TAR, LAYER_ZSTD
from stratum.errors import BundleError, ExitCode
from tests.bundles import Entry, gzipped, tar, zstd

ARCHIVE = tar([Entry("a", bytes(range(256)) * 2000), Entry("b", b"end")])
SKIPPABLE = b"\x5a\x2a\x4d\x18" + (7).to_bytes(4, "little") + b"ignored"
EMPTY_FRAME = zstd(b"")


def unpacked(data: bytes, media_type: str, limit: int = 1 << 30, step: int = 1 << 20) -> bytes:
    reader = LayerReader(io.BytesIO(data), media_type, limit, "blob x")
    result = b""
    while True:
        part = reader.read(step)
        assert len(part) <= step
        if not part:
            assert reader.size == len(result)
            return result
        result += part


def refusal(data: bytes, media_type: str, limit: int = 1 << 30) -> str:
    with pytest.raises(BundleError) as caught:
        unpacked(data, media_type, limit)
    assert caught.value.exit_code == ExitCode.BUNDLE_MALFORMED
    assert "blob x" in caught.value.message
    return f"[{caught.value.reference}] {caught.value.message}"


def frames(data: bytes, size: int = 10_000) -> bytes:
    return b"".join(zstd(data[start : start + size]) for start in range(0, len(data), size))


def members(data: bytes, size: int = 10_000) -> bytes:
    return b"".join(gzip.compress(data[start : start + size]) for start in range(0, len(data), size))


def streamed(data: bytes) -> bytes:
    """A frame that does not say its size, in blocks."""
    out = io.BytesIO()
    with zstandard.ZstdCompressor(level=1).stream_writer(out, closefd=False) as writer:
        for start in range(0, len(data), 999):
            writer.write(data[start : start + 999])
            writer.flush()
    return out.getvalue()


@pytest.mark.parametrize("step", [1, 1000, 1 << 20])
@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (ARCHIVE, LAYER_TAR),
        (gzipped(ARCHIVE), LAYER_GZIP),
        (members(ARCHIVE), LAYER_GZIP),
        (zstd(ARCHIVE), LAYER_ZSTD),
        (frames(ARCHIVE), LAYER_ZSTD),
        (streamed(ARCHIVE), LAYER_ZSTD),
        (SKIPPABLE + zstd(ARCHIVE), LAYER_ZSTD),
        (SKIPPABLE + EMPTY_FRAME + zstd(ARCHIVE) + SKIPPABLE + EMPTY_FRAME, LAYER_ZSTD),
        (zstandard.ZstdCompressor(write_checksum=False, write_content_size=False).compress(ARCHIVE), LAYER_ZSTD),
        (zstandard.ZstdCompressor(level=19).compress(ARCHIVE), LAYER_ZSTD),
    ],
)
def test_every_stream_of_a_known_kind_is_unpacked(data: bytes, media_type: str, step: int) -> None:
    wanted = ARCHIVE if step > 1 else ARCHIVE[:5000]
    reader = LayerReader(io.BytesIO(data), media_type, len(ARCHIVE), "blob x")
    result = b""
    while len(result) < len(wanted):
        part = reader.read(step)
        assert 0 < len(part) <= step
        result += part
    assert result == wanted


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=4000), min_size=1, max_size=5), st.integers(1, 5000))
def test_streams_in_pieces_are_the_whole(parts: list[bytes], step: int) -> None:
    whole = tar([]) + b"".join(parts)
    assert unpacked(zstd(tar([])) + b"".join(map(zstd, parts)), LAYER_ZSTD, step=step) == whole
    assert unpacked(gzipped(tar([])) + b"".join(map(gzipped, parts)), LAYER_GZIP, step=step) == whole


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (zstd(ARCHIVE), LAYER_ZSTD),
        (frames(ARCHIVE), LAYER_ZSTD),
        (streamed(ARCHIVE[:20_000]), LAYER_ZSTD),
        (gzipped(ARCHIVE), LAYER_GZIP),
        (members(ARCHIVE), LAYER_GZIP),
    ],
)
def test_a_stream_cut_short_is_refused(data: bytes, media_type: str) -> None:
    boundaries = 0
    for length in sorted(
        {*range(1, min(len(data), 400)), *range(0, len(data), 211), *range(len(data) - 40, len(data))}
    ):
        try:
            got = unpacked(data[:length], media_type)
        except BundleError:
            continue
        # Between two frames the stream looks whole; the digest and the archive's end tell.
        boundaries += 1
        assert len(got) < len(ARCHIVE)
    assert boundaries < 5


@pytest.mark.parametrize("tail", [b"x", b"\0", b"\0" * 512, b"garbage that is longer than a header"])
@pytest.mark.parametrize(("pack", "media_type"), [(zstd, LAYER_ZSTD), (gzipped, LAYER_GZIP)])
def test_bytes_after_the_end_are_refused(pack: Callable[[bytes], bytes], media_type: str, tail: bytes) -> None:
    assert "bad-compression" in refusal(pack(ARCHIVE) + tail, media_type)


@pytest.mark.parametrize(("pack", "media_type"), [(zstd, LAYER_ZSTD), (gzipped, LAYER_GZIP)])
def test_a_bit_turned_in_a_stream_is_noticed_by_its_checksum(pack: Callable[[bytes], bytes], media_type: str) -> None:
    data = pack(ARCHIVE)
    for position in range(20, len(data) - 8, 53):
        changed = bytearray(data)
        changed[position] ^= 0x10
        refusal(bytes(changed), media_type)


# -- which codec ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "media_type", "why"),
    [
        (zstd(ARCHIVE), LAYER_GZIP, "but holds zstd"),
        (zstd(ARCHIVE), LAYER_TAR, "but holds zstd"),
        (gzipped(ARCHIVE), LAYER_ZSTD, "but holds gzip"),
        (gzipped(ARCHIVE), LAYER_TAR, "but holds gzip"),
        (ARCHIVE, LAYER_ZSTD, "but holds tar"),
        (ARCHIVE, LAYER_GZIP, "but holds tar"),
        (lzma.compress(ARCHIVE), LAYER_ZSTD, "but holds xz"),
        (bz2.compress(ARCHIVE), LAYER_TAR, "but holds bzip2"),
        (b"", LAYER_ZSTD, "does not begin like zstd"),
        (b"rubbish" * 100, LAYER_ZSTD, "does not begin like zstd"),
        (b"rubbish" * 100, LAYER_GZIP, "does not begin like gzip"),
        (b"(", LAYER_ZSTD, "does not begin like zstd"),
        (ARCHIVE, "application/x-lzma", "application/x-lzma is not known"),
        (ARCHIVE, "", "is not known"),
        (ARCHIVE, LAYER_TAR + "+zstd\n", "is not known"),
    ],
)
def test_a_media_type_that_lies_is_reported(data: bytes, media_type: str, why: str) -> None:
    assert why in refusal(data, media_type)


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (zstd(b"x"), "zstd"),
        (SKIPPABLE, "zstd"),
        (gzipped(b"x"), "gzip"),
        (lzma.compress(b"x"), "xz"),
        (bz2.compress(b"x"), "bzip2"),
        (b"PK\x03\x04", "zip"),
        (b"\x04\x22\x4d\x18", "lz4"),
        (ARCHIVE[:512], "tar"),
        (bytes(512), "tar"),
        (tar([Entry("BZh-is-a-name", b"x")])[:512], "tar"),
        (b"", None),
        (b"x", None),
        (bytes(511), None),
    ],
)
def test_a_codec_is_told_by_the_first_bytes(start: bytes, name: str) -> None:
    assert identify(start) == name


# -- windows --------------------------------------------------------------------------------------------


def frame_header(window_log: int, mantissa: int = 0) -> bytes:
    return b"\x28\xb5\x2f\xfd\x00" + bytes([(window_log - 10) << 3 | mantissa])


def rle(size: int, *, last: bool = False) -> bytes:
    return (int(last) | 1 << 1 | size << 3).to_bytes(3, "little") + b"\0"


def test_a_window_of_128_mib_passes_and_a_larger_one_is_refused_by_name() -> None:
    # zstd --long=27 and --long=28
    good = frame_header(27) + rle(1024, last=True)
    assert unpacked(good, LAYER_ZSTD) == bytes(1024)
    for bad, size in ((frame_header(27, 1), 150994944), (frame_header(28), 1 << 28), (frame_header(41), 1 << 41)):
        said = refusal(bad + rle(1024, last=True), LAYER_ZSTD)
        assert "window-too-large" in said
        assert f"a window of {size} bytes; at most {WINDOW_LIMIT}" in said


def test_the_window_of_every_frame_counts() -> None:
    assert "window-too-large" in refusal(zstd(ARCHIVE) + frame_header(28) + rle(1, last=True), LAYER_ZSTD)


def test_a_single_segment_has_its_content_as_window() -> None:
    large = b"\x28\xb5\x2f\xfd\xe0" + ((1 << 27) + 1).to_bytes(8, "little") + rle(1024, last=True)
    assert "window-too-large" in refusal(large, LAYER_ZSTD)


def test_the_zstd_program_with_a_long_window_is_refused() -> None:
    for level, refused in (("--long=27", False), ("--long=28", True)):
        made = subprocess.run(["zstd", "-1", level, "-c"], input=ARCHIVE, capture_output=True, check=True, timeout=60)
        # From a pipe the program does not know the size, so the window is the one that was asked for.
        if refused:
            assert "window-too-large" in refusal(made.stdout, LAYER_ZSTD)
        else:
            assert unpacked(made.stdout, LAYER_ZSTD) == ARCHIVE


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 50))
def test_the_frame_scanner_raises_nothing_but_bundle_errors(data: bytes, step: int) -> None:
    scanner = FrameScanner(io.BytesIO(b"\x28\xb5\x2f\xfd" + data), "blob x")
    try:
        while scanner.read(step):
            pass
    except BundleError:
        pass


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=3000), min_size=1, max_size=4), st.integers(1, 700))
def test_the_frame_scanner_passes_good_streams_unchanged(parts: list[bytes], step: int) -> None:
    data = b"".join(zstd(part) + SKIPPABLE for part in parts)
    scanner = FrameScanner(io.BytesIO(data), "blob x")
    got = b""
    while True:
        part = scanner.read(step)
        if not part:
            break
        got += part
    assert got == data


# -- bombs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pack", "media_type"), [(bytes, LAYER_TAR), (zstd, LAYER_ZSTD), (gzipped, LAYER_GZIP)])
def test_not_one_byte_more_than_declared_is_handed_out(pack: Callable[[bytes], bytes], media_type: str) -> None:
    data = pack(ARCHIVE)
    assert unpacked(data, media_type, len(ARCHIVE)) == ARCHIVE
    reader = LayerReader(io.BytesIO(data), media_type, 1000, "blob x")
    with pytest.raises(BundleError, match="unpacks to more than the 1000 bytes"):
        while reader.read(300):
            assert reader.size <= 1000


BOMB = r"""
    import io, re, sys
    from stratum.bundle.compression import LayerReader
    from stratum.bundle.oci import LAYER_GZIP, LAYER_ZSTD
    from stratum.errors import BundleError
    from tests.bundles import gzipped
    from tests.unit.test_compression import frame_header, rle

    kind, limit = sys.argv[1], int(sys.argv[2])
    if kind == "zstd":  # 4 GiB from 128 KiB
        data, media_type = frame_header(20) + rle(1 << 17) * (1 << 15), LAYER_ZSTD
    else:  # 4 GiB from 4 MiB
        data, media_type = gzipped(bytes(64 << 20)) * 64, LAYER_GZIP

    reader = LayerReader(io.BytesIO(data), media_type, limit, "bomb")
    total = 0
    try:
        while True:
            part = reader.read(1 << 20)
            if not part:
                break
            total += len(part)
        print("end", end=" ")
    except BundleError as error:
        print(error.reference, end=" ")
    # Of this program alone; getrusage() counts what its parent had when it forked.
    print(total, int(re.search(r"VmHWM:\s+([0-9]+) kB", open("/proc/self/status").read()).group(1)) >> 10)
"""


@pytest.mark.parametrize("kind", ["zstd", "gzip"])
@pytest.mark.parametrize("limit", [1000, 200 << 20])
def test_a_bomb_of_4_gib_stops_at_the_declared_size_in_little_time_and_memory(kind: str, limit: int) -> None:
    started = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BOMB), kind, str(limit)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    reference, total, peak = run.stdout.split()
    assert reference == "too-large"
    assert int(total) <= limit
    # The making of the gzip bomb takes 64 MiB itself; 4 GiB would not fit under this.
    assert int(peak) < 250
    assert time.monotonic() - started < 60
