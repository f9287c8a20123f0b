"""systemd units of the node stack, rendered from one specification (seed 000, type UnitSpec).

The names are ours, so a unit of the distribution is never touched. ``render_`` makes text and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from stratum.system import SEARCH_PATH, HostPath

__all__ = ["SYSTEMD_DIR", "UNIT_CONTAINERD", "UnitFile", "UnitSpec", "drop_in_dir", "render_units"]

SYSTEMD_DIR = HostPath("/etc/systemd/system")
UNIT_CONTAINERD = "stratum-containerd.service"
MARK = "# Written by Stratum; put changes into a drop-in of your own (systemctl edit).\n"


@dataclass(frozen=True)
class UnitSpec:
    """What the unit templates need."""

    bin_dir: HostPath
    containerd_config: HostPath


@dataclass(frozen=True)
class UnitFile:
    """A unit file or a drop-in, below the unit directory."""

    path: HostPath
    content: bytes


def drop_in_dir(unit: str, directory: HostPath = SYSTEMD_DIR) -> HostPath:
    """The drop-in directory of a unit."""
    return directory / f"{unit}.d"


def render_containerd(spec: UnitSpec) -> bytes:
    """The containerd unit, after containerd.service of containerd's own repository.

    ``KillMode=process``: a restart of containerd leaves the containers to their shims.
    """
    return f"""{MARK}[Unit]
Description=containerd of the Stratum node
Documentation=https://containerd.io
After=network.target local-fs.target dbus.service
RequiresMountsFor=/opt/stratum /var/lib/stratum

[Service]
Type=notify
ExecStartPre=-/sbin/modprobe overlay
ExecStart={spec.bin_dir}/containerd --config {spec.containerd_config}
Delegate=yes
KillMode=process
Restart=always
RestartSec=5
LimitNPROC=infinity
LimitCORE=infinity
TasksMax=infinity
OOMScoreAdjust=-999
TimeoutStartSec=120
""".encode()


def render_path_drop_in(bin_dir: HostPath) -> bytes:
    """The drop-in that puts the version's programs first on PATH.

    containerd finds its shim and runc there and the host's PATH stays as it is.
    """
    return f"{MARK}[Service]\nEnvironment=PATH={bin_dir}:{':'.join(SEARCH_PATH)}\n".encode()


def render_units(spec: UnitSpec, directory: HostPath = SYSTEMD_DIR) -> list[UnitFile]:
    """Every file of the stack's units, drop-ins included."""
    return [
        UnitFile(directory / UNIT_CONTAINERD, render_containerd(spec)),
        UnitFile(drop_in_dir(UNIT_CONTAINERD, directory) / "10-path.conf", render_path_drop_in(spec.bin_dir)),
    ]
