"""Swap off, now and for good (seed 004, Prereqs), and back on by uninstall.

Four things can switch swap on: a line of fstab, a swap unit, a service, and whatever it was in a boot that we
did not see (an initramfs that resumes). The first three are switched off at their source; the fourth is found by
:func:`check_swap`, which looks at what is on and believes no earlier success.

What was done is in a record: the lines that became comments, and the devices and units that were on. Undo makes
the lines live again, takes masks away and switches on what was on before us, nothing else.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Callable

from stratum import atomicfile
from stratum.errors import CommandError, StratumError
from stratum.host import fstab
from stratum.host.finding import WARN, Finding
from stratum.host.swapsources import explain
from stratum.host.swapunits import ADMIN, SwapUnit, read_services, read_swap_units, same_device
from stratum.receipt import STATE_DIRECTORY, Entry, content_digest
from stratum.steps import RELOAD_SYSTEMD, Action, Call, Command, RemoveDirectory, RemoveFile, Work, plan_file, plan_link
from stratum.system import Host, HostPath

__all__ = [
    "DROP_IN",
    "RECORD",
    "ActiveSwap",
    "SwapRecord",
    "check_swap",
    "plan_swap_off",
    "plan_undo",
    "read_record",
    "read_swaps",
]

RECORD = STATE_DIRECTORY / "swap.json"
DROP_IN = "90-stratum-off.conf"
# A condition that never holds: the unit counts as started and does nothing, systemd.unit(5).
_NEVER = b"# Written by Stratum: a node runs without swap.\n[Unit]\nConditionPathExists=!/\n"
_SYSTEMCTL_TIMEOUT = 90.0
_SWAPOFF_TIMEOUT = 600.0  # everything that was swapped out is read back first

Warn = Callable[[str], object]


@dataclass(frozen=True)
class ActiveSwap:
    """One line of /proc/swaps."""

    device: str
    priority: int


@dataclass(frozen=True)
class SwapRecord:
    """What was switched off: fstab lines (bytes as surrogate escapes), devices with priorities, units."""

    lines: tuple[str, ...] = ()
    devices: tuple[ActiveSwap, ...] = ()
    units: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The form on the disk."""
        devices = [{"device": item.device, "priority": item.priority} for item in self.devices]
        return {"format": 1, "lines": list(self.lines), "devices": devices, "units": list(self.units)}


def read_swaps(host: Host) -> list[ActiveSwap]:
    """What is on now; empty without procfs. Format: proc(5), with octal escapes in the names."""
    try:
        lines = host.read_text("/proc/swaps").splitlines()[1:]
    except OSError:
        return []
    swaps = []
    for line in lines:
        fields = line.split()
        if len(fields) >= 5:
            device = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[0])
            swaps.append(ActiveSwap(device, int(fields[4])))
    return swaps


def read_record(host: Host) -> SwapRecord:
    """The record; an absent one is empty. Raises :class:`StratumError` when it cannot be read."""
    try:
        value = json.loads(host.read_bytes(RECORD))
    except FileNotFoundError:
        return SwapRecord()
    except ValueError as error:
        raise _unreadable(error) from None
    try:
        devices = tuple(ActiveSwap(str(item["device"]), int(item["priority"])) for item in value["devices"])
        return SwapRecord(tuple(map(str, value["lines"])), devices, tuple(map(str, value["units"])))
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(error) from None


def _unreadable(error: Exception) -> StratumError:
    return StratumError(
        "swap-record-unreadable",
        f"{RECORD}: not a record that this version reads: {error}",
        hint=f"look for '{fstab.MARK.decode().strip()}' in /etc/fstab, then remove the record",
    )


def _write_record(work: Work, record: SwapRecord) -> None:
    data = json.dumps(record.to_json(), indent=1).encode() + b"\n"
    work.receipt.record(Entry(RECORD, "file", (content_digest(data),)))
    atomicfile.write_file(work.host, RECORD, data, 0o600)


# -- off --------------------------------------------------------------------------------------------------


