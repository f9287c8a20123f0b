"""systemd units of the node stack, rendered from one specification (seed 000, type UnitSpec).

The names are ours, so a unit of the distribution is never touched. ``render_`` makes text and writes nothing.
Every command line refers to programs through the ``current`` link: a flip changes what the units run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

from stratum.system import SEARCH_PATH, HostPath
from stratum.systemd import quote_argument, quote_setting

__all__ = [
    "EVERY_UNIT",
    "SYSTEMD_DIR",
    "UNIT_CONTAINERD",
    "UNIT_KUBELET",
    "UNIT_KUBELET_LAUNCH_CHECK",
    "UNIT_LOCALDNS",
    "UNIT_LOCALDNS_NETWORK",
    "UnitFile",
    "UnitSpec",
    "drop_in_dir",
    "render_units",
    "stack_units",
]

SYSTEMD_DIR = HostPath("/etc/systemd/system")
UNIT_CONTAINERD = "stratum-containerd.service"
UNIT_KUBELET = "stratum-kubelet.service"
UNIT_KUBELET_LAUNCH_CHECK = "stratum-kubelet-launch-check.service"
UNIT_LOCALDNS = "stratum-localdns.service"
# Made and owned by the host's preparation, shared by every mode; the stack only orders after it.
UNIT_LOCALDNS_NETWORK = "stratum-localdns-network.service"
# All that a node can have, in start order.
EVERY_UNIT = (UNIT_LOCALDNS_NETWORK, UNIT_LOCALDNS, UNIT_CONTAINERD, UNIT_KUBELET_LAUNCH_CHECK, UNIT_KUBELET)
CONTAINERD_CONFIG = HostPath("/etc/stratum/containerd/config.toml")
KUBELET_CONFIG = HostPath("/etc/stratum/kubelet/config.yaml")
MARK = "# Written by Stratum; put changes into a drop-in of your own (systemctl edit).\n"

# Exit status of the launch check that says no for good, see render_kubelet_launch_check.
REFUSED = 78  # EX_CONFIG, sysexits.h


# Go programs and the tools that they start read these, in either case.
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_OTHER_PROXIES = ("ALL_PROXY", "FTP_PROXY")


@dataclass(frozen=True)
class UnitSpec:
    """What the unit templates need."""

    bin_dir: HostPath
    containerd_config: HostPath = CONTAINERD_CONFIG
    kubelet: bool = False
    kubelet_config: HostPath = KUBELET_CONFIG
    # Further arguments of the kubelet, and variables of its environment; no secret is among them.
    kubelet_arguments: tuple[str, ...] = ()
    kubelet_environment: tuple[tuple[str, str], ...] = ()
    containerd_environment: tuple[tuple[str, str], ...] = ()
    # A file with the variables of both for a proxy, whose address may hold a password; none without a proxy.
    proxy_file: Optional[HostPath] = None
    # Adds the CoreDNS unit and makes containerd and kubelet depend on it: the path of the supervisor script.
    localdns: str = ""
    # Commands that containerd runs before each start to prepare GPUs; they name driver files by version, so a
    # boot must run them too.
    gpu_setup: tuple[tuple[str, ...], ...] = field(default=())
    # The command of the allocation launch check, a command line for ExecStart=; empty without one.
    launch_check: str = ""


@dataclass(frozen=True)
class UnitFile:
    """A unit file or a drop-in, below the unit directory."""

    path: HostPath
    content: bytes


def stack_units(spec: UnitSpec) -> tuple[str, ...]:
    """The units of the stack in start order."""
    localdns = (UNIT_LOCALDNS,) if spec.localdns else ()
    kubelet = (UNIT_KUBELET,) if spec.kubelet else ()
    return (*localdns, UNIT_CONTAINERD, *kubelet)


def drop_in_dir(unit: str, directory: HostPath = SYSTEMD_DIR) -> HostPath:
    """The drop-in directory of a unit."""
    return directory / f"{unit}.d"


def _render_environment(spec: UnitSpec, variables: Sequence[tuple[str, str]]) -> str:
    """The lines for the environment of a unit, which the manager's own variables for a proxy never reach.

    A proxy in ``system.conf`` (DefaultEnvironment=) or one that somebody gave the manager would take the kubelet's
    probes along. ``systemctl show`` shows ``Environment=`` to everybody, so our own proxy is in a file.
    """
    # Empty counts as not set, and a drop-in of the admin's can still say otherwise, which UnsetEnvironment= forbids.
    names = [word for name in (*PROXY_VARIABLES, *_OTHER_PROXIES) for word in (name, name.lower())]
    lines = ["Environment=" + " ".join(f"{name}=" for name in names)]
    lines += [f"Environment={quote_setting(f'{name}={value}')}" for name, value in variables]
    if spec.proxy_file:
        lines.append(f"EnvironmentFile={spec.proxy_file}")
    return "".join(f"{line}\n" for line in lines)


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
{_render_environment(spec, spec.containerd_environment)}""".encode()


def render_kubelet(spec: UnitSpec) -> bytes:
    """The kubelet unit: after, and wanting, our containerd, never the distribution's.

    It wants containerd and does not require it: a containerd that crashed takes neither the kubelet nor pods along.
    """
    config = f"--config={spec.kubelet_config}"
    command = " ".join(map(quote_argument, (f"{spec.bin_dir}/kubelet", config, *spec.kubelet_arguments)))
    return f"""{MARK}[Unit]
Description=kubelet of the Stratum node
Documentation=https://kubernetes.io/docs/reference/command-line-tools-reference/kubelet/
After={UNIT_CONTAINERD} network-online.target
Wants={UNIT_CONTAINERD} network-online.target
RequiresMountsFor=/opt/stratum /var/lib/stratum /var/lib/kubelet
StartLimitIntervalSec=0

[Service]
ExecStart={command}
Delegate=yes
KillMode=process
Restart=always
RestartSec=5
OOMScoreAdjust=-999
{_render_environment(spec, spec.kubelet_environment)}""".encode()


