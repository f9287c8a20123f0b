"""Where a node's settings come from: option, file, record, default; and what is recorded of them.

The machine is a directory tree that plays systemd, swap, sysctls and the network; the kubelet is a stand-in.
"""

from __future__ import annotations

import io
import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.cli import build_parser
from stratum.config import CONFIG_PATH, Cluster, Network, NodeSpec, Proxy, Secret
from stratum.configcodec import field_paths, get_field
from stratum.configfile import parse_config
from stratum.errors import ExitCode, HostRefusedError, StratumError, UsageError
from stratum.node.settings import FROM_BEFORE, SETTINGS_PATH, Settings, plan_settings, read_settings
from stratum.node.versions import VersionRecord
from stratum.output import Output
from stratum.scripts import prerequisites
from stratum.scripts.context import Context
from stratum.scripts.kubelet import check_kubernetes
from stratum.scripts.settings import Chosen, find_differing, merge
from stratum.system import Host, HostPath, PathLike
from tests.fakes import Desk
from tests.unit.hosting import perform, put
from tests.unit.test_config import EVERYTHING, HEAD, TOKEN
from tests.unit.test_prerequisites import KubernetesHost, bundle_of, document, drop_in, quiet, supervised
from tests.unit.test_prerequisites import bundle as bundle
from tests.unit.test_prerequisites import desk as desk
from tests.unit.test_prerequisites import host as host

SERVER = "https://192.0.2.1:6443"
CA = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
JOIN = f"  role: worker\n  cluster: {{server: '{SERVER}', caFile: /root/ca.crt, tokenFile: /root/token}}\n"
FILE = f"file {CONFIG_PATH}"


def configure(host: KubernetesHost, body: str) -> None:
    put(host, str(CONFIG_PATH), HEAD + body)
    drop_in(host, CONFIG_PATH).chmod(0o600)


def choose(
    host: KubernetesHost, *words: str, kubelet: bool = True, stdin: Optional[bytes] = None
) -> tuple[Chosen, str, list[Any]]:
    """What ``up`` with these options would take, what it says, and its findings."""
    components = (("kubelet", "1.34.1", ""),) if kubelet else ()
    version = VersionRecord("b", "1.0", 1, "sha256:" + "0" * 64, components, (), ())
    said = io.StringIO()
    context = Context(host, Output(stdout=said, stderr=said), None, io.BytesIO(stdin) if stdin is not None else None)
    arguments = build_parser("up").parse_args(["up", *words])
    chosen, findings = prerequisites.choose_settings(context, arguments, version)
    return chosen, said.getvalue(), findings


def record(host: Host, settings: Settings) -> None:
    perform(host, lambda work: plan_settings(work, settings))


def in_force(host: KubernetesHost) -> dict[str, str]:
    """The recorded sources without those of name and address."""
    return {path: source for path, source in read_settings(host).sources.items() if not path.startswith("node")}


# -- precedence -----------------------------------------------------------------------------------------------


def test_an_option_wins_over_the_file_the_file_over_an_earlier_option_and_that_over_the_default(
    host: KubernetesHost,
) -> None:
    assert choose(host)[0].settings.profile == "default"
    chosen = choose(host, "--profile", "cis")[0].settings
    assert (chosen.profile, chosen.sources["profile"]) == ("cis", "option --profile")
    record(host, chosen)
    assert choose(host)[0].settings.profile == "cis", "a later run without the option"
    configure(host, "  profile: default\n")
    assert choose(host)[0].settings.sources["profile"] == FILE
    assert choose(host)[0].settings.profile == "default"
    assert choose(host, "--profile", "cis")[0].settings.profile == "cis"


