"""The tar reader: what tarfile writes is read alike, what is hostile is refused, in bounded memory."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
from collections.abc import Sequence
from typing import Optional, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratum.bundle.tarstream import BLOCK, PADDING_LIMIT, PAX_LIMIT, Member, TarReader, shown
from stratum.errors import BundleError
from tests.bundles import Entry, directory, hard_link, header, pax, pax_records, symlink, tar

END = bytes(2 * BLOCK)


def read_all(data: bytes, chunk: int = 1 << 20) -> list[tuple[Member, bytes]]:
    reader = TarReader(io.BytesIO(data), "test", chunk=chunk)
    found = []
    for member in reader:
        content = b""
        while True:
            part = reader.read(700)
            if not part:
                break
            content += bytes(part)
        found.append((member, content))
    return found


def names(data: bytes) -> list[str]:
    return [member.name for member in TarReader(io.BytesIO(data), "test")]


def refusal(data: bytes) -> str:
    with pytest.raises(BundleError) as caught:
        read_all(data)
    assert caught.value.message.isascii()
    assert "\n" not in caught.value.message
    return f"[{caught.value.reference}] {caught.value.message}"


# -- what is good ---------------------------------------------------------------------------------------

KINDS = {
    tarfile.REGTYPE: "file",
    tarfile.DIRTYPE: "directory",
    tarfile.SYMTYPE: "symlink",
    tarfile.LNKTYPE: "hard link",
}
letters = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="/"), min_size=1, max_size=60)
paths = st.lists(letters, min_size=1, max_size=6).map("/".join)


@st.composite
def archives(draw: st.DrawFn) -> tuple[bytes, list[tuple[tarfile.TarInfo, bytes]]]:
    form = draw(st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    members = []
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for name in draw(st.lists(paths, max_size=6)):
            info = tarfile.TarInfo(name)
            info.type = draw(st.sampled_from(list(KINDS)))
            info.mode = draw(st.integers(0, 0o7777))
            info.mtime = draw(st.integers(0, 2**33 - 1))
            content = draw(st.binary(max_size=1500)) if info.type == tarfile.REGTYPE else b""
            info.size = len(content)
            if info.type in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                info.linkname = draw(paths)
            if form == tarfile.PAX_FORMAT and draw(st.booleans()):
                info.pax_headers = {"comment": draw(letters)}
            try:
                info.tobuf(form)
            except ValueError:
                continue  # the old format has no room for this name
            archive.addfile(info, io.BytesIO(content))
            members.append((info, content))
    return out.getvalue(), members


@settings(max_examples=150, deadline=None)
@given(archives(), st.sampled_from([1, 511, 512, 513, 4096, 1 << 20]))
def test_archives_of_tarfile_are_read_as_they_were_written(
    archive: tuple[bytes, list[tuple[tarfile.TarInfo, bytes]]], chunk: int
) -> None:
    data, members = archive
    found = read_all(data, chunk)
    assert len(found) == len(members)
    for (member, content), (info, wanted) in zip(found, members):
        assert member.name.rstrip("/") == info.name.rstrip("/")
        assert (member.kind, member.mode, member.mtime) == (KINDS[info.type], info.mode, info.mtime)
        assert (member.link, content, member.size) == (info.linkname, wanted, len(wanted))
        if content:
            assert data[member.offset : member.offset + member.size] == content


def test_content_that_nobody_reads_is_passed_over() -> None:
    assert names(tar([Entry("a", b"x" * 5000), Entry("b", b"y"), directory("c"), Entry("d")])) == ["a", "b", "c/", "d"]


def test_content_can_be_read_in_part() -> None:
    reader = TarReader(io.BytesIO(tar([Entry("a", b"x" * 5000), Entry("b", b"second")])), "test", chunk=600)
    assert reader.next()
    assert bytes(reader.read(10)) == b"x" * 10
    assert reader.next()
    assert bytes(reader.read(100)) == b"second"
    assert bytes(reader.read(100)) == b""
    assert reader.next() is None


def test_an_archive_of_global_headers_only_is_empty() -> None:
    # CPython issue 149578: git archive of an empty tree.
    assert names(tar([pax({"comment": "0123456789abcdef"}, flag=b"g")])) == []


def test_a_pax_size_overrides_the_header() -> None:
    content = b"z" * 600
    data = tar([pax({"size": "600"}), header(b"a", size=0) + content + bytes(-600 % BLOCK), Entry("after", b"!")])
    assert [(member.name, got) for member, got in read_all(data)] == [("a", content), ("after", b"!")]


def test_an_empty_pax_value_means_that_of_the_header() -> None:
    (found,) = read_all(tar([pax({"path": "", "mtime": ""}), Entry("real", b"x")]))
    assert (found[0].name, found[0].mtime) == ("real", 1_700_000_000)


def test_long_names_of_gnu_tar_are_read() -> None:
    long = "d/" * 100 + "name"
    data = tar(
        [
            Entry("././@LongLink", long.encode() + b"\0", flag=b"L", magic=b"ustar  \0"),
            Entry("././@LongLink", b"t" * 150 + b"\0", flag=b"K", magic=b"ustar  \0"),
            Entry("cut", flag=b"2", link="cut", magic=b"ustar  \0"),
        ]
    )
    ((member, _),) = read_all(data)
    assert (member.name, member.link) == (long, "t" * 150)


def test_numbers_in_base_256_are_read() -> None:
    ((member, _),) = read_all(tar([Entry("a", b"", mtime=1 << 33)]))
    assert member.mtime == 1 << 33
    big = header(b"big", size=1 << 40)
    assert TarReader(io.BytesIO(big), "test").next() == Member("big", "file", 0o755, 1 << 40, 0, "", BLOCK)


@pytest.mark.parametrize(("mtime", "kept"), [("-5", 0), ("1700000000.75", 1700000000), ("99999999999999", 0)])
def test_times_that_no_file_system_agrees_on_become_zero(mtime: str, kept: int) -> None:
    ((member, _),) = read_all(tar([pax({"mtime": mtime}), Entry("a")]))
    assert member.mtime == kept
    ((member, _),) = read_all(tar([Entry("a", mtime=-5)]))
    assert member.mtime == 0


def test_zeros_after_the_end_are_padding() -> None:
    assert names(tar([Entry("a")], end=bytes(10240))) == ["a"]


# -- what is hostile ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([Entry("a", flag=b"S")], "a GNU sparse file"),
        ([Entry("a", flag=b"7")], "contiguous"),
        ([Entry("a", flag=b"M")], "multi-volume"),
        ([Entry("a", flag=b"D")], "directory dump"),
        ([Entry("a", flag=b"V")], "volume label"),
        ([Entry("a", flag=b"Z")], "unknown type Z"),
        ([Entry("a", flag=b"\xff")], "unknown type"),
        ([pax({"GNU.sparse.major": "1"}), Entry("a")], "sparse"),
        ([pax({"GNU.sparse.size": "1000", "size": "2000"}), Entry("a")], "sparse"),
        ([pax({"SCHILY.xattr.security.capability": b"\1\0\0\2"}), Entry("a")], "capabilities"),
        ([pax({"path": "x"}, flag=b"g"), Entry("a")], "global pax header sets path"),
        ([pax({"size": "0"}, flag=b"g"), Entry("a")], "global pax header sets size"),
        ([pax({"path": "x"}), pax({"path": "y"}), Entry("a")], "several extension headers"),
        ([Entry("L", b"x\0", flag=b"L"), Entry("L", b"y\0", flag=b"L"), Entry("a")], "several extension headers"),
        ([Entry("L", b"x\0", flag=b"L"), pax({"path": "y"}), Entry("a")], "several extension headers"),
        ([pax({"size": "0"}), Entry("L", b"x\0", flag=b"L"), Entry("a")], "several extension headers"),
        ([pax({"path": "x"})], "without a member"),
        ([Entry("L", b"x\0", flag=b"L")], "without a member"),
        ([Entry("", b"")], "empty name"),
        ([pax({"path": "a\0b"}), Entry("a")], "a NUL"),
        ([Entry("L", b"a\0b\0", flag=b"L"), Entry("a")], "a NUL"),
        ([Entry(b"caf\xe9")], r"caf\xe9: a name that is not UTF-8"),
        ([Entry("a", flag=b"2", link=b"caf\xe9")], "not UTF-8"),
        ([pax({"path": b"\xff\xfe"}), Entry("a")], "not UTF-8"),
        ([Entry("a", flag=b"2")], "a link to nowhere"),
        ([Entry("a", flag=b"1")], "a link to nowhere"),
        ([Entry("a", b"x", flag=b"2", link="b")], "a symlink with content"),
        ([Entry("a", b"x", flag=b"1", link="b")], "a hard link with content"),
        ([Entry("a/", b"x", flag=b"5")], "a directory with content"),
        ([Entry("a", b"x", flag=b"6")], "a fifo with content"),
        ([Entry("a/", b"x")], "name of a directory"),
        ([Entry("a", spoil_checksum=True)], "wrong checksum"),
        ([Entry("a", magic=bytes(8))], "no tar header"),
        ([Entry("a", magic=b"ustar  \0", prefix=b"atime")], "incremental"),
        ([pax({"size": "-1"}), Entry("a")], "malformed pax size"),
        ([pax({"size": "1e3"}), Entry("a")], "malformed pax size"),
        ([pax({"size": "9999999999999999999"}), Entry("a")], "malformed pax size"),
        ([pax({"mtime": "yesterday"}), Entry("a")], "malformed pax time"),
        ([Entry("x", pax_records([("path", "a"), ("path", "b")]), flag=b"x"), Entry("a")], "stands twice"),
    ],
)
def test_what_can_be_understood_in_two_ways_is_refused(entries: Sequence[Union[Entry, bytes]], why: str) -> None:
    assert why in refusal(tar([Entry("first", b"ok"), *entries]))


@pytest.mark.parametrize(
    "records",
    [
        *(b"path=x\n", b"9 path=x", b"10 path=xx\n", b"7 path=x\n", b"99999999 path=x\n", b"8 pathx\n\n"),
        *(b"5 =x\n", b"0 a=b\n", b"-9 path=x\n", b"9 path=x\n\0\0\0", b" 9 path=x\n", b"09 path=x\n"),
    ],
)
def test_a_malformed_pax_record_is_refused(records: bytes) -> None:
    assert "malformed pax record" in refusal(tar([Entry("x", records, flag=b"x"), Entry("a")]))


@pytest.mark.parametrize("field", [slice(100, 108), slice(124, 136), slice(136, 148), slice(148, 156)])
@pytest.mark.parametrize("value", [b"9", b"-1", b"0x1", b"1 2", b"\x80" + b"\xff" * 20, b"\xff" * 12])
def test_a_number_that_is_none_is_refused(field: slice, value: bytes) -> None:
    block = bytearray(header(b"a"))
    width = field.stop - field.start
    block[field] = value[:width].ljust(width, b"\0")
    if field.start != 148:
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
    if field.start == 136 and value[0] == 0xFF:  # a time before 1970 is no error
        return
    if field.start == 100 and value[0] in (0x80,):
        return  # a mode in base 256 is strange, and masked
    assert "bad-archive" in refusal(bytes(block) + END)


@pytest.mark.parametrize("flag", [b"x", b"g", b"L", b"K"])
def test_one_header_that_claims_a_gigabyte_allocates_nothing(flag: bytes) -> None:
    # CPython issue 151497: 512 bytes make tarfile ask for 1 GB.
    data = header(b"x", flag=flag, size=1 << 30) + END
    tracemalloc.start()
    try:
        message = refusal(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "at most" in message
    assert peak < 4 << 20


def test_a_pax_header_up_to_the_limit_is_read() -> None:
    value = "v" * (PAX_LIMIT - 100)
    assert names(tar([pax({"comment": value}), Entry("a")])) == ["a"]


def test_a_member_that_claims_more_than_there_is_is_cut_short() -> None:
    assert "cut-short" in refusal(tar([Entry("a", b"abc", size=1 << 40)]))


# -- where it ends --------------------------------------------------------------------------------------

WHOLE = tar(
    [directory("d"), Entry("d/a", b"x" * 700), pax({"path": "d/" + "n" * 200}), Entry("n", b"y"), symlink("s", "d")]
)


@pytest.mark.parametrize("chunk", [512, 1 << 20])
def test_an_archive_cut_at_any_byte_is_refused(chunk: int) -> None:
    for length in range(len(WHOLE)):
        with pytest.raises(BundleError, match="cut-short"):
            read_all(WHOLE[:length], chunk)


@pytest.mark.parametrize("tail", [b"x", bytes(BLOCK) + b"x", b"\0" * 511 + b"x", bytes(PADDING_LIMIT) + bytes(BLOCK)])
def test_garbage_after_the_end_is_refused(tail: bytes) -> None:
    assert "after the end" in refusal(WHOLE + tail)


def test_a_second_archive_after_the_first_is_not_passed_over() -> None:
    assert "after the end" in refusal(WHOLE + WHOLE)


def test_one_empty_block_is_no_end() -> None:
    single = tar([Entry("a")], end=bytes(BLOCK))
    assert "cut-short" in refusal(single)
    assert "followed by data" in refusal(single + tar([Entry("b")]))


@pytest.mark.parametrize("data", [b"", b"x", b"hello" * 500, bytes(BLOCK), b"\x1f\x8b" + bytes(2000)])
def test_what_is_no_tar_is_refused(data: bytes) -> None:
    refusal(data)


# -- fuzzing --------------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_mutated_archives_raise_nothing_but_bundle_errors(data: st.DataObject) -> None:
    archive, _ = data.draw(archives())
    changed = bytearray(archive + WHOLE[: data.draw(st.integers(0, len(WHOLE)))])
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, max(len(changed) - 1, 0)))
        changed[position : position + 1] = data.draw(st.binary(max_size=4))
    _consume(bytes(changed))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_headers_with_a_right_checksum_raise_nothing_but_bundle_errors(data: st.DataObject) -> None:
    entries = []
    for _ in range(data.draw(st.integers(1, 4))):
        block = bytearray(
            header(b"name", flag=data.draw(st.sampled_from([b"0", b"1", b"2", b"5", b"x", b"g", b"L", b"K"])))
        )
        for start, end in ((0, 100), (100, 108), (124, 136), (136, 148), (157, 257), (345, 500)):
            if data.draw(st.booleans()):
                block[start:end] = data.draw(st.binary(max_size=end - start)).ljust(end - start, b"\0")
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        entries.append(bytes(block) + data.draw(st.binary(max_size=600)).ljust(1024, b"\0"))
    _consume(b"".join(entries) + END)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=3000))
def test_arbitrary_bytes_raise_nothing_but_bundle_errors(data: bytes) -> None:
    _consume(data)


def _consume(data: bytes) -> Optional[str]:
    try:
        found = read_all(data, 512)
    except BundleError as error:
        assert error.message.isascii()
        return error.reference
    assert sum(len(content) for _, content in found) <= len(data)
    return None


@pytest.mark.parametrize(
    ("name", "text"),
    [("plain", "plain"), ("café", "caf\\xe9"), ("a\nb", "a\\nb"), (b"\xff", "\\xff"), ("\x1b[31m", "\\x1b[31m")],
)
def test_names_are_escaped_for_messages(name: object, text: str) -> None:
    assert shown(name) == text


def test_hard_links_keep_their_target() -> None:
    found = read_all(tar([Entry("a", b"x"), hard_link("b", "a")]))
    assert (found[1][0].kind, found[1][0].link) == ("hard link", "a")