def render_localdns(supervisor: str) -> bytes:
    """The CoreDNS unit: it runs the supervisor script of the version under a user of its own.

    That user may bind to port 53 and sees a system that it cannot write to. CoreDNS asks for the interfaces when it
    binds (plugin bind), so netlink is among the address families. No setting is newer than systemd 239.
    """
    return f"""{MARK}[Unit]
Description=node-local DNS of the Stratum node (CoreDNS)
After={UNIT_LOCALDNS_NETWORK} network.target
Requires={UNIT_LOCALDNS_NETWORK}
RequiresMountsFor=/opt/stratum
StartLimitIntervalSec=0

[Service]
ExecStart={quote_argument(supervisor)}
DynamicUser=yes
AmbientCapabilities=CAP_NET_BIND_SERVICE
CapabilityBoundingSet=CAP_NET_BIND_SERVICE
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native
TimeoutStopSec=15
Restart=always
RestartSec=5
OOMScoreAdjust=-900
""".encode()


def render_kubelet_launch_check(command: str) -> bytes:
    """The oneshot that runs the allocation launch check before every kubelet start.

    It is a unit of its own, not an ExecStartPre: ``RestartPreventExitStatus=`` holds for a unit's main process
    only, and a final refusal must fail the kubelet's start rather than loop under its ``Restart=always``. No
    [Install] section: only the kubelet pulls it in.

    Any other failure fails that start of the kubelet too, and the check is tried again by itself; once it agrees, it
    starts the kubelet, which by then waits for nothing any more. (``RestartMode=direct`` would keep the kubelet's
    start waiting instead, and is new in systemd 254.) Whoever stops the kubelet stops the check with it.
    """
    return f"""{MARK}[Unit]
Description=launch check of the Stratum node's kubelet
PartOf={UNIT_KUBELET}
StartLimitIntervalSec=0

[Service]
Type=oneshot
ExecStart={command}
ExecStartPost=systemctl --no-block start {UNIT_KUBELET}
TimeoutStartSec=120
Restart=on-failure
RestartSec=5
RestartPreventExitStatus={REFUSED}
""".encode()


def render_path_drop_in(bin_dir: HostPath) -> bytes:
    """The drop-in that puts the version's programs first on PATH.

    containerd finds its shim and runc there, the kubelet its tools, and the host's PATH stays as it is.
    """
    return f"{MARK}[Service]\nEnvironment=PATH={bin_dir}:{':'.join(SEARCH_PATH)}\n".encode()


def render_localdns_drop_in() -> bytes:
    """The drop-in that orders a node unit after LocalDNS and makes it depend on it."""
    return f"{MARK}[Unit]\nAfter={UNIT_LOCALDNS}\nRequires={UNIT_LOCALDNS}\n".encode()


def render_gpu_setup_drop_in(commands: Sequence[Sequence[str]]) -> bytes:
    """The containerd drop-in that runs each command before containerd starts.

    A failure fails the start, and ``Restart=`` tries again.
    """
    lines = "".join(f"ExecStartPre={' '.join(quote_argument(word) for word in command)}\n" for command in commands)
    return f"{MARK}[Service]\n{lines}".encode()


def render_kubelet_launch_check_drop_in() -> bytes:
    """The kubelet drop-in that makes every start of it wait for, and depend on, the launch check."""
    return f"{MARK}[Unit]\nAfter={UNIT_KUBELET_LAUNCH_CHECK}\nRequires={UNIT_KUBELET_LAUNCH_CHECK}\n".encode()


def render_units(spec: UnitSpec, directory: HostPath = SYSTEMD_DIR) -> list[UnitFile]:
    """Every file of the stack's units, drop-ins included."""
    content = {UNIT_CONTAINERD: render_containerd(spec)}
    if spec.kubelet:
        content[UNIT_KUBELET] = render_kubelet(spec)
    if spec.localdns:
        content[UNIT_LOCALDNS] = render_localdns(spec.localdns)
    if spec.launch_check and spec.kubelet:
        content[UNIT_KUBELET_LAUNCH_CHECK] = render_kubelet_launch_check(spec.launch_check)
    files = [UnitFile(directory / unit, text) for unit, text in content.items()]
    files += [
        UnitFile(drop_in_dir(unit, directory) / "10-path.conf", render_path_drop_in(spec.bin_dir)) for unit in content
    ]
    nodes = [unit for unit in (UNIT_CONTAINERD, UNIT_KUBELET) if unit in content]
    if spec.localdns:
        files += [
            UnitFile(drop_in_dir(unit, directory) / "20-localdns.conf", render_localdns_drop_in()) for unit in nodes
        ]
    if spec.gpu_setup:
        path = drop_in_dir(UNIT_CONTAINERD, directory) / "30-gpu-setup.conf"
        files.append(UnitFile(path, render_gpu_setup_drop_in(spec.gpu_setup)))
    if UNIT_KUBELET_LAUNCH_CHECK in content:
        path = drop_in_dir(UNIT_KUBELET, directory) / "40-launch-check.conf"
        files.append(UnitFile(path, render_kubelet_launch_check_drop_in()))
    return files
