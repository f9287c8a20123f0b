"""What a node needs of its host, and giving the host back: settings, modules, sysctls, swap, mounts, labels, managers.

The same steps run in ``up``, before a switch to another version and at each start of the supervisor. What is for a
Kubernetes node only (a version with a kubelet) leaves a container host alone: swap there is the admin's matter.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from stratum.errors import HostRefusedError
from stratum.host import modules, netmanagers, rootmount, selinux, swap, sysctls
from stratum.host.addresses import read_network
from stratum.host.detection import detect_node_ips, families_of
from stratum.host.finding import REJECT, Finding
from stratum.host.nodeip import RECORDED, check_argument, check_node_ip, check_pinned, resolve_without_config
from stratum.host.profiles import BASE, PROFILES, Profile, Sysctl, find_profile
from stratum.node import cni
from stratum.node.layout import Layout
from stratum.node.settings import Settings, plan_settings, read_settings
from stratum.node.stackspec import is_kubernetes_node
from stratum.node.versions import VersionRecord
from stratum.scripts.context import Context
from stratum.steps import Action, RemoveDirectory, RemoveFile, Step, Work
from stratum.system import HostPath

__all__ = [
    "add_settings_arguments",
    "base_sysctls",
    "check_prerequisites",
    "choose_settings",
    "find_drift",
    "label_steps",
    "pin_node_ip",
    "plan_restore",
    "prerequisite_steps",
    "restored_paths",
    "settings_step",
]

_PIN_WAIT = 60.0  # seconds: at boot an interface may come up after the supervisor
_PIN_EVERY = 1.0


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that are recorded and hold for each later start."""
    group = parser.add_argument_group("settings of the node (recorded; one that is not given stays as it is)")
    group.add_argument("--profile", choices=sorted(PROFILES), help="kernel settings of a profile (default: default)")
    group.add_argument("--node-ip", metavar="ADDRESS[,ADDRESS]", help="the node's address (default: detected)")
    group.add_argument(
        "--cluster-cidr",
        metavar="CIDR[,CIDR]",
        help="networks of pods and services, whose families the node's addresses have (default: IPv4)",
    )
    group.add_argument(
        "--selinux",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="file contexts and labels where SELinux is on (default: yes)",
    )


def base_sysctls(record: VersionRecord) -> Sequence[Sysctl]:
    """The kernel settings that the version needs under any profile.

    A container host needs forwarding alone, which comes and goes with its bridge.
    """
    return BASE if is_kubernetes_node(record) else ()


# -- settings ---------------------------------------------------------------------------------------------


def choose_settings(context: Context, arguments: argparse.Namespace, record: VersionRecord) -> Settings:
    """What the command line and the record say together; looks only. Raises :class:`StratumError`."""
    known = read_settings(context.host)
    cidrs = tuple(arguments.cluster_cidr.split(",")) if arguments.cluster_cidr else known.cluster_cidrs
    spec = replace(
        known.spec,
        profile=find_profile(arguments.profile or known.profile).name,
        network=replace(known.spec.network, cluster_cidrs=cidrs),
        selinux=known.selinux if arguments.selinux is None else arguments.selinux,
    )
    chosen = replace(known, spec=spec)
    if arguments.node_ip:
        check_argument(arguments.node_ip)
    return replace(chosen, node_ip=choose_node_ip(context, chosen, record, flag=arguments.node_ip or ""))


def choose_node_ip(context: Context, settings: Settings, record: VersionRecord, *, flag: str = "") -> str:
    """The node's address; empty for a container host, and in a tree, whose machine will find its own.

    Raises :class:`UsageError` for one that is no use, :class:`HostRefusedError` where none can be found, or where
    the recorded one is gone.
    """
    host, families = context.host, families_of(settings.cluster_cidrs)
    if not is_kubernetes_node(record) or not host.live:
        given = flag or settings.node_ip
        if given:
            check_node_ip(given, families)
        return given
    network = read_network(host)
    choice = resolve_without_config(flag, settings.node_ip, host.environ, lambda: detect_node_ips(network, families))
    check_node_ip(choice.ip, families)
    if choice.source == RECORDED:
        check_pinned(choice.ip, network)
    else:
        context.out.note(f"node IP {choice.ip} ({choice.source})")
    for warning in choice.warnings:
        context.out.warn(warning)
    return choice.ip


def pin_node_ip(context: Context, record: VersionRecord) -> Settings:
    """The settings of an installed node with its address, which a node made as an image gets at its first start.

    An address that is not there yet is waited for. Raises :class:`StratumError`.
    """
    settings = read_settings(context.host)
    deadline = context.host.monotonic() + _PIN_WAIT
    while True:
        try:
            return replace(settings, node_ip=choose_node_ip(context, settings, record))
        except HostRefusedError:
            if context.host.monotonic() >= deadline:
                raise
        context.host.sleep(_PIN_EVERY)


