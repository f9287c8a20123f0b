"""What the supervisor costs while nothing happens: resident memory, and processor time in an idle minute.

Both are read from the kernel's account of the process that systemd runs as ``stratum.service``, on a lab machine with
the real containerd of Debian 12 and a node that is up.
"""

from __future__ import annotations

import json
import time

from tests.bench.frame import Result
from tests.lab import image, packages, roots
from tests.lab.demo import cached_bundle
from tests.lab.node import bring
from tests.lab.nspawn import NspawnMachine
from tests.pyz import built_pyz, default_cache

LARGEST_RESIDENT = 40.0  # MiB
LARGEST_TIME = 60.0  # milliseconds of a processor in a minute, which is a thousandth
SETTLED = 20.0  # seconds: more than one look of the watch
IDLE = 60.0

_LOOK = r"""
import json, os, re, subprocess

pid = subprocess.run(["systemctl", "show", "-P", "MainPID", "stratum.service"], stdout=subprocess.PIPE, check=True)
pid = int(pid.stdout)
assert pid, "it does not run"

def kibibytes(name, key):
    return int(re.search(r"^%s:\s*(\d+) kB" % key, open("/proc/%d/%s" % (pid, name)).read(), re.M).group(1))

fields = [int(word) for word in open("/proc/%d/stat" % pid).read().rpartition(")")[2].split()[1:]]
tick = os.sysconf("SC_CLK_TCK")
# Of the children that it waited for: proc(5), fields 16 and 17.
seconds = sum(fields[12:14]) / tick
try:
    # Its own in nanoseconds, which ticks are too coarse for; it has one thread.
    assert os.listdir("/proc/%d/task" % pid) == [str(pid)]
    seconds += int(open("/proc/%d/schedstat" % pid).read().split()[0]) / 1e9
except FileNotFoundError:
    seconds += sum(fields[10:12]) / tick
found = {"pid": pid, "resident": kibibytes("status", "VmRSS"), "peak": kibibytes("status", "VmHWM"),
         "share": kibibytes("smaps_rollup", "Pss"), "seconds": seconds}
print(json.dumps(found))
"""


def run(runs: int) -> list[Result]:
    """Measure one supervisor for a minute; ``runs`` does not matter."""
    pyz, tree = built_pyz(default_cache()), packages.fetch("bookworm")
    demo = image.busybox_image(tree["busybox-static"].tree / "bin/busybox")
    publisher, bundle = cached_bundle(pyz, tree, [demo])
    with NspawnMachine(roots.root_directory(roots.BOOKWORM), "bench") as machine:
        node = bring(machine, pyz, publisher.public, bundle)
        node.stratum("up", "--quiet")
        node.settle()
        time.sleep(SETTLED)
        before, start = _look(machine), time.monotonic()
        time.sleep(IDLE)
        after, seconds = _look(machine), time.monotonic() - start
    assert before["pid"] == after["pid"], "the supervisor was started anew"
    used = after["seconds"] - before["seconds"]
    return [
        Result("supervisor", "resident", after["resident"] / 1024, "MiB", LARGEST_RESIDENT),
        Result("supervisor", "resident, shared pages by share", after["share"] / 1024, "MiB"),
        Result("supervisor", "most that was ever resident", after["peak"] / 1024, "MiB"),
        Result("supervisor", "processor time in an idle minute", 60_000 * used / seconds, "ms", LARGEST_TIME),
    ]


def _look(machine: NspawnMachine) -> dict[str, float]:
    found: dict[str, float] = json.loads(machine.run(["python3", "-IS", "-c", _LOOK]).stdout)
    return found
