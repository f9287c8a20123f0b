"""The text form that minisign's files share: comment lines and base64 words, read strictly.

Every function raises ValueError with the reason; the caller knows which kind of file it reads.
"""

from __future__ import annotations

import base64
import binascii

__all__ = ["check_comment", "decode", "encode", "split_lines", "take_comment"]


def split_lines(data: bytes, count: int, limit: int) -> list[str]:
    """The ``count`` lines of ``data``; raises ValueError. CRLF is taken as LF, as minisign does."""
    if len(data) > limit:
        raise ValueError(f"over {limit} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    lines = [line[:-1] if line.endswith("\r") else line for line in text.split("\n")]
    if lines[-1] == "":
        lines.pop()
    if len(lines) != count:
        raise ValueError(f"{len(lines)} lines instead of {count}")
    return lines


def take_comment(line: str, prefix: str, limit: int) -> str:
    """What stands after ``prefix`` in a comment line; raises ValueError."""
    if not line.startswith(prefix):
        raise ValueError(f"no line that begins with {prefix.strip()!r}")
    found = line[len(prefix) :]
    check_comment(found, limit)
    return found


def check_comment(comment: str, limit: int) -> None:
    """Raise ValueError unless ``comment`` is one line of at most ``limit`` bytes without control characters.

    A tab is allowed: minisign puts them into its trusted comments. An escape sequence would reach the
    terminal of whoever reads the comment.
    """
    if any(letter != "\t" and not letter.isprintable() for letter in comment):
        raise ValueError("a comment has a line break or a control character")
    if len(comment.encode("utf-8")) > limit:
        raise ValueError(f"a comment is over {limit} bytes")


def decode(text: str, size: int) -> bytes:
    """The ``size`` bytes that the base64 word ``text`` stands for; raises ValueError."""
    try:
        found = base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise ValueError("a line is not base64") from None
    if len(found) != size:
        raise ValueError(f"{len(found)} bytes instead of {size}")
    # One value has one spelling: no stray bits in the last letter, no missing or extra padding.
    if base64.b64encode(found).decode("ascii") != text:
        raise ValueError("a line is not canonical base64")
    return found


def encode(data: bytes) -> str:
    """``data`` as a base64 word."""
    return base64.b64encode(data).decode("ascii")
