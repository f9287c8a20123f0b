"""Which versions were active, in order: what ``rollback`` goes back to.

A version enters the history when it has been proven ready, not when the link turned.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Optional

from stratum import atomicfile
from stratum.errors import StratumError
from stratum.receipt import STATE_DIRECTORY, Entry, Receipt, content_digest
from stratum.system import Host

__all__ = ["HISTORY_PATH", "Activation", "note_activation", "previous_version", "read_history"]

HISTORY_PATH = STATE_DIRECTORY / "history.json"
_REMEMBERED = 20


@dataclass(frozen=True)
class Activation:
    """A version that was proven ready, and when (seconds since 1970)."""

    version: str
    time: float


def read_history(host: Host) -> list[Activation]:
    """The activations, oldest first; raises :class:`StratumError` when the file is damaged."""
    try:
        return [Activation(**item) for item in json.loads(host.read_bytes(HISTORY_PATH))]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError) as error:
        raise StratumError(
            "history-unreadable",
            f"{HISTORY_PATH}: {error}",
            hint=f"remove {HISTORY_PATH}; rollback then needs a version",
        ) from None


def note_activation(host: Host, receipt: Receipt, version: str) -> None:
    """Add ``version`` to the history unless it is the last one in it. Raises OSError, :class:`StratumError`."""
    history = read_history(host)
    if history and history[-1].version == version:
        return
    history = [*history, Activation(version, host.now())][-_REMEMBERED:]
    content = json.dumps([asdict(item) for item in history], indent=1).encode() + b"\n"
    receipt.record(Entry(HISTORY_PATH, "file", (content_digest(content),)))
    atomicfile.write_file(host, HISTORY_PATH, content)


def previous_version(history: Sequence[Activation], current: Optional[str], installed: Sequence[str]) -> Optional[str]:
    """The version that was active last before ``current`` and is still installed; None without one."""
    for item in reversed(history):
        if item.version != current and item.version in installed:
            return item.version
    return None
