"""Steps that several commands share: starting, gating, importing images, stopping."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Callable, Optional

from stratum import systemd
from stratum.errors import join_errors
from stratum.host import firewalld, forwarding, masquerade, persistence, portchains
from stratum.node import cni, containerd, pods
from stratum.node.backend import Backend, Hooks
from stratum.node.settings import plan_settings
from stratum.node.stack import CONTAINER_CGROUPS, Stack
from stratum.node.stackspec import is_kubernetes_node
from stratum.node.units import (
    SYSTEMD_DIR,
    UNIT_CONTAINERD,
    UNIT_KUBELET,
    UNIT_KUBELET_LAUNCH_CHECK,
    UNIT_LOCALDNS,
    UNIT_LOCALDNS_NETWORK,
    UnitSpec,
    stack_units,
)
from stratum.scripts import images as image_script
from stratum.scripts import kubelet, localdns, node, runtime
from stratum.scripts.context import Context
from stratum.scripts.goal import Goal, goal_in_force
from stratum.steps import Action, Call, Command, PlaceLink, Step, Work

__all__ = [
    "make_backend",
    "plan_start",
    "plan_stop",
    "plan_version_needs",
    "record_ahead",
    "restart_steps",
    "start_steps",
    "stop_steps",
]

Warn = Callable[[str], object]
_KUBELET = (UNIT_KUBELET, UNIT_KUBELET_LAUNCH_CHECK)


def make_backend(
    context: Context, work: Work, stack: Stack, *, goal: Optional[Goal] = None, previous: Optional[Goal] = None
) -> Backend:
    """The stack as the contract's backend, with this node's gates and configuration.

    ``goal`` is what an upgrade leads to, ``previous`` what it would go back to. Without a goal the node is as it is.
    Raises :class:`StratumError`.
    """
    now = goal or previous or goal_in_force(stack.layout)
    spec = now.unit_spec(stack.layout) if now else UnitSpec(stack.layout.bin_dir, containerd.CONFIG_PATH)
    gates = {unit: functools.partial(_gate, context, work, stack, unit) for unit in stack_units(_every(spec))}
    # A switch writes the units for the GPUs of that moment; any other start finds those of the last `up`.
    gpus = [] if goal or previous else runtime.plan_gpu_refresh(work, spec)
    hooks = Hooks(
        before_start=functools.partial(_perform, work, gpus) if gpus else None,
        after_start=gates,
        after_restart=gates,
        plan_upgrade_start=functools.partial(_plan_configure, context, work, stack, goal) if goal else None,
        before_rollback_start=functools.partial(_configure, context, work, stack, previous) if previous else None,
    )
    back = previous.unit_spec(stack.layout) if previous else None
    return Backend(work, stack.layout, spec, hooks, rollback_spec=back)


def _perform(work: Work, actions: Sequence[Action]) -> None:
    for action in actions:
        action.perform(work)


def _every(spec: UnitSpec) -> UnitSpec:
    """Gates are by unit: those of a version that a switch goes back to are needed too."""
    return replace(spec, kubelet=True, localdns="/x")


def _gate(context: Context, work: Work, stack: Stack, unit: str) -> None:
    stack.wait_ready(unit)
    if unit == UNIT_CONTAINERD and UNIT_KUBELET in stack.units:
        # Before the kubelet starts: it would try to pull what is in the bundle.
        image_script.import_now(context, work, stack)
    if unit == UNIT_KUBELET:
        kubelet.finish_join(work)
    stack.note_started(unit)


def plan_version_needs(work: Work, stack: Stack, goal: Goal, warn: Optional[Warn] = None) -> list[Action]:
    """Settings, configuration and plugin links as ``goal`` needs them; ``warn`` hears what a way back goes without."""
    return [
        *plan_settings(work, goal.settings),
        *node.plan_configuration(work, goal, warn),
        *node.plan_network(work, stack.layout, goal),
    ]


def _plan_configure(
    context: Context, work: Work, stack: Stack, goal: Goal, warn: Optional[Warn] = None
) -> list[Action]:
    """What a switch does for ``goal`` while nothing runs; ``warn`` as in :func:`plan_version_needs`."""
    # What LocalDNS had of the network can go, if it is not to come back.
    gone = [] if goal.serves_dns else [action for step in localdns_steps(work, goal) for action in step.plan()]
    # A bridge that comes needs its way out; where there is one already, it has it.
    comes = goal.bridged and cni.subnet_in_force(stack.host) is None
    way_out = [*plan_trust(context, work, True), *plan_masquerade(stack, goal)] if comes else []
    needs = plan_version_needs(work, stack, goal, warn)
    return [*plan_release(stack, context.out.warn), *gone, *needs, *way_out]


def _configure(context: Context, work: Work, stack: Stack, goal: Goal) -> None:
    _perform(work, _plan_configure(context, work, stack, goal, context.out.warn))


def record_ahead(work: Work, stack: Stack, goal: Goal) -> None:
    """Record what a switch to ``goal`` will make, while the old version still runs: the receipt takes time to sync.

    What is in the way of it is met here too, before anything stops. Raises OSError and :class:`StratumError`.
    """
    actions: list[Action] = [PlaceLink(stack.layout.current_link, goal.record.version)]
    actions += plan_version_needs(work, stack, goal)
    work.receipt.record(*(entry for action in actions for entry in action.entries))


def plan_start(context: Context, work: Work, stack: Stack, ahead: Optional[Goal] = None) -> list[Action]:
    """Start each unit that is not active; restart those that run with other files than those in place now.

    With ``ahead``, in a dry run, as it will be when all that this goal needs is in its place.
    """
    backend = make_backend(context, work, stack, goal=ahead)
    states = systemd.read_units(stack.host, backend.units)
    down = [unit for unit in backend.units if states[unit].active != "active"]
    stale = [unit for unit in backend.units if stack.started_with(unit) != stack.inputs(unit)]
    if ahead is not None:
        changes = [*plan_version_needs(work, stack, ahead), *node.plan_units(work, stack.layout, ahead)]
        stopped = {action.subject for action in changes if action.verb == "stop"}
        # What requires a unit that goes stops with it (systemd.unit(5), Requires=).
        down += [UNIT_CONTAINERD, UNIT_KUBELET] if UNIT_LOCALDNS in stopped else []
        down += [UNIT_KUBELET] if stopped.intersection(_KUBELET) else []
        changed = {action.subject for action in changes}
        stale += [unit for unit in backend.units if stack.depends_on(unit, ahead.settings, changed)]
    return backend.plan_bring_up(down, stale)


def start_steps(context: Context, work: Work, stack: Stack, ahead: Optional[Goal] = None) -> list[Step]:
    """Start the stack in order, each unit behind its gate; ``ahead`` as in :func:`plan_start`."""

    def plan() -> list[Action]:
        return plan_start(context, work, stack, ahead)

    return [Step("start", "start the units and wait until they answer", plan)]


def plan_stop(stack: Stack, units: Sequence[str]) -> list[Action]:
    """Stop ``units`` in the order given, as far as they run."""
    states = systemd.read_units(stack.host, units)
    # By its state alone: a unit whose file somebody deleted may well run.
    running = [name for name in units if not states[name].stopped]
    if not running:
        return []
    return [Call("stop", ", ".join(running), lambda: join_errors(systemd.stop_units(stack.host, running), "stop"))]


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
        # The kubelet first: it would start again what ends.
        steps.append(Step("stop-kubelet", "stop the kubelet", lambda: plan_stop(stack, _KUBELET)))
        steps.append(Step("end-containers", "end the running containers", lambda: plan_end_containers(stack)))
    steps.append(Step("stop", "stop the units", lambda: plan_stop(stack, tuple(units))))
    if containers:
        steps.append(Step("end-shims", "end what outlived containerd", lambda: plan_reap(stack)))
        steps.append(Step("release", "give back what the containers held", lambda: plan_release(stack, warn)))
    return steps


def restart_steps(context: Context, work: Work, stack: Stack) -> list[Step]:
    """Restart the stack in start order; the host and the containers go on."""
    return make_backend(context, work, stack).restart_steps()


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


def plan_masquerade(stack: Stack, goal: Goal) -> list[Action]:
    """Forwarding and address translation for the container network, where there is or will be one."""
    subnet = node.bridge_subnet(stack.host, goal.settings) if goal.bridged else cni.subnet_in_force(stack.host)
    if not subnet:
        return []
    # A Kubernetes node has forwarding among its sysctls.
    forward = [] if is_kubernetes_node(goal.record) else forwarding.plan_forwarding(stack.host)
    return [
        *forward,
        *masquerade.plan_masquerade(stack.host, subnet),
        *portchains.plan_remember(stack.host),
    ]


def localdns_steps(work: Work, goal: Goal) -> list[Step]:
    """The network of LocalDNS; on a node without it, what takes away one that it had."""
    if goal.serves_dns:
        make = functools.partial(localdns.plan_network, work.host, goal.settings)
        return [Step("localdns", "make the network of LocalDNS", make)]
    if work.receipt.get(SYSTEMD_DIR / UNIT_LOCALDNS_NETWORK) is None:
        return []
    return [Step("localdns", "take LocalDNS away", lambda: localdns.plan_withdrawal(work))]


def network_steps(context: Context, work: Work, stack: Stack, goal: Goal) -> list[Step]:
    """The container network of this boot: nothing of an earlier one, and the way out; and that of LocalDNS."""
    bridged = goal.bridged

    def plan_stale() -> list[Action]:
        attached = cni.read_attachments(stack.host)
        return [] if not attached or stack.shims() or stack.ctr.answers() else plan_release(stack, context.out.warn)

    return [
        *localdns_steps(work, goal),
        Step("release-network", "give back what containers of an earlier boot held", plan_stale),
        Step("firewall", "let the container network through firewalld", lambda: plan_trust(context, work, bridged)),
        Step("masquerade", "let containers reach out", lambda: plan_masquerade(stack, goal)),
    ]
