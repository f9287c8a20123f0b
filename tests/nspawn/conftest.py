"""Machines for the nspawn tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Machines
from tests.lab.demo import Publisher, cached_bundle
from tests.lab.image import Image
from tests.lab.node import Node, bring
from tests.lab.nspawn import NspawnMachine
from tests.lab.packages import Package
from tests.pyz import built_pyz, default_cache


@pytest.fixture
def machine(machines: Machines, lab_root: Path) -> NspawnMachine:
    """A fresh booted machine for one test."""
    return machines.boot(NspawnMachine(lab_root))


@pytest.fixture(scope="module")
def shared_machine(module_machines: Machines, lab_root: Path) -> NspawnMachine:
    """A booted machine that the tests of a module share."""
    return module_machines.boot(NspawnMachine(lab_root, "shared"))


@pytest.fixture(scope="session")
def pyz() -> Path:
    """The pyz of the present sources."""
    return built_pyz(default_cache())


@pytest.fixture(scope="session")
def shipped(
    pyz: Path, debian_packages: dict[str, Package], demo_image: Image
) -> tuple[Publisher, Path]:
    """The publisher and a signed bundle of real programs and one image."""
    return cached_bundle(pyz, debian_packages, [demo_image])


@pytest.fixture
def node(machine: NspawnMachine, pyz: Path, shipped: tuple[Publisher, Path]) -> Node[NspawnMachine]:
    """A fresh machine with pyz, key and bundle; nothing is installed."""
    return bring(machine, pyz, shipped[0].public, shipped[1])


@pytest.fixture(scope="module")
def bare(
    shared_machine: NspawnMachine, pyz: Path, shipped: tuple[Publisher, Path]
) -> Node[NspawnMachine]:
    """A machine of the module with pyz, key and bundle; each test must leave nothing installed on it."""
    return bring(shared_machine, pyz, shipped[0].public, shipped[1])


@pytest.fixture(scope="module")
def running(
    module_machines: Machines, lab_root: Path, pyz: Path, shipped: tuple[Publisher, Path]
) -> Node[NspawnMachine]:
    """A node of the module that is up; each test must leave it as it was."""
    machine = module_machines.boot(NspawnMachine(lab_root, "running"))
    made = bring(machine, pyz, shipped[0].public, shipped[1])
    made.stratum("up", "--quiet")
    made.settle()
    return made
