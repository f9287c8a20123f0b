"""Ending what outlives containerd: its shims, and the processes below them (seed 000, Destroy).

A shim is found by the socket that it was started for, never by its name alone: another containerd of the host
has shims of the same name. Processes are signalled through a pidfd, so a pid that was given to somebody else
meanwhile is never hit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Callable, Optional

from stratum.errors import StratumError
from stratum.system import Host, HostPath

__all__ = ["Process", "end_processes", "find_shims", "kill_process", "with_descendants"]

PROC = HostPath("/proc")
_GONE_TIMEOUT = 10.0


@dataclass(frozen=True)
class Process:
    """A process of the host. ``started`` is its start time in clock ticks, which tells it from a later pid."""

    pid: int
    parent: int
    started: int
    argv: tuple[str, ...]


def read_process(host: Host, pid: int) -> Optional[Process]:
    """What /proc says of a process, or None when it is gone. Fields of ``stat``: proc(5)."""
    try:
        # The command name may hold spaces and parentheses; the fields start after the last one.
        fields = host.read_text(PROC / str(pid) / "stat").rpartition(")")[2].split()
        argv = host.read_bytes(PROC / str(pid) / "cmdline").rstrip(b"\0").split(b"\0")
        return Process(pid, int(fields[1]), int(fields[19]), tuple(os.fsdecode(word) for word in argv))
    except (OSError, IndexError, ValueError):
        return None


def read_processes(host: Host) -> list[Process]:
    """Every process of the host; none where there is no procfs, as in a directory tree."""
    if not host.is_dir(PROC):
        return []
    found = (read_process(host, int(name)) for name in host.listdir(PROC) if name.isdigit())
    return [process for process in found if process]


def _address(argv: tuple[str, ...]) -> Optional[str]:
    for position, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name in ("-address", "--address"):
            return value if equals else (argv[position + 1] if position + 1 < len(argv) else None)
    return None


def find_shims(processes: Iterable[Process], address: HostPath) -> list[Process]:
    """The containerd shims that were started for the containerd at ``address``."""
    return [
        process
        for process in processes
        if HostPath(process.argv[0] or "?").name.startswith("containerd-shim")
        and _address(process.argv) == str(address)
    ]


def with_descendants(processes: Iterable[Process], roots: Iterable[Process]) -> list[Process]:
    """``roots`` and every process below them, roots first."""
    everybody = list(processes)
    found = list(roots)
    for process in found:
        found += [child for child in everybody if child.parent == process.pid and child not in found]
    return found


def kill_process(host: Host, process: Process) -> None:
    """SIGKILL to ``process`` if it still is the one that was found; raises OSError."""

    def same() -> bool:
        now = read_process(host, process.pid)
        return now is not None and now.started == process.started

    host.kill(process.pid, same)


def end_processes(
    host: Host, processes: list[Process], kill: Callable[[Host, Process], None] = kill_process
) -> list[StratumError]:
    """Kill ``processes`` and wait until they are gone; every one is tried, what failed is returned."""
    errors: list[StratumError] = []
    for process in processes:
        try:
            kill(host, process)
        except OSError as error:
            errors.append(StratumError("kill-failed", f"process {process.pid} ({process.argv[0]}): {error.strerror}"))
    deadline = host.monotonic() + _GONE_TIMEOUT
    left = processes
    while left and host.monotonic() < deadline:
        left = [process for process in left if _alive(host, process)]
        if left:
            host.sleep(0.05)
    errors += [
        StratumError(
            "process-stays",
            f"process {process.pid} ({process.argv[0]}): still there after SIGKILL",
            hint="look for a hung disk or network mount (ps -o pid,stat,wchan)",
        )
        for process in left
    ]
    return errors


def _alive(host: Host, process: Process) -> bool:
    now = read_process(host, process.pid)
    # A zombie has no command line: it is dead and waits for its parent.
    return now is not None and now.started == process.started and now.argv != ("",)