def test_a_value_of_the_file_goes_with_it_and_one_of_an_option_stays(
    desk: Desk, host: KubernetesHost, bundle: Path
) -> None:
    configure(host, "  selinux: false\n  kubelet: {labels: {a: b}}\n")
    desk.up(host, bundle, "--profile", "cis")
    assert in_force(host) == {"selinux": FILE, "kubelet.labels": FILE, "profile": "option --profile"}
    assert desk.up(host, bundle).text.startswith("nothing to do\n")
    configure(host, "  selinux: false\n")
    desk.up(host, bundle)
    assert in_force(host) == {"selinux": FILE, "profile": "option --profile"}
    drop_in(host, CONFIG_PATH).unlink()
    desk.up(host, bundle)
    assert in_force(host) == {"profile": "option --profile"}
    assert read_settings(host).spec == NodeSpec(profile="cis")


def test_another_file_counts_for_its_run_and_is_named_as_the_source(
    desk: Desk, host: KubernetesHost, bundle: Path, tmp_path: Path
) -> None:
    configure(host, "  selinux: false\n")
    other = tmp_path / "other.yaml"
    other.write_text(HEAD + "  profile: cis\n")
    desk.up(host, bundle, "--config", str(other))
    assert in_force(host) == {"profile": f"file {other}"}
    ran = desk.up(host, bundle)
    assert f"settings came from {other}, which is not read now" in ran.err.getvalue()
    assert in_force(host) == {"selinux": FILE}
    with pytest.raises(UsageError, match="cannot be read"):
        desk.up(host, bundle, "--config", str(tmp_path / "none"))


@pytest.mark.parametrize("given", [{"role"}, {"role", "network.clusterCIDRs"}, set()])
def test_for_each_field_the_first_source_that_says_something_is_taken(given: set[str]) -> None:
    file = parse_config((HEAD + EVERYTHING).encode(), "n.yaml")
    options = {path: ("--x", get_field(NodeSpec(role="worker"), path)) for path in given}
    merged = merge(Settings(NodeSpec(profile="cis"), sources={"profile": "option --profile"}), file, options)
    for path in field_paths():
        if path in given:
            assert merged.sources[path] == "option --x"
        elif file.sets(path):
            assert (get_field(merged.spec, path), merged.sources[path]) == (get_field(file.spec, path), "file n.yaml")
        else:
            assert path not in merged.sources and get_field(merged.spec, path) == get_field(NodeSpec(), path)


def test_a_wrong_option_and_a_wrong_field_are_named_by_where_they_stand(host: KubernetesHost) -> None:
    with pytest.raises(UsageError, match=r"^\[config-invalid\] --cluster-cidr: '10.0.0.1/8' has bits set"):
        choose(host, "--cluster-cidr", "10.0.0.1/8")
    with pytest.raises(UsageError, match=r"--node-name: 'Node_1' must consist of"):
        choose(host, "--node-name", "Node_1")
    with pytest.raises(UsageError, match=r"--server: must not be empty"):
        choose(host, "--server", "")
    configure(host, "  network:\n    clusterCIDRs: [10.0.0.1/8, x]\n")
    with pytest.raises(UsageError) as caught:
        choose(host)
    assert f"{CONFIG_PATH}:5: spec.network.clusterCIDRs[0]: " in caught.value.message
    assert "(and 1 more; see: stratum config check)" in caught.value.message
    assert choose(host, "--cluster-cidr", "10.0.0.0/8")[0].settings.cluster_cidrs == ("10.0.0.0/8",)


def test_without_a_file_all_that_is_missing_is_named_and_no_check_of_a_file_advised(host: KubernetesHost) -> None:
    with pytest.raises(UsageError) as caught:
        choose(host, "--role", "worker")
    assert caught.value.message.endswith("API server's URL (and also: cluster.caFile, cluster.tokenFile)")


def test_the_file_that_an_option_names_is_the_one_to_check(host: KubernetesHost, tmp_path: Path) -> None:
    name = tmp_path / "own.yaml"
    name.write_text(HEAD + "  network:\n    clusterCIDRs: [10.0.0.1/8, x]\n")
    with pytest.raises(UsageError) as caught:
        choose(host, "--config", str(name))
    assert f"see: stratum config check {name})" in caught.value.message


