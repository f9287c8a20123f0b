"""``stratum uninstall``: remove what Stratum made, and nothing else.

The order is that of seed 004: remember enablement, disable, suppress restart, tear down, stop the unit,
delete, reload. When a step before the deletion fails, the node is put back as it was found.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from typing import Callable

from stratum import lock, systemd
from stratum.compiled import ROOT_PLACES
from stratum.errors import ExitCode, StratumError
from stratum.host import (
    kubechains,
    netmanagers,
    persistence,
)
from stratum.journal import JOURNAL_PATH
from stratum.node import cni, containerd
from stratum.node.kubeletroot import plan_kubelet_remains
from stratum.node.layout import Layout
from stratum.node.sandboxes import plan_sandboxes
from stratum.node.stack import Stack
from stratum.node.units import EVERY_UNIT, SYSTEMD_DIR, drop_in_dir
from stratum.receipt import STATE_DIRECTORY
from stratum.removal import Left, Removal, plan_removal
from stratum.scripts import prerequisites, teardown
from stratum.scripts import stack as stack_script
from stratum.scripts.context import Context, add_dry_run, add_output, add_root
from stratum.scripts.recover import recover
from stratum.scripts.run import ignore_signals, load_work, perform, report
from stratum.steps import Action, Call, Outcome, RemoveDirectory, RemoveFile, RemoveTree, Step, Work
from stratum.system import HostPath


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_output(parser)
    add_dry_run(parser)
    add_root(parser)
    parser.add_argument("--keep-data", action="store_true", help="leave containerd's data (images, containers)")


@dataclass(frozen=True)
class Found:
    """The node as uninstall found it, to be put back when a step fails."""

    enabled: bool
    supervised: bool
    running: bool


def find(context: Context) -> Found:
    """Remember what is enabled and running."""
    states = systemd.read_units(context.host, (persistence.UNIT, *EVERY_UNIT))
    return Found(
        persistence.unit_enabled(context.host),
        states[persistence.UNIT].active in ("active", "activating"),
        any(states[unit].active == "active" for unit in EVERY_UNIT),
    )


def put_back(context: Context, stack: Stack, found: Found) -> list[str]:
    """Make the node as it was found; return what could not be done."""
    failed = []
    attempts: list[tuple[bool, Callable[[], object]]] = [
        (True, lambda: persistence.allow_restart(context.host)),
        (found.enabled, lambda: persistence.enable(context.host)),
        (
            found.running,
            lambda: [
                action.perform(load_work(context))
                for action in stack_script.plan_start(context, load_work(context), stack)
            ],
        ),
        (found.supervised, lambda: persistence.start_later(context.host)),
    ]
    for wanted, attempt in attempts:
        try:
            if wanted:
                attempt()
        except (StratumError, OSError) as error:
            failed.append(str(error))
    return failed


def plan_disarm(context: Context) -> list[Action]:
    """No start at the next boot, and no restart now."""
    if not persistence.installed(context.host):
        return []
    return [
        Call("disable", persistence.UNIT, lambda: persistence.disable(context.host)),
        Call("suppress the restart of", persistence.UNIT, lambda: persistence.suppress_restart(context.host)),
    ]


def plan_stop_supervisor(context: Context) -> list[Action]:
    """Stop the supervisor, when nothing is left that it could watch."""
    if not persistence.installed(context.host):
        return []
    return [Call("stop", persistence.UNIT, lambda: persistence.stop(context.host))]


def plan_reload(context: Context) -> list[Action]:
    """systemd forgets the units that are gone."""
    return [Call("make systemd forget", persistence.UNIT, lambda: persistence.forget(context.host, EVERY_UNIT))]


def plan_disable(context: Context) -> list[Action]:
    """Take away what starts a unit of the stack at boot beside the supervisor: an admin's ``systemctl add-wants``.

    Seed 000, Destroy. The link would be left to lead nowhere; ``systemctl disable`` needs the unit's file.
    """
    host = context.host
    places = [SYSTEMD_DIR / name for name in host.listdir(SYSTEMD_DIR)] if host.is_dir(SYSTEMD_DIR) else []
    places = [path for path in places if path.suffix in (".wants", ".requires") and host.is_dir(path)]
    links = [path / unit for path in places for unit in EVERY_UNIT if host.is_link(path / unit)]
    return [RemoveFile(path) for path in links]


def teardown_steps(context: Context, work: Work, stack: Stack) -> list[Step]:
    """Everything before the deletion; a failure in here puts the node back."""
    return [
        Step("disarm", "keep the supervisor from coming back", lambda: plan_disarm(context)),
        *teardown.end_steps(context, work, stack),
        Step("stop-supervisor", "stop the supervisor", lambda: plan_stop_supervisor(context)),
        # Last: what still ran until here needed it.
        *restore_steps(context, work),
    ]


def restore_steps(context: Context, work: Work) -> list[Step]:
    """The host as it was: swap, kernel settings, mounts, file contexts."""
    return [Step("restore", "give the host back what was changed", lambda: prerequisites.plan_restore(context, work))]


def delete_steps(context: Context, work: Work, removal: Removal, *, dry_run: bool) -> list[Step]:
    """The deletion, then systemd's own memory, the record last: until then a run that is cut off can go on."""
    remains = plan_kubelet_remains(work)
    disable = Step("disable", "take away what starts the units at boot", lambda: plan_disable(context))
    steps = [disable, Step("delete", "delete what the receipt lists", lambda: [*remains, *removal.actions])]
    if context.host.live:
        steps += [
            Step("forget", "let systemd forget the units", lambda: plan_reload(context)),
            Step(
                "managers",
                "let network managers read their files again",
                lambda: netmanagers.plan_forget(work, context.out.warn, removed=dry_run),
            ),
        ]
    return [*steps, Step("close", "remove the record", lambda: removal.closing)]


