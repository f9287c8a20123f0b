"""The manual page says what the program does."""

from __future__ import annotations

import re
from pathlib import Path

from stratum.cli import COMMANDS
from stratum.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "man/stratum.1").read_text()


def test_the_manual_page_and_the_readme_list_every_exit_code_with_its_meaning() -> None:
    page = {int(number): text for number, text in re.findall(r"^(\d+)\|(.*)$", PAGE, re.MULTILINE)}
    assert page == {int(code): code.meaning for code in ExitCode}
    readme = (ROOT / "README.md").read_text()
    for code in ExitCode:
        assert re.search(rf"\| {int(code)} \| {re.escape(code.meaning)} \|", readme), code


def test_the_manual_page_names_every_command() -> None:
    commands = PAGE.partition(".SH COMMANDS")[2].partition(".SH EXIT STATUS")[0]
    lines = re.findall(r"^\.BR? (.*)$", commands, re.MULTILINE)
    named = {word for line in lines for word in re.findall(r"[a-z]+", line)}
    assert set(COMMANDS) <= named
