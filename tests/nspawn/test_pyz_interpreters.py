"""The same pyz in the interpreters of four Debian releases: 3.9, 3.11, 3.13 and the newest.

No machine is booted; each root is only entered, in mounts of its own, and never written to.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.lab import roots
from tests.pyz import USE_EVERYTHING, built_pyz, default_cache

# The places that root unpacks into are on an empty tmpfs; the rest of the root is read-only.
ENTER = """
root=$1 pyz=$2; shift 2
mount --bind "$root" "$root"
mount -t tmpfs -o mode=0755 none "$root/var/lib"
mount -t tmpfs none "$root/mnt"
touch "$root/mnt/stratum.pyz"
mount --bind "$pyz" "$root/mnt/stratum.pyz"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
mount -o remount,bind,ro "$root"
exec env -i PATH=/usr/bin:/bin:/usr/sbin chroot "$root" /usr/bin/python3 -I -S "$@"
"""

START = """
import sys
sys.path.insert(0, "/mnt/stratum.pyz")
from stratum import boot
boot.start()
"""


def enter(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    pyz = built_pyz(default_cache())
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", ENTER, "sh", str(root), str(pyz)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("recipe", roots.PYTHON_ROOTS, ids=lambda recipe: str(recipe.suite))
def test_the_pyz_starts_and_every_package_works(recipe: roots.Recipe) -> None:
    root = roots.root_directory(recipe)
    done = enter(root, "/mnt/stratum.pyz", "--version")
    assert (done.stdout, done.stderr, done.returncode) == ("stratum 0.1.0\n", "", 0)
    done = enter(root, "-c", START + USE_EVERYTHING.format(persist=False) + "print(boot.created_paths())")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("/proc/self/fd/")
    assert done.stdout.endswith("\n()\n")
    done = enter(root, "-c", START + USE_EVERYTHING.format(persist=True))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("/var/lib/stratum/runtime/cp3")
