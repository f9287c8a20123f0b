"""Swap: off at each of its sources, and back on as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stratum.errors import StratumError
from stratum.host import swap
from stratum.host.finding import WARN
from stratum.host.fstab import MARK
from stratum.host.swapunits import read_services, read_swap_units
from stratum.removal import plan_removal
from stratum.system import Host
from tests.unit.hosting import TreeMachine, content, link, perform, put, snapshot, work_on

HEADER = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
FSTAB = b"# static\nUUID=x / ext4 defaults 0 1\n/swap.img none swap sw 0 0\n/dev/sdb1 /srv/swap ext4 defaults 0 2"
GENERATOR = "/run/systemd/generator"
ZRAM_UNIT = "# made by zram-generator\n[Unit]\nDescription=Compressed swap\n[Swap]\nWhat=/dev/zram0\nPriority=100\n"
FSTAB_UNIT = "[Unit]\nSourcePath=/etc/fstab\n[Swap]\nWhat=/swap.img\n"


class SwapMachine(TreeMachine):
    """Plays swapon, swapoff and systemctl over the tree's /proc/swaps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.on: dict[str, int] = {}
        self.busy: set[str] = set()
        self.broken: set[str] = set()
        self.devices_of: dict[str, str] = {}
        self.running: set[str] = set()
        self.programs = {"swapoff": self.swapoff, "swapon": self.swapon, "systemctl": self.systemctl}
        put(self, "/run/systemd/system/keep")
        self.show()

    def show(self) -> None:
        lines = [f"{name}\tpartition\t1048572\t\t0\t\t{priority}\n" for name, priority in self.on.items()]
        put(self, "/proc/swaps", HEADER + "".join(lines))

    def switch(self, device: str, priority: int = -2) -> None:
        self.on[device] = priority
        put(self, device.replace("\\040", " "))
        self.show()

    def swapoff(self, words: list[str]) -> int:
        if words[0] in self.busy or words[0] not in self.on:
            return 1
        del self.on[words[0]]
        self.show()
        return 0

    def swapon(self, words: list[str]) -> int:
        if words[-1] in self.broken:
            return 1
        self.switch(words[-1], int(words[1]) if words[0] == "-p" else -2)
        return 0

    def systemctl(self, words: list[str]) -> int:
        name = words[-1]
        if words[0] == "is-active":
            return 0 if name in self.running else 3
        if words[0] == "stop":
            self.running.discard(name)
        if words[0] in ("stop", "start") and name in self.devices_of:
            self.on.pop(self.devices_of[name], None)
        if words[0] == "start":
            if name in self.broken:
                return 1
            self.running.add(name)
            if name in self.devices_of:
                self.on[self.devices_of[name]] = 100
        self.show()
        return 0


@pytest.fixture
def host(tmp_path: Path) -> SwapMachine:
    return SwapMachine(str(tmp_path))


def off(host: Host) -> list[str]:
    return perform(host, swap.plan_swap_off)


def undo(host: Host) -> tuple[list[str], list[str]]:
    warned: list[str] = []
    done = perform(host, lambda work: swap.plan_undo(work, warned.append))
    # What uninstall does next with the receipt.
    perform(host, lambda work: plan_removal(work).actions)
    return done, warned


def static(host: Host) -> dict[str, bytes | str]:
    return {path: value for path, value in snapshot(host).items() if not path.startswith(("/proc/", "/dev/"))}


def test_swap_of_a_line_in_fstab_goes_off_now_and_for_good(host: SwapMachine) -> None:
    put(host, "/etc/fstab", FSTAB)
    host.switch("/swap.img")
    before = static(host)
    off(host)
    assert host.on == {}
    assert content(host, "/etc/fstab") == FSTAB.replace(b"/swap.img none", MARK + b"/swap.img none")
    assert host.commands == ["systemctl daemon-reload", "swapoff /swap.img"]
    assert off(host) == []
    undo(host)
    assert host.on == {"/swap.img": -2}
    assert static(host) == before


