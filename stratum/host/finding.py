"""What a look at the host has to say: the words that preflight, boot checks and reports share."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["REJECT", "WARN", "Finding"]

REJECT = "reject"
WARN = "warn"


@dataclass(frozen=True)
class Finding:
    """Something that preflight has to say: ``check`` is its name, ``severity`` ``reject`` or ``warn``."""

    check: str
    severity: str
    message: str
    hint: str

    def to_json(self) -> dict[str, object]:
        """The form of ``--output json``."""
        return {"check": self.check, "severity": self.severity, "message": self.message, "hint": self.hint}
