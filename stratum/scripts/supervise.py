"""What ``stratum.service`` runs: bring the node up, tell systemd, then watch it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NoReturn

from stratum import lock
from stratum.errors import NotInstalledError, StratumError, system_error
from stratum.host.notify import extend_start, notify, watchdog_of
from stratum.node.kubeletconfig import BOOTSTRAP
from stratum.node.layout import Layout
from stratum.node.stack import Stack
from stratum.node.stackspec import is_kubernetes_node
from stratum.scripts import images as image_script
from stratum.scripts import node as node_script
from stratum.scripts import prerequisites
from stratum.scripts import stack as stack_script
from stratum.scripts.context import Context
from stratum.scripts.goal import Goal, goal_in_force
from stratum.scripts.recover import recover
from stratum.scripts.run import load_work, perform
from stratum.scripts.watch import PATIENCE, Watch
from stratum.steps import Step, Work

_LOCK_WAIT = 600.0  # seconds: an `up` or `upgrade` by hand may be at work
_WATCH_EVERY = 15.0  # seconds


def _active(stack: Stack) -> Goal:
    goal = goal_in_force(stack.layout)
    if goal is None:
        raise NotInstalledError(
            "not-installed", f"{stack.layout.current_link}: no version is active", hint="run: stratum up --bundle FILE"
        )
    return goal


def _host_steps(context: Context, work: Work, stack: Stack, goal: Goal, *, unfinished: bool = False) -> list[Step]:
    """What the host must be, in order: the same steps at each start and when something came undone.

    With ``unfinished`` an ``up`` was cut off, maybe between the record of its settings and what follows from them.
    """
    settings, record = goal.settings, goal.record
    steps = prerequisites.prerequisite_steps(context, work, settings, record, bridged=goal.bridged)
    if is_kubernetes_node(record) or goal.serves_dns or unfinished or context.host.lexists(BOOTSTRAP):
        # It depends on what changes under a node: resolvers, dates of certificates, a join that is complete by now.
        # A file that the configuration names for a registry may be on a stick that is gone by now.
        configure = functools.partial(node_script.plan_configuration, work, goal, context.out.warn)
        steps.append(Step("configure", "write the configuration", configure))
    if unfinished:
        network = functools.partial(node_script.plan_network, work, stack.layout, goal)
        units = functools.partial(node_script.plan_units, work, stack.layout, goal)
        steps += [Step("network", "write the container network", network), Step("units", "write the units", units)]
    return [
        *steps,
        *prerequisites.label_steps(context, work, settings),
        *stack_script.network_steps(context, work, stack, goal),
    ]


def bring_up(context: Context, stack: Stack) -> None:
    """Everything that the installed version needs to run. Raises StratumError."""
    work = load_work(context)
    recover(context, work, stack, command="supervise")
    goal = _active(stack)
    settings, record = prerequisites.pin_node(context, goal.record), goal.record
    for finding in prerequisites.find_drift(context, settings, record):
        # What was put right once and is not so at this start: somebody or something works against us.
        context.out.warn(f"{finding.message}; {finding.hint}")
    goal = replace(goal, settings=settings)
    operation = work.journal.unfinished()
    steps: list[Step] = [
        prerequisites.settings_step(work, settings),
        *_host_steps(context, work, stack, goal, unfinished=operation is not None and operation.name == "up"),
        *stack_script.start_steps(context, work, stack),
        *image_script.import_steps(context, stack, record),
    ]
    perform(context, work, "supervise", steps, dry_run=False)


def put_right(context: Context, stack: Stack) -> list[StratumError]:
    """Make the host again what the installed version needs; the units are left alone.

    Every step is tried; what failed is returned. Raises :class:`StratumError` when none could be.
    """
    work = load_work(context)
    recover(context, work, stack, command="supervise")
    errors: list[StratumError] = []
    goal = _active(stack)
    steps = _host_steps(context, work, stack, goal)
    if stack.ctr.answers():
        steps += image_script.import_steps(context, stack, goal.record)
    for step in steps:
        try:
            perform(context, work, "supervise", [step], dry_run=False)
        except StratumError as error:
            errors.append(error)
        except OSError as error:
            errors.append(system_error(error))
    return errors


def run(context: Context) -> NoReturn:
    """Run until systemd says stop (SIGTERM ends it through the command line's own boundary)."""
    context.require_root("up --supervise")
    host, stack = context.host, Stack(Layout(context.host))
    watchdog = watchdog_of(host)
    notify(host, "STATUS=starting the node")
    # The unit's limit is for a start that hangs; what takes long here has limits of its own.
    extend_start(host, _LOCK_WAIT + PATIENCE)
    with lock.hold_lock(host, lock.SUPERVISOR, wait=_LOCK_WAIT):
        bring_up(context, stack)
    watch = Watch(context, stack, lambda: bring_up(context, stack), lambda: put_right(context, stack), watchdog)
    notify(host, f"READY=1\nSTATUS=version {stack.layout.current()} is running")
    while True:
        notify(host, f"STATUS={watch.look()}")
        watchdog.alive()
        host.sleep(watchdog.shorten(_WATCH_EVERY))