def plan_swap_off(work: Work) -> list[Action]:
    """What switches swap off, now and at each boot; nothing when it is. In a tree: fstab and units.

    The actions raise :class:`StratumError`: kubelet does not start while swap is on.
    """
    host = work.host
    actions: list[Action] = []
    lines = fstab.swap_lines(fstab.read_fstab(host))
    if lines:
        words = "; ".join(line.decode("utf-8", "backslashreplace").strip() for line in lines)
        actions.append(Call("make a comment", f"in {fstab.FSTAB}: {words}", lambda: _disable_lines(host)))
    for unit in _units_in_the_way(host):
        actions += _plan_unit(work, unit)
    services = _services(host)
    for service in services:
        actions += _plan_mask(work, service)
    if host.live:
        if actions and _has_systemd(host):
            # systemd forgets the units of the lines, and learns of the masks.
            actions.append(RELOAD_SYSTEMD)
        actions += [Command(("systemctl", "stop", name), _SYSTEMCTL_TIMEOUT) for name in services]
        actions += [
            Call("switch off swap", swap.device, functools.partial(_switch_off, host, swap.device))
            for swap in read_swaps(host)
        ]
    if actions:
        # Known before the first change, whatever cuts the run off.
        actions.insert(0, Call("record", str(RECORD), lambda: _record_state(work, lines)))
    return actions


def _units_in_the_way(host: Host) -> list[SwapUnit]:
    """The swap units that start at boot or are on now; those of fstab lines go with the lines."""
    active = read_swaps(host)
    return [
        unit
        for unit in read_swap_units(host)
        if not unit.from_fstab
        and (unit.wanted or any(same_device(host, unit.device, swap.device) for swap in active))
        and not _is_off(host, unit)
    ]


def _services(host: Host) -> list[str]:
    # A host that runs without systemd may have the unit files of its packages; nothing starts them.
    return read_services(host) if _has_systemd(host) or not host.live else []


def _drop_in(name: str) -> HostPath:
    return ADMIN / f"{name}.d" / DROP_IN


def _is_off(host: Host, unit: SwapUnit) -> bool:
    path = _drop_in(unit.name)
    return host.exists(path) and host.read_bytes(path) == _NEVER


def _plan_unit(work: Work, unit: SwapUnit) -> list[Action]:
    if unit.can_be_masked:
        return _plan_mask(work, unit.name)
    # The admin's own unit file is where the mask would go; a drop-in leaves it as it is.
    return plan_file(work, _drop_in(unit.name), _NEVER)


def _plan_mask(work: Work, name: str) -> list[Action]:
    if work.host.lexists(ADMIN / name):
        return plan_file(work, _drop_in(name), _NEVER)
    return plan_link(work, ADMIN / name, "/dev/null")


def _record_state(work: Work, lines: Sequence[bytes]) -> None:
    """Add what is on now to the record. What an earlier run recorded stays: it may be off because of us."""
    host, known = work.host, read_record(work.host)
    texts = [line.decode("utf-8", "surrogateescape") for line in lines]
    devices, units = list(known.devices), list(known.units)
    if host.live:
        active = read_swaps(host)
        names = {item.device for item in known.devices}
        devices += [item for item in active if item.device not in names]
        units += [unit.name for unit in _units_in_the_way(host) if _is_on(host, unit, active)]
        units += [name for name in _services(host) if _is_active(host, name)]
    # A line that is known was live before and has come back since: it is still one line.
    new = [text for text in texts if text not in known.lines]
    _write_record(work, SwapRecord((*known.lines, *new), tuple(devices), tuple(dict.fromkeys(units))))


def _is_on(host: Host, unit: SwapUnit, active: Sequence[ActiveSwap]) -> bool:
    return any(same_device(host, unit.device, swap.device) for swap in active)


def _is_active(host: Host, unit: str) -> bool:
    return host.run(["systemctl", "is-active", "--quiet", unit], timeout=_SYSTEMCTL_TIMEOUT, check=False).status == 0


def _disable_lines(host: Host) -> None:
    fstab.write_fstab(host, fstab.disable_swap_lines(fstab.read_fstab(host)))


