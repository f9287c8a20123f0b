#!/usr/bin/env python3
"""A stand-in for the kubelet of Kubernetes 1.34, as far as a node's tools have to do with one.

It stands in for ``kubelet`` and is at least as strict about what it is given: flags as cobra and pflag, its
configuration as the strict decoder (unknown fields, wrong types, doubled keys), and at its start the same refusals
with the same words. Where the real one only warns or fails later (a cgroup driver other than containerd's, a resolver
file that is not there, a node IP that is none), this one refuses at once. It speaks CRI to containerd, runs static
pods whose images are there (it never pulls), serves healthz and its TLS port, and joins a cluster by TLS bootstrap as
the real one does: LoadClientConfig, certificate requests of client-go, the file store for certificates, node and
lease.

It does not: pull, mount volumes, probe, evict, take pods from the API server, renew certificates.

It needs Debian's python3-yaml, python3-cryptography and, for CRI, python3-grpcio. Environment, for tests without root:
``STANDIN_WITHOUT_RUNTIME=1`` (no CRI), ``STANDIN_PROC=DIR`` (a directory for /proc), ``STANDIN_RETRY=SECONDS``.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import http.client
import http.server
import ipaddress
import json
import os
import re
import signal
import socket
import ssl
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VERSION = "v1.34.1"
PROC = Path(os.environ.get("STANDIN_PROC", "/proc"))
RETRY = float(os.environ.get("STANDIN_RETRY", "2"))

# Flags that are not deprecated and that nodes are run with; the real one has more. pflag: all take a value but bools.
FLAGS = {
    "bootstrap-kubeconfig": "",
    "cert-dir": "/var/lib/kubelet/pki",
    "config": "",
    "hostname-override": "",
    "kubeconfig": "",
    "node-ip": "",
    "node-labels": "",
    "root-dir": "/var/lib/kubelet",
    "v": "0",
}
# v1beta1 of 1.34, from k8s.io/kubelet/config/v1beta1/types.go: Go type, then the fields that have it.
TYPES = """
bool enableServer rotateCertificates serverTLSBootstrap enableDebuggingHandlers enableContentionProfiling cgroupsPerQOS
bool singleProcessOOMKill runOnce cpuCFSQuota serializeImagePulls enableControllerAttachDetach protectKernelDefaults
bool makeIPTablesUtilChains failSwapOn kernelMemcgNotification enableSystemLogHandler enableSystemLogQuery
bool enableProfilingHandler enableDebugFlagsHandler seccompDefault registerNode localStorageCapacityIsolation
bool failCgroupV1 mergeDefaultEvictionSettings
string staticPodPath podLogsDir staticPodURL address tlsCertFile tlsPrivateKeyFile tlsMinVersion healthzBindAddress
string clusterDomain kubeletCgroups systemCgroups cgroupRoot cgroupDriver cpuManagerPolicy memoryManagerPolicy
string topologyManagerPolicy topologyManagerScope hairpinMode podCIDR resolvConf contentType containerLogMaxSize
string reservedSystemCPUs showHiddenMetricsForVersion systemReservedCgroup kubeReservedCgroup volumePluginDir providerID
string containerRuntimeEndpoint imageServiceEndpoint configMapAndSecretChangeDetectionStrategy
string imagePullCredentialsVerificationPolicy apiVersion kind
duration syncFrequency fileCheckFrequency httpCheckFrequency streamingConnectionIdleTimeout nodeStatusUpdateFrequency
duration nodeStatusReportFrequency imageMinimumGCAge imageMaximumGCAge volumeStatsAggPeriod cpuManagerReconcilePeriod
duration runtimeRequestTimeout cpuCFSQuotaPeriod evictionPressureTransitionPeriod containerLogMonitorInterval
duration shutdownGracePeriod shutdownGracePeriodCriticalPods
int port readOnlyPort registryPullQPS registryBurst eventRecordQPS eventBurst healthzPort oomScoreAdj maxPods
int podPidsLimit
int nodeLeaseDurationSeconds imageGCHighThresholdPercent imageGCLowThresholdPercent nodeStatusMaxImages maxOpenFiles
int kubeAPIQPS kubeAPIBurst maxParallelImagePulls evictionMaxPodGracePeriod podsPerCore iptablesMasqueradeBit
int iptablesDropBit containerLogMaxFiles containerLogMaxWorkers
[]string tlsCipherSuites clusterDNS enforceNodeAllocatable allowedUnsafeSysctls preloadedImagesVerificationAllowlist
map cpuManagerPolicyOptions topologyManagerPolicyOptions qosReserved evictionHard evictionSoft evictionSoftGracePeriod
map evictionMinimumReclaim systemReserved kubeReserved
float memoryThrottlingFactor
object authentication authorization memorySwap crashLoopBackOff tracing userNamespaces logging featureGates
object staticPodURLHeader
[]object shutdownGracePeriodByPodPriority reservedMemory registerWithTaints
"""
BELOW = {
    "authentication": {"x509": "object", "webhook": "object", "anonymous": "object"},
    "authentication.x509": {"clientCAFile": "string"},
    "authentication.webhook": {"enabled": "bool", "cacheTTL": "duration"},
    "authentication.anonymous": {"enabled": "bool"},
    "authorization": {"mode": "string", "webhook": "object"},
    "authorization.webhook": {"cacheAuthorizedTTL": "duration", "cacheUnauthorizedTTL": "duration"},
    "memorySwap": {"swapBehavior": "string"},
    "crashLoopBackOff": {"maxContainerRestartPeriod": "duration"},
    "userNamespaces": {"idsPerPod": "int"},
    "tracing": {"endpoint": "string", "samplingRatePerMillion": "int"},
    "registerWithTaints": {"key": "string", "value": "string", "effect": "string", "timeAdded": "string"},
}
FIELDS = {name: line.split()[0] for line in TYPES.strip().splitlines() for name in line.split()[1:]}
DURATION = re.compile(r"[-+]?(?:0|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:ns|us|µs|ms|s|m|h))+")
QUANTITY = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
LABEL_DOMAINS = ("kubelet.kubernetes.io", "node.kubernetes.io")
LABELS = {
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
}


class Refused(Exception):
    """What the real one ends with."""


def log(kind, text):
    """A line as klog writes it."""
    now = datetime.datetime.now()
    sys.stderr.write(f"{kind}{now:%m%d %H:%M:%S.%f} {os.getpid():7} standin.go:1] {text}\n")
    sys.stderr.flush()


# -- flags and configuration --------------------------------------------------------------------------


def parse_flags(argv):
    found = dict(FLAGS)
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise Refused(f"unknown command {word!r}: the kubelet takes no arguments")
        name, equals, value = word[2:].partition("=")
        if name == "version":
            print(f"Kubernetes {VERSION}")
            raise SystemExit(0)
        if name not in FLAGS:
            raise Refused(f"failed to parse kubelet flag: unknown flag: --{name}")
        if not equals:
            if not rest:
                raise Refused(f"failed to parse kubelet flag: flag needs an argument: --{name}")
            value = rest.pop(0)
        found[name] = value
    for label in filter(None, found["node-labels"].split(",")):
        key, equals, _ = label.partition("=")
        domain = key.rpartition("/")[0]
        ours = any(domain == end or domain.endswith("." + end) for end in ("kubernetes.io", "k8s.io"))
        allowed = key in LABELS or any(domain == own or domain.endswith("." + own) for own in LABEL_DOMAINS)
        if not equals or (ours and not allowed):
            raise Refused(f"failed to validate kubelet flags: unknown 'kubernetes.io' or 'k8s.io' labels: [{key}]")
    for address in filter(None, found["node-ip"].split(",")):
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise Refused(f"bad --node-ip {found['node-ip']!r}: {address} is no address") from None
    return found


class StrictLoader(yaml.SafeLoader):
    """Doubled keys are errors, as for the strict decoder."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise Refused(f'strict decoding error: key "{key}" already set in map')
        return super().construct_mapping(node, deep)


