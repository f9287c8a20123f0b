"""Layers: the deterministic tar of one component, and what its description says of it.

The same files give the same bytes on every machine: names sorted, owner 0:0, one time for all, modes as defined,
plain ustar headers (POSIX.1-2017, pax) with an extended header only where a name or a size does not fit, one
single-threaded zstd frame with its size and a checksum. Its bytes depend on the release of the zstd library as
well; what the lock and the description prove besides, the digest of the plain tar, does not.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Callable, Optional

from stratum import boot
from stratum.bundle.definition import FileRule
from stratum.bundle.oci import FileEntry, safe_relative
from stratum.bundle.sources import Entry
from stratum.errors import BundleError

__all__ = [
    "LayerResult",
    "Member",
    "collect_members",
    "compress_stream",
    "compression_library",
    "select",
    "tar_header",
    "write_layer",
]

_CHUNK = 1 << 20
_BLOCK = 512
_WINDOW_LOG = 26  # 64 MiB, half of what decoders take without being asked to
LEVELS = range(1, 20)  # above 19 zstd needs --ultra and windows that small machines cannot afford


@dataclass(frozen=True)
class Member:
    """One path of a component: a file, directory or symlink below the version directory."""

    path: str
    kind: str
    mode: int = 0o755
    size: int = 0
    target: str = ""
    open: Optional[Callable[[], BinaryIO]] = None


@dataclass(frozen=True)
class LayerResult:
    """A layer that was written: its uncompressed and compressed form, and the files in it."""

    diff_id: str
    size: int
    files: tuple[FileEntry, ...]


# -- which files ------------------------------------------------------------------------------------


def _pattern(glob: str) -> re.Pattern[str]:
    """``*`` and ``?`` within one name, ``[abc]``, and ``**`` for any depth; a trailing ``/`` stands for ``/**``."""
    glob = glob + "**" if glob.endswith("/") else glob
    parts = []
    for piece in re.findall(r"\*\*/?|\*|\?|\[!?[^]/]+\]|[^*?[]+|\[", glob):
        if piece.startswith("**"):
            parts.append(".*" if piece == "**" else "(?:.*/)?")
        elif piece == "*":
            parts.append("[^/]*")
        elif piece == "?":
            parts.append("[^/]")
        elif piece.startswith("[") and len(piece) > 1:
            inside = piece[1:-1].replace("\\", r"\\")
            parts.append(f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]")
        else:
            parts.append(re.escape(piece))
    return re.compile("".join(parts) + r"\Z", re.DOTALL)


def _relative(path: str, glob: str) -> str:
    # What stands before `**` is stripped; without one, only the last name is kept.
    head, deep, _ = (glob + "**" if glob.endswith("/") else glob).partition("**")
    return "/".join(path.split("/")[head.count("/") :]) if deep else posixpath.basename(path)


def select(rule: FileRule, glob: str, entries: Mapping[str, Entry], subject: str) -> list[Member]:
    """The members that ``rule`` takes out of ``entries``; ``glob`` is its source path, filled in.

    Raises UsageError with the rule's line when nothing matches, several match where one must, or what matches
    cannot be placed.
    """
    glob = posixpath.normpath(glob) + ("/" if glob.endswith("/") else "")
    pattern = _pattern(glob)
    matches = sorted(path for path in entries if pattern.match(path))
    if not matches:
        if any(path.startswith(glob + "/") for path in entries):
            raise rule.place.error(f"{glob!r} is a directory in {subject}", hint=f"write {glob}/ for all that is in it")
        raise rule.place.error(f"nothing in {subject} matches {glob!r}", hint=_nearby(entries))
    if not rule.target.endswith("/"):
        if len(matches) > 1:
            raise rule.place.error(
                f"{len(matches)} paths in {subject} match {glob!r}, but {rule.target!r} names one file",
                hint=f"write {rule.target}/ for a directory",
            )
        return [_member(rule, rule.target, entries[matches[0]], subject)]
    return [_member(rule, rule.target + _relative(path, glob), entries[path], subject) for path in matches]


def _nearby(entries: Mapping[str, Entry]) -> str:
    shown = ", ".join(repr(path) for path in sorted(entries)[:8])
    return f"it holds {shown}{', ...' if len(entries) > 8 else ''}" if entries else "it is empty"


def _member(rule: FileRule, path: str, entry: Entry, subject: str) -> Member:
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        raise rule.place.error(f"{entry.path!r} in {subject}: the name is not UTF-8") from None
    why = safe_relative(path)
    if why:
        raise rule.place.error(f"{entry.path!r} in {subject}: {why}")
    if entry.kind == "symlink":
        if rule.mode is not None:
            raise rule.place.error(f"{entry.path!r} in {subject} is a symbolic link, which has no mode")
        return Member(path, "symlink", target=entry.target)
    if entry.kind != "file":
        raise rule.place.error(f"{entry.path!r} in {subject} is neither a file nor a symbolic link")
    mode = rule.mode if rule.mode is not None else 0o755 if entry.executable else 0o644
    return Member(path, "file", mode, entry.size, open=entry.open)


def collect_members(named: Iterable[tuple[FileRule, Member]]) -> list[Member]:
    """The members in the order of the tar, with the directories above them.

    Raises UsageError when two rules place one path, or a link leads out of the component.
    """
    found: dict[str, tuple[FileRule, Member]] = {}
    for rule, member in named:
        if member.path in found:
            other = found[member.path][0]
            raise rule.place.error(f"{member.path!r} is already placed by line {other.place.line}")
        found[member.path] = (rule, member)
    directories = {str(parent) for path in found for parent in _parents(path)}
    for path, (rule, member) in found.items():
        if path in directories:
            raise rule.place.error(f"{path!r} would be a file and a directory")
        if member.kind == "symlink":
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), member.target))
            if member.target.startswith("/") or not (target in found or target in directories):
                raise rule.place.error(
                    f"the link {path!r} leads to {member.target!r}, which the component does not place",
                    hint="place what it leads to as well, or leave the link out",
                )
    members = [member for _, member in found.values()]
    return sorted([*members, *(Member(path, "directory") for path in directories)], key=lambda item: item.path)


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