def _switch_off(host: Host, device: str) -> None:
    if not _still_on(host, device):
        return  # its unit or its service has done it
    try:
        host.run(["swapoff", device], timeout=_SWAPOFF_TIMEOUT)
    except CommandError as error:
        if _still_on(host, device):
            raise StratumError(
                "swap-not-off",
                f"{device}: swap cannot be switched off: {error.stderr.strip() or error.message}",
                hint=f"free memory or reboot, then run: swapoff {device}",
            ) from None


def _still_on(host: Host, device: str) -> bool:
    return any(swap.device == device for swap in read_swaps(host))


def _has_systemd(host: Host) -> bool:
    return host.is_dir("/run/systemd/system")


# -- back -------------------------------------------------------------------------------------------------


def plan_undo(work: Work, warn: Warn) -> list[Action]:
    """What takes back every change of :func:`plan_swap_off`, and switches on what was on before it.

    A swap that does not come on is told to ``warn``. Raises :class:`StratumError` for a record that cannot be read.
    """
    host, record = work.host, read_record(work.host)
    if not host.lexists(RECORD):
        return []
    actions: list[Action] = []
    lines = [text.encode("utf-8", "surrogateescape") for text in record.lines]
    before = fstab.read_fstab(host)
    if fstab.enable_swap_lines(before, lines) != before:
        actions.append(Call("put back", f"the lines of swap in {fstab.FSTAB}", lambda: _enable_lines(host, lines)))
    actions += _plan_unmask(work)
    if host.live:
        if actions and _has_systemd(host):
            actions.append(RELOAD_SYSTEMD)
        actions += [Call("start", unit, functools.partial(_start_unit, host, unit, warn)) for unit in record.units]
        actions += [
            Call("switch on swap", item.device, functools.partial(_switch_on, host, item, warn))
            for item in record.devices
            if not _still_on(host, item.device)
        ]
    return [*actions, RemoveFile(RECORD)]


def _plan_unmask(work: Work) -> list[Action]:
    """Our masks and drop-ins, as far as they are still what we made."""
    actions: list[Action] = []
    for entry in work.receipt:
        ours = entry.kind == "link" and entry.contents == ("/dev/null",) and entry.path.parent == ADMIN
        if (ours or entry.path.name == DROP_IN) and work.receipt.owns(entry.path):
            actions.append(RemoveFile(entry.path))
            if work.receipt.get(entry.path.parent) and entry.path.name == DROP_IN:
                actions.append(RemoveDirectory(entry.path.parent))
    return actions


def _enable_lines(host: Host, lines: Sequence[bytes]) -> None:
    fstab.write_fstab(host, fstab.enable_swap_lines(fstab.read_fstab(host), lines))


def _start_unit(host: Host, unit: str, warn: Warn) -> None:
    try:
        host.run(["systemctl", "start", unit], timeout=_SYSTEMCTL_TIMEOUT)
    except CommandError as error:
        warn(f"{unit} was running before Stratum and does not start: {error.message}")


def _switch_on(host: Host, swap: ActiveSwap, warn: Warn) -> None:
    if _still_on(host, swap.device):
        return  # its unit has done it
    # The kernel counts down from -2 by itself; only a priority that somebody chose is given again.
    chosen = ["-p", str(swap.priority)] if swap.priority >= 0 else []
    try:
        host.run(["swapon", *chosen, swap.device], timeout=_SYSTEMCTL_TIMEOUT)
    except CommandError as error:
        warn(f"swap {swap.device} was on before Stratum and does not come on: {error.message}")


# -- checking ---------------------------------------------------------------------------------------------


def check_swap(host: Host) -> list[Finding]:
    """Nothing is swapped to now: what is on is named, with what seems to have switched it on."""
    return [
        Finding(
            "swap",
            WARN,
            f"swap is on: {swap.device} ({explain(host, swap.device)})",
            f"run: swapoff {swap.device}; a node runs without swap",
        )
        for swap in read_swaps(host)
    ]
