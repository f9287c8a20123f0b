"""What ``up``, a switch and ``uninstall`` make of containerd: GPUs, registries, fragments, the bridge."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest

from stratum.config import Network, NodeSpec
from stratum.errors import ExitCode, HostRefusedError, StratumError
from stratum.host.nvidia import CDI_SPEC
from stratum.node import cni, containerd
from stratum.node.containerd import FRAGMENT_DIR, REGISTRY_DIR
from stratum.node.layout import Layout
from stratum.node.settings import Settings
from stratum.node.stack import Stack
from stratum.node.units import SYSTEMD_DIR
from stratum.output import Output
from stratum.scripts import supervise
from stratum.scripts.context import Context
from stratum.scripts.goal import Goal, goal_in_force
from stratum.scripts.runtime import plan_runtime
from tests.bundles import Entry, Part
from tests.fakes import Desk, node_publisher
from tests.unit import test_prerequisites, test_watch
from tests.unit.hosting import put, work_on
from tests.unit.test_image_steps import record_of
from tests.unit.test_nvidia import TOOLKIT, driver, libraries, program, ubuntu
from tests.unit.test_watch import LivingHost, NodeHost

kubernetes_host = test_prerequisites.host  # fixtures under their names
desk, root = test_watch.desk, test_watch.root

DROP_IN = SYSTEMD_DIR / "stratum-containerd.service.d/30-gpu-setup.conf"
PROGRAM = b"#!/bin/sh\n"
PAUSE = "registry.example.test/pause:3.10"


def bundle_of(desk: Desk, *, kubelet: bool = False, images: tuple[str, ...] = (), version: str = "1.0.0") -> Path:
    parts = [
        Part("containerd", [Entry("bin/containerd", PROGRAM), Entry("bin/ctr", PROGRAM)], version="1.7.24"),
        Part("cni-plugins", [Entry("cni/bin/bridge", PROGRAM)]),
    ]
    if kubelet:
        parts.append(Part("kubelet", [Entry("bin/kubelet", PROGRAM + b"# k")], version="1.34.1"))
    publisher = node_publisher(version=version, parts=parts, serial=int(version[0]))
    if images:
        layer = publisher.images[0][1]
        publisher.images = [(name, layer) for name in images]
    return desk.bundle(publisher.build(), f"{version}-{kubelet}-{len(images)}.tar")


@pytest.fixture
def host(root: Path) -> LivingHost:
    return LivingHost(str(root), {})


@pytest.fixture
def node(kubernetes_host: Any) -> NodeHost:
    return NodeHost(kubernetes_host.root, {}, on=kubernetes_host.on)


def configure(host: LivingHost, spec: str) -> None:
    put(host, "/etc/stratum/stratum.yaml", f"apiVersion: stratum.dev/v1\nkind: Node\nspec:\n{spec}")


def read(host: LivingHost, path: object) -> str:
    return Path(host.root + str(path)).read_text()


def exists(host: LivingHost, path: object) -> bool:
    return Path(host.root + str(path)).exists()


# -- GPUs -----------------------------------------------------------------------------------------------


def test_where_there_is_a_gpu_containerd_gets_its_commands_and_a_runtime(desk: Desk, host: LivingHost) -> None:
    ubuntu(host)
    assert desk.up(host, bundle_of(desk)).status == ExitCode.DONE
    assert f"ExecStartPre=/usr/bin/nvidia-ctk cdi generate --output={CDI_SPEC}" in read(host, DROP_IN)
    assert 'BinaryName = "/usr/bin/nvidia-container-runtime"' in read(host, containerd.CONFIG_PATH)
    assert 'default_runtime_name = "runc"' in read(host, containerd.CONFIG_PATH)


def test_without_one_there_is_no_word_of_them(desk: Desk, host: LivingHost) -> None:
    ran = desk.up(host, bundle_of(desk))
    assert not exists(host, DROP_IN)
    assert "nvidia" not in read(host, containerd.CONFIG_PATH)
    assert "gpu" not in ran.err.getvalue()


def test_gpus_that_are_switched_off_take_their_drop_in_along(desk: Desk, host: LivingHost) -> None:
    ubuntu(host)
    bundle = bundle_of(desk)
    desk.up(host, bundle)
    configure(host, "  gpu: {nvidia: 'off'}\n")
    desk.up(host, bundle)
    assert not exists(host, DROP_IN)
    assert "nvidia" not in read(host, containerd.CONFIG_PATH)


def boot(host: LivingHost) -> list[str]:
    """The node starts as at a boot; what systemd was told to do."""
    for unit in ("stratum-kubelet.service", "stratum-containerd.service"):
        host.run(["systemctl", "stop", unit], timeout=60)
    host.commands.clear()
    context = Context(host, Output(stdout=io.StringIO(), stderr=io.StringIO()))
    supervise.bring_up(context, Stack(Layout(host)))
    return [line for line in host.commands if line.startswith(("systemctl daemon-reload", "systemctl start"))]


def add_gpu(host: LivingHost, number: int) -> None:
    put(host, f"/proc/driver/nvidia/gpus/0000:{number + 1:02x}:00.0/information", "Model: NVIDIA L4\n")
    put(host, f"/dev/nvidia{number}")


def without_driver(host: LivingHost) -> None:
    shutil.rmtree(f"{host.root}/proc/driver/nvidia")
    for path in Path(host.root, "dev").glob("nvidia*"):
        path.unlink()


def test_each_start_prepares_the_gpus_that_are_there_by_then(desk: Desk, host: LivingHost) -> None:
    ubuntu(host, 1)
    desk.up(host, bundle_of(desk))
    assert boot(host) == ["systemctl start stratum-containerd.service"]
    add_gpu(host, 1)
    assert boot(host) == ["systemctl daemon-reload", "systemctl start stratum-containerd.service"]
    assert "--create-nvidia-device-file=1" in read(host, DROP_IN)
    add_gpu(host, 2)
    desk.run(host, "restart")
    assert "--create-nvidia-device-file=2" in read(host, DROP_IN)


def test_a_drop_in_that_the_admin_edited_is_as_it_was_after_a_start(desk: Desk, host: LivingHost) -> None:
    ubuntu(host, 1)
    desk.up(host, bundle_of(desk))
    Path(host.root + str(DROP_IN)).write_text("[Service]\nExecStartPre=/root/mine\n")
    add_gpu(host, 1)
    boot(host)
    assert read(host, DROP_IN) == "[Service]\nExecStartPre=/root/mine\n"


def test_a_gpu_that_was_not_there_at_the_last_up_is_left_alone_by_a_start(desk: Desk, host: LivingHost) -> None:
    desk.up(host, bundle_of(desk))
    ubuntu(host, 1)
    assert boot(host) == ["systemctl start stratum-containerd.service"]
    assert not exists(host, DROP_IN)


def test_a_driver_that_comes_later_in_the_boot_than_the_node_finds_its_runtime(desk: Desk, node: NodeHost) -> None:
    """Else containerd, whose set-up is tried again until the driver is there, would start without it."""
    driver(node)
    libraries(node, "/usr/lib/x86_64-linux-gnu", "550.90.07")
    program(node, *TOOLKIT)
    bundle = bundle_of(desk, kubelet=True, images=(PAUSE,))
    assert desk.up(node, bundle).status == ExitCode.DONE
    before = read(node, containerd.CONFIG_PATH), read(node, DROP_IN)
    assert "nvidia-container-runtime" in before[0]
    without_driver(node)
    boot(node)
    assert (read(node, containerd.CONFIG_PATH), read(node, DROP_IN)) == before
    # Who took the GPU out for good says so with an up.
    desk.up(node, bundle)
    assert not exists(node, DROP_IN)
    assert "nvidia" not in read(node, containerd.CONFIG_PATH)


def test_a_driver_without_the_toolkit_is_said_and_a_demand_for_it_refused(desk: Desk, host: LivingHost) -> None:
    driver(host)
    libraries(host, "/usr/lib64", "550.90.07")
    bundle = bundle_of(desk)
    configure(host, "  gpu: {nvidia: 'on'}\n")
    with pytest.raises(HostRefusedError) as caught:
        desk.up(host, bundle)
    assert "nvidia-ctk, nvidia-container-runtime is missing" in caught.value.message
    assert not exists(host, containerd.CONFIG_PATH)
    configure(host, "  gpu: {nvidia: auto}\n")
    assert "containers get no GPU" in desk.up(host, bundle).err.getvalue()
    program(host, "/usr/bin/nvidia-ctk", "/usr/bin/nvidia-container-runtime")
    desk.up(host, bundle)
    assert exists(host, DROP_IN)


@pytest.mark.parametrize("refreshed", [False, True])
def test_the_specification_goes_with_the_node_unless_the_toolkits_service_keeps_it(
    desk: Desk, host: LivingHost, refreshed: bool
) -> None:
    ubuntu(host)
    if refreshed:
        put(host, "/usr/lib/systemd/system/nvidia-cdi-refresh.service", "[Service]\n")
    desk.up(host, bundle_of(desk))
    put(host, str(CDI_SPEC), "cdiVersion: 0.5.0\n")
    assert f"remove {CDI_SPEC}" in desk.run(host, "uninstall", "--dry-run").text or refreshed
    desk.run(host, "uninstall")
    assert exists(host, CDI_SPEC) == refreshed
    assert exists(host, CDI_SPEC.parent) == refreshed


def test_a_specification_of_somebody_elses_stays(desk: Desk, host: LivingHost) -> None:
    put(host, str(CDI_SPEC), "cdiVersion: 0.5.0\n")
    desk.up(host, bundle_of(desk))
    desk.run(host, "uninstall")
    assert exists(host, CDI_SPEC)


# -- registries, fragments, the sandbox -----------------------------------------------------------------

REGISTRIES = """  containerd:
    registries:
      - name: docker.io
        mirrors:
          - url: https://mirror.test
            username: reader
            passwordFile: /root/password
