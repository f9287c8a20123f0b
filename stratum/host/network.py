"""Network interfaces of the host."""

from __future__ import annotations

from stratum.system import Host

__all__ = ["interface_exists", "remove_bridge"]

_TIMEOUT = 30.0


def interface_exists(host: Host, name: str) -> bool:
    """Whether there is a network interface of that name."""
    return host.is_dir(f"/sys/class/net/{name}")


def remove_bridge(host: Host, name: str) -> None:
    """Delete a bridge; a missing one is fine. Raises CommandError; an interface of another kind is left."""
    if host.is_dir(f"/sys/class/net/{name}/bridge"):
        host.run(["ip", "link", "delete", "dev", name, "type", "bridge"], timeout=_TIMEOUT)
