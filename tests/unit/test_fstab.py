"""The lines of swap in fstab: those, and not a byte more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.errors import StratumError
from stratum.host.fstab import MARK, disable_swap_lines, enable_swap_lines, read_fstab, swap_lines, write_fstab
from stratum.system import Host
from tests.unit.hosting import TreeMachine, content, link, put

LIVE = [
    b"/swap.img none swap sw 0 0",
    b"UUID=x swap swap",
    b"/dev/sda2 none swap defaults",
    b"/dev/sda2\tswap\tswap\tpri=5,discard=once\t0\t0",
    b"  \t LABEL=s none swap sw,noauto 0 0  ",
    b"/dev/zram0 none swap sw # with a comment",
    b"/dev/disk/by-label/caf\xe9 none swap sw",
    b"/swap\\040file none swap sw 0 0",
    b"/dev/sda2 /mnt swap sw 0 0",
]
NOT_SWAP = [
    b"",
    b" ",
    b"# /etc/fstab: static file system information.",
    b"#/old none swap",
    b"# /dev/sda2 none swap sw 0 0",
    b" \t#/dev/sda2 none swap sw 0 0",
    b"UUID=x / ext4 defaults 0 1",
    b"UUID=y /srv/swap ext4 defaults 0 2",
    b"/dev/swap /data ext4 defaults 0 2",
    b"LABEL=swap swap ext4 swap 0 0",
    b"none swap",
    b"/dev/sda2 none swapfs sw",
    b"/dev/sda2 none SWAP sw",
    b"/dev/sda2 none noswap sw",
    b"tmpfs /swap tmpfs size=1g 0 0",
    b"/dev/mapper/vg-swap /var xfs defaults 0 0",
    b"\xff\xfe\x00",
    MARK + b"/swap.img none swap sw 0 0",
]


@pytest.mark.parametrize("line", LIVE)
def test_a_live_line_of_type_swap_becomes_a_comment(line: bytes) -> None:
    assert disable_swap_lines(line) == MARK + line
    assert swap_lines(line) == [line]


@pytest.mark.parametrize("line", NOT_SWAP)
def test_every_other_line_stays(line: bytes) -> None:
    assert disable_swap_lines(line) == line
    assert swap_lines(line) == []


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [b"", b"\n", b"\r\n"])
def test_line_ends_and_a_missing_last_one_are_kept(end: bytes, last: bytes) -> None:
    lines = [NOT_SWAP[2], LIVE[1], NOT_SWAP[6], b"", LIVE[0]]
    before = end.join(lines) + last
    after = disable_swap_lines(before)
    assert after == end.join([lines[0], MARK + lines[1], lines[2], lines[3], MARK + lines[4]]) + last
    assert enable_swap_lines(after, swap_lines(before)) == before


def test_a_second_run_changes_nothing() -> None:
    before = b"\n".join([*LIVE, *NOT_SWAP])
    once = disable_swap_lines(before)
    assert disable_swap_lines(once) == once


def test_what_somebody_wrote_meanwhile_stays() -> None:
    before = b"UUID=x / ext4 defaults 0 1\n/a none swap sw 0 0\n/b none swap sw 0 0\n"
    recorded = swap_lines(before)
    edited = (
        b"# moved to the new disk\nUUID=z / xfs defaults 0 1\n" + MARK + b"/b none swap sw 0 0\n/srv /mnt none bind 0 0"
    )
    assert enable_swap_lines(edited, recorded) == (
        b"# moved to the new disk\nUUID=z / xfs defaults 0 1\n/b none swap sw 0 0\n/srv /mnt none bind 0 0"
    )


def test_a_marked_line_that_somebody_changed_stays_as_it_is() -> None:
    edited = MARK + b"/a none swap sw,pri=9 0 0\n"
    assert enable_swap_lines(edited, [b"/a none swap sw 0 0"]) == edited


def test_a_marked_line_that_was_not_recorded_stays_as_it_is() -> None:
    # The file may have been copied from another node.
    edited = MARK + b"/a none swap sw 0 0\n"
    assert enable_swap_lines(edited, []) == edited


def test_a_line_that_an_admin_wrote_anew_is_not_there_twice() -> None:
    line = b"/a none swap sw 0 0"
    edited = MARK + line + b"\n" + line + b"\nUUID=x / ext4 defaults 0 1\n"
    assert enable_swap_lines(edited, [line]) == line + b"\nUUID=x / ext4 defaults 0 1\n"


def test_a_file_that_had_a_line_twice_gets_both_back() -> None:
    before = b"/a none swap sw 0 0\n" * 2
    assert enable_swap_lines(disable_swap_lines(before), swap_lines(before)) == before


def test_the_mark_comes_off_where_an_editor_changed_the_line_ends() -> None:
    before = b"/a none swap sw 0 0\nUUID=x / ext4 defaults 0 1\n"
    edited = disable_swap_lines(before).replace(b"\n", b"\r\n")
    assert enable_swap_lines(edited, swap_lines(before)) == before.replace(b"\n", b"\r\n")


FIELDS = st.sampled_from([b"swap", b"none", b"/a", b"#", b"#x", b"ext4", b"", b"\xe9", b"\x00", b"sw,pri=1", MARK])
BLANKS = st.sampled_from([b" ", b"\t", b" \t ", b"  "])
LINES = st.builds(
    lambda words, blank, end: blank.join(words) + end,
    st.lists(FIELDS, max_size=6),
    BLANKS,
    st.sampled_from([b"\n", b"\r\n", b"\r", b"\x0b\n", b""]),
)
TABLES = st.one_of(st.binary(max_size=200), st.lists(LINES, max_size=8).map(b"".join))


@given(TABLES)
def test_for_any_bytes_only_marks_are_added_and_all_come_off_again(before: bytes) -> None:
    after = disable_swap_lines(before)
    assert swap_lines(after) == []
    assert disable_swap_lines(after) == after
    assert len(after) == len(before) + len(MARK) * len(swap_lines(before))
    if MARK not in before:
        assert enable_swap_lines(after, swap_lines(before)) == before


@given(TABLES, TABLES)
def test_for_any_edit_in_front_and_behind_the_edit_stays(before: bytes, more: bytes) -> None:
    # Not when the edit has the same lines: those are the cases above.
    if MARK in more or MARK in before or set(swap_lines(more)) & set(swap_lines(before)):
        return
    edited = more + b"\n" + disable_swap_lines(before) + b"\n" + more
    assert enable_swap_lines(edited, swap_lines(before)) == more + b"\n" + before + b"\n" + more


# -- the file ---------------------------------------------------------------------------------------------


def test_an_absent_file_is_empty_and_not_made(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    assert read_fstab(host) == b""
    assert not (tmp_path / "etc").exists()


@pytest.mark.parametrize("mode", [0o644, 0o600, 0o664])
def test_the_file_keeps_its_mode_and_owner(tmp_path: Path, mode: int) -> None:
    host = Host(str(tmp_path))
    put(host, "/etc/fstab", "x\n")
    path = tmp_path / "etc/fstab"
    path.chmod(mode)
    owner = (12345, 12346) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(path, *owner)
    write_fstab(host, b"y\n")
    info = path.stat()
    assert path.read_bytes() == b"y\n"
    assert info.st_mode & 0o7777 == mode
    assert (info.st_uid, info.st_gid) == owner


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    put(host, "/usr/etc/fstab", "x\n")
    link(host, "/etc/fstab", "../usr/etc/fstab")
    write_fstab(host, b"y\n")
    assert (tmp_path / "etc/fstab").readlink() == Path("../usr/etc/fstab")
    assert content(host, "/usr/etc/fstab") == b"y\n"


def test_a_file_that_cannot_be_replaced_is_an_error_that_says_so(tmp_path: Path) -> None:
    class Mounted(TreeMachine):
        def rename(self, source: object, target: object) -> None:
            raise OSError(16, "Device or resource busy")

    host = Mounted(str(tmp_path))
    put(host, "/etc/fstab", "x\n")
    with pytest.raises(StratumError) as caught:
        write_fstab(host, b"y\n")
    assert caught.value.reference == "fstab-not-written"
    assert "/etc/fstab: cannot be replaced: Device or resource busy" in caught.value.message
    assert [path.name for path in (tmp_path / "etc").iterdir()] == ["fstab"]
