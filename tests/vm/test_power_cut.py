"""The power goes at random moments of an upgrade; the machine comes up by itself, wholly old or wholly new."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Machines
from tests.lab import roots
from tests.lab.image import Image
from tests.lab.qemu import QemuMachine
from tests.lab.releases import Releases, releases
from tests.pyz import built_pyz, default_cache

BUNDLES = "/root/bundles"
CONTAINERDS = {"1.0": "1.6.20", "2.0": "1.7.24"}
SEED = int(os.environ.get("STRATUM_TEST_SEED", "20261130"))


@pytest.fixture(scope="module")
def released(demo_image: Image) -> Releases:
    """The releases with the containerd of Debian 12 and 13."""
    return releases(built_pyz(default_cache()), demo_image)


@pytest.fixture(scope="module")
def host(module_machines: Machines, released: Releases) -> QemuMachine:
    """A node with release 1.0, and the bundle of 2.0 beside it."""
    files: dict[str, Path] = {f"{BUNDLES}/{version}.tar": released.bundle(version) for version in CONTAINERDS}
    files["/root/stratum.pyz"] = released.publisher.pyz
    files["/etc/stratum/trust.d/publisher.pub"] = released.publisher.public
    disk = roots.root_disk(roots.UNSTABLE)
    machine = module_machines.boot(QemuMachine(disk, "power-cut", files=files))
    machine.sh("chmod 0755 /root/stratum.pyz; chmod 0644 /etc/stratum/trust.d/publisher.pub")
    machine.run(["/root/stratum.pyz", "up", "--quiet", "--bundle", f"{BUNDLES}/1.0.tar"], timeout=600)
    return machine


def status(host: QemuMachine) -> dict[str, Any]:
    done = host.run(["stratum", "status", "--wait", "240", "--output", "json"], timeout=600, check=False)
    assert done.status == 0, done.describe()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check_whole(host: QemuMachine) -> str:
    """The node is ready, is one of the two releases in every respect, and nothing of it drifted; which one."""
    report = status(host)
    version = str(report["version"])
    assert report["ready"] is True, report
    assert report["drift"] == [], report
    assert report["unfinished"] is None, report
    pid = host.run(["systemctl", "show", "--property=MainPID", "--value", "stratum-containerd.service"]).stdout.strip()
    program = host.run(["readlink", f"/proc/{pid}/exe"]).stdout.strip()
    assert program == f"/opt/stratum/node/{version}/bin/containerd"
    assert not host.exists("/opt/stratum/.staging")
    return version


def upgrade_arguments(version: str, number: int) -> list[str]:
    """Every other time the new version is unpacked too; else it is there already and only switched to."""
    if number % 2:
        return ["upgrade", "--allow-downgrade", "--bundle", f"{BUNDLES}/{version}.tar"]
    return ["upgrade", "--allow-downgrade", "--to", version]


@pytest.mark.timeout(4000)  # seconds; a loaded machine is several times slower
def test_a_power_cut_at_any_moment_of_an_upgrade_leaves_a_node_that_comes_up_by_itself(
    host: QemuMachine, power_cuts: int
) -> None:
    moments = random.Random(SEED)
    assert check_whole(host) == "1.0"
    begin = time.monotonic()
    host.run(["stratum", *upgrade_arguments("2.0", 1)], timeout=600)
    length = time.monotonic() - begin
    assert check_whole(host) == "2.0"
    current, outcomes = "2.0", []
    for number in range(power_cuts):
        target = "1.0" if current == "2.0" else "2.0"
        if number % 2:
            host.run(["stratum", "remove", target], timeout=600, check=False)
        host.run(["systemd-run", "--no-block", "--quiet", "stratum", *upgrade_arguments(target, number)])
        moment = moments.uniform(0, length)
        time.sleep(moment)
        host.power_cut()
        before, current = current, check_whole(host)
        outcomes.append(f"{number}: cut after {moment:.1f} of {length:.1f} s: {before} -> {current}")
        print(outcomes[-1])
    assert len(outcomes) == power_cuts
    # After all of that an undisturbed upgrade does what it always does.
    target = "1.0" if current == "2.0" else "2.0"
    host.run(["stratum", *upgrade_arguments(target, 1)], timeout=600)
    assert check_whole(host) == target
