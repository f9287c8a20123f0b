"""A Debian with SELinux in its kernel and a small part of Debian's policy.

The whole policy has over 300 modules, and each change of it is built anew from all of them: that takes seconds, and
in an emulated machine minutes. What the machine runs is in the base module.
"""

from __future__ import annotations

from pathlib import Path

from tests.lab import roots, tools

#: For the kernel's command line. The machine boots permissive; tests switch.
OPTIONS = "security=selinux selinux=1 enforcing=0"

# The base module has a user with a role of xserver's, which needs the others; unconfined is what services run as.
_KEPT = ("base", "getty", "unconfined", "xdg", "xserver")
_PRIORITY = "100"  # of the modules that come with the package
_CONTEXTS = "etc/selinux/default/contexts/files/file_contexts"

#: Stands in for the package container-selinux, which Debian does not have: its types, as far as files go.
CONTAINER_TYPES = "".join(
    f"(type {name})\n(roletype object_r {name})\n(typeattributeset file_type ({name}))\n"
    for name in ("container_runtime_exec_t", "container_var_lib_t", "container_ro_file_t", "container_var_run_t")
)


def selinux_disk() -> roots.Disk:
    """Return a disk whose files have the labels of the small policy; boot it with :data:`OPTIONS`.

    :raises LabError: if the disk cannot be made.
    """
    label = f"{roots.SELINUX.label}-small-{tools.key(*_KEPT)}"
    return roots.disk_of(roots.root_directory(roots.SELINUX), label, _shrink)


def _shrink(root: Path) -> None:
    inside = ["chroot", str(root)]
    modules = tools.tool([*inside, "semodule", "--list-modules"], timeout=120).split()
    words = [word for name in modules if name not in _KEPT for word in ("--remove", name)]
    tools.tool([*inside, "semodule", "--noreload", f"--priority={_PRIORITY}", *words], timeout=600)
    # Types that are gone must not be on any file. setfiles needs a /proc; -m: this machine mounts nothing with labels.
    inside = ["unshare", "--pid", "--fork", f"--mount-proc={root}/proc", *inside]
    tools.tool([*inside, "setfiles", "-m", "-F", f"/{_CONTEXTS}", "/"], timeout=600)
