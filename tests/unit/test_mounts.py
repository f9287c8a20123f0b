"""The mount table: what lies below our trees, and in which order it can be taken away (row 47)."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratum.errors import StratumError
from stratum.host.mounts import mount_types, mounts_below, plan_unmount, read_mounts, unmount
from stratum.system import HostPath
from tests.fakes import MachineHost, make_tree
from tests.unit.hosting import work_on

ROOTS = (HostPath("/var/lib/stratum"), HostPath("/opt/stratum"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "root", live=True)


@pytest.fixture
def machine(root: Path) -> MachineHost:
    return MachineHost(str(root), {})


def mount(root: Path, *lines: str) -> None:
    """Write the table: ``number parent path`` of each mount."""
    table = ["1 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"]
    for line in lines:
        number, parent, path = line.split(" ", 2)
        table.append(f"{number} {parent} 8:2 / {path} rw,nosuid shared:{number} master:1 - ext4 /dev/sdb1 rw")
    (root / "proc/self/mountinfo").write_text("\n".join(table) + "\n")


def below(machine: MachineHost) -> list[str]:
    return [str(item.path) for item in mounts_below(machine, ROOTS)]


def test_a_line_is_read_with_its_options_and_tags(root: Path, machine: MachineHost) -> None:
    mount(root, "2 1 /data")
    item = read_mounts(machine)[1]
    assert (str(item.path), item.type, item.source) == ("/data", "ext4", "/dev/sdb1")
    assert item.options == {"rw", "nosuid"} and item.tags == {"shared:2", "master:1"}


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("/a\\040b", "/a b"),
        ("/a\\011b", "/a\tb"),
        ("/a\\012b", "/a\nb"),
        ("/a\\134b", "/a\\b"),
        ("/a\\134040b", "/a\\040b"),
        ("/é", "/é"),
        ("/a\rb", "/a\rb"),
        ("/a\u2028b", "/a\u2028b"),
        ("/a\x0bb", "/a\x0bb"),
    ],
)
def test_names_may_hold_whatever_a_name_may_hold(root: Path, machine: MachineHost, written: str, path: str) -> None:
    line = f"2 1 8:2 / {written} rw - ext4 /dev/sdb1 rw\n"
    (root / "proc/self/mountinfo").write_bytes(line.encode())
    assert [str(item.path) for item in read_mounts(machine)] == [path]


def test_lines_that_are_none_are_passed_over(root: Path, machine: MachineHost) -> None:
    (root / "proc/self/mountinfo").write_text("\n- -\n1 2 3\n1 2 3 4 5 6 - \nx - y z w\n")
    assert read_mounts(machine) == []
    (root / "proc/self/mountinfo").unlink()
    assert read_mounts(machine) == []


def test_the_topmost_mount_counts(root: Path, machine: MachineHost) -> None:
    lines = "2 1 0:1 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n3 2 0:2 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    (root / "proc/self/mountinfo").write_text(lines)
    assert mount_types(machine)[HostPath("/sys/fs/cgroup")] == "cgroup2"


def test_only_what_is_strictly_below_is_ours_to_take_away(root: Path, machine: MachineHost) -> None:
    mount(root, "2 1 /var/lib/stratum", "3 1 /var/lib/stratum-other/x", "4 1 /opt", "5 2 /var/lib/stratum/x", "6 1 /x")
    assert below(machine) == ["/var/lib/stratum/x"]


def test_what_is_in_or_over_another_comes_first_whatever_the_order_of_the_table(
    root: Path, machine: MachineHost
) -> None:
    mount(root, "4 3 /var/lib/stratum/a/b", "5 4 /var/lib/stratum/a/b/c", "3 1 /var/lib/stratum/a")
    assert below(machine) == ["/var/lib/stratum/a/b/c", "/var/lib/stratum/a/b", "/var/lib/stratum/a"]
    # One mount lies over the directory that another is mounted below: it must go first, though its path is shorter.
    mount(root, "2 1 /opt/stratum/a/b", "3 1 /opt/stratum/a")
    assert below(machine) == ["/opt/stratum/a", "/opt/stratum/a/b"]
    # And twice over the same place.
    mount(root, "3 2 /opt/stratum/a", "2 1 /opt/stratum/a")
    assert [item.number for item in mounts_below(machine, ROOTS)] == ["3", "2"]


def test_a_loop_in_the_table_is_no_endless_search(root: Path, machine: MachineHost) -> None:
    mount(root, "2 3 /opt/stratum/a", "3 2 /opt/stratum/b", "4 4 /opt/stratum/c")
    assert sorted(below(machine)) == ["/opt/stratum/a", "/opt/stratum/b", "/opt/stratum/c"]


def test_a_tree_behind_a_link_is_found_by_its_real_path(root: Path, machine: MachineHost) -> None:
    (root / "data/opt/stratum").mkdir(parents=True)
    (root / "opt/other").rmdir()
    (root / "opt").rmdir()
    (root / "opt").symlink_to("/data/opt")
    mount(root, "2 1 /data/opt/stratum/x", "3 1 /data/other")
    assert below(machine) == ["/data/opt/stratum/x"]


def test_a_mount_is_taken_away_without_force_and_a_busy_one_says_who_to_look_for(
    root: Path, machine: MachineHost
) -> None:
    mount(root, "2 1 /opt/stratum/x")
    unmount(machine, HostPath("/opt/stratum/x"))
    assert machine.commands == ["umount --no-canonicalize /opt/stratum/x"]
    machine.failing = {"umount": 1}
    with pytest.raises(StratumError) as caught:
        unmount(machine, HostPath("/opt/stratum/y"))
    assert caught.value.reference == "mount-busy"
    assert "fuser --mount /opt/stratum/y" in str(caught.value.hint)


def test_what_is_mounted_in_a_bind_of_ours_is_not_taken_away_where_the_bind_is_from(
    root: Path, machine: MachineHost
) -> None:
    """A volume with subPath is a bind of a directory, and shares with it what the admin mounted there later."""
    (root / "usr/bin/mount").write_text("#!/bin/sh\n")
    (root / "usr/bin/mount").chmod(0o755)
    mount(root, "2 1 /opt/stratum/bind", "3 1 /mnt/disk", "4 2 /opt/stratum/bind/disk", "5 1 /opt/stratum/alone")
    assert [action.describe() for action in plan_unmount(work_on(machine), ROOTS)] == [
        "make private /opt/stratum/bind",
        "unmount /opt/stratum/bind/disk",
        "unmount /opt/stratum/alone",
        "unmount /opt/stratum/bind",
    ]
    plan_unmount(work_on(machine), ROOTS)[0].perform(work_on(machine))
    assert machine.commands == ["mount --make-private /opt/stratum/bind"]
    machine.failing = {"mount": 1}
    with pytest.raises(StratumError) as caught:
        plan_unmount(work_on(machine), ROOTS)[0].perform(work_on(machine))
    assert caught.value.reference == "mount-shared"
