"""What people and programs see: results on stdout, everything else on stderr, progress where it helps."""

from __future__ import annotations

import contextlib
import errno
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Optional, Protocol, TextIO

from stratum.errors import StratumError

__all__ = ["API_VERSION", "Output", "Progress"]

API_VERSION = "stratum.dev/v1"
_LINE_EVERY = 10.0  # seconds between two progress lines where there is no terminal


class Progress(Protocol):
    """Something that can be told how far the work is."""

    def advance(self, amount: int) -> None:
        """``amount`` more units (bytes, mostly) are done."""


class _Lines:
    """Progress as a line now and then."""

    def __init__(self, output: Output, label: str, total: int) -> None:
        self.output, self.label, self.total = output, label, total
        self.done = 0
        self.last = time.monotonic()

    def advance(self, amount: int) -> None:
        self.done += amount
        if time.monotonic() - self.last >= _LINE_EVERY:
            self.last = time.monotonic()
            share = f"{100 * self.done // self.total} %" if self.total else f"{self.done >> 20} MiB"
            self.output.note(f"{self.label}: {share}")


class _Bar:
    """Progress as a bar on a terminal, drawn by tqdm."""

    def __init__(self, label: str, total: int, file: TextIO) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=total or None, desc=label, unit="B", unit_scale=True, leave=False, file=file)

    def advance(self, amount: int) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            self.bar.update(amount)


def _one_line(text: str) -> str:
    """``text`` without line ends and control sequences: file names and programs' own words may hold any."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


@dataclass
class Output:
    """Where a command speaks. ``as_json``: results are one JSON document on stdout.

    ``lost`` are the streams that took no more; ``cut_off`` says that a result did not reach its file.
    """

    as_json: bool = False
    quiet: bool = False
    debug: bool = False
    stdout: Optional[TextIO] = None
    stderr: Optional[TextIO] = None
    lost: list[TextIO] = field(default_factory=list)
    cut_off: bool = False

    def __post_init__(self) -> None:
        self.stdout = self.stdout or sys.stdout
        self.stderr = self.stderr or sys.stderr

    def _print(self, text: str, file: Optional[TextIO]) -> None:
        # Both are None when the caller closed them (cloud-init may): there is nobody to tell.
        if file is None or file in self.lost:
            return
        try:
            print(text, file=file, flush=True)
        except OSError as error:
            # A reader that left, a terminal that is gone, a full disk: no reason to leave a node half made.
            self.lost.append(file)
            self.cut_off = self.cut_off or (file is self.stdout and error.errno != errno.EPIPE)

    def result(self, text: str) -> None:
        """A line of the result, for people; with JSON output the document says it instead."""
        if not self.as_json:
            # A text of several lines (a schema) stays one.
            self._print("\n".join(map(_one_line, text.split("\n"))), self.stdout)

    def document(self, kind: str, value: Mapping[str, object]) -> None:
        """The result for programs, printed only with JSON output."""
        if self.as_json:
            body = {"apiVersion": API_VERSION, "kind": kind, **value}
            self._print(json.dumps(body, indent=2), self.stdout)

    def note(self, text: str) -> None:
        """What is being done; not with ``--quiet``."""
        if not self.quiet:
            self._print(_one_line(text), self.stderr)

    def warn(self, text: str) -> None:
        """Something that deserves attention and does not stop the work."""
        self._print(f"stratum: warning: {_one_line(text)}", self.stderr)

    def trace(self, text: str) -> None:
        """Where an error came from, for ``--debug``."""
        self._print(text.rstrip(), self.stderr)

    def error(self, error: StratumError) -> None:
        """The end of a failed run: what, what state it left, what to do."""
        self._print(f"stratum: error[{error.reference}]: {_one_line(error.message)}", self.stderr)
        if error.state:
            self._print(f"state: {_one_line(error.state)}", self.stderr)
        if error.hint:
            self._print(f"hint: {_one_line(error.hint)}", self.stderr)
        details = {
            "reference": error.reference,
            "message": error.message,
            "state": error.state,
            "hint": error.hint,
            "exitCode": int(error.exit_code),
        }
        self.document("Error", {"error": details})

    @contextlib.contextmanager
    def progress(self, label: str, total: int) -> Iterator[Progress]:
        """A meter for ``total`` bytes (0: unknown): a bar on a terminal, else a line now and then."""
        if self.stderr is None or self.quiet or not self.stderr.isatty():
            yield _Lines(self, label, total)
            return
        bar = _Bar(label, total, self.stderr)
        try:
            yield bar
        finally:
            with contextlib.suppress(OSError):
                bar.bar.close()
