"""The kubelet's configuration: what it says, what it refuses, and that a strict kubelet takes it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stratum.config import WORKER, Cluster, ExecCredential, Kubelet, NodeSpec, Taint
from stratum.errors import StratumError, UsageError
from stratum.node import kubeletconfig
from stratum.node.kubeconfig import render_json
from stratum.node.kubeletconfig import KubeletFacts, check_kubelet, kubelet_arguments, read_facts, reservations
from stratum.node.kubeletfields import check_fields, merge, parse_release
from stratum.node.settings import Settings
from stratum.system import HostPath
from tests.standins import kubelet as standin
from tests.unit.hosting import TreeMachine, put
from tests.unit.kubelets import FACTS, STANDALONE_SETTINGS, STANDINS, config_of, worker

RELEASES = ("1.31.0", "1.32.7", "1.33.1", "1.34.1", "1.35.0", "1.36.4", "1.37.2")


def with_config(settings: Settings, config: Mapping[str, Any], **more: Any) -> Settings:
    kubelet = Kubelet(config=config, **more)
    return dataclasses.replace(settings, spec=dataclasses.replace(settings.spec, kubelet=kubelet))


def strictly_read(path: Path, content: bytes) -> Any:
    """What a strict kubelet makes of a file; raises what that ends with."""
    path.write_bytes(content)
    return standin.load_config(str(path))


# -- what it says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [STANDALONE_SETTINGS, worker()], ids=["standalone", "worker"])
@pytest.mark.parametrize("version", RELEASES)
def test_a_strict_kubelet_takes_what_is_rendered(settings: Settings, version: str, tmp_path: Path) -> None:
    facts = dataclasses.replace(FACTS, version=version)
    content = kubeletconfig.render_kubelet_config(settings, facts)
    assert strictly_read(tmp_path / "config.yaml", content) == config_of(settings, facts)
    assert content == kubeletconfig.render_kubelet_config(settings, facts)


@pytest.mark.parametrize("settings", [STANDALONE_SETTINGS, worker()], ids=["standalone", "worker"])
def test_no_field_is_written_that_the_oldest_release_does_not_know(settings: Settings) -> None:
    mine = {key: value for key, value in config_of(settings).items() if key not in ("apiVersion", "kind")}
    for key in ("cgroupDriver", "containerRuntimeEndpoint", "healthzBindAddress", "healthzPort", "volumePluginDir"):
        mine.pop(key)
    assert check_fields(mine, (1, 31)) == []


def test_a_standalone_kubelet_asks_no_server_and_lets_only_its_own_client_in() -> None:
    config = config_of(STANDALONE_SETTINGS)
    assert config["authentication"] == {
        "anonymous": {"enabled": False},
        "webhook": {"enabled": False},
        "x509": {"clientCAFile": "/etc/stratum/kubelet/ca.crt"},
    }
    assert config["authorization"] == {"mode": "AlwaysAllow"}
    assert (config["rotateCertificates"], config["readOnlyPort"]) == (False, 0)


def test_a_worker_asks_its_cluster_who_may() -> None:
    config = config_of(worker(dns=("10.96.0.10",)))
    assert config["authentication"]["webhook"] == {"enabled": True}
    assert config["authentication"]["anonymous"] == {"enabled": False}
    assert config["authorization"] == {"mode": "Webhook"}
    assert (config["rotateCertificates"], config["clusterDNS"]) == (True, ["10.96.0.10"])
    assert "serverTLSBootstrap" not in config, "nobody approves such requests unless somebody set that up"


def test_the_volume_plugin_directory_is_ours_and_not_in_usr() -> None:
    """Row 23: /usr may be read-only, and the kubelet's default is /usr/libexec/kubernetes."""
    for settings in (STANDALONE_SETTINGS, worker()):
        config = config_of(settings)
        assert config["volumePluginDir"] == "/var/lib/stratum/kubelet-plugins"
        assert not [value for value in config.values() if str(value).startswith("/usr")]


