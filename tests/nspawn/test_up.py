"""`up` on a real host: every way to give it a bundle, every poor environment, and what it leaves running."""

from __future__ import annotations

import json
from pathlib import Path

from stratum.scripts.footprint import find_place, is_own
from stratum.system import HostPath
from tests.lab.machine import BARE_ENV, wait_until
from tests.lab.node import BUNDLE, IMAGE, PYZ, USB, Node, installed, refusal
from tests.lab.nspawn import NspawnMachine
from tests.lab.snapshot import check_same, snapshot, written

MachineNode = Node[NspawnMachine]

KEPT = "/var/lib/stratum/bundles"

# Ends when it is asked to; a plain sleep as the first process of a container does not.
WAITS = ("sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.2; done")


def test_the_bundle_beside_the_pyz_makes_a_container_host(running: MachineNode) -> None:
    status = running.json("status")
    assert status["ready"] and status["enabled"]
    assert (status["version"], status["bundle"], status["drift"], status["unfinished"]) == ("1.0", "demo", [], None)
    assert {unit["active"] for unit in status["units"].values()} == {"active"}
    assert IMAGE in running.ctr("images", "list", "--quiet").lines
    done = running.ctr("run", "--rm", "--cni", "--cpu-shares", "0", IMAGE, "first", "ip", "addr", "show", "eth0")
    assert "inet 10.215." in done.stdout
    links = ["cat", "/sys/class/net/stratum0/operstate"]
    wait_until("the container's link is gone", lambda: running.machine.run(links).stdout == "down\n", 60)


def test_a_second_up_changes_nothing_and_says_so(running: MachineNode) -> None:
    before = snapshot(running.machine)
    done = running.stratum("up")
    assert (done.lines[0], done.stderr) == ("nothing to do", "")
    assert running.json("up")["changed"] is False
    # As somebody who has only what is installed: the copy below /opt/stratum has no bundle beside it.
    assert running.machine.run(["stratum", "up", "--bundle", BUNDLE]).lines[0] == "nothing to do"
    assert running.machine.run(["stratum", "up"]).lines[0] == "nothing to do"
    check_same(before, snapshot(running.machine))


def test_up_writes_only_to_its_own_directories_and_to_the_footprint(bare: MachineNode) -> None:
    before = snapshot(bare.machine)
    bare.stratum("up", "--quiet")
    bare.settle()
    bare.ctr("run", "--rm", "--cni", "--cpu-shares", "0", IMAGE, "footprint", "true")
    assert [path for path in outside(written(before, snapshot(bare.machine))) if find_place(path) is None] == []
    bare.stratum("uninstall", "--quiet")
    check_same(before, snapshot(bare.machine))


def outside(paths: list[str]) -> list[HostPath]:
    """Those that are not in a directory of Stratum's own."""
    found = map(HostPath, paths)
    return [path for path in found if not is_own(path)]


def test_a_newer_program_takes_over_and_only_the_one_before_it_stays(node: MachineNode) -> None:
    machine, supervisors = node.machine, []
    node.stratum("up", "--quiet")
    for number in range(3):
        # Another build, as far as anybody can tell: the line before the archive has one more space.
        machine.sh(f"LC_ALL=C sed -i '1s/python3 /python3  /' {PYZ}")
        node.settle()
        before = machine.run(["systemctl", "show", "-P", "MainPID", "stratum"]).stdout
        node.stratum("up", "--quiet")
        node.settle()
        supervisors.append((before, machine.run(["systemctl", "show", "-P", "MainPID", "stratum"]).stdout))
        kept = machine.run(["ls", "/opt/stratum/pyz"]).lines
        assert (len(kept), "current" in kept) == (3, True), f"after {number + 1}: {kept}"
        assert machine.sh(f"cmp {PYZ} /opt/stratum/pyz/current/stratum.pyz").status == 0
    assert all(before != after for before, after in supervisors)
    assert node.stratum("up").lines[0] == "nothing to do"
    status = node.json("status")
    assert (status["ready"], status["drift"], status["unfinished"]) == (True, [], None)


def test_up_runs_with_all_three_streams_closed(running: MachineNode) -> None:
    done = running.machine.run(["sh", "-c", f"exec {PYZ} up <&- >&- 2>&-"], env=BARE_ENV)
    assert (done.stdout, done.stderr) == ("", "")


