"""Telling systemd how a service is: the sd_notify(3) protocol, and its watchdog."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from stratum.system import Host

__all__ = ["Watchdog", "extend_start", "notify", "watchdog_of"]

_SECOND = 1_000_000  # microseconds


def notify(host: Host, state: str) -> None:
    """Send ``state`` (``READY=1``, ``STATUS=…``, lines of them) to the service manager; nothing without one.

    Raises OSError when the manager's socket cannot be reached.
    """
    address = host.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    # "@" stands for the NUL of an abstract socket, sd_notify(3).
    target = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.sendto(state.encode(), target)


def extend_start(host: Host, seconds: float) -> None:
    """Ask for ``seconds`` from now until READY=1, if the unit's own limit is shorter. Raises OSError."""
    notify(host, f"EXTEND_TIMEOUT_USEC={int(seconds * _SECOND)}")


@dataclass
class Watchdog:
    """systemd kills this service when it hears nothing for ``usec`` microseconds; 0 where it does not."""

    host: Host
    usec: int = 0
    _patient: bool = field(default=False, init=False)

    def shorten(self, seconds: float) -> float:
        """``seconds``, or half of the watchdog's time if that is less: what sd_watchdog_enabled(3) recommends."""
        return min(seconds, self.usec / _SECOND / 2) if self.usec else seconds

    def alive(self) -> None:
        """Say that this process lives. Raises OSError."""
        if self.usec:
            notify(self.host, "WATCHDOG=1")

    @contextlib.contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """While the block runs, silence of up to ``seconds`` is no sign of death. Raises OSError.

        Inside of such a block another one changes nothing: its end must not bring the short time back.
        """
        if not self.usec or self._patient:
            yield
            return
        notify(self.host, f"WATCHDOG=1\nWATCHDOG_USEC={max(self.usec, int(seconds * _SECOND))}")
        self._patient = True
        try:
            yield
        finally:
            self._patient = False
            # In one message: the old time counts from now, not from before the block.
            notify(self.host, f"WATCHDOG=1\nWATCHDOG_USEC={self.usec}")


def watchdog_of(host: Host) -> Watchdog:
    """The watchdog that this process must feed, as sd_watchdog_enabled(3) reads the environment.

    One that is meant for another process, as for the parent of this one, is none.
    """
    usec, pid = host.environ.get("WATCHDOG_USEC", ""), host.environ.get("WATCHDOG_PID")
    if not (usec.isascii() and usec.isdigit()) or (pid is not None and pid != str(host.pid)):
        return Watchdog(host)
    return Watchdog(host, int(usec))
