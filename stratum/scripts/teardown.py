"""Taking a node down: what ``uninstall`` does before it deletes, and an ``up`` that takes its first try back."""

from __future__ import annotations

from stratum import systemd
from stratum.host import firewalld, forwarding, kubechains, masquerade, mounts, network, portchains
from stratum.node import cni
from stratum.node.kubeletconfig import VOLUME_PLUGINS
from stratum.node.kubeletroot import kubelet_mount_roots
from stratum.node.sandboxes import plan_sandboxes
from stratum.node.stack import Stack
from stratum.node.traces import plan_traces
from stratum.node.units import EVERY_UNIT, SYSTEMD_DIR, UNIT_KUBELET
from stratum.receipt import STATE_DIRECTORY
from stratum.removal import Left
from stratum.scripts import localdns
from stratum.scripts import stack as stack_script
from stratum.scripts.context import Context
from stratum.scripts.runtime import plan_cdi_removal
from stratum.steps import Action, Call, Step, Work
from stratum.system import HostPath

__all__ = ["PORT_CHAINS", "end_steps", "had_kubelet", "plan_port_chains"]

PODS_SLICE = "kubepods.slice"  # kubelet's cgroup root with the systemd driver
PORT_CHAINS = f"{portchains.PREFIX}*"
ROOTS = (HostPath("/opt/stratum"), STATE_DIRECTORY, HostPath("/run/stratum"))


def plan_port_chains(work: Work) -> tuple[list[Action], list[Left]]:
    """What takes away the chains for published ports, as far as they are ours alone; and what of them stays."""
    if work.receipt.get(cni.HOST_BIN_DIR / "portmap") is None:
        return [], []
    actions, left = portchains.plan_removal(work.host, cni.NETWORK, shared=cni.others_use_cni(work))
    return actions, [Left(HostPath(PORT_CHAINS), why) for why in left]


def had_kubelet(work: Work) -> bool:
    """Whether this node has, or had, a kubelet of ours: an upgrade can have made a container host of it since."""
    return any(work.receipt.get(path) is not None for path in (SYSTEMD_DIR / UNIT_KUBELET, VOLUME_PLUGINS))


def plan_slice(context: Context) -> list[Action]:
    """Take away the slice that a kubelet makes for its pods; systemd keeps it for as long as nobody says so."""
    (state,) = systemd.read_units(context.host, [PODS_SLICE]).values()
    if state.active not in ("active", "activating"):
        return []
    return [Call("stop", PODS_SLICE, lambda: systemd.stop_unit(context.host, PODS_SLICE))]


def plan_network(context: Context, work: Work) -> list[Action]:
    """Remove our bridge and our part of the firewall; the containers' own interfaces and rules went with them."""
    actions = firewalld.plan_untrust(work)
    actions += forwarding.plan_restore(context.host) + masquerade.plan_removal(context.host)
    actions += plan_port_chains(work)[0]
    if had_kubelet(work):
        actions += kubechains.plan_removal(context.host)
    if not network.interface_exists(context.host, cni.BRIDGE):
        return actions
    return [*actions, Call("remove bridge", cni.BRIDGE, lambda: network.remove_bridge(context.host, cni.BRIDGE))]


def end_steps(context: Context, work: Work, stack: Stack) -> list[Step]:
    """End what runs and take back what it had of the kernel: units, containers, mounts, the network."""
    return [
        *stack_script.stop_steps(stack, tuple(reversed(EVERY_UNIT)), containers=True, warn=context.out.warn),
        *([Step("slice", "remove the pods' slice", lambda: plan_slice(context))] if had_kubelet(work) else []),
        Step("sandboxes", "remove what dead pods left in the network", lambda: plan_sandboxes(context.host)),
        Step(
            "traces",
            "remove what dead containers left in /run",
            lambda: [*plan_traces(context.host), *plan_cdi_removal(work)],
        ),
        Step(
            "unmount",
            "take away mounts below Stratum's directories",
            lambda: mounts.plan_unmount(work, (*ROOTS, *kubelet_mount_roots(work))),
        ),
        Step("network", "remove the container bridge", lambda: plan_network(context, work)),
        Step("localdns", "remove the network of LocalDNS", lambda: localdns.plan_teardown(work)),
    ]