def test_every_way_to_give_the_bundle_makes_the_same_node(bare: MachineNode, running: MachineNode) -> None:
    machine, wanted = bare.machine, installed(snapshot(running.machine))
    before = snapshot(machine)
    machine.sh(f"mkdir /root/layout; tar -xf {BUNDLE} -C /root/layout; mv {BUNDLE} /root/elsewhere.tar")
    # A pipe that ends, and one whose writer is slow to come.
    piped = f"(sleep 0.3; cat /root/elsewhere.tar) | {PYZ} up --quiet --bundle -"
    found = f"mkdir -p {KEPT}; mv /root/elsewhere.tar {KEPT}/it.tar; {PYZ} up --quiet"
    ways = ["--bundle /root/elsewhere.tar", "--bundle /root/layout", "--bundle - </root/elsewhere.tar"]
    try:
        for way in [*(f"{PYZ} up --quiet {given}" for given in ways), piped, found]:
            machine.sh(way)
            got = installed(snapshot(machine))
            bare.stratum("uninstall")
            got = {path: text for path, text in got.items() if not path.startswith(KEPT)}
            assert got == wanted, way
        assert machine.exists(f"{KEPT}/it.tar"), "the admin put it there"
    finally:
        machine.sh(
            f"rm -r /root/layout; mv {KEPT}/it.tar {BUNDLE} || mv /root/elsewhere.tar {BUNDLE};"
            f"rmdir {KEPT} /var/lib/stratum || true"
        )
    check_same(before, snapshot(machine))


def test_without_a_bundle_or_with_two_of_them_up_lists_what_it_found(bare: MachineNode) -> None:
    machine = bare.machine
    before = snapshot(machine)
    machine.sh(f"mv {BUNDLE} /root/away.tar")
    none = bare.stratum("up", check=False)
    missing = bare.stratum("up", "--bundle", "/root/no-such.tar", check=False)
    machine.sh(f"cp /root/away.tar {USB}/other.tar; mv /root/away.tar {BUNDLE}")
    two = bare.stratum("up", check=False)
    machine.sh(f"rm {USB}/other.tar")
    assert (none.status, refusal(none)) == (14, "bundle-missing")
    assert (two.status, refusal(two)) == (14, "bundle-ambiguous")
    assert BUNDLE in two.stderr and f"{USB}/other.tar" in two.stderr
    assert missing.status == 14 and "/root/no-such.tar" in missing.stderr
    refusal(missing)
    check_same(before, snapshot(machine))


def test_a_bare_environment_and_a_strict_umask_make_the_same_node(bare: MachineNode, running: MachineNode) -> None:
    before = snapshot(bare.machine)
    done = bare.machine.run(["sh", "-c", f"umask 077; exec {PYZ} up --bundle {BUNDLE} <&-"], env=BARE_ENV, cwd="/")
    ready, made = bare.json("status")["ready"], installed(snapshot(bare.machine))
    bare.machine.run(["sh", "-c", f"umask 077; exec {PYZ} uninstall <&-"], env=BARE_ENV, cwd="/")
    assert ready and "stratum: " not in done.stderr
    assert made == installed(snapshot(running.machine))
    check_same(before, snapshot(bare.machine))


