"""Debian roots for the machines, made by mmdebstrap once and then cached.

A root has real systemd, Debian's Python, the cloud kernel and the programs
that a bare server has; it has neither containerd nor runc. The directory
serves nspawn machines as the lower layer of an overlay, the disk serves qemu
machines as the backing file of theirs: neither is ever written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from tests.lab import tools
from tests.lab.machine import LabError

_MIRROR = "http://deb.debian.org/debian"
_SECURITY_MIRROR = "http://deb.debian.org/debian-security"

#: Counted up when the way of making roots changes.
_FORMAT = "1"

_DISK_SIZE = "4G"

_MACHINE_PACKAGES = (
    "systemd", "systemd-sysv", "udev", "dbus", "python3", "iproute2", "iptables", "nftables",
    "kmod", "procps", "linux-image-cloud-amd64", "qemu-guest-agent",
)

# The initrd holds what the disk needs and no more: emulated processors are slow.
_INITRD_MODULES = "virtio_pci\nvirtio_blk\next4\ncrc32c_generic\n"

# Nobody logs in, there is nothing to fetch, and no disk to trim.
_MASKED = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer",
    "e2scrub_reap.service", "fstrim.timer", "console-getty.service", "getty@tty1.service",
    "serial-getty@ttyS0.service",
)


@dataclass(frozen=True)
class Recipe:
    """How a root is made; the cache's key is made of all of it."""

    suite: str
    packages: tuple[str, ...]
    machine: bool = True
    labelled: bool = False  # each file has its SELinux label

    @property
    def label(self) -> str:
        """The name of the root in the cache."""
        kind = "machine" if self.machine else "python"
        text = json.dumps([_FORMAT, self.suite, self.packages, _hooks(self)])
        return f"{self.suite}-{kind}-{tools.key(text)}"


BOOKWORM = Recipe("bookworm", _MACHINE_PACKAGES)
TRIXIE = Recipe("trixie", _MACHINE_PACKAGES)
UNSTABLE = Recipe("unstable", _MACHINE_PACKAGES)
#: What meddles with interfaces: a firewall with zones, and NetworkManager.
FIREWALLD = Recipe("bookworm", (*_MACHINE_PACKAGES, "firewalld", "network-manager"))
SELINUX = Recipe("bookworm", (*_MACHINE_PACKAGES, "selinux-policy-default", "policycoreutils"), labelled=True)

#: What the stand-ins for a kubelet, an API server and CoreDNS are written with, and a resolver with a stub.
KUBERNETES = Recipe(
    "bookworm",
    (*_MACHINE_PACKAGES, "python3-yaml", "python3-grpcio", "python3-cryptography", "systemd-resolved", "conntrack"),
)

#: Roots with nothing but a Python: 3.9, 3.11, 3.13 and the newest that Debian has.
PYTHON_ROOTS = tuple(
    Recipe(suite, ("python3-minimal", "libpython3-stdlib"), machine=False)
    for suite in ("bullseye", "bookworm", "trixie", "unstable")
)


@dataclass(frozen=True)
class Disk:
    """A raw disk with a root on it, and what qemu needs to boot it."""

    image: Path
    kernel: Path
    initrd: Path


def root_directory(recipe: Recipe = BOOKWORM) -> Path:
    """Return a root as a directory that must not be written to; make it if need be.

    :raises LabError: if mmdebstrap is missing or fails.
    """
    tools.require("mmdebstrap")
    target = tools.cache_directory() / "roots" / recipe.label
    with tools.building(target) as new:
        if new is not None:
            hooks = [f"--{kind}-hook={script}" for kind, script in _hooks(recipe)]
            tools.tool(
                ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--format=directory",
                 *_excludes(), *_apt_options(), *hooks, f"--include={','.join(recipe.packages)}",
                 recipe.suite, str(new), *apt_sources(recipe.suite)],
                timeout=3600,
            )
            # mmdebstrap leaves the directory to its user alone.
            new.chmod(0o755)
    return target


def root_disk(recipe: Recipe = BOOKWORM) -> Disk:
    """Return a root as a raw ext4 disk that must not be written to; make it if need be.

    :raises LabError: if the root cannot be made, or mkfs.ext4 fails.
    """
    return disk_of(root_directory(recipe), recipe.label)


