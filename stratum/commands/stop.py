"""``stratum stop``: stop the supervisor and the node's units; containers end only with ``--containers``."""

from __future__ import annotations

import argparse

from stratum.host import persistence
from stratum.node.layout import Layout
from stratum.node.stack import Stack
from stratum.node.units import EVERY_UNIT
from stratum.scripts import stack as stack_script
from stratum.scripts.context import Context, add_dry_run, add_output
from stratum.scripts.run import run_script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_output(parser)
    add_dry_run(parser)
    parser.add_argument("--containers", action="store_true", help="end the running containers too")


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Stop what is running."""
    layout = Layout(context.host)
    context.require_root("stop")
    context.require_installed(layout.current_link)
    # The supervisor first: it would start again what it finds stopped.
    units = (persistence.UNIT, *reversed(EVERY_UNIT))
    steps = stack_script.stop_steps(Stack(layout), units, containers=arguments.containers)
    return run_script(context, "stop", lambda _: steps, dry_run=arguments.dry_run)
