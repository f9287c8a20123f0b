"""Machines under systemd-nspawn: real systemd on this kernel, up in a second.

The root is an overlay on a cached root, in memory; ``/var/lib`` is a plain
tmpfs, because containerd's snapshots cannot lie on an overlay. There is one
network interface, ``lo``. Everything that a machine makes outside of itself is
in a private mount, process and network namespace that ends with it, but for
its cgroup, which ``stop`` removes.

What it cannot show: a kernel of its own. Modules, sysctls outside
``/proc/sys/net``, real power cuts and, where cgroup v1 holds the controllers,
limits on containers belong under qemu. There ``ctr run`` needs
``--cpu-shares 0``: its default of 1024 wants ``cpu.weight``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Optional

from tests.lab import tools
from tests.lab.machine import ROOT_ENV, Argument, CommandTimeout, LabError, Machine, Result, plain, wait_until

_SUPERVISOR = Path(__file__).with_name("nspawn-supervisor.sh")
_PREFIX = "stratum-lab-"
_numbers = itertools.count(1)

# Puts itself in a cgroup of the machine, so that the command sees no other.
_ENTER = 'echo $$ >"$1/cgroup.procs"; shift; unset PWD; exec "$@"'


class NspawnMachine(Machine):
    """A machine under systemd-nspawn.

    :param root: a root directory of ``tests.lab.roots``; it is only read.
    :param size: how much the machine may write, as tmpfs takes it.
    :param boot: without it PID 1 is no systemd but a program that only sleeps.
    :param cgroup: 2, or 1 for a machine that has only the old hierarchy.
    """

    def __init__(
        self, root: Path, name: str = "machine", *, size: str = "3g", boot: bool = True, cgroup: int = 2
    ) -> None:
        self.name = name
        self._root = root
        self._size = size
        self._boot = boot
        self._cgroup = cgroup
        self._unit = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self._runs = itertools.count(1)
        self._supervisor: Optional[subprocess.Popen[bytes]] = None
        self._console: Optional[IO[bytes]] = None
        self._init: Optional[int] = None

    def start(self) -> None:
        """Boot, and wait until systemd says that it is done."""
        tools.require("systemd-nspawn", "unshare", "nsenter", "setpriv")
        remove_stale_cgroups()
        self._console = tempfile.TemporaryFile(prefix="stratum-lab-console-")  # noqa: SIM115 -- stop closes it
        what = ["--boot"] if self._boot else ["--as-pid2", "sleep", "infinity"]
        # If this process dies in whatever way, the kernel kills the supervisor, and with it the rest.
        self._supervisor = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork",
             "--kill-child=KILL", "--mount-proc", "sh", str(_SUPERVISOR), str(self._root), self._unit,
             self._size, "1" if self._cgroup == 2 else "0", *what],
            stdin=subprocess.DEVNULL, stdout=self._console, stderr=self._console, start_new_session=True,
            env=dict(os.environ, PATH=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"),
        )
        self._wait_ready(180)

    def stop(self) -> None:
        """Kill the machine and remove its cgroup; mounts and interfaces end with it."""
        if self._supervisor is not None:
            # The first process of the namespace takes all the others with it.
            with contextlib.suppress(OSError):
                for child in _children(self._supervisor.pid):
                    os.kill(child, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(timeout=20)
            self._supervisor.kill()
            self._supervisor.wait()
            self._supervisor = None
        self._init = None
        for tree in _cgroup_trees():
            _remove_cgroup(tree / self._unit)
        if self._console is not None:
            self._console.close()
            self._console = None

    def reboot(self, timeout: float = 180) -> None:
        """Ask the machine's systemd for a reboot and wait for the next boot."""
        before = self._require_init()
        self.run(["systemctl", "reboot"], check=False)
        wait_until("the machine shuts down", lambda: not _alive(before), timeout)
        self._wait_ready(timeout)

    def power_cut(self, timeout: float = 180) -> None:
        """Kill every process of the machine at once and boot it again.

        Other than with a real power cut, nothing that was written is lost.
        """
        before = self._require_init()
        self._inside("run/machine/power").touch()
        os.kill(before, signal.SIGKILL)
        wait_until("the machine is dead", lambda: not _alive(before), timeout)
        self._wait_ready(timeout)

    def console(self) -> str:
        """Return what the machine has written to its console so far."""
        if self._console is None:
            return ""
        with open(f"/proc/self/fd/{self._console.fileno()}", "rb") as log:
            return plain(log.read())

    def path_in_machine(self, path: Argument) -> Path:
        """Return where a path of the machine is for a program of the outer machine.

        Valid for this boot. An absolute link on the way leads out of the machine.
        """
        return Path(f"/proc/{self._require_init()}/root") / str(path).lstrip("/")

    def copy_in(self, source: Path, target: Argument, mode: int = 0o644) -> None:
        """Copy a file of the outer machine into the machine, with its directories."""
        script = 'mkdir -p "${1%/*}/"; cat >"$1"; chmod "$2" "$1"'
        with open(source, "rb") as stream, self.popen(
            ["sh", "-euc", script, "sh", target, f"{mode:o}"], stdin=stream, stderr=subprocess.PIPE
        ) as process:
            _, words = process.communicate(timeout=300)
        if process.returncode != 0:
            raise LabError(f"on {self.name}: cannot write {target}: {words.decode(errors='replace')}")

    def copy_tree_in(self, source: Path, target: Argument) -> None:
        """Copy what is in a directory of the outer machine into one of the machine."""
        # Another test process may write bytecode there meanwhile, which tar takes for an error.
        argv = ["tar", "-C", str(source), "-cf", "-", "--exclude=__pycache__", "."]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as pack:
            script = 'mkdir -p "$1"; exec tar -C "$1" -xf - --keep-directory-symlink --no-overwrite-dir'
            with self.popen(["sh", "-euc", script, "sh", target], stdin=pack.stdout) as unpack:
                unpack.wait(timeout=300)
        if pack.returncode or unpack.returncode:
            raise LabError(f"on {self.name}: cannot copy {source} to {target}")

    def popen(
        self,
        argv: Sequence[Argument],
        *,
        env: Optional[Mapping[str, str]] = None,
        cwd: str = "/root",
        stdin: object = subprocess.DEVNULL,
        stdout: object = None,
        stderr: object = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command in the machine; use ``signal_to`` to send it a signal."""
        return self._popen(self._new_run(), argv, ROOT_ENV if env is None else env, cwd, stdin, stdout, stderr)

    def signal_to(self, process: subprocess.Popen[bytes], number: int) -> None:
        """Send a signal to the command that ``popen`` started, not to its children."""
        for child in _children(process.pid):
            os.kill(child, number)

    def keep(self, directory: Path) -> None:
        """Save the console and all that the machine has written."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "console.log").write_text(self.console())
        for place, name in (("upper", "root"), ("varlib/upper", "var-lib")):
            shutil.rmtree(directory / name, ignore_errors=True)
            tools.tool(["cp", "-a", str(self._inside(f"run/machine/{place}")), str(directory / name)], timeout=300)

    def _execute(
        self, argv: tuple[str, ...], timeout: float, sent: bytes, env: Mapping[str, str], cwd: str
    ) -> Result:
        group = self._new_run()
        begin = time.monotonic()
        # Files, not pipes: a daemon that the command leaves behind would hold a pipe open.
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            stdin.write(sent)
            stdin.seek(0)
            process = self._popen(group, argv, env, cwd, stdin, out, err)
            try:
                status = process.wait(timeout=timeout)
            except BaseException as error:
                (group / "cgroup.kill").write_text("1")
                process.kill()
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                out.seek(0)
                err.seek(0)
                late = Result(argv, -signal.SIGKILL, out.read(), err.read(), time.monotonic() - begin)
                raise CommandTimeout(f"on {self.name}, killed: {late.describe()}") from error
            finally:
                with contextlib.suppress(OSError):
                    group.rmdir()
            out.seek(0)
            err.seek(0)
            return Result(argv, status, out.read(), err.read(), time.monotonic() - begin)

    def _popen(
        self, group: Path, argv: Sequence[Argument], env: Mapping[str, str], cwd: str,
        stdin: object, stdout: object, stderr: object,
    ) -> subprocess.Popen[bytes]:
        enter = ["nsenter", f"--target={self._require_init()}", "--mount", "--uts", "--ipc", "--net", "--pid",
                 "--cgroup", "--root", f"--wdns={cwd}", "--"]
        process: subprocess.Popen[bytes] = subprocess.Popen(
            ["/bin/sh", "-ec", _ENTER, "sh", str(group), *enter, *(str(word) for word in argv)],
            stdin=stdin, stdout=stdout, stderr=stderr, env=dict(env), start_new_session=True,  # type: ignore[call-overload]
        )
        return process

    def _new_run(self) -> Path:
        """Make a cgroup for one command, beside those of the machine's systemd."""
        payload = self._tree() / self._unit / "nspawn" / "payload"
        group = payload / "lab" / str(next(self._runs))
        group.mkdir(parents=True)
        return group

    def _tree(self) -> Path:
        return self._inside("sys/fs/cgroup" if self._cgroup == 2 else "sys/fs/cgroup/systemd")

    def _inside(self, path: str) -> Path:
        """Return where a path of the supervisor's own mount namespace is."""
        if self._supervisor is None:
            raise LabError(f"{self.name} is not running")
        for child in _children(self._supervisor.pid):
            return Path(f"/proc/{child}/root/{path}")
        raise LabError(f"{self.name} has stopped")

    def _require_init(self) -> int:
        if self._init is None or not _alive(self._init):
            raise LabError(f"{self.name} is not running")
        return self._init

    def _wait_ready(self, timeout: float) -> None:
        """Wait for the machine's first process, then for the end of its boot."""
        self._init = None
        wait_until(f"{self.name} gets its first process", self._find_init, timeout)
        if not self._boot:
            return
        states = ("running", "degraded")

        def booted() -> bool:
            state = self.run(["systemctl", "is-system-running", "--wait"], timeout=timeout, check=False)
            return state.stdout.strip() in states

        wait_until(f"{self.name} boots", booted, timeout)

    def _find_init(self) -> bool:
        """Find the outer process id of the machine's PID 1."""
        assert self._supervisor is not None
        if self._supervisor.poll() is not None:
            raise LabError(f"{self.name}: systemd-nspawn ended with status {self._supervisor.returncode}")
        wanted = ("systemd", "init") if self._boot else ("(sd-stubinit)", "sleep")
        for pid in _descendants(self._supervisor.pid):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                numbers = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                # Our namespace, the supervisor's, the machine's: in the last one it is number 1.
                if len(numbers) >= 3 and numbers[-1] == "1" and name in wanted:
                    self._init = pid
                    return True
        return False


def remove_stale_cgroups() -> None:
    """Remove the cgroups of machines whose test run was killed."""
    for tree in _cgroup_trees():
        for group in tree.glob(f"{_PREFIX}*"):
            if not Path("/proc", group.name.split("-")[2]).exists():
                _remove_cgroup(group)


def _cgroup_trees() -> list[Path]:
    """Return where cgroup v2 and the named v1 hierarchy are mounted here."""
    trees = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            trees.append(Path(place))
    return trees


def _remove_cgroup(group: Path) -> None:
    """Remove a tree of cgroups; its processes are dying already."""
    def empty() -> bool:
        for directory, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        return not group.exists()

    wait_until(f"{group} becomes empty", empty, 60, pause=0.02)


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/ns").exists()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)
