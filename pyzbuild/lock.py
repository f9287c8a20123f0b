"""``zipapp.lock``: which wheel, with which SHA-256, goes into the pyz for each interpreter and machine."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Lock", "MACHINES", "PYTHONS", "Wheel", "fetch_wheels", "set_key", "update_lock"]

PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 28)

# cryptography excludes 3.9.0 and 3.9.1, and pip takes "3.9" to be 3.9.0: it would fall back to a release of 2024.
_ASSUMED_PATCH = {"3.9": "3.9.2"}

_REQUIREMENTS = ("cryptography", "pyyaml", "requests", "tqdm", "zstandard")

# Has a pure wheel too, which is all that requests needs of it.
_PURE = frozenset({"charset-normalizer"})

# cffi is there for _cffi_backend only; its C parser is for building extensions.
_DROPPED = frozenset({"pycparser"})


class LockError(Exception):
    """The lock, a wheel or pip is not what it should be; the message is one line."""


@dataclass(frozen=True)
class Wheel:
    """A wheel that the lock names."""

    file: str
    sha256: str

    @property
    def distribution(self) -> str:
        """Its project's name, normalised as in PEP 503."""
        return re.sub(r"[-_.]+", "-", self.file.split("-")[0]).lower()

    @property
    def version(self) -> str:
        """Its project's version."""
        return self.file.split("-")[1]

    @property
    def tags(self) -> tuple[str, str, str]:
        """Its interpreter, ABI and platform tags (PEP 425), each of which may be several joined with dots."""
        python, abi, platform = self.file[: -len(".whl")].split("-")[-3:]
        return python, abi, platform


@dataclass(frozen=True)
class Lock:
    """The wheels of each set; a set is named like ``cp311-x86_64``."""

    sets: dict[str, tuple[Wheel, ...]]

    @classmethod
    def read(cls, path: Path) -> Lock:
        """Read the lock. Raises LockError if it is not one."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            wheels = {file: Wheel(file, digest) for file, digest in document["wheels"].items()}
            return cls({key: tuple(wheels[file] for file in files) for key, files in document["sets"].items()})
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise LockError(f"{path}: not a lock of wheels: {error!r}; write it with --update-lock") from None

    def write(self, path: Path) -> None:
        """Write the lock, sorted, so that a diff shows what changed."""
        digests = {wheel.file: wheel.sha256 for wheels in self.sets.values() for wheel in wheels}
        document = {
            "sets": {key: sorted(wheel.file for wheel in wheels) for key, wheels in self.sets.items()},
            "wheels": {file: digests[file] for file in sorted(digests)},
        }
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    def wheels(self, python: str, machine: str) -> tuple[Wheel, ...]:
        """Return the wheels of one set. Raises LockError if the lock does not have it."""
        try:
            return self.sets[set_key(python, machine)]
        except KeyError:
            raise LockError(f"the lock has no wheels for CPython {python} on {machine}") from None


def set_key(python: str, machine: str) -> str:
    """Return the name of the set for ``3.11`` and ``x86_64``: ``cp311-x86_64``."""
    return f"cp{python.replace('.', '')}-{machine}"


def fetch_wheels(lock: Lock, pythons: Sequence[str], machines: Sequence[str], cache: Path) -> None:
    """Put every wheel of the sets into ``cache``; nothing is downloaded that is there with the right digest.

    Raises LockError when a wheel cannot be had, or is not the one in the lock.
    """
    cache.mkdir(parents=True, exist_ok=True)
    for python in pythons:
        for machine in machines:
            wheels = lock.wheels(python, machine)
            if not all(_is_intact(cache / wheel.file, wheel) for wheel in wheels):
                _download(wheels, python, machine, cache)


def read_wheel(wheel: Wheel, cache: Path) -> bytes:
    """Return the bytes of a cached wheel. Raises LockError if they are not those of the lock."""
    data = (cache / wheel.file).read_bytes()
    if hashlib.sha256(data).hexdigest() != wheel.sha256:
        raise LockError(f"{cache / wheel.file}: SHA-256 is not that of the lock")
    return data


def _is_intact(path: Path, wheel: Wheel) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == wheel.sha256


def _download(wheels: Iterable[Wheel], python: str, machine: str, cache: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache) as directory:
        requirements = Path(directory, "requirements.txt")
        lines = [f"{wheel.distribution}=={wheel.version} --hash=sha256:{wheel.sha256}" for wheel in wheels]
        requirements.write_text("\n".join(lines) + "\n", encoding="ascii")
        arguments = ["--no-deps", "--require-hashes", "--requirement", str(requirements)]
        _pip_download(Path(directory), python, _platforms(machine), arguments)
        for wheel in wheels:
            # pip has compared the digests, but what we rely on we check.
            if not _is_intact(Path(directory, wheel.file), wheel):
                raise LockError(f"pip did not download {wheel.file} with the SHA-256 of the lock")
            Path(directory, wheel.file).replace(cache / wheel.file)


def update_lock(pythons: Sequence[str], machines: Sequence[str]) -> Lock:
    """Resolve the newest wheels that each interpreter can have. Raises LockError when pip finds none."""
    sets: dict[str, tuple[Wheel, ...]] = {}
    for python in pythons:
        for machine in machines:
            with tempfile.TemporaryDirectory() as directory:
                sets[set_key(python, machine)] = tuple(_resolve(Path(directory), python, machine))
    return Lock({key: tuple(_share_abi3(wheel, sets.values()) for wheel in wheels) for key, wheels in sets.items()})


def _resolve(directory: Path, python: str, machine: str) -> Iterable[Wheel]:
    _pip_download(directory, python, _platforms(machine), list(_REQUIREMENTS))
    for wheel in _wheels_in(directory):
        if wheel.distribution in _DROPPED:
            continue
        if wheel.distribution in _PURE:
            pure = directory / "pure"
            _pip_download(pure, python, ["any"], ["--no-deps", f"{wheel.distribution}=={wheel.version}"])
            yield from _wheels_in(pure)
        else:
            yield wheel


def _wheels_in(directory: Path) -> list[Wheel]:
    return [Wheel(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in sorted(directory.glob("*.whl"))]


def _share_abi3(wheel: Wheel, sets: Iterable[tuple[Wheel, ...]]) -> Wheel:
    """Return the wheel for the oldest interpreter with the same release, machine and stable ABI: it serves all."""
    if wheel.tags[1] != "abi3":
        return wheel
    alike = [
        other
        for wheels in sets
        for other in wheels
        if (other.distribution, other.version, other.tags[1:]) == (wheel.distribution, wheel.version, wheel.tags[1:])
    ]
    return min(alike, key=lambda other: int(other.tags[0][len("cp3") :]))


def _platforms(machine: str) -> list[str]:
    # pip itself would take the newest that the building machine can run, which is newer than our floor.
    return [f"manylinux_{GLIBC[0]}_{minor}_{machine}" for minor in range(GLIBC[1], 16, -1)] + [
        f"manylinux2014_{machine}"
    ]


def _pip_download(directory: Path, python: str, platforms: Sequence[str], arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--dest", str(directory), "--implementation", "cp"]
    command += ["--python-version", _ASSUMED_PATCH.get(python, f"{python}.0")]
    for platform in platforms:
        command += ["--platform", platform]
    abis = ["none"] if list(platforms) == ["any"] else [f"cp{python.replace('.', '')}", "abi3", "none"]
    for abi in abis:
        command += ["--abi", abi]
    run = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if run.returncode:
        said = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or run.stderr.splitlines()[-1:]
        raise LockError(f"pip download for CPython {python}: {' '.join(said) or 'failed and said nothing'}")
