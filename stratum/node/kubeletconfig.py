"""The kubelet's configuration and command line, rendered from the settings and a few facts of the machine.

``render_`` makes text and writes nothing. Every field and flag here is one that the kubelets 1.31 to 1.37 have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from stratum.config import WORKER, NodeSpec
from stratum.node import containerd
from stratum.node.kubeconfig import render_json
from stratum.node.kubeletfields import check_fields, merge, parse_release
from stratum.node.settings import Settings
from stratum.node.units import KUBELET_CONFIG
from stratum.receipt import STATE_DIRECTORY
from stratum.system import Host, HostPath

__all__ = [
    "HEALTHZ_PORT",
    "KUBELET_PORT",
    "KubeletFacts",
    "check_kubelet",
    "kubelet_arguments",
    "kubelet_config",
    "read_facts",
    "render_kubelet_config",
    "reservations",
]

DIRECTORY = KUBELET_CONFIG.parent
CA_FILE = DIRECTORY / "ca.crt"
BOOTSTRAP = DIRECTORY / "bootstrap-kubeconfig"
GIVEN_KUBECONFIG = DIRECTORY / "kubeconfig"  # with a credential that the configuration names
MANIFESTS = DIRECTORY / "manifests"
VOLUME_PLUGINS = STATE_DIRECTORY / "kubelet-plugins"
ROOT = HostPath("/var/lib/kubelet")  # the kubelet's own default; CSI drivers have it in their manifests
PKI = ROOT / "pki"  # its default --cert-dir
CLIENT_CERTIFICATE = PKI / "kubelet-client-current.pem"
JOINED_KUBECONFIG = ROOT / "kubeconfig"  # written by the kubelet when it asks for its certificate
HEALTHZ_PORT = 10248
KUBELET_PORT = 10250  # the kubelet's default, pkg/cluster/ports

_MIB = 1 << 20
# Google Kubernetes Engine, "Plan node sizes", Resource reservations: shares of memory (of the first so many GiB)
# and of processors (of the first so many cores). Azure and others use much the same.
# In units of a ten-thousandth.
_MEMORY_STEPS = ((4, 2500), (4, 2000), (8, 1000), (112, 600))
_MEMORY_REST = 200
_CPU_STEPS = ((1, 600), (1, 100), (2, 50))
_CPU_REST = 25
# The kubelet's own defaults: pkg/kubelet/apis/config/v1beta1/defaults_linux.go. Whoever gives one signal would put
# the others to zero if they were not here to be merged with.
_EVICTION = {
    "memory.available": "100Mi",
    "nodefs.available": "10%",
    "nodefs.inodesFree": "5%",
    "imagefs.available": "15%",
    "imagefs.inodesFree": "5%",
}
_PIDS = 4096  # of one pod: enough for any ordinary one, and eight of them do not fill a kernel's default of 32768


@dataclass(frozen=True)
class KubeletFacts:
    """What the configuration depends on besides the settings."""

    version: str  # of the kubelet in the version that will be active
    memory: int  # bytes
    cpus: int
    resolv_conf: str = ""  # the file that names real servers; empty when there is none
    local_dns: tuple[str, ...] = ()  # the address of LocalDNS, on a node that has it


def read_facts(
    host: Host, version: str, resolv_conf: Optional[HostPath], *, local_dns: tuple[str, ...] = ()
) -> KubeletFacts:
    """The facts of this machine for a kubelet of ``version``. Raises OSError when procfs cannot be read.

    A tree that will be another machine's has no memory and no processors: that machine reserves at its first start.
    """
    resolv = str(resolv_conf) if resolv_conf else ""
    if not host.live:
        return KubeletFacts(version, 0, 1, resolv, local_dns)
    found = re.search(r"^MemTotal:\s*(\d+) kB", host.read_text("/proc/meminfo"), re.MULTILINE)
    cpus = len(re.findall(r"^processor\s*:", host.read_text("/proc/cpuinfo"), re.MULTILINE))
    return KubeletFacts(version, int(found[1]) * 1024 if found else 0, max(cpus, 1), resolv, local_dns)


def _share(amount: int, unit: int, steps: tuple[tuple[int, int], ...], rest: int) -> int:
    """The part of ``amount`` that the steps make, each as many times ``unit`` wide as it says."""
    total = 0
    for width, part in steps:
        step = min(amount, width * unit)
        total += step * part
        amount -= step
    return (total + amount * rest) // 10_000


def reservations(memory: int, cpus: int) -> dict[str, str]:
    """What the system and the node's own programs keep of ``memory`` bytes and ``cpus``, as quantities.

    At most a quarter of either, so that a small machine too has most of itself left for pods.
    """
    millicores = _share(cpus * 1000, 1000, _CPU_STEPS, _CPU_REST)
    mebibytes = _share(memory // _MIB, 1024, _MEMORY_STEPS, _MEMORY_REST)
    return {"cpu": f"{millicores}m", "memory": f"{mebibytes}Mi"}


def kubelet_config(settings: Settings, facts: KubeletFacts) -> dict[str, Any]:
    """The whole KubeletConfiguration, with the user's own fields laid over ours. Raises as :func:`check_kubelet`."""
    spec = settings.spec
    worker = spec.role == WORKER
    check_kubelet(spec, facts.version)
    dns = facts.local_dns or spec.cluster.dns
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            # Both ask the API server, and without one the kubelet refuses to start with them.
            "webhook": {"enabled": worker},
            "x509": {"clientCAFile": str(CA_FILE)},
        },
        # On a standalone node the only client there is holds the certificate that was made with its CA.
        "authorization": {"mode": "Webhook" if worker else "AlwaysAllow"},
        "cgroupDriver": "systemd",
        "clusterDomain": spec.cluster.domain,
        "containerLogMaxFiles": 5,
        "containerLogMaxSize": "10Mi",
        "containerRuntimeEndpoint": f"unix://{containerd.ADDRESS}",
        "enforceNodeAllocatable": ["pods"],
        "evictionHard": dict(_EVICTION),
        "failSwapOn": True,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": HEALTHZ_PORT,
        "kubeReserved": reservations(facts.memory, facts.cpus),
        "podPidsLimit": _PIDS,
        "protectKernelDefaults": settings.profile == "cis",
        "readOnlyPort": 0,
        "resolvConf": facts.resolv_conf,
        # A program that gives credentials has its own way of renewing them.
        "rotateCertificates": worker and spec.cluster.exec is None,
        "seccompDefault": True,
        "staticPodPath": str(MANIFESTS),
        "tlsMinVersion": "VersionTLS12",
        "volumePluginDir": str(VOLUME_PLUGINS),
    }
    if dns:
        config["clusterDNS"] = list(dns)
    if worker and spec.kubelet.taints:
        config["registerWithTaints"] = [
            {"key": taint.key, "value": taint.value, "effect": taint.effect} for taint in spec.kubelet.taints
        ]
    return merge(config, spec.kubelet.config)


