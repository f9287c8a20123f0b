"""The configuration file: strict reading with file and line, checks of the values, and the form that is recorded."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stratum import kubenames
from stratum.config import (
    CONFIG_PATH,
    Cluster,
    Containerd,
    ExecCredential,
    Kubelet,
    LocalDNS,
    Mirror,
    Network,
    NodeSpec,
    Registry,
    Secret,
    Taint,
)
from stratum.configchecks import OWNED, check_join
from stratum.configcodec import field_paths, get_field, set_field, spec_from_json, spec_to_json
from stratum.configfile import ConfigFile, parse_config, read_config, read_given_file
from stratum.configvalues import parse_address, parse_network, why_no_network, why_no_url
from stratum.errors import ExitCode, UsageError
from stratum.host.profiles import PROFILES
from stratum.system import Host, PathLike
from tests.unit.hosting import TreeMachine, link, put

HEAD = "apiVersion: stratum.dev/v1\nkind: Node\nspec:\n"
TOKEN = "abcdef.0123456789abcdef"
WORKER = """\
  role: worker
  cluster:
    server: https://192.0.2.1:6443
    caFile: /root/ca.crt
    tokenFile: /root/token
"""
EVERYTHING = """\
  role: worker
  nodeName: node-1.example
  profile: cis
  selinux: false
  network:
    nodeIP: 192.0.2.10,2001:db8::10
    clusterCIDRs: [10.244.0.0/16, 10.96.0.0/12, fd00:1::/56]
    bridge: true
    bridgeSubnet: 172.30.0.0/24
  proxy:
    http: http://user:secret@proxy.example:3128
    https: http://proxy.example:3128
    noProxy: [example.com, .internal, 10.0.0.0/8]
  cluster:
    server: https://[2001:db8::1]:6443
    ca: |
      -----BEGIN CERTIFICATE-----
      MIIB
      -----END CERTIFICATE-----
    exec:
      command: /usr/bin/token
      args: [get, "1"]
      env: {A: "", B: "x y"}
      apiVersion: client.authentication.k8s.io/v1beta1
    dns: [10.96.0.10, "fd00:1::a"]
    domain: cluster.example
  kubelet:
    config:
      maxPods: 50
      evictionHard: {memory.available: 100Mi}
      featureGates: {A: true, B: false}
      ratio: 0.5
      nothing: null
      list: [1, a, [b]]
    labels: {example.com/rack: r1, plain: "", node.kubernetes.io/x: y}
    taints:
      - {key: dedicated, value: gpu, effect: NoExecute}
      - {key: other}
    launchCheck: [/usr/local/bin/allow, --strict]
  containerd:
    registries:
      - name: docker.io
        upstream: false
        mirrors:
          - url: https://mirror.example:5000/v2
            caFile: /etc/ca.crt
            clientCertificateFile: /etc/c.crt
            clientKeyFile: /etc/c.key
            skipVerify: true
            overridePath: true
            username: u
            passwordFile: /root/password
      - name: "[2001:db8::5]:5000"
        mirrors: [{url: "http://m"}]
  localDNS:
    enabled: true
    address: 169.254.20.11
    upstream: [192.0.2.53, "192.0.2.54:5353", "[2001:db8::53]:53"]
  gpu:
    nvidia: off
