"""``stratum versions``: the installed versions, the active one marked."""

from __future__ import annotations

import argparse

from stratum.errors import ExitCode
from stratum.node.layout import Layout
from stratum.node.versions import read_record
from stratum.scripts.context import Context, add_output, add_root


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_output(parser)
    add_root(parser)


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Print the versions."""
    layout = Layout(context.host)
    context.require_installed(layout.base)
    current = layout.current()
    rows: list[dict[str, object]] = []
    for version in layout.versions():
        record = read_record(layout, version)
        components = {name: number for name, number, _ in record.components} if record else {}
        rows.append(
            {
                "version": version,
                "active": version == current,
                "bundle": record.bundle if record else None,
                "components": components,
            }
        )
        words = " ".join(f"{name}={number}" for name, number in components.items())
        context.out.result(f"{'*' if version == current else ' '} {version}  {words}")
    context.out.document("Versions", {"versions": rows})
    return int(ExitCode.DONE)