# -- checks -----------------------------------------------------------------------------------------------


def _policy(context: Context, settings: Settings) -> selinux.Policy:
    return selinux.Policy(opt_out=not settings.selinux, existing=Layout(context.host).current() is not None)


def _modules(record: VersionRecord) -> Sequence[modules.Module]:
    return modules.NODE if is_kubernetes_node(record) else modules.CONTAINER_HOST


def check_prerequisites(
    context: Context, arguments: argparse.Namespace, record: VersionRecord
) -> tuple[Settings, list[Finding]]:
    """The settings and what is to be said of the host before anything is written.

    An address that is refused is a finding too, so that it is shown with all others. Raises :class:`StratumError`.
    """
    findings: list[Finding] = []
    try:
        settings = choose_settings(context, arguments, record)
    except HostRefusedError as error:
        settings = read_settings(context.host)
        findings.append(Finding("node-ip", REJECT, error.message, error.hint or ""))
    if context.host.live:
        findings += selinux.check_policy(context.host, _policy(context, settings))
        findings += modules.check_modules(context.host, _modules(record), before_loading=True)
    return settings, [finding for finding in findings if finding.check not in arguments.skip_check]


def find_drift(context: Context, settings: Settings, record: VersionRecord) -> list[Finding]:
    """What is not as the node needs it now: swap that is on, kernel settings with other values (report rows 14, 19)."""
    if not context.host.live:
        return []
    found = sysctls.check_sysctls(context.host, find_profile(settings.profile), base_sysctls(record))
    return [*(swap.check_swap(context.host) if is_kubernetes_node(record) else ()), *found]


# -- steps ------------------------------------------------------------------------------------------------


def prerequisite_steps(
    context: Context, work: Work, settings: Settings, record: VersionRecord, *, bridged: bool
) -> list[Step]:
    """Make the host fit for the version; each step finds nothing to do when it is. In a tree, the files only.

    ``bridged`` says that the version has the bridge network.
    """
    host, warn = context.host, context.out.warn
    profile = find_profile(settings.profile)
    steps = [
        Step(
            "selinux",
            "register file contexts",
            lambda: selinux.plan_contexts(work, _policy(context, settings), warn),
        ),
    ]
    if is_kubernetes_node(record):
        steps.append(Step("modules", "load kernel modules", lambda: modules.plan_modules(work, modules.NODE, warn)))
    steps.append(Step("sysctls", "set kernel settings", lambda: _plan_sysctls(context, work, profile, record)))
    if is_kubernetes_node(record):
        steps += [
            Step("swap", "switch swap off", lambda: swap.plan_swap_off(work)),
            Step(
                "mounts",
                "mount what network plugins need",
                lambda: [*rootmount.plan_root_shared(host, warn), *rootmount.plan_bpf(host, warn)],
            ),
        ]
    if bridged:
        steps.append(
            Step(
                "managers",
                "keep network managers off the container network",
                lambda: netmanagers.plan_unmanaged(work, cni.BRIDGE, warn),
            )
        )
    return steps


def _plan_sysctls(context: Context, work: Work, profile: Profile, record: VersionRecord) -> list[Action]:
    base = base_sysctls(record)
    for finding in sysctls.check_sysctls(context.host, profile, base):
        # Of the live values the actions speak; a file that will undo them at the next boot nobody else names.
        if finding.check == "sysctl-overridden":
            context.out.warn(f"{finding.message}; {finding.hint}")
    return sysctls.plan_sysctls(work, profile, context.out.warn, base)


def settings_step(work: Work, settings: Settings) -> Step:
    """Record the settings: from then on they are in force."""
    return Step("settings", "record the node's settings", lambda: plan_settings(work, settings))


def label_steps(context: Context, work: Work, settings: Settings, name: str = "labels") -> list[Step]:
    """Give what was placed the labels of its place, when all of it is there and before it is executed."""
    return [
        Step(
            name,
            "label the files for SELinux",
            lambda: selinux.plan_relabel(work, _policy(context, settings), context.out.warn),
        )
    ]


# -- back -------------------------------------------------------------------------------------------------


def plan_restore(context: Context, work: Work) -> list[Action]:
    """Give the host its swap, kernel settings and mounts back, as far as nobody changed them since.

    What is only a file of ours goes with the receipt. Raises :class:`StratumError`.
    """
    warn = context.out.warn
    return [
        *swap.plan_undo(work, warn),
        *sysctls.plan_undo(context.host, warn),
        *rootmount.plan_undo(context.host, warn),
        *selinux.plan_unregister(work),
    ]


def restored_paths(context: Context, work: Work) -> list[HostPath]:
    """The paths that :func:`plan_restore` removes, for a dry run of what comes after it."""
    return [action.path for action in plan_restore(context, work) if isinstance(action, (RemoveFile, RemoveDirectory))]
