"""A Kubernetes node's host on a machine with a kernel of its own: prepared by `up`, after a reboot, given back.

The kubelet in the bundle is a stand-in; what it makes of the host is real.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from stratum.scripts.footprint import find_place, is_own
from stratum.system import HostPath
from tests.conftest import Machines
from tests.lab import demo
from tests.lab.machine import wait_until
from tests.lab.packages import Package
from tests.lab.qemu import QemuMachine
from tests.lab.roots import Disk
from tests.lab.snapshot import REBOOTED, difference, snapshot, written
from tests.pyz import built_pyz, default_cache

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


# An interface that comes up late has the address; the supervisor waits for it at boot.
ADDRESS = "192.0.2.10"
LATE_ADDRESS = f"""[Service]
Type=simple
ExecStart=/bin/sh -c 'sleep 4; exec ip address replace {ADDRESS}/32 dev lo'
[Install]
WantedBy=multi-user.target
"""

# A module stays loaded until the next boot, and shows its controls.
LEFT = (
    ("units", r"network-online\.target.*", "a target that was reached stays so until the next boot"),
    ("forwarding", r"/proc/sys/net/bridge/.*", "a module that was loaded stays until the next boot"),
    (
        "cgroups",
        r"/sys/fs/cgroup/system.slice/.*\.swap",
        "it is empty, and systemd makes it for what it switches on",
    ),
)


@pytest.fixture
def host(machines: Machines, kubernetes_disk: Disk, debian_packages: dict[str, Package]) -> QemuMachine:
    """A machine with three kinds of swap and a bundle that has a kubelet."""
    pyz = built_pyz(default_cache())
    publisher, bundle = demo.cached_bundle(pyz, debian_packages, [], kubelet=True)
    files = {
        "/root/usb/stratum.pyz": pyz,
        "/root/usb/demo.tar": bundle,
        "/etc/stratum/trust.d/publisher.pub": publisher.public,
    }
    vm = machines.boot(QemuMachine(kubernetes_disk, "prerequisites", files=files))
    vm.sh("chmod 0755 /root/usb/stratum.pyz; chmod 0644 /etc/stratum/trust.d/publisher.pub")
    vm.sh("for f in /swapfile /srv/admin; do dd if=/dev/zero of=$f bs=1M count=16; chmod 600 $f; mkswap $f; done")
    vm.write("/etc/fstab", vm.read("/etc/fstab") + FSTAB)
    vm.write("/etc/systemd/system-generators/zram-test", GENERATOR, 0o755)
    vm.write("/etc/systemd/system/zram-setup.service", SETUP_ZRAM)
    vm.write("/etc/systemd/system/srv-admin.swap", ADMIN_UNIT)
    vm.write("/etc/systemd/system/late-address.service", LATE_ADDRESS)
    vm.sh("systemctl daemon-reload; systemctl enable srv-admin.swap late-address; systemctl start swap.target")
    vm.run(["systemctl", "start", "late-address"])
    gone = ["systemctl", "is-active", "--quiet", "late-address"]
    wait_until("the address has come", lambda: vm.run(gone, check=False).status != 0, 120, pause=0.5)
    assert ADDRESS in vm.sh("ip -4 address show lo").stdout
    return vm


def swaps(vm: QemuMachine) -> dict[str, int]:
    lines = [line.split() for line in vm.read("/proc/swaps").splitlines()[1:]]
    return {fields[0]: int(fields[4]) for fields in lines}


def sysctls(vm: QemuMachine) -> dict[str, str]:
    keys = ["kernel.panic", "net.ipv4.ip_forward"]
    return dict(zip(keys, vm.run(["sysctl", "-n", *keys]).lines))


def stratum(vm: QemuMachine, *words: str, check: bool = True) -> Any:
    argv = ["/root/usb/stratum.pyz", *words, "--output", "json"]
    done = vm.run(["sh", "-c", 'cd /root/usb && exec "$@"', "sh", *argv], timeout=600, check=check)
    return json.loads(done.stdout)


def actions(document: Any) -> dict[str, list[str]]:
    return {
        step["step"]: [f"{action['verb']} {action['subject']}" for action in step["actions"]]
        for step in document["steps"]
    }


@pytest.mark.timeout(2400)
def test_a_kubernetes_node_gets_its_host_keeps_it_through_a_reboot_and_gives_it_back(host: QemuMachine) -> None:
    on = {"/swapfile": 3, "/srv/admin": 7, "/dev/zram0": 100}
    assert swaps(host) == on
    before, live = snapshot(host), sysctls(host)
    assert live == {"kernel.panic": "-1", "net.ipv4.ip_forward": "0"}

    # The network has no other address, so none is guessed.
    stratum(host, "up", "--profile", "cis", "--node-ip", ADDRESS)
    assert swaps(host) == {}
    assert sysctls(host) == {"kernel.panic": "10", "net.ipv4.ip_forward": "1"}
    assert stratum(host, "up")["changed"] is False
    status = stratum(host, "status", "--wait", "120")
    assert (status["nodeIP"], status["profile"], status["host"]) == (ADDRESS, "cis", [])
    changed = [HostPath(path) for path in written(before, snapshot(host), ignore=REBOOTED)]
    elsewhere = [path for path in changed if not is_own(path)]
    assert [path for path in elsewhere if find_place(path) is None] == []

    # Taken back in the same boot: swap is on as it was, live values and files are those of before.
    planned = actions(stratum(host, "uninstall", "--dry-run"))
    assert {"switch on swap /swapfile", "set kernel.panic = -1, as it was"} <= set(planned["restore"])
    assert swaps(host) == {}
    assert actions(stratum(host, "uninstall"))["restore"] == planned["restore"]
    assert swaps(host) == on
    assert sysctls(host) == live
    left = difference(before, snapshot(host), ignore=(*LEFT, *REBOOTED))
    assert not left, "\n".join(left)

    # After a reboot everything holds: no swap, modules before their sysctls, the address that was recorded.
    stratum(host, "up", "--profile", "cis", "--node-ip", ADDRESS)
    host.reboot()
    assert swaps(host) == {}
    assert host.run(["systemctl", "is-failed", "systemd-modules-load.service"], check=False).stdout.strip() != "failed"
    status = stratum(host, "status", "--wait", "180")
    assert (status["ready"], status["nodeIP"], status["host"]) == (True, ADDRESS, [])
    assert stratum(host, "up")["changed"] is False
    assert "warning" not in host.run(["journalctl", "--boot", "--unit", "stratum.service"]).stdout

    # What comes undone while the node runs is put right, and said.
    host.sh("swapon --priority 3 /swapfile; sysctl -q -w kernel.panic=5")
    wait_until("swap is off again", lambda: swaps(host) == {}, 300, pause=2)
    wait_until("the sysctl is set again", lambda: sysctls(host)["kernel.panic"] == "10", 300, pause=2)
    said = host.run(["journalctl", "--boot", "--unit", "stratum.service"]).stdout
    assert "/swapfile" in said and "kernel.panic" in said

    # What an admin does meanwhile stays.
    host.sh("printf '\\nLABEL=more /srv/more ext4 noauto 0 0\\n' >>/etc/fstab")
    stratum(host, "uninstall")
    assert swaps(host) == on
    host.sh("sed -i -e '/^LABEL=more/d' /etc/fstab; truncate -s -1 /etc/fstab; systemctl daemon-reload")
    ours = (("forwarding", r".*", "a value that a drop-in of ours set at boot stays until the next one"),)
    left = difference(before, snapshot(host), ignore=(*LEFT, *REBOOTED, *ours))
    assert not left, "\n".join(left)
