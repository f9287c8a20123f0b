"""``stratum rollback``: go back to the version that ran before, or to a named one that is installed."""

from __future__ import annotations

import argparse
import contextlib
from typing import Optional

from stratum import lock
from stratum.errors import BundleNotFoundError, ExitCode, NotInstalledError
from stratum.node.history import previous_version, read_history
from stratum.node.layout import Layout
from stratum.node.settings import Settings, read_settings
from stratum.node.stack import Stack
from stratum.node.versions import VersionRecord
from stratum.scripts import node as node_script
from stratum.scripts import prerequisites, switch
from stratum.scripts.context import Context, add_dry_run, add_output
from stratum.scripts.goal import Goal
from stratum.scripts.recover import recover
from stratum.scripts.run import announce, load_work, perform, report
from stratum.scripts.target import check_units, target_of_version
from stratum.steps import Outcome, Step, run_steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_output(parser)
    add_dry_run(parser)
    parser.add_argument("version", nargs="?", help="an installed version (default: the one that ran before)")


def choose_version(layout: Layout, given: Optional[str]) -> str:
    """The version to go back to; raises :class:`BundleNotFoundError`."""
    if given is not None:
        return given
    found = previous_version(read_history(layout.host), layout.current(), layout.versions())
    if found is None:
        raise BundleNotFoundError(
            "no-previous-version",
            f"no other version that ran before is installed under {layout.base}",
            hint="run: stratum versions; then: stratum rollback VERSION",
        )
    return found


def choose_settings(context: Context, record: VersionRecord) -> Settings:
    """The settings in force, with the name and the address of a node that never was one. Raises StratumError."""
    settings = read_settings(context.host)
    if settings.node_name and settings.node_ip:
        return settings
    return prerequisites.address_node(context, prerequisites.name_node(context, settings, record), record)


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Go back."""
    dry_run = arguments.dry_run
    context.require_root("rollback")
    context.require_installed(Layout(context.host).current_link)
    stack = Stack(Layout(context.host))
    layout = stack.layout
    with contextlib.nullcontext() if dry_run else lock.hold_lock(context.host, "rollback"):
        work = load_work(context)
        if not dry_run:
            recover(context, work, stack, command="rollback")
        current = layout.current()
        if current is None:
            raise NotInstalledError("not-installed", f"{layout.current_link}: no version is active")
        target = target_of_version(layout, choose_version(layout, arguments.version))
        record = target.record
        goal = Goal(record, target.plugins, choose_settings(context, record))
        outcome = Outcome()
        if record.version != current:
            check_units(context)
            check = Step("check", "see that its programs run", lambda: switch.plan_check(work, layout, record.version))
            repair = Step("version", "link the version's files", lambda: node_script.plan_version(work, layout, record))
            # Of a version that never ran, or not since the host was given back what a node takes.
            host = prerequisites.prerequisite_steps(context, work, goal.settings, record, bridged=goal.bridged)
            steps = [repair, *host, check]
            outcome = perform(context, work, "prepare", steps, dry_run=dry_run, target=record.version)
            if dry_run:
                switching = switch.switch_plan(context, work, stack, goal)
                outcome.performed += run_steps(work, switching, dry_run=True, on_step=announce(context, True)).performed
            else:
                outcome.performed += switch.switch_version(context, work, stack, goal, name="rollback")
    report(context, "rollback", outcome, dry_run=dry_run, more={"from": current, "to": record.version})
    if not dry_run:
        node_script.print_running(context, stack)
    return int(ExitCode.DONE)
