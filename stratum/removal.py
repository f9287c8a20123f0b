"""Taking away what the receipt lists: exactly that, in the state in which Stratum left it.

A file or link that somebody changed stays and is named. A directory goes when nothing else is in it. No link
is followed out of a recorded directory and no mount is crossed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stratum.journal import JOURNAL_PATH
from stratum.lock import LOCK_PATH
from stratum.receipt import RECEIPT_PATH, STATE_DIRECTORY, Condition, Entry, Receipt
from stratum.steps import Action, Call, RemoveDirectory, RemoveFile, RemoveTree, Work
from stratum.system import Host, HostPath

__all__ = ["Left", "Removal", "plan_removal"]

_RUNTIME = LOCK_PATH.parent


@dataclass(frozen=True)
class Left:
    """A path that stays, and why."""

    path: HostPath
    why: str

    def to_json(self) -> dict[str, object]:
        """The form of ``--output json``."""
        return {"path": str(self.path), "why": self.why}


@dataclass
class Removal:
    """What will go and what will stay.

    ``closing`` takes away the record itself and what the lock needs; it is for the very end.
    """

    actions: list[Action] = field(default_factory=list)
    closing: list[Action] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)


def plan_removal(
    work: Work,
    *,
    keep: Sequence[HostPath] = (),
    released: Sequence[HostPath] = (),
    attached: Sequence[HostPath] = (),
) -> Removal:
    """What to do so that nothing in the receipt is there any more, except the trees in ``keep``.

    ``released`` are paths that will be gone by then. ``attached`` are directories where others put what belongs to
    files of ours: what stays in them is named, whoever made the directory.

    Plans only; raises OSError when the host cannot be read.
    """
    removal = Removal()
    host, receipt = work.host, work.receipt
    gone: set[HostPath] = {RECEIPT_PATH, JOURNAL_PATH, *released}
    barred = _barred(receipt, removal)
    kept: list[Entry] = []
    late = {STATE_DIRECTORY, *STATE_DIRECTORY.parents, _RUNTIME}
    for entry in sorted(receipt, key=lambda item: item.path.parts, reverse=True):
        if any(parent in barred for parent in (entry.path, *entry.path.parents)):
            continue
        if entry.path in keep and receipt.condition(entry) != Condition.MISSING:
            removal.left.append(Left(entry.path, "kept, as asked"))
            kept.append(entry)
        elif entry.path not in late:
            _plan_entry(host, receipt, entry, gone, removal)
    for path in attached:
        others = _others(host, path, gone) if receipt.get(path) is None and host.is_dir(path) else []
        if others:
            removal.left.append(_left_with(path, others))
    removal.closing.append(Call("remove", str(RECEIPT_PATH), lambda: _close(work, kept)))
    if not kept:
        _plan_state(host, receipt, gone, removal)
    _plan_runtime(host, receipt, removal)
    return removal


def _barred(receipt: Receipt, removal: Removal) -> set[HostPath]:
    """Recorded directories that are something else now: nothing is followed through them."""
    barred = {
        entry.path
        for entry in receipt
        if entry.kind in ("directory", "tree") and receipt.condition(entry) == Condition.CHANGED
    }
    removal.left += [Left(path, "was a directory of Stratum's and is something else now") for path in sorted(barred)]
    return barred


def _plan_entry(host: Host, receipt: Receipt, entry: Entry, gone: set[HostPath], removal: Removal) -> None:
    condition = receipt.condition(entry)
    if condition == Condition.MISSING or entry.path in gone:
        return
    if condition == Condition.CHANGED:
        removal.left.append(Left(entry.path, "changed since Stratum wrote it"))
    elif entry.kind == "tree":
        _plan_tree(host, entry.path, gone, removal)
    elif entry.kind == "directory":
        removal.actions += _plan_directory(host, entry.path, gone, removal)
    else:
        removal.actions.append(RemoveFile(entry.path))
        gone.add(entry.path)


def _plan_tree(host: Host, path: HostPath, gone: set[HostPath], removal: Removal) -> None:
    # On the running machine mounts are taken away before; a tree is somebody's work in progress.
    mounts = [] if host.live else host.mounts_within(path)
    if mounts:
        removal.left.append(Left(path, f"a file system is mounted at {mounts[0]}"))
        return
    if host.is_mount_point(path):
        # A disk that the admin gave us: what is on it is ours, the mount is not.
        removal.actions.append(RemoveTree(path, spare=""))
        removal.left.append(Left(path, "a file system is mounted there; what Stratum had on it is removed"))
        return
    removal.actions.append(RemoveTree(path))
    gone.add(path)


def _plan_directory(host: Host, path: HostPath, gone: set[HostPath], removal: Removal) -> list[Action]:
    others = _others(host, path, gone)
    if others:
        removal.left.append(_left_with(path, others))
        return []
    if host.is_mount_point(path):
        removal.left.append(Left(path, "a file system is mounted there"))
        return []
    gone.add(path)
    return [RemoveDirectory(path)]


def _left_with(path: HostPath, others: Sequence[str]) -> Left:
    return Left(path, f"holds what is not Stratum's: {', '.join(others)}")


def _others(host: Host, path: HostPath, gone: Iterable[HostPath]) -> list[str]:
    return [name for name in host.listdir(path) if path / name not in gone]


def _close(work: Work, kept: Sequence[Entry]) -> None:
    """The record goes last: until then a run that is cut off can go on."""
    work.journal.close()
    # Removals are not synced one by one. A power cut after this point must not bring a path back without its entry.
    work.host.sync()
    if kept:
        work.receipt.forget(
            *(entry.path for entry in work.receipt if entry not in kept and entry.path != STATE_DIRECTORY)
        )
        RemoveFile(JOURNAL_PATH).perform(work)
        return
    for path in (JOURNAL_PATH, RECEIPT_PATH):
        RemoveFile(path).perform(work)


def _plan_state(host: Host, receipt: Receipt, gone: set[HostPath], removal: Removal) -> None:
    """The directory that held the record, and those that were made for it."""
    for path in (STATE_DIRECTORY, *STATE_DIRECTORY.parents):
        if receipt.get(path) is not None and host.is_dir(path):
            removal.closing += _plan_directory(host, path, gone, removal)


def _plan_runtime(host: Host, receipt: Receipt, removal: Removal) -> None:
    """All that is under /run but the lock: without it another run could begin while this one still removes."""
    if receipt.get(_RUNTIME) is None or not host.is_dir(_RUNTIME) or host.is_link(_RUNTIME):
        return
    if set(host.listdir(_RUNTIME)) - {LOCK_PATH.name}:
        removal.closing.append(RemoveTree(_RUNTIME, spare=LOCK_PATH.name))
