"""Checks of the host, each with a name, before anything is written.

A check looks and returns findings; it changes nothing. A finding that rejects stops ``up``; a warning is shown.
The same list feeds ``stratum preflight`` and the gate in ``up``. One check can be skipped by its name.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, Optional

from stratum.host.finding import REJECT, WARN, Finding
from stratum.host.floor import check_cgroup, check_kernel, parse_kernel_release
from stratum.host.netmanagers import check_cloud_setup
from stratum.host.places import existing_parent, why_unwritable
from stratum.host.program import COMMAND, LINK, why_no_link
from stratum.system import SEARCH_PATH, Host, HostPath

__all__ = ["REJECT", "WARN", "Finding", "Need", "check_host", "detect_unmanaged", "parse_kernel_release"]

UNIT_DIRS = tuple(
    HostPath(name)
    for name in ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
)
# What up runs outside of the bundle, and why.
COMMANDS = {"systemctl": "units are managed with it", "journalctl": "logs and errors are read with it"}
# Programs that some functions need and a container host can do without: any one of each group.
OPTIONAL_COMMANDS = {
    ("nft", "iptables"): "containers get no address translation to the outside",
    ("modprobe",): "kernel modules must be loaded already",
}
_WRITABLE = ("/etc/stratum", "/etc/systemd/system", "/opt/stratum", "/var/lib/stratum", "/run")
OWNED = HostPath("/opt/stratum")


@dataclass(frozen=True)
class Need:
    """What an installation will take from one directory's file system: bytes and inodes."""

    path: HostPath
    size: int
    inodes: int


def check_root(host: Host) -> list[Finding]:
    """The process is root; the files of the node belong to root."""
    if host.euid == 0:
        return []
    return [Finding("root", REJECT, f"running as user {host.euid}, not root", "run it with sudo")]


def check_systemd(host: Host) -> list[Finding]:
    """systemd is PID 1: sd_booted(3) tests for its runtime directory."""
    if host.is_dir("/run/systemd/system"):
        return []
    return [
        Finding(
            "systemd",
            REJECT,
            "systemd is not PID 1 here (/run/systemd/system is missing)",
            "boot the host with systemd; Stratum runs the node as systemd units",
        )
    ]


def check_commands(host: Host) -> list[Finding]:
    """The programs that up runs, looked up in PATH and the standard directories."""
    missing = [
        Finding("commands", REJECT, f"{name} is not installed: {why}", f"install the package that has {name}")
        for name, why in COMMANDS.items()
        if host.which(name) is None
    ]
    return missing + [
        Finding("optional-commands", WARN, f"no {' or '.join(group)} here: {why}", f"install {group[0]} if you need it")
        for group, why in OPTIONAL_COMMANDS.items()
        if not any(host.which(name) for name in group)
    ]


def check_writable(host: Host) -> list[Finding]:
    """Each directory that up writes to is writable; a missing one through its nearest parent.

    The command's place on PATH is a convenience: some hosts keep all of /usr read-only, and nothing of the node is
    in there.
    """
    findings = []
    for name in _WRITABLE:
        why, parent = why_unwritable(host, HostPath(name)), existing_parent(host, HostPath(name))
        if why:
            findings.append(Finding("writable-paths", REJECT, f"{name}: {parent} is {why}", _writable_hint(parent)))
    why = why_no_link(host)
    if why:
        message = f"{LINK.parent} is {why}, so there will be no {LINK}"
        findings.append(Finding("writable-paths", WARN, message, f"run {COMMAND} instead"))
    return findings


def _writable_hint(parent: HostPath) -> str:
    return f"make {parent} writable (findmnt --target {parent} shows its mount)"


def check_executable(host: Host) -> list[Finding]:
    """No ``noexec`` where programs will be: containerd could not start.

    A link is not asked: what counts for it is the mount of the file that it leads to.
    """
    parent = existing_parent(host, OWNED)
    if not host.statvfs(parent).f_flag & os.ST_NOEXEC:
        return []
    hint = f"remount it: mount -o remount,exec $(findmnt --noheadings --output TARGET --target {parent})"
    return [Finding("noexec", REJECT, f"{OWNED}: its file system is mounted noexec", hint)]


