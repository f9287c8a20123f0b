"""systemd, spoken to with systemctl and journalctl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stratum.errors import CommandError, StratumError
from stratum.system import Host

__all__ = [
    "UnitState",
    "failed_start",
    "forget_failures",
    "is_enabled",
    "journal_tail",
    "quote_argument",
    "quote_setting",
    "read_restarts",
    "read_units",
    "render_command",
    "restart_unit",
    "start_unit",
    "stop_unit",
    "stop_units",
]

_CALL_TIMEOUT = 30.0
_START_TIMEOUT = 180.0
_STOP_TIMEOUT = 180.0


@dataclass(frozen=True)
class UnitState:
    """What systemd says of a unit (``systemctl show``)."""

    unit: str
    load: str  # loaded, not-found, masked …
    active: str  # active, inactive, activating, failed …
    sub: str
    main_pid: int
    needs_reload: bool
    drop_ins: tuple[str, ...]

    @property
    def installed(self) -> bool:
        """Whether systemd knows a unit of that name."""
        return self.load not in ("not-found", "")

    @property
    def stopped(self) -> bool:
        """Whether it is down for good: a unit that fails and that systemd will start again is ``activating``."""
        return self.active in ("inactive", "failed")


_PROPERTIES = "Id,LoadState,ActiveState,SubState,MainPID,NeedDaemonReload,DropInPaths"


_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _escaped(char: str) -> str:
    # A line break would end the line, and what comes behind it be a setting of its own. systemd.syntax(7), "Quoting".
    return _CONTROL.get(char, f"\\x{ord(char):02x}") if char < " " or char == "\x7f" else char


def _quoted(word: str) -> str:
    """One word in quotes where it needs them, with specifiers doubled; dollars stay."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    escaped = "".join(_escaped(char) for char in escaped)
    plain = escaped == word and word and not any(char.isspace() or char in "';" for char in word)
    return word if plain else f'"{escaped}"'


def quote_argument(word: str) -> str:
    """One argument of an ``ExecStart=`` line: systemd.service(5), "Command lines"."""
    quoted = _quoted(word.replace("$", "$$"))
    return f'"{quoted}"' if "$" in word and not quoted.startswith('"') else quoted


def quote_setting(word: str) -> str:
    """One word of a setting that is split as words and takes specifiers, as ``Environment=``; dollars are its own."""
    return _quoted(word)


def render_command(argv: Sequence[str]) -> str:
    """The value of ``ExecStart=`` that makes systemd run exactly ``argv``.

    Raises :class:`StratumError` for a program that systemd refuses: not an absolute path, or with a quote, a
    backslash or a control character in it; and for words that are not UTF-8, with which ``systemctl show`` fails.
    """
    for word in argv:
        if any("\udc80" <= char <= "\udcff" for char in word):
            raise StratumError("unit-command", f"{word!a}: not UTF-8, which systemd cannot show")
    program = argv[0]
    if (
        not program.startswith("/")
        or program.endswith("/")
        or any(char < " " or char in "\"'\\\x7f" for char in program)
    ):
        raise StratumError("unit-command", f"{program!r}: not the path of a program that systemd can run")
    arguments = [quote_argument(word) for word in argv[1:]]
    # The path is taken as it is, but the name that the program gets, which is the same word, has its variables
    # replaced; "@" lets the name be a word of its own.
    first = [_quoted(program)] if "$" not in program else [f"@{_quoted(program)}", quote_argument(program)]
    return " ".join(first + arguments)


def read_units(host: Host, units: Sequence[str]) -> dict[str, UnitState]:
    """The state of each unit; raises CommandError."""
    text = host.run(["systemctl", "show", f"--property={_PROPERTIES}", *units], timeout=_CALL_TIMEOUT).text
    states = {}
    for unit, block in zip(units, text.strip().split("\n\n")):
        values = dict(line.partition("=")[::2] for line in block.splitlines())
        states[unit] = UnitState(
            unit,
            values.get("LoadState", ""),
            values.get("ActiveState", ""),
            values.get("SubState", ""),
            int(values.get("MainPID") or 0),
            values.get("NeedDaemonReload") == "yes",
            tuple(values.get("DropInPaths", "").split()),
        )
    return states


def read_restarts(host: Host, unit: str) -> int:
    """How often systemd has restarted a unit by itself since somebody started it (NRestarts=); 0 when it cannot say."""
    argv = ["systemctl", "show", "--property=NRestarts", unit]
    try:
        text = host.run(argv, timeout=_CALL_TIMEOUT).text
    except CommandError:
        return 0
    found = dict(line.partition("=")[::2] for line in text.splitlines()).get("NRestarts", "")
    return int(found) if found.isdigit() else 0


def is_enabled(host: Host, unit: str) -> bool:
    """Whether the unit starts at boot; raises CommandError only when systemctl cannot be run."""
    return host.run(["systemctl", "is-enabled", "--quiet", unit], timeout=_CALL_TIMEOUT, check=False).status == 0


def journal_tail(host: Host, unit: str, lines: int = 10) -> list[str]:
    """The last lines of a unit's journal in this boot; empty when there are none or journalctl fails."""
    argv = ["journalctl", "--unit", unit, "--boot", "--no-pager", "--output", "cat", "--lines", str(lines)]
    try:
        return [line for line in host.run(argv, timeout=_CALL_TIMEOUT).text.splitlines() if line.strip()]
    except CommandError:
        return []


def failed_start(host: Host, unit: str, error: StratumError) -> StratumError:
    """``error`` with the unit's last journal lines, which say why it did not start."""
    tail = " | ".join(journal_tail(host, unit, 5))
    return StratumError(
        "unit-failed",
        f"{unit}: did not start: {tail or error.message}",
        hint=f"read all of it: journalctl --boot --unit {unit}",
    )


def forget_failures(host: Host, units: Sequence[str]) -> None:
    """Let units that hit their start limit start again; raises CommandError only when systemctl cannot run."""
    host.run(["systemctl", "reset-failed", *units], timeout=_CALL_TIMEOUT, check=False)


def start_unit(host: Host, unit: str, *, forget: bool = True) -> None:
    """Start a unit and wait until systemd calls it started; raises :class:`StratumError` with its journal.

    Without ``forget`` the caller has called :func:`forget_failures` already.
    """
    if forget:
        forget_failures(host, [unit])
    try:
        host.run(["systemctl", "start", unit], timeout=_START_TIMEOUT)
    except CommandError as error:
        raise failed_start(host, unit, error) from None


def restart_unit(host: Host, unit: str) -> None:
    """Restart a unit and wait until systemd calls it started; raises :class:`StratumError` with its journal."""
    forget_failures(host, [unit])
    try:
        host.run(["systemctl", "restart", unit], timeout=_STOP_TIMEOUT + _START_TIMEOUT)
    except CommandError as error:
        raise failed_start(host, unit, error) from None


def stop_unit(host: Host, unit: str) -> None:
    """Stop a unit and wait for it; raises CommandError."""
    host.run(["systemctl", "stop", unit], timeout=_STOP_TIMEOUT)


def stop_units(host: Host, units: Sequence[str]) -> list[StratumError]:
    """Stop each of ``units``, in the order given; every one is tried, and what failed is returned."""
    errors: list[StratumError] = []
    for unit in units:
        try:
            stop_unit(host, unit)
        except CommandError as error:
            errors.append(error)
    return errors
