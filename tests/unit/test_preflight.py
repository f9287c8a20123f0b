"""Checks of the host, over directory trees that look like hosts of many kinds."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stratum.cli import build_parser
from stratum.host import preflight
from stratum.host.preflight import REJECT, WARN, Finding, Need, check_host, detect_unmanaged
from stratum.system import Host, HostPath, PathLike
from tests.bundles import Entry, Part, directory, snapshot
from tests.fakes import Desk, MachineHost, make_tree, node_publisher

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "root", live=True)


@pytest.fixture
def machine(root: Path) -> MachineHost:
    return MachineHost(str(root), {})


def names(findings: list[Finding], severity: str = REJECT) -> list[str]:
    return [finding.check for finding in findings if finding.severity == severity]


def program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


def test_a_plain_host_has_nothing_to_say_against_it_and_is_not_changed(root: Path, machine: MachineHost) -> None:
    before = snapshot(root)
    assert check_host(machine, needs=[Need(HostPath("/opt/stratum/components"), 1, 1)], units=["x.service"]) == []
    assert snapshot(root) == before
    assert machine.commands == []


def test_all_findings_come_at_once_each_with_what_to_do(root: Path, machine: MachineHost) -> None:
    machine.user = 1000
    machine.release = "4.4.0"
    for name in ("systemctl", "modprobe"):
        (root / "usr/bin" / name).unlink()
    (root / "run/systemd/system").rmdir()
    (root / "proc/self/mountinfo").write_text("")
    program(root / "usr/bin/containerd")
    findings = check_host(machine)
    assert set(names(findings)) == {"root", "systemd", "cgroup-v2", "kernel", "commands", "unmanaged"}
    assert names(findings, WARN) == ["optional-commands"]
    assert all(finding.hint and finding.message and "\n" not in finding.message for finding in findings)
    assert json.loads(json.dumps([finding.to_json() for finding in findings]))


def test_each_finding_has_a_name_that_can_be_skipped(root: Path, machine: MachineHost) -> None:
    machine.user = 1000
    machine.release = "4.4.0"
    for name in names(check_host(machine)):
        assert name in preflight.CHECKS
        assert name not in names(check_host(machine, skip=[name]))


# -- rows 15 and 16: cgroups ----------------------------------------------------------------------------

LEGACY = "30 1 8:1 / / rw - ext4 /dev/sda1 rw\n31 30 0:27 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n"


@pytest.mark.parametrize(
    ("table", "fit"),
    [
        ("31 30 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n", True),
        ("31 30 0:27 / /sys/fs/cgroup rw shared:9 master:3 - cgroup2 none rw\n", True),
        (LEGACY + "32 31 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", False),
        (LEGACY + "32 31 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n", False),
        ("31 30 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n", False),
        (LEGACY + "33 31 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", True),  # mounted over it
        ("", False),
    ],
    ids=["v2", "v2 in a container", "v1", "hybrid", "unified only", "v2 over tmpfs", "no table"],
)
def test_only_cgroup_v2_alone_is_fit_by_the_type_of_what_is_mounted(
    root: Path, machine: MachineHost, table: str, fit: bool
) -> None:
    (root / "proc/self/mountinfo").write_text(table)
    found = [finding for finding in check_host(machine) if finding.check == "cgroup-v2"]
    assert (found == []) == fit
    if not fit:
        assert found[0].severity == REJECT
        assert "cgroup v2" in found[0].message
        assert "systemd.unified_cgroup_hierarchy=1" in found[0].hint


def test_without_procfs_the_cgroup_check_refuses_and_does_not_crash(root: Path, machine: MachineHost) -> None:
    (root / "proc/self/mountinfo").unlink()
    assert "cgroup-v2" in names(check_host(machine))


# -- kernel ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("release", "severity"),
    [
        ("6.1.0-1-amd64", None),
        ("5.10.0", None),
        ("5.14.0-427.el9.x86_64", None),
        ("6.12-rc3", None),
        ("10.0.0", None),
        ("5.9.16", WARN),
        ("5.4.0-150-generic", WARN),
        ("4.19.57", WARN),
        ("4.19.56", REJECT),
        ("4.18.0-553.el8_10.x86_64", REJECT),
        ("3.10.0-1160.el7", REJECT),
        ("custom", WARN),
        ("", WARN),
    ],
)
def test_the_kernel_is_judged_by_its_numbers(machine: MachineHost, release: str, severity: str | None) -> None:
    machine.release = release
    found = [finding.severity for finding in check_host(machine) if finding.check == "kernel"]
    assert found == ([severity] if severity else [])


# -- row 34: programs -----------------------------------------------------------------------------------


def test_programs_in_sbin_are_found_on_crons_path(root: Path) -> None:
    for name in ("modprobe", "iptables", "systemctl"):
        (root / "usr/bin" / name).unlink()
        program(root / "usr/sbin" / name)
    for path in ("/usr/bin:/bin", "", "."):
        assert check_host(MachineHost(str(root), {"PATH": path})) == []


def test_only_what_is_really_absent_is_reported(root: Path, machine: MachineHost) -> None:
    (root / "usr/bin/journalctl").unlink()
    (finding,) = check_host(machine)
    assert (finding.check, finding.severity) == ("commands", REJECT)
    assert "journalctl" in finding.message


def test_one_of_two_firewall_programs_is_enough(root: Path, machine: MachineHost) -> None:
    (root / "usr/bin/iptables").unlink()
    assert names(check_host(machine), WARN) == ["optional-commands"]
    program(root / "usr/sbin/nft")
    assert check_host(machine) == []


# -- rows 25 and 28: places that are written to -----------------------------------------------------------


class Mounted(MachineHost):
    """Some places are on file systems of another kind."""

    flags: dict[str, int]
    space: dict[str, dict[str, int]]
    devices: dict[str, int]

    def statvfs(self, path: PathLike) -> os.statvfs_result:
        real = super().statvfs(path)
        values = {name: getattr(real, name) for name in ("f_flag", "f_bavail", "f_frsize", "f_files", "f_favail")}
        for place, flag in getattr(self, "flags", {}).items():
            if self._within(path, place):
                values["f_flag"] = flag
        for place, changes in getattr(self, "space", {}).items():
            if self._within(path, place):
                values.update(changes)
        return SimpleNamespace(**values)  # type: ignore[return-value]

    def stat(self, path: PathLike) -> os.stat_result:
        real = super().stat(path)
        for place, device in getattr(self, "devices", {}).items():
            if self._within(path, place):
                return SimpleNamespace(st_dev=device, st_mode=real.st_mode)  # type: ignore[return-value]
        return real

    @staticmethod
    def _within(path: PathLike, place: str) -> bool:
        return HostPath(place) in (HostPath(str(path)), *HostPath(str(path)).parents)


@pytest.mark.parametrize(
    ("place", "hit"),
    [
        ("/etc", {"/etc/stratum", "/etc/systemd/system"}),
        ("/opt", {"/opt/stratum"}),
        ("/var", {"/var/lib/stratum"}),
        ("/run", {"/run"}),
        ("/usr", set()),
        ("/", {"/etc/stratum", "/etc/systemd/system", "/opt/stratum", "/var/lib/stratum", "/run"}),
    ],
)
def test_a_read_only_place_is_found_before_anything_is_written(root: Path, place: str, hit: set[str]) -> None:
    host = Mounted(str(root), {})
    host.flags = {place: os.ST_RDONLY}
    found = [finding for finding in check_host(host) if finding.check == "writable-paths"]
    assert {finding.message.partition(":")[0] for finding in found if finding.severity == REJECT} == hit
    assert all("read-only" in finding.message for finding in found)


def test_a_read_only_place_for_the_command_is_one_warning_that_names_what_to_run(root: Path) -> None:
    host = Mounted(str(root), {})
    host.flags = {"/usr/local": os.ST_RDONLY | os.ST_NOEXEC}
    (finding,) = check_host(host)
    assert (finding.check, finding.severity) == ("writable-paths", WARN)
    assert "/usr/local/bin/stratum" in finding.message
    assert finding.hint == "run /opt/stratum/pyz/current/stratum.pyz instead"


def test_noexec_for_the_command_is_nothing_to_say(root: Path) -> None:
    """It is a link: what counts is the mount of the file that it leads to."""
    host = Mounted(str(root), {})
    host.flags = {"/usr/local/bin": os.ST_NOEXEC}
    assert check_host(host) == []


def test_a_file_in_place_of_a_directory_is_found(root: Path, machine: MachineHost) -> None:
    (root / "opt/stratum").write_text("a file")
    assert "writable-paths" in names(check_host(machine))


def test_a_place_on_noexec_is_found_and_the_mount_named(root: Path) -> None:
    host = Mounted(str(root), {})
    host.flags = {"/opt": os.ST_NOEXEC}
    (finding,) = [finding for finding in check_host(host) if finding.check == "noexec"]
    assert "/opt/stratum" in finding.message and "noexec" in finding.message
    assert "remount" in finding.hint


def test_space_is_added_up_for_each_file_system(root: Path) -> None:
    host = Mounted(str(root), {})
    host.devices = {"/opt": 1, "/var": 2}
    roomy = {"f_bavail": 10 * GIB, "f_frsize": 1, "f_files": 1000, "f_favail": 1000}
    host.space = {"/opt": roomy, "/var": roomy}
    opt, var = HostPath("/opt/stratum/components"), HostPath("/var/lib/stratum/images")
    fits = [Need(opt, 9 * GIB, 900), Need(var, 9 * GIB, 900)]
    assert check_host(host, needs=fits) == []
    both = [Need(var, 6 * GIB, 600), Need(HostPath("/var/lib/stratum/containerd"), 6 * GIB, 600)]
    found = check_host(host, needs=both)
    assert names(found) == ["disk-space", "inodes"]
    assert "12288 MiB are needed and 10240 MiB are free" in found[0].message
    assert "free 2048 MiB" in found[0].hint
    assert "1200 inodes are needed and 1000 are free" in found[1].message


def test_what_just_fits_fits_and_one_byte_more_does_not(root: Path) -> None:
    host = Mounted(str(root), {})
    host.devices = {"/opt": 1}
    host.space = {"/opt": {"f_bavail": 10, "f_frsize": 4096, "f_files": 100, "f_favail": 7}}
    path = HostPath("/opt/stratum")
    assert check_host(host, needs=[Need(path, 40960, 7)]) == []
    assert names(check_host(host, needs=[Need(path, 40961, 7)])) == ["disk-space"]
    assert names(check_host(host, needs=[Need(path, 40960, 8)])) == ["inodes"]


def test_a_file_system_that_counts_no_inodes_has_enough(root: Path) -> None:
    host = Mounted(str(root), {})
    host.devices = {"/opt": 1}
    host.space = {"/opt": {"f_bavail": GIB, "f_frsize": 1, "f_files": 0, "f_favail": 0}}
    assert check_host(host, needs=[Need(HostPath("/opt/stratum"), 1, 10**9)]) == []


# -- row 36: systemd --------------------------------------------------------------------------------------


def test_a_container_without_systemd_is_refused(root: Path, machine: MachineHost) -> None:
    (root / "run/systemd/system").rmdir()
    (finding,) = check_host(machine)
    assert (finding.check, finding.severity) == ("systemd", REJECT)
    (root / "run/systemd").rmdir()
    assert names(check_host(machine)) == ["systemd"]


# -- row 37: masked units -----------------------------------------------------------------------------------

UNITS = ("stratum.service", "stratum-containerd.service")


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("place", ["etc/systemd/system", "run/systemd/system"])
@pytest.mark.parametrize("target", ["/dev/null", "../../../dev/null", "/etc/also-null"])
def test_a_masked_unit_of_ours_is_found_and_never_written_through(
    root: Path, machine: MachineHost, unit: str, place: str, target: str
) -> None:
    (root / "etc/also-null").symlink_to("/dev/null")
    (root / place / unit).symlink_to(target)
    before = snapshot(root)
    (finding,) = check_host(machine, units=UNITS)
    assert (finding.check, finding.severity) == ("masked-unit", REJECT)
    assert f"/{place}/{unit}" in finding.message
    assert f"systemctl unmask {unit}" in finding.hint
    assert snapshot(root) == before


def test_an_empty_unit_file_masks_too(root: Path, machine: MachineHost) -> None:
    (root / "run/systemd/system" / UNITS[0]).write_text("")
    assert names(check_host(machine, units=UNITS)) == ["masked-unit"]


def test_a_unit_that_is_there_is_not_masked(root: Path, machine: MachineHost) -> None:
    (root / "etc/systemd/system" / UNITS[0]).write_text("[Service]\n")
    (root / "etc/systemd/system" / UNITS[1]).symlink_to("/usr/lib/systemd/system/x.service")
    assert check_host(machine, units=UNITS) == []


# -- row 38: another containerd -----------------------------------------------------------------------------


def test_each_trace_of_another_containerd_or_kubelet_is_a_finding(root: Path, machine: MachineHost) -> None:
    for name in ("usr/lib/systemd/system/containerd.service", "etc/systemd/system/kubelet.service"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("[Service]\n")
    program(root / "usr/bin/containerd")
    program(root / "usr/local/bin/kubelet")
    process(root, 10, "/usr/bin/containerd")
    process(root, 11, "/usr/bin/kubelet (deleted)")
    process(root, 12, "/usr/bin/containerd-shim-runc-v2")
    process(root, 13, "/usr/bin/dockerd")
    found = detect_unmanaged(machine)
    assert sorted(found) == [
        "process 10 (/usr/bin/containerd)",
        "process 11 (/usr/bin/kubelet)",
        "program /usr/bin/containerd",
        "program /usr/local/bin/kubelet",
        "unit file /etc/systemd/system/kubelet.service",
        "unit file /usr/lib/systemd/system/containerd.service",
    ]
    assert len(names(check_host(machine))) == 6


def process(root: Path, pid: int, exe: str) -> None:
    (root / f"proc/{pid}").mkdir(parents=True)
    (root / f"proc/{pid}/exe").symlink_to(exe)


def test_what_is_ours_is_no_finding(root: Path, machine: MachineHost) -> None:
    program(root / "opt/stratum/node/1.0/bin/containerd")
    (root / "opt/stratum/node/current").symlink_to("1.0")
    (root / "usr/local/bin/containerd").symlink_to("/opt/stratum/node/current/bin/containerd")
    (root / "etc/systemd/system/stratum-containerd.service").write_text("[Service]\n")
    process(root, 10, "/opt/stratum/node/1.0/bin/containerd")
    process(root, 11, "/opt/stratum/node/0.9/bin/containerd (deleted)")
    assert detect_unmanaged(machine) == []


def test_a_name_that_only_begins_like_ours_is_not_ours(root: Path, machine: MachineHost) -> None:
    program(root / "opt/stratum-other/containerd")
    (root / "usr/bin/containerd").symlink_to("/opt/stratum-other/containerd")
    process(root, 10, "/opt/stratum-other/containerd")
    assert len(detect_unmanaged(machine)) == 2


def test_a_masked_unit_of_theirs_starts_nothing(root: Path, machine: MachineHost) -> None:
    (root / "etc/systemd/system/containerd.service").symlink_to("/dev/null")
    assert detect_unmanaged(machine) == []


def test_a_mask_in_etc_covers_the_packages_unit(root: Path, machine: MachineHost) -> None:
    """The admin installed a package and masked its unit: it never runs, though the file is there."""
    (root / "usr/lib/systemd/system").mkdir(parents=True)
    (root / "usr/lib/systemd/system/containerd.service").write_text("[Service]\n")
    (root / "etc/systemd/system/containerd.service").symlink_to("/dev/null")
    assert detect_unmanaged(machine) == []


def test_one_file_behind_two_names_is_named_once(root: Path, machine: MachineHost) -> None:
    (root / "usr/lib/systemd/system").mkdir(parents=True)
    (root / "usr/lib/systemd/system/containerd.service").write_text("[Service]\n")
    (root / "lib").symlink_to("usr/lib")
    program(root / "usr/sbin/containerd")
    (root / "sbin").symlink_to("usr/sbin")
    assert len(detect_unmanaged(machine)) == 2


def test_a_dangling_program_and_a_process_that_ends_are_no_crash(root: Path, machine: MachineHost) -> None:
    (root / "usr/bin/containerd").symlink_to("nowhere")
    (root / "proc/99").mkdir()
    assert len(detect_unmanaged(machine)) <= 1


# -- trees, and who asks --------------------------------------------------------------------------------


def test_a_directory_tree_is_asked_only_what_holds_for_a_tree(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "image")
    assert check_host(Host(str(root), {}), units=UNITS) == []
    program(root / "usr/bin/containerd")
    (root / "etc/systemd/system" / UNITS[0]).symlink_to("/dev/null")
    assert sorted(names(check_host(Host(str(root), {}), units=UNITS))) == ["masked-unit", "unmanaged"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_what_only_root_may_see_is_no_crash_for_others(machine: MachineHost, number: int) -> None:
    machine.user = 1000

    def refuse(path: PathLike) -> list[str]:
        raise OSError(number, os.strerror(number))

    machine.listdir = refuse  # type: ignore[method-assign]
    assert names(check_host(machine)) == ["root"]


def test_another_error_is_not_swallowed(machine: MachineHost) -> None:
    def fail(path: PathLike) -> Any:
        raise OSError(errno.EIO, "I/O error")

    machine.statvfs = fail  # type: ignore[method-assign]
    with pytest.raises(OSError):
        check_host(machine)


# -- the command ----------------------------------------------------------------------------------------


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    (tmp_path / "desk").mkdir()
    return Desk(tmp_path / "desk")


def run(desk: Desk, host: Host, *words: str) -> tuple[int, dict[str, Any]]:
    ran = desk.run(host, "preflight", "--trust", str(desk.key), "--output", "json", *words)
    return ran.status, json.loads(ran.text)


def test_the_command_checks_host_and_bundle_and_writes_nothing(desk: Desk, root: Path, machine: MachineHost) -> None:
    bundle = desk.bundle(node_publisher().build())
    before = snapshot(root)
    status, document = run(desk, machine, "--bundle", str(bundle))
    assert (status, document["fit"], document["bundle"]) == (0, True, "demo 1.0.0")
    assert document["kind"] == "Preflight"
    assert snapshot(root) == before
    assert machine.commands == []


def _spoil(digest: int) -> Callable[[], Any]:
    def make() -> Any:
        bundle = node_publisher().build()
        bundle.spoil(list(bundle.blobs)[digest], 99)
        return bundle

    return make


def _unsigned() -> Any:
    bundle = node_publisher().build()
    bundle.signatures = {}
    return bundle


@pytest.mark.parametrize(
    ("make", "check"),
    [(_spoil(0), "digests"), (_spoil(1), "digests"), (_spoil(2), "digests"), (_spoil(-1), "digests"),
     (_unsigned, "signature")],
    ids=["manifest", "description", "layer", "image", "unsigned"],
)  # fmt: skip
def test_a_bad_bundle_is_a_finding_beside_those_of_the_host(
    desk: Desk, machine: MachineHost, make: Callable[[], Any], check: str
) -> None:
    machine.release = "4.4.0"
    status, document = run(desk, machine, "--bundle", str(desk.bundle(make())))
    assert status == 10
    assert {finding["check"] for finding in document["findings"]} == {"kernel", check}
    status, document = run(desk, machine, "--bundle", str(desk.bundle(make())), "--skip-check", "kernel")
    assert {finding["check"] for finding in document["findings"]} == {check}


def test_a_bundle_for_another_architecture_is_a_finding(desk: Desk, machine: MachineHost) -> None:
    bundle = desk.bundle(node_publisher().build())
    machine.machine = lambda: "aarch64" if Host().machine() != "aarch64" else "x86_64"  # type: ignore[method-assign]
    status, document = run(desk, machine, "--bundle", str(bundle))
    assert status == 10
    assert [finding["check"] for finding in document["findings"]] == ["architecture"]


def test_a_bundle_that_makes_no_node_is_a_finding(desk: Desk, machine: MachineHost) -> None:
    bundle = node_publisher(parts=[Part("tool", [directory("bin"), Entry("bin/tool", b"x")])]).build()
    status, document = run(desk, machine, "--bundle", str(desk.bundle(bundle)))
    assert status == 10
    (finding,) = document["findings"]
    assert (finding["check"], "no component called containerd" in finding["message"]) == ("components", True)
    assert document["bundle"] == "no bundle"


def test_without_a_bundle_the_host_alone_is_checked(desk: Desk, machine: MachineHost) -> None:
    status, document = run(desk, machine)
    assert (status, document["bundle"]) == (0, "no bundle")


def test_the_names_of_the_checks_are_in_the_help() -> None:
    parser = next(
        action.choices["preflight"] for action in build_parser("preflight")._actions if isinstance(action.choices, dict)
    )
    text = parser.format_help()
    assert all(name in text for name in preflight.CHECKS)
