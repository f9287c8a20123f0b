"""What the machines of the lab have in common: commands, results, errors.

A machine runs a command in all of its own namespaces with a clean
environment, and hands back the true exit status. Tests are written against
``Machine``, so most of them could run in either tier.
"""

from __future__ import annotations

import abc
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Optional, TypeVar, Union

STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: What a command in a machine sees when the test says nothing else.
ROOT_ENV: Mapping[str, str] = {"PATH": STANDARD_PATH, "HOME": "/root", "LANG": "C.UTF-8"}

#: What cloud-init gives to its scripts: no HOME, no locale, no /usr/local.
BARE_ENV: Mapping[str, str] = {"PATH": "/usr/bin:/bin"}

Argument = Union[str, Path, PurePosixPath]
Self = TypeVar("Self", bound="Machine")


class LabError(Exception):
    """The lab itself failed: a tool is missing, a machine did not boot."""


class CommandFailed(LabError):
    """A command in a machine had an exit status that the test did not expect."""

    def __init__(self, machine: str, result: Result) -> None:
        self.result = result
        super().__init__(f"on {machine}: {result.describe()}")


class CommandTimeout(LabError):
    """A command in a machine did not end in time; it was killed."""


@dataclass(frozen=True)
class Result:
    """What a command left: ``status`` is negative if a signal ended it."""

    argv: tuple[str, ...]
    status: int
    raw_stdout: bytes
    raw_stderr: bytes
    seconds: float

    @property
    def stdout(self) -> str:
        """Standard output as text."""
        return self.raw_stdout.decode("utf-8", "backslashreplace")

    @property
    def stderr(self) -> str:
        """Standard error as text."""
        return self.raw_stderr.decode("utf-8", "backslashreplace")

    @property
    def lines(self) -> list[str]:
        """The lines of standard output."""
        return self.stdout.splitlines()

    def describe(self) -> str:
        """Make a report for a person: command, status, both outputs."""
        parts = [f"{shlex.join(self.argv)}: exit status {self.status} after {self.seconds:.1f} s"]
        for title, text in (("stdout", self.stdout), ("stderr", self.stderr)):
            if text.strip():
                parts.append(f"--- {title}\n{text.rstrip()}")
        return "\n".join(parts)


class Machine(abc.ABC):
    """A machine of the lab, used as a context manager; leaving it removes it."""

    name: str

    #: Seconds that a command may take when the test says nothing.
    patience: float = 120.0

    @abc.abstractmethod
    def start(self) -> None:
        """Boot, and wait until systemd says that it is done."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Remove the machine and everything that it made outside of itself."""

    @abc.abstractmethod
    def reboot(self, timeout: float = ...) -> None:
        """Ask the machine's systemd for a reboot and wait for the next boot."""

    @abc.abstractmethod
    def power_cut(self, timeout: float = ...) -> None:
        """Take the power away with no warning, give it back, wait for the boot."""

    @abc.abstractmethod
    def console(self) -> str:
        """Return what the machine has written to its console so far."""

    @abc.abstractmethod
    def _execute(
        self,
        argv: tuple[str, ...],
        timeout: float,
        sent: bytes,
        env: Mapping[str, str],
        cwd: str,
    ) -> Result:
        """Run one command in the machine."""

    @abc.abstractmethod
    def copy_in(self, source: Path, target: Argument, mode: int = 0o644) -> None:
        """Copy a file of this machine into the machine."""

    @abc.abstractmethod
    def keep(self, directory: Path) -> None:
        """Save console and disk in a directory, to look at after a failure."""

    def run(
        self,
        argv: Sequence[Argument],
        *,
        timeout: Optional[float] = None,
        input: Union[bytes, str] = b"",  # noqa: A002 -- the name that subprocess has for it
        env: Optional[Mapping[str, str]] = None,
        cwd: str = "/root",
        check: bool = True,
    ) -> Result:
        """Run a command as root in the machine and wait for it.

        ``env`` is the whole environment (default ``ROOT_ENV``). Processes that
        the command leaves behind live on; they do not hold this call back.

        :param timeout: seconds, by default ``patience``; the command is killed then.
        :raises CommandFailed: if ``check`` and the exit status is not 0.
        :raises CommandTimeout: if it did not end in time.
        """
        sent = input.encode() if isinstance(input, str) else input
        words = tuple(str(word) for word in argv)
        limit = self.patience if timeout is None else timeout
        result = self._execute(words, limit, sent, ROOT_ENV if env is None else env, cwd)
        if check and result.status != 0:
            raise CommandFailed(self.name, result)
        return result

    def sh(self, script: str, **options: object) -> Result:
        """Run a shell script with ``set -eu``; the options are those of ``run``."""
        return self.run(["sh", "-euc", script], **options)  # type: ignore[arg-type]

    def write(self, target: Argument, content: Union[bytes, str], mode: int = 0o644) -> None:
        """Write a file in the machine, with its directories."""
        script = 'mkdir -p "${1%/*}/"; cat >"$1"; chmod "$2" "$1"'
        self.run(["sh", "-euc", script, "sh", target, f"{mode:o}"], input=content)

    def read(self, path: Argument) -> str:
        """Read a file of the machine as text."""
        return self.run(["cat", path]).stdout

    def exists(self, path: Argument) -> bool:
        """Say whether a path exists in the machine; a dangling link does too."""
        script = 'test -e "$1" || test -L "$1"'
        return self.run(["sh", "-c", script, "sh", path], check=False).status == 0

    def kill(self, pid: int, signal: str = "KILL") -> None:
        """Send a signal to a process, by its id inside the machine."""
        self.run(["kill", f"-{signal}", str(pid)])

    def boot_id(self) -> str:
        """Return the id of this boot."""
        return self.read("/proc/sys/kernel/random/boot_id").strip()

    def failure_report(self) -> str:
        """Return the end of console and journal; never raises."""
        parts = [f"console of {self.name}:", *self.console().splitlines()[-60:]]
        try:
            journal = self.run(["journalctl", "-b", "--no-pager", "-n", "120"], timeout=30, check=False)
            parts += ["journal:", journal.stdout]
        except Exception as error:
            parts += [f"no journal: {error}"]
        return "\n".join(parts)

    def __enter__(self: Self) -> Self:
        try:
            self.start()
        except BaseException as error:
            console = "\n".join(self.console().splitlines()[-60:])
            self.stop()
            if isinstance(error, LabError):
                raise LabError(f"{error}\n--- console of {self.name}\n{console}") from error
            raise
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.stop()


def plain(console: bytes) -> str:
    """Return what a console shows, without colours and carriage returns."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", console.decode(errors="replace"))


def wait_until(what: str, condition: Callable[[], bool], timeout: float, pause: float = 0.05) -> None:
    """Wait until a condition holds.

    :param timeout: seconds.
    :param pause: seconds between two looks.
    :raises LabError: if it does not hold in time.
    """
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise LabError(f"waited {timeout:.0f} s in vain: {what}")
        time.sleep(pause)
