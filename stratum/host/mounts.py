"""The mount table, and taking away the mounts below our own trees."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stratum.errors import CommandError, StratumError
from stratum.system import Host, HostPath

__all__ = ["Mount", "mounts_below", "read_mounts", "unmount"]

_TIMEOUT = 30.0


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo."""

    path: HostPath
    type: str
    source: str
    options: frozenset[str]
    tags: frozenset[str] = frozenset()  # the optional fields: "shared:12", "master:3" and others


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def read_mounts(host: Host) -> list[Mount]:
    """The mount table, in the kernel's order; empty when there is no procfs. See proc(5), mountinfo."""
    try:
        text = host.read_text("/proc/self/mountinfo")
    except OSError:
        return []
    mounts = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if len(fields) >= 6 and len(rest) >= 2:
            options = frozenset(fields[5].split(","))
            tags = frozenset(fields[6:])
            mounts.append(Mount(HostPath(_unescape(fields[4])), rest[0], _unescape(rest[1]), options, tags))
    return mounts


def mount_types(host: Host) -> dict[HostPath, str]:
    """The file system type at each mount point, the topmost one."""
    return {mount.path: mount.type for mount in read_mounts(host)}


def mounts_below(host: Host, roots: Sequence[HostPath]) -> list[Mount]:
    """The mounts strictly below any of ``roots``, in the order in which they can be taken away.

    A root that is itself a mount point (a disk that the admin gave us) is not among them.
    """
    found = [mount for mount in read_mounts(host) if any(root in mount.path.parents for root in roots)]
    return list(reversed(found))


def unmount(host: Host, path: HostPath) -> None:
    """Take a mount away, neither lazily nor by force: what is in use stays. Raises :class:`StratumError`."""
    try:
        host.run(["umount", "--no-canonicalize", str(path)], timeout=_TIMEOUT)
    except CommandError as error:
        raise StratumError(
            "mount-busy",
            f"{path}: cannot be unmounted: {error.stderr.strip() or error.message}",
            hint=f"find who uses it (fuser --mount {path}), end that, then run the command again",
        ) from None
