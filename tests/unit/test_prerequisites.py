"""What up, upgrade, the supervisor and uninstall do with a Kubernetes node's host, and leave of a container host's.

The machine is a directory tree that plays systemd, swap, sysctls and the network; the kubelet is a stand-in.
"""

from __future__ import annotations

import copy as copy_module
import io
import itertools
import json
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional

import pytest

from stratum.config import Network, NodeSpec
from stratum.errors import ExitCode, HostRefusedError, StratumError, UsageError
from stratum.host import modules, persistence, swapunits, sysctls
from stratum.host.profiles import BASE_PATH, PROFILES
from stratum.node.layout import Layout
from stratum.node.settings import SETTINGS_PATH, Settings, read_settings
from stratum.node.stack import Stack
from stratum.node.units import SYSTEMD_DIR, UNIT_KUBELET_LAUNCH_CHECK, UNIT_LOCALDNS, UNIT_LOCALDNS_NETWORK
from stratum.output import Output
from stratum.scripts import supervise
from stratum.scripts.context import Context
from stratum.scripts.footprint import find_place, footprint, is_own
from stratum.system import HostPath, PathLike
from tests import netlink
from tests.bundles import Entry, Part, snapshot
from tests.fakes import Desk, Killed, MachineHost, make_tree, node_publisher, relative

FSTAB = b"UUID=x / ext4 defaults 0 1\n/swap.img none swap sw 0 0\n"
HEADER = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
MOUNTINFO = (
    "30 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"
    "31 30 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    "32 30 0:28 / /sys/fs/bpf rw shared:2 - bpf bpf rw\n"
)
CONTROLS = {
    "net/ipv4/ip_forward": "0",
    "net/bridge/bridge-nf-call-iptables": "0",
    "net/bridge/bridge-nf-call-ip6tables": "0",
    "net/netfilter/nf_conntrack_max": "262144",
    "vm/overcommit_memory": "0",
    "vm/panic_on_oom": "0",
    "kernel/panic": "0",
    "kernel/panic_on_oops": "0",
    "kernel/keys/root_maxkeys": "200",
    "kernel/keys/root_maxbytes": "20000",
    "kernel/random/boot_id": "11111111-2222-3333-4444-555555555555",
}


@dataclass
class KubernetesHost(MachineHost):
    """A machine with swap, sysctls and network cards."""

    addresses: dict[str, list[str]] = field(default_factory=lambda: {"eth0": ["192.0.2.10/24"]})
    on: dict[str, int] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)  # controls that cannot be written

    def ask_rtnetlink(self, request: bytes, is_last: Callable[[bytes], bool]) -> list[bytes]:
        return netlink.answer(struct.unpack_from("=IH", request)[1], self.addresses)

    def write_control(self, path: PathLike, data: bytes) -> None:
        if str(path) in self.stuck:
            raise PermissionError(1, "Operation not permitted", str(path))
        assert self.exists(path)
        self.mutation(f"control {path}")
        Path(self.real(path, follow=True)).write_bytes(data)

    def show_swap(self) -> None:
        lines = [f"{name}\tpartition\t1048572\t\t0\t\t{priority}\n" for name, priority in self.on.items()]
        Path(self.root, "proc/swaps").write_text(HEADER + "".join(lines))

    def switch_on(self, device: str, priority: int = -2) -> None:
        self.on[device] = priority
        self.show_swap()

    def _answer(self, line: str, argv: list[str], data: bytes) -> tuple[int, str]:
        if argv[0] == "swapoff":
            self.on.pop(argv[1], None)
            self.show_swap()
        if argv[0] == "swapon":
            self.switch_on(argv[-1])
        return super()._answer(line, argv, data)

    def sysctl(self, key: str) -> str:
        return Path(self.root, "proc/sys", key).read_text().strip()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    (tmp_path / "desk").mkdir()
    return Desk(tmp_path / "desk")


