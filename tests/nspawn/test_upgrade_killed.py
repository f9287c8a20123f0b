"""An upgrade between two real containerds that is killed at random moments: the node is wholly old or wholly new.

The moments come from a seed, which is printed: ``STRATUM_SEED=… pytest …`` runs the same ones again, as far as a
machine can be run again. ``STRATUM_KILLS`` is how many.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Machines
from tests.lab import roots
from tests.lab.facts import look
from tests.lab.image import Image
from tests.lab.machine import wait_until
from tests.lab.node import PYZ, bring
from tests.lab.nspawn import NspawnMachine
from tests.lab.releases import releases
from tests.nspawn.upgrading import Upgrading

KILLS = int(os.environ.get("STRATUM_KILLS", "50"))
SIGNALS = 10
VERSIONS = ("1.0", "2.0")


@pytest.fixture(scope="module")
def host(module_machines: Machines, pyz: Path, demo_image: Image) -> Upgrading:
    """A node with release 1.0."""
    released = releases(pyz, demo_image)
    machine = module_machines.boot(NspawnMachine(roots.root_directory(roots.UNSTABLE), "killed", size="4g"))
    node = bring(machine, pyz, released.publisher.public, None)
    host = Upgrading(node, released)
    host.stratum("up", "--bundle", host.bundle("1.0"))
    node.settle()
    host.check("1.0")
    return host


@pytest.fixture(scope="module")
def lengths(host: Upgrading) -> dict[str, Length]:
    """How long an upgrade away from each of the two versions takes."""
    found = {version: measure(host, version) for version in VERSIONS}
    print(f"lengths: {found}")
    return found


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    """A source of random moments; the report of a failure says how to have the same ones again."""
    seed = int(os.environ.get("STRATUM_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"STRATUM_SEED={seed}")
    return random.Random(seed)


class Run:
    """A run of ``stratum upgrade`` from a bundle, and what the journal says of it meanwhile."""

    def __init__(self, host: Upgrading, version: str) -> None:
        self._machine = host.machine
        argv = [PYZ, "upgrade", "--allow-downgrade", "--bundle", host.bundle(version)]
        self._before = self.journal()["identifier"]
        self._begin = time.monotonic()
        self._process = host.machine.popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def journal(self) -> dict[str, Any]:
        """The journal, read from outside: no command runs in the machine for it."""
        place = self._machine.path_in_machine("/var/lib/stratum/journal.json")
        found: dict[str, Any] = json.loads(place.read_text())
        return found

    @property
    def age(self) -> float:
        """The seconds since its start."""
        return time.monotonic() - self._begin

    def wait_for(self, step: str) -> None:
        """Wait until it is at a step of the switch."""

        def there() -> bool:
            journal = self.journal()
            return self.ended or (journal["identifier"] != self._before and journal["step"] == step)

        wait_until(f"the upgrade reaches the step {step}", there, 120, pause=0.005)

    def wait_for_proof(self) -> None:
        """Wait until it says that the new version is ready."""
        wait_until("the new version is proven", lambda: self.ended or self.journal()["proven"], 120, pause=0.001)

    def wrote(self) -> bool:
        """Whether the journal is of this run."""
        return bool(self.journal()["identifier"] != self._before)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._machine.signal_to(self._process, number)

    def end(self, timeout: float = 120) -> tuple[int, str]:
        """Wait for the end; return the exit status and what was said."""
        said, _ = self._process.communicate(timeout=timeout)
        return self._process.returncode, said.decode()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None


@dataclass(frozen=True)
class Length:
    """How long an upgrade takes, in seconds: until the old version stops, until the new one answers, and in whole."""

    prepared: float
    switched: float
    whole: float


def measure(host: Upgrading, version: str) -> Length:
    """Do a whole upgrade away from ``version`` and see how long it takes."""
    forget_other(host, version)
    run = Run(host, other(version))
    run.wait_for("stop")
    prepared = run.age
    run.wait_for("ready")
    switched = run.age
    status, said = run.end()
    assert status == 0, said
    return Length(prepared, switched, run.age)


def interrupt(host: Upgrading, target: str, length: Length, chance: random.Random, number: signal.Signals) -> Run:
    """Begin an upgrade and send it a signal at a random moment.

    Four of ten moments lie anywhere in it. As many lie in the switch itself, which is short and begins when the machine
    comes to it, and the rest around the proof that the new version is ready.
    """
    run = Run(host, target)
    kind = chance.choices(("anywhere", "switch", "proof"), (4, 4, 2))[0]
    if kind == "anywhere":
        moment = chance.uniform(0, length.switched)
    elif kind == "switch":
        run.wait_for("stop")
        moment = run.age + chance.uniform(0, length.switched - length.prepared)
    else:
        run.wait_for("ready")
        if chance.random() < 0.3:
            moment = run.age + chance.uniform(0, length.whole - length.switched)
        else:
            run.wait_for_proof()
            moment = run.age + chance.expovariate(100)
    time.sleep(max(0.0, moment - run.age))
    run.send(number)
    return run


def other(version: str) -> str:
    return VERSIONS[1 - VERSIONS.index(version)]


def forget_other(host: Upgrading, version: str) -> None:
    """Remove the version that is not active, so that the next upgrade has everything to do."""
    if other(version) in look(host.machine).versions:
        host.stratum("remove", other(version))


def expected(journal: dict[str, Any], source: str, target: str) -> str:
    """The version that a node must be after the end of a run that left this journal: forward from the proof on."""
    if journal["name"] == "program":
        return target
    return target if journal["name"] == "upgrade" and (journal["proven"] or journal["state"] == "done") else source


def check_told(host: Upgrading, journal: dict[str, Any], target: str) -> None:
    """``status`` tells of the switch that was cut off, unless the supervisor has put it right meanwhile."""
    if journal["name"] != "upgrade" or journal["state"] != "running":
        return
    status = host.stratum("status", check=False)
    if json.loads(host.machine.read("/var/lib/stratum/journal.json")) == journal:
        assert status.status == 1, status.describe()
        assert f"upgrade to {target} at step {journal['step']}" in status.stdout, status.describe()


def check_status(host: Upgrading) -> None:
    """The node is ready, and every file of it is as it was written."""
    status = host.node.json("status")
    assert (status["ready"], status["drift"], status["unfinished"]) == (True, [], None), status


@pytest.mark.timeout(3600)  # seconds; fifty upgrades, and a loaded machine is several times slower
def test_a_killed_upgrade_leaves_the_old_version_or_the_new_one_whole(
    host: Upgrading, lengths: dict[str, Length], chance: random.Random
) -> None:
    current = host.check(*VERSIONS).current
    seen: collections.Counter[str] = collections.Counter()
    forward = 0
    for number in range(KILLS):
        target = other(current)
        if chance.random() < 0.5:
            forget_other(host, current)
        run = interrupt(host, target, lengths[current], chance, signal.SIGKILL)
        moment = run.age
        status, _ = run.end()
        journal, mine = run.journal(), run.wrote()
        where = f"{journal['name']}: {journal['step'] or journal['state']}" if mine else "before it wrote anything"
        wanted = expected(journal, current, target) if mine else current
        way = ("start", "boot", "start", "boot", "upgrade", "boot")[number % 6]
        print(f"{number}: {current} -> {target}, {moment:.2f} s, {where} (status {status}), then {way}: {wanted}")
        seen[where] += 1
        forward += wanted == target
        if way == "boot":
            host.machine.power_cut()
            host.node.settle()
        else:
            check_told(host, journal, target)
            if way == "start":
                host.stratum("start")
            else:
                host.upgrade(target, "--allow-downgrade")
                wanted = target
        assert host.check(wanted).current == wanted
        if number % 3 == 0:
            # It looks at the digest of every file, which takes a while.
            check_status(host)
        current = wanted
    print(f"killed at: {dict(seen)}")
    # A good part of them hit the switch itself, and not always at the same step.
    switch = {where: count for where, count in seen.items() if where.startswith("upgrade: ")}
    assert sum(switch.values()) >= KILLS // 4, seen
    assert len(switch) >= 3, seen
    assert forward >= 1, seen


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_upgrade_goes_back_by_itself(
    host: Upgrading, lengths: dict[str, Length], chance: random.Random, number: signal.Signals
) -> None:
    current = host.check(*VERSIONS).current
    for turn in range(SIGNALS):
        target = other(current)
        if chance.random() < 0.5:
            forget_other(host, current)
        run = interrupt(host, target, lengths[current], chance, number)
        moment = run.age
        # A second one, as an impatient admin sends it, cuts nothing off.
        time.sleep(0.1)
        if not run.ended:
            run.send(number)
        status, said = run.end()
        facts = look(host.machine)
        print(f"{turn}: {current} -> {target}, {moment:.2f} s: exit status {status}, now {facts.current}")
        assert status in (0, 128 + number, -number), said
        # What comes when the switch is over finds the new version.
        over = status == 0 or (run.wrote() and expected(facts.journal, current, target) == target)
        assert facts.current == (target if over else current), said
        assert (facts.active, facts.program) == ("active", f"/opt/stratum/node/{facts.current}/bin/containerd"), facts
        assert facts.settled, (facts, said)
        host.stratum("start")
        current = host.check(facts.current).current
    check_status(host)
