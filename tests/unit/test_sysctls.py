"""Kernel settings: drop-ins, live values, what is put back and what is checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import pytest

from stratum.errors import StratumError, UsageError
from stratum.host import profiles, sysctls
from stratum.host.finding import REJECT, WARN
from stratum.host.profiles import BASE, PROFILES, Profile, Sysctl, find_profile
from stratum.steps import Action, Work
from stratum.system import Host
from tests.unit.hosting import BOOT_ID, TreeMachine, content, perform, put, work_on

DEFAULT, CIS = PROFILES["default"], PROFILES["cis"]
FORWARD = "/proc/sys/net/ipv4/ip_forward"
CALL = "/proc/sys/net/bridge/bridge-nf-call-iptables"
CALL6 = "/proc/sys/net/bridge/bridge-nf-call-ip6tables"
PANIC = "/proc/sys/kernel/panic"


class Warnings(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def warned() -> Warnings:
    return Warnings()


@pytest.fixture
def host(tmp_path: Path) -> TreeMachine:
    machine = TreeMachine(str(tmp_path))
    put(machine, "/proc/sys/kernel/random/boot_id", BOOT_ID)
    for path in (FORWARD, CALL, CALL6):
        put(machine, path, "0\n")
    for setting in CIS.sysctls:
        put(machine, f"/proc/sys/{setting.key.replace('.', '/')}", "0\n")
    return machine


def up(host: Host, warned: Warnings, profile: Profile = DEFAULT, base: Sequence[Sysctl] = BASE) -> list[str]:
    return perform(host, lambda work: sysctls.plan_sysctls(work, profile, warned, base))


def undo(host: Host, warned: Warnings) -> list[str]:
    return perform(host, lambda _: sysctls.plan_undo(host, warned))


def messages(host: Host, profile: Profile = DEFAULT) -> list[tuple[str, str, str]]:
    return [(item.check, item.severity, item.message) for item in sysctls.check_sysctls(host, profile)]


def test_both_the_file_and_the_live_value_are_set(host: TreeMachine, warned: Warnings) -> None:
    up(host, warned)
    assert content(host, FORWARD) == content(host, CALL) == content(host, CALL6) == b"1\n"
    assert b"\nnet.ipv4.ip_forward = 1\n" in content(host, "/etc/sysctl.d/99-stratum.conf")
    assert not Path(host.root, "etc/sysctl.d/99-stratum-cis.conf").exists()
    assert warned == []
    assert messages(host) == []


def test_a_second_run_has_nothing_to_do(host: TreeMachine, warned: Warnings) -> None:
    up(host, warned, CIS)
    assert up(host, warned, CIS) == []


def test_planning_alone_changes_nothing(host: TreeMachine, warned: Warnings) -> None:
    actions = sysctls.plan_sysctls(work_on(host), CIS, warned)
    assert "set net.ipv4.ip_forward = 1" in [action.describe() for action in actions]
    assert content(host, FORWARD) == b"0\n"
    assert not Path(host.root, "etc/sysctl.d").exists()
    assert not Path(host.root, "run/stratum").exists()


def test_a_directory_tree_gets_the_files_alone(tmp_path: Path, warned: Warnings) -> None:
    tree = Host(str(tmp_path))
    assert up(tree, warned, CIS) == [
        "make directory /etc/sysctl.d",
        "write /etc/sysctl.d/99-stratum.conf",
        "write /etc/sysctl.d/99-stratum-cis.conf",
    ]
    assert undo(tree, warned) == []
    assert messages(tree) == []


def test_the_profile_adds_a_file_of_its_own_and_another_profile_takes_it_away(
    host: TreeMachine, warned: Warnings
) -> None:
    up(host, warned, CIS)
    assert b"\nkernel.panic = 10\n" in content(host, "/etc/sysctl.d/99-stratum-cis.conf")
    assert content(host, PANIC) == b"10\n"
    assert up(host, warned, DEFAULT) == ["remove /etc/sysctl.d/99-stratum-cis.conf"]


def test_somebody_elses_file_at_the_place_of_a_drop_in_is_refused(host: TreeMachine, warned: Warnings) -> None:
    put(host, "/etc/sysctl.d/99-stratum.conf", "kernel.panic = 1\n")
    with pytest.raises(StratumError) as caught:
        up(host, warned)
    assert caught.value.reference == "foreign-file"


def test_a_base_value_that_cannot_be_set_is_a_warning(host: TreeMachine, warned: Warnings) -> None:
    host.refuses.add(FORWARD)
    Path(host.root + CALL).unlink()
    up(host, warned)
    assert len(warned) == 2
    assert "net.ipv4.ip_forward cannot be set to 1: Operation not permitted" in warned[0]
    assert f"{CALL} is not there" in warned[1]
    assert content(host, CALL6) == b"1\n"


@pytest.mark.parametrize("missing", [False, True])
def test_a_profile_value_that_cannot_be_set_is_fatal(host: TreeMachine, warned: Warnings, missing: bool) -> None:
    if missing:
        Path(host.root + PANIC).unlink()
    else:
        host.refuses.add(PANIC)
    with pytest.raises(StratumError) as caught:
        up(host, warned, CIS)
    assert caught.value.reference == "sysctl-not-applied"
    assert "kernel.panic: cannot be set to 10, which profile cis depends on" in caught.value.message


def test_a_value_that_is_right_is_not_written_even_where_writing_is_forbidden(
    host: TreeMachine, warned: Warnings
) -> None:
    put(host, PANIC, "10\n")
    host.refuses.add(PANIC)
    up(host, warned, CIS)
    assert "set kernel.panic = 10" not in warned


def test_the_cis_profile_is_what_kubelet_compares() -> None:
    assert {setting.key: setting.value for setting in find_profile("cis").sysctls} == {
        "vm.overcommit_memory": "1",
        "vm.panic_on_oom": "0",
        "kernel.panic": "10",
        "kernel.panic_on_oops": "1",
        "kernel.keys.root_maxkeys": "1000000",
        "kernel.keys.root_maxbytes": "25000000",
    }


def test_an_unknown_profile_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(UsageError) as caught:
        find_profile("strict")
    assert caught.value.hint == "there are: cis, default"


def test_the_footprint_has_the_base_and_each_profile_with_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [str(path) for path in sysctls.drop_ins()] == [
        "/etc/sysctl.d/99-stratum.conf",
        "/etc/sysctl.d/99-stratum-cis.conf",
    ]
    own = Profile("own", (Sysctl("kernel.panic", "5", "for a test"),))
    monkeypatch.setattr(sysctls, "PROFILES", {**profiles.PROFILES, "own": own})
    assert str(sysctls.drop_ins()[-1]) == "/etc/sysctl.d/99-stratum-own.conf"


# -- undo -------------------------------------------------------------------------------------------------


def test_undo_puts_back_what_was_changed_in_this_boot(host: TreeMachine, warned: Warnings) -> None:
    put(host, PANIC, "60\n")
    put(host, CALL, "1\n")
    up(host, warned, CIS)
    done = undo(host, warned)
    assert content(host, PANIC) == b"60\n"
    assert content(host, FORWARD) == b"0\n"
    assert content(host, CALL) == b"1\n"
    assert "set kernel.panic = 60, as it was" in done
    assert undo(host, warned) == []


def test_undo_leaves_what_an_admin_set_since(host: TreeMachine, warned: Warnings) -> None:
    put(host, PANIC, "60\n")
    up(host, warned, CIS)
    put(host, PANIC, "5\n")
    undo(host, warned)
    assert content(host, PANIC) == b"5\n"


def test_undo_leaves_what_an_admin_sets_between_plan_and_deed(host: TreeMachine, warned: Warnings) -> None:
    up(host, warned)
    (forward,) = [item for item in sysctls.plan_undo(host, warned) if "ip_forward" in item.subject]
    put(host, FORWARD, "2\n")
    forward.perform(work_on(host))
    assert content(host, FORWARD) == b"2\n"


def test_undo_goes_back_to_what_an_admin_set_before_the_last_run(host: TreeMachine, warned: Warnings) -> None:
    put(host, PANIC, "60\n")
    up(host, warned, CIS)
    put(host, PANIC, "5\n")
    up(host, warned, CIS)
    undo(host, warned)
    assert content(host, PANIC) == b"5\n"


def test_a_value_of_an_earlier_boot_is_not_put_back(host: TreeMachine, warned: Warnings) -> None:
    up(host, warned)
    put(host, "/proc/sys/kernel/random/boot_id", "99999999-2222-3333-4444-555555555555\n")
    assert undo(host, warned) == []
    assert content(host, FORWARD) == b"1\n"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"boot": 1}', f'{{"boot": "{BOOT_ID.strip()}", "values": [1]}}'])
def test_a_record_that_makes_no_sense_puts_nothing_back(host: TreeMachine, warned: Warnings, text: str) -> None:
    put(host, "/run/stratum/sysctls.json", text)
    assert undo(host, warned) == []


def test_a_value_that_cannot_be_put_back_does_not_stop_the_others(host: TreeMachine, warned: Warnings) -> None:
    up(host, warned)
    host.refuses.add(FORWARD)
    undo(host, warned)
    assert content(host, CALL) == b"0\n"
    assert warned == ["net.ipv4.ip_forward stays 1: Operation not permitted"]


def test_a_run_that_is_cut_off_after_the_change_can_be_put_back(host: TreeMachine, warned: Warnings) -> None:
    def cut_off(work: Work) -> list[Action]:
        return sysctls.plan_sysctls(work, DEFAULT, warned)[:3]

    perform(host, cut_off)
    assert content(host, FORWARD) == b"1\n"
    undo(host, warned)
    assert content(host, FORWARD) == b"0\n"


# -- checks -----------------------------------------------------------------------------------------------


def test_another_file_that_wins_is_named_even_while_the_live_value_is_right(
    host: TreeMachine, warned: Warnings
) -> None:
    put(host, "/etc/sysctl.d/99-zz.conf", "# mine\nnet.ipv4.ip_forward=0\n")
    up(host, warned)
    assert content(host, FORWARD) == b"1\n"
    ((check, severity, message),) = messages(host)
    assert (check, severity) == ("sysctl-overridden", WARN)
    assert "/etc/sysctl.d/99-zz.conf line 2 sets net.ipv4.ip_forward to 0" in message


@pytest.mark.parametrize("value", ["1", " 1 "])
def test_another_file_that_agrees_is_nobodys_problem(host: TreeMachine, warned: Warnings, value: str) -> None:
    put(host, "/etc/sysctl.d/99-zz.conf", f"net.ipv4.ip_forward={value}\n")
    up(host, warned)
    assert messages(host) == []


def test_a_file_that_sorts_before_ours_does_not_win(host: TreeMachine, warned: Warnings) -> None:
    put(host, "/etc/sysctl.d/50-default.conf", "net.ipv4.ip_forward=0\n")
    up(host, warned)
    assert messages(host) == []


def test_a_live_value_lost_at_boot_is_found_with_the_file_that_did_it(host: TreeMachine, warned: Warnings) -> None:
    up(host, warned)
    put(host, FORWARD, "0\n")
    put(host, "/etc/sysctl.conf", "net.ipv4.ip_forward=0\n")
    first, second = messages(host)
    assert first[:2] == ("sysctl", WARN)
    assert "net.ipv4.ip_forward is 0 and must be 1; /etc/sysctl.conf line 1 sets it" in first[2]
    assert second[0] == "sysctl-overridden"


def test_a_live_value_lost_at_boot_with_no_file_to_blame_is_found(host: TreeMachine, warned: Warnings) -> None:
    up(host, warned)
    put(host, CALL, "0\n")
    ((check, severity, message),) = messages(host)
    assert (check, severity) == ("sysctl", WARN)
    assert message == "net.bridge.bridge-nf-call-iptables is 0 and must be 1"


def test_a_key_whose_module_is_not_there_is_found(host: TreeMachine, warned: Warnings) -> None:
    up(host, warned)
    Path(host.root + CALL).unlink()
    ((check, _, message),) = messages(host)
    assert check == "sysctl"
    assert f"{CALL} is not there" in message


def test_what_the_profile_depends_on_rejects(host: TreeMachine, warned: Warnings) -> None:
    up(host, warned, CIS)
    put(host, PANIC, "0\n")
    assert [item[:2] for item in messages(host, CIS)] == [("sysctl", REJECT)]


def test_an_image_tree_is_told_of_a_file_that_will_win(tmp_path: Path, warned: Warnings) -> None:
    tree = Host(str(tmp_path))
    up(tree, warned)
    put(tree, "/usr/lib/sysctl.d/99-zz.conf", "net.ipv4.ip_forward=0\n")
    found: Optional[list[tuple[str, str, str]]] = messages(tree)
    assert [item[0] for item in found] == ["sysctl-overridden"]
