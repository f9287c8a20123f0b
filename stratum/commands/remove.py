"""``stratum remove VERSION``: remove an installed version that is not active, and what only it used."""

from __future__ import annotations

import argparse

from stratum.errors import BundleNotFoundError
from stratum.node.layout import Layout, VersionActiveError
from stratum.scripts.collect import plan_collect
from stratum.scripts.context import Context, add_dry_run, add_output
from stratum.scripts.run import run_script
from stratum.steps import Action, Step, Work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_output(parser)
    add_dry_run(parser)
    parser.add_argument("version", help="the version to remove")


def plan_remove(work: Work, layout: Layout, version: str) -> list[Action]:
    """What removing takes; raises :class:`VersionActiveError` and :class:`BundleNotFoundError`."""
    if version == layout.current():
        raise VersionActiveError(version)
    if version not in layout.versions():
        raise BundleNotFoundError(
            "version-missing", f"{version}: not installed under {layout.base}", hint="run: stratum versions"
        )
    return plan_collect(work, layout, [version])


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Remove a version."""
    context.require_root("remove")
    layout = Layout(context.host)
    context.require_installed(layout.base)

    def steps(work: Work) -> list[Step]:
        return [
            Step(
                "remove",
                "remove the version and what only it used",
                lambda: plan_remove(work, layout, arguments.version),
            )
        ]

    return run_script(context, "remove", steps, dry_run=arguments.dry_run)
