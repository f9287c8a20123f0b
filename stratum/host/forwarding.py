"""IPv4 forwarding, which a bridge network needs: switched on at each boot, and back by uninstall.

What it was is remembered under /run, so it holds for the boot in which it was changed; a host that forwards by
its own configuration is left alone.
"""

from __future__ import annotations

from stratum import atomicfile
from stratum.steps import Action, Call
from stratum.system import Host, HostPath

__all__ = ["KEY", "plan_forwarding", "plan_restore"]

KEY = "net.ipv4.ip_forward"
CONTROL = HostPath("/proc/sys/net/ipv4/ip_forward")
REMEMBERED = HostPath("/run/stratum/ip_forward")


def _value(host: Host) -> str:
    try:
        return host.read_text(CONTROL).strip()
    except OSError:
        return ""


def _switch_on(host: Host) -> None:
    host.makedirs(REMEMBERED.parent)
    atomicfile.write_file(host, REMEMBERED, b"0\n")
    host.write_control(CONTROL, b"1\n")


def plan_forwarding(host: Host) -> list[Action]:
    """Switch forwarding on where it is off."""
    if _value(host) != "0":
        return []
    return [Call("set", "net.ipv4.ip_forward = 1", lambda: _switch_on(host))]


def _restore(host: Host) -> None:
    host.write_control(CONTROL, b"0\n")
    host.unlink(REMEMBERED)


def plan_restore(host: Host) -> list[Action]:
    """Switch forwarding off again where Stratum switched it on in this boot."""
    if not host.exists(REMEMBERED) or _value(host) != "1":
        return []
    return [Call("set", "net.ipv4.ip_forward = 0, as it was", lambda: _restore(host))]