def test_up_works_from_a_unit_during_the_first_boot(node: MachineNode) -> None:
    # As cloud-init runs its user data: root, no terminal, no HOME, in the middle of the boot.
    unit = (
        "[Unit]\nAfter=network.target\nBefore=multi-user.target\n"
        f"[Service]\nType=oneshot\nExecStart={PYZ} up\nEnvironment=PATH=/usr/bin:/bin\nStandardInput=null\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
    node.machine.write("/etc/systemd/system/first-boot.service", unit)
    node.machine.sh("systemctl enable --quiet first-boot")
    node.machine.reboot()
    assert node.machine.run(["systemctl", "show", "-P", "Result", "first-boot"]).stdout == "success\n"
    assert node.json("status", "--wait", "120")["ready"]
    assert node.machine.run(["systemctl", "is-system-running"]).stdout == "running\n"


def test_a_reboot_brings_everything_up_again(running: MachineNode) -> None:
    machine = running.machine
    before = machine.boot_id()
    running.ctr("run", "--detach", "--cni", "--cpu-shares", "0", IMAGE, "old", *WAITS)
    machine.reboot()
    assert machine.boot_id() != before
    status = running.json("status", "--wait", "120")
    assert status["ready"] and {unit["active"] for unit in status["units"].values()} == {"active"}
    # What the container of the last boot held is given back: its address can be had again.
    assert machine.sh("find /var/lib/cni/results /run/stratum/cni -name '*old*' -o -name '10.215*'").stdout == ""
    running.ctr("containers", "delete", "old")
    done = running.ctr("run", "--rm", "--cni", "--cpu-shares", "0", IMAGE, "new", "ip", "route")
    assert "default via 10.215.0.1" in done.stdout


def test_a_containerd_and_a_supervisor_that_are_killed_come_back(running: MachineNode) -> None:
    machine = running.machine

    def main_pid(unit: str) -> int:
        return int(machine.run(["systemctl", "show", "-P", "MainPID", unit]).stdout)

    units = ("stratum-containerd.service", "stratum.service")
    old = {unit: main_pid(unit) for unit in units}
    for pid in old.values():
        machine.kill(pid)
    for unit in units:
        wait_until(f"{unit} is back", lambda: main_pid(unit) not in (0, old[unit]), 60, pause=0.2)  # noqa: B023
    assert running.json("status", "--wait", "120")["ready"]
    running.settle()


def test_a_containerd_that_was_stopped_by_hand_is_started_by_up(running: MachineNode) -> None:
    running.machine.run(["systemctl", "stop", "stratum-containerd"])
    assert running.stratum("status", check=False).status == 1
    done = running.json("up")
    assert [step["step"] for step in done["steps"]] == ["start"]
    assert running.json("status", "--wait", "120")["ready"]


def test_up_puts_back_what_is_missing_or_damaged(running: MachineNode) -> None:
    machine = running.machine
    before = installed(snapshot(machine))
    program = "/opt/stratum/node/1.0/bin/runc"
    # The file of the version is a hard link to the component's: writing into it damages both.
    machine.sh(f"rm /opt/cni/bin/vlan /etc/cni/net.d/10-stratum.conflist; echo x >>{program}; chmod 600 {program}")
    configuration, client = "/etc/stratum/containerd/config.toml", "/opt/stratum/node/1.0/bin/ctr"
    machine.sh(f"echo '# mine' >>{configuration}; chmod 600 {client}")
    drift = running.json("status", check=False)["drift"]
    named = {line.split(":")[0] for line in drift}
    assert named >= {"/opt/cni/bin/vlan", "/etc/cni/net.d/10-stratum.conflist", program, configuration}
    assert f"{client}: mode 0600, was 0755" in drift
    done = running.stratum("up")
    # What somebody changed is named before it is gone; what was only missing is no loss.
    warned = {line.split(": ")[2] for line in done.stderr.splitlines() if ": warning: " in line}
    assert warned == {program, configuration, client}
    assert installed(snapshot(machine)) == before
    assert running.json("status")["drift"] == []
    assert machine.run(["/opt/stratum/node/current/bin/runc", "--version"]).stdout.startswith("runc version")


def test_dry_runs_on_a_node_change_nothing(running: MachineNode) -> None:
    before = snapshot(running.machine)
    for command in ("up", "uninstall", "stop", "restart"):
        text = running.stratum(command, "--dry-run")
        plan = running.json(command, "--dry-run")
        assert plan["dryRun"] and plan["changed"] is (command != "up")
        for step in plan["steps"]:
            for action in step["actions"]:
                assert f"    {action['verb']} {action['subject']}" in text.lines
    check_same(before, snapshot(running.machine))


def test_up_does_what_its_dry_run_lists(node: MachineNode) -> None:
    before = snapshot(node.machine)
    plan = node.json("up", "--dry-run")
    check_same(before, snapshot(node.machine))
    done = node.json("up")
    assert done["steps"] == plan["steps"]
    actions = [action for step in plan["steps"] for action in step["actions"]]
    made = {str(action["subject"]).partition(" -> ")[0] for action in actions} | {
        str(action["subject"]).partition(" -> ")[2] for action in actions if action["verb"] == "copy"
    }
    made |= {path for action in actions if action["verb"] == "record" for path in action["subject"].split(", ")}
    # Whatever is new lies at or below a path of the plan; the record itself is in its own directory.
    made |= {"/opt/stratum/node", "/opt/stratum/components", "/var/lib/stratum"}
    after = snapshot(node.machine)
    new = {path for path in after["files"] if path not in before["files"]}
    unplanned = {path for path in new if not made & {path, *map(str, Path(path).parents)}}
    assert {path for path in unplanned if not path.startswith("/run/systemd/")} == set()
    # And nothing of the plan is missing, and nothing that was there has changed.
    written = {str(action["subject"]) for action in actions if action["verb"] in ("write", "make directory")}
    assert written - new == set()
    assert all(after["files"].get(path) == text for path, text in before["files"].items() if path.startswith("/etc/"))


def test_what_a_run_says_fits_a_log(bare: MachineNode) -> None:
    # Results on stdout, all else on stderr, no control characters without a terminal, no line that says nothing.
    done = bare.stratum("up", "--output", "json")
    assert json.loads(done.stdout)["command"] == "up"
    assert all(line.isprintable() and line.strip() for line in done.stderr.splitlines())
    # At once: the supervisor has hardly started, and is waited for.
    quiet = bare.stratum("uninstall", "--quiet")
    assert (quiet.stdout, quiet.stderr) == ("uninstall: done\n", "")