def check(value, kind, path):
    right = {
        "bool": lambda: isinstance(value, bool),
        "int": lambda: isinstance(value, int) and not isinstance(value, bool),
        "float": lambda: isinstance(value, (int, float)) and not isinstance(value, bool),
        "string": lambda: isinstance(value, str),
        "duration": lambda: isinstance(value, str) and DURATION.fullmatch(value),
        "[]string": lambda: isinstance(value, list) and all(isinstance(item, str) for item in value),
        "map": lambda: isinstance(value, dict) and all(isinstance(item, str) for item in value.values()),
        "object": lambda: isinstance(value, dict),
        "[]object": lambda: isinstance(value, list) and all(isinstance(item, dict) for item in value),
    }
    if value is not None and not right[kind]():
        raise Refused(
            f"json: cannot unmarshal {value!r} into Go struct field KubeletConfiguration.{path} of type {kind}"
        )
    if path in BELOW and value is not None:
        for item in value if isinstance(value, list) else [value]:
            check_fields(item, BELOW[path], f"{path}.")


def check_fields(value, fields, where):
    for key, item in value.items():
        if key not in fields:
            raise Refused(f'strict decoding error: unknown field "{where}{key}"')
        check(item, fields[key], f"{where}{key}")


def load_config(path):
    failed = f"failed to load kubelet config file, path: {path}, error: "
    try:
        value = yaml.load(Path(path).read_text(), StrictLoader)
    except OSError as error:
        raise Refused(f"{failed}open {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Refused(f"{failed}{' '.join(str(error).split())}") from None
    try:
        if not isinstance(value, dict) or value.get("apiVersion") != "kubelet.config.k8s.io/v1beta1":
            raise Refused("no kind KubeletConfiguration is registered for that version")
        if value.get("kind") != "KubeletConfiguration":
            raise Refused(f'no kind "{value.get("kind")}" is registered')
        check_fields(value, FIELDS, "")
        validate(value)
    except Refused as error:
        raise Refused(f"{failed}{error}") from None
    return value


def validate(config):
    """ValidateKubeletConfiguration, as far as it concerns what nodes set."""
    low, high = config.get("imageGCLowThresholdPercent", 80), config.get("imageGCHighThresholdPercent", 85)
    if low >= high:
        raise Refused("imageGCLowThresholdPercent must be less than imageGCHighThresholdPercent")
    for name, allowed in (
        ("tlsMinVersion", ("", "VersionTLS10", "VersionTLS11", "VersionTLS12", "VersionTLS13")),
        ("cgroupDriver", ("systemd",)),  # containerd here is told the same; the real one would also take cgroupfs
    ):
        if config.get(name, allowed[0]) not in allowed:
            raise Refused(f"invalid configuration: {name}: {config[name]!r}")
    if not set(config.get("enforceNodeAllocatable", ["pods"])) <= {"pods", "none", "system-reserved", "kube-reserved"}:
        raise Refused("invalid configuration: option specified for enforceNodeAllocatable")
    for name in ("kubeReserved", "systemReserved"):
        for key, text in config.get(name, {}).items():
            if key not in ("cpu", "memory", "ephemeral-storage", "pid") or not QUANTITY.fullmatch(text):
                raise Refused(f"invalid configuration: {name}: {key}={text}")
    for key, text in config.get("evictionHard", {}).items():
        if not re.fullmatch(r"(memory|nodefs|imagefs|containerfs|pid)\.(available|inodesFree)", key):
            raise Refused(f"unknown eviction signal {key}")
        if not (QUANTITY.fullmatch(text) or re.fullmatch(r"[0-9.]+%", text)):
            raise Refused(f"invalid eviction threshold {key}: {text}")
    for address in config.get("clusterDNS", []):
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise Refused(f"invalid configuration: clusterDNS: {address}") from None
    if config.get("podPidsLimit", -1) == 0 or config.get("podPidsLimit", -1) < -1:
        raise Refused("invalid configuration: podPidsLimit")


def check_machine(config, flags):
    """What run() refuses before it starts anything."""
    authentication = config.get("authentication", {})
    webhook = authentication.get("webhook", {}).get("enabled", True)
    anonymous = authentication.get("anonymous", {}).get("enabled", False)
    ca = authentication.get("x509", {}).get("clientCAFile", "")
    joined = bool(flags["kubeconfig"] or flags["bootstrap-kubeconfig"])
    mode = config.get("authorization", {}).get("mode", "Webhook")
    if flags["bootstrap-kubeconfig"] and not flags["kubeconfig"]:
        raise Refused("--kubeconfig is needed with --bootstrap-kubeconfig")
    if ca and not os.path.exists(ca):
        raise Refused(f"unable to load client CA file {ca}: open {ca}: no such file or directory")
    if ca and "-----BEGIN CERTIFICATE-----" not in Path(ca).read_text():
        raise Refused(f"unable to load client CA file {ca}: data does not contain any valid certificates")
    if webhook and not joined:
        raise Refused("no client provided, cannot use webhook authentication")
    if mode == "Webhook" and not joined:
        raise Refused("no client provided, cannot use webhook authorization")
    if mode not in ("Webhook", "AlwaysAllow"):
        raise Refused(f"unknown authorization mode {mode}")
    if not (webhook or anonymous or ca):
        raise Refused("no authentication method configured")
    if config.get("failSwapOn", True) and len((PROC / "swaps").read_text().splitlines()) > 1:
        raise Refused("running with swap on is not supported, please disable swap or set --fail-swap-on flag to false")
    if config.get("protectKernelDefaults", False):
        for name, wanted in SYSCTLS.items():
            actual = int((PROC / "sys" / name).read_text())
            if actual != wanted:
                raise Refused(f"invalid kernel flag: {name}, expected value: {wanted}, actual value: {actual}")
    resolver = config.get("resolvConf", "/etc/resolv.conf")
    if resolver and not os.path.exists(resolver):
        raise Refused(f"open {resolver}: no such file or directory")
    if not config.get("containerRuntimeEndpoint", "").startswith("unix://"):
        raise Refused(
            "the container runtime endpoint address was not specified or empty, use --container-runtime-endpoint to set"
        )
    manifests = config.get("staticPodPath", "")
    if manifests and not os.path.isdir(manifests):
        raise Refused(f"static pods: {manifests}: no such directory")


# -- protobuf and CRI (runtime.v1, k8s.io/cri-api) ------------------------------------------------------


def varint(number):
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out + bytes([number]))


