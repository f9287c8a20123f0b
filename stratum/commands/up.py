"""``stratum up``: make this host a container host or a node from a bundle.

The script, in order: lock, preflight, unpack (verifying in the same pass), version, prerequisites of the host,
configuration, network, units, program, activate, start, images, enable. Each step plans from what is there, so a
second run with the same bundle finds nothing to do. A first run that fails or is interrupted takes everything back.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import NoReturn, Optional

from stratum import boot, lock
from stratum.bundle.verify import VerifiedBundle
from stratum.errors import ExitCode, StratumError, system_error
from stratum.host import netmanagers, persistence
from stratum.journal import Operation
from stratum.node.kubeletroot import plan_kubelet_remains
from stratum.node.layout import Layout
from stratum.node.stack import Stack
from stratum.node.units import EVERY_UNIT
from stratum.node.versions import usable_record
from stratum.removal import plan_removal
from stratum.scripts import images as image_script
from stratum.scripts import node as node_script
from stratum.scripts import prerequisites, supervise, switch, teardown
from stratum.scripts import stack as stack_script
from stratum.scripts.choice import add_bundle_arguments, open_trusted
from stratum.scripts.context import Context, add_dry_run, add_output, add_root
from stratum.scripts.goal import Goal
from stratum.scripts.overwrites import warn_overwrites
from stratum.scripts.recover import recover
from stratum.scripts.run import announce, ignore_signals, load_work, perform, report
from stratum.scripts.settings import add_settings_arguments
from stratum.scripts.target import Target, check_init, check_preflight, target_of_bundle, target_of_version
from stratum.staging import reap_staging
from stratum.steps import Outcome, Step, Work, run_steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_output(parser)
    add_dry_run(parser)
    add_root(parser)
    add_bundle_arguments(parser)
    add_settings_arguments(parser)
    parser.add_argument(
        "--supervise", action="store_true", help="bring the node up, then watch it (what the unit runs)"
    )


def read_target(work: Work, layout: Layout, bundle: Optional[VerifiedBundle]) -> Target:
    """The target, from the bundle or, without one, from the active version."""
    if bundle is not None:
        return target_of_bundle(work, bundle)
    current = layout.current()
    assert current is not None, "a bundle is demanded where no version is active"
    return target_of_version(layout, current)


def check_version(layout: Layout, target: Target) -> None:
    """``up`` never changes the version under a running node; raises :class:`StratumError`."""
    current = layout.current()
    if current is not None and current != target.record.version:
        raise StratumError(
            "other-version",
            f"version {current} is active and the bundle has {target.record.version}; `up` does not change versions",
            hint="run: stratum upgrade",
        )
    known = usable_record(layout, target.record.version) if current else None
    if known and known.manifest != target.record.manifest:
        raise StratumError(
            "version-differs",
            f"version {current} is active from another bundle of the same version ({known.manifest[:19]}…)",
            hint="give each bundle a version of its own",
        )


def check_places(context: Context, work: Work, layout: Layout, goal: Goal) -> None:
    """Somebody else's file at a place of ours is met here, before the first change; raises :class:`StratumError`.

    What somebody changed in a file of ours will be gone, so each such file is named.
    """
    actions = [
        *node_script.plan_modes(work),
        *node_script.plan_configuration(work, goal),
        *node_script.plan_network(work, layout, goal),
        *node_script.plan_units(work, layout, goal),
        *node_script.plan_program(context, work),
        *persistence.plan_enablement(work),
    ]
    warn_overwrites(context, work, actions, versions=[layout.version_dir(goal.record.version)])


def build_steps(context: Context, work: Work, stack: Stack, target: Target, goal: Goal, *, dry_run: bool) -> list[Step]:
    """The script."""
    layout, record, settings, live = stack.layout, goal.record, goal.settings, context.host.live
    steps = [
        Step("state", "record the data directories", lambda: node_script.plan_state(work)),
        Step("modes", "put back modes that were changed", lambda: node_script.plan_modes(work)),
        Step("unpack", "verify and unpack the bundle", lambda: node_script.plan_unpack(context, target.placement)),
        Step("version", "link the version's files", lambda: node_script.plan_version(work, layout, record)),
        prerequisites.settings_step(work, settings),
        *prerequisites.prerequisite_steps(context, work, settings, record, bridged=goal.bridged),
        Step("configure", "write the configuration", lambda: node_script.plan_configuration(work, goal)),
        Step("network", "write the container network", lambda: node_script.plan_network(work, layout, goal)),
        Step("units", "write the units", lambda: node_script.plan_units(work, layout, goal)),
        Step("program", "put stratum in its place", lambda: switch.plan_program(context, work)),
        Step("activate", "make the version current", lambda: node_script.plan_activate(work, layout, record)),
    ]
    steps += prerequisites.label_steps(context, work, settings)
    if live:
        steps += stack_script.network_steps(context, work, stack, goal)
        steps += stack_script.start_steps(context, work, stack, goal if dry_run else None)
        # containerd makes its directories at its first start; what is imported takes its label from them.
        steps += prerequisites.label_steps(context, work, settings, "data-labels")
        steps += image_script.import_steps(context, stack, record)
        steps.append(Step("history", "note what is active", lambda: node_script.plan_history(work, record)))
    return [
        *steps,
        Step("enable", "start at boot", lambda: persistence.plan_enablement(work)),
        Step("tidy", "remove old copies of stratum", lambda: node_script.plan_old_programs(context, work)),
    ]


def _bring_up(context: Context, arguments: argparse.Namespace, work: Work, stack: Stack) -> Outcome:
    dry_run, layout = arguments.dry_run, stack.layout
    with open_trusted(context, arguments) as bundle:
        target = read_target(work, layout, bundle)
        check_version(layout, target)
        goal = check_preflight(context, arguments, target)
        check_places(context, work, layout, goal)
        steps = build_steps(context, work, stack, target, goal, dry_run=dry_run)
        return perform(
            context, work, "up", steps, dry_run=dry_run, source=layout.current(), target=target.record.version
        )


def _undo(context: Context, work: Work, stack: Stack) -> str:
    """Take back what a first run made before it failed, so that the host is as it was; return what that came to."""
    ignore_signals()
    reap_staging(context.host)
    loaded = context.host.live and persistence.installed(context.host)
    started = context.host.live and stack.layout.current() is not None
    if started:
        run_steps(work, teardown.end_steps(context, work, stack))
    if len(work.receipt):
        for action in prerequisites.plan_restore(context, work):
            action.perform(work)
    remains = plan_kubelet_remains(work)
    removal = plan_removal(work)
    if len(work.receipt):
        for action in [*remains, *removal.actions, *removal.closing]:
            action.perform(work)
    for action in netmanagers.plan_forget(work, context.out.warn):
        action.perform(work)
    if loaded:
        persistence.forget(context.host, EVERY_UNIT)
    boot.undo_created()
    lock.remove_lock(context.host)
    left = ", ".join(str(item.path) for item in removal.left)
    if left:
        return f"what was done is taken back, except {left}"
    return "everything that was done is taken back" if started else "nothing was changed"


def _has_begun(work: Work, before: Optional[Operation]) -> bool:
    """Whether a step was done since ``before`` was the last operation: each is in the journal first."""
    try:
        return work.journal.read() != before
    except (StratumError, OSError):
        return True


def _fail(
    context: Context, work: Work, stack: Stack, cause: BaseException, *, undo: bool, before: Optional[Operation]
) -> NoReturn:
    """Raise ``cause`` with the state that it leaves; ``undo`` takes back what was done. ``before`` as in _has_begun."""
    error = system_error(cause) if isinstance(cause, OSError) else cause
    state = "nothing was changed"
    if _has_begun(work, before):
        state = "the node is as far as the steps above say; `stratum up` goes on, `stratum uninstall` removes it"
    if undo:
        try:
            state = _undo(context, work, stack)
        except (StratumError, OSError) as trouble:
            state = f"not everything could be taken back ({trouble}); run: stratum uninstall"
    if isinstance(error, StratumError):
        error.state = error.state or state
    raise error from (None if error is cause else cause)


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Bring the host up."""
    if arguments.supervise:
        supervise.run(context)
    dry_run = arguments.dry_run
    if not dry_run:
        context.require_root("up")
    check_init(context, arguments.skip_check)
    boot.require_compiled(persist=context.host.live and not dry_run)
    stack = Stack(Layout(context.host))
    with contextlib.nullcontext() if dry_run else lock.hold_lock(context.host, "up"):
        work = load_work(context)
        fresh = not len(work.receipt)
        if not dry_run:
            recover(context, work, stack, command="up")
        before = None if dry_run else work.journal.read()
        try:
            outcome = _bring_up(context, arguments, work, stack)
        except BaseException as error:
            if dry_run:
                raise
            _fail(context, work, stack, error, undo=fresh, before=before)
        if not dry_run:
            # What an older pyz unpacked, and what a run that was killed had begun to.
            boot.prune_runtime()
    if context.host.live:
        work.journal.close()  # the lock is given back: from here on the journal is another run's to write
        steps = stack_script.supervisor_steps(context)
        outcome.performed += run_steps(work, steps, dry_run=dry_run, on_step=announce(context, dry_run)).performed
    report(context, "up", outcome, dry_run=dry_run)
    if context.host.live and not dry_run:
        node_script.print_running(context, stack)
    return int(ExitCode.DONE)
