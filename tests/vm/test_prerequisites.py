"""Swap, modules, sysctls and mounts on a machine with a kernel of its own: applied, after a reboot, taken back."""

from __future__ import annotations

import json

import pytest

from tests.lab.qemu import QemuMachine
from tests.sources import sources_zip

# What `up` and `uninstall` do with these parts: plan, then perform, with the record on the disk.
DRIVE = """
import json, sys
from stratum.host import modules, rootmount, swap, sysctls
from stratum.host.profiles import PROFILES
from stratum.journal import Journal
from stratum.receipt import Receipt
from stratum.removal import plan_removal
from stratum.steps import Work
from stratum.system import Host

host, warned, done = Host(), [], []
host.makedirs("/var/lib/stratum")
work = Work(host, Receipt.load(host), Journal(host))
cis = PROFILES["cis"]
plans = {
    "apply": [
        lambda: modules.plan_modules(work, modules.NODE, warned.append),
        lambda: sysctls.plan_sysctls(work, cis, warned.append),
        lambda: swap.plan_swap_off(work),
        lambda: rootmount.plan_root_shared(host, warned.append),
        lambda: rootmount.plan_bpf(host, warned.append),
    ],
    "undo": [
        lambda: swap.plan_undo(work, warned.append),
        lambda: sysctls.plan_undo(host, warned.append),
        lambda: rootmount.plan_undo(host, warned.append),
        lambda: plan_removal(work).actions,
    ],
    "check": [],
}
for plan in plans[sys.argv[1]]:
    for action in plan():
        done.append(action.describe())
        action.perform(work)
found = modules.check_modules(host, modules.NODE) + sysctls.check_sysctls(host, cis) + swap.check_swap(host)
print(json.dumps({"done": done, "warned": warned, "found": [item.message for item in found]}))
"""

FSTAB = (
    "# the disk\nUUID=none-of-this\t/srv/none ext4 noauto 0 0\r\n/swapfile none\tswap sw,pri=3 0 0\n#/old none swap sw"
)

# A generator as zram-generator is one: it makes the unit at each boot and each reload.
GENERATOR = """#!/bin/sh
mkdir -p "$1/swap.target.requires"
cat >"$1/dev-zram0.swap" <<END
[Unit]
Requires=zram-setup.service
After=zram-setup.service
[Swap]
What=/dev/zram0
Priority=100
END
ln -sf ../dev-zram0.swap "$1/swap.target.requires/"
"""

SETUP_ZRAM = """[Unit]
DefaultDependencies=no
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'modprobe zram; echo 32M >/sys/block/zram0/disksize; mkswap /dev/zram0'
"""

ADMIN_UNIT = "[Swap]\nWhat=/srv/admin\nPriority=7\n[Install]\nWantedBy=swap.target\n"


def drive(vm: QemuMachine, what: str) -> dict[str, list[str]]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/root/src.zip"}
    answer: dict[str, list[str]] = json.loads(vm.run(["python3", "-S", "/root/drive.py", what], env=environment).stdout)
    return answer


def swaps(vm: QemuMachine) -> dict[str, int]:
    lines = [line.split() for line in vm.read("/proc/swaps").splitlines()[1:]]
    return {fields[0]: int(fields[4]) for fields in lines}


def sysctl(vm: QemuMachine, key: str) -> str:
    return vm.run(["sysctl", "-n", key]).stdout.strip()


def etc(vm: QemuMachine) -> list[str]:
    """Every file below /etc: kind, mode, owner, target or content."""
    stats = vm.sh("find /etc ! -type d -printf '%p %y %m %U:%G %l\\n'").lines
    sums = vm.sh("find /etc -type f -exec sha256sum {} +").lines
    return sorted(stats + sums)


@pytest.mark.timeout(1800)
def test_swap_modules_sysctls_and_mounts_are_applied_hold_after_a_reboot_and_are_taken_back(vm: QemuMachine) -> None:
    vm.write("/root/src.zip", sources_zip())
    vm.write("/root/drive.py", DRIVE)
    vm.sh("for f in /swapfile /srv/admin; do dd if=/dev/zero of=$f bs=1M count=16; chmod 600 $f; mkswap $f; done")
    vm.write("/etc/fstab", vm.read("/etc/fstab") + FSTAB)
    vm.write("/etc/systemd/system-generators/zram-test", GENERATOR, 0o755)
    vm.write("/etc/systemd/system/zram-setup.service", SETUP_ZRAM)
    vm.write("/etc/systemd/system/srv-admin.swap", ADMIN_UNIT)
    vm.sh("systemctl daemon-reload; systemctl enable srv-admin.swap; systemctl start swap.target")
    on = {"/swapfile": 3, "/srv/admin": 7, "/dev/zram0": 100}
    assert swaps(vm) == on
    before = etc(vm)
    panic, forward = sysctl(vm, "kernel.panic"), sysctl(vm, "net.ipv4.ip_forward")
    assert panic != "10"
    assert forward == "0"

    # Applied: nothing is left to find, and a second run has nothing to do.
    assert drive(vm, "apply")["found"] == []
    assert swaps(vm) == {}
    assert (sysctl(vm, "kernel.panic"), sysctl(vm, "net.bridge.bridge-nf-call-iptables")) == ("10", "1")
    again = drive(vm, "apply")
    assert (again["done"], again["warned"]) == ([], [])
    assert vm.run(["systemctl", "is-failed", "systemd-modules-load.service"], check=False).stdout.strip() != "failed"

    # Taken back in the same boot: swap is on as it was, live values and files are those of before.
    back = drive(vm, "undo")
    assert back["warned"] == []
    assert swaps(vm) == on
    assert (sysctl(vm, "kernel.panic"), sysctl(vm, "net.ipv4.ip_forward")) == (panic, forward)
    assert etc(vm) == before

    # After a reboot everything holds without anybody's help: no swap, modules before their sysctls, both as set.
    drive(vm, "apply")
    vm.reboot()
    assert swaps(vm) == {}
    assert drive(vm, "check")["found"] == []
    assert drive(vm, "apply")["done"] == []
    # What an admin does meanwhile stays.
    vm.sh("printf '\\nLABEL=more /srv/more ext4 noauto 0 0\\n' >>/etc/fstab")
    drive(vm, "undo")
    assert swaps(vm) == on
    assert etc(vm) != before
    vm.sh("sed -i -e '/^LABEL=more/d' /etc/fstab; truncate -s -1 /etc/fstab")
    assert etc(vm) == before
