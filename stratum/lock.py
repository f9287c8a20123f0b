"""The lock: one run that changes the node at a time.

It is an flock(2) on ``/run/stratum/lock``, so it goes with the process, however that ends, and with a reboot.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

from stratum.errors import AlreadyRunningError, StratumError
from stratum.system import Host, HostPath

__all__ = ["LOCK_PATH", "SUPERVISOR", "hold_lock", "is_held", "remove_lock"]

LOCK_PATH = HostPath("/run/stratum/lock")
_POLL = 0.2
SUPERVISOR = "up --supervise"
# The supervisor brings up what is installed, within its gates' timeout. Whoever runs a command just after `up` or at
# boot waits for that; nothing else in this program takes the lock without an admin's command behind it.
SUPERVISOR_PATIENCE = 180.0  # seconds


def _open_locked(host: Host, command: str) -> tuple[int, list[HostPath]]:
    """The descriptor of the locked file and the directories made for it, or raise BlockingIOError."""
    while True:
        made = host.makedirs(LOCK_PATH.parent, 0o755)
        real = host.real(LOCK_PATH)
        try:
            descriptor = os.open(real, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # an uninstall took the directory away just now
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # uninstall removes the file: a lock on a name that is gone would not keep anybody out.
            same = os.path.exists(real) and os.path.samestat(os.stat(real), os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        if same:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()} {command}\n".encode())
            return descriptor, made
        os.close(descriptor)


def _holder(host: Host) -> str:
    try:
        return host.read_text(LOCK_PATH).strip() or "unknown"
    except OSError:
        return "unknown"


@contextlib.contextmanager
def hold_lock(host: Host, command: str, *, wait: float = 0.0) -> Iterator[None]:
    """Hold the lock while the block runs; wait for it up to ``wait`` seconds, for the supervisor to be done anyway.

    Raises :class:`AlreadyRunningError` with the pid and command that hold it, or :class:`StratumError` when
    the file cannot be made.
    """
    start = host.monotonic()
    while True:
        try:
            descriptor, made = _open_locked(host, command)
            break
        except BlockingIOError:
            # Who has the lock writes its name a moment later: one look is not enough.
            patience = SUPERVISOR_PATIENCE if _holder(host).endswith(f" {SUPERVISOR}") else _POLL
            if host.monotonic() - start < max(wait, patience):
                host.sleep(_POLL)
                continue
            raise AlreadyRunningError(
                "locked",
                f"{LOCK_PATH}: held by another run (pid and command: {_holder(host)})",
                hint="wait for it to end, then run the command again",
            ) from None
        except OSError as error:
            kind = "read-only" if error.errno == errno.EROFS else "lock-failed"
            raise StratumError(kind, f"{LOCK_PATH}: {error.strerror}", hint="check that /run is writable") from None
    try:
        yield
    finally:
        try:
            if not host.live:
                # An image that is being built must not show that somebody was at work in it.
                remove_lock(host)
                for directory in reversed(made):
                    with contextlib.suppress(OSError):
                        host.rmdir(directory)
        finally:
            os.close(descriptor)


def is_held(host: Host) -> bool:
    """Whether a run is at work now; looking does not get in its way.

    Trying the lock would, so it reads what the kernel says: proc(5), locks.
    """
    try:
        info = host.stat(LOCK_PATH)
        lines = host.read_text("/proc/locks").splitlines()
    except OSError:
        return False
    name = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    return any(name in line.split() and "->" not in line.split() for line in lines)


def remove_lock(host: Host) -> None:
    """Remove the lock file and its directory if that is empty; call it as the last thing under the lock."""
    with contextlib.suppress(FileNotFoundError):
        host.unlink(LOCK_PATH)
    with contextlib.suppress(OSError):
        host.rmdir(LOCK_PATH.parent)
