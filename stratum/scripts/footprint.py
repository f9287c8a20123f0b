"""Every place outside of Stratum's own directories that a run may write to (seed 004, Footprint).

One list, which nothing is written by: each writer has its own plan. It says what to expect on a host, and a test
compares it with what ``up`` really writes there. ``uninstall`` covers all of it, through the receipt or an undo of
its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

from stratum.compiled import ROOT_PLACES
from stratum.host import (
    firewalld,
    fstab,
    modules,
    netmanagers,
    persistence,
    program,
    swap,
    swapunits,
    sysctls,
)
from stratum.node import cni, traces
from stratum.node.kubeletroot import KUBELET_TREES
from stratum.node.sandboxes import NETNS
from stratum.node.units import EVERY_UNIT, SYSTEMD_DIR
from stratum.receipt import STATE_DIRECTORY
from stratum.system import HostPath

__all__ = ["Place", "find_place", "footprint", "is_own"]

#: Everything below is Stratum's alone.
_OWN_ROOTS = (HostPath("/opt/stratum"), HostPath("/etc/stratum"), STATE_DIRECTORY, HostPath("/run/stratum"))


@dataclass(frozen=True)
class Place:
    """A path; a ``*`` in it stands for one name or a part of one, a ``/`` at its end for all that is below."""

    path: str
    what: str

    def holds(self, path: HostPath) -> bool:
        """Whether ``path`` is this place, or is in it."""
        below = "(/.*)?" if self.path.endswith("/") else ""
        return re.fullmatch(_pattern(self.path.rstrip("/")) + below, str(path)) is not None

    def covers(self, path: HostPath) -> bool:
        """Whether the place holds ``path``, or ``path`` is a directory on the way to it."""
        on_the_way = HostPath(self.path).parents
        return self.holds(path) or any(re.fullmatch(_pattern(str(item)), str(path)) for item in on_the_way)


def _pattern(path: str) -> str:
    return "[^/]*".join(map(re.escape, path.split("*")))


def is_own(path: HostPath) -> bool:
    """Whether ``path`` is one of Stratum's own directories, or in one."""
    return any(root in (path, *path.parents) for root in _OWN_ROOTS)


def footprint() -> tuple[Place, ...]:
    """The list. Directories on the way to a place are made where they are missing, and go when they are empty."""
    drop_in = swapunits.ADMIN / "*.d" / swap.DROP_IN
    return (
        Place(str(program.LINK), "the command"),
        Place(str(persistence.UNIT_PATH), "the supervisor's unit"),
        Place(str(persistence.ENABLEMENT), "its start at boot"),
        Place(str(persistence.OVERRIDE), "for as long as uninstall runs: no restart of the supervisor"),
        *(Place(str(SYSTEMD_DIR / unit), "a unit of the stack") for unit in EVERY_UNIT),
        *(Place(f"{SYSTEMD_DIR / unit}.d/*", "its drop-ins") for unit in EVERY_UNIT),
        Place(str(cni.CONFIG_PATH), "the bridge network"),
        Place(f"{cni.HOST_BIN_DIR}/*", "links to the CNI plugins of the bundle"),
        Place(f"{cni.RESULTS}/*", "what containers were given, by libcni"),
        Place(f"{traces.ROOT}/", "sockets and states of running containers, by containerd's shims"),
        Place(f"{NETNS}/", "network namespaces of pods, by containerd"),
        *(Place(f"{path}/", "what a kubelet keeps, and the logs of its pods") for path in KUBELET_TREES),
        Place(str(modules.LOAD_FILE), "kernel modules of a Kubernetes node, at boot"),
        *(Place(str(path), "kernel settings, at boot") for path in sysctls.drop_ins()),
        Place(str(fstab.FSTAB), "lines of swap become comments on a Kubernetes node"),
        Place(f"{swapunits.ADMIN}/*.swap", "masks of units that switch swap on"),
        *(Place(str(swapunits.ADMIN / name), "masks a service that makes swap") for name in swapunits.SERVICES),
        Place(str(drop_in), "keeps a swap unit of the admin's from starting"),
        Place(str(netmanagers.NETWORK_MANAGER.path), "NetworkManager keeps off the container network"),
        Place(str(netmanagers.NETWORKD.path), "systemd-networkd keeps off the container network"),
        Place(f"{firewalld.ZONES}/{firewalld.ZONE}.xml*", "the bridge in firewalld's trusted zone, by firewall-cmd"),
        *(
            Place(f"{place.path}/", "compiled parts of the pyz, where /var and /opt cannot hold them")
            for place in ROOT_PLACES
            if not is_own(HostPath(place.path))
        ),
    )


def find_place(path: HostPath) -> Optional[Place]:
    """The place that ``path`` belongs to; None for one of Stratum's own and for what no run writes."""
    return next((place for place in footprint() if place.covers(path)), None)
