#!/usr/bin/env python3
"""Build ``stratum.pyz``: one file that runs on every CPython and machine that the lock has wheels for.

    python3 build_zipapp.py                                   dist/stratum.pyz, all interpreters and machines
    python3 build_zipapp.py --python 3.11 --arch x86_64       a slim one
    python3 build_zipapp.py --trust release.pub               trusts that minisign key
    python3 build_zipapp.py --update-lock                     chooses the newest wheels

The wheels are those of ``zipapp.lock``, checked by SHA-256; pip downloads them once into a cache. The same
sources, lock, keys and SOURCE_DATE_EPOCH give the same bytes.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from pyzbuild.archive import TooLargeError, write_archive
from pyzbuild.lock import MACHINES, PYTHONS, Lock, LockError, fetch_wheels, read_wheel, set_key, update_lock
from pyzbuild.wheels import open_wheel

HERE = Path(__file__).resolve().parent
LOCK = HERE / "zipapp.lock"

MEGABYTE = 1000 * 1000
LARGEST_FULL = 60 * MEGABYTE
LARGEST_SLIM = 10 * MEGABYTE


class BuildError(Exception):
    """The pyz cannot be built; the message is one line."""


@dataclass(frozen=True)
class Options:
    """What to build. The defaults make the file for every interpreter and machine."""

    output: Path
    cache: Path
    pythons: Sequence[str] = PYTHONS
    machines: Sequence[str] = MACHINES
    trust: Sequence[Path] = ()
    epoch: int = 0
    source: Path = HERE

    @property
    def limit(self) -> int:
        """The largest size of the output in bytes."""
        return LARGEST_SLIM if len(self.pythons) == len(self.machines) == 1 else LARGEST_FULL


def build(options: Options) -> None:
    """Build the pyz. Raises BuildError, LockError or TooLargeError; the output is then as it was before."""
    lock = Lock.read(LOCK)
    fetch_wheels(lock, options.pythons, options.machines, options.cache)
    members = collect_own_files(options.source)
    facts = add_keys(members, options.trust)
    facts += add_wheels(members, lock, options)
    members["stratum/pyz.list"] = "".join(f"{fact}\n" for fact in facts).encode("ascii")
    write_archive(members, options.output, epoch=options.epoch, limit=options.limit)


def collect_own_files(source: Path) -> dict[str, bytes]:
    """Return the files of our package and the manual pages, by their name in the zip."""
    members = {
        str(path.relative_to(source)): path.read_bytes()
        for directory in ("stratum", "man")
        for path in _files_below(source / directory)
    }
    members["__main__.py"] = members["stratum/__main__.py"]
    return members


def _files_below(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        parts = path.relative_to(directory).parts
        if path.is_file() and path.suffix != ".pyc" and not any(p.startswith(".") or p == "__pycache__" for p in parts):
            yield path


def add_keys(members: dict[str, bytes], paths: Sequence[Path]) -> list[str]:
    """Add minisign public keys under their key id; return the facts about them. Raises BuildError for another file."""
    names = set()
    for path in paths:
        data = path.read_bytes()
        name = f"stratum/trusted_keys/{key_id(path, data)}.pub"
        members[name] = data
        names.add(name)
    return [f"key {name}" for name in sorted(names)]


def key_id(path: Path, data: bytes) -> str:
    """Return the id of a minisign public key as minisign prints it. Raises BuildError if the file is not one."""
    # https://jedisct1.github.io/minisign/: a comment, then base64 of "Ed", 8 bytes of id, 32 bytes of key.
    lines = data.decode("utf-8", "replace").splitlines()
    try:
        raw = base64.b64decode(lines[1], validate=True)
    except (IndexError, binascii.Error, ValueError):
        raw = b""
    if not lines or not lines[0].startswith("untrusted comment:") or len(raw) != 42 or raw[:2] != b"Ed":
        raise BuildError(f"{path}: not a minisign public key")
    return raw[2:10][::-1].hex().upper()


def add_wheels(members: dict[str, bytes], lock: Lock, options: Options) -> list[str]:
    """Add what the wheels give; return the facts about it."""
    facts: list[str] = []
    licences: dict[str, bytes] = {}
    vendored: dict[str, dict[str, bytes]] = {}
    for python in sorted(options.pythons, key=lambda python: int(python.split(".")[1])):
        directory = f"vendor/cp{python.replace('.', '')}"
        python_files: dict[str, bytes] = {}
        for machine in sorted(options.machines):
            for wheel in lock.wheels(python, machine):
                contents = open_wheel(wheel, read_wheel(wheel, options.cache), machine)
                licences.update(contents.licences)
                facts += _add_compiled(members, contents.compiled, wheel.tags[1], set_key(python, machine))
                for name, data in contents.python.items():
                    if python_files.setdefault(name, data) != data:
                        raise BuildError(f"{wheel.file}: {name} differs from machine to machine")
        _add_vendored(vendored, directory, python_files)
    for directory, files in vendored.items():
        members.update({f"{directory}/{name}": data for name, data in files.items()})
    names = [directory.split("/")[1] for directory in vendored]
    members["vendor/LICENCES"] = b"\n".join(f"== {n} ==\n\n".encode() + licences[n] for n in sorted(licences))
    return [" ".join(["vendor", *names]), *sorted(facts)]


def _add_compiled(members: dict[str, bytes], compiled: dict[str, bytes], abi: str, key: str) -> list[str]:
    machine = key.split("-")[1]
    facts = []
    for module, data in compiled.items():
        # A module for the stable ABI has the same name for each interpreter, and so is there once.
        member = f"compiled/{machine}/{abi}/{module}.so"
        members[member] = data
        facts.append(f"part {key} {module} {member} {len(data)} {hashlib.sha256(data).hexdigest()}")
    return facts


def _add_vendored(vendored: dict[str, dict[str, bytes]], directory: str, files: dict[str, bytes]) -> None:
    """Put in ``directory`` the packages of this interpreter that differ from what the older ones look up.

    At run time an interpreter searches its directory first and then those of the older ones, see boot.py. A package
    goes in as a whole: Python does not look for the rest of it elsewhere.
    """
    visible: dict[str, dict[str, bytes]] = {}
    for older in vendored.values():
        visible.update(_by_package(older))
    own = {
        name: data
        for package, package_files in _by_package(files).items()
        if visible.get(package) != package_files
        for name, data in package_files.items()
    }
    if own:
        vendored[directory] = own


def _by_package(files: dict[str, bytes]) -> dict[str, dict[str, bytes]]:
    packages: dict[str, dict[str, bytes]] = {}
    for name, data in files.items():
        packages.setdefault(name.split("/")[0], {})[name] = data
    return packages


def default_cache() -> Path:
    """Return the directory that wheels are kept in from build to build."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache, "stratum-build", "wheels")


def parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=HERE / "dist" / "stratum.pyz", help="default: dist/stratum.pyz")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="only this interpreter (repeatable)")
    parser.add_argument("--arch", action="append", choices=MACHINES, help="only this machine (repeatable)")
    parser.add_argument("--trust", action="append", type=Path, metavar="KEY.pub", help="build in a minisign public key")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="wheels, default: %(default)s")
    parser.add_argument("--update-lock", action="store_true", help="write zipapp.lock with the newest wheels; no build")
    return parser.parse_args(arguments)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command line; return the exit status."""
    given = parse(arguments)
    try:
        if given.update_lock:
            update_lock(PYTHONS, MACHINES).write(LOCK)
            print(LOCK)
            return 0
        options = Options(
            output=given.output,
            cache=given.cache,
            pythons=tuple(dict.fromkeys(given.python or PYTHONS)),
            machines=tuple(dict.fromkeys(given.arch or MACHINES)),
            trust=given.trust or (),
            epoch=int(os.environ.get("SOURCE_DATE_EPOCH") or 0),
        )
        build(options)
    except (BuildError, LockError, TooLargeError, OSError, ValueError) as error:
        print(f"build_zipapp: error: {error}", file=sys.stderr)
        return 1
    digest = hashlib.sha256(options.output.read_bytes()).hexdigest()
    print(f"{options.output}  {options.output.stat().st_size / MEGABYTE:.1f} MB  sha256:{digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
