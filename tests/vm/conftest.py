"""Machines for the qemu tier. They are slow to boot: share one where the test allows it."""

from __future__ import annotations

import pytest

from tests.conftest import Machines
from tests.lab.qemu import QemuMachine
from tests.lab.roots import Disk


@pytest.fixture
def vm(machines: Machines, lab_disk: Disk) -> QemuMachine:
    """A fresh booted machine for one test."""
    return machines.boot(QemuMachine(lab_disk))


@pytest.fixture(scope="module")
def shared_vm(module_machines: Machines, lab_disk: Disk) -> QemuMachine:
    """A booted machine that the tests of a module share."""
    return module_machines.boot(QemuMachine(lab_disk, "shared"))


@pytest.fixture
def power_cuts(pytestconfig: pytest.Config) -> int:
    """How often the power goes."""
    return int(pytestconfig.getoption("--power-cuts"))