def test_a_program_that_gives_credentials_renews_them_itself() -> None:
    assert config_of(worker(exec=ExecCredential("/bin/true")))["rotateCertificates"] is False


def test_localdns_is_what_pods_ask_where_there_is_one() -> None:
    settings = worker(dns=("10.96.0.10",))
    assert config_of(settings)["clusterDNS"] == ["10.96.0.10"]
    facts = dataclasses.replace(FACTS, local_dns=("169.254.20.10",))
    assert config_of(settings, facts)["clusterDNS"] == ["169.254.20.10"]


def test_kernel_settings_are_demanded_in_the_profile_cis_only() -> None:
    for profile, wanted in (("default", False), ("cis", True)):
        spec = dataclasses.replace(STANDALONE_SETTINGS.spec, profile=profile)
        config = config_of(dataclasses.replace(STANDALONE_SETTINGS, spec=spec))
        assert config["protectKernelDefaults"] is wanted


def test_taints_are_those_a_worker_registers_with() -> None:
    kubelet = Kubelet(taints=(Taint("dedicated", "gpu"), Taint("x/y", effect="NoExecute")))
    settings = worker()
    config = config_of(dataclasses.replace(settings, spec=dataclasses.replace(settings.spec, kubelet=kubelet)))
    assert config["registerWithTaints"] == [
        {"key": "dedicated", "value": "gpu", "effect": "NoSchedule"},
        {"key": "x/y", "value": "", "effect": "NoExecute"},
    ]


# -- reservations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gib", "cpus", "cpu", "memory"),
    [(1, 1, "60m", "256Mi"), (4, 2, "70m", "1024Mi"), (8, 4, "80m", "1843Mi"), (16, 8, "90m", "2662Mi")],
)
def test_reservations_follow_the_published_steps(gib: int, cpus: int, cpu: str, memory: str) -> None:
    assert reservations(gib << 30, cpus) == {"cpu": cpu, "memory": memory}


@given(memory=st.integers(256 << 20, 1 << 42), cpus=st.integers(1, 512))
def test_most_of_any_machine_is_left_for_pods(memory: int, cpus: int) -> None:
    found = reservations(memory, cpus)
    evicted = 100 << 20
    assert int(found["memory"][:-2]) << 20 <= memory // 4
    assert memory - (int(found["memory"][:-2]) << 20) - evicted > 0
    assert 0 < int(found["cpu"][:-1]) < cpus * 1000 // 4


# -- the user's own fields --------------------------------------------------------------------------------


