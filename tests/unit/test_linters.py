"""What the linters hold: style, types and the direction of imports."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
SCRIPTS = [".ci/run", "tests/run", "tests/demo", "tests/prepare.sh", "tests/lab/nspawn-supervisor.sh"]


def complaints(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "--no-cache", "."], ["mypy"], ["lint-imports", "--no-cache"]],
    ids=["ruff", "mypy", "import-linter"],
)
def test_a_linter_has_nothing_to_say(command: list[str]) -> None:
    words = complaints([str(PROGRAMS / command[0]), *command[1:]])
    assert not words, words


@pytest.mark.parametrize("script", SCRIPTS)
def test_shell_scripts_are_posix_and_executable(script: str) -> None:
    assert complaints(["dash", "-n", script]) == ""
    assert (REPOSITORY / script).stat().st_mode & 0o111