def message(*fields):
    """Encode (number, value) pairs: bytes and str are length-delimited, int a varint, dict a map."""
    out = b""
    for number, value in fields:
        if isinstance(value, dict):
            for key in sorted(value):
                out += message((number, message((1, key), (2, value[key]))))
        elif isinstance(value, int):
            out += varint(number << 3) + varint(value) if value else b""
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return out


def decode(data):
    """The fields of a message: number to the list of its values."""
    found, at = {}, 0

    def number():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = number()
        if key & 7 == 0:
            value = number()
        else:
            length = {1: 8, 5: 4}.get(key & 7) or number()
            value = data[at : at + length]
            at += length
        found.setdefault(key >> 3, []).append(value)
    return found


class Runtime:
    """containerd's CRI service."""

    def __init__(self, endpoint):
        import grpc

        self.error = grpc.RpcError
        self.channel = grpc.insecure_channel(endpoint)

    def call(self, method, request=b"", service="RuntimeService"):
        call = self.channel.unary_unary(f"/runtime.v1.{service}/{method}", lambda data: data, lambda data: data)
        return decode(call(request, timeout=120))

    def version(self):
        return self.call("Version", message((1, "0.1.0")))[2][0].decode()

    def has_image(self, image):
        return 1 in self.call("ImageStatus", message((1, message((1, image)))), "ImageService")

    def sandboxes(self):
        items = [decode(item) for item in self.call("ListPodSandbox").get(1, [])]
        return [(item[1][0].decode(), decode(item[2][0]), item.get(3, [0])[0]) for item in items]

    def containers(self):
        items = [decode(item) for item in self.call("ListContainers").get(1, [])]
        return [
            (item[1][0].decode(), item[2][0].decode(), decode(item[3][0])[1][0].decode(), item.get(6, [0])[0])
            for item in items
        ]


