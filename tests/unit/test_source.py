"""Bundles as a directory, a tar file and a pipe: read alike when good, one clear error when not."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import random
import stat
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Optional

import pytest

from stratum.bundle.oci import INDEX_LIMIT, Descriptor, digest_of
from stratum.bundle.source import BundleSource, Wanted, open_bundle
from stratum.bundle.tarstream import CHUNK
from stratum.errors import BundleError, BundleNotFoundError, DigestMismatchError, ExitCode
from tests.bundles import (
    BLOCK,
    EVERY_BYTE,
    Bundle,
    Entry,
    Publisher,
    directory,
    flipped,
    hard_link,
    header,
    pax,
    symlink,
    tar,
    zstd,
)

FORMS = ["directory", "tar", "pipe"]


def open_as(form: str, bundle: Bundle, tmp_path: Path) -> BundleSource:
    if form == "directory":
        return open_bundle(str(bundle.write_directory(tmp_path / "bundle")))
    if form == "tar":
        return open_bundle(str(bundle.write_tar(tmp_path / "bundle.tar")))
    return open_pipe(bundle.tar())


def open_pipe(data: bytes) -> BundleSource:
    return open_bundle("-", stdin=io.BytesIO(data))


def descriptors(bundle: Bundle) -> list[Descriptor]:
    return [Descriptor("application/octet-stream", digest, len(data)) for digest, data in bundle.blobs.items()]


def read_everything(source: BundleSource, bundle: Bundle) -> dict[str, bytes]:
    with source:
        found = {item.digest: blob.read() for item, blob in source.stream_blobs(descriptors(bundle))}
        source.finish()
    return found


def refusal(open_it: Callable[[], Any], code: ExitCode = ExitCode.BUNDLE_MALFORMED) -> str:
    expected = BundleNotFoundError if code == ExitCode.NOT_FOUND else BundleError
    with pytest.raises(expected) as caught:
        open_it()
    assert caught.value.exit_code == code
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return f"[{caught.value.reference}] {caught.value.message} ({caught.value.hint})"


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    made = Publisher.demo().build()
    made.sign("other")
    return made


# -- what is good ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_index_signatures_and_blobs(form: str, bundle: Bundle, tmp_path: Path) -> None:
    source = open_as(form, bundle, tmp_path)
    assert source.index_bytes == bundle.index
    assert sorted(source.signatures) == sorted(bundle.signatures.values())
    assert read_everything(source, bundle) == bundle.blobs


@pytest.mark.parametrize("form", FORMS)
def test_no_file_stays_open(form: str, bundle: Bundle, tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    read_everything(open_as(form, bundle, tmp_path), bundle)
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_order_in_a_tar_file_does_not_matter(bundle: Bundle, tmp_path: Path) -> None:
    for seed in range(5):
        shuffled = tmp_path / f"{seed}.tar"

        def order(items: list[Any], seed: int = seed) -> list[Any]:
            return random.Random(seed).sample(items, len(items))

        assert read_everything(open_bundle(str(bundle.write_tar(shuffled, order=order))), bundle) == bundle.blobs


@pytest.mark.parametrize("form", ["tar", "pipe"])
def test_names_may_begin_with_a_dot_and_directories_may_be_members(form: str, bundle: Bundle, tmp_path: Path) -> None:
    tops = [directory("."), directory("./blobs"), directory("./blobs/sha256/")]
    data = tar([*tops, *(Entry(f"./{name}", content) for name, content in bundle.files().items())])
    (tmp_path / "b.tar").write_bytes(data)
    source = open_pipe(data) if form == "pipe" else open_bundle(str(tmp_path / "b.tar"))
    assert read_everything(source, bundle) == bundle.blobs


def test_files_that_are_none_of_ours_are_passed_over(bundle: Bundle) -> None:
    data = tar([Entry("manifest.json", b"[]"), *bundle.entries(), Entry("README", b"hello")])
    assert read_everything(open_pipe(data), bundle) == bundle.blobs


def test_a_pipe_passes_over_blobs_that_nobody_wants(bundle: Bundle) -> None:
    source = open_pipe(bundle.tar())
    last = descriptors(bundle)[-1]
    assert source.read_blob(last, 1 << 20) == bundle.blobs[last.digest]
    source.finish()


def test_blobs_that_are_found_on_the_way_come_too(bundle: Bundle, tmp_path: Path) -> None:
    for form in FORMS:
        first, second, third, *_ = descriptors(bundle)
        wanted = Wanted([first])
        seen = []
        with open_as(form, bundle, tmp_path) as source:
            for descriptor, _ in source.stream_blobs(wanted):
                seen.append(descriptor.digest)
                if descriptor == first:
                    assert wanted.add(third)
                    assert wanted.add(second)
                    assert not wanted.add(first)
        assert sorted(seen) == sorted([first.digest, second.digest, third.digest])


def test_a_fifo_is_read_as_a_pipe(bundle: Bundle, tmp_path: Path) -> None:
    # bash's <(command) gives such a path.
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.write_bytes(bundle.tar()))
    writer.start()
    assert read_everything(open_bundle(str(fifo)), bundle) == bundle.blobs
    writer.join()


def test_a_pipe_that_comes_in_drops_is_read(bundle: Bundle) -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)  # as ssh may leave it

    def write() -> None:
        with os.fdopen(writing, "wb", buffering=0) as out:
            data = bundle.tar()
            for start in range(0, len(data), 777):
                out.write(data[start : start + 777])
                if start % 5 == 0:
                    time.sleep(0.001)

    thread = threading.Thread(target=write)
    thread.start()
    with os.fdopen(reading, "rb") as stdin:
        assert read_everything(open_bundle("-", stdin=stdin), bundle) == bundle.blobs
    thread.join()


def test_blobs_of_a_tar_file_can_be_read_by_several_threads(tmp_path: Path) -> None:
    bundle = Bundle()
    for number in range(4):
        bundle.add(bytes([number]) * (3 << 20))
    bundle.index = b"{}"
    with open_bundle(str(bundle.write_tar(tmp_path / "b.tar"))) as source:
        assert source.random_access
        results: list[bool] = []

        def read(item: Descriptor) -> None:
            results.append(source.open_blob(item).read() == bundle.blobs[item.digest])

        threads = [threading.Thread(target=read, args=(item,)) for item in descriptors(bundle)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 4


@pytest.mark.parametrize("form", FORMS)
def test_a_large_blob_is_read_in_little_memory(form: str, tmp_path: Path) -> None:
    content = bytes(64 << 20)
    bundle = Bundle(index=b"{}")
    bundle.add(content)
    item = descriptors(bundle)[0]
    with open_as(form, bundle, tmp_path) as source:
        tracemalloc.start()
        try:
            ((_, blob),) = ((found, blob) for found, blob in source.stream_blobs([item]))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert blob.read() == b""
    assert peak < 8 * CHUNK


# -- a blob ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_bit_turned_in_a_blob_is_noticed_before_its_last_bytes_are_handed_out(form: str, tmp_path: Path) -> None:
    for bit in (0, 7777, 799_999):
        bundle = Bundle(index=b"{}")
        digest = bundle.add(b"a" * 100_000)
        bundle.spoil(digest, bit)
        with open_as(form, bundle, tmp_path) as source:
            blob = source.open_blob(Descriptor("x", digest, 100_000))
            got = blob.read(60_000)
            with pytest.raises(DigestMismatchError) as caught:
                while True:
                    part = blob.read(60_000)
                    assert part
                    got += part
            assert len(got) < 100_000
            assert (caught.value.expected, caught.value.exit_code) == (digest, ExitCode.BUNDLE_MALFORMED)
            # It stays wrong, also for somebody who asks again.
            for ask in (blob.read, blob.finish):
                with pytest.raises(DigestMismatchError):
                    ask()


@pytest.mark.parametrize("form", FORMS)
def test_finish_proves_what_nobody_read(form: str, tmp_path: Path) -> None:
    bundle = Bundle(index=b"{}")
    digest = bundle.add(b"a" * 1000)
    bundle.spoil(digest)
    with open_as(form, bundle, tmp_path) as source, pytest.raises(DigestMismatchError):
        for _ in source.stream_blobs([Descriptor("x", digest, 1000)]):
            pass


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_blob_is_proved_too(form: str, tmp_path: Path) -> None:
    bundle = Bundle(index=b"{}")
    right, wrong = digest_of(b""), digest_of(b"x")
    bundle.blobs = {right: b"", wrong: b""}
    with open_as(form, bundle, tmp_path) as source:
        assert source.read_blob(Descriptor("x", right, 0), 10) == b""
        with pytest.raises(DigestMismatchError):
            source.read_blob(Descriptor("x", wrong, 0), 10)


@pytest.mark.parametrize("form", FORMS)
def test_a_blob_of_another_size_or_none_is_refused(form: str, bundle: Bundle, tmp_path: Path) -> None:
    first = descriptors(bundle)[0]
    for size in (first.size - 1, first.size + 1):
        with open_as(form, bundle, tmp_path) as source:
            said = refusal(lambda: source.read_blob(Descriptor("x", first.digest, size), 1 << 20))  # noqa: B023
        assert f"has {first.size} bytes instead of {size}" in said
    with open_as(form, bundle, tmp_path) as source:
        absent = Descriptor("x", digest_of(b"absent"), 6)
        assert "is not in the bundle" in refusal(lambda: source.read_blob(absent, 100))


def test_a_blob_over_the_limit_is_not_read(bundle: Bundle, tmp_path: Path) -> None:
    first = descriptors(bundle)[0]
    with open_as("tar", bundle, tmp_path) as source:
        assert "at most 10 are read" in refusal(lambda: source.read_blob(first, 10))


def test_one_digest_with_two_sizes_is_refused() -> None:
    digest = digest_of(b"")
    assert "is said to have 1 and 2 bytes" in refusal(
        lambda: Wanted([Descriptor("x", digest, 1), Descriptor("x", digest, 2)])
    )


# -- not a bundle ---------------------------------------------------------------------------------------


def both(data: bytes, tmp_path: Path) -> Iterator[Callable[[], BundleSource]]:
    path = tmp_path / "bundle.tar"
    path.write_bytes(data)
    yield lambda: open_bundle(str(path))
    yield lambda: open_pipe(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b"hello, this is a text\n" * 100, "no tar archive"),
        (b"x", "no tar archive"),
        (b"PK\x03\x04" + bytes(600), "a zip file"),
        (bytes(1024), "no oci-layout"),
        (tar([Entry("hello", b"x")]), "no OCI image layout"),
        (tar([Entry("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')]), "no index.json"),
        (
            tar([Entry("oci-layout", b'{"imageLayoutVersion":"2.0.0"}'), Entry("index.json", b"{}")]),
            "only 1.0.0 is known",
        ),
        (tar([Entry("oci-layout", b"rubbish"), Entry("index.json", b"{}")]), "not JSON"),
        (tar([Entry("oci-layout", b" " * 5000), Entry("index.json", b"{}")]), "at most 4096 are read"),
    ],
)
def test_what_is_no_bundle_is_said_to_be_what_it_is(data: bytes, why: str, tmp_path: Path) -> None:
    for open_it in both(data, tmp_path):
        assert why in refusal(open_it)


@pytest.mark.parametrize(
    ("compress", "name"), [(gzip.compress, "gzip"), (zstd, "zstd"), (lzma.compress, "xz")], ids=["gzip", "zstd", "xz"]
)
def test_a_compressed_tar_is_named_with_what_to_do(
    compress: Callable[[bytes], bytes], name: str, bundle: Bundle, tmp_path: Path
) -> None:
    for open_it in both(compress(bundle.tar()), tmp_path):
        said = refusal(open_it)
        assert f"is compressed with {name}" in said
        assert f"run: {name} -dc" in said


def test_a_missing_bundle_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for path in (tmp_path / "absent", tmp_path / "file/below", tmp_path / ("x" * 300)):
        assert "bundle-not-found" in refusal(lambda: open_bundle(str(path)), ExitCode.NOT_FOUND)  # noqa: B023


def test_closed_standard_input_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input is closed" in refusal(lambda: open_bundle("-"), ExitCode.NOT_FOUND)


def test_a_terminal_is_no_bundle() -> None:
    controller, terminal = os.openpty()
    try:
        with os.fdopen(terminal, "rb") as stdin:
            assert "is a terminal" in refusal(lambda: open_bundle("-", stdin=stdin), ExitCode.NOT_FOUND)
    finally:
        os.close(controller)


def test_a_device_is_no_bundle() -> None:
    assert "neither a file nor a directory" in refusal(lambda: open_bundle("/dev/zero"))


@pytest.mark.parametrize("form", ["tar", "pipe", "directory"])
def test_a_layout_in_a_directory_of_its_own_is_refused_with_the_reason(
    form: str, bundle: Bundle, tmp_path: Path
) -> None:
    if form == "directory":
        bundle.write_directory(tmp_path / "top/img")
        said = refusal(lambda: open_bundle(str(tmp_path / "top")))
    else:
        opens = dict(zip(("tar", "pipe"), both(bundle.tar(prefix="img/"), tmp_path)))
        said = refusal(opens[form])
    assert "the image layout is in img/ and not at the top" in said
    assert "tar -C img" in said


# -- cut short, added to, put in disorder ---------------------------------------------------------------


def test_a_bundle_cut_at_any_byte_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    data = bundle.tar()
    path = tmp_path / "cut.tar"
    lengths = range(len(data)) if EVERY_BYTE else [*range(0, len(data), 97), *range(len(data) - 1100, len(data))]
    path.write_bytes(data)
    for length in reversed(lengths):
        os.truncate(path, length)
        refusal(lambda: open_bundle(str(path)).close())
        refusal(lambda: read_everything(open_pipe(data[:length]), bundle))  # noqa: B023


@pytest.mark.parametrize("tail", [b"x", b"garbage" * 1000, bytes(512) + b"x"])
def test_bytes_after_the_end_are_refused(tail: bytes, bundle: Bundle, tmp_path: Path) -> None:
    for open_it in both(bundle.tar() + tail, tmp_path):
        assert "after the end" in refusal(lambda: read_everything(open_it(), bundle))  # noqa: B023


def test_two_bundles_in_one_file_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    for open_it in both(bundle.tar() * 2, tmp_path):
        assert "after the end" in refusal(lambda: read_everything(open_it(), bundle))  # noqa: B023


def reordered(bundle: Bundle, *, last: str) -> bytes:
    return bundle.tar(order=lambda items: sorted(items, key=lambda item: item[0] == last))


@pytest.mark.parametrize("last", ["index.json", "oci-layout", "index.json.minisig"])
def test_a_pipe_must_bring_index_and_signatures_before_blobs(last: str, bundle: Bundle) -> None:
    said = refusal(lambda: read_everything(open_pipe(reordered(bundle, last=last)), bundle))
    if last != "oci-layout":
        assert "out-of-order" in said
        assert "save it to a file" in said


def test_a_pipe_must_bring_a_blob_after_the_one_that_names_it(bundle: Bundle) -> None:
    first, second, *_ = descriptors(bundle)
    source = open_pipe(bundle.tar())
    assert not source.random_access
    source.read_blob(second, 1 << 20)
    assert source.has_passed(first)
    assert "out-of-order" in refusal(lambda: source.read_blob(first, 1 << 20))


def test_a_pipe_gives_each_blob_once(bundle: Bundle) -> None:
    source = open_pipe(bundle.tar())
    first = descriptors(bundle)[0]
    source.read_blob(first, 1 << 20)
    refusal(lambda: source.read_blob(first, 1 << 20))


# -- hostile archives and directories -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        (symlink("blobs/sha256/" + "0" * 64, "/etc/shadow"), "is a symlink"),
        (hard_link("index.json.minisig", "index.json"), "is a hard link"),
        (Entry("dev", flag=b"3"), "is a character device"),
        (Entry("dev", flag=b"4"), "is a block device"),
        (Entry("fifo", flag=b"6"), "is a fifo"),
        (Entry("index.json", b"{}"), "stands twice"),
        (Entry("./index.json", b"{}"), "stands twice"),
        (Entry("blobs/../index.json", b"{}"), "no clean relative name"),
        (Entry("../index.json", b"{}"), "no clean relative name"),
        (Entry("/index.json", b"{}"), "no clean relative name"),
        (Entry("blobs//x", b"{}"), "no clean relative name"),
        (Entry(b"caf\xe9", b""), "not UTF-8"),
    ],
)
def test_a_hostile_member_is_refused(extra: Entry, why: str, bundle: Bundle, tmp_path: Path) -> None:
    names = list(bundle.files())
    for position in (0, 3, len(names)):
        entries = bundle.entries()
        entries.insert(position, extra)
        for open_it in both(tar(entries), tmp_path):
            assert why in refusal(lambda: read_everything(open_it(), bundle))  # noqa: B023


def test_a_duplicate_blob_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    name = list(bundle.files())[-1]
    for open_it in both(tar([*bundle.entries(), Entry(name, b"other")]), tmp_path):
        assert "stands twice" in refusal(lambda: read_everything(open_it(), bundle))  # noqa: B023


def test_a_pax_name_cannot_hide_a_member(bundle: Bundle, tmp_path: Path) -> None:
    hidden = [pax({"path": "index.json"}), Entry("harmless", b"{}")]
    for open_it in both(tar([*bundle.entries(), *hidden]), tmp_path):
        assert "stands twice" in refusal(lambda: read_everything(open_it(), bundle))  # noqa: B023


@pytest.mark.parametrize("form", FORMS)
def test_a_huge_index_is_not_read(form: str, tmp_path: Path) -> None:
    bundle = Bundle(index=b" " * (INDEX_LIMIT + 1))
    assert str(INDEX_LIMIT) in refusal(lambda: open_as(form, bundle, tmp_path))


@pytest.mark.parametrize("form", FORMS)
def test_signatures_are_limited_in_size_and_number(form: str, tmp_path: Path) -> None:
    large = Bundle(index=b"{}", signatures={"index.json.minisig": b"x" * 16385})
    refusal(lambda: open_as(form, large, tmp_path))
    many = Bundle(index=b"{}", signatures={f"index.json.{number:016X}.minisig": b"x" for number in range(17)})
    assert "16" in refusal(lambda: open_as(form, many, tmp_path))


def test_an_index_that_claims_a_terabyte_allocates_nothing(tmp_path: Path) -> None:
    data = tar([Entry("oci-layout", b"{}"), header(b"index.json", size=1 << 40)])
    tracemalloc.start()
    try:
        for open_it in both(data, tmp_path):
            refusal(open_it)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["link out", "link in", "fifo", "directory"])
@pytest.mark.parametrize("name", ["blob", "index.json", "oci-layout", "index.json.minisig"])
def test_in_a_directory_only_regular_files_count(name: str, kind: str, bundle: Bundle, tmp_path: Path) -> None:
    top = bundle.write_directory(tmp_path / "bundle")
    victim = descriptors(bundle)[0]
    path = top / (f"blobs/sha256/{victim.hex}" if name == "blob" else name)
    content = path.read_bytes()
    path.unlink()
    if kind.startswith("link"):
        other = (tmp_path if kind == "link out" else top) / "elsewhere"
        other.write_bytes(content)
        path.symlink_to(other)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    started = time.monotonic()
    refusal(lambda: read_everything(open_bundle(str(top)), bundle))
    assert time.monotonic() - started < 60


@pytest.mark.parametrize("linked", ["blobs", "blobs/sha256"])
def test_in_a_directory_links_to_directories_are_not_followed(linked: str, bundle: Bundle, tmp_path: Path) -> None:
    top = bundle.write_directory(tmp_path / "bundle")
    os.rename(top / linked, tmp_path / "moved")
    (top / linked).symlink_to(tmp_path / "moved")
    refusal(lambda: read_everything(open_bundle(str(top)), bundle))


def test_a_bundle_directory_may_itself_be_reached_through_a_link(bundle: Bundle, tmp_path: Path) -> None:
    bundle.write_directory(tmp_path / "bundle")
    (tmp_path / "link").symlink_to("bundle")
    assert read_everything(open_bundle(str(tmp_path / "link")), bundle) == bundle.blobs


@pytest.mark.parametrize("form", ["tar", "pipe"])
def test_a_bit_turned_anywhere_in_the_tar_is_noticed_or_harmless(form: str, tmp_path: Path) -> None:
    """Harmless: a field that nobody uses, such as a time. Index, signatures and blobs always come out as they were."""
    bundle = Publisher.of([Entry("bin/tool", b"tool")]).build()
    data = bundle.tar()
    path = tmp_path / "b.tar"
    noticed = 0
    for bit in range(0, len(data) * 8, 101):
        changed = flipped(data, bit)
        path.write_bytes(changed)
        try:
            source = open_pipe(changed) if form == "pipe" else open_bundle(str(path))
            found: Optional[dict[str, bytes]] = read_everything(source, bundle)
        except BundleError:
            noticed += 1
            continue
        assert found == bundle.blobs
    assert noticed > len(data) * 8 // 101 // 2


def test_nothing_is_written_beside_the_bundle(bundle: Bundle, tmp_path: Path) -> None:
    top = bundle.write_directory(tmp_path / "bundle")
    for path in [top, *top.rglob("*")]:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)
    before = sorted(tmp_path.rglob("*"))
    assert read_everything(open_bundle(str(top)), bundle) == bundle.blobs
    assert sorted(tmp_path.rglob("*")) == before
    for path in [top, *top.rglob("*")]:
        path.chmod(0o755)


def test_padding_to_a_record_is_no_garbage(bundle: Bundle, tmp_path: Path) -> None:
    data = bundle.tar()
    for open_it in both(data + bytes(-len(data) % 10240 + 10240), tmp_path):
        assert read_everything(open_it(), bundle) == bundle.blobs
    assert len(data) % BLOCK == 0
