"""A machine whose PID 1 is BusyBox's init: Stratum refuses it, leaves it as it is, and its libraries do no harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Machines
from tests.lab import demo
from tests.lab.busybox import OPTIONS, busybox_disk
from tests.lab.image import Image
from tests.lab.machine import BARE_ENV, Result
from tests.lab.packages import Package
from tests.lab.qemu import QemuMachine
from tests.lab.snapshot import check_same, snapshot
from tests.pyz import built_pyz, default_cache
from tests.sources import sources_zip

PYZ = "/root/usb/stratum.pyz"
COMES_AND_GOES = (
    ("files", r"/run/stratum-lab-\d+\.(err|out)", "the lab's own: what its commands print"),
    ("files", r"/run/qga\.state", "the lab's agent counts the files that it writes"),
)

# What `up`, the supervisor and `uninstall` call, each on its own.
DRIVE = """
import json, sys
from stratum.host import persistence, rootmount
from stratum.journal import Journal
from stratum.receipt import Receipt
from stratum.steps import Work
from stratum.system import Host

host, warned, done = Host(), [], []
work = Work(host, Receipt.load(host), Journal(host))

def perform(actions):
    for action in actions:
        done.append(action.describe())
        action.perform(work)

answer = {}
if sys.argv[1] == "mount":
    perform(rootmount.plan_root_shared(host, warned.append))
    perform(rootmount.plan_bpf(host, warned.append))
elif sys.argv[1] == "undo":
    perform(rootmount.plan_undo(host, warned.append))
elif sys.argv[1] == "persistence":
    perform(persistence.plan_unit(work, ["/usr/bin/python3", "/usr/local/bin/stratum", "up", "--supervise"]))
    perform(persistence.plan_enablement(work))
    for name in ("enable", "disable", "suppress_restart", "allow_restart", "reload", "start_later", "restart", "stop"):
        getattr(persistence, name)(host)
    persistence.forget(host, ["stratum-containerd.service"])
    for name in ("systemd_available", "installed", "unit_enabled", "main_pid"):
        answer[name] = getattr(persistence, name)(host)
