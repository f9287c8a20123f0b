"""The operation journal: what is being done to the node, written and synced before each step.

A run that finds an unfinished operation knows what was cut off and where. One operation runs at a time (the
lock sees to that), so the journal is one small file, replaced whole.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Optional, Union

from stratum import atomicfile
from stratum.errors import StratumError
from stratum.receipt import STATE_DIRECTORY
from stratum.system import Host, unguessable

__all__ = ["JOURNAL_PATH", "Journal", "Operation"]

JOURNAL_PATH = STATE_DIRECTORY / "journal.json"


@dataclass(frozen=True)
class Operation:
    """An operation on the node: ``up``, ``uninstall`` and so on, with versions where it has them."""

    name: str
    identifier: str
    started: float  # seconds since 1970
    source: Optional[str] = None  # the version that was active
    target: Optional[str] = None  # the version that is to be
    step: Optional[str] = None
    state: str = "running"  # running, done, failed, or rolled-back
    proven: bool = False  # the target was seen ready: from here on the way is forward
    error: Optional[str] = None


_SETTLED = ("done", "rolled-back")
_STATES = ("running", "failed", *_SETTLED)


def _check(operation: Operation) -> None:
    """Raise ValueError unless the fields are what this module writes: recovery acts on them."""
    texts = (operation.source, operation.target, operation.step, operation.error)
    if not isinstance(operation.name, str) or not all(text is None or isinstance(text, str) for text in texts):
        raise ValueError("a field is no text")
    if any(version and "/" in version for version in (operation.source, operation.target)):
        raise ValueError(f"no version: {operation.source!r} or {operation.target!r}")
    if not isinstance(operation.started, (int, float)) or not isinstance(operation.proven, bool):
        raise ValueError("a field has another type")
    if operation.state not in _STATES:
        raise ValueError(f"state {operation.state!r}")


class Journal:
    """Reads and writes the journal of one host."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self._current: Optional[Operation] = None

    def read(self) -> Optional[Operation]:
        """The last operation, or None; raises :class:`StratumError` when the file is damaged."""
        try:
            operation = Operation(**json.loads(self.host.read_bytes(JOURNAL_PATH)))
            _check(operation)
            return operation
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise StratumError(
                "journal-unreadable", f"{JOURNAL_PATH}: {error}", hint="remove the file, then run `stratum up` again"
            ) from None

    def unfinished(self) -> Optional[Operation]:
        """The operation that was cut off or failed, or None."""
        last = self.read()
        return last if last and last.state not in _SETTLED else None

    def begin(self, name: str, *, source: Optional[str] = None, target: Optional[str] = None) -> Operation:
        """Record that an operation starts."""
        self._current = Operation(name, unguessable(), self.host.now(), source, target)
        self._write()
        return self._current

    def step(self, name: str) -> None:
        """Record that the step ``name`` is about to be done."""
        self._update(step=name)

    def prove(self) -> None:
        """Record that the target was seen ready."""
        self._update(proven=True)

    def turn_back(self, error: str) -> None:
        """Record that the operation failed with ``error`` and that the way to the source begins."""
        self._update(proven=False, error=error)

    def roll_back(self, error: str) -> None:
        """Record that the operation failed with ``error`` and that the source runs again."""
        self._update(state="rolled-back", step=None, error=error)

    def settle(self, state: str) -> None:
        """Record that the operation that an earlier run left unfinished has come to ``state``."""
        last = self.read()
        if last is not None:
            self._current = replace(last, state=state, step=None)
            self._write()

    def resume(self) -> None:
        """Go on writing to the operation that an earlier run left unfinished."""
        self._current = self.read()

    def finish(self) -> None:
        """Record that the operation is complete."""
        self._update(state="done", step=None)

    def fail(self, error: str) -> None:
        """Record that the operation stopped at its step with ``error``."""
        self._update(state="failed", error=error)

    def close(self) -> None:
        """Write no more: the operation is about to remove the journal itself."""
        self._current = None

    def _update(self, **changes: Union[str, bool, None]) -> None:
        if self._current is None:
            return
        self._current = replace(self._current, **changes)  # type: ignore[arg-type]
        self._write()

    def _write(self) -> None:
        if self._current is not None:
            data = json.dumps(asdict(self._current), indent=1, sort_keys=True).encode() + b"\n"
            atomicfile.write_file(self.host, JOURNAL_PATH, data, 0o600)
