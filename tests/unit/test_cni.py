"""The container network: a subnet of its own, links to plugins, and attachments given back."""

from __future__ import annotations

import base64
import ipaddress
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from stratum.errors import CommandError, StratumError
from stratum.journal import Journal
from stratum.node import cni
from stratum.receipt import Receipt
from stratum.steps import Work
from stratum.system import HostPath
from tests.bundles import snapshot
from tests.fakes import FaultHost, MachineHost, make_tree

ACTIVE = HostPath("/opt/stratum/node/current/cni/bin")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = make_tree(tmp_path / "root")
    (root / "var/lib/stratum").mkdir()
    (root / "proc/net").mkdir(parents=True)
    return root


@pytest.fixture
def work(root: Path) -> Work:
    host = FaultHost(str(root), {})
    return Work(host, Receipt.load(host), Journal(host))


def routes(root: Path, *networks: str, interface: str = "eth0") -> None:
    """Write the kernel's routing table."""
    lines = ["Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"]
    for name in networks:
        network = ipaddress.IPv4Network(name)
        numbers = [struct.pack("<I", int(value)).hex().upper() for value in (network.network_address, network.netmask)]
        lines.append(f"{interface}\t{numbers[0]}\t00000000\t0001\t0\t0\t0\t{numbers[1]}\t0\t0\t0")
    (root / "proc/net/route").write_text("\n".join(lines) + "\n")


def configure(root: Path, content: bytes) -> None:
    path = root / "etc/cni/net.d/10-stratum.conflist"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


# -- the network ----------------------------------------------------------------------------------------


def test_the_network_is_a_list_that_cni_1_0_reads() -> None:
    value = json.loads(cni.render_network("10.215.0.0/16"))
    assert (value["cniVersion"], value["name"]) == ("1.0.0", "stratum")
    bridge, portmap = value["plugins"]
    assert bridge["type"] == "bridge" and bridge["bridge"] == "stratum0"
    assert len(bridge["bridge"]) < 16, "IFNAMSIZ"
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.215.0.0/16"}]]
    assert bridge["ipam"]["dataDir"].startswith("/run/"), "a reboot frees every address"
    assert portmap == {"type": "portmap", "capabilities": {"portMappings": True}}


@pytest.mark.parametrize(
    ("taken", "chosen"),
    [
        ([], "10.215.0.0/16"),
        (["0.0.0.0/0"], "10.215.0.0/16"),
        (["0.0.0.0/1", "128.0.0.0/1"], "10.215.0.0/16"),  # a VPN that takes the default route in two halves
        (["192.0.2.0/24"], "10.215.0.0/16"),
        (["10.215.3.0/24"], "10.216.0.0/16"),
        (["10.215.0.1/32"], "10.216.0.0/16"),
        (["10.0.0.0/8"], "172.27.0.0/16"),
        (["10.0.0.0/8", "172.16.0.0/12"], "192.168.215.0/24"),
        (["10.214.0.0/16", "10.217.0.0/16"], "10.215.0.0/16"),
    ],
)
def test_the_subnet_overlaps_no_route_of_the_host(root: Path, work: Work, taken: list[str], chosen: str) -> None:
    routes(root, *taken)
    assert cni.choose_subnet(work.host) == chosen


def test_without_a_free_subnet_there_is_an_error_that_names_them(root: Path, work: Work) -> None:
    routes(root, "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
    with pytest.raises(StratumError) as caught:
        cni.choose_subnet(work.host)
    assert "10.215.0.0/16" in caught.value.message
    assert "ip route" in str(caught.value.hint)


def test_a_subnet_once_chosen_stays(root: Path, work: Work) -> None:
    configure(root, cni.render_network("172.27.0.0/16"))
    routes(root, "172.27.0.0/16", interface="stratum0")
    assert cni.choose_subnet(work.host) == "172.27.0.0/16"
    routes(root, "172.27.0.0/16", interface="eth1")
    assert cni.choose_subnet(work.host) == "172.27.0.0/16", "containers run in it"


def test_our_own_bridge_is_no_reason_for_another_subnet(root: Path, work: Work) -> None:
    routes(root, "10.215.0.0/16", interface="stratum0")
    assert cni.choose_subnet(work.host) == "10.215.0.0/16"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"7", b'{"plugins": []}', b'{"plugins": [{"ipam": 7}]}', b"\xff",
     cni.render_network("10.215.0.1/16"), cni.render_network("not a network"), cni.render_network("fd00::/64")],
)  # fmt: skip
def test_a_configuration_that_cannot_be_read_counts_as_none(root: Path, work: Work, content: bytes) -> None:
    configure(root, content)
    assert cni.choose_subnet(work.host) == "10.215.0.0/16"
    assert cni.subnet_in_force(work.host) is None


@pytest.mark.parametrize("text", ["", "header only\n", "Iface Destination\neth0\n"])
def test_a_routing_table_that_is_no_table_is_no_traceback(root: Path, work: Work, text: str) -> None:
    (root / "proc/net/route").write_text(text)
    assert cni.choose_subnet(work.host) == "10.215.0.0/16"
    (root / "proc/net/route").unlink()
    assert cni.choose_subnet(work.host) == "10.215.0.0/16"


