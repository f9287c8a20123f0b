"""The words of a command line in a unit file: quotes, escapes, specifiers, dollars.

systemd.syntax(7) "Quoting", systemd.service(5) "Command lines", systemd.unit(5) "Specifiers"; where these leave
a question open the answer is that of systemd itself (``extract_first_word``, ``specifier_printf``,
``replace_env_argv``), and the lab asks it.
"""

from __future__ import annotations

import re
from typing import Callable, Optional

__all__ = ["expand_dollars", "expand_specifiers", "split_words"]

_BLANK = " \t\n\r"
_SIMPLE = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "s": " "}
_SIMPLE.update({char: char for char in "\\\"'"})
_NUMBERED = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{3})")


def _escape(text: str, at: int) -> tuple[Optional[bytes], int]:
    """The character behind the backslash before ``at`` and how long it is written; None for an unknown one."""
    if text[at] in _SIMPLE:
        return _SIMPLE[text[at]].encode(), 1
    found = _NUMBERED.match(text, at)
    if found is None:
        return None, 0
    byte, short, long, octal = found.groups()
    number = int(byte or short or long or octal, 8 if octal else 16)
    if number == 0 or number > (0xFF if octal or byte else 0x10FFFF):
        return None, 0
    # \x and octal name a byte, \u and \U a character.
    value = bytes([number]) if octal or byte else chr(number).encode("utf-8", "surrogatepass")
    return value, len(found[0])


def _next_word(text: str, at: int) -> tuple[str, int]:
    """The word that starts at ``at``, and where the one after it starts; raises ValueError for an open quote."""
    word = bytearray()
    quote = ""
    while at < len(text):
        char = text[at]
        if char == "\\":
            value, length = _escape(text, at + 1) if at + 1 < len(text) else (None, 0)
            if value is None:
                # An unknown escape stays as it is written, be it before a blank; systemd warns and goes on.
                length = min(1, len(text) - at - 1)
                value = text[at : at + 1 + length].encode("utf-8", "surrogateescape")
            word += value
            at += 1 + length
            continue
        at += 1
        if quote:
            if char == quote:
                quote = ""
                continue
        elif char in "\"'":
            quote = char
            continue
        elif char in _BLANK:
            break
        word += char.encode("utf-8", "surrogateescape")
    if quote:
        raise ValueError("a quote is not closed")
    while at < len(text) and text[at] in _BLANK:
        at += 1
    return word.decode("utf-8", "surrogateescape"), at


def split_words(value: str) -> list[list[str]]:
    """The words of each command of a line. A ``;`` that stands alone and unquoted starts another; ``\\;`` is a word.

    Raises ValueError for a quote that is not closed.
    """
    value = value.strip(_BLANK)
    groups: list[list[str]] = [[]]
    at = 0
    while at < len(value):
        alone = re.match(r"(\\?);(?=[ \t\n\r]|\Z)[ \t\n\r]*", value[at:])
        if alone and alone[1] and groups[-1]:
            groups[-1].append(";")
            at += alone.end()
        elif alone and not alone[1]:
            groups.append([])
            at += alone.end()
        else:
            word, at = _next_word(value, at)
            groups[-1].append(word)
    return [group for group in groups if group]


def expand_specifiers(word: str, value_of: Callable[[str], str]) -> str:
    """``word`` with ``%%`` and specifiers (a letter or digit) replaced; any other ``%`` stays. Passes on ValueError."""
    return re.sub(r"%([%A-Za-z0-9])", lambda found: "%" if found[1] == "%" else value_of(found[1]), word)


def expand_dollars(word: str) -> str:
    """``word`` with ``$$`` replaced; raises ValueError where a variable would be, whose value a file cannot tell."""
    if word.startswith("$") and not word.startswith(("$$", "${")):
        raise ValueError(f"{word}: depends on an environment variable")

    def replace(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        raise ValueError(f"{word}: depends on an environment variable")

    return re.sub(r"\$\$|\$\{[^:}]*\}", replace, word)
