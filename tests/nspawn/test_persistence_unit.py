"""The reboot-persistence unit on real systemd, and systemd's own reading of unit files."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from stratum.host.persistence import render_unit
from tests.conftest import Machines
from tests.lab.machine import Machine, Result, wait_until
from tests.lab.nspawn import NspawnMachine
from tests.unitlines import BROKEN, COMMANDS, UNTOLD

SOURCES = Path(__file__).resolve().parents[2] / "stratum"
UNIT = "stratum.service"
PATH = f"/etc/systemd/system/{UNIT}"
WANTS = f"/etc/systemd/system/multi-user.target.wants/{UNIT}"
OVERRIDES = f"/run/systemd/system/{UNIT}.d"

# What the unit runs here: it says that it is ready and sleeps. The command line is that of the real one.
PROGRAM = """#!/usr/bin/python3
import os, socket, sys, time
with open("/run/starts", "a") as log:
    log.write(repr(sys.argv[1:]) + chr(10))
if os.path.exists("/run/crash"):
    sys.exit(1)
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
    channel.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
time.sleep(1e6)
"""
ARGV = ["/usr/bin/python3", "-IS", "/usr/local/bin/stratum", "up", "--supervise"]

PRELUDE = """
import json, sys
sys.path.insert(0, "/opt/sources")
from stratum.host import persistence, unitfile
from stratum.host.persistence import *
from stratum.journal import Journal
from stratum.receipt import STATE_DIRECTORY, Receipt
from stratum.steps import Work
from stratum.system import Host
host = Host("/")
def install(argv):
    host.makedirs(STATE_DIRECTORY)
    work = Work(host, Receipt.load(host), Journal(host))
    done = []
    for plan in (lambda: plan_unit(work, argv), lambda: plan_enablement(work)):
        for action in plan():
            action.perform(work)
            done.append(action.describe())
    reload(host)
    return done
