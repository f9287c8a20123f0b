"""What unit tests share: directories that nobody else can write to, the built pyz, the interpreters of the machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratum.runtimedir import Place, UnusableError, open_trusted
from tests.pyz import ROOT, built_pyz, default_cache


@pytest.fixture(autouse=True)
def process_state() -> Iterator[None]:
    """Commands that run in this process set signal handlers and the umask; the next test finds them as they were."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    mask = os.umask(0o022)
    yield
    os.umask(mask)
    for number, handler in signals.items():
        signal.signal(number, handler)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory: a rename over a file takes milliseconds on ext4."""
    path = tempfile.mkdtemp(prefix="stratum-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    yield Path(path)
    shutil.rmtree(path)


@pytest.fixture
def safe_dir() -> Iterator[Path]:
    """A directory that only this user can write to, as is every directory above it; /tmp never is one."""
    for parent in (Path.home(), Path("/var/lib"), ROOT):
        try:
            os.close(open_trusted(Place(str(parent), 0), frozenset({0, os.geteuid()}), create=False, created=[]))
            path = tempfile.mkdtemp(prefix=".stratum-test-", dir=parent)
        except (UnusableError, OSError):
            continue
        yield Path(path)
        shutil.rmtree(path)
        return
    pytest.fail("no directory on this machine is writable by its owner only; the tests cannot run here")


@pytest.fixture(scope="session")
def pyz() -> Path:
    """The pyz for all interpreters and machines, of the present sources."""
    return built_pyz(default_cache())


def interpreters() -> dict[str, str]:
    """Return the interpreters of this machine by version (``3.11.2``): Debian's, pyenv's, the one that runs us."""
    candidates = [*Path("/usr/bin").glob("python3*"), *Path("/usr/local/bin").glob("python3*")]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    candidates += [*pyenv.glob("*/bin/python"), Path(sys.executable)]
    found = {}
    for path in candidates:
        name = path.name.replace("python", "").replace(".", "")
        if name.isdigit() or not name:
            code = "import sys; sys.stdout.write('.'.join(map(str, sys.version_info[:3])))"
            run = subprocess.run([str(path), "-c", code], capture_output=True, text=True, timeout=60, check=False)
            if run.returncode == 0:
                found[run.stdout] = str(path)
    return found
