"""Calls of the container runtime interface, by hand: Debian has no crictl.

Messages are those of ``runtime.v1`` (kubernetes/cri-api, pkg/apis/runtime/v1/api.proto), as far as tests need them.
The socket is reached through the machine's root in the outer /proc.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Union

import grpc

Value = Union[int, bytes]


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def text(number: int, value: Union[str, bytes]) -> bytes:
    """A field with a string or a message in it."""
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Number and value of each field of a message."""
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while place < len(data):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
        elif key & 7 == 2:
            size = number()
            yield key >> 3, data[place : place + size]
            place += size
        else:
            raise ValueError(f"wire type {key & 7}")


class Cri:
    """A client of one machine's socket."""

    def __init__(self, socket: Path) -> None:
        # A name of a socket has 107 bytes, which the way through /proc does not exceed.
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=[("grpc.default_authority", "localhost")])

    def call(self, method: str, message: bytes, timeout: float = 60) -> bytes:
        """Call a method of ``runtime.v1``; raises grpc.RpcError."""
        answer: bytes = self._channel.unary_unary(f"/runtime.v1.{method}")(message, timeout=timeout)
        return answer

    def close(self) -> None:
        self._channel.close()

    def version(self) -> str:
        """The runtime's own version (VersionResponse.runtime_version)."""
        answer = dict(fields(self.call("RuntimeService/Version", text(1, "0.1.0"))))
        return bytes_of(answer[3]).decode()

    def pull(self, reference: str) -> str:
        """PullImage; returns the image's reference, which is its id."""
        answer = dict(fields(self.call("ImageService/PullImage", text(1, text(1, reference)))))
        return bytes_of(answer[1]).decode()

    def remove(self, reference: str) -> None:
        """RemoveImage: every name of the image goes."""
        self.call("ImageService/RemoveImage", text(1, text(1, reference)))

    def images(self) -> dict[str, bool]:
        """ListImages: each tag, and whether the image is pinned (Image.repo_tags, Image.pinned)."""
        found: dict[str, bool] = {}
        for _, image in fields(self.call("ImageService/ListImages", b"")):
            content = list(fields(bytes_of(image)))
            pinned = any(number == 8 and value for number, value in content)
            found.update({bytes_of(value).decode(): pinned for number, value in content if number == 2})
        return found


def bytes_of(value: Value) -> bytes:
    assert isinstance(value, bytes)
    return value
