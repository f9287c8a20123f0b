"""What a node needs of its host, and giving the host back: settings, modules, sysctls, swap, mounts, labels, managers.

The same steps run in ``up``, before a switch to another version and at each start of the supervisor. What is for a
Kubernetes node only (a version with a kubelet) leaves a container host alone: swap there is the admin's matter.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Optional

from stratum.config import WORKER
from stratum.errors import HostRefusedError
from stratum.host import modules, netmanagers, rootmount, selinux, swap, sysctls
from stratum.host.addresses import read_network
from stratum.host.detection import detect_node_ips, families_of
from stratum.host.finding import REJECT, Finding
from stratum.host.nodeip import (
    RECORDED,
    check_argument,
    check_node_ip,
    check_pinned,
    resolve_node_ip,
    resolve_without_config,
)
from stratum.host.nodename import choose_node_name
from stratum.host.profiles import BASE, Profile, Sysctl, find_profile
from stratum.node import cni
from stratum.node.layout import Layout
from stratum.node.settings import Settings, plan_settings, read_settings
from stratum.node.stackspec import is_kubernetes_node, serves_dns
from stratum.node.versions import VersionRecord
from stratum.scripts import kubelet, localdns
from stratum.scripts.context import Context
from stratum.scripts.runtime import check_runtime
from stratum.scripts.settings import Chosen, read_join, read_merged
from stratum.steps import Action, RemoveDirectory, RemoveFile, Step, Work
from stratum.system import HostPath

__all__ = [
    "base_sysctls",
    "check_prerequisites",
    "choose_settings",
    "find_drift",
    "label_steps",
    "pin_node",
    "plan_restore",
    "prerequisite_steps",
    "restored_paths",
    "settings_step",
]

_PIN_WAIT = 60.0  # seconds: at boot an interface may come up after the supervisor
_PIN_EVERY = 1.0


def base_sysctls(record: VersionRecord) -> Sequence[Sysctl]:
    """The kernel settings that the version needs under any profile.

    A container host needs forwarding alone, which comes and goes with its bridge.
    """
    return BASE if is_kubernetes_node(record) else ()


# -- settings ---------------------------------------------------------------------------------------------


def choose_settings(
    context: Context, arguments: argparse.Namespace, record: VersionRecord
) -> tuple[Chosen, list[Finding]]:
    """What options, file and record say together, with the node's name and address; looks only.

    A name or address that is refused is a finding, so that it is shown with all others. Raises :class:`StratumError`.
    """
    if arguments.node_ip is not None:
        check_argument(arguments.node_ip)
    kubelet = is_kubernetes_node(record)
    merged = read_merged(context, arguments)
    merged.check(kubelet=kubelet)
    if not kubelet and merged.spec.role == WORKER:
        context.out.warn(f"version {record.version} has no kubelet: the role {WORKER} has no effect")
    token, ca = read_join(context, merged, bundle=arguments.bundle) if kubelet else (None, b"")
    spec, sources = merged.recorded()
    known = merged.known
    resolved = {name: known.sources[name] for name in ("nodeIP", "nodeName") if name in known.sources}
    settings = Settings(spec, known.node_ip, known.node_name, {**sources, **resolved})
    findings: list[Finding] = []
    try:
        settings = name_node(context, settings, record)
    except HostRefusedError as error:
        findings.append(Finding("node-name", REJECT, error.message, error.hint or ""))
    try:
        settings = address_node(context, settings, record, flag=arguments.node_ip or "")
    except HostRefusedError as error:
        findings.append(Finding("node-ip", REJECT, error.message, error.hint or ""))
    return Chosen(settings, token, ca), findings


def name_node(context: Context, settings: Settings, record: VersionRecord) -> Settings:
    """``settings`` with the node's name; none for a container host, and in a tree only one that is configured.

    Raises :class:`UsageError` and :class:`HostRefusedError`.
    """
    configured, recorded = settings.spec.node_name, settings.node_name
    if not is_kubernetes_node(record) or not (context.host.live or configured or recorded):
        return settings
    choice = choose_node_name(context.host, configured, recorded)
    if choice.name == recorded:
        return settings
    context.out.note(choice.note or f"node name {choice.name} ({choice.source})")
    source = settings.sources.get("nodeName", choice.source)
    return replace(settings, node_name=choice.name, sources={**settings.sources, "nodeName": source})


def address_node(
    context: Context, settings: Settings, record: VersionRecord, *, flag: Optional[str] = None
) -> Settings:
    """``settings`` with the node's address; none for a container host, and in a tree, whose machine will find its own.

    ``flag`` is the option's value, empty when it was not given; None at a start without options and file.
    Raises :class:`UsageError` for one that is no use, :class:`HostRefusedError` where none can be found, or where
    the recorded one is gone.
    """
    host, families = context.host, families_of(settings.cluster_cidrs)
    recorded, configured = settings.node_ip, settings.spec.network.node_ip
    if not is_kubernetes_node(record) or not host.live:
        given = flag or recorded
        if given:
            check_node_ip(given, families)
        return _with_address(settings, given, "option --node-ip") if flag else settings
    network = read_network(host)
    if flag is None and not configured:
        choice = resolve_without_config("", recorded, host.environ, lambda: detect_node_ips(network, families))
    else:
        flag = flag or ""
        choice = resolve_node_ip(flag, recorded, configured, host.environ, lambda: detect_node_ips(network, families))
    check_node_ip(choice.ip, families)
    if choice.source == RECORDED:
        check_pinned(choice.ip, network)
        if configured and configured != recorded:
            context.out.warn(
                f"node IP {recorded} stays, and network.nodeIP ({configured}) is not used: it is for a node's first "
                f"start; to move this node on purpose: stratum up --node-ip {configured}"
            )
        return settings
    context.out.note(f"node IP {choice.ip} ({choice.source})")
    for warning in choice.warnings:
        context.out.warn(warning)
    return _with_address(settings, choice.ip, f"option {choice.source}" if flag else choice.source)


def _with_address(settings: Settings, address: str, source: str) -> Settings:
    return replace(settings, node_ip=address, sources={**settings.sources, "nodeIP": source})


def pin_node(context: Context, record: VersionRecord) -> Settings:
    """The settings of an installed node with its name and address, which an image gets at its first start.

    A name or an address that is not there yet is waited for. Raises :class:`StratumError`.
    """
    settings = read_settings(context.host)
    deadline = context.host.monotonic() + _PIN_WAIT
    while True:
        try:
            return address_node(context, name_node(context, settings, record), record)
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
) -> tuple[Chosen, list[Finding]]:
    """The settings and what is to be said of the host before anything is written. Raises :class:`StratumError`."""
    chosen, findings = choose_settings(context, arguments, record)
    if context.host.live:
        findings += selinux.check_policy(context.host, _policy(context, chosen.settings))
        findings += modules.check_modules(context.host, _modules(record), before_loading=True)
        findings += check_runtime(context.host, record, chosen.settings)
    if serves_dns(record, chosen.settings):
        findings += localdns.check_host(context.host, chosen.settings)
    findings += kubelet.check_kubernetes(context, chosen.settings, record)
    return chosen, [finding for finding in findings if finding.check not in arguments.skip_check]


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
    if bridged or serves_dns(record, settings):
        steps.append(
            Step(
                "managers",
                "keep network managers off the node's own interfaces",
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