@pytest.mark.parametrize("as_option", [True, False])
def test_a_token_that_others_can_read_is_said(host: KubernetesHost, tmp_path: Path, as_option: bool) -> None:
    put(host, "/root/ca.crt", CA)
    put(host, "/root/token", TOKEN)
    configure(host, JOIN)
    name = drop_in(host, HostPath("/root/token"))
    words = ("--token-file", str(name)) if as_option else ()
    name.chmod(0o640)
    assert "token: has a token and mode 0640: others can read it" in choose(host, *words)[1]
    name.chmod(0o600)
    assert "others can read it" not in choose(host, *words)[1]


def test_a_program_that_is_not_there_is_said_before_the_kubelet_waits_for_it(host: KubernetesHost) -> None:
    def missing() -> list[str]:
        version = VersionRecord("b", "1.0", 1, "sha256:" + "0" * 64, (("kubelet", "1.34.1", ""),), (), ())
        context = Context(host, Output(stdout=io.StringIO(), stderr=io.StringIO()))
        findings = check_kubernetes(context, choose(host)[0].settings, version)
        return [item.message for item in findings if item.check == "kubelet-program"]

    configure(host, "  kubelet: {launchCheck: [/usr/local/bin/allow, -x]}\n")
    assert missing() == ["spec.kubelet.launchCheck: /usr/local/bin/allow: no such program"]
    put(host, "/usr/local/bin/allow", "#!/bin/sh\n")
    assert missing() == []


def test_a_registrys_file_that_is_gone_keeps_no_node_from_booting(
    desk: Desk, host: KubernetesHost, bundle: Path
) -> None:
    mirror = "{url: 'https://m', caFile: /media/usb/ca.crt}"
    configure(host, f"  containerd: {{registries: [{{name: docker.io, mirrors: [{mirror}]}}]}}\n")
    put(host, "/media/usb/ca.crt", CA)
    desk.up(host, bundle)
    before = quiet(host)
    drop_in(host, HostPath("/media/usb/ca.crt")).unlink()
    assert "caFile /media/usb/ca.crt: No such file or directory; the registries stay as they are" in supervised(host)
    assert {name: value for name, value in before.items() if "certs.d" in name}.items() <= quiet(host).items()
    # Whoever runs `up` can put it there again.
    with pytest.raises(StratumError, match="registry-file"):
        desk.up(host, bundle)


def test_a_broken_file_stops_up_upgrade_and_preflight_before_anything_is_written(
    desk: Desk, host: KubernetesHost, bundle: Path
) -> None:
    desk.up(host, bundle)
    before = quiet(host)
    configure(host, "  rol: worker\n")
    newer = bundle_of(desk, kubelet=True, version="2.0", serial=2)
    trust = ("--trust", str(desk.key))
    for words in (
        ("up", "--bundle", str(bundle), *trust),
        ("upgrade", "--bundle", str(newer), *trust),
        ("preflight", "--bundle", str(bundle), *trust),
        ("preflight",),
    ):
        with pytest.raises(UsageError, match="unknown field") as caught:
            desk.run(host, *words)
        assert words[0] != "up" or caught.value.state == "nothing was changed"
    after = quiet(host)
    assert {path for path in after if before.get(path) != after[path]} <= {str(CONFIG_PATH), "/var/lib/stratum/lock"}


@dataclass
class UsersView(KubernetesHost):
    """The machine as a user sees it who may not read what is root's alone."""

    private: HostPath = CONFIG_PATH

    def open(self, path: PathLike) -> BinaryIO:
        if str(path) == str(self.private):
            raise PermissionError(13, "Permission denied", str(path))
        return super().open(path)


