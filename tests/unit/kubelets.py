"""A host with a kubelet's files in a directory tree, and the stand-ins as processes on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional

from stratum.config import WORKER, Cluster, Kubelet, NodeSpec, Secret
from stratum.node import kubelet, kubeletconfig
from stratum.node.kubeconfig import Join
from stratum.node.settings import Settings
from stratum.system import Completed
from tests.unit.hosting import TreeMachine, link, put, work_on

STANDINS = Path(__file__).resolve().parents[1] / "standins"
TOKEN = "abcdef.0123456789abcdef"
FACTS = kubelet.KubeletFacts("1.34.1", 4 << 30, 2, "/etc/resolv.conf")
STANDALONE_SETTINGS = Settings(NodeSpec(), "192.0.2.10", "node-1")


def worker(server: str = "https://192.0.2.1:6443", **cluster: Any) -> Settings:
    """Settings of a worker that joins with a token."""
    spec = NodeSpec(role=WORKER, cluster=Cluster(server=server, ca_file="/root/ca.crt", **cluster), kubelet=Kubelet())
    return Settings(spec, "192.0.2.10", "node-1")


@dataclass
class KubeletHost(TreeMachine):
    """A machine in a tree whose clock can be set, and whose journal is what the test says."""

    clock: Optional[float] = None
    journal: list[str] = field(default_factory=list)

    def now(self) -> float:
        return time.time() if self.clock is None else self.clock

    def run(self, argv: Any, **options: Any) -> Completed:
        if argv[0] == "journalctl":
            return Completed(tuple(argv), 0, "\n".join(self.journal).encode(), b"")
        return super().run(argv, **options)


def host_in(directory: Path) -> KubeletHost:
    host = KubeletHost(str(directory))
    # The kubelet's store for certificates makes links with whole paths, which lead out of the tree; this leads back.
    link(host, host.root, "/")
    put(host, "/etc/resolv.conf", "nameserver 192.0.2.53\n")
    put(host, "/proc/swaps", "Filename\tType\tSize\tUsed\tPriority\n")
    return host


def wait_for(what: str, condition: Callable[[], object], timeout: float = 30.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class FakeCluster:
    """A running stand-in of an API server."""

    directory: Path

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{(self.directory / 'port').read_text()}"

    @property
    def ca(self) -> bytes:
        return (self.directory / "ca.crt").read_bytes()

    @property
    def requests(self) -> list[dict[str, str]]:
        path = self.directory / "log.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def behave(self, mode: str) -> None:
        (self.directory / "mode").write_text(mode)

    def join(self, token: str = TOKEN) -> Join:
        return Join(self.server, self.ca, Secret(token))


@contextmanager
def api_server(directory: Path) -> Iterator[FakeCluster]:
    argv = [sys.executable, str(STANDINS / "apiserver.py"), "--directory", str(directory), "--token", TOKEN]
    with subprocess.Popen(argv) as process:
        try:
            wait_for("the API server listens", (directory / "port").exists)
            yield FakeCluster(directory)
        finally:
            process.kill()


class RunningKubelet:
    """The stand-in with the files of a tree: their paths are turned into those of the tree."""

    def __init__(self, host: KubeletHost, settings: Settings) -> None:
        self.host, self.port, self.secure_port = host, free_port(), free_port()
        root = host.root
        config = json.loads(content_of(host, "/etc/stratum/kubelet/config.yaml").split("\n", 1)[1])
        config.update(healthzPort=self.port, port=self.secure_port, address="127.0.0.1")
        config["resolvConf"] = root + config["resolvConf"]
        config["staticPodPath"] = root + config["staticPodPath"]
        config["authentication"]["x509"]["clientCAFile"] = root + str(kubeletconfig.CA_FILE)
        put(host, "/tmp/kubelet.yaml", json.dumps(config))
        for path in (kubeletconfig.BOOTSTRAP, kubeletconfig.GIVEN_KUBECONFIG):
            if host.exists(path):
                text = content_of(host, str(path)).replace('"/etc/stratum', f'"{root}/etc/stratum')
                put(host, f"/tmp/{path.name}", text)
                os.chmod(f"{root}/tmp/{path.name}", 0o600)
        replaced = {str(kubeletconfig.BOOTSTRAP): "/tmp/bootstrap-kubeconfig"}
        replaced[str(kubeletconfig.GIVEN_KUBECONFIG)] = "/tmp/kubeconfig"
        words = [word.partition("=") for word in kubelet.kubelet_arguments(settings)]
        self.argv = [sys.executable, str(STANDINS / "kubelet.py"), f"--config={root}/tmp/kubelet.yaml"]
        self.argv += [
            f"{name}={root + replaced.get(value, value) if value.startswith('/') else value}"
            for name, _, value in words
        ]
        self.argv += [f"--root-dir={root}/var/lib/kubelet", f"--cert-dir={root}/var/lib/kubelet/pki"]
        self.log = Path(root, "tmp/kubelet.log")
        self.process: Optional[subprocess.Popen[bytes]] = None

    def __enter__(self) -> RunningKubelet:
        env = {
            "PATH": os.environ["PATH"],
            "STANDIN_WITHOUT_RUNTIME": "1",
            "STANDIN_PROC": f"{self.host.root}/proc",
            "STANDIN_RETRY": "0.2",
        }
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.argv, stderr=log, env=env)
        return self

    def __exit__(self, *_exception: object) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.host.journal = self.lines

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def end(self) -> int:
        assert self.process is not None
        return self.process.wait(timeout=30)


def content_of(host: KubeletHost, path: str) -> str:
    return Path(host.root + path).read_text()


def bring(
    host: KubeletHost, settings: Settings, join: Optional[Join] = None, facts: kubelet.KubeletFacts = FACTS
) -> list[str]:
    """Plan and perform, and what was done in words."""
    work = work_on(host)
    actions = kubelet.plan_kubelet(work, settings, facts, join)
    for action in actions:
        action.perform(work)
    return [action.describe() for action in actions]


def config_of(settings: Settings, facts: kubelet.KubeletFacts = FACTS) -> Mapping[str, Any]:
    return kubeletconfig.kubelet_config(settings, facts)
