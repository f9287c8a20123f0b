"""Programs that the lab needs on the outer machine, and where it keeps things."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.lab.machine import LabError

HINT = "run tests/prepare.sh as root on a Debian 12 or 13"


def require(*programs: str) -> None:
    """Check that this process is root and that the programs are there.

    :raises LabError: naming what is missing and how to get it.
    """
    if os.geteuid() != 0:
        raise LabError("the lab makes machines and must run as root")
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    missing = [name for name in programs if shutil.which(name, path=path) is None]
    if missing:
        raise LabError(f"missing programs: {', '.join(missing)}; {HINT}")


def tool(argv: Sequence[str], *, timeout: float, cwd: Path | None = None) -> str:
    """Run a program of the outer machine and return its standard output.

    :param timeout: seconds.
    :raises LabError: with the program's own words if it fails.
    """
    environment = dict(os.environ, LC_ALL="C.UTF-8", DEBIAN_FRONTEND="noninteractive")
    environment["PATH"] = environment.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    try:
        done = subprocess.run(
            list(argv), cwd=cwd, env=environment, timeout=timeout, stdin=subprocess.DEVNULL,
            capture_output=True, check=False,
        )
    except FileNotFoundError as error:
        raise LabError(f"{argv[0]}: not found; {HINT}") from error
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{argv[0]} did not end within {timeout:.0f} s: {' '.join(argv)}") from error
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip()[-4000:]
        raise LabError(f"{' '.join(argv)}: exit status {done.returncode}\n{words}")
    return done.stdout.decode(errors="replace")


def cache_directory() -> Path:
    """Return the directory in which the lab keeps roots, disks and packages."""
    directory = Path(os.environ.get("STRATUM_LAB_CACHE") or "/var/cache/stratum-lab")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def key(*parts: str) -> str:
    """Return a short name for a recipe."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path | None]:
    """Make ``target`` once, even if two test runs start together.

    Yields None if it is there already, else a scratch path beside it, which
    becomes the target by one rename when the block ends without an error.
    """
    if target.exists():
        yield None
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            yield None
            return
        # Nobody else can be at work here: what lies about is from a run that was killed.
        for left in target.parent.glob(f".{target.name}.part-*"):
            shutil.rmtree(left)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
        try:
            yield scratch / "new"
            os.rename(scratch / "new", target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
