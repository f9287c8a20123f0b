"""SELinux labels of files: whether there are any, which one a path should have, reading and setting them.

The state is read from the kernel's own file system and not from ``getenforce``, which a short PATH or a small
image does not have.
"""

from __future__ import annotations

import enum
import errno
import os
from typing import Optional

from stratum.system import Host, HostPath, PathLike

__all__ = ["ATTRIBUTE", "SELinux", "label_like", "read_label", "selinux_state", "set_label"]

SELINUXFS = HostPath("/sys/fs/selinux")
ATTRIBUTE = "security.selinux"


class SELinux(enum.Enum):
    """What SELinux does on this host."""

    OFF = "off"
    PERMISSIVE = "permissive"
    ENFORCING = "enforcing"


def selinux_state(host: Host) -> SELinux:
    """Whether SELinux is on, from ``/sys/fs/selinux/enforce``; a directory tree has none.

    Like libselinux (``is_selinux_enabled``), a selinuxfs that is mounted read-only counts as off: that is how
    container managers tell those inside that labels are not their business.
    """
    if not host.live:
        return SELinux.OFF
    try:
        text = host.read_text(SELINUXFS / "enforce").strip()
        if host.statvfs(SELINUXFS).f_flag & os.ST_RDONLY:
            return SELinux.OFF
    except OSError:
        return SELinux.OFF
    return SELinux.PERMISSIVE if text == "0" else SELinux.ENFORCING


def read_label(host: Host, path: PathLike) -> Optional[str]:
    """The label of an entry, of a link itself; None without one. Raises OSError."""
    value = host.getxattr(path, ATTRIBUTE)
    return None if value is None else value.rstrip(b"\0").decode("ascii", "replace")


def set_label(host: Host, path: PathLike, label: str) -> None:
    """Give an entry a label; raises OSError (EINVAL: the policy does not know it)."""
    host.setxattr(path, ATTRIBUTE, label.encode() + b"\0")


def label_like(host: Host, temporary: PathLike, path: PathLike) -> None:
    """Give ``temporary`` the label that the policy wants for ``path``, which it is about to become.

    The kernel labels a new file after its directory and its name *then*; a rename changes nothing about that.
    Where the policy cannot be asked, the label of what is at ``path`` is kept. Raises OSError only where a wrong
    label would count: SELinux is enforcing and this process is root.
    """
    state = selinux_state(host)
    if state is SELinux.OFF:
        return
    try:
        wanted = host.policy_label(path, host.lstat(temporary).st_mode) or _label_at(host, path)
        if wanted is not None and wanted != read_label(host, temporary):
            set_label(host, temporary, wanted)
    except OSError as error:
        if error.errno == errno.ENOTSUP or state is not SELinux.ENFORCING or host.euid != 0:
            return  # a file system without labels has nothing to get wrong
        raise


def _label_at(host: Host, path: PathLike) -> Optional[str]:
    try:
        return read_label(host, path)
    except FileNotFoundError:
        return None