def make_kubernetes_tree(root: Path) -> Path:
    """The tree of a machine that a Kubernetes node can be made of."""
    make_tree(root, live=True)
    (root / "etc/fstab").write_bytes(FSTAB)
    (root / "dev").mkdir()
    for key, value in CONTROLS.items():
        (root / "proc/sys" / key).parent.mkdir(parents=True, exist_ok=True)
        (root / "proc/sys" / key).write_text(value + "\n")
    for name in ("swapon", "swapoff", "mount"):
        (root / "usr/bin" / name).write_text("#!/bin/sh\n")
        (root / "usr/bin" / name).chmod(0o755)
    (root / "sys/fs/bpf").mkdir()
    (root / "proc/self/mountinfo").write_text(MOUNTINFO)
    tree = root / "lib/modules/6.1.0-1-amd64"
    tree.mkdir(parents=True)
    (tree / "modules.dep").write_text(
        "".join(f"kernel/{name}.ko:\n" for name in ("overlay", "br_netfilter", "nf_conntrack"))
    )
    (root / "swap.img").touch()
    return root


@pytest.fixture
def host(tmp_path: Path) -> KubernetesHost:
    made = KubernetesHost(str(make_kubernetes_tree(tmp_path / "root")), {})
    made.switch_on("/swap.img")
    return made


def bundle_of(desk: Desk, *, kubelet: bool, version: str = "1.0", serial: int = 1) -> Path:
    program = b"#!/bin/sh\n"
    publisher = node_publisher(version=version, serial=serial)
    publisher.parts = [
        Part("containerd", [Entry("bin/containerd", program), Entry("bin/ctr", program)], version="1.7.24"),
        Part("cni-plugins", [Entry("cni/bin/bridge", program)]),
    ]
    if kubelet:
        publisher.parts.append(Part("kubelet", [Entry("bin/kubelet", program + b"# a stand-in")], version="1.34.1"))
    return desk.bundle(publisher.build(), f"{version}-{kubelet}.tar")


@pytest.fixture
def bundle(desk: Desk) -> Path:
    return bundle_of(desk, kubelet=True)


def document(ran: Any) -> Any:
    return json.loads(ran.text)


def steps(ran: Any) -> dict[str, list[str]]:
    return {
        step["step"]: [f"{action['verb']} {action['subject']}" for action in step["actions"]]
        for step in document(ran)["steps"]
    }


def drop_in(host: KubernetesHost, path: object) -> Path:
    return Path(host.root + str(path))


def supervised(host: KubernetesHost) -> str:
    """What the supervisor says while it brings the node up, as at a boot."""
    said = io.StringIO()
    context = Context(host, Output(stdout=said, stderr=said))
    supervise.bring_up(context, Stack(Layout(host)))
    return said.getvalue()


def quiet(host: KubernetesHost) -> dict[str, Any]:
    """All files but those of the kernel, which the machine only plays, and of systemd; without times."""
    found = relative(Path(host.root), snapshot(Path(host.root)))
    kept = {name: value[:3] + value[4:] for name, value in found.items()}
    return {name: value for name, value in kept.items() if not name.startswith(("/proc", "/sys", "/run"))}


# -- up -----------------------------------------------------------------------------------------------------


def test_a_kubernetes_node_gets_modules_sysctls_and_no_swap_now_and_at_boot(
    desk: Desk, host: KubernetesHost, bundle: Path
) -> None:
    ran = desk.up(host, bundle, "--profile", "cis")
    assert ran.status == ExitCode.DONE
    assert host.on == {}
    assert b"\n# off by stratum: /swap.img none swap" in drop_in(host, "/etc/fstab").read_bytes()
    assert host.sysctl("net/bridge/bridge-nf-call-iptables") == "1" and host.sysctl("kernel/panic") == "10"
    listed = [line for line in drop_in(host, modules.LOAD_FILE).read_text().splitlines() if not line.startswith("#")]
    assert listed == ["overlay", "br_netfilter", "nf_conntrack"]
    assert drop_in(host, BASE_PATH).exists() and drop_in(host, PROFILES["cis"].path).exists()
    sources = {
        "profile": "option --profile",
        "nodeIP": "detected: the only global IPv4 address, on eth0",
        "nodeName": "the host's name",
    }
    assert read_settings(host) == Settings(NodeSpec(profile="cis"), "192.0.2.10", "node", sources)
    again = desk.up(host, bundle)
    assert again.text.startswith("nothing to do\n")


def test_a_container_host_keeps_its_swap_and_kernel_settings(desk: Desk, host: KubernetesHost) -> None:
    host.addresses = {"eth0": ["192.0.2.10/24"], "eth1": ["198.51.100.7/24"]}  # which a node could not choose from
    desk.up(host, bundle_of(desk, kubelet=False))
    assert host.on == {"/swap.img": -2}
    assert drop_in(host, "/etc/fstab").read_bytes() == FSTAB
    assert not any(drop_in(host, path).exists() for path in (modules.LOAD_FILE, BASE_PATH, SETTINGS_PATH))
    assert host.sysctl("net/bridge/bridge-nf-call-iptables") == "0"


