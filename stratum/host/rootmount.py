"""Mounts that a network plugin's pods need (seed 004, EnsureRootShared and EnsureBPFFS).

systemd makes / shared and mounts the BPF file system at boot; BusyBox, OpenRC and containers do not. Nothing here
is fatal: a plugin that does not need it works, and one that does says so.

Undo: a BPF file system that was mounted in this boot goes again if nothing is pinned in it. A root that was made
shared stays so until the next boot: mounts that others made since may rely on it, and nothing of it is on a disk.
"""

from __future__ import annotations

import functools
from typing import Callable, Optional

from stratum import atomicfile
from stratum.errors import CommandError
from stratum.host.mounts import Mount, read_mounts
from stratum.steps import Action, Call
from stratum.system import Host, HostPath

__all__ = ["BPF", "plan_bpf", "plan_root_shared", "plan_undo", "propagation"]

BPF = HostPath("/sys/fs/bpf")
ROOT = HostPath("/")
REMEMBERED = HostPath("/run/stratum/bpf-mounted")  # holds the boot's id: what an earlier boot mounted is gone
BOOT_ID = HostPath("/proc/sys/kernel/random/boot_id")

_TIMEOUT = 30.0

Warn = Callable[[str], object]


def _topmost(host: Host, path: HostPath) -> Optional[Mount]:
    return next((mount for mount in reversed(read_mounts(host)) if mount.path == path), None)


def propagation(mount: Mount) -> str:
    """``shared``, ``slave`` or ``private``, by the optional fields of mountinfo (proc(5)).

    A mount can be shared and a slave at once; it then passes mounts on, which is what matters here.
    """
    kinds = {tag.partition(":")[0] for tag in mount.tags}
    if "shared" in kinds:
        return "shared"
    return "slave" if "master" in kinds else "private"


def plan_root_shared(host: Host, warn: Warn) -> list[Action]:
    """Make / and every mount below it shared where / is private.

    Shared and slave are left alone: containerd accepts both for mounts from the host, and making a slave shared
    would be a change of what it follows.
    """
    if not host.live:
        return []
    root = _topmost(host, ROOT)
    if root is None or propagation(root) != "private":
        return []
    argv = ["mount", "--make-rshared", "/"]
    return [Call("make shared", "/ and every mount below it", functools.partial(_try, host, argv, warn))]


def plan_bpf(host: Host, warn: Warn) -> list[Action]:
    """Mount the BPF file system at /sys/fs/bpf, shared; one that is there and private is made shared."""
    if not host.live:
        return []
    if not host.is_dir(BPF):
        # sysfs has the directory when the kernel has BPF; nobody can make it there.
        warn(f"{BPF} is not there: this kernel has no BPF file system, or /sys is not mounted")
        return []
    mount = _topmost(host, BPF)
    if mount is None or mount.type != "bpf":
        return [Call("mount", f"the BPF file system at {BPF}", functools.partial(_mount_bpf, host, warn))]
    if propagation(mount) == "shared":
        return []
    return [Call("make shared", str(BPF), functools.partial(_share_bpf, host, warn))]


def _try(host: Host, argv: list[str], warn: Warn) -> bool:
    try:
        host.run(argv, timeout=_TIMEOUT)
    except CommandError as error:
        warn(error.message)
        return False
    return True


def _share_bpf(host: Host, warn: Warn) -> bool:
    return _try(host, ["mount", "--make-shared", str(BPF)], warn)


def _mount_bpf(host: Host, warn: Warn) -> None:
    host.makedirs(REMEMBERED.parent)
    atomicfile.write_file(host, REMEMBERED, _boot(host), 0o600)
    if _try(host, ["mount", "-t", "bpf", "bpf", str(BPF)], warn):
        _share_bpf(host, warn)


def _boot(host: Host) -> bytes:
    try:
        return host.read_bytes(BOOT_ID)
    except OSError:
        return b""


def plan_undo(host: Host, warn: Warn) -> list[Action]:
    """Unmount the BPF file system that was mounted in this boot, if nobody pinned anything in it."""
    if not host.live or not host.exists(REMEMBERED) or host.read_bytes(REMEMBERED) != _boot(host):
        return []
    mount = _topmost(host, BPF)
    if mount is None or mount.type != "bpf" or host.listdir(BPF):
        return []
    return [Call("unmount", str(BPF), functools.partial(_try, host, ["umount", str(BPF)], warn))]
