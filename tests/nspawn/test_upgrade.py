"""Upgrades between the real containerds of Debian 12, 13 and unstable, and new versions that are broken."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Machines
from tests.lab import roots
from tests.lab.facts import Facts, look
from tests.lab.image import Image
from tests.lab.machine import Result, wait_until
from tests.lab.node import IMAGE, PYZ, bring, refusal
from tests.lab.nspawn import NspawnMachine
from tests.lab.packages import fetch
from tests.lab.releases import Releases, releases
from tests.nspawn.upgrading import BUNDLES, Upgrading

UNIT = "stratum-containerd.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"

#: A containerd of a broken release; it must be able to say its version, or it would be refused before the switch.
SAYS_VERSION = 'case "$*" in *-version*) echo containerd 1.7.24; exit 0 ;; esac\n'
#: The client of another release does for a broken one.
CTR = '#!/bin/sh\nexec /opt/stratum/node/1.0/bin/ctr "$@"\n'
EXITS = f"#!/bin/sh\n{SAYS_VERSION}echo the moon is full >&2\nexit 1\n"
SLEEPS = f"#!/bin/sh\n{SAYS_VERSION}echo thinking about it >&2\nexec sleep 600\n"
DIES = """#!/usr/bin/python3
import os, socket, subprocess, sys, time
if "--version" in sys.argv:
    sys.exit("containerd 1.7.24" and 0)
notify = os.environ.pop("NOTIFY_SOCKET")
child = subprocess.Popen(["/opt/stratum/node/1.0/bin/containerd", *sys.argv[1:]], stderr=subprocess.DEVNULL)
while True:
    with socket.socket(socket.AF_UNIX) as look:
        if look.connect_ex("/run/stratum/containerd/containerd.sock") == 0:
            break
    time.sleep(0.05)
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"READY=1", notify)
time.sleep(1)
child.kill()
sys.exit("a second is enough for me")
"""


@pytest.fixture(scope="module")
def released(pyz: Path, demo_image: Image) -> Releases:
    """The three releases."""
    return releases(pyz, demo_image)


@pytest.fixture(scope="module")
def module_host(module_machines: Machines, released: Releases) -> Upgrading:
    """A node of the module, with release 1.0 at first."""
    machine = module_machines.boot(NspawnMachine(roots.root_directory(roots.UNSTABLE), "upgrading", size="5g"))
    node = bring(machine, released.publisher.pyz, released.publisher.public, None)
    host = Upgrading(node, released)
    host.stratum("up", "--bundle", host.bundle("1.0"))
    node.settle()
    return host


@pytest.fixture
def host(module_host: Upgrading) -> Iterator[Upgrading]:
    """The node; whatever a test did to it, the next one finds it ready."""
    yield module_host
    module_host.node.settle()
    assert module_host.stratum("status", check=False).status == 0


def steps(document: dict[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """What a plan or result says of its steps."""
    return [
        (item["step"], tuple(f"{action['verb']} {action['subject']}" for action in item["actions"]))
        for item in document["steps"]
    ]


def inodes(host: Upgrading) -> dict[str, tuple[int, int]]:
    """Inode and size of each file under /opt/stratum."""
    listed = host.machine.run(["find", "/opt/stratum", "-type", "f", "-printf", "%p %i %s\n"]).lines
    return {path: (int(inode), int(size)) for path, inode, size in (line.split() for line in listed)}


def footprint(host: Upgrading) -> str:
    """Everything about Stratum's files that shows a change, but for what containerd itself writes."""
    places = ["/opt/stratum", "/opt/cni", "/etc", "/usr/local", "/var/lib/stratum", "/run/stratum"]
    skipped = ["-path", "/var/lib/stratum/containerd", "-o", "-path", "/run/stratum/containerd"]
    form = "%p %i %m %s %T@ %C@ %l\n"
    return host.machine.run(["find", *places, "(", *skipped, ")", "-prune", "-o", "-printf", form]).stdout


