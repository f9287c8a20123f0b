"""A crash in what is done to a Kubernetes node with LocalDNS: it stays whole.

``STRATUM_TEST_EVERY`` says which changes a crash is tried at: 1 is every single one, which takes most of an hour.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

import pytest

from stratum.errors import StratumError
from stratum.node import kubeletconfig
from stratum.node.settings import read_settings
from tests.faults import Loss
from tests.kubernodes import (
    OTHER_SETTINGS,
    STANDALONE_WITH_DNS,
    NodeMachine,
    bring,
    check_node,
    kubernetes_lab,
    node,
    worker,
)
from tests.nodes import Lab, boot, tree_of

EVERY = int(os.environ.get("STRATUM_TEST_EVERY", "29"))
PLAIN = "  role: standalone\n"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with kubernetes_lab() as lab:
        bring(lab, "host", "bare", None, "up", "--bundle", "host.tar")
        bring(lab, "old", "bare", STANDALONE_WITH_DNS, "up", "--bundle", "old.tar")
        bring(lab, "worker", "bare", worker(more=STANDALONE_WITH_DNS), "up", "--bundle", "old.tar")
        bring(lab, "changed", "old", OTHER_SETTINGS, "up")
        yield lab


@dataclass(frozen=True)
class Case:
    """A command on a machine in a state, under a configuration; and the versions that may run after a crash in it."""

    before: str
    body: str
    command: tuple[str, ...]
    between: tuple[str, ...]
    status: int = 0
    removes: bool = False


CASES = {
    "first up": Case("bare", STANDALONE_WITH_DNS, ("up", "--bundle", "old.tar"), ("1.0",)),
    "join": Case("bare", worker(more=STANDALONE_WITH_DNS), ("up", "--bundle", "old.tar"), ("1.0",)),
    "other settings": Case("old", OTHER_SETTINGS, ("up",), ("1.0",)),
    "fewer settings": Case("changed", PLAIN, ("up",), ("1.0",)),
    "upgrade": Case("old", OTHER_SETTINGS, ("upgrade", "--bundle", "new.tar"), ("1.0", "2.0")),
    "upgrade without": Case("changed", PLAIN, ("upgrade", "--bundle", "new.tar"), ("1.0", "2.0")),
    "upgrade that goes back": Case("old", OTHER_SETTINGS, ("upgrade", "--bundle", "bad.tar"), ("1.0",), 20),
    "upgrade without that goes back": Case("changed", PLAIN, ("upgrade", "--bundle", "bad.tar"), ("1.0",), 20),
    "upgrade of a worker": Case(
        "worker", worker("", more=OTHER_SETTINGS), ("upgrade", "--bundle", "bad.tar"), ("1.0",), 20
    ),
    "to a node": Case("host", STANDALONE_WITH_DNS, ("upgrade", "--bundle", "new.tar"), ("0.9", "2.0")),
    "to a worker, and back": Case("host", worker(), ("upgrade", "--bundle", "bad.tar"), ("0.9",), 20),
    "to a container host": Case("changed", PLAIN, ("upgrade", "--bundle", "later-host.tar"), ("1.0", "3.0")),
    "uninstall": Case("old", PLAIN, ("uninstall",), ("1.0",), removes=True),
    "uninstall a worker": Case("worker", PLAIN, ("uninstall",), ("1.0",), removes=True),
}
SWITCHES = ("upgrade",)
FORMS: dict[str, Callable[[int], Optional[Loss]]] = {
    "the process dies": lambda _: None,
    "the power goes": Loss,
    "the power goes, all is kept": lambda number: Loss(number, 0.0),
}


def check_gone(lab: Lab, machine: NodeMachine) -> None:
    left = tree_of(Path(machine.root))
    changed = {name for name in {*left, *lab.original} if left.get(name) != lab.original.get(name)}
    assert changed <= {"/etc/stratum", "/etc/stratum/stratum.yaml", "/proc/sys/kernel/random/boot_id"}
    assert (machine.links, machine.tables, machine.on) == ({}, {}, {"/swap.img": -2})


def check_after(lab: Lab, machine: NodeMachine, case: Case, settings: object) -> None:
    """The machine boots: it is whole, of one version and its settings; or not there yet, or no more."""
    try:
        started = boot(lab, machine)
    except StratumError as error:
        assert case.removes and error.reference == "uninstall-unfinished", error
        return
    if not started:
        assert case.removes or case.command[0] == "up"
        return
    version = check_node(machine, *case.between)
    if version != case.between[-1] or case.status == 20:
        assert read_settings(machine) == settings, "the settings of before"
        assert not machine.exists(kubeletconfig.BOOTSTRAP)


def survive(lab: Lab, case: Case, dies_at: int, loss: Optional[Loss]) -> bool:
    """Crash, boot, go on, take everything away; whether there was a change to crash at."""
    with node(lab, case.before) as machine:
        settings = read_settings(machine)
        machine.configure(case.body)
        where = lab.crash(machine, case.command, dies_at, loss)
        if where is None:
            return False
        try:
            if not lab.is_new(machine, "crashed", case, loss is None):
                return True
            if loss is not None:
                check_after(lab, machine, case, settings)
            answer = lab.ask(machine, *case.command)
            assert answer.status == case.status, answer
            if not case.removes:
                check_node(machine, case.between[-1])
                if not lab.is_new(machine, "finished"):
                    return True
                answer = lab.ask(machine, "uninstall")
                assert answer.status == 0, answer
            check_gone(lab, machine)
        except BaseException as error:
            raise AssertionError(f"{where}: {error!r}") from error
    return True


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_a_crash_before_any_change_leaves_a_whole_node_and_the_command_finishes(lab: Lab, name: str, form: str) -> None:
    crashed = zlib.crc32(f"{name} {form}".encode()) % EVERY
    begun = crashed
    while survive(lab, CASES[name], crashed, FORMS[form](crashed)):
        crashed += EVERY
    assert crashed > begun
