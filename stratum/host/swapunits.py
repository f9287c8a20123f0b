"""What switches swap on at boot besides fstab: systemd's swap units, and services that do it themselves.

Swap units come from generators (zram-generator, the one for GPT partitions), from packages and from admins.
Those that the fstab generator makes go with their line. The places and their precedence are those of
systemd.unit(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stratum.system import Host, HostPath

__all__ = ["SERVICES", "SwapUnit", "is_masked", "read_services", "read_swap_units", "same_device"]

# First wins. Masking is a link in the first of ADMIN; what is before it there cannot be masked.
UNIT_PATH = tuple(
    HostPath(path)
    for path in (
        "/etc/systemd/system.control",
        "/run/systemd/system.control",
        "/run/systemd/transient",
        "/run/systemd/generator.early",
        "/etc/systemd/system",
        "/run/systemd/system",
        "/run/systemd/generator",
        "/usr/local/lib/systemd/system",
        "/usr/lib/systemd/system",
        "/lib/systemd/system",
        "/run/systemd/generator.late",
    )
)
ADMIN = HostPath("/etc/systemd/system")

# Services that make and switch on swap without a swap unit, by the distribution that they come from.
SERVICES = (
    "zramswap.service",  # Debian's zram-tools
    "zram-config.service",  # Ubuntu
    "zram-swap.service",  # Fedora before zram-generator
    "armbian-zram-config.service",  # Armbian
    "dphys-swapfile.service",  # Raspberry Pi OS
    "systemd-swap.service",  # Arch, Manjaro
    "swapspace.service",  # Debian's swapspace
)


@dataclass(frozen=True)
class SwapUnit:
    """A swap unit that is not masked: where its file is, which device it is for, and what starts it."""

    name: str
    path: HostPath
    device: str
    from_fstab: bool
    wanted: bool  # something at boot asks for it

    @property
    def can_be_masked(self) -> bool:
        """Whether a link in /etc hides the file: not where one of the admin's or of an earlier place is in the way."""
        return UNIT_PATH.index(self.path.parent) > UNIT_PATH.index(ADMIN)


def is_masked(host: Host, name: str) -> bool:
    """Whether the unit that decides for ``name`` is a link to /dev/null or empty."""
    path = next((directory / name for directory in UNIT_PATH if host.lexists(directory / name)), None)
    if path is None:
        return False
    if host.is_link(path) and host.readlink(path) == "/dev/null":
        return True
    return host.exists(path) and not host.is_dir(path) and not host.read_bytes(path)


def _names(host: Host, suffix: str) -> dict[str, HostPath]:
    """The file that decides for each unit whose name ends in ``suffix``."""
    found: dict[str, HostPath] = {}
    for directory in UNIT_PATH:
        for name in host.listdir(directory) if host.is_dir(directory) else ():
            if name.endswith(suffix) and not host.is_dir(directory / name):
                found.setdefault(name, directory / name)
    return found


def _wanted(host: Host) -> set[str]:
    """Every unit that a ``.wants`` or ``.requires`` directory names: what is enabled, by hand or by a generator."""
    found: set[str] = set()
    for directory in UNIT_PATH:
        for name in host.listdir(directory) if host.is_dir(directory) else ():
            if name.endswith((".wants", ".requires", ".upholds")):
                found.update(host.listdir(directory / name) if host.is_dir(directory / name) else ())
    return found


def _settings(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, equals, value = line.strip().partition("=")
        if equals and not name.startswith(("#", ";")):
            yield name.strip(), value.strip()


def read_swap_units(host: Host) -> list[SwapUnit]:
    """Every swap unit that has a file and is not masked."""
    wanted = _wanted(host)
    units = []
    for name, path in sorted(_names(host, ".swap").items()):
        if is_masked(host, name) or not host.exists(path):
            continue
        settings = dict(_settings(host.read_text(path)))
        device = settings.get("What", "")
        source = settings.get("SourcePath", "")
        units.append(SwapUnit(name, path, device, source == "/etc/fstab", name in wanted))
    return units


def read_services(host: Host, names: Sequence[str] = SERVICES) -> list[str]:
    """The services among ``names`` that start at boot and are not masked."""
    wanted = _wanted(host)
    files = _names(host, ".service")
    return [name for name in names if name in wanted and name in files and not is_masked(host, name)]


def same_device(host: Host, one: str, other: str) -> bool:
    """Whether two names (``/dev/disk/by-uuid/…``, ``/dev/sda2``) lead to one device or file."""
    if one == other:
        return True
    if not (one.startswith("/") and other.startswith("/")):
        return False
    return os.path.realpath(host.real(one, follow=True)) == os.path.realpath(host.real(other, follow=True))