def check_space(host: Host, needs: Sequence[Need]) -> list[Finding]:
    """Free space and inodes, summed for each file system, for everything that will be written."""
    by_device: dict[int, list[Need]] = {}
    for need in needs:
        device = host.stat(existing_parent(host, need.path)).st_dev
        by_device.setdefault(device, []).append(need)
    findings = []
    for group in by_device.values():
        where = existing_parent(host, group[0].path)
        system = host.statvfs(where)
        size, inodes = sum(need.size for need in group), sum(need.inodes for need in group)
        free = system.f_bavail * system.f_frsize
        if size > free:
            findings.append(
                Finding(
                    "disk-space",
                    REJECT,
                    f"{group[0].path}: {_mib(size)} are needed and {_mib(free)} are free",
                    f"free {_mib(size - free)} on the file system of {where}",
                )
            )
        # Some file systems (btrfs, bcachefs) make inodes as they go and report none.
        if system.f_files and inodes > system.f_favail:
            findings.append(
                Finding(
                    "inodes",
                    REJECT,
                    f"{group[0].path}: {inodes} inodes are needed and {system.f_favail} are free",
                    f"remove files from the file system of {where}",
                )
            )
    return findings


def _mib(size: int) -> str:
    return f"{-(-size // (1 << 20))} MiB"


def is_masked(host: Host, path: HostPath) -> bool:
    """Whether the unit file at ``path`` leads to /dev/null, by whatever links, or is empty: both mask a unit."""
    real = os.path.realpath(host.real(path, follow=True))
    if real == os.path.realpath(host.real("/dev/null")):
        return True
    return host.exists(path) and not host.is_dir(path) and host.stat(path).st_size == 0


def check_masked(host: Host, units: Sequence[str]) -> list[Finding]:
    """None of our units is masked: systemd would refuse to start it, and we never unmask what an admin masked."""
    findings = []
    for unit in units:
        for directory in UNIT_DIRS[:2]:
            path = directory / unit
            if is_masked(host, path):
                hint = f"if that is not on purpose: systemctl unmask {unit}"
                findings.append(Finding("masked-unit", REJECT, f"{path}: the unit is masked", hint))
    return findings


def detect_unmanaged(host: Host, owned: HostPath = OWNED) -> list[str]:
    """Each kubelet or containerd that is not ours: a unit file, a program, a running process (seed 000).

    Two of them on one host fight over sockets and directories.
    """
    names = ("containerd", "kubelet")
    found = [
        f"unit file {path}"
        for name in names
        for path in _unit_files(host, f"{name}.service")
        if not is_masked(host, path)
    ]
    found += [
        f"program {directory}/{name}"
        for directory in SEARCH_PATH
        for name in names
        if host.lexists(f"{directory}/{name}") and not _leads_into(host, HostPath(f"{directory}/{name}"), owned)
    ]
    return _unique_files(host, found) + _foreign_processes(host, names, owned)


def _unit_files(host: Host, unit: str) -> list[HostPath]:
    """The files of a unit, the one that systemd takes first; none when that masks it: it never starts then."""
    files = [directory / unit for directory in UNIT_DIRS if host.lexists(directory / unit)]
    return [] if files and is_masked(host, files[0]) else files


def _leads_into(host: Host, path: HostPath, owned: HostPath) -> bool:
    real = os.path.realpath(host.real(path, follow=True))
    return real.startswith(os.path.realpath(host.real(owned)) + "/")


def _unique_files(host: Host, found: Sequence[str]) -> list[str]:
    # /lib is a link to /usr/lib on merged systems: one file must not be named twice.
    seen: dict[str, str] = {}
    for text in found:
        kind, _, path = text.rpartition(" ")
        parent = os.path.realpath(host.real(HostPath(path).parent, follow=True))
        seen.setdefault(f"{kind} {parent}/{HostPath(path).name}", text)
    return list(seen.values())


def _foreign_processes(host: Host, names: Sequence[str], owned: HostPath) -> list[str]:
    found = []
    for name in host.listdir("/proc") if host.is_dir("/proc") else []:
        if not name.isdigit():
            continue
        try:
            program = host.readlink(f"/proc/{name}/exe").replace(" (deleted)", "")
        except OSError:
            continue  # a kernel thread, or a process that has just ended
        if HostPath(program).name in names and not program.startswith(f"{owned}/"):
            found.append(f"process {name} ({program})")
    return found


