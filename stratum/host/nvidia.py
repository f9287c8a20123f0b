"""NVIDIA GPUs: what of them is on the host, and what containerd needs for them (seed 000, GPUSetup, GPUHostPaths).

A grant needs three things, which come from three packages: devices of a loaded driver, the driver's libraries, and the
NVIDIA Container Toolkit. Places are those that the toolkit itself looks at (nvidia-container-toolkit,
internal/lookup/library.go, and its CDI documentation). Nothing is installed or loaded here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

from stratum.host.finding import REJECT, WARN, Finding
from stratum.system import SEARCH_PATH, Host, HostPath

__all__ = ["CDI_SPEC", "OFF", "REFRESH_UNITS", "RUNTIME", "GpuPlan", "Gpus", "check_mode", "find_gpus", "plan_gpus"]

AUTO, ON, OFF = "auto", "on", "off"
#: Where the toolkit's own service writes its specification: two files with the same devices would be no devices.
CDI_SPEC = HostPath("/run/cdi/nvidia.yaml")
#: The toolkit's service since 1.18, which keeps the specification whether there is a node or not.
REFRESH_UNITS = ("nvidia-cdi-refresh.service", "nvidia-cdi-refresh.path")

_CHECK = "gpu"
_VENDOR = "0x10de"
_DISPLAY = "0x03"  # the PCI base class of display controllers: VGA, 3D (PCI Code and ID Assignment, 1.4)
_LIBRARY_DIRS = tuple(
    HostPath(place)
    for place in (
        "/usr/lib64",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib/x86_64-linux-gnu/nvidia/current",
        "/usr/lib/aarch64-linux-gnu/nvidia/current",
        "/lib64",
        "/lib/x86_64-linux-gnu",
        "/lib/aarch64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu/tegra",
        "/usr/lib/aarch64-linux-gnu/nvidia",
        "/run/opengl-driver/lib",
    )
)
_CUDA = re.compile(r"libcuda\.so\.\d")
_MANAGEMENT = re.compile(r"libnvidia-ml\.so\.\d")
_NODE = re.compile(r"nvidia\d+\Z")
_CONTROL = ("nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools")
_TEGRA_RELEASE = HostPath("/etc/nv_tegra_release")
_TEGRA_FAMILY = HostPath("/sys/devices/soc0/family")
TOOLKIT, RUNTIME = "nvidia-ctk", "nvidia-container-runtime"
_HINT_OFF = "or set gpu.nvidia to off"


@dataclass(frozen=True)
class Gpus:
    """What of NVIDIA's a host has."""

    nodes: tuple[HostPath, ...] = ()  # /dev/nvidia0 …
    control: tuple[HostPath, ...] = ()  # /dev/nvidiactl …
    capabilities: tuple[HostPath, ...] = ()  # of MIG, in /dev/nvidia-caps
    loaded: tuple[str, ...] = ()  # PCI addresses that a loaded driver serves
    idle: tuple[str, ...] = ()  # PCI addresses of display controllers that no driver at all serves
    driver: str = ""  # the release of the driver, where it says so
    tegra: bool = False
    libraries: tuple[HostPath, ...] = ()
    tools: tuple[HostPath, ...] = ()  # nvidia-ctk, nvidia-container-runtime, as far as they are there
    modprobe: Optional[HostPath] = None

    @property
    def devices(self) -> bool:
        """Whether a driver serves a GPU here now. At boot, nodes in /dev come later than the driver."""
        return bool(self.nodes or self.loaded or self.tegra)

    def tool(self, name: str) -> Optional[HostPath]:
        """The path of a tool of the toolkit."""
        return next((path for path in self.tools if path.name == name), None)


@dataclass(frozen=True)
class GpuPlan:
    """What follows: whether GPUs are granted to containers, and with what.

    ``setup`` are the commands before each start of containerd, ``host_paths`` what must be on the host then,
    ``runtime`` the path of the runtime class's program.
    """

    granted: bool = False
    findings: tuple[Finding, ...] = ()
    setup: tuple[tuple[str, ...], ...] = ()
    host_paths: tuple[HostPath, ...] = ()
    runtime: str = ""


def check_mode(mode: str) -> bool:
    """Whether ``mode`` is one of the configuration's ``gpu.nvidia``."""
    return mode in (AUTO, ON, OFF)


# -- looking ----------------------------------------------------------------------------------------------


def _names(host: Host, path: str) -> list[str]:
    try:
        return sorted(host.listdir(path))
    except OSError:
        return []


def _text(host: Host, path: HostPath) -> str:
    try:
        return host.read_text(path).strip()
    except (OSError, ValueError):
        return ""


def _idle_controllers(host: Host) -> tuple[str, ...]:
    """NVIDIA's display controllers that no driver has taken; one in the hands of vfio-pci is for a virtual machine."""
    found = []
    base = HostPath("/sys/bus/pci/devices")
    for name in _names(host, str(base)):
        device = base / name
        ours = _text(host, device / "vendor") == _VENDOR and _text(host, device / "class").startswith(_DISPLAY)
        if ours and not host.lexists(device / "driver"):
            found.append(name)
    return tuple(found)


def _driver_release(host: Host) -> str:
    """The release in /proc/driver/nvidia/version, which both kinds of kernel module write."""
    found = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+){1,2})\b", _text(host, HostPath("/proc/driver/nvidia/version")))
    return found[1] if found else ""


def _libraries(host: Host) -> tuple[HostPath, ...]:
    """The driver's libraries, each file once: /lib is a link to /usr/lib on most hosts."""
    found: dict[str, HostPath] = {}
    for directory in _LIBRARY_DIRS:
        for name in _names(host, str(directory)):
            if _CUDA.match(name) or _MANAGEMENT.match(name):
                found.setdefault(host.real(directory / name, follow=True), directory / name)
    return tuple(found.values())


