"""``stratum status``: what is installed, whether it runs, what drifted. Exit status 0 only when ready."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from typing import Optional

from stratum import lock, systemd
from stratum.errors import ExitCode, UsageError
from stratum.host import persistence
from stratum.host.finding import Finding
from stratum.journal import Operation
from stratum.node.layout import Layout
from stratum.node.settings import Settings, read_settings
from stratum.node.stack import Stack
from stratum.node.versions import VersionRecord, read_record
from stratum.receipt import Condition, Entry
from stratum.scripts.context import Context, add_output
from stratum.scripts.nodestatus import NodeStatus, read_node
from stratum.scripts.prerequisites import find_drift as find_prerequisites
from stratum.scripts.recover import BESIDE
from stratum.scripts.run import load_work
from stratum.scripts.settings import find_differing
from stratum.steps import Work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_output(parser)
    parser.add_argument(
        "--wait", metavar="SECONDS", type=float, default=0.0, help="wait that long for the node to be ready"
    )


@dataclass(frozen=True)
class Status:
    """What ``status`` reports."""

    version: Optional[str]
    record: Optional[VersionRecord]
    units: dict[str, systemd.UnitState]
    answers: bool
    enabled: bool
    drift: list[str]
    unfinished: Optional[Operation]
    at_work: bool  # a run holds the lock now: what is unfinished is in progress
    settings: Settings
    config: str  # how the configuration file differs from what is in force; empty when it does not
    prerequisites: list[Finding]  # swap that is on, kernel settings that are not those of the node
    drop_ins: dict[str, list[str]]  # by unit, those that Stratum did not write
    node: Optional[NodeStatus]  # of a version with a kubelet

    @property
    def ready(self) -> bool:
        """Whether the node does its work: the stack is active and answers, and no change of it is unfinished."""
        return not self.troubles

    @property
    def troubles(self) -> list[str]:
        """Why the node is not ready, in words."""
        found = [] if self.version is not None else ["no version is active"]
        states = [state for unit, state in self.units.items() if unit != persistence.UNIT]
        found += [f"{state.unit} is {state.active}" for state in states if state.active != "active"]
        found += [] if self.answers else ["containerd does not answer"]
        found += self.node.troubles if self.node else []
        if self.unfinished is not None and self.unfinished.name not in BESIDE:
            found.append(f"{self.unfinished.name} is {'in progress' if self.at_work else 'unfinished'}")
        return found


def find_drift(work: Work) -> list[str]:
    """The recorded paths that are missing or changed, each with what is wrong."""
    found = [(entry, _drift_of(work, entry)) for entry in work.receipt]
    return [f"{entry.path}: {what}" for entry, what in found if what]


def _drift_of(work: Work, entry: Entry) -> str:
    condition = work.receipt.condition(entry)
    if condition == Condition.CHANGED or (condition == Condition.MISSING and entry.kind in ("file", "link")):
        return condition
    mode = work.receipt.changed_mode(entry)
    return "" if mode is None else f"mode {mode:04o}, was {entry.mode:04o}"


def read_status(context: Context, *, drift: bool = True) -> Status:
    """Look at the host; raises StratumError."""
    work = load_work(context)
    layout = Layout(context.host)
    version = layout.current()
    record = read_record(layout, version) if version else None
    settings = read_settings(context.host)
    stack = Stack(layout)
    units = systemd.read_units(context.host, (*stack.units, persistence.UNIT))
    return Status(
        version,
        record,
        units,
        version is not None and stack.ctr.answers(),
        systemd.is_enabled(context.host, persistence.UNIT),
        find_drift(work) if drift else [],
        work.journal.unfinished(),
        lock.is_held(context.host),
        settings,
        differs_from_file(context, settings) if drift else "",
        find_prerequisites(context, settings, record) if record and drift else [],
        {unit: [path for path in state.drop_ins if not work.receipt.get(path)] for unit, state in units.items()},
        read_node(context.host, record, settings),
    )


def differs_from_file(context: Context, settings: Settings) -> str:
    """How the configuration file differs from what is in force; one that is broken differs too."""
    try:
        paths = find_differing(context, settings)
    except UsageError as error:
        return f"cannot be used: {error.message}"
    return f"says otherwise than what is in force: {', '.join(paths)} (to apply it: stratum up)" if paths else ""


def wait_ready(context: Context, seconds: float) -> None:
    """Wait up to ``seconds`` until the node is ready."""
    deadline = context.host.monotonic() + seconds
    while context.host.monotonic() < deadline and not read_status(context, drift=False).ready:
        context.host.sleep(0.5)


def _since(context: Context, operation: Operation) -> str:
    minutes = max(0, int(context.host.now() - operation.started)) // 60
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(operation.started))} UTC, {minutes} min ago"


def print_text(context: Context, status: Status) -> None:
    """The report for people; it fits one screen."""
    out, record = context.out, status.record
    out.result(f"version    {status.version or 'none'}" + (f" of {record.bundle}" if record else ""))
    if record:
        out.result(f"signed by  {', '.join(record.signers) or 'nobody (the check was skipped)'}")
        out.result("components " + " ".join(f"{name}={number}" for name, number, _ in record.components))
    for unit, state in status.units.items():
        enabled = (
            (", starts at boot" if status.enabled else ", does NOT start at boot") if unit == persistence.UNIT else ""
        )
        out.result(f"unit       {unit}: {state.active} ({state.sub}){enabled}")
        for path in status.drop_ins[unit]:
            out.result(f"           drop-in of yours: {path}")
    out.result(f"containerd {'answers' if status.answers else 'does not answer'}")
    for line in status.node.lines() if status.node else ():
        out.result(line)
    if status.unfinished:
        target = f" to {status.unfinished.target}" if status.unfinished.target else ""
        step = f" at step {status.unfinished.step}" if status.unfinished.step else ""
        begun = _since(context, status.unfinished)
        kind = "in progress" if status.at_work else "unfinished"
        out.result(f"{kind} {status.unfinished.name}{target}{step} ({begun})")
        if status.unfinished.error:
            out.result(f"           {status.unfinished.error}")
    if status.settings.node_ip:
        out.result(f"node IP    {status.settings.node_ip}")
    if status.settings.node_name:
        out.result(f"node name  {status.settings.node_name}")
    if status.config:
        out.result(f"config     the configuration {status.config}")
    for finding in status.prerequisites:
        out.result(f"host       {finding.message}")
    for line in status.drift[:8]:
        out.result(f"drift      {line}")
    if len(status.drift) > 8:
        out.result(f"drift      and {len(status.drift) - 8} more paths")
    out.result(f"ready      {'yes' if status.ready else 'no: ' + '; '.join(status.troubles)}")


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Report."""
    context.require_root("status")
    context.require_installed(Layout(context.host).base)
    if arguments.wait > 0:
        wait_ready(context, arguments.wait)
    status = read_status(context)
    print_text(context, status)
    context.out.document(
        "Status",
        {
            "ready": status.ready,
            "version": status.version,
            "bundle": status.record.bundle if status.record else None,
            "serial": status.record.serial if status.record else None,
            "signers": list(status.record.signers) if status.record else [],
            "units": {
                unit: {"active": state.active, "sub": state.sub, "dropIns": status.drop_ins[unit]}
                for unit, state in status.units.items()
            },
            "containerdAnswers": status.answers,
            **(status.node.to_json() if status.node else {}),
            "notReady": status.troubles,
            "enabled": status.enabled,
            "nodeIP": status.settings.node_ip or None,
            "nodeName": status.settings.node_name or None,
            "profile": status.settings.profile,
            "config": status.config or None,
            "host": [finding.to_json() for finding in status.prerequisites],
            "drift": status.drift,
            "unfinished": asdict(status.unfinished) if status.unfinished else None,
            "inProgress": status.unfinished is not None and status.at_work,
        },
    )
    return int(ExitCode.DONE if status.ready else ExitCode.FAILED)
