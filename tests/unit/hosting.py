"""A running machine in a directory tree: its /proc and /sys are plain files, its commands are recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Callable, Optional

from stratum.errors import CommandError
from stratum.journal import Journal
from stratum.receipt import Receipt
from stratum.steps import Action, Work
from stratum.system import Completed, Host, PathLike, command_failure

BOOT_ID = "11111111-2222-3333-4444-555555555555\n"


@dataclass
class TreeMachine(Host):
    """A live host whose root is a directory tree. ``programs`` plays a command; one that is not there is missing."""

    release: str = "6.1.0-18-amd64"
    programs: dict[str, Callable[[list[str]], Optional[int]]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    refuses: set[str] = field(default_factory=set)  # controls that cannot be written

    @property
    def live(self) -> bool:
        return True

    @property
    def euid(self) -> int:
        return 0

    def kernel_release(self) -> str:
        return self.release

    def real(self, path: PathLike, *, follow: bool = False) -> str:
        return self._resolve(str(path), follow)

    def which(self, name: str) -> Optional[str]:
        return f"/usr/sbin/{name}" if name in self.programs else None

    def write_control(self, path: PathLike, data: bytes) -> None:
        if str(path) in self.refuses:
            raise PermissionError(1, "Operation not permitted", str(path))
        # The kernel keeps one value whatever was in the file; O_WRONLY alone would leave the end of a longer one.
        if not self.exists(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        Path(self.real(path, follow=True)).write_bytes(data)

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        check: bool = True,
        env: Optional[Mapping[str, str]] = None,
        feed: Optional[Callable[[BinaryIO], None]] = None,
    ) -> Completed:
        if argv[0] not in self.programs:
            raise CommandError("command-missing", f"{argv[0]}: no such program", status=None)
        self.commands.append(" ".join(argv))
        status = self.programs[argv[0]](list(argv[1:])) or 0
        done = Completed(tuple(argv), status, b"", b"" if status == 0 else b"it was told to fail")
        if check and status != 0:
            raise command_failure(done)
        return done


def put(host: Host, path: str, content: str | bytes = b"") -> None:
    """A file of the tree, with its directories."""
    real = Path(host.root + path)
    real.parent.mkdir(parents=True, exist_ok=True)
    real.write_bytes(content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content)


def content(host: Host, path: str) -> bytes:
    return Path(host.root + path).read_bytes()


def link(host: Host, path: str, target: str) -> None:
    real = Path(host.root + path)
    real.parent.mkdir(parents=True, exist_ok=True)
    real.symlink_to(target)


def work_on(host: Host) -> Work:
    """The record of the tree as it is on its disk now."""
    for path in ("/var/lib/stratum", "/etc", "/run"):
        Path(host.root + path).mkdir(parents=True, exist_ok=True)
    return Work(host, Receipt.load(host), Journal(host))


def perform(host: Host, plan: Callable[[Work], Sequence[Action]]) -> list[str]:
    """Plan with the record on the disk, do it, and return what was done, in words."""
    work = work_on(host)
    actions = plan(work)
    for action in actions:
        action.perform(work)
    return [action.describe() for action in actions]


def snapshot(host: Host) -> dict[str, bytes | str]:
    """Every file and link of the tree outside of our own state."""
    top = Path(host.root)
    found: dict[str, bytes | str] = {}
    for path in sorted(top.rglob("*")):
        name = f"/{path.relative_to(top)}"
        if name.startswith(("/var/lib/stratum", "/run/stratum")):
            continue
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = path.read_bytes()
    return found
