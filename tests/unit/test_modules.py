"""Kernel modules: now, at boot, and judged by their effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratum.host.finding import REJECT, WARN
from stratum.host.modules import CONTAINER_HOST, LOAD_FILE, NODE, Module, check_modules, is_effective, plan_modules
from stratum.removal import plan_removal
from stratum.system import Host, HostPath
from tests.unit.hosting import TreeMachine, content, perform, put, work_on

OVERLAY, BRIDGE, CONNTRACK = NODE
FILESYSTEMS = "nodev\tsysfs\nnodev\ttmpfs\n\text4\n"
DEP = "kernel/fs/overlayfs/overlay.ko.xz:\nkernel/net/bridge/br_netfilter.ko: kernel/net/bridge/bridge.ko\n"
DEP += "kernel/net/netfilter/nf_conntrack.ko.zst: kernel/lib/libcrc32c.ko.zst\n"


@pytest.fixture
def host(tmp_path: Path) -> TreeMachine:
    machine = TreeMachine(str(tmp_path))
    put(machine, "/proc/filesystems", FILESYSTEMS)
    put(machine, "/proc/modules")
    put(machine, f"/lib/modules/{machine.release}/modules.dep", DEP)
    machine.programs["modprobe"] = lambda words: load(machine, words[0])
    return machine


def load(host: TreeMachine, name: str) -> int:
    """What the kernel shows once the module is there."""
    if name == "overlay":
        put(host, "/proc/filesystems", FILESYSTEMS + "nodev\toverlay\n")
    elif name == "br_netfilter":
        put(host, "/proc/sys/net/bridge/bridge-nf-call-iptables", "1\n")
    elif name == "nf_conntrack":
        put(host, "/proc/sys/net/netfilter/nf_conntrack_max", "262144\n")
    put(host, "/proc/modules", content(host, "/proc/modules") + f"{name} 163840 0 - Live 0x0\n".encode())
    return 0


def up(host: Host, modules: tuple[Module, ...] = NODE) -> tuple[list[str], list[str]]:
    warned: list[str] = []
    return perform(host, lambda work: plan_modules(work, modules, warned.append)), warned


def checks(host: Host, *, before_loading: bool = False) -> list[tuple[str, str]]:
    return [(item.check, item.severity) for item in check_modules(host, NODE, before_loading=before_loading)]


def names(host: Host) -> list[str]:
    return [line for line in content(host, str(LOAD_FILE)).decode().splitlines() if not line.startswith("#")]


def test_modules_are_loaded_now_and_at_boot(host: TreeMachine) -> None:
    assert checks(host) == [("module-missing", REJECT), ("module-missing", REJECT), ("module-missing", WARN)]
    assert checks(host, before_loading=True) == []
    assert up(host)[1] == []
    assert host.commands == ["modprobe overlay", "modprobe br_netfilter", "modprobe nf_conntrack"]
    assert names(host) == ["overlay", "br_netfilter", "nf_conntrack"]
    assert checks(host) == []


def test_a_second_run_has_nothing_to_do(host: TreeMachine) -> None:
    up(host)
    assert up(host) == ([], [])


def test_a_container_host_needs_only_overlay(host: TreeMachine) -> None:
    up(host, CONTAINER_HOST)
    assert host.commands == ["modprobe overlay"]


def test_a_built_in_module_is_fine(host: TreeMachine) -> None:
    base = f"/lib/modules/{host.release}"
    put(host, f"{base}/modules.dep", "")
    put(host, f"{base}/modules.builtin", "kernel/fs/overlayfs/overlay.ko\nkernel/net/bridge/br-netfilter.ko\n")
    load(host, "overlay")
    load(host, "br_netfilter")
    put(host, "/proc/modules")
    assert up(host, NODE[:2])[1] == []
    assert host.commands == []
    assert names(host) == ["overlay", "br_netfilter"]


def test_a_container_without_modules_of_its_own_works_when_the_effect_is_there(host: TreeMachine) -> None:
    Path(host.root, f"lib/modules/{host.release}/modules.dep").unlink()
    for name in ("overlay", "br_netfilter", "nf_conntrack"):
        load(host, name)
    put(host, "/proc/modules")
    del host.programs["modprobe"]
    assert up(host) == ([], [])
    assert checks(host) == []
    # systemd-modules-load would fail on a module that it cannot find.
    assert not Path(host.root + str(LOAD_FILE)).exists()


def test_a_modprobe_that_fails_is_no_matter_when_the_effect_is_there_after_it(host: TreeMachine) -> None:
    def fail(words: list[str]) -> int:
        load(host, words[0])
        return 1

    host.programs["modprobe"] = fail
    assert up(host)[1] == []


def test_a_modprobe_that_fails_without_effect_is_told_and_then_found(host: TreeMachine) -> None:
    host.programs["modprobe"] = lambda words: 1
    _, warned = up(host)
    assert len(warned) == 3
    assert "module overlay cannot be loaded" in warned[0]
    assert "it was told to fail" in warned[0]
    assert checks(host)[0] == ("module-missing", REJECT)


def test_a_module_that_nobody_has_is_found_before_anything_is_done(host: TreeMachine) -> None:
    put(host, f"/lib/modules/{host.release}/modules.dep", DEP.partition("\n")[2])
    assert checks(host, before_loading=True) == [("module-missing", REJECT)]


def test_a_module_that_is_loaded_but_not_visible_is_a_finding_of_its_own(host: TreeMachine) -> None:
    put(host, "/proc/modules", "br_netfilter 32768 0 - Live 0x0\n")
    load(host, "overlay")
    load(host, "nf_conntrack")
    _, warned = up(host)
    assert host.commands == []
    assert warned == []
    (finding,) = check_modules(host, NODE)
    assert (finding.check, finding.severity) == ("module-not-visible", REJECT)
    assert "/proc/sys/net/bridge is missing" in finding.message
    assert checks(host, before_loading=True) == [("module-not-visible", REJECT)]


def test_the_names_of_modules_and_file_systems_are_compared_whole(host: TreeMachine) -> None:
    put(host, "/proc/filesystems", "nodev\toverlayfs2\nnodev\tnotoverlay\n")
    put(host, "/proc/modules", "br_netfilter_more 1 0 - Live 0x0\n")
    assert not is_effective(host, OVERLAY)
    assert checks(host)[1] == ("module-missing", REJECT)


def test_a_host_without_proc_gives_findings_and_no_traceback(tmp_path: Path) -> None:
    assert [item.check for item in check_modules(TreeMachine(str(tmp_path)), NODE)] == ["module-missing"] * 3


def test_a_tree_gets_the_file_and_nothing_is_run(tmp_path: Path) -> None:
    tree = Host(str(tmp_path))
    up(tree)
    assert names(tree) == ["overlay", "br_netfilter", "nf_conntrack"]
    assert check_modules(tree, NODE) == []


def test_a_tree_with_a_kernel_gets_the_modules_that_it_has(tmp_path: Path) -> None:
    tree = Host(str(tmp_path))
    put(tree, "/lib/modules/6.1.0-9-amd64/modules.dep", DEP.partition("\n")[0] + "\n")
    up(tree)
    assert names(tree) == ["overlay"]


def test_the_drop_in_goes_with_the_receipt_and_no_module_is_unloaded(host: TreeMachine) -> None:
    up(host)
    before = list(host.commands)
    perform(host, lambda work: plan_removal(work).actions)
    assert not Path(host.root + str(LOAD_FILE)).exists()
    assert host.commands == before


def test_planning_alone_changes_nothing(host: TreeMachine) -> None:
    assert plan_modules(work_on(host), NODE, print)
    assert host.commands == []
    assert not Path(host.root + str(LOAD_FILE)).exists()


def test_a_module_has_one_effect_to_look_at() -> None:
    assert all((module.filesystem is None) != (module.path is None) for module in NODE)
    assert CONNTRACK.path == HostPath("/proc/sys/net/netfilter/nf_conntrack_max")
    assert BRIDGE.path == HostPath("/proc/sys/net/bridge")
