"""The reboot-persistence unit ``stratum.service`` (seed 004, InstallUnit and its neighbours).

It runs ``stratum up --supervise``: the steady-state command line, never a one-shot flag. Disabling it governs
the next boot only; an active unit keeps ``Restart=always`` until :func:`suppress_restart` overrides that at
run time. Where systemd is not PID 1, and in a directory tree, nothing here asks systemd anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from stratum import atomicfile, systemd
from stratum.errors import StratumError
from stratum.host import unitfile
from stratum.steps import Action, Work, plan_file, plan_link
from stratum.system import Host, HostPath, command_failure

__all__ = [
    "STEADY_FLAGS",
    "UNIT",
    "UNIT_PATH",
    "active",
    "allow_restart",
    "check_steady",
    "disable",
    "enable",
    "forget",
    "installed",
    "main_pid",
    "masked",
    "plan_enablement",
    "plan_unit",
    "reload",
    "render_unit",
    "restart",
    "start",
    "start_later",
    "stop",
    "suppress_restart",
    "systemd_available",
    "unit_argv",
    "unit_enabled",
    "unit_exec_path",
]

UNIT = "stratum.service"
UNIT_PATH = HostPath("/etc/systemd/system") / UNIT
ENABLEMENT = HostPath("/etc/systemd/system/multi-user.target.wants") / UNIT
# Under /run: a reboot clears it without anybody's help. Drop-ins of all directories count in the order of their
# names, so the name sorts behind those that people give.
OVERRIDE = HostPath("/run/systemd/system") / f"{UNIT}.d" / "zzz-stratum-no-restart.conf"
# What may stand behind `up` in the unit. Each start repeats it, so nothing that holds for one run only, such as
# --bundle or a join token, may be among it.
STEADY_FLAGS = ("--supervise",)

_TIMEOUT = 60.0
# systemctl(1), is-enabled. What is not among these is no answer.
_ENABLEMENT_STATES = (
    "enabled", "enabled-runtime", "linked", "linked-runtime", "alias", "masked", "masked-runtime", "static",
    "indirect", "disabled", "generated", "transient", "bad", "not-found",
)  # fmt: skip


def systemd_available(host: Host) -> bool:
    """Whether systemd is PID 1 of this running machine: sd_booted(3) looks for its runtime directory."""
    return host.live and host.is_dir("/run/systemd/system")


def check_steady(argv: Sequence[str]) -> None:
    """Raise :class:`StratumError` when ``argv`` has a flag that must not be repeated at each start.

    What counts is a list of the few that may: a new flag of ``up`` stays out until somebody decides otherwise.
    """
    behind = list(argv)[list(argv).index("up") + 1 :] if "up" in argv else []
    # Their values may be secrets, so they are not repeated here.
    wrong = [
        word.partition("=")[0] if word.startswith("-") else "an argument" for word in behind if word not in STEADY_FLAGS
    ]
    if wrong:
        raise StratumError(
            "one-shot-flag",
            f"{UNIT}: {', '.join(wrong)} must not be in the unit's command: each start would repeat it",
        )


def render_unit(argv: Sequence[str]) -> bytes:
    """The unit that runs ``argv`` at boot and after a crash.

    ``KillMode=process``: systemd signals only the supervisor; the node's units are units of their own. Raises
    :class:`StratumError` for a program that systemd would refuse.
    """
    return f"""# Written by Stratum; put changes into a drop-in of your own (systemctl edit).
[Unit]
Description=Stratum node
After=network.target local-fs.target dbus.service firewalld.service NetworkManager.service
RequiresMountsFor=/opt/stratum /var/lib/stratum
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={systemd.render_command(argv)}
Restart=always
RestartSec=10
KillMode=process
# SIGTERM is how systemd ends it; the exit status that says so is no failure.
SuccessExitStatus=143
TimeoutStartSec=15min
# The supervisor says that it lives every 15 seconds and asks for more before it does something that takes long.
WatchdogSec=3min
OOMScoreAdjust=-500

