"""Stand-ins for the machine: a host whose process dies at a chosen change, and one that plays systemd.

Both are a ``Host`` over a directory tree; nothing outside of the tree is changed and no program is run.
"""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, Callable, Optional, cast

from stratum.bundle.oci import Platform
from stratum.cli import build_parser
from stratum.errors import CommandError
from stratum.node import containerd
from stratum.node.units import SYSTEMD_DIR
from stratum.output import Output
from stratum.scripts.context import Context
from stratum.system import Completed, Host, PathLike, command_failure
from tests import netlink
from tests.bundles import Bundle, Entry, Part, Publisher, directory, key_pair, symlink, tar


class Killed(BaseException):
    """The process has died; no clean-up of it changes anything any more."""


class _DyingFile(io.RawIOBase):
    """A new file of a :class:`FaultHost`: the process may die in the middle of a write."""

    def __init__(self, host: FaultHost, file: BinaryIO, name: str) -> None:
        self._host, self._file, self._name = host, file, name

    def write(self, data: Any) -> int:
        try:
            self._host.mutation(f"write {self._name}")
        except Killed:
            self._file.write(bytes(data)[: len(data) // 2])
            self._file.flush()
            raise
        self._file.write(data)
        self._file.flush()
        return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
        super().close()


@dataclass
class FaultHost(Host):
    """Counts the changes; with ``dies_at`` the process dies before the change of that number, and stays dead.

    ``syncs`` are not done: a process that dies loses nothing that it wrote.
    """

    dies_at: Optional[int] = None
    mutations: list[str] = field(default_factory=list)
    dead: bool = False

    def mutation(self, what: str) -> None:
        if self.dead or self.dies_at == len(self.mutations):
            self.dead = True
            raise Killed(what)
        self.mutations.append(what)

    def mkdir(self, path: PathLike, mode: int = 0o755) -> None:
        self.mutation(f"mkdir {path}")
        super().mkdir(path, mode)

    def open_new(self, path: PathLike, mode: int) -> BinaryIO:
        self.mutation(f"create {path}")
        return cast(BinaryIO, _DyingFile(self, super().open_new(path, mode), str(path)))

    def rename(self, source: PathLike, target: PathLike) -> None:
        self.mutation(f"rename {source} {target}")
        super().rename(source, target)

    def link(self, source: PathLike, target: PathLike) -> None:
        self.mutation(f"link {source} {target}")
        super().link(source, target)

    def symlink(self, target: str, path: PathLike) -> None:
        self.mutation(f"symlink {target} {path}")
        super().symlink(target, path)

    def unlink(self, path: PathLike) -> None:
        self.mutation(f"unlink {path}")
        super().unlink(path)

    def rmdir(self, path: PathLike) -> None:
        self.mutation(f"rmdir {path}")
        super().rmdir(path)

    def chmod(self, path: PathLike, mode: int) -> None:
        self.mutation(f"chmod {path}")
        super().chmod(path, mode)

    def fsync(self, file: IO[bytes]) -> None:
        file.flush()

    def fsync_dir(self, path: PathLike) -> None:
        assert self.is_dir(path)

    def syncfs(self, path: PathLike) -> None:
        assert self.lexists(path)

    def sync(self) -> None:
        """Nothing: a killed process loses nothing."""


# -- a machine ------------------------------------------------------------------------------------------


@dataclass
class Unit:
    """A unit as systemd has it in memory."""

    active: str = "inactive"
    loaded: Optional[bytes] = None


@dataclass
class MachineHost(FaultHost):
    """A live machine in a directory tree. It plays systemd, ctr and the few programs that Stratum runs.

    ``commands`` are the command lines that were run. ``failing`` maps the start of a command line to the number
    of times that it fails from now on.
    """

    units: dict[str, Unit] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    failing: dict[str, int] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    image_labels: dict[str, set[str]] = field(default_factory=dict)
    image_namespaces: dict[str, str] = field(default_factory=dict)
    silent: bool = False  # containerd starts and never answers
    chains: dict[str, list[str]] = field(default_factory=dict)  # of the firewall, in the table nat
    sockets: set[str] = field(default_factory=set)  # where somebody else listens
    clock: float = 1_800_000_000.0
    user: int = 0
    hooks: dict[str, Callable[[], object]] = field(default_factory=dict)
    release: str = "6.1.0-1-amd64"
    generation: int = 1  # of the firewall's rules

    @property
    def live(self) -> bool:
        return True

    @property
    def euid(self) -> int:
        return self.user

    def now(self) -> float:
        return self.clock

    def monotonic(self) -> float:
        return self.clock

    def sleep(self, seconds: float) -> None:
        self.clock += seconds

    def kernel_release(self) -> str:
        return self.release

    def real(self, path: PathLike, *, follow: bool = False) -> str:
        assert str(path).startswith("/")
        return self._resolve(str(path), follow)

    def which(self, name: str) -> Optional[str]:
        return super().which(name)

    def ask_netlink(self, protocol: int, request: bytes, is_last: Callable[[bytes], bool]) -> list[bytes]:
        if protocol != netlink.NETFILTER:
            return super().ask_netlink(protocol, request, is_last)
        return [netlink.generation(self.generation)]

    def listens(self, path: PathLike) -> bool:
        if str(path) in self.sockets:
            return True
        return str(path) == str(containerd.ADDRESS) and self.active("stratum-containerd.service") and not self.silent

    def get_local(self, port: int, path: str, timeout: float) -> tuple[int, bytes]:
        """The kubelet's healthz."""
        if (port, path) == (10248, "/healthz") and self.active("stratum-kubelet.service"):
            return 200, b"ok"
        raise ConnectionRefusedError(111, "Connection refused")

    def chown(self, path: PathLike, uid: int, gid: int) -> None:
        """It says that it is root; the process that plays it may not be."""
        if os.geteuid() == 0:
            super().chown(path, uid, gid)

    def kill(self, pid: int, still_the_same: Callable[[], bool]) -> None:
        """End a process of the tree's /proc."""
        self.commands.append(f"kill {pid}")
        for path in sorted(Path(self.root, "proc", str(pid)).glob("*")):
            path.unlink()
        Path(self.root, "proc", str(pid)).rmdir()

    def active(self, unit: str) -> bool:
        return unit in self.units and self.units[unit].active == "active"

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        check: bool = True,
        env: Optional[Mapping[str, str]] = None,
        feed: Optional[Callable[[BinaryIO], None]] = None,
    ) -> Completed:
        line = " ".join(argv)
        if self.which(argv[0]) is None:
            raise CommandError("command-missing", f"{argv[0]}: no such program", status=None)
        self.mutation(f"run {line}")
        self.commands.append(line)
        for start, hook in self.hooks.items():
            if line.startswith(start):
                hook()
        pipe = io.BytesIO()
        if feed:
            feed(pipe)
        status, text = self._answer(line, list(argv), pipe.getvalue())
        done = Completed(tuple(argv), status, text.encode(), b"" if status == 0 else b"it was told to fail")
        if check and status != 0:
            raise command_failure(done)
        return done

    def _answer(self, line: str, argv: list[str], data: bytes) -> tuple[int, str]:
        for start, times in self.failing.items():
            if line.startswith(start) and times > 0:
                self.failing[start] -= 1
                return 1, ""
        name = argv[0].rpartition("/")[2]
        players = {
            "systemctl": self._systemctl,
            "ctr": self._ctr,
            "umount": self._umount,
            "ip": self._ip,
            "iptables": self._iptables,
        }
        return players[name](argv[1:], data) if name in players else (0, "")

    # -- systemd --

    def _file(self, unit: str) -> Optional[bytes]:
        path = SYSTEMD_DIR / unit
        parts = [self.read_bytes(path)] if self.exists(path) and not self.is_dir(path) else []
        for base in ("/etc/systemd/system", "/run/systemd/system"):
            drop_ins = f"{base}/{unit}.d"
            if self.is_dir(drop_ins):
                parts += [self.read_bytes(f"{drop_ins}/{name}") for name in self.listdir(drop_ins)]
        return b"\n".join(parts) if self.exists(path) else None

    def _unit(self, name: str) -> Unit:
        unit = self.units.setdefault(name, Unit())
        if unit.loaded is None:
            unit.loaded = self._file(name)
        return unit

    def _systemctl(self, argv: list[str], _data: bytes) -> tuple[int, str]:
        words = [word for word in argv[1:] if not word.startswith("-")]
        if argv[0] == "show":
            return 0, "\n".join(self._show(name) for name in words)
        if argv[0] == "daemon-reload":
            for name, known in self.units.items():
                known.loaded = self._file(name)
            return 0, ""
        name = words[0]
        unit = self._unit(name)
        wants = SYSTEMD_DIR / "multi-user.target.wants" / name
        if argv[0] == "is-enabled":
            return (0, "enabled\n") if self.lexists(wants) else (1, "disabled\n")
        if argv[0] == "reset-failed":
            return (0 if unit.loaded else 1), ""
        if argv[0] in ("start", "restart") and unit.loaded is None:
            return 5, ""
        if argv[0] in ("start", "restart"):
            unit.active = "active"
            self._touch_socket(name)
        elif argv[0] == "stop":
            unit.active = "inactive"
        elif argv[0] == "enable" and not self.lexists(wants):
            Path(super().real(wants)).parent.mkdir(parents=True, exist_ok=True)
            Path(self.real(wants)).symlink_to(str(SYSTEMD_DIR / name))
        elif argv[0] == "disable" and self.lexists(wants):
            Path(self.real(wants)).unlink()
        return 0, ""

    def _touch_socket(self, name: str) -> None:
        if name == "stratum-containerd.service":
            path = Path(self.real(containerd.ADDRESS))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def _show(self, name: str) -> str:
        unit = self._unit(name)
        load = "loaded" if unit.loaded is not None else "not-found"
        stale = "yes" if unit.loaded != self._file(name) else "no"
        return (
            f"Id={name}\nLoadState={load}\nActiveState={unit.active}\nSubState=x\nMainPID=0\n"
            f"NeedDaemonReload={stale}\nDropInPaths=\n"
        )

    # -- other programs --

    def _ctr(self, argv: list[str], data: bytes) -> tuple[int, str]:
        if argv == ["--version"]:
            return 0, "ctr 1.7.24"
        words = argv[2:]  # behind --address
        namespace = "default"
        if words[0] == "--namespace":
            namespace, words = words[1], words[2:]
        if words == ["namespaces", "list", "--quiet"]:
            return 0, "default\n"
        if words[:2] == ["images", "import"]:
            import json
            import tarfile

            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                member = archive.extractfile("index.json")
                assert member is not None
                for item in json.load(member)["manifests"]:
                    name = item["annotations"]["io.containerd.image.name"]
                    self.images[name] = item["digest"]
                    self.image_namespaces[name] = namespace
                    # CRI takes notice of an image in its own namespace, and in no other.
                    self.image_labels[name] = {"io.cri-containerd.image=managed"} if namespace == "k8s.io" else set()
            return 0, ""
        if words[:2] == ["images", "label"]:
            if self.image_namespaces.get(words[2], "default") != namespace or words[2] not in self.images:
                return 1, ""
            self.image_labels.setdefault(words[2], set()).update(words[3:])
            return 0, words[2]
        if words[:2] == ["images", "list"]:
            return 0, "REF TYPE DIGEST SIZE PLATFORMS LABELS\n" + "".join(
                f"{name} t {digest} 1.0 MiB linux/amd64 {','.join(sorted(self.image_labels.get(name, ()))) or '-'}\n"
                for name, digest in self.images.items()
                if self.image_namespaces.get(name, "default") == namespace
            )
        return 0, ""

    def _umount(self, argv: list[str], _data: bytes) -> tuple[int, str]:
        table = Path(self.real("/proc/self/mountinfo"))
        lines = [line for line in table.read_text().splitlines() if line.split()[4] != argv[-1]]
        table.write_text("\n".join(lines) + "\n")
        return 0, ""

    def _iptables(self, argv: list[str], _data: bytes) -> tuple[int, str]:
        words = [word for word in argv if word not in ("--wait", "10", "--table", "nat")]
        if words == ["--list-rules"]:
            rules = [f"-A {name} {rule}" for name, held in self.chains.items() for rule in held]
            return 0, "\n".join([*(f"-N {name}" for name in self.chains if name != "POSTROUTING"), *rules]) + "\n"
        action, chain = words[0], words[1]
        known = self.chains.setdefault("POSTROUTING", [])
        if action == "--new-chain":
            status = 1 if chain in self.chains else 0
            self.chains.setdefault(chain, [])
            return status, ""
        if chain not in self.chains:
            return 1, ""
        rule = " ".join(words[2:])
        if action == "--append":
            self.chains[chain].append(rule)
        elif action == "--check":
            return (0 if rule in known else 1), ""
        elif action == "--delete":
            known.remove(rule)
        elif action == "--flush":
            self.chains[chain].clear()
        elif action == "--delete-chain":
            del self.chains[chain]
        rules = [f"-A {chain} {rule}" for rule in self.chains.get(chain, [])]
        return 0, "\n".join([f"-N {chain}", *rules]) + "\n"

    def _ip(self, argv: list[str], _data: bytes) -> tuple[int, str]:
        if argv[:2] == ["link", "delete"]:
            interface = Path(self.real(f"/sys/class/net/{argv[3]}"))
            (interface / "bridge").rmdir()
            interface.rmdir()
        return 0, ""


MOUNTINFO = "30 1 8:1 / / rw - ext4 /dev/sda1 rw\n31 30 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def make_tree(root: Path, *, live: bool = False) -> Path:
    """A small system tree; with ``live`` what a running machine shows too."""
    for name in ("etc/systemd/system/multi-user.target.wants", "usr/local/bin", "opt", "var/lib", "run", "usr/bin"):
        (root / name).mkdir(parents=True)
    (root / "etc/hostname").write_text("node\n")
    (root / "etc/resolv.conf").symlink_to("../run/resolv.conf")
    (root / "usr/local/bin/admin-tool").write_text("theirs\n")
    (root / "opt/other").mkdir(mode=0o750)
    names = ["python3", "systemctl", "journalctl", "modprobe", "iptables", "umount", "ip"] if live else ["python3"]
    for name in names:
        (root / "usr/bin" / name).write_text("#!/bin/sh\n")
        (root / "usr/bin" / name).chmod(0o755)
    if live:
        for name in ("run/systemd/system", "proc/self", "proc/sys/kernel", "sys/fs/cgroup", "sys/class/net"):
            (root / name).mkdir(parents=True)
        (root / "proc/self/mountinfo").write_text(MOUNTINFO)
        (root / "proc/sys/kernel/hostname").write_text("node\n")
        (root / "proc/meminfo").write_text("MemTotal:        2048000 kB\nMemFree: 1 kB\n")
        (root / "proc/cpuinfo").write_text("processor\t: 0\nprocessor\t: 1\n")
        (root / "proc/filesystems").write_text("nodev\tproc\nnodev\toverlay\n\text4\n")
    return root


def node_publisher(**changes: Any) -> Publisher:
    """The publisher of a small container host: components with the names and paths that Stratum looks for."""
    program = b"#!/bin/sh\n"
    parts = [
        Part(
            "containerd",
            [directory("bin"), Entry("bin/containerd", program + b"# d"), Entry("bin/ctr", program + b"# ctr")],
            version="1.7.24",
        ),
        Part(
            "cni-plugins",
            [
                directory("cni"),
                directory("cni/bin"),
                Entry("cni/bin/bridge", program),
                symlink("cni/bin/portmap", "bridge"),
            ],
            version="1.1.1",
        ),
    ]
    layer = tar([Entry("etc/motd", b"hello\n", mode=0o644)])
    values: dict[str, Any] = {
        "platforms": (Platform.of_machine(Host().machine()),),
        "parts": parts,
        "images": [("example.test/demo:1", [layer])],
    }
    return Publisher(**{**values, **changes})


class Desk:
    """Runs commands in this process: against a host, with a bundle on disk, and keeps what they say."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "usb").mkdir()
        self.archive = directory / "usb" / "stratum.pyz"
        self.archive.write_bytes(b"#!/usr/bin/env python3\nthe program\n")
        self.key = directory / "publisher.pub"
        self.key.write_bytes(key_pair("publisher")[1].to_bytes())
        self._parsers: dict[str, argparse.ArgumentParser] = {}

    def bundle(self, bundle: Bundle, name: str = "bundle.tar") -> Path:
        return bundle.write_tar(self.directory / name)

    def run(self, host: Host, name: str, *words: str) -> Ran:
        import importlib

        out, err = io.StringIO(), io.StringIO()
        if name not in self._parsers:
            self._parsers[name] = build_parser(name)  # it takes longer than some commands do
        arguments = self._parsers[name].parse_args([name, *words])
        as_json = getattr(arguments, "output", "text") == "json"
        context = Context(host, Output(as_json=as_json, stdout=out, stderr=err), str(self.archive), None)
        module = importlib.import_module(f"stratum.commands.{name}")
        ran = Ran(arguments, out, err)
        ran.status = module.run(context, arguments)
        return ran

    def up(self, host: Host, bundle: Path, *words: str) -> Ran:
        return self.run(host, "up", "--bundle", str(bundle), "--trust", str(self.key), *words)


@dataclass
class Ran:
    """A command that was run."""

    arguments: argparse.Namespace
    out: io.StringIO
    err: io.StringIO
    status: int = -1

    @property
    def text(self) -> str:
        return self.out.getvalue()


def relative(top: Path, found: Mapping[str, Any], without: Iterable[str] = ()) -> dict[str, Any]:
    """A snapshot with paths below ``top``, without those that ``without`` names."""
    named = {name[len(str(top)) :].rstrip("/.") or "/": value for name, value in found.items()}
    return {name: value for name, value in named.items() if name not in set(without)}
