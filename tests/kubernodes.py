"""Kubernetes nodes in directory trees: a machine that plays kubelet, CoreDNS and their units, and labs of them.

The machine is as strict as systemd where the order of units matters: what a unit requires is started before it, and
what requires a unit stops and restarts with it. Nothing outside of the tree is changed and no program is run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from stratum.journal import Journal
from stratum.node import kubelet, kubeletconfig
from stratum.node.layout import Layout
from stratum.node.settings import EARLIER_PATH
from stratum.node.stack import STARTED, Stack
from stratum.node.units import (
    EVERY_UNIT,
    REFUSED,
    UNIT_KUBELET,
    UNIT_KUBELET_LAUNCH_CHECK,
    UNIT_LOCALDNS,
    UNIT_LOCALDNS_NETWORK,
)
from stratum.node.versions import differences
from stratum.output import Output
from stratum.receipt import Receipt
from stratum.scripts import localdns, stack
from stratum.scripts.context import Context
from stratum.scripts.goal import goal_in_force
from stratum.scripts.node import plan_units
from stratum.scripts.run import load_work
from stratum.system import PathLike
from stratum.trust import certificates
from tests.bundles import Bundle, Entry, Part, directory, tar
from tests.fakes import Desk, Unit, node_publisher
from tests.faults import FaultyMachine
from tests.nodes import REMEMBERED, Lab, State, directory_in_memory, find_strays, tree_of
from tests.standins import coredns
from tests.unit.test_prerequisites import CONTROLS, FSTAB, KubernetesHost, make_kubernetes_tree

CONFIG = "/etc/stratum/stratum.yaml"
HEAD = "apiVersion: stratum.dev/v1\nkind: Node\nspec:\n"
TOKEN = "abcdef.0123456789abcdef"
LINK = "stratum-dns0"
SERVER = "https://192.0.2.1:6443"
RESOLV_CONF = "nameserver 192.0.2.53\n"
HEALTHZ_PORT = 10248
READS = re.compile(r"run \S*(systemctl (show|is-)|journalctl|ip -o|nft list|ctr .* list|\S+ --?v(ersion)?$)")


@functools.cache
def authority(client: str) -> certificates.Authority:
    """A CA and its client; always the same ones, so that equal machines are equal."""
    return certificates.make_authority(1_800_000_000.0, client, "system:nodes")


def cluster_ca() -> str:
    return authority("system:node:node").ca.decode()


@dataclass
class NodeMachine(FaultyMachine, KubernetesHost):
    """A machine that runs a kubelet and CoreDNS, as the content of their program files says.

    A kubelet that is ``silent`` never answers, one that ``loops`` ends again and again. With ``refused`` the API server
    knows no token; else a kubelet with a bootstrap kubeconfig gets its certificate at its start.
    """

    links: dict[str, list[str]] = field(default_factory=dict)  # interfaces of ours and their addresses
    refused: bool = False
    verdict: int = 0  # of the launch check
    restarts: dict[str, int] = field(default_factory=dict)
    boots: int = 0

    def mutation(self, what: str) -> None:
        """Only what changes something is a moment to die in: the gates ask the same again and again."""
        if not (READS.match(what) and not self.dead):
            super().mutation(what)

    # -- systemd ------------------------------------------------------------------------------------

    def _required(self, unit: str) -> list[str]:
        text = (self._unit(unit).loaded or b"").decode()
        return [word for line in re.findall("^Requires=(.*)$", text, re.MULTILINE) for word in line.split()]

    def _dependents(self, unit: str) -> list[str]:
        return [name for name in EVERY_UNIT if unit in self._required(name) and self.active(name)]

    def _systemctl(self, argv: list[str], data: bytes) -> tuple[int, str]:
        names = [word for word in argv[1:] if not word.startswith("-")]
        if argv[0] in ("stop", "restart") and names and names[0] in EVERY_UNIT:
            dependents = self._dependents(names[0])
            for name in reversed(dependents):
                self._systemctl(["stop", name], b"")
            if names[0] == UNIT_LOCALDNS_NETWORK and self.active(names[0]):
                self._drop_link()
            status = super()._systemctl(argv, data)
            if argv[0] == "restart":
                for name in dependents:
                    self._start(name)
            return status
        return super()._systemctl(argv, data)

    def _start(self, unit: str) -> tuple[int, str]:
        if self.active(unit) and unit in self.running:
            self.running.pop(unit)
        for name in self._required(unit):
            if not self.active(name) and self._start(name)[0]:
                return 1, ""
        if unit == UNIT_LOCALDNS_NETWORK:
            return self._start_network()
        if unit == UNIT_KUBELET_LAUNCH_CHECK:
            # A oneshot: it has ended by the time that its start is through.
            self._unit(unit).active = {0: "inactive", REFUSED: "failed"}.get(self.verdict, "activating")
            return (1 if self.verdict else 0), ""
        status = super()._start(unit)
        if unit == UNIT_KUBELET and self.active(unit):
            self._begin_kubelet()
        return status

    def _start_network(self) -> tuple[int, str]:
        known = self._unit(UNIT_LOCALDNS_NETWORK)
        if known.loaded is None:
            return 5, ""
        found = re.search(r"--address (\S+)", known.loaded.decode())
        assert found
        known.active = "active"
        localdns.bring_up(self, found[1])
        return 0, ""

    def _drop_link(self) -> None:
        localdns.bring_down(self)

    def _show(self, name: str) -> str:
        status = self.verdict if name == UNIT_KUBELET_LAUNCH_CHECK else 0
        return f"{super()._show(name)}ExecMainStatus={status}\nNRestarts={self.restarts.get(name, 0)}\n"

    def reboot(self) -> None:
        super().reboot()
        for name in self.links:
            shutil.rmtree(Path(self.root, "sys/class/net", name))
        self.links.clear()
        self.restarts.clear()
        Path(self.root, "run/resolv.conf").write_text(RESOLV_CONF)
        # The kernel's own values; a swap that is in fstab.
        for key, value in CONTROLS.items():
            Path(self.root, "proc/sys", key).write_text(f"{value}\n")
        self.boots += 1
        Path(self.root, "proc/sys/kernel/random/boot_id").write_text(f"{self.boots:08}-2222-3333-4444-555555555555\n")
        self.on.clear()
        self.show_swap()
        if FSTAB in self.read_bytes("/etc/fstab"):
            self.switch_on("/swap.img")

    # -- the network --------------------------------------------------------------------------------

    def _ip(self, argv: list[str], data: bytes) -> tuple[int, str]:
        words = [word for word in argv if not word.startswith("-")]
        name = words[words.index("dev") + 1] if "dev" in words else ""
        if name != LINK:
            return super()._ip(argv, data)
        if words[:2] == ["link", "add"]:
            self.links[name] = []
            Path(self.root, "sys/class/net", name).mkdir(parents=True)
        elif name not in self.links:
            return 1, ""
        elif words[:2] == ["link", "delete"]:
            del self.links[name]
            Path(self.root, "sys/class/net", name).rmdir()
        elif words[:2] == ["address", "flush"]:
            self.links[name].clear()
        elif words[:2] == ["address", "add"]:
            self.links[name].append(words[2])
        elif words[:2] == ["address", "show"]:
            return 0, "".join(f"5: {name}    inet {one} scope global {name}\n" for one in self.links[name])
        return 0, ""

    def _nft(self, argv: list[str], data: bytes) -> tuple[int, str]:
        text = data.decode()
        if argv[0] == "list":
            key = " ".join(argv[-2:])
            return (0, self.tables[key]) if key in self.tables else (1, "")
        if argv[0] == "delete":
            return (0, "") if self.tables.pop(" ".join(argv[-2:]), None) else (1, "")
        found = re.findall(r"^table (\S+ \S+) \{$", text, re.MULTILINE)
        assert found, text
        self.tables[found[0]] = text[text.rindex(f"table {found[0]} {{") :]
        return 0, ""

    def write_control(self, path: PathLike, data: bytes) -> None:
        KubernetesHost.write_control(self, path, data)

    # -- the programs -------------------------------------------------------------------------------

    def _begin_kubelet(self) -> None:
        """What the kubelet does on the disk at its start, beside what Stratum does: it is another process."""
        root = Path(self.root, "var/lib/kubelet")
        (root / "pods").mkdir(parents=True, exist_ok=True)
        (root / "cpu_manager_state").write_text("{}\n")
        words = (self._unit(UNIT_KUBELET).loaded or b"").decode()
        if "--bootstrap-kubeconfig=" not in words:
            return
        pem = self.real(kubelet.CLIENT_CERTIFICATE)
        if Path(pem).exists():
            return
        if not self.exists(kubeletconfig.BOOTSTRAP):
            self._end_kubelet("failed to run Kubelet: unable to load bootstrap kubeconfig: stat: no such file")
        elif self.refused:
            said = "failed to run Kubelet: cannot create certificate signing request: Unauthorized"
            self.journals.setdefault(UNIT_KUBELET, []).append(said)
        else:
            Path(pem).parent.mkdir(parents=True, exist_ok=True)
            made = authority("system:node:node")
            Path(pem).write_bytes(made.certificate + made.key)
            Path(self.root, "var/lib/kubelet/kubeconfig").write_text("joined\n")

    def _end_kubelet(self, said: str) -> None:
        self.journals.setdefault(UNIT_KUBELET, []).append(said)
        self.running.pop(UNIT_KUBELET, None)
        self._unit(UNIT_KUBELET).active = "failed"

    def get_local(self, port: int, path: str, timeout: float) -> tuple[int, bytes]:
        assert (port, path) == (HEALTHZ_PORT, "/healthz")
        program = self.running.get(UNIT_KUBELET, (b"silent", b"", b""))[0]
        if b"loops" in program:
            self.restarts[UNIT_KUBELET] = self.restarts.get(UNIT_KUBELET, 0) + 1
            self.journals.setdefault(UNIT_KUBELET, []).append("E1130 run.go:72] unknown flag: --nonsense")
        if b"silent" in program or b"loops" in program:
            raise ConnectionRefusedError(111, "Connection refused")
        return 200, b"ok"

    def ask_dns(self, address: str, port: int, query: bytes, *, tcp: bool, timeout: float) -> bytes:
        program = self.running.get(UNIT_LOCALDNS, (b"silent", b"", b""))[0]
        if b"silent" in program or f"{address}/32" not in self.links.get(LINK, ()):
            raise ConnectionRefusedError(111, "Connection refused")
        question = coredns.decode_question(query)
        answer = coredns.render(f"{{{{ .Name }}}} 5 IN A {address}", question.name)
        return coredns.reply(question, 0, [answer])

    # -- the admin ----------------------------------------------------------------------------------

    def configure(self, body: str) -> None:
        """Write the configuration: the fields of ``spec``, with two spaces before each."""
        path = Path(self.root + CONFIG)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEAD + body)
        path.chmod(0o600)


KUBERNETES_REMEMBERED = (*REMEMBERED, "on", "links", "restarts", "boots")


def bundle_of(version: str, serial: int, *, kubelet: str = "", dns: bool = False, program: str = "") -> Bundle:
    """A version; ``kubelet`` is that program's version, and ``program`` says how the kubelet behaves."""
    head = b"#!/bin/sh\n# "
    daemon = [Entry("bin/containerd", head + version.encode()), Entry("bin/ctr", head + b"ctr " + version.encode())]
    plugins = [Entry(f"cni/bin/{name}", head + name.encode()) for name in ("bridge", "portmap")]
    parts = [
        Part("containerd", [directory("bin"), *daemon], "1.7.24" if serial == 1 else "2.1.3"),
        Part("cni-plugins", [directory("cni"), directory("cni/bin"), *plugins], "1.5.0"),
    ]
    if kubelet:
        text = head + f"kubelet {version} {program}".encode()
        parts.append(Part("kubelet", [directory("bin"), Entry("bin/kubelet", text)], kubelet))
    if dns:
        parts.append(
            Part("coredns", [directory("bin"), Entry("bin/coredns", head + b"coredns " + version.encode())], "1.12.1")
        )
    layer = tar([Entry("etc/version", version.encode(), mode=0o644)])
    return node_publisher(
        version=version, serial=serial, parts=parts, images=[(f"example.test/demo:{version}", [layer])]
    ).build()


