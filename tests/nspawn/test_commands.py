"""start, stop, restart, status, versions, logs, exec on a node that is up, and their JSON."""

from __future__ import annotations

import re
import signal
import subprocess
import time

from tests.lab.machine import BARE_ENV, wait_until
from tests.lab.node import IMAGE, Node, refusal
from tests.lab.nspawn import NspawnMachine
from tests.lab.snapshot import check_same, snapshot

MachineNode = Node[NspawnMachine]

UNITS = ("stratum-containerd.service", "stratum.service")
POLITE = ("sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.2; done")


def states(node: MachineNode) -> dict[str, str]:
    return {unit: value["active"] for unit, value in node.json("status", check=False)["units"].items()}


def main_pid(node: MachineNode, unit: str) -> int:
    return int(node.machine.run(["systemctl", "show", "-P", "MainPID", unit]).stdout)


def test_stop_start_and_restart_do_what_they_list_and_say_so(running: MachineNode) -> None:
    steps: dict[str, list[str]] = {}
    for command in ("stop", "start", "restart"):
        plan = running.json(command, "--dry-run")
        assert (plan["kind"], plan["dryRun"], plan["changed"]) == ("Plan", True, True)
        before = {unit: main_pid(running, unit) for unit in UNITS}
        done = running.json(command)
        assert (done["kind"], done["command"], done["changed"]) == ("Result", command, True)
        assert done["steps"] == plan["steps"]
        steps[command] = [action["subject"] for step in done["steps"] for action in step["actions"]]
        if command != "stop":
            running.settle()
        assert set(states(running).values()) == {"inactive" if command == "stop" else "active"}
        after = {unit: main_pid(running, unit) for unit in UNITS}
        assert after["stratum-containerd.service"] != before["stratum-containerd.service"]
        if command != "restart":
            again = running.json(command)
            assert (again["changed"], again["steps"]) == (False, [])
            assert running.stratum(command).lines == ["nothing to do"]
    # The supervisor first, or it would start again what is being stopped.
    assert steps["stop"] == ["stratum.service, stratum-containerd.service"]
    assert steps["start"][0] == "stratum-containerd.service" and "stratum.service" in steps["start"][-1]


def test_a_stopped_node_stays_stopped_until_it_is_started_or_boots(running: MachineNode) -> None:
    running.stratum("stop")
    status = running.stratum("status", check=False)
    assert status.status == 1 and "ready      no" in status.stdout and "containerd does not answer" in status.stdout
    before = states(running)
    time.sleep(2)
    assert states(running) == before
    done = running.machine.run(["stratum", "exec", "ctr", "--connect-timeout", "1s", "version"], check=False)
    assert done.status != 0
    running.machine.reboot()
    assert running.json("status", "--wait", "120")["ready"]
    running.settle()


def test_containers_live_through_stop_start_and_restart(running: MachineNode) -> None:
    running.ctr("run", "--detach", "--cni", "--cpu-shares", "0", IMAGE, "alive", *POLITE)
    pid = running.ctr("tasks", "list").lines[1].split()[1]
    for command in ("restart", "stop", "start"):
        running.stratum(command)
        running.machine.run(["kill", "-0", pid])
    assert running.ctr("tasks", "list").lines[1].split() == ["alive", pid, "RUNNING"]
    running.settle()
    running.ctr("tasks", "kill", "--signal", "TERM", "alive")
    wait_until("it ends", lambda: "STOPPED" in running.ctr("tasks", "list").stdout, 60, pause=0.2)
    running.ctr("tasks", "delete", "alive")
    running.ctr("containers", "delete", "alive")


def test_the_supervisor_starts_what_stopped_for_good(running: MachineNode) -> None:
    # `systemctl stop` is no failure to systemd, so it restarts nothing by itself.
    running.machine.run(["systemctl", "stop", "stratum-containerd"])
    assert running.json("status", "--wait", "120")["ready"]
    words = running.machine.run(["systemctl", "show", "-P", "StatusText", "stratum"]).stdout
    assert "had to be started again" in words