def test_the_order_is_modules_sysctls_swap_mounts_before_anything_starts(
    desk: Desk, host: KubernetesHost, bundle: Path
) -> None:
    plan = steps(desk.up(host, bundle, "--dry-run", "--output", "json"))
    order = list(plan)
    wanted = ["version", "settings", "modules", "sysctls", "swap", "configure", "units", "activate", "start"]
    assert [name for name in order if name in wanted] == wanted
    assert host.on == {"/swap.img": -2}, "a dry run changes nothing"
    done = steps(desk.up(host, bundle, "--output", "json"))
    for name in ("settings", "modules", "sysctls", "swap"):
        assert done[name] == plan[name]


def test_a_profile_value_that_cannot_be_set_stops_up_and_everything_is_taken_back(
    desk: Desk, host: KubernetesHost, bundle: Path
) -> None:
    before, forward = quiet(host), host.sysctl("net/ipv4/ip_forward")
    host.stuck.add("/proc/sys/kernel/panic_on_oops")
    with pytest.raises(StratumError) as caught:
        desk.up(host, bundle, "--profile", "cis")
    assert caught.value.reference == "sysctl-not-applied"
    assert quiet(host) == before
    assert (host.sysctl("net/ipv4/ip_forward"), host.sysctl("kernel/panic")) == (forward, "0")


def test_a_first_up_that_fails_at_the_start_gives_swap_and_sysctls_back(
    desk: Desk, host: KubernetesHost, bundle: Path
) -> None:
    before = quiet(host)
    host.failing["systemctl start stratum-containerd"] = 9
    with pytest.raises(StratumError):
        desk.up(host, bundle, "--profile", "cis")
    assert quiet(host) == before
    assert host.on == {"/swap.img": -2}
    assert host.sysctl("kernel/panic") == "0" and host.sysctl("net/ipv4/ip_forward") == "0"


def test_a_sysctl_file_that_sorts_behind_ours_is_named(desk: Desk, host: KubernetesHost, bundle: Path) -> None:
    drop_in(host, "/etc/sysctl.d").mkdir()
    drop_in(host, "/etc/sysctl.d/99-zz.conf").write_text("net.ipv4.ip_forward=0\n")
    said = desk.up(host, bundle).err.getvalue()
    assert "/etc/sysctl.d/99-zz.conf line 1 sets net.ipv4.ip_forward to 0" in said
    assert host.sysctl("net/ipv4/ip_forward") == "1"


def test_a_tree_gets_the_files_and_its_address_at_the_first_start(desk: Desk, tmp_path: Path, bundle: Path) -> None:
    from stratum.system import Host

    root = make_tree(tmp_path / "image")
    (root / "etc/fstab").write_bytes(FSTAB)
    tree = Host(str(root), {})
    assert desk.up(tree, bundle, "--profile", "cis").status == ExitCode.DONE
    assert b"# off by stratum: " in (root / "etc/fstab").read_bytes()
    assert read_settings(tree) == Settings(NodeSpec(profile="cis"), sources={"profile": "option --profile"})
    assert desk.run(tree, "uninstall").status == ExitCode.DONE
    assert (root / "etc/fstab").read_bytes() == FSTAB


# -- the node IP ----------------------------------------------------------------------------------------------


def test_the_address_is_recorded_at_the_first_start_and_used_at_each_later_one(
    desk: Desk, host: KubernetesHost, bundle: Path
) -> None:
    said = desk.up(host, bundle).err.getvalue()
    assert "node IP 192.0.2.10 (detected: " in said
    host.addresses = {
        "lo": ["192.0.2.200/32"],
        "eth0": ["192.0.2.3/24", "192.0.2.10/24", "192.0.2.99/32"],
        "eth1": ["198.51.100.7/24"],
    }
    assert desk.up(host, bundle).text.startswith("nothing to do\n")
    supervised(host)
    assert read_settings(host).node_ip == "192.0.2.10"
    assert json.loads(desk.run(host, "status", "--output", "json").text)["nodeIP"] == "192.0.2.10"


