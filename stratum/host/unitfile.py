"""The command of a unit file, read as systemd reads it: systemd.syntax(7), systemd.service(5) "Command lines".

``systemctl show`` joins the arguments with spaces and without quotes, so an argument with a space in it cannot be
told from two; that is why the file is read. What the file alone cannot tell (an environment variable, a drop-in
that sets another command) is an error here and never a guess.
"""

from __future__ import annotations

import posixpath
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Callable

from stratum.errors import StratumError
from stratum.host.unitwords import expand_dollars, expand_specifiers, split_words
from stratum.system import Host, HostPath

__all__ = ["Assignment", "UnitCommand", "UnitFileError", "UnitMissingError", "is_masked", "parse_unit", "read_command"]

# systemd.unit(5), "System Unit Search Path", by precedence. /lib is /usr/lib where the two are one.
_SEARCH = tuple(
    HostPath(name)
    for name in (
        "/etc/systemd/system.control",
        "/run/systemd/system.control",
        "/run/systemd/transient",
        "/run/systemd/generator.early",
        "/etc/systemd/system",
        "/etc/systemd/system.attached",
        "/run/systemd/system",
        "/run/systemd/system.attached",
        "/run/systemd/generator",
        "/usr/local/lib/systemd/system",
        "/usr/lib/systemd/system",
        "/lib/systemd/system",
        "/run/systemd/generator.late",
    )
)
# systemd.exec(5) and systemd's default: where a program without a slash is looked for.
_PROGRAM_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_BLANK = " \t\n\r"
_SECTIONS = ("Unit", "Service", "Install")
_BYTE_ORDER_MARK = "\ufeff"


class UnitMissingError(StratumError):
    """There is no such unit, or it is masked: systemd never starts it."""

    def __init__(self, path: HostPath, why: str) -> None:
        super().__init__("unit-missing", f"{path}: {why}", hint="run: stratum up")


class UnitFileError(StratumError):
    """The file does not tell which command the unit runs."""

    def __init__(self, path: HostPath, why: str) -> None:
        super().__init__("unit-unreadable", f"{path}: {why}", hint=f"look at it: systemctl cat {path.name}")


@dataclass(frozen=True)
class Assignment:
    """A line ``key = value`` in a section; ``line`` counts from 1."""

    section: str
    key: str
    value: str
    line: int


@dataclass(frozen=True)
class UnitCommand:
    """What the unit runs: the program, and the arguments with the name of the program first."""

    executable: str
    argv: tuple[str, ...]


@dataclass
class _Command:
    executable: str
    argv: list[str] = field(default_factory=list)
    expand: bool = True  # environment variables


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Logical lines with the number of their last physical one; comments are out, also between continued ones."""
    pending = b""
    number = 0
    for number, raw in enumerate(data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"), 1):
        if raw.lstrip(_BLANK.encode())[:1] in (b"#", b";"):
            continue
        line = pending + raw
        # An odd number of backslashes at the end: the last one joins the next line, with a space for itself.
        if (len(line) - len(line.rstrip(b"\\"))) % 2:
            pending = line[:-1] + b" "
        else:
            pending = b""
            yield number, line
    if pending:
        yield number, pending


def parse_unit(path: HostPath, data: bytes) -> list[Assignment]:
    """The assignments in a unit file, in order, as systemd takes them in.

    Lines that systemd skips with a warning are skipped: without ``=``, in front of any section or in a section
    that it does not know. Raises :class:`UnitFileError` for what makes it refuse the file: text that is not UTF-8
    and a section that is not closed.
    """
    section = ""
    found = []
    for number, raw in _lines(data.replace(b"\0", b"\n")):
        try:
            line = raw.decode("utf-8").lstrip(_BYTE_ORDER_MARK if number == 1 else "").strip(_BLANK)
        except UnicodeDecodeError:
            raise UnitFileError(path, f"line {number}: not UTF-8") from None
        if line.startswith("["):
            if not line.endswith("]"):
                raise UnitFileError(path, f"line {number}: not a section: {line}")
            section = line[1:-1] if line[1:-1] in _SECTIONS else ""
        elif section and "=" in line:
            key, _, value = line.partition("=")
            found.append(Assignment(section, key.strip(_BLANK), value.strip(_BLANK), number))
    return found


def _take_prefixes(path: HostPath, word: str) -> tuple[str, set[str]]:
    """The program without the characters that say how it is run, and those characters."""
    flags: set[str] = set()
    while word and word[0] in "-@:+!|":
        if word[0] in flags and not (word[0] == "!" and "!!" not in flags):
            break
        flags.add("!!" if word[0] == "!" and "!" in flags else word[0])
        word = word[1:]
    if not word:
        raise UnitFileError(path, "ExecStart= names no program")
    return word, flags


def _simple_path(program: str) -> str:
    """The path as systemd's ``path_simplify`` leaves it; raises ValueError for one that systemd refuses."""
    if program.endswith("/") or re.search(r"[\x00-\x1f\x7f\"'\\]", program):
        raise ValueError(f"{program!r} is no program that systemd runs")
    # ".." stays: where it leads depends on links.
    parts = [part for part in program.split("/") if part not in ("", ".")]
    return ("/" if program.startswith("/") else "") + "/".join(parts)


def _commands(path: HostPath, value: str, resolve: Callable[[str], str]) -> list[_Command]:
    """The commands of one ``ExecStart=`` line; a semicolon that stands alone parts them."""
    commands = []
    try:
        groups = split_words(value)
        for group in groups:
            first, flags = _take_prefixes(path, group[0])
            program = resolve(first)
            arguments = [resolve(word) for word in group[1:]]
            if "@" not in flags:
                arguments.insert(0, program)
            if not arguments:
                raise UnitFileError(path, "ExecStart= has @ and no name for the program")
            commands.append(_Command(_simple_path(program), arguments, ":" not in flags))
    except ValueError as error:
        raise UnitFileError(path, f"ExecStart={value}: {error}") from None
    return commands


