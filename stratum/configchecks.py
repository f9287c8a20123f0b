"""What a configuration must hold for its values, and what contradicts itself.

Pure: a :class:`~stratum.config.NodeSpec` in, problems out, each with the path of its field. Whoever read the values
knows where they stand. What is legal but odd is a warning.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from stratum.config import STANDALONE, WORKER, Cluster, LocalDNS, Mirror, NodeSpec
from stratum.configvalues import (
    families,
    overlaps,
    parse_address,
    parse_network,
    why_no_address,
    why_no_network,
    why_no_path,
    why_no_registry,
    why_no_server,
    why_no_url,
)
from stratum.kubenames import (
    EFFECTS,
    propose_name,
    why_no_domain,
    why_no_label_key,
    why_no_label_value,
    why_no_node_name,
    why_not_own_label,
)

__all__ = ["OWNED", "Problem", "check_join", "check_spec"]

_LEAST_BRIDGE = 8  # addresses: the network, the bridge, the broadcast and a few containers

#: Fields of KubeletConfiguration that are not the user's, and why.
OWNED: Mapping[str, str] = {
    "apiVersion": "Stratum writes kubelet.config.k8s.io/v1beta1",
    "kind": "it is KubeletConfiguration",
    "containerRuntimeEndpoint": "the kubelet's containerd is Stratum's own",
    "imageServiceEndpoint": "the kubelet's containerd is Stratum's own",
    "cgroupDriver": "it must be containerd's, which is systemd",
    "volumePluginDir": "it is below Stratum's own state, because /usr may be read-only",
    "failSwapOn": "Stratum switches swap off, and a node where it is on again must not start",
    "healthzBindAddress": "Stratum asks there whether the kubelet is well",
    "healthzPort": "Stratum asks there whether the kubelet is well",
    "registerWithTaints": "write them in kubelet.taints",
}


@dataclass(frozen=True)
class Problem:
    """Something about the field at ``path`` (below ``spec``): wrong, or only odd."""

    path: str
    why: str
    hint: str = ""
    odd: bool = False


def check_spec(spec: NodeSpec, profiles: Iterable[str]) -> list[Problem]:
    """What is wrong or odd, wrong first. ``profiles`` are the names that there are."""
    found = [
        *_check_top(spec, sorted(profiles)),
        *_check_network(spec),
        *_check_proxy(spec),
        *_check_cluster(spec),
        *_check_kubelet(spec),
        *_check_registries(spec),
        *_check_local_dns(spec),
        *_one_of("gpu.nvidia", spec.gpu.nvidia, ("auto", "on", "off")),
    ]
    return sorted(found, key=lambda problem: problem.odd)


def check_join(cluster: Cluster, *, has_ca: bool = False, has_certificate: bool = False) -> list[Problem]:
    """What a worker lacks to join. One that has joined has the CA, and if it had a token a certificate of its own.

    A missing credential is last: it may come with an option of ``up``.
    """
    found = []
    if not cluster.server:
        found.append(
            Problem("cluster.server", "a worker needs the API server's URL", "write cluster.server, or give --server")
        )
    if not has_ca and not (cluster.ca or cluster.ca_file):
        found.append(
            Problem("cluster.caFile", "a worker needs the cluster's CA", "write cluster.caFile, or give --ca-file")
        )
    if not has_certificate and not _credentials(cluster):
        hint = "write cluster.tokenFile, or give --token-file (- for standard input)"
        found.append(Problem("cluster.tokenFile", "a worker needs a credential to join with", hint))
    return found


# -- words ------------------------------------------------------------------------------------------------


def _one_of(path: str, value: str, known: Sequence[str]) -> Iterator[Problem]:
    if value not in known:
        near = difflib.get_close_matches(value, known, 1, 0.5)
        offer = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        yield Problem(path, f"{value!r} is not known ({offer})")


def _each(path: str, values: Sequence[str], why_not: Callable[[str], str]) -> Iterator[Problem]:
    for number, value in enumerate(values):
        if why_not(value):
            yield Problem(f"{path}[{number}]", why_not(value))
        elif value in values[:number]:
            yield Problem(f"{path}[{number}]", f"{value} stands twice")


def _if_set(path: str, value: str, why_not: Callable[[str], str]) -> Iterator[Problem]:
    if value and why_not(value):
        yield Problem(path, why_not(value))


# -- the sections -----------------------------------------------------------------------------------------


def _check_top(spec: NodeSpec, profiles: Sequence[str]) -> Iterator[Problem]:
    yield from _one_of("role", spec.role, (STANDALONE, WORKER))
    yield from _one_of("profile", spec.profile, profiles)
    if spec.node_name and why_no_node_name(spec.node_name):
        near = propose_name(spec.node_name)
        hint = f"write for example: nodeName: {near}" if near else ""
        yield Problem("nodeName", f"{spec.node_name!r} {why_no_node_name(spec.node_name)}", hint)


def _check_network(spec: NodeSpec) -> Iterator[Problem]:
    network = spec.network
    yield from _each("network.clusterCIDRs", network.cluster_cidrs, why_no_network)
    cidrs = [parse_network(cidr) for cidr in network.cluster_cidrs]
    for number, one in enumerate(cidrs):
        for other in cidrs[:number]:
            if one and other and one != other and overlaps(one, other):
                yield Problem(f"network.clusterCIDRs[{number}]", f"{one} overlaps {other}")
    if network.node_ip:
        yield from _check_node_ip(network.node_ip, network.cluster_cidrs)
    if not network.bridge_subnet:
        return
    path = "network.bridgeSubnet"
    yield from _if_set(path, network.bridge_subnet, why_no_network)
    subnet = parse_network(network.bridge_subnet)
    if network.bridge is False:
        yield Problem(path, "there is no bridge network: network.bridge is false")
    elif network.bridge is None and spec.role == WORKER:
        yield Problem(path, "has no effect: a worker has the bridge network only with network.bridge: true", odd=True)
    if subnet and subnet.num_addresses < _LEAST_BRIDGE:
        yield Problem(path, f"{subnet} has {subnet.num_addresses} addresses, {_LEAST_BRIDGE} are needed at least")
    for cidr in cidrs:
        if subnet and cidr and overlaps(subnet, cidr):
            yield Problem(path, f"{subnet} overlaps {cidr} of network.clusterCIDRs")


def _check_node_ip(value: str, cidrs: Sequence[str]) -> Iterator[Problem]:
    path = "network.nodeIP"
    addresses = [parse_address(part) for part in value.split(",")]
    wrong = next((part for part, address in zip(value.split(","), addresses) if address is None), None)
    if wrong is not None:
        yield Problem(path, why_no_address(wrong))
        return
    wanted = families(cidrs)
    if tuple(address.version for address in addresses if address) != wanted:
        names = " and an ".join(f"IPv{family} address" for family in wanted)
        because = "the families of network.clusterCIDRs" if cidrs else "without network.clusterCIDRs a node is IPv4"
        yield Problem(path, f"{value!r} must be an {names}{', in that order' if len(wanted) > 1 else ''}: {because}")


def _check_proxy(spec: NodeSpec) -> Iterator[Problem]:
    proxy = spec.proxy
    for path, value in (("proxy.http", proxy.http), ("proxy.https", proxy.https)):
        yield from _if_set(path, value, lambda text: why_no_url(text, ("http", "https", "socks5"), password=True))
    yield from _each("proxy.noProxy", proxy.no_proxy, _why_no_exception)
    if proxy.no_proxy and not (proxy.http or proxy.https):
        yield Problem("proxy.noProxy", "has no effect without proxy.http or proxy.https", odd=True)


def _why_no_exception(text: str) -> str:
    bad = any(char in text for char in " ,\t") or "://" in text
    return f"{text!r} must be one host name, domain, address or network" if bad else ""


def _credentials(cluster: Cluster) -> list[str]:
    there = {
        "token": cluster.token is not None,
        "tokenFile": bool(cluster.token_file),
        "clientCertificateFile": bool(cluster.client_certificate_file),
        "exec": cluster.exec is not None,
    }
    return [name for name, holds in there.items() if holds]


def _check_cluster(spec: NodeSpec) -> Iterator[Problem]:
    cluster = spec.cluster
    yield from _if_set("cluster.server", cluster.server, why_no_server)
    for name, value in (
        ("caFile", cluster.ca_file),
        ("tokenFile", cluster.token_file),
        ("clientCertificateFile", cluster.client_certificate_file),
        ("clientKeyFile", cluster.client_key_file),
    ):
        yield from _if_set(f"cluster.{name}", value, why_no_path)
    if cluster.ca and cluster.ca_file:
        yield Problem("cluster.ca", "stands beside cluster.caFile: keep one of them")
    elif cluster.ca and "-----BEGIN CERTIFICATE-----" not in cluster.ca:
        yield Problem("cluster.ca", "has no certificate in PEM form (-----BEGIN CERTIFICATE-----)")
    credentials = _credentials(cluster)
    for name in credentials[1:]:
        yield Problem(f"cluster.{name}", f"stands beside cluster.{credentials[0]}: a node joins with one credential")
    if cluster.client_certificate_file and not cluster.client_key_file:
        yield Problem("cluster.clientCertificateFile", "cluster.clientKeyFile is missing")
    if cluster.client_key_file and not cluster.client_certificate_file:
        yield Problem("cluster.clientKeyFile", "cluster.clientCertificateFile is missing")
    if cluster.exec:
        yield from _if_set("cluster.exec.command", cluster.exec.command, why_no_path)
        versions = [f"client.authentication.k8s.io/{version}" for version in ("v1", "v1beta1")]
        yield from _one_of("cluster.exec.apiVersion", cluster.exec.api_version, versions)
    yield from _each("cluster.dns", cluster.dns, why_no_address)
    yield from _if_set("cluster.domain", cluster.domain, why_no_domain)
    if spec.role == STANDALONE:
        joining = {"server": cluster.server, "caFile": cluster.ca_file, "ca": cluster.ca}
        for name in [*(name for name, value in joining.items() if value), *credentials]:
            why = "a standalone node joins no cluster"
            yield Problem(f"cluster.{name}", why, "write role: worker, or give --role worker; else remove it")


def _check_kubelet(spec: NodeSpec) -> Iterator[Problem]:
    for key, value in spec.kubelet.labels.items():
        path = f"kubelet.labels.{key}"
        why = why_no_label_key(key) or why_not_own_label(key)
        if why:
            yield Problem(path, why)
        if why_no_label_value(value):
            yield Problem(path, f"the value {value!r} {why_no_label_value(value)}")
    seen = set()
    for number, taint in enumerate(spec.kubelet.taints):
        path = f"kubelet.taints[{number}]"
        yield from _if_set(f"{path}.key", taint.key or "-", why_no_label_key)
        yield from _if_set(f"{path}.value", taint.value, why_no_label_value)
        yield from _one_of(f"{path}.effect", taint.effect, EFFECTS)
        if (taint.key, taint.effect) in seen:
            yield Problem(path, f"{taint.key} with {taint.effect} stands twice")
        seen.add((taint.key, taint.effect))
    if spec.role == STANDALONE:
        unused = {"labels": spec.kubelet.labels, "taints": spec.kubelet.taints}
        for name in (name for name, value in unused.items() if value):
            yield Problem(f"kubelet.{name}", "has no effect: a standalone node registers nowhere", odd=True)
    if spec.kubelet.launch_check:
        yield from _if_set("kubelet.launchCheck[0]", spec.kubelet.launch_check[0], why_no_path)
    yield from _check_owned(spec)


def _check_owned(spec: NodeSpec) -> Iterator[Problem]:
    config = spec.kubelet.config
    owned = dict(OWNED)
    if spec.profile == "cis":
        owned["protectKernelDefaults"] = "the profile cis says that it is true"
    for name, why in owned.items():
        if name in config:
            yield Problem(f"kubelet.config.{name}", f"is Stratum's to set: {why}", "remove it")
    authentication: Any = config.get("authentication")
    if spec.role == STANDALONE and isinstance(authentication, Mapping) and "x509" in authentication:
        why = "is Stratum's to set on a standalone node: its CA is the node's own"
        yield Problem("kubelet.config.authentication.x509", why, "remove it")
    anonymous = authentication.get("anonymous") if isinstance(authentication, Mapping) else None
    if spec.role == STANDALONE and isinstance(anonymous, Mapping) and anonymous.get("enabled") not in (None, False):
        # There is no API server to ask who may do what, so that whoever is let in may do everything.
        why = "would let everybody who reaches this node run commands in its pods: it has no API server to ask"
        yield Problem("kubelet.config.authentication.anonymous", why, "remove it")


def _check_registries(spec: NodeSpec) -> Iterator[Problem]:
    names: list[str] = []
    for number, registry in enumerate(spec.containerd.registries):
        path = f"containerd.registries[{number}]"
        yield from _if_set(f"{path}.name", registry.name, why_no_registry)
        if registry.name in names:
            yield Problem(f"{path}.name", f"{registry.name} stands twice")
        names.append(registry.name)
        if not registry.mirrors:
            yield Problem(path, "has no mirrors", "name one, or remove the registry")
        urls = [mirror.url for mirror in registry.mirrors]
        for index, mirror in enumerate(registry.mirrors):
            if mirror.url in urls[:index]:
                yield Problem(f"{path}.mirrors[{index}].url", "stands twice: name each mirror once")
            yield from _check_mirror(f"{path}.mirrors[{index}]", mirror)


def _check_mirror(path: str, mirror: Mirror) -> Iterator[Problem]:
    yield from _if_set(f"{path}.url", mirror.url, lambda text: why_no_url(text, ("https", "http")))
    pairs = (
        ("clientCertificateFile", mirror.client_certificate_file, "clientKeyFile", mirror.client_key_file),
        ("username", mirror.username, "passwordFile", mirror.password_file),
    )
    for one, first, other, second in pairs:
        if bool(first) != bool(second):
            there, missing = (one, other) if first else (other, one)
            yield Problem(f"{path}.{there}", f"{missing} is missing")
    files = ("caFile", mirror.ca_file), ("clientCertificateFile", mirror.client_certificate_file)
    for name, value in (*files, ("clientKeyFile", mirror.client_key_file), ("passwordFile", mirror.password_file)):
        yield from _if_set(f"{path}.{name}", value, why_no_path)
    if mirror.username and ":" in mirror.username:
        yield Problem(f"{path}.username", "must have no : in it")
    if mirror.url.startswith("http://"):
        tls = {"caFile": mirror.ca_file, "clientKeyFile": mirror.client_key_file, "skipVerify": mirror.skip_verify}
        for name in (name for name, value in tls.items() if value):
            yield Problem(f"{path}.{name}", "has no effect: the URL is http://", odd=True)
        if mirror.password_file:
            yield Problem(f"{path}.passwordFile", "the password goes over the network as it is", odd=True)


def _check_local_dns(spec: NodeSpec) -> Iterator[Problem]:
    local, path = spec.local_dns, "localDNS.address"
    yield from _each("localDNS.upstream", local.upstream, _why_no_upstream)
    if local.address in local.upstream:
        yield Problem("localDNS.upstream", f"{local.address} is LocalDNS itself")
    if not local.enabled and local != LocalDNS():
        yield Problem("localDNS", "has no effect without localDNS.enabled: true", odd=True)
    yield from _if_set(path, local.address, why_no_address)
    address = parse_address(local.address)
    if address is None:
        return
    bad = address.is_loopback or address.is_unspecified or address.is_multicast or address.is_reserved
    if bad or not (address.is_link_local or address.is_private):
        yield Problem(path, f"{address} must be a link-local or private address: it is on this node alone")
    if local.address in spec.network.node_ip.split(","):
        yield Problem(path, f"{address} is the node's own address (network.nodeIP)")
    for name in (*spec.network.cluster_cidrs, spec.network.bridge_subnet):
        network = parse_network(name) if name else None
        if network and address.version == network.version and address in network:
            yield Problem(path, f"{address} is in {network}, which pods and services have")


def _why_no_upstream(text: str) -> str:
    host, _, port = (text, "", "53") if parse_address(text) else text.rpartition(":")
    address = parse_address(host.strip("[]"))
    if address is None or (host != text and why_no_registry(text)):
        return f"{text!r} is no address, with a port behind it if need be"
    # On another port of the loopback another server may listen.
    if address.is_unspecified or address.is_multicast or (address.is_loopback and port == "53"):
        return f"{text} is this host itself, or no server: name the servers that the host's own resolver asks"
    return ""
