"""First steps of a run, standard library only: streams, the search path inside the pyz, compiled parts.

From a source tree or a venv there is no pyz: the search path stays as it is, ``require_compiled`` does nothing
and no key is built in.

The pyz holds ``stratum/pyz.list``, one fact a line, written by ``build_zipapp.py``::

    vendor cp39 cp310                                  directories under vendor/, oldest first
    key stratum/trusted_keys/<KEYID>.pub               a minisign public key that was built in
    part <set> <module> <member> <size> <sha256>       a compiled module of the set, for example cp311-x86_64
"""

from __future__ import annotations

import os
import sys
import zipimport

# typing and dataclasses would cost more time than all that is done here, so neither is imported at run time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from typing import Optional

    from stratum.compiled import Runtime

__all__ = [
    "PartsFinder",
    "Pyz",
    "builtin_keys",
    "created_paths",
    "prune_runtime",
    "require_compiled",
    "setup_streams",
    "start",
    "undo_created",
]

LIST_MEMBER = "stratum/pyz.list"


class Pyz:
    """The zip file that this program runs from."""

    def __init__(self, loader: zipimport.zipimporter) -> None:
        self._loader = loader
        self.path = loader.archive

    @classmethod
    def running(cls) -> Optional[Pyz]:
        """Return the pyz that this module was loaded from, or None in a source tree or a venv."""
        loader = __spec__.loader
        return cls(loader) if isinstance(loader, zipimport.zipimporter) else None

    def read(self, member: str) -> bytes:
        """Return the bytes of ``member`` (a name in the zip, with ``/``). Raises OSError if it is not there."""
        return self._loader.get_data(self.path + "/" + member)

    def facts(self, kind: str) -> Iterator[list[str]]:
        """Yield the fields of each line of that kind in the pyz's list."""
        for line in self.read(LIST_MEMBER).decode("ascii").splitlines():
            fields = line.split(" ")
            if fields[0] == kind:
                yield fields[1:]


def start() -> None:
    """Make the process fit to run in: working streams, vendored packages importable, compiled parts found.

    Writes nothing and unpacks nothing.
    """
    setup_streams()
    pyz = Pyz.running()
    if pyz is None:
        return
    for names in pyz.facts("vendor"):
        # Behind the pyz and before all else: the machine's own packages must not hide the ones that were tested.
        sys.path[1:1] = vendor_paths(pyz.path, names, sys.version_info[1])
    sys.meta_path.insert(0, PartsFinder(pyz))


def vendor_paths(archive: str, names: Sequence[str], minor: int) -> list[str]:
    """Return the search path entries for CPython 3.``minor``, the most particular first.

    ``vendor/cp310`` holds what differs from the directories before it, for 3.10 and every later interpreter.
    """
    fitting = [name for name in names if int(name[len("cp3") :]) <= minor]
    return [f"{archive}/vendor/{name}" for name in reversed(fitting)]


def setup_streams() -> None:
    """Give the process three open standard streams that never raise UnicodeEncodeError.

    With a closed stream Python sets ``sys.stdin`` (or stdout, stderr) to None, and the next file that is opened
    takes the free descriptor: a child's stderr could then land in the bundle. /dev/null fills the gap. In a locale
    that is not UTF-8, a character that it lacks is written as a backslash escape.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == number:
                os.set_inheritable(opened, True)
            else:
                os.dup2(opened, number)
                os.close(opened)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def builtin_keys() -> list[bytes]:
    """Return the minisign public key files that this pyz was built to trust; none outside a pyz."""
    pyz = Pyz.running()
    if pyz is None:
        return []
    return [pyz.read(fields[0]) for fields in pyz.facts("key")]


class PartsFinder:
    """Finds the compiled modules, which an import cannot load from inside a zip.

    It stands in ``sys.meta_path``, the interpreter's own table, so there is no global of ours. What it needs to
    unpack is imported when a compiled module is first asked for.
    """

    def __init__(self, pyz: Pyz) -> None:
        self._pyz = pyz
        self._runtime: Optional[Runtime] = None
        self.names = frozenset(fields[1] for fields in pyz.facts("part"))

    @property
    def runtime(self) -> Runtime:
        """The compiled parts of this interpreter. Raises StratumError if the pyz has none."""
        if self._runtime is None:
            from stratum.compiled import Runtime

            self._runtime = Runtime.for_this_process(self._pyz.facts("part"), self._pyz.read)
        return self._runtime

    @property
    def started(self) -> Optional[Runtime]:
        """The same, but None if nothing has asked for a compiled module yet."""
        return self._runtime

    def find_spec(
        self,
        name: str,
        path: object = None,  # noqa: ARG002 - the import system's protocol
        target: object = None,  # noqa: ARG002
    ) -> Optional[ModuleSpec]:
        """Answer the import system for the compiled modules; a caller that forgot to prepare writes nothing."""
        if name not in self.names:
            return None
        self.runtime.prepare(persist=False)
        return self.runtime.spec(name)


def require_compiled(*, persist: bool) -> None:
    """Make cryptography and zstandard importable; call it just before the first import of either.

    With ``persist`` the compiled parts are unpacked into a directory that later runs use again. Without it
    nothing is written to a disk: a directory that is there already is used, else they are loaded from memory.
    Cheap when called again, and does nothing outside a pyz. Raises StratumError when this interpreter or machine
    has no compiled parts in the pyz, or when they cannot be loaded from any place.
    """
    finder = _finder()
    if finder is not None:
        finder.runtime.prepare(persist=persist)


def created_paths() -> tuple[str, ...]:
    """Return the directories that unpacking made in this process, in the order in which they were made."""
    runtime = _started_runtime()
    return () if runtime is None else tuple(runtime.created)


def undo_created() -> None:
    """Remove what this process unpacked, for a command that failed before it installed anything.

    A directory that something else has been put into since stays.
    """
    runtime = _started_runtime()
    if runtime is not None:
        runtime.undo_created()


def prune_runtime() -> list[str]:
    """Remove what other builds unpacked beside the directory in use; return the paths that were removed.

    Does nothing when this process uses no such directory.
    """
    runtime = _started_runtime()
    return [] if runtime is None else runtime.prune()


def _finder() -> Optional[PartsFinder]:
    return next((finder for finder in sys.meta_path if isinstance(finder, PartsFinder)), None)


def _started_runtime() -> Optional[Runtime]:
    finder = _finder()
    return None if finder is None else finder.started
