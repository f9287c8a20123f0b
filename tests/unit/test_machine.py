"""Commands on a running machine: what is started and stopped in which order, and what a failure leaves."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any, Optional

import pytest

from stratum.cli import Terminated
from stratum.errors import ExitCode, HostRefusedError, NotInstalledError, NotRootError, StratumError
from stratum.lock import hold_lock
from stratum.node.layout import Layout
from stratum.node.stack import Stack
from stratum.node.units import EVERY_UNIT
from stratum.output import Output
from stratum.scripts import supervise
from stratum.scripts.context import Context
from tests.bundles import Entry, Part, snapshot
from tests.fakes import Desk, Killed, MachineHost, make_tree, node_publisher, relative

CONTAINERD, SUPERVISOR = "stratum-containerd.service", "stratum.service"
OVERRIDE = "run/systemd/system/stratum.service.d/zzz-stratum-no-restart.conf"
WANTS = "etc/systemd/system/multi-user.target.wants/stratum.service"


@pytest.fixture
def desk(memory: Path) -> Desk:
    (memory / "desk").mkdir()
    return Desk(memory / "desk")


@pytest.fixture
def bundle(desk: Desk) -> Path:
    publisher = node_publisher()
    program = b"#!/bin/sh\n"
    publisher.parts = [
        Part("containerd", [Entry("bin/containerd", program), Entry("bin/ctr", program)], version="1.7.24"),
        Part("cni-plugins", [Entry("cni/bin/bridge", program)]),
    ]
    return desk.bundle(publisher.build())


@pytest.fixture
def root(memory: Path) -> Path:
    return make_tree(memory / "root", live=True)


@pytest.fixture
def machine(root: Path) -> MachineHost:
    return MachineHost(str(root), {})


@pytest.fixture
def node(desk: Desk, machine: MachineHost, bundle: Path) -> MachineHost:
    """A node that runs."""
    assert desk.up(machine, bundle).status == ExitCode.DONE
    machine.units[SUPERVISOR].active = "active"
    machine.commands.clear()
    return machine


def next_run(machine: MachineHost, dies_at: Optional[int] = None) -> MachineHost:
    """The same machine as another process finds it."""
    shared = {name: getattr(machine, name) for name in ("units", "images", "chains", "clock")}
    return MachineHost(machine.root, {}, dies_at, **shared)


def changing(machine: MachineHost) -> list[str]:
    """The command lines that change something, without what only looks."""
    looks = ("systemctl show", "systemctl is-enabled", "nft list", "iptables", "journalctl")
    return [line for line in machine.commands if not line.startswith(looks) and " images list" not in line]


def steady(root: Path) -> dict[str, Any]:
    """The files that must be the same before and after: without times and without what every run writes anew."""
    without = ("/var/lib/stratum/journal.json", "/run/stratum/lock", "/run/stratum/started.json")
    return {name: value[:3] + value[4:] for name, value in relative(root, snapshot(root), without).items()}


# -- up -------------------------------------------------------------------------------------------------


def test_a_first_up_starts_the_stack_behind_its_gate_and_the_supervisor_last(
    desk: Desk, machine: MachineHost, bundle: Path
) -> None:
    ran = desk.up(machine, bundle)
    lines = [line.rpartition("/bin/")[2] for line in changing(machine)]
    wanted = [
        "systemctl daemon-reload",
        f"systemctl start {CONTAINERD}",
        "ctr --address /run/stratum/containerd/containerd.sock version",
        "ctr --address /run/stratum/containerd/containerd.sock --namespace default images import",
        f"systemctl start --no-block {SUPERVISOR}",
    ]
    positions = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in wanted]
    assert positions == sorted(positions)
    assert machine.active(CONTAINERD) and machine.active(SUPERVISOR)
    assert machine.images == {"example.test/demo:1": next(iter(machine.images.values()))}
    assert "running: demo 1.0.0" in ran.text
    assert Path(machine.root, WANTS).is_symlink()


def test_a_second_up_on_a_running_node_runs_nothing_that_changes(
    desk: Desk, node: MachineHost, bundle: Path, root: Path
) -> None:
    before = steady(root)
    ran = desk.up(node, bundle)
    assert ran.text.startswith("nothing to do\n")
    assert not [line for line in changing(node) if " version" not in line]
    assert steady(root) == before


def test_up_without_a_bundle_starts_what_was_stopped(desk: Desk, node: MachineHost) -> None:
    desk.run(node, "stop")
    assert not node.active(CONTAINERD) and not node.active(SUPERVISOR)
    desk.run(node, "up")
    assert node.active(CONTAINERD) and node.active(SUPERVISOR)


def test_a_changed_configuration_restarts_containerd(desk: Desk, node: MachineHost, bundle: Path, root: Path) -> None:
    with open(root / "etc/stratum/containerd/config.toml", "a") as file:
        file.write("# x\n")
    desk.up(node, bundle)
    assert f"systemctl restart {CONTAINERD}" not in node.commands, "it was put back to what it was started with"
    Path(node.root, "run/stratum/started.json").unlink()
    desk.up(node, bundle)
    assert f"systemctl restart {CONTAINERD}" in node.commands


def test_a_unit_edited_on_disk_is_put_back_and_loaded(desk: Desk, node: MachineHost, bundle: Path, root: Path) -> None:
    (root / "etc/systemd/system" / CONTAINERD).write_text("[Service]\nExecStart=/bin/false\n")
    desk.up(node, bundle)
    assert "systemctl daemon-reload" in node.commands


@pytest.mark.parametrize("what", ["does not start", "never answers"])
def test_a_stack_that_does_not_come_up_is_an_error_with_the_units_name(
    desk: Desk, machine: MachineHost, bundle: Path, what: str
) -> None:
    if what == "never answers":
        machine.silent = True
    else:
        machine.failing[f"systemctl start {CONTAINERD}"] = 1
    with pytest.raises(StratumError) as caught:
        desk.up(machine, bundle)
    assert "containerd" in caught.value.message
    assert caught.value.hint
    machine.silent = False
    assert desk.up(next_run(machine), bundle).status == ExitCode.DONE
    assert machine.active(CONTAINERD)


def test_somebody_who_is_not_root_changes_nothing(desk: Desk, machine: MachineHost, bundle: Path, root: Path) -> None:
    machine.user = 1000
    before = snapshot(root)
    with pytest.raises(NotRootError):
        desk.up(machine, bundle)
    for name in ("uninstall", "start", "stop", "restart"):
        with pytest.raises(NotRootError):
            desk.run(machine, name)
    assert snapshot(root) == before
    assert machine.commands == []


def test_a_host_without_systemd_is_refused_before_the_first_write(
    desk: Desk, machine: MachineHost, bundle: Path, root: Path
) -> None:
    shutil.rmtree(root / "run/systemd")
    before = snapshot(root)
    with pytest.raises(HostRefusedError) as caught:
        desk.up(machine, bundle)
    assert "systemd" in caught.value.message
    assert caught.value.exit_code == ExitCode.HOST_REFUSED
    assert caught.value.state == "nothing was changed"
    assert snapshot(root) == before
    assert machine.mutations == [], "not even the lock is taken"


@pytest.mark.parametrize("name", ["start", "stop", "restart"])
def test_without_a_node_there_is_nothing_to_start_or_stop(desk: Desk, machine: MachineHost, name: str) -> None:
    with pytest.raises(NotInstalledError):
        desk.run(machine, name)
    assert machine.commands == []


# -- start, stop, restart -------------------------------------------------------------------------------


def test_stop_stops_the_supervisor_first_and_leaves_it_enabled(desk: Desk, node: MachineHost, root: Path) -> None:
    desk.run(node, "stop")
    assert changing(node) == [f"systemctl stop {SUPERVISOR}", f"systemctl stop {CONTAINERD}"]
    assert (root / WANTS).is_symlink()
    assert desk.run(node, "stop").text == "nothing to do\n"


def test_stop_tries_every_unit_and_names_all_that_failed(desk: Desk, node: MachineHost) -> None:
    node.failing = {f"systemctl stop {SUPERVISOR}": 1, f"systemctl stop {CONTAINERD}": 1}
    with pytest.raises(StratumError) as caught:
        desk.run(node, "stop")
    assert SUPERVISOR in caught.value.message and CONTAINERD in caught.value.message
    assert len(changing(node)) == 2


def test_a_unit_whose_file_somebody_deleted_is_stopped_too(desk: Desk, node: MachineHost, root: Path) -> None:
    (root / "etc/systemd/system" / CONTAINERD).unlink()
    node.run(["systemctl", "daemon-reload"], timeout=1)
    desk.run(node, "stop")
    assert not node.active(CONTAINERD)


def test_start_starts_what_is_stopped_and_nothing_else(desk: Desk, node: MachineHost) -> None:
    assert desk.run(node, "start").text == "nothing to do\n"
    desk.run(node, "stop")
    node.commands.clear()
    desk.run(node, "start")
    lines = [line for line in changing(node) if line.startswith("systemctl start")]
    assert lines == [f"systemctl start {CONTAINERD}", f"systemctl start --no-block {SUPERVISOR}"]


@pytest.mark.parametrize("words", [["start"], ["restart"], ["up"]], ids=lambda words: words[0])
def test_what_is_done_without_the_lock_does_not_touch_the_journal(
    desk: Desk, node: MachineHost, bundle: Path, words: list[str]
) -> None:
    """Another run may have begun meanwhile: its record must not be replaced by ours."""
    desk.run(node, "stop")
    seen: list[str] = []
    node.hooks = {f"systemctl start --no-block {SUPERVISOR}": lambda: seen.extend(node.mutations)}
    if words == ["up"]:
        desk.up(node, bundle)
    else:
        desk.run(node, *words)
    last = max(i for i, what in enumerate(seen) if "journal.json" in what)
    lock_given_back = max(i for i, what in enumerate(seen) if "systemctl show" in what)
    assert last < lock_given_back


def test_restart_goes_through_the_gate(desk: Desk, node: MachineHost) -> None:
    desk.run(node, "restart")
    assert f"systemctl restart {CONTAINERD}" in node.commands
    node.silent = True
    with pytest.raises(StratumError):
        desk.run(node, "restart")


def test_dry_runs_change_nothing_and_take_no_lock(desk: Desk, node: MachineHost, bundle: Path, root: Path) -> None:
    before = snapshot(root)
    with hold_lock(node, "upgrade"):
        before = snapshot(root)
        for words in (["stop"], ["start"], ["restart"], ["uninstall"], ["up", "--bundle", str(bundle)]):
            trust = ["--trust", str(desk.key)] if words[0] == "up" else []
            assert desk.run(node, *words, *trust, "--dry-run").status == ExitCode.DONE
        assert snapshot(root) == before
    assert [line for line in changing(node) if "version" not in line and "nri" not in line] == []


@pytest.mark.parametrize("words", [["stop"], ["start"], ["uninstall"], ["restart"]], ids=lambda words: words[0])
def test_a_second_run_at_the_same_time_is_refused(desk: Desk, node: MachineHost, words: list[str]) -> None:
    with hold_lock(node, "upgrade"), pytest.raises(StratumError) as caught:
        desk.run(node, *words)
    assert caught.value.exit_code == ExitCode.LOCKED
    assert changing(node) == []


# -- uninstall ------------------------------------------------------------------------------------------


def test_uninstall_stops_disarmed_in_order_and_leaves_no_trace(
    desk: Desk, machine: MachineHost, bundle: Path, root: Path
) -> None:
    before = snapshot(root)
    desk.up(machine, bundle)
    machine.commands.clear()
    assert desk.run(machine, "uninstall").status == ExitCode.DONE
    assert changing(machine) == [
        f"systemctl disable {SUPERVISOR}",
        "systemctl daemon-reload",
        f"systemctl stop {CONTAINERD}",
        f"systemctl stop {SUPERVISOR}",
        "systemctl daemon-reload",
        " ".join(("systemctl reset-failed", SUPERVISOR, *EVERY_UNIT)),
    ]
    assert snapshot(root) == before
    assert desk.run(machine, "uninstall").text.startswith("nothing to remove")
    assert snapshot(root) == before


def test_while_it_tears_down_the_supervisor_cannot_be_started_again(desk: Desk, node: MachineHost, root: Path) -> None:
    seen = []
    node.hooks = {f"systemctl stop {SUPERVISOR}": lambda: seen.append((root / OVERRIDE).read_text())}
    desk.run(node, "uninstall")
    assert seen == ["[Service]\nRestart=no\n"]
    assert not (root / OVERRIDE).parent.exists()


def test_mounts_below_our_trees_are_taken_away_the_innermost_first(desk: Desk, node: MachineHost, root: Path) -> None:
    mounts = ["/var/lib/stratum/plugins/x", "/var/lib/stratum/plugins/x/pv", "/srv/theirs", "/run/stratum/a b"]
    table = root / "proc/self/mountinfo"
    for number, path in enumerate(mounts):
        (root / path[1:]).mkdir(parents=True)
        escaped = path.replace(" ", "\\040")
        table.write_text(table.read_text() + f"{50 + number} 30 8:1 / {escaped} rw - ext4 /dev/sdb rw\n")
    dry = desk.run(node, "uninstall", "--dry-run")
    assert "unmount /var/lib/stratum/plugins/x/pv" in dry.text
    node.hooks = {"umount": lambda: node.commands.append(str(sorted(node.units)))}
    desk.run(node, "uninstall")
    lines = [line.split(" ", 2)[2] for line in node.commands if line.startswith("umount")]
    assert sorted(lines) == sorted(mounts[:2] + mounts[3:])
    assert lines.index(mounts[1]) < lines.index(mounts[0])
    assert not [line for line in node.commands if line.startswith("umount") and ("-l" in line or "-f" in line)]
    assert "/srv/theirs" in table.read_text()


def test_what_an_admin_made_to_start_a_unit_at_boot_goes_with_the_unit(
    desk: Desk, node: MachineHost, root: Path
) -> None:
    """``systemctl add-wants`` and ``add-requires``: the links would lead nowhere."""
    made = [
        root / "etc/systemd/system" / name / CONTAINERD for name in ("graphical.target.wants", "my.target.requires")
    ]
    theirs = made[0].with_name("theirs.service")
    for link in (*made, theirs):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(f"/etc/systemd/system/{link.name}")
    listed = desk.run(node, "uninstall", "--dry-run").text
    assert all(f"remove /{link.relative_to(root)}" in listed and link.is_symlink() for link in made)
    desk.run(node, "uninstall")
    assert not any(link.is_symlink() for link in made)
    assert theirs.is_symlink()


def test_a_mount_that_is_busy_stops_the_uninstall_and_the_canary_lives(
    desk: Desk, node: MachineHost, root: Path
) -> None:
    canary = root / "var/lib/stratum/containerd/pv/canary"
    canary.parent.mkdir(parents=True)
    canary.write_text("data")
    table = root / "proc/self/mountinfo"
    table.write_text(table.read_text() + "50 30 8:1 / /var/lib/stratum/containerd/pv rw - ext4 /dev/sdb rw\n")
    before = steady(root)
    node.failing = {"umount": 1}
    with pytest.raises(StratumError) as caught:
        desk.run(node, "uninstall")
    assert caught.value.reference == "mount-busy"
    assert "/var/lib/stratum/containerd/pv" in caught.value.message
    assert caught.value.state == "nothing was deleted; the node runs as before"
    assert_as_before(node, root, before)


def assert_as_before(machine: MachineHost, root: Path, before: dict[str, Any]) -> None:
    assert steady(root) == before
    assert machine.active(CONTAINERD)
    assert machine.active(SUPERVISOR)
    assert (root / WANTS).is_symlink()
    assert not (root / OVERRIDE).exists()


def teardown_lines(desk: Desk, node: MachineHost, root: Path) -> list[str]:
    """The command lines of an uninstall up to the deletion, that may fail."""
    copy = root.parent / "copy"
    shutil.copytree(root, copy, symlinks=True)
    other = MachineHost(
        str(copy), {}, units={name: type(unit)(unit.active, unit.loaded) for name, unit in node.units.items()}
    )
    (copy / "sys/class/net/stratum0/bridge").mkdir(parents=True, exist_ok=True)
    desk.run(other, "uninstall")
    shutil.rmtree(copy)
    stop = other.commands.index(f"systemctl stop {SUPERVISOR}")
    return list(dict.fromkeys(changing(other)[: changing(other).index(other.commands[stop]) + 1]))


def test_each_step_of_the_teardown_that_fails_puts_the_node_back(desk: Desk, node: MachineHost, root: Path) -> None:
    (root / "sys/class/net/stratum0/bridge").mkdir(parents=True)
    lines = teardown_lines(desk, node, root)
    assert len(lines) >= 5
    before = steady(root)
    for line in lines:
        failing = next_run(node)
        failing.failing = {line: 1}
        with pytest.raises(StratumError) as caught:
            desk.run(failing, "uninstall")
        assert caught.value.state == "nothing was deleted; the node runs as before", line
        (root / "sys/class/net/stratum0/bridge").mkdir(parents=True, exist_ok=True)
        assert_as_before(failing, root, before)
        journal = json.loads((root / "var/lib/stratum/journal.json").read_text())
        assert journal["state"] == "rolled-back", line
    assert desk.run(next_run(node), "uninstall").status == ExitCode.DONE
    assert not (root / "opt/stratum").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, Terminated])
def test_a_signal_during_the_teardown_puts_the_node_back(
    desk: Desk, node: MachineHost, root: Path, error: type[BaseException]
) -> None:
    lines = teardown_lines(desk, node, root)
    before = steady(root)
    for line in lines:
        if line.startswith("ip "):
            continue
        stopped = next_run(node)
        hit = []

        def interrupt(hit: list[int] = hit) -> None:
            if not hit:
                hit.append(1)
                raise error

        stopped.hooks = {line: interrupt}
        with pytest.raises(error):
            desk.run(stopped, "uninstall")
        assert_as_before(stopped, root, before)


def test_a_way_back_that_fails_too_is_said(desk: Desk, node: MachineHost) -> None:
    node.failing = {f"systemctl stop {SUPERVISOR}": 1, f"systemctl start {CONTAINERD}": 1}
    with pytest.raises(StratumError) as caught:
        desk.run(node, "uninstall")
    assert caught.value.state and "not everything could be put back" in caught.value.state
    assert CONTAINERD in caught.value.state


def test_what_was_stopped_or_disabled_before_stays_so_when_uninstall_fails(
    desk: Desk, node: MachineHost, root: Path
) -> None:
    desk.run(node, "stop")
    (root / WANTS).unlink()
    node.units[SUPERVISOR].active = "inactive"
    node.failing = {f"systemctl stop {SUPERVISOR}": 1}
    try:
        desk.run(node, "uninstall")
    except StratumError:
        assert not node.active(CONTAINERD) and not node.active(SUPERVISOR)
        assert not (root / WANTS).is_symlink()
        assert not (root / OVERRIDE).exists()


@pytest.mark.parametrize("then", ["uninstall", "up"])
def test_an_uninstall_killed_at_any_change_can_be_finished_or_taken_back(
    desk: Desk, node: MachineHost, bundle: Path, root: Path, then: str
) -> None:
    Path(node.root, "run/containerd/s").mkdir(parents=True)
    shutil.copytree(root, root.parent / "installed", symlinks=True)
    state = {name: (unit.active, unit.loaded) for name, unit in node.units.items()}
    chains = {name: list(rules) for name, rules in node.chains.items()}
    assert chains["STRATUM-POSTROUTING"] and chains["POSTROUTING"]
    whole = steady(root)
    survey = next_run(node)
    desk.run(survey, "uninstall")
    gone = steady(root)
    inside = [
        number
        for number, what in enumerate(survey.mutations)
        if what.startswith(("write", "rename")) and ("/.receipt.json." in what or "/.journal.json." in what)
    ]
    points = [number for number in range(len(survey.mutations)) if number not in inside[4:]]
    points = points[::2] if then == "up" else points[1::2]
    for number in points:
        shutil.rmtree(root)
        shutil.copytree(root.parent / "installed", root, symlinks=True)
        for name, (active, loaded) in state.items():
            node.units[name].active, node.units[name].loaded = active, loaded
        node.chains.clear()
        node.chains.update({name: list(rules) for name, rules in chains.items()})
        killed = next_run(node, number)
        with pytest.raises(Killed):
            desk.run(killed, "uninstall")
        what = f"killed at change {number}, after: {killed.mutations[-3:]}"
        again = next_run(node)
        if then == "uninstall":
            assert desk.run(again, "uninstall").status == ExitCode.DONE, what
            assert steady(root) == gone, what
            assert not again.active(CONTAINERD), what
            assert not again.active(SUPERVISOR), what
            assert again.chains == {"POSTROUTING": []}, what
            continue
        try:
            desk.up(again, bundle)
        except StratumError as error:
            assert error.reference == "uninstall-unfinished", what
            continue
        assert again.active(CONTAINERD) and again.active(SUPERVISOR), what
        assert again.chains == chains, what
        found = {name: value for name, value in steady(root).items() if not name.startswith("/run/containerd")}
        wanted = {name: value for name, value in whole.items() if not name.startswith("/run/containerd")}
        found.pop("/var/lib/stratum/receipt.json")
        wanted.pop("/var/lib/stratum/receipt.json")
        assert found == wanted, what


def test_sockets_of_another_containerd_are_left_alone(desk: Desk, node: MachineHost, root: Path) -> None:
    """Row 51: shims of every containerd of a host have their sockets in one directory."""
    place = root / "run/containerd/s"
    place.mkdir(parents=True)
    (root / "run/containerd/runc/moby/live").mkdir(parents=True)
    (root / "run/containerd/runc/default").mkdir()
    (root / "run/stratum/containerd/io.containerd.runtime.v2.task/default/one").mkdir(parents=True)
    # As containerd names the socket of a shim: its own address, namespace, container.
    name = hashlib.sha256(b"/run/stratum/containerd/containerd.sock/default/one").hexdigest()
    here = os.open(place, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as live, socket.socket(socket.AF_UNIX) as dead:
            live.bind(f"/proc/self/fd/{here}/live")
            live.listen()
            dead.bind(f"/proc/self/fd/{here}/{name}")
            node.sockets = {"/run/containerd/s/live"}
            (place / "file").write_text("theirs")
            desk.run(node, "uninstall")
    finally:
        os.close(here)
    assert sorted(os.listdir(place)) == ["file", "live"]
    assert os.listdir(root / "run/containerd/runc") == ["moby"]


def test_a_reboot_in_the_middle_is_finished_by_the_supervisor(desk: Desk, node: MachineHost, root: Path) -> None:
    node.failing = {}
    survey = next_run(node)
    shutil.copytree(root, root.parent / "installed", symlinks=True)
    desk.run(survey, "uninstall")
    number = next(i for i, what in enumerate(survey.mutations) if what == f"run systemctl stop {CONTAINERD}")
    shutil.rmtree(root)
    shutil.copytree(root.parent / "installed", root, symlinks=True)
    for name in (CONTAINERD, SUPERVISOR):
        node.units[name].active = "active"
        node.units[name].loaded = None
    with pytest.raises(Killed):
        desk.run(next_run(node, number), "uninstall")
    # The power went: /run is empty, no unit runs.
    shutil.rmtree(root / "run")
    (root / "run/systemd/system").mkdir(parents=True)
    for unit in node.units.values():
        unit.active, unit.loaded = "inactive", None
    booted = next_run(node)
    supervise.bring_up(context(booted), Stack(Layout(booted)))
    assert booted.active(CONTAINERD)
    assert (root / WANTS).is_symlink(), "it starts at the next boot as before"


# -- the supervisor -------------------------------------------------------------------------------------


def context(machine: MachineHost) -> Context:
    import io

    return Context(machine, Output(stdout=io.StringIO(), stderr=io.StringIO()), None, None)


def test_a_boot_starts_the_stack_and_imports_what_is_missing(node: MachineHost, root: Path) -> None:
    shutil.rmtree(root / "run")
    (root / "run/systemd/system").mkdir(parents=True)
    node.units[CONTAINERD].active = "inactive"
    node.images.clear()
    supervise.bring_up(context(node), Stack(Layout(node)))
    assert node.active(CONTAINERD)
    assert list(node.images) == ["example.test/demo:1"]


def test_the_supervisor_without_a_version_says_so(node: MachineHost, root: Path) -> None:
    (root / "opt/stratum/node/current").unlink()
    with pytest.raises(NotInstalledError):
        supervise.bring_up(context(node), Stack(Layout(node)))