def render_kubelet_config(settings: Settings, facts: KubeletFacts) -> bytes:
    """The file's content. Raises :class:`StratumError` for what the kubelet of ``facts`` would not take."""
    return render_json(
        kubelet_config(settings, facts), "Written by Stratum; your own fields go into spec.kubelet.config of its file."
    )


def check_kubelet(spec: NodeSpec, version: str) -> list[str]:
    """Check what the user gave for the kubelet, before anything is stopped; the warnings.

    Raises :class:`UsageError` for a field that the kubelet would refuse, :class:`StratumError` for a release that is
    not supported. Labels and taints are checked when the configuration is read.
    """
    return check_fields(spec.kubelet.config, parse_release(version))


def uses_token(spec: NodeSpec) -> bool:
    """Whether the node asks for its certificate itself, rather than being given a credential."""
    return spec.cluster.exec is None and not spec.cluster.client_certificate_file


def kubelet_arguments(settings: Settings) -> tuple[str, ...]:
    """The kubelet's arguments besides ``--config``. None is a secret, and none changes when a join is complete:

    a kubelet whose kubeconfig is valid does not look at the bootstrap file (LoadClientConfig, pkg/kubelet/certificate/
    bootstrap), so it may be gone by then.
    """
    spec = settings.spec
    words = []
    if settings.node_name:
        words.append(f"--hostname-override={settings.node_name}")
    if settings.node_ip:
        words.append(f"--node-ip={settings.node_ip}")
    if spec.role != WORKER:
        return tuple(words)
    if uses_token(spec):
        words += [f"--kubeconfig={JOINED_KUBECONFIG}", f"--bootstrap-kubeconfig={BOOTSTRAP}"]
    else:
        words.append(f"--kubeconfig={GIVEN_KUBECONFIG}")
    labels: Mapping[str, str] = spec.kubelet.labels
    if labels:
        words.append("--node-labels=" + ",".join(f"{key}={labels[key]}" for key in sorted(labels)))
    return tuple(words)