def test_the_users_fields_are_laid_over_ours() -> None:
    config = {"maxPods": 30, "evictionHard": {"memory.available": "500Mi"}, "enforceNodeAllocatable": ["none"]}
    found = config_of(with_config(STANDALONE_SETTINGS, {**config, "podPidsLimit": None}))
    assert found["maxPods"] == 30
    assert found["evictionHard"]["memory.available"] == "500Mi"
    assert found["evictionHard"]["nodefs.available"] == "10%", "one signal does not put the others to zero"
    assert found["enforceNodeAllocatable"] == ["none"]
    assert "podPidsLimit" not in found


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"maxPodz": 30}, "did you mean maxPods"),
        ({"authentication": {"x508": {}}}, "authentication.x508"),
        ({"maxPods": "30"}, "whole number"),
        ({"maxPods": True}, "whole number"),
        ({"failSwapOn": "false"}, "true or false"),
        ({"syncFrequency": "soon"}, "duration"),
        ({"syncFrequency": 30}, "duration"),
        ({"clusterDNS": "10.0.0.1"}, "list of strings"),
        ({"evictionHard": {"memory.available": 5}}, "mapping of strings"),
        ({"authentication": True}, "must be a mapping"),
        ({"containerRuntimeEndpoint": "unix:///run/x"}, "Stratum sets it"),
        ({"healthzPort": None}, "Stratum sets it"),
        ({"memoryReservationPolicy": "None"}, "a kubelet 1.34 has no such field"),
    ],
)
def test_a_field_that_the_kubelet_would_not_take_is_refused_with_its_path(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        config_of(with_config(STANDALONE_SETTINGS, config))
    assert caught.value.reference == "kubelet-config"
    assert words in caught.value.message and "spec.kubelet.config." in caught.value.message


def test_a_field_is_refused_for_a_release_that_came_before_it() -> None:
    field = {"crashLoopBackOff": {"maxContainerRestartPeriod": "60s"}}
    assert check_fields(field, (1, 32)) == []
    with pytest.raises(UsageError, match=r"1\.31 has no such field"):
        check_fields(field, (1, 31))


def test_a_field_nobody_knows_is_a_warning_for_a_kubelet_newer_than_the_list() -> None:
    spec = with_config(STANDALONE_SETTINGS, {"brandNew": 1}).spec
    (warning,) = check_kubelet(spec, "1.37.0")
    assert "spec.kubelet.config.brandNew" in warning
    with pytest.raises(UsageError):
        check_kubelet(spec, "1.35.4")


def test_every_field_of_the_strict_kubelet_is_known_with_the_same_type() -> None:
    """The stand-in has a list of its own, of the same source."""
    values: dict[str, Any] = {
        "bool": True, "int": 1, "float": 0.5, "string": "x", "duration": "1m30s", "[]string": ["x"], "map": {"a": "b"},
        "object": {}, "[]object": [{}],
    }  # fmt: skip
    ours = {"apiVersion", "kind", "cgroupDriver", "containerRuntimeEndpoint", "imageServiceEndpoint", "volumePluginDir"}
    ours |= {"healthzPort", "healthzBindAddress"}
    for name, kind in standin.FIELDS.items():
        if name not in ours:
            assert check_fields({name: values[kind]}, (1, 34)) == [], name
    with pytest.raises(UsageError):
        check_fields({"dynamicConfigDir": "x"}, (1, 34))


@pytest.mark.parametrize("version", ["1.30.9", "2.0.0", "current", "1.x"])
def test_a_kubelet_that_is_not_supported_is_refused(version: str) -> None:
    with pytest.raises(StratumError) as caught:
        parse_release(version)
    assert caught.value.reference == "kubelet-version" and version in caught.value.message


# -- merging, and the file's form ---------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
MAPPINGS = st.dictionaries(st.text(max_size=3), VALUES, max_size=4)


@given(MAPPINGS, MAPPINGS)
def test_merging_gives_each_key_of_the_upper_mapping_and_keeps_the_rest(
    base: dict[str, Any], over: dict[str, Any]
) -> None:
    copy = json.dumps([base, over])
    found = merge(base, over)
    assert json.dumps([base, over]) == copy, "neither is changed"
    assert set(found) == (set(base) | set(over)) - {key for key, value in over.items() if value is None}
    for key, value in over.items():
        if value is not None and not isinstance(value, dict):
            assert found[key] == value
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            assert found[key] == merge(base[key], value)
    assert all(found[key] == base[key] for key in base if key not in over)
    assert merge(found, over) == found


@given(MAPPINGS)
def test_what_is_rendered_is_yaml_with_the_same_value(value: dict[str, Any]) -> None:
    content = render_json(value, "a comment")
    assert content.startswith(b"# a comment\n")
    assert yaml.safe_load(content.decode()) == value


# -- arguments and labels -----------------------------------------------------------------------------------


def test_arguments_are_those_that_a_kubelet_has_and_hold_no_secret() -> None:
    settings = with_config(worker(), {}, labels={"node.kubernetes.io/pool": "a", "zone": "b"})
    words = kubelet_arguments(settings)
    assert words == (
        "--hostname-override=node-1",
        "--node-ip=192.0.2.10",
        "--kubeconfig=/var/lib/kubelet/kubeconfig",
        "--bootstrap-kubeconfig=/etc/stratum/kubelet/bootstrap-kubeconfig",
        "--node-labels=node.kubernetes.io/pool=a,zone=b",
    )
    assert standin.parse_flags(list(words))["node-ip"] == "192.0.2.10"
    assert kubelet_arguments(STANDALONE_SETTINGS) == words[:2]


def test_a_given_credential_has_a_kubeconfig_of_ours() -> None:
    for cluster in ({"exec": ExecCredential("/bin/true")}, {"client_certificate_file": "/x", "client_key_file": "/y"}):
        assert "--kubeconfig=/etc/stratum/kubelet/kubeconfig" in kubelet_arguments(worker(**cluster))


# -- the machine ----------------------------------------------------------------------------------------------


def test_the_facts_are_read_from_procfs(tmp_path: Path) -> None:
    host = TreeMachine(str(tmp_path))
    put(host, "/proc/meminfo", "MemTotal:        2048 kB\nMemFree: 1 kB\n")
    put(host, "/proc/cpuinfo", "processor\t: 0\nmodel\t: x\n\nprocessor\t: 1\n")
    assert read_facts(host, "1.34.1", None).resolv_conf == ""
    assert read_facts(host, "1.34.1", HostPath("/etc/resolv.conf")) == KubeletFacts(
        "1.34.1", 2048 << 10, 2, "/etc/resolv.conf"
    )


# -- the stand-in is strict -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kind: KubeletConfiguration\n", "no kind"),
        (
            "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPodz: 1\n",
            'unknown field "maxPodz"',
        ),
        ("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: a\n", "cannot unmarshal"),
        ("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nport: 1\nport: 2\n", "already set"),
        ("{", "while parsing"),
    ],
)
def test_the_stand_in_refuses_what_the_real_one_refuses(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    argv = [sys.executable, str(STANDINS / "kubelet.py"), f"--config={tmp_path}/config.yaml"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and words in done.stderr


MINIMAL: dict[str, Any] = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authentication": {"webhook": {"enabled": False}, "anonymous": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "containerRuntimeEndpoint": "unix:///nowhere/containerd.sock",
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "no authentication method configured"),
        ({"authentication": {"anonymous": {"enabled": True}}}, "cannot use webhook authentication"),
        ({"authorization": {}, "authentication": {"webhook": {"enabled": False}}}, "cannot use webhook authorization"),
        ({"authentication": {"x509": {"clientCAFile": "/nowhere/ca.crt"}}}, "unable to load client CA file"),
        ({"protectKernelDefaults": True}, "invalid kernel flag: vm/overcommit_memory, expected value: 1"),
        ({"cgroupDriver": "cgroupfs"}, "cgroupDriver"),
        ({"containerRuntimeEndpoint": ""}, "container runtime endpoint"),
        ({"resolvConf": "/nowhere/resolv.conf"}, "no such file"),
        ({"staticPodPath": "/nowhere/manifests"}, "no such directory"),
        ({"kubeReserved": {"memory": "1 GB"}}, "kubeReserved"),
        ({"evictionHard": {"memory.free": "5%"}}, "unknown eviction signal"),
    ],
)  # fmt: skip
def test_the_stand_in_does_not_start_on_what_the_real_one_does_not_start_on(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    opened = {"authentication": {"webhook": {"enabled": False}, "anonymous": {"enabled": True}}}
    config = {**MINIMAL, "resolvConf": "", **(opened if changes else {}), **changes}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "sys/vm").mkdir(parents=True)
    (tmp_path / "sys/vm/overcommit_memory").write_text("0\n")
    (tmp_path / "swaps").write_text("Filename\n")
    argv = [sys.executable, str(STANDINS / "kubelet.py"), f"--config={tmp_path}/config.yaml"]
    env = {"STANDIN_PROC": str(tmp_path), "STANDIN_WITHOUT_RUNTIME": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 1 and words in done.stderr, done.stderr


def test_the_stand_in_knows_its_version_and_no_flag_of_the_past() -> None:
    argv = [sys.executable, str(STANDINS / "kubelet.py")]
    done = subprocess.run([*argv, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "Kubernetes v1.34.1\n"
    done = subprocess.run(
        [*argv, "--container-runtime=remote"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and "unknown flag: --container-runtime" in done.stderr


def test_the_default_role_is_standalone() -> None:
    assert NodeSpec().role != WORKER and Cluster().server == ""
