"""Kernel settings (seed 004, Prereqs): drop-ins for every boot, the live values now, both checked later.

A drop-in alone is not enough: it may be applied before the module that makes its key, or be overridden by a
file that sorts behind it. A live value alone is gone at the next boot. So both are set, and
:func:`check_sysctls` compares the live values at each boot and names the file that says otherwise.

Uninstall takes the drop-ins away by the receipt, and puts back the live values that were changed in this boot.
Values that a drop-in of ours set at boot stay until the next one: what they would have been is not known.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Callable, Optional

from stratum import atomicfile
from stratum.errors import StratumError
from stratum.host.finding import REJECT, WARN, Finding
from stratum.host.profiles import BASE, BASE_PATH, PROFILES, Profile, Sysctl
from stratum.host.sysctlfiles import control_path, find_winner, read_assignments, same_value
from stratum.steps import Action, Call, RemoveFile, Work, plan_file
from stratum.system import Host, HostPath

__all__ = ["check_sysctls", "drop_ins", "find_differing", "plan_sysctls", "plan_undo"]

# Under /run and with the boot's id: a value of an earlier boot is nothing that could be put back.
REMEMBERED = HostPath("/run/stratum/sysctls.json")
BOOT_ID = HostPath("/proc/sys/kernel/random/boot_id")

Warn = Callable[[str], object]


def drop_ins() -> list[HostPath]:
    """Every file that :func:`plan_sysctls` may write, for the footprint (seed 004, ProfileSysctlFiles)."""
    return [BASE_PATH, *(profile.path for profile in PROFILES.values() if profile.sysctls)]


def render_drop_in(settings: Iterable[Sysctl]) -> bytes:
    """The text of a drop-in, sysctl.d(5)."""
    lines = ["# Written by Stratum; a setting of your own goes into a file that sorts behind this one."]
    for setting in settings:
        lines += [f"# {setting.why}", f"{setting.key} = {setting.value}"]
    return ("\n".join(lines) + "\n").encode()


def read_live(host: Host, key: str) -> Optional[str]:
    """The value that the kernel shows for ``key``; None when there is no such control or it cannot be read."""
    try:
        return host.read_text(control_path(key)).strip()
    except OSError:
        return None


def find_differing(host: Host, settings: Iterable[Sysctl]) -> list[tuple[Sysctl, Optional[str]]]:
    """Those of ``settings`` that the kernel has another value for, and that value (None: no such control)."""
    values = [(setting, read_live(host, setting.key)) for setting in settings]
    return [(setting, live) for setting, live in values if not same_value(live or "", setting.value)]


def plan_sysctls(work: Work, profile: Profile, warn: Warn, base: Sequence[Sysctl] = BASE) -> list[Action]:
    """What writes the drop-ins and sets the live values that differ; in a tree, the drop-ins.

    A live value of ``base`` that cannot be set is told to ``warn``. One of ``profile`` raises
    :class:`StratumError` when it is performed: kubelet would refuse to start in words that are hard to read.
    """
    actions: list[Action] = []
    if base:
        actions += plan_file(work, BASE_PATH, render_drop_in(base))
    elif work.receipt.owns(BASE_PATH):
        actions.append(RemoveFile(BASE_PATH))
    for other in PROFILES.values():
        if other == profile and profile.sysctls:
            actions += plan_file(work, profile.path, render_drop_in(profile.sysctls))
        elif other != profile and work.receipt.owns(other.path):
            actions.append(RemoveFile(other.path))
    actions = list(dict.fromkeys(actions))  # both files need the directory
    if not work.host.live:
        return actions
    actions += _plan_live(work.host, base, functools.partial(_warn_of, warn))
    return actions + _plan_live(work.host, profile.sysctls, functools.partial(_refuse, profile))


def _plan_live(host: Host, settings: Iterable[Sysctl], failed: Callable[[Sysctl, str], None]) -> list[Action]:
    return [
        Call("set", f"{setting.key} = {setting.value}", functools.partial(_apply, host, setting, failed))
        for setting, _ in find_differing(host, settings)
    ]


def _warn_of(warn: Warn, setting: Sysctl, why: str) -> None:
    warn(f"{setting.key} cannot be set to {setting.value}: {why} ({setting.why})")


def _refuse(profile: Profile, setting: Sysctl, why: str) -> None:
    raise StratumError(
        "sysctl-not-applied",
        f"{setting.key}: cannot be set to {setting.value}, which profile {profile.name} depends on: {why}",
        hint=f"set it by hand: sysctl -w {setting.key}={setting.value}; or choose another profile",
    )


def _apply(host: Host, setting: Sysctl, failed: Callable[[Sysctl, str], None]) -> None:
    before = read_live(host, setting.key)
    if before is None:
        failed(setting, f"{control_path(setting.key)} is not there")
        return
    if same_value(before, setting.value):
        return
    _remember(host, setting, before)
    try:
        host.write_control(control_path(setting.key), f"{setting.value}\n".encode())
    except OSError as error:
        failed(setting, error.strerror or str(error))


# -- putting back -----------------------------------------------------------------------------------------


def _boot(host: Host) -> str:
    try:
        return host.read_text(BOOT_ID).strip()
    except OSError:
        return ""


def _remembered(host: Host) -> dict[str, dict[str, str]]:
    """For each key changed in this boot: ``before`` and ``set``."""
    try:
        value = json.loads(host.read_bytes(REMEMBERED))
        if value["boot"] == _boot(host):
            return {
                str(key): {"before": str(item["before"]), "set": str(item["set"])}
                for key, item in value["values"].items()
            }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # nothing was changed in this boot, or a file that is not ours to guess about
    return {}


def _remember(host: Host, setting: Sysctl, before: str) -> None:
    """Before the change, so that one that is cut off can be put back too."""
    values = _remembered(host)
    known = values.get(setting.key)
    # Set again after somebody had changed it: what they set is what was before us now.
    if known is None or not same_value(before, known["set"]):
        values[setting.key] = {"before": before, "set": setting.value}
    else:
        values[setting.key] = {"before": known["before"], "set": setting.value}
    host.makedirs(REMEMBERED.parent)
    text = json.dumps({"boot": _boot(host), "values": values}, indent=1, sort_keys=True)
    atomicfile.write_file(host, REMEMBERED, text.encode() + b"\n", 0o600)


def plan_undo(host: Host, warn: Warn) -> list[Action]:
    """What puts back the live values that were changed in this boot and that nobody has changed since."""
    if not host.live:
        return []
    return [
        Call("set", f"{key} = {item['before']}, as it was", functools.partial(_restore, host, key, item, warn))
        for key, item in _remembered(host).items()
        if same_value(read_live(host, key) or "", item["set"])
    ]


def _restore(host: Host, key: str, item: dict[str, str], warn: Warn) -> None:
    if not same_value(read_live(host, key) or "", item["set"]):
        return
    try:
        host.write_control(control_path(key), f"{item['before']}\n".encode())
    except OSError as error:
        warn(f"{key} stays {item['set']}: {error.strerror}")


# -- checking ---------------------------------------------------------------------------------------------


def check_sysctls(host: Host, profile: Profile, base: Sequence[Sysctl] = BASE) -> list[Finding]:
    """The live values are ours, and no file says otherwise for the next boot or the next re-apply.

    What the profile depends on rejects; a live value of the base, or a file that will change one, warns.
    """
    assignments = read_assignments(host)
    findings = []
    for setting in (*base, *profile.sysctls):
        severity = REJECT if setting in profile.sysctls else WARN
        decides = find_winner(assignments, setting.key)
        foreign = decides if decides and not same_value(decides.value or "", setting.value) else None
        live = read_live(host, setting.key)
        if host.live and live is None:
            where = control_path(setting.key)
            message = f"{setting.key}: {where} is not there, so it cannot be {setting.value}"
            findings.append(Finding("sysctl", severity, message, "load the module that makes it, then run: stratum up"))
        elif host.live and not same_value(live or "", setting.value):
            because = f"; {foreign.path} line {foreign.line} sets it" if foreign else ""
            message = f"{setting.key} is {live} and must be {setting.value}{because}"
            findings.append(Finding("sysctl", severity, message, _hint(setting, foreign.path if foreign else None)))
        if foreign:
            message = (
                f"{foreign.path} line {foreign.line} sets {setting.key} to {foreign.value}, after every other file; "
                f"a node needs {setting.value}"
            )
            findings.append(Finding("sysctl-overridden", WARN, message, _hint(setting, foreign.path)))
    return findings


def _hint(setting: Sysctl, path: Optional[HostPath]) -> str:
    if path is None:
        return f"find out who changed it, then run: sysctl -w {setting.key}={setting.value}"
    return f"take the line out of {path}, then run: sysctl --system"