"""


@pytest.fixture
def machine(shared_machine: NspawnMachine) -> NspawnMachine:
    """The shared machine without a unit of ours and without what a test left of it."""
    if not shared_machine.exists("/opt/sources"):
        shared_machine.copy_tree_in(SOURCES, "/opt/sources/stratum")
    script = f"""
        systemctl stop {UNIT} 2>/dev/null || :
        rm -rf {PATH} {PATH}.d {WANTS} {OVERRIDES} /usr/lib/systemd/system/{UNIT}.d /run/starts /run/crash
        rm -rf /var/lib/stratum
        systemctl daemon-reload
        systemctl reset-failed {UNIT} 2>/dev/null || :
    """
    shared_machine.sh(script)
    shared_machine.write("/usr/local/bin/stratum", PROGRAM, 0o755)
    return shared_machine


def ask(machine: Machine, code: str, check: bool = True) -> Any:
    """Run a line of Python in the machine and return its value."""
    result = python(machine, f"print(json.dumps({code}))", check)
    return json.loads(result.stdout)


def python(machine: Machine, code: str, check: bool = True) -> Result:
    return machine.run(["python3", "-c", f"{PRELUDE}\n{code}\n"], check=check)


def show(machine: Machine, name: str) -> str:
    return machine.run(["systemctl", "show", "--value", "-p", name, UNIT]).stdout.strip()


def start(machine: Machine) -> int:
    ask(machine, f"[install({ARGV!r}), start(host)]")
    return int(show(machine, "MainPID"))


def starts(machine: Machine) -> int:
    return len(machine.read("/run/starts").splitlines())


# -- install, enable, disable -------------------------------------------------------------------------------


def test_the_unit_runs_its_command_and_systemd_has_nothing_to_say_about_the_file(machine: NspawnMachine) -> None:
    pid = start(machine)
    assert pid == ask(machine, "main_pid(host)") > 0
    assert machine.read("/run/starts") == "['up', '--supervise']\n"
    assert ask(machine, "unit_argv(host)") == ARGV
    assert ask(machine, "unit_exec_path(host)") == "/usr/bin/python3"
    verify = machine.run(["systemd-analyze", "verify", "--man=no", PATH], check=False)
    assert (verify.status, verify.stderr) == (0, "")
    assert ask(machine, f"install({ARGV!r})") == []
    assert show(machine, "NeedDaemonReload") == "no"


def test_enablement_is_written_as_systemctl_writes_it_and_survives_both_ways(machine: NspawnMachine) -> None:
    start(machine)
    assert ask(machine, "unit_enabled(host)") is True
    ours = machine.run(["readlink", WANTS]).stdout
    ask(machine, "disable(host)")
    assert ask(machine, "unit_enabled(host)") is False
    assert not machine.exists(WANTS)
    assert show(machine, "ActiveState") == "active", "disabling is about the next boot"
    ask(machine, "enable(host)")
    assert ask(machine, "unit_enabled(host)") is True
    assert machine.run(["readlink", WANTS]).stdout == ours


def test_enabled_at_run_time_only_is_not_enabled(machine: NspawnMachine) -> None:
    start(machine)
    ask(machine, "disable(host)")
    machine.run(["systemctl", "enable", "--runtime", UNIT])
    assert machine.run(["systemctl", "is-enabled", UNIT]).stdout == "enabled-runtime\n"
    assert ask(machine, "unit_enabled(host)") is False
    machine.run(["systemctl", "disable", "--runtime", UNIT])


def test_everything_about_a_missing_unit_is_no_error_and_leaves_nothing(machine: NspawnMachine) -> None:
    for call in ("disable", "enable", "stop", "restart", "suppress_restart", "allow_restart", "start_later"):
        ask(machine, f"{call}(host)")
    assert ask(machine, "[unit_enabled(host), main_pid(host)]") == [False, 0]
    assert not machine.exists(OVERRIDES)
    assert "UnitMissingError" in python(machine, "unit_argv(host)", check=False).stderr


def test_the_pid_is_0_once_the_unit_has_stopped(machine: NspawnMachine) -> None:
    pid = start(machine)
    ask(machine, "stop(host)")
    assert ask(machine, "main_pid(host)") == 0
    assert not machine.exists(f"/proc/{pid}")
    assert show(machine, "ActiveState") == "inactive"


# -- masks ----------------------------------------------------------------------------------------------------


def test_a_masked_unit_stays_masked_through_everything(machine: NspawnMachine) -> None:
    machine.run(["systemctl", "mask", UNIT])
    assert ask(machine, f"install({ARGV!r})") == []
    assert machine.run(["readlink", PATH]).stdout == "/dev/null\n"
    for call in ("enable", "disable", "suppress_restart", "allow_restart", "stop", "reload"):
        ask(machine, f"{call}(host)")
    assert ask(machine, "[masked(host), unit_enabled(host), main_pid(host)]") == [True, False, 0]
    assert show(machine, "LoadState") == "masked"
    assert not machine.exists(WANTS)
    assert "the unit is masked" in python(machine, "unit_argv(host)", check=False).stderr


def test_an_active_unit_that_was_masked_meanwhile_is_stopped_and_left_masked(machine: NspawnMachine) -> None:
    pid = start(machine)
    machine.sh(f"rm {PATH}; systemctl mask {UNIT}")
    ask(machine, "disable(host)")
    ask(machine, "suppress_restart(host)")
    ask(machine, "stop(host)")
    assert not machine.exists(f"/proc/{pid}")
    ask(machine, "allow_restart(host)")
    assert machine.run(["readlink", PATH]).stdout == "/dev/null\n"


def test_a_unit_without_content_is_masked_for_systemd_and_for_us(machine: NspawnMachine) -> None:
    machine.sh(f": >{PATH}; systemctl daemon-reload")
    assert show(machine, "LoadState") == "masked"
    assert ask(machine, "masked(host)") is True


# -- restart --------------------------------------------------------------------------------------------------


def test_an_end_of_the_supervisor_during_a_teardown_is_not_followed_by_a_start(machine: NspawnMachine) -> None:
    pid = start(machine)
    # An admin's own drop-in that says the opposite, with a name that sorts late.
    machine.write(f"{PATH}.d/zz-mine.conf", "[Service]\nRestart=always\nRestartSec=100ms\n")
    ask(machine, "suppress_restart(host)")
    assert show(machine, "Restart") == "no"
    assert int(show(machine, "MainPID")) == pid, "the running one goes on"
    machine.kill(pid)
    wait_until("the unit ends", lambda: show(machine, "ActiveState") in ("failed", "inactive"), 60)
    time.sleep(1.0)
    assert starts(machine) == 1
    ask(machine, "allow_restart(host)")
    assert show(machine, "Restart") == "always"
    assert not machine.exists(OVERRIDES)


def test_a_reboot_takes_the_override_back(machines: Machines, lab_root: Path) -> None:
    machine = machines.boot(NspawnMachine(lab_root))
    machine.copy_tree_in(SOURCES, "/opt/sources/stratum")
    machine.write("/usr/local/bin/stratum", PROGRAM, 0o755)
    start(machine)
    ask(machine, "suppress_restart(host)")
    machine.reboot()
    assert show(machine, "Restart") == "always"
    wait_until("the unit is up after the boot", lambda: show(machine, "ActiveState") == "active", 60)


def test_a_reload_that_failed_is_made_up_for_by_the_next_call(machine: NspawnMachine) -> None:
    start(machine)
    ask(machine, "suppress_restart(host)")
    # systemctl can reach systemd neither through its own socket nor through the bus.
    machine.sh("mv /run/systemd/private /run/systemd/private.off; mv /run/dbus /run/dbus.off")
    try:
        failed = python(machine, "allow_restart(host)", check=False)
        assert "CommandError" in failed.stderr
        assert "CommandError" in python(machine, "unit_enabled(host)", check=False).stderr, "no answer is no 'no'"
    finally:
        machine.sh("mv /run/systemd/private.off /run/systemd/private; mv /run/dbus.off /run/dbus")
    assert not machine.exists(OVERRIDES)
    assert show(machine, "Restart") == "no", "the file is gone; systemd still has what it read"
    ask(machine, "allow_restart(host)")
    assert show(machine, "Restart") == "always"


def test_a_unit_that_crashes_again_and_again_is_started_again_and_again(machine: NspawnMachine) -> None:
    machine.sh("touch /run/crash")
    machine.write(f"{PATH}.d/fast.conf", "[Service]\nRestartSec=50ms\n")
    ask(machine, f"[install({ARGV!r}), start_later(host)]")
    wait_until("many starts", lambda: machine.exists("/run/starts") and starts(machine) > 12, 120)
    machine.sh("rm /run/crash")
    wait_until("it is up in the end", lambda: show(machine, "ActiveState") == "active", 60)
    # In the middle of a storm it can be stopped for good.
    machine.sh(f"touch /run/crash; kill -9 $(systemctl show --value -p MainPID {UNIT})")
    wait_until("the storm goes on", lambda: show(machine, "SubState") == "auto-restart", 60)
    ask(machine, "[disable(host), suppress_restart(host), stop(host)]")
    before = starts(machine)
    time.sleep(1.0)
    assert starts(machine) == before
    assert show(machine, "ActiveState") in ("inactive", "failed")
    ask(machine, "allow_restart(host)")


def test_a_restart_is_a_new_process_with_the_same_command(machine: NspawnMachine) -> None:
    pid = start(machine)
    ask(machine, "restart(host)")
    wait_until(
        "a new process",
        lambda: show(machine, "ActiveState") == "active" and ask(machine, "main_pid(host)") not in (0, pid),
        60,
    )
    assert machine.read("/run/starts") == "['up', '--supervise']\n" * 2


def test_a_stop_signals_the_supervisor_only(machine: NspawnMachine) -> None:
    machine.write(
        "/usr/local/bin/stratum", PROGRAM.replace("if os.path", "os.system('sleep 4247 &')\nif os.path"), 0o755
    )
    start(machine)
    ask(machine, "stop(host)")
    left = machine.run(["pgrep", "-f", "sleep 4247"]).stdout.split()
    for pid in left:
        machine.kill(int(pid))
    assert len(left) == 1


def test_a_deleted_unit_is_forgotten_by_systemd_too(machine: NspawnMachine) -> None:
    pid = start(machine)
    ask(machine, "suppress_restart(host)")
    machine.kill(pid)
    wait_until("it has failed", lambda: show(machine, "ActiveState") == "failed", 60)
    machine.sh(f"rm {PATH} {WANTS}")
    ask(machine, 'forget(host, ["stratum-containerd.service"])')
    assert show(machine, "LoadState") == "not-found"
    listed = machine.run(["systemctl", "list-units", "--all", "--no-legend", "--plain", "stratum*"]).stdout
    assert listed == ""


# -- the command, as systemd reads it -------------------------------------------------------------------------

# Runs each unit file and tells what the kernel knows of the process: the program and its arguments.
RUN_ALL = """
import json, os, subprocess, sys
def systemctl(*words):
    return subprocess.run(["systemctl", *words], capture_output=True, text=True)