def start_container(host: Upgrading, name: str) -> None:
    # The machine has no cpu controller, see tests.lab.nspawn.
    host.node.ctr("run", "--cpu-shares", "0", "--detach", IMAGE, name, "sleep", "3600")


def tasks(host: Upgrading) -> dict[str, str]:
    """The containers that containerd has a process for, with its state."""
    lines = host.node.ctr("tasks", "list").lines[1:]
    return {line.split()[0]: line.split()[2] for line in lines}


def test_a_node_goes_through_three_real_releases_and_back(host: Upgrading) -> None:
    host.bring_to("1.0")
    seen = [host.check("1.0")]
    for version in ("2.0", "3.0"):
        assert f"running: demo {version}\n" in host.upgrade(version).stdout
        seen.append(host.check(version))
    # Without a name it is the one that ran before; with one it is any that is installed.
    host.stratum("rollback")
    seen.append(host.check("2.0"))
    host.stratum("rollback", "1.0")
    seen.append(host.check("1.0"))
    assert len({facts.pid for facts in seen}) == 5
    assert [item["version"] for item in seen[-1].history[-5:]] == ["1.0", "2.0", "3.0", "2.0", "1.0"]
    assert seen[-1].versions == ["1.0", "2.0", "3.0"]


def test_a_reboot_comes_up_in_the_version_that_was_switched_to(host: Upgrading) -> None:
    host.bring_to("2.0")
    host.machine.reboot()
    host.node.settle()
    host.check("2.0")


def test_a_rollback_to_a_version_that_is_not_there_is_refused(host: Upgrading) -> None:
    before = host.bring_to("1.0")
    result = host.stratum("rollback", "7.0", check=False)
    assert (result.status, refusal(result, state=False)) == (14, "version-missing")
    assert look(host.machine).pid == before.pid


def test_what_is_prepared_leaves_the_running_version_alone_until_it_is_asked_for(host: Upgrading) -> None:
    before = host.bring_to("1.0")
    host.upgrade("2.0", "--prepare-only")
    prepared = host.check("1.0")
    assert prepared.pid == before.pid
    assert prepared.versions == ["1.0", "2.0"]
    # The bundle is not needed any more.
    host.machine.run(["mv", host.bundle("2.0"), "/root/away.tar"])
    try:
        switched = host.node.json("upgrade", "--to", "2.0")
    finally:
        host.machine.run(["mv", "/root/away.tar", f"{BUNDLES}/2.0.tar"])
    assert (switched["from"], switched["to"]) == ("1.0", "2.0")
    assert steps(switched)[0][0] == "check"
    host.check("2.0")


@pytest.mark.parametrize("prepared", [False, True], ids=["from-a-bundle", "prepared"])
def test_a_dry_run_of_an_upgrade_says_what_the_real_one_does_and_changes_nothing(
    host: Upgrading, prepared: bool
) -> None:
    host.bring_to("1.0", *(["2.0"] if prepared else []))
    words = ["upgrade", "--to", "2.0"] if prepared else ["upgrade", "--bundle", host.bundle("2.0")]
    before = footprint(host), look(host.machine)
    plan = host.node.json(*words, "--dry-run")
    assert (footprint(host), look(host.machine)) == before
    assert steps(plan) == steps(host.node.json(*words))
    host.check("2.0")


def test_a_dry_run_of_a_rollback_says_what_the_real_one_does_and_changes_nothing(host: Upgrading) -> None:
    host.bring_to("1.0", "2.0")
    host.stratum("upgrade", "--to", "2.0")
    before = footprint(host), look(host.machine)
    plan = host.node.json("rollback", "--dry-run")
    assert (footprint(host), look(host.machine)) == before
    assert plan["to"] == "1.0"
    assert steps(plan) == steps(host.node.json("rollback"))
    host.check("1.0")


