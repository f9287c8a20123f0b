"""``stratum prune --keep N``: remove old versions, and what only they used. The active one always stays."""

from __future__ import annotations

import argparse

from stratum.errors import UsageError
from stratum.node.history import read_history
from stratum.node.layout import Layout
from stratum.node.versions import read_record
from stratum.scripts.collect import plan_collect
from stratum.scripts.context import Context, add_dry_run, add_output
from stratum.scripts.run import run_script
from stratum.steps import Action, Step, Work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_output(parser)
    add_dry_run(parser)
    parser.add_argument(
        "--keep", type=int, metavar="N", default=2, help="how many versions stay, the active one counted (default: 2)"
    )


def versions_to_remove(layout: Layout, keep: int) -> list[str]:
    """All but ``keep`` versions: the active one stays, then those that ran last, then the highest serials."""
    ran = {item.version: item.time for item in read_history(layout.host)}

    def worth(version: str) -> tuple[bool, float, int, str]:
        record = read_record(layout, version)
        return (version == layout.current(), ran.get(version, 0.0), record.serial if record else 0, version)

    return sorted(layout.versions(), key=worth, reverse=True)[keep:]


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Prune."""
    if arguments.keep < 1:
        raise UsageError("keep-nothing", f"--keep {arguments.keep}: at least the active version stays")
    context.require_root("prune")
    layout = Layout(context.host)
    context.require_installed(layout.base)

    def plan(work: Work) -> list[Action]:
        return plan_collect(work, layout, versions_to_remove(layout, arguments.keep))

    def steps(work: Work) -> list[Step]:
        return [Step("prune", "remove old versions and what only they used", lambda: plan(work))]

    return run_script(context, "prune", steps, dry_run=arguments.dry_run)
