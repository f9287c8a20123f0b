"""NVIDIA GPUs: trees as real hosts list them, and what follows from each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from stratum.host.finding import REJECT, WARN
from stratum.host.nvidia import CDI_SPEC, Gpus, check_mode, find_gpus, plan_gpus
from stratum.node.containerd import CDI_SPEC_DIRS
from stratum.node.units import UnitSpec, render_units
from stratum.system import Host, HostPath
from tests.unit.hosting import link, put

VERSION = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31 09:35:42 UTC 2024\n"
    "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
)
OPEN_VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (root@build)\n"
    "GCC version:  gcc version 11.5.0 20240719 (Red Hat 11.5.0-2) (GCC)\n"
)
TOOLKIT = ("/usr/bin/nvidia-ctk", "/usr/bin/nvidia-container-runtime")


def program(host: Host, *paths: str) -> None:
    for path in paths:
        put(host, path, "#!/bin/sh\n")
        Path(host.root + path).chmod(0o755)


def driver(host: Host, gpus: int = 1, version: str = VERSION, *, nodes: bool = True) -> None:
    """A loaded driver that serves GPUs."""
    put(host, "/proc/driver/nvidia/version", version)
    for number in range(gpus):
        address = f"0000:{number + 1:02x}:00.0"
        put(host, f"/proc/driver/nvidia/gpus/{address}/information", "Model: NVIDIA L4\n")
        controller(host, address, driver_name="nvidia")
        if nodes:
            put(host, f"/dev/nvidia{number}")
    if nodes:
        for name in ("nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools"):
            put(host, f"/dev/{name}")


def controller(
    host: Host, address: str, *, vendor: str = "0x10de", kind: str = "0x030200", driver_name: str = ""
) -> None:
    base = f"/sys/bus/pci/devices/{address}"
    put(host, f"{base}/vendor", f"{vendor}\n")
    put(host, f"{base}/class", f"{kind}\n")
    if driver_name:
        link(host, f"{base}/driver", f"../../../../bus/pci/drivers/{driver_name}")


def libraries(host: Host, directory: str, release: str, names: Iterable[str] = ("libcuda", "libnvidia-ml")) -> None:
    for name in names:
        put(host, f"{directory}/{name}.so.{release}")
        link(host, f"{directory}/{name}.so.1", f"{name}.so.{release}")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(str(tmp_path))
    host.environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    for name in ("null", "tty", "nvme0", "nvram"):
        put(host, f"/dev/{name}")
    controller(host, "0000:00:02.0", vendor="0x8086", kind="0x030000", driver_name="i915")
    return host


def ubuntu(host: Host, gpus: int = 2) -> None:
    """Ubuntu 22.04 with the server driver: libraries in the multiarch directory, /lib a link to usr/lib."""
    driver(host, gpus)
    link(host, "/lib", "usr/lib")
    libraries(host, "/usr/lib/x86_64-linux-gnu", "550.90.07")
    program(host, *TOOLKIT, "/usr/bin/nvidia-modprobe")


def red_hat(host: Host) -> None:
    """RHEL 9 with the open kernel module: libraries in lib64."""
    driver(host, 1, OPEN_VERSION)
    libraries(host, "/usr/lib64", "570.86.15")
    link(host, "/lib64", "usr/lib64")
    program(host, *TOOLKIT)


def test_a_host_of_ubuntus_is_granted_its_gpus(host: Host) -> None:
    ubuntu(host)
    found = find_gpus(host)
    assert [str(path) for path in found.nodes] == ["/dev/nvidia0", "/dev/nvidia1"]
    assert [path.name for path in found.control] == ["nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools"]
    assert found.driver == "550.90.07"
    assert {path.parent for path in found.libraries} == {HostPath("/usr/lib/x86_64-linux-gnu")}, "each file once"
    plan = plan_gpus(host, "auto")
    assert plan.granted
    assert plan.findings == ()
    assert plan.runtime == "/usr/bin/nvidia-container-runtime"
    assert [str(path) for path in plan.host_paths] == list(TOOLKIT)
    modprobe = "/usr/bin/nvidia-modprobe"
    assert plan.setup == (
        (modprobe, "--create-nvidia-device-file=0", "--create-nvidia-device-file=1"),
        (modprobe, "--unified-memory", "--create-nvidia-device-file=0"),
        ("/usr/bin/nvidia-ctk", "system", "create-device-nodes", "--control-devices"),
        ("/usr/bin/nvidia-ctk", "cdi", "generate", "--output=/run/cdi/nvidia.yaml"),
    )
    assert plan_gpus(host, "on") == plan


def test_a_host_of_red_hats_is_granted_its_gpu_without_nvidia_modprobe(host: Host) -> None:
    red_hat(host)
    assert find_gpus(host).driver == "570.86.15"
    plan = plan_gpus(host, "on")
    assert plan.granted
    assert [command[0] for command in plan.setup] == ["/usr/bin/nvidia-ctk"] * 2


def test_where_nobody_has_used_a_gpu_since_the_boot_the_loaded_driver_counts(host: Host) -> None:
    driver(host, 3, nodes=False)
    libraries(host, "/usr/lib/x86_64-linux-gnu", "550.90.07")
    program(host, *TOOLKIT, "/usr/bin/nvidia-modprobe")
    plan = plan_gpus(host, "auto")
    assert plan.granted
    assert plan.setup[0][1:] == tuple(f"--create-nvidia-device-file={number}" for number in range(3))


def test_gpus_are_counted_by_number_and_nothing_else_is_taken_for_one(host: Host) -> None:
    ubuntu(host, 11)
    put(host, "/dev/nvidia-nvswitchctl")
    put(host, "/dev/nvidiax")
    assert [path.name for path in find_gpus(host).nodes] == [f"nvidia{number}" for number in range(11)]


def test_capabilities_of_mig_are_found(host: Host) -> None:
    ubuntu(host, 1)
    put(host, "/dev/nvidia-caps/nvidia-cap1")
    put(host, "/dev/nvidia-caps/nvidia-cap2")
    assert [path.name for path in find_gpus(host).capabilities] == ["nvidia-cap1", "nvidia-cap2"]
    assert plan_gpus(host, "auto").granted


@pytest.mark.parametrize(
    ("tools", "lacks"),
    [
        ((), "nvidia-ctk, nvidia-container-runtime"),
        (TOOLKIT[:1], "nvidia-container-runtime"),
        (TOOLKIT[1:], "nvidia-ctk"),
    ],
)
def test_a_driver_without_the_toolkit_is_warned_of_by_auto_and_rejected_by_on(
    host: Host, tools: tuple[str, ...], lacks: str
) -> None:
    driver(host)
    libraries(host, "/usr/lib64", "550.90.07")
    program(host, *tools)
    plan = plan_gpus(host, "auto")
    (finding,) = plan.findings
    assert (plan.granted, finding.severity) == (False, WARN)
    assert f" and {lacks} is missing" in finding.message
    assert "/dev/nvidia0" in finding.message
    assert "NVIDIA Container Toolkit" in finding.hint
    assert (plan.setup, plan.host_paths, plan.runtime) == ((), (), ""), "nothing is demanded of it at a start"
    assert [item.severity for item in plan_gpus(host, "on").findings] == [REJECT]


def test_a_toolkit_without_a_driver_is_nothing_for_auto_and_rejected_by_on(host: Host) -> None:
    program(host, *TOOLKIT)
    assert plan_gpus(host, "auto").findings == ()
    (finding,) = plan_gpus(host, "on").findings
    assert finding.severity == REJECT
    assert "no NVIDIA driver serves a GPU here" in finding.message


def test_a_driver_without_its_libraries_for_computing_is_named(host: Host) -> None:
    driver(host)
    program(host, *TOOLKIT)
    libraries(host, "/usr/lib64", "550.90.07", ("libnvidia-ml",))
    (finding,) = plan_gpus(host, "auto").findings
    assert "libcuda.so" in finding.message
    assert "libnvidia-ml" not in finding.message


def test_a_host_without_a_gpu_has_nothing_to_say_unless_one_is_demanded(host: Host) -> None:
    assert find_gpus(host) == Gpus()
    assert plan_gpus(host, "auto").findings == ()
    assert not plan_gpus(host, "auto").granted
    assert [item.severity for item in plan_gpus(host, "on").findings] == [REJECT]


def test_a_gpu_that_no_driver_serves_is_warned_of_and_one_for_a_virtual_machine_is_not(host: Host) -> None:
    controller(host, "0000:01:00.0", driver_name="vfio-pci")
    controller(host, "0000:01:00.1", kind="0x040300")  # its sound device
    assert plan_gpus(host, "auto").findings == ()
    controller(host, "0000:02:00.0")
    (finding,) = plan_gpus(host, "auto").findings
    assert finding.severity == WARN
    assert "0000:02:00.0" in finding.message
    assert "0000:02:00.0" in plan_gpus(host, "on").findings[0].message


@pytest.mark.parametrize("place", ["release", "family"])
def test_tegra_has_no_pci_device_and_no_management_library(host: Host, place: str) -> None:
    if place == "release":
        put(host, "/etc/nv_tegra_release", "# R36 (release), REVISION: 3.0\n")
    else:
        put(host, "/sys/devices/soc0/family", "Tegra\n")
    libraries(host, "/usr/lib/aarch64-linux-gnu/tegra", "1.1", ("libcuda",))
    program(host, *TOOLKIT)
    plan = plan_gpus(host, "auto")
    assert plan.granted
    assert plan.setup == (("/usr/bin/nvidia-ctk", "cdi", "generate", f"--output={CDI_SPEC}"),)


def test_wsl_has_no_device_that_is_ours_to_grant(host: Host) -> None:
    put(host, "/dev/dxg")
    libraries(host, "/usr/lib/wsl/lib", "1.1")
    program(host, *TOOLKIT)
    assert not plan_gpus(host, "auto").granted


def test_a_program_from_a_users_path_gets_into_no_unit(host: Host) -> None:
    driver(host)
    libraries(host, "/usr/lib/x86_64-linux-gnu", "550.54.15")
    host.environ = {"PATH": "/home/user/bin"}
    program(host, *(f"/home/user/bin/{name}" for name in ("nvidia-ctk", "nvidia-container-runtime", "nvidia-modprobe")))
    assert not plan_gpus(host, "auto").granted
    program(host, *TOOLKIT)
    plan = plan_gpus(host, "auto")
    assert plan.granted and "/home/user" not in f"{plan.setup} {plan.runtime}"


def test_off_looks_at_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    ubuntu(host)

    def refuse(*_: object) -> None:
        raise AssertionError("it was looked at")

    for name in ("listdir", "exists", "which", "read_text"):
        monkeypatch.setattr(Host, name, refuse)
    plan = plan_gpus(host, "off")
    assert (plan.granted, plan.findings, plan.setup, plan.host_paths) == (False, (), (), ())


@pytest.mark.parametrize("text", ["", "\n", "NVRM version:", "NVRM version: x\n", b"\xff\xfe"])
def test_a_version_that_says_nothing_is_no_release(host: Host, text: str) -> None:
    ubuntu(host)
    put(host, "/proc/driver/nvidia/version", text)
    assert find_gpus(host).driver == ""
    assert plan_gpus(host, "auto").granted


def test_the_three_words_of_the_configuration_are_known() -> None:
    assert [word for word in ("auto", "on", "off", "", "yes", "nvidia") if check_mode(word)] == ["auto", "on", "off"]


def test_the_specification_is_where_containerd_looks(host: Host) -> None:
    """/var/run is a link to /run on every host with systemd."""
    assert str(CDI_SPEC.parent) in [path.replace("/var/run", "/run") for path in CDI_SPEC_DIRS]


def test_the_commands_become_containerds_drop_in(host: Host) -> None:
    ubuntu(host)
    spec = UnitSpec(HostPath("/opt/stratum/node/current/bin"), gpu_setup=plan_gpus(host, "auto").setup)
    (drop_in,) = [item for item in render_units(spec) if item.path.name == "30-gpu-setup.conf"]
    lines = [line for line in drop_in.content.decode().splitlines() if line.startswith("ExecStartPre=")]
    assert lines == [f"ExecStartPre={' '.join(command)}" for command in spec.gpu_setup]
    assert not any(line.startswith("ExecStartPre=-") for line in lines), "a failure fails the start"