# -- a subnet of the admin's choice -------------------------------------------------------------------------


def test_a_subnet_that_is_asked_for_is_taken_and_stays_without_being_asked_for(root: Path, work: Work) -> None:
    assert cni.choose_subnet(work.host, "10.99.0.0/24") == "10.99.0.0/24"
    configure(root, cni.render_network("10.99.0.0/24"))
    routes(root, "10.99.0.0/24", interface="eth1")
    assert cni.choose_subnet(work.host, "10.99.0.0/24") == "10.99.0.0/24", "it is in force"
    assert cni.choose_subnet(work.host) == "10.99.0.0/24"


def test_a_network_of_the_cluster_is_not_taken(work: Work) -> None:
    assert cni.choose_subnet(work.host, avoid=("10.215.0.0/17", "fd00::/48")) == "10.216.0.0/16"


def test_another_subnet_is_refused_while_containers_have_addresses_of_the_old_one(root: Path, work: Work) -> None:
    configure(root, cni.render_network("10.215.0.0/16"))
    cache(root, containerId="ours")
    with pytest.raises(StratumError) as caught:
        cni.choose_subnet(work.host, "10.99.0.0/24")
    assert caught.value.reference == "subnet-in-use"
    assert "ours" in caught.value.message
    assert "10.215.0.0/16" in str(caught.value.hint)
    assert cni.choose_subnet(work.host, "10.215.0.0/16") == "10.215.0.0/16"


@pytest.mark.parametrize(
    ("wanted", "reference"),
    [("192.0.2.128/25", "subnet-overlaps"), ("fd00::/64", "subnet-invalid"), ("10.0.0.1/8", "subnet-invalid")],
)
def test_a_subnet_that_cannot_be_is_refused_with_the_reason(
    root: Path, work: Work, wanted: str, reference: str
) -> None:
    routes(root, "192.0.2.0/24")
    with pytest.raises(StratumError) as caught:
        cni.choose_subnet(work.host, wanted)
    assert caught.value.reference == reference
    assert wanted in caught.value.message


# -- plugins --------------------------------------------------------------------------------------------


def link(work: Work, *names: str) -> list[str]:
    actions = cni.plan_plugin_links(work, names, ACTIVE)
    for action in actions:
        action.perform(work)
    return [action.describe() for action in actions]


def test_each_plugin_is_linked_through_the_current_version(root: Path, work: Work) -> None:
    assert link(work, "bridge", "portmap") == [
        "make directory /opt/cni",
        "make directory /opt/cni/bin",
        f"link /opt/cni/bin/bridge -> {ACTIVE}/bridge",
        f"link /opt/cni/bin/portmap -> {ACTIVE}/portmap",
    ]
    assert link(work, "bridge", "portmap") == []


def test_a_bundle_without_plugins_makes_nothing(root: Path, work: Work) -> None:
    assert link(work) == []
    assert not (root / "opt/cni").exists()


def test_a_plugin_that_the_version_has_no_more_is_withdrawn(root: Path, work: Work) -> None:
    link(work, "bridge", "portmap")
    (root / "opt/cni/bin/theirs").write_text("theirs")
    (root / "opt/cni/bin/linked").symlink_to("/usr/lib/cni/linked")
    link(work, "bridge")
    assert sorted(os.listdir(root / "opt/cni/bin")) == ["bridge", "linked", "theirs"]
    assert work.receipt.get("/opt/cni/bin/portmap") is None


@pytest.mark.parametrize("kind", ["file", "directory", "link", "dangling"])
def test_a_plugin_of_somebody_else_is_neither_replaced_nor_recorded(root: Path, work: Work, kind: str) -> None:
    path = root / "opt/cni/bin/bridge"
    path.parent.mkdir(parents=True)
    if kind == "file":
        path.write_text("theirs")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/usr/lib/cni/bridge" if kind == "link" else "nowhere")
    before = snapshot(root / "opt/cni/bin")
    link(work, "bridge")
    assert snapshot(root / "opt/cni/bin") == before
    assert work.receipt.get("/opt/cni/bin/bridge") is None


def test_a_link_of_an_earlier_version_of_ours_is_turned(root: Path, work: Work) -> None:
    path = root / "opt/cni/bin/bridge"
    path.parent.mkdir(parents=True)
    path.symlink_to("/opt/stratum/node/1.0/cni/bin/bridge")
    link(work, "bridge")
    assert os.readlink(path) == f"{ACTIVE}/bridge"


# -- attachments ----------------------------------------------------------------------------------------

PORTS = [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]


def cache(root: Path, name: str = "stratum-one-eth0", **changes: Any) -> Path:
    """A file as libcni 1.1 writes it (libcni/api.go, cachedInfo)."""
    configuration = json.loads(cni.render_network("10.215.0.0/16"))
    value = {
        "kind": "cniCacheV1",
        "containerId": "one",
        "config": base64.b64encode(json.dumps(configuration).encode()).decode(),
        "ifName": "eth0",
        "networkName": "stratum",
        "cniArgs": [["K8S_POD_NAME", "p"], ["A", "b"]],
        "capabilityArgs": {"portMappings": PORTS},
        "result": {"cniVersion": "1.0.0", "ips": []},
        **changes,
    }
    path = root / "var/lib/cni/results" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


