"""/etc/fstab: the lines of swap made comments and back; every other byte stays as it is.

A line is one of swap when its third field is ``swap`` (fstab(5)), whatever its mount point (``none``, ``swap``)
and its options say; a comment or a path that has "swap" in it is not. Such a line gets :data:`MARK` in front,
which is all that changes in the file. Undo takes the mark off the very lines that were recorded, wherever they
are by then, and touches nothing else: what an admin added, changed or deleted meanwhile stays.
"""

from __future__ import annotations

import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator

from stratum import atomicfile
from stratum.errors import StratumError
from stratum.system import Host, HostPath

__all__ = ["FSTAB", "MARK", "disable_swap_lines", "enable_swap_lines", "read_fstab", "swap_lines", "write_fstab"]

FSTAB = HostPath("/etc/fstab")
MARK = b"# off by stratum: "

_LINKS_MAX = 8


def _split(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Each line as its content and its end: a newline, one with a carriage return before it, or nothing."""
    # Only a newline ends a line of fstab; bytes.splitlines() would take a lone carriage return for an end, too.
    for line in re.findall(rb"[^\n]*\n|[^\n]+", data):
        content = line[:-1] if line.endswith(b"\n") else line
        content = content[:-1] if content.endswith(b"\r") else content
        yield content, line[len(content) :]


def _is_swap(content: bytes) -> bool:
    fields = re.split(rb"[ \t]+", content.strip(b" \t"))
    return len(fields) > 2 and not fields[0].startswith(b"#") and fields[2] == b"swap"


def swap_lines(data: bytes) -> list[bytes]:
    """The live lines of swap, without their ends."""
    return [content for content, _ in _split(data) if _is_swap(content)]


def disable_swap_lines(data: bytes) -> bytes:
    """``data`` with each live line of swap made a comment."""
    return b"".join((MARK if _is_swap(content) else b"") + content + end for content, end in _split(data))


def enable_swap_lines(data: bytes, recorded: Iterable[bytes]) -> bytes:
    """``data`` with the mark taken off the lines in ``recorded``, each as often as it is in there.

    A marked line that is not recorded was written or changed by somebody and stays. One whose like is live again
    (an admin wrote it anew) would switch on the same swap twice, and is dropped.
    """
    recorded = list(recorded)
    left = Counter(recorded) - Counter(swap_lines(data))
    result = []
    for content, end in _split(data):
        original = content[len(MARK) :] if content.startswith(MARK) else None
        if original is None or original not in recorded:
            result.append(content + end)
        elif left[original] > 0:
            left[original] -= 1
            result.append(original + end)
    return b"".join(result)


def _target(host: Host) -> HostPath:
    """The file itself, behind links: a link is the admin's and stays one."""
    path = FSTAB
    for _ in range(_LINKS_MAX):
        if not host.is_link(path):
            return path
        path = path.parent / host.readlink(path)
    raise StratumError("link-loop", f"{FSTAB}: too many levels of symbolic links")


def read_fstab(host: Host) -> bytes:
    """The content of /etc/fstab; an absent one is empty. Raises OSError."""
    try:
        return host.read_bytes(FSTAB)
    except FileNotFoundError:
        return b""


def write_fstab(host: Host, data: bytes) -> None:
    """Replace the content of /etc/fstab, which is there, with its owner and mode.

    Raises :class:`StratumError` when it cannot be replaced (it may be a mount of its own in a container).
    """
    path = _target(host)
    try:
        info = host.stat(path)
        atomicfile.write_file(host, path, data, stat.S_IMODE(info.st_mode))
        after = host.stat(path)
        if (info.st_uid, info.st_gid) != (after.st_uid, after.st_gid):
            host.chown(path, info.st_uid, info.st_gid)
    except OSError as error:
        raise StratumError(
            "fstab-not-written",
            f"{path}: cannot be replaced: {error.strerror}",
            hint="make it writable, or change its lines of type swap by hand, then run the command again",
        ) from error
