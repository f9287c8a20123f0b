"""The lab itself tells the truth: nspawn machines."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Machines
from tests.lab.image import LAB_NETWORK, Image
from tests.lab.machine import BARE_ENV, CommandFailed, CommandTimeout, LabError, wait_until
from tests.lab.nspawn import NspawnMachine
from tests.lab.packages import Package


def outer_traces(owner: int) -> dict[str, set[str]]:
    """What the machines of a process could leave on the outer machine; others may be at work there."""
    mark = f"stratum-lab-{owner}-"
    commands = set()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = process.read_bytes().decode(errors="replace").replace("\0", " ")
            commands |= {words} if mark in words else set()
    return {
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
        "interfaces": set(os.listdir("/sys/class/net")),
        # Not glob(), which fails when somebody else's cgroup goes meanwhile.
        "cgroups": {path for path, _, _ in os.walk("/sys/fs/cgroup") if path.rpartition("/")[2].startswith(mark)},
        "commands": commands,
    }


def nothing_new(before: dict[str, set[str]]) -> bool:
    """Whether there is no mount and no interface that was not there before; those of others come and go."""
    now = outer_traces(os.getpid())
    return now["mounts"] <= before["mounts"] and now["interfaces"] <= before["interfaces"]


@pytest.mark.parametrize("status", [0, 1, 7, 255])
def test_the_exit_status_of_a_command_is_its_own(shared_machine: NspawnMachine, status: int) -> None:
    assert shared_machine.run(["sh", "-c", f"exit {status}"], check=False).status == status


def test_a_command_that_a_signal_ended_has_a_negative_status(shared_machine: NspawnMachine) -> None:
    assert shared_machine.run(["sh", "-c", "kill -TERM $$"], check=False).status == -signal.SIGTERM


def test_an_unexpected_status_raises_with_the_words_of_the_command(shared_machine: NspawnMachine) -> None:
    with pytest.raises(CommandFailed, match="no such luck"):
        shared_machine.run(["sh", "-c", "echo no such luck >&2; exit 3"])


def test_a_command_that_hangs_is_killed_with_its_children(shared_machine: NspawnMachine) -> None:
    with pytest.raises(CommandTimeout, match="before"):
        shared_machine.run(["sh", "-c", "echo before; setsid sleep 4242 & sleep 4243"], timeout=3)
    wait_until(
        "the sleepers are gone",
        lambda: shared_machine.run(["pgrep", "-f", "sleep 424"], check=False).status == 1, 60,
    )


def test_a_daemon_that_a_command_leaves_behind_lives_on(shared_machine: NspawnMachine) -> None:
    begin = time.monotonic()
    shared_machine.sh("setsid sleep 4244 & echo $! >/run/sleeper")
    assert time.monotonic() - begin < 60
    shared_machine.kill(int(shared_machine.read("/run/sleeper")))


def test_standard_input_reaches_the_command_unchanged(shared_machine: NspawnMachine) -> None:
    sent = bytes(range(256)) * 4096
    assert shared_machine.run(["cat"], input=sent).raw_stdout == sent


def test_a_command_sees_the_environment_that_the_test_gives_and_no_more(shared_machine: NspawnMachine) -> None:
    seen = dict(line.split("=", 1) for line in shared_machine.run(["env"], env=BARE_ENV).lines)
    assert seen == dict(BARE_ENV)


def test_a_command_runs_in_a_cgroup_of_the_machine(shared_machine: NspawnMachine) -> None:
    unified = [line for line in shared_machine.read("/proc/self/cgroup").splitlines() if line.startswith("0::")]
    assert unified[0].startswith("0::/lab/")


def test_the_machine_runs_systemd_and_is_content(shared_machine: NspawnMachine) -> None:
    assert shared_machine.read("/proc/1/comm") == "systemd\n"
    assert shared_machine.run(["systemctl", "is-system-running"]).stdout == "running\n"
    assert shared_machine.run(["stat", "-f", "-c", "%T", "/sys/fs/cgroup"]).stdout == "cgroup2fs\n"


def test_the_machine_has_no_network_beyond_lo(shared_machine: NspawnMachine) -> None:
    assert shared_machine.run(["ls", "/sys/class/net"]).lines == ["lo"]
    assert shared_machine.run(["ip", "route"]).stdout == ""


def test_the_machine_has_no_container_runtime(shared_machine: NspawnMachine) -> None:
    for program in ("containerd", "runc", "ctr"):
        assert shared_machine.run(["sh", "-c", f"command -v {program}"], check=False).status != 0


def test_files_go_in_with_their_mode(shared_machine: NspawnMachine, tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(b"#!/bin/sh\necho it runs\n")
    shared_machine.copy_in(tmp_path / "program", "/opt/new/program", 0o750)
    assert shared_machine.run(["/opt/new/program"]).stdout == "it runs\n"
    assert shared_machine.run(["stat", "-c", "%a %U", "/opt/new/program"]).stdout == "750 root\n"
    assert shared_machine.path_in_machine("/opt/new/program").read_bytes().endswith(b"it runs\n")
    assert shared_machine.exists("/opt/new") and not shared_machine.exists("/opt/old")


def test_a_signal_reaches_the_command_in_the_machine(shared_machine: NspawnMachine) -> None:
    script = "trap 'exit 42' INT; touch /run/armed; while :; do sleep 0.1; done"
    with shared_machine.popen(["sh", "-c", script]) as process:
        wait_until("the trap is set", lambda: shared_machine.exists("/run/armed"), 60)
        shared_machine.signal_to(process, signal.SIGINT)
        assert process.wait(timeout=60) == 42


def test_a_reboot_gives_a_new_boot_and_keeps_the_files(machine: NspawnMachine) -> None:
    machine.sh("echo kept >/etc/kept; echo kept >/var/lib/kept; echo lost >/run/lost; ip link add gone0 type bridge")
    before = machine.boot_id()
    machine.reboot()
    assert machine.boot_id() != before
    assert machine.read("/etc/kept") + machine.read("/var/lib/kept") == "kept\nkept\n"
    assert not machine.exists("/run/lost")
    assert machine.run(["ls", "/sys/class/net"]).lines == ["lo"]


def test_a_power_cut_runs_no_shutdown(machine: NspawnMachine) -> None:
    unit = "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\nExecStop=/bin/touch /root/stopped\n"
    machine.write("/etc/systemd/system/tell.service", unit)
    machine.sh("systemctl daemon-reload; systemctl start tell")
    before = machine.boot_id()
    machine.power_cut()
    assert machine.boot_id() != before
    assert not machine.exists("/root/stopped")
    machine.sh("systemctl start tell")
    machine.reboot()
    assert machine.exists("/root/stopped")


def test_two_machines_share_nothing_that_they_write(machines: Machines, lab_root: Path) -> None:
    one = machines.boot(NspawnMachine(lab_root, "one"))
    two = machines.boot(NspawnMachine(lab_root, "two"))
    one.sh("echo one >/root/who; echo one >/var/lib/who")
    assert not two.exists("/root/who") and not two.exists("/var/lib/who")
    assert not (lab_root / "root/who").exists()


def test_nothing_is_left_on_the_outer_machine(lab_root: Path) -> None:
    before = outer_traces(os.getpid())
    with NspawnMachine(lab_root) as machine:
        machine.sh("setsid sleep 4245 & ip link add left0 type bridge; mount -t tmpfs left /mnt")
        wait_until("nothing is seen of its mounts and interfaces", lambda: nothing_new(before), 120)
        during = outer_traces(os.getpid())
        assert during["cgroups"] > before["cgroups"] and during["commands"] > before["commands"]
    after = outer_traces(os.getpid())
    assert (after["cgroups"], after["commands"]) == (before["cgroups"], before["commands"])
    wait_until("no mount and no interface is left", lambda: nothing_new(before), 120)
    with pytest.raises(LabError, match="not running"):
        machine.run(["true"])


def test_nothing_is_left_when_the_test_run_itself_is_killed(lab_root: Path) -> None:
    program = (
        "import sys, time, pathlib; from tests.lab.nspawn import NspawnMachine\n"
        "with NspawnMachine(pathlib.Path(sys.argv[1])): print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(lab_root)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as process:
        before = outer_traces(process.pid)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        during = outer_traces(process.pid)
        assert during["commands"] and during["cgroups"]
        process.kill()
    wait_until("its processes are gone", lambda: not outer_traces(process.pid)["commands"], 60)
    # An empty cgroup may stay behind; the next machine takes it away.
    with NspawnMachine(lab_root):
        pass
    assert not outer_traces(process.pid)["cgroups"]
    wait_until("no mount and no interface is left", lambda: nothing_new(before), 120)


def test_a_machine_without_systemd_has_another_first_process(machines: Machines, lab_root: Path) -> None:
    machine = machines.boot(NspawnMachine(lab_root, boot=False))
    assert "systemd" not in machine.read("/proc/1/comm").split()
    assert not machine.exists("/run/systemd/system")


def test_a_machine_with_the_old_cgroups_has_no_new_ones(machines: Machines, lab_root: Path) -> None:
    machine = machines.boot(NspawnMachine(lab_root, cgroup=1))
    assert machine.run(["stat", "-f", "-c", "%T", "/sys/fs/cgroup"]).stdout == "tmpfs\n"
    assert machine.run(["systemctl", "is-system-running"]).stdout == "running\n"


def test_debians_containerd_runs_a_container_with_a_bridge_network(
    machine: NspawnMachine, debian_packages: dict[str, Package], demo_image: Image
) -> None:
    for name in ("containerd", "runc", "containernetworking-plugins"):
        machine.copy_tree_in(debian_packages[name].tree, "/")
    machine.write("/root/image.tar", demo_image.oci_archive())
    machine.write("/etc/cni/net.d/10-lab.conflist", LAB_NETWORK)
    machine.sh("mkdir -p /opt/cni/bin; ln -s /usr/lib/cni/* /opt/cni/bin/; systemctl start containerd")
    machine.run(["ctr", "images", "import", "/root/image.tar"])
    # Without cgroup v2's cpu controller runc cannot set the weight that ctr asks for by default.
    inside = machine.run(["ctr", "run", "--rm", "--cni", "--cpu-shares", "0", demo_image.reference, "c1", "ip", "a"])
    assert "inet 10.88.0.2/16" in inside.stdout
    assert "lab0" in machine.run(["ls", "/sys/class/net"]).lines
