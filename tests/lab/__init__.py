"""The lab: real Debian machines for the tests, without a network.

``roots``     Debian root directories and disks, made once and cached
``packages``  Debian's own containerd, runc and CNI plugins, unpacked
``image``     a small real container image made of busybox
``nspawn``    machines with real systemd on this kernel, up in a second
``qemu``      machines with a kernel of their own: real reboots, power cuts

The lab needs root and the programs that ``tests/prepare.sh`` installs.
"""