def _tool(host: Host, name: str) -> Optional[HostPath]:
    """Where a program is, whoever asks: its path goes into a unit of root's, and a user's PATH may name any place."""
    found = (host.which(f"{directory}/{name}") for directory in SEARCH_PATH)
    return next((HostPath(path) for path in found if path), None)


def find_gpus(host: Host) -> Gpus:
    """Look at the host; reads a few directories and starts nothing."""
    names = _names(host, "/dev")
    nodes = sorted((name for name in names if _NODE.match(name)), key=lambda name: int(name[len("nvidia") :]))
    found = Gpus(
        tuple(HostPath("/dev") / name for name in nodes),
        tuple(HostPath("/dev") / name for name in _CONTROL if name in names),
        tuple(HostPath("/dev/nvidia-caps") / name for name in _names(host, "/dev/nvidia-caps")),
        tuple(_names(host, "/proc/driver/nvidia/gpus")),
        _idle_controllers(host),
        _driver_release(host),
        host.exists(_TEGRA_RELEASE) or _text(host, _TEGRA_FAMILY).lower().startswith("tegra"),
    )
    if not found.devices:
        return found  # what is in the directories of libraries, thousands of files, changes nothing
    tools = [path for name in (TOOLKIT, RUNTIME) for path in (_tool(host, name),) if path]
    return replace(
        found,
        libraries=_libraries(host),
        tools=tuple(tools),
        modprobe=_tool(host, "nvidia-modprobe"),
    )


# -- deciding ---------------------------------------------------------------------------------------------


def _missing(gpus: Gpus) -> list[tuple[str, str]]:
    """What a grant lacks besides devices, and what to do about each."""
    lacks = []
    # CUDA's library is not where the management library is on Tegra, which has none of the latter.
    wanted = [("libcuda.so", _CUDA)] + ([] if gpus.tegra else [("libnvidia-ml.so", _MANAGEMENT)])
    for name, pattern in wanted:
        if not any(pattern.match(path.name) for path in gpus.libraries):
            lacks.append((f"the driver's library {name}", "install the driver's libraries for computing"))
    for name in (TOOLKIT, RUNTIME):
        if gpus.tool(name) is None:
            lacks.append((name, "install the NVIDIA Container Toolkit"))
    return lacks


def plan_gpus(host: Host, mode: str) -> GpuPlan:
    """What ``gpu.nvidia`` comes to on this host. With ``off`` nothing is looked at.

    ``on`` rejects a host that cannot; ``auto`` goes on without GPUs there and says why, if there is one at all.
    """
    if mode == OFF:
        return GpuPlan()
    gpus = find_gpus(host)
    demanded = mode == ON
    if not gpus.devices:
        return GpuPlan(findings=tuple(_without_devices(gpus, demanded)))
    lacks = _missing(gpus)
    if lacks:
        what = ", ".join(name for name, _ in lacks)
        advice = "; ".join(dict.fromkeys(hint for _, hint in lacks))
        message = f"there is an NVIDIA GPU ({_shown(gpus)}), and {what} is missing"
        if not demanded:
            message += ": containers get no GPU"
        severity = REJECT if demanded else WARN
        return GpuPlan(findings=(Finding(_CHECK, severity, message, f"{advice}, {_HINT_OFF}"),))
    toolkit, runtime = gpus.tool(TOOLKIT), gpus.tool(RUNTIME)
    assert toolkit is not None and runtime is not None
    return GpuPlan(True, (), _setup(gpus, toolkit), (toolkit, runtime), str(runtime))


def _shown(gpus: Gpus) -> str:
    names = [str(path) for path in gpus.nodes] or list(gpus.loaded) or ["Tegra"]
    return ", ".join(names)


def _without_devices(gpus: Gpus, demanded: bool) -> Sequence[Finding]:
    where = f" (there is one at {', '.join(gpus.idle)} that no driver serves)" if gpus.idle else ""
    if demanded:
        message = f"gpu.nvidia is on, and no NVIDIA driver serves a GPU here{where}"
        return [Finding(_CHECK, REJECT, message, f"install and load NVIDIA's driver, {_HINT_OFF} or to auto")]
    if gpus.idle:
        message = f"the NVIDIA GPU at {', '.join(gpus.idle)} has no driver: containers get no GPU"
        return [Finding(_CHECK, WARN, message, f"install and load NVIDIA's driver, {_HINT_OFF}")]
    return []


def _setup(gpus: Gpus, toolkit: HostPath) -> tuple[tuple[str, ...], ...]:
    """The commands before each start of containerd.

    Where nobody has used a GPU since the boot the nodes in /dev are not there yet: nvidia-modprobe(1) makes them, and
    the toolkit alone makes those that are not a GPU's. Then the specification, which names the libraries by the
    driver's release (NVIDIA Container Toolkit, "Support for Container Device Interface").
    """
    commands: list[tuple[str, ...]] = []
    if not gpus.tegra:
        if gpus.modprobe is not None:
            # Minor numbers count the GPUs. With --unified-memory they are those of that module's nodes.
            count = max(len(gpus.nodes), len(gpus.loaded), 1)
            made = [f"--create-nvidia-device-file={minor}" for minor in range(count)]
            commands.append((str(gpus.modprobe), *made))
            commands.append((str(gpus.modprobe), "--unified-memory", "--create-nvidia-device-file=0"))
        commands.append((str(toolkit), "system", "create-device-nodes", "--control-devices"))
    commands.append((str(toolkit), "cdi", "generate", f"--output={CDI_SPEC}"))
    return tuple(commands)
