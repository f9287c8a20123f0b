"""Calling Stratum's libraries in a machine, from the sources, with the machine's own Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.lab.machine import Machine, Result

SOURCES = Path(__file__).resolve().parents[2] / "stratum"
PLACE = "/opt/sources/stratum"

_PRELUDE = """
import json, sys
sys.path.insert(0, "/opt/sources")
sys.dont_write_bytecode = True
from stratum.journal import Journal
from stratum.receipt import STATE_DIRECTORY, Receipt
from stratum.steps import Work
from stratum.system import Host
host = Host("/")
warnings = []
def work_on():
    host.makedirs(STATE_DIRECTORY)
    return Work(host, Receipt.load(host), Journal(host))
def perform(plan):
    work = work_on()
    done = []
    for action in plan(work):
        action.perform(work)
        done.append(action.describe())
    return done
"""


def python(machine: Machine, code: str, *, check: bool = True, timeout: float | None = None) -> Result:
    """Run code with ``host``, ``work_on``, ``perform`` and ``warnings`` at hand."""
    return machine.run(["python3", "-c", f"{_PRELUDE}\n{code}\n"], check=check, timeout=timeout)


def ask(machine: Machine, imports: str, value: str, *, timeout: float | None = None) -> Any:
    """Return the value of an expression in the machine, which must fit into JSON."""
    return json.loads(python(machine, f"{imports}\nprint(json.dumps({value}))", timeout=timeout).stdout)