BUNDLES = {
    "host.tar": bundle_of("0.9", 1),
    "old.tar": bundle_of("1.0", 1, kubelet="1.34.1", dns=True),
    "new.tar": bundle_of("2.0", 2, kubelet="1.35.0", dns=True),
    "bad.tar": bundle_of("2.0", 2, kubelet="1.35.0", dns=True, program="silent"),
    "later-host.tar": bundle_of("3.0", 3),
}
STANDALONE_WITH_DNS = "  localDNS: {enabled: true}\n"
OTHER_SETTINGS = (
    "  localDNS: {enabled: true, upstream: [192.0.2.54]}\n"
    "  kubelet:\n    labels: {example.test/rack: r2}\n    launchCheck: [/bin/true]\n"
    "  proxy: {https: 'http://192.0.2.80:3128'}\n"
    "  containerd: {registries: [{name: docker.io, mirrors: [{url: 'https://mirror.example.test'}]}]}\n"
)


def worker(token: str = TOKEN, *, more: str = "") -> str:
    """The configuration of a worker with a token in it."""
    ca = "".join(f"      {line}\n" for line in cluster_ca().splitlines())
    inline = f"    token: {token}\n" if token else ""
    return f"  role: worker\n  cluster:\n    server: {SERVER}\n    dns: [10.96.0.10]\n{inline}    ca: |\n{ca}{more}"


