"""Network namespaces and libcni's memory of our pods go; those of another containerd's pods stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stratum.journal import Journal
from stratum.node.cni import RESULTS
from stratum.node.sandboxes import plan_sandboxes
from stratum.receipt import Receipt
from stratum.steps import Work
from tests.unit.hosting import TreeMachine

OURS, THEIRS = "a" * 64, "b" * 64
UUIDS = {OURS: "cni-a5ab0acd-51c0-81a0-7e77-84813fd7e45d", THEIRS: "cni-bbbbbbbb-51c0-81a0-7e77-84813fd7e45d"}
SANDBOXES = "var/lib/stratum/containerd/io.containerd.grpc.v1.cri/sandboxes"


def write_result(root: Path, network: str, sandbox: str, result: Any) -> None:
    value = {"kind": "cniCacheV1", "containerId": sandbox, "networkName": network, "result": result}
    (root / f"{RESULTS}"[1:] / f"{network}-{sandbox}-eth0").write_text(json.dumps(value))


@pytest.fixture
def host(tmp_path: Path) -> TreeMachine:
    for name in ("run/netns", str(RESULTS)[1:], f"{SANDBOXES}/{OURS}"):
        (tmp_path / name).mkdir(parents=True)
    for sandbox, name in UUIDS.items():
        (tmp_path / "run/netns" / name).touch()
        interfaces = [{"name": "eth0", "sandbox": f"/var/run/netns/{name}"}, {"name": "veth0"}]
        write_result(tmp_path, "stratum", sandbox, {"interfaces": interfaces})
        write_result(tmp_path, "cni-loopback", sandbox, {"interfaces": interfaces[:1]})
    return TreeMachine(str(tmp_path), programs={"umount": lambda _: None})


def perform(host: TreeMachine) -> list[str]:
    work = Work(host, Receipt.load(host), Journal(host))
    actions = plan_sandboxes(host)
    for action in actions:
        action.perform(work)
    return [action.subject for action in actions]


def test_our_pods_namespaces_and_results_go_and_those_of_others_stay(host: TreeMachine) -> None:
    perform(host)
    assert host.commands == [f"umount --no-canonicalize /run/netns/{UUIDS[OURS]}"]
    assert host.listdir("/run/netns") == [UUIDS[THEIRS]]
    assert sorted(host.listdir(RESULTS)) == [f"cni-loopback-{THEIRS}-eth0", f"stratum-{THEIRS}-eth0"]
    assert plan_sandboxes(host) == []


def test_the_directory_goes_with_the_last_namespace(host: TreeMachine) -> None:
    Path(host.root, "run/netns", UUIDS[THEIRS]).unlink()
    perform(host)
    assert not host.exists("/run/netns")


def test_without_a_sandbox_of_ours_nothing_is_looked_at(host: TreeMachine) -> None:
    Path(host.root, SANDBOXES, OURS).rmdir()
    assert plan_sandboxes(host) == []


@pytest.mark.parametrize(
    "sandbox",
    ["/run/netns/../../etc/passwd", "/run/netns/admin", "/proc/1/ns/net", "/run/netns/cni-x", 5, None],
)
def test_a_path_that_containerd_never_makes_is_not_touched(host: TreeMachine, sandbox: Any) -> None:
    for network in ("stratum", "cni-loopback"):
        write_result(Path(host.root), network, OURS, {"interfaces": [{"name": "eth0", "sandbox": sandbox}]})
    perform(host)
    assert host.commands == []
    assert sorted(host.listdir("/run/netns")) == sorted(UUIDS.values())


@pytest.mark.parametrize("text", ["", "[]", "{", '{"containerId": []}', '"x"', '{"containerId": {}, "result": 1}'])
def test_a_file_that_libcni_did_not_write_stays(host: TreeMachine, text: str) -> None:
    Path(host.root, str(RESULTS)[1:], "stratum-x-eth0").write_text(text)
    perform(host)
    assert "stratum-x-eth0" in host.listdir(RESULTS)
