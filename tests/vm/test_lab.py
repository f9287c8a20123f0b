"""The lab itself tells the truth: qemu machines. The tests share one, for each boot costs time."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import Machines
from tests.lab.image import LAB_NETWORK, Image
from tests.lab.machine import BARE_ENV, CommandFailed, CommandTimeout, LabError
from tests.lab.packages import Package
from tests.lab.qemu import QemuMachine
from tests.lab.roots import Disk

STACK = ("containerd", "runc", "containernetworking-plugins")
INSTALL = "for tree in /opt/debian/*; do tar -C $tree -cf - . | tar -C / -xf - --keep-directory-symlink; done"


@pytest.fixture(scope="module")
def lab_vm(
    module_machines: Machines, lab_disk: Disk, debian_packages: dict[str, Package], demo_image: Image,
    tmp_path_factory: pytest.TempPathFactory,
) -> QemuMachine:
    scratch = tmp_path_factory.mktemp("files")
    (scratch / "image.tar").write_bytes(demo_image.oci_archive())
    (scratch / "network").write_text(LAB_NETWORK)
    files = {f"/opt/debian/{name}": debian_packages[name].tree for name in STACK}
    files |= {"/root/image.tar": scratch / "image.tar", "/etc/cni/net.d/10-lab.conflist": scratch / "network"}
    return module_machines.boot(QemuMachine(lab_disk, "lab", files=files))


@pytest.mark.parametrize("status", [0, 7, 137, 255])
def test_the_exit_status_of_a_command_is_its_own(lab_vm: QemuMachine, status: int) -> None:
    assert lab_vm.run(["sh", "-c", f"exit {status}"], check=False).status == status


def test_a_command_that_a_signal_ended_has_a_negative_status(lab_vm: QemuMachine) -> None:
    assert lab_vm.run(["sh", "-c", "kill -TERM $$"], check=False).status == -signal.SIGTERM


def test_an_unexpected_status_raises_with_the_words_of_the_command(lab_vm: QemuMachine) -> None:
    with pytest.raises(CommandFailed, match="no such luck"):
        lab_vm.run(["sh", "-c", "echo no such luck >&2; exit 3"])


def test_a_command_that_hangs_is_killed_with_its_children(lab_vm: QemuMachine) -> None:
    with pytest.raises(CommandTimeout, match="before"):
        lab_vm.run(["sh", "-c", "echo before; sleep 4242 & sleep 4243"], timeout=8)
    assert lab_vm.run(["pgrep", "-f", "sleep 424"], check=False).status == 1


def test_standard_input_reaches_the_command_unchanged(lab_vm: QemuMachine) -> None:
    sent = bytes(range(256)) * 1024
    assert lab_vm.run(["cat"], input=sent).raw_stdout == sent


def test_a_command_sees_the_environment_that_the_test_gives_and_no_more(lab_vm: QemuMachine) -> None:
    seen = dict(line.split("=", 1) for line in lab_vm.run(["env"], env=BARE_ENV).lines)
    assert seen == dict(BARE_ENV)


def test_the_machine_has_a_kernel_of_its_own_and_all_cgroup_controllers(lab_vm: QemuMachine) -> None:
    assert lab_vm.run(["uname", "-r"]).stdout.strip() != os.uname().release
    assert lab_vm.run(["systemctl", "is-system-running"]).stdout == "running\n"
    controllers = lab_vm.read("/sys/fs/cgroup/cgroup.controllers").split()
    assert {"cpu", "cpuset", "io", "memory", "pids"} <= set(controllers)


def test_the_machine_has_no_network_beyond_lo(lab_vm: QemuMachine) -> None:
    assert "lo" in lab_vm.run(["ls", "/sys/class/net"]).lines
    cards = lab_vm.sh("ls -d /sys/class/net/*/device 2>/dev/null || true").lines
    assert cards == []
    assert lab_vm.run(["ip", "route", "show", "default"]).stdout == ""


def test_files_go_in_with_their_mode(lab_vm: QemuMachine, tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(b"#!/bin/sh\necho it runs\n")
    lab_vm.copy_in(tmp_path / "program", "/opt/new/program", 0o750)
    assert lab_vm.run(["/opt/new/program"]).stdout == "it runs\n"
    assert lab_vm.run(["stat", "-c", "%a %U", "/opt/new/program"]).stdout == "750 root\n"


def test_debians_containerd_runs_a_container_with_a_bridge_network(lab_vm: QemuMachine, demo_image: Image) -> None:
    lab_vm.sh(f"{INSTALL}; mkdir -p /opt/cni/bin; ln -s /usr/lib/cni/* /opt/cni/bin/")
    lab_vm.run(["systemctl", "start", "containerd"], timeout=300)
    lab_vm.run(["ctr", "images", "import", "/root/image.tar"], timeout=300)
    inside = lab_vm.run(["ctr", "run", "--rm", "--cni", demo_image.reference, "c1", "ip", "a"], timeout=300)
    assert "inet 10.88.0.2/16" in inside.stdout


def test_a_reboot_gives_a_new_boot_and_keeps_the_files(lab_vm: QemuMachine) -> None:
    lab_vm.sh("echo kept >/etc/kept; echo lost >/run/lost; ip link add gone0 type bridge")
    before = lab_vm.boot_id()
    lab_vm.reboot()
    assert lab_vm.boot_id() != before
    assert lab_vm.read("/etc/kept") == "kept\n"
    assert not lab_vm.exists("/run/lost")
    assert lab_vm.run(["ls", "/sys/class/net"]).lines == ["lo"]


def test_a_power_cut_loses_what_was_not_synced_and_keeps_what_was(lab_vm: QemuMachine) -> None:
    # One long interval, so that the kernel does not happen to write it just in time.
    lab_vm.sh("mount -o remount,commit=600 /; echo 600000 >/proc/sys/vm/dirty_writeback_centisecs")
    lab_vm.sh("echo synced >/root/synced; sync /root/synced /root; echo unsynced >/root/unsynced")
    before = lab_vm.boot_id()
    lab_vm.power_cut()
    assert lab_vm.boot_id() != before
    assert lab_vm.read("/root/synced") == "synced\n"
    assert not lab_vm.exists("/root/unsynced") or lab_vm.read("/root/unsynced") == ""


def test_a_machine_that_is_powered_off_runs_nothing(lab_vm: QemuMachine) -> None:
    lab_vm.power_off()
    with pytest.raises(LabError, match="is not running"):
        lab_vm.run(["true"])
    assert "reboot: Power down" in lab_vm.console()


def test_nothing_is_left_on_the_outer_machine(module_machines: Machines, lab_vm: QemuMachine) -> None:
    directory = lab_vm.directory
    assert directory.exists()
    lab_vm.stop()
    assert not directory.exists()
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # processes of others come and go
            commands.append(path.read_bytes())
    assert not [words for words in commands if str(directory).encode() in words]