@pytest.mark.parametrize("private", [CONFIG_PATH, SETTINGS_PATH])
def test_preflight_of_a_user_who_may_not_read_the_settings_says_that_and_all_else(
    desk: Desk, host: KubernetesHost, bundle: Path, private: HostPath
) -> None:
    configure(host, "  profile: cis\n")
    put(host, str(SETTINGS_PATH), json.dumps(Settings().to_json()))
    user = UsersView(host.root, {}, user=1000, private=private)
    for words in ((), ("--bundle", str(bundle), "--trust", str(desk.key))):
        ran = desk.run(user, "preflight", "--output", "json", *words)
        assert ran.status == ExitCode.HOST_REFUSED
        found = [item for item in document(ran)["findings"] if item["check"] == "root"]
        assert len(found) == 2 and str(private) in found[1]["message"]


def test_the_supervisor_does_not_read_the_file(desk: Desk, host: KubernetesHost, bundle: Path) -> None:
    configure(host, "  profile: cis\n")
    desk.up(host, bundle)
    configure(host, "  rol: broken\n")
    assert supervised(host) == ""
    assert read_settings(host).profile == "cis"


def test_the_units_command_line_has_no_option_and_no_token(desk: Desk, host: KubernetesHost, bundle: Path) -> None:
    configure(host, "  profile: cis\n  nodeName: other\n")
    desk.up(host, bundle, "--node-ip", "192.0.2.10", "--no-selinux")
    text = drop_in(host, "/etc/systemd/system/stratum.service").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    assert line.endswith(" up --supervise")


def test_a_container_host_says_that_a_role_has_no_effect(host: KubernetesHost) -> None:
    configure(host, "  role: worker\n")
    chosen, said, _ = choose(host, kubelet=False)
    assert "has no kubelet: the role worker has no effect" in said
    assert (chosen.settings.node_name, chosen.settings.node_ip) == ("", "")


# -- joining --------------------------------------------------------------------------------------------------


def test_what_a_worker_joins_with_is_handed_on_in_memory_and_never_recorded(host: KubernetesHost) -> None:
    configure(host, JOIN)
    put(host, "/root/ca.crt", CA)
    put(host, "/root/token", TOKEN + "\n")
    chosen = choose(host)[0]
    assert (chosen.token, chosen.ca) == (Secret(TOKEN), CA.encode())
    assert chosen.settings.spec.cluster == Cluster(server=SERVER, ca_file="/root/ca.crt")
    assert TOKEN not in repr(chosen)
    record(host, chosen.settings)
    assert TOKEN not in drop_in(host, SETTINGS_PATH).read_text()
    assert "tokenFile" not in drop_in(host, SETTINGS_PATH).read_text()


def test_a_worker_that_has_joined_needs_token_and_ca_no_more(host: KubernetesHost) -> None:
    configure(host, JOIN)
    for path, text in (("/root/ca.crt", CA), ("/root/token", TOKEN)):
        put(host, path, text)
    record(host, choose(host)[0].settings)
    for path in ("/root/ca.crt", "/root/token"):
        drop_in(host, path).unlink()
    chosen = choose(host)[0]
    assert (chosen.token, chosen.ca) == (None, b"")
    configure(host, JOIN.replace("192.0.2.1", "192.0.2.2"))
    with pytest.raises(UsageError, match="/root/token: cannot be read"):
        choose(host)


def test_a_worker_with_a_client_certificate_needs_it_at_each_run(host: KubernetesHost) -> None:
    certificate = "clientCertificateFile: /c, clientKeyFile: /k"
    configure(host, JOIN.replace("tokenFile: /root/token", certificate))
    put(host, "/root/ca.crt", CA)
    record(host, choose(host)[0].settings)
    assert read_settings(host).spec.cluster.client_key_file == "/k"
    configure(host, JOIN.replace(", tokenFile: /root/token", ""))
    with pytest.raises(UsageError, match="a worker needs a credential"):
        choose(host)


