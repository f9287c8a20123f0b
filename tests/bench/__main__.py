"""``python3 -m tests.bench [NAME…]``: run benchmarks and print a table; exit 1 when a limit is passed."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Optional

from tests.bench.frame import Result, render

BENCHMARKS = {
    "startup": ("tests.bench.startup", "how long the pyz takes to answer, beside a bare interpreter"),
    "upgrade": ("tests.bench.upgrade", "how long an upgrade is down beside a restart by hand, and what it writes"),
    "supervisor": ("tests.bench.supervisor", "what the supervisor takes of memory and processor while nothing happens"),
}
"""Name to module and summary. A module has ``run(runs) -> list[Result]``."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command line; return the exit status."""
    listed = "\n".join(f"  {name:<12} {summary}" for name, (_, summary) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python3 -m tests.bench",
        description="Run benchmarks.",
        epilog=f"benchmarks:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="all without one")
    parser.add_argument("--runs", type=int, default=40, help="how often each is measured (default: %(default)s)")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}")
    results: list[Result] = []
    for name in given.names or BENCHMARKS:
        results += importlib.import_module(BENCHMARKS[name][0]).run(given.runs)
    if given.output == "json":
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        print(render(results))
    return 1 if any(result.is_over for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
