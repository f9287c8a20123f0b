"""The compiled modules of cryptography and zstandard: which set this interpreter needs, and where it is loaded from.

A module that is compiled cannot be imported from inside a zip; the dynamic linker wants a file. A command that
may write unpacks the set once into a directory (see ``runtimedir``). One that must write nothing, and one that
finds no directory to use, gives the linker a file that exists in memory only (memfd_create(2)).
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from typing import Callable, Optional

from stratum.errors import StratumError
from stratum.runtimedir import (
    Part,
    Place,
    UnusableError,
    directory_name,
    find_unpacked,
    mount_of,
    open_trusted,
    prune_beside,
    remove_tree,
    unpack,
)

__all__ = ["OLDEST_GLIBC", "Runtime", "Target", "places_for"]

OLDEST_GLIBC = (2, 28)
"""What the manylinux_2_28 wheels in the pyz need."""

ROOT_PLACES = (
    Place("/var/lib/stratum/runtime", 0o755),
    Place("/opt/stratum/runtime", 0o755),
    Place("/usr/local/lib/stratum/runtime", 0o755),
    Place("/run/stratum/runtime", 0o755),
)

_MFD_CLOEXEC = 0x0001
_MFD_NOEXEC_SEAL = 0x0008  # linux/memfd.h; the os module does not name it before 3.13


def places_for(uid: int, environ: Callable[[str], Optional[str]]) -> list[Place]:
    """Return the directories that user ``uid`` may unpack into, the best first. HOME is not relied on."""
    if uid == 0:
        return list(ROOT_PLACES)
    places = []
    cache = environ("XDG_CACHE_HOME")
    if cache and os.path.isabs(cache):
        places.append(Place(os.path.join(cache, "stratum"), 0o700, base=os.path.dirname(cache)))
    try:
        home = pwd.getpwuid(uid).pw_dir
    except KeyError:
        home = ""
    if os.path.isabs(home):
        places.append(Place(os.path.join(home, ".cache/stratum"), 0o700, base=home))
    places.append(Place(f"/run/user/{uid}/stratum", 0o700, base=f"/run/user/{uid}"))
    return places


class Target:
    """What decides which compiled modules fit: interpreter, machine and C library.

    The arguments are those of the running interpreter unless a test gives others.
    """

    def __init__(
        self,
        *,
        implementation: str = sys.implementation.name,
        version: Sequence[int] = tuple(sys.version_info[:3]),
        abiflags: str = getattr(sys, "abiflags", ""),
        machine: Optional[str] = None,
        bits: int = 64 if sys.maxsize > 2**32 else 32,
        libc: Optional[str] = None,
        suffix: str = EXTENSION_SUFFIXES[0],
    ) -> None:
        self.implementation = implementation
        self.version = version
        self.abiflags = abiflags
        self.machine = os.uname().machine if machine is None else machine
        self.bits = bits
        self.libc = _libc() if libc is None else libc
        self.suffix = suffix

    @property
    def key(self) -> str:
        """The name of the set of compiled parts, for example ``cp311-x86_64``."""
        return f"cp{self.version[0]}{self.version[1]}-{self.machine}"

    def unfit(self, keys: Iterable[str]) -> Optional[tuple[str, str]]:
        """Return why none of the sets ``keys`` fits and what to do about it, or None if one does."""
        carried = sorted((_minor(key), key.split("-", 1)[1]) for key in keys)
        pythons = _range([minor for minor, _ in carried])
        running = f"{self.implementation} {'.'.join(map(str, self.version))} ({sys.executable or 'unknown path'})"
        another = f"run it with another interpreter, as in: python3.{carried[-1][0]} stratum.pyz"
        if self.implementation != "cpython" or "t" in self.abiflags:
            kind = "a free-threaded build" if self.implementation == "cpython" else "not CPython"
            return f"this is {running}, {kind}; the compiled parts need CPython {pythons}", another
        if self.machine not in {machine for _, machine in carried} or self.bits != 64:
            machines = " and ".join(sorted({machine for _, machine in carried}))
            have = f"{self.machine} with a {self.bits}-bit interpreter"
            return f"this machine is {have}; the compiled parts are for {machines}", "use a stratum.pyz built for it"
        if self.key not in keys:
            return f"this is {running}; the compiled parts need CPython {pythons}", (
                f"use a stratum.pyz that is built for it, or {another}"
            )
        name, _, release = self.libc.partition(" ")
        if name != "glibc" or "musl" in self.suffix:
            return "this machine's C library is not glibc (musl?); the compiled parts need glibc", (
                "use a distribution with glibc 2.28 or later"
            )
        if tuple(int(part) for part in release.split(".")[:2]) < OLDEST_GLIBC:
            return f"this machine has glibc {release}; the compiled parts need 2.28 or later", (
                "use a newer release of the distribution"
            )
        return None


def _libc() -> str:
    # glibc answers "glibc 2.36"; musl does not know the name.
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        return ""


def _minor(key: str) -> int:
    return int(key.split("-", 1)[0][len("cp3") :])


def _range(minors: Sequence[int]) -> str:
    first, last = min(minors), max(minors)
    return f"3.{first}" if first == last else f"3.{first} to 3.{last}"


def _load(spec: ModuleSpec) -> None:
    module = module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    sys.modules[spec.name] = module


class Runtime:
    """The set of compiled modules of this process and the place that it is loaded from."""

    def __init__(
        self,
        key: str,
        parts: Sequence[Part],
        *,
        read: Callable[[str], bytes],
        places: Sequence[Place],
        shared: Sequence[Place] = (),
        owners: frozenset[int],
        load: Callable[[ModuleSpec], None] = _load,
    ) -> None:
        """``shared`` are places that are used when they are filled already, but are never filled from here.

        ``load`` really loads a module; it raises ImportError.
        """
        self._load = load
        self._name = directory_name(key, parts)
        self._parts = parts
        self._read = read
        self._places = places
        self._shared = shared
        self._owners = owners
        self._files: dict[str, str] = {}
        self._persisted = False
        self.directory: Optional[str] = None
        self.created: list[str] = []

    @classmethod
    def for_this_process(cls, lines: Iterable[Sequence[str]], read: Callable[[str], bytes]) -> Runtime:
        """Choose this interpreter's set from the ``part`` lines of the pyz's list. Raises StratumError if none fits."""
        sets: dict[str, list[Part]] = {}
        for key, module, member, size, digest in lines:
            sets.setdefault(key, []).append(Part(module, member, int(size), digest))
        target = Target()
        unfit = target.unfit(sets)
        if unfit is not None:
            raise StratumError("no-compiled-parts", unfit[0], hint=unfit[1])
        uid = os.geteuid()
        return cls(
            target.key,
            sets[target.key],
            read=read,
            places=places_for(uid, os.environ.get),
            shared=() if uid == 0 else ROOT_PLACES,
            owners=frozenset({0, uid}),
        )

    def prepare(self, *, persist: bool) -> None:
        """Decide where the modules are loaded from. Raises StratumError when no place will do."""
        if self._persisted or (self._files and not persist):
            return
        reasons: list[str] = []
        if self._use_unpacked(reasons) or (persist and self._unpack(reasons)):
            self._persisted = True
        elif not self._files:
            self._use_memory(reasons)

    def spec(self, module: str) -> ModuleSpec:
        """Return how to import ``module``, after ``prepare``."""
        file = self._files[module]
        return ModuleSpec(module, ExtensionFileLoader(module, file), origin=file)

    def _use_unpacked(self, reasons: list[str]) -> bool:
        for place in [*self._places, *self._shared]:
            try:
                found = find_unpacked(place, self._name, self._parts, self._owners)
                if found is not None:
                    self._use_directory(found)
                    return True
            except (UnusableError, OSError) as error:
                reasons.append(_reason(place, error))
        return False

    def _unpack(self, reasons: list[str]) -> bool:
        reasons.clear()  # each place is about to be tried again, and says more
        for place in self._places:
            created: list[str] = []
            try:
                path = unpack(place, self._name, self._parts, self._owners, read=self._read, created=created)
                self._use_directory(path)
                self.created += created
                return True
            except (UnusableError, OSError) as error:
                reasons.append(_reason(place, error))
                self._remove(created)
            except BaseException:
                self._remove(created)
                raise
        return False

    def _use_directory(self, path: str) -> None:
        files = {part.module: os.path.join(path, part.file_name) for part in self._parts}
        self._load_from(files, path)
        self.directory = path

    def _load_from(self, files: dict[str, str], where: str) -> None:
        """Take ``files``, proved by loading the smallest module. Raises UnusableError with what the linker said."""
        before, self._files = self._files, files
        smallest = min((part for part in self._parts if "." not in part.module), key=lambda part: part.size)
        try:
            if smallest.module not in sys.modules:
                self._load(self.spec(smallest.module))
        except ImportError as error:
            self._files = before
            point, options = mount_of(where)
            because = f" ({point} is mounted noexec)" if "noexec" in options else ""
            raise UnusableError(f"{where}: {error}{because}") from None

    def _use_memory(self, reasons: list[str]) -> None:
        try:
            files = {part.module: _memory_file(part, self._read(part.member)) for part in self._parts}
            self._load_from(files, "memory")
        except (UnusableError, OSError) as error:
            reasons.append(f"memory: {error}")
            raise StratumError(
                "compiled-parts",
                "cannot load cryptography and zstandard from any place: " + "; ".join(reasons),
                hint=f"make {self._places[0].path} writable by its owner only and on a file system without noexec",
            ) from None

    def undo_created(self) -> None:
        """Remove the directories in ``created``, except what something else has been put into since."""
        self._remove(self.created)
        self.created = []

    def _remove(self, created: Sequence[str]) -> None:
        for path in reversed(created):
            parent, name = os.path.split(path)
            try:
                fd = open_trusted(Place(parent, 0), self._owners, create=False, created=[])
            except (UnusableError, OSError):
                continue
            try:
                if name == self._name:
                    remove_tree(fd, name)
                else:
                    os.rmdir(name, dir_fd=fd)
            except OSError:
                pass  # another process has put something into it
            finally:
                os.close(fd)

    def prune(self) -> list[str]:
        """Remove what other builds unpacked beside the directory in use; return the paths that were removed."""
        try:
            return [] if self.directory is None else prune_beside(self.directory, self._owners)
        except (UnusableError, OSError):
            return []  # left for another time: they are only a few megabytes


def _reason(place: Place, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{place.path}: {os.strerror(error.errno or 0)}"
    return str(error)


def _memory_file(part: Part, data: bytes) -> str:
    """Return the path of a file in memory that holds ``data``. It stays open as long as the process lives.

    The linker knows a library by its path, so a descriptor that was closed and used again would give the wrong one.
    """
    try:
        # With vm.memfd_noexec=2 the kernel makes a memfd only if it can never be executed as a program; mapping it
        # as a library is still allowed. Kernels before 6.3 do not know the flag.
        fd = os.memfd_create(part.file_name, _MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:
        fd = os.memfd_create(part.file_name, _MFD_CLOEXEC)
    with open(fd, "wb", buffering=0, closefd=False) as stream:
        view = memoryview(data)
        while view:
            view = view[stream.write(view) or 0 :]
    return f"/proc/self/fd/{fd}"
