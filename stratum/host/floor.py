"""The platform floor (seed 004, CheckFloor): cgroup v2 and a kernel that is new enough.

Both are judged before anything starts, with the requirement in the message: a kubelet and a network plugin
would fail later, in words that do not name it.
"""

from __future__ import annotations

import re
from typing import Optional

from stratum.host.finding import REJECT, WARN, Finding
from stratum.host.mounts import mount_types, read_mounts
from stratum.system import Host, HostPath

__all__ = ["KERNEL_FLOOR", "KERNEL_TARGET", "check_cgroup", "check_kernel", "kernel_version", "parse_kernel_release"]

# Cilium's replacement of kube-proxy needs the floor and is made for the target.
KERNEL_FLOOR = (4, 19, 57)
KERNEL_TARGET = (5, 10, 0)
CGROUP_ROOT = HostPath("/sys/fs/cgroup")

_Version = tuple[int, int, int]


def check_cgroup(host: Host, kubelet: Optional[str] = None) -> list[Finding]:
    """cgroup v2 alone at /sys/fs/cgroup, judged by the type of the file system there.

    A cgroup2 mount elsewhere (``/sys/fs/cgroup/unified``, the hybrid layout) does not count: its controllers
    are with version 1. ``kubelet`` is the version that the bundle brings, for the message.
    """
    kind = mount_types(host).get(CGROUP_ROOT)
    if kind == "cgroup2":
        return []
    found = f"its type is {kind}" if kind else "nothing is mounted there"
    hybrid = next((mount.path for mount in read_mounts(host) if mount.type == "cgroup2"), None)
    if hybrid:
        found += f"; cgroup2 at {hybrid} is the hybrid layout, which counts as version 1"
    who = f"kubelet {kubelet.lstrip('v')} and runc need" if kubelet else "the container runtime needs"
    return [
        Finding(
            "cgroup-v2",
            REJECT,
            f"/sys/fs/cgroup is not the cgroup v2 file system ({found}); {who} cgroup v2",
            "boot with systemd.unified_cgroup_hierarchy=1 on the kernel command line",
        )
    ]


def parse_kernel_release(release: str) -> Optional[_Version]:
    """The numbers at the start of a release string such as ``5.14.0-427.el9`` or ``6.1-rc3``; None without."""
    # ASCII only: \d would take digits of other scripts, which int() reads as well.
    found = re.match(r"([0-9]+)\.([0-9]+)(?:\.([0-9]+))?", release)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def kernel_version(host: Host) -> Optional[_Version]:
    """The upstream version of the running kernel; None when its release string has none.

    Debian's and Ubuntu's release strings end in .0 whatever stable release the kernel is (``4.19.0-27-amd64``
    is 4.19.316); they say the true one elsewhere.
    """
    version = parse_kernel_release(host.kernel_release())
    if version is None or version[2] != 0:
        return version
    told = _debian_version(host) or _ubuntu_version(host)
    return told if told and told[:2] == version[:2] else version


def _debian_version(host: Host) -> Optional[_Version]:
    # "... #1 SMP Debian 4.19.316-1 (2024-06-25)"; before the # stands the compiler, which is Debian's as well.
    build = _read(host, "/proc/version").partition(" #")[2]
    found = re.search(r"\bDebian ([0-9.]+)", build)
    return parse_kernel_release(found[1]) if found else None


def _ubuntu_version(host: Host) -> Optional[_Version]:
    # "Ubuntu 5.4.0-150.167-generic 5.4.233"
    words = _read(host, "/proc/version_signature").split()
    return parse_kernel_release(words[-1]) if words else None


def _read(host: Host, path: str) -> str:
    try:
        return host.read_text(path)
    except OSError:
        return ""


def check_kernel(host: Host) -> list[Finding]:
    """The kernel is at least 4.19.57; under 5.10 there is a warning."""
    release = host.kernel_release()
    version = kernel_version(host)
    if version is None:
        return [Finding("kernel", WARN, f"cannot read a version in the kernel release {release!r}", "check it by hand")]
    number = ".".join(map(str, version))
    name = release if release.startswith(number) else f"{release} ({number})"
    if version < KERNEL_FLOOR:
        return [Finding("kernel", REJECT, f"kernel {name} is older than 4.19.57", "install a newer kernel")]
    if version < KERNEL_TARGET:
        return [Finding("kernel", WARN, f"kernel {name} is older than 5.10", "a newer kernel is advised")]
    return []
