"""Machines under qemu: a kernel of their own, real reboots, real power cuts.

The processor is emulated (no /dev/kvm is needed), so a boot takes half a
minute and a Go program some seconds to start. The disk is a qcow2 overlay on
a cached raw disk. There is no network card at all; commands go through qemu's
guest agent on a virtio serial port. At most two machines run at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Optional

from tests.lab import tools
from tests.lab.agent import AgentError, Ended, GuestAgent
from tests.lab.machine import Argument, CommandTimeout, LabError, Machine, Result, plain
from tests.lab.roots import Disk

#: Seconds for a boot: four times what it takes on two slow cores.
BOOT = 240.0

_AT_ONCE = 2
_PREFIX = "vm-"
_numbers = itertools.count(1)

# Mitigations cost much and protect nobody in an emulator.
_KERNEL_OPTIONS = (
    "root=/dev/vda rw console=ttyS0 net.ifnames=0 quiet mitigations=off nokaslr tsc=reliable audit=0 panic=-1 "
    "systemd.show_status=1"
)

#: More words for a machine whose programs have time limits of their own: on a busy computer the processor's clock, as
#: the guest reads it, has been seen to run at more than twice its speed. This clock does not, and is slower to read.
STEADY_CLOCK = "clocksource=hpet"

# Files, not pipes: a daemon that the command leaves behind would hold a pipe open. A cgroup beside
# those of systemd: what the command leaves behind is no part of the agent, and all of it can be killed.
_RUN = """/usr/bin/mkdir -p "$1" && echo $$ >"$1/cgroup.procs" && in=$3 && cd "$2" && shift 3 &&
unset PWD OLDPWD && exec "$@" <"$in" >"$0.out" 2>"$0.err\""""
_COLLECT = 'cat "$0.out"; cat "$0.err" >&2; rm -f "$0.out" "$0.err" "$0.in"'


