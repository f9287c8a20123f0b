"""Tiers, cached roots and packages, and what a failed test shows of its machines."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Optional, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from tests.lab import image, packages, roots, tools
from tests.lab.machine import Machine
from tests.order import long_first

AnyMachine = TypeVar("AnyMachine", bound=Machine)

_MACHINES = pytest.StashKey[list[Machine]]()
_TIERS = ("nspawn", "vm")

# How long an example takes says more of the machine and who else is at work there than of what is tested.
settings.register_profile("unhurried", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    # Here and not beside the test that reads it: options are read before deeper conftest files are.
    parser.addoption("--power-cuts", type=int, default=10, metavar="N", help="how often the power goes (default: 10)")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell starts its background jobs so, and every program that a test interrupts would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_MACHINES] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with the tier whose directory it is in; order them if several processes share them."""
    here = Path(__file__).parent
    places = {item: str(item.path.relative_to(here)) for item in items if item.path.is_relative_to(here)}
    for item, place in places.items():
        tier = place.partition("/")[0]
        if tier in _TIERS:
            item.add_marker(tier)
    if hasattr(config, "workerinput"):  # one of pytest-xdist's processes
        order = {place: number for number, place in enumerate(long_first(places.values()))}
        items.sort(key=lambda item: order[places[item]] if item in places else len(order))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Add console and journal of the machines that run to the report of a failure."""
    report: Any = yield
    if report.failed:
        for machine in item.config.stash[_MACHINES]:
            report.sections.append((f"machine {machine.name}", machine.failure_report()))
            if os.environ.get("STRATUM_LAB_KEEP") == "1":
                report.sections.append(("kept", _keep(item, machine)))
    return report


def _keep(item: pytest.Item, machine: Machine) -> str:
    """Save a machine for a look at it; a failure to do so must not hide the test's own."""
    name = re.sub(r"[^\w.-]+", "_", item.nodeid)
    directory = tools.cache_directory() / "kept" / name / machine.name
    try:
        machine.keep(directory)
    except Exception as error:
        return f"could not keep {machine.name}: {error}"
    return str(directory)


class Machines:
    """Boots machines for one scope and removes them when it ends, last one first."""

    def __init__(self, config: pytest.Config) -> None:
        self._listed = config.stash[_MACHINES]
        self._mine: list[Machine] = []

    def boot(self, machine: AnyMachine) -> AnyMachine:
        """Boot a machine; it is removed at the end of the scope."""
        machine.__enter__()
        self._mine.append(machine)
        self._listed.append(machine)
        return machine

    def close(self) -> None:
        """Remove all of them, even if one makes trouble."""
        trouble: Optional[BaseException] = None
        for machine in reversed(self._mine):
            self._listed.remove(machine)
            try:
                machine.stop()
            except BaseException as error:
                trouble = trouble or error
        if trouble is not None:
            raise trouble


@pytest.fixture
def machines(pytestconfig: pytest.Config) -> Iterator[Machines]:
    """Boots machines that live as long as one test."""
    scope = Machines(pytestconfig)
    yield scope
    scope.close()


@pytest.fixture(scope="module")
def module_machines(pytestconfig: pytest.Config) -> Iterator[Machines]:
    """Boots machines that live as long as the tests of one module."""
    scope = Machines(pytestconfig)
    yield scope
    scope.close()


@pytest.fixture(scope="session")
def lab_root() -> Path:
    """A Debian 12 root directory, only to be read."""
    return roots.root_directory(roots.BOOKWORM)


@pytest.fixture(scope="session")
def lab_disk() -> roots.Disk:
    """The same root as a disk with its kernel, only to be read."""
    return roots.root_disk(roots.BOOKWORM)


@pytest.fixture(scope="session")
def kubernetes_disk() -> roots.Disk:
    """A disk with what the stand-ins of a Kubernetes node need, only to be read."""
    return roots.root_disk(roots.KUBERNETES)


@pytest.fixture(scope="session")
def debian_packages() -> dict[str, packages.Package]:
    """Debian 12's containerd, runc, CNI plugins and static busybox, unpacked."""
    return packages.fetch("bookworm")


@pytest.fixture(scope="session")
def demo_image(debian_packages: dict[str, packages.Package]) -> image.Image:
    """A small real container image."""
    return image.busybox_image(debian_packages["busybox-static"].tree / "bin/busybox")
