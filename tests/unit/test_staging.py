"""Staging: unguessable, on the right file system, and gone after every run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from stratum.errors import StratumError
from stratum.journal import JOURNAL_PATH
from stratum.receipt import RECEIPT_PATH, Entry, Receipt
from stratum.staging import OWN_ROOT, STAGING, make_private, new_staging, reap_staging, reap_temporaries
from stratum.system import HostPath
from tests.fakes import FaultHost


@pytest.fixture
def host(tmp_path: Path) -> FaultHost:
    (tmp_path / "var/lib/stratum").mkdir(parents=True)
    return FaultHost(str(tmp_path), {})


def test_each_staging_directory_is_new_empty_and_closed_to_others(host: FaultHost) -> None:
    receipt = Receipt(host)
    one, other = new_staging(host, receipt), new_staging(host, receipt)
    assert one != other
    assert one.parent == other.parent == STAGING
    assert host.listdir(one) == []
    assert stat.S_IMODE(host.stat(STAGING).st_mode) == 0o700, "nobody else may look for what is half unpacked"
    assert stat.S_IMODE(host.stat(one).st_mode) == 0o755, "it becomes a version directory by a rename"


def test_a_private_directory_that_existed_with_another_mode_is_closed_too(host: FaultHost) -> None:
    host.makedirs(STAGING, 0o755)
    new_staging(host, Receipt(host))
    assert stat.S_IMODE(host.stat(STAGING).st_mode) == 0o700
    kept = HostPath("/var/lib/stratum/images/blobs/sha256")
    host.makedirs(kept, 0o777)
    make_private(host, kept)
    assert stat.S_IMODE(host.stat(kept).st_mode) == 0o700
    assert stat.S_IMODE(host.stat(kept.parent).st_mode) == 0o777, "only the directory itself"


def test_staging_is_below_our_own_root_and_never_in_tmp() -> None:
    assert OWN_ROOT in STAGING.parents  # row 32: one rename must reach the place, and /tmp may be small


def test_everything_made_for_staging_is_recorded_before(host: FaultHost) -> None:
    receipt = Receipt(host)
    new_staging(host, receipt)
    assert [str(entry.path) for entry in Receipt.load(host)] == ["/opt", "/opt/stratum", "/opt/stratum/.staging"]
    first = host.mutations.index("mkdir /opt")
    assert any("receipt.json" in line for line in host.mutations[:first])


def test_a_directory_that_was_there_is_not_claimed(host: FaultHost) -> None:
    host.mkdir("/opt")
    receipt = Receipt(host)
    new_staging(host, receipt)
    assert receipt.get("/opt") is None
    assert receipt.get("/opt/stratum") is not None
    other = Receipt(host)
    reap_staging(host)
    new_staging(host, other)
    assert other.get("/opt/stratum") is None, "the admin's own, for example a disk that is mounted there"


def test_reaping_removes_what_three_killed_runs_left(host: FaultHost) -> None:
    receipt = Receipt(host)
    for _ in range(3):
        path = new_staging(host, receipt)
        host.mkdir(path / "bin")
        host.open_new(path / "bin/half", 0o755).close()
    reap_staging(host)
    assert not host.lexists(STAGING)
    reap_staging(host)
    assert host.listdir(new_staging(host, receipt)) == []


def test_reaping_follows_no_link(host: FaultHost) -> None:
    host.makedirs("/srv")
    host.open_new("/srv/canary", 0o644).close()
    host.makedirs(OWN_ROOT)
    host.symlink("/srv", str(STAGING))
    reap_staging(host)
    assert host.exists("/srv/canary")
    path = new_staging(host, Receipt(host))
    host.symlink("/srv", str(path / "out"))
    reap_staging(host)
    assert host.exists("/srv/canary")


def test_a_mount_in_staging_is_an_error_and_not_emptied(host: FaultHost, monkeypatch: pytest.MonkeyPatch) -> None:
    path = new_staging(host, Receipt(host))
    host.open_new(path / "canary", 0o644).close()
    monkeypatch.setattr(host, "mount_points", lambda: [host.real(path)])
    with pytest.raises(StratumError) as caught:
        reap_staging(host)
    assert caught.value.reference == "mount-in-the-way"
    assert host.exists(path / "canary")


def test_hidden_copies_beside_recorded_paths_go_and_nothing_else(host: FaultHost) -> None:
    host.makedirs("/etc")
    receipt = Receipt(host)
    receipt.record(Entry(HostPath("/etc/ours"), "file", ("sha256:x",)), Entry(HostPath("/etc/dir"), "directory"))
    receipt.record(Entry(HostPath("/gone/away"), "file", ("sha256:x",)))
    token = "0123456789abcdef"
    ours = [f"/etc/.ours.{token}.tmp", f"{RECEIPT_PATH.parent}/.{RECEIPT_PATH.name}.{token}.tmp"]
    ours.append(f"{JOURNAL_PATH.parent}/.{JOURNAL_PATH.name}.{token}.tmp")
    host.makedirs(f"/etc/.dir.{token}.tmp/half")
    theirs = [
        "/etc/ours",
        f"/etc/.theirs.{token}.tmp",
        "/etc/.ours.tmp",
        "/etc/.ours.short.tmp",
        f"/etc/.ours.{token}.tmp.bak",
        f"/etc/ours.{token}.tmp",
        f"/etc/.ours.{token.upper()}.tmp",
    ]
    for name in ours + theirs:
        host.open_new(name, 0o600).close()
    reap_temporaries(host, receipt)
    assert [name for name in ours if host.lexists(name)] == []
    assert not host.lexists(f"/etc/.dir.{token}.tmp"), "a directory that was being removed"
    assert [name for name in theirs if host.lexists(name)] == theirs


def test_a_temporary_name_tells_what_it_is_for(host: FaultHost) -> None:
    for name in ("file", "a.b.tmp", ".hidden", "caf\udce9", "two\nlines"):
        assert host.temporary_of(host.temporary_name(f"/etc/{name}").name) == name
    for name in ("", "file", ".file.tmp", "..tmp", f".{os.urandom(8).hex()}.tmp"):
        assert host.temporary_of(name) is None
