"""The reboot-persistence unit ``stratum.service`` (seed 004, InstallUnit and its neighbours).

It runs ``stratum up --supervise``: the steady-state command line, never a one-shot flag. Disabling it governs
the next boot only; an active unit keeps ``Restart=always`` until :func:`suppress_restart` overrides that at
run time.
"""

from __future__ import annotations

from collections.abc import Sequence

from stratum import atomicfile, systemd
from stratum.errors import StratumError
from stratum.steps import Action, Work, plan_file, plan_link
from stratum.system import Host, HostPath

__all__ = ["UNIT", "UNIT_PATH", "allow_restart", "disable", "enable", "plan_unit", "render_unit", "suppress_restart"]

UNIT = "stratum.service"
UNIT_PATH = HostPath("/etc/systemd/system") / UNIT
ENABLEMENT = HostPath("/etc/systemd/system/multi-user.target.wants") / UNIT
# Under /run: a reboot clears it without anybody's help.
OVERRIDE = HostPath("/run/systemd/system") / f"{UNIT}.d" / "90-no-restart.conf"

_TIMEOUT = 60.0


def render_unit(argv: Sequence[str]) -> bytes:
    """The unit that runs ``argv`` at boot and after a crash.

    ``KillMode=process``: systemd signals only the supervisor; the node's units are units of their own.
    """
    return f"""# Written by Stratum; put changes into a drop-in of your own (systemctl edit).
[Unit]
Description=Stratum node
After=network.target local-fs.target dbus.service
RequiresMountsFor=/opt/stratum /var/lib/stratum /usr/local/bin
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
ExecStart={" ".join(systemd.quote_argument(word) for word in argv)}
Restart=always
RestartSec=10
KillMode=process
# SIGTERM is how systemd ends it; the exit status that says so is no failure.
SuccessExitStatus=143
TimeoutStartSec=15min
OOMScoreAdjust=-500

[Install]
WantedBy=multi-user.target
""".encode()


def plan_unit(work: Work, argv: Sequence[str]) -> list[Action]:
    """What writes the unit."""
    return plan_file(work, UNIT_PATH, render_unit(argv))


def plan_enablement(work: Work) -> list[Action]:
    """What makes the unit start at boot: the link that ``systemctl enable`` makes, in a tree as well."""
    return plan_link(work, ENABLEMENT, str(UNIT_PATH))


def installed(host: Host) -> bool:
    """Whether the unit file is there."""
    return host.lexists(UNIT_PATH)


def disable(host: Host) -> None:
    """The unit does not start at the next boot. A missing unit is no error; raises CommandError."""
    if installed(host):
        host.run(["systemctl", "disable", UNIT], timeout=_TIMEOUT)


def enable(host: Host) -> None:
    """The unit starts at the next boot. A missing unit is no error; raises CommandError."""
    if installed(host):
        host.run(["systemctl", "enable", UNIT], timeout=_TIMEOUT)


def reload(host: Host) -> None:
    """systemd reads its unit files again; raises CommandError."""
    host.run(["systemctl", "daemon-reload"], timeout=_TIMEOUT)


def suppress_restart(host: Host) -> None:
    """The active unit is not started again when it ends, until :func:`allow_restart` or a reboot.

    Without it an unrelated end of the supervisor during a teardown would start the node again in its middle.
    A missing unit is no error: there is nothing to keep from starting. Raises OSError, CommandError.
    """
    if not installed(host):
        return
    host.makedirs(OVERRIDE.parent)
    atomicfile.write_file(host, OVERRIDE, b"[Service]\nRestart=no\n")
    reload(host)


def allow_restart(host: Host) -> None:
    """Take the override back. The reload is done even if it is gone: an earlier call may have failed there."""
    try:
        host.unlink(OVERRIDE)
    except FileNotFoundError:
        pass
    try:
        host.rmdir(OVERRIDE.parent)
    except OSError:
        pass  # somebody else's runtime drop-in is in it, or it never was
    reload(host)


def stop(host: Host) -> None:
    """Stop the unit. A missing unit is no error; raises CommandError."""
    if installed(host):
        systemd.stop_unit(host, UNIT)


def start(host: Host) -> None:
    """Start the unit and wait until it reports the node ready; raises :class:`StratumError`."""
    if not installed(host):
        raise StratumError("unit-missing", f"{UNIT_PATH}: is not there", hint="run: stratum up")
    systemd.start_unit(host, UNIT)


def start_later(host: Host) -> None:
    """Ask systemd to start the unit without waiting for it; raises CommandError."""
    if installed(host):
        host.run(["systemctl", "start", "--no-block", UNIT], timeout=_TIMEOUT)


def forget(host: Host, units: Sequence[str]) -> None:
    """Let systemd drop the units that were deleted, with their failures and our override. Raises CommandError."""
    allow_restart(host)
    # A unit that failed stays in systemd's list without its file until that is reset.
    host.run(["systemctl", "reset-failed", UNIT, *units], timeout=_TIMEOUT, check=False)


def restart(host: Host) -> None:
    """Restart the unit without waiting; its supervisor waits for the lock of the run that asks. Raises CommandError."""
    if installed(host):
        host.run(["systemctl", "restart", "--no-block", UNIT], timeout=_TIMEOUT)
