"""Steps and actions: what a command will do is the same object as what it does.

A command is a list of named steps. A step plans actions from the state of the host as it is at that moment:
none when it is done already. ``--dry-run`` prints the actions; a real run performs those very objects. Each
step is in the operation journal before its first action, each path is in the receipt before it is made.
"""

from __future__ import annotations

import abc
import errno
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Callable, Optional

from stratum import atomicfile
from stratum.errors import StratumError
from stratum.journal import Journal
from stratum.receipt import Entry, Receipt, content_digest, file_digest
from stratum.system import Host, HostPath, unguessable

__all__ = [
    "Action",
    "RELOAD_SYSTEMD",
    "Call",
    "Command",
    "MakeDirectory",
    "PlaceLink",
    "RemoveDirectory",
    "RemoveFile",
    "RemoveTree",
    "SetMode",
    "Step",
    "Work",
    "WriteFile",
    "foreign_file",
    "plan_directory",
    "plan_file",
    "plan_link",
    "refuse_mounts",
    "remove_at_once",
    "remove_tree",
    "run_steps",
    "withdraw",
]


@dataclass(frozen=True)
class Work:
    """What actions work with: the host, the record of what was made, the journal."""

    host: Host
    receipt: Receipt
    journal: Journal


class Action(abc.ABC):
    """One change to the host."""

    verb = "do"

    @property
    @abc.abstractmethod
    def subject(self) -> str:
        """What the change is made to."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What the receipt will say of it; recorded before the change is made, or long before where time matters."""
        return ()

    @abc.abstractmethod
    def perform(self, work: Work) -> None:
        """Make the change; may be repeated."""

    def describe(self) -> str:
        """The line that a dry run prints."""
        return f"{self.verb} {self.subject}"

    def to_json(self) -> dict[str, object]:
        """The action in a plan with ``--output json``."""
        return {"verb": self.verb, "subject": self.subject}


@dataclass(frozen=True)
class MakeDirectory(Action):
    """Make one directory."""

    path: HostPath
    mode: int = 0o755
    verb = "make directory"

    @property
    def subject(self) -> str:
        return str(self.path)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (Entry(self.path, "directory"),)

    def perform(self, work: Work) -> None:
        """Record it, then make it."""
        work.receipt.record(*self.entries)
        if not work.host.is_dir(self.path):
            work.host.mkdir(self.path, self.mode)
            work.host.fsync_dir(self.path.parent)


@dataclass(frozen=True)
class WriteFile(Action):
    """Write a file whole."""

    path: HostPath
    content: bytes = field(repr=False)
    mode: int = 0o644
    verb = "write"

    @property
    def subject(self) -> str:
        return str(self.path)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (Entry(self.path, "file", (content_digest(self.content),), self.mode),)

    def perform(self, work: Work) -> None:
        """Record its digest, then replace it at once."""
        work.receipt.record(*self.entries)
        atomicfile.write_file(work.host, self.path, self.content, self.mode)


@dataclass(frozen=True)
class SetMode(Action):
    """Give a file of ours its mode again."""

    path: HostPath
    mode: int
    verb = "set the mode of"

    @property
    def subject(self) -> str:
        return f"{self.path} to {self.mode:04o}"

    def perform(self, work: Work) -> None:
        """chmod(2), of a regular file only."""
        if stat.S_ISREG(work.host.lstat(self.path).st_mode):
            work.host.chmod(self.path, self.mode)


@dataclass(frozen=True)
class PlaceLink(Action):
    """Make or turn a symbolic link."""

    path: HostPath
    target: str
    verb = "link"

    @property
    def subject(self) -> str:
        return f"{self.path} -> {self.target}"

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (Entry(self.path, "link", (self.target,)),)

    def perform(self, work: Work) -> None:
        """Record its target, then rename a new link over it."""
        work.receipt.record(*self.entries)
        atomicfile.replace_link(work.host, self.path, self.target)


@dataclass(frozen=True)
class RemoveFile(Action):
    """Remove a file or link of ours."""

    path: HostPath
    verb = "remove"

    @property
    def subject(self) -> str:
        return str(self.path)

    def perform(self, work: Work) -> None:
        """Unlink it; one that is gone is fine."""
        try:
            work.host.unlink(self.path)
        except FileNotFoundError:
            pass