def test_a_lower_serial_is_refused_unless_it_is_asked_for(host: Upgrading) -> None:
    before = host.bring_to("2.0")
    for words in (["--bundle", host.bundle("1.0")], ["--bundle", host.bundle("1.0"), "--prepare-only"]):
        result = host.stratum("upgrade", *words, check=False)
        assert (result.status, refusal(result, state=False)) == (1, "downgrade")
    after = host.check("2.0")
    assert (after.pid, after.versions) == (before.pid, ["2.0"])
    host.upgrade("1.0", "--allow-downgrade")
    host.check("1.0")


def test_an_upgrade_to_the_running_version_does_nothing(host: Upgrading) -> None:
    before = host.bring_to("1.0")
    assert "1.0 is active already" in host.upgrade("1.0").stdout
    assert host.check("1.0").pid == before.pid


def test_only_the_components_that_changed_are_written(host: Upgrading) -> None:
    host.bring_to("1.0")
    before = inodes(host)
    host.upgrade("1.1")
    after = inodes(host)
    old = {inode for inode, _ in before.values()}
    new = {inode: size for inode, size in after.values() if inode not in old}
    for name in ("bin/containerd", "bin/containerd-shim-runc-v2", "bin/ctr", "cni/bin/bridge", "cni/bin/host-local"):
        one, other = after[f"/opt/stratum/node/1.0/{name}"], after[f"/opt/stratum/node/1.1/{name}"]
        assert one == other == before[f"/opt/stratum/node/1.0/{name}"]
    runc = host.releases.program("1.1", "runc").stat().st_size
    # Two files: runc, and what the version says of itself.
    assert len(new) == 2
    assert runc < sum(new.values()) < runc + 10_000
    host.check("1.1")


def test_removing_a_version_frees_what_no_other_uses_and_the_active_one_is_refused(host: Upgrading) -> None:
    host.bring_to("1.0", "1.1", "3.0")
    held = inodes(host)
    refused = host.stratum("remove", "1.0", check=False)
    assert (refused.status, refusal(refused, state=False)) == (1, "version-active")
    missing = host.stratum("remove", "7.0", check=False)
    assert (missing.status, refusal(missing, state=False)) == (14, "version-missing")
    assert inodes(host) == held

    # 1.1 has a runc of its own and shares the rest with 1.0.
    host.stratum("remove", "1.1")
    left = inodes(host)
    freed = {item for item in held.values() if item not in left.values()}
    gone = {path for path in held if path not in left}
    assert left == {path: item for path, item in held.items() if path not in gone}
    assert {item for path, item in held.items() if path in gone and "/node/1.1/" not in path} < freed
    assert sum(size for _, size in freed) > host.releases.program("1.1", "runc").stat().st_size
    assert len(freed) == 2
    assert host.check("1.0").versions == ["1.0", "3.0"]
    assert "3.0" in host.stratum("versions").stdout


def test_prune_keeps_the_active_version_and_those_that_ran_last(host: Upgrading) -> None:
    host.bring_to("2.0", "1.0", "1.1", "3.0")
    for version in ("1.1", "2.0"):
        host.stratum("rollback", version)
    before = host.check("2.0")
    plan = host.node.json("prune", "--keep", "2", "--dry-run")
    assert look(host.machine) == before
    assert steps(plan) == steps(host.node.json("prune", "--keep", "2"))
    assert host.check("2.0").versions == ["1.1", "2.0"]
    host.stratum("prune", "--keep", "1")
    after = host.check("2.0")
    assert (after.versions, after.pid) == (["2.0"], before.pid)
    linked = host.machine.run(["find", "/opt/stratum/components", "-type", "f", "-links", "1"]).lines
    assert linked == []


