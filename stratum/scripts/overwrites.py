"""Saying beforehand which of our files somebody changed and will find as Stratum wrote them."""

from __future__ import annotations

from collections.abc import Sequence

from stratum.host.program import CopyProgram
from stratum.receipt import Condition, Entry
from stratum.scripts.context import Context
from stratum.steps import Action, PlaceLink, SetMode, Work, WriteFile
from stratum.system import HostPath

__all__ = ["warn_overwrites"]


def warn_overwrites(
    context: Context, work: Work, actions: Sequence[Action], *, versions: Sequence[HostPath] = ()
) -> None:
    """A warning for each file or link of ours that ``actions`` put right and somebody has changed.

    The files of the ``versions``, which are put right as a whole, are asked as well. Raises OSError.
    """
    paths = [entry.path for entry in work.receipt if any(entry.is_below(top) for top in versions)]
    paths += [item.path for item in actions if isinstance(item, (WriteFile, PlaceLink, CopyProgram, SetMode))]
    named: set[tuple[int, int]] = set()
    for path in paths:
        entry = work.receipt.get(path)
        what = _changed(work, entry) if entry else ""
        if not what:
            continue
        info = work.host.lstat(path)
        # A program of a version has a second name among the components.
        if (info.st_dev, info.st_ino) not in named:
            context.out.warn(f"{path}: {what}; it is put back as Stratum made it")
        named.add((info.st_dev, info.st_ino))


def _changed(work: Work, entry: Entry) -> str:
    if entry.kind in ("file", "link") and work.receipt.condition(entry) == Condition.CHANGED:
        return "somebody changed it"
    mode = work.receipt.changed_mode(entry)
    return "" if mode is None else f"somebody changed its mode to {mode:04o}"