class QemuMachine(Machine):
    """A machine under qemu.

    :param disk: a disk of ``tests.lab.roots``; it is only read.
    :param files: what to put into the machine at its first boot: path in the
        machine to file of the outer machine. Fast also for big files.
    :param memory: MiB.
    :param options: more words for the kernel's command line.
    :param systemd: whether systemd is its PID 1; without it the machine is ready when its agent
        answers, and it can be stopped but not shut down.
    """

    patience = 400.0

    def __init__(
        self,
        disk: Disk,
        name: str = "vm",
        *,
        files: Optional[Mapping[str, Path]] = None,
        memory: int = 1024,
        options: str = "",
        systemd: bool = True,
    ) -> None:
        self.name = name
        self._disk = disk
        self._files = dict(files or {})
        self._memory = memory
        self._options = options
        self._systemd = systemd
        self._directory: Optional[Path] = None
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._agent: Optional[GuestAgent] = None
        self._slot: Optional[IO[str]] = None
        self._runs = itertools.count(1)

    def start(self) -> None:
        """Boot, put the files in, and wait until systemd says that it is done."""
        tools.require("qemu-system-x86_64", "qemu-img", "setpriv")
        home = tools.cache_directory() / "machines"
        home.mkdir(exist_ok=True)
        _remove_stale(home)
        self._slot = _take_slot(home)
        self._directory = home / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self._directory.mkdir(mode=0o700)
        tools.tool(
            ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(self._disk.image),
             str(self._directory / "disk.qcow2")], timeout=60,
        )
        files = self._pack_files()
        self._launch(BOOT, files)
        if files is not None:
            self.sh("tar -C / --no-overwrite-dir --keep-directory-symlink -xf /dev/vdb; sync", timeout=BOOT)

    def stop(self) -> None:
        """Kill qemu and remove the machine's disk."""
        self._kill()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        if self._slot is not None:
            self._slot.close()
            self._slot = None

    def power_on(self, timeout: float = BOOT) -> None:
        """Start qemu on the machine's disk and wait for the boot."""
        if self._process is not None and self._process.poll() is None:
            raise LabError(f"{self.name} is on already")
        self._launch(timeout, None)

    def _launch(self, timeout: float, files: Optional[Path]) -> None:
        ours, theirs = socket.socketpair()
        self._agent = GuestAgent(ours)
        with theirs, open(self.directory / "console.log", "ab") as console:
            self._process = subprocess.Popen(
                self._command(theirs.fileno(), files), stdin=subprocess.DEVNULL, stdout=console, stderr=console,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )
        self._wait_ready(timeout)

    def power_off(self, timeout: float = BOOT) -> None:
        """Ask the machine's systemd to power off and wait until qemu ends."""
        self._shut_down("poweroff", timeout)

    def power_cut(self, timeout: float = BOOT) -> None:
        """Kill qemu, so that what the guest has not synced is gone, and boot again."""
        self._require_process()
        self._kill()
        self.power_on(timeout)

    def reboot(self, timeout: float = BOOT) -> None:
        """Ask the machine's systemd for a reboot and wait for the next boot."""
        self._shut_down("reboot", timeout)
        self.power_on(timeout)

    def console(self) -> str:
        """Return what the machine has written to its console so far, all boots."""
        log = None if self._directory is None else self._directory / "console.log"
        if log is None or not log.exists():
            return ""
        return plain(log.read_bytes())

    def copy_in(self, source: Path, target: Argument, mode: int = 0o644) -> None:
        """Copy a file into the machine; big ones go faster as ``files``."""
        self.run(["mkdir", "-p", str(target).rpartition("/")[0] or "/"])
        self._require_agent().write_file(str(target), source.read_bytes())
        self.run(["chmod", f"{mode:o}", target])

    def keep(self, directory: Path) -> None:
        """Save console and disk; the disk needs the cached one that it lies on."""
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("console.log", "disk.qcow2"):
            shutil.copyfile(self.directory / name, directory / name)

    def _execute(
        self, argv: tuple[str, ...], timeout: float, sent: bytes, env: Mapping[str, str], cwd: str
    ) -> Result:
        self._require_process()
        number = next(self._runs)
        agent, base, stdin = self._require_agent(), f"/run/stratum-lab-{number}", "/dev/null"
        group = f"/sys/fs/cgroup/lab/{number}"
        begin = time.monotonic()
        if sent:
            stdin = f"{base}.in"
            agent.write_file(stdin, sent)
        pid = agent.begin(
            ["/bin/sh", "-c", _RUN, base, group, cwd, stdin, *argv],
            [f"{name}={value}" for name, value in env.items()], capture=False,
        )
        ended = self._wait_for(pid, timeout)
        if ended is None:
            self._shell('echo 1 >"$0/cgroup.kill"', group)
            self._wait_for(pid, 30)
        output = self._shell(_COLLECT, base)
        status = -signal.SIGKILL if ended is None else ended.status
        result = Result(argv, status, output.stdout, output.stderr, time.monotonic() - begin)
        if ended is None:
            raise CommandTimeout(f"on {self.name}, killed: {result.describe()}")
        return result

    def _shell(self, script: str, argument: str) -> Ended:
        """Run a short script of our own, whose output is small and ends with it."""
        ended = self._wait_for(self._require_agent().begin(["/bin/sh", "-c", script, argument], [], capture=True), 180)
        if ended is None:
            raise LabError(f"{self.name}: the guest hangs")
        return ended

    def _wait_for(self, pid: int, timeout: float) -> Optional[Ended]:
        """Wait for a program in the guest; None if it did not end in time."""
        end, pause = time.monotonic() + timeout, 0.02
        while True:
            ended = self._require_agent().ended(pid)
            if ended is not None or time.monotonic() > end:
                return ended
            time.sleep(pause)
            # Each look costs the guest some time, too.
            pause = min(0.5, pause * 1.5)

    def _shut_down(self, verb: str, timeout: float) -> None:
        """Ask the guest's systemd to end the boot, and wait for the end of qemu."""
        process = self._require_process()
        # The answer may never come.
        with contextlib.suppress(AgentError):
            self._require_agent().begin(["/usr/bin/systemctl", "--no-block", verb], [], capture=False)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise LabError(f"{self.name}: {verb} did not end within {timeout:.0f} s") from error
        if status != 0:
            raise LabError(f"{self.name}: qemu ended with status {status}")
        self._kill()

    def _wait_ready(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while True:
            self._require_process()
            try:
                self._require_agent().sync(5)
                break
            except AgentError as error:
                if time.monotonic() > end:
                    raise LabError(f"{self.name} did not boot within {timeout:.0f} s") from error
        if not self._systemd:
            return
        state = self.run(
            ["systemctl", "is-system-running", "--wait"], timeout=max(10.0, end - time.monotonic()), check=False
        )
        if state.stdout.strip() not in ("running", "degraded"):
            raise LabError(f"{self.name} did not boot: {state.describe()}")

    def _command(self, agent: int, files: Optional[Path]) -> list[str]:
        """Return the command line of qemu.

        :param agent: the file descriptor of the guest agent's connection.
        :param files: a disk with the files to put in.
        """
        disk = self.directory / "disk.qcow2"
        # With -no-reboot a reset ends qemu, and the next boot is a new one on the same disk.
        # cache=unsafe spares the outer disk; qemu still hands on what the guest syncs, and only that.
        drive = "if=virtio,cache=unsafe,discard=unmap"
        command = [
            # If this process dies in whatever way, the kernel kills qemu.
            "setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", "-nodefaults", "-no-user-config",
            "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max,la57=off,svm=off", "-smp", "2",
            "-m", str(self._memory), "-display", "none", "-nic", "none", "-no-reboot",
            "-serial", "stdio", "-monitor", "none",
            "-kernel", str(self._disk.kernel), "-initrd", str(self._disk.initrd),
            "-append", f"{_KERNEL_OPTIONS} {self._options}",
            "-drive", f"file={disk},format=qcow2,{drive}",
            "-device", "virtio-serial", "-chardev", f"socket,fd={agent},id=agent",
            "-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0", "-device", "virtio-rng-pci",
        ]
        if files is not None:
            command += ["-drive", f"file={files},format=raw,readonly=on,if=virtio"]
        return command

    def _pack_files(self) -> Optional[Path]:
        """Make a tar that serves as a disk: the guest reads it as it is."""
        if not self._files:
            return None
        target = self.directory / "files.tar"
        with tarfile.open(target, "w") as tar:
            for place, source in self._files.items():
                tar.add(source, place.lstrip("/"), filter=_of_root)
        return target

    @property
    def directory(self) -> Path:
        """Where the machine's disk and console are."""
        if self._directory is None:
            raise LabError(f"{self.name} is not running")
        return self._directory

    def _require_process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise LabError(f"{self.name} is not running")
        if self._process.poll() is not None:
            raise LabError(f"{self.name} is off: qemu ended with status {self._process.returncode}")
        return self._process

    def _require_agent(self) -> GuestAgent:
        if self._agent is None:
            raise LabError(f"{self.name} is not running")
        return self._agent

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._agent is not None:
            self._agent.close()
            self._agent = None


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry


def _take_slot(home: Path) -> IO[str]:
    """Wait until fewer than the allowed number of machines run on this computer."""
    while True:
        for number in range(_AT_ONCE):
            slot = open(home / f"slot{number}.lock", "w")  # noqa: SIM115 -- open as long as the machine lives
            try:
                fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return slot
            except BlockingIOError:
                slot.close()
        time.sleep(0.5)


def _remove_stale(home: Path) -> None:
    """Remove the disks of machines whose test run was killed."""
    for directory in home.glob(f"{_PREFIX}*-*"):
        if not Path("/proc", directory.name.split("-")[1]).exists():
            shutil.rmtree(directory, ignore_errors=True)
