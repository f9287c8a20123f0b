"""A Kubernetes node by `up`, on a machine with a kernel of its own: a worker that joins, and a standalone node.

containerd, runc and the CNI plugins are real. kubelet, CoreDNS, the pause image and the API server are stand-ins, which
check what they are given as strictly as the real ones. With ``STRATUM_LAB_BUNDLE`` (a bundle) and ``STRATUM_LAB_KEY``
(its public key) the first three are real too; the API server stays a stand-in.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stratum.scripts.footprint import find_place, is_own
from stratum.system import HostPath
from tests.conftest import Machines
from tests.lab import demo
from tests.lab.image import Image, pause_image
from tests.lab.machine import wait_until
from tests.lab.packages import Package
from tests.lab.qemu import STEADY_CLOCK, QemuMachine
from tests.lab.roots import Disk
from tests.lab.snapshot import REBOOTED, difference, snapshot, written
from tests.pyz import built_pyz, default_cache

ADDRESS, SERVER, NAME = "192.0.2.10", "192.0.2.1", "node-1"
KUBELET, LOCALDNS = "stratum-kubelet.service", "stratum-localdns.service"
TOKEN = "abcdef.0123456789abcdef"  # the one that the API server knows unless it is told another

# The machine has no network card: one that the kernel plays has the node's address and the API server's.
NETWORK = f"""[Unit]
Before=network.target stratum.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=ip link add eth9 type dummy
ExecStart=ip link set eth9 up
ExecStart=ip address add {ADDRESS}/24 dev eth9
ExecStart=ip address add {SERVER}/32 dev eth9
ExecStart=ip route add default dev eth9
[Install]
WantedBy=multi-user.target
"""
API_SERVER = f"""[Unit]
After=lab-network.service
[Service]
ExecStart=python3 /srv/apiserver.py --directory /srv/api --address {SERVER} --port 6443 --names {SERVER}
[Install]
WantedBy=multi-user.target
"""
WORKER = f"""apiVersion: stratum.dev/v1
kind: Node
spec:
  role: worker
  nodeName: {NAME}
  network:
    nodeIP: {ADDRESS}
    clusterCIDRs: [10.244.0.0/16, 10.96.0.0/12]
  cluster:
    server: https://{SERVER}:6443
    caFile: /srv/api/ca.crt
    dns: [10.96.0.10]
  kubelet:
    labels: {{example.org/rack: r1}}
    taints: [{{key: example.org/new, effect: NoSchedule}}]
    config: {{maxPods: 20}}
  localDNS:
    enabled: true
    upstream: [192.0.2.53]
"""
# The API server's own files, and what systemd keeps of units with a dynamic user.
OTHERS = ("/srv/api/", "/run/systemd/")
SUBJECT = """
from cryptography import x509
data = open("/var/lib/kubelet/pki/kubelet-client-current.pem", "rb").read()
print(x509.load_pem_x509_certificate(data).subject.rfc4514_string())
"""
ASK_KUBELET = f"""
import http.client, ssl, sys
context = ssl._create_unverified_context()
if sys.argv[1:]:
    context.load_cert_chain(*sys.argv[1:])
