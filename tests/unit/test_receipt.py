"""The receipt: what is ours, told from what somebody changed."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratum.errors import StratumError
from stratum.receipt import RECEIPT_PATH, Condition, Entry, Receipt, content_digest, file_digest
from stratum.system import Host, HostPath
from tests.fakes import FaultHost, Killed


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "var/lib/stratum").mkdir(parents=True)
    return FaultHost(str(tmp_path), {})


def file_entry(path: str, *contents: bytes) -> Entry:
    return Entry(HostPath(path), "file", tuple(content_digest(content) for content in contents))


def write(host: Host, data: bytes) -> None:
    Path(host.real(RECEIPT_PATH)).write_bytes(data)


def test_no_receipt_is_an_empty_one_and_is_not_written(host: Host) -> None:
    assert list(Receipt.load(host)) == []
    assert not host.lexists(RECEIPT_PATH)


def test_what_is_recorded_is_read_again_in_the_same_order(host: Host) -> None:
    entries = [
        Entry(HostPath("/z"), "directory"),
        file_entry("/z/file", b"1", b"2"),
        Entry(HostPath("/a"), "link", ("../target",)),
        Entry(HostPath("/tree"), "tree"),
        Entry(HostPath("/program"), "file", (content_digest(b"1"),), 0o755),
    ]
    receipt = Receipt.load(host)
    for entry in entries:
        receipt.record(entry)
    assert list(Receipt.load(host)) == entries
    assert stat.S_IMODE(host.stat(RECEIPT_PATH).st_mode) == 0o600


def test_a_changed_mode_is_told_from_changed_content(host: Host) -> None:
    path = Path(host.real("/program"))
    path.write_bytes(b"1")
    path.chmod(0o755)
    entry = Entry(HostPath("/program"), "file", (content_digest(b"1"),), 0o755)
    receipt = Receipt(host, [entry])
    assert receipt.changed_mode(entry) is None
    path.chmod(0o4755)
    assert receipt.changed_mode(entry) == 0o4755
    assert receipt.condition(entry) == Condition.OURS, "there is nothing of the admin's in it that could be lost"
    assert receipt.changed_mode(file_entry("/program", b"1")) is None, "an entry without a mode"
    path.write_bytes(b"2")
    assert receipt.changed_mode(entry) is None, "it holds something else: its mode is not ours either"
    path.unlink()
    assert receipt.changed_mode(entry) is None


def test_recording_the_same_again_does_not_touch_the_disk(host: FaultHost) -> None:
    receipt = Receipt.load(host)
    receipt.record(file_entry("/f", b"1"))
    count = len(host.mutations)
    receipt.record(file_entry("/f", b"1"))
    receipt.forget("/nothing")
    assert len(host.mutations) == count


def test_a_path_keeps_its_place_and_its_older_contents_when_it_is_written_again(host: Host) -> None:
    receipt = Receipt(host)
    receipt.record(file_entry("/a", b"1"), file_entry("/b", b"1"))
    receipt.record(file_entry("/a", b"2"))
    assert list(receipt) == [file_entry("/a", b"1", b"2"), file_entry("/b", b"1")]
    receipt.record(file_entry("/a", b"1"))
    assert receipt.get("/a") == file_entry("/a", b"2", b"1"), "the newest is last, none is named twice"


def test_only_the_last_eight_contents_are_remembered(host: Host) -> None:
    receipt = Receipt(host)
    for number in range(20):
        receipt.record(file_entry("/f", b"%d" % number))
    assert receipt.get("/f") == file_entry("/f", *(b"%d" % number for number in range(12, 20)))


def test_a_path_that_becomes_another_kind_forgets_its_contents(host: Host) -> None:
    receipt = Receipt(host)
    receipt.record(file_entry("/p", b"1"))
    receipt.record(Entry(HostPath("/p"), "link", ("x",)))
    assert receipt.get("/p") == Entry(HostPath("/p"), "link", ("x",))


def test_forgetting_is_written_at_once(host: Host) -> None:
    receipt = Receipt(host)
    receipt.record(file_entry("/a", b"1"), file_entry("/b", b"1"))
    receipt.forget("/a", HostPath("/c"))
    assert [str(entry.path) for entry in Receipt.load(host)] == ["/b"]
    assert len(receipt) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"format": 2, "entries": []}',
        b'{"format": 1}',
        b'{"format": 1, "entries": {"a": 1}}',
        b'{"format": 1, "entries": ["/etc"]}',
        b'{"format": 1, "entries": [{"kind": "file"}]}',
        b'{"format": 1, "entries": [{"path": "/a"}]}',
        b'{"format": 1, "entries": [{"path": "/a", "kind": "mystery"}]}',
        b'{"format": 1, "entries": [{"path": "etc/passwd", "kind": "file"}]}',
        b'{"format": 1, "entries": [{"path": "", "kind": "tree"}]}',
        b'{"format": 1, "entries": [{"path": "/", "kind": "tree"}]}',
        b'{"format": 1, "entries": [{"path": "/opt/stratum/../../etc", "kind": "tree"}]}',
        b'{"format": 1, "entries": [{"path": "/a//b", "kind": "tree"}]}',
        b'{"format": 1, "entries": [{"path": "/a/.", "kind": "tree"}]}',
        b'{"format": 1, "entries": [{"path": 7, "kind": "tree"}]}',
        b'{"format": 1, "entries": [{"path": "/a", "kind": "file", "contents": "sha256:x"}]}',
        b'{"format": 1, "entries": [{"path": "/a", "kind": "file", "contents": [1]}]}',
        b'{"format": 1, "entries": [{"path": "/a", "kind": "file", "contents": null}]}',
        b'{"format": 1, "entries": [{"path": "/a", "kind": "file", "mode": 493}]}',
        b'{"format": 1, "entries": [{"path": "/a", "kind": "file", "mode": "4755"}]}',
    ],
)
def test_a_receipt_that_cannot_be_trusted_is_refused_and_kept(host: Host, data: bytes) -> None:
    write(host, data)
    with pytest.raises(StratumError) as caught:
        Receipt.load(host)
    assert caught.value.reference == "receipt-unreadable"
    assert str(RECEIPT_PATH) in caught.value.message
    assert host.read_bytes(RECEIPT_PATH) == data


def test_every_prefix_of_a_receipt_is_refused(host: Host) -> None:
    Receipt(host).record(file_entry("/a", b"1"), Entry(HostPath("/b"), "link", ("x",)))
    data = host.read_bytes(RECEIPT_PATH)
    for size in range(len(data.rstrip())):
        write(host, data[:size])
        with pytest.raises(StratumError):
            Receipt.load(host)


def test_a_name_that_is_not_utf8_survives_the_receipt(host: Host) -> None:
    path = HostPath(os.fsdecode(b"/caf\xe9"))
    Path(os.fsdecode(host.root.encode() + b"/caf\xe9")).write_bytes(b"1")
    receipt = Receipt(host)
    receipt.record(Entry(path, "file", (content_digest(b"1"),)))
    (entry,) = Receipt.load(host)
    assert entry.path == path
    assert receipt.condition(entry) == Condition.OURS


def test_the_digest_of_a_file_is_that_of_its_content(host: Host) -> None:
    data = os.urandom(3_000_000)
    Path(host.root, "f").write_bytes(data)
    assert file_digest(host, "/f") == content_digest(data)


# -- what became of a path ------------------------------------------------------------------------------


def test_a_file_is_ours_as_long_as_it_holds_something_that_we_wrote(host: Host) -> None:
    entry = file_entry("/f", b"old", b"new")
    receipt, path = Receipt(host), Path(host.root, "f")
    assert receipt.condition(entry) == Condition.MISSING
    for content, found in ((b"old", Condition.OURS), (b"new", Condition.OURS), (b"newer", Condition.CHANGED)):
        path.write_bytes(content)
        assert receipt.condition(entry) == found
    path.write_bytes(b"")
    assert receipt.condition(entry) == Condition.CHANGED


@pytest.mark.parametrize("kind", ["file", "directory", "link", "tree"])
@pytest.mark.parametrize("found", ["file", "directory", "link", "link to a directory", "link to such a file", "fifo"])
def test_another_kind_of_entry_at_the_path_is_a_change(host: Host, kind: str, found: str) -> None:
    path = Path(host.root, "p")
    Path(host.root, "elsewhere").mkdir()
    Path(host.root, "same").write_bytes(b"content")
    if found == "file":
        path.write_bytes(b"other")
    elif found == "directory":
        path.mkdir()
    elif found == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"link": "x", "link to a directory": "elsewhere", "link to such a file": "same"}[found])
    contents = {"file": (content_digest(b"content"),), "link": ("target",)}.get(kind, ())
    ours = found == "directory" and kind in ("directory", "tree")
    entry = Entry(HostPath("/p"), kind, contents)
    assert Receipt(host).condition(entry) == (Condition.OURS if ours else Condition.CHANGED)


def test_a_path_below_what_is_a_file_now_is_missing(host: Host) -> None:
    Path(host.root, "d").write_text("a file")
    assert Receipt(host).condition(file_entry("/d/f", b"1")) == Condition.MISSING


def test_only_what_is_recorded_and_unchanged_is_owned(host: Host) -> None:
    receipt = Receipt(host)
    Path(host.root, "f").write_bytes(b"1")
    assert not receipt.owns("/f")
    receipt.record(file_entry("/f", b"2"))
    assert not receipt.owns("/f")
    receipt.record(file_entry("/f", b"1"))
    assert receipt.owns("/f")


# -- whatever happens -----------------------------------------------------------------------------------

PATHS = st.sampled_from([HostPath(name) for name in ("/a", "/a/b", "/c", "/c/d/e")])
ENTRIES = st.builds(
    Entry,
    PATHS,
    st.sampled_from(["file", "link", "directory", "tree"]),
    st.lists(st.sampled_from(["x", "y", "z"]), max_size=3, unique=True).map(tuple),
)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("record"), st.lists(ENTRIES, min_size=1, max_size=3)),
        st.tuples(st.just("forget"), st.lists(PATHS, max_size=2)),
    ),
    max_size=8,
)


@settings(max_examples=80, deadline=None)
@given(changes=CHANGES, dies=st.integers(0, 30))
def test_the_disk_never_knows_less_than_the_receipt_before_the_change_that_was_cut_off(
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[str, list]],
    dies: int,  # type: ignore[type-arg]
) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "var/lib/stratum").mkdir(parents=True)
    receipt = Receipt.load(FaultHost(str(root), {}, dies))
    seen: list[list[Entry]] = [[]]
    try:
        for what, values in changes:
            before = list(receipt)
            seen = [before]
            if what == "record":
                receipt.record(*values)
            else:
                receipt.forget(*values)
            seen = [list(receipt)]
    except Killed:
        seen.append(list(receipt))
    assert list(Receipt.load(Host(str(root)))) in seen


@settings(max_examples=50, deadline=None)
@given(entries=st.lists(ENTRIES, max_size=6))
def test_the_file_is_json_that_other_programs_read(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Entry]
) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "var/lib/stratum").mkdir(parents=True)
    host = Host(str(root))
    receipt = Receipt(host)
    receipt.record(*entries)
    if entries:
        value = json.loads(host.read_bytes(RECEIPT_PATH))
        assert value["format"] == 1
        assert [item["path"] for item in value["entries"]] == [str(entry.path) for entry in receipt]
