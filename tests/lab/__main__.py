"""``python -m tests.lab``: the lab from the command line.

``demo``     the main job in a throwaway machine
``sources``  what bundles/demo.yaml is made of, in dist/demo
``shell``    a shell in a throwaway nspawn machine
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.lab import roots, walkthrough
from tests.lab.machine import ROOT_ENV, LabError
from tests.lab.nspawn import NspawnMachine


def shell() -> None:
    """Give a shell in a throwaway machine."""
    environment = {**ROOT_ENV, "TERM": "xterm"}
    with NspawnMachine(roots.root_directory(), "shell") as machine, machine.popen(
        ["bash", "-l"], stdin=None, env=environment
    ) as process:
        process.wait()


def main() -> int:
    """Run one command of the lab."""
    commands = {
        "demo": walkthrough.walk_through, "sources": walkthrough.prepare_sources, "shell": shell,
    }
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    parser.add_argument("command", choices=sorted(commands))
    arguments = parser.parse_args()
    try:
        commands[arguments.command]()
    except (LabError, subprocess.SubprocessError) as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