# -- the tar ----------------------------------------------------------------------------------------


def _number(value: int, width: int) -> bytes:
    return b"%0*o\0" % (width - 1, value)


def _ustar(
    name: bytes, kind: bytes, mode: int, size: int, mtime: int, target: bytes = b"", prefix: bytes = b""
) -> bytes:
    head = b"".join(
        (
            name.ljust(100, b"\0"),
            _number(mode, 8) + _number(0, 8) + _number(0, 8),
            _number(size, 12) + _number(mtime, 12),
            b" " * 8,
            kind,
            target.ljust(100, b"\0"),
            b"ustar\00000",
            b"\0" * 64,
            _number(0, 8) + _number(0, 8),
            prefix.ljust(155, b"\0"),
            b"\0" * 12,
        )
    )
    return head[:148] + b"%06o\0 " % sum(head) + head[156:]


def _record(key: str, value: bytes) -> bytes:
    # The length at its start counts its own digits, POSIX pax "Extended Header".
    rest = b" " + key.encode("ascii") + b"=" + value + b"\n"
    length = len(rest)
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return str(length).encode("ascii") + rest


_KINDS = {"file": b"0", "symlink": b"2", "directory": b"5"}


def tar_header(path: str, kind: str, *, mode: int, size: int = 0, mtime: int = 0, target: str = "") -> bytes:
    """The header of one member, with an extended one before it where ustar has no room."""
    name, link = path.encode("utf-8"), target.encode("utf-8")
    if kind == "directory":
        name += b"/"
    records, prefix = b"", b""
    if len(name) > 100 or not name.isascii():
        cut = name.rfind(b"/", 0, 156)
        if name.isascii() and cut > 0 and len(name) - cut - 1 <= 100 and name[cut + 1 :]:
            prefix, name = name[:cut], name[cut + 1 :]
        else:
            records += _record("path", name)
            name = name[:100]
    if len(link) > 100 or not link.isascii():
        records += _record("linkpath", link)
        link = link[:100]
    if size >= 1 << 33:
        records += _record("size", str(size).encode("ascii"))
    extended = b""
    if records:
        extended = _ustar(b"PaxHeader", b"x", 0o644, len(records), mtime) + records + padding(len(records))
    shown = size if size < 1 << 33 else 0
    return extended + _ustar(name, _KINDS[kind], mode, shown, mtime, link, prefix)