def test_a_join_by_options_alone_is_not_repeated_by_a_later_run(host: KubernetesHost, tmp_path: Path) -> None:
    (tmp_path / "ca").write_text(CA)
    words = ("--role", "worker", "--server", SERVER, "--ca-file", str(tmp_path / "ca"), "--token-file", "-")
    chosen = choose(host, *words, stdin=TOKEN.encode() + b"\n")[0]
    assert (chosen.token, chosen.ca) == (Secret(TOKEN), CA.encode())
    assert chosen.settings.spec == NodeSpec(role="worker", cluster=Cluster(server=SERVER))
    record(host, chosen.settings)
    again = choose(host)[0]
    assert again == Chosen(chosen.settings, None, b"")
    configure(host, "  role: standalone\n")
    assert choose(host)[0].settings.spec == NodeSpec(), "the recorded server goes with the role"


def test_options_win_over_the_files_credential_and_ca(host: KubernetesHost, tmp_path: Path) -> None:
    configure(
        host,
        f"  role: worker\n  cluster:\n    server: {SERVER}\n    ca: '{CA.splitlines()[0]}'\n"
        "    clientCertificateFile: /c\n    clientKeyFile: /k\n",
    )
    (tmp_path / "ca").write_text(CA)
    (tmp_path / "token").write_text(TOKEN)
    chosen = choose(host, "--ca-file", str(tmp_path / "ca"), "--token-file", str(tmp_path / "token"))[0]
    assert (chosen.token, chosen.ca) == (Secret(TOKEN), CA.encode())
    assert chosen.settings.spec.cluster == Cluster(server=SERVER)


@pytest.mark.parametrize(
    ("lacking", "why"),
    {
        "--server": "cluster.server: a worker needs the API server's URL",
        "--ca-file": "cluster.caFile: a worker needs the cluster's CA",
        "--token-file": "cluster.tokenFile: a worker needs a credential to join with",
    }.items(),
)
def test_a_worker_that_lacks_something_is_refused_with_the_option_that_gives_it(
    host: KubernetesHost, tmp_path: Path, lacking: str, why: str
) -> None:
    (tmp_path / "ca").write_text(CA)
    words = {"--server": SERVER, "--ca-file": str(tmp_path / "ca"), "--token-file": "-"}
    del words[lacking]
    with pytest.raises(UsageError) as caught:
        choose(host, "--role", "worker", *(word for pair in words.items() for word in pair), stdin=TOKEN.encode())
    assert why in caught.value.message and lacking in (caught.value.hint or "")


@pytest.mark.parametrize("data", [b"", b"\n", b"a b", b"abc\xff", b"a\nb", b"x" * 70000, None])
def test_what_is_no_token_is_refused_and_not_shown(host: KubernetesHost, tmp_path: Path, data: Optional[bytes]) -> None:
    (tmp_path / "ca").write_text(CA)
    words = ("--role", "worker", "--server", SERVER, "--ca-file", str(tmp_path / "ca"), "--token-file", "-")
    with pytest.raises(UsageError) as caught:
        choose(host, *words, stdin=data)
    assert caught.value.message.startswith(("standard input: is ", "--token-file -: standard input is closed"))


def test_a_ca_that_is_none_is_refused(host: KubernetesHost) -> None:
    configure(host, JOIN)
    put(host, "/root/token", TOKEN)
    with pytest.raises(UsageError, match=f"{CONFIG_PATH}:5: spec.cluster.caFile: /root/ca.crt: cannot be read"):
        choose(host)
    put(host, "/root/ca.crt", "-----BEGIN PRIVATE KEY-----")
    with pytest.raises(UsageError, match=r"/root/ca.crt: has no certificate in PEM form"):
        choose(host)


def test_bundle_and_token_cannot_both_come_through_standard_input(host: KubernetesHost, tmp_path: Path) -> None:
    (tmp_path / "ca").write_text(CA)
    words = ("--role", "worker", "--server", SERVER, "--ca-file", str(tmp_path / "ca"), "--token-file", "-")
    with pytest.raises(UsageError) as caught:
        choose(host, *words, "--bundle", "-", stdin=b"x")
    assert caught.value.reference == "two-on-stdin"


def test_no_option_takes_a_token(desk: Desk) -> None:
    for command in ("up", "upgrade", "preflight"):
        words = [word for word in build_parser(command).parse_args([command]).__dict__ if "token" in word]
        assert words == ["token_file"]


