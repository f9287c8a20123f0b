"""`up` and `uninstall` interrupted at any moment, by real signals at seeded random times."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.lab.machine import Result
from tests.lab.node import PYZ, USB, Node, installed
from tests.lab.nspawn import NspawnMachine
from tests.lab.snapshot import Snapshot, check_same, snapshot

MachineNode = Node[NspawnMachine]

ROUNDS = 12
SEED = 20260


@pytest.fixture(scope="module")
def before(bare: MachineNode) -> Snapshot:
    """The machine on which nothing was ever done."""
    return snapshot(bare.machine)


@pytest.fixture(scope="module")
def undisturbed(bare: MachineNode, before: Snapshot) -> tuple[float, dict[str, str], float]:
    """The seconds that `up` takes on this machine now, what it installs, and the seconds of `uninstall`."""
    up = bare.stratum("up", "--quiet").seconds
    made = installed(snapshot(bare.machine))
    bare.settle()
    uninstall = bare.stratum("uninstall", "--quiet").seconds
    check_same(before, snapshot(bare.machine))
    return up, made, uninstall


def delays(name: str, length: float, rounds: int) -> Iterator[float]:
    """Moments spread over a run: one at random in each equal part of it, the same in each session."""
    chance = random.Random(f"{SEED} {name}")
    for number in range(rounds):
        yield length * (number + chance.random()) / rounds


def interrupted(node: MachineNode, words: list[str], number: int, delay: float) -> Result:
    """Run the pyz and send it a signal after ``delay`` seconds; its status is negative if a signal ended it."""
    process = node.machine.popen([PYZ, *words], cwd=USB, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(delay)
    if process.poll() is None:
        node.machine.signal_to(process, number)
    out, err = process.communicate(timeout=120)
    return Result((*words, f"signal {number} after {delay:.2f} s"), process.returncode, out, err, delay)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_up_that_is_interrupted_leaves_nothing_or_a_whole_node(
    bare: MachineNode, before: Snapshot, undisturbed: tuple[float, dict[str, str], float], number: signal.Signals
) -> None:
    cut = 0
    for delay in delays(f"up {number}", undisturbed[0], ROUNDS):
        done = interrupted(bare, ["up"], number, delay)
        # A process that a signal ended has that status for a shell: 128 and the number.
        assert done.status in (0, 128 + number, -number), done.describe()
        assert "Traceback" not in done.stderr, done.describe()
        cut += done.status != 0
        status = bare.stratum("status", "--wait", "10", check=False).status
        if done.status == 0:
            assert status == 0, done.describe()
        if status != 5:
            # Not installed has its own status; what is installed is all there.
            assert status == 0, done.describe()
            bare.stratum("uninstall", "--quiet")
        try:
            check_same(before, snapshot(bare.machine))
        except AssertionError as error:
            raise AssertionError(f"{done.describe()}\n{error}") from None
    assert cut >= ROUNDS / 2, "most of the signals hit something"


def test_an_up_that_is_killed_is_made_whole_by_the_next_or_removed_by_uninstall(
    bare: MachineNode, before: Snapshot, undisturbed: tuple[float, dict[str, str], float]
) -> None:
    length, wanted, _ = undisturbed
    for round_, delay in enumerate(delays("up kill", length, ROUNDS)):
        done = interrupted(bare, ["up"], signal.SIGKILL, delay)
        if round_ % 3 != 2:
            again = bare.stratum("up")
            assert installed(snapshot(bare.machine)) == wanted, f"{done.describe()}\n{again.describe()}"
            assert bare.json("status", "--wait", "10")["ready"], done.describe()
        bare.stratum("uninstall", "--quiet")
        try:
            check_same(before, snapshot(bare.machine))
        except AssertionError as error:
            raise AssertionError(f"{done.describe()}\n{error}") from None


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["SIGINT", "SIGTERM", "SIGKILL"]
)
def test_an_uninstall_that_is_interrupted_is_finished_by_the_next(
    bare: MachineNode, before: Snapshot, undisturbed: tuple[float, dict[str, str], float], number: signal.Signals
) -> None:
    for delay in delays(f"uninstall {number}", undisturbed[2], ROUNDS // 3):
        bare.stratum("up", "--quiet")
        bare.settle()
        done = interrupted(bare, ["uninstall"], number, delay)
        assert done.status in (0, 128 + number, -number), done.describe()
        assert "Traceback" not in done.stderr, done.describe()
        bare.stratum("uninstall", "--quiet")
        try:
            check_same(before, snapshot(bare.machine))
        except AssertionError as error:
            raise AssertionError(f"{done.describe()}\n{error}") from None
