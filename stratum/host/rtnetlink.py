"""Messages of the kernel's network tables, rtnetlink(7): what is asked and what is answered, as bytes.

The tables are read this way and not with ``ip``: that program is missing on minimal hosts, BusyBox's has no JSON,
and /proc shows neither scopes nor flags of IPv4 addresses.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from stratum.system import Host

__all__ = ["ERROR", "HEADER", "attributes", "dump", "messages"]

HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_REQUEST = 0x1 | 0x300  # NLM_F_REQUEST | NLM_F_DUMP
_INTERRUPTED = 0x10  # NLM_F_DUMP_INTR: the table changed while it was read
ERROR, _DONE = 2, 3
_TYPE_MASK = 0x3FFF  # the two upper bits are flags (nested, byte order)
_TRIES = 5


def _align(length: int) -> int:
    return (length + 3) & ~3


def messages(datagram: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Type, flags and body of each message."""
    offset = 0
    while offset + HEADER.size <= len(datagram):
        length, kind, flags, _, _ = HEADER.unpack_from(datagram, offset)
        if length < HEADER.size:
            return
        yield kind, flags, datagram[offset + HEADER.size : offset + length]
        offset += _align(length)


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and value of each attribute in ``data``."""
    offset = 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < _ATTRIBUTE.size:
            return
        yield kind & _TYPE_MASK, data[offset + _ATTRIBUTE.size : offset + length]
        offset += _align(length)


def _is_last(datagram: bytes) -> bool:
    return any(kind in (ERROR, _DONE) for kind, _, _ in messages(datagram))


def dump(host: Host, kind: int, body: bytes) -> list[bytes]:
    """The bodies of a whole table: ``kind`` is the request (RTM_GET…), ``body`` its fixed part.

    A table that changes while it is read is read again. Raises OSError.
    """
    request = HEADER.pack(HEADER.size + len(body), kind, _REQUEST, 1, 0) + body
    found: list[bytes] = []
    for _ in range(_TRIES):
        found, interrupted = [], False
        for datagram in host.ask_rtnetlink(request, _is_last):
            for message, flags, content in messages(datagram):
                interrupted |= bool(flags & _INTERRUPTED)
                if message == ERROR:
                    code = -int(struct.unpack_from("=i", content)[0])
                    raise OSError(code, f"rtnetlink request {kind} was refused")
                if message != _DONE:
                    found.append(content)
        if not interrupted:
            break
    return found
