"""Joining a cluster, with the stand-ins of kubelet and API server: the way in, the token's end, and what goes wrong."""

from __future__ import annotations

import dataclasses
import http.client
import json
import ssl
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

import pytest

from stratum.config import STANDALONE, ExecCredential, Secret
from stratum.errors import StratumError
from stratum.node import kubelet, kubeletconfig, kubeletready
from stratum.node.kubeconfig import Join, make_join
from stratum.node.settings import Settings
from stratum.receipt import RECEIPT_PATH
from stratum.trust import certificates
from tests.unit.hosting import put, work_on
from tests.unit.kubelets import (
    STANDALONE_SETTINGS,
    TOKEN,
    FakeCluster,
    KubeletHost,
    RunningKubelet,
    api_server,
    bring,
    content_of,
    host_in,
    wait_for,
    worker,
)

BROKEN = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
BOOTSTRAP = str(kubeletconfig.BOOTSTRAP)
CURRENT = str(kubelet.CLIENT_CERTIFICATE)
PATIENCE = 20.0  # for what comes to a good end; two processes start, each with imports that take a second
SHORT = 3.0  # for what does not


@pytest.fixture
def cluster(memory: Path) -> Iterator[FakeCluster]:
    with api_server(memory / "api") as found:
        yield found


@pytest.fixture
def host(memory: Path) -> KubeletHost:
    (memory / "root").mkdir()
    return host_in(memory / "root")


def finish(host: KubeletHost, settings: Settings) -> list[str]:
    work = work_on(host)
    actions = kubelet.plan_finish_join(work, settings)
    for action in actions:
        action.perform(work)
    return [action.describe() for action in actions]


def joined(host: KubeletHost, cluster: FakeCluster) -> Settings:
    """A node that has joined, and whose kubelet is down again."""
    settings = worker(cluster.server)
    bring(host, settings, cluster.join())
    with RunningKubelet(host, settings) as running:
        kubeletready.wait_kubelet(host, settings, PATIENCE, port=running.port)
    finish(host, settings)
    return settings


def failure(host: KubeletHost, settings: Settings, patience: float = SHORT) -> StratumError:
    """What the gate says of a kubelet that does not get ready."""
    with RunningKubelet(host, settings) as running:
        wait_for("the kubelet has said why", lambda: any(line.startswith("E") for line in running.lines))
        host.journal = running.lines
        with pytest.raises(StratumError) as caught:
            kubeletready.wait_kubelet(host, settings, patience, port=running.port)
    return caught.value


def every_file(host: KubeletHost) -> dict[str, Path]:
    top = Path(host.root)
    return {f"/{path.relative_to(top)}": path for path in top.rglob("*") if path.is_file() and not path.is_symlink()}


# -- the good way -----------------------------------------------------------------------------------------


def test_a_node_joins_with_a_token_and_the_token_leaves_the_disk(host: KubeletHost, cluster: FakeCluster) -> None:
    settings = worker(cluster.server)
    bring(host, settings, cluster.join())
    assert stat.S_IMODE(Path(host.root + BOOTSTRAP).stat().st_mode) == 0o600
    assert TOKEN in content_of(host, BOOTSTRAP)
    with RunningKubelet(host, settings) as running:
        kubeletready.wait_kubelet(host, settings, PATIENCE, port=running.port)
        assert finish(host, settings) == [f"remove {BOOTSTRAP}"]
        wait_for("it is a node", lambda: any(item["path"] == "/api/v1/nodes" for item in cluster.requests))
    held = [
        name for name, path in every_file(host).items() if not name.startswith("/tmp/") and TOKEN in path.read_text()
    ]
    assert held == []
    assert finish(host, settings) == []
    assert bring(host, settings) == [], "a later start has nothing to do"
    user = [item["user"] for item in cluster.requests if item["path"] == "/api/v1/nodes"]
    assert user == ["system:node:node-1"]


def test_a_node_that_has_joined_starts_again_without_a_token(host: KubeletHost, cluster: FakeCluster) -> None:
    settings = joined(host, cluster)
    before = len(cluster.requests)
    with RunningKubelet(host, settings) as running:
        kubeletready.wait_kubelet(host, settings, PATIENCE, port=running.port)
        wait_for("it asks as a node", lambda: len(cluster.requests) > before)
    assert {item["user"] for item in cluster.requests[before:]} == {"system:node:node-1"}


def test_a_crash_between_certificate_and_end_of_the_join_leaves_the_token_no_longer_than_the_next_start(
    host: KubeletHost, cluster: FakeCluster
) -> None:
    settings = worker(cluster.server)
    bring(host, settings, cluster.join())
    with RunningKubelet(host, settings) as running:
        kubeletready.wait_kubelet(host, settings, PATIENCE, port=running.port)
    assert host.exists(BOOTSTRAP)
    assert bring(host, settings) == [f"remove {BOOTSTRAP}"]


