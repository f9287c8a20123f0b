"""Switching the version under a node: forward, and back when that fails. ``upgrade`` and ``rollback`` share it."""

from __future__ import annotations

import functools
import signal
from collections.abc import Sequence
from typing import Optional

from stratum.errors import CommandError, StratumError
from stratum.host import persistence
from stratum.node.backend import UpgradeError
from stratum.node.history import note_activation
from stratum.node.layout import Layout
from stratum.node.stack import Stack
from stratum.node.units import UNIT_CONTAINERD
from stratum.node.versions import VersionRecord, read_record
from stratum.scripts import images as image_script
from stratum.scripts import node as node_script
from stratum.scripts import stack as stack_script
from stratum.scripts.context import Context
from stratum.steps import Action, Call, Step, Work
from stratum.systemd import journal_tail

__all__ = ["check_programs", "plan_check", "plan_program", "recover_switch", "switch_plan", "switch_version"]

Performed = list[tuple[Step, Sequence[Action]]]
# Programs of a version that can say their version: the way to see that they run on this host at all.
_SELF_CHECKS = {"containerd": ("--version",), "runc": ("--version",), "ctr": ("--version",)}
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
    """The gate of a switch: containerd answers and the version's images are there."""
    stack.wait_ready(UNIT_CONTAINERD)
    for step in image_script.import_steps(context, stack, record):
        for action in step.plan():
            action.perform(work)


def switch_plan(context: Context, work: Work, stack: Stack, record: VersionRecord) -> Sequence[Step]:
    """The steps of the switch, for a dry run."""
    backend = stack_script.make_backend(work, stack, record=record)
    return backend.switch_steps(record.version, functools.partial(_wait_ready, context, work, stack, record))


def switch_version(context: Context, work: Work, stack: Stack, record: VersionRecord, *, name: str) -> Performed:
    """Make a prepared version run, or the one before again. The journal knows at each step which it will be.

    Returns the steps that were done. Raises :class:`UpgradeError` with exit code 20 or 21.
    """
    current = stack.layout.current()
    previous = read_record(stack.layout, current) if current else None
    backend = stack_script.make_backend(work, stack, record=record, previous=previous)
    work.journal.begin(name, source=current, target=record.version)
    ready = functools.partial(_wait_ready, context, work, stack, record)
    performed: Performed = []

    def note(step: Step, actions: Sequence[Action]) -> None:
        context.out.note(f"{step.name}: {step.summary}")
        performed.append((step, actions))

    try:
        with _deaf_when_going_back():
            backend.upgrade(record.version, ready, on_step=note)
    except UpgradeError as error:
        tail = journal_tail(context.host, UNIT_CONTAINERD, 5)
        if tail and tail[-1] not in error.message:
            context.out.note("\n".join(f"  {UNIT_CONTAINERD}: {line}" for line in tail))
        _settle_failure(work, error)
        raise
    except BaseException as error:
        work.journal.roll_back(f"cut off: {type(error).__name__}")
        raise
    work.journal.prove()
    finish_switch(context, work, record.version)
    return performed


def _settle_failure(work: Work, error: UpgradeError) -> None:
    if error.rolled_back:
        work.journal.roll_back(error.message)
    else:
        work.journal.fail(error.message)


class _deaf_when_going_back:  # noqa: N801 - reads as a word of the with statement
    """After the first signal no other one interrupts: the way back is not to be cut off by a second Ctrl-C."""

    def __enter__(self) -> None:
        self.previous = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, self._once)

    def _once(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.previous)


def finish_switch(context: Context, work: Work, version: str) -> None:
    """What follows the proof: history, and the journal closed. May be repeated."""
    note_activation(context.host, work.receipt, version)
    work.journal.finish()


def recover_switch(context: Context, work: Work, stack: Stack, source: Optional[str], target: Optional[str]) -> None:
    """Finish a switch that was cut off: forward where the target had been proven ready, back otherwise.

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
        work.journal.settle("done")
        return
    record = read_record(stack.layout, source)
    backend = stack_script.make_backend(work, stack, previous=record)
    backend.rollback(source, on_step=lambda step, _: context.out.note(f"{step.name}: {step.summary}"))
    work.journal.roll_back(operation.error or "it was cut off")
    context.out.warn(f"{operation.name} to {target} had been cut off: version {source} runs again")


def plan_program(context: Context, work: Work) -> list[Action]:
    """Put the pyz that runs in its place, and let the supervisor run it."""
    actions = node_script.plan_program(context, work)
    if actions and persistence.installed(context.host):
        actions.append(Call("restart", persistence.UNIT, lambda: persistence.restart(context.host)))
    return actions