def disk_of(root: Path, label: str, change: Optional[Callable[[Path], None]] = None) -> Disk:
    """Return a root directory as a raw ext4 disk that must not be written to; make it if need be.

    :param label: the disk's name in the cache; it stands for the root and the change.
    :param change: what to do with a copy of the root first.
    :raises LabError: if it cannot be made.
    """
    tools.require("mkfs.ext4")
    kernels = sorted((root / "boot").glob("vmlinuz-*"))
    if not kernels:
        raise LabError(f"{root}: no kernel in /boot")
    target = tools.cache_directory() / "disks" / f"{label}.raw"
    with tools.building(target) as new:
        if new is not None:
            source = root
            if change is not None:
                source = new.with_name("root")
                tools.tool(["cp", "--archive", "--reflink=auto", str(root), str(source)], timeout=900)
                change(source)
            # Fixed numbers: two disks made of one root are the same disk.
            tools.tool(
                ["mkfs.ext4", "-q", "-F", "-L", "stratum-lab", "-m", "1", "-d", str(source),
                 "-U", "6a1f3c62-5f5d-4e6a-9d0c-1b1f5c0e7a11", str(new), _DISK_SIZE],
                timeout=900,
            )
    version = kernels[-1].name[len("vmlinuz-"):]
    return Disk(target, kernels[-1], root / "boot" / f"initrd.img-{version}")


def apt_sources(suite: str) -> list[str]:
    """Return one-line apt sources for a Debian suite.

    The mirrors are those that this machine's apt uses for Debian, if it is a
    Debian; else Debian's own.
    """
    mirror, security = _machine_mirrors()
    keyring = _keyring()
    sources = [f"deb [signed-by={keyring}] {mirror} {suite} main"]
    if suite not in ("unstable", "sid"):
        sources.append(f"deb [signed-by={keyring}] {mirror} {suite}-updates main")
        sources.append(f"deb [signed-by={keyring}] {security} {suite}-security main")
    return sources


def _machine_mirrors() -> tuple[str, str]:
    """Find the mirrors of Debian and of its security updates that apt uses here."""
    listing = tools.tool(
        ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(REPO_URI)", "Created-By: Packages"],
        timeout=60,
    )
    found: dict[str, str] = {}
    for line in listing.splitlines():
        origin, label, uri = line.split("|", 2)
        if origin == "Debian" and uri.startswith("http"):
            found.setdefault(label, uri.rstrip("/"))
    return found.get("Debian", _MIRROR), found.get("Debian-Security", _SECURITY_MIRROR)


def _keyring() -> str:
    for suffix in ("gpg", "pgp"):
        path = f"/usr/share/keyrings/debian-archive-keyring.{suffix}"
        if os.path.exists(path):
            return path
    raise LabError(f"no keyring of Debian's archive; {tools.HINT}")


def _apt_options() -> list[str]:
    """Return mmdebstrap options: how this machine's apt reaches the archive, and that it may be an old one."""
    dump = tools.tool(["apt-config", "dump", "--no-empty", "Acquire::http", "Acquire::https"], timeout=60)
    # A mirror that stands still is signed by Debian all the same, and good enough for a lab.
    lines = ['Acquire::Check-Valid-Until "false";', *dump.splitlines()]
    return [f"--aptopt={line}" for line in lines if '"' in line]


def _excludes() -> list[str]:
    places = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
    return [f"--dpkgopt=path-exclude={place}" for place in places]


def _hooks(recipe: Recipe) -> list[tuple[str, str]]:
    """Return mmdebstrap's hooks; ``$1`` is the new root."""
    if not recipe.machine:
        return []
    initrd = (
        'mkdir -p "$1/etc/initramfs-tools/conf.d" "$1/usr/share/initramfs-tools/modules.d" && '
        'echo MODULES=list >"$1/etc/initramfs-tools/conf.d/stratum-lab" && '
        f"printf '%s' '{_INITRD_MODULES}' >\"$1/usr/share/initramfs-tools/modules.d/stratum-lab\""
    )
    # The agent tells the journal of each question; ours would drown all the rest.
    quiet = "etc/systemd/system/qemu-guest-agent.service.d"
    settle = (
        f'mkdir -p "$1/{quiet}" && printf "[Service]\\nLogLevelMax=warning\\n" >"$1/{quiet}/quiet.conf" && '
        'echo stratum-lab >"$1/etc/hostname" && '
        "printf '127.0.0.1 localhost\\n127.0.1.1 stratum-lab\\n' >\"$1/etc/hosts\" && "
        f'chroot "$1" systemctl mask --quiet {" ".join(_MASKED)} && '
        ': >"$1/etc/machine-id" && rm -f "$1/etc/resolv.conf" && : >"$1/etc/resolv.conf"'
    )
    # -m: this machine mounts nothing with labels, and they are written all the same.
    contexts = "etc/selinux/default/contexts/files/file_contexts"
    label = f'chroot "$1" setfiles -m -F /{contexts} /'
    hooks = [("essential", initrd), ("customize", settle)]
    return [*hooks, ("customize", label)] if recipe.labelled else hooks