def test_nothing_is_done_or_recorded_where_there_is_no_swap(host: SwapMachine) -> None:
    put(host, "/etc/fstab", "UUID=x / ext4 defaults 0 1\n# /swap.img none swap sw 0 0\n")
    assert off(host) == []
    assert not Path(host.root + str(swap.RECORD)).exists()
    assert undo(host)[0] == []


def test_an_absent_fstab_is_not_made(host: SwapMachine) -> None:
    host.switch("/dev/sda2")
    off(host)
    assert host.on == {}
    assert not Path(host.root, "etc/fstab").exists()
    undo(host)
    assert not Path(host.root, "etc/fstab").exists()
    assert host.on == {"/dev/sda2": -2}


def test_planning_alone_changes_nothing(host: SwapMachine) -> None:
    put(host, "/etc/fstab", FSTAB)
    host.switch("/swap.img")
    assert [action.verb for action in swap.plan_swap_off(work_on(host))] == [
        "record",
        "make a comment",
        "run",
        "switch off swap",
    ]
    assert content(host, "/etc/fstab") == FSTAB
    assert host.on
    assert host.commands == []


def test_swap_that_was_off_before_is_not_switched_on(host: SwapMachine) -> None:
    put(host, "/etc/fstab", FSTAB)
    off(host)
    assert b"".join([MARK, b"/swap.img"]) in content(host, "/etc/fstab")
    undo(host)
    assert host.on == {}
    assert content(host, "/etc/fstab") == FSTAB


@pytest.mark.parametrize(("priority", "argument"), [(5, "swapon -p 5 /dev/sda2"), (-3, "swapon /dev/sda2")])
def test_a_chosen_priority_is_given_again(host: SwapMachine, priority: int, argument: str) -> None:
    host.switch("/dev/sda2", priority)
    off(host)
    undo(host)
    assert argument in host.commands


def test_names_with_blanks_are_read(host: SwapMachine) -> None:
    put(host, "/proc/swaps", HEADER + "/my\\040swap                              file\t\t1048572\t\t0\t\t-2\n")
    assert swap.read_swaps(host) == [swap.ActiveSwap("/my swap", -2)]


def test_a_host_without_procfs_has_no_swap(tmp_path: Path) -> None:
    assert swap.read_swaps(Host(str(tmp_path))) == []


def test_swap_that_cannot_be_switched_off_is_an_error_that_names_it(host: SwapMachine) -> None:
    host.switch("/dev/sda2")
    host.busy.add("/dev/sda2")
    with pytest.raises(StratumError) as caught:
        off(host)
    assert caught.value.reference == "swap-not-off"
    assert caught.value.message.startswith("/dev/sda2: swap cannot be switched off: it was told to fail")


def test_a_run_that_failed_can_be_undone(host: SwapMachine) -> None:
    put(host, "/etc/fstab", FSTAB)
    host.switch("/swap.img")
    host.switch("/dev/sda2")
    host.busy.add("/dev/sda2")
    before = static(host)
    with pytest.raises(StratumError):
        off(host)
    undo(host)
    assert host.on == {"/swap.img": -2, "/dev/sda2": -2}
    assert static(host) == before


@pytest.mark.parametrize("done", range(5))
def test_a_run_that_was_cut_off_is_finished_by_the_next_and_undone_whole(host: SwapMachine, done: int) -> None:
    put(host, "/etc/fstab", FSTAB)
    put(host, f"{GENERATOR}/dev-zram0.swap", ZRAM_UNIT)
    link(host, f"{GENERATOR}/swap.target.wants/dev-zram0.swap", "../dev-zram0.swap")
    host.devices_of["dev-zram0.swap"] = "/dev/zram0"
    host.switch("/swap.img", 3)
    host.switch("/dev/zram0", 100)
    before = static(host)
    perform(host, lambda work: swap.plan_swap_off(work)[:done])
    off(host)
    assert host.on == {}
    undo(host)
    assert host.on == {"/swap.img": 3, "/dev/zram0": 100}
    assert static(host) == before


