"""Ending what outlives containerd: our shims by their address, and no process of anybody else's (row 51).

The processes are real: ``sleep`` under the names and arguments that shims have.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratum.errors import StratumError
from stratum.node import containerd, pods, reaper
from stratum.system import Host, HostPath
from tests.fakes import MachineHost, make_tree

OURS = str(containerd.ADDRESS)
DOCKERS = "/run/containerd/containerd.sock"


class Processes:
    """Starts processes and ends those that are left."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self.children: list[int] = []

    def start(self, *argv: str) -> subprocess.Popen[bytes]:
        """A process that sleeps under this command line."""
        script = 'exec -a "$0" sh -c \'read x\' "$@"'
        process = subprocess.Popen(["/bin/bash", "-c", script, *argv], stdin=subprocess.PIPE)
        self.started.append(process)
        self._wait(process, argv[0])
        return process

    def family(self, *argv: str) -> tuple[subprocess.Popen[bytes], int]:
        """The same, with a child that runs on its own; the child's pid."""
        script = 'exec -a "$0" sh -c \'sleep 300 >&2 & echo $!; read x\' "$@"'
        process = subprocess.Popen(["/bin/bash", "-c", script, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.started.append(process)
        assert process.stdout
        child = int(process.stdout.readline())
        self.children.append(child)
        self._wait(process, argv[0])
        return process, child

    def _wait(self, process: subprocess.Popen[bytes], name: str) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = reaper.read_process(Host(), process.pid)
            if found and found.argv[0] == name:
                return
            time.sleep(0.005)
        raise AssertionError(f"{name} did not start")

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for pid in self.children:
            if runs(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.close()


@pytest.fixture
def live() -> Host:
    return Host("/", environ={})


def ends(process: subprocess.Popen[bytes]) -> int:
    return process.wait(timeout=60)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def only(live: Host, *processes: subprocess.Popen[bytes]) -> list[reaper.Process]:
    found = [reaper.read_process(live, process.pid) for process in processes]
    return [item for item in found if item]


# -- finding --------------------------------------------------------------------------------------------


def test_a_shim_is_found_by_the_socket_it_was_started_for(live: Host, processes: Processes) -> None:
    ours = [
        processes.start("containerd-shim-foo-v2", "-namespace", "default", "-address", OURS),
        processes.start("/opt/stratum/node/current/bin/containerd-shim-runc-v2", "-address", OURS, "-id", "x"),
        processes.start("containerd-shim-spin-v2", f"--address={OURS}"),
    ]
    others = [
        processes.start("containerd-shim-foo-v2", "-namespace", "moby", "-address", DOCKERS),
        processes.start("containerd-shim-runc-v2", "-address", f"{OURS}.old"),
        processes.start("containerd-shim-runc-v2", "-address"),
        processes.start("containerd-shim-runc-v2"),
        processes.start("sleepy", "-address", OURS),
        processes.start("vim", "containerd-shim-runc-v2", "-address", OURS),
    ]
    found = reaper.find_shims(only(live, *ours, *others), containerd.ADDRESS)
    assert {process.pid for process in found} == {process.pid for process in ours}


def test_the_whole_process_table_is_read_and_holds_this_process(live: Host) -> None:
    everybody = {process.pid: process for process in reaper.read_processes(live)}
    assert everybody[os.getpid()].parent == os.getppid()
    assert everybody[os.getpid()].argv


def test_descendants_are_found_whatever_they_are_called(live: Host, processes: Processes) -> None:
    shim, child = processes.family("containerd-shim-foo-v2", "-address", OURS)
    everybody = reaper.read_processes(live)
    found = reaper.with_descendants(everybody, reaper.find_shims(only(live, shim), containerd.ADDRESS))
    assert [process.pid for process in found] == [shim.pid, child]


def process(pid: int, parent: int, *argv: str, started: int = 1) -> reaper.Process:
    return reaper.Process(pid, parent, started, argv or ("x",))


def test_a_loop_in_what_was_read_is_no_endless_search() -> None:
    everybody = [process(1, 3), process(2, 1), process(3, 2)]
    assert [item.pid for item in reaper.with_descendants(everybody, everybody[:1])] == [1, 2, 3]


@pytest.mark.parametrize(
    ("stat", "cmdline", "argv"),
    [
        (b"7 (a (b) c) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0", b"a\0b c\0\0d\0", ("a", "b c", "", "d")),
        (b"7 (\xff\n) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0", b"\xff\0", ("\udcff",)),
        (b"7 (kthread) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0", b"", ("",)),
    ],
)
def test_names_of_processes_may_hold_anything(
    tmp_path: Path, stat: bytes, cmdline: bytes, argv: tuple[str, ...]
) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/stat").write_bytes(stat)
    (tmp_path / "proc/7/cmdline").write_bytes(cmdline)
    host = Host(str(tmp_path), {})
    assert reaper.read_processes(host) == [reaper.Process(7, 1, 4242, argv)]
    assert reaper.find_shims(reaper.read_processes(host), containerd.ADDRESS) == []


@pytest.mark.parametrize("stat", [b"", b"7", b"7 (x)", b"7 (x) S", b"7 (x) S one"])
def test_a_process_that_ends_while_it_is_read_is_none(tmp_path: Path, stat: bytes) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/stat").write_bytes(stat)
    (tmp_path / "proc/7/cmdline").write_bytes(b"x\0")
    assert reaper.read_processes(Host(str(tmp_path), {})) == []


def test_a_tree_without_proc_has_no_processes(tmp_path: Path) -> None:
    assert reaper.read_processes(Host(str(tmp_path), {})) == []


# -- ending ---------------------------------------------------------------------------------------------


def test_our_shim_and_its_children_end_and_dockers_shim_lives(live: Host, processes: Processes) -> None:
    ours, child = processes.family("containerd-shim-foo-v2", "-namespace", "default", "-address", OURS)
    dockers, other = processes.family("containerd-shim-foo-v2", "-namespace", "moby", "-address", DOCKERS)
    everybody = reaper.read_processes(live)
    table = [item for item in everybody if item.pid in (ours.pid, child, dockers.pid, other)]
    doomed = reaper.with_descendants(table, reaper.find_shims(table, containerd.ADDRESS))
    # The shim is our own child and stays a zombie until it is waited for.
    assert reaper.end_processes(live, doomed) == []
    assert ends(ours) == -signal.SIGKILL
    assert not runs(child)
    assert dockers.poll() is None and runs(other)


def test_a_process_that_got_the_number_of_another_is_never_hit(live: Host, processes: Processes) -> None:
    bystander = processes.start("containerd-shim-foo-v2", "-address", OURS)
    (seen,) = only(live, bystander)
    earlier = reaper.Process(seen.pid, seen.parent, seen.started - 1, seen.argv)
    reaper.kill_process(live, earlier)
    assert reaper.end_processes(live, [earlier]) == []
    assert bystander.poll() is None
    reaper.kill_process(live, seen)
    assert ends(bystander) == -signal.SIGKILL


def test_a_process_that_is_gone_is_fine(live: Host, processes: Processes) -> None:
    shim = processes.start("containerd-shim-foo-v2", "-address", OURS)
    (seen,) = only(live, shim)
    shim.kill()
    shim.wait()
    reaper.kill_process(live, seen)
    assert reaper.end_processes(live, [seen]) == []


@pytest.mark.parametrize("missing", ["ENOSYS", "function"])
def test_without_pidfds_the_number_is_used_after_the_same_look(
    live: Host, processes: Processes, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Linux before 5.3 has none, and a CPython that was built with older headers has no such function."""

    def fail(_pid: int) -> int:
        raise OSError(38, "Function not implemented")

    if missing == "function":
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", fail)
    shim = processes.start("containerd-shim-foo-v2", "-address", OURS)
    (seen,) = only(live, shim)
    reaper.kill_process(live, reaper.Process(seen.pid, seen.parent, seen.started - 1, seen.argv))
    assert shim.poll() is None
    reaper.kill_process(live, seen)
    assert ends(shim) == -signal.SIGKILL


def test_killing_leaves_no_descriptor_open(live: Host, processes: Processes) -> None:
    shim = processes.start("containerd-shim-foo-v2", "-address", OURS)
    (seen,) = only(live, shim)
    before = len(os.listdir("/proc/self/fd"))
    reaper.kill_process(live, reaper.Process(seen.pid, seen.parent, seen.started - 1, seen.argv))
    reaper.kill_process(live, seen)
    ends(shim)
    reaper.kill_process(live, seen)
    assert len(os.listdir("/proc/self/fd")) == before


def test_every_process_is_tried_and_each_failure_is_named(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "root", live=True)
    host = MachineHost(str(root), {})
    tried = []

    def kill(_host: Host, item: reaper.Process) -> None:
        tried.append(item.pid)
        if item.pid == 1:
            raise PermissionError(1, "Operation not permitted")

    errors = reaper.end_processes(host, [process(1, 0, "a"), process(2, 0, "b")], kill)
    assert tried == [1, 2]
    assert [error.message for error in errors] == ["process 1 (a): Operation not permitted"]


def test_a_process_that_survives_is_waited_for_only_so_long(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "root", live=True)
    _proc(root, 7, "containerd-shim-foo-v2", "-address", OURS)
    host = MachineHost(str(root), {})
    start = host.clock
    (error,) = reaper.end_processes(host, reaper.read_processes(host), lambda *_: None)
    assert "process 7 (containerd-shim-foo-v2): still there" in error.message
    assert 5 < host.clock - start < 60


def test_a_directory_tree_never_signals_a_process(tmp_path: Path, processes: Processes) -> None:
    bystander = processes.start("containerd-shim-foo-v2", "-address", OURS)
    _proc(tmp_path, bystander.pid, "containerd-shim-foo-v2", "-address", OURS)
    host = Host(str(tmp_path), {})
    with pytest.raises(RuntimeError):
        reaper.kill_process(host, reaper.read_processes(host)[0])
    assert bystander.poll() is None


# -- pods -----------------------------------------------------------------------------------------------


def _proc(root: Path, pid: int, *argv: str, parent: int = 1, cgroup: str = "/") -> None:
    place = root / f"proc/{pid}"
    place.mkdir(parents=True)
    place.joinpath("stat").write_text(f"{pid} (x) S {parent} " + "0 " * 17 + "4242 0")
    place.joinpath("cmdline").write_text("\0".join(argv) + "\0")
    place.joinpath("cgroup").write_text(f"1:name=systemd:/x\n0::{cgroup}\n")


@pytest.fixture
def machine(tmp_path: Path) -> MachineHost:
    root = make_tree(tmp_path / "root", live=True)
    unit = "/system.slice/stratum-containerd.service"
    _proc(root, 10, "containerd-shim-runc-v2", "-address", OURS, cgroup=unit)
    _proc(root, 11, "pause", parent=10, cgroup="/kubepods.slice/pod1/a")
    _proc(root, 12, "app", parent=11, cgroup="/kubepods.slice/pod1/b")
    _proc(root, 13, "other", parent=10, cgroup="/system.slice/stratum.service")
    _proc(root, 14, "root", parent=10, cgroup="/")
    _proc(root, 20, "containerd-shim-runc-v2", "-address", DOCKERS, cgroup="/system.slice/docker.service")
    _proc(root, 21, "theirs", parent=20, cgroup="/docker/x")
    for name in ("kubepods.slice/pod1/a", "kubepods.slice/pod1/b", "docker/x", "system.slice/stratum.service"):
        (root / "sys/fs/cgroup" / name).mkdir(parents=True)
        (root / "sys/fs/cgroup" / name / "cgroup.kill").touch()
    (root / "sys/fs/cgroup/cgroup.kill").touch()
    return MachineHost(str(root), {})


def test_only_the_cgroups_of_our_containers_are_killed(machine: MachineHost) -> None:
    found = pods.find_pods(machine)
    assert [item.pid for item in found] == [10, 11, 13, 14, 12]
    assert pods.pod_cgroups(machine, found) == [
        HostPath("/sys/fs/cgroup/kubepods.slice/pod1/a"),
        HostPath("/sys/fs/cgroup/kubepods.slice/pod1/b"),
    ]


def test_ending_pods_kills_their_cgroups_and_processes_and_nobody_elses(machine: MachineHost) -> None:
    assert pods.end_pods(machine) == []
    root = Path(machine.root, "sys/fs/cgroup")
    killed = sorted(str(path.parent.relative_to(root)) for path in root.rglob("cgroup.kill") if path.read_text())
    assert killed == ["kubepods.slice/pod1/a", "kubepods.slice/pod1/b"]
    assert sorted(machine.commands) == [f"kill {pid}" for pid in (10, 11, 12, 13, 14)]
    assert sorted(name for name in os.listdir(Path(machine.root, "proc")) if name.isdigit()) == ["20", "21"]
    assert pods.end_pods(machine) == []


def test_a_kernel_without_cgroup_kill_still_ends_the_processes(machine: MachineHost) -> None:
    for path in Path(machine.root, "sys/fs/cgroup").rglob("cgroup.kill"):
        path.unlink()
    assert pods.end_pods(machine) == []
    assert "kill 12" in machine.commands


def test_without_our_shims_nothing_is_looked_at_further(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "root", live=True)
    _proc(root, 20, "containerd-shim-runc-v2", "-address", DOCKERS)
    host = MachineHost(str(root), {})
    assert pods.end_pods(host) == []
    assert host.mutations == []


def test_a_group_that_cannot_be_killed_is_an_error_and_the_rest_goes_on(machine: MachineHost) -> None:
    def refuse(path: object, data: bytes) -> None:
        raise PermissionError(1, "Operation not permitted")

    machine.write_control = refuse  # type: ignore[method-assign, assignment]
    errors = pods.end_pods(machine)
    assert len(errors) == 2
    assert all(isinstance(error, StratumError) and "cgroup" in error.message for error in errors)
    assert "kill 10" in machine.commands
