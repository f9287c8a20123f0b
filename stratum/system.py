"""The one seam to the host: files under a root, commands, environment, clock.

Everything outside this process goes through one :class:`Host`. Paths given to it are *host paths*
(absolute, pure: they cannot be opened by accident); it finds them under its root, so the same code
prepares the running machine and the directory tree of an image being built. Links that a tree holds are
resolved inside that tree, as chroot(2) would, never on the machine that builds it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, BinaryIO, Callable, Optional, Union, cast

from stratum.errors import CommandError, StratumError

if TYPE_CHECKING:
    from stratum.libselinux import FileContexts

__all__ = ["SEARCH_PATH", "Completed", "Host", "HostPath", "PathLike", "unguessable"]

HostPath = PurePosixPath
PathLike = Union[str, PurePosixPath]

# cron and cloud-init start with a PATH that has no sbin, where modprobe, iptables and mount helpers live.
SEARCH_PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")

_LINKS_MAX = 40  # as the kernel's own limit, path_resolution(7)
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp\Z", re.DOTALL)
_PATH_LONG = 3000  # bytes
_STDERR_SHOWN = 600
_CONNECT_TIMEOUT = 5.0  # seconds
_ANSWER_MAX = 1 << 16
_DATAGRAM_MAX = 1 << 17  # the kernel puts at most 32 KiB into one


def unguessable() -> str:
    """A name that nobody can guess, for what is made in a directory before it is complete."""
    # The module `secrets` would do the same and costs a fifth of the start-up time (it imports hmac, random).
    return os.urandom(8).hex()


@dataclass(frozen=True)
class Completed:
    """An external command that has ended."""

    argv: tuple[str, ...]
    status: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """Its standard output as text; bytes that are not UTF-8 are escaped."""
        return self.stdout.decode("utf-8", "backslashreplace")


def _one_line(data: bytes) -> str:
    text = data.decode("utf-8", "backslashreplace").strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines)[-_STDERR_SHOWN:]


@dataclass
class Host:
    """A machine, or a directory tree that will become one.

    ``root`` is ``/`` for the running machine. ``environ`` is what this process was started with; commands
    do not inherit it.
    """

    root: str = "/"
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    _contexts: Optional[tuple[int, FileContexts]] = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.root = os.path.realpath(self.root)

    # -- who and when -------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Whether this is the running machine, where units can be started."""
        return self.root == "/"

    @property
    def euid(self) -> int:
        """The effective user id of this process."""
        return os.geteuid()

    @property
    def pid(self) -> int:
        """The number of this process."""
        return os.getpid()

    def now(self) -> float:
        """Seconds since 1970, as this machine believes."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds of a clock that nobody sets."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def machine(self) -> str:
        """The kernel's name of the architecture (``x86_64``, ``aarch64``)."""
        return os.uname().machine

    def kernel_release(self) -> str:
        """The running kernel's release string, uname(2)."""
        return os.uname().release

    # -- paths --------------------------------------------------------------------------------------

    def real(self, path: PathLike, *, follow: bool = False) -> str:
        """Where ``path`` of this host is for this process.

        Links in the parents are resolved inside the root; the last component only with ``follow``.
        Raises :class:`StratumError` on a link loop.
        """
        text = str(path)
        if not text.startswith("/"):
            raise ValueError(f"not an absolute host path: {text!r}")
        if self.live:
            return text
        return self._resolve(text, follow)

    def _resolve(self, text: str, follow: bool) -> str:
        pending = [part for part in text.split("/") if part]
        done: list[str] = []
        links = 0
        while pending:
            part = pending.pop(0)
            if part == ".":
                continue
            if part == "..":
                if done:
                    done.pop()
                continue
            here = "/".join([self.root, *done, part])
            if (pending or follow) and os.path.islink(here):
                links += 1
                if links > _LINKS_MAX:
                    raise StratumError("link-loop", f"{text}: too many levels of symbolic links")
                target = os.readlink(here)
                if target.startswith("/"):
                    done = []
                pending = [piece for piece in target.split("/") if piece] + pending
                continue
            done.append(part)
        return "/".join([self.root, *done])

    # -- reading ------------------------------------------------------------------------------------

    def exists(self, path: PathLike) -> bool:
        """Whether ``path`` leads to something; a dangling link does not."""
        return os.path.exists(self.real(path, follow=True))

    def lexists(self, path: PathLike) -> bool:
        """Whether there is an entry at ``path``, be it a dangling link."""
        return os.path.lexists(self.real(path))

    def is_dir(self, path: PathLike) -> bool:
        """Whether ``path`` leads to a directory."""
        return os.path.isdir(self.real(path, follow=True))

    def is_link(self, path: PathLike) -> bool:
        """Whether the entry at ``path`` is a symbolic link."""
        return os.path.islink(self.real(path))

    def lstat(self, path: PathLike) -> os.stat_result:
        """Like lstat(2); raises OSError."""
        return os.lstat(self.real(path))

    def stat(self, path: PathLike) -> os.stat_result:
        """Like stat(2); raises OSError."""
        return os.stat(self.real(path, follow=True))

    def statvfs(self, path: PathLike) -> os.statvfs_result:
        """Space and inodes of the file system that holds ``path``; raises OSError."""
        return os.statvfs(self.real(path, follow=True))

    def readlink(self, path: PathLike) -> str:
        """The target of the link at ``path``; raises OSError."""
        return os.readlink(self.real(path))

    def listdir(self, path: PathLike) -> list[str]:
        """The sorted names in the directory ``path``; raises OSError."""
        return sorted(os.listdir(self.real(path, follow=True)))

    def open(self, path: PathLike) -> BinaryIO:
        """Open a file for reading; raises OSError."""
        return open(self.real(path, follow=True), "rb")

    def read_bytes(self, path: PathLike) -> bytes:
        """The content of a file; raises OSError."""
        with self.open(path) as file:
            return file.read()

    def read_text(self, path: PathLike) -> str:
        """The content of a file as text; what is not UTF-8 is kept as surrogate escapes."""
        return self.read_bytes(path).decode("utf-8", "surrogateescape")

    def getxattr(self, path: PathLike, name: str) -> Optional[bytes]:
        """An extended attribute of an entry, of a link itself; None where there is none. Raises OSError."""
        try:
            return os.getxattr(self.real(path), name, follow_symlinks=False)
        except OSError as error:
            if error.errno in (errno.ENODATA, errno.ENOTSUP):
                return None
            raise

    def policy_label(self, path: PathLike, mode: int) -> Optional[str]:
        """The SELinux label that this machine's policy wants for ``path`` with the file type in ``mode``.

        None when the policy wants none or cannot be asked, and for a directory tree.
        """
        if not self.live:
            return None
        try:
            return self._file_contexts().lookup(str(path), mode)
        except (ImportError, OSError, AttributeError, MemoryError):
            # No libselinux here, or none that can be loaded: callers keep the label that is there.
            return None

    def _file_contexts(self) -> FileContexts:
        # A policy module that comes or goes renames the files in this directory, which changes its time.
        from stratum.libselinux import FileContexts

        stamp = 0
        for name in os.listdir("/etc/selinux"):
            with contextlib.suppress(OSError):
                stamp = max(stamp, os.stat(f"/etc/selinux/{name}/contexts/files").st_mtime_ns)
        if self._contexts is None or self._contexts[0] != stamp:
            if self._contexts is not None:
                self._contexts[1].close()
                self._contexts = None
            self._contexts = (stamp, FileContexts())
        return self._contexts[1]

    # -- changing -----------------------------------------------------------------------------------

    def mkdir(self, path: PathLike, mode: int = 0o755) -> None:
        """Make one directory with exactly ``mode``, whatever the umask; raises OSError."""
        real = self.real(path)
        os.mkdir(real, mode)
        os.chmod(real, mode)

    def open_new(self, path: PathLike, mode: int) -> BinaryIO:
        """Create a file that did not exist, with exactly ``mode``, open for writing; raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.real(path), flags, 0o600)
        try:
            os.fchmod(descriptor, mode)
            return os.fdopen(descriptor, "wb")
        except BaseException:
            os.close(descriptor)
            raise

    def rename(self, source: PathLike, target: PathLike) -> None:
        """rename(2): replaces a file or link at ``target`` at once; raises OSError."""
        os.rename(self.real(source), self.real(target))

    def link(self, source: PathLike, target: PathLike) -> None:
        """Make a hard link at ``target``; raises OSError when something is there."""
        os.link(self.real(source), self.real(target), follow_symlinks=False)

    def symlink(self, target: str, path: PathLike) -> None:
        """Make a symbolic link at ``path``; raises OSError when something is there."""
        os.symlink(target, self.real(path))

    def unlink(self, path: PathLike) -> None:
        """Remove a file or a link; raises OSError."""
        os.unlink(self.real(path))

    def rmdir(self, path: PathLike) -> None:
        """Remove an empty directory; raises OSError."""
        os.rmdir(self.real(path))

    def chmod(self, path: PathLike, mode: int) -> None:
        """Set the mode of a file or directory that is not a link; raises OSError."""
        os.chmod(self.real(path), mode)

    def chown(self, path: PathLike, uid: int, gid: int) -> None:
        """Set the owner of an entry, of a link itself; raises OSError."""
        os.chown(self.real(path), uid, gid, follow_symlinks=False)

    def setxattr(self, path: PathLike, name: str, value: bytes) -> None:
        """Set an extended attribute of an entry, of a link itself; raises OSError."""
        os.setxattr(self.real(path), name, value, follow_symlinks=False)

    def utime(self, path: PathLike, mtime: float) -> None:
        """Set the times of an entry, of a link itself, to ``mtime`` seconds since 1970; raises OSError."""
        os.utime(self.real(path), (mtime, mtime), follow_symlinks=False)

    def write_control(self, path: PathLike, data: bytes) -> None:
        """Write to a file of the kernel's (cgroupfs, procfs), which is neither made nor replaced; raises OSError."""
        descriptor = os.open(self.real(path, follow=True), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def fsync(self, file: IO[bytes]) -> None:
        """Flush ``file`` and wait until its bytes are on the disk; raises OSError."""
        file.flush()
        os.fsync(file.fileno())

    def fsync_dir(self, path: PathLike) -> None:
        """Wait until the entries of a directory are on the disk; raises OSError."""
        descriptor = os.open(self.real(path, follow=True), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some file systems (9p, some FUSE) have no directory sync; there is nothing better to do there.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)

    def syncfs(self, path: PathLike) -> None:
        """Wait until everything written to the file system of ``path`` is on its disk; raises OSError."""
        descriptor = os.open(self.real(path, follow=True), os.O_RDONLY | os.O_CLOEXEC)
        try:
            # syncfs(2) has no function in the standard library; sync(2) waits for it too, and for others.
            try:
                import ctypes

                if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) == 0:
                    return
            except (ImportError, OSError, AttributeError):
                pass
            os.sync()
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        """Wait until everything that was written, anywhere, is on the disks: sync(2)."""
        os.sync()

    def makedirs(self, path: PathLike, mode: int = 0o755) -> list[HostPath]:
        """Make ``path`` and its missing parents, each with exactly ``mode``; the ones made, top first.

        A directory that exists keeps its mode: it is not ours to change. Raises OSError.
        """
        wanted = HostPath(str(path))
        missing = []
        for candidate in (wanted, *wanted.parents):
            if self.is_dir(candidate):
                break
            missing.append(candidate)
        made = list(reversed(missing))
        for directory in made:
            try:
                self.mkdir(directory, mode)
            except FileExistsError:
                # Another process makes the same directory, as two runs do on their way to the lock.
                if not self.is_dir(directory):
                    raise
            self.fsync_dir(directory.parent)
        return made

    def temporary_name(self, path: PathLike) -> HostPath:
        """A hidden name beside ``path`` that nobody can guess."""
        wanted = HostPath(str(path))
        return wanted.with_name(f".{wanted.name}.{unguessable()}.tmp")

    @staticmethod
    def temporary_of(name: str) -> Optional[str]:
        """The name of the file that a name made by :meth:`temporary_name` is for; None for any other name."""
        found = _TEMPORARY.match(name)
        return found["name"] if found else None

    def too_long(self, path: PathLike) -> bool:
        """Whether names below ``path`` may be more than a system call takes (PATH_MAX is 4096 bytes)."""
        return len(os.fsencode(self.real(path))) > _PATH_LONG

    def walk(self, path: PathLike) -> Iterator[tuple[HostPath, os.stat_result]]:
        """Every entry below ``path``, children before their directory; follows no link, crosses no mount.

        A directory for which :meth:`too_long` holds is given and not entered.
        """
        top = HostPath(str(path))
        device = self.lstat(top).st_dev
        # A list and no recursion: a container's files may lie deeper than Python's calls can go.
        pending = [(top / name, False) for name in reversed(self.listdir(top))]
        while pending:
            child, entered = pending.pop()
            info = self.lstat(child)
            inside = stat.S_ISDIR(info.st_mode) and info.st_dev == device and not self.too_long(child)
            if inside and not entered:
                pending.append((child, True))
                pending += [(child / name, False) for name in reversed(self.listdir(child))]
            else:
                yield child, info

    def mount_points(self) -> list[str]:
        """Where this process sees mounts, as real paths; binds of the same file system too, which stat(2) hides.

        Empty without procfs. Format: proc(5), mountinfo.
        """
        try:
            with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
                fields = [line.split(" ", 5) for line in file]
        except OSError:
            return []
        return [re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), item[4]) for item in fields]

    def mounts_within(self, path: PathLike) -> list[str]:
        """The mounts at ``path`` and below it, as real paths."""
        top = os.path.realpath(self.real(path))
        below = f"{top.rstrip('/')}/"
        return [mount for mount in self.mount_points() if mount == top or mount.startswith(below)]

    def is_mount_point(self, path: PathLike) -> bool:
        """Whether a file system is mounted at ``path``."""
        return os.path.realpath(self.real(path)) in self.mount_points()

    # -- network ------------------------------------------------------------------------------------

    def ask_rtnetlink(self, request: bytes, is_last: Callable[[bytes], bool]) -> list[bytes]:
        """Send one request to the kernel's network tables, rtnetlink(7); the datagrams of the answer.

        ``is_last`` knows the datagram that ends it. Raises OSError, TimeoutError among them.
        """
        return self.ask_netlink(socket.NETLINK_ROUTE, request, is_last)

    def ask_netlink(self, protocol: int, request: bytes, is_last: Callable[[bytes], bool]) -> list[bytes]:
        """Like :meth:`ask_rtnetlink`, for any part of the kernel that speaks netlink(7)."""
        if not self.live:
            raise RuntimeError("a directory tree has no network")
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        with socket.socket(socket.AF_NETLINK, kind, protocol) as channel:
            channel.settimeout(_CONNECT_TIMEOUT)
            channel.bind((0, 0))
            channel.send(request)
            answer = []
            while True:
                answer.append(channel.recv(_DATAGRAM_MAX))
                if is_last(answer[-1]):
                    return answer

    def ask_dns(self, address: str, port: int, query: bytes, *, tcp: bool, timeout: float) -> bytes:
        """Send one DNS message to a server and return what it answers; ``timeout`` is in seconds.

        Over TCP a message has its length before it (RFC 1035, section 4.2.2). Raises OSError, TimeoutError among them.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        kind = socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM
        with socket.socket(family, kind | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(timeout)
            channel.connect((address, port))
            if not tcp:
                channel.send(query)
                return channel.recv(_DATAGRAM_MAX)
            channel.sendall(len(query).to_bytes(2, "big") + query)
            with _cut_off(channel, timeout), channel.makefile("rb") as stream:
                answer = stream.read(int.from_bytes(stream.read(2), "big"))
        if not answer:
            raise ConnectionResetError(errno.ECONNRESET, "closed without an answer", f"{address}:{port}")
        return answer

    # -- commands -----------------------------------------------------------------------------------

    def search_path(self) -> list[str]:
        """The directories that commands are looked up in: PATH, then the standard ones it lacks."""
        given = [part for part in self.environ.get("PATH", "").split(":") if part.startswith("/")]
        return given + [part for part in SEARCH_PATH if part not in given]

    def which(self, name: str) -> Optional[str]:
        """Where the program ``name`` is, or None."""
        candidates = [name] if "/" in name else [f"{directory}/{name}" for directory in self.search_path()]
        for candidate in candidates:
            real = self.real(candidate, follow=True)
            if os.path.isfile(real) and os.access(real, os.X_OK):
                return candidate
        return None

    def listens(self, path: PathLike) -> bool:
        """Whether somebody accepts connections on the UNIX stream socket at ``path``."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(_CONNECT_TIMEOUT)
            try:
                channel.connect(self.real(path, follow=True))
            except BlockingIOError:
                return True  # its queue of connections is full, so somebody is there
            except OSError:
                return False
            return True

    def get_local(self, port: int, path: str, timeout: float) -> tuple[int, bytes]:
        """GET ``path`` from the HTTP server at 127.0.0.1:``port``: the status and at most 64 KiB of the answer.

        Never through a proxy, whatever the environment says. Raises OSError.
        """
        import http.client

        channel = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        try:
            channel.connect()
            # Anybody on the host may listen there while the server is down.
            with _cut_off(channel.sock, timeout):
                channel.request("GET", path)
                answer = channel.getresponse()
                return answer.status, answer.read(_ANSWER_MAX)
        except http.client.HTTPException as error:
            raise ConnectionError(f"127.0.0.1:{port}: {error!r}") from None
        finally:
            channel.close()

    def _command_environment(self, extra: Optional[Mapping[str, str]]) -> dict[str, str]:
        # A proxy, a locale or a loader variable of the caller must not reach what we start.
        return {"PATH": ":".join(self.search_path()), "LC_ALL": "C", "LANG": "C", **(extra or {})}

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        check: bool = True,
        env: Optional[Mapping[str, str]] = None,
        feed: Optional[Callable[[BinaryIO], None]] = None,
    ) -> Completed:
        """Run a command to its end and return what it said.

        ``timeout`` is in seconds. ``feed`` writes to its standard input, which is empty otherwise.
        Raises :class:`CommandError` when it cannot be started or runs out of time, and with ``check`` when
        its status is not 0.
        """
        if not self.live:
            raise RuntimeError(f"a directory tree runs no commands: {argv!r}")
        program = self.which(argv[0])
        if program is None:
            raise CommandError("command-missing", f"{argv[0]}: no such program", status=None)
        with _buffers() as (out, err):
            status = self._run_process([program, *argv[1:]], timeout, env, feed, out, err)
            done = Completed(tuple(argv), status, _content(out), _content(err))
        if check and status != 0:
            raise command_failure(done)
        return done

    def kill(self, pid: int, still_the_same: Callable[[], bool]) -> None:
        """SIGKILL to a process of this machine, if ``still_the_same`` says so once its number cannot change hands.

        A process that is gone is fine. Raises OSError.
        """
        if not self.live:
            raise RuntimeError(f"a directory tree has no processes: {pid}")
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except AttributeError:  # a CPython that was built with the headers of an older Linux, as on RHEL 8
            descriptor = -1
        except OSError as error:
            if error.errno != errno.ENOSYS:  # before Linux 5.3
                raise
            descriptor = -1
        try:
            if not still_the_same():
                return
            if descriptor >= 0:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _run_process(
        self,
        argv: list[str],
        timeout: float,
        env: Optional[Mapping[str, str]],
        feed: Optional[Callable[[BinaryIO], None]],
        out: IO[bytes],
        err: IO[bytes],
    ) -> int:
        # A session of its own: Ctrl-C is for us, and we decide what becomes of the child.
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE if feed else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._command_environment(env),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            # A file cut short, an interpreter that is missing, a noexec mount.
            why = f"{argv[0]}: cannot be started: {error.strerror}"
            raise CommandError("command-not-started", why, status=None) from error
        late = threading.Event()

        def end() -> None:
            late.set()
            _kill_group(process)

        # A timer and not wait(timeout): a child that stops reading blocks us in feed().
        timer = threading.Timer(timeout, end)
        timer.daemon = True
        timer.start()
        try:
            if feed and process.stdin:
                with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                    feed(cast(BinaryIO, pipe))
            status = process.wait()
        finally:
            timer.cancel()
            _kill_group(process)
        if late.is_set():
            said = _one_line(_content(err)) or "it said nothing"
            raise CommandError(
                "command-timeout",
                f"{' '.join(argv)}: no end after {timeout:g} s: {said}",
                status=None,
                stderr=_content(err).decode("utf-8", "backslashreplace"),
            )
        return status


@contextlib.contextmanager
def _cut_off(channel: socket.socket, timeout: float) -> Iterator[None]:
    """End a conversation ``timeout`` seconds from now: a socket has a limit for each piece, which may be small."""

    def end() -> None:
        with contextlib.suppress(OSError):
            channel.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(timeout, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


@contextlib.contextmanager
def _buffers() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    # In memory: a full or missing /tmp must not stop a node.
    with contextlib.ExitStack() as stack:
        files = [
            stack.enter_context(os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "w+b"))
            for name in ("stdout", "stderr")
        ]
        yield files[0], files[1]


def command_failure(done: Completed) -> CommandError:
    """The error that says how ``done`` failed, with what it wrote to stderr."""
    said = _one_line(done.stderr) or _one_line(done.stdout) or "it said nothing"
    ended = f"exit status {done.status}" if done.status >= 0 else f"killed by signal {-done.status}"
    return CommandError(
        "command-failed",
        f"{' '.join(done.argv)}: {ended}: {said}",
        status=done.status,
        stderr=done.stderr.decode("utf-8", "backslashreplace"),
    )