def test_a_container_that_runs_across_an_upgrade_is_ended_and_can_start_again_and_images_stay(host: Upgrading) -> None:
    host.bring_to("1.0")
    start_container(host, "across")
    image = host.node.ctr("images", "list").lines[1:]
    assert [line.split()[0] for line in image] == [IMAGE]
    for version in ("2.0", "3.0"):
        assert tasks(host)["across"] == "RUNNING"
        sleeper = host.machine.run(["pgrep", "-f", "^sleep 3600"]).lines
        host.upgrade(version)
        assert host.machine.run(["pgrep", "-f", "^sleep 3600"], check=False).lines == []
        assert tasks(host).get("across") != "RUNNING"
        assert [line.split()[:3] for line in host.node.ctr("images", "list").lines[1:]] == [image[0].split()[:3]]
        host.node.ctr("tasks", "start", "--detach", "across")
        assert host.machine.run(["pgrep", "-f", "^sleep 3600"]).lines != sleeper
    host.check("3.0")
    host.node.ctr("tasks", "kill", "--signal", "SIGKILL", "across")
    wait_until("the container ends", lambda: tasks(host)["across"] == "STOPPED", 60)
    host.node.ctr("containers", "delete", "across")


def test_drop_ins_of_the_admin_stay_through_an_upgrade_and_status_shows_them(host: Upgrading) -> None:
    host.bring_to("1.0")
    mine = f"{UNIT_FILE}.d/50-mine.conf"
    host.machine.write(mine, "[Service]\nEnvironment=MINE=yes\n")
    host.machine.run(["systemctl", "daemon-reload"])
    try:
        host.upgrade("2.0")
        facts = look(host.machine)
        assert facts.current == "2.0"
        assert "MINE=yes" in host.machine.read(f"/proc/{facts.pid}/environ").split("\0")
        assert host.machine.read(mine) == "[Service]\nEnvironment=MINE=yes\n"
        status = host.stratum("status").stdout
        assert f"drop-in of yours: {mine}" in status
        assert status.count("drop-in of yours") == 1
    finally:
        host.machine.run(["rm", mine])
        host.machine.run(["systemctl", "daemon-reload"])


def journal_step(host: Upgrading) -> str:
    """The step that the journal says is being done."""
    return str(json.loads(host.machine.read("/var/lib/stratum/journal.json"))["step"])


class SlowStart:
    """While it lasts, containerd's unit has other words; with ``HOLDS`` it does not start until it is released."""

    HOLDS = "ExecStartPre=/bin/sh -c 'while [ -e /run/hold ]; do sleep 0.05; done'\nTimeoutStartSec=300"

    def __init__(self, host: Upgrading, words: str = HOLDS) -> None:
        self._machine, self._words = host.machine, words
        self._path = f"/run/systemd/system/{UNIT}.d/50-slow.conf"

    def __enter__(self) -> SlowStart:
        self._machine.write(self._path, f"[Service]\n{self._words}\n")
        self._machine.sh("touch /run/hold; systemctl daemon-reload")
        return self

    def release(self) -> None:
        """Let it start."""
        self._machine.run(["rm", "-f", "/run/hold"])

    def __exit__(self, *_: object) -> None:
        self.release()
        self._machine.run(["rm", "-f", self._path])
        self._machine.run(["systemctl", "daemon-reload"])


