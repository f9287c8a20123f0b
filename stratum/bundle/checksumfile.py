"""Checksum files as publishers really write them.

Accepted lines: ``HEX  name`` and ``HEX *name`` (coreutils), with one space or tabs, ``SHA256 (name) = HEX`` (BSD),
and a bare ``HEX`` when it is all that the file has. Line ends may be LF, CRLF or CR; a byte-order mark (UTF-8 or
UTF-16) is taken off; names may start with ``./`` or a path. A clear-signed file (OpenPGP, RFC 9580 section 7, as
runc publishes) is read between its armour; the signature itself is not checked. What is none of this is an error
with its line number: a page that says "not found" must never pass for a list in which nothing was found.
"""

from __future__ import annotations

import codecs
import posixpath
import re
from dataclasses import dataclass
from typing import Optional

from stratum.errors import BundleError

__all__ = ["ChecksumLine", "find_checksum", "parse_checksums"]

SIZE_LIMIT = 1 << 20

_PLAIN = re.compile(r"(?P<hex>[0-9a-fA-F]+)(?:[ \t]+\*?(?P<name>\S.*?))?[ \t]*\Z")
_BSD = re.compile(r"(?P<algorithm>[A-Z][A-Z0-9/-]*) ?\((?P<name>.+)\) ?= ?(?P<hex>[0-9a-fA-F]+)[ \t]*\Z")
_LINE_END = re.compile(r"\r\n|\n|\r")
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_SIGNED = "-----BEGIN PGP SIGNED MESSAGE-----"
_SIGNATURE = "-----BEGIN PGP SIGNATURE-----"


@dataclass(frozen=True)
class ChecksumLine:
    """One line: where, for which name ("" in a bare one), and the SHA-256 in lower-case hexadecimal digits."""

    number: int
    name: str
    sha256: str


def _malformed(where: str, number: int, why: str) -> BundleError:
    return BundleError(
        "checksum-file", f"{where}:{number}: {why}", hint="look at the file: it may be an error page or of another kind"
    )


def _decode(data: bytes, where: str) -> str:
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            try:
                return data[len(mark) :].decode(encoding)
            except UnicodeDecodeError:
                raise _malformed(where, 1, f"not {encoding}, as its byte-order mark says") from None
    return data.decode("utf-8", "surrogateescape")


def _lines(text: str, where: str) -> list[tuple[int, str]]:
    lines = list(enumerate(_LINE_END.split(text), 1))
    start = next((place for place, (_, line) in enumerate(lines) if line.strip()), 0)
    if lines[start][1].rstrip() != _SIGNED:
        return lines
    body = lines[start + 1 :]
    blank = next((place for place, (_, line) in enumerate(body) if not line.strip()), None)
    end = next((place for place, (_, line) in enumerate(body) if line.rstrip() == _SIGNATURE), None)
    if blank is None or end is None or end < blank:
        raise _malformed(where, lines[start][0], "a signed message without its end")
    # Dash escapes, RFC 9580 section 7.1.
    return [(number, line[2:] if line.startswith("- ") else line) for number, line in body[blank + 1 : end]]


def _parse_line(number: int, line: str, where: str) -> Optional[ChecksumLine]:
    bsd = _BSD.match(line)
    match = bsd or _PLAIN.match(line)
    if match is None:
        shown = line.strip()[:60].encode("ascii", "backslashreplace").decode("ascii")
        raise _malformed(where, number, f"not a checksum line: {shown!r}")
    if bsd and bsd["algorithm"] != "SHA256":
        return None
    digits = match["hex"]
    if len(digits) != 64:
        raise _malformed(where, number, f"{len(digits)} hexadecimal digits, a SHA-256 has 64")
    name = match["name"] or ""
    return ChecksumLine(number, name[2:] if name.startswith("./") else name, digits.lower())


def parse_checksums(data: bytes, where: str) -> list[ChecksumLine]:
    """The SHA-256 lines of a checksum file; ``where`` is what errors call it. Raises :class:`BundleError`."""
    if len(data) > SIZE_LIMIT:
        raise _malformed(where, 1, f"longer than {SIZE_LIMIT} bytes")
    found = []
    for number, line in _lines(_decode(data, where), where):
        if not line.strip() or line.startswith("#"):
            continue
        parsed = _parse_line(number, line, where)
        if parsed is not None:
            found.append(parsed)
    bare = [line for line in found if not line.name]
    if bare and len(found) > 1:
        raise _malformed(where, bare[0].number, "a checksum without a name, in a file with several")
    return found


def find_checksum(data: bytes, name: str, where: str) -> ChecksumLine:
    """The line of ``data`` that is for the file ``name``.

    A line for just that name wins over lines for a path that ends with it; a bare checksum is for any name.
    Raises :class:`BundleError` when no line matches, or when two disagree.
    """
    lines = parse_checksums(data, where)
    last = posixpath.basename(name)
    matching = (
        [line for line in lines if line.name == name]
        or [line for line in lines if posixpath.basename(line.name) == last]
        or [line for line in lines if not line.name]
    )
    if not matching:
        raise BundleError(
            "checksum-missing",
            f"{where}: none of {len(lines)} checksums is for {name}",
            hint="set checksums.name in the definition to the name that the file uses",
        )
    for line in matching:
        if line.sha256 != matching[0].sha256:
            raise _malformed(where, line.number, f"another checksum for {name} than line {matching[0].number} has")
    return matching[0]
