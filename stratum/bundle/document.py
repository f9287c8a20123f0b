"""JSON documents of a bundle: written the same everywhere, read strictly, complaints that name the place."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Optional

from stratum.errors import BundleError

__all__ = ["Reader", "canonical_json", "digest_of", "malformed", "parse_json"]

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")


def canonical_json(value: object) -> bytes:
    """``value`` as JSON that is the same bytes on each machine: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def digest_of(data: bytes) -> str:
    """The OCI digest of ``data``."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def malformed(where: str, why: str, hint: str = "build or copy the bundle again") -> BundleError:
    """The error for a bundle that is not what it must be; ``where`` is the place in it."""
    return BundleError("bundle-malformed", f"{where}: {why}", hint=hint)


def _whole_number(text: str) -> int:
    # int() takes quadratic time before Python 3.11, and nothing here is longer than a 64-bit number.
    if len(text) > 20:
        raise ValueError("a number is too long")
    return int(text)


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Two readers must never see two different values for one name: RFC 8259 section 4 leaves it open.
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return result


def parse_json(data: bytes, where: str) -> Mapping[str, Any]:
    """``data`` as one JSON object with unique names; raises :class:`BundleError`."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_int=_whole_number, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise malformed(where, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise malformed(where, "not a JSON object")
    return value


class Reader:
    """Typed access to one JSON object; every complaint names the place."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise malformed(where, "must be an object")
        self.value = value
        self.where = where

    def _get(self, name: str, kind: type, default: Any) -> Any:
        found = self.value.get(name, default)
        if found is None and default is None and name not in self.value:
            return None
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            raise malformed(f"{self.where}.{name}", f"must be {_KINDS[kind]}" if name in self.value else "missing")
        return found

    def text(self, name: str) -> str:
        """A string that must be there."""
        return str(self._get(name, str, ...))

    def optional_text(self, name: str) -> Optional[str]:
        """A string, or None when it is not there."""
        found = self._get(name, str, None)
        return None if found is None else str(found)

    def size(self, name: str) -> int:
        """A whole number from 0 to 2**62."""
        found = int(self._get(name, int, ...))
        if not 0 <= found < 1 << 62:
            raise malformed(f"{self.where}.{name}", "out of range")
        return found

    def items(self, name: str) -> list[Reader]:
        """A list of objects."""
        found = self._get(name, list, ...)
        return [Reader(item, f"{self.where}.{name}[{number}]") for number, item in enumerate(found)]

    def child(self, name: str) -> Reader:
        """An object."""
        return Reader(self._get(name, dict, ...), f"{self.where}.{name}")

    def texts(self, name: str) -> dict[str, str]:
        """An object of strings; empty when it is not there."""
        found = self._get(name, dict, {})
        for key, value in found.items():
            if not isinstance(value, str):
                raise malformed(f"{self.where}.{name}.{key}", "must be a string")
        return dict(found)

    def digest(self, name: str) -> str:
        """A SHA-256 digest as OCI writes it."""
        found = self.text(name)
        if not _DIGEST.match(found):
            raise malformed(f"{self.where}.{name}", f"{found!r} is no sha256 digest")
        return found


_KINDS = {str: "a string", int: "a whole number", list: "a list", dict: "an object"}
