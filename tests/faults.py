"""A machine that fails at a chosen moment: the process dies, or the power goes.

Every change that Stratum makes is counted: each file created, each write, rename, link, unlink, directory, mode,
sync and command. ``dies_at`` chooses one, before which everything stops; a write is cut in its middle. When the
process dies, what it wrote stays. When the power goes, what was not synced may be lost:

* the content of a file since its last fsync is gone, wholly or from some point on;
* a directory entry that was made, moved or removed since the last sync of its directory may be as before. A rename is
  one change; it is on the disk when the directory that it leads into is. Which of the changes are lost is drawn from
  a seed (or all of them are, without one), so that no change is kept that needs a lost one.

The model is harsher than ext4, XFS and btrfs, which write such changes in order.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, Callable, Optional, cast

from stratum.system import Host, HostPath, PathLike
from tests.fakes import Killed, MachineHost, Unit

__all__ = ["FaultyMachine", "Loss"]

Name = tuple[int, str]  # a directory's inode and a name in it


@dataclass
class _Change:
    """A change of directory entries (or of a mode) that is not on the disk yet."""

    what: str
    names: frozenset[Name]
    commits: frozenset[int]  # it is on the disk when one of these directories is
    undo: Callable[[], None]
    makes: int = 0  # the inode of the directory that it made
    inside: frozenset[int] = frozenset()  # the directories that it needs


@dataclass
class Loss:
    """How much is lost when the power goes: all that was not synced, or what ``seed`` draws, in the given share."""

    seed: Optional[int] = None
    share: float = 0.5

    def lost(self, changes: int) -> list[bool]:
        if self.seed is None:
            return [True] * changes
        source = random.Random(self.seed)
        return [source.random() < self.share for _ in range(changes)]

    def kept_bytes(self, synced: int, size: int) -> int:
        if self.share == 0:
            return size
        return synced if self.seed is None else random.Random(self.seed).randint(synced, size)


class _File:
    """A new file: writes are counted, cut in the middle at the end, and remembered until they are synced."""

    def __init__(self, machine: FaultyMachine, descriptor: int, name: str) -> None:
        self._machine, self._descriptor, self._name = machine, descriptor, name

    def write(self, data: Any) -> int:
        try:
            self._machine.mutation(f"write {self._name}")
        except Killed:
            if self._machine.just_died:
                os.write(self._descriptor, bytes(data)[: len(data) // 2])
            raise
        os.write(self._descriptor, data)
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered."""

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class FaultyMachine(MachineHost):
    """A live machine in a directory tree that fails before the change number ``dies_at``.

    ``loss`` says that the power goes then. ``graveyard`` is a directory beside the tree, on the same file
    system. A program of a version behaves as its content says: with ``refuses`` its unit does not start, with
    ``dies`` it ends by itself a moment later, with ``silent`` it never answers, with ``broken`` it cannot be run.
    """

    loss: Optional[Loss] = None
    graveyard: Path = Path("/nonexistent")
    running: dict[str, tuple[bytes, bytes, bytes]] = field(default_factory=dict)
    journals: dict[str, list[str]] = field(default_factory=dict)
    tables: dict[str, str] = field(default_factory=dict)
    just_died: bool = False
    _changes: list[_Change] = field(default_factory=list)
    _unsynced: dict[int, tuple[int, int]] = field(default_factory=dict)  # inode: descriptor, bytes on the disk
    _directories: dict[int, int] = field(default_factory=dict)
    _buried: int = 0
    _plain: set[str] = field(default_factory=set)  # directories that are reached through no link
    _programs: dict[str, Optional[str]] = field(default_factory=dict)  # where they were found

    # -- counting -----------------------------------------------------------------------------------

    def mutation(self, what: str) -> None:
        was_dead = self.dead
        try:
            super().mutation(what)
        except Killed:
            self.just_died = not was_dead
            raise

    def arm(self, dies_at: Optional[int], loss: Optional[Loss] = None) -> None:
        """Count from here on, with everything so far on the disk."""
        self._settle_all()
        self.mutations.clear()
        self.commands.clear()
        self.dies_at, self.loss, self.dead = dies_at, loss, False

    def _resolve(self, text: str, follow: bool) -> str:
        """As the host does it, remembering where no link is in the way: these tests ask for little else."""
        head, _, name = text.rpartition("/")
        if head in self._plain and name not in ("", ".", ".."):
            here = f"{self.root}{head}/{name}"
            if not (follow and os.path.islink(here)):
                return here
        real = super()._resolve(text, follow)
        # What /sys does not have it never gets here.
        if real == self.root + text and (os.path.isdir(self.root + head) or text.startswith("/sys/")):
            self._plain.add(head)
        return real

    def which(self, name: str) -> Optional[str]:
        """As the host does it, once for each program of the host's: they stay as they are here. Ours come and go."""
        if "/" in name:
            return super().which(name)
        if name not in self._programs:
            self._programs[name] = super().which(name)
        return self._programs[name]

    def _forget_plain(self, path: PathLike) -> None:
        if self._plain:
            below = f"{path}/"
            self._plain = {known for known in self._plain if not f"{known}/".startswith(below)}

    # -- the record of what is not on the disk ------------------------------------------------------

    def _directory(self, path: PathLike) -> int:
        """A descriptor of a directory that stays right when the directory is moved."""
        real = self.real(path, follow=True)
        inode = os.stat(real).st_ino
        if inode not in self._directories:
            self._directories[inode] = os.open(real, os.O_RDONLY | os.O_DIRECTORY)
        return inode

    def _place(self, path: PathLike) -> Name:
        wanted = HostPath(str(path))
        return self._directory(wanted.parent), wanted.name

    def _bury(self, directory: int, name: str) -> str:
        """Keep what an entry leads to, so that it can come back."""
        self._buried += 1
        kept = str(self.graveyard / str(self._buried))
        here = self._directories[directory]
        if stat.S_ISDIR(os.lstat(name, dir_fd=here).st_mode):
            os.rename(name, kept, src_dir_fd=here)
        else:
            os.link(name, kept, src_dir_fd=here, follow_symlinks=False)
        return kept

    def _raise_buried(self, kept: str, directory: int, name: str) -> None:
        os.rename(kept, name, dst_dir_fd=self._directories[directory])

    def _remember(self, what: str, names: list[Name], undo: Callable[[], None], **more: Any) -> None:
        into = names[-1][0] if names else 0
        inside = frozenset(directory for directory, _ in names)
        commits = frozenset({into}) if names else more.pop("commits")
        self._changes.append(_Change(what, frozenset(names), commits, undo, inside=inside, **more))

    def _commit(self, change: _Change) -> None:
        """A change is on the disk, and with it the earlier ones of the same names."""
        if change not in self._changes:
            return
        position = self._changes.index(change)
        earlier = self._changes[:position]
        self._changes.remove(change)
        for other in reversed(earlier):
            # What moves into a new directory takes the directory along: journals keep that order.
            if other.names & change.names or (len(change.names) > 1 and other.makes in change.inside):
                self._commit(other)

    def _settle_all(self) -> None:
        self._changes.clear()
        for descriptor, _ in self._unsynced.values():
            os.close(descriptor)
        self._unsynced.clear()

    # -- changes ------------------------------------------------------------------------------------

    def mkdir(self, path: PathLike, mode: int = 0o755) -> None:
        self.mutation(f"mkdir {path}")
        self._make_directory(path, mode)

    def _make_directory(self, path: PathLike, mode: int = 0o755) -> None:
        Host.mkdir(self, path, mode)
        if self.loss is None:
            return
        directory, name = self._place(path)
        made = self._directory(path)

        def undo() -> None:
            shutil.rmtree(os.path.join(f"/proc/self/fd/{self._directories[directory]}", name))

        self._remember(f"mkdir {path}", [(directory, name)], undo, makes=made)

    def open_new(self, path: PathLike, mode: int) -> BinaryIO:
        self.mutation(f"create {path}")
        with Host.open_new(self, path, mode) as file:
            descriptor = os.dup(file.fileno())
        if self.loss is not None:
            directory, name = self._place(path)
            self._unsynced[os.fstat(descriptor).st_ino] = (os.dup(descriptor), 0)
            self._remember(f"create {path}", [(directory, name)], lambda: self._unlink_at(directory, name))
        return cast(BinaryIO, _File(self, descriptor, str(path)))

    def _unlink_at(self, directory: int, name: str) -> None:
        os.unlink(name, dir_fd=self._directories[directory])

    def rename(self, source: PathLike, target: PathLike) -> None:
        self.mutation(f"rename {source} {target}")
        self._forget_plain(source)
        self._forget_plain(target)
        if self.loss is None:
            Host.rename(self, source, target)
            return
        old, new = self._place(source), self._place(target)
        replaced = self.lexists(target)
        if replaced and self.is_dir(target) and not self.is_link(target) and self.listdir(target):
            Host.rename(self, source, target)  # raises: the directory is not empty
        kept = self._bury(*new) if replaced else None
        Host.rename(self, source, target)

        def undo() -> None:
            os.rename(new[1], old[1], src_dir_fd=self._directories[new[0]], dst_dir_fd=self._directories[old[0]])
            if kept:
                self._raise_buried(kept, *new)

        self._remember(f"rename {source} {target}", [old, new], undo)

    def link(self, source: PathLike, target: PathLike) -> None:
        self.mutation(f"link {source} {target}")
        Host.link(self, source, target)
        if self.loss is not None:
            place = self._place(target)
            self._remember(f"link {target}", [place], lambda: self._unlink_at(*place))

    def symlink(self, target: str, path: PathLike) -> None:
        self.mutation(f"symlink {target} {path}")
        self._make_link(target, path)

    def _make_link(self, target: str, path: PathLike) -> None:
        self._forget_plain(path)
        Host.symlink(self, target, path)
        if self.loss is not None:
            place = self._place(path)
            self._remember(f"symlink {path}", [place], lambda: self._unlink_at(*place))

    def unlink(self, path: PathLike) -> None:
        self.mutation(f"unlink {path}")
        self._remove(path)

    def _remove(self, path: PathLike) -> None:
        if self.loss is None or not self.lexists(path):
            Host.unlink(self, path)
            return
        place = self._place(path)
        kept = self._bury(*place)
        Host.unlink(self, path)
        self._remember(f"unlink {path}", [place], lambda: self._raise_buried(kept, *place))

    def rmdir(self, path: PathLike) -> None:
        self.mutation(f"rmdir {path}")
        if self.loss is None or not self.lexists(path) or self.listdir(path):
            Host.rmdir(self, path)
            return
        place = self._place(path)
        kept = self._bury(*place)
        self._remember(f"rmdir {path}", [place], lambda: self._raise_buried(kept, *place))

    def chmod(self, path: PathLike, mode: int) -> None:
        self.mutation(f"chmod {path}")
        real = self.real(path)
        before = stat.S_IMODE(os.lstat(real).st_mode)
        Host.chmod(self, path, mode)
        if self.loss is not None:
            held = os.open(real, os.O_PATH)
            inode = os.fstat(held).st_ino

            def undo() -> None:
                os.chmod(f"/proc/self/fd/{held}", before)
                os.close(held)

            self._remember(f"chmod {path}", [], undo, commits=frozenset({inode}))

    def chown(self, path: PathLike, uid: int, gid: int) -> None:
        self.mutation(f"chown {path}")
        assert self.lexists(path)  # who runs the tests may not give files away

    def utime(self, path: PathLike, mtime: float) -> None:
        self.mutation(f"utime {path}")
        Host.utime(self, path, mtime)

    def write_control(self, path: PathLike, data: bytes) -> None:
        self.mutation(f"control {path}")
        Host.write_control(self, path, data)

    def kill(self, pid: int, still_the_same: Callable[[], bool]) -> None:
        self.mutation(f"kill {pid}")
        if still_the_same():
            super().kill(pid, still_the_same)

    # -- syncs --------------------------------------------------------------------------------------

    def fsync(self, file: IO[bytes]) -> None:
        if self.loss is None:
            return  # a process that dies loses nothing of what it wrote
        self.mutation("fsync")
        inode = os.fstat(file.fileno()).st_ino
        known = self._unsynced.pop(inode, None)
        if known:
            os.close(known[0])
        self._commit_directory(inode)

    def _commit_directory(self, inode: int) -> None:
        for change in [change for change in self._changes if inode in change.commits]:
            self._commit(change)

    def fsync_dir(self, path: PathLike) -> None:
        if self.loss is None:
            return
        self.mutation(f"fsync {path}")
        self._commit_directory(self._directory(path))

    def syncfs(self, path: PathLike) -> None:
        if self.loss is not None:
            self.mutation(f"syncfs {path}")
            self._settle_all()

    def sync(self) -> None:
        if self.loss is not None:
            self.mutation("sync")
            self._settle_all()

    # -- the end and the next boot ------------------------------------------------------------------

    def lose_power(self) -> list[str]:
        """Take away what was not synced, and boot; what was lost, in words."""
        assert self.loss is not None
        lost = self._choose(self.loss.lost(len(self._changes)))
        names = []
        for change in reversed(self._changes):
            if id(change) in lost:
                change.undo()
                names.append(change.what)
        for descriptor, synced in self._unsynced.values():
            os.truncate(descriptor, self.loss.kept_bytes(synced, os.fstat(descriptor).st_size))
        self._settle_all()
        self.reboot()
        return names

    def _choose(self, drawn: list[bool]) -> set[int]:
        """The changes that are lost: those drawn, and those that need one of them."""
        lost: list[_Change] = []
        for change, bad in zip(self._changes, drawn):
            needs = any(change.names & other.names or other.makes in change.inside for other in lost)
            if bad or needs:
                lost.append(change)
        return {id(change) for change in lost}

    def reboot(self) -> None:
        """Everything in memory is gone."""
        self.revive()
        for unit in list(self.units):
            self.units[unit] = Unit()
        self.running.clear()
        self.journals.clear()
        self.tables.clear()
        for path in Path(self.root, "run").iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        Path(self.root, "run/systemd/system").mkdir(parents=True)

    def revive(self) -> None:
        """The next process: it dies no more."""
        self._plain.clear()
        self.dies_at, self.loss, self.dead, self.just_died = None, None, False, False
        self._settle_all()

    def close(self) -> None:
        """Give back the descriptors."""
        self._settle_all()
        for descriptor in self._directories.values():
            os.close(descriptor)
        self._directories.clear()

    # -- systemd and the programs -------------------------------------------------------------------

    def _answer(self, line: str, argv: list[str], data: bytes) -> tuple[int, str]:
        name = argv[0].rpartition("/")[2]
        if name == "nft":
            return self._nft(argv[1:], data)
        if name == "journalctl":
            return 0, "\n".join(self.journals.get(argv[2], []))
        if argv[1:] == ["--version"]:
            return (126, "") if b"broken" in self.read_bytes(argv[0]) else (0, "1.0")
        return super()._answer(line, argv, data)

    def _nft(self, argv: list[str], data: bytes) -> tuple[int, str]:
        if argv[0] == "list":
            return (0, self.tables[argv[-1]]) if argv[-1] in self.tables else (1, "")
        if argv[0] == "delete":
            return (0, "") if self.tables.pop(argv[-1], None) else (1, "")
        self.tables["stratum"] = data.decode()
        return 0, ""

    def _masked(self, unit: str) -> bool:
        path = f"/etc/systemd/system/{unit}"
        return self.is_link(path) and self.readlink(path) == "/dev/null"

    def _program(self, unit: str) -> bytes:
        """What the unit's ExecStart runs; empty when that is not there."""
        for line in (self._unit(unit).loaded or b"").decode().splitlines():
            if line.startswith("ExecStart="):
                path = line.partition("=")[2].split()[0].strip('"')
                return self.read_bytes(path) if self.exists(path) else b""
        return b""

    def _config(self) -> bytes:
        path = "/etc/stratum/containerd/config.toml"
        return self.read_bytes(path) if self.exists(path) else b""

    def _systemctl(self, argv: list[str], data: bytes) -> tuple[int, str]:
        names = [word for word in argv[1:] if not word.startswith("-")]
        if argv[0] in ("start", "restart") and names[0] != "stratum.service":
            return self._start(names[0])
        if argv[0] == "stop":
            self.running.pop(names[0], None)
            if self._unit(names[0]).loaded is None and self._unit(names[0]).active == "inactive":
                return 5, ""
        if argv[0] in ("enable", "disable") and self.loss is not None:
            return self._enablement(argv[0], names[0])
        return super()._systemctl(argv, data)

    def _enablement(self, verb: str, unit: str) -> tuple[int, str]:
        """systemctl(1) makes and removes links too, and syncs none of them."""
        wants = HostPath("/etc/systemd/system/multi-user.target.wants") / unit
        if verb == "enable" and not self.lexists(wants):
            if not self.is_dir(wants.parent):
                self._make_directory(wants.parent)
            self._make_link(f"/etc/systemd/system/{unit}", wants)
        elif verb == "disable" and self.lexists(wants):
            self._remove(wants)
        return 0, ""

    def _start(self, unit: str) -> tuple[int, str]:
        known = self._unit(unit)
        if self._masked(unit) or known.loaded is None:
            return (1 if self._masked(unit) else 5), ""
        program = self._program(unit)
        self.running.pop(unit, None)
        if not program or b"refuses" in program:
            known.active = "failed"
            self.journals.setdefault(unit, []).append(f"{unit} says: I refuse")
            return 1, ""
        known.active = "active"
        self.running[unit] = (program, self._config(), known.loaded)
        self._touch_socket(unit)
        return 0, ""

    def _look(self, name: str) -> None:
        """A program that dies has died by the time that somebody looks."""
        if name in self.running and b"dies" in self.running[name][0]:
            del self.running[name]
            self._unit(name).active = "failed"
            self.journals.setdefault(name, []).append(f"{name} says: I die")

    def _show(self, name: str) -> str:
        self._look(name)
        text = super()._show(name)
        return text.replace("LoadState=loaded", "LoadState=masked") if self._masked(name) else text

    def listens(self, path: PathLike) -> bool:
        self._look("stratum-containerd.service")
        program = self.running.get("stratum-containerd.service", (b"silent", b"", b""))[0]
        return super().listens(path) and b"silent" not in program


@contextlib.contextmanager
def faulty_machine(
    root: Path, graveyard: Path, kind: type[FaultyMachine] = FaultyMachine, **more: Any
) -> Iterator[FaultyMachine]:
    """A machine of a ``kind`` over ``root`` whose descriptors are given back."""
    graveyard.mkdir(exist_ok=True)
    machine = kind(str(root), environ={}, graveyard=graveyard, **more)
    try:
        yield machine
    finally:
        machine.close()
