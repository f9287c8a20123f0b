"""Which units a version makes of a node, by its components and the settings: the stack follows the bundle."""

from __future__ import annotations

from collections.abc import Sequence

from stratum.node import containerd, localdns
from stratum.node.kubeletconfig import kubelet_arguments
from stratum.node.layout import Layout
from stratum.node.proxy import proxy_file
from stratum.node.settings import Settings
from stratum.node.units import UnitSpec
from stratum.node.versions import VersionRecord
from stratum.systemd import render_command

__all__ = ["is_kubernetes_node", "serves_dns", "unit_spec"]


def is_kubernetes_node(record: VersionRecord) -> bool:
    """Whether the version makes a Kubernetes node: it has a kubelet."""
    return record.component_version("kubelet") is not None


def serves_dns(record: VersionRecord, settings: Settings) -> bool:
    """Whether the node has LocalDNS: CoreDNS is in the version and the configuration asks for it."""
    return settings.spec.local_dns.enabled and record.component_version(localdns.COMPONENT) is not None


def unit_spec(
    layout: Layout, record: VersionRecord, settings: Settings, *, gpu_setup: Sequence[Sequence[str]] = ()
) -> UnitSpec:
    """What the units of the node are rendered from."""
    kubelet = is_kubernetes_node(record)
    check = settings.spec.kubelet.launch_check
    return UnitSpec(
        layout.bin_dir,
        containerd.CONFIG_PATH,
        kubelet=kubelet,
        kubelet_arguments=kubelet_arguments(settings) if kubelet else (),
        proxy_file=proxy_file(settings),
        localdns=str(layout.current_link / localdns.SUPERVISOR) if serves_dns(record, settings) else "",
        gpu_setup=tuple(tuple(command) for command in gpu_setup),
        launch_check=render_command(check) if kubelet and check else "",
    )