def check_ownership(host: Host) -> list[Finding]:
    """No kubelet or containerd that is not ours; each one is a finding."""
    return [
        Finding(
            "unmanaged", REJECT, f"{what} is not Stratum's", "remove it; two of them on one host fight over sockets"
        )
        for what in detect_unmanaged(host)
    ]


def check_host(
    host: Host,
    *,
    needs: Sequence[Need] = (),
    units: Sequence[str] = (),
    skip: Sequence[str] = (),
    kubelet: Optional[str] = None,
) -> list[Finding]:
    """All findings about the host at once. A directory tree is asked only what holds for a tree.

    ``kubelet`` is the release of the kubelet that the node will have.
    """
    findings: list[Finding] = []
    for check in _checks(host, needs, units, kubelet):
        try:
            findings += check()
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                continue  # not root: that is a finding of its own
            raise
    return [finding for finding in findings if finding.check not in skip]


def _checks(
    host: Host, needs: Sequence[Need], units: Sequence[str], kubelet: Optional[str]
) -> list[Callable[[], list[Finding]]]:
    both = [
        lambda: check_writable(host),
        lambda: check_space(host, needs),
        lambda: check_masked(host, units),
        lambda: check_ownership(host),
        lambda: check_cloud_setup(host),
    ]
    if not host.live:
        return both
    running = (check_root, check_systemd, check_kernel, check_commands, check_executable)
    return [*(lambda check=check: check(host) for check in running), lambda: check_cgroup(host, kubelet), *both]


CHECKS: Mapping[str, str] = {
    "root": "the process is root",
    "systemd": "systemd is PID 1",
    "cgroup-v2": "cgroup v2 alone at /sys/fs/cgroup",
    "kernel": "kernel 4.19.57 or later",
    "commands": "systemctl and journalctl are there",
    "optional-commands": "nft or iptables, and modprobe, are there",
    "writable-paths": "the directories that up writes to are writable",
    "noexec": "programs can be run from /opt/stratum",
    "disk-space": "room for everything that will be unpacked",
    "inodes": "inodes for everything that will be unpacked",
    "masked-unit": "no unit of ours is masked",
    "unmanaged": "no containerd or kubelet that is not ours",
    "module-missing": "the kernel has the modules that a node needs, or can load them",
    "module-not-visible": "what a loaded module is for can be seen (in a container it may not)",
    "selinux-policy": "where SELinux is on, its policy knows containers",
    "selinux-tools": "where SELinux is on, file contexts can be registered",
    "node-name": "a Kubernetes node's name is given, recorded, or the host's own and legal",
    "node-ip": "a Kubernetes node's address is given, recorded or found without doubt",
    "kubelet-state": "no identity of another kubelet is in the kubelet's directory",
    "kubelet-port": "nobody has the ports of the kubelet before it first starts",
    "kubelet-config": "the kubelet knows the fields that the configuration gives it",
    "kubelet-program": "the programs that the configuration names for the kubelet are there",
    "localdns": "the bundle has CoreDNS where LocalDNS is asked for",
    "localdns-upstream": "the host, or the configuration, names a DNS server for LocalDNS to ask",
    "localdns-port": "nobody has port 53 of every address, LocalDNS's among them",
    "localdns-locked-out": "LocalDNS's user can get to its configuration and its program",
    "nm-cloud-setup": "nm-cloud-setup, which breaks container traffic, is not enabled",
    "gpu": "NVIDIA GPUs have what containers need of the host, where there are any",
    "sandbox-image": "a bundle with a kubelet has the image that pods are held together by",
    "cni-loopback": "a bundle with a kubelet has the CNI plugin that every pod needs",
    "containerd-fragment": "no file of containerd's conf.d takes the place of what Stratum sets",
    "architecture": "the bundle is for this machine",
    "components": "the bundle has what every node needs",
    "signature": "a trusted key signed the bundle",
    "digests": "each blob of the bundle has its digest",
}
