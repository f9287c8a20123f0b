"""NetworkManager and systemd-networkd leave the interfaces of the container network and of LocalDNS alone.

Either may take a new bridge, veth or dummy for a network card: it asks for DHCP there and puts routes and addresses on
it, or takes those away that the CNI plugin gave. A file of ours says hands off; it must be there before the first
interface appears. nm-cloud-setup is another matter: its rule tables break the traffic of containers, and only the
admin knows whether the host needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from stratum.errors import StratumError
from stratum.host import localdnsnet
from stratum.host.finding import WARN, Finding
from stratum.steps import Action, Call, Work, plan_file
from stratum.system import Host, HostPath

__all__ = ["Manager", "check_cloud_setup", "managers_in_use", "plan_forget", "plan_unmanaged"]

# The bridge plugin names a container's end on the host "veth" and eight hexadecimal digits; `veth*` would take
# in what people name themselves.
VETH = "veth????????"
LOCALDNS = localdnsnet.INTERFACE

_TIMEOUT = 60.0
_UNIT_DIRECTORIES = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")


@dataclass(frozen=True)
class Manager:
    """A network manager: its unit, our file for it, and how it reads that file again."""

    name: str
    unit: str
    path: HostPath
    render: Callable[[str], bytes]
    reload: tuple[str, ...]


def render_network_manager(bridge: str) -> bytes:
    """NetworkManager.conf(5): a device section of our own, so that lists in other files stay as they are."""
    return f"""# Written by Stratum: the container network is not NetworkManager's.
[device-stratum]
match-device=interface-name:{bridge},interface-name:{VETH},interface-name:{LOCALDNS}
managed=0
""".encode()


def render_networkd(bridge: str) -> bytes:
    """systemd.network(5): the first file that matches an interface counts, so its name comes before all others."""
    return f"""# Written by Stratum: the container network is not systemd-networkd's.
[Match]
Name={bridge} {VETH} {LOCALDNS}

[Link]
Unmanaged=yes
""".encode()


NETWORK_MANAGER = Manager(
    "NetworkManager",
    "NetworkManager.service",
    HostPath("/etc/NetworkManager/conf.d/90-stratum.conf"),
    render_network_manager,
    ("systemctl", "reload", "NetworkManager.service"),
)
NETWORKD = Manager(
    "systemd-networkd",
    "systemd-networkd.service",
    HostPath("/etc/systemd/network/00-stratum.network"),
    render_networkd,
    ("networkctl", "reload"),
)


def _wanted(host: Host, unit: str) -> bool:
    """Whether some target or timer pulls ``unit`` in at boot."""
    for base in _UNIT_DIRECTORIES:
        for name in host.listdir(base) if host.is_dir(base) else ():
            if name.endswith((".wants", ".requires")) and host.lexists(f"{base}/{name}/{unit}"):
                return True
    return False


def managers_in_use(host: Host) -> list[Manager]:
    """NetworkManager where it is installed; systemd-networkd, which comes with systemd, where it is enabled or runs."""
    found = [NETWORK_MANAGER] if host.which("NetworkManager") else []
    # systemd-networkd keeps its state there for as long as it runs.
    if _wanted(host, NETWORKD.unit) or (host.live and host.exists("/run/systemd/netif/state")):
        found.append(NETWORKD)
    return found


def _reload(host: Host, manager: Manager, warn: Callable[[str], object]) -> None:
    try:
        if host.run(["systemctl", "is-active", "--quiet", manager.unit], timeout=_TIMEOUT, check=False).status == 0:
            host.run(manager.reload, timeout=_TIMEOUT)
    except StratumError as error:
        warn(f"{manager.name} did not read its configuration again: {error.message}; run: {' '.join(manager.reload)}")


def plan_unmanaged(work: Work, bridge: str, warn: Callable[[str], object]) -> list[Action]:
    """What keeps the network managers off ``bridge`` and the veths: a file for each, then a reload, never a restart.

    A reload that fails is told to ``warn``: the file counts from the manager's next start on. Raises
    :class:`StratumError` when somebody else's file is in the way.
    """
    actions: list[Action] = []
    for manager in managers_in_use(work.host):
        written = plan_file(work, manager.path, manager.render(bridge))
        actions += written
        if written and work.host.live:
            actions.append(_call_reload(work.host, manager, warn))
    return actions


def _call_reload(host: Host, manager: Manager, warn: Callable[[str], object]) -> Action:
    return Call("reload", manager.name, lambda: _reload(host, manager, warn))


def plan_forget(work: Work, warn: Callable[[str], object], *, removed: bool = False) -> list[Action]:
    """After our files were removed (they are in the receipt): the managers that had one read their files again.

    ``removed`` is for a dry run, in which they are still there.
    """
    if not work.host.live:
        return []
    return [
        _call_reload(work.host, manager, warn)
        for manager in (NETWORK_MANAGER, NETWORKD)
        if work.receipt.get(manager.path) is not None and (removed or not work.host.lexists(manager.path))
    ]


def check_cloud_setup(host: Host) -> list[Finding]:
    """Whether nm-cloud-setup is enabled, which writes rule tables that break the traffic of containers."""
    units = ("nm-cloud-setup.timer", "nm-cloud-setup.service")
    enabled = [unit for unit in units if _wanted(host, unit)]
    if not enabled:
        return []
    return [
        Finding(
            "nm-cloud-setup",
            WARN,
            f"{' and '.join(enabled)} is enabled: its rule tables break the traffic of containers",
            f"if the host can do without: systemctl disable --now {' '.join(units)}, then reboot",
        )
    ]
