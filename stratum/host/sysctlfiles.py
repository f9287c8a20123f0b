"""Which file decides a sysctl: the drop-ins of all directories, read as systemd-sysctl reads them.

Order and syntax are those of sysctl.d(5): files of all directories sorted by name, a file in an earlier
directory hides its namesakes in later ones, the last assignment of a key wins, and an explicit assignment wins
over a pattern whatever their order.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Optional

from stratum.system import Host, HostPath

__all__ = [
    "CONTROLS",
    "DIRECTORIES",
    "Assignment",
    "control_path",
    "find_winner",
    "normalize_key",
    "parse_assignments",
    "read_assignments",
    "same_value",
]

CONTROLS = HostPath("/proc/sys")
# The order of precedence; /lib is a directory of its own only where /usr is not merged.
DIRECTORIES = tuple(HostPath(f"{base}/sysctl.d") for base in ("/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib"))
# Not read by systemd-sysctl unless a link in a directory leads to it; `sysctl --system` applies it last.
OLD_FILE = HostPath("/etc/sysctl.conf")
_PATTERN = "*?["


@dataclass(frozen=True)
class Assignment:
    """One line of a drop-in.

    ``key`` has slashes between its parts, as the path below /proc/sys. ``value`` is None for a line ``-key``,
    which takes the key out of all patterns and of earlier files.
    """

    key: str
    value: Optional[str]
    path: HostPath
    line: int

    @property
    def is_pattern(self) -> bool:
        """Whether the key stands for several."""
        return any(char in self.key for char in _PATTERN)


def normalize_key(key: str) -> str:
    """``net.ipv4.conf.eth0/1.x`` and ``net/ipv4/conf/eth0.1/x`` are both ``net/ipv4/conf/eth0.1/x``.

    The first separator decides: after a dot, dots and slashes change places (an interface name may hold dots).
    """
    first = next((char for char in key if char in "/."), "/")
    if first == ".":
        key = key.translate(str.maketrans("/.", "./"))
    return "/".join(part for part in key.split("/") if part)


def control_path(key: str) -> HostPath:
    """Where the kernel shows the value of ``key`` (in either form)."""
    return CONTROLS / normalize_key(key)


def same_value(one: str, other: str) -> bool:
    """Whether two values are the same; the kernel puts tabs between numbers."""
    return one.split() == other.split()


def parse_assignments(text: str, path: HostPath) -> Iterator[Assignment]:
    """The assignments of one file; lines that are none are passed over, as systemd-sysctl does."""
    # split() and not splitlines(): only a newline ends a line for the tools that read the file.
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped[0] in "#;":
            continue
        left, equals, right = stripped.partition("=")
        key = normalize_key(left[1:].strip() if left.startswith("-") else left.strip())
        if not key or (not equals and not left.startswith("-")):
            continue
        yield Assignment(key, right.strip() if equals else None, path, number)


def _drop_ins(host: Host) -> list[HostPath]:
    """The files that are read, in the order in which they are."""
    chosen: dict[str, HostPath] = {}
    for directory in DIRECTORIES:
        for name in host.listdir(directory) if host.is_dir(directory) else ():
            if name.endswith(".conf") and not name.startswith("."):
                chosen.setdefault(name, directory / name)
    # By bytes, as strcmp(3) in the C locale.
    return [chosen[name] for name in sorted(chosen, key=lambda name: name.encode("utf-8", "surrogateescape"))]


def read_assignments(host: Host) -> list[Assignment]:
    """All assignments in the order in which they apply, /etc/sysctl.conf last; unreadable files are passed over."""
    paths = _drop_ins(host)
    # On Debian it is among them by a link, and then keeps the place of that link.
    if not any(_leads_to(host, path, OLD_FILE) for path in paths):
        paths.append(OLD_FILE)
    found: list[Assignment] = []
    for path in paths:
        try:
            found += parse_assignments(host.read_text(path), path)
        except OSError:
            continue  # a dangling link; one to /dev/null hides its namesakes and is empty
    return found


def _leads_to(host: Host, path: HostPath, target: HostPath) -> bool:
    return host.exists(target) and host.real(path, follow=True) == host.real(target, follow=True)


def find_winner(assignments: Iterable[Assignment], key: str) -> Optional[Assignment]:
    """The assignment that decides ``key`` when all files are applied; None when none does."""
    wanted = normalize_key(key)
    explicit: Optional[Assignment] = None
    pattern: Optional[Assignment] = None
    for assignment in assignments:
        if assignment.key == wanted:
            explicit = assignment
        elif assignment.is_pattern and assignment.value is not None and _matches(wanted, assignment.key):
            pattern = assignment
    decides = explicit or pattern
    return decides if decides and decides.value is not None else None


def _matches(key: str, pattern: str) -> bool:
    # glob(7): no wildcard goes over a slash.
    parts, wanted = key.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
