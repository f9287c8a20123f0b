"""How long the stack is down in an upgrade, and how much an upgrade writes.

Both are measured on a lab machine with the real containerd of Debian 12: release 1.1 differs from 1.0 in one of three
components. The time down is what a client sees: how long nobody accepts connections on containerd's socket. Upgrades
and a stop and start of the same unit by hand take turns in one run.
"""

from __future__ import annotations

import json
import statistics

from tests.bench.frame import Result
from tests.lab import image, packages, roots
from tests.lab.node import bring
from tests.lab.nspawn import NspawnMachine
from tests.lab.releases import releases
from tests.nspawn.upgrading import Upgrading
from tests.pyz import built_pyz, default_cache

LARGEST_DOWN_RATIO = 1.2
MOST_RUNS = 7
BY_HAND = ["sh", "-c", "systemctl stop stratum-containerd.service && systemctl start stratum-containerd.service"]

_DOWN = r"""
import socket, subprocess, sys, time

def up():
    with socket.socket(socket.AF_UNIX) as channel:
        return channel.connect_ex("/run/stratum/containerd/containerd.sock") == 0

assert up()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
down, last = 0.0, time.perf_counter()
while process.poll() is None:
    time.sleep(0.001)
    now = time.perf_counter()
    if not up():
        down += now - last
    last = now
assert process.returncode == 0 and up(), process.stderr.read()
assert down > 0, "it was never down"
print(down)
"""

_WRITTEN = r"""
import json, os, sys

found = {}
for directory, names, files in os.walk("/opt/stratum"):
    for name in names + files:
        info = os.lstat(os.path.join(directory, name))
        found[info.st_ino] = info.st_size if name in files else 0
print(json.dumps([len(found), sum(found.values())]))
"""


def run(runs: int) -> list[Result]:
    """Measure on a machine that is thrown away; an upgrade takes seconds, so ``runs`` counts up to seven."""
    busybox = packages.fetch("bookworm")["busybox-static"].tree / "bin/busybox"
    released = releases(built_pyz(default_cache()), image.busybox_image(busybox))
    with NspawnMachine(roots.root_directory(roots.UNSTABLE), "bench", size="5g") as machine:
        node = bring(machine, released.publisher.pyz, released.publisher.public, None)
        host = Upgrading(node, released)
        empty = _written(machine)
        host.stratum("up", "--bundle", host.bundle("1.0"))
        node.settle()
        first = _written(machine)
        host.upgrade("1.1", "--prepare-only")
        second = _written(machine)
        upgrades, by_hand = [], []
        for number in range(min(runs, MOST_RUNS) + 1):
            target = "1.1" if number % 2 == 0 else "1.0"
            upgrades.append(_down(machine, ["/usr/local/bin/stratum", "upgrade", "--to", target]))
            by_hand.append(_down(machine, BY_HAND))
    down, hand = statistics.median(upgrades[1:]), statistics.median(by_hand[1:])  # the first fills the page cache
    return [
        Result("upgrade", "down in an upgrade", down * 1000, "ms"),
        Result("upgrade", "down in stop and start by hand", hand * 1000, "ms"),
        Result("upgrade", "upgrade / by hand", down / hand, "", LARGEST_DOWN_RATIO),
        Result("upgrade", "bytes of 1 of 3 components / all", _ratio(empty, first, second, 1), ""),
        Result("upgrade", "inodes of 1 of 3 components / all", _ratio(empty, first, second, 0), ""),
    ]


def _down(machine: NspawnMachine, argv: list[str]) -> float:
    """Seconds for which nobody accepted connections while the command ran."""
    return float(machine.run(["python3", "-IS", "-c", _DOWN, *argv], timeout=300).stdout)


def _written(machine: NspawnMachine) -> list[int]:
    """Inodes below Stratum's root, and the bytes in them."""
    found: list[int] = json.loads(machine.run(["python3", "-IS", "-c", _WRITTEN]).stdout)
    return found


def _ratio(empty: list[int], first: list[int], second: list[int], which: int) -> float:
    return (second[which] - first[which]) / (first[which] - empty[which])
