"""``stratum preflight``: every check of the host and of a bundle at once; nothing is changed or written."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Optional

from stratum import boot
from stratum.bundle.place import Placement
from stratum.bundle.verify import VerifiedBundle, check_all_digests
from stratum.configfile import UNREADABLE
from stratum.errors import (
    BundleError,
    BundleNotFoundError,
    ExitCode,
    HostRefusedError,
    NotTrustedError,
    StratumError,
    UsageError,
)
from stratum.host import persistence, preflight
from stratum.host.preflight import REJECT, Finding, Need
from stratum.node.units import EVERY_UNIT
from stratum.node.versions import VersionRecord
from stratum.scripts import node as node_script
from stratum.scripts.choice import add_bundle_arguments, open_trusted
from stratum.scripts.context import Context, add_output, add_root
from stratum.scripts.prerequisites import check_prerequisites
from stratum.scripts.run import load_work
from stratum.scripts.runtime import check_plugins
from stratum.scripts.settings import add_settings_arguments, read_merged


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_output(parser)
    add_root(parser)
    add_bundle_arguments(parser)
    add_settings_arguments(parser)
    names = "\n".join(f"  {name:18} {what}" for name, what in preflight.CHECKS.items())
    parser.epilog = f"checks:\n{names}\n\n{parser.epilog}"


# What each error of a bundle is called here; any other says that its content is not what it should be.
_CHECKS = {"wrong-platform": "architecture", "no-containerd": "components"}


def _finding(error: StratumError) -> Finding:
    check = "signature" if isinstance(error, NotTrustedError) else _CHECKS.get(error.reference, "digests")
    return Finding(check, REJECT, error.message, error.hint or "get the bundle again")


def _check_digests(context: Context, bundle: VerifiedBundle) -> None:
    size = sum(item.size for item in bundle.manifest.layers)
    with context.out.progress("check digests", size) as progress:
        check_all_digests(bundle, progress.advance)


@dataclass
class Checked:
    """What there is to say of a bundle and of what it needs of the host."""

    name: str = "no bundle"
    findings: list[Finding] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    kubelet: Optional[str] = None
    record: Optional[VersionRecord] = None


def _prerequisites(context: Context, arguments: argparse.Namespace, record: Optional[VersionRecord]) -> list[Finding]:
    """What the settings demand of the host. For a user who may not read them that is a finding: it needs root."""
    try:
        if record is not None:
            return check_prerequisites(context, arguments, record)[1]
        # Without a version it is not known what of a configuration has an effect; whether it is one is.
        read_merged(context, arguments).check(kubelet=False)
    except PermissionError as error:
        return [Finding("root", REJECT, f"{error.filename}: cannot be read by this user", "run it with sudo")]
    except UsageError as error:
        if error.reference != UNREADABLE:
            raise
        return [Finding("root", REJECT, error.message, "run it with sudo")]
    return []


def check_bundle(context: Context, arguments: argparse.Namespace) -> Checked:
    """Look at the bundle; that there is none at all is said too. Raises :class:`StratumError`."""
    checked = Checked()
    try:
        with open_trusted(context, arguments) as bundle:
            if bundle is not None:
                checked.name = f"{bundle.description.name} {bundle.description.version}"
                checked.needs = node_script.needs(context, Placement(context.host, load_work(context).receipt, bundle))
                checked.record = record = node_script.record_of(bundle)
                checked.kubelet = record.component_version("kubelet")
                checked.findings += _prerequisites(context, arguments, record)
                checked.findings += check_plugins(context.host, record, node_script.plugins_of(bundle.description))
                _check_digests(context, bundle)
    except BundleNotFoundError as error:
        if arguments.bundle is not None:
            raise
        context.out.note(f"only the host is checked: {error.message}")
    except (BundleError, NotTrustedError, HostRefusedError) as error:
        if isinstance(error, HostRefusedError) and error.reference not in _CHECKS:
            raise
        checked.findings.append(_finding(error))
    return checked


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Check and report; exit status 10 when something rejects."""
    boot.require_compiled(persist=False)
    checked = check_bundle(context, arguments)
    if checked.record is None:
        checked.findings += _prerequisites(context, arguments, None)
    findings = preflight.check_host(
        context.host,
        needs=checked.needs,
        units=(*EVERY_UNIT, persistence.UNIT),
        skip=arguments.skip_check,
        kubelet=checked.kubelet,
    )
    findings += [finding for finding in checked.findings if finding.check not in arguments.skip_check]
    rejected = any(finding.severity == REJECT for finding in findings)
    for finding in findings:
        context.out.result(f"{finding.severity:7} {finding.check}: {finding.message}")
        context.out.result(f"        do: {finding.hint}")
    context.out.result(f"checked: this host and {checked.name}: {'refused' if rejected else 'fit'}")
    context.out.document(
        "Preflight",
        {"fit": not rejected, "bundle": checked.name, "findings": [finding.to_json() for finding in findings]},
    )
    return int(ExitCode.HOST_REFUSED if rejected else ExitCode.DONE)