@dataclass(frozen=True)
class RemoveDirectory(Action):
    """Remove a directory of ours when nothing else is in it."""

    path: HostPath
    verb = "remove directory"

    @property
    def subject(self) -> str:
        return str(self.path)

    def perform(self, work: Work) -> None:
        """rmdir(2); what others put there meanwhile keeps it, and so does a mount."""
        try:
            work.host.rmdir(self.path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                raise


@dataclass(frozen=True)
class RemoveTree(Action):
    """Remove a tree whose whole content is ours, without crossing a mount or following a link."""

    path: HostPath
    spare: Optional[str] = None  # the name of an entry at the top that stays, and the top with it
    verb = "remove tree"

    @property
    def subject(self) -> str:
        return str(self.path)

    def perform(self, work: Work) -> None:
        """Children first; a mount below stops it with an error before anything behind the mount is touched."""
        if self.spare is None:
            remove_tree(work.host, self.path)
            return
        for name in work.host.listdir(self.path) if work.host.is_dir(self.path) else ():
            if name != self.spare:
                remove_tree(work.host, self.path / name)


def refuse_mounts(host: Host, path: HostPath) -> None:
    """Raise :class:`StratumError` when a file system is mounted at ``path`` or below it."""
    for mount in host.mounts_within(path):
        raise StratumError(
            "mount-in-the-way", f"{path}: a file system is mounted at {mount}", hint=f"run: umount {mount}"
        )


def remove_tree(host: Host, path: HostPath) -> None:
    """Remove ``path`` and everything below it on the same file system.

    Raises :class:`StratumError` when a mount is there or below, and removes nothing then: its content is not
    ours. Raises OSError.
    """
    try:
        info = host.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(info.st_mode):
        host.unlink(path)
        return
    refuse_mounts(host, path)
    device, again = info.st_dev, True
    while again:
        again = False
        for child, child_info in host.walk(path):
            if not stat.S_ISDIR(child_info.st_mode):
                host.unlink(child)
            elif child_info.st_dev != device:
                raise StratumError(
                    "mount-in-the-way", f"{child}: another file system is mounted there", hint=f"run: umount {child}"
                )
            elif host.too_long(child) and host.listdir(child):
                # A container can nest directories deeper than a path can say: they are taken to the top first.
                host.rename(child, path / unguessable())
                again = True
            else:
                host.rmdir(child)
    host.rmdir(path)


def remove_at_once(host: Host, path: HostPath) -> None:
    """Remove a tree so that a run that is cut off leaves all of it or nothing but a hidden remainder.

    The rename and the end of the removal are on the disk when this returns, so the record of the tree may go
    then. Raises :class:`StratumError` for a mount below, OSError.
    """
    refuse_mounts(host, path)
    hidden = host.temporary_name(path)
    host.rename(path, hidden)
    host.fsync_dir(path.parent)
    remove_tree(host, hidden)
    host.fsync_dir(path.parent)


def withdraw(work: Work, path: HostPath) -> None:
    """Remove a file or link of ours and then its record. Raises OSError."""
    RemoveFile(path).perform(work)
    if work.host.is_dir(path.parent):
        # On the disk before the record goes: a path must never come back without one.
        work.host.fsync_dir(path.parent)
    work.receipt.forget(path)


@dataclass(frozen=True)
class Command(Action):
    """Run an external command."""

    argv: tuple[str, ...]
    timeout: float  # seconds
    verb = "run"

    @property
    def subject(self) -> str:
        return " ".join(self.argv)

    def perform(self, work: Work) -> None:
        """Run it to its end; a failure raises CommandError."""
        work.host.run(self.argv, timeout=self.timeout)


#: systemd reads the unit files that were written or removed.
RELOAD_SYSTEMD = Command(("systemctl", "daemon-reload"), 60.0)


@dataclass(frozen=True)
class Call(Action):
    """A change that a library makes; ``what`` says it in words."""

    doing: str
    what: str
    function: Callable[[], object] = field(repr=False)

    @property
    def verb(self) -> str:  # type: ignore[override]
        """The caller's own verb."""
        return self.doing

    @property
    def subject(self) -> str:
        return self.what

    def perform(self, work: Work) -> None:
        """Call the library."""
        self.function()


def plan_directory(host: Host, path: HostPath, mode: int = 0o755) -> list[Action]:
    """The directories that are missing down to ``path``, top first; existing ones keep their mode.

    ``mode`` is that of ``path`` itself; a parent that is made is 0755.
    """
    missing: list[Action] = []
    for candidate in (path, *path.parents):
        if host.is_dir(candidate):
            break
        missing.insert(0, MakeDirectory(candidate, mode if candidate == path else 0o755))
    return missing


def foreign_file(path: HostPath, what: str = "a file that Stratum did not write") -> StratumError:
    """The error for somebody else's file or link at a place of ours: it is refused, not replaced."""
    return StratumError(
        "foreign-file", f"{path}: there is {what}", hint=f"move it away, for example: mv {path} {path}.saved"
    )


def plan_file(work: Work, path: HostPath, content: bytes, mode: int = 0o644) -> list[Action]:
    """What makes ``path`` hold ``content`` with ``mode``: nothing when it does.

    A file that is there and was never ours is refused, not replaced: :class:`StratumError`.
    """
    host = work.host
    try:
        info = host.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return [*plan_directory(host, path.parent), WriteFile(path, content, mode)]
    if stat.S_ISREG(info.st_mode) and file_digest(host, path) == content_digest(content):
        if stat.S_IMODE(info.st_mode) == mode and work.receipt.get(path):
            return []
    elif work.receipt.get(path) is None:
        raise foreign_file(path)
    return [WriteFile(path, content, mode)]


def plan_link(work: Work, path: HostPath, target: str) -> list[Action]:
    """What makes ``path`` a link to ``target``: nothing when it is; a foreign entry there is refused."""
    host = work.host
    if not host.lexists(path):
        return [*plan_directory(host, path.parent), PlaceLink(path, target)]
    if host.is_link(path) and host.readlink(path) == target and work.receipt.get(path):
        return []
    if work.receipt.get(path) is None and not (host.is_link(path) and host.readlink(path) == target):
        raise foreign_file(path, "an entry that Stratum did not make")
    return [PlaceLink(path, target)]


@dataclass(frozen=True)
class Step:
    """A named part of a command. ``plan`` looks at the host and returns what is left to do."""

    name: str
    summary: str
    plan: Callable[[], Sequence[Action]]


@dataclass
class Outcome:
    """What a run of steps came to: the actions of each step that had any."""

    performed: list[tuple[Step, Sequence[Action]]] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Whether there was anything to do."""
        return bool(self.performed)

    def to_json(self) -> list[dict[str, object]]:
        """The plan for ``--output json``."""
        return [
            {"step": step.name, "summary": step.summary, "actions": [action.to_json() for action in actions]}
            for step, actions in self.performed
        ]


def run_steps(
    work: Work,
    steps: Sequence[Step],
    *,
    dry_run: bool = False,
    before_first_change: Optional[Callable[[], object]] = None,
    on_step: Optional[Callable[[Step, Sequence[Action]], object]] = None,
    made: Collection[HostPath] = (),
) -> Outcome:
    """Plan each step and, unless ``dry_run``, perform it.

    ``before_first_change`` is called once, before the first action of the run (to open the journal);
    ``on_step`` hears of each step that has something to do; ``made`` are directories that a dry run takes for made by
    then. Errors pass through.
    """
    outcome = Outcome()
    planned: set[Action] = set()
    for step in steps:
        # In a dry run a directory that an earlier step makes is still missing when a later one plans.
        actions = [action for action in step.plan() if action not in planned]
        actions = [action for action in actions if not (isinstance(action, MakeDirectory) and action.path in made)]
        planned.update(action for action in actions if dry_run and isinstance(action, MakeDirectory))
        if not actions:
            continue
        if on_step:
            on_step(step, actions)
        if not dry_run:
            if not outcome.performed and before_first_change:
                before_first_change()
            work.journal.step(step.name)
            for action in actions:
                action.perform(work)
        outcome.performed.append((step, actions))
    return outcome