def uninstall(context: Context, work: Work, *, keep_data: bool, dry_run: bool) -> tuple[Outcome, Removal]:
    """Tear down, then delete. Errors pass through, with the state that they leave."""
    stack = Stack(Layout(context.host))
    outcome = Outcome()
    # A dry run has not taken away what the real one has by now: attachments, and the link that starts us at boot.
    released: list[HostPath] = prerequisites.restored_paths(context, work) if dry_run else []
    if not context.host.live:
        outcome = perform(context, work, "uninstall", restore_steps(context, work), dry_run=dry_run, ends=False)
    else:
        found = find(context)
        try:
            steps = teardown_steps(context, work, stack)
            outcome = perform(context, work, "uninstall", steps, dry_run=dry_run, ends=False)
        except BaseException as error:
            if not dry_run:
                ignore_signals()
                failed = put_back(context, stack, found)
                if not failed:
                    work.journal.roll_back(str(error) or "interrupted")
                if isinstance(error, StratumError):
                    error.state = "nothing was deleted; " + (
                        f"not everything could be put back: {'; '.join(failed)}"
                        if failed
                        else "the node runs as before"
                    )
            raise
    if dry_run and context.host.live:
        released += [persistence.ENABLEMENT, *(item.path for item in cni.read_attachments(context.host))]
        released += [item.path for item in plan_sandboxes(context.host) if isinstance(item, RemoveFile)]
    drop_ins = [drop_in_dir(unit) for unit in (persistence.UNIT, *EVERY_UNIT)]
    keep = (containerd.DATA_ROOT,) if keep_data else ()
    removal = plan_removal(work, keep=keep, released=released, attached=drop_ins)
    if context.host.live:
        undone, staying = teardown.plan_port_chains(work)
        # After the teardown none is left to do, unless somebody began to use them in that moment.
        if not dry_run:
            staying += [Left(HostPath(teardown.PORT_CHAINS), f"{item.subject}: in use by now") for item in undone]
        if teardown.had_kubelet(work):
            made = "made by pods of the cluster, and gone with the next boot"
            staying += [Left(HostPath(name), made) for name in kubechains.find_others(context.host)]
        removal.left += staying
    steps = delete_steps(context, work, removal, dry_run=dry_run)
    try:
        deleted = perform(context, work, "uninstall", steps, dry_run=dry_run)
    except StratumError as error:
        error.state = "the node is stopped and partly deleted; run `stratum uninstall` again"
        raise
    outcome.performed += deleted.performed
    return outcome, removal


def clear_remains(context: Context) -> None:
    """What has our names and no record: a first run was killed before it wrote one, or a last one after."""
    work = load_work(context)
    if len(work.receipt):
        return
    actions: list[Action] = []
    for place in ROOT_PLACES:
        # Compiled parts are unpacked before there can be a record.
        path = HostPath(place.path)
        if context.host.is_dir(path):
            actions += [RemoveTree(path), RemoveDirectory(path.parent)]
    actions += [
        # The power may have taken the journal's removal back and not the receipt's.
        RemoveFile(JOURNAL_PATH),
        RemoveDirectory(STATE_DIRECTORY),
        RemoveTree(lock.LOCK_PATH.parent, spare=lock.LOCK_PATH.name),
    ]
    for action in actions:
        action.perform(work)


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Uninstall, or list what it would do."""
    context.require_root("uninstall")
    dry_run = arguments.dry_run
    with contextlib.nullcontext() if dry_run else lock.hold_lock(context.host, "uninstall"):
        work = load_work(context)
        if not dry_run:
            recover(context, work, Stack(Layout(context.host)), command="uninstall")
        if len(work.receipt):
            outcome, removal = uninstall(context, work, keep_data=arguments.keep_data, dry_run=dry_run)
        else:
            outcome, removal = Outcome(), Removal()
        if not dry_run:
            clear_remains(context)
            lock.remove_lock(context.host)
    if not outcome.changed:
        context.out.result("nothing to remove: Stratum is not installed here")
        context.out.document("Result", {"command": "uninstall", "changed": False, "steps": [], "left": []})
        return int(ExitCode.DONE)
    for left in removal.left:
        context.out.result(f"{'stays' if dry_run else 'left'}: {left.path}: {left.why}")
    report(context, "uninstall", outcome, dry_run=dry_run, more={"left": [left.to_json() for left in removal.left]})
    return int(ExitCode.DONE)
