"""firewalld: the bridge of the container network is in the zone that lets everything through.

The interface is bound, never a range of addresses: a range would also let in packets that only claim to come from
a container. The binding is made in the permanent and in the runtime configuration, so that neither a restart nor a
reload by the admin takes it away; Stratum itself never reloads, which under the iptables backend throws away the
rules of everybody else. What was added is on record, and only that is removed.

A firewall that cannot be changed is told to ``warn`` with the exact commands and fails no start: the node may well
be working.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Callable, Optional

from stratum import atomicfile
from stratum.errors import CommandError, StratumError
from stratum.receipt import STATE_DIRECTORY, Entry, content_digest
from stratum.steps import Action, Call, Work
from stratum.system import Host, HostPath, command_failure

__all__ = ["RECORD", "ZONE", "ZONES", "Binding", "firewall_stamp", "owned_interfaces", "plan_trust", "plan_untrust"]

ZONE = "trusted"
RECORD = STATE_DIRECTORY / "firewalld.json"
UNIT = "firewalld.service"
ZONES = HostPath("/etc/firewalld/zones")
_DEFAULTS = HostPath("/usr/lib/firewalld/zones")
_FORMAT = 1
_TIMEOUT = 180.0  # seconds; each call is a Python program that speaks D-Bus
# firewall-cmd(1), "Exit codes".
_NO_ZONE = 2
_NOT_RUNNING = 252

Warn = Callable[[str], object]


@dataclass(frozen=True)
class Binding:
    """An interface that Stratum put into a zone, and in which of the two configurations it did.

    ``made_file``: the zone had no file of its own in ``/etc/firewalld`` before.
    """

    interface: str
    zone: str
    permanent: bool = False
    runtime: bool = False
    made_file: bool = False


# -- the record -------------------------------------------------------------------------------------------


def owned_interfaces(host: Host) -> list[Binding]:
    """The bindings that Stratum added and uninstall will remove; for the dry run too.

    Raises :class:`StratumError` when the record cannot be read: the real run would fail on it.
    """
    try:
        value = json.loads(host.read_bytes(RECORD))
        if value["format"] != _FORMAT:
            raise ValueError(f"format {value['format']!r}")
        bindings = [Binding(**item) for item in value["bindings"]]
        if not all(isinstance(item.interface, str) and isinstance(item.zone, str) for item in bindings):
            raise ValueError("a binding without names")
        return bindings
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StratumError(
            "firewalld-record",
            f"{RECORD}: cannot be read: {error}",
            hint=f"look at it; if stratum's interfaces are in no zone (firewall-cmd --list-all-zones): rm {RECORD}",
        ) from None


def _write_record(work: Work, bindings: Sequence[Binding]) -> None:
    if not any(item.permanent or item.runtime for item in bindings):
        if work.host.lexists(RECORD):
            work.host.unlink(RECORD)
        work.receipt.forget(RECORD)
        return
    kept = [asdict(item) for item in bindings if item.permanent or item.runtime]
    content = json.dumps({"format": _FORMAT, "bindings": kept}, indent=1).encode() + b"\n"
    work.receipt.record(Entry(RECORD, "file", (content_digest(content),)))
    atomicfile.write_file(work.host, RECORD, content, 0o600)


def _note(work: Work, interface: str, *, permanent: bool, added: bool, made_file: bool = False) -> None:
    """Put one binding on record, or take it off; before it is made and after it is gone."""
    bindings = {item.interface: item for item in owned_interfaces(work.host)}
    known = bindings.get(interface, Binding(interface, ZONE))
    changed = replace(known, permanent=added) if permanent else replace(known, runtime=added)
    bindings[interface] = replace(changed, made_file=known.made_file or made_file)
    _write_record(work, list(bindings.values()))


# -- talking to firewalld -----------------------------------------------------------------------------------


def _argv(permanent: bool, running: bool, *words: str) -> list[str]:
    if not running:
        return ["firewall-offline-cmd", *words]
    return ["firewall-cmd", *(["--permanent"] if permanent else []), *words]


def _add_command(interface: str, permanent: bool, running: bool) -> list[str]:
    return _argv(permanent, running, f"--zone={ZONE}", f"--add-interface={interface}")


def _remove_command(binding: Binding, permanent: bool, running: bool) -> list[str]:
    return _argv(permanent, running, f"--zone={binding.zone}", f"--remove-interface={binding.interface}")


def _is_running(host: Host) -> bool:
    """Whether firewalld runs; raises CommandError when it cannot be asked."""
    done = host.run(["firewall-cmd", "--state"], timeout=_TIMEOUT, check=False)
    if done.status not in (0, _NOT_RUNNING):
        raise command_failure(done)
    return done.status == 0


def _zone_of(host: Host, interface: str, permanent: bool, running: bool) -> Optional[str]:
    """The zone that an interface is bound to, or None; raises CommandError."""
    argv = _argv(permanent, running, f"--get-zone-of-interface={interface}")
    done = host.run(argv, timeout=_TIMEOUT, check=False)
    if done.status == _NO_ZONE:
        return None
    if done.status != 0:
        raise command_failure(done)
    return done.text.strip()


def firewall_stamp(host: Host) -> str:
    """Something that changes when firewalld is started anew or its permanent zones are written.

    It reads two small files and starts nothing, so that a supervisor can look at it often and ask firewalld
    itself only when it has changed.
    """
    try:
        changed = str(host.stat(ZONES).st_mtime_ns)
    except OSError:
        changed = ""
    try:
        processes = host.read_text(f"/sys/fs/cgroup/system.slice/{UNIT}/cgroup.procs").split()
    except OSError:
        processes = []
    return " ".join([changed, *processes])


# -- trusting -----------------------------------------------------------------------------------------------


def plan_trust(work: Work, interfaces: Sequence[str], warn: Warn) -> list[Action]:
    """What puts ``interfaces`` into the trusted zone, permanently and now; nothing where firewalld is not used.

    An interface that somebody bound to another zone stays there, with a warning. One of ours that was lost is
    bound again, and says so. A firewalld that is stopped but starts at boot gets the permanent part.
    """
    host = work.host
    if not host.live or host.which("firewall-cmd") is None:
        return []
    try:
        running = _is_running(host)
        if not running and not _starts_at_boot(host):
            return []
        owned = {item.interface: item for item in owned_interfaces(host)}
        actions: list[Action] = []
        for interface in interfaces:
            actions += _plan_interface(work, interface, running, owned.get(interface), warn)
        return actions
    except StratumError as error:
        commands = "; ".join(_commands(interfaces))
        warn(f"firewalld: {error.message}; containers may be cut off from the network; run: {commands}")
        return []


def _commands(interfaces: Sequence[str]) -> list[str]:
    return [" ".join(_add_command(name, permanent, True)) for name in interfaces for permanent in (True, False)]


def _starts_at_boot(host: Host) -> bool:
    argv = ["systemctl", "is-enabled", "--quiet", UNIT]
    return host.run(argv, timeout=_TIMEOUT, check=False).status == 0


def _plan_interface(work: Work, interface: str, running: bool, owned: Optional[Binding], warn: Warn) -> list[Action]:
    missing = []
    for permanent in (True, False) if running else (True,):
        zone = _zone_of(work.host, interface, permanent, running)
        if zone is None:
            missing.append(permanent)
        elif zone != ZONE:
            where = "permanent" if permanent else "runtime"
            command = " ".join(_argv(permanent, running, f"--zone={ZONE}", f"--change-interface={interface}"))
            warn(
                f"firewalld: {interface} is in zone {zone} ({where}), which may cut containers off; to trust it "
                f"run: {command}"
            )
    if not missing:
        return []
    lost = owned is not None and any(owned.permanent if permanent else owned.runtime for permanent in missing)
    where = " and ".join("permanent" if permanent else "runtime" for permanent in missing)
    what = f"{interface} in firewalld's zone {ZONE} ({where})" + (", which was lost" if lost else "")
    return [Call("trust", what, lambda: _trust(work, interface, missing, running, warn))]


def _trust(work: Work, interface: str, configurations: Sequence[bool], running: bool, warn: Warn) -> None:
    for permanent in configurations:
        before = {item.interface: item for item in owned_interfaces(work.host)}.get(interface)
        files = (ZONES / f"{ZONE}.xml", ZONES / f"{ZONE}.xml.old")
        made_file = permanent and not any(work.host.lexists(path) for path in files)
        command = _add_command(interface, permanent, running)
        # A firewalld that is stopped will have at run time what is permanent now: then that is ours as well.
        parts = (permanent,) if running else (True, False)
        try:
            for part in parts:
                _note(work, interface, permanent=part, added=True, made_file=made_file)
            work.host.run(command, timeout=_TIMEOUT)
        except CommandError as error:
            for part in parts:
                if before is None or not (before.permanent if part else before.runtime):
                    _note(work, interface, permanent=part, added=False)
            warn(f"firewalld: {interface} is not trusted: {error.message}; run: {' '.join(command)}")


# -- taking it back -----------------------------------------------------------------------------------------


def plan_untrust(work: Work) -> list[Action]:
    """What removes the bindings on record, from the configurations they were added to and no others.

    While firewalld is stopped its runtime configuration is gone already and the permanent one is edited offline,
    so that the binding does not come back with it. Raises :class:`StratumError` when the record cannot be read;
    the action raises it with the exact commands for what it could not remove.
    """
    if not work.host.live:
        return []
    return [
        Call(
            "remove",
            f"{item.interface} from firewalld's zone {item.zone} "
            f"({' and '.join(name for name in ('permanent', 'runtime') if getattr(item, name))})",
            functools.partial(_untrust, work, item),
        )
        for item in owned_interfaces(work.host)
    ]


def _untrust(work: Work, binding: Binding) -> None:
    host = work.host
    if host.which("firewall-cmd") is None:
        _untrust_without_firewalld(work, binding)
        return
    failed: list[str] = []
    reasons: list[str] = []
    running = False
    for permanent in (True, False):
        if not (binding.permanent if permanent else binding.runtime):
            continue
        command = _remove_command(binding, permanent, True)
        try:
            running = _is_running(host)
            command = _remove_command(binding, permanent, running)
            if running or permanent:
                # Whoever moved it to another zone since has made it theirs.
                if _zone_of(host, binding.interface, permanent, running) == binding.zone:
                    host.run(command, timeout=_TIMEOUT)
                if permanent and binding.made_file:
                    _remove_zone_file(host, binding.zone, running)
            _note(work, binding.interface, permanent=permanent, added=False)
        except CommandError as error:
            failed.append(" ".join(command))
            reasons.append(error.message)
    if failed:
        raise StratumError(
            "firewalld-binding",
            f"{binding.interface} is still in firewalld's zone {binding.zone}: {'; '.join(dict.fromkeys(reasons))}",
            hint=f"run: {'; '.join(failed)}",
        )


def _untrust_without_firewalld(work: Work, binding: Binding) -> None:
    """firewalld was removed from the host; its configuration may have stayed, and would count if it came back."""
    path = ZONES / f"{binding.zone}.xml"
    try:
        text = work.host.read_text(path)
    except (FileNotFoundError, NotADirectoryError):
        text = ""
    if f'"{binding.interface}"' in text:
        raise StratumError(
            "firewalld-binding",
            f"{path} still names {binding.interface}, and firewalld is not installed any more",
            hint=f"""run: sed -i '/<interface name="{binding.interface}"/d' {path}""",
        )
    for permanent in (True, False):
        _note(work, binding.interface, permanent=permanent, added=False)


def _remove_zone_file(host: Host, zone: str, running: bool) -> None:
    """Take away the zone's file when it says no more than firewalld's own; raises CommandError.

    firewalld wrote it for our binding, with a copy of the last state beside it.
    """
    path, default = ZONES / f"{zone}.xml", _DEFAULTS / f"{zone}.xml"
    try:
        if host.read_bytes(path) != host.read_bytes(default):
            return
    except OSError:
        return
    if running:
        # Removing the file would leave the zone in its memory as it is.
        host.run(["firewall-cmd", "--permanent", f"--load-zone-defaults={zone}"], timeout=_TIMEOUT)
    # firewall-offline-cmd has the same option and writes the file of the default zone on its way.
    for leftover in (path, path.with_name(f"{path.name}.old")):
        if host.lexists(leftover):
            host.unlink(leftover)
    host.fsync_dir(ZONES)
