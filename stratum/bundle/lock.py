"""The lock of a definition: the digest of everything that went into a bundle and of everything that came out.

It stands beside its definition (``demo.yaml.lock``), is JSON with sorted keys, and is meant to be committed and
read in reviews. The first build writes it; a later build must meet it in every entry.

A layer's digest depends on the release of the zstd library that compressed it; its diffID (the digest of the
uncompressed tar) does not. The lock holds both and names the library, so that a difference says which it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from stratum.bundle.oci import parse_json
from stratum.errors import BundleError, StratumError

__all__ = ["Compression", "Lock", "LockMismatchError", "parse_lock"]

_VERSION = 1
# What is compared first says most: other content always means another layer, which has another size.
_ORDER = ("version", "diffID", "sha256", "manifest", "layer", "files", "size")
_UPDATE = "if the change is wanted, build with --update-lock and review the lock"


class LockMismatchError(StratumError):
    """What was found or built is not what the lock says."""

    def __init__(self, subject: str, expected: str, actual: str, *, hint: Optional[str] = None) -> None:
        super().__init__("lock-mismatch", f"{subject}: the lock says {expected}, got {actual}", hint=hint or _UPDATE)
        self.expected = expected
        self.actual = actual


@dataclass(frozen=True)
class Compression:
    """How layers were compressed."""

    level: int
    library: str

    def __str__(self) -> str:
        return f"zstd {self.library} level {self.level}"


@dataclass
class Lock:
    """The entries, each a mapping of names to digests (and sizes).

    ``sources`` by location; ``components`` and ``images`` by ``os/arch`` and name. ``mtime`` is the time that
    every file in a layer has, in seconds since 1970.
    """

    compression: Compression
    mtime: int = 0
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    components: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    images: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The lock as a file."""
        value = {
            "lockVersion": _VERSION,
            "compression": {"format": "zstd", "level": self.compression.level, "library": self.compression.library},
            "mtime": self.mtime,
            "sources": self.sources,
            "components": self.components,
            "images": self.images,
        }
        return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=True) + "\n").encode("ascii")

    def source(self, location: str) -> Mapping[str, Any]:
        """The entry of a source; raises :class:`StratumError` when it has none."""
        if location not in self.sources:
            raise StratumError(
                "lock-incomplete", f"{location}: is not in the lock, so the definition has changed since", hint=_UPDATE
            )
        return self.sources[location]

    def check(self, built: Lock) -> None:
        """Raise :class:`LockMismatchError` at the first entry of ``built`` that this lock does not have."""
        for subject, name, expected, actual in self._pairs(built):
            if expected is None:
                raise StratumError(
                    "lock-incomplete",
                    f"{subject}: is not in the lock, so the definition has changed since",
                    hint=_UPDATE,
                )
            if expected != actual:
                hint = None
                if name == "layer" and self.compression != built.compression:
                    hint = (
                        "the content is the same, only its compressed form differs: the lock was made with "
                        f"{self.compression}, this is {built.compression}; use the same, or --update-lock"
                    )
                raise LockMismatchError(f"{subject}: {name}", str(expected), str(actual), hint=hint)

    def _pairs(self, built: Lock) -> Iterator[tuple[str, str, Any, Any]]:
        # Sources come first, then what is made of them: the first difference is the cause of the others.
        groups = [("source", self.sources, built.sources)]
        for kind, mine, theirs in (
            ("component", self.components, built.components),
            ("image", self.images, built.images),
        ):
            groups += [(f"{platform} {kind}", mine.get(platform, {}), theirs[platform]) for platform in sorted(theirs)]
        for kind, known, found in groups:
            for subject in sorted(found):
                entry = known.get(subject)
                for name in sorted(found[subject], key=_ORDER.index):
                    yield f"{kind} {subject}", name, None if entry is None else entry.get(name), found[subject][name]

    def completed_from(self, old: Optional[Lock], platforms: set[str]) -> Lock:
        """This lock plus what ``old`` says of ``platforms``, which the definition has and this build left out."""
        if old is None:
            return self
        merged = Lock(self.compression, self.mtime, {**old.sources, **self.sources} if platforms else self.sources)
        for mine, theirs, target in (
            (self.components, old.components, merged.components),
            (self.images, old.images, merged.images),
        ):
            target.update({name: entries for name, entries in theirs.items() if name in platforms})
            target.update(mine)
        return merged


def _entries(value: object, depth: int) -> bool:
    if not isinstance(value, dict):
        return False
    if depth == 0:
        return all(isinstance(item, (str, int)) and not isinstance(item, bool) for item in value.values())
    return all(_entries(item, depth - 1) for item in value.values())


def parse_lock(data: bytes, where: str) -> Lock:
    """Read a lock; ``where`` is what errors call it. Raises :class:`StratumError`."""
    try:
        value = parse_json(data, where)
        compression = value["compression"]
        lock = Lock(
            Compression(compression["level"], compression["library"]),
            value["mtime"],
            value["sources"],
            value["components"],
            value["images"],
        )
        if value["lockVersion"] != _VERSION:
            raise ValueError(f"lockVersion is {value['lockVersion']!r}, this stratum knows {_VERSION}")
        if not (_entries(lock.sources, 1) and _entries(lock.components, 2) and _entries(lock.images, 2)):
            raise ValueError("an entry has a wrong type")
        if type(lock.mtime) is not int or type(lock.compression.level) is not int:
            raise ValueError("a number has a wrong type")
    except BundleError as error:
        raise _bad(error.message) from None
    except (KeyError, TypeError) as error:
        raise _bad(f"{where}: a field is missing or of a wrong type: {error}") from None
    except ValueError as error:
        raise _bad(f"{where}: {error}") from None
    return lock


def _bad(why: str) -> StratumError:
    return StratumError("lock-malformed", why, hint="restore the lock from version control, or remove it to lock anew")