# -- the node's name and address ------------------------------------------------------------------------------


def test_the_name_is_the_hosts_at_the_first_start_and_stays(desk: Desk, host: KubernetesHost, bundle: Path) -> None:
    put(host, "/proc/sys/kernel/hostname", "PHost01\n")
    said = desk.up(host, bundle).err.getvalue()
    assert "the node's name is phost01: the host's name PHost01 in lower case" in said
    assert drop_in(host, "/etc/hostname").read_text() == "node\n"
    put(host, "/proc/sys/kernel/hostname", "renamed\n")
    assert desk.up(host, bundle).text.startswith("nothing to do\n")
    supervised(host)
    settings = read_settings(host)
    assert (settings.node_name, settings.sources["nodeName"]) == ("phost01", "the host's name")
    assert document(desk.run(host, "status", "--output", "json"))["nodeName"] == "phost01"
    with pytest.raises(UsageError, match="brought up as phost01"):
        desk.up(host, bundle, "--node-name", "renamed")


@pytest.mark.parametrize(
    ("name", "near"), [("node_1", "node-1"), ("a" * 64, "a" * 63), ("bc." * 24 + "d", "bc"), ("localhost", "NAME")]
)
def test_a_name_that_never_registers_is_refused_in_preflight_with_one_that_does(
    desk: Desk, host: KubernetesHost, bundle: Path, name: str, near: str
) -> None:
    put(host, "/proc/sys/kernel/hostname", name + "\n")
    before = quiet(host)
    with pytest.raises(HostRefusedError) as caught:
        desk.up(host, bundle)
    assert f"node-name: the host's name '{name}' cannot be the node's" in caught.value.message
    assert f"--node-name {near} " in (caught.value.hint or "")
    assert quiet(host) == before
    ran = desk.run(host, "preflight", "--bundle", str(bundle), "--trust", str(desk.key), "--output", "json")
    assert ran.status == ExitCode.HOST_REFUSED
    assert [item["check"] for item in document(ran)["findings"] if item["severity"] == "reject"] == ["node-name"]
    assert desk.up(host, bundle, "--node-name", "node-1").status == ExitCode.DONE
    assert read_settings(host).node_name == "node-1"


@pytest.mark.parametrize(("config", "port"), [("", 10250), ("  kubelet: {config: {port: 10350}}\n", 10350)])
def test_a_host_whose_kubelet_ports_are_taken_is_refused_before_the_first_write(
    desk: Desk, host: KubernetesHost, bundle: Path, config: str, port: int
) -> None:
    if config:
        put(host, "/etc/stratum/stratum.yaml", f"apiVersion: stratum.dev/v1\nkind: Node\nspec:\n{config}")
    put(host, "/proc/net/tcp", f"  sl  local_address rem_address st\n  1: 00000000:{port:04X} 00000000:0000 0A 0:0\n")
    before = quiet(host)
    with pytest.raises(HostRefusedError) as caught:
        desk.up(host, bundle)
    assert f"kubelet-port: port {port} is taken" in caught.value.message
    assert quiet(host) == before
    assert desk.up(host, bundle, "--skip-check", "kubelet-port").status == ExitCode.DONE
    assert desk.up(host, bundle).status == ExitCode.DONE, "by now it is our own kubelet's"


def test_a_refused_name_and_a_refused_address_are_said_together(host: KubernetesHost) -> None:
    put(host, "/proc/sys/kernel/hostname", "node_1\n")
    host.addresses = {}
    assert [finding.check for finding in choose(host)[2]] == ["node-name", "node-ip"]