"""


def parsed(body: str) -> ConfigFile:
    return parse_config((HEAD + body).encode(), "n.yaml")


def refusal(text: str, *, head: str = HEAD) -> str:
    with pytest.raises(UsageError) as caught:
        parse_config((head + text).encode(), "n.yaml")
    assert caught.value.reference == "config-invalid"
    assert caught.value.exit_code == ExitCode.USAGE
    return caught.value.message


def problems(body: str) -> list[str]:
    """What is wrong, with file and line; what is odd begins with a word that says so."""
    config = parsed(body)
    found = config.problems(PROFILES)
    assert [problem.odd for problem in found] == sorted(problem.odd for problem in found)
    return [("odd: " if problem.odd else "") + config.error(problem).message for problem in found]


# -- reading --------------------------------------------------------------------------------------------------


def test_no_field_is_needed() -> None:
    assert parsed("  {}\n").spec == NodeSpec()


def test_each_field_is_read_with_its_type() -> None:
    config = parsed(EVERYTHING)
    assert problems(EVERYTHING) == []
    spec = config.spec
    assert (spec.role, spec.node_name, spec.profile, spec.selinux) == ("worker", "node-1.example", "cis", False)
    assert spec.network == Network(
        "192.0.2.10,2001:db8::10", ("10.244.0.0/16", "10.96.0.0/12", "fd00:1::/56"), True, "172.30.0.0/24"
    )
    assert spec.proxy.no_proxy == ("example.com", ".internal", "10.0.0.0/8")
    assert spec.cluster.exec == ExecCredential(
        "/usr/bin/token", ("get", "1"), {"A": "", "B": "x y"}, "client.authentication.k8s.io/v1beta1"
    )
    assert spec.cluster.ca.startswith("-----BEGIN CERTIFICATE-----\nMIIB\n")
    assert spec.kubelet.config["list"] == [1, "a", ["b"]] and spec.kubelet.config["nothing"] is None
    assert spec.kubelet.config["featureGates"] == {"A": True, "B": False} and spec.kubelet.config["ratio"] == 0.5
    assert spec.kubelet.taints == (Taint("dedicated", "gpu", "NoExecute"), Taint("other"))
    assert spec.containerd.registries[0].mirrors[0] == Mirror(
        "https://mirror.example:5000/v2", "/etc/ca.crt", "/etc/c.crt", "/etc/c.key", True, True, "u", "/root/password"
    )
    assert spec.local_dns == LocalDNS(True, "169.254.20.11", ("192.0.2.53", "192.0.2.54:5353", "[2001:db8::53]:53"))
    assert spec.gpu.nvidia == "off", "the word, whatever YAML 1.1 takes it for"
    unset = {"cluster.caFile", "cluster.token", "cluster.tokenFile"}
    unset |= {"cluster.clientCertificateFile", "cluster.clientKeyFile"}
    assert {path for path in field_paths() if not config.sets(path)} == unset


@pytest.mark.parametrize(
    ("head", "why"),
    {
        "": "n.yaml:1: the file is empty",
        "[": "n.yaml:1: not YAML",
        "a: b: c": "n.yaml:1: not YAML: mapping values are not allowed here",
        "- a": "n.yaml:1: must be a mapping, not a list",
        "kind: Node\nspec: {}": "n.yaml:1: the field apiVersion is missing",
        "apiVersion: stratum.dev/v1\nkind: Node": "n.yaml:1: the field spec is missing",
        "apiVersion: stratum.dev/v2\nkind: Node\nspec: {}": "n.yaml:1: apiVersion: must be stratum.dev/v1",
        "apiVersion: stratum.dev/v1\nkind: Pod\nspec: {}": "n.yaml:2: kind: must be Node, not 'Pod'",
        "apiVersion: stratum.dev/v1\nkind: Node\nspec:": "n.yaml:3: spec: must be a mapping, not nothing",
        HEAD + "  {}\n---\n{}": "not YAML: but found another document",
        "apiVersion: stratum.dev/v1\nkind: Node\nspec: !!python/object:os.system {}": "",
    }.items(),
)
def test_a_document_of_another_kind_is_refused(head: str, why: str) -> None:
    if why:
        assert why in refusal("", head=head)
    else:
        assert parse_config(head.encode(), "n.yaml").spec == NodeSpec(), "a tag is not obeyed"


@pytest.mark.parametrize(
    ("body", "why"),
    {
        "  rol: worker\n": "n.yaml:4: spec.rol: unknown field (did you mean role?)",
        "  role: worker\n  role: worker\n": "n.yaml:5: spec.role: stands twice (first in line 4)",
        "  role: ''\n": "n.yaml:4: spec.role: must not be empty",
        "  role: [a]\n": "n.yaml:4: spec.role: must be a single value, not a list",
        "  nodeName: 7\n": "n.yaml:4: spec.nodeName: must be a string, not 7 (put it in quotes",
        "  nodeName:\n": "n.yaml:4: spec.nodeName: must be a string, not nothing",
        "  selinux: yes\n": "n.yaml:4: spec.selinux: must be true or false, not yes",
        "  selinux: 'true'\n": "n.yaml:4: spec.selinux: must be true or false",
        "  network: 10.0.0.1\n": "n.yaml:4: spec.network: must be a mapping, not a single value",
        "  network:\n    clusterCIDRs: 10.0.0.0/8\n": "n.yaml:5: spec.network.clusterCIDRs: must be a list",
        "  network:\n    clusterCidrs: []\n": "unknown field (did you mean clusterCIDRs?)",
        "  network:\n    clusterCIDRs:\n    - a\n    - [b]\n": "n.yaml:7: spec.network.clusterCIDRs[1]: must be",
        "  kubelet:\n    taints: [{value: x}]\n": "n.yaml:5: spec.kubelet.taints[0]: the field key is missing",
        "  kubelet:\n    labels: {a: 1}\n": "spec.kubelet.labels.a: must be a string, not 1",
        "  kubelet:\n    config: {a: 0x10}\n": "spec.kubelet.config.a: 0x10 is not the same to all readers",
        "  kubelet:\n    config: {a: {b: 2020-01-01}}\n": "spec.kubelet.config.a.b: 2020-01-01 is not the same",
        "  kubelet:\n    config: {a: on}\n": "spec.kubelet.config.a: must be true or false, not on",
        "  kubelet:\n    config: {a: .inf}\n": "spec.kubelet.config.a: .inf is not the same",
        "  kubelet:\n    config: [1]\n": "spec.kubelet.config: must be a mapping, not a list",
        "  cluster:\n    exec: {args: [a]}\n": "n.yaml:5: spec.cluster.exec: the field command is missing",
        '  nodeName: "a\\nb"\n': "spec.nodeName: has a character that cannot be printed",
    }.items(),
)
def test_a_field_that_is_unknown_wrong_empty_or_there_twice_is_refused_with_its_line(body: str, why: str) -> None:
    assert why in refusal(body)


@pytest.mark.parametrize("token", ["1234567890", "[secret-7]", "'a secret-7'", "{secret-7: x}", "'secret-7é'", "true"])
def test_a_token_is_never_shown_in_an_error(token: str) -> None:
    said = refusal(f"  cluster:\n    token: {token}\n")
    assert "n.yaml:5: spec.cluster.token: " in said
    assert "secret" not in said and "1234567890" not in said and "not true" not in said


def test_a_token_is_not_in_any_text_of_a_configuration() -> None:
    config = parsed(f"  role: worker\n  cluster: {{token: {TOKEN}}}\n")
    assert config.spec.cluster.token == Secret(TOKEN)
    assert TOKEN not in f"{config!r} {config} {config.spec.cluster} {config.spec.cluster.token}"


def test_a_document_that_unfolds_without_end_is_refused() -> None:
    lines = ["  kubelet:", "    config:", "      a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"      a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    assert "unfolds to more than" in refusal("\n".join(lines) + "\n")


# -- the file -------------------------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(str(tmp_path), {})


def file_of(host: Host) -> Path:
    return Path(f"{host.root}{CONFIG_PATH}")


def test_a_host_without_the_file_has_no_configuration(host: Host) -> None:
    assert read_config(host) is None


def test_the_standard_file_is_read_from_the_hosts_tree(host: Host) -> None:
    put(host, str(CONFIG_PATH), HEAD + "  profile: cis\n")
    config = read_config(host)
    assert config is not None and config.spec.profile == "cis" and config.name == str(CONFIG_PATH)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_with_a_token_that_others_can_read_is_refused_by_its_mode(host: Host, mode: int) -> None:
    put(host, str(CONFIG_PATH), HEAD + f"  role: worker\n  cluster: {{token: {TOKEN}}}\n")
    file_of(host).chmod(mode)
    with pytest.raises(UsageError) as caught:
        read_config(host)
    assert f"{CONFIG_PATH}:5: spec.cluster.token: the file has a token and mode {mode:04o}" in caught.value.message
    assert TOKEN not in str(caught.value) and "chmod 0600" in (caught.value.hint or "")
    file_of(host).chmod(0o600)
    assert read_config(host) is not None


def test_a_link_is_judged_by_its_target(host: Host) -> None:
    put(host, "/srv/n.yaml", HEAD + f"  cluster: {{token: {TOKEN}}}\n")
    link(host, str(CONFIG_PATH), "/srv/n.yaml")
    Path(host.root + "/srv/n.yaml").chmod(0o644)
    with pytest.raises(UsageError, match="mode 0644"):
        read_config(host)
    Path(host.root + "/srv/n.yaml").chmod(0o400)
    assert stat.S_IMODE(os.lstat(file_of(host)).st_mode) == 0o777
    assert read_config(host) is not None


class Owned(TreeMachine):
    """A machine on which every file belongs to one user."""

    owner = 0

    def stat(self, path: PathLike) -> os.stat_result:
        fields = list(super().stat(path))
        fields[stat.ST_UID] = self.owner
        return os.stat_result(fields)


def test_the_hosts_file_is_refused_when_it_is_another_users(tmp_path: Path) -> None:
    host = Owned(str(tmp_path), {})
    put(host, str(CONFIG_PATH), HEAD + "  role: standalone\n")
    for host.owner in (0, os.geteuid()):
        assert read_config(host) is not None
    host.owner = os.geteuid() + 1000
    with pytest.raises(UsageError, match=r"belongs to user \d+, who could change what root will run") as caught:
        read_config(host)
    assert str(caught.value.hint) == f"run: chown root: {CONFIG_PATH}"
    # Whoever names a file says whose settings these are.
    assert read_config(host, str(tmp_path) + str(CONFIG_PATH)) is not None


def test_a_file_that_anybody_may_write_is_refused(host: Host) -> None:
    put(host, str(CONFIG_PATH), HEAD + "  {}\n")
    file_of(host).chmod(0o666)
    with pytest.raises(UsageError, match="mode 0666: anybody could change"):
        read_config(host)


def test_what_is_no_file_is_refused_at_once(host: Host, tmp_path: Path) -> None:
    file_of(host).parent.mkdir(parents=True)
    os.mkfifo(file_of(host))
    with pytest.raises(UsageError, match="not a regular file"):
        read_config(host)
    for name in (str(tmp_path), "/dev/zero"):
        with pytest.raises(UsageError, match="not a regular file"):
            read_config(host, name)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_config(host, str(tmp_path / "none"))
    link(host, "/etc/stratum/other", "nowhere")
    file_of(host).unlink()
    file_of(host).symlink_to("nowhere")
    with pytest.raises(UsageError, match="cannot be read"):
        read_config(host)
    (tmp_path / "large").write_bytes(b"#" * (1 << 20) + b"#")
    with pytest.raises(UsageError, match="longer than"):
        read_config(host, str(tmp_path / "large"))


# -- values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "why"),
    {
        "  role: master\n": "n.yaml:4: spec.role: 'master' is not known (known: standalone, worker)",
        "  role: Worker\n": "did you mean worker?",
        "  profile: CIS\n": "n.yaml:4: spec.profile: 'CIS' is not known",
        "  nodeName: Node_1\n": "n.yaml:4: spec.nodeName: 'Node_1' must consist of a-z, 0-9, - and .",
        f"  nodeName: {'a' * 64}\n": "has 64 characters; the name becomes a label, which has at most 63",
        "  nodeName: localhost\n": "is no name that tells one host from another",
        "  network: {nodeIP: 192.0.2.300}\n": "'192.0.2.300' is not an IP address",
        "  network: {nodeIP: 010.0.0.1}\n": "'010.0.0.1' is not an IP address",
        "  network: {nodeIP: 'fe80::1%eth0'}\n": "is not an IP address",
        "  network: {nodeIP: '2001:db8::1'}\n": "must be an IPv4 address: without network.clusterCIDRs",
        "  network: {nodeIP: 192.0.2.1, clusterCIDRs: ['fd00::/56']}\n": "must be an IPv6 address: the families of",
        "  network: {nodeIP: '2001:db8::1,192.0.2.1', clusterCIDRs: ['fd00::/56', 10.0.0.0/16]}\n": "in that order",
        "  network:\n    clusterCIDRs:\n    - 10.0.0.0/16\n    - 10.1.0.0\n": "n.yaml:7: spec.network.clusterCIDRs[1]",
        "  network: {clusterCIDRs: [10.0.0.1/8]}\n": "bits set behind its prefix; the network is 10.0.0.0/8",
        "  network: {clusterCIDRs: [10.0.0.0/255.0.0.0]}\n": "'10.0.0.0/255.0.0.0'",
        "  network: {clusterCIDRs: [10.0.0.0/8, 10.9.0.0/16]}\n": "10.9.0.0/16 overlaps 10.0.0.0/8",
        "  network: {clusterCIDRs: [10.0.0.0/8, 10.0.0.0/8]}\n": "10.0.0.0/8 stands twice",
        "  network: {bridge: false, bridgeSubnet: 172.30.0.0/24}\n": "bridgeSubnet: there is no bridge network",
        "  network: {bridgeSubnet: 172.30.0.0/30}\n": "has 4 addresses, 8 are needed",
        "  network: {bridgeSubnet: 10.3.0.0/24, clusterCIDRs: [10.0.0.0/8]}\n": "overlaps 10.0.0.0/8 of network",
        "  proxy: {http: proxy:3128}\n": "must be a URL that starts with http:// or https:// or socks5://",
        "  proxy: {https: 'ftp://p'}\n": "must be a URL that starts with",
        "  proxy: {https: 'http://p', noProxy: ['a,b']}\n": "spec.proxy.noProxy[0]: 'a,b' must be one host name",
        "  cluster: {dns: [dns.example]}\n": "spec.cluster.dns[0]: 'dns.example' is not an IP address",
        "  cluster: {domain: Cluster.Local}\n": "spec.cluster.domain: must consist of",
        "  kubelet: {labels: {'a b': x}}\n": "spec.kubelet.labels.a b: must consist of letters, digits",
        "  kubelet: {labels: {a/b/c: x}}\n": "must be a name, or a domain, a slash and a name",
        "  kubelet: {labels: {EXAMPLE.com/b: x}}\n": "the part before the slash must consist of",
        "  kubelet: {labels: {a: '-x'}}\n": "the value '-x' must consist of",
        "  kubelet: {labels: {node-role.kubernetes.io/worker: ''}}\n": "a kubelet may not set this label",
        "  kubelet: {labels: {x.node-restriction.kubernetes.io/a: ''}}\n": "a kubelet may not set this label",
        "  kubelet: {taints: [{key: a, effect: noschedule}]}\n": "taints[0].effect: 'noschedule' is not known (did",
        "  kubelet: {taints: [{key: a}, {key: a, value: b}]}\n": "taints[1]: a with NoSchedule stands twice",
        "  kubelet: {taints: [{key: ''}]}\n": "taints[0].key: must consist of",
        "  kubelet: {launchCheck: [allow]}\n": "launchCheck[0]: 'allow' must be an absolute path",
        "  profile: cis\n  kubelet:\n    config: {protectKernelDefaults: false}\n": "n.yaml:6: spec.kubelet.config.",
        "  kubelet: {config: {authentication: {x509: {}}}}\n": "authentication.x509: is Stratum's to set on a stand",
        "  kubelet: {config: {authentication: {anonymous: {enabled: true}}}}\n": "anonymous: would let everybody who",
        "  containerd: {registries: [{name: 'https://r', mirrors: [{url: 'https://m'}]}]}\n": "name: 'https://r' is no",
        "  containerd: {registries: [{name: 'r:70000', mirrors: [{url: 'https://m'}]}]}\n": "is no registry",
        "  containerd:\n    registries:\n" + 2 * "    - {name: r, mirrors: [{url: 'https://m'}]}\n": "r stands twice",
        "  containerd: {registries: [{name: r}]}\n": "registries[0]: has no mirrors",
        "  containerd: {registries: [{name: r, upstream: false}]}\n": "registries[0]: has no mirrors",
        "  containerd: {registries: [{name: r, mirrors: [{url: 'http://m'}, {url: 'http://m'}]}]}\n": "url: stands tw",
        "  containerd: {registries: [{name: r, mirrors: [{url: m}]}]}\n": "mirrors[0].url: must be a URL that starts",
        "  containerd: {registries: [{name: r, mirrors: [{url: 'https://u:p@m'}]}]}\n": "no user name or password",
        "  containerd: {registries: [{name: r, mirrors: [{url: 'https://m', username: u}]}]}\n": "passwordFile is mis",
        "  containerd: {registries: [{name: r, mirrors: [{url: 'https://m', clientKeyFile: /k}]}]}\n": "Certificate",
        "  containerd: {registries: [{name: r, mirrors: [{url: 'https://m', caFile: ca.crt}]}]}\n": "an absolute path",
        "  localDNS: {address: 192.0.2.x}\n": "localDNS.address: '192.0.2.x' is not an IP",
        "  localDNS: {address: 8.8.8.8}\n": "must be a link-local or private address",
        "  localDNS: {address: 127.0.0.53}\n": "must be a link-local or private address",
        "  localDNS: {address: 10.1.2.3}\n  network: {clusterCIDRs: [10.0.0.0/8]}\n": "10.1.2.3 is in 10.0.0.0/8",
        "  localDNS: {address: 10.1.2.3}\n  network: {nodeIP: 10.1.2.3}\n": "is the node's own address",
        "  localDNS: {upstream: [169.254.20.10]}\n": "169.254.20.10 is LocalDNS itself",
        "  localDNS: {upstream: [dns.example]}\n": "'dns.example' is no address",
        "  localDNS: {upstream: [127.0.0.53]}\n": "127.0.0.53 is this host itself",
        "  localDNS: {upstream: ['[::1]:53']}\n": "[::1]:53 is this host itself",
        "  localDNS: {upstream: [0.0.0.0]}\n": "0.0.0.0 is this host itself",
        "  gpu: {nvidia: yes}\n": "gpu.nvidia: 'yes' is not known (known: auto, on, off)",
    }.items(),
)
def test_a_value_that_means_nothing_is_refused_with_its_place(body: str, why: str) -> None:
    found = [line for line in problems(body) if not line.startswith("odd: ")]
    assert len(found) == 1 and why in found[0], found
    assert found[0].startswith("n.yaml:")


@pytest.mark.parametrize("name", OWNED)
def test_a_kubelet_field_of_stratums_own_is_refused_with_the_reason(name: str) -> None:
    (found,) = problems(f"  kubelet:\n    config:\n      {name}: x\n")
    assert found == f"n.yaml:6: spec.kubelet.config.{name}: is Stratum's to set: {OWNED[name]}"


def test_fields_that_stratum_owns_under_conditions_are_free_without_them() -> None:
    assert problems("  kubelet: {config: {protectKernelDefaults: true, staticPodPath: /x}}\n") == []
    assert problems(WORKER + "  kubelet: {config: {authentication: {x509: {clientCAFile: /x}}}}\n") == []
    assert problems(WORKER + "  kubelet: {config: {authentication: {anonymous: {enabled: true}}}}\n") == []
    assert problems("  kubelet: {config: {authentication: {anonymous: {enabled: false}}}}\n") == []


@pytest.mark.parametrize(
    ("body", "why"),
    {
        "    token: abc\n": "n.yaml:8: spec.cluster.tokenFile: stands beside cluster.token: a node joins with one",
        "    exec: {command: /x}\n": "n.yaml:9: spec.cluster.exec: stands beside cluster.tokenFile",
        "    ca: x\n": "n.yaml:9: spec.cluster.ca: stands beside cluster.caFile",
        "    clientKeyFile: /k\n": "n.yaml:9: spec.cluster.clientKeyFile: cluster.clientCertificateFile is missing",
        "    clientCertificateFile: /c\n    clientKeyFile: /k\n": "clientCertificateFile: stands beside",
    }.items(),
)
def test_a_node_joins_with_one_credential_and_one_ca(body: str, why: str) -> None:
    assert problems(WORKER) == []
    (found,) = problems(WORKER + body)
    assert why in found


@pytest.mark.parametrize(
    ("field", "why"),
    {
        "server: http://192.0.2.1": "must be a URL that starts with https://",
        "server: 192.0.2.1:6443": "must be a URL that starts with https://",
        "server: 'https://'": "must be a URL that starts with https://",
        "server: 'https://a:b@c'": "must have no user name or password in it",
        "server: 'https://c?x'": "must have no ?",
        "server: 'https://c:99999'": "must be a URL that starts with https://",
        "server: 'https://a_b'": "'a_b' is no host name and no address",
        "caFile: ca.crt": "'ca.crt' must be an absolute path of a file",
        "tokenFile: /root/../x": "must not have . or .. in it",
        "tokenFile: /root/": "must be an absolute path of a file",
    }.items(),
)
def test_what_a_worker_joins_with_must_be_usable(field: str, why: str) -> None:
    name = field.partition(":")[0]
    lines = [line for line in WORKER.splitlines() if not line.strip().startswith(f"{name}:")]
    (found,) = problems("\n".join([*lines, f"    {field}"]) + "\n")
    assert f"n.yaml:{len(lines) + 4}: spec.cluster.{name}: " in found and why in found


def test_a_standalone_node_joins_nothing() -> None:
    found = problems(WORKER.replace("worker", "standalone"))
    assert [line.partition(" a ")[0] for line in found] == [
        "n.yaml:6: spec.cluster.server:",
        "n.yaml:7: spec.cluster.caFile:",
        "n.yaml:8: spec.cluster.tokenFile:",
    ]
    assert problems("  cluster: {dns: [10.96.0.10], domain: x.example}\n") == []


def test_a_worker_needs_server_ca_and_credential_until_it_has_them() -> None:
    assert [problem.path for problem in check_join(Cluster())] == [
        "cluster.server",
        "cluster.caFile",
        "cluster.tokenFile",
    ]
    assert [problem.path for problem in check_join(Cluster(), has_ca=True, has_certificate=True)] == ["cluster.server"]
    assert [problem.path for problem in check_join(Cluster("https://a"), has_ca=True)] == ["cluster.tokenFile"]
    assert check_join(parsed(WORKER).spec.cluster) == check_join(parsed(EVERYTHING).spec.cluster) == []


@pytest.mark.parametrize(
    ("body", "why"),
    {
        "  proxy: {noProxy: [a]}\n": "spec.proxy.noProxy: has no effect without proxy.http",
        "  localDNS: {upstream: [192.0.2.53]}\n": "spec.localDNS: has no effect without localDNS.enabled",
        "  localDNS: {enabled: false, upstream: ['127.0.0.1:5353']}\n": "spec.localDNS: has no effect",
        "  kubelet: {labels: {a: b}}\n": "spec.kubelet.labels: has no effect: a standalone node registers nowhere",
        "  kubelet: {taints: [{key: a}]}\n": "spec.kubelet.taints: has no effect: a standalone node registers nowhere",
        "  containerd: {registries: [{name: r, mirrors: [{url: 'http://m', skipVerify: true}]}]}\n": "URL is http://",
        WORKER + "  network: {bridgeSubnet: 172.30.0.0/24}\n": "has no effect: a worker has the bridge network only",
    }.items(),
)
def test_what_is_legal_but_odd_is_only_said(body: str, why: str) -> None:
    (found,) = problems(body)
    assert found.startswith("odd: n.yaml:") and why in found


def test_a_file_that_this_user_may_not_read_is_roots_to_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: str) -> os.stat_result:
        raise PermissionError(13, "Permission denied", path)

    name = str(tmp_path / "token")
    with pytest.raises(UsageError) as caught:
        read_given_file(name, "config-invalid")
    assert caught.value.hint == f"put {name} there, or name another file"
    monkeypatch.setattr("stratum.configfile.os.stat", refuse)
    with pytest.raises(UsageError) as caught:
        read_given_file(name, "config-invalid")
    assert caught.value.message == f"{name}: cannot be read: Permission denied"
    assert caught.value.hint == f"run as root, or as who may read {name}"


def test_a_url_with_a_password_is_not_repeated_in_an_error() -> None:
    for text in ("htps://u:secret@h", "https://u:secret@h", "https://u:secret@h:x"):
        why = why_no_url(text, ("https",))
        assert why and "secret" not in why


# -- properties -----------------------------------------------------------------------------------------------


@given(st.binary(max_size=300))
def test_any_bytes_are_a_configuration_or_a_usage_error(data: bytes) -> None:
    try:
        parse_config(data, "n.yaml")
    except UsageError as error:
        assert error.message.startswith("n.yaml") and error.reference == "config-invalid"


def _trees() -> st.SearchStrategy[Any]:
    names = sorted({name for path in field_paths() for name in path.split(".")})
    leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["worker", "10.0.0.0/8"])
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(names), inner, max_size=4),
        max_leaves=12,
    )


@given(_trees())
def test_any_tree_of_known_names_is_read_or_refused_with_its_line(tree: object) -> None:
    document = {"apiVersion": "stratum.dev/v1", "kind": "Node", "spec": tree}
    try:
        config = parse_config(yaml.safe_dump(document, allow_unicode=True).encode(), "n.yaml")
    except UsageError as error:
        assert error.message.startswith("n.yaml:")
        return
    for problem in config.problems(PROFILES):
        assert config.error(problem).message.startswith("n.yaml:")
    assert spec_from_json(json.loads(json.dumps(spec_to_json(config.spec)))) == without_token(config.spec)


def without_token(spec: NodeSpec) -> NodeSpec:
    for path in ("cluster.token", "cluster.tokenFile"):
        spec = set_field(spec, path, get_field(NodeSpec(), path))
    return spec


@given(st.text(max_size=24))
def test_addresses_and_networks_are_taken_as_they_are_written_or_not_at_all(text: str) -> None:
    address, network = parse_address(text), parse_network(text)
    if address is not None and address.version == 4:
        assert str(address) == text
    if network is not None:
        assert why_no_network(text) == "" and "/" in text
        assert not int(network.network_address) & int(network.hostmask)


# -- the record -----------------------------------------------------------------------------------------------


def _specs() -> Iterator[NodeSpec]:
    yield NodeSpec()
    yield without_token(parsed(EVERYTHING).spec)
    yield NodeSpec(network=Network(bridge=False), cluster=Cluster(exec=ExecCredential("/x")))
    yield NodeSpec(kubelet=Kubelet(config={"a": {"b": [None, 1.5]}}), containerd=Containerd((Registry("r"),)))


@pytest.mark.parametrize("spec", list(_specs()), ids=["empty", "full", "false", "free"])
def test_a_record_is_read_back_as_it_was(spec: NodeSpec) -> None:
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec


def test_defaults_and_what_a_node_joins_with_are_left_out_of_a_record() -> None:
    cluster = Cluster(server="https://a", token=Secret(TOKEN), token_file="/root/token")
    assert spec_to_json(NodeSpec(profile="cis", cluster=cluster)) == {
        "profile": "cis",
        "cluster": {"server": "https://a"},
    }
    assert spec_to_json(NodeSpec(cluster=Cluster(token=Secret(TOKEN)))) == {}


@pytest.mark.parametrize(
    "value",
    [
        [],
        None,
        {"rol": "worker"},
        {"role": 1},
        {"selinux": "yes"},
        {"selinux": 1},
        {"network": {"clusterCIDRs": "10.0.0.0/8"}},
        {"network": {"clusterCIDRs": [1]}},
        {"cluster": {"token": TOKEN}},
        {"kubelet": {"taints": [{}]}},
        {"kubelet": {"labels": ["a"]}},
    ],
)
def test_a_record_of_another_kind_is_a_value_error(value: object) -> None:
    with pytest.raises(ValueError) as caught:
        spec_from_json(value)
    assert TOKEN not in str(caught.value)


# -- names ----------------------------------------------------------------------------------------------------


@given(st.text(max_size=80) | st.from_regex(r"[A-Za-z0-9_.-]{0,80}", fullmatch=True))
def test_a_proposed_name_is_legal_and_a_legal_name_is_proposed_as_it_is(text: str) -> None:
    near = kubenames.propose_name(text)
    assert near == "" or kubenames.why_no_node_name(near) == ""
    if not kubenames.why_no_node_name(text):
        assert near == text


@given(st.from_regex(r"[a-z0-9]{1,20}([.-][a-z0-9]{1,9}){0,4}", fullmatch=True))
def test_short_names_of_letters_digits_dots_and_dashes_are_legal(name: str) -> None:
    if name not in ("localhost", "none", "linux", "unknown", "localhost4", "localhost6", "localhost.localdomain"):
        assert kubenames.why_no_node_name(name[:63].rstrip(".-")) == ""


@pytest.mark.parametrize("key", ["a", "a.b_c-d", "example.com/a", "kubernetes.io/hostname", "x.node.kubernetes.io/a"])
def test_labels_that_a_kubelet_may_set(key: str) -> None:
    assert kubenames.why_no_label_key(key) == kubenames.why_not_own_label(key) == ""


@pytest.mark.parametrize("key", ["kubernetes.io/role", "x.k8s.io/a", "k8s.io/a", "node-role.kubernetes.io/a"])
def test_labels_that_a_kubelet_may_not_set(key: str) -> None:
    assert kubenames.why_no_label_key(key) == ""
    assert kubenames.why_not_own_label(key)