def test_joining_the_same_cluster_again_changes_nothing_and_writes_no_token(
    host: KubeletHost, cluster: FakeCluster
) -> None:
    settings = joined(host, cluster)
    before = content_of(host, CURRENT)
    assert bring(host, settings, cluster.join("another.token0000000000")) == []
    assert (content_of(host, CURRENT), host.exists(BOOTSTRAP)) == (before, False)


def test_a_join_that_is_under_way_is_not_begun_again(host: KubeletHost, cluster: FakeCluster) -> None:
    settings = worker(cluster.server)
    cluster.behave("pending")
    bring(host, settings, cluster.join())
    with RunningKubelet(host, settings) as running:
        wait_for("it has asked", lambda: any(item["method"] == "POST" for item in cluster.requests))
        wait_for("it answers", lambda: kubeletready.kubelet_answers(host, running.port) is None)
    assert bring(host, settings) == []
    assert bring(host, settings, cluster.join()) == []


def test_the_token_is_in_no_record_and_in_no_words(host: KubeletHost, cluster: FakeCluster) -> None:
    settings = worker(cluster.server)
    done = bring(host, settings, cluster.join())
    assert TOKEN not in content_of(host, str(RECEIPT_PATH)) + "".join(done) + repr(cluster.join())
    assert [name for name, path in every_file(host).items() if TOKEN in path.read_text()] == [BOOTSTRAP]


# -- another cluster, an old certificate --------------------------------------------------------------------


def test_the_certificate_of_another_cluster_is_forgotten(host: KubeletHost, cluster: FakeCluster, memory: Path) -> None:
    """eks-hybrid#413: an old certificate that is still valid breaks the next join."""
    joined(host, cluster)
    with api_server(memory / "second") as second:
        settings = worker(second.server)
        done = bring(host, settings, second.join())
        assert f"remove {CURRENT}" in done and f"remove {kubeletconfig.JOINED_KUBECONFIG}" in done
        with RunningKubelet(host, settings) as running:
            kubeletready.wait_kubelet(host, settings, PATIENCE, port=running.port)
            wait_for("it is a node", lambda: any(item["path"] == "/api/v1/nodes" for item in second.requests))


def test_a_certificate_that_ran_out_is_said_and_a_new_token_joins_again(
    host: KubeletHost, cluster: FakeCluster
) -> None:
    settings = joined(host, cluster)
    host.clock = time.time() + 400 * 86400
    with pytest.raises(StratumError) as caught:
        bring(host, settings)
    assert caught.value.reference == "node-certificate"
    assert "expired at" in caught.value.message and "the clock says" in caught.value.message
    assert "--token-file" in (caught.value.hint or "")
    done = bring(host, settings, cluster.join())
    assert f"remove {CURRENT}" in done and f"write {BOOTSTRAP}" in done
    host.clock = None
    with RunningKubelet(host, settings) as running:
        kubeletready.wait_kubelet(host, settings, PATIENCE, port=running.port)


def test_a_certificate_of_the_future_names_the_clock(host: KubeletHost, cluster: FakeCluster) -> None:
    """Row 46."""
    settings = joined(host, cluster)
    host.clock = time.time() - 30 * 86400
    with pytest.raises(StratumError, match=r"not valid before .* and the clock says") as caught:
        bring(host, settings)
    assert "timedatectl" in (caught.value.hint or "")


def test_a_worker_that_never_joined_says_how(host: KubeletHost) -> None:
    with pytest.raises(StratumError) as caught:
        bring(host, worker())
    assert caught.value.reference == "join-missing" and "--token-file" in (caught.value.hint or "")


# -- an API server that misbehaves ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "words", "hint"),
    [
        ("expired-token", "the token is expired or wrong", "kubeadm token create"),
        ("forbid", "the API server refuses", "node-bootstrapper"),
        ("deny", "not approved", "journalctl"),
        ("future", "not valid before", "journalctl"),
        ("wrong-name", "it is for system:node:node-1-other", "journalctl"),
    ],
)
def test_a_join_that_fails_says_why(host: KubeletHost, cluster: FakeCluster, mode: str, words: str, hint: str) -> None:
    settings = worker(cluster.server)
    cluster.behave(mode)
    bring(host, settings, cluster.join())
    if mode in ("future", "wrong-name"):  # it gets one, and is content with it
        with RunningKubelet(host, settings) as running:
            wait_for("it has a certificate", lambda: host.lexists(CURRENT))
            with pytest.raises(StratumError) as caught:
                kubeletready.wait_kubelet(host, settings, SHORT, port=running.port)
        error = caught.value
    else:
        error = failure(host, settings)
    assert error.reference == "kubelet-not-ready"
    assert words in error.message, error.message
    assert hint in (error.hint or "")
    assert TOKEN not in error.message
    assert host.exists(BOOTSTRAP), "the join may still come to its end"
    assert finish(host, settings) == []


