"""How long the pyz takes to answer, as a ratio to ``python3 -c pass`` with the interpreter of its first line."""

from __future__ import annotations

from tests.bench.frame import Result, time_side_by_side
from tests.pyz import built_pyz, default_cache

LARGEST_VERSION_RATIO = 2.0

INTERPRETER = "/usr/bin/python3"


def run(runs: int) -> list[Result]:
    """Measure the pyz for all interpreters, the slowest one: its table of contents is the longest."""
    pyz = str(built_pyz(default_cache()))
    subjects = {
        "python3 -c pass": [INTERPRETER, "-c", "pass"],
        "python3 -IS -c pass": [INTERPRETER, "-IS", "-c", "pass"],
        "stratum.pyz --version": [pyz, "--version"],
        "stratum.pyz --help": [pyz, "--help"],
    }
    seconds = dict(zip(subjects, time_side_by_side(list(subjects.values()), runs)))
    bare = seconds["python3 -c pass"]
    results = [Result("startup", subject, value * 1000, "ms") for subject, value in seconds.items()]
    version, usage = seconds["stratum.pyz --version"] / bare, seconds["stratum.pyz --help"] / bare
    results.append(Result("startup", "--version / bare", version, "", LARGEST_VERSION_RATIO))
    results.append(Result("startup", "--help / bare", usage, ""))
    return results
