"""One question to a DNS server and what it answers, as bytes: RFC 1035, section 4."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass

__all__ = ["A", "AAAA", "Answer", "encode_query", "parse_answer"]

A, AAAA = 1, 28  # RFC 1035 and RFC 3596
_IN = 1
_HEADER = struct.Struct(">HHHHHH")  # identifier, flags, counts of questions, answers, authorities, additionals
_RESPONSE, _RECURSION_DESIRED = 0x8000, 0x0100
_RECORD = struct.Struct(">HHIH")  # type, class, seconds to live, length
_LABEL_MAX = 63


@dataclass(frozen=True)
class Answer:
    """What a server said: its code (0 is no error, RFC 1035 section 4.1.1) and the addresses of the answer section."""

    identifier: int
    rcode: int
    addresses: tuple[str, ...]


def encode_query(identifier: int, name: str, kind: int = A) -> bytes:
    """The message that asks for the records of one type of ``name``. Raises ValueError for a name that is none."""
    question = b""
    for label in name.rstrip(".").split("."):
        data = label.encode("ascii")
        if not 0 < len(data) <= _LABEL_MAX:
            raise ValueError(f"not a domain name: {name!r}")
        question += bytes([len(data)]) + data
    return _HEADER.pack(identifier, _RECURSION_DESIRED, 1, 0, 0, 0) + question + b"\0" + struct.pack(">HH", kind, _IN)


def _skip_name(data: bytes, offset: int) -> int:
    """Where the name at ``offset`` ends; a pointer ends it (section 4.1.4)."""
    while True:
        length = data[offset]
        if length >= 0xC0:
            return offset + 2
        offset += 1 + length
        if length == 0:
            return offset


def parse_answer(data: bytes) -> Answer:
    """The answer in a message. Raises ValueError when it is none."""
    try:
        identifier, flags, questions, answers, _, _ = _HEADER.unpack_from(data)
        if not flags & _RESPONSE:
            raise ValueError("a question, not an answer")
        offset = _HEADER.size
        for _ in range(questions):
            offset = _skip_name(data, offset) + 4
        addresses = []
        for _ in range(answers):
            offset = _skip_name(data, offset)
            kind, _, _, length = _RECORD.unpack_from(data, offset)
            offset += _RECORD.size
            if (kind, length) in ((A, 4), (AAAA, 16)):
                addresses.append(str(ipaddress.ip_address(data[offset : offset + length])))
            offset += length
        if offset > len(data):
            raise ValueError("cut short")
    except (IndexError, struct.error):
        raise ValueError("cut short") from None
    return Answer(identifier, flags & 0xF, tuple(addresses))