class Pods:
    """Static pods: the files of a directory, run again when they change or end."""

    def __init__(self, config, runtime, node):
        self.config, self.runtime, self.node = config, runtime, node
        self.directory = Path(config["staticPodPath"])

    def wanted(self):
        pods = {}
        for path in sorted(self.directory.iterdir()):
            if path.name.startswith(".") or not path.is_file():
                continue
            try:
                pod = yaml.safe_load(path.read_text())
                meta, spec = pod["metadata"], pod["spec"]
                if pod["kind"] != "Pod" or pod["apiVersion"] != "v1" or not spec["containers"]:
                    raise ValueError("not a Pod of v1 with containers")
                if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", meta["name"]):
                    raise ValueError(f"metadata.name: {meta['name']!r}")
                uid = hashlib.md5(path.name.encode() + json.dumps(pod, sort_keys=True).encode()).hexdigest()
                pods[uid] = (f"{meta['name']}-{self.node}", meta.get("namespace", "default"), spec)
            except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
                log("E", f'"Could not process manifest file" path="{path}" err="{error!r}"')
        return pods

    def sync(self):
        wanted, running = self.wanted(), {}
        for sandbox, meta, state in self.runtime.sandboxes():
            uid = meta[2][0].decode()
            if uid in wanted and state == 0 and uid not in running:
                running[uid] = sandbox
            else:
                self.runtime.call("StopPodSandbox", message((1, sandbox)))
                self.runtime.call("RemovePodSandbox", message((1, sandbox)))
        for uid, (name, namespace, spec) in wanted.items():
            missing = [item["image"] for item in spec["containers"] if not self.runtime.has_image(item["image"])]
            if missing:
                log(
                    "E",
                    f'"Error syncing pod, skipping" err="ErrImageNeverPull: {missing[0]} is not present" pod="{name}"',
                )
                continue
            sandbox = self.sandbox(uid, name, namespace, spec)
            if uid not in running:
                answer = self.runtime.call("RunPodSandbox", message((1, sandbox)))
                running[uid] = answer[1][0].decode()
                log("I", f'"Started sandbox" pod="{namespace}/{name}"')
            held = [(item[2], item[3]) for item in self.runtime.containers() if item[1] == running[uid]]
            for item in spec["containers"]:
                states = [state for container, state in held if container == item["name"]]
                if any(state in (0, 1) for state in states) or (states and spec.get("restartPolicy") == "Never"):
                    continue
                attempt = len(states)
                log_directory = self.logs(uid, name, namespace) / item["name"]
                log_directory.mkdir(exist_ok=True)
                container = self.start(running[uid], sandbox, item, attempt, spec)
                links = Path("/var/log/containers")
                links.mkdir(parents=True, exist_ok=True)
                link = links / f"{name}_{namespace}_{item['name']}-{container}.log"
                link.unlink(missing_ok=True)
                link.symlink_to(log_directory / f"{attempt}.log")

    def sandbox(self, uid, name, namespace, spec):
        labels = {
            "io.kubernetes.pod.name": name,
            "io.kubernetes.pod.namespace": namespace,
            "io.kubernetes.pod.uid": uid,
        }
        network = 2 if spec.get("hostNetwork") else 0
        context = message((1, message((1, network), (2, 1), (3, network))))
        group = f"kubepods-besteffort-pod{uid}.slice"
        return message(
            (1, message((1, name), (2, uid), (3, namespace))),
            (2, "" if network else name),
            (3, str(self.logs(uid, name, namespace))),
            (4, self.dns(spec)),
            (6, labels),
            (8, message((1, group), (2, context))),
        )

    def logs(self, uid, name, namespace):
        """Where the logs of a pod go; the runtime makes only the files."""
        path = Path(self.config.get("podLogsDir", "/var/log/pods")) / f"{namespace}_{name}_{uid}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def dns(self, spec):
        servers = self.config.get("clusterDNS", []) if spec.get("dnsPolicy", "ClusterFirst") == "ClusterFirst" else []
        domain = self.config.get("clusterDomain", "")
        if not servers and self.config.get("resolvConf", "/etc/resolv.conf"):
            text = Path(self.config.get("resolvConf", "/etc/resolv.conf")).read_text()
            servers = re.findall(r"^\s*nameserver\s+(\S+)", text, re.MULTILINE)
        searches = [f"default.svc.{domain}", f"svc.{domain}", domain] if servers and domain else []
        return message(*((1, server) for server in servers), *((2, name) for name in searches))

    def start(self, sandbox, sandbox_config, item, attempt, spec):
        network = 2 if spec.get("hostNetwork") else 0
        privileged = int(bool(item.get("securityContext", {}).get("privileged")))
        linux = message(
            (1, message((3, 2), (5, 1000))),
            (2, message((2, privileged), (3, message((1, network), (2, 1), (3, network))))),
        )
        config = message(
            (1, message((1, item["name"]), (2, attempt))),
            (2, message((1, item["image"]))),
            *((3, word) for word in item.get("command", [])),
            *((4, word) for word in item.get("args", [])),
            (5, item.get("workingDir", "")),
            *((6, message((1, pair["name"]), (2, str(pair.get("value", ""))))) for pair in item.get("env", [])),
            (9, {"io.kubernetes.container.name": item["name"]}),
            (11, f"{item['name']}/{attempt}.log"),
            (15, linux),
        )
        answer = self.runtime.call("CreateContainer", message((1, sandbox), (2, config), (3, sandbox_config)))
        self.runtime.call("StartContainer", message((1, answer[1][0])))
        log("I", f'"Started container" container="{item["name"]}"')
        return answer[1][0].decode()

    def run(self):
        while True:
            try:
                self.sync()
            except Exception as error:
                details = getattr(error, "details", None)
                log("E", f'"Error syncing pod" err="{details() if callable(details) else repr(error)}"')
            time.sleep(1)


