"""Mounts that a network plugin's pods need: the BPF file system and a root that is not private."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratum.host import rootmount
from stratum.host.mounts import read_mounts
from stratum.system import Host
from tests.unit.hosting import BOOT_ID, TreeMachine, perform, put

BPF_LINE = "40 30 0:33 / /sys/fs/bpf rw,nosuid{tags} - bpf bpf rw,mode=700\n"


def root_line(tags: str) -> str:
    return f"24 1 254:1 / / rw,relatime{tags} - ext4 /dev/vda1 rw\n"


class MountMachine(TreeMachine):
    """Plays mount and umount over the tree's mountinfo."""

    root_tags = " shared:1"
    bpf_tags: str | None = None
    fails = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.programs = {"mount": self.mount, "umount": self.umount}
        put(self, "/proc/sys/kernel/random/boot_id", BOOT_ID)
        Path(self.root, "sys/fs/bpf").mkdir(parents=True)
        self.show()

    def show(self) -> None:
        text = root_line(self.root_tags)
        if self.bpf_tags is not None:
            text += BPF_LINE.format(tags=self.bpf_tags)
        put(self, "/proc/self/mountinfo", text)

    def have(self, root_tags: str, bpf_tags: str | None) -> None:
        self.root_tags, self.bpf_tags = root_tags, bpf_tags
        self.show()

    def mount(self, words: list[str]) -> int:
        if self.fails:
            return 32
        if words == ["--make-rshared", "/"]:
            self.have(" shared:1", None if self.bpf_tags is None else " shared:2")
        elif words == ["--make-shared", "/sys/fs/bpf"]:
            self.have(self.root_tags, " shared:2")
        elif words == ["-t", "bpf", "bpf", "/sys/fs/bpf"]:
            self.have(self.root_tags, "")
        else:
            return 1
        return 0

    def umount(self, words: list[str]) -> int:
        self.have(self.root_tags, None)
        return 0


@pytest.fixture
def host(tmp_path: Path) -> MountMachine:
    return MountMachine(str(tmp_path))


def up(host: Host) -> tuple[list[str], list[str]]:
    warned: list[str] = []
    done = perform(host, lambda _: rootmount.plan_root_shared(host, warned.append))
    done += perform(host, lambda _: rootmount.plan_bpf(host, warned.append))
    return done, warned


def undo(host: Host) -> list[str]:
    return perform(host, lambda _: rootmount.plan_undo(host, print))


@pytest.mark.parametrize(
    ("tags", "kind"),
    [
        ("", "private"),
        (" unbindable", "private"),
        (" shared:1", "shared"),
        (" master:7", "slave"),
        (" master:7 propagate_from:2", "slave"),
        (" shared:1 master:7", "shared"),
        (" future:1", "private"),
    ],
)
def test_propagation_is_read_from_the_optional_fields(host: MountMachine, tags: str, kind: str) -> None:
    host.have(tags, None)
    assert rootmount.propagation(read_mounts(host)[0]) == kind


def test_a_private_root_is_made_shared_with_everything_below(host: MountMachine) -> None:
    host.have("", " shared:2")
    assert up(host) == (["make shared / and every mount below it"], [])
    assert host.commands == ["mount --make-rshared /"]
    assert up(host) == ([], [])


@pytest.mark.parametrize("tags", [" shared:1", " master:7", " shared:1 master:7"])
def test_a_shared_or_slave_root_is_left_alone(host: MountMachine, tags: str) -> None:
    host.have(tags, " shared:2")
    assert up(host) == ([], [])
    assert host.commands == []


def test_a_missing_bpf_file_system_is_mounted_and_shared_whatever_the_root_is(host: MountMachine) -> None:
    host.have(" master:7", None)
    up(host)
    assert host.commands == ["mount -t bpf bpf /sys/fs/bpf", "mount --make-shared /sys/fs/bpf"]
    assert up(host) == ([], [])


def test_a_private_bpf_file_system_is_made_shared(host: MountMachine) -> None:
    host.have(" master:7", "")
    up(host)
    assert host.commands == ["mount --make-shared /sys/fs/bpf"]


def test_another_file_system_at_the_place_is_not_the_bpf_one(host: MountMachine) -> None:
    put(host, "/proc/self/mountinfo", root_line(" shared:1") + "40 30 0:33 / /sys/fs/bpf rw - tmpfs tmpfs rw\n")
    assert up(host)[0] == ["mount the BPF file system at /sys/fs/bpf"]


def test_a_failure_is_a_warning(host: MountMachine) -> None:
    host.have("", None)
    host.fails = True
    _, warned = up(host)
    assert len(warned) == 2
    assert all("it was told to fail" in text for text in warned)


def test_a_kernel_without_bpf_is_a_warning(host: MountMachine) -> None:
    Path(host.root, "sys/fs/bpf").rmdir()
    _, warned = up(host)
    assert len(warned) == 1
    assert "no BPF file system" in warned[0]
    assert host.commands == []


def test_undo_unmounts_what_this_boot_mounted_and_nobody_uses(host: MountMachine) -> None:
    up(host)
    assert undo(host) == ["unmount /sys/fs/bpf"]
    assert undo(host) == []


def test_undo_leaves_a_bpf_file_system_that_was_there_or_has_pins_or_is_of_another_boot(host: MountMachine) -> None:
    host.have(" shared:1", " shared:2")
    up(host)
    assert undo(host) == []
    host.have(" shared:1", None)
    up(host)
    put(host, "/sys/fs/bpf/somebodys_map")
    assert undo(host) == []
    Path(host.root, "sys/fs/bpf/somebodys_map").unlink()
    put(host, "/proc/sys/kernel/random/boot_id", "another\n")
    assert undo(host) == []


def test_a_tree_has_no_mounts_to_make(tmp_path: Path) -> None:
    assert up(Host(str(tmp_path))) == ([], [])
