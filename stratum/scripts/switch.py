"""Switching the version under a node: forward, and back when that fails. ``upgrade`` and ``rollback`` share it."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType
from typing import Callable, Optional

from stratum.errors import CommandError, StratumError
from stratum.host import persistence
from stratum.host.program import CURRENT
from stratum.node.backend import UpgradeError
from stratum.node.history import note_activation
from stratum.node.layout import Layout
from stratum.node.settings import forget_earlier, keep_earlier, read_earlier
from stratum.node.stack import Stack
from stratum.node.units import EVERY_UNIT, UNIT_CONTAINERD
from stratum.node.versions import VersionRecord
from stratum.scripts import images as image_script
from stratum.scripts import node as node_script
from stratum.scripts import stack as stack_script
from stratum.scripts.context import Context
from stratum.scripts.goal import Goal, goal_in_force
from stratum.scripts.overwrites import warn_overwrites
from stratum.steps import Action, Call, PlaceLink, Step, Work
from stratum.systemd import journal_tail

__all__ = ["check_programs", "plan_check", "plan_program", "recover_switch", "switch_plan", "switch_version"]

Performed = list[tuple[Step, Sequence[Action]]]
# Programs of a version that can say their version: the way to see that they run on this host at all.
_SELF_CHECKS = {
    "containerd": ("--version",),
    "containerd-shim-runc-v2": ("-v",),
    "runc": ("--version",),
    "ctr": ("--version",),
    "kubelet": ("--version",),
    "coredns": ("-version",),
}
_CHECK_TIMEOUT = 30.0


def check_programs(work: Work, layout: Layout, version: str) -> None:
    """Run each program of a version for its version: wrong architecture and missing libraries show here.

    Nothing has been stopped yet. Raises :class:`StratumError`.
    """
    for name, arguments in _SELF_CHECKS.items():
        path = layout.version_dir(version) / "bin" / name
        if not work.host.exists(path):
            continue
        try:
            work.host.run([str(path), *arguments], timeout=_CHECK_TIMEOUT)
        except (CommandError, OSError) as error:
            said = error.message if isinstance(error, CommandError) else str(error)
            raise StratumError(
                "program-broken",
                f"version {version}: {name} does not run on this host: {said}",
                hint="get a bundle that was built for this distribution",
            ) from None


def plan_check(work: Work, layout: Layout, version: str) -> list[Action]:
    """The check, as an action."""
    return [Call("check", f"the programs of {version}", lambda: check_programs(work, layout, version))]


def _wait_ready(context: Context, work: Work, stack: Stack, record: VersionRecord) -> None:
    """The gate of a switch: every unit answers and goes on, and the version's images are there."""
    for unit in stack.units:
        stack.wait_ready(unit)
    for step in image_script.import_steps(context, stack, record):
        for action in step.plan():
            action.perform(work)
    stack.wait_steady()


def switch_plan(context: Context, work: Work, stack: Stack, goal: Goal) -> Sequence[Step]:
    """The steps of the switch, for a dry run."""
    warn_overwrites(context, work, stack_script.plan_version_needs(work, stack, goal))
    backend = stack_script.make_backend(context, work, stack, goal=goal)
    return backend.switch_steps(goal.record.version, functools.partial(_wait_ready, context, work, stack, goal.record))


def switch_version(context: Context, work: Work, stack: Stack, goal: Goal, *, name: str) -> Performed:
    """Make a prepared version run, or the one before again. The journal knows at each step which it will be.

    Returns the steps that were done. Raises :class:`UpgradeError` with exit code 20 or 21.
    """
    current, record = stack.layout.current(), goal.record
    previous = goal_in_force(stack.layout)
    backend = stack_script.make_backend(context, work, stack, goal=goal, previous=previous)
    performed: Performed = []
    going_back: list[BaseException] = []
    warn_overwrites(context, work, stack_script.plan_version_needs(work, stack, goal))

    def note(step: Step, actions: Sequence[Action]) -> None:
        context.out.note(f"{step.name}: {step.summary}")
        performed.append((step, actions))

    with _Signals() as signals:

        def ready() -> None:
            _wait_ready(context, work, stack, record)
            # From the proof on the way is forward, and nothing that is left to do takes long.
            signals.ignore()
            work.journal.prove()

        def failed(failure: BaseException) -> None:
            signals.ignore()
            going_back.append(failure)
            _add_journal(context, failure)
            with contextlib.suppress(OSError, StratumError):
                work.journal.turn_back(_said(failure))

        try:
            work.journal.begin(name, source=current, target=record.version)
            keep_earlier(work, goal.settings)
            stack_script.record_ahead(work, stack, goal)
            backend.upgrade(record.version, ready, on_step=note, on_failure=failed)
        except BaseException as error:
            # A signal can come between a failure and the way back: then the next run finds the switch unfinished.
            _settle_failure(work, error, went_back=bool(going_back) or not performed)
            raise
        finish_switch(context, work, record.version)
    return performed


