"""The tables of statements and tests name tests that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
TABLES = sorted((TESTS / "contracts").glob("*.md"))


def named_tests(text: str) -> Iterator[tuple[str, str]]:
    """Each ``file::function``; one without a file is in the file before it."""
    file = ""
    for given, function in re.findall(r"`([\w/]*(?:\.py)?)::(\w+)`", text):
        file = given or file
        yield file, function


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_each_test_that_a_table_names_is_there(table: Path) -> None:
    named = list(named_tests(table.read_text()))
    assert named
    missing = [f"{file}::{name}" for file, name in named if f"\ndef {name}(" not in _source(file)]
    assert missing == []


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_each_statement_has_a_test_or_says_that_it_is_open(table: Path) -> None:
    rows = [re.split(r" *\| *", line.strip("| ")) for line in table.read_text().splitlines() if line.startswith("|")]
    silent = [
        row
        for row in rows
        if not row[0].startswith(("---", "Statement", "**"))
        and not ("::" in row[-1] or row[-1].startswith(("open", "not ours")))
    ]
    assert rows
    assert silent == []


def _source(name: str) -> str:
    path = TESTS / name
    return path.read_text() if path.exists() else ""
