"""Exceptions and exit codes: one enum, one place, the same in help, manual page and JSON."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Optional

__all__ = [
    "AlreadyRunningError",
    "BundleError",
    "BundleNotFoundError",
    "CommandError",
    "DigestMismatchError",
    "ExitCode",
    "HostRefusedError",
    "NotInstalledError",
    "NotRootError",
    "NotTrustedError",
    "StratumError",
    "UsageError",
    "system_error",
    "join_errors",
]


class ExitCode(enum.IntEnum):
    """What the exit status of ``stratum`` means. Scripts must treat an unknown one as a failure."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_ROOT = 4
    NOT_INSTALLED = 5
    HOST_REFUSED = 10
    LOCKED = 11
    BUNDLE_MALFORMED = 12
    NOT_TRUSTED = 13
    NOT_FOUND = 14
    ROLLED_BACK = 20
    ROLLBACK_FAILED = 21
    INTERRUPTED = 130
    TERMINATED = 143

    @property
    def meaning(self) -> str:
        """The sentence that help and manual pages print for this code."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.DONE: "done, or nothing to do",
    ExitCode.FAILED: "failed",
    ExitCode.USAGE: "usage error",
    ExitCode.NOT_ROOT: "not root",
    ExitCode.NOT_INSTALLED: "not installed",
    ExitCode.HOST_REFUSED: "the host was refused by preflight",
    ExitCode.LOCKED: "another run holds the lock",
    ExitCode.BUNDLE_MALFORMED: "bundle malformed, or a digest does not match",
    ExitCode.NOT_TRUSTED: "bundle not trusted",
    ExitCode.NOT_FOUND: "bundle, mirror or version not found",
    ExitCode.ROLLED_BACK: "failed, rolled back",
    ExitCode.ROLLBACK_FAILED: "failed, and so did the rollback",
    ExitCode.INTERRUPTED: "interrupted (SIGINT)",
    ExitCode.TERMINATED: "terminated (SIGTERM)",
}


class StratumError(Exception):
    """An error that a user can meet.

    ``reference`` is a stable kebab-case name, ``message`` one line (what, on what, why), ``hint`` what to
    do about it, ``state`` what the run left behind (filled in by the command that knows).
    """

    exit_code = ExitCode.FAILED

    def __init__(
        self, reference: str, message: str, *, hint: Optional[str] = None, state: Optional[str] = None
    ) -> None:
        super().__init__(message)
        self.reference = reference
        self.message = message
        self.hint = hint
        self.state = state

    def __str__(self) -> str:
        return f"[{self.reference}] {self.message}"


class UsageError(StratumError):
    """The command line or a definition file asks for something that is not there."""

    exit_code = ExitCode.USAGE


class NotRootError(StratumError):
    """The command changes the host and was not started by root."""

    exit_code = ExitCode.NOT_ROOT


class NotInstalledError(StratumError):
    """The command needs an installed node and there is none."""

    exit_code = ExitCode.NOT_INSTALLED


class HostRefusedError(StratumError):
    """Preflight found the host unfit."""

    exit_code = ExitCode.HOST_REFUSED


class AlreadyRunningError(StratumError):
    """Another run holds the lock."""

    exit_code = ExitCode.LOCKED


class BundleError(StratumError):
    """A bundle is malformed."""

    exit_code = ExitCode.BUNDLE_MALFORMED


class DigestMismatchError(BundleError):
    """The bytes of a blob are not those that its digest names."""

    def __init__(self, subject: str, expected: str, actual: str, *, hint: Optional[str] = None) -> None:
        super().__init__(
            "digest-mismatch",
            f"{subject}: expected {expected}, got {actual}",
            hint=hint or "copy the bundle again; if it stays so, the bundle was changed after it was built",
        )
        self.expected = expected
        self.actual = actual


class NotTrustedError(StratumError):
    """No trusted key signed these bytes."""

    exit_code = ExitCode.NOT_TRUSTED


class BundleNotFoundError(StratumError):
    """A bundle, mirror or version does not exist where it was looked for."""

    exit_code = ExitCode.NOT_FOUND


class CommandError(StratumError):
    """An external command failed, could not be started or ran out of time.

    ``stderr`` is what it wrote there; ``status`` is None when it never exited by itself.
    """

    def __init__(
        self, reference: str, message: str, *, status: Optional[int], stderr: str = "", hint: Optional[str] = None
    ) -> None:
        super().__init__(reference, message, hint=hint)
        self.status = status
        self.stderr = stderr


def join_errors(errors: Sequence[StratumError], doing: str) -> None:
    """Raise one error that says all of ``errors``; none hides another. No errors: nothing."""
    if not errors:
        return
    if len(errors) == 1:
        raise errors[0]
    raise StratumError(
        errors[0].reference,
        f"{doing}: " + "; ".join(error.message for error in errors),
        hint="; ".join(dict.fromkeys(error.hint for error in errors if error.hint)) or None,
    )


def system_error(error: OSError) -> StratumError:
    """The error for a call to the system that nobody explained better."""
    where = " -> ".join(str(name) for name in (error.filename, error.filename2) if name)
    why = error.strerror or str(error)
    return StratumError(
        "system-error", f"{where}: {why}" if where else why, hint="mend what is named, then run the command again"
    )