def _said(failure: BaseException) -> str:
    if isinstance(failure, StratumError):
        return failure.message
    return str(failure) if isinstance(failure, Exception) else f"cut off: {type(failure).__name__}"


def _add_journal(context: Context, failure: BaseException) -> None:
    """Let a gate's error say what the unit said last; a start that failed says it already."""
    if isinstance(failure, StratumError) and failure.reference != "unit-failed" and not _names_unit(failure):
        tail = journal_tail(context.host, UNIT_CONTAINERD, 5)
        if tail:
            failure.message += f"; {UNIT_CONTAINERD} said last: {' | '.join(tail)}"


def _names_unit(failure: StratumError) -> bool:
    """Whether an error is one of another unit, whose gate has looked into its journal."""
    return any(unit in failure.message for unit in EVERY_UNIT if unit != UNIT_CONTAINERD)


def _settle_failure(work: Work, error: BaseException, *, went_back: bool) -> None:
    """The journal's last word on a failed switch; a full disk must not hide why it failed."""
    with contextlib.suppress(OSError, StratumError):
        if went_back and not (isinstance(error, UpgradeError) and not error.rolled_back):
            forget_earlier(work)
            work.journal.roll_back(_said(error))
        else:
            work.journal.fail(_said(error))


class _Signals:
    """The signals that end a run: the first one turns a switch back, and nothing cuts off the way back."""

    def __init__(self) -> None:
        self.ignored = False
        self._before: dict[signal.Signals, Callable[[int, Optional[FrameType]], object]] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before = signal.getsignal(number)
            if callable(before):  # one that is ignored, as SIGINT is in the background of a shell, stays so
                self._before[number] = before
                signal.signal(number, self._first)
        return self

    def _first(self, number: int, frame: Optional[FrameType]) -> None:
        if not self.ignored:
            self.ignore()
            self._before[signal.Signals(number)](number, frame)

    def ignore(self) -> None:
        """From now on nothing is cut off."""
        self.ignored = True

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._first:  # else the one that came made them all unheard
                signal.signal(number, before)


def finish_switch(context: Context, work: Work, version: str) -> None:
    """What follows the proof: history, and the journal closed. May be repeated."""
    note_activation(context.host, work.receipt, version)
    forget_earlier(work)
    work.journal.finish()


def recover_switch(context: Context, work: Work, stack: Stack, source: Optional[str], target: Optional[str]) -> None:
    """Finish a switch that was cut off: forward where the target had been proven ready, back otherwise.

    Forward too where there is nothing left to go back to.
    Raises :class:`StratumError` when the way back fails; it is tried again at the next command or boot.
    """
    operation = work.journal.unfinished()
    if operation is None:
        return
    work.journal.resume()
    if operation.proven and target:
        finish_switch(context, work, target)
        context.out.note(f"{operation.name} to {target} had been cut off after it was proven ready: finished")
        return
    if source is None:
        forget_earlier(work)
        work.journal.settle("done")
        return
    installed = stack.layout.versions()
    ahead = target in installed and source not in installed
    version = target if ahead and target else source
    goal = goal_in_force(stack.layout, version)
    if goal and not ahead:
        goal = replace(goal, settings=read_earlier(context.host))
    backend = stack_script.make_backend(context, work, stack, previous=goal)
    backend.rollback(version, on_step=lambda step, _: context.out.note(f"{step.name}: {step.summary}"))
    if ahead and goal:
        _wait_ready(context, work, stack, goal.record)
        finish_switch(context, work, version)
        context.out.warn(f"{operation.name} to {target} had been cut off and {source} is gone: {target} runs")
        return
    forget_earlier(work)
    work.journal.roll_back(operation.error or "it was cut off")
    context.out.warn(f"{operation.name} to {target} had been cut off: version {source} runs again")


def plan_program(context: Context, work: Work) -> list[Action]:
    """Put the pyz that runs in its place, and let a supervisor that runs go on with it."""
    actions = node_script.plan_program(context, work)
    # The link on PATH is for people: making that one changes nothing that runs.
    turned = any(isinstance(item, PlaceLink) and item.path == CURRENT for item in actions)
    if turned and persistence.active(context.host):
        actions.append(Call("restart", persistence.UNIT, lambda: persistence.restart(context.host)))
    return actions