def begin_upgrade(host: Upgrading, version: str, step: str) -> subprocess.Popen[bytes]:
    """Start an upgrade to an installed version and return when it is at ``step``."""
    process = host.machine.popen(
        [PYZ, "upgrade", "--to", version], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    wait_until(f"the upgrade reaches the step {step}", lambda: journal_step(host) == step, 120)
    return process


def test_while_an_upgrade_runs_status_says_so_and_a_second_one_is_told_to_wait(host: Upgrading) -> None:
    host.bring_to("1.0", "2.0")
    with SlowStart(host) as slow:
        process = begin_upgrade(host, "2.0", "start")
        try:
            status = host.stratum("status", check=False)
            second = host.stratum("upgrade", "--to", "2.0", check=False)
        finally:
            slow.release()
            said, _ = process.communicate(timeout=120)
    assert status.status == 1
    assert re.search(r"^in progress upgrade to 2\.0 at step start", status.stdout, re.MULTILINE), status.describe()
    assert "unfinished" not in status.stdout
    assert (second.status, refusal(second, state=False)) == (11, "locked")
    assert process.returncode == 0, said
    host.check("2.0")


def test_an_upgrade_that_was_killed_is_shown_and_the_next_command_goes_back(host: Upgrading) -> None:
    host.bring_to("1.0", "2.0")
    with SlowStart(host):
        process = begin_upgrade(host, "2.0", "start")
        host.machine.run(["pkill", "-KILL", "-f", "stratum.pyz upgrade"])
        process.wait(timeout=60)
        status = host.stratum("status", check=False)
    assert status.status == 1
    assert re.search(r"^unfinished upgrade to 2\.0 at step start", status.stdout, re.MULTILINE), status.describe()
    assert "ready      no" in status.stdout
    started = host.stratum("start")
    assert "version 1.0 runs again" in started.stderr
    host.check("1.0")


def test_an_address_that_a_plugin_does_not_give_back_is_no_reason_to_be_down(host: Upgrading) -> None:
    host.bring_to("1.0", "2.0")
    # What libcni remembers of a container that is gone; the plugin refuses to end it.
    configuration = {"cniVersion": "0.4.0", "name": "stratum", "plugins": [{"type": "host-local"}]}
    packed = base64.b64encode(json.dumps(configuration).encode()).decode()
    memory = {"kind": "cniCacheV1", "containerId": "ghost", "config": packed, "ifName": "eth0",
              "networkName": "stratum", "result": {"cniVersion": "0.4.0"}}
    path = "/var/lib/cni/results/stratum-ghost-eth0"
    host.machine.write(path, json.dumps(memory))
    try:
        result = host.stratum("upgrade", "--to", "2.0")
        assert "warning: a container's network could not be given back" in result.stderr
        host.check("2.0")
        host.machine.reboot()
        host.node.settle()
        assert "could not be given back" in host.machine.run(["journalctl", "-b", "-u", "stratum.service"]).stdout
        host.check("2.0")
    finally:
        host.machine.run(["rm", "-f", path])


# -- new versions that are broken ----------------------------------------------------------------------------------


def rolled_back(host: Upgrading, before: Facts, result: Result) -> str:
    """Check that an upgrade failed and that the version before runs again; return the message."""
    assert result.status == 20, result.describe()
    assert f"state: version {before.current} runs again" in result.stderr, result.describe()
    after = host.check(before.current)
    assert after.pid != before.pid
    assert after.journal["state"] == "rolled-back"
    assert host.stratum("status", check=False).status == 0
    return next(line for line in result.stderr.splitlines() if line.startswith("stratum: error["))


def try_broken(host: Upgrading, tmp_path: Path, version: str, programs: dict[str, str | Path]) -> Result:
    bundle = host.releases.broken(tmp_path, version, 9, programs)
    host.machine.copy_in(bundle, f"{BUNDLES}/broken.tar")
    return host.stratum("upgrade", "--bundle", f"{BUNDLES}/broken.tar", check=False)


def test_a_containerd_that_does_not_start_is_left_for_the_old_one(host: Upgrading, tmp_path: Path) -> None:
    before = host.bring_to("1.0")
    start_container(host, "before")
    message = rolled_back(host, before, try_broken(host, tmp_path, "9.1", {"containerd": EXITS}))
    assert UNIT in message
    assert "the moon is full" in message
    # What ran before the upgrade can run again.
    host.node.ctr("tasks", "start", "--detach", "before")
    host.node.ctr("tasks", "kill", "--signal", "SIGKILL", "before")
    wait_until("the container ends", lambda: tasks(host)["before"] == "STOPPED", 60)
    host.node.ctr("containers", "delete", "before")


def test_a_containerd_that_answers_and_then_dies_is_left_for_the_old_one(host: Upgrading, tmp_path: Path) -> None:
    before = host.bring_to("1.0")
    message = rolled_back(host, before, try_broken(host, tmp_path, "9.2", {"containerd": DIES, "ctr": CTR}))
    assert UNIT in message
    assert "a second is enough for me" in message


def test_a_containerd_that_never_answers_is_left_for_the_old_one(host: Upgrading, tmp_path: Path) -> None:
    before = host.bring_to("1.0")
    with SlowStart(host, "TimeoutStartSec=10"):
        message = rolled_back(host, before, try_broken(host, tmp_path, "9.3", {"containerd": SLEEPS}))
    assert UNIT in message
    assert "thinking about it" in message


def test_the_next_upgrade_after_a_rollback_is_not_in_the_way_of_the_last(host: Upgrading, tmp_path: Path) -> None:
    before = host.bring_to("1.0")
    rolled_back(host, before, try_broken(host, tmp_path, "9.1", {"containerd": EXITS}))
    host.upgrade("2.0")
    assert "9.1" in host.check("2.0").versions


@pytest.mark.parametrize("command", ["upgrade", "rollback"])
def test_a_unit_that_the_admin_masked_is_refused_before_anything_stops(host: Upgrading, command: str) -> None:
    before = host.bring_to("1.0", "2.0")
    content = host.machine.read(UNIT_FILE)
    host.machine.run(["ln", "-sf", "/dev/null", UNIT_FILE])
    try:
        words = ["upgrade", "--to", "2.0"] if command == "upgrade" else ["rollback", "2.0"]
        result = host.stratum(*words, check=False)
        assert (result.status, refusal(result, state=False)) == (10, "host-refused")
        assert "is masked" in result.stderr
        assert host.machine.run(["readlink", UNIT_FILE]).stdout == "/dev/null\n"
        after = look(host.machine)
        assert (after.current, after.pid, after.active) == ("1.0", before.pid, "active")
    finally:
        host.machine.run(["rm", UNIT_FILE])
        host.machine.write(UNIT_FILE, content)
        host.machine.run(["systemctl", "daemon-reload"])
    host.check("1.0")


@pytest.mark.parametrize("what", ["another-architecture", "no-interpreter", "no-shim"])
def test_programs_that_cannot_run_here_are_refused_before_anything_stops(
    host: Upgrading, tmp_path: Path, what: str
) -> None:
    before = host.bring_to("1.0")
    programs: dict[str, dict[str, str | Path]] = {
        "another-architecture": {"containerd": fetch("bookworm", architecture="arm64")["runc"].tree / "usr/sbin/runc"},
        "no-interpreter": {"containerd": "#!/nowhere/sh\n"},
        "no-shim": {"containerd": EXITS, "containerd-shim-runc-v2": "#!/bin/sh\necho no such library >&2; exit 127\n"},
    }
    result = try_broken(host, tmp_path, "9.4", programs[what])
    assert (result.status, refusal(result, state=False)) == (1, "program-broken")
    assert host.check("1.0").pid == before.pid
    assert host.stratum("status", check=False).status == 0


def test_a_release_that_is_too_new_for_this_host_is_refused_before_anything_stops(
    machines: Machines, released: Releases, lab_root: Path
) -> None:
    machine = machines.boot(NspawnMachine(lab_root, "old"))
    host = Upgrading(bring(machine, released.publisher.pyz, released.publisher.public, None), released)
    host.stratum("up", "--bundle", host.bundle("1.0"))
    host.node.settle()
    before = host.check("1.0")
    # Debian 13's runc asks for a newer C library than Debian 12 has.
    result = host.upgrade("2.0", check=False)
    assert (result.status, refusal(result, state=False)) == (1, "program-broken")
    assert "GLIBC" in result.stderr
    assert host.check("1.0").pid == before.pid


def test_a_full_disk_stops_the_preparation_and_nothing_else(host: Upgrading) -> None:
    before = host.bring_to("1.0")
    path = host.bundle("2.0")
    free = int(host.machine.run(["stat", "-f", "-c", "%a", "/opt/stratum"]).stdout)
    block = int(host.machine.run(["stat", "-f", "-c", "%S", "/opt/stratum"]).stdout)
    host.machine.run(["fallocate", "-l", str(free * block - (40 << 20)), "/opt/filler"])
    try:
        asked = host.stratum("upgrade", "--bundle", path, check=False)
        forced = host.stratum("upgrade", "--bundle", path, "--skip-check", "disk-space", check=False)
        during = look(host.machine)
    finally:
        host.machine.run(["rm", "-f", "/opt/filler"])
    assert (asked.status, refusal(asked, state=False)) == (10, "host-refused")
    assert "MiB are needed" in asked.stderr
    assert forced.status == 1
    assert "No space left on device" in forced.stderr
    assert (during.current, during.pid, during.active) == ("1.0", before.pid, "active")
    assert (during.staging, during.versions) == (False, ["1.0"])
    assert host.check("1.0").pid == before.pid
    assert host.stratum("status", check=False).status == 0
    host.upgrade("2.0")
    host.check("2.0")


def test_a_version_that_somebody_changed_is_mended_from_its_components_or_refused(host: Upgrading) -> None:
    before = host.bring_to("1.0", "2.0")
    program = "/opt/stratum/node/2.0/bin/ctr"
    # Replaced in the version only: the component has what it should be.
    host.machine.sh(f"cp {program} {program}.new; echo >>{program}.new; mv {program}.new {program}")
    host.stratum("upgrade", "--to", "2.0")
    host.check("2.0")
    host.stratum("rollback")

    # Changed in place it is the same file as the component's, and there is nothing to mend it with but a bundle.
    before = host.check("1.0")
    host.machine.sh(f"echo changed >>{program}")
    for words in (["upgrade", "--to", "2.0"], ["rollback", "2.0"]):
        result = host.stratum(*words, check=False)
        assert (result.status, refusal(result, state=False)) == (1, "component-damaged"), result.describe()
        assert "/bin/ctr" in result.stderr
    assert look(host.machine).pid == before.pid
    host.upgrade("2.0")
    host.check("2.0")


@pytest.mark.parametrize("way", ["command", "reboot"])
def test_when_the_way_back_fails_too_the_next_command_or_boot_tries_again(
    host: Upgrading, tmp_path: Path, way: str
) -> None:
    before = host.bring_to("1.0")
    # The broken version takes along what the old one needs as well.
    script = EXITS.replace("exit 1\n", "touch /run/no-more\nexit 1\n")
    mine = f"{UNIT_FILE}.d/50-mine.conf"
    host.machine.write(mine, "[Service]\nExecStartPre=/bin/sh -c '! test -e /run/no-more'\nRestart=no\n")
    host.machine.run(["systemctl", "daemon-reload"])
    # Nobody else is to try meanwhile.
    host.machine.run(["systemctl", "stop", "stratum.service"])
    try:
        result = try_broken(host, tmp_path, "9.5", {"containerd": script})
        assert result.status == 21, result.describe()
        assert "going back to 1.0 failed too" in result.stderr
        assert "the moon is full" in result.stderr
        status = host.stratum("status", check=False)
        assert status.status == 1
        assert "unfinished upgrade to 9.5" in status.stdout
        assert host.stratum("start", check=False).status != 0
        if way == "reboot":
            host.machine.reboot()
            host.node.settle()
        else:
            host.machine.run(["rm", "/run/no-more"])
            host.stratum("start")
    finally:
        host.machine.run(["rm", "-f", mine, "/run/no-more"])
        host.machine.run(["systemctl", "daemon-reload"])
        host.machine.run(["systemctl", "start", "stratum.service"])
    assert host.check("1.0").pid != before.pid


def test_the_whole_is_taken_away_after_many_upgrades(host: Upgrading) -> None:
    host.bring_to("2.0", "1.0", "3.0")
    host.stratum("uninstall")
    left = host.machine.sh("find /opt /etc/cni /etc/stratum /var/lib/stratum /run/stratum 2>/dev/null || true").lines
    assert [path for path in left if not path.startswith("/etc/stratum/trust.d")] == ["/opt", "/etc/stratum"]
    started = time.monotonic()
    host.stratum("up", "--bundle", host.bundle("1.0"))
    host.node.settle()
    host.check("1.0")
    assert time.monotonic() - started < 120
