"""The mount table, and taking away the mounts below our own trees."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stratum.errors import CommandError, StratumError
from stratum.steps import Action, Call, Work
from stratum.system import Host, HostPath

__all__ = ["Mount", "mounts_below", "plan_unmount", "read_mounts", "unmount"]

_TIMEOUT = 30.0


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo."""

    path: HostPath
    type: str
    source: str
    options: frozenset[str]
    tags: frozenset[str] = frozenset()  # the optional fields: "shared:12", "master:3" and others
    number: str = ""  # the mount's id and that of the mount it is in
    parent: str = ""


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def read_mounts(host: Host) -> list[Mount]:
    """The mount table, in the kernel's order; empty when there is no procfs. See proc(5), mountinfo."""
    try:
        text = host.read_text("/proc/self/mountinfo")
    except OSError:
        return []
    mounts = []
    for line in text.split("\n"):  # not splitlines(): a name may hold other characters that end lines
        left, _, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if len(fields) >= 6 and len(rest) >= 2:
            options = frozenset(fields[5].split(","))
            tags = frozenset(fields[6:])
            path = HostPath(_unescape(fields[4]))
            mounts.append(Mount(path, rest[0], _unescape(rest[1]), options, tags, fields[0], fields[1]))
    return mounts


def mount_types(host: Host) -> dict[HostPath, str]:
    """The file system type at each mount point, the topmost one."""
    return {mount.path: mount.type for mount in read_mounts(host)}


def mounts_below(host: Host, roots: Sequence[HostPath]) -> list[Mount]:
    """The mounts strictly below any of ``roots``, in the order in which they can be taken away.

    A root that is itself a mount point (a disk that the admin gave us) is not among them. The table has real
    paths, so links in a root's parents are resolved.
    """
    table = read_mounts(host)
    tops = [_resolved(host, root) for root in roots]
    found = [mount for mount in table if any(top in mount.path.parents for top in tops)]
    by_number = {mount.number: mount for mount in table}
    # What is mounted in another comes first: the order of the table does not tell, mounts can be moved. Of those
    # beside each other the later one does: it may lie over the place of the earlier one.
    found.reverse()
    return sorted(found, key=lambda mount: _depth(mount, by_number), reverse=True)


def _resolved(host: Host, path: HostPath) -> HostPath:
    real = os.path.realpath(host.real(path, follow=True))
    return HostPath(real) if host.root == "/" else HostPath("/", os.path.relpath(real, host.root))


def _depth(mount: Mount, by_number: Mapping[str, Mount]) -> int:
    depth = 0
    while mount.parent in by_number and mount.parent != mount.number and depth < len(by_number):
        mount, depth = by_number[mount.parent], depth + 1
    return depth


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


def _detach(host: Host, path: HostPath) -> None:
    """Let nothing that is unmounted in the mount at ``path`` be unmounted in its peers too."""
    try:
        host.run(["mount", "--make-private", str(path)], timeout=_TIMEOUT)
    except CommandError as error:
        raise StratumError(
            "mount-shared",
            f"{path}: cannot be parted from the mounts that it shares with: {error.stderr.strip() or error.message}",
            hint=f"look at it (findmnt --output TARGET,PROPAGATION {path}), then run the command again",
        ) from None


def plan_unmount(work: Work, roots: Sequence[HostPath]) -> list[Action]:
    """Take away the mounts below ``roots``; one that is in use raises :class:`StratumError` when its turn comes.

    A mount just where we keep something is a disk that the admin gave us, and stays.
    """
    found = [mount for mount in mounts_below(work.host, roots) if work.receipt.get(mount.path) is None]
    # A bind of a directory (a volume with subPath) is a peer of where it is from: what the admin mounted there later is
    # mounted in it too, and taken away here it would be taken away there (mount_namespaces(7), shared subtrees).
    parents = {mount.parent for mount in found}
    shared = [item for item in found if item.number in parents and any(tag.startswith("shared:") for tag in item.tags)]
    return [
        *(
            Call("make private", str(mount.path), functools.partial(_detach, work.host, mount.path))
            for mount in reversed(shared)
        ),
        *(Call("unmount", str(mount.path), functools.partial(unmount, work.host, mount.path)) for mount in found),
    ]