# -- the cluster ----------------------------------------------------------------------------------------


class Config:
    """A kubeconfig, flattened."""

    def __init__(self, path):
        try:
            value = yaml.safe_load(Path(path).read_text())
        except OSError as error:
            raise Refused(f"stat {path}: {error.strerror.lower()}") from None
        except yaml.YAMLError as error:
            raise Refused(f"error loading config file {path}: {' '.join(str(error).split())}") from None
        try:
            context = next(item for item in value["contexts"] if item["name"] == value["current-context"])["context"]
            cluster = next(item for item in value["clusters"] if item["name"] == context["cluster"])["cluster"]
            user = next(item for item in value["users"] if item["name"] == context["user"])["user"]
        except (KeyError, TypeError, StopIteration) as error:
            raise Refused(f"invalid configuration: {path}: {error!r}") from None
        if value.get("apiVersion") != "v1" or value.get("kind") != "Config":
            raise Refused(f"invalid configuration: {path}: apiVersion or kind")
        self.server, self.token = cluster["server"], user.get("token", "")
        self.ca = cluster.get("certificate-authority", "")
        self.ca_data = cluster.get("certificate-authority-data", "")
        self.certificate, self.key = user.get("client-certificate", ""), user.get("client-key", "")
        if self.token and Path(path).stat().st_mode & 0o077:
            raise Refused(f"{path}: holds a token and others can read it")  # the real one does not look

    def context(self):
        context = ssl.create_default_context(cafile=self.ca or None)
        if self.ca_data:
            context.load_verify_locations(cadata=base64.b64decode(self.ca_data).decode())
        if self.certificate:
            context.load_cert_chain(self.certificate, self.key)
        return context

    def request(self, method, path, body=None):
        """Status and body; raises Refused with the words of client-go."""
        place = urlsplit(self.server)
        if place.scheme != "https" or not place.hostname:
            raise Refused(f"{self.server}: the server must be an https URL")
        try:
            channel = http.client.HTTPSConnection(place.hostname, place.port or 443, timeout=10, context=self.context())
            headers = {"Content-Type": "application/json"}
            if self.token:
                headers["Authorization"] = f"Bearer {self.token}"
            channel.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = channel.getresponse()
            status, data = answer.status, answer.read()
            channel.close()
        except ssl.SSLCertVerificationError as error:
            why = {
                9: "certificate has expired or is not yet valid",
                10: "certificate has expired or is not yet valid",
            }.get(error.verify_code, "certificate signed by unknown authority")
            if error.verify_code in (62, 64):
                why = f"certificate is valid for other names, not {place.hostname}"
            raise Refused(f'{method} "{self.server}{path}": tls: failed to verify certificate: x509: {why}') from None
        except socket.timeout:
            raise Refused(
                f'{method} "{self.server}{path}": net/http: request canceled (Client.Timeout exceeded)'
            ) from None
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise Refused(f'{method} "{self.server}{path}": dial tcp {place.netloc}: connect: {why}') from None
        if status == 401:
            raise Refused("Unauthorized")
        if status == 403:
            raise Refused(json.loads(data).get("message", "Forbidden"))
        return status, json.loads(data) if data.startswith(b"{") else {}


