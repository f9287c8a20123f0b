"""Staging: where things are made before one rename puts them in their place.

It is on the file system of what it becomes, at names that nobody can guess. Whoever holds the lock may clear it:
what is in it then was left by a run that was cut off.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence

from stratum.journal import JOURNAL_PATH
from stratum.receipt import RECEIPT_PATH, Entry, Receipt
from stratum.steps import remove_tree
from stratum.system import Host, HostPath, unguessable

__all__ = ["OWN_ROOT", "STAGING", "make_private", "new_staging", "reap_staging", "reap_temporaries"]

OWN_ROOT = HostPath("/opt/stratum")
STAGING = OWN_ROOT / ".staging"


def make_private(host: Host, directory: HostPath) -> None:
    """Make ``directory`` 0700, also where it exists with another mode (seed 004, Dirs). Raises OSError."""
    host.makedirs(directory, 0o700)
    if stat.S_IMODE(host.stat(directory).st_mode) != 0o700:
        host.chmod(directory, 0o700)


def new_staging(host: Host, receipt: Receipt) -> HostPath:
    """A new empty directory; its parents are recorded before they are made. Raises OSError."""
    if not host.is_dir(STAGING):
        missing = [path for path in (*reversed(OWN_ROOT.parents), OWN_ROOT) if not host.is_dir(path)]
        receipt.record(*(Entry(path, "directory") for path in missing), Entry(STAGING, "tree"))
        host.makedirs(OWN_ROOT)
    make_private(host, STAGING)
    path = STAGING / unguessable()
    host.mkdir(path, 0o755)
    return path


def reap_staging(host: Host) -> None:
    """Remove what is left in staging, and staging itself. Call it with the lock held. Raises OSError."""
    if host.is_dir(STAGING):
        remove_tree(host, STAGING)


def reap_temporaries(host: Host, receipt: Receipt, more: Sequence[HostPath] = ()) -> None:
    """Remove the hidden copies that a killed run left beside the paths of the receipt, and of the record itself.

    A directory that was hidden in order to be removed is one of them. A path is recorded before anything is
    written beside it, so no copy is missed; ``more`` are files that are not recorded one by one. Call it with the
    lock held. Raises OSError.
    """
    places: dict[HostPath, set[str]] = {}
    for path in (RECEIPT_PATH, JOURNAL_PATH, *more, *(entry.path for entry in receipt)):
        places.setdefault(path.parent, set()).add(path.name)
    for directory, names in places.items():
        for name in host.listdir(directory) if host.is_dir(directory) else ():
            if host.temporary_of(name) in names:
                remove_tree(host, directory / name)
