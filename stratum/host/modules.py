"""Kernel modules (seed 004, Prereqs): loaded now and at each boot, judged by what they do.

What counts is the effect: a module that is built in, or that the machine around a container has loaded, is there
without modprobe, and modprobe can fail where the feature works (no /lib/modules in a container). A module that is
loaded but whose controls are not visible is a finding of its own: the container does not show them, and loading
it again helps nothing.

Undo is the drop-in, which the receipt lists. A module that was loaded stays until the next boot: nobody records
who else came to rely on it since, and without br_netfilter the host's own firewall would see other packets.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable, Optional

from stratum.errors import CommandError
from stratum.host.finding import REJECT, WARN, Finding
from stratum.steps import Action, Call, RemoveFile, Work, plan_file
from stratum.system import Host, HostPath, PathLike

__all__ = ["CONTAINER_HOST", "LOAD_FILE", "NODE", "Module", "check_modules", "is_effective", "plan_modules"]

LOAD_FILE = HostPath("/etc/modules-load.d/stratum.conf")
_TREES = HostPath("/lib/modules")
_TIMEOUT = 60.0

Warn = Callable[[str], object]


@dataclass(frozen=True)
class Module:
    """A module, why it is needed and where its effect is seen: a file system, or a path that it makes."""

    name: str
    why: str
    filesystem: Optional[str] = None
    path: Optional[HostPath] = None
    required: bool = True


CONTAINER_HOST = (Module("overlay", "containerd's snapshots are overlay mounts", filesystem="overlay"),)

NODE = (
    *CONTAINER_HOST,
    Module(
        "br_netfilter",
        "services between pods on one bridge need its sysctls",
        path=HostPath("/proc/sys/net/bridge"),
    ),
    Module(
        "nf_conntrack",
        "kube-proxy sets its limits",
        path=HostPath("/proc/sys/net/netfilter/nf_conntrack_max"),
        required=False,
    ),
)


def is_effective(host: Host, module: Module) -> bool:
    """Whether what ``module`` is for works now."""
    if module.filesystem is not None:
        # Lines are "nodev\toverlay" or "\text4".
        return module.filesystem in (line.split("\t")[-1].strip() for line in _lines(host, "/proc/filesystems"))
    return module.path is not None and host.exists(module.path)


def is_loaded(host: Host, module: Module) -> bool:
    """Whether the kernel lists the module as loaded; a built-in one is not listed."""
    return any(line.split(" ", 1)[0] == module.name for line in _lines(host, "/proc/modules"))


def _lines(host: Host, path: PathLike) -> list[str]:
    try:
        return host.read_text(path).splitlines()
    except OSError:
        return []


def _can_be_loaded(host: Host, module: Module) -> bool:
    """Whether systemd-modules-load would find the module; it fails as a unit for one that it does not.

    A tree may get its kernel later, so there every module is listed until a kernel says otherwise.
    """
    directory = _TREES / host.kernel_release()
    if not host.live:
        kernels = host.listdir(_TREES) if host.is_dir(_TREES) else []
        return not kernels or any(_is_listed(host, _TREES / kernel, module) for kernel in kernels)
    return _is_listed(host, directory, module)


def _is_listed(host: Host, directory: HostPath, module: Module) -> bool:
    # "kernel/fs/overlayfs/overlay.ko.xz: …" and "kernel/fs/overlayfs/overlay.ko"; depmod writes both lists.
    for name in ("modules.dep", "modules.builtin"):
        for line in _lines(host, directory / name):
            found = HostPath(line.partition(":")[0]).name.partition(".ko")[0]
            # Files are named with either sign, modules with the underscore only.
            if found.replace("-", "_") == module.name:
                return True
    return False


def render_load_file(modules: Sequence[Module]) -> bytes:
    """The drop-in for systemd-modules-load, modules-load.d(5)."""
    lines = ["# Written by Stratum: what its node needs at each boot."]
    for module in modules:
        lines += [f"# {module.why}", module.name]
    return ("\n".join(lines) + "\n").encode()


def plan_modules(work: Work, modules: Sequence[Module], warn: Warn) -> list[Action]:
    """What loads ``modules`` at each boot, and now where their effect is missing.

    A modprobe that fails is told to ``warn`` when the effect is missing afterwards; :func:`check_modules` judges.
    """
    host = work.host
    loadable = [module for module in modules if _can_be_loaded(host, module)]
    actions: list[Action] = []
    if loadable:
        actions += plan_file(work, LOAD_FILE, render_load_file(loadable))
    elif work.receipt.owns(LOAD_FILE):
        actions.append(RemoveFile(LOAD_FILE))
    if not host.live:
        return actions
    missing = [module for module in modules if not is_effective(host, module) and not is_loaded(host, module)]
    return actions + [
        Call("load module", module.name, functools.partial(_load, host, module, warn)) for module in missing
    ]


def _load(host: Host, module: Module, warn: Warn) -> None:
    try:
        host.run(["modprobe", module.name], timeout=_TIMEOUT)
    except CommandError as error:
        if not is_effective(host, module):
            warn(f"module {module.name} cannot be loaded ({module.why}): {error.message}")


def check_modules(host: Host, modules: Sequence[Module], *, before_loading: bool = False) -> list[Finding]:
    """The effect of each module is there; ``before_loading`` (in preflight), it is or modprobe will find the module."""
    if not host.live:
        return []
    return [
        _finding(host, module)
        for module in modules
        if not is_effective(host, module)
        and not (before_loading and not is_loaded(host, module) and _can_be_loaded(host, module))
    ]


def _finding(host: Host, module: Module) -> Finding:
    severity = REJECT if module.required else WARN
    where = module.path or f"{module.filesystem} in /proc/filesystems"
    if is_loaded(host, module):
        return Finding(
            "module-not-visible",
            severity,
            f"module {module.name} is loaded but not visible: {where} is missing ({module.why})",
            "in a container, let its manager give it the host's network sysctls; otherwise look into dmesg",
        )
    return Finding(
        "module-missing",
        severity,
        f"module {module.name} is not loaded: {where} is missing ({module.why})",
        f"run: modprobe {module.name}; in a container, run it on the machine around it",
    )