def test_status_and_versions_say_what_is_installed(running: MachineNode) -> None:
    status = running.json("status")
    assert (status["kind"], status["ready"], status["version"], status["serial"]) == ("Status", True, "1.0", 1)
    assert len(status["signers"]) == 1 and status["unfinished"] is None
    text = running.stratum("status").stdout
    assert "version    1.0 of demo" in text and f"signed by  {status['signers'][0]}" in text
    assert "stratum.service: active (running), starts at boot" in text and "ready      yes" in text
    running.machine.run(["systemctl", "disable", "--quiet", "stratum"])
    assert not running.json("status")["enabled"] and "does NOT start at boot" in running.stratum("status").stdout
    assert [step["step"] for step in running.json("up")["steps"]] == ["enable"]
    versions = running.json("versions")
    (version,) = versions["versions"]
    assert (versions["kind"], version["version"], version["active"]) == ("Versions", "1.0", True)
    assert set(version["components"]) == {"containerd", "runc", "cni-plugins"}
    assert running.stratum("versions").stdout.startswith("* 1.0 ")


def test_logs_are_the_journal_of_the_units(running: MachineNode) -> None:
    both = running.stratum("logs").stdout
    assert "containerd successfully booted" in both and "Started stratum.service" in both
    assert "containerd successfully booted" not in running.stratum("logs", "stratum").stdout
    assert len(running.stratum("logs", "containerd", "-n", "3").lines) == 3
    wrong = running.stratum("logs", "sshd", check=False)
    assert (wrong.status, refusal(wrong, state=False)) == (2, "unknown-unit")
    with running.machine.popen(["stratum", "logs", "--follow"], stdout=subprocess.PIPE) as follower:
        assert follower.stdout is not None and follower.stdout.readline()
        assert follower.poll() is None
        running.machine.signal_to(follower, signal.SIGINT)
        assert follower.wait(timeout=60) in (0, 130, -signal.SIGINT)


def test_exec_runs_a_command_with_the_nodes_programs_and_status(running: MachineNode) -> None:
    assert running.stratum("exec", "ctr", "version", env=BARE_ENV).stdout.count("Version:") == 2
    assert running.stratum("exec", "--", "sh", "-c", "exit 7", check=False).status == 7
    seen = dict(line.split("=", 1) for line in running.stratum("exec", "env", env={**BARE_ENV, "MINE": "1"}).lines)
    assert seen["PATH"].startswith("/opt/stratum/node/current/bin:") and seen["MINE"] == "1"
    assert seen["CONTAINERD_ADDRESS"] == "/run/stratum/containerd/containerd.sock"
    assert running.stratum("exec", "cat", input=b"\xff\x00raw").raw_stdout == b"\xff\x00raw"
    missing = running.stratum("exec", "no-such-program", check=False)
    assert missing.status == 14 and "no-such-program" in missing.stderr


def test_commands_that_look_change_nothing(running: MachineNode) -> None:
    before = snapshot(running.machine)
    for words in (["status"], ["versions"], ["logs", "-n", "1"], ["preflight"], ["exec", "true"], ["--help"]):
        running.stratum(*words)
    check_same(before, snapshot(running.machine))


def test_every_command_has_help_and_refuses_what_it_does_not_know(running: MachineNode) -> None:
    listed = running.stratum("--help").stdout
    for command in ("up", "preflight", "status", "start", "stop", "restart", "versions", "logs", "exec", "uninstall"):
        assert re.search(rf"^    {command}\s", listed, re.MULTILINE)
        text = running.stratum(command, "--help").stdout
        assert text.startswith(f"usage: stratum {command}") and "exit status:" in text
        if command != "exec":
            assert running.stratum(command, "--no-such-option", check=False).status == 2


def test_a_node_whose_link_is_damaged_is_reported_and_mended(running: MachineNode) -> None:
    running.machine.sh("ln -sfn nowhere /opt/stratum/node/current")
    done = running.stratum("status", check=False)
    assert done.status != 0 and "Traceback" not in done.stderr
    running.machine.sh("ln -sfn 1.0 /opt/stratum/node/current")
    assert running.json("status")["drift"] == []
