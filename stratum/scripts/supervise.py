"""What ``stratum.service`` runs: bring the node up, tell systemd, then watch it."""

from __future__ import annotations

from typing import NoReturn

from stratum import lock, systemd
from stratum.errors import AlreadyRunningError, NotInstalledError, StratumError
from stratum.host.notify import notify
from stratum.node.layout import Layout
from stratum.node.stack import UNITS, Stack
from stratum.node.versions import read_record
from stratum.scripts import images as image_script
from stratum.scripts import prerequisites
from stratum.scripts import stack as stack_script
from stratum.scripts.context import Context
from stratum.scripts.recover import recover
from stratum.scripts.run import load_work, perform
from stratum.steps import Step

_LOCK_WAIT = 600.0  # seconds: an `up` or `upgrade` by hand may be at work
_WATCH_EVERY = 15.0  # seconds


def bring_up(context: Context, stack: Stack) -> None:
    """Everything that the installed version needs to run. Raises StratumError."""
    work = load_work(context)
    recover(context, work, stack, command="supervise")
    version = stack.layout.current()
    record = read_record(stack.layout, version) if version else None
    if version is None or record is None:
        raise NotInstalledError(
            "not-installed", f"{stack.layout.current_link}: no version is active", hint="run: stratum up --bundle FILE"
        )
    settings = prerequisites.pin_node_ip(context, record)
    for finding in prerequisites.find_drift(context, settings, record):
        # What was put right once and is not so at this start: somebody or something works against us.
        context.out.warn(f"{finding.message}; {finding.hint}")
    bridged = "bridge" in stack.layout.plugins(version)
    steps: list[Step] = [
        *prerequisites.prerequisite_steps(context, work, settings, record, bridged=bridged),
        *prerequisites.label_steps(context, work, settings),
        *stack_script.network_steps(context, work, stack),
        *stack_script.start_steps(work, stack),
        *image_script.import_steps(context, stack, record),
    ]
    perform(context, work, "supervise", steps, dry_run=False)


def watch_once(context: Context, stack: Stack) -> str:
    """Look at the units and put right what died; the line for systemd's STATUS=."""
    states = systemd.read_units(context.host, UNITS)
    # systemd restarts a unit that fails; what needs us is one that is down for good.
    down = [unit for unit in UNITS if states[unit].active in ("inactive", "failed")]
    if not down:
        return f"version {stack.layout.current()} is running"
    try:
        with lock.hold_lock(context.host, lock.SUPERVISOR):
            bring_up(context, stack)
    except AlreadyRunningError:
        return f"{', '.join(down)} down while another run is at work"
    context.out.warn(f"{', '.join(down)} was down and has been started again")
    return f"version {stack.layout.current()} is running; {', '.join(down)} had to be started again"


def run(context: Context) -> NoReturn:
    """Run until systemd says stop (SIGTERM ends it through the command line's own boundary)."""
    context.require_root("up --supervise")
    stack = Stack(Layout(context.host))
    notify(context.host, "STATUS=starting the node")
    with lock.hold_lock(context.host, lock.SUPERVISOR, wait=_LOCK_WAIT):
        bring_up(context, stack)
    notify(context.host, f"READY=1\nSTATUS=version {stack.layout.current()} is running")
    while True:
        context.host.sleep(_WATCH_EVERY)
        try:
            notify(context.host, f"STATUS={watch_once(context, stack)}")
        except StratumError as error:
            # The node is broken now and may not be in a while: the supervisor goes on and says so.
            context.out.error(error)
            notify(context.host, f"STATUS={error.message}")
