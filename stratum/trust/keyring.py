"""The keys that a host trusts: ``/etc/stratum/trust.d/*.pub`` and those that the pyz was built with.

A key file that cannot be used is an error, not a warning: an admin who put it there relies on it. On the
running machine nobody but root may be able to change the directory or a file in it, else any user could
decide what root installs.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from stratum import boot
from stratum.errors import NotTrustedError
from stratum.system import Host, HostPath
from stratum.trust.minisign import KEY_FILE_LIMIT, PublicKey

__all__ = ["TRUST_DIRECTORY", "load_keyring"]

TRUST_DIRECTORY = HostPath("/etc/stratum/trust.d")
_KEYS_MOST = 256


def load_keyring(host: Host, extra: Sequence[bytes] = ()) -> list[PublicKey]:
    """Every key that ``host`` trusts, each once: those of the pyz, of its directory, then ``extra``.

    ``extra`` are public key files given on the command line. A missing directory has no keys. Raises
    :class:`NotTrustedError` naming the file that is malformed or that others may change.
    """
    keys = [_parse(data, f"key {number} built into stratum") for number, data in enumerate(boot.builtin_keys(), 1)]
    keys += _directory_keys(host)
    keys += [_parse(data, "the key given on the command line") for data in extra]
    found: dict[str, PublicKey] = {}
    for key in keys:
        found.setdefault(key.fingerprint, key)
    return list(found.values())


def _directory_keys(host: Host) -> list[PublicKey]:
    try:
        names = [name for name in host.listdir(TRUST_DIRECTORY) if name.endswith(".pub") and not name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unusable(TRUST_DIRECTORY, f"cannot be read: {error.strerror}") from None
    if len(names) > _KEYS_MOST:
        raise _unusable(TRUST_DIRECTORY, f"holds {len(names)} keys; at most {_KEYS_MOST} are read")
    _check_owner(host, TRUST_DIRECTORY, host.stat(TRUST_DIRECTORY))
    return [_read(host, TRUST_DIRECTORY / name) for name in names]


def _read(host: Host, path: HostPath) -> PublicKey:
    try:
        info = host.lstat(path)
        if not stat.S_ISREG(info.st_mode):
            raise _unusable(path, "is not a regular file")
        _check_owner(host, path, info)
        with host.open(path) as file:
            data = file.read(KEY_FILE_LIMIT + 1)
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror}") from None
    return _parse(data, str(path))


def _check_owner(host: Host, path: HostPath, info: os.stat_result) -> None:
    # A tree that will become a machine may belong to whoever builds it.
    if host.live and info.st_uid != 0:
        raise _unusable(path, f"belongs to user {info.st_uid}, not to root", hint=f"run: chown root: {path}")
    if info.st_mode & 0o022:
        raise _unusable(path, "can be changed by others than root", hint=f"run: chmod go-w {path}")


def _parse(data: bytes, where: str) -> PublicKey:
    try:
        return PublicKey.parse(data)
    except NotTrustedError as error:
        raise NotTrustedError(error.reference, f"{where}: {error.message}", hint=error.hint) from None


def _unusable(path: HostPath, why: str, hint: str = "repair it or remove it") -> NotTrustedError:
    return NotTrustedError("unsafe-keyring", f"{path}: {why}", hint=hint)
