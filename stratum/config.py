"""The node's configuration, ``/etc/stratum/stratum.yaml``, as typed and checked settings.

::

    apiVersion: stratum.dev/v1
    kind: Node
    spec:
      role: worker
      cluster:
        server: https://192.0.2.1:6443
        caFile: /root/ca.crt
        tokenFile: /root/token

Every field has a default: no file at all is a valid configuration. Field names in the file are those of the classes
here in camelCase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from stratum.system import HostPath

__all__ = [
    "CONFIG_PATH",
    "STANDALONE",
    "WORKER",
    "Cluster",
    "Containerd",
    "ExecCredential",
    "GPU",
    "Kubelet",
    "LocalDNS",
    "Mirror",
    "Network",
    "NodeSpec",
    "Proxy",
    "Registry",
    "Secret",
    "Taint",
]

CONFIG_PATH = HostPath("/etc/stratum/stratum.yaml")

STANDALONE = "standalone"
WORKER = "worker"


@dataclass(frozen=True)
class Secret:
    """A value that is never shown: not in a repr, not in an error, not in a log."""

    value: str = field(repr=False)

    def __str__(self) -> str:
        return "(secret)"


@dataclass(frozen=True)
class Network:
    """Addresses of the node, and the bridge network of containers that no cluster network serves."""

    node_ip: str = ""  # nodeIP: v4, v6 or v4,v6; empty: detected once, then recorded
    cluster_cidrs: tuple[str, ...] = ()  # clusterCIDRs: pods and services; their families are the node's
    bridge: Optional[bool] = None  # None: yes on a container host and a standalone node, no on a worker
    bridge_subnet: str = ""  # bridgeSubnet: empty: the first candidate that overlaps no route


@dataclass(frozen=True)
class Proxy:
    """The way out for containerd (pulls) and kubelet; loopback, node IP and clusterCIDRs never go through it."""

    http: str = ""
    https: str = ""
    no_proxy: tuple[str, ...] = ()  # noProxy


@dataclass(frozen=True)
class ExecCredential:
    """A program that gives the kubelet its client credential (client-go ExecConfig)."""

    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    api_version: str = "client.authentication.k8s.io/v1"  # apiVersion


@dataclass(frozen=True)
class Cluster:
    """What a worker joins; and what a standalone node's pods call their cluster.

    Exactly one credential: a bootstrap token (inline or a file), a client certificate with its key, or an exec
    credential. The token is used once and is never recorded.
    """

    server: str = ""  # https://host:port
    ca_file: str = ""  # caFile: PEM
    ca: str = ""  # PEM, inline
    token: Optional[Secret] = None
    token_file: str = ""  # tokenFile
    client_certificate_file: str = ""  # clientCertificateFile
    client_key_file: str = ""  # clientKeyFile
    exec: Optional[ExecCredential] = None
    dns: tuple[str, ...] = ()  # addresses of the cluster's DNS service
    domain: str = "cluster.local"


@dataclass(frozen=True)
class Taint:
    """A taint that the node registers with: Kubernetes API, core/v1 Taint."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


@dataclass(frozen=True)
class Kubelet:
    """The kubelet's own settings: ``config`` is merged over what Stratum renders (KubeletConfiguration v1beta1)."""

    config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    taints: tuple[Taint, ...] = ()
    launch_check: tuple[str, ...] = ()  # launchCheck: a command that must agree before each start of the kubelet


@dataclass(frozen=True)
class Mirror:
    """An endpoint that serves a registry's images (containerd's hosts.toml)."""

    url: str
    ca_file: str = ""  # caFile
    client_certificate_file: str = ""
    client_key_file: str = ""
    skip_verify: bool = False  # skipVerify
    override_path: bool = False  # overridePath
    username: str = ""
    password_file: str = ""  # passwordFile


@dataclass(frozen=True)
class Registry:
    """A registry by its name (``docker.io``; ``_default`` for all others) and the mirrors that are asked first.

    ``upstream`` says whether the registry itself is asked when no mirror has the image.
    """

    name: str
    mirrors: tuple[Mirror, ...] = ()
    upstream: bool = True


@dataclass(frozen=True)
class Containerd:
    """containerd's registries. Whatever else is wanted goes into files of its ``conf.d``."""

    registries: tuple[Registry, ...] = ()


@dataclass(frozen=True)
class LocalDNS:
    """A CoreDNS on the node that pods ask; the host's own resolver is not touched."""

    enabled: bool = False
    address: str = "169.254.20.10"  # link-local, on a dummy interface
    upstream: tuple[str, ...] = ()  # empty: the host's own servers, read past a stub resolver


@dataclass(frozen=True)
class GPU:
    """NVIDIA GPUs: ``auto`` grants them where there are devices, ``on`` demands them, ``off`` looks at nothing."""

    nvidia: str = "auto"


@dataclass(frozen=True)
class NodeSpec:
    """The whole configuration."""

    role: str = STANDALONE  # of a version with a kubelet
    node_name: str = ""  # nodeName: empty: the host's name in lower case, recorded
    profile: str = "default"
    selinux: bool = True
    network: Network = Network()
    proxy: Proxy = Proxy()
    cluster: Cluster = Cluster()
    kubelet: Kubelet = Kubelet()
    containerd: Containerd = Containerd()
    local_dns: LocalDNS = LocalDNS()  # localDNS
    gpu: GPU = GPU()