print(json.dumps({"done": done, "warned": warned, **answer}))
"""


@pytest.fixture(scope="module")
def host(
    module_machines: Machines,
    debian_packages: dict[str, Package],
    demo_image: Image,
    tmp_path_factory: pytest.TempPathFactory,
) -> QemuMachine:
    """A machine with the stick's content and a trusted key, as `up` demands it; and Stratum's sources."""
    scratch = tmp_path_factory.mktemp("files")
    (scratch / "src.zip").write_bytes(sources_zip())
    (scratch / "drive.py").write_text(DRIVE)
    pyz = built_pyz(default_cache())
    publisher, bundle = demo.cached_bundle(pyz, debian_packages, [demo_image])
    files: dict[str, Path] = {
        PYZ: pyz,
        "/root/usb/demo.tar": bundle,
        "/etc/stratum/trust.d/publisher.pub": publisher.public,
        "/root/src.zip": scratch / "src.zip",
        "/root/drive.py": scratch / "drive.py",
    }
    disk = busybox_disk(debian_packages["busybox-static"].tree / "bin/busybox")
    machine = QemuMachine(disk, "busybox", files=files, options=OPTIONS, systemd=False)
    module_machines.boot(machine)
    machine.sh(f"chmod 0755 {PYZ}; chmod 0644 /etc/stratum/trust.d/publisher.pub")
    return machine


def stratum(host: QemuMachine, *arguments: str, status: int) -> Result:
    """Run the pyz as a first-boot script would; whatever it finds, it says in one line and a hint."""
    done = host.run([PYZ, *arguments], env=BARE_ENV, cwd="/root/usb", check=False)
    assert done.status == status, done.describe()
    assert "Traceback" not in done.stdout + done.stderr, done.describe()
    assert "error[internal-error]" not in done.stderr, done.describe()
    errors = [line for line in done.stderr.splitlines() if line.startswith("stratum: error[")]
    # A preflight that refuses is no error: it says what it found as its result.
    assert len(errors) == (0 if status == 0 or arguments[0] == "preflight" else 1), done.describe()
    return done


def drive(host: QemuMachine, what: str) -> dict[str, Any]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/root/src.zip"}
    done = host.run(["python3", "-S", "/root/drive.py", what], env=environment)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def propagation(host: QemuMachine) -> dict[str, str]:
    """Each mount that can be seen, the topmost of each place: its kind and whether it is shared."""
    found = {}
    for line in host.read("/proc/self/mountinfo").splitlines():
        before, _, behind = line.partition(" - ")
        fields = before.split(" ")
        shared = any(tag.startswith("shared:") for tag in fields[6:])
        found[fields[4]] = f"{behind.split(' ')[0]} {'shared' if shared else 'private'}"
    return found


def test_up_is_refused_and_leaves_nothing_and_no_command_falls_over_the_missing_systemd(host: QemuMachine) -> None:
    assert host.run(["readlink", "/proc/1/exe"]).stdout.strip() == "/usr/bin/busybox"
    before = snapshot(host)
    done = stratum(host, "up", status=10)
    said = done.stderr.splitlines()
    assert "stratum: error[host-refused]: this host is not fit: " in done.stderr, done.describe()
    assert "systemd: systemd is not PID 1 here" in done.stderr, done.describe()
    assert said[-1].startswith("hint: ") and "boot the host with systemd" in said[-1], done.describe()

    done = stratum(host, "preflight", status=10)
    rejected = [line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("reject")]
    assert sorted(rejected) == ["commands", "commands", "systemd"], done.describe()
    assert stratum(host, "--version", status=0).stdout.startswith("stratum ")
    assert "error[not-installed]" in stratum(host, "status", status=5).stderr
    for arguments in (["uninstall", "--dry-run"], ["uninstall"]):
        done = stratum(host, *arguments, status=0)
        assert done.stdout == "nothing to remove: Stratum is not installed here\n", done.describe()
    check_same(before, snapshot(host), ignore=COMES_AND_GOES)


def test_everything_about_the_persistence_unit_does_nothing(host: QemuMachine) -> None:
    before = snapshot(host)
    nothing = {"done": [], "warned": [], "systemd_available": False, "unit_enabled": False, "main_pid": 0}
    assert drive(host, "persistence") == {**nothing, "installed": False}
    # As an image has it that was prepared for systemd.
    host.write("/etc/systemd/system/stratum.service", "[Service]\nExecStart=/bin/false\n")
    assert drive(host, "persistence") == {**nothing, "installed": True}
    host.run(["rm", "/etc/systemd/system/stratum.service"])
    check_same(before, snapshot(host), ignore=COMES_AND_GOES)


def test_the_root_and_the_mounts_below_it_are_made_shared_and_the_bpf_file_system_comes_and_goes(
    host: QemuMachine,
) -> None:
    before = propagation(host)
    assert {kind.split(" ")[1] for kind in before.values()} == {"private"}
    assert {"/", "/proc", "/run", "/sys", "/sys/fs/cgroup"} <= set(before)
    assert "/sys/fs/bpf" not in before

    assert drive(host, "mount") == {
        "done": ["make shared / and every mount below it", "mount the BPF file system at /sys/fs/bpf"], "warned": [],
    }
    after = propagation(host)
    assert after.pop("/sys/fs/bpf") == "bpf shared"
    assert after == {place: kind.replace("private", "shared") for place, kind in before.items()}
    # What it is for: a mount in one namespace is seen in the next one.
    host.sh("unshare --mount --propagation slave sh -c 'sleep 60 & echo $! >/run/other'; mount -t tmpfs new /srv")
    assert " /srv " in host.sh("cat /proc/$(cat /run/other)/mountinfo").stdout
    host.sh("umount /srv; kill $(cat /run/other); rm /run/other")
    assert drive(host, "mount") == {"done": [], "warned": []}

    # It is not ours to unmount as long as somebody has something in it.
    host.run(["mkdir", "/sys/fs/bpf/pinned"])
    assert drive(host, "undo") == {"done": [], "warned": []}
    host.run(["rmdir", "/sys/fs/bpf/pinned"])
    assert drive(host, "undo") == {"done": ["unmount /sys/fs/bpf"], "warned": []}
    assert "/sys/fs/bpf" not in propagation(host)