def still_valid(path):
    """isClientConfigStillValid: the kubeconfig is there, its certificate can be loaded and has not run out."""
    if not os.path.exists(path):
        return False
    try:
        config = Config(path)
        config.context()
        certificate = x509.load_pem_x509_certificate(Path(config.certificate).read_bytes())
        end = certificate.not_valid_after.replace(tzinfo=datetime.timezone.utc)
        if datetime.datetime.now(datetime.timezone.utc) > end:
            log(
                "E",
                f'"Unhandled Error" err="part of the existing bootstrap client certificate {path} is expired: {end}"',
            )
            return False
        return True
    except (Refused, OSError, ValueError) as error:
        log("E", f'"Unhandled Error" err="unable to load configuration from {path}: {error}"')
        return False


class Joining:
    """What a kubelet with a kubeconfig does."""

    def __init__(self, flags, config, node):
        self.flags, self.config, self.node = flags, config, node
        self.pki = Path(flags["cert-dir"])
        self.current = self.pki / "kubelet-client-current.pem"

    def load(self):
        """LoadClientConfig: for certificates, and for all else."""
        path, bootstrap = self.flags["kubeconfig"], self.flags["bootstrap-kubeconfig"]
        if not bootstrap:
            try:
                return None, Config(path)
            except Refused as error:
                raise Refused(f"unable to load kubeconfig: {error}") from None
        if still_valid(path):
            return None, Config(path)
        try:
            asking = Config(bootstrap)
        except Refused as error:
            raise Refused(f"unable to load bootstrap kubeconfig: {error}") from None
        value = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "default-cluster", "cluster": {"certificate-authority": asking.ca, "server": asking.server}}
            ],
            "contexts": [
                {
                    "name": "default-context",
                    "context": {"cluster": "default-cluster", "namespace": "default", "user": "default-auth"},
                }
            ],
            "current-context": "default-context",
            "preferences": {},
            "users": [
                {
                    "name": "default-auth",
                    "user": {"client-certificate": str(self.current), "client-key": str(self.current)},
                }
            ],
        }
        os.makedirs(os.path.dirname(path), exist_ok=True)
        new = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(new, "w") as file:
            yaml.safe_dump(value, file)
        return asking, path

    def key(self):
        """LoadOrGenerateKeyFile: one key for all tries of a request."""
        path = self.pki / "kubelet-client.key.tmp"
        if path.exists():
            return load_pem_private_key(path.read_bytes(), None)
        key = ec.generate_private_key(ec.SECP256R1())
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
        return key

    def ask(self, asking):
        """Request a certificate and wait for it; raises Refused."""
        self.pki.mkdir(parents=True, exist_ok=True)
        key = self.key()
        name = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, "system:nodes"),
                x509.NameAttribute(NameOID.COMMON_NAME, f"system:node:{self.node}"),
            ]
        )
        request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
        spec = {
            "request": base64.b64encode(request.public_bytes(Encoding.PEM)).decode(),
            "signerName": "kubernetes.io/kube-apiserver-client-kubelet",
            "usages": ["digital signature", "client auth"],
        }
        body = {
            "apiVersion": "certificates.k8s.io/v1",
            "kind": "CertificateSigningRequest",
            "metadata": {"generateName": "csr-"},
            "spec": spec,
        }
        place = "/apis/certificates.k8s.io/v1/certificatesigningrequests"
        status, made = asking.request("POST", place, body)
        if status != 201:
            raise Refused(f"cannot create certificate signing request: {made.get('message', status)}")
        end = time.monotonic() + 900
        while time.monotonic() < end:
            _, found = asking.request("GET", f"{place}/{made['metadata']['name']}")
            state = found.get("status", {})
            if any(item["type"] in ("Denied", "Failed") for item in state.get("conditions", [])):
                raise Refused(f"certificate signing request {made['metadata']['name']} was not approved: denied")
            if state.get("certificate"):
                return self.store(base64.b64decode(state["certificate"]), key)
            time.sleep(0.2)
        raise Refused("timed out waiting for the condition")

    def store(self, pem, key):
        """The file store of client-go: a dated file, and a link to it that is turned by a rename."""
        path = self.pki / f"kubelet-client-{datetime.datetime.now():%Y-%m-%d-%H-%M-%S}.pem"
        content = pem + key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        new = self.pki / "kubelet-client-updated.pem"
        new.unlink(missing_ok=True)
        new.symlink_to(path)
        new.rename(self.current)
        (self.pki / "kubelet-client.key.tmp").unlink(missing_ok=True)
        log("I", '"Certificate rotation detected, shutting down client connections to start using new credentials"')

    def run(self, asking, using):
        """In the background, for ever: the certificate, then node and lease."""
        while asking is not None:
            try:
                self.ask(asking)
                asking, using = None, Config(using)
            except Refused as error:
                log("E", f'"Failed while requesting a signed certificate from the control plane" err="{error}"')
                time.sleep(RETRY)
        registered = False
        while True:
            try:
                registered = registered or self.register(using)
                self.lease(using)
                time.sleep(10)
            except (Refused, OSError) as error:
                log("E", f'"Unable to register node with API server" err="{error}" node="{self.node}"')
                time.sleep(RETRY)

    def register(self, using):
        labels = dict(label.split("=", 1) for label in filter(None, self.flags["node-labels"].split(",")))
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.node, "labels": {**labels, "kubernetes.io/hostname": self.node}},
            "spec": {"taints": self.config.get("registerWithTaints", [])},
            "status": {
                "addresses": [
                    {"type": "InternalIP", "address": item} for item in self.flags["node-ip"].split(",") if item
                ],
                "nodeInfo": {"kubeletVersion": VERSION},
            },
        }
        status, answer = using.request("POST", "/api/v1/nodes", body)
        if status not in (201, 409):
            raise Refused(answer.get("message", str(status)))
        log("I", f'"Successfully registered node" node="{self.node}"')
        return True

    def lease(self, using):
        place = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        moment = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.node, "namespace": "kube-node-lease"},
            "spec": {"holderIdentity": self.node, "leaseDurationSeconds": 40, "renewTime": moment},
        }
        using.request("PUT", f"{place}/{self.node}", body)