[Install]
WantedBy=multi-user.target
""".encode()


def masked(host: Host) -> bool:
    """Whether an admin masked the unit: it is never started then, and the mask stays as it is."""
    return unitfile.is_masked(host, UNIT_PATH)


def installed(host: Host) -> bool:
    """Whether the unit file is there, be it a mask."""
    return host.lexists(UNIT_PATH)


def _governs(host: Host) -> bool:
    """Whether there is a unit here and a systemd to talk to about it."""
    return systemd_available(host) and installed(host)


def plan_unit(work: Work, argv: Sequence[str]) -> list[Action]:
    """What writes the unit: nothing where systemd is not, nothing through a mask.

    Raises :class:`StratumError` when ``argv`` has a one-shot flag, or a file of somebody else is in the way.
    """
    check_steady(argv)
    if _is_no_place(work.host):
        return []
    return plan_file(work, UNIT_PATH, render_unit(argv))


def plan_enablement(work: Work) -> list[Action]:
    """What makes the unit start at boot: the link that ``systemctl enable`` makes, in a tree as well."""
    if _is_no_place(work.host):
        return []
    return plan_link(work, ENABLEMENT, str(UNIT_PATH))


def _is_no_place(host: Host) -> bool:
    return masked(host) or (host.live and not systemd_available(host))


def unit_argv(host: Host) -> tuple[str, ...]:
    """The command line that each start of the unit runs.

    Raises :class:`~stratum.host.unitfile.UnitMissingError` without a unit or with a masked one, and
    :class:`~stratum.host.unitfile.UnitFileError` when the file does not tell or a drop-in sets another command.
    """
    return unitfile.read_command(host, UNIT_PATH).argv


def unit_exec_path(host: Host) -> str:
    """The program that each start of the unit runs. Raises like :func:`unit_argv`."""
    return unitfile.read_command(host, UNIT_PATH).executable


def unit_enabled(host: Host) -> bool:
    """Whether the unit starts at the next boot. False for a missing unit; raises CommandError without an answer.

    ``enabled-runtime`` is no: what is under /run is gone at the next boot.
    """
    if not _governs(host):
        return False
    done = host.run(["systemctl", "is-enabled", UNIT], timeout=_TIMEOUT, check=False)
    answer = done.text.strip()
    if answer in _ENABLEMENT_STATES:
        return answer == "enabled"
    # Before systemd 253 a unit that it does not know is an error on stderr. "Failed to connect to bus: No such file"
    # ends alike, and is no answer.
    if re.search(rb"unit file state .*: No such file or directory", done.stderr):
        return False
    raise command_failure(done)


def main_pid(host: Host) -> int:
    """The process that systemd runs as the unit; 0 when it runs none. Raises CommandError."""
    if not systemd_available(host):
        return 0
    return systemd.read_units(host, [UNIT])[UNIT].main_pid


def active(host: Host) -> bool:
    """Whether the unit runs, or is about to. Raises CommandError."""
    if not systemd_available(host):
        return False
    return systemd.read_units(host, [UNIT])[UNIT].active in ("active", "activating")


def disable(host: Host) -> None:
    """The unit does not start at the next boot. A missing unit is no error; raises CommandError.

    An active one goes on, and systemd starts it again when it ends: see :func:`suppress_restart`.
    """
    if _governs(host):
        host.run(["systemctl", "disable", UNIT], timeout=_TIMEOUT)


def enable(host: Host) -> None:
    """The unit starts at the next boot; nothing is started now. A missing unit is no error; raises CommandError.

    A masked one stays as it is: nobody but the admin takes a mask away.
    """
    if _governs(host) and not masked(host):
        host.run(["systemctl", "enable", UNIT], timeout=_TIMEOUT)


def reload(host: Host) -> None:
    """systemd reads its unit files again; raises CommandError."""
    if systemd_available(host):
        host.run(["systemctl", "daemon-reload"], timeout=_TIMEOUT)


def suppress_restart(host: Host) -> None:
    """The active unit is not started again when it ends, until :func:`allow_restart` or a reboot.

    Without it an unrelated end of the supervisor during a teardown would start the node again in its middle.
    A missing unit is no error: there is nothing to keep from starting, and a drop-in would be an orphan. Raises
    OSError, CommandError.
    """
    if not _governs(host):
        return
    host.makedirs(OVERRIDE.parent)
    try:
        atomicfile.write_file(host, OVERRIDE, b"[Service]\nRestart=no\n")
    except BaseException:
        _remove_override_directory(host)
        raise
    reload(host)


def allow_restart(host: Host) -> None:
    """Take the override back. Raises OSError, CommandError.

    The reload is done even if the file is gone: an earlier call may have removed it and failed there, and systemd
    would keep to what it has read.
    """
    try:
        host.unlink(OVERRIDE)
    except (FileNotFoundError, NotADirectoryError):
        pass
    _remove_override_directory(host)
    reload(host)


def _remove_override_directory(host: Host) -> None:
    try:
        host.rmdir(OVERRIDE.parent)
    except OSError:
        pass  # somebody else's runtime drop-in is in it, or it never was


def stop(host: Host) -> None:
    """Stop the unit and wait for its end. A missing unit is no error; raises CommandError."""
    if _governs(host):
        systemd.stop_unit(host, UNIT)


def start(host: Host) -> None:
    """Start the unit and wait until it reports the node ready; raises :class:`StratumError`."""
    if not installed(host):
        raise unitfile.UnitMissingError(UNIT_PATH, "there is no such unit")
    systemd.start_unit(host, UNIT)


def start_later(host: Host) -> None:
    """Ask systemd to start the unit without waiting for it; raises CommandError."""
    if _governs(host):
        host.run(["systemctl", "start", "--no-block", UNIT], timeout=_TIMEOUT)


def forget(host: Host, units: Sequence[str]) -> None:
    """Let systemd drop the units that were deleted, with their failures and our override. Raises CommandError."""
    if not systemd_available(host):
        return
    allow_restart(host)
    # A unit that failed stays in systemd's list without its file until that is reset.
    host.run(["systemctl", "reset-failed", UNIT, *units], timeout=_TIMEOUT, check=False)


def restart(host: Host) -> None:
    """Restart the unit without waiting; its supervisor waits for the lock of the run that asks. Raises CommandError."""
    if _governs(host):
        host.run(["systemctl", "restart", "--no-block", UNIT], timeout=_TIMEOUT)
