"""The receipt: each path that Stratum made, with what it wrote there.

It is the base of dry runs, of drift and of uninstall: nothing is removed that is not in it, and a file whose
content is none of those recorded was changed by somebody and is left alone. An entry is recorded *before* its
path is made, so a crash in between leaves an entry without a path (harmless), never a path without an entry.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Optional

from stratum import atomicfile
from stratum.errors import StratumError
from stratum.system import Host, HostPath, PathLike

__all__ = ["RECEIPT_PATH", "STATE_DIRECTORY", "Condition", "Entry", "Receipt", "content_digest", "file_digest"]

STATE_DIRECTORY = HostPath("/var/lib/stratum")
RECEIPT_PATH = STATE_DIRECTORY / "receipt.json"

_FORMAT = 1
_KINDS = ("file", "directory", "link", "tree")
_REMEMBERED = 8  # contents of ours that one path may have had; older ones count as somebody else's
_CHUNK = 1 << 20
_SETTLED = 2.0  # seconds


def file_digest(host: Host, path: PathLike) -> str:
    """The SHA-256 of a regular file, as ``sha256:…``; raises OSError."""
    digest = hashlib.sha256()
    with host.open(path) as file:
        while True:
            chunk = file.read(_CHUNK)
            if not chunk:
                return f"sha256:{digest.hexdigest()}"
            digest.update(chunk)


def content_digest(content: bytes) -> str:
    """The SHA-256 of ``content``, as ``sha256:…``."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@dataclass(frozen=True)
class Entry:
    """One path that Stratum made.

    ``kind`` is ``file``, ``directory``, ``link`` or ``tree``. A tree is a directory whose content belongs
    to Stratum whatever it is (containerd's data); the others are removed only in the state we left them in.
    ``contents`` are the digests (file) or targets (link) that we gave it, the newest last. ``mode`` is that of a file,
    None where nobody goes by it; who changed it changed nothing that uninstall would have to keep.
    """

    path: HostPath
    kind: str
    contents: tuple[str, ...] = ()
    mode: Optional[int] = None

    def is_below(self, directory: HostPath) -> bool:
        """Whether its path is one in ``directory``, at any depth."""
        # Not ``in path.parents``, which makes each of them: this is asked of every entry, again and again.
        return str(self.path).startswith(f"{str(directory).rstrip('/')}/")


class Condition:
    """What became of a recorded path."""

    OURS = "ours"
    MISSING = "missing"
    CHANGED = "changed"


def _entry_json(entry: Entry) -> dict[str, object]:
    value: dict[str, object] = {"path": str(entry.path), "kind": entry.kind}
    if entry.contents:
        value["contents"] = entry.contents
    if entry.mode is not None:
        value["mode"] = f"{entry.mode:04o}"
    return value


def _entry_from_json(item: Any) -> Entry:
    """Parse an entry; raises ValueError, KeyError, TypeError or AttributeError."""
    path, kind, contents = item["path"], item["kind"], item.get("contents", [])
    # Whatever made the file wrong, a path that leads elsewhere must not be removed.
    parsed = HostPath(path)
    if not path.startswith("/") or path != str(parsed) or ".." in parsed.parts or path == "/":
        raise ValueError(f"path {path!r}")
    if kind not in _KINDS:
        raise ValueError(f"{path}: kind {kind!r}")
    if not isinstance(contents, list) or not all(isinstance(content, str) for content in contents):
        raise ValueError(f"{path}: contents {contents!r}")
    mode = item.get("mode")
    if mode is not None and not re.fullmatch("0[0-7]{3}", mode):
        raise ValueError(f"{path}: mode {mode!r}")
    return Entry(parsed, kind, tuple(contents), None if mode is None else int(mode, 8))


