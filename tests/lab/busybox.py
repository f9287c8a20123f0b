"""A Debian whose PID 1 is BusyBox's init and that has no systemctl: a host that Stratum cannot run a node on."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.lab import roots, tools

#: For the kernel's command line. BusyBox is an init when it is started under that name.
OPTIONS = "init=/usr/local/sbin/init"

_INITTAB = """::sysinit:/etc/lab/setup
::respawn:/etc/lab/agent
::shutdown:/usr/bin/umount -a -r
"""

# What systemd and udev would do, as far as the lab needs it. Mounts stay private, as the kernel makes them.
_SETUP = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t cgroup2 cgroup2 /sys/fs/cgroup
hostname -F /etc/hostname
ip link set lo up
modprobe -a virtio_console virtio_rng
"""

# Without udev there is no link with the port's name.
_AGENT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin
for port in /sys/class/virtio-ports/*; do
    test "$(cat "$port/name")" = org.qemu.guest_agent.0 || continue
    exec qemu-ga --method virtio-serial --path "/dev/${port##*/}"
done
sleep 1
"""

_FILES = {"etc/inittab": (_INITTAB, 0o644), "etc/lab/setup": (_SETUP, 0o755), "etc/lab/agent": (_AGENT, 0o755)}

# An Alpine has none of them, and what asks them is found out.
_NOT_THERE = ("usr/bin/systemctl", "usr/bin/journalctl")


def busybox_disk(busybox: Path) -> roots.Disk:
    """Return a disk made of the Debian 12 root and a static busybox; boot it with :data:`OPTIONS`.

    :raises LabError: if the disk cannot be made.
    """
    label = f"{roots.BOOKWORM.label}-busybox-{tools.key(repr(_FILES), repr(_NOT_THERE))}"
    return roots.disk_of(roots.root_directory(roots.BOOKWORM), label, lambda root: _change(root, busybox))


def _change(root: Path, busybox: Path) -> None:
    shutil.copyfile(busybox, root / "usr/bin/busybox")
    (root / "usr/bin/busybox").chmod(0o755)
    (root / "usr/local/sbin/init").symlink_to("../../bin/busybox")
    for name, (text, mode) in _FILES.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
    for name in _NOT_THERE:
        (root / name).unlink()