"""


def test_registries_come_from_the_configuration_and_need_no_restart(desk: Desk, host: LivingHost) -> None:
    bundle = bundle_of(desk)
    desk.up(host, bundle)
    configure(
        host, "".join(line for line in REGISTRIES.splitlines(True) if "reader" not in line and "/root" not in line)
    )
    host.commands.clear()
    desk.up(host, bundle)
    assert "https://mirror.test" in read(host, REGISTRY_DIR / "docker.io/hosts.toml")
    assert not [line for line in host.commands if "start" in line]
    # Credentials are in 1.7's main configuration too.
    put(host, "/root/password", "hidden\n")
    configure(host, REGISTRIES)
    ran = desk.up(host, bundle)
    assert "systemctl restart stratum-containerd.service" in host.commands
    assert Path(host.root + str(containerd.CONFIG_PATH)).stat().st_mode & 0o777 == 0o600
    assert "hidden" not in ran.text + ran.err.getvalue()
    assert "hidden" not in read(host, "/var/lib/stratum/settings.json")
    desk.run(host, "uninstall")
    assert not exists(host, "/etc/stratum/containerd")


def test_a_way_back_does_not_stumble_over_a_password_file_that_is_gone(desk: Desk, host: LivingHost) -> None:
    put(host, "/root/password", "hidden\n")
    configure(host, REGISTRIES)
    desk.up(host, bundle_of(desk))
    configure(host, "  profile: default\n")
    Path(host.root + "/root/password").unlink()
    broken = bundle_of(desk, version="2.0.0")
    host.hooks["systemctl start stratum-containerd.service"] = lambda: setattr(
        host, "silent", "2.0.0" in str(Path(host.root + "/opt/stratum/node/current").readlink())
    )
    with pytest.raises(Exception) as caught:
        desk.run(host, "upgrade", "--bundle", str(broken), "--trust", str(desk.key))
    assert getattr(caught.value, "exit_code", None) == ExitCode.ROLLED_BACK
    assert host.active("stratum-containerd.service")


def test_a_start_without_the_password_file_keeps_the_credentials_that_containerd_has(
    desk: Desk, host: LivingHost
) -> None:
    put(host, "/root/password", "hidden\n")
    configure(host, REGISTRIES)
    desk.up(host, bundle_of(desk))
    before = read(host, containerd.CONFIG_PATH)
    assert "hidden" in before
    Path(host.root + "/root/password").unlink()
    said: list[str] = []
    goal = goal_in_force(Layout(host))
    assert goal is not None
    assert plan_runtime(work_on(host), goal.record, goal.settings, said.append) == []
    assert len(said) == 1 and "the registries stay as they are" in said[0]


def test_fragments_of_the_admins_are_kept_and_named_by_uninstall(desk: Desk, host: LivingHost) -> None:
    desk.up(host, bundle_of(desk))
    assert exists(host, FRAGMENT_DIR)
    put(host, str(FRAGMENT_DIR / "own.toml"), "version = 2\n")
    ran = desk.run(host, "uninstall")
    assert f"{FRAGMENT_DIR}: holds what is not Stratum's: own.toml" in ran.text
    assert read(host, FRAGMENT_DIR / "own.toml") == "version = 2\n"


def test_a_fragment_counts_from_the_next_up(desk: Desk, host: LivingHost) -> None:
    bundle = bundle_of(desk)
    desk.up(host, bundle)
    for text in ("version = 2\n", "version = 2\noom_score = -1\n"):
        put(host, str(FRAGMENT_DIR / "own.toml"), text)
        host.commands.clear()
        desk.up(host, bundle)
        assert "systemctl restart stratum-containerd.service" in host.commands
    put(host, str(FRAGMENT_DIR / "notes.txt"), "mine")
    put(host, str(FRAGMENT_DIR / "old.toml/x"), "mine")
    host.commands.clear()
    desk.up(host, bundle)
    assert not [line for line in host.commands if line.startswith("systemctl restart")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('version = 2\n[plugins."io.containerd.grpc.v1.cri"]\n  x = 1\n', True),
        ("version = 2\n  [plugins.'io.containerd.grpc.v1.cri'.registry]\n", True),
        ('version = 2\n# [plugins."io.containerd.grpc.v1.cri"]\n[debug]\n', False),
        ('version = 2\n[plugins."io.containerd.grpc.v1.cri-x"]\n', False),
        (b"\xff\xfe", False),
    ],
)
def test_a_fragment_that_drops_what_stratum_sets_is_warned_of(
    desk: Desk, host: LivingHost, text: Any, said: bool
) -> None:
    put(host, str(FRAGMENT_DIR / "own.toml"), text)
    put(host, str(FRAGMENT_DIR / "own.txt"), '[plugins."io.containerd.grpc.v1.cri"]\n')
    assert ("containerd-fragment" in desk.up(host, bundle_of(desk)).err.getvalue()) == said


def test_the_sandbox_is_the_bundles_own(desk: Desk, node: NodeHost) -> None:
    ran = desk.up(node, bundle_of(desk, kubelet=True, images=(PAUSE, "example.test/demo:1")))
    assert f'sandbox_image = "{PAUSE}"' in read(node, containerd.CONFIG_PATH)
    assert "sandbox-image" not in ran.err.getvalue()


def test_a_kubelet_without_one_is_warned_of(desk: Desk, node: NodeHost) -> None:
    ran = desk.up(node, bundle_of(desk, kubelet=True))
    assert "sandbox-image: the bundle has a kubelet and no image called pause" in ran.err.getvalue()
    assert "sandbox_image" not in read(node, containerd.CONFIG_PATH)


# -- the bridge -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "bridged"), [("", True), ("  network: {bridge: false}\n", False)])
def test_a_node_of_its_own_has_the_bridge_unless_it_is_switched_off(
    desk: Desk, node: NodeHost, spec: str, bridged: bool
) -> None:
    configure(node, f"  role: standalone\n{spec}")
    desk.up(node, bundle_of(desk, kubelet=True))
    assert exists(node, cni.CONFIG_PATH) == bridged
    assert exists(node, cni.CONFIG_PATH.parent), "containerd waits for the directory"


def test_a_network_that_the_cluster_wrote_stays(desk: Desk, host: LivingHost) -> None:
    theirs = cni.CONFIG_PATH.parent / "05-cluster.conflist"
    put(host, str(theirs), "{}\n")
    configure(host, "  network: {bridge: false}\n")
    desk.up(host, bundle_of(desk))
    desk.run(host, "uninstall")
    assert read(host, theirs) == "{}\n"


def test_another_subnet_makes_the_bridge_anew_where_nothing_is_attached(desk: Desk, host: LivingHost) -> None:
    bundle = bundle_of(desk)
    desk.up(host, bundle)
    assert cni.subnet_in_force(host) == "10.215.0.0/16"
    Path(host.root + "/sys/class/net/stratum0/bridge").mkdir(parents=True)
    configure(host, "  network: {bridgeSubnet: 10.99.0.0/24}\n")
    assert "10.99.0.0/24" in desk.up(host, bundle, "--dry-run").text
    assert cni.subnet_in_force(host) == "10.215.0.0/16"
    desk.up(host, bundle)
    assert cni.subnet_in_force(host) == "10.99.0.0/24"
    assert not exists(host, "/sys/class/net/stratum0")
    assert "10.99.0.0/24" in str(host.chains) and "10.215.0.0/16" not in str(host.chains)
    host.commands.clear()
    desk.up(host, bundle)
    assert not [line for line in host.commands if "link delete" in line]


def test_a_bridge_that_is_switched_off_goes_with_its_rules(desk: Desk, host: LivingHost) -> None:
    bundle = bundle_of(desk)
    desk.up(host, bundle)
    Path(host.root + "/sys/class/net/stratum0/bridge").mkdir(parents=True)
    assert "10.215.0.0/16" in str(host.chains)
    configure(host, "  network: {bridge: false}\n")
    desk.up(host, bundle)
    assert not exists(host, cni.CONFIG_PATH)
    assert not exists(host, "/sys/class/net/stratum0")
    assert "STRATUM-POSTROUTING" not in host.chains
    configure(host, "  network: {bridge: true}\n")
    desk.up(host, bundle)
    assert "10.215.0.0/16" in str(host.chains)


def test_a_bridge_that_is_asked_for_needs_its_plugin(desk: Desk, host: LivingHost) -> None:
    configure(host, "  network: {bridge: true}\n")
    publisher = node_publisher()
    publisher.parts = publisher.parts[:1]
    with pytest.raises(StratumError) as caught:
        desk.up(host, desk.bundle(publisher.build(), "no-plugins.tar"))
    assert caught.value.reference == "no-bridge-plugin"


@pytest.mark.parametrize("there", [False, True])
def test_the_plugin_that_every_pod_needs_is_missed(desk: Desk, node: NodeHost, there: bool) -> None:
    if there:
        put(node, str(cni.HOST_BIN_DIR / "loopback"), "#!/bin/sh\n")
    ran = desk.up(node, bundle_of(desk, kubelet=True))
    assert ("cni-loopback" in ran.err.getvalue()) != there
    checked = desk.run(node, "preflight", "--bundle", str(bundle_of(desk, kubelet=True)), "--trust", str(desk.key))
    assert ("cni-loopback" in checked.text) != there


def test_a_worker_has_no_bridge_unless_it_is_asked_for() -> None:
    record = record_of(PAUSE)
    for role, asked, plugins, bridged in [
        ("worker", None, ("bridge",), False),
        ("worker", True, ("bridge",), True),
        ("worker", False, ("bridge",), False),
        ("standalone", None, ("bridge",), True),
        ("standalone", False, ("bridge",), False),
        ("standalone", None, ("loopback",), False),
    ]:
        spec = NodeSpec(role=role, network=Network(bridge=asked))
        assert Goal(record, plugins, Settings(spec)).bridged == bridged, (role, asked)
    # Without a kubelet there is no cluster that would bring a network.
    container_host = record_of(PAUSE, kubelet=False)
    assert Goal(container_host, ("bridge",), Settings(NodeSpec(role="worker"))).bridged
