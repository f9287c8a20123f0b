"""The operation journal: the next run knows what was cut off, and where."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from stratum.errors import StratumError
from stratum.journal import JOURNAL_PATH, Journal, Operation
from stratum.system import Host
from tests.fakes import FaultHost, Killed


@pytest.fixture
def host(tmp_path: Path) -> FaultHost:
    (tmp_path / "var/lib/stratum").mkdir(parents=True)
    return FaultHost(str(tmp_path), {})


def again(host: Host) -> Journal:
    """The journal as another process reads it."""
    return Journal(Host(host.root, {}))


def test_without_a_journal_nothing_is_unfinished(host: FaultHost) -> None:
    assert Journal(host).read() is None
    assert Journal(host).unfinished() is None
    assert host.mutations == []


def test_an_operation_is_on_the_disk_before_its_first_step(host: FaultHost) -> None:
    before = host.now()
    operation = Journal(host).begin("upgrade", source="1.0", target="2.0")
    found = again(host).read()
    assert found == operation
    assert (found.name, found.source, found.target, found.state) == ("upgrade", "1.0", "2.0", "running")
    assert before <= found.started <= host.now()
    assert stat.S_IMODE(host.stat(JOURNAL_PATH).st_mode) == 0o600


def test_two_operations_have_two_identifiers(host: FaultHost) -> None:
    assert Journal(host).begin("up").identifier != Journal(host).begin("up").identifier


def test_each_step_is_known_to_the_next_process(host: FaultHost) -> None:
    journal = Journal(host)
    journal.begin("up")
    for name in ("unpack", "units"):
        journal.step(name)
        found = again(host).unfinished()
        assert found and found.step == name


@pytest.mark.parametrize(
    ("end", "state", "unfinished"),
    [
        (lambda journal: journal.finish(), "done", False),
        (lambda journal: journal.fail("no space"), "failed", True),
        (lambda journal: journal.roll_back("no space"), "rolled-back", False),
        (lambda journal: journal.prove(), "running", True),
        (lambda journal: journal.step("x"), "running", True),
    ],
)
def test_only_what_is_done_or_rolled_back_is_finished(host: FaultHost, end, state: str, unfinished: bool) -> None:  # type: ignore[no-untyped-def]
    journal = Journal(host)
    journal.begin("upgrade")
    end(journal)
    found = again(host).read()
    assert found and found.state == state
    assert (again(host).unfinished() is not None) == unfinished


def test_a_failure_keeps_its_step_and_says_why(host: FaultHost) -> None:
    journal = Journal(host)
    journal.begin("up")
    journal.step("unpack")
    journal.fail("no space\nleft")
    found = again(host).unfinished()
    assert found and (found.step, found.error) == ("unpack", "no space\nleft")


def test_a_journal_that_was_closed_writes_no_more(host: FaultHost) -> None:
    journal = Journal(host)
    journal.begin("uninstall")
    journal.close()
    host.unlink(JOURNAL_PATH)
    for call in (journal.finish, lambda: journal.step("x"), lambda: journal.fail("x"), journal.prove):
        call()
    assert not host.lexists(JOURNAL_PATH)


def test_without_an_operation_steps_are_not_written(host: FaultHost) -> None:
    Journal(host).step("x")
    Journal(host).finish()
    assert host.mutations == []


def test_an_operation_of_an_earlier_run_can_be_gone_on_with_and_settled(host: FaultHost) -> None:
    Journal(host).begin("upgrade", source="1", target="2")
    later = Journal(host)
    later.resume()
    later.step("rollback-start")
    found = again(host).unfinished()
    assert found and (found.step, found.target) == ("rollback-start", "2")
    Journal(host).settle("rolled-back")
    assert again(host).unfinished() is None
    Journal(host).settle("done")
    host.unlink(JOURNAL_PATH)
    Journal(host).settle("done")
    assert not host.lexists(JOURNAL_PATH), "where nothing was begun, nothing is settled"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"7",
        b"{}",
        b"\xff",
        b'{"name": "up"}',
        b'{"name": "up", "identifier": "x", "started": 1, "unheard-of": 1}',
        b'{"name": ["up"], "identifier": "x", "started": 1}',
        b'{"name": "up", "identifier": "x", "started": "yesterday"}',
        b'{"name": "up", "identifier": "x", "started": 1, "state": "odd"}',
        b'{"name": "up", "identifier": "x", "started": 1, "target": 7}',
        b'{"name": "up", "identifier": "x", "started": 1, "target": "../../etc"}',
        b'{"name": "up", "identifier": "x", "started": 1, "proven": "no"}',
    ],
)
def test_a_damaged_journal_is_an_error_with_a_way_out(host: FaultHost, data: bytes) -> None:
    Path(host.real(JOURNAL_PATH)).write_bytes(data)
    with pytest.raises(StratumError) as caught:
        Journal(host).unfinished()
    assert caught.value.reference == "journal-unreadable"
    assert caught.value.hint


def test_a_process_that_dies_leaves_the_step_before_or_the_new_one(tmp_path: Path) -> None:
    for number in range(20):
        root = tmp_path / str(number)
        (root / "var/lib/stratum").mkdir(parents=True)
        host = FaultHost(str(root), {}, number)
        journal = Journal(host)
        done: list[str | None] = []
        try:
            journal.begin("up")
            done = [None]
            for name in ("a", "b"):
                journal.step(name)
                done.append(name)
            return
        except Killed:
            found = again(host).read()
            wanted = [None, "a", "b"]
            if found is None:
                assert done == []
            else:
                assert found.step in wanted[max(0, len(done) - 1) : len(done) + 1]


def test_the_journal_is_json_that_an_admin_can_read(host: FaultHost) -> None:
    Journal(host).begin("up", target="1.0")
    value = json.loads(host.read_bytes(JOURNAL_PATH))
    assert value["name"] == "up" and value["target"] == "1.0"
    assert Operation(**value).state == "running"
