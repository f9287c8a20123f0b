"""Telling systemd how a service is: the sd_notify(3) protocol."""

from __future__ import annotations

import socket

from stratum.system import Host

__all__ = ["notify"]


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