def check_node(machine: FaultyMachine, *allowed: str) -> str:
    """Everything on the node is of one version and its settings: files, units, what runs, the network of LocalDNS."""
    layout, work = Layout(machine), load_work(Context(machine, Output()))
    goal = goal_in_force(layout)
    assert goal is not None
    version = goal.record.version
    assert version in allowed, f"{version} runs"
    assert differences(work.receipt, layout.version_dir(version)) == []
    left = [
        action.describe()
        for action in [
            *stack.plan_version_needs(work, Stack(layout), goal),
            *plan_units(work, layout, goal),
            *(action for step in stack.localdns_steps(work, goal) for action in step.plan()),
        ]
    ]
    assert left == []
    running = Stack(layout).units
    for unit in EVERY_UNIT:
        wanted = unit in running or (unit == UNIT_LOCALDNS_NETWORK and UNIT_LOCALDNS in running)
        if unit in running or not wanted or unit == UNIT_LOCALDNS_NETWORK:
            assert machine.active(unit) == wanted or "launch" in unit, f"{unit} is active: {not wanted}"
    for unit in running:
        program = "coredns" if unit == UNIT_LOCALDNS else unit.split("-")[1].split(".")[0]
        text = machine.read_bytes(layout.bin_dir / program)
        assert unit == UNIT_LOCALDNS or machine.running[unit][0] == text
        # A program is known there by its inode, which is another one on each machine.
        started, inputs = Stack(layout).started_with(unit), Stack(layout).inputs(unit)
        differing = {path for path in {*started, *inputs} if started.get(path) != inputs.get(path)}
        assert differing <= {str(layout.bin_dir / program)}, f"{unit} runs with something else: {differing}"
    if UNIT_LOCALDNS not in running:
        assert not machine.lexists(f"/sys/class/net/{LINK}")
        assert not any("localdns" in table for table in machine.tables)
    assert Journal(machine).unfinished() is None
    assert not machine.lexists(EARLIER_PATH) and Receipt.load(machine).get(EARLIER_PATH) is None
    assert find_strays(machine) == []
    return version


