"""Files that are replaced whole or not at all, and are on the disk when the call returns.

The order is the one of seed 004: a hidden name of its own in the same directory, SELinux label, mode, content,
sync of the file, rename, sync of the directory. Nobody ever sees a half-written file, whenever the power goes.
"""

from __future__ import annotations

import os
from typing import Optional

from stratum.errors import StratumError
from stratum.labels import label_like
from stratum.system import Host, HostPath, PathLike

__all__ = [
    "NotDurableError",
    "StrayCopyError",
    "create_exclusively",
    "remove_created",
    "replace_link",
    "write_file",
]


class NotDurableError(StratumError):
    """The file was replaced, but its directory could not be synced: a power cut may bring the old one back.

    ``created`` is the stat of a file that :func:`create_exclusively` made; None from the others.
    """

    def __init__(self, path: PathLike, cause: OSError, created: Optional[os.stat_result] = None) -> None:
        super().__init__(
            "not-durable",
            f"{path}: written, but the directory could not be synced: {cause.strerror}",
            hint="check the disk (dmesg), then run the command again",
        )
        self.created = created


class StrayCopyError(StratumError):
    """A temporary copy could not be removed and still holds the file's content.

    ``temporary`` is its path. ``created`` is the stat of the file that :func:`create_exclusively` made all the
    same; None when no file came to its place. ``because`` is what had failed before, if anything.
    """

    def __init__(
        self,
        path: PathLike,
        temporary: PathLike,
        cause: OSError,
        *,
        created: Optional[os.stat_result] = None,
        because: Optional[BaseException] = None,
    ) -> None:
        first = f"{_reason(because)}; and " if because else ""
        super().__init__(
            "stray-copy",
            f"{path}: {first}the temporary copy {temporary} could not be removed: {cause.strerror}",
            hint=f"remove {temporary} by hand",
        )
        self.temporary = HostPath(str(temporary))
        self.created = created
        self.because = because


def _reason(error: BaseException) -> str:
    if isinstance(error, StratumError):
        return error.message
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _write_temporary(host: Host, path: HostPath, data: bytes, mode: int) -> tuple[HostPath, os.stat_result]:
    temporary = host.temporary_name(path)
    file = host.open_new(temporary, mode)
    try:
        with file:
            label_like(host, temporary, path)
            file.write(data)
            host.fsync(file)
            info = os.fstat(file.fileno())
    except BaseException as error:
        _discard(host, path, temporary, error)
        raise
    return temporary, info


def _discard(host: Host, path: HostPath, temporary: HostPath, because: BaseException) -> None:
    """Remove the copy after ``because``; raises :class:`StrayCopyError` from it when that fails too."""
    try:
        host.unlink(temporary)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StrayCopyError(path, temporary, error, because=because) from because


def _sync_parent(host: Host, path: HostPath, created: Optional[os.stat_result] = None) -> None:
    try:
        host.fsync_dir(path.parent)
    except OSError as error:
        raise NotDurableError(path, error, created) from error


def write_file(host: Host, path: PathLike, data: bytes, mode: int = 0o644) -> None:
    """Write ``data`` to ``path`` with exactly ``mode``, replacing what is there at once.

    A link at ``path`` is replaced, not followed. Raises OSError (nothing changed), :class:`NotDurableError`
    (replaced) or :class:`StrayCopyError` (nothing changed, but a copy is left).
    """
    wanted = HostPath(str(path))
    temporary, _ = _write_temporary(host, wanted, data, mode)
    try:
        host.rename(temporary, wanted)
    except BaseException as error:
        _discard(host, wanted, temporary, error)
        raise
    _sync_parent(host, wanted)


def create_exclusively(host: Host, path: PathLike, data: bytes, mode: int = 0o600) -> os.stat_result:
    """Write ``data`` to ``path``, which must not exist: a file that appeared meanwhile is never replaced.

    Returns the stat of the file that this call made; :func:`remove_created` takes exactly that one back.
    Raises FileExistsError and other OSErrors (nothing changed). :class:`NotDurableError` and
    :class:`StrayCopyError` carry the stat in ``created`` when the file came to its place.
    """
    wanted = HostPath(str(path))
    temporary, info = _write_temporary(host, wanted, data, mode)
    try:
        # A link, not a rename: it fails when something is there.
        host.link(temporary, wanted)
    except BaseException as error:
        _discard(host, wanted, temporary, error)
        raise
    stray: Optional[OSError] = None
    try:
        host.unlink(temporary)
    except FileNotFoundError:
        pass
    except OSError as error:
        stray = error
    try:
        _sync_parent(host, wanted, info)
    except NotDurableError as error:
        if stray is None:
            raise
        raise StrayCopyError(wanted, temporary, stray, created=info, because=error) from error
    if stray is not None:
        raise StrayCopyError(wanted, temporary, stray, created=info) from stray
    return info


def remove_created(host: Host, path: PathLike, created: os.stat_result) -> bool:
    """Remove the file that :func:`create_exclusively` made at ``path``; what has replaced it since stays.

    Returns whether it was still there. Raises OSError.
    """
    try:
        found = host.lstat(path)
        if (found.st_dev, found.st_ino) != (created.st_dev, created.st_ino):
            return False
        host.unlink(path)
    except FileNotFoundError:
        return False
    host.fsync_dir(HostPath(str(path)).parent)
    return True


def replace_link(host: Host, path: PathLike, target: str) -> None:
    """Point the symbolic link ``path`` at ``target``; there is no moment without a link.

    Raises OSError, :class:`NotDurableError` or :class:`StrayCopyError`.
    """
    wanted = HostPath(str(path))
    temporary = host.temporary_name(wanted)
    host.symlink(target, temporary)
    try:
        label_like(host, temporary, wanted)
        host.rename(temporary, wanted)
    except BaseException as error:
        _discard(host, wanted, temporary, error)
        raise
    _sync_parent(host, wanted)