def test_a_pinned_address_that_is_gone_is_an_error_and_never_another_one(
    desk: Desk, host: KubernetesHost, bundle: Path
) -> None:
    desk.up(host, bundle)
    host.addresses = {"eth0": ["192.0.2.77/24"]}
    with pytest.raises(HostRefusedError) as caught:
        desk.up(host, bundle)
    assert "192.0.2.10 is not on this host any more" in caught.value.message
    begun = host.clock
    with pytest.raises(HostRefusedError):
        supervised(host)
    assert 60 <= host.clock - begun < 70, "an interface may come up late"
    assert read_settings(host).node_ip == "192.0.2.10"
    desk.up(host, bundle, "--node-ip", "192.0.2.77")
    assert read_settings(host).node_ip == "192.0.2.77"


def test_two_candidates_stop_up_before_the_first_write_with_both_and_the_flag(
    desk: Desk, host: KubernetesHost, bundle: Path
) -> None:
    before = quiet(host)
    host.addresses = {"eth0": ["192.0.2.10/24"], "eth1": ["198.51.100.7/24"]}
    with pytest.raises(HostRefusedError) as caught:
        desk.up(host, bundle)
    assert all(word in caught.value.message for word in ("node-ip", "192.0.2.10", "198.51.100.7"))
    assert "--node-ip" in (caught.value.hint or "")
    assert quiet(host) == before
    ran = desk.run(host, "preflight", "--bundle", str(bundle), "--trust", str(desk.key), "--output", "json")
    assert ran.status == ExitCode.HOST_REFUSED
    assert "node-ip" in [finding["check"] for finding in document(ran)["findings"]]
    assert desk.up(host, bundle, "--node-ip", "198.51.100.7").status == ExitCode.DONE


@pytest.mark.parametrize("address", ["fe80::1", "127.0.0.1", "169.254.1.1", "ff02::1", "192.0.2.10,192.0.2.11", "node"])
def test_an_address_of_no_use_is_a_usage_error_before_anything_is_written(
    desk: Desk, host: KubernetesHost, bundle: Path, address: str
) -> None:
    before = quiet(host)
    with pytest.raises(UsageError):
        desk.up(host, bundle, "--node-ip", address)
    assert quiet(host) == before


def test_the_families_of_the_cluster_decide_and_are_recorded(desk: Desk, host: KubernetesHost, bundle: Path) -> None:
    host.addresses = {"eth0": ["10.0.2.15/24", "2001:db8::10/64"]}
    desk.up(host, bundle, "--cluster-cidr", "fd00:1::/56,fd00:2::/112")
    settings = read_settings(host)
    assert settings.spec == NodeSpec(network=Network(cluster_cidrs=("fd00:1::/56", "fd00:2::/112")))
    assert settings.node_ip == "2001:db8::10"
    assert desk.up(host, bundle).text.startswith("nothing to do\n")


def test_settings_that_cannot_be_read_are_never_passed_over(desk: Desk, host: KubernetesHost, bundle: Path) -> None:
    desk.up(host, bundle)
    drop_in(host, SETTINGS_PATH).write_text('{"format": 7}')
    with pytest.raises(StratumError) as caught:
        desk.up(host, bundle)
    assert caught.value.reference == "settings-unreadable" and "--node-ip" in (caught.value.hint or "")


# -- the footprint --------------------------------------------------------------------------------------------


def outside(paths: set[str]) -> set[HostPath]:
    """Those that are not in a directory of Stratum's own."""
    found = {HostPath(path) for path in paths}
    return {path for path in found if not is_own(path)}


