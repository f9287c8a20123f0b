"""Steps that several commands share: starting, gating, importing images, stopping."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Callable, Optional

from stratum import systemd
from stratum.errors import join_errors
from stratum.host import firewalld, forwarding, masquerade, mounts, persistence, portchains
from stratum.node import cni, pods
from stratum.node.backend import Backend, Hooks
from stratum.node.stack import CONTAINER_CGROUPS, UNITS, Stack
from stratum.node.units import UNIT_CONTAINERD
from stratum.node.versions import VersionRecord
from stratum.receipt import STATE_DIRECTORY
from stratum.scripts import node
from stratum.scripts.context import Context
from stratum.steps import Action, Call, Command, PlaceLink, Step, Work

__all__ = ["make_backend", "plan_start", "plan_stop", "record_ahead", "restart_steps", "start_steps", "stop_steps"]

Warn = Callable[[str], object]


def make_backend(
    work: Work,
    stack: Stack,
    *,
    record: Optional[VersionRecord] = None,
    previous: Optional[VersionRecord] = None,
    plugins: Optional[tuple[str, ...]] = None,
    warn: Optional[Warn] = None,
) -> Backend:
    """The stack as the contract's backend, with this node's gates and configuration.

    ``record`` is the version that an upgrade leads to, ``previous`` the one that it would go back to; ``plugins``
    are those of a ``record`` that is not on the disk yet. ``warn`` hears of what a switch can do without.
    """
    gates = {UNIT_CONTAINERD: functools.partial(_gate, stack, UNIT_CONTAINERD)}
    hooks = Hooks(
        after_start=gates,
        after_restart=gates,
        plan_upgrade_start=functools.partial(_plan_configure, work, stack, record, warn, plugins) if record else None,
        before_rollback_start=functools.partial(_configure, work, stack, previous, warn) if previous else None,
    )
    return Backend(work, stack.layout, node.unit_spec(stack.layout), hooks)


def _gate(stack: Stack, unit: str) -> None:
    stack.wait_ready(unit)
    stack.note_started()


def _plan_version_needs(
    work: Work, stack: Stack, record: VersionRecord, plugins: Optional[tuple[str, ...]] = None
) -> list[Action]:
    """Configuration and plugin links as ``record`` needs them."""
    names = stack.layout.plugins(record.version) if plugins is None else plugins
    return [*node.plan_configuration(work, record), *node.plan_network(work, stack.layout, names)]


def _plan_configure(
    work: Work,
    stack: Stack,
    record: VersionRecord,
    warn: Optional[Warn],
    plugins: Optional[tuple[str, ...]] = None,
) -> list[Action]:
    return [*plan_release(stack, warn), *_plan_version_needs(work, stack, record, plugins)]


def _configure(work: Work, stack: Stack, record: VersionRecord, warn: Optional[Warn]) -> None:
    for action in _plan_configure(work, stack, record, warn):
        action.perform(work)


def record_ahead(work: Work, stack: Stack, record: VersionRecord) -> None:
    """Record what a switch to ``record`` will make, while the old version still runs: the receipt takes time to sync.

    What is in the way of it is met here too, before anything stops. Raises OSError and :class:`StratumError`.
    """
    actions = [PlaceLink(stack.layout.current_link, record.version), *_plan_version_needs(work, stack, record)]
    work.receipt.record(*(entry for action in actions for entry in action.entries))


def plan_start(work: Work, stack: Stack) -> list[Action]:
    """Start each unit that is not active; restart them when they run with other files than those in place now."""
    backend = make_backend(work, stack)
    if backend.status():
        fresh = stack.started_with() == stack.inputs()
        return [] if fresh else list(backend.restart_steps()[0].plan())
    return list(backend.start_steps()[0].plan())


def start_steps(work: Work, stack: Stack) -> list[Step]:
    """Start the stack in order, each unit behind its gate."""
    return [Step("start", "start the units and wait until they answer", lambda: plan_start(work, stack))]


def plan_stop(stack: Stack, units: Sequence[str]) -> list[Action]:
    """Stop ``units`` in the order given, as far as they run."""
    states = systemd.read_units(stack.host, units)
    # By its state alone: a unit whose file somebody deleted may well run.
    running = [name for name in units if states[name].active not in ("inactive", "failed")]
    if not running:
        return []
    return [Call("stop", ", ".join(running), lambda: join_errors(systemd.stop_units(stack.host, running), "stop"))]


def take_down_steps(work: Work, stack: Stack) -> list[Step]:
    """What undoes the start of a node that has run no container yet: units, mounts of an import, kernel settings."""
    host = stack.host
    return [
        Step("stop", "stop the units", lambda: plan_stop(stack, tuple(reversed(UNITS)))),
        Step(
            "unmount",
            "take away what an import had mounted",
            lambda: mounts.plan_unmount(work, (STATE_DIRECTORY,)),
        ),
        Step(
            "network",
            "give back the kernel's settings",
            lambda: [
                *firewalld.plan_untrust(work),
                *masquerade.plan_removal(host),
                *forwarding.plan_restore(host),
            ],
        ),
    ]


def plan_end_containers(stack: Stack) -> list[Action]:
    """End the containers through containerd while it answers; none when none is there."""
    if not stack.shims():
        return []
    return [Call("end", "every running container", lambda: join_errors(stack.end_containers(), "end containers"))]


def plan_reap(stack: Stack) -> list[Action]:
    """End what outlived the units; nothing when nothing did."""
    left = stack.shims()
    if not left:
        return []
    what = ", ".join(str(process.pid) for process in left)
    return [Call("kill", f"processes {what}", lambda: join_errors(pods.end_pods(stack.host), "end shims"))]


def stop_steps(stack: Stack, units: Sequence[str], *, containers: bool, warn: Optional[Warn] = None) -> list[Step]:
    """Stop ``units``; with ``containers`` what runs under containerd ends first. ``warn`` is for the release."""
    steps = []
    if containers:
        steps.append(Step("end-containers", "end the running containers", lambda: plan_end_containers(stack)))
    steps.append(Step("stop", "stop the units", lambda: plan_stop(stack, tuple(units))))
    if containers:
        steps.append(Step("end-shims", "end what outlived containerd", lambda: plan_reap(stack)))
        steps.append(Step("release", "give back what the containers held", lambda: plan_release(stack, warn)))
    return steps


def restart_steps(work: Work, stack: Stack) -> list[Step]:
    """Restart the stack in start order; the host and the containers go on."""
    return make_backend(work, stack).restart_steps()


def supervisor_steps(context: Context) -> list[Step]:
    """Start the supervisor unit, which watches the stack from now on."""

    def plan() -> list[Action]:
        if persistence.active(context.host):
            return []
        return [Command(("systemctl", "start", "--no-block", persistence.UNIT), 60.0)]

    return [Step("watch", "start the supervisor", plan)]


def plan_release(stack: Stack, warn: Optional[Warn]) -> list[Action]:
    """Give back what containers that are gone still hold in the network and among the cgroups.

    With ``warn`` a node goes on without: an address that a plugin does not give back is lost until the next try, and
    no reason to be down. Without it that raises :class:`StratumError`.
    """
    held = [attachment.container for attachment in cni.read_attachments(stack.host)]
    held += [str(group) for group in CONTAINER_CGROUPS if stack.host.is_dir(group)]
    if not held:
        return []

    def release() -> None:
        errors = stack.release()
        if warn is None:
            join_errors(errors, "release")
            return
        for error in errors:
            warn(f"a container's network could not be given back: {error.message}")

    return [Call("release", ", ".join(held), release)]


def plan_trust(context: Context, work: Work, bridged: bool) -> list[Action]:
    """The bridge in firewalld's trusted zone, where there is or will be (``bridged``) one."""
    if not bridged and cni.subnet_in_force(work.host) is None:
        return []
    return firewalld.plan_trust(work, [cni.BRIDGE], context.out.warn)


def plan_masquerade(stack: Stack, bridged: bool) -> list[Action]:
    """Forwarding and address translation for the container network, where there is or will be (``bridged``) one."""
    subnet = cni.choose_subnet(stack.host) if bridged else cni.subnet_in_force(stack.host)
    if not subnet:
        return []
    return [
        *forwarding.plan_forwarding(stack.host),
        *masquerade.plan_masquerade(stack.host, subnet),
        *portchains.plan_remember(stack.host),
    ]


def network_steps(context: Context, work: Work, stack: Stack, *, bridged: bool = False) -> list[Step]:
    """The container network of this boot: nothing of an earlier one, and the way out.

    ``bridged`` tells a dry run of the first ``up`` that an earlier step writes the network.
    """

    def plan_stale() -> list[Action]:
        attached = cni.read_attachments(stack.host)
        return [] if not attached or stack.shims() or stack.ctr.answers() else plan_release(stack, context.out.warn)

    return [
        Step("release-network", "give back what containers of an earlier boot held", plan_stale),
        Step("firewall", "let the container network through firewalld", lambda: plan_trust(context, work, bridged)),
        Step("masquerade", "let containers reach out", lambda: plan_masquerade(stack, bridged)),
    ]