def test_an_image_gets_its_name_at_its_first_start_which_may_come_late(
    desk: Desk, host: KubernetesHost, bundle: Path
) -> None:
    desk.up(host, bundle)
    record_text = json.loads(drop_in(host, SETTINGS_PATH).read_text())
    record_text.update(nodeName="", nodeIP="", sources={})
    drop_in(host, SETTINGS_PATH).write_text(json.dumps(record_text))
    put(host, "/proc/sys/kernel/hostname", "localhost\n")
    begun = host.clock
    with pytest.raises(HostRefusedError):
        supervised(host)
    assert host.clock - begun >= 60
    put(host, "/proc/sys/kernel/hostname", "image-7\n")
    supervised(host)
    assert (read_settings(host).node_name, read_settings(host).node_ip) == ("image-7", "192.0.2.10")


def test_the_files_address_counts_for_the_first_start_only(desk: Desk, host: KubernetesHost, bundle: Path) -> None:
    host.addresses = {"eth0": ["192.0.2.10/24"], "eth1": ["198.51.100.7/24"]}
    configure(host, "  network: {nodeIP: 198.51.100.7}\n")
    desk.up(host, bundle)
    assert read_settings(host).node_ip == "198.51.100.7"
    configure(host, "  network: {nodeIP: 192.0.2.10}\n")
    said = desk.up(host, bundle).err.getvalue()
    assert "node IP 198.51.100.7 stays, and network.nodeIP (192.0.2.10) is not used" in said
    assert read_settings(host).node_ip == "198.51.100.7"
    desk.up(host, bundle, "--node-ip", "192.0.2.10")
    assert read_settings(host).sources["nodeIP"] == "option --node-ip"


def test_an_image_takes_the_files_address_at_its_first_start(desk: Desk, host: KubernetesHost, bundle: Path) -> None:
    configure(host, "  network: {nodeIP: 198.51.100.7}\n  nodeName: image\n")
    desk.up(host, bundle)
    text = json.loads(drop_in(host, SETTINGS_PATH).read_text())
    text.update(nodeName="", nodeIP="")  # as up --root leaves it
    drop_in(host, SETTINGS_PATH).write_text(json.dumps(text))
    drop_in(host, CONFIG_PATH).unlink()
    host.addresses = {"eth0": ["192.0.2.10/24"], "eth1": ["198.51.100.7/24"]}
    supervised(host)
    assert (read_settings(host).node_name, read_settings(host).node_ip) == ("image", "198.51.100.7")


def test_a_start_without_options_and_file_names_neither_in_its_hint(
    desk: Desk, host: KubernetesHost, bundle: Path
) -> None:
    desk.up(host, bundle)
    text = json.loads(drop_in(host, SETTINGS_PATH).read_text())
    drop_in(host, SETTINGS_PATH).write_text(json.dumps({**text, "nodeIP": ""}))
    host.addresses = {}
    with pytest.raises(HostRefusedError) as caught:
        supervised(host)
    assert "network.nodeIP" not in (caught.value.hint or "")
    with pytest.raises(HostRefusedError) as caught:
        desk.up(host, bundle)
    assert "network.nodeIP in the configuration" in (caught.value.hint or "")


def test_uninstall_leaves_the_admins_file(desk: Desk, host: KubernetesHost, bundle: Path) -> None:
    configure(host, "  profile: cis\n")
    before = quiet(host)
    desk.up(host, bundle)
    assert desk.run(host, "uninstall").status == ExitCode.DONE
    assert quiet(host) == before


# -- the record -----------------------------------------------------------------------------------------------


def test_the_record_of_an_older_release_is_read_and_its_values_stay(host: KubernetesHost) -> None:
    old = {"format": 1, "profile": "cis", "nodeIP": "192.0.2.10", "clusterCIDRs": ["10.0.0.9/8"], "selinux": False}
    put(host, str(SETTINGS_PATH), json.dumps(old))
    settings = read_settings(host)
    assert settings.spec == NodeSpec(profile="cis", selinux=False, network=Network(cluster_cidrs=("10.0.0.0/8",)))
    assert (settings.node_ip, settings.node_name) == ("192.0.2.10", "")
    assert settings.sources == dict.fromkeys(("profile", "selinux", "network.clusterCIDRs", "nodeIP"), FROM_BEFORE)
    chosen = choose(host)[0].settings
    assert chosen.spec == settings.spec and chosen.node_name == "node"
    assert choose(host, "--profile", "default")[0].settings.profile == "default"