class Specifiers:
    """Resolves ``%`` for one unit of the system manager; a callable."""

    def __init__(self, host: Host, path: HostPath) -> None:
        self._host = host
        self._path = path

    def __call__(self, word: str) -> str:
        """``word`` with its specifiers replaced; raises ValueError for one that cannot be known from here."""
        return expand_specifiers(word, self._value)

    def _value(self, letter: str) -> str:
        name = self._path.name
        prefix = name.rpartition(".")[0].partition("@")[0]
        fixed = {
            "n": name, "N": name.rpartition(".")[0], "p": prefix, "P": prefix, "i": "", "I": "",
            "j": prefix.rpartition("-")[2], "J": prefix.rpartition("-")[2], "f": f"/{prefix}",
            "y": str(self._path), "Y": str(self._path.parent),
            "t": "/run", "S": "/var/lib", "C": "/var/cache", "L": "/var/log", "E": "/etc", "T": "/tmp", "V": "/var/tmp",  # noqa: S108
            "u": "root", "U": "0", "g": "root", "G": "0", "h": "/root",
        }  # fmt: skip
        if letter in fixed:
            return fixed[letter]
        try:
            return self._of_machine(letter)
        except OSError as error:
            raise ValueError(f"%{letter} cannot be told: {error.strerror}") from None

    def _of_machine(self, letter: str) -> str:
        def text(path: str) -> str:
            return self._host.read_text(path).strip()

        if letter == "b":
            return text("/proc/sys/kernel/random/boot_id").replace("-", "")
        if letter == "m":
            return text("/etc/machine-id")
        if letter in "Hl":
            name = text("/proc/sys/kernel/hostname")
            return name if letter == "H" else name.partition(".")[0]
        if letter == "v":
            return self._host.kernel_release()
        raise ValueError(f"what %{letter} stands for cannot be told from the file")


def is_masked(host: Host, path: HostPath) -> bool:
    """Whether the unit is masked, so that systemd never starts it: a link to /dev/null, or a file without content."""
    try:
        info = host.lstat(path)
        if stat.S_ISLNK(info.st_mode):
            target = posixpath.normpath(posixpath.join(path.parent, host.readlink(path)))
            return f"/{target.lstrip('/')}" == "/dev/null"
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISREG(info.st_mode) and info.st_size == 0


def _drop_ins(host: Host, path: HostPath) -> list[HostPath]:
    """The drop-ins of a unit in the order in which they count; of two with one name the first directory's wins."""
    found: dict[str, HostPath] = {}
    for directory in (f"{path.name}.d", f"{path.suffix[1:]}.d"):
        for base in _SEARCH:
            place = base / directory
            for name in host.listdir(place) if host.is_dir(place) else ():
                if name.endswith(".conf") and not name.startswith("."):
                    found.setdefault(name, place / name)
    return [found[name] for name in sorted(found)]


def _check_drop_ins(host: Host, path: HostPath) -> None:
    for drop_in in _drop_ins(host, path):
        try:
            data = host.read_bytes(drop_in)
        except FileNotFoundError:
            continue  # systemd skips it too: a dangling link, or removed since
        except OSError as error:
            raise UnitFileError(drop_in, f"cannot be read: {error.strerror}") from error
        for item in parse_unit(drop_in, data):
            if (item.section, item.key) == ("Service", "ExecStart"):
                raise UnitFileError(drop_in, f"line {item.line}: the drop-in sets another ExecStart=")


def read_command(host: Host, path: HostPath) -> UnitCommand:
    """What the unit at ``path`` runs at each start.

    Raises :class:`UnitMissingError` without the file and for a masked unit, :class:`UnitFileError` when the file
    does not tell, or when a drop-in of the unit sets ``ExecStart=``.
    """
    if is_masked(host, path):
        raise UnitMissingError(path, "the unit is masked")
    try:
        data = host.read_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UnitMissingError(path, "there is no such unit") from None
    except OSError as error:
        raise UnitFileError(path, f"cannot be read: {error.strerror}") from error
    _check_drop_ins(host, path)
    commands: list[_Command] = []
    for item in parse_unit(path, data):
        if (item.section, item.key) != ("Service", "ExecStart"):
            continue
        if item.value:
            commands += _commands(path, item.value, Specifiers(host, path))
        else:
            commands = []  # an empty one takes back those before it
    if len(commands) != 1:
        what = f"{len(commands)} commands in ExecStart=" if commands else "no ExecStart="
        raise UnitFileError(path, f"{what}; a service runs exactly one")
    return _started(host, path, commands[0])


def _started(host: Host, path: HostPath, command: _Command) -> UnitCommand:
    argv: Sequence[str] = command.argv
    if command.expand:
        try:
            argv = [expand_dollars(word) for word in command.argv]
        except ValueError as error:
            raise UnitFileError(path, str(error)) from None
    executable = command.executable
    if "/" not in executable:
        places = [f"{directory}/{executable}" for directory in _PROGRAM_PATH]
        executable = next((place for place in places if host.which(place)), "")
        if not executable:
            raise UnitFileError(path, f"{command.executable}: no such program")
    elif not executable.startswith("/"):
        raise UnitFileError(path, f"{executable}: not an absolute path")
    return UnitCommand(executable, tuple(argv))
