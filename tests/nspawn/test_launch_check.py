"""The launch check on real systemd: a final refusal fails the kubelet's start, another failure is tried again.

Only unit files and scripts: no node is brought up here, and what the units run are scripts that say that they ran.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stratum.errors import StratumError
from stratum.node.launchcheck import read_launch_check, refusal, start_failure
from stratum.node.units import (
    SYSTEMD_DIR,
    UNIT_CONTAINERD,
    UNIT_KUBELET,
    UNIT_KUBELET_LAUNCH_CHECK,
    UnitSpec,
    render_units,
)
from stratum.system import Completed, Host, HostPath
from tests.conftest import Machines
from tests.lab import roots
from tests.lab.machine import wait_until
from tests.lab.nspawn import NspawnMachine

BIN = HostPath("/srv/bin")
# What the check says is in a file; each run of it, and of the kubelet, is a line in another.
CHECK = '#!/bin/sh\necho check >>/srv/log\nread status </srv/verdict\necho "verdict: $status" >&2\nexit "$status"\n'
KUBELET = "#!/bin/sh\necho kubelet >>/srv/log\nenv >/srv/environment\nexec sleep 1000\n"
CONTAINERD = "#!/bin/sh\nenv >/srv/environment-containerd\nsystemd-notify --ready\nexec sleep 1000\n"
QUICK = "[Service]\nRestartSec=300ms\n"
MANAGER = "[Manager]\nDefaultEnvironment=http_proxy=http://leak:1 HTTPS_PROXY=http://leak:1 ALL_PROXY=http://leak:1\n"
KUBELET_UP, CHECKED = "kubelet", "check"


class InMachine(Host):
    """Asks the machine's systemd with Stratum's own code."""

    machine: NspawnMachine

    def run(self, argv, **options):  # type: ignore[no-untyped-def]
        done = self.machine.run(list(argv), check=options.get("check", True))
        return Completed(tuple(argv), done.status, done.raw_stdout, done.raw_stderr)


def asking(machine: NspawnMachine) -> InMachine:
    host = InMachine()
    host.machine = machine
    return host


# systemd 252 and 257: the newer one has another way of restarting (254).
@pytest.fixture(scope="module", params=[roots.BOOKWORM, roots.TRIXIE], ids=["bookworm", "trixie"])
def machine(request: pytest.FixtureRequest, module_machines: Machines) -> NspawnMachine:
    machine = module_machines.boot(NspawnMachine(roots.root_directory(request.param), "launch"))
    machine.write("/etc/systemd/system.conf.d/proxy.conf", MANAGER)
    for name, script in (("check", CHECK), ("kubelet", KUBELET), ("containerd", CONTAINERD)):
        machine.write(f"{BIN}/{name}", script, 0o755)
    spec = UnitSpec(BIN, kubelet=True, launch_check=f"{BIN}/check")
    for file in render_units(spec):
        machine.write(str(file.path), file.content)
    for unit in (UNIT_KUBELET, UNIT_KUBELET_LAUNCH_CHECK):
        machine.write(f"{SYSTEMD_DIR}/{unit}.d/99-quick.conf", QUICK)
    machine.write(f"{SYSTEMD_DIR}/{UNIT_CONTAINERD}.d/99-notify.conf", "[Service]\nNotifyAccess=all\n")
    machine.run(["systemctl", "daemon-reexec"])
    return machine


@pytest.fixture
def verdict(machine: NspawnMachine) -> Iterator[None]:
    """Everything down and forgotten."""
    yield
    machine.sh(f"systemctl stop {UNIT_KUBELET} {UNIT_KUBELET_LAUNCH_CHECK}; systemctl reset-failed; rm -f /srv/log")


def say(machine: NspawnMachine, status: int) -> None:
    machine.write("/srv/verdict", f"{status}\n")


def runs(machine: NspawnMachine) -> list[str]:
    return machine.read("/srv/log").split() if machine.exists("/srv/log") else []


def state(machine: NspawnMachine, unit: str = UNIT_KUBELET) -> str:
    return machine.run(["systemctl", "show", "-P", "ActiveState", unit]).stdout.strip()


def start(machine: NspawnMachine) -> int:
    return machine.run(["systemctl", "start", UNIT_KUBELET], check=False).status


def stays(machine: NspawnMachine, expected: list[str]) -> None:
    """Nothing runs again in ten times the time after which a restart would come."""
    machine.run(["sleep", "3"])
    assert runs(machine) == expected


def test_a_final_refusal_fails_the_start_and_nothing_is_tried_again(machine: NspawnMachine, verdict: None) -> None:
    say(machine, 78)
    assert start(machine) != 0
    assert runs(machine) == [CHECKED]
    stays(machine, [CHECKED])
    assert (state(machine), state(machine, UNIT_KUBELET_LAUNCH_CHECK)) == ("inactive", "failed")
    host = asking(machine)
    assert read_launch_check(host).refused
    assert refusal(host).message.endswith("for good: verdict: 78")
    # A start that somebody asks for asks again, and once the check agrees the kubelet runs.
    assert start(machine) != 0
    say(machine, 0)
    assert start(machine) == 0
    assert (runs(machine), state(machine)) == ([CHECKED, CHECKED, CHECKED, KUBELET_UP], "active")
    assert not read_launch_check(host).refused
    stays(machine, [CHECKED, CHECKED, CHECKED, KUBELET_UP])


def test_any_other_failure_is_tried_again_and_the_kubelet_comes_up_by_itself(
    machine: NspawnMachine, verdict: None
) -> None:
    say(machine, 1)
    machine.run(["systemctl", "start", "--no-block", UNIT_KUBELET])
    wait_until("the check is tried again", lambda: runs(machine).count(CHECKED) >= 3, 30, pause=0.2)
    assert KUBELET_UP not in runs(machine) and state(machine) != "active"
    assert read_launch_check(asking(machine)).trying
    assert start_failure(asking(machine), StratumError("unit-failed", "x")) is None, "it comes up by itself"
    say(machine, 0)
    wait_until("the kubelet is up", lambda: state(machine) == "active", 30, pause=0.2)
    assert runs(machine).count(KUBELET_UP) == 1
    stays(machine, runs(machine))


def test_a_failure_that_becomes_a_refusal_ends_the_tries(machine: NspawnMachine, verdict: None) -> None:
    say(machine, 1)
    machine.run(["systemctl", "start", "--no-block", UNIT_KUBELET])
    wait_until("the check is tried again", lambda: runs(machine).count(CHECKED) >= 2, 30, pause=0.2)
    say(machine, 78)
    wait_until("it has failed for good", lambda: state(machine, UNIT_KUBELET_LAUNCH_CHECK) == "failed", 30, pause=0.2)
    stays(machine, runs(machine))
    assert state(machine) == "inactive"


def test_every_start_of_the_kubelet_waits_for_the_check_one_after_a_crash_too(
    machine: NspawnMachine, verdict: None
) -> None:
    say(machine, 0)
    assert start(machine) == 0
    machine.run(["systemctl", "kill", "--signal=KILL", UNIT_KUBELET])
    expected = [CHECKED, KUBELET_UP, CHECKED, KUBELET_UP]
    wait_until("it is up again", lambda: runs(machine) == expected, 30, pause=0.2)
    # And a refusal at such a start leaves it down.
    say(machine, 78)
    machine.run(["systemctl", "kill", "--signal=KILL", UNIT_KUBELET])
    wait_until("it was refused", lambda: state(machine, UNIT_KUBELET_LAUNCH_CHECK) == "failed", 30, pause=0.2)
    stays(machine, [*expected, CHECKED])
    assert state(machine) != "active"


def test_whoever_stops_the_kubelet_stops_the_tries(machine: NspawnMachine, verdict: None) -> None:
    say(machine, 1)
    machine.run(["systemctl", "start", "--no-block", UNIT_KUBELET])
    wait_until("the check is tried again", lambda: runs(machine).count(CHECKED) >= 2, 30, pause=0.2)
    machine.run(["systemctl", "stop", UNIT_KUBELET])
    say(machine, 0)
    stays(machine, runs(machine))
    assert KUBELET_UP not in runs(machine) and state(machine) == "inactive"


def test_a_proxy_of_the_manager_reaches_neither_containerd_nor_the_kubelet(
    machine: NspawnMachine, verdict: None
) -> None:
    """Row 43."""
    manager = machine.run(["systemctl", "show-environment"]).stdout
    machine.run(["systemd-run", "--wait", "--quiet", "sh", "-c", "env >/srv/environment-other"])
    assert "leak" in machine.read("/srv/environment-other"), manager
    say(machine, 0)
    assert start(machine) == 0
    for name in ("/srv/environment", "/srv/environment-containerd"):
        found = dict(line.partition("=")[::2] for line in machine.read(name).splitlines())
        assert "leak" not in "".join(found.values())
        assert {found[key] for key in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "NO_PROXY")} == {""}


def test_a_crash_of_containerd_takes_no_kubelet_along(machine: NspawnMachine, verdict: None) -> None:
    say(machine, 0)
    assert start(machine) == 0
    pid = machine.run(["systemctl", "show", "-P", "MainPID", UNIT_KUBELET]).stdout
    machine.run(["systemctl", "kill", "--signal=KILL", UNIT_CONTAINERD])
    wait_until("it is noticed", lambda: state(machine, UNIT_CONTAINERD) != "active", 30, pause=0.1)
    stays(machine, [CHECKED, KUBELET_UP])
    assert machine.run(["systemctl", "show", "-P", "MainPID", UNIT_KUBELET]).stdout == pid