# -- servers --------------------------------------------------------------------------------------------


class Health(http.server.BaseHTTPRequestHandler):
    """127.0.0.1:10248, for everybody."""

    def log_message(self, *_words):
        """Quiet."""

    def do_GET(self):
        self.answer(
            200 if self.path == "/healthz" else 404, b"ok" if self.path == "/healthz" else b"404 page not found\n"
        )

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Secured(Health):
    """Port 10250: a client certificate of the CA, or 401."""

    webhook = False
    node = ""

    def do_GET(self):
        if not self.connection.getpeercert():
            self.answer(401, b"Unauthorized")
        elif self.webhook:
            self.answer(403, b"Forbidden: this stand-in asks nobody whether you may")
        elif self.path in ("/healthz", "/pods"):
            self.answer(
                200, b"ok" if self.path == "/healthz" else b'{"kind": "PodList", "apiVersion": "v1", "items": []}'
            )
        else:
            self.answer(404, b"404 page not found\n")


class TLSServer(http.server.ThreadingHTTPServer):
    """TLS in each connection's own thread."""

    daemon_threads = True
    context = None

    def process_request_thread(self, request, client_address):
        try:
            request = self.context.wrap_socket(request, server_side=True)
        except (OSError, ssl.SSLError):
            self.shutdown_request(request)
            return
        super().process_request_thread(request, client_address)


