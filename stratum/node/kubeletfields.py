"""The fields of KubeletConfiguration (kubelet.config.k8s.io/v1beta1), by the release that has them.

Source: ``staging/src/k8s.io/kubelet/config/v1beta1/types.go`` of Kubernetes 1.32.7, and what the reference of later
releases adds. The kubelet decodes its file strictly: one unknown field and it does not start. So a field is refused
here, before anything is stopped, when the release is one whose list is complete; for a newer one it is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Optional, Union

from stratum.errors import StratumError, UsageError

__all__ = ["ANY", "NEWEST_LISTED", "OLDEST", "Release", "check_fields", "merge", "parse_release"]

Release = tuple[int, int]
OLDEST: Release = (1, 31)  # the oldest release that Stratum writes a configuration for
NEWEST_LISTED: Release = (1, 35)  # the newest one whose list of fields here is known to be complete
ANY: Release = (1, 999)  # where the release is not known: of the fields here, all are there

Kind = Union[str, Mapping[str, Any]]


def _all(kind: str, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


_TTL = {"cacheAuthorizedTTL": "duration", "cacheUnauthorizedTTL": "duration"}
_FIELDS: Mapping[str, Kind] = {
    "apiVersion": "str",
    "kind": "str",
    "authentication": {
        "x509": {"clientCAFile": "str"},
        "webhook": {"enabled": "bool", "cacheTTL": "duration"},
        "anonymous": {"enabled": "bool"},
    },
    "authorization": {"mode": "str", "webhook": _TTL},
    "crashLoopBackOff": {"maxContainerRestartPeriod": "duration"},
    "featureGates": "bools",
    "logging": "any",  # component-base's own structure
    "memorySwap": {"swapBehavior": "str"},
    "memoryThrottlingFactor": "float",
    "registerWithTaints": "objects",
    "reservedMemory": "objects",
    "shutdownGracePeriodByPodPriority": "objects",
    "staticPodURLHeader": "any",
    "tracing": {"endpoint": "str", "samplingRatePerMillion": "int"},
    "userNamespaces": {"idsPerPod": "int"},
    **_all(
        "bool",
        """enableServer rotateCertificates serverTLSBootstrap enableDebuggingHandlers enableContentionProfiling
        cgroupsPerQOS singleProcessOOMKill runOnce cpuCFSQuota serializeImagePulls enableControllerAttachDetach
        protectKernelDefaults makeIPTablesUtilChains failSwapOn kernelMemcgNotification enableSystemLogHandler
        enableSystemLogQuery enableProfilingHandler enableDebugFlagsHandler seccompDefault registerNode
        localStorageCapacityIsolation failCgroupV1 mergeDefaultEvictionSettings""",
    ),
    **_all(
        "int",
        """port readOnlyPort registryPullQPS registryBurst eventRecordQPS eventBurst healthzPort oomScoreAdj
        nodeLeaseDurationSeconds imageGCHighThresholdPercent imageGCLowThresholdPercent maxPods podPidsLimit
        nodeStatusMaxImages maxOpenFiles kubeAPIQPS kubeAPIBurst maxParallelImagePulls evictionMaxPodGracePeriod
        podsPerCore iptablesMasqueradeBit iptablesDropBit containerLogMaxFiles containerLogMaxWorkers""",
    ),
    **_all(
        "str",
        """staticPodPath podLogsDir staticPodURL address tlsCertFile tlsPrivateKeyFile tlsMinVersion
        healthzBindAddress clusterDomain kubeletCgroups systemCgroups cgroupRoot cgroupDriver cpuManagerPolicy
        memoryManagerPolicy topologyManagerPolicy topologyManagerScope hairpinMode podCIDR resolvConf contentType
        containerLogMaxSize configMapAndSecretChangeDetectionStrategy reservedSystemCPUs showHiddenMetricsForVersion
        systemReservedCgroup kubeReservedCgroup volumePluginDir providerID containerRuntimeEndpoint
        imageServiceEndpoint imagePullCredentialsVerificationPolicy memoryReservationPolicy""",
    ),
    **_all(
        "duration",
        """syncFrequency fileCheckFrequency httpCheckFrequency streamingConnectionIdleTimeout nodeStatusUpdateFrequency
        nodeStatusReportFrequency imageMinimumGCAge imageMaximumGCAge volumeStatsAggPeriod cpuManagerReconcilePeriod
        runtimeRequestTimeout cpuCFSQuotaPeriod evictionPressureTransitionPeriod containerLogMonitorInterval
        shutdownGracePeriod shutdownGracePeriodCriticalPods""",
    ),
    **_all(
        "strings",
        """tlsCipherSuites clusterDNS enforceNodeAllocatable allowedUnsafeSysctls
        preloadedImagesVerificationAllowlist""",
    ),
    **_all(
        "map",
        """cpuManagerPolicyOptions topologyManagerPolicyOptions qosReserved evictionHard evictionSoft
        evictionSoftGracePeriod evictionMinimumReclaim systemReserved kubeReserved""",
    ),
}
_SINCE: Mapping[str, Release] = {
    "crashLoopBackOff": (1, 32),
    "singleProcessOOMKill": (1, 32),
    "imagePullCredentialsVerificationPolicy": (1, 33),
    "mergeDefaultEvictionSettings": (1, 33),
    "preloadedImagesVerificationAllowlist": (1, 33),
    "userNamespaces": (1, 33),
    "memoryReservationPolicy": (1, 36),
}
# What decides who runs on the node and where its parts find each other.
_OURS = (
    "apiVersion",
    "kind",
    "cgroupDriver",
    "containerRuntimeEndpoint",
    "healthzBindAddress",
    "healthzPort",
    "imageServiceEndpoint",
    "volumePluginDir",
)
# Go's time.ParseDuration, without signs: no field of the kubelet takes a negative one.
_DURATION = re.compile(r"0|(?:[0-9]+(?:\.[0-9]*)?(?:ns|us|µs|ms|s|m|h))+")


def parse_release(version: str) -> Release:
    """The minor release of a kubelet version such as ``1.34.1`` or ``v1.35.0-rc.1``; raises :class:`StratumError`."""
    found = re.match(r"v?(\d+)\.(\d+)(?:[.\-+]|\Z)", version)
    if not found:
        raise StratumError("kubelet-version", f"kubelet {version!r}: cannot read its version")
    release = int(found[1]), int(found[2])
    if release < OLDEST or release[0] != 1:
        raise StratumError(
            "kubelet-version",
            f"kubelet {version}: only {OLDEST[0]}.{OLDEST[1]} and later releases of Kubernetes 1 are supported",
            hint="build a bundle with a newer kubelet",
        )
    return release


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``over`` laid over it: mappings are merged, anything else is replaced, None takes a field away."""
    merged = dict(base)
    for key, value in over.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            below = merged.get(key)
            merged[key] = merge(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def check_fields(config: Mapping[str, Any], release: Release) -> list[str]:
    """Check the user's own fields for a kubelet of ``release``; the warnings for what only a newer one could know.

    Raises :class:`UsageError` for a field that the release does not have, for a value of a wrong type, and for a
    field that Stratum sets for all parts of the node together.
    """
    warnings: list[str] = []
    for key in _OURS:
        if key in config:
            raise _invalid(key, "Stratum sets it: all parts of the node depend on it")
    _check(config, _FIELDS, "", release, warnings)
    return warnings


def _check(value: Mapping[str, Any], fields: Mapping[str, Any], where: str, release: Release, out: list[str]) -> None:
    for key, item in value.items():
        path = f"{where}{key}"
        kind = fields.get(key)
        since = _SINCE.get(path, OLDEST)
        if kind is None or since > release:
            if kind is None and release > NEWEST_LISTED:
                out.append(
                    f"spec.kubelet.config.{path}: not a field that Stratum knows of any kubelet, but passed on"
                    f"{_near(key, fields)}"
                )
                continue
            raise _invalid(path, f"a kubelet {release[0]}.{release[1]} has no such field" + _near(key, fields))
        if item is None:
            continue
        if isinstance(kind, Mapping):
            if not isinstance(item, Mapping):
                raise _invalid(path, "must be a mapping")
            _check(item, kind, f"{path}.", release, out)
        else:
            why = _why_wrong(item, kind)
            if why:
                raise _invalid(path, why)


def _why_wrong(item: object, kind: str) -> Optional[str]:
    """Why ``item`` is no value of ``kind``; None when it is one."""
    checks = {
        "bool": ("true or false", isinstance(item, bool)),
        "int": ("a whole number", isinstance(item, int) and not isinstance(item, bool)),
        "float": ("a number", isinstance(item, (int, float)) and not isinstance(item, bool)),
        "str": ("a string", isinstance(item, str)),
        "duration": (
            'a duration such as "30s" or "1m30s"',
            isinstance(item, str) and _DURATION.fullmatch(item) is not None,
        ),
        "strings": ("a list of strings", isinstance(item, (list, tuple)) and all(isinstance(x, str) for x in item)),
        "objects": (
            "a list of mappings",
            isinstance(item, (list, tuple)) and all(isinstance(x, Mapping) for x in item),
        ),
        "map": ("a mapping of strings to strings", _is_map(item, str)),
        "bools": ("a mapping of names to true or false", _is_map(item, bool)),
        "any": ("a mapping", isinstance(item, Mapping)),
    }
    wanted, right = checks[kind]
    return None if right else f"must be {wanted}"


def _is_map(item: object, kind: type) -> bool:
    """Whether it is a mapping of strings; None takes an entry away."""
    return isinstance(item, Mapping) and all(
        isinstance(key, str) and (value is None or isinstance(value, kind)) for key, value in item.items()
    )


def _near(key: str, fields: Mapping[str, Any]) -> str:
    import difflib

    found = difflib.get_close_matches(key, list(fields), 1)
    return f"; did you mean {found[0]}?" if found else ""


def _invalid(path: str, why: str) -> UsageError:
    return UsageError("kubelet-config", f"spec.kubelet.config.{path}: {why}", hint="correct the configuration file")