def test_the_footprint_is_what_up_writes_outside_of_our_directories(
    desk: Desk, host: KubernetesHost, bundle: Path
) -> None:
    # Everything that a host can have which is written to: each kind of swap, both network managers.
    for path, text in {
        "/run/systemd/generator/dev-zram0.swap": "[Swap]\nWhat=/dev/zram0\n",
        "/etc/systemd/system/srv-admin.swap": "[Swap]\nWhat=/srv/admin\n",
        "/usr/lib/systemd/system/zramswap.service": "[Service]\nType=oneshot\n",
        "/usr/bin/NetworkManager": "#!/bin/sh\n",
    }.items():
        drop_in(host, path).parent.mkdir(parents=True, exist_ok=True)
        drop_in(host, path).write_text(text)
        drop_in(host, path).chmod(0o755)
    wants = {"swap.target.wants": ("dev-zram0.swap", "srv-admin.swap")}
    wants["multi-user.target.wants"] = ("zramswap.service", "systemd-networkd.service")
    for directory, names in wants.items():
        drop_in(host, f"/etc/systemd/system/{directory}").mkdir(exist_ok=True)
        for name in names:
            drop_in(host, f"/etc/systemd/system/{directory}/{name}").symlink_to(f"/somewhere/{name}")
    before = quiet(host)
    desk.up(host, bundle, "--profile", "cis")
    after = quiet(host)
    written = outside({name for name in after if before.get(name) != after[name]})
    assert {path for path in written if find_place(path) is None} == set()
    # What only a machine with real programs writes: containers, firewalld, the unpacking, a running uninstall.
    elsewhere = {"/run/containerd/", "/var/lib/cni/results/*", "/etc/firewalld/zones/trusted.xml*"}
    elsewhere |= {str(persistence.OVERRIDE), "/usr/local/lib/stratum/runtime/"}
    elsewhere |= {"/run/netns/", "/var/lib/kubelet/", "/var/log/pods/", "/var/log/containers/"}  # by pods
    # What only a configuration asks for.
    for unit in (UNIT_LOCALDNS, UNIT_LOCALDNS_NETWORK, UNIT_KUBELET_LAUNCH_CHECK):
        elsewhere |= {f"{SYSTEMD_DIR}/{unit}", f"{SYSTEMD_DIR}/{unit}.d/*"}
    elsewhere |= {f"/etc/systemd/system/{name}" for name in swapunits.SERVICES if name != "zramswap.service"}
    assert {place.path for place in footprint() if not any(map(place.holds, written))} == elsewhere
    desk.run(host, "uninstall")
    assert quiet(host) == before, "uninstall covers all of it"


# -- later starts ---------------------------------------------------------------------------------------------


def test_swap_and_a_sysctl_that_came_back_are_named_and_put_right_at_boot(
    desk: Desk, host: KubernetesHost, bundle: Path
) -> None:
    desk.up(host, bundle, "--profile", "cis")
    assert supervised(host) == ""
    host.switch_on("/dev/sda7")
    drop_in(host, "/proc/sys/kernel/panic").write_text("0\n")
    assert [item["check"] for item in document(desk.run(host, "status", "--output", "json"))["host"]] == [
        "swap",
        "sysctl",
    ]
    said = supervised(host)
    assert "swap is on: /dev/sda7" in said and "kernel.panic is 0 and must be 10" in said
    assert host.on == {} and host.sysctl("kernel/panic") == "10"


def test_an_image_gets_its_address_at_its_first_start(desk: Desk, host: KubernetesHost, bundle: Path) -> None:
    desk.up(host, bundle)
    drop_in(host, SETTINGS_PATH).unlink()  # as up --root leaves it
    supervised(host)
    assert read_settings(host).node_ip == "192.0.2.10"


def test_an_upgrade_from_a_container_host_prepares_the_host_before_it_stops_anything(
    desk: Desk, host: KubernetesHost
) -> None:
    desk.up(host, bundle_of(desk, kubelet=False))
    newer = bundle_of(desk, kubelet=True, version="2.0", serial=2)
    host.commands.clear()
    arguments = ("--bundle", str(newer), "--trust", str(desk.key))
    assert desk.run(host, "upgrade", *arguments, "--node-ip", "192.0.2.10").status == ExitCode.DONE
    stopped = next(number for number, line in enumerate(host.commands) if line.startswith("systemctl stop stratum-con"))
    off = next(number for number, line in enumerate(host.commands) if line.startswith("swapoff"))
    assert off < stopped
    assert read_settings(host).node_ip == "192.0.2.10" and host.on == {}


# -- back -----------------------------------------------------------------------------------------------------


def test_uninstall_gives_back_swap_sysctls_and_every_file(desk: Desk, host: KubernetesHost, bundle: Path) -> None:
    before = quiet(host)
    desk.up(host, bundle, "--profile", "cis")
    plan = steps(desk.run(host, "uninstall", "--dry-run", "--output", "json"))
    assert "switch on swap /swap.img" in plan["restore"] and "set kernel.panic = 0, as it was" in plan["restore"]
    done = steps(desk.run(host, "uninstall", "--output", "json"))
    assert done["restore"] == plan["restore"]
    assert done["delete"] == plan["delete"]
    assert quiet(host) == before
    assert host.on == {"/swap.img": -2}
    assert host.sysctl("kernel/panic") == "0" and host.sysctl("net/ipv4/ip_forward") == "0"