def test_a_device_that_is_gone_by_uninstall_is_told_and_stops_nothing(host: SwapMachine) -> None:
    put(host, "/etc/fstab", FSTAB)
    host.switch("/dev/sda2")
    off(host)
    host.broken.add("/dev/sda2")
    _, warned = undo(host)
    assert content(host, "/etc/fstab") == FSTAB
    assert len(warned) == 1
    assert "/dev/sda2 was on before Stratum" in warned[0]


def test_swap_that_is_on_by_now_is_not_switched_on_twice(host: SwapMachine) -> None:
    host.switch("/dev/sda2")
    off(host)
    host.switch("/dev/sda2", 7)
    undo(host)
    assert host.on == {"/dev/sda2": 7}
    assert not any(line.startswith("swapon") for line in host.commands)


def test_what_an_admin_does_to_fstab_meanwhile_stays(host: SwapMachine) -> None:
    put(host, "/etc/fstab", FSTAB)
    off(host)
    put(host, "/etc/fstab", content(host, "/etc/fstab") + b"\nserver:/x /x nfs defaults 0 0\n")
    assert off(host) == []
    undo(host)
    assert content(host, "/etc/fstab") == FSTAB + b"\nserver:/x /x nfs defaults 0 0\n"


def test_a_line_that_comes_back_goes_off_again_and_comes_back_once(host: SwapMachine) -> None:
    put(host, "/etc/fstab", FSTAB)
    off(host)
    put(host, "/etc/fstab", content(host, "/etc/fstab") + b"\n/swap.img none swap sw 0 0\n")
    off(host)
    assert content(host, "/etc/fstab").count(MARK) == 2
    undo(host)
    assert content(host, "/etc/fstab") == FSTAB + b"\n"


def test_lines_that_are_not_text_are_put_back(host: SwapMachine) -> None:
    table = b"/dev/disk/by-label/caf\xe9 none swap sw\r\n"
    put(host, "/etc/fstab", table)
    off(host)
    assert content(host, "/etc/fstab") == MARK + table
    undo(host)
    assert content(host, "/etc/fstab") == table


def test_an_image_tree_is_changed_and_nothing_is_run(tmp_path: Path) -> None:
    tree = Host(str(tmp_path))
    put(tree, "/etc/fstab", FSTAB)
    put(tree, "/usr/lib/systemd/system/var-swap.swap", "[Swap]\nWhat=/var/swap\n")
    link(tree, "/etc/systemd/system/swap.target.wants/var-swap.swap", "/usr/lib/systemd/system/var-swap.swap")
    before = snapshot(tree)
    off(tree)
    assert MARK in content(tree, "/etc/fstab")
    assert Path(tree.root, "etc/systemd/system/var-swap.swap").readlink() == Path("/dev/null")
    assert off(tree) == []
    undo(tree)
    assert snapshot(tree) == before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"devices": [], "lines": 1, "units": []}', "\0"])
def test_a_record_that_cannot_be_read_is_an_error_and_nothing_is_guessed(host: SwapMachine, text: str) -> None:
    put(host, str(swap.RECORD), text)
    with pytest.raises(StratumError) as caught:
        undo(host)
    assert caught.value.reference == "swap-record-unreadable"


# -- units ------------------------------------------------------------------------------------------------


def test_a_generated_unit_is_masked_its_swap_goes_off_and_both_come_back(host: SwapMachine) -> None:
    put(host, f"{GENERATOR}/dev-zram0.swap", ZRAM_UNIT)
    link(host, f"{GENERATOR}/swap.target.requires/dev-zram0.swap", "../dev-zram0.swap")
    host.devices_of["dev-zram0.swap"] = "/dev/zram0"
    host.switch("/dev/zram0", 100)
    before = static(host)
    off(host)
    assert Path(host.root, "etc/systemd/system/dev-zram0.swap").readlink() == Path("/dev/null")
    assert host.on == {}
    assert host.commands.index("systemctl daemon-reload") < host.commands.index("swapoff /dev/zram0")
    assert off(host) == []
    host.commands.clear()
    undo(host)
    assert host.commands[:2] == ["systemctl daemon-reload", "systemctl start dev-zram0.swap"]
    assert host.on == {"/dev/zram0": 100}
    assert static(host) == before
    assert not any(line.startswith("swapon") for line in host.commands)


