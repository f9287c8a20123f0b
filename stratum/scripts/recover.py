"""Finishing what an earlier run left unfinished. Every command that changes the node begins with it, each boot too."""

from __future__ import annotations

from typing import Optional

from stratum.bundle.images import reap_blobs
from stratum.bundle.place import COMPONENTS
from stratum.errors import StratumError
from stratum.host import forwarding, persistence, portchains
from stratum.host.fstab import FSTAB
from stratum.journal import Operation
from stratum.node.layout import Layout
from stratum.node.stack import STARTED, Stack
from stratum.scripts.context import Context
from stratum.scripts.switch import recover_switch
from stratum.staging import reap_staging, reap_temporaries
from stratum.steps import Work
from stratum.system import HostPath

__all__ = ["BESIDE", "forget_absent", "recover"]

_SWITCHES = ("upgrade", "rollback")
# Operations that leave the running version alone; what they had begun is either complete or cleared away.
BESIDE = ("prepare", "program", "prune", "remove")


# Files that are written whole and are not in the receipt one by one.
_UNRECORDED = (STARTED, persistence.OVERRIDE, FSTAB, forwarding.REMEMBERED, portchains.REMEMBERED)


def recover(context: Context, work: Work, stack: Stack, *, command: str) -> None:
    """Bring an unfinished operation to an end, forward or back; call it with the lock held.

    Raises :class:`StratumError` when that fails, or when it takes a decision that only the admin can make.
    """
    reap_staging(context.host)
    reap_blobs(context.host)
    reap_temporaries(context.host, work.receipt, _UNRECORDED)
    forget_absent(work)
    operation = work.journal.unfinished()
    if operation is None or not context.host.live:
        return
    if operation.name in _SWITCHES:
        # What is to be removed need not run before: it may never be able to again.
        if command != "uninstall":
            _recover_switch(context, work, stack, operation, command)
    elif operation.name == "uninstall" and command != "uninstall":
        _recover_uninstall(context, work, operation.step)
    elif operation.name in BESIDE:
        work.journal.settle("rolled-back")
    # The steps of the other operations are planned from what is there: doing them again is all that it takes.


def forget_absent(work: Work) -> None:
    """Drop the records of versions and components that are not there as a whole; raises OSError.

    A run records them before they appear and forgets them after they went, and may be cut off in between.
    """
    layout = Layout(work.host)
    absent: list[HostPath] = []
    for top in (layout.base, COMPONENTS):
        inside = [entry.path for entry in work.receipt if entry.is_below(top)]
        children = {top / path.relative_to(top).parts[0] for path in inside} - {layout.current_link}
        gone = {child for child in children if not work.host.lexists(child)}
        absent += [path for path in inside if top / path.relative_to(top).parts[0] in gone]
        if gone and work.host.is_dir(top):
            work.host.fsync_dir(top)
    work.receipt.forget(*absent)


def _recover_switch(context: Context, work: Work, stack: Stack, operation: Operation, command: str) -> None:
    try:
        recover_switch(context, work, stack, operation.source, operation.target)
    except StratumError as error:
        # Where all is in its place and only the start failed, another version may be what helps.
        if command == "supervise" or not _is_current(stack.layout, operation.source):
            raise
        context.out.warn(f"version {operation.source} does not run: {error.message}")


def _is_current(layout: Layout, version: Optional[str]) -> bool:
    try:
        return version is not None and layout.current() == version
    except StratumError:
        return False


def _recover_uninstall(context: Context, work: Work, step: Optional[str]) -> None:
    if step in ("delete", "forget", "close"):
        raise StratumError(
            "uninstall-unfinished",
            "an uninstall was cut off while it deleted files: this node cannot run any more",
            hint="run: stratum uninstall",
        )
    # Nothing was deleted: the node is put back as it was before.
    persistence.allow_restart(context.host)
    persistence.enable(context.host)
    work.journal.settle("rolled-back")
    context.out.warn("an uninstall had been cut off before it deleted anything: the node is put back")