def test_a_token_that_the_server_does_not_know_is_said(host: KubeletHost, cluster: FakeCluster) -> None:
    settings = worker(cluster.server)
    bring(host, settings, cluster.join("wrong0.0123456789abcdef"))
    assert "the token is expired or wrong" in failure(host, settings).message


def test_a_wrong_ca_is_said(host: KubeletHost, cluster: FakeCluster) -> None:
    settings = worker(cluster.server)
    other = (cluster.directory / "other-ca.crt").read_bytes()
    bring(host, settings, Join(cluster.server, other, Secret(TOKEN)))
    error = failure(host, settings)
    assert "not signed by the CA that was given" in error.message and "caFile" in (error.hint or "")


def test_a_server_that_is_not_there_is_said(host: KubeletHost, cluster: FakeCluster) -> None:
    settings = worker("https://127.0.0.1:9")
    bring(host, settings, Join("https://127.0.0.1:9", cluster.ca, Secret(TOKEN)))
    error = failure(host, settings)
    assert "the API server cannot be reached" in error.message and "127.0.0.1:9" in error.message


def test_a_server_that_hangs_ends_the_wait_at_its_time(host: KubeletHost, cluster: FakeCluster) -> None:
    settings = worker(cluster.server)
    cluster.behave("hang")
    bring(host, settings, cluster.join())
    with RunningKubelet(host, settings) as running:
        wait_for("it answers", lambda: kubeletready.kubelet_answers(host, running.port) is None)
        begin = time.monotonic()
        with pytest.raises(StratumError, match=r"no .*kubelet-client-current\.pem yet"):
            kubeletready.wait_kubelet(host, settings, 1.0, port=running.port)
        assert time.monotonic() - begin < 10


def test_a_server_that_recovers_lets_the_join_come_to_its_end(host: KubeletHost, cluster: FakeCluster) -> None:
    settings = worker(cluster.server)
    cluster.behave("forbid")
    bring(host, settings, cluster.join())
    with RunningKubelet(host, settings) as running:
        wait_for("it was refused", lambda: any("forbidden" in line for line in running.lines))
        cluster.behave("ok")
        kubeletready.wait_kubelet(host, settings, PATIENCE, port=running.port)


def test_a_kubelet_that_does_not_start_is_quoted(host: KubeletHost, cluster: FakeCluster) -> None:
    settings = worker(cluster.server)
    bring(host, settings, cluster.join())
    put(host, "/proc/swaps", "Filename\n/dev/vda2 partition 1 0 -2\n")
    running = RunningKubelet(host, settings)
    with running:
        assert running.end() == 1
    with pytest.raises(StratumError) as caught:
        kubeletready.wait_kubelet(host, settings, 0.0, port=running.port)
    assert "running with swap on is not supported" in caught.value.message


# -- other credentials --------------------------------------------------------------------------------------------


def test_a_given_certificate_is_copied_with_its_key_for_root_only(host: KubeletHost, cluster: FakeCluster) -> None:
    node = joined(host, cluster)
    pem = content_of(host, CURRENT)
    put(host, "/root/node.crt", pem[: pem.index("-----BEGIN EC")])
    put(host, "/root/node.key", pem[pem.index("-----BEGIN EC") :])
    put(host, "/root/ca.crt", cluster.ca)
    given = {"client_certificate_file": "/root/node.crt", "client_key_file": "/root/node.key"}
    settings = worker(cluster.server, **given)
    join = make_join(host, settings.spec.cluster, None, cluster.ca)
    assert join is not None and "BEGIN EC" not in repr(join)
    bring(host, settings, join)
    for path in (kubelet.GIVEN_KEY, kubeletconfig.GIVEN_KUBECONFIG):
        assert stat.S_IMODE(Path(host.root, str(path)[1:]).stat().st_mode) == 0o600
    assert bring(host, settings) == bring(host, settings, join) == []
    put(host, "/root/node.key", "-----BEGIN EC PRIVATE KEY-----\nx\n")
    with pytest.raises(StratumError, match="not the private key of"):
        make_join(host, settings.spec.cluster, None, cluster.ca)
    # And back to a token: what was given goes.
    done = bring(host, node, cluster.join())
    assert f"remove {kubelet.GIVEN_KEY}" in done


