"""Small nodes in directory trees, in known states, and what must hold of a whole one.

``node_lab`` has a bare machine, one that runs version 1.0, and one that was upgraded from it to 2.0, with bundles of
both. Commands run on copies of them, as ``stratum`` runs them.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import os
import random
import re
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from stratum import lock
from stratum.errors import ExitCode, StratumError, system_error
from stratum.journal import Journal
from stratum.node.containerd import CONFIG_PATH, render_config
from stratum.node.layout import Layout
from stratum.node.stack import STARTED, Stack
from stratum.node.units import UNIT_CONTAINERD, UnitSpec, render_units
from stratum.node.versions import differences, read_record
from stratum.output import Output
from stratum.receipt import Receipt
from stratum.scripts import supervise
from stratum.scripts.context import Context
from stratum.system import HostPath
from tests.bundles import Bundle, Entry, Part, directory, snapshot, tar
from tests.fakes import Desk, Killed, make_tree, node_publisher, relative
from tests.faults import FaultyMachine, Loss, faulty_machine

SERVICE = "stratum.service"


def bundle_of(version: str, serial: int, containerd: str, *, program: bytes = b"") -> Bundle:
    """A node with one component of its own and one that every version shares."""
    daemon = b"#!/bin/sh\n# containerd " + version.encode() + b" " + program + b"\n"
    client = b"#!/bin/sh\n# ctr " + version.encode()
    names = ["bridge", "portmap"] + (["tuning"] if serial > 1 else [])
    plugins = [Entry(f"cni/bin/{name}", b"#!/bin/sh\n# " + name.encode()) for name in names]
    parts = [
        Part("containerd", [directory("bin"), Entry("bin/containerd", daemon), Entry("bin/ctr", client)], containerd),
        Part("runc", [directory("bin"), Entry("bin/runc", b"#!/bin/sh\n# runc\n")]),
        Part("cni-plugins", [directory("cni"), directory("cni/bin"), *plugins], version),
    ]
    layer = tar([Entry("etc/version", version.encode(), mode=0o644)])
    images = [(f"example.test/demo:{version}", [layer])]
    return node_publisher(version=version, serial=serial, parts=parts, images=images).build()


OLD = ("1.0", 1, "1.7.24")
NEW = ("2.0", 2, "2.1.3")


@dataclass
class State:
    """A machine at rest: its tree, hard links and all, and what it has in memory."""

    entries: list[tuple[str, os.stat_result, Any]]  # path below the top, parents first; content or target
    memory: dict[str, Any]

    @classmethod
    def of(cls, top: str, memory: dict[str, Any]) -> State:
        entries: list[tuple[str, os.stat_result, Any]] = []
        for base, directories, names in os.walk(top):
            for name in [*directories, *names]:
                path = os.path.join(base, name)
                info = os.lstat(path)
                content: Any = None
                if stat.S_ISLNK(info.st_mode):
                    content = os.readlink(path)
                elif stat.S_ISREG(info.st_mode):
                    content = Path(path).read_bytes()
                entries.append((path[len(top) + 1 :], info, content))
        return cls(entries, copy.deepcopy(memory))

    def restore(self, top: Path) -> None:
        top.mkdir()
        made: dict[int, str] = {}
        for name, info, content in self.entries:
            path = f"{top}/{name}"
            if isinstance(content, str):
                os.symlink(content, path)
            elif content is None:
                os.mkdir(path)
                os.chmod(path, stat.S_IMODE(info.st_mode))
            elif info.st_ino in made:
                os.link(made[info.st_ino], path)
            else:
                Path(path).write_bytes(content)
                os.chmod(path, stat.S_IMODE(info.st_mode))
                made[info.st_ino] = path


REMEMBERED = ("units", "images", "image_labels", "image_namespaces", "running", "journals", "tables", "clock")


@dataclass
class Answer:
    """What a command came to."""

    status: int
    text: str
    error: Optional[StratumError]
    said: str = ""  # on standard error


@dataclass
class Lab:
    """Makes machines in a known state, and runs commands on them."""

    directory: Path
    desk: Desk
    original: dict[str, Any] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    # What was followed to its end already: equal machines have equal futures, because no name is left to chance.
    followed: set[str] = field(default_factory=set)
    count: int = 0
    kind: type[FaultyMachine] = FaultyMachine
    remembered: tuple[str, ...] = REMEMBERED

    @contextlib.contextmanager
    def machine(self, state: str) -> Iterator[FaultyMachine]:
        self.count += 1
        here = self.directory / f"m{self.count}"
        here.mkdir()
        known = self.states[state]
        known.restore(here / "root")
        with faulty_machine(here / "root", here / "graveyard", self.kind) as machine:
            for name, value in copy.deepcopy(known.memory).items():
                setattr(machine, name, value)
            with drawn_names():
                yield machine
        shutil.rmtree(here)

    def keep(self, name: str, machine: FaultyMachine) -> None:
        self.states[name] = State.of(machine.root, {item: getattr(machine, item) for item in self.remembered})

    def is_new(self, machine: FaultyMachine, *words: object) -> bool:
        """Whether no machine like this one was met before under the same ``words``."""
        memory = [repr(getattr(machine, name)) for name in self.remembered]
        digest = hashlib.sha256(repr((words, memory)).encode())
        files: dict[bytes, str] = {}
        for base, directories, names in os.walk(machine.root):
            directories.sort()
            for name in sorted([*names, *directories]):
                path = os.path.join(base, name)
                info = os.lstat(path)
                digest.update(f"{path[len(machine.root) :]} {info.st_mode:o} ".encode())
                if stat.S_ISLNK(info.st_mode):
                    digest.update(os.readlink(path).encode())
                elif stat.S_ISREG(info.st_mode):
                    files.setdefault(f"{info.st_dev}:{info.st_ino}".encode(), path[len(machine.root) :])
                    if path != f"{machine.root}{STARTED}":
                        digest.update(Path(path).read_bytes())
        if machine.exists(STARTED):
            # It knows a program by its inode, which is another one on each machine: which file that is counts.
            noted = machine.read_bytes(STARTED)
            digest.update(re.sub(rb"\d+:\d+(?=:)", lambda found: files.get(found[0], "none").encode(), noted))
        found = digest.hexdigest()
        new = found not in self.followed
        self.followed.add(found)
        return new

    def run(self, machine: FaultyMachine, *words: str) -> int:
        """A command as ``stratum`` runs it: errors become exit codes, a death passes through."""
        return self.ask(machine, *words).status

    def crash(
        self, machine: FaultyMachine, command: Sequence[str], dies_at: int, loss: Optional[Loss]
    ) -> Optional[str]:
        """Run a command that is cut off before a change, and let the next process come; where that was.

        None when there was no such change. With a ``loss`` the power goes.
        """
        machine.arm(dies_at, loss)
        try:
            self.run(machine, *command)
        except Killed:
            pass
        if not machine.dead:
            return None
        where = f"before {machine.mutations[-1:]}, change {dies_at}"
        if loss is not None:
            where += f", lost: {machine.lose_power()}"
        machine.revive()
        return where

    def ask(self, machine: FaultyMachine, *words: str) -> Answer:
        """A command, and what it said. Names of bundles are those of the desk."""
        words = tuple(str(self.desk.directory / word) if word.endswith(".tar") else word for word in words)
        trust = ["--trust", str(self.desk.key)] if "--bundle" in words else []
        try:
            ran = self.desk.run(machine, words[0], *words[1:], *trust)
        except StratumError as error:
            return Answer(int(error.exit_code), "", error)
        except OSError as error:
            return Answer(int(ExitCode.FAILED), "", system_error(error))
        return Answer(ran.status, ran.text, None, ran.err.getvalue())


@contextlib.contextmanager
def drawn_names() -> Iterator[None]:
    """The names that nobody can guess are the same in each run."""
    source, urandom = random.Random(1), os.urandom
    os.urandom = source.randbytes
    try:
        yield
    finally:
        os.urandom = urandom


def boot(lab: Lab, machine: FaultyMachine) -> bool:
    """What systemd does at boot: start the supervisor, if it is enabled; whether it was."""
    wants = f"/etc/systemd/system/multi-user.target.wants/{SERVICE}"
    if not machine.exists(wants) or not machine.exists("/opt/stratum/pyz/current/stratum.pyz"):
        return False
    context = Context(machine, Output(stdout=io.StringIO(), stderr=io.StringIO()), str(lab.desk.archive), None)
    with lock.hold_lock(machine, "supervise"):
        supervise.bring_up(context, Stack(Layout(machine)))
    machine.units.setdefault(SERVICE, type(machine._unit(SERVICE))()).active = "active"
    return True


def find_strays(machine: FaultyMachine) -> list[str]:
    """Staging and hidden copies."""
    found = [str(path) for path in Path(machine.root).rglob(".*") if path.name.endswith(".tmp")]
    return found + [str(path) for path in Path(machine.root, "opt/stratum/.staging").glob("*")]


def check_whole(machine: FaultyMachine, allowed: tuple[str, ...]) -> str:
    """The link, the files, the units, the configuration and what runs are one version; which."""
    layout, receipt = Layout(machine), Receipt.load(machine)
    version = layout.current()
    assert version in allowed
    record = read_record(layout, version)
    assert record is not None
    assert differences(receipt, layout.version_dir(version)) == []
    for unit in render_units(UnitSpec(layout.bin_dir, CONFIG_PATH)):
        assert machine.read_bytes(unit.path) == unit.content
    config = render_config(str(record.component_version("containerd")))
    assert machine.read_bytes(CONFIG_PATH) == config
    for name in machine.listdir(layout.version_dir(version) / "cni/bin"):
        assert machine.read_bytes(HostPath("/opt/cni/bin") / name).endswith(name.encode())
    for name in machine.listdir("/opt/cni/bin"):
        assert machine.exists(f"/opt/cni/bin/{name}"), f"the link {name} dangles"
    assert machine.active(UNIT_CONTAINERD)
    program, started_with, _ = machine.running[UNIT_CONTAINERD]
    assert program == machine.read_bytes(layout.bin_dir / "containerd")
    assert started_with == config
    assert f"example.test/demo:{version}" in machine.images
    assert Journal(machine).unfinished() is None
    assert find_strays(machine) == []
    return version


def tree_of(root: Path) -> dict[str, Any]:
    """The tree without times, and without /run, which no boot keeps."""
    found = relative(root, snapshot(root))
    return {
        name: (mode, owner, group, extra)
        for name, (mode, owner, group, _, extra) in found.items()
        if not name.startswith("/run/")
    }


@contextlib.contextmanager
def directory_in_memory() -> Iterator[Path]:
    """A directory of our own, in memory where programs can be run from there: all of this is small files."""
    memory = Path("/dev/shm")
    fit = memory.is_dir() and os.access(memory, os.W_OK) and not os.statvfs(memory).f_flag & os.ST_NOEXEC
    with tempfile.TemporaryDirectory(prefix="stratum-faults-", dir=memory if fit else None) as path:
        yield Path(path).resolve()


@contextlib.contextmanager
def node_lab() -> Iterator[Lab]:
    """A laboratory with its states; the process's own signal handlers are put back."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with directory_in_memory() as top:
        try:
            yield make_lab(top)
        finally:
            for number, handler in signals.items():
                signal.signal(number, handler)


def make_lab(top: Path) -> Lab:
    (top / "desk").mkdir()
    lab = Lab(top, Desk(top / "desk"))
    lab.desk.bundle(bundle_of(*OLD), "old.tar")
    lab.desk.bundle(bundle_of(*NEW), "new.tar")
    lab.desk.bundle(bundle_of(*NEW, program=b"refuses"), "bad.tar")
    tree = make_tree(top / "bare", live=True)
    nft = tree / "usr/bin/nft"
    nft.write_text("#!/bin/sh\n")
    nft.chmod(0o755)
    lab.original = tree_of(tree)
    lab.states["bare"] = State.of(str(tree), {})
    for state, before, command in [
        ("old", "bare", ("up", "--bundle", "old.tar")),
        ("new", "old", ("upgrade", "--bundle", "new.tar")),
    ]:
        with lab.machine(before) as machine:
            assert lab.run(machine, *command) == 0
            lab.keep(state, machine)
    return lab
