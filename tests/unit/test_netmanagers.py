"""Network managers are told to leave the container network alone, where there are any."""

from __future__ import annotations

import configparser
import fnmatch
from pathlib import Path

import pytest

from stratum.errors import StratumError
from stratum.host import netmanagers
from stratum.host.netmanagers import NETWORK_MANAGER, NETWORKD
from stratum.journal import Journal
from stratum.receipt import STATE_DIRECTORY, Receipt
from stratum.removal import plan_removal
from stratum.steps import Action, Work
from stratum.system import Host
from tests.fakes import MachineHost, make_tree

BRIDGE = "stratum0"


@pytest.fixture
def host(tmp_path: Path) -> MachineHost:
    host = MachineHost(str(make_tree(tmp_path / "root", live=True)), {})
    host.makedirs(STATE_DIRECTORY)
    return host


def work_on(host: Host) -> Work:
    return Work(host, Receipt.load(host), Journal(host))


def program(host: Host, path: str) -> None:
    real = Path(host.real(path))
    real.parent.mkdir(parents=True, exist_ok=True)
    real.write_text("#!/bin/sh\n")
    real.chmod(0o755)


def link(host: Host, path: str, target: str = "/usr/lib/systemd/system/x") -> None:
    real = Path(host.real(path))
    real.parent.mkdir(parents=True, exist_ok=True)
    real.symlink_to(target)


def use_network_manager(host: Host) -> None:
    program(host, "/usr/sbin/NetworkManager")


def use_networkd(host: Host) -> None:
    program(host, "/usr/bin/networkctl")
    link(host, "/etc/systemd/system/multi-user.target.wants/systemd-networkd.service")


def apply(host: Host) -> tuple[list[Action], list[str]]:
    warnings: list[str] = []
    work = work_on(host)
    actions = netmanagers.plan_unmanaged(work, BRIDGE, warnings.append)
    for action in actions:
        action.perform(work)
    return actions, warnings


def test_without_a_network_manager_nothing_is_written(host: MachineHost) -> None:
    assert apply(host) == ([], [])
    assert not host.exists("/etc/NetworkManager") and not host.exists("/etc/systemd/network")


def test_networkmanager_gets_a_file_and_reads_it(host: MachineHost) -> None:
    use_network_manager(host)
    apply(host)
    assert host.commands[-1] == "systemctl reload NetworkManager.service"
    parsed = configparser.ConfigParser()
    parsed.read_string(host.read_text(NETWORK_MANAGER.path))
    (section,) = parsed.sections()
    assert section.startswith("device"), "no list of somebody else's is replaced"
    assert parsed[section]["managed"] == "0"
    names = parsed[section]["match-device"].split(",")
    assert names == [f"interface-name:{name}" for name in ("stratum0", "veth????????", "stratum-dns0")]
    host.commands.clear()
    assert apply(host) == ([], [])
    assert host.commands == [], "a second time nothing is reloaded"


def test_systemd_networkd_gets_a_file_that_comes_before_all_others(host: MachineHost) -> None:
    use_networkd(host)
    apply(host)
    assert host.commands[-1] == "networkctl reload"
    assert "Unmanaged=yes" in host.read_text(NETWORKD.path)
    assert all(NETWORKD.path.name < name for name in ("10-netplan-eth0.network", "05-lan.network", "all.network"))
    assert not host.exists(NETWORK_MANAGER.path)


@pytest.mark.parametrize(
    ("name", "ours"),
    [("stratum0", True), ("stratum-dns0", True), ("veth1a2b3c4d", True), ("vethlan", False), ("veth0", False),
     ("eth0", False), ("stratum01", False), ("docker0", False)],
)  # fmt: skip
def test_only_our_interfaces_and_what_the_cni_plugin_names_are_matched(name: str, ours: bool) -> None:
    text = netmanagers.render_networkd(BRIDGE).decode()
    globs = next(line for line in text.splitlines() if line.startswith("Name=")).partition("=")[2].split()
    assert any(fnmatch.fnmatchcase(name, glob) for glob in globs) is ours


