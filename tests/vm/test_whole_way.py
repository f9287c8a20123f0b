"""The whole way on a machine with a kernel of its own: up, a container, a reboot, uninstall, no trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Machines
from tests.lab import demo
from tests.lab.image import Image
from tests.lab.packages import Package
from tests.lab.qemu import QemuMachine
from tests.lab.roots import Disk
from tests.lab.snapshot import REBOOTED, difference, snapshot
from tests.pyz import built_pyz, default_cache

CTR = "/opt/stratum/node/current/bin/ctr"
ADDRESS = "/run/stratum/containerd/containerd.sock"
# Two containers that see each other over the bridge, and the bridge's own address.
LOOK = "ip -4 addr show dev eth0 && ping -c 1 -w 20 10.215.0.1"


@pytest.fixture(scope="module")
def host(
    module_machines: Machines, lab_disk: Disk, debian_packages: dict[str, Package], demo_image: Image
) -> QemuMachine:
    """A bare machine with the stick's content in /root/usb and a trusted key, before ``up``."""
    pyz = built_pyz(default_cache())
    publisher, bundle = demo.cached_bundle(pyz, debian_packages, [demo_image])
    files: dict[str, Path] = {
        "/root/usb/stratum.pyz": pyz,
        "/root/usb/demo.tar": bundle,
        "/etc/stratum/trust.d/publisher.pub": publisher.public,
    }
    machine = module_machines.boot(QemuMachine(lab_disk, "whole-way", files=files))
    machine.sh("chmod 0755 /root/usb/stratum.pyz; chmod 0644 /etc/stratum/trust.d/publisher.pub")
    return machine


def ctr(host: QemuMachine, *arguments: str) -> str:
    return host.run([CTR, "--address", ADDRESS, *arguments], timeout=300).stdout


def start_container(host: QemuMachine, demo_image: Image, name: str, *command: str) -> None:
    # ctr finds its shim and runc on the PATH; `stratum exec` sets it for people.
    argv = ["stratum", "exec", "ctr", "run", "--detach", "--cni", demo_image.reference, name, *command]
    host.run(argv, timeout=300)


def running(host: QemuMachine) -> set[str]:
    return {line.split()[0] for line in ctr(host, "tasks", "list").splitlines()[1:] if "RUNNING" in line}


@pytest.mark.timeout(2400)  # seconds; a loaded machine is several times slower
def test_a_bare_host_becomes_a_container_host_survives_a_reboot_and_is_left_without_a_trace(
    host: QemuMachine, demo_image: Image
) -> None:
    before = snapshot(host)
    host.run(["sh", "-c", "cd /root/usb && exec ./stratum.pyz up"], timeout=600)

    # A container runs with a network of its own, and reaches the host and its neighbour.
    start_container(host, demo_image, "neighbour", "sleep", "3600")
    argv = ["stratum", "exec", "ctr", "run", "--rm", "--cni", demo_image.reference, "look", "sh", "-c", LOOK]
    seen = host.run(argv, timeout=300).stdout
    assert "inet 10.215.0." in seen
    assert "1 packets received" in seen
    assert running(host) == {"neighbour"}

    # The supervisor and containerd come back by themselves.
    host.reboot()
    status = host.run(["stratum", "status", "--wait", "120", "--output", "json"], timeout=400)
    report = json.loads(status.stdout)
    assert report["ready"] is True
    assert report["drift"] == []
    ctr(host, "containers", "delete", "neighbour")
    start_container(host, demo_image, "after-reboot", "sleep", "3600")
    assert running(host) == {"after-reboot"}

    # A running container is ended, and nothing of any of it is left.
    listed = host.run(["stratum", "uninstall", "--dry-run"], timeout=300).stdout
    assert "/usr/local/bin/stratum" in listed
    assert running(host) == {"after-reboot"}
    done = host.run(["stratum", "uninstall"], timeout=600)
    assert "left:" not in done.stdout
    left = difference(before, snapshot(host), ignore=REBOOTED)
    assert not left, "\n".join(left)
