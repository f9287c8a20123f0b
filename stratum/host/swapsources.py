"""Who switched on a swap that is on: for the message of the boot check."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stratum.host.fstab import FSTAB, read_fstab, swap_lines
from stratum.host.swapunits import SERVICES, read_services, read_swap_units, same_device
from stratum.system import Host, HostPath

__all__ = ["explain"]

# Debian's initramfs-tools keeps the device to resume from here; dracut and others take it from the command line.
_RESUME = HostPath("/etc/initramfs-tools/conf.d")
_CMDLINE = HostPath("/proc/cmdline")


def explain(host: Host, device: str) -> str:
    """What names ``device`` as swap, in a few words: a line of fstab, a unit, a service, the initramfs."""
    for line in swap_lines(read_fstab(host)):
        source = re.split(rb"[ \t]+", line.strip(b" \t"))[0].decode("utf-8", "surrogateescape")
        if same_device(host, _by_tag(source), device):
            return f"{FSTAB} has a line for it"
    for unit in read_swap_units(host):
        if same_device(host, unit.device, device):
            return f"unit {unit.name} in {unit.path.parent}"
    for place, source in _resume_settings(host):
        if same_device(host, _by_tag(source), device):
            return f"{place} names it as the device to resume from, so the initramfs looks at it"
    services = read_services(host, SERVICES)
    return f"perhaps by {', '.join(services)}" if services else "nothing was found that asks for it"


def _by_tag(source: str) -> str:
    """The link that udev makes for ``UUID=…`` and its like."""
    tag, equals, value = source.partition("=")
    place = {"UUID": "uuid", "LABEL": "label", "PARTUUID": "partuuid", "PARTLABEL": "partlabel"}.get(tag)
    return f"/dev/disk/by-{place}/{value.strip(chr(34))}" if equals and place else source


def _resume_settings(host: Host) -> Iterator[tuple[HostPath, str]]:
    """Each place that sets a device to resume from, with the device."""
    for name in host.listdir(_RESUME) if host.is_dir(_RESUME) else ():
        for line in host.read_text(_RESUME / name).splitlines():
            key, equals, value = line.strip().partition("=")
            if equals and key == "RESUME":
                yield _RESUME / name, value.strip().strip("'\"")
    try:
        words = host.read_text(_CMDLINE).split()
    except OSError:
        return
    for word in words:
        if word.startswith("resume="):
            yield _CMDLINE, word.partition("=")[2]
