"""Machines for the nspawn tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Machines
from tests.lab.nspawn import NspawnMachine


@pytest.fixture
def machine(machines: Machines, lab_root: Path) -> NspawnMachine:
    """A fresh booted machine for one test."""
    return machines.boot(NspawnMachine(lab_root))


@pytest.fixture(scope="module")
def shared_machine(module_machines: Machines, lab_root: Path) -> NspawnMachine:
    """A booted machine that the tests of a module share."""
    return module_machines.boot(NspawnMachine(lab_root, "shared"))