def test_the_units_of_fstab_lines_are_not_masked(host: SwapMachine) -> None:
    put(host, "/etc/fstab", FSTAB)
    put(host, f"{GENERATOR}/swap.img.swap", FSTAB_UNIT)
    link(host, f"{GENERATOR}/swap.target.requires/swap.img.swap", "../swap.img.swap")
    host.switch("/swap.img")
    off(host)
    assert not Path(host.root, "etc/systemd/system").exists()
    undo(host)
    assert "swapon /swap.img" in host.commands


def test_an_admins_own_unit_file_stays_and_a_drop_in_keeps_it_from_starting(host: SwapMachine) -> None:
    put(host, "/etc/systemd/system/dev-sda2.swap", "[Swap]\nWhat=/dev/sda2\n[Install]\nWantedBy=swap.target\n")
    link(host, "/etc/systemd/system/swap.target.wants/dev-sda2.swap", "/etc/systemd/system/dev-sda2.swap")
    host.devices_of["dev-sda2.swap"] = "/dev/sda2"
    host.switch("/dev/sda2", 100)
    before = static(host)
    off(host)
    drop_in = content(host, "/etc/systemd/system/dev-sda2.swap.d/90-stratum-off.conf")
    assert drop_in.endswith(b"[Unit]\nConditionPathExists=!/\n")
    assert before.items() <= static(host).items()
    assert off(host) == []
    undo(host)
    assert static(host) == before
    assert not Path(host.root, "etc/systemd/system/dev-sda2.swap.d").exists()
    assert host.on == {"/dev/sda2": 100}


def test_a_unit_that_nothing_starts_is_left_alone(host: SwapMachine) -> None:
    put(host, "/usr/lib/systemd/system/var-swap.swap", "[Swap]\nWhat=/var/swap\n")
    assert off(host) == []
    host.switch("/var/swap")
    off(host)
    assert Path(host.root, "etc/systemd/system/var-swap.swap").readlink() == Path("/dev/null")


def test_the_device_of_a_unit_may_have_another_name(host: SwapMachine) -> None:
    put(host, "/dev/sda2")
    link(host, "/dev/disk/by-uuid/1234", "../../sda2")
    put(host, "/run/systemd/generator.late/x.swap", "[Swap]\nWhat=/dev/disk/by-uuid/1234\n")
    host.switch("/dev/sda2")
    off(host)
    assert Path(host.root, "etc/systemd/system/x.swap").is_symlink()


def test_an_admins_mask_stays_after_uninstall(host: SwapMachine) -> None:
    put(host, "/etc/fstab", FSTAB)
    put(host, f"{GENERATOR}/dev-zram0.swap", ZRAM_UNIT)
    link(host, f"{GENERATOR}/swap.target.wants/dev-zram0.swap", "../dev-zram0.swap")
    link(host, "/etc/systemd/system/dev-zram0.swap", "/dev/null")
    off(host)
    undo(host)
    assert Path(host.root, "etc/systemd/system/dev-zram0.swap").readlink() == Path("/dev/null")


def test_a_mask_that_an_admin_made_something_else_of_stays(host: SwapMachine) -> None:
    put(host, f"{GENERATOR}/dev-zram0.swap", ZRAM_UNIT)
    link(host, f"{GENERATOR}/swap.target.wants/dev-zram0.swap", "../dev-zram0.swap")
    off(host)
    path = Path(host.root, "etc/systemd/system/dev-zram0.swap")
    path.unlink()
    path.write_text("[Swap]\nWhat=/dev/zram0\n")
    undo(host)
    assert path.read_text() == "[Swap]\nWhat=/dev/zram0\n"


