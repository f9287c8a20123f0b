"""Stratum itself on the host: versioned copies of the pyz, the link that chooses one, and what runs it.

The unit goes by that link and not by the command on PATH: /usr may be read-only, and may be another mount.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from dataclasses import dataclass

from stratum import __version__
from stratum.errors import StratumError
from stratum.host.places import why_unwritable
from stratum.receipt import Condition, Entry
from stratum.steps import Action, Call, RemoveDirectory, Work, plan_directory, plan_link, withdraw
from stratum.system import Host, HostPath

__all__ = [
    "COMMAND",
    "CURRENT",
    "LINK",
    "PROGRAMS",
    "CopyProgram",
    "plan_program",
    "plan_prune",
    "program_argv",
    "supervisor_argv",
    "why_no_link",
]

PROGRAMS = HostPath("/opt/stratum/pyz")
CURRENT = PROGRAMS / "current"
COMMAND = CURRENT / "stratum.pyz"
LINK = HostPath("/usr/local/bin/stratum")  # for people
SYSTEM_PYTHON = "/usr/bin/python3"
_CHUNK = 1 << 20
_MODE = 0o755


def _archive_digest(archive: str) -> str:
    digest = hashlib.sha256()
    with open(archive, "rb") as file:
        for chunk in iter(lambda: file.read(_CHUNK), b""):
            digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def _name(digest: str) -> str:
    """The directory of a copy: version and content, so that every build has its own."""
    return f"{__version__}-{digest.partition(':')[2][:12]}"


@dataclass(frozen=True)
class CopyProgram(Action):
    """Copy the pyz that runs to its place. ``archive`` is a path of this process, not of the host's tree."""

    archive: str
    path: HostPath
    digest: str
    verb = "copy"

    @property
    def subject(self) -> str:
        """From where to where."""
        return f"{self.archive} -> {self.path}"

    def perform(self, work: Work) -> None:
        """Record it, copy it under a hidden name, sync, rename. Raises OSError, :class:`StratumError`."""
        host = work.host
        work.receipt.record(Entry(self.path, "file", (self.digest,), _MODE))
        temporary = host.temporary_name(self.path)
        try:
            digest = hashlib.sha256()
            with open(self.archive, "rb") as source, host.open_new(temporary, _MODE) as target:
                for chunk in iter(lambda: source.read(_CHUNK), b""):
                    digest.update(chunk)
                    target.write(chunk)
                host.fsync(target)
            if f"sha256:{digest.hexdigest()}" != self.digest:
                raise StratumError(
                    "program-changed", f"{self.archive}: changed while it was read", hint="run the command again"
                )
            host.rename(temporary, self.path)
        except BaseException:
            if host.lexists(temporary):
                host.unlink(temporary)
            raise
        host.fsync_dir(self.path.parent)


def why_no_link(host: Host) -> str:
    """Why the command cannot be put on PATH; empty when it can, or is there."""
    if host.is_link(LINK) and host.readlink(LINK) == str(COMMAND):
        return ""
    return why_unwritable(host, LINK.parent)


def plan_program(work: Work, archive: str) -> list[Action]:
    """The copy and the links; nothing when they are there. Where the command's link cannot be made, all but that."""
    digest = _archive_digest(archive)
    name = _name(digest)
    path = PROGRAMS / name / "stratum.pyz"
    actions: list[Action] = []
    if not work.receipt.owns(path):
        actions = [*plan_directory(work.host, path.parent), CopyProgram(archive, path, digest)]
    # In a dry run the directory of the link is still to be made, by the actions before it.
    planned = set(actions)
    actions += [action for action in plan_link(work, CURRENT, name) if action not in planned]
    return actions if why_no_link(work.host) else actions + plan_link(work, LINK, str(COMMAND))


def plan_prune(work: Work, archive: str) -> list[Action]:
    """Remove the copies older than the one before ``archive``, which is or will be the one in use.

    One stays to go back to, and because the supervisor may still be running from it. A copy that somebody changed
    stays as well.
    """
    keep = {_name(_archive_digest(archive))}
    if work.host.is_link(LINK):
        # Not through the other link, if an older release made it.
        keep.add(HostPath(work.host.readlink(LINK)).parent.name)
    chosen = work.receipt.get(CURRENT)
    before = [name for name in (chosen.contents if chosen else ()) if name not in keep]
    keep |= set([name for name in before if work.receipt.owns(PROGRAMS / name / "stratum.pyz")][-1:])
    actions: list[Action] = []
    for entry in work.receipt:
        if entry.kind != "directory" or entry.path.parent != PROGRAMS or entry.path.name in keep:
            continue
        copy = work.receipt.get(entry.path / "stratum.pyz")
        if copy is None or work.receipt.condition(copy) != Condition.CHANGED:
            remove = functools.partial(_remove, work, entry.path)
            actions.append(Call("remove program", str(entry.path), remove))
    return actions


def _remove(work: Work, directory: HostPath) -> None:
    withdraw(work, directory / "stratum.pyz")
    RemoveDirectory(directory).perform(work)
    if not work.host.lexists(directory):
        work.host.fsync_dir(directory.parent)
        work.receipt.forget(directory)


def program_argv(host: Host) -> list[str]:
    """What starts this program on the host: the interpreter that runs now, without site or environment.

    ``/usr/bin/python3`` where it is the same release, so that a unit outlives a point upgrade of it. A tree is
    started by its own ``/usr/bin/python3``.
    """
    interpreter = SYSTEM_PYTHON
    if host.live and not _same_release(host):
        interpreter = os.path.realpath(sys.executable)
    return [interpreter, "-IS", str(COMMAND)]


def supervisor_argv(host: Host) -> list[str]:
    """The steady-state command line of the supervisor."""
    return [*program_argv(host), "up", "--supervise"]


def _same_release(host: Host) -> bool:
    if not host.exists(SYSTEM_PYTHON):
        return False
    name = os.path.basename(os.path.realpath(host.real(SYSTEM_PYTHON)))
    return name == f"python{sys.version_info[0]}.{sys.version_info[1]}" or os.path.realpath(
        SYSTEM_PYTHON
    ) == os.path.realpath(sys.executable)
