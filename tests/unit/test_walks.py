"""Commands in any order, crashes in the middle of them, and files that somebody deletes or replaces in between.

Each walk is drawn from its number. ``STRATUM_TEST_WALKS`` says how many there are.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

import pytest

from stratum.errors import StratumError
from stratum.node.layout import Layout
from tests.fakes import Killed
from tests.faults import FaultyMachine, Loss
from tests.nodes import Lab, boot, bundle_of, check_whole, node_lab, tree_of

WALKS = int(os.environ.get("STRATUM_TEST_WALKS", "60"))
VERSIONS = {"1.0": "old.tar", "2.0": "new.tar", "3.0": "newest.tar"}
COMMANDS = [
    ("up", "--bundle", "old.tar"),
    ("up",),
    ("upgrade", "--bundle", "new.tar"),
    ("upgrade", "--bundle", "newest.tar"),
    ("upgrade", "--bundle", "bad.tar"),
    ("upgrade", "--bundle", "new.tar", "--prepare-only"),
    ("upgrade", "--bundle", "old.tar", "--allow-downgrade"),
    ("upgrade", "--to", "2.0"),
    ("rollback",),
    ("rollback", "1.0"),
    ("prune", "--keep", "1"),
    ("prune",),
    ("remove", "1.0"),
    ("remove", "2.0"),
    ("stop",),
    ("start",),
    ("restart",),
    ("uninstall",),
]
OURS = ("opt/stratum", "etc/systemd/system", "etc/stratum", "etc/cni/net.d", "opt/cni/bin", "var/lib/stratum/images")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with node_lab() as lab:
        lab.desk.bundle(bundle_of("3.0", 3, "2.1.3"), "newest.tar")
        yield lab


class Walk:
    """One walk: where it is, and what happened on the way."""

    def __init__(self, lab: Lab, machine: FaultyMachine, draw: random.Random) -> None:
        self.lab, self.machine, self.draw = lab, machine, draw
        self.story: list[str] = []
        self.damaged: set[str] = set()

    def damage(self) -> None:
        """Somebody deletes or replaces a file of ours; not the links by which the node is found."""
        files = [
            path
            for top in OURS
            for path in sorted(Path(self.machine.root, top).rglob("*stratum*" if top.startswith("etc/") else "*"))
            if not path.is_dir() and path.name != "current" and "wants" not in path.parent.name
        ]
        if not files:
            return
        path = self.draw.choice(files)
        path.unlink()
        if self.draw.random() < 0.5:
            path.write_text("somebody else's\n")
        name = str(path.relative_to(self.machine.root))
        self.damaged.add(f"/{name}")
        self.story.append(f"damage {name}")

    def step(self) -> None:
        """A command, perhaps with a crash in it, and then the boot."""
        command = self.draw.choice(COMMANDS)
        crash = self.draw.randint(0, self.draw.choice([30, 120, 250])) if self.draw.random() < 0.6 else None
        losses = [None, Loss(), Loss(self.draw.getrandbits(30)), Loss(self.draw.getrandbits(30), 0.1)]
        loss: Optional[Loss] = self.draw.choice(losses)
        self.story.append(f"{' '.join(command)}, crash {crash}, {loss}")
        self.machine.arm(crash, loss)
        with contextlib.suppress(Killed):
            self.story.append(f"status {self.lab.run(self.machine, *command)}")
        died = self.machine.dead
        if died and loss is not None:
            self.story.append(f"lost {self.machine.lose_power()}")
        self.machine.revive()
        if died and loss is not None:
            self.boot()

    def boot(self) -> None:
        try:
            if boot(self.lab, self.machine) and not self.damaged:
                self.story.append(f"booted {check_whole(self.machine, tuple(VERSIONS))}")
        except StratumError as error:
            assert self.damaged or error.reference == "uninstall-unfinished", error

    def repair(self) -> None:
        """What an admin does with a node that may be damaged: the version that is active, from its bundle.

        Not where a file of somebody else is in the place of one of ours, which is left alone.
        """
        self.lab.run(self.machine, "prune", "--keep", "9")  # finishes what was cut off
        try:
            version = Layout(self.machine).current()
        except StratumError:
            return
        if version is None or any(path.startswith(("/etc/", "/opt/cni/")) for path in self.damaged):
            return
        answer = self.lab.ask(self.machine, "up", "--bundle", VERSIONS[version])
        self.story.append(f"repair of {version}: {answer}")
        if answer.error is None:
            check_whole(self.machine, (version,))
        else:
            assert answer.error.reference in ("uninstall-unfinished", "foreign-file", "version-differs")

    def leave(self) -> None:
        """Uninstall: nothing is left but what somebody else put there."""
        answer = self.lab.ask(self.machine, "uninstall")
        self.story.append(f"uninstall: {answer}")
        assert answer.status == 0
        found = tree_of(Path(self.machine.root))
        theirs = {str(parent) for name in self.damaged for parent in (Path(name), *Path(name).parents)}
        left = {name for name, value in found.items() if self.lab.original.get(name) != value} - theirs - {"/"}
        assert left == set()


@pytest.mark.parametrize("number", range(WALKS))
def test_whatever_is_done_a_boot_finds_a_whole_node_and_uninstall_the_bare_machine(lab: Lab, number: int) -> None:
    draw = random.Random(number)
    with lab.machine(draw.choice(["bare", "old", "new"])) as machine:
        walk = Walk(lab, machine, draw)
        try:
            for _ in range(draw.randint(3, 9)):
                if number % 2 and draw.random() < 0.25:
                    walk.damage()
                walk.step()
            walk.repair()
            walk.leave()
        except (AssertionError, StratumError, OSError) as error:
            raise AssertionError("\n".join([repr(error), *walk.story])) from error
