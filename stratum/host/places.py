"""Whether something can be made at a place of the host, asked before anything is written."""

from __future__ import annotations

import os

from stratum.system import Host, HostPath

__all__ = ["existing_parent", "why_unwritable"]


def existing_parent(host: Host, path: HostPath) -> HostPath:
    """``path`` or its nearest parent that exists."""
    return next(candidate for candidate in (path, *path.parents) if host.exists(candidate))


def why_unwritable(host: Host, path: HostPath) -> str:
    """Why nothing can be made in the directory ``path``, or in its nearest parent that exists; empty when it can.

    Raises OSError when the host cannot be read.
    """
    parent = existing_parent(host, path)
    if not host.is_dir(parent):
        return "not a directory"
    if host.statvfs(parent).f_flag & os.ST_RDONLY:
        return "on a read-only file system"
    if not os.access(host.real(parent, follow=True), os.W_OK | os.X_OK):
        return "not writable"
    return ""