channel = http.client.HTTPSConnection("{ADDRESS}", 10250, context=context, timeout=30)
channel.request("GET", "/pods")
print(channel.getresponse().status)
"""
# What stays of a node in the kernel until the next boot.
LEFT = (
    ("files", r"/srv/api/.*", "the API server's own"),
    ("files", r"/run/systemd/dynamic-uid(/.*)?", "systemd keeps it once a unit had a dynamic user"),
    ("units", r"network-online\.target.*", "a target that was reached stays so until the next boot"),
    ("forwarding", r"/proc/sys/net/bridge/.*", "a module that was loaded stays until the next boot"),
    ("forwarding", r".*", "a value that a drop-in of ours set at boot stays until the next one"),
)


def pod(image: str, *, host_network: bool) -> str:
    """A static pod of the one image that every bundle has."""
    spec = {"hostNetwork": host_network, "containers": [{"name": "main", "image": image, "imagePullPolicy": "Never"}]}
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "hello"}, "spec": spec})


@pytest.fixture
def node(machines: Machines, kubernetes_disk: Disk, debian_packages: dict[str, Package]) -> QemuMachine:
    """A machine with an API server, the stick, and nothing of Stratum's."""
    pyz = built_pyz(default_cache())
    images: list[Image] = [pause_image(debian_packages["busybox-static"].tree / "bin/busybox")]
    publisher, bundle = demo.cached_bundle(pyz, debian_packages, images, kubelet=True)
    key = publisher.public
    if os.environ.get("STRATUM_LAB_BUNDLE"):
        bundle, key = Path(os.environ["STRATUM_LAB_BUNDLE"]), Path(os.environ["STRATUM_LAB_KEY"])
    files = {
        "/root/usb/stratum.pyz": pyz,
        "/root/usb/node.tar": bundle,
        "/etc/stratum/trust.d/publisher.pub": key,
        "/srv/apiserver.py": demo.STANDINS / "apiserver.py",
    }
    vm = machines.boot(QemuMachine(kubernetes_disk, "kubernetes", files=files, options=STEADY_CLOCK))
    vm.sh("chmod 0755 /root/usb/stratum.pyz; chmod 0644 /etc/stratum/trust.d/publisher.pub; mkdir -p /srv/api")
    vm.write("/etc/systemd/system/lab-network.service", NETWORK)
    vm.write("/etc/systemd/system/lab-api.service", API_SERVER)
    vm.write("/root/token", f"{TOKEN}\n", 0o600)
    vm.sh("systemctl daemon-reload; systemctl enable --now lab-network lab-api")
    wait_until("the API server listens", lambda: vm.run(["test", "-e", "/srv/api/port"], check=False).status == 0, 120)
    return vm


def stratum(vm: QemuMachine, *words: str, check: bool = True) -> Any:
    argv = ["/root/usb/stratum.pyz", *words, "--output", "json"]
    done = vm.run(["sh", "-c", 'cd /root/usb && exec "$@"', "sh", *argv], timeout=900, check=check)
    return json.loads(done.stdout)


def requests(vm: QemuMachine) -> list[Any]:
    return [json.loads(line) for line in vm.read("/srv/api/log.jsonl").splitlines()]


def ctr(vm: QemuMachine, *words: str) -> str:
    return vm.run(["stratum", "exec", "ctr", "--namespace", "k8s.io", *words], timeout=120).stdout


def running(vm: QemuMachine) -> int:
    return sum("RUNNING" in line for line in ctr(vm, "tasks", "list").splitlines())


def sandbox_image(vm: QemuMachine) -> str:
    (name,) = [name for name in ctr(vm, "images", "list", "--quiet").split() if "/pause:" in name]
    return name


def start_pod(vm: QemuMachine, *, host_network: bool) -> None:
    manifest = pod(sandbox_image(vm), host_network=host_network)
    vm.write("/etc/stratum/kubelet/manifests/hello.yaml", manifest)
    wait_until("the pod runs", lambda: running(vm) == 2, 240, pause=2)


def journal(vm: QemuMachine, unit: str) -> str:
    return vm.run(["journalctl", "--boot", "--unit", unit, "--output", "cat"]).stdout


def everything_said_and_shown(vm: QemuMachine) -> str:
    """The journal, each process's command line, every unit, and what anybody may read of ours."""
    readable = "find /etc/stratum /var/lib/stratum /run/stratum -type f -perm /044 -size -1M -exec cat {} +"
    return vm.sh(
        f"journalctl --boot; cat /proc/[0-9]*/cmdline; systemctl show '*'; {readable}; true", timeout=300
    ).stdout