def test_a_unit_with_an_empty_file_is_masked(host: SwapMachine) -> None:
    put(host, "/etc/systemd/system/a.swap", "")
    put(host, "/usr/lib/systemd/system/a.swap", "[Swap]\nWhat=/a\n")
    assert read_swap_units(host) == []


def test_a_service_that_makes_swap_is_stopped_and_masked_and_comes_back(host: SwapMachine) -> None:
    name = "zramswap.service"
    put(host, f"/usr/lib/systemd/system/{name}", "[Service]\nExecStart=/usr/sbin/zramswap start\n")
    link(host, f"/etc/systemd/system/multi-user.target.wants/{name}", f"/usr/lib/systemd/system/{name}")
    host.devices_of[name] = "/dev/zram0"
    host.running.add(name)
    host.switch("/dev/zram0", 100)
    before = static(host)
    assert read_services(host) == [name]
    off(host)
    assert f"systemctl stop {name}" in host.commands
    assert "swapoff /dev/zram0" not in host.commands
    assert host.on == {}
    assert off(host) == []
    undo(host)
    assert host.on == {"/dev/zram0": 100}
    assert static(host) == before


def test_a_host_without_systemd_needs_no_systemctl(host: SwapMachine) -> None:
    Path(host.root, "run/systemd/system/keep").unlink()
    Path(host.root, "run/systemd/system").rmdir()
    del host.programs["systemctl"]
    put(host, "/usr/lib/systemd/system/zramswap.service", "[Service]\n")
    link(
        host, "/etc/systemd/system/multi-user.target.wants/zramswap.service", "/usr/lib/systemd/system/zramswap.service"
    )
    put(host, "/etc/fstab", FSTAB)
    host.switch("/swap.img")
    off(host)
    assert host.commands == ["swapoff /swap.img"]
    undo(host)
    assert host.commands == ["swapoff /swap.img", "swapon /swap.img"]


# -- the boot check ---------------------------------------------------------------------------------------


def test_swap_that_came_back_is_named_although_it_was_switched_off_once(host: SwapMachine) -> None:
    put(host, "/etc/fstab", FSTAB)
    host.switch("/swap.img")
    off(host)
    assert swap.check_swap(host) == []
    put(host, "/etc/initramfs-tools/conf.d/resume", "# set by the installer\nRESUME=UUID=1234\n")
    put(host, "/dev/dm-1")
    link(host, "/dev/disk/by-uuid/1234", "../../dm-1")
    host.switch("/dev/dm-1")
    (finding,) = swap.check_swap(host)
    assert (finding.check, finding.severity) == ("swap", WARN)
    assert "swap is on: /dev/dm-1" in finding.message
    assert "/etc/initramfs-tools/conf.d/resume names it" in finding.message


def test_the_boot_check_says_who_switched_it_on(host: SwapMachine) -> None:
    put(host, "/etc/fstab", 'UUID="ab-cd" none swap sw 0 0\n')
    put(host, "/dev/sda2")
    link(host, "/dev/disk/by-uuid/ab-cd", "../../sda2")
    put(host, f"{GENERATOR}/dev-zram0.swap", ZRAM_UNIT)
    put(host, "/proc/cmdline", "root=/dev/vda resume=/dev/sda3 quiet\n")
    for device in ("/dev/sda2", "/dev/zram0", "/dev/sda3", "/dev/sda4"):
        host.switch(device)
    words = [finding.message for finding in swap.check_swap(host)]
    assert "/etc/fstab has a line for it" in words[0]
    assert f"unit dev-zram0.swap in {GENERATOR}" in words[1]
    assert "/proc/cmdline names it" in words[2]
    assert "nothing was found that asks for it" in words[3]


def test_the_record_says_what_was_on(host: SwapMachine) -> None:
    put(host, "/etc/fstab", FSTAB)
    host.switch("/swap.img", 4)
    off(host)
    assert json.loads(content(host, str(swap.RECORD))) == {
        "format": 1,
        "lines": ["/swap.img none swap sw 0 0"],
        "devices": [{"device": "/swap.img", "priority": 4}],
        "units": [],
    }