def serving_pair(config, pki, node):
    """The configured pair, one that is there already whatever its dates, or a new one for a year."""
    if config.get("tlsCertFile"):
        return config["tlsCertFile"], config["tlsPrivateKeyFile"]
    certificate, key_path = pki / "kubelet.crt", pki / "kubelet.key"
    if certificate.exists() and key_path.exists():
        return certificate, key_path
    pki.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{node}@{int(time.time())}")])
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=365))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(node)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    certificate.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    with open(os.open(key_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
    return certificate, key_path


def serve(config, pki, node):
    """Both servers, in the background."""
    address = (config.get("healthzBindAddress", "127.0.0.1"), config.get("healthzPort", 10248))
    certificate, key = serving_pair(config, pki, node)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    authentication = config.get("authentication", {})
    ca = authentication.get("x509", {}).get("clientCAFile")
    if ca:
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_OPTIONAL
    Secured.webhook = config.get("authorization", {}).get("mode", "Webhook") == "Webhook"
    try:
        secured = TLSServer((config.get("address", "0.0.0.0"), config.get("port", 10250)), Secured)
        secured.context = context
        health = http.server.ThreadingHTTPServer(address, Health) if address[1] else None
    except OSError as error:
        raise Refused(f"failed to listen: {error.strerror}") from None
    for server in filter(None, (secured, health)):
        threading.Thread(target=server.serve_forever, daemon=True).start()


def run(argv):
    flags = parse_flags(argv)
    config = load_config(flags["config"]) if flags["config"] else {}
    node = (flags["hostname-override"] or socket.gethostname()).lower().strip()
    pki = Path(flags["cert-dir"])
    joining = Joining(flags, config, node) if flags["kubeconfig"] or flags["bootstrap-kubeconfig"] else None
    check_machine(config, flags)
    asking, using = joining.load() if joining else (None, None)
    runtime = None
    if os.environ.get("STANDIN_WITHOUT_RUNTIME") != "1":
        runtime = Runtime(config["containerRuntimeEndpoint"])
        try:
            log("I", f'"Container runtime initialized" containerRuntime="{runtime.version()}"')
        except runtime.error as error:
            raise Refused(f'validate service connection: validate CRI v1 runtime API: "{error.details()}"') from None
    os.makedirs(flags["root-dir"], exist_ok=True)
    for name in ("pods", "plugins", "plugins_registry", "pod-resources", "device-plugins"):
        os.makedirs(os.path.join(flags["root-dir"], name), exist_ok=True)
    if joining and asking is not None and not config.get("rotateCertificates", False):
        joining.ask(asking)
        asking, using = None, Config(using)
    serve(config, pki, node)
    log("I", f'"Starting to listen" kubeletVersion="{VERSION}" node="{node}" standalone={joining is None}')
    if joining:
        threading.Thread(target=joining.run, args=(asking, using), daemon=True).start()
    if runtime and config.get("staticPodPath"):
        threading.Thread(target=Pods(config, runtime, node).run, daemon=True).start()
    signal.pause()


def main():
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_words: os._exit(0))
    try:
        run(sys.argv[1:])
    except Refused as error:
        log("E", f'"command failed" err="failed to run Kubelet: {error}"')
        sys.exit(1)


if __name__ == "__main__":
    main()
