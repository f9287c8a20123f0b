"""firewalld: our interface in its trusted zone, on record, and out of it again; tests/vm asks the real one."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stratum.errors import CommandError, StratumError
from stratum.host import firewalld
from stratum.host.firewalld import RECORD, Binding
from stratum.journal import Journal
from stratum.receipt import STATE_DIRECTORY, Receipt
from stratum.steps import Action, Work
from stratum.system import Host
from tests.fakes import Killed, MachineHost, make_tree

BRIDGE = "stratum0"
PLAIN = '<zone target="ACCEPT">\n</zone>\n'
ADD_PERMANENT = f"firewall-cmd --permanent --zone=trusted --add-interface={BRIDGE}"
ADD_RUNTIME = f"firewall-cmd --zone=trusted --add-interface={BRIDGE}"


@dataclass
class FirewallHost(MachineHost):
    """A machine with firewalld 1.3, as far as interfaces go: statuses and files are those of the real one."""

    running: bool = True
    enabled: bool = True
    broken: bool = False  # firewalld runs and cannot be asked
    runtime: dict[str, str] = field(default_factory=dict)

    def install(self) -> FirewallHost:
        for name in ("firewall-cmd", "firewall-offline-cmd"):
            program = Path(self.root, "usr/bin", name)
            program.write_text("#!/usr/bin/python3\n")
            program.chmod(0o755)
        for zone in ("trusted", "public"):
            for place in ("usr/lib", "etc"):
                path = Path(self.root, place, "firewalld/zones", f"{zone}.xml")
                path.parent.mkdir(parents=True, exist_ok=True)
                if place == "usr/lib":
                    path.write_text(PLAIN)
        return self

    def _zone_file(self, zone: str) -> Path:
        return Path(self.root, "etc/firewalld/zones", f"{zone}.xml")

    def permanent(self) -> dict[str, str]:
        found = {}
        for path in Path(self.root, "etc/firewalld/zones").glob("*.xml"):
            for name in re.findall(r'<interface name="(.*?)"', path.read_text()):
                found[name] = path.stem
        return found

    def start(self) -> None:
        self.running, self.runtime = True, self.permanent()

    def stop(self) -> None:
        self.running, self.runtime = False, {}

    def _answer(self, line: str, argv: list[str], data: bytes) -> tuple[int, str]:
        if argv[:2] == ["systemctl", "is-enabled"] and argv[-1] == "firewalld.service":
            return (0 if self.enabled else 1), ""
        status, text = super()._answer(line, argv, data)
        if status != 0:
            return status, text
        if argv[0] not in ("firewall-cmd", "firewall-offline-cmd"):
            return status, text
        offline = argv[0] == "firewall-offline-cmd"
        assert "--reload" not in argv and "--complete-reload" not in argv, "never"
        assert not (offline and self.running), "the offline program is for a firewalld that does not run"
        if self.broken:
            return 251, ""
        if not offline and not self.running:
            return 252, ""
        return (0, "running\n") if argv[1] == "--state" else self._zones(argv[1:], offline)

    def _zones(self, words: list[str], offline: bool) -> tuple[int, str]:
        permanent = offline or "--permanent" in words
        options = dict(word[2:].partition("=")[::2] for word in words)
        known = self.permanent() if permanent else self.runtime
        if "get-zone-of-interface" in options:
            zone = known.get(options["get-zone-of-interface"])
            return (0, f"{zone}\n") if zone else (2, "no zone\n")
        if "load-zone-defaults" in options:
            path = self._zone_file(options["load-zone-defaults"])
            path.rename(f"{path}.old")
            return 0, ""
        zone, name = options["zone"], options.get("add-interface") or options["remove-interface"]
        if "add-interface" in options and known.get(name, zone) != zone:
            return 18, ""
        if permanent:
            self._write(zone, name, "add-interface" in options)
        elif "add-interface" in options:
            self.runtime[name] = zone
        elif self.runtime.pop(name, None) is None:
            return 17, ""
        return 0, ""

    def _write(self, zone: str, name: str, add: bool) -> None:
        path = self._zone_file(zone)
        text = path.read_text() if path.exists() else PLAIN
        if path.exists():
            Path(f"{path}.old").write_text(text)
        line = f'  <interface name="{name}"/>\n'
        text = text.replace(line, "")
        path.write_text(text.replace("</zone>", f"{line}</zone>") if add else text)


@pytest.fixture
def host(tmp_path: Path) -> FirewallHost:
    host = FirewallHost(str(make_tree(tmp_path / "root", live=True)), {}).install()
    host.makedirs(STATE_DIRECTORY)
    return host


def work_on(host: Host) -> Work:
    return Work(host, Receipt.load(host), Journal(host))


def perform(work: Work, actions: list[Action]) -> list[str]:
    for action in actions:
        action.perform(work)
    return [action.describe() for action in actions]


def refuse(text: str) -> None:
    pytest.fail(f"a warning: {text}")


def trust(host: Host, warn=refuse) -> list[str]:  # type: ignore[no-untyped-def]
    work = work_on(host)
    return perform(work, firewalld.plan_trust(work, [BRIDGE], warn))


def untrust(host: Host) -> list[str]:
    work = work_on(host)
    return perform(work, firewalld.plan_untrust(work))


def changes(host: MachineHost) -> list[str]:
    return [line for line in host.commands if "--add" in line or "--remove" in line or "defaults" in line]


def etc(host: Host) -> dict[str, str]:
    return {path.name: path.read_text() for path in Path(host.root, "etc/firewalld/zones").iterdir()}


# -- trusting -----------------------------------------------------------------------------------------------


def test_the_interface_is_bound_permanently_and_now_and_never_a_range_of_addresses(host: FirewallHost) -> None:
    assert trust(host) == ["trust stratum0 in firewalld's zone trusted (permanent and runtime)"]
    assert host.permanent() == {BRIDGE: "trusted"} == host.runtime
    assert changes(host) == [ADD_PERMANENT, ADD_RUNTIME]
    assert not any("source" in line for line in host.commands)


def test_a_second_time_there_is_nothing_to_do(host: FirewallHost) -> None:
    trust(host)
    host.commands.clear()
    assert trust(host) == []
    assert changes(host) == []


def test_without_firewalld_nothing_is_asked(tmp_path: Path) -> None:
    host = FirewallHost(str(make_tree(tmp_path / "root", live=True)), {})
    assert trust(host) == [] == untrust(host)
    assert host.commands == []


def test_a_tree_has_no_firewall_to_change(tmp_path: Path) -> None:
    tree = Host(str(make_tree(tmp_path / "root")), {})
    assert trust(tree) == [] == untrust(tree)


def test_the_record_is_written_before_the_binding(host: FirewallHost) -> None:
    def look() -> None:
        assert owned(host)[0].permanent

    host.hooks = {"firewall-cmd --permanent --zone=trusted --add": look}
    trust(host)
    assert owned(host) == [Binding(BRIDGE, "trusted", True, True, True)]
    assert work_on(host).receipt.owns(RECORD)


def owned(host: Host) -> list[Binding]:
    return firewalld.owned_interfaces(host)


def test_a_run_that_is_killed_anywhere_leaves_nothing_that_is_not_on_record(tmp_path: Path) -> None:
    for number in range(200):
        host = FirewallHost(str(make_tree(tmp_path / str(number), live=True)), {}).install()
        host.makedirs(STATE_DIRECTORY)
        host.dies_at = len(host.mutations) + number
        try:
            trust(host)
        except Killed:
            assert set(host.permanent()) | set(host.runtime) <= {item.interface for item in owned(host)}
            host.dies_at, host.dead = None, False
            untrust(host)
            assert host.permanent() == {} == host.runtime
        else:
            assert number > 8
            return
    pytest.fail("it never came to an end")


def test_a_binding_that_was_there_before_is_used_and_never_removed(host: FirewallHost) -> None:
    host._write("trusted", BRIDGE, True)
    assert trust(host) == ["trust stratum0 in firewalld's zone trusted (runtime)"]
    assert owned(host) == [Binding(BRIDGE, "trusted", permanent=False, runtime=True)]
    untrust(host)
    assert host.permanent() == {BRIDGE: "trusted"}
    assert host.runtime == {}


@pytest.mark.parametrize("permanent", [True, False])
def test_an_interface_that_somebody_put_into_another_zone_stays_there(host: FirewallHost, permanent: bool) -> None:
    if permanent:
        host._write("public", BRIDGE, True)
    else:
        host.runtime[BRIDGE] = "public"
    warnings: list[str] = []
    trust(host, warnings.append)
    assert (host.permanent() if permanent else host.runtime)[BRIDGE] == "public"
    option = "--permanent " if permanent else ""
    assert len(warnings) == 1
    assert warnings[0].endswith(f"run: firewall-cmd {option}--zone=trusted --change-interface=stratum0")


@pytest.mark.parametrize("where", ["permanent", "runtime"])
def test_a_binding_that_was_lost_is_made_again_and_says_so(host: FirewallHost, where: str) -> None:
    trust(host)
    if where == "permanent":
        host._write("trusted", BRIDGE, False)
    else:
        host.runtime.clear()
    assert trust(host) == [f"trust stratum0 in firewalld's zone trusted ({where}), which was lost"]
    assert host.permanent() == {BRIDGE: "trusted"} == host.runtime


def test_a_stopped_firewalld_that_starts_at_boot_gets_the_permanent_part(host: FirewallHost) -> None:
    host.stop()
    assert trust(host) == ["trust stratum0 in firewalld's zone trusted (permanent)"]
    assert changes(host) == [f"firewall-offline-cmd --zone=trusted --add-interface={BRIDGE}"]
    host.start()
    assert trust(host) == [], "it came with the permanent configuration"


def test_what_a_firewalld_that_was_stopped_has_from_us_once_it_runs_is_taken_back_too(host: FirewallHost) -> None:
    host.stop()
    trust(host)
    host.start()
    assert host.runtime == {BRIDGE: "trusted"}
    untrust(host)
    assert host.permanent() == {} == host.runtime
    assert owned(host) == []


def test_a_firewalld_that_is_not_used_is_left_alone(host: FirewallHost) -> None:
    host.stop()
    host.enabled = False
    assert trust(host) == []
    assert etc(host) == {}


# -- failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failing", ["firewall-cmd --state", "firewall-cmd --get-zone", "firewall-cmd --permanent --get-zone"]
)
def test_a_firewalld_that_cannot_be_asked_is_a_warning_with_every_command(host: FirewallHost, failing: str) -> None:
    host.failing[failing] = 1
    warnings: list[str] = []
    assert trust(host, warnings.append) == []
    assert len(warnings) == 1
    assert warnings[0].endswith(f"run: {ADD_PERMANENT}; {ADD_RUNTIME}")
    assert not host.lexists(RECORD)


@pytest.mark.parametrize("command", [ADD_PERMANENT, ADD_RUNTIME])
def test_an_addition_that_fails_is_a_warning_with_its_command_and_is_not_on_record(
    host: FirewallHost, command: str
) -> None:
    host.failing[command] = 1
    warnings: list[str] = []
    trust(host, warnings.append)
    assert len(warnings) == 1 and warnings[0].endswith(f"run: {command}")
    (binding,) = owned(host)
    assert (binding.permanent, binding.runtime) == (command != ADD_PERMANENT, command != ADD_RUNTIME)


def test_a_firewalld_that_has_failed_is_a_warning_and_no_start_fails(host: FirewallHost) -> None:
    host.broken = True
    warnings: list[str] = []
    assert trust(host, warnings.append) == []
    assert len(warnings) == 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"format": 2, "bindings": []}', b'{"format": 1, "bindings": [{"zone": "x"}]}',
                b'{"format": 1, "bindings": [{"interface": 1, "zone": "x"}]}', b'{"format": 1, "bindings": [7]}',
                b"\xff"],
)  # fmt: skip
def test_a_record_that_cannot_be_read_is_an_error_and_no_empty_list(host: FirewallHost, content: bytes) -> None:
    Path(host.real(RECORD)).write_bytes(content)
    with pytest.raises(StratumError) as caught:
        owned(host)
    assert caught.value.reference == "firewalld-record"
    with pytest.raises(StratumError):
        untrust(host)
    warnings: list[str] = []
    assert trust(host, warnings.append) == [], "and it fails no start"
    assert len(warnings) == 1 and str(RECORD) in warnings[0]


# -- taking it back -----------------------------------------------------------------------------------------


def test_the_dry_run_discloses_what_would_be_removed(host: FirewallHost) -> None:
    assert owned(host) == []
    trust(host)
    host.commands.clear()
    (action,) = firewalld.plan_untrust(work_on(host))
    assert action.describe() == "remove stratum0 from firewalld's zone trusted (permanent and runtime)"
    assert host.commands == []


def test_everything_is_taken_back_without_a_trace(host: FirewallHost) -> None:
    before = etc(host)
    trust(host)
    untrust(host)
    assert host.permanent() == {} == host.runtime
    assert etc(host) == before
    assert not host.lexists(RECORD)
    assert work_on(host).receipt.get(RECORD) is None
    assert untrust(host) == []


def test_a_binding_is_removed_offline_while_firewalld_is_stopped_and_does_not_come_back(host: FirewallHost) -> None:
    trust(host)
    host.stop()
    host.commands.clear()
    untrust(host)
    assert changes(host) == [f"firewall-offline-cmd --zone=trusted --remove-interface={BRIDGE}"]
    assert etc(host) == {}
    host.start()
    assert host.runtime == {}
    assert owned(host) == []


def test_a_zone_file_of_an_admin_stays_with_their_settings(host: FirewallHost) -> None:
    theirs = PLAIN.replace("</zone>", '  <source address="10.1.0.0/16"/>\n</zone>')
    host._zone_file("trusted").write_text(theirs)
    trust(host)
    untrust(host)
    assert host._zone_file("trusted").read_text() == theirs


def test_a_zone_file_that_an_admin_changed_meanwhile_stays(host: FirewallHost) -> None:
    trust(host)
    host._write("trusted", "eth9", True)
    untrust(host)
    assert host.permanent() == {"eth9": "trusted"}


def test_an_interface_that_somebody_moved_since_is_theirs(host: FirewallHost) -> None:
    trust(host)
    host._write("trusted", BRIDGE, False)
    host._write("public", BRIDGE, True)
    host.runtime[BRIDGE] = "public"
    untrust(host)
    assert host.permanent() == {BRIDGE: "public"} == host.runtime
    assert owned(host) == []


@pytest.mark.parametrize("failing", ["--permanent", ""])
def test_what_cannot_be_removed_is_an_error_with_the_exact_command_and_stays_on_record(
    host: FirewallHost, failing: str
) -> None:
    trust(host)
    command = f"firewall-cmd {failing + ' ' if failing else ''}--zone=trusted --remove-interface={BRIDGE}"
    host.failing[command] = 1
    with pytest.raises(StratumError) as caught:
        untrust(host)
    assert caught.value.reference == "firewalld-binding"
    assert caught.value.hint == f"run: {command}"
    (left,) = owned(host)
    assert (left.permanent, left.runtime) == (bool(failing), not failing), "the other one is gone"
    untrust(host)
    assert host.permanent() == {} == host.runtime


def test_a_firewalld_that_cannot_be_asked_gives_both_commands(host: FirewallHost) -> None:
    trust(host)
    host.broken = True
    with pytest.raises(StratumError) as caught:
        untrust(host)
    assert caught.value.hint == (
        f"run: firewall-cmd --permanent --zone=trusted --remove-interface={BRIDGE}; "
        f"firewall-cmd --zone=trusted --remove-interface={BRIDGE}"
    )


def test_a_firewalld_that_was_taken_off_the_host_leaves_nothing_to_do_or_a_file_to_edit(host: FirewallHost) -> None:
    trust(host)
    os.unlink(host.real("/usr/bin/firewall-cmd"))
    with pytest.raises(StratumError) as caught:
        untrust(host)
    assert caught.value.hint == """run: sed -i '/<interface name="stratum0"/d' /etc/firewalld/zones/trusted.xml"""
    host._write("trusted", BRIDGE, False)
    untrust(host)
    assert owned(host) == []


# -- looking often ------------------------------------------------------------------------------------------


def test_the_stamp_changes_with_a_new_firewalld_or_new_zones_and_starts_nothing(host: FirewallHost) -> None:
    procs = Path(host.root, "sys/fs/cgroup/system.slice/firewalld.service/cgroup.procs")
    stamps = [firewalld.firewall_stamp(host)]
    procs.parent.mkdir(parents=True)
    for pid in ("100\n", "200\n"):
        procs.write_text(pid)
        stamps.append(firewalld.firewall_stamp(host))
    os.utime(host.real("/etc/firewalld/zones"), (1, 1))
    stamps.append(firewalld.firewall_stamp(host))
    assert len(set(stamps)) == 4
    assert firewalld.firewall_stamp(host) == stamps[-1]
    assert host.commands == []


def test_the_record_is_private_and_says_what_it_is(host: FirewallHost) -> None:
    trust(host)
    assert os.stat(host.real(RECORD)).st_mode & 0o777 == 0o600
    value = json.loads(host.read_bytes(RECORD))
    assert value["bindings"][0]["interface"] == BRIDGE


def test_a_command_error_of_a_query_is_what_firewalld_said(host: FirewallHost) -> None:
    host.broken = True
    with pytest.raises(CommandError):
        firewalld._is_running(host)