class PluginHost(MachineHost):
    """Remembers what plugins were given."""

    def run(self, argv: Any, *, timeout: float, check: bool = True, env: Any = None, feed: Any = None) -> Any:
        import io

        pipe = io.BytesIO()
        if feed:
            feed(pipe)
        self.calls.append((argv[0], dict(env), json.loads(pipe.getvalue())))
        return super().run(argv, timeout=timeout, check=check, env=env)


@pytest.fixture
def machine(root: Path) -> PluginHost:
    for name in ("bridge", "portmap"):
        program = root / "opt/stratum/node/current/cni/bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    host = PluginHost(str(root), {})
    host.calls: list[tuple[str, dict[str, str], dict[str, Any]]] = []  # type: ignore[misc]
    return host


def test_giving_back_runs_del_of_each_plugin_the_last_first(root: Path, machine: PluginHost) -> None:
    path = cache(root)
    (attachment,) = cni.read_attachments(machine)
    cni.release_attachment(machine, attachment, ACTIVE)
    assert [call[0] for call in machine.calls] == [f"{ACTIVE}/portmap", f"{ACTIVE}/bridge"]
    for _, environment, request in machine.calls:
        assert environment == {
            "CNI_COMMAND": "DEL",
            "CNI_CONTAINERID": "one",
            "CNI_IFNAME": "eth0",
            "CNI_NETNS": "",
            "CNI_PATH": str(ACTIVE),
            "CNI_ARGS": "K8S_POD_NAME=p;A=b",
        }
        assert (request["name"], request["cniVersion"]) == ("stratum", "1.0.0")
        assert request["prevResult"] == {"cniVersion": "1.0.0", "ips": []}
    assert machine.calls[0][2]["runtimeConfig"] == {"portMappings": PORTS}
    assert machine.calls[1][2]["runtimeConfig"] == {}, "only what the plugin asked for"
    assert not path.exists()


def test_a_plugin_that_fails_keeps_the_attachment_for_the_next_try(root: Path, machine: PluginHost) -> None:
    path = cache(root)
    machine.failing = {f"{ACTIVE}/bridge": 1}
    (attachment,) = cni.read_attachments(machine)
    with pytest.raises(CommandError):
        cni.release_attachment(machine, attachment, ACTIVE)
    assert path.exists()
    cni.release_attachment(machine, attachment, ACTIVE)
    cni.release_attachment(machine, attachment, ACTIVE)
    assert not path.exists()


def test_a_plugin_that_is_gone_does_not_keep_a_node_from_being_removed(root: Path, machine: PluginHost) -> None:
    path = cache(root)
    (root / "opt/stratum/node/current/cni/bin/portmap").unlink()
    (attachment,) = cni.read_attachments(machine)
    cni.release_attachment(machine, attachment, ACTIVE)
    assert not path.exists()


def test_a_plugin_cannot_be_named_outside_of_our_directory(root: Path, machine: PluginHost) -> None:
    evil = {"name": "stratum", "plugins": [{"type": "../../../../bin/sh"}]}
    cache(root, config=base64.b64encode(json.dumps(evil).encode()).decode())
    (attachment,) = cni.read_attachments(machine)
    cni.release_attachment(machine, attachment, ACTIVE)
    assert [call[0] for call in machine.calls] == [f"{ACTIVE}/sh"]


def test_attachments_to_other_networks_are_not_ours(root: Path, machine: PluginHost) -> None:
    cache(root, "cbr0-one-eth0", networkName="cbr0")
    cache(root, "stratum-other-eth0", networkName="stratum-other")
    assert cni.read_attachments(machine) == []


def encoded(value: Any) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()


@pytest.mark.parametrize(
    "changes",
    [
        {"config": "*"},
        {"config": encoded([])},
        {"config": encoded(None)},
        {"config": encoded({"plugins": 7})},
        {"config": encoded({"plugins": [7]})},
        {"config": encoded({"plugins": [{"no": "type"}]})},
        {"config": encoded({"plugins": [{"type": 7}]})},
        {"config": encoded({"plugins": [{"type": "x", "capabilities": 7}]})},
        {"config": None},
        {"cniArgs": 7},
        {"cniArgs": [["a"]]},
        {"capabilityArgs": [1]},
    ],
    ids=str,
)
def test_a_file_that_libcni_did_not_write_is_passed_over(
    root: Path, machine: PluginHost, changes: dict[str, Any]
) -> None:
    cache(root, **changes)
    (root / "var/lib/cni/results/stratum-junk").write_bytes(b"\xff")
    (root / "var/lib/cni/results/stratum-list").write_text("[]")
    (root / "var/lib/cni/results/stratum-directory").mkdir()
    assert cni.read_attachments(machine) == []


def test_no_cache_is_no_attachment(machine: PluginHost) -> None:
    assert cni.read_attachments(machine) == []
