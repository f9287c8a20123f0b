"""The kernel settings of a node, as data: a base for every node and what a profile adds.

A new profile is a new entry of :data:`PROFILES`; its drop-in, its removal and the check of its values follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stratum.errors import UsageError
from stratum.system import HostPath

__all__ = ["BASE", "FORWARD_IPV6", "PROFILES", "Profile", "Sysctl", "find_profile"]

_DIRECTORY = HostPath("/etc/sysctl.d")


@dataclass(frozen=True)
class Sysctl:
    """One setting: ``key`` with dots, ``value`` as the kernel takes it, and why a node needs it."""

    key: str
    value: str
    why: str


@dataclass(frozen=True)
class Profile:
    """A set of settings that a node depends on when it has any (seed 004, Prereqs)."""

    name: str
    sysctls: tuple[Sysctl, ...] = ()

    @property
    def path(self) -> HostPath:
        """Its drop-in, which is written only when it has settings."""
        return _DIRECTORY / f"99-stratum-{self.name}.conf"


# 99: a distribution's own file must not win by its name. An admin's that sorts behind it is found and named.
BASE_PATH = _DIRECTORY / "99-stratum.conf"

BASE = (
    Sysctl("net.ipv4.ip_forward", "1", "pods reach other hosts through this one"),
    Sysctl("net.bridge.bridge-nf-call-iptables", "1", "services work between pods on one bridge"),
    Sysctl("net.bridge.bridge-nf-call-ip6tables", "1", "the same, for IPv6"),
)

# For a node with IPv6 pods. The kernel then ignores router advertisements on interfaces whose accept_ra is not 2:
# a host that has its IPv6 default route from them (and no manager that handles them itself) would lose it.
FORWARD_IPV6 = (Sysctl("net.ipv6.conf.all.forwarding", "1", "pods reach other hosts through this one, by IPv6"),)

# What kubelet's protectKernelDefaults compares, and refuses to start on: setupKernelTunables in its container manager.
_KUBELET = "kubelet with protectKernelDefaults starts only with this value"

PROFILES: Mapping[str, Profile] = {
    "default": Profile("default"),
    "cis": Profile(
        "cis",
        (
            Sysctl("vm.overcommit_memory", "1", _KUBELET),
            Sysctl("vm.panic_on_oom", "0", _KUBELET),
            Sysctl("kernel.panic", "10", _KUBELET),
            Sysctl("kernel.panic_on_oops", "1", _KUBELET),
            Sysctl("kernel.keys.root_maxkeys", "1000000", _KUBELET),
            Sysctl("kernel.keys.root_maxbytes", "25000000", _KUBELET),
        ),
    ),
}


def find_profile(name: str) -> Profile:
    """The profile called ``name``; raises :class:`UsageError` with the names that there are."""
    if name not in PROFILES:
        raise UsageError(
            "unknown-profile", f"profile {name!r} is not known", hint=f"there are: {', '.join(sorted(PROFILES))}"
        )
    return PROFILES[name]
