"""``stratum localdns``: make LocalDNS's interface and rules, or take them away. Its network unit runs this at boot."""

from __future__ import annotations

import argparse

from stratum.config import LocalDNS
from stratum.errors import ExitCode, UsageError
from stratum.scripts.context import Context
from stratum.scripts.localdns import bring_down, bring_up


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("action", choices=("up", "down"), help="make them, or take them away")
    parser.add_argument("--address", default=LocalDNS().address, help="LocalDNS's address (default: %(default)s)")


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Make what is missing, or remove what is there. It takes no lock: who holds it starts the unit."""
    context.require_root("localdns")
    if not context.host.live:
        raise UsageError("no-machine", "localdns: works on the running machine only")
    lines = bring_up(context.host, arguments.address) if arguments.action == "up" else bring_down(context.host)
    for line in lines:
        context.out.note(line)
    return int(ExitCode.DONE)
