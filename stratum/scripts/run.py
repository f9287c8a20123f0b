"""Running a script of steps: lock, journal, words. Commands give it their steps and get an exit status."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from typing import Callable, Optional

from stratum.errors import ExitCode, StratumError
from stratum.journal import Journal
from stratum.lock import hold_lock
from stratum.node.layout import Layout
from stratum.node.stack import Stack
from stratum.receipt import STATE_DIRECTORY, Entry, Receipt
from stratum.scripts.context import Context
from stratum.scripts.recover import BESIDE, forget_absent, recover
from stratum.steps import Action, Outcome, Step, Work, run_steps

__all__ = ["announce", "ignore_signals", "load_work", "open_state", "perform", "report", "run_script"]


def ignore_signals() -> None:
    """What takes back an interrupted run is not interrupted in its turn."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def load_work(context: Context) -> Work:
    """What actions work with, read from the host; writes nothing."""
    return Work(context.host, Receipt.load(context.host), Journal(context.host))


def open_state(work: Work) -> None:
    """Make the state directory, so that the receipt and the journal have a place. Raises OSError."""
    missing = [path for path in reversed(STATE_DIRECTORY.parents) if not work.host.is_dir(path)]
    # It cannot be recorded before it is there: it is what holds the record.
    work.host.makedirs(STATE_DIRECTORY, 0o755)
    work.receipt.record(*(Entry(path, "directory") for path in (*missing, STATE_DIRECTORY)))


def announce(context: Context, dry_run: bool) -> Callable[[Step, Sequence[Action]], None]:
    """What says each step: its name in a real run, its actions too in a dry one."""

    def say(step: Step, actions: Sequence[Action]) -> None:
        if not dry_run:
            context.out.note(f"{step.name}: {step.summary}")
            return
        context.out.result(f"{step.name}: {step.summary}")
        for action in actions:
            context.out.result(f"    {action.describe()}")

    return say


def perform(
    context: Context,
    work: Work,
    name: str,
    steps: Sequence[Step],
    *,
    dry_run: bool,
    source: Optional[str] = None,
    target: Optional[str] = None,
    ends: bool = True,
) -> Outcome:
    """Do the steps (or print them) and keep the journal: begun before the first change, then done or failed.

    With ``ends`` false it stays open: the same operation goes on with more steps.
    """

    def begin() -> None:
        open_state(work)
        work.journal.begin(name, source=source, target=target)

    # Made with the journal, before the first change of any run.
    made = (STATE_DIRECTORY, *STATE_DIRECTORY.parents) if dry_run else ()
    say = announce(context, dry_run)
    try:
        outcome = run_steps(work, steps, dry_run=dry_run, before_first_change=begin, on_step=say, made=made)
    except BaseException as error:
        if not dry_run:
            with contextlib.suppress(OSError, StratumError):
                forget_absent(work)
                # What only happens beside the running version leaves nothing to be finished.
                (work.journal.roll_back if name in BESIDE else work.journal.fail)(str(error) or type(error).__name__)
        raise
    if dry_run or not ends:
        return outcome
    if outcome.changed:
        work.journal.finish()
    else:
        last = work.journal.unfinished()
        if last is not None and name in (last.name, "up"):
            # It was cut off after its last change, or has nothing left to do by now.
            work.journal.settle("done" if last.name == name else "rolled-back")
    return outcome


def report(
    context: Context, name: str, outcome: Outcome, *, dry_run: bool, more: Optional[Mapping[str, object]] = None
) -> None:
    """Say what was done, or would be."""
    if not outcome.changed:
        context.out.result("nothing to do")
    elif not dry_run:
        context.out.result(f"{name}: done")
    document = {"command": name, "dryRun": dry_run, "changed": outcome.changed, "steps": outcome.to_json()}
    context.out.document("Plan" if dry_run else "Result", {**document, **(more or {})})


def run_script(
    context: Context,
    name: str,
    steps: Callable[[Work], Sequence[Step]],
    *,
    after_lock: Sequence[Step] = (),
    dry_run: bool = False,
) -> int:
    """Run a simple command: what was cut off is finished, then its steps under the lock, then those without it."""
    # A dry run writes nothing, not even the lock's file.
    with contextlib.nullcontext() if dry_run else hold_lock(context.host, name):
        work = load_work(context)
        if not dry_run:
            recover(context, work, Stack(Layout(context.host)), command=name)
        outcome = perform(context, work, name, steps(work), dry_run=dry_run)
    work.journal.close()  # the lock is given back: from here on the journal is another run's to write
    outcome.performed += run_steps(work, after_lock, dry_run=dry_run, on_step=announce(context, dry_run)).performed
    report(context, name, outcome, dry_run=dry_run)
    return int(ExitCode.DONE)
