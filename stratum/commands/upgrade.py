"""``stratum upgrade``: prepare a new version beside the running one, then switch to it.

Nothing that runs is touched until the new version is unpacked, verified and seen to run. When the switch fails
the previous version runs again and the exit status is 20.
"""

from __future__ import annotations

import argparse
import contextlib

from stratum import boot, lock
from stratum.errors import ExitCode, NotInstalledError, StratumError, UsageError
from stratum.node.layout import Layout
from stratum.node.stack import Stack
from stratum.node.versions import read_record
from stratum.scripts import kubelet, prerequisites, switch
from stratum.scripts import node as node_script
from stratum.scripts.choice import add_bundle_arguments, open_trusted
from stratum.scripts.context import Context, add_dry_run, add_output
from stratum.scripts.goal import Goal, goal_in_force
from stratum.scripts.recover import recover
from stratum.scripts.run import announce, load_work, perform, report
from stratum.scripts.settings import add_settings_arguments
from stratum.scripts.target import Target, check_preflight, target_of_bundle, target_of_version
from stratum.steps import Outcome, Step, Work, run_steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_output(parser)
    add_dry_run(parser)
    add_bundle_arguments(parser)
    add_settings_arguments(parser)
    parser.add_argument("--to", metavar="VERSION", help="switch to a version that is installed (no bundle is read)")
    parser.add_argument("--prepare-only", action="store_true", help="unpack and check; leave the running version alone")
    parser.add_argument("--allow-downgrade", action="store_true", help="accept a bundle with a lower serial")


def check_direction(layout: Layout, current: str, target: Target, *, allow_downgrade: bool) -> None:
    """Refuse a lower serial, and other content under the version that runs; raises :class:`StratumError`."""
    known = read_record(layout, current)
    if known is None:
        return
    if target.record.version == current and target.record.manifest != known.manifest:
        raise StratumError(
            "version-differs",
            f"version {current} is active from another bundle of the same version ({known.manifest[:19]}…)",
            hint="give each bundle a version of its own",
        )
    if target.record.serial < known.serial and not allow_downgrade:
        raise StratumError(
            "downgrade",
            f"version {target.record.version} has serial {target.record.serial}, the running one {known.serial}",
            hint="if going back is what you want: --allow-downgrade, or stratum rollback",
        )


def prepare_steps(context: Context, work: Work, layout: Layout, target: Target, goal: Goal) -> list[Step]:
    """Everything that leaves the running version alone. Its settings are in force until the switch."""
    record, settings = goal.record, goal.settings
    return [
        Step("state", "record the data directories", lambda: node_script.plan_state(work)),
        Step("modes", "put back modes that were changed", lambda: node_script.plan_modes(work)),
        Step("unpack", "verify and unpack the bundle", lambda: node_script.plan_unpack(context, target.placement)),
        Step("version", "link the version's files", lambda: node_script.plan_version(work, layout, record)),
        *prerequisites.prerequisite_steps(context, work, settings, record, bridged=goal.bridged),
        *prerequisites.label_steps(context, work, settings),
        Step("check", "see that the new programs run", lambda: switch.plan_check(work, layout, record.version)),
    ]


def upgrade(
    context: Context, arguments: argparse.Namespace, work: Work, stack: Stack, target: Target, goal: Goal
) -> Outcome:
    """Prepare, then switch. Raises StratumError; UpgradeError when the switch failed."""
    dry_run = arguments.dry_run
    steps = prepare_steps(context, work, stack.layout, target, goal)
    outcome = perform(context, work, "prepare", steps, dry_run=dry_run, target=goal.record.version)
    if arguments.prepare_only:
        return outcome
    if dry_run:
        switching = switch.switch_plan(context, work, stack, goal)
        outcome.performed += run_steps(work, switching, dry_run=True, on_step=announce(context, True)).performed
    else:
        outcome.performed += switch.switch_version(context, work, stack, goal, name="upgrade")
    program = [
        Step("program", "put stratum in its place", lambda: switch.plan_program(context, work)),
        Step("tidy", "remove old copies of stratum", lambda: node_script.plan_old_programs(context, work)),
    ]
    outcome.performed += perform(context, work, "program", program, dry_run=dry_run).performed
    return outcome


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Upgrade."""
    dry_run = arguments.dry_run
    context.require_root("upgrade")
    context.require_installed(Layout(context.host).current_link)
    if arguments.to is not None and arguments.bundle is not None:
        raise UsageError("two-sources", "--to names an installed version and --bundle a new one: give one of them")
    boot.require_compiled(persist=not dry_run)
    stack = Stack(Layout(context.host))
    with contextlib.nullcontext() if dry_run else lock.hold_lock(context.host, "upgrade"):
        work = load_work(context)
        if not dry_run:
            recover(context, work, stack, command="upgrade")
        current = stack.layout.current()
        if current is None:
            raise NotInstalledError("not-installed", f"{stack.layout.current_link}: no version is active")
        with open_trusted(context, arguments) if arguments.to is None else contextlib.nullcontext() as bundle:
            target = (
                target_of_bundle(work, bundle) if bundle else target_of_version(stack.layout, arguments.to or current)
            )
            check_direction(stack.layout, current, target, allow_downgrade=arguments.allow_downgrade)
            if target.record.version == current:
                context.out.result(f"version {current} is active already; to repair it run: stratum up")
                outcome = Outcome()
            else:
                goal = check_preflight(context, arguments, target)
                kubelet.check_stays(work, goal_in_force(stack.layout), goal)
                outcome = upgrade(context, arguments, work, stack, target, goal)
    report(context, "upgrade", outcome, dry_run=dry_run, more={"from": current, "to": target.record.version})
    if not dry_run and not arguments.prepare_only:
        node_script.print_running(context, stack)
    return int(ExitCode.DONE)
