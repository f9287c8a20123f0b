"""``stratum restart``: restart the node's units in start order; the host and the containers go on."""

from __future__ import annotations

import argparse

from stratum.node.layout import Layout
from stratum.node.stack import Stack
from stratum.scripts import stack as stack_script
from stratum.scripts.context import Context, add_dry_run, add_output
from stratum.scripts.run import run_script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_output(parser)
    add_dry_run(parser)


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Restart the stack."""
    layout = Layout(context.host)
    context.require_root("restart")
    context.require_installed(layout.current_link)
    stack = Stack(layout)
    return run_script(
        context,
        "restart",
        lambda work: stack_script.restart_steps(context, work, stack),
        after_lock=stack_script.supervisor_steps(context),
        dry_run=arguments.dry_run,
    )
