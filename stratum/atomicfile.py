"""Files that are replaced whole or not at all, and are on the disk when the call returns.

The order is the one of seed 004: a hidden name of its own in the same directory, mode, content, sync of the
file, rename, sync of the directory. Nobody ever sees a half-written file, whenever the power goes.
"""

from __future__ import annotations

import contextlib

from stratum.errors import StratumError
from stratum.system import Host, HostPath, PathLike

__all__ = ["NotDurableError", "StrayCopyError", "create_exclusively", "replace_link", "write_file"]


class NotDurableError(StratumError):
    """The file was replaced, but its directory could not be synced: a power cut may bring the old one back."""

    def __init__(self, path: PathLike, cause: OSError) -> None:
        super().__init__(
            "not-durable",
            f"{path}: written, but the directory could not be synced: {cause.strerror}",
            hint="check the disk (dmesg), then run the command again",
        )


class StrayCopyError(StratumError):
    """A temporary copy could not be removed and still holds the file's content."""

    def __init__(self, path: PathLike, temporary: PathLike, cause: OSError) -> None:
        super().__init__(
            "stray-copy",
            f"{path}: the temporary copy {temporary} could not be removed: {cause.strerror}",
            hint=f"remove {temporary} by hand",
        )


def _write_temporary(host: Host, path: HostPath, data: bytes, mode: int) -> HostPath:
    temporary = host.temporary_name(path)
    file = host.open_new(temporary, mode)
    try:
        with file:
            file.write(data)
            host.fsync(file)
    except BaseException:
        _discard(host, path, temporary)
        raise
    return temporary


def _discard(host: Host, path: HostPath, temporary: HostPath) -> None:
    try:
        host.unlink(temporary)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StrayCopyError(path, temporary, error) from error


def _sync_parent(host: Host, path: HostPath) -> None:
    try:
        host.fsync_dir(path.parent)
    except OSError as error:
        raise NotDurableError(path, error) from error


def write_file(host: Host, path: PathLike, data: bytes, mode: int = 0o644) -> None:
    """Write ``data`` to ``path`` with exactly ``mode``, replacing what is there at once.

    A link at ``path`` is replaced, not followed. Raises OSError (nothing changed), :class:`NotDurableError`
    (replaced) or :class:`StrayCopyError` (a copy is left).
    """
    wanted = HostPath(str(path))
    temporary = _write_temporary(host, wanted, data, mode)
    try:
        host.rename(temporary, wanted)
    except BaseException:
        _discard(host, wanted, temporary)
        raise
    _sync_parent(host, wanted)


def create_exclusively(host: Host, path: PathLike, data: bytes, mode: int = 0o600) -> None:
    """Write ``data`` to ``path``, which must not exist: a file that appeared meanwhile is never replaced.

    Raises FileExistsError, other OSErrors, :class:`NotDurableError` or :class:`StrayCopyError`.
    """
    wanted = HostPath(str(path))
    temporary = _write_temporary(host, wanted, data, mode)
    try:
        host.link(temporary, wanted)
    except BaseException:
        _discard(host, wanted, temporary)
        raise
    _discard(host, wanted, temporary)
    _sync_parent(host, wanted)


def replace_link(host: Host, path: PathLike, target: str) -> None:
    """Point the symbolic link ``path`` at ``target``; there is no moment without a link. Raises OSError."""
    wanted = HostPath(str(path))
    temporary = host.temporary_name(wanted)
    host.symlink(target, temporary)
    try:
        host.rename(temporary, wanted)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            host.unlink(temporary)
        raise
    _sync_parent(host, wanted)
