"""One run at a time, however the other one ends."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stratum.errors import AlreadyRunningError, ExitCode, StratumError
from stratum.lock import LOCK_PATH, hold_lock, remove_lock
from stratum.system import Host
from tests.fakes import MachineHost
from tests.pyz import ROOT

HOLD = """
import sys, time
sys.path.insert(0, {root!r})
from stratum.lock import hold_lock
from tests.fakes import MachineHost
with hold_lock(MachineHost({tree!r}, {{}}), "upgrade"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A live machine, where the file stays, in a tree of its own; its clock is the real one."""
    host = MachineHost(str(tmp_path), {})
    host.mkdir("/run")
    host.monotonic = time.monotonic  # type: ignore[method-assign]
    host.sleep = time.sleep  # type: ignore[method-assign]
    return host


def start_holder(host: Host) -> subprocess.Popen[str]:
    code = HOLD.format(root=str(ROOT), tree=host.root)
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_told_who_holds_the_lock(host: Host) -> None:
    process = start_holder(host)
    try:
        with pytest.raises(AlreadyRunningError) as caught, hold_lock(host, "up"):
            pytest.fail("two runs at once")
    finally:
        process.communicate("")
    assert f"{process.pid} upgrade" in caught.value.message
    assert caught.value.exit_code == ExitCode.LOCKED
    with hold_lock(host, "up"):
        pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_lock_goes_with_its_process_however_that_ends(host: Host, number: int) -> None:
    process = start_holder(host)
    process.send_signal(number)
    process.communicate()
    with hold_lock(host, "up"):
        assert host.read_text(LOCK_PATH) == f"{os.getpid()} up\n"


def test_a_run_may_wait_for_another_to_end(host: Host) -> None:
    process = start_holder(host)
    threading.Timer(0.3, lambda: process.communicate("")).start()
    start = time.monotonic()
    with hold_lock(host, "up --supervise", wait=20):
        assert 0.1 < time.monotonic() - start < 15
    process.wait()


def test_waiting_has_an_end(host: Host) -> None:
    process = start_holder(host)
    try:
        start = time.monotonic()
        with pytest.raises(AlreadyRunningError), hold_lock(host, "up", wait=0.3):
            pass
        assert 0.3 <= time.monotonic() - start < 10
    finally:
        process.communicate("")


def test_a_command_that_is_run_does_not_inherit_the_lock(tmp_path: Path) -> None:
    host = MachineHost(str(tmp_path), {})
    host.mkdir("/run")
    with hold_lock(host, "up"):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with hold_lock(host, "up"):
            pass
    finally:
        child.kill()
        child.wait()


def test_the_lock_is_given_back_when_the_work_fails(host: Host) -> None:
    with pytest.raises(KeyboardInterrupt), hold_lock(host, "up"):
        raise KeyboardInterrupt
    with hold_lock(host, "up"):
        pass


def test_only_root_can_open_the_lock(host: Host) -> None:
    before = os.umask(0)
    try:
        with hold_lock(host, "up"):
            assert stat.S_IMODE(host.stat(LOCK_PATH).st_mode) == 0o600
            assert stat.S_IMODE(host.stat(LOCK_PATH.parent).st_mode) == 0o755
    finally:
        os.umask(before)


def test_a_link_in_place_of_the_lock_is_not_followed(host: Host) -> None:
    host.makedirs(LOCK_PATH.parent)
    host.symlink("/run/victim", str(LOCK_PATH))
    host.open_new("/run/victim", 0o644).close()
    Path(host.root, "run/victim").write_text("precious")
    with pytest.raises(StratumError) as caught, hold_lock(host, "up"):
        pass
    assert str(LOCK_PATH) in caught.value.message
    assert host.read_text("/run/victim") == "precious"


def test_a_lock_whose_file_was_removed_meanwhile_keeps_others_out(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """An uninstall removes the file between our open and our lock: a lock on a name that is gone is none."""
    import fcntl

    before = fcntl.flock
    tries = []

    def flock(descriptor: int, how: int) -> None:
        before(descriptor, how)
        tries.append(descriptor)
        if len(tries) == 1:
            remove_lock(host)

    monkeypatch.setattr(fcntl, "flock", flock)
    with hold_lock(host, "up"):
        assert len(tries) == 2
        monkeypatch.setattr(fcntl, "flock", before)
        with pytest.raises(AlreadyRunningError), hold_lock(host, "up"):
            pass


def test_a_directory_that_an_uninstall_takes_away_is_made_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    before = host.makedirs
    calls = []

    def makedirs(path: object, mode: int = 0o755) -> object:
        made = before(str(path), mode)
        calls.append(path)
        if len(calls) == 1:
            remove_lock(host)
        return made

    monkeypatch.setattr(host, "makedirs", makedirs)
    with hold_lock(host, "up"):
        assert len(calls) == 2


@pytest.mark.parametrize("number", [30, 28, 13])
def test_a_run_directory_that_cannot_be_written_is_one_clear_error(host: Host, number: int) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    host.makedirs = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(StratumError) as caught, hold_lock(host, "up"):
        pass
    assert os.strerror(number) in caught.value.message
    assert caught.value.hint


def test_removing_the_lock_leaves_what_others_have_beside_it(host: Host) -> None:
    with hold_lock(host, "uninstall"):
        host.open_new(LOCK_PATH.parent / "other", 0o644).close()
        remove_lock(host)
    assert host.listdir(LOCK_PATH.parent) == ["other"]
    remove_lock(host)


def _fail() -> None:
    raise StratumError("x", "y")


@pytest.mark.parametrize("end", [lambda: None, _fail], ids=["done", "failed"])
@pytest.mark.parametrize("there", ["nothing", "/run", "/run/stratum"])
def test_a_directory_tree_shows_no_lock_afterwards(tmp_path: Path, there: str, end: Callable[[], None]) -> None:
    host = Host(str(tmp_path), {})
    if there != "nothing":
        host.makedirs(there)
    try:
        with hold_lock(host, "up"):
            assert host.exists(LOCK_PATH)
            with pytest.raises(AlreadyRunningError), hold_lock(host, "up"):
                pass
            assert host.exists(LOCK_PATH)
            end()
    except StratumError:
        pass
    assert host.listdir("/") == ([] if there == "nothing" else ["run"])
    assert there == "nothing" or host.listdir("/run") == []