def test_a_file_with_certificate_and_key_leaves_no_key_where_everybody_can_read_it(
    host: KubeletHost, cluster: FakeCluster
) -> None:
    joined(host, cluster)
    pem = content_of(host, CURRENT)
    put(host, "/root/node.pem", pem)
    given = {"client_certificate_file": "/root/node.pem", "client_key_file": "/root/node.pem"}
    settings = worker(cluster.server, **given)
    join = make_join(host, settings.spec.cluster, None, cluster.ca + pem[pem.index("-----BEGIN EC") :].encode())
    bring(host, settings, join)
    open_to_all = [
        name
        for name, path in every_file(host).items()
        if path.stat().st_mode & 0o044 and "PRIVATE KEY" in path.read_text() and name != "/root/node.pem"
    ]
    assert open_to_all == []
    assert certificates.matches_key(
        content_of(host, str(kubelet.GIVEN_CERTIFICATE)).encode(), content_of(host, str(kubelet.GIVEN_KEY)).encode()
    )
    assert content_of(host, str(kubeletconfig.CA_FILE)).strip() == cluster.ca.decode().strip()


def test_a_program_can_speak_for_the_node(host: KubeletHost, cluster: FakeCluster) -> None:
    credential = ExecCredential("/usr/bin/helper", ("--region", "x"), {"B": "2", "A": "1"})
    settings = worker(cluster.server, exec=credential)
    bring(host, settings, Join(cluster.server, cluster.ca, exec=credential))
    text = content_of(host, str(kubeletconfig.GIVEN_KUBECONFIG)).split("\n", 1)[1]
    assert json.loads(text)["users"][0]["user"]["exec"] == {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "/usr/bin/helper",
        "args": ["--region", "x"],
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
        "interactiveMode": "Never",
        "provideClusterInfo": False,
    }


@pytest.mark.parametrize("ca", [b"", b"MIIB not PEM", BROKEN.encode()])
def test_a_ca_that_is_none_is_named_before_anything_is_written(host: KubeletHost, ca: bytes) -> None:
    with pytest.raises(StratumError) as caught:
        make_join(host, worker().spec.cluster, Secret(TOKEN), ca)
    assert caught.value.reference == "ca-unreadable" and "/root/ca.crt" in caught.value.message


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_a_credential_that_is_not_there_is_named(host: KubeletHost, cluster: FakeCluster, text: Optional[str]) -> None:
    if text is not None:
        put(host, "/root/node.crt", text)
    settings = worker(cluster.server, client_certificate_file="/root/node.crt", client_key_file="/root/node.key")
    with pytest.raises(StratumError, match=r"/root/node\.crt: ") as caught:
        make_join(host, settings.spec.cluster, None, cluster.ca)
    assert caught.value.reference == "cluster-file" and "clientCertificateFile" in (caught.value.hint or "")


def test_without_a_credential_there_is_no_join(host: KubeletHost, cluster: FakeCluster) -> None:
    assert make_join(host, worker(cluster.server).spec.cluster, None, cluster.ca) is None
    assert make_join(host, worker(cluster.server).spec.cluster, Secret(TOKEN), cluster.ca) == cluster.join()


# -- standalone -------------------------------------------------------------------------------------------------------


def ask(running: RunningKubelet, host: KubeletHost, *, certificate: bool) -> int:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate:
        root = host.root
        context.load_cert_chain(f"{root}{kubelet.ADMIN_CERTIFICATE}", f"{root}{kubelet.ADMIN_KEY}")
    channel = http.client.HTTPSConnection("127.0.0.1", running.secure_port, timeout=10, context=context)
    channel.request("GET", "/pods")
    return channel.getresponse().status


def test_a_standalone_kubelet_serves_the_one_client_of_its_own_ca(host: KubeletHost) -> None:
    bring(host, STANDALONE_SETTINGS)
    assert bring(host, STANDALONE_SETTINGS) == []
    assert stat.S_IMODE(Path(f"{host.root}{kubelet.ADMIN_KEY}").stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(f"{host.root}{kubelet.ADMIN_KEY.parent}").stat().st_mode) == 0o700
    with RunningKubelet(host, STANDALONE_SETTINGS) as running:
        kubeletready.wait_kubelet(host, STANDALONE_SETTINGS, PATIENCE, port=running.port)
        assert (ask(running, host, certificate=True), ask(running, host, certificate=False)) == (200, 401)
    assert list(Path(f"{host.root}{kubeletconfig.MANIFESTS}").iterdir()) == []


def test_a_worker_that_becomes_standalone_keeps_no_credential(host: KubeletHost, cluster: FakeCluster) -> None:
    settings = worker(cluster.server)
    bring(host, settings, cluster.join())
    spec = dataclasses.replace(settings.spec, role=STANDALONE)
    done = bring(host, dataclasses.replace(settings, spec=spec))
    assert f"remove {BOOTSTRAP}" in done
    assert not host.exists(BOOTSTRAP)
    assert content_of(host, str(kubeletconfig.CA_FILE)) != cluster.ca.decode()
