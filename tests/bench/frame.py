"""What a benchmark returns, and how commands are timed side by side."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class Result:
    """One measured value; ``limit`` is the largest that is good, if there is one."""

    benchmark: str
    subject: str
    value: float
    unit: str
    limit: Optional[float] = None

    @property
    def is_over(self) -> bool:
        """Whether the value is above its limit."""
        return self.limit is not None and self.value > self.limit


def time_side_by_side(commands: Sequence[Sequence[str]], runs: int) -> list[float]:
    """Return the median seconds of each command.

    The commands take turns, so that whatever else the machine does meanwhile slows all of them alike. Raises
    CalledProcessError when one fails: a failing command would be quick.
    """
    seconds: list[list[float]] = [[] for _ in commands]
    for _ in range(runs + 1):
        for command, measured in zip(commands, seconds):
            start = time.perf_counter()
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=60)
            measured.append(time.perf_counter() - start)
    return [statistics.median(measured[1:]) for measured in seconds]  # the first fills the page cache


def render(results: Sequence[Result]) -> str:
    """Return a table of the results."""
    width = max(len(result.subject) for result in results)
    lines = []
    for result in results:
        limit = "" if result.limit is None else f"  at most {result.limit:g}: {'OVER' if result.is_over else 'good'}"
        lines.append(f"{result.benchmark:<10} {result.subject:<{width}} {result.value:>9.2f} {result.unit}{limit}")
    return "\n".join(lines)