@pytest.mark.parametrize(
    "value",
    [
        {"format": 3},
        {"format": 2},
        {"format": 2, "spec": {"rol": 1}, "nodeIP": "", "nodeName": "", "sources": {}},
        {"format": 2, "spec": {}, "nodeIP": "", "nodeName": "", "sources": []},
        [],
    ],
)
def test_a_record_that_is_none_is_an_error_and_never_passed_over(host: KubernetesHost, value: object) -> None:
    put(host, str(SETTINGS_PATH), json.dumps(value))
    with pytest.raises(StratumError) as caught:
        read_settings(host)
    assert caught.value.reference == "settings-unreadable"


def test_a_record_is_roots_alone_when_it_holds_a_password(host: KubernetesHost) -> None:
    def mode(settings: Settings) -> int:
        record(host, settings)
        assert read_settings(host) == settings
        return stat.S_IMODE(drop_in(host, SETTINGS_PATH).stat().st_mode)

    assert mode(Settings(NodeSpec(proxy=Proxy(https="http://proxy:3128")))) == 0o644
    assert mode(Settings(NodeSpec(proxy=Proxy(https="http://u:p@proxy:3128")))) == 0o600
    file = parse_config((HEAD + EVERYTHING.replace("user:secret@", "")).encode(), "n.yaml")
    assert mode(Settings(file.spec)) == 0o600, "the environment of an exec credential"
    assert mode(Settings(NodeSpec(profile="cis"))) == 0o644


LASTING = sorted(set(field_paths()) - {"cluster.caFile", "cluster.tokenFile"})


@given(st.sampled_from(LASTING), st.booleans())
def test_what_is_taken_once_more_from_the_same_sources_is_the_same(path: str, with_file: bool) -> None:
    file = parse_config((HEAD + EVERYTHING).encode(), "n.yaml")
    options = {path: ("--x", get_field(file.spec, path))}
    spec, sources = merge(Settings(), file if with_file else None, {"role": ("--role", "worker"), **options}).recorded()
    again, same = merge(Settings(spec, sources=sources), file if with_file else None, {}).recorded()
    if not with_file:
        assert (again, same) == (spec, sources)
    else:
        assert again == spec


# -- status ---------------------------------------------------------------------------------------------------


def test_status_says_when_the_file_differs_from_what_is_in_force_or_is_broken(
    desk: Desk, host: KubernetesHost, bundle: Path
) -> None:
    def said() -> Any:
        ran = desk.run(host, "status", "--output", "json")
        return document(ran)["config"]

    configure(host, "  profile: cis\n")
    desk.up(host, bundle, "--no-selinux")
    assert said() is None
    configure(host, "  profile: default\n  kubelet: {labels: {a: b}}\n")
    assert said() == "says otherwise than what is in force: profile, kubelet.labels (to apply it: stratum up)"
    configure(host, "  rol: x\n")
    assert said().startswith(f"cannot be used: {CONFIG_PATH}:4: spec.rol: unknown field")
    assert "config     the configuration cannot be used" in desk.run(host, "status").text
    drop_in(host, CONFIG_PATH).unlink()
    assert "profile" in said(), "the next up would give the default"
    desk.up(host, bundle)
    assert said() is None


def test_a_used_token_that_was_removed_from_the_file_is_no_difference(host: KubernetesHost) -> None:
    configure(host, JOIN)
    put(host, "/root/ca.crt", CA)
    put(host, "/root/token", TOKEN)
    settings = choose(host)[0].settings
    record(host, settings)
    configure(host, JOIN.replace(", tokenFile: /root/token", ""))
    context = Context(host, Output(stdout=io.StringIO(), stderr=io.StringIO()))
    assert find_differing(context, settings) == []
    assert choose(host)[0].settings == settings