def padding(size: int) -> bytes:
    """The zeros that fill ``size`` bytes up to whole blocks."""
    return b"\0" * (-size % _BLOCK)


def tar_size(members: Iterable[Member], mtime: int) -> int:
    """The size in bytes of the tar of ``members``."""
    total = 2 * _BLOCK
    for item in members:
        total += len(_header(item, mtime)) + item.size + len(padding(item.size))
    return total


def _header(member: Member, mtime: int) -> bytes:
    mode = 0o777 if member.kind == "symlink" else member.mode
    return tar_header(member.path, member.kind, mode=mode, size=member.size, mtime=mtime, target=member.target)


def compression_library() -> str:
    """The release of the zstd library, which decides the bytes of a compressed layer."""
    boot.require_compiled(persist=False)
    import zstandard

    return ".".join(str(part) for part in zstandard.ZSTD_VERSION)


def _compressor(level: int, size: int) -> Any:
    boot.require_compiled(persist=False)
    import zstandard

    # Programs of one component are linked with the same libraries: matches over a long distance make Debian's
    # containerd and CNI plugins a fifth smaller, for the memory of the window while unpacking.
    parameters = zstandard.ZstdCompressionParameters.from_level(
        level,
        source_size=size,
        window_log=_WINDOW_LOG,
        enable_ldm=True,
        threads=0,
        write_checksum=1,
        write_content_size=1,
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=size)


def compress_stream(
    file: BinaryIO, write: Callable[[bytes], object], *, size: int, level: int, tick: Callable[[int], None]
) -> None:
    """Compress the ``size`` bytes of ``file`` as a layer is. Raises :class:`BundleError` when it has not that many."""
    compressor = _compressor(level, size)
    done = 0
    for chunk in iter(lambda: file.read(_CHUNK), b""):
        done += len(chunk)
        write(compressor.compress(chunk))
        tick(len(chunk))
    if done != size:
        raise BundleError("source-changed", f"{done} bytes were read, {size} were announced")
    write(compressor.flush())


def write_layer(
    members: list[Member],
    write: Callable[[bytes], object],
    *,
    level: int,
    mtime: int,
    tick: Callable[[int], None],
    subject: str,
) -> LayerResult:
    """Hand the bytes of the layer of ``members`` to ``write``; ``tick`` is told what was read, and may raise.

    Raises :class:`BundleError` when a file does not have the size that it had when it was listed.
    """
    size = tar_size(members, mtime)
    compressor = _compressor(level, size)
    diff_id = hashlib.sha256()
    files = []

    def put(data: bytes) -> None:
        diff_id.update(data)
        write(compressor.compress(data))

    for member in members:
        put(_header(member, mtime))
        digest = None
        if member.kind == "file":
            digest = _copy(member, put, tick, subject)
            put(padding(member.size))
        target = member.target if member.kind == "symlink" else None
        mode = 0 if member.kind == "symlink" else member.mode
        files.append(FileEntry(member.path, member.kind, mode, member.size, digest, target))
    put(b"\0" * (2 * _BLOCK))
    write(compressor.flush())
    return LayerResult("sha256:" + diff_id.hexdigest(), size, tuple(files))


def _copy(member: Member, put: Callable[[bytes], None], tick: Callable[[int], None], subject: str) -> str:
    digest, done = hashlib.sha256(), 0
    if member.open is None:
        raise AssertionError(f"{member.path} is a file without content")
    with member.open() as file:
        for chunk in iter(lambda: file.read(_CHUNK), b""):
            done += len(chunk)
            if done > member.size:
                break
            digest.update(chunk)
            put(chunk)
            tick(len(chunk))
    if done != member.size:
        raise BundleError(
            "source-changed",
            f"{subject}: {member.path} changed while it was read",
            hint="leave the sources alone and build again",
        )
    return "sha256:" + digest.hexdigest()
