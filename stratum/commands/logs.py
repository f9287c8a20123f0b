"""``stratum logs``: the journal of the node's units."""

from __future__ import annotations

import argparse
import os
from typing import Optional

from stratum.errors import StratumError, UsageError
from stratum.host import persistence
from stratum.node.layout import Layout
from stratum.node.stack import Stack
from stratum.node.units import EVERY_UNIT
from stratum.scripts.context import Context


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    names = "containerd, kubelet, localdns, stratum"
    parser.add_argument("unit", nargs="?", help=f"{names}, or a unit's full name (default: all that the node has)")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what comes")
    parser.add_argument("-n", "--lines", type=int, metavar="N", help="only the last N lines")
    parser.add_argument("--all-boots", action="store_true", help="earlier boots too (default: this one)")


def unit_names(layout: Layout, unit: Optional[str]) -> list[str]:
    """The units that ``unit`` names, those of the node without it; raises :class:`UsageError`."""
    if unit is None:
        return [*Stack(layout).units, persistence.UNIT]
    known = [*EVERY_UNIT, persistence.UNIT]
    for name in known:
        if unit in (name, name.removesuffix(".service"), name.removesuffix(".service").removeprefix("stratum-")):
            return [name]
    raise UsageError("unknown-unit", f"{unit}: no unit of Stratum", hint=f"one of: {', '.join(known)}")


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Become journalctl."""
    layout = Layout(context.host)
    context.require_installed(layout.base)
    program = context.host.which("journalctl")
    if program is None:
        raise StratumError("command-missing", "journalctl: no such program", hint="install systemd's journal tools")
    argv = [program, *(f"--unit={name}" for name in unit_names(layout, arguments.unit))]
    argv += [] if arguments.all_boots else ["--boot"]
    argv += ["--follow"] if arguments.follow else []
    argv += [f"--lines={arguments.lines}"] if arguments.lines is not None else []
    os.execv(program, argv)
