"""The platform floor: cgroup v2 and the kernel's version."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import pytest

from stratum.host.finding import REJECT, WARN
from stratum.host.floor import check_cgroup, check_kernel, kernel_version, parse_kernel_release
from tests.unit.hosting import TreeMachine, put

CGROUP2 = "34 24 0:29 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
TMPFS = "32 24 0:27 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:9 - tmpfs tmpfs ro,mode=755\n"
UNIFIED = "33 32 0:28 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw,nsdelegate\n"
MEMORY = "38 32 0:33 / /sys/fs/cgroup/memory rw,nosuid shared:16 - cgroup cgroup rw,memory\n"
ROOT = "24 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n"


def host_with(tmp_path: Path, mountinfo: str = "", release: str = "6.1.0-18-amd64") -> TreeMachine:
    host = TreeMachine(str(tmp_path), release=release)
    if mountinfo:
        put(host, "/proc/self/mountinfo", mountinfo)
    return host


def test_cgroup_v2_at_its_place_is_fine(tmp_path: Path) -> None:
    assert check_cgroup(host_with(tmp_path, ROOT + CGROUP2)) == []


def test_version_1_controllers_on_a_tmpfs_are_refused_and_the_kubelet_is_named(tmp_path: Path) -> None:
    (finding,) = check_cgroup(host_with(tmp_path, ROOT + TMPFS + MEMORY), kubelet="v1.35.2")
    assert (finding.check, finding.severity) == ("cgroup-v2", REJECT)
    assert "its type is tmpfs" in finding.message
    assert "kubelet 1.35.2" in finding.message
    assert "hybrid" not in finding.message


def test_a_hybrid_layout_counts_as_version_1(tmp_path: Path) -> None:
    (finding,) = check_cgroup(host_with(tmp_path, ROOT + TMPFS + UNIFIED + MEMORY))
    assert finding.severity == REJECT
    assert "/sys/fs/cgroup/unified is the hybrid layout" in finding.message


def test_only_the_topmost_mount_at_the_place_counts(tmp_path: Path) -> None:
    assert check_cgroup(host_with(tmp_path / "a", ROOT + TMPFS + CGROUP2)) == []
    assert check_cgroup(host_with(tmp_path / "b", ROOT + CGROUP2 + TMPFS)) != []


def test_a_host_without_a_mount_there_is_refused(tmp_path: Path) -> None:
    (finding,) = check_cgroup(host_with(tmp_path, ROOT))
    assert "nothing is mounted there" in finding.message


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("4.19.57", (4, 19, 57)),
        ("3.10.0-1160.114.2.el7.x86_64", (3, 10, 0)),  # CentOS 7
        ("4.18.0-553.16.1.el8_10.x86_64", (4, 18, 0)),  # RHEL 8
        ("5.14.0-427.13.1.el9_4.aarch64+64k", (5, 14, 0)),  # RHEL 9
        ("6.12.0-55.9.1.el10_0.x86_64", (6, 12, 0)),  # RHEL 10
        ("5.15.0-200.131.27.el9uek.x86_64", (5, 15, 0)),  # Oracle Linux
        ("6.8.5-301.fc40.x86_64", (6, 8, 5)),  # Fedora
        ("4.19.0-27-amd64", (4, 19, 0)),  # Debian 10
        ("6.1.0-18-cloud-arm64", (6, 1, 0)),  # Debian 12
        ("6.12.9+bpo-amd64", (6, 12, 9)),  # Debian backports
        ("6.10-trunk-amd64", (6, 10, 0)),  # Debian experimental
        ("5.15.0-1051-azure", (5, 15, 0)),  # Ubuntu
        ("5.4.0-150-generic", (5, 4, 0)),
        ("6.1.0-rpi7-rpi-v8", (6, 1, 0)),  # Raspberry Pi OS
        ("5.10.103-v7l+", (5, 10, 103)),
        ("5.10.209-198.812.amzn2.x86_64", (5, 10, 209)),  # Amazon Linux 2
        ("6.1.72-96.166.amzn2023.x86_64", (6, 1, 72)),
        ("5.3.18-150300.59.93-default", (5, 3, 18)),  # SLES 15
        ("6.4.0-150600.21-default", (6, 4, 0)),
        ("6.7.4-arch1-1", (6, 7, 4)),  # Arch
        ("6.6.14-0-lts", (6, 6, 14)),  # Alpine
        ("6.1.77-gentoo-dist", (6, 1, 77)),
        ("6.6.52_1", (6, 6, 52)),  # Void
        ("6.6.32-nixos", (6, 6, 32)),
        ("6.1.73-flatcar", (6, 1, 73)),
        ("5.15.106+", (5, 15, 106)),  # Container-Optimized OS
        ("6.1.82-talos", (6, 1, 82)),
        ("5.15.133.1-microsoft-standard-WSL2", (5, 15, 133)),
        ("5.19.0-43.1.ph5-esx", (5, 19, 0)),  # Photon
        ("6.8.0-rc3-next-20240207", (6, 8, 0)),
        ("6.1-rc3", (6, 1, 0)),
        ("10.0.0", (10, 0, 0)),
        ("4.9.337-tegra", (4, 9, 337)),
        ("", None),
        ("linux", None),
        ("6", None),
        ("v6.1.0", None),
        ("\u0666.\u0661", None),
    ],
)
def test_the_release_strings_of_distributions_are_read(release: str, version: Optional[tuple[int, int, int]]) -> None:
    assert parse_kernel_release(release) == version


@pytest.mark.parametrize(
    ("release", "severity"),
    [
        ("4.19.56", REJECT),
        ("4.18.0-553.el8_10.x86_64", REJECT),
        ("4.9.337-tegra", REJECT),
        ("4.19.57", WARN),
        ("5.4.0-150-generic", WARN),
        ("5.9.16", WARN),
        ("5.10.0-28-amd64", None),
        ("5.10.0", None),
        ("10.0.0", None),
        ("made-at-home", WARN),
    ],
)
def test_old_kernels_are_refused_and_ageing_ones_warned_about(
    tmp_path: Path, release: str, severity: Optional[str]
) -> None:
    findings = check_kernel(host_with(tmp_path, release=release))
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert all(release in finding.message for finding in findings)


DEBIAN_10 = (
    "Linux version 4.19.0-27-amd64 (debian-kernel@lists.debian.org) (gcc version 8.3.0 (Debian 8.3.0-6)) "
    "#1 SMP Debian 4.19.316-1 (2024-06-25)\n"
)


def test_debian_says_the_stable_release_beside_its_release_string(tmp_path: Path) -> None:
    host = host_with(tmp_path, release="4.19.0-27-amd64")
    put(host, "/proc/version", DEBIAN_10)
    assert kernel_version(host) == (4, 19, 316)
    (finding,) = check_kernel(host)
    assert finding.severity == WARN
    assert "4.19.0-27-amd64 (4.19.316)" in finding.message


def test_the_compiler_of_a_kernel_is_not_its_version(tmp_path: Path) -> None:
    host = host_with(tmp_path, release="4.19.0-custom")
    put(host, "/proc/version", "Linux version 4.19.0-custom (me@here) (gcc (Debian 4.19.99-1) 12) #1 SMP 2024\n")
    assert kernel_version(host) == (4, 19, 0)


def test_another_kernels_version_is_not_believed(tmp_path: Path) -> None:
    # In a container the text may be old while uname(2) is the machine's.
    host = host_with(tmp_path, release="6.1.0-18-amd64")
    put(host, "/proc/version", DEBIAN_10)
    assert kernel_version(host) == (6, 1, 0)


def test_ubuntu_says_the_stable_release_in_its_signature(tmp_path: Path) -> None:
    host = host_with(tmp_path, release="4.19.0-13-generic")
    put(host, "/proc/version_signature", "Ubuntu 4.19.0-13.14-generic 4.19.20\n")
    assert kernel_version(host) == (4, 19, 20)
    assert check_kernel(host)[0].severity == REJECT