def test_networkd_that_only_comes_with_systemd_is_not_in_use(host: MachineHost) -> None:
    program(host, "/usr/bin/networkctl")
    program(host, "/usr/lib/systemd/system/systemd-networkd.service")
    assert netmanagers.managers_in_use(host) == []
    Path(host.real("/run/systemd/netif")).mkdir(parents=True)
    Path(host.real("/run/systemd/netif/state")).touch()
    assert netmanagers.managers_in_use(host) == [NETWORKD]


@pytest.mark.parametrize("failing", ["systemctl is-active", "systemctl reload"])
def test_a_manager_that_does_not_run_is_not_reloaded_and_a_reload_that_fails_is_a_warning(
    host: MachineHost, failing: str
) -> None:
    use_network_manager(host)
    host.failing[failing] = 1
    _, warnings = apply(host)
    assert host.exists(NETWORK_MANAGER.path)
    if failing == "systemctl is-active":
        assert warnings == [] and "systemctl reload NetworkManager.service" not in host.commands
    else:
        assert len(warnings) == 1 and warnings[0].endswith("run: systemctl reload NetworkManager.service")


def test_a_file_of_somebody_else_is_not_replaced(host: MachineHost) -> None:
    use_network_manager(host)
    path = Path(host.real(NETWORK_MANAGER.path))
    path.parent.mkdir(parents=True)
    path.write_text("[main]\nplugins=keyfile\n")
    with pytest.raises(StratumError, match="90-stratum"):
        apply(host)
    assert path.read_text() == "[main]\nplugins=keyfile\n"


def test_a_tree_gets_the_files_and_nothing_is_reloaded(tmp_path: Path) -> None:
    tree = Host(str(make_tree(tmp_path / "root")), {})
    tree.makedirs(STATE_DIRECTORY)
    use_network_manager(tree)
    use_networkd(tree)
    apply(tree)  # a command would be a RuntimeError
    assert tree.exists(NETWORK_MANAGER.path) and tree.exists(NETWORKD.path)


def test_uninstall_removes_our_files_only_and_the_managers_forget_them(host: MachineHost) -> None:
    use_network_manager(host)
    use_networkd(host)
    theirs = Path(host.real("/etc/NetworkManager/conf.d/10-theirs.conf"))
    theirs.parent.mkdir(parents=True)
    theirs.write_text("[main]\n")
    apply(host)
    work = work_on(host)
    assert netmanagers.plan_forget(work, print) == [], "not before the files are gone"
    for action in plan_removal(work).actions:
        action.perform(work)
    host.commands.clear()
    for action in netmanagers.plan_forget(work, print):
        action.perform(work)
    assert [line for line in host.commands if "reload" in line] == [
        "systemctl reload NetworkManager.service", "networkctl reload",
    ]  # fmt: skip
    assert theirs.read_text() == "[main]\n"
    assert host.listdir("/etc/NetworkManager/conf.d") == ["10-theirs.conf"]
    assert not host.exists("/etc/systemd/network"), "a directory that we made goes with its last file"


@pytest.mark.parametrize(
    ("path", "flagged"),
    [
        ("/etc/systemd/system/timers.target.wants/nm-cloud-setup.timer", True),
        ("/usr/lib/systemd/system/timers.target.wants/nm-cloud-setup.timer", True),
        ("/etc/systemd/system/NetworkManager.service.wants/nm-cloud-setup.service", True),
        ("/usr/lib/systemd/system/nm-cloud-setup.timer", False),
        (None, False),
    ],
)
def test_nm_cloud_setup_is_flagged_where_it_is_enabled(host: MachineHost, path: str | None, flagged: bool) -> None:
    if path:
        link(host, path)
    findings = netmanagers.check_cloud_setup(host)
    assert bool(findings) is flagged
    if findings:
        assert findings[0].severity == "warn"
        assert "systemctl disable --now nm-cloud-setup.timer nm-cloud-setup.service" in findings[0].hint
