"""A client for qemu's guest agent, which runs commands in a machine without a network.

The protocol is JSON lines over a virtio serial port
(https://qemu.readthedocs.io/en/latest/interop/qemu-ga-ref.html). The agent
forgets all that it was doing when the guest boots anew, and bytes of an older
answer can still be on their way then; ``sync`` sorts that out.
"""

from __future__ import annotations

import base64
import itertools
import json
import select
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Optional

from tests.lab.machine import LabError

#: The agent's own limit is 64 MB for a request; base64 makes four bytes of three.
_CHUNK = 4 << 20


class AgentError(LabError):
    """The guest agent refused a command, or did not answer in time."""


@dataclass(frozen=True)
class Ended:
    """How a program in the guest ended; ``status`` is negative for a signal."""

    status: int
    stdout: bytes
    stderr: bytes


class GuestAgent:
    """Talks to the agent over a connected socket, one request at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._buffer = b""
        self._ids = itertools.count(int(time.time()) % 1_000_000 * 1000)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def sync(self, timeout: float) -> None:
        """Wait until the agent answers, and drop what older requests left.

        :raises AgentError: if it does not within ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            number = next(self._ids)
            request = {"execute": "guest-sync-delimited", "arguments": {"id": number}}
            try:
                # 0xff makes the agent's parser drop half a request.
                self._send(b"\xff" + json.dumps(request).encode() + b"\n", min(end, time.monotonic() + 3))
                limit = min(end, time.monotonic() + 3)
                while True:
                    line = self._line(limit)
                    _, mark, rest = line.rpartition(b"\xff")
                    if mark and json.loads(rest).get("return") == number:
                        return
            except (AgentError, ValueError):
                continue
        raise AgentError(f"the guest agent did not answer within {timeout:.0f} s")

    def call(self, command: str, timeout: float = 180, **arguments: object) -> Any:
        """Send one command and return what it returns.

        :raises AgentError: if the agent reports an error or says nothing for ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        names = {name.replace("_", "-"): value for name, value in arguments.items()}
        self._send(json.dumps({"execute": command, "arguments": names}).encode() + b"\n", end)
        answer = json.loads(self._line(end).lstrip(b"\xff"))
        if "error" in answer:
            raise AgentError(f"{command}: {answer['error'].get('desc', answer['error'])}")
        return answer["return"]

    def begin(self, argv: list[str], env: Iterable[str], capture: bool) -> int:
        """Start a program in the guest and return its process id."""
        started = self.call("guest-exec", path=argv[0], arg=argv[1:], env=list(env), capture_output=capture)
        return int(started["pid"])

    def ended(self, pid: int) -> Optional[Ended]:
        """Say how a program ended, once; None while it runs."""
        state = self.call("guest-exec-status", pid=pid)
        if not state["exited"]:
            return None
        status = -state["signal"] if "signal" in state else state["exitcode"]
        out, err = (base64.b64decode(state.get(name, "")) for name in ("out-data", "err-data"))
        return Ended(status, out, err)

    def write_file(self, path: str, content: bytes) -> None:
        """Write a file in the guest."""
        handle = self.call("guest-file-open", path=path, mode="wb")
        try:
            for start in range(0, len(content), _CHUNK):
                data = base64.b64encode(content[start:start + _CHUNK]).decode()
                self.call("guest-file-write", handle=handle, buf_b64=data, timeout=300)
        finally:
            self.call("guest-file-close", handle=handle)

    def _send(self, data: bytes, end: float) -> None:
        while data:
            if not select.select([], [self._socket], [], max(0.0, end - time.monotonic()))[1]:
                raise AgentError("the guest agent takes no request")
            try:
                data = data[self._socket.send(data):]
            except OSError as error:
                raise AgentError(f"the machine is off: {error}") from error

    def _line(self, end: float) -> bytes:
        while b"\n" not in self._buffer:
            if not select.select([self._socket], [], [], max(0.0, end - time.monotonic()))[0]:
                raise AgentError("the guest agent does not answer")
            try:
                data = self._socket.recv(1 << 20)
            except OSError as error:
                raise AgentError(f"the machine is off: {error}") from error
            if not data:
                raise AgentError("the machine is off")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
