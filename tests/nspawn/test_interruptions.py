"""`up` and `uninstall` interrupted by real signals: in each of their steps, at a moment drawn from a seed.

Each step is hit once, by one of the three signals in turn. ``STRATUM_TEST_SEED`` draws other moments and turns.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.lab.machine import Result, wait_until
from tests.lab.node import PYZ, USB, Node, installed
from tests.lab.nspawn import NspawnMachine
from tests.lab.snapshot import Snapshot, check_same, snapshot

MachineNode = Node[NspawnMachine]

SEED = int(os.environ.get("STRATUM_TEST_SEED", "20260"))
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
# Before its first step a command reads what is there; it says nothing meanwhile.
BEGINNING = ""


@dataclass(frozen=True)
class Moment:
    """So many seconds after a command has said that a step begins."""

    step: str
    delay: float


@dataclass(frozen=True)
class Undisturbed:
    """What the commands do on this machine when nobody interrupts them."""

    up: dict[str, float]  # seconds by step
    installed: dict[str, str]
    uninstall: dict[str, float]


class Running:
    """The pyz at work, and what it has said so far."""

    def __init__(self, node: MachineNode, words: tuple[str, ...]) -> None:
        self.node, self.words = node, words
        # Files, not pipes: they can be read while it runs and when it has ended.
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 -- closed in end()
        self._begin = time.monotonic()
        self.process = node.machine.popen([PYZ, *words], cwd=USB, stdout=self._out, stderr=self._err)

    @property
    def said(self) -> list[str]:
        """The steps that it has begun."""
        text = os.pread(self._err.fileno(), 1 << 20, 0).decode(errors="replace")
        return [line.partition(":")[0] for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_for(self, step: str) -> None:
        """Wait until it has begun a step, or has ended."""
        if step != BEGINNING:
            wait_until(
                f"{self.words} begins {step}", lambda: step in self.said or self.process.poll() is not None, 120, 0.005
            )

    def lengths(self) -> dict[str, float]:
        """Wait for its end; the seconds that each step took."""
        begun = {BEGINNING: self._begin}
        while self.process.poll() is None:
            for step in self.said:
                begun.setdefault(step, time.monotonic())
            time.sleep(0.002)
        moments = [*begun.values(), time.monotonic()]
        return {step: after - moments[number] for number, (step, after) in enumerate(zip(begun, moments[1:]))}

    def end(self, name: str = "") -> Result:
        """Wait for its end; the status is negative if a signal ended it."""
        status = self.process.wait(timeout=120)
        with self._out, self._err:
            self._out.seek(0)
            self._err.seek(0)
            out, err = self._out.read(), self._err.read()
        return Result((*self.words, name), status, out, err, time.monotonic() - self._begin)


def undisturbed_run(node: MachineNode, *words: str) -> dict[str, float]:
    """Run a command to its end; the seconds of each of its steps."""
    run = Running(node, words)
    lengths = run.lengths()
    done = run.end()
    assert done.status == 0, done.describe()
    return lengths


def interrupted(node: MachineNode, command: str, number: signal.Signals, moment: Moment) -> Result:
    """Run the pyz and send it a signal at a moment."""
    run = Running(node, (command,))
    run.wait_for(moment.step)
    time.sleep(moment.delay)
    if run.process.poll() is None:
        node.machine.signal_to(run.process, number)
    return run.end(f"{number.name} {moment.delay:.3f} s after the begin of {moment.step or 'the command'}")


def moments(command: str, lengths: dict[str, float], number: signal.Signals) -> Iterator[Moment]:
    """A moment in each step that it is this signal's turn for, the same ones for the same seed."""
    turn = random.Random(f"{SEED} {command}").randrange(len(SIGNALS))
    for place, (step, length) in enumerate(lengths.items()):
        chance = random.Random(f"{SEED} {command} {step}").random()
        if SIGNALS[(place + turn) % len(SIGNALS)] == number:
            yield Moment(step, chance * length)


@pytest.fixture(scope="module")
def before(bare: MachineNode) -> Snapshot:
    """The machine on which nothing was ever done."""
    return snapshot(bare.machine)


@pytest.fixture(scope="module")
def undisturbed(bare: MachineNode, before: Snapshot) -> Undisturbed:
    """How long the steps take on this machine now, and what is installed in between."""
    up = undisturbed_run(bare, "up")
    made = installed(snapshot(bare.machine))
    bare.settle()
    uninstall = undisturbed_run(bare, "uninstall")
    check_same(before, snapshot(bare.machine))
    return Undisturbed(up, made, uninstall)


def check_nothing_left(node: MachineNode, before: Snapshot, done: Result) -> None:
    """Nothing is left of what was interrupted."""
    try:
        check_same(before, snapshot(node.machine))
    except AssertionError as error:
        raise AssertionError(f"{done.describe()}\n{error}") from None


def name_of(number: signal.Signals) -> str:
    return number.name


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=name_of)
def test_an_up_that_is_interrupted_leaves_nothing_or_a_whole_node(
    bare: MachineNode, before: Snapshot, undisturbed: Undisturbed, number: signal.Signals
) -> None:
    rounds = cut = 0
    for moment in moments("up", undisturbed.up, number):
        done = interrupted(bare, "up", number, moment)
        # A process that a signal ended has that status for a shell: 128 and the number.
        assert done.status in (0, 128 + number, -number), done.describe()
        assert "Traceback" not in done.stderr, done.describe()
        rounds += 1
        cut += done.status != 0
        status = bare.stratum("status", "--wait", "60", check=False).status
        if done.status == 0:
            assert status == 0, done.describe()
        if status != 5:
            # Not installed has its own status; what is installed is all there.
            assert status == 0, done.describe()
            bare.stratum("uninstall", "--quiet")
        check_nothing_left(bare, before, done)
    assert cut >= rounds / 2 >= 2, "most of the signals hit something"


def test_an_up_that_is_killed_is_made_whole_by_the_next_or_removed_by_uninstall(
    bare: MachineNode, before: Snapshot, undisturbed: Undisturbed
) -> None:
    for number, moment in enumerate(moments("up", undisturbed.up, signal.SIGKILL)):
        done = interrupted(bare, "up", signal.SIGKILL, moment)
        if number % 3 != 2:
            again = bare.stratum("up")
            assert installed(snapshot(bare.machine)) == undisturbed.installed, f"{done.describe()}\n{again.describe()}"
            assert bare.json("status", "--wait", "60")["ready"], done.describe()
        bare.stratum("uninstall", "--quiet")
        check_nothing_left(bare, before, done)


@pytest.mark.parametrize("number", SIGNALS, ids=name_of)
def test_an_uninstall_that_is_interrupted_is_finished_by_the_next(
    bare: MachineNode, before: Snapshot, undisturbed: Undisturbed, number: signal.Signals
) -> None:
    rounds = 0
    for moment in moments("uninstall", undisturbed.uninstall, number):
        bare.stratum("up", "--quiet")
        bare.settle()
        done = interrupted(bare, "uninstall", number, moment)
        assert done.status in (0, 128 + number, -number), done.describe()
        assert "Traceback" not in done.stderr, done.describe()
        bare.stratum("uninstall", "--quiet")
        check_nothing_left(bare, before, done)
        rounds += 1
    assert rounds >= 2
