"""What a host is to become: the version out of a bundle, or one that is installed, and the gate before it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from stratum.bundle.place import Placement
from stratum.bundle.verify import VerifiedBundle
from stratum.errors import BundleNotFoundError, HostRefusedError, StratumError
from stratum.host import persistence, preflight
from stratum.node.layout import Layout
from stratum.node.units import EVERY_UNIT
from stratum.node.versions import VersionRecord, read_record
from stratum.scripts import kubelet
from stratum.scripts import node as node_script
from stratum.scripts.context import Context
from stratum.scripts.goal import Goal
from stratum.scripts.prerequisites import check_prerequisites
from stratum.scripts.runtime import check_plugins
from stratum.steps import Work

__all__ = ["Target", "check_init", "check_preflight", "check_units", "target_of_bundle", "target_of_version"]


@dataclass(frozen=True)
class Target:
    """What the host is to become. ``placement`` is None for a version that is installed already."""

    record: VersionRecord
    plugins: tuple[str, ...]
    placement: Optional[Placement]


def target_of_bundle(work: Work, bundle: VerifiedBundle) -> Target:
    """The version that a verified bundle holds."""
    placement = Placement(work.host, work.receipt, bundle)
    return Target(node_script.record_of(bundle), node_script.plugins_of(bundle.description), placement)


def target_of_version(layout: Layout, version: str) -> Target:
    """An installed version. Raises :class:`BundleNotFoundError` and :class:`StratumError`."""
    if version not in layout.versions():
        raise BundleNotFoundError(
            "version-missing",
            f"{version}: not installed under {layout.base} (installed: {', '.join(layout.versions()) or 'none'})",
            hint="run: stratum versions",
        )
    record = read_record(layout, version)
    if record is None:
        raise StratumError(
            "version-unreadable",
            f"{layout.version_dir(version)}: has no bundle.json",
            hint="run again with --bundle FILE",
        )
    return Target(record, layout.plugins(version), None)


def check_preflight(context: Context, arguments: argparse.Namespace, target: Target) -> Goal:
    """The gate: every finding is shown, and one that rejects raises :class:`HostRefusedError`.

    Returns what the node will be: the target under the settings of this run, and what it joins a cluster with.
    """
    chosen, prerequisites = check_prerequisites(context, arguments, target.record)
    findings = preflight.check_host(
        context.host,
        needs=node_script.needs(context, target.placement) if target.placement else (),
        units=(*EVERY_UNIT, persistence.UNIT),
        skip=arguments.skip_check,
        kubelet=target.record.component_version("kubelet"),
    )
    plugins = check_plugins(context.host, target.record, target.plugins)
    findings += [*prerequisites, *(finding for finding in plugins if finding.check not in arguments.skip_check)]
    for finding in findings:
        if finding.severity == preflight.WARN:
            context.out.warn(f"{finding.check}: {finding.message}; {finding.hint}")
    _refuse(findings)
    join = kubelet.join_of(context.host, chosen, target.record)
    return Goal(target.record, target.plugins, chosen.settings, join)


def check_init(context: Context, skip: Sequence[str]) -> None:
    """A host without systemd is no place for a node: raises :class:`HostRefusedError` before anything is written.

    Everything else preflight says at once, and later: reading the bundle for it may need compiled parts on the disk.
    """
    if context.host.live and "systemd" not in skip:
        try:
            _refuse(preflight.check_systemd(context.host))
        except HostRefusedError as error:
            error.state = "nothing was changed"
            raise


def check_units(context: Context) -> None:
    """A unit that the admin masked cannot start again: raises :class:`HostRefusedError` before it is stopped."""
    _refuse(preflight.check_masked(context.host, (*EVERY_UNIT, persistence.UNIT)))


def _refuse(findings: Sequence[preflight.Finding]) -> None:
    rejected = [finding for finding in findings if finding.severity == preflight.REJECT]
    if rejected:
        raise HostRefusedError(
            "host-refused",
            "this host is not fit: " + "; ".join(f"{item.check}: {item.message}" for item in rejected),
            hint="; ".join(dict.fromkeys(item.hint for item in rejected)),
        )