def make_lab(top: Path) -> Lab:
    (top / "desk").mkdir()
    lab = Lab(top, Desk(top / "desk"), kind=NodeMachine, remembered=KUBERNETES_REMEMBERED)
    for name, bundle in BUNDLES.items():
        lab.desk.bundle(bundle, name)
    tree = make_kubernetes_tree(top / "bare")
    (tree / "run/resolv.conf").write_text(RESOLV_CONF)
    KubernetesHost(str(tree), {}).switch_on("/swap.img")
    (tree / "usr/bin/nft").write_text("#!/bin/sh\n")
    (tree / "usr/bin/nft").chmod(0o755)
    lab.original = tree_of(tree)
    lab.states["bare"] = State.of(str(tree), {"on": {"/swap.img": -2}, "units": {"stratum.service": Unit()}})
    return lab


@contextlib.contextmanager
def kubernetes_lab() -> Iterator[Lab]:
    """A laboratory with a bare machine; states are added by :func:`bring`."""
    with directory_in_memory() as top:
        yield make_lab(top)


def bring(lab: Lab, state: str, before: str, body: Optional[str], *command: str) -> None:
    """Keep, as ``state``, the machine in state ``before`` after ``command`` with the configuration ``body``."""
    with node(lab, before) as machine:
        if body is not None:
            machine.configure(body)
        answer = lab.ask(machine, *command)
        assert answer.status == 0, answer
        lab.keep(state, machine)


def files_of(machine: FaultyMachine) -> dict[str, object]:
    """What is on the disk, without the records of what was done and what it was done for."""
    found = tree_of(Path(machine.root))
    records = ("receipt.json", "journal.json", "lock", "history.json")
    left_out = (*(f"/var/lib/stratum/{name}" for name in records), "/opt/stratum/", "/proc", "/sys", CONFIG)
    return {name: value for name, value in found.items() if not name.startswith(left_out)}


def different(machine: FaultyMachine, before: dict[str, object]) -> set[str]:
    """The paths that are not as they were."""
    now = files_of(machine)
    return {name for name in {*now, *before} if now.get(name) != before.get(name)}


@contextlib.contextmanager
def node(lab: Lab, state: str) -> Iterator[NodeMachine]:
    with lab.machine(state) as machine:
        assert isinstance(machine, NodeMachine)
        # What the units were started with is known by inodes, which are others in this copy.
        here = Stack(Layout(machine))
        if machine.exists(STARTED):
            noted = {unit: here.inputs(unit) for unit in here.units}
            Path(machine.root + str(STARTED)).write_text(json.dumps(noted))
        yield machine
