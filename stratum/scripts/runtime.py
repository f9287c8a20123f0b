"""What containerd is given on this host: its sandbox image, GPUs and registries, and what there is to say of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Optional

from stratum.errors import StratumError
from stratum.host import nvidia
from stratum.host.finding import WARN, Finding
from stratum.host.preflight import UNIT_DIRS
from stratum.node import containerd, registries
from stratum.node.cni import HOST_BIN_DIR
from stratum.node.containerd import ContainerdOptions, Login
from stratum.node.settings import Settings
from stratum.node.stackspec import is_kubernetes_node
from stratum.node.units import UNIT_CONTAINERD, UnitSpec, drop_in_dir, render_units
from stratum.node.versions import VersionRecord
from stratum.scripts import images
from stratum.steps import RELOAD_SYSTEMD, Action, RemoveDirectory, RemoveFile, Work, plan_file
from stratum.system import Host

__all__ = ["check_plugins", "check_runtime", "gpu_setup", "plan_cdi_removal", "plan_gpu_refresh", "plan_runtime"]

_GPU_DROP_IN = drop_in_dir(UNIT_CONTAINERD) / "30-gpu-setup.conf"


def _release(record: VersionRecord) -> str:
    return record.component_version("containerd") or ""


def gpu_setup(host: Host, settings: Settings) -> tuple[tuple[str, ...], ...]:
    """The commands that containerd's unit runs before each start; none where no GPU is granted."""
    return nvidia.plan_gpus(host, settings.spec.gpu.nvidia).setup


def plan_gpu_refresh(work: Work, spec: UnitSpec) -> list[Action]:
    """Before a start: containerd's drop-in for the GPUs and tools that are there now, on a node that was granted some.

    Seed 000, BeforeStart. Without any now it stays: a driver may come later in the boot than we do, and systemd tries
    its commands again until then. ``up`` is what takes it away.
    """
    if not spec.gpu_setup or not work.receipt.owns(_GPU_DROP_IN):
        return []
    actions = [
        action
        for file in render_units(spec)
        if file.path == _GPU_DROP_IN
        for action in plan_file(work, file.path, file.content)
    ]
    return [*actions, RELOAD_SYSTEMD] if actions else []


def _runtime_program(work: Work, mode: str, *, starting: bool) -> str:
    """The program of the runtime class; empty without GPUs.

    When a node is ``starting`` that was granted some, they count as there: the driver may come later than we do.
    """
    plan = nvidia.plan_gpus(work.host, mode)
    if starting and not plan.granted and mode != nvidia.OFF and work.receipt.get(_GPU_DROP_IN) is not None:
        return work.host.which(nvidia.RUNTIME) or ""
    return plan.runtime


def check_runtime(host: Host, record: VersionRecord, settings: Settings) -> list[Finding]:
    """Findings before anything is written. Raises :class:`BundleError` for a bundle with two sandbox images."""
    findings = [*images.check_sandbox(record), *nvidia.plan_gpus(host, settings.spec.gpu.nvidia).findings]
    if _release(record):
        findings += [
            Finding(
                "containerd-fragment",
                WARN,
                f"{path}: has settings of CRI, which containerd {_release(record)} takes in place of all of Stratum's",
                f"put into it all that {containerd.CONFIG_PATH} has for CRI, or take these settings out of it",
            )
            for path in containerd.overriding_fragments(host, _release(record))
        ]
    return findings


def check_plugins(host: Host, record: VersionRecord, plugins: Sequence[str]) -> list[Finding]:
    """CRI runs the plugin ``loopback`` for each pod (containerd, ``use_internal_loopback`` is off in all releases).

    A cluster's network may bring it along, so that its absence is no reason to refuse.
    """
    if not is_kubernetes_node(record) or "loopback" in plugins or host.exists(HOST_BIN_DIR / "loopback"):
        return []
    return [
        Finding(
            "cni-loopback",
            WARN,
            f"the bundle has a kubelet and no CNI plugin called loopback, and neither has {HOST_BIN_DIR}: "
            "pods with a network of their own do not start without it",
            "add the CNI plugins to the bundle's definition",
        )
    ]


def plan_runtime(
    work: Work, record: VersionRecord, settings: Settings, warn: Optional[Callable[[str], object]] = None
) -> list[Action]:
    """containerd's configuration and its registries.

    A file that the configuration names and that is gone is an error; with ``warn``, at a start and on the way back to
    a version that ran, it is said and the registries stay as they are. Raises :class:`StratumError`.
    """
    program = _runtime_program(work, settings.spec.gpu.nvidia, starting=warn is not None)
    spec = settings.spec.containerd
    logins: tuple[Login, ...] = ()
    actions: list[Action] = []
    try:
        logins = registries.read_logins(work.host, spec, _release(record))
        actions = registries.plan_registries(work, spec, _release(record))
    except StratumError as error:
        if warn is None:
            raise
        logins = registries.recorded_logins(work.host, _release(record))
        warn(f"{error.message}; the registries stay as they are")
    options = ContainerdOptions(images.sandbox_image(record), program, logins)
    return list(dict.fromkeys([*containerd.plan_configuration(work, _release(record), options), *actions]))


def plan_cdi_removal(work: Work) -> list[Action]:
    """Remove the specification of GPUs that our commands made; not where the toolkit's own service keeps one."""
    host = work.host
    refreshed = any(host.lexists(directory / unit) for directory in UNIT_DIRS for unit in nvidia.REFRESH_UNITS)
    if work.receipt.get(_GPU_DROP_IN) is None or refreshed or not host.lexists(nvidia.CDI_SPEC):
        return []
    return [RemoveFile(nvidia.CDI_SPEC), RemoveDirectory(nvidia.CDI_SPEC.parent)]