class Receipt:
    """The record under ``/var/lib/stratum``, kept on the disk at each change."""

    def __init__(self, host: Host, entries: Iterable[Entry] = ()) -> None:
        self.host = host
        self._entries: dict[HostPath, Entry] = {entry.path: entry for entry in entries}
        self._digests: dict[tuple[int, ...], str] = {}
        self._lines: dict[Entry, str] = {}

    @classmethod
    def load(cls, host: Host) -> Receipt:
        """Read the receipt; an absent one is empty. Raises :class:`StratumError` when it cannot be read."""
        try:
            data = host.read_bytes(RECEIPT_PATH)
        except FileNotFoundError:
            return cls(host)
        try:
            value = json.loads(data)
            if value["format"] != _FORMAT:
                raise ValueError(f"format {value['format']!r}")
            entries = [_entry_from_json(item) for item in value["entries"]]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StratumError(
                "receipt-unreadable",
                f"{RECEIPT_PATH}: not a receipt that this version reads: {error}",
                hint="put it back from a backup; without it nothing can be removed safely",
            ) from None
        return cls(host, entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, path: PathLike) -> Optional[Entry]:
        """The entry of ``path``, or None."""
        return self._entries.get(HostPath(str(path)))

    def record(self, *entries: Entry) -> None:
        """Add entries (merging with what is known of their paths) and write the receipt; raises OSError."""
        changed = False
        for entry in entries:
            known = self._entries.get(entry.path)
            merged = entry
            if known and known.kind == entry.kind:
                older = tuple(item for item in known.contents if item not in entry.contents)
                merged = replace(entry, contents=(older + entry.contents)[-_REMEMBERED:])
            if merged != known:
                # The order is the order of making; a path that is made again keeps its place.
                self._entries[entry.path] = merged
                changed = True
        if changed:
            self._write()

    def forget(self, *paths: PathLike) -> None:
        """Drop the entries of ``paths`` and write the receipt; raises OSError."""
        known = {HostPath(str(path)) for path in paths} & set(self._entries)
        for path in known:
            del self._entries[path]
        if known:
            self._write()

    def _write(self) -> None:
        # A line for each entry, and each by itself: with indent= json uses its slow encoder, and this is written often,
        # each time with nearly the same entries.
        self._lines = {
            entry: self._lines.get(entry) or json.dumps(_entry_json(entry), sort_keys=True)
            for entry in self._entries.values()
        }
        entries = ",\n".join(self._lines.values())
        data = f'{{"format": {_FORMAT}, "entries": [\n{entries}\n]}}\n'.encode()
        atomicfile.write_file(self.host, RECEIPT_PATH, data, 0o600)

    def digest(self, path: PathLike) -> str:
        """The SHA-256 of a regular file, as ``sha256:…``; raises OSError.

        A file has many names here (a component's and those in versions) and is read once in a run.
        """
        info = self.host.lstat(path)
        state = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
        if state in self._digests:
            return self._digests[state]
        digest = file_digest(self.host, path)
        # The clock of files is coarse: a file of just now may change and look the same.
        if self.host.now() - max(info.st_mtime, info.st_ctime) > _SETTLED:
            self._digests[state] = digest
        return digest

    def condition(self, entry: Entry) -> str:
        """Whether the path of ``entry`` is as we left it: one of :class:`Condition`; raises OSError."""
        try:
            info = self.host.lstat(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            return Condition.MISSING
        if entry.kind in ("directory", "tree"):
            return Condition.OURS if stat.S_ISDIR(info.st_mode) else Condition.CHANGED
        if entry.kind == "link":
            ours = stat.S_ISLNK(info.st_mode) and self.host.readlink(entry.path) in entry.contents
            return Condition.OURS if ours else Condition.CHANGED
        ours = stat.S_ISREG(info.st_mode) and self.digest(entry.path) in entry.contents
        return Condition.OURS if ours else Condition.CHANGED

    def changed_mode(self, entry: Entry) -> Optional[int]:
        """The mode of a file of ours that is not the one we gave it; None when it is, or is not known. Raises OSError.

        What holds something else by now is asked for its content only.
        """
        if entry.kind != "file" or entry.mode is None:
            return None
        try:
            mode = stat.S_IMODE(self.host.lstat(entry.path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return None
        # The content last: it has to be read.
        return mode if mode != entry.mode and self.condition(entry) == Condition.OURS else None

    def owns(self, path: PathLike) -> bool:
        """Whether ``path`` is recorded and holds something that we wrote; raises OSError."""
        entry = self.get(path)
        return entry is not None and self.condition(entry) == Condition.OURS