answers = {}
for name, text in json.load(sys.stdin).items():
    with open("/etc/systemd/system/stratum.service", "wb") as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    systemctl("daemon-reload")
    said = systemctl("start", "stratum.service").stderr
    state = systemctl("show", "--value", "-p", "LoadState", "stratum.service").stdout.strip()
    pid = systemctl("show", "--value", "-p", "MainPID", "stratum.service").stdout.strip()
    if pid != "0":
        words = open(f"/proc/{pid}/cmdline", "rb").read().decode("utf-8", "surrogateescape").split(chr(0))[:-1]
        answers[name] = [state, os.readlink(f"/proc/{pid}/exe"), words]
    else:
        answers[name] = [state, "", said]
    systemctl("stop", "stratum.service")
    systemctl("reset-failed", "stratum.service")
json.dump(answers, sys.stdout)
"""


def sleeper() -> bytes:
    """A program that looks at no argument and does nothing but wait: pause(2) for ever, as an x86-64 ELF file."""
    code = b"\xb8\x22\x00\x00\x00\x0f\x05\xeb\xf7"  # mov eax, SYS_pause; syscall; jmp to the start
    size = 64 + 56 + len(code)
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 62, 1, 0x400078, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, 0x400000, 0x400000, size, size, 0x1000)
    return header + segment + code


@pytest.fixture(scope="module")
def answers(shared_machine: NspawnMachine) -> dict[str, list[Any]]:
    """What systemd makes of each file."""
    shared_machine.sh(f"systemctl stop {UNIT} 2>/dev/null || :; rm -rf {PATH}.d")
    shared_machine.write("/opt/probe", sleeper(), 0o755)
    shared_machine.write(f"{PATH}.d/type.conf", "[Service]\nType=exec\nRestart=no\n")
    files = {name: text for name, (text, _, _) in COMMANDS.items()} | BROKEN
    result = shared_machine.run(["python3", "-c", RUN_ALL], input=json.dumps(files), timeout=300)
    shared_machine.sh(f"rm -rf {PATH} {PATH}.d /opt/probe; systemctl daemon-reload")
    found: dict[str, list[Any]] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("name", COMMANDS, ids=list(COMMANDS))
def test_systemd_runs_the_program_and_the_words_that_we_read(answers: dict[str, list[Any]], name: str) -> None:
    _, executable, argv = COMMANDS[name]
    assert answers[name] == ["loaded", executable, list(argv)]


@pytest.mark.parametrize("name", [name for name in BROKEN if name not in UNTOLD])
def test_systemd_refuses_what_we_refuse(answers: dict[str, list[Any]], name: str) -> None:
    assert answers[name][0] in ("bad-setting", "error"), answers[name]


@pytest.mark.parametrize(("name", "argv"), [("variable", ["/opt/probe"]), ("lone dollar", ["/opt/probe"])])
def test_what_the_file_does_not_tell_depends_on_the_manager(
    answers: dict[str, list[Any]], name: str, argv: list[str]
) -> None:
    assert answers[name][2] == argv, "a variable that is not set is no word at all"


def test_a_drop_in_that_sets_the_command_is_what_systemd_runs(machine: NspawnMachine) -> None:
    start(machine)
    machine.write(f"{PATH}.d/mine.conf", "[Service]\nExecStart=\nExecStart=/bin/sleep 4243\n")
    machine.run(["systemctl", "daemon-reload"])
    assert "path=/bin/sleep" in show(machine, "ExecStart")
    assert f"{PATH}.d/mine.conf: line 2" in python(machine, "unit_argv(host)", check=False).stderr


@pytest.mark.parametrize("directory", [f"/usr/lib/systemd/system/{UNIT}.d", OVERRIDES, "/etc/systemd/system/service.d"])
def test_drop_ins_are_found_where_systemd_finds_them(machine: NspawnMachine, directory: str) -> None:
    start(machine)
    machine.write(f"{directory}/mine.conf", "[Service]\nExecStart=\n")
    machine.run(["systemctl", "daemon-reload"])
    assert f"{directory}/mine.conf" in show(machine, "DropInPaths")
    assert "sets another ExecStart" in python(machine, "unit_argv(host)", check=False).stderr
    machine.sh(f"rm -r {directory}")


def test_drop_ins_that_systemd_passes_over_are_passed_over(machine: NspawnMachine) -> None:
    start(machine)
    machine.write(f"/usr/lib/systemd/system/{UNIT}.d/a.conf", "[Service]\nExecStart=\nExecStart=/bin/sleep 1\n")
    machine.sh(f"mkdir -p {PATH}.d; ln -s /dev/null {PATH}.d/a.conf; ln -s /nowhere {PATH}.d/b.conf")
    machine.write(f"{PATH}.d/c.conf.bak", "[Service]\nExecStart=\n")
    machine.run(["systemctl", "daemon-reload"])
    assert "path=/usr/bin/python3" in show(machine, "ExecStart")
    assert show(machine, "LoadState") == "loaded"
    assert ask(machine, "unit_argv(host)") == ARGV


AWKWARD = [
    "",
    " ",
    "a b",
    "tab\tand\nline",
    "\\",
    "q\"u'o",
    "%n %% %",
    "$HOME ${HOME} $$",
    ";",
    "#x",
    "-x",
    "\u20ac",
    "\x01\x7f",
]


def test_awkward_arguments_reach_the_process_unchanged(machine: NspawnMachine) -> None:
    """The property test of the unit tier, once with systemd itself between the two."""
    words = ["/opt/pro be%$x", *AWKWARD]
    machine.write(words[0], sleeper(), 0o755)
    machine.write(PATH, render_unit(words))
    machine.write(f"{PATH}.d/type.conf", "[Service]\nType=exec\n")
    machine.sh(f"systemctl daemon-reload; systemctl start {UNIT}")
    raw = machine.run(["cat", f"/proc/{show(machine, 'MainPID')}/cmdline"]).raw_stdout
    assert raw.decode("utf-8", "surrogateescape").split("\0")[:-1] == words
    machine.run(["rm", words[0]])
