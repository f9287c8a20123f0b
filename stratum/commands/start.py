"""``stratum start``: start the node's units, each behind its gate, then the supervisor."""

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
    """Start what is not running."""
    layout = Layout(context.host)
    context.require_root("start")
    context.require_installed(layout.current_link)
    stack = Stack(layout)
    return run_script(
        context,
        "start",
        lambda work: stack_script.start_steps(context, work, stack),
        after_lock=stack_script.supervisor_steps(context),
        dry_run=arguments.dry_run,
    )