def test_an_uninstall_that_fails_puts_the_prepared_host_back(desk: Desk, host: KubernetesHost, bundle: Path) -> None:
    desk.up(host, bundle)
    assert read_settings(host).node_ip
    before = quiet(host)
    host.failing["swapon"] = 0
    host.failing["systemctl stop stratum.service"] = 1
    with pytest.raises(StratumError) as caught:
        desk.run(host, "uninstall")
    assert "the node runs as before" in caught.value.state
    supervised(host)  # systemd starts it again
    after = quiet(host)
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    assert changed <= {"/var/lib/stratum/journal.json"}
    assert host.on == {}


def test_what_an_admin_changed_meanwhile_stays(desk: Desk, host: KubernetesHost, bundle: Path) -> None:
    desk.up(host, bundle)
    with drop_in(host, "/etc/fstab").open("ab") as file:
        file.write(b"/dev/sdb1 /srv ext4 defaults 0 2\n")
    drop_in(host, "/proc/sys/net/bridge/bridge-nf-call-iptables").write_text("2\n")
    desk.run(host, "uninstall")
    assert drop_in(host, "/etc/fstab").read_bytes() == FSTAB + b"/dev/sdb1 /srv ext4 defaults 0 2\n"
    assert host.sysctl("net/bridge/bridge-nf-call-iptables") == "2"
    assert not drop_in(host, sysctls.REMEMBERED).exists()


# -- cut off --------------------------------------------------------------------------------------------------


def next_run(host: KubernetesHost, dies_at: Optional[int] = None) -> KubernetesHost:
    """The same machine as another process finds it."""
    shared = {name: getattr(host, name) for name in ("units", "images", "chains", "clock", "on", "addresses")}
    return KubernetesHost(host.root, {}, dies_at, **shared)


def controls(host: KubernetesHost) -> dict[str, str]:
    return {key: host.sysctl(key) for key in CONTROLS}


def changes_of(host: KubernetesHost, first: str, last: str) -> range:
    """The numbers of the changes from the one that names ``first`` to the one that names ``last``."""
    begin = next(number for number, text in enumerate(host.mutations) if first in text)
    end = max(number for number, text in enumerate(host.mutations) if last in text)
    return range(begin, end + 2)


@pytest.fixture
def copies(host: KubernetesHost, tmp_path: Path) -> Iterator[Callable[[], KubernetesHost]]:
    """Makes machines that are as ``host`` is now."""
    numbers = itertools.count()
    made: list[Path] = []

    def copy() -> KubernetesHost:
        root = tmp_path / f"copy{next(numbers)}"
        shutil.copytree(host.root, root, symlinks=True)
        made.append(root)
        one = next_run(host)
        return KubernetesHost(str(root), {}, units=copy_module.deepcopy(one.units), on=dict(one.on))

    yield copy
    for root in made:
        shutil.rmtree(root)


def test_an_up_killed_at_any_change_to_the_host_is_taken_back_whole_by_uninstall(
    desk: Desk, host: KubernetesHost, bundle: Path, copies: Callable[[], KubernetesHost]
) -> None:
    before, live = quiet(host), controls(host)
    whole = copies()
    desk.up(whole, bundle, "--profile", "cis")
    for number in changes_of(whole, "settings.json", "swapoff"):
        machine = copies()
        machine.dies_at = number
        with pytest.raises(Killed):
            desk.up(machine, bundle, "--profile", "cis")
        again = next_run(machine)
        desk.run(again, "uninstall")
        assert (quiet(again), controls(again), again.on) == (before, live, {"/swap.img": -2}), whole.mutations[number]


def test_an_uninstall_killed_while_it_gives_the_host_back_is_finished_by_the_next(
    desk: Desk, host: KubernetesHost, bundle: Path, copies: Callable[[], KubernetesHost]
) -> None:
    before, live = quiet(host), controls(host)
    desk.up(host, bundle, "--profile", "cis")
    whole = copies()
    desk.run(whole, "uninstall")
    for number in changes_of(whole, "fstab", "control"):
        machine = copies()
        machine.dies_at = number
        with pytest.raises(Killed):
            desk.run(machine, "uninstall")
        again = next_run(machine)
        desk.run(again, "uninstall")
        assert (quiet(again), controls(again), again.on) == (before, live, {"/swap.img": -2}), whole.mutations[number]