def check_uninstall(vm: QemuMachine, before: Any) -> None:
    """Pods, interfaces, rules, the kubelet's directories: all goes but the manifest, which is the admin's."""
    done = stratum(vm, "uninstall")
    assert [item["path"] for item in done["left"]][:1] == ["/etc/stratum/kubelet/manifests"], done["left"]
    vm.sh("rm /etc/stratum/kubelet/manifests/hello.yaml; rmdir -p /etc/stratum/kubelet/manifests || true")
    left = difference(before, snapshot(vm), ignore=(*LEFT, *REBOOTED))
    assert not left, "\n".join(left)


@pytest.mark.timeout(3600)
def test_a_worker_joins_keeps_its_place_through_a_reboot_and_leaves_no_trace(node: QemuMachine) -> None:
    node.write("/etc/stratum/stratum.yaml", WORKER)
    before = snapshot(node)
    stratum(node, "up", "--token-file", "/root/token")

    # It has joined: a certificate of its own, its node with what the configuration says, and no token any more.
    assert node.run(["test", "-e", "/etc/stratum/kubelet/bootstrap-kubeconfig"], check=False).status != 0
    status = stratum(node, "status", "--wait", "240")
    assert (status["ready"], status["nodeName"], status["nodeIP"]) == (True, NAME, ADDRESS)
    assert f"CN=system:node:{NAME},O=system:nodes" in node.run(["python3", "-c", SUBJECT]).stdout
    assert any(entry["path"].startswith("/api/v1/nodes") for entry in requests(node))
    assert TOKEN.partition(".")[2] not in everything_said_and_shown(node)
    assert stratum(node, "up")["steps"] == []

    # LocalDNS is what pods ask, and a pod runs from what is in the bundle, under systemd's cgroups.
    config = json.loads(node.read("/etc/stratum/kubelet/config.yaml").partition("\n")[2])
    assert (config["clusterDNS"], config["maxPods"]) == (["169.254.20.10"], 20)
    assert node.run(["test", "-e", "/etc/cni/net.d/10-stratum.conflist"], check=False).status != 0
    start_pod(node, host_network=True)
    changed = [path for path in written(before, snapshot(node), ignore=REBOOTED) if not path.startswith(OTHERS)]
    assert [path for path in map(HostPath, changed) if not is_own(path) and find_place(path) is None] == []

    # An image that somebody removes comes back, and so does LocalDNS's rule.
    ctr(node, "images", "remove", sandbox_image(node))
    wait_until("the image is back", lambda: "/pause:" in ctr(node, "images", "list", "--quiet"), 300, pause=3)

    # A boot brings all of it back without a token and without an API server, and the pod with it.
    node.run(["systemctl", "disable", "lab-api"])
    node.reboot()
    status = stratum(node, "status", "--wait", "240")
    assert status["ready"] is True, node.run(["systemctl", "status", "stratum", KUBELET, LOCALDNS], check=False).stdout
    wait_until("the pod runs again", lambda: running(node) == 2, 240, pause=2)
    assert stratum(node, "up")["steps"] == []

    node.run(["systemctl", "enable", "--now", "lab-api"])
    check_uninstall(node, before)


@pytest.mark.timeout(2400)
def test_a_standalone_node_runs_pods_on_its_own_bridge(node: QemuMachine) -> None:
    before = snapshot(node)
    stratum(node, "up", "--node-ip", ADDRESS)
    assert stratum(node, "status", "--wait", "240")["ready"] is True
    start_pod(node, host_network=False)
    assert "stratum0" in node.sh("ip -brief link show type bridge").stdout

    # The kubelet's API lets in the one client that there is, and nobody else.
    client = ["/var/lib/stratum/pki/admin.crt", "/var/lib/stratum/pki/admin.key"]
    assert node.run(["python3", "-c", ASK_KUBELET]).stdout.split() == ["401"]
    assert node.run(["python3", "-c", ASK_KUBELET, *client]).stdout.split() == ["200"]

    check_uninstall(node, before)
