"""The main job from end to end, for a person to watch: ``tests/demo``.

A release engineer makes a key, the pyz that trusts it, and a signed bundle of
Debian's own containerd, runc and CNI plugins. The two files go to a machine
that has no network, and make it a container host; then it is taken off again.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

from tests.lab import image, packages, roots
from tests.lab.machine import LabError, Machine
from tests.lab.nspawn import NspawnMachine

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "dist/demo"

# nspawn machines have the outer machine's processor, and the lab's disks are for this one.
_ARCHITECTURE = "amd64"

# Lines of one command that are shown.
_SHOWN = 40


def prepare_sources(target: Path = DEMO / _ARCHITECTURE) -> None:
    """Put what ``bundles/demo.yaml`` is made of where it looks for it.

    The packages are links to the lab's cache of unpacked Debian packages.
    """
    target.mkdir(parents=True, exist_ok=True)
    found = packages.fetch(architecture=_ARCHITECTURE)
    for name, package in found.items():
        link = target / name
        link.unlink(missing_ok=True)
        link.symlink_to(package.tree)
    busybox = image.busybox_image(found["busybox-static"].tree / "bin/busybox")
    (target / "busybox.tar").write_bytes(busybox.oci_archive())


def build() -> tuple[Path, Path]:
    """Make the key, the pyz and the demo bundle; return where pyz and bundle are."""
    prepare_sources()
    pyz, bundle = "dist/stratum.pyz", "dist/demo/demo.tar"
    if not (DEMO / "demo.pub").exists():
        _here("-m", "stratum", "bundle", "keygen", "--no-password", "--to", "dist/demo/demo")
    _here("build_zipapp.py", "--trust", "dist/demo/demo.pub", "--output", pyz)
    # The lock stays beside the packages: they are as new as the lab's cache.
    _here(pyz, "bundle", "build", "bundles/demo.yaml", "--platform", f"linux/{_ARCHITECTURE}",
          "--lock", "dist/demo/demo.lock", "--update-lock", "--to", bundle, "--force")
    _here(pyz, "bundle", "sign", "--key", "dist/demo/demo.key", bundle)
    return REPOSITORY / pyz, REPOSITORY / bundle


def walk_through() -> None:
    """Do the main job in a throwaway machine and show each step."""
    root = roots.root_directory()
    pyz, bundle = build()
    with NspawnMachine(root, "demo") as machine:
        _say("a machine with systemd, Debian's Python, no network and no container runtime")
        machine.copy_in(pyz, "/root/stratum.pyz", 0o755)
        machine.copy_in(bundle, "/root/demo.tar")
        _there(machine, "ls", "/root", "/sys/class/net")
        _there(machine, "./stratum.pyz", "up")
        # Where cgroup v1 holds the outer machine's controllers, a container cannot have a weight.
        run = ["stratum", "exec", "--", "ctr", "run", "--rm", "--cni", "--cpu-shares", "0", image.DEMO_IMAGE, "hello"]
        _there(machine, *run, "ip", "address", "show", "eth0")
        _say("reboot")
        machine.reboot()
        _there(machine, "stratum", "status")
        _there(machine, *run, "echo", "a container runs again")
        _there(machine, "stratum", "uninstall", "--dry-run")
        _there(machine, "stratum", "uninstall")
        _there(machine, "ls", "/opt", "/etc/systemd/system", "/var/lib", "/sys/class/net")


def _say(text: str) -> None:
    print(f"\n# {text}", flush=True)


def _here(*arguments: str) -> None:
    """Run Python here, from the repository, and show the command."""
    print(f"$ {shlex.join(['python3', *arguments])}", flush=True)
    done = subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise LabError(f"exit status {done.returncode}")


def _there(machine: Machine, *argv: str) -> None:
    """Run a command in the machine and show it with all that it says."""
    print(f"\ndemo# {shlex.join(argv)}", flush=True)
    begin = time.monotonic()
    # Both outputs in the order in which they come.
    result = machine.run(["sh", "-c", 'exec "$@" 2>&1', "sh", *argv], timeout=300, check=False)
    lines = result.lines
    if len(lines) > _SHOWN:
        lines[_SHOWN // 2 : -_SHOWN // 2] = [f"    ... {len(lines) - _SHOWN} lines more ..."]
    print("\n".join(lines))
    print(f"({time.monotonic() - begin:.1f} s)", flush=True)
    if result.status != 0:
        raise LabError(f"exit status {result.status}\n{machine.failure_report()}")
