"""A node with LocalDNS, by the commands: brought up, watched, taken off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Optional

import pytest

from stratum.config import CONFIG_PATH
from stratum.errors import ExitCode, HostRefusedError, StratumError
from stratum.host import localdnsnet, netmanagers
from stratum.node import localdns
from stratum.system import Completed
from tests.bundles import Entry, Part
from tests.fakes import Desk, make_tree, node_publisher
from tests.standins import coredns
from tests.unit.test_localdns_network import Router
from tests.unit.test_watch import SUPERVISOR, LivingHost, at_rest, bring, post

ADDRESS = "169.254.20.10"
DNS = "stratum-localdns.service"
PROGRAM = b"#!/bin/sh\n"
PARTS = [
    Part("containerd", [Entry("bin/containerd", PROGRAM), Entry("bin/ctr", PROGRAM)], version="1.7.24"),
    Part("coredns", [Entry("bin/coredns", PROGRAM)], version="1.12.1"),
]
CONFIG = "apiVersion: stratum.dev/v1\nkind: Node\nspec:\n  localDNS:\n    enabled: true\n"


@dataclass
class DnsHost(LivingHost):
    """A machine on which LocalDNS answers while its unit is active. Its network is that of ``router``."""

    router: Optional[Router] = None
    refuses: bool = False
    asked: list[str] = field(default_factory=list)

    @property
    def network(self) -> Router:
        if self.router is None:
            self.router = Router(self.root, {}, tools=frozenset({"ip", "iptables"}))
        return self.router

    def ask_dns(self, address: str, port: int, query: bytes, *, tcp: bool, timeout: float) -> bytes:
        self.asked.append(f"{address}:{port}")
        if self.refuses or not self.active(DNS) or localdnsnet.INTERFACE not in self.network.interfaces:
            raise ConnectionRefusedError(111, "Connection refused")
        question = coredns.decode_question(query)
        return coredns.reply(question, 0, [coredns.render(f"{{{{ .Name }}}} 5 IN A {ADDRESS}", question.name)])

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        check: bool = True,
        env: Optional[Mapping[str, str]] = None,
        feed: Optional[Callable[[BinaryIO], None]] = None,
    ) -> Completed:
        if argv[0] == "ip" or (argv[0] == "iptables" and argv[4] != "nat"):
            self.commands.append(" ".join(argv))
            return self.network.run(argv, timeout=timeout, check=check, feed=feed)
        return super().run(argv, timeout=timeout, check=check, env=env, feed=feed)

    def _systemctl(self, argv: list[str], data: bytes) -> tuple[int, str]:
        answer = super()._systemctl(argv, data)
        if argv[-1] == localdnsnet.UNIT and answer[0] == 0 and argv[0] in ("start", "restart", "stop"):
            plan = (
                localdnsnet.plan_network_removal(self) if argv[0] == "stop" else localdnsnet.plan_network(self, ADDRESS)
            )
            for action in plan:
                action.function()  # type: ignore[attr-defined]
        return answer


@pytest.fixture
def desk(memory: Path) -> Desk:
    (memory / "desk").mkdir()
    return Desk(memory / "desk")


@pytest.fixture
def host(memory: Path) -> DnsHost:
    root = make_tree(memory / "root", live=True)
    (root / "etc/resolv.conf").unlink()
    (root / "etc/resolv.conf").write_text("nameserver 127.0.0.53\n")
    (root / "run/systemd/resolve").mkdir(parents=True)
    (root / "run/systemd/resolve/resolv.conf").write_text("nameserver 192.0.2.53\n")
    (root / "etc/stratum").mkdir()
    (root / str(CONFIG_PATH).lstrip("/")).write_text(CONFIG)
    return DnsHost(str(root), {})


@pytest.fixture
def node(desk: Desk, host: DnsHost) -> DnsHost:
    bring(desk, host, parts=PARTS)
    return host


def bundle(desk: Desk, **changes: Any) -> Path:
    return desk.bundle(node_publisher(**{"parts": PARTS, **changes}).build())


def test_up_makes_the_network_then_dns_then_containerd_and_a_second_run_changes_nothing(
    desk: Desk, host: DnsHost
) -> None:
    assert desk.up(host, bundle(desk)).status == ExitCode.DONE
    started = [line.split()[-1] for line in host.commands if line.startswith(("systemctl start", "systemctl restart"))]
    assert started[:3] == [localdnsnet.UNIT, DNS, "stratum-containerd.service"]
    assert localdns.recorded_upstreams(host) == ("192.0.2.53",)
    assert set(host.asked) == {f"{ADDRESS}:53"}
    host.units[SUPERVISOR].active = "active"
    assert "nothing to do" in desk.up(host, bundle(desk)).text


def test_a_dns_that_does_not_answer_stops_up_before_containerd_starts(desk: Desk, host: DnsHost) -> None:
    host.refuses = True
    with pytest.raises(StratumError) as caught:
        desk.up(host, bundle(desk))
    assert caught.value.reference == "localdns-not-ready"
    assert not any(line.startswith("systemctl start stratum-containerd") for line in host.commands)
    # A first run that fails takes back what it made.
    assert localdnsnet.INTERFACE not in host.network.interfaces
    assert not host.exists(localdnsnet.UNIT_PATH) and not host.exists(localdns.COREFILE)


def test_at_rest_the_watch_reads_files_alone(node: DnsHost) -> None:
    watch = at_rest(node)
    for _ in range(5):
        assert watch.look() == "version 1.0.0 is running"
    assert node.commands == []


def test_the_watch_follows_the_hosts_servers_and_restarts_nothing(node: DnsHost) -> None:
    watch = at_rest(node)
    (Path(node.root) / "run/systemd/resolve/resolv.conf").write_text("nameserver 192.0.2.99\n")
    watch.look()
    assert localdns.recorded_upstreams(node) == ("192.0.2.99",)
    assert any("192.0.2.99" in line for line in watch.said())
    assert not any("systemctl restart" in line or "systemctl start" in line for line in node.commands)
    assert watch.look() == "version 1.0.0 is running"


def test_the_watch_makes_the_interface_and_the_rules_again(node: DnsHost) -> None:
    watch = at_rest(node)
    for action in localdnsnet.plan_network_removal(node):
        action.function()  # type: ignore[attr-defined]
    node.generation += 1
    node.clock += 60
    watch.look()
    assert node.network.interfaces == {localdnsnet.INTERFACE: [f"{ADDRESS}/32"]}
    assert localdnsnet.plan_network(node, ADDRESS) == []
    assert any(localdnsnet.INTERFACE in line for line in watch.said())


def test_servers_that_are_gone_for_a_while_leave_those_that_were_known(node: DnsHost) -> None:
    watch = at_rest(node)
    (Path(node.root) / "run/systemd/resolve/resolv.conf").write_text("# No DNS servers known.\n")
    assert watch.look() == "version 1.0.0 is running"
    assert localdns.recorded_upstreams(node) == ("192.0.2.53",)
    assert post(node).look() == "version 1.0.0 is running"


def test_a_node_that_is_to_have_none_any_more_loses_unit_file_and_network(desk: Desk, node: DnsHost) -> None:
    path = Path(node.root) / str(CONFIG_PATH).lstrip("/")
    path.write_text(CONFIG.replace("true", "false"))
    assert desk.up(node, bundle(desk)).status == ExitCode.DONE
    assert not node.active(DNS) and node.active("stratum-containerd.service")
    for gone in (f"/etc/systemd/system/{DNS}", localdnsnet.UNIT_PATH, localdns.COREFILE):
        assert not node.lexists(gone), gone
    assert node.network.interfaces == {} and node.network.ours() == {}


def test_uninstall_takes_all_of_it(desk: Desk, node: DnsHost) -> None:
    assert desk.run(node, "uninstall").status == ExitCode.DONE
    for gone in (f"/etc/systemd/system/{DNS}", localdnsnet.UNIT_PATH, localdns.COREFILE.parent):
        assert not node.lexists(gone), gone
    assert node.network.interfaces == {} and node.network.ours() == {}
    assert not node.lexists(netmanagers.NETWORKD.path)


def test_network_managers_are_told_where_there_is_no_bridge_either(desk: Desk, host: DnsHost) -> None:
    nm = Path(host.root) / "usr/sbin/NetworkManager"
    nm.parent.mkdir(parents=True, exist_ok=True)
    nm.write_text("#!/bin/sh\n")
    nm.chmod(0o755)
    desk.up(host, bundle(desk))
    assert localdnsnet.INTERFACE in host.read_text(netmanagers.NETWORK_MANAGER.path)


# -- before anything is written -------------------------------------------------------------------------


def refused(desk: Desk, host: DnsHost) -> str:
    """What preflight refuses the host for; nothing was written."""
    before = sorted(path for path in Path(host.root).rglob("*") if "/run/stratum" not in str(path))
    with pytest.raises(HostRefusedError) as caught:
        desk.up(host, bundle(desk))
    assert sorted(path for path in Path(host.root).rglob("*") if "/run/stratum" not in str(path)) == before
    return f"{caught.value.message} {caught.value.hint}"


def test_a_host_without_a_real_dns_server_is_refused_and_told_what_to_set(desk: Desk, host: DnsHost) -> None:
    resolved = Path(host.root) / "run/systemd/resolve/resolv.conf"
    resolved.write_text("# No DNS servers known.\n")
    assert "spec.localDNS.upstream" in refused(desk, host)
    path = Path(host.root) / str(CONFIG_PATH).lstrip("/")
    path.write_text(f"{CONFIG}    upstream: [198.51.100.53]\n")
    assert desk.up(host, bundle(desk)).status == ExitCode.DONE
    assert localdns.recorded_upstreams(host) == ("198.51.100.53",)


def test_an_upstream_that_is_the_host_itself_is_refused_before_anything_is_written(desk: Desk, host: DnsHost) -> None:
    path = Path(host.root) / str(CONFIG_PATH).lstrip("/")
    path.write_text(f"{CONFIG}    upstream: [127.0.0.53]\n")
    with pytest.raises(StratumError) as caught:
        desk.up(host, bundle(desk))
    assert caught.value.reference == "upstream-dns-loop"
    assert not host.lexists("/opt/stratum")


@pytest.mark.parametrize("directory", ["etc/stratum", "opt"])
def test_a_directory_that_would_keep_localdns_out_is_named_before_anything_is_written(
    desk: Desk, host: DnsHost, directory: str
) -> None:
    place = Path(host.root) / directory
    place.chmod(0o750)
    assert f"chmod o+x /{directory}" in refused(desk, host)


TABLE = "  sl  local_address rem_address   st tx_queue rx_queue\n"


@pytest.mark.parametrize(
    ("protocol", "line", "taken"),
    [
        ("udp", "  1: 00000000:0035 00000000:0000 07 0:0", True),
        ("udp6", "  1: 00000000000000000000000000000000:0035 00000000000000000000000000000000:0000 07 0:0", True),
        ("tcp", "  1: 00000000:0035 00000000:0000 0A 0:0", True),
        ("udp", "  1: 3500007F:0035 00000000:0000 07 0:0", False),  # 127.0.0.53, systemd-resolved
        ("udp", "  1: 00000000:0044 00000000:0000 07 0:0", False),
        ("tcp", "  1: 00000000:0035 00000000:0000 01 0:0", False),
        ("udp", "  1:", False),
    ],
)
def test_a_program_that_has_port_53_of_every_address_is_found(
    host: DnsHost, protocol: str, line: str, taken: bool
) -> None:
    table = Path(host.root) / "proc/net" / protocol
    table.parent.mkdir(parents=True)
    table.write_text(f"{TABLE}{line}\n")
    found = localdnsnet.check_port(host)
    assert bool(found) is taken
    if found:
        assert protocol in found[0].message and "ss -lntup" in found[0].hint
