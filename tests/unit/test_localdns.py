"""LocalDNS: its Corefile as CoreDNS reads it, its supervisor script, and the gate behind it.

CoreDNS is the stand-in of tests/standins, which runs on addresses of the loopback.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.config import Cluster, LocalDNS, Network, NodeSpec
from stratum.errors import StratumError
from stratum.host import localdnsnet
from stratum.node import localdns, stackspec
from stratum.node.layout import Layout
from stratum.node.settings import Settings
from stratum.node.units import UNIT_LOCALDNS_NETWORK
from stratum.node.versions import VersionRecord
from stratum.scripts import localdns as script
from stratum.system import Host
from tests.standins import coredns
from tests.unit.hosting import TreeMachine, content, perform, put, work_on

UPSTREAM = ("192.0.2.53", "fe80::1%eth0")
DNS = LocalDNS(enabled=True)
WORKER = NodeSpec(
    role="worker",
    local_dns=DNS,
    cluster=Cluster(dns=("10.96.0.10",)),
    network=Network(cluster_cidrs=("10.96.0.0/15", "fd00:10:96::/108")),
)
STANDALONE = NodeSpec(local_dns=DNS)
COREFILE = str(localdns.COREFILE)


def blocks(spec: NodeSpec, upstreams: tuple[str, ...] = UPSTREAM) -> dict[str, coredns.Block]:
    """The server blocks, by their first zone, as the strict parser of the stand-in reads them."""
    parsed = coredns.parse_corefile(localdns.render_corefile(spec, upstreams).decode())
    return {block.zones[0]: block for block in parsed}


# -- the Corefile ---------------------------------------------------------------------------------------


def test_a_standalone_node_asks_the_hosts_servers_for_everything() -> None:
    found = blocks(STANDALONE)
    assert list(found) == [f"{localdns.HEALTH_NAME}.", "."]
    (forward,) = found["."].plugins["forward"]
    assert forward.origin == "."
    assert forward.servers == [("192.0.2.53", 53), ("fe80::1%eth0", 53)]
    assert forward.policy == "sequential", "the first server may know names that the others do not"
    assert not forward.force_tcp


def test_a_worker_asks_its_clusters_dns_for_the_names_and_addresses_of_the_cluster() -> None:
    found = blocks(WORKER)
    assert list(found) == [f"{localdns.HEALTH_NAME}.", "cluster.local.", "."]
    cluster = found["cluster.local."]
    assert cluster.zones == ["cluster.local.", "96.10.in-addr.arpa.", "97.10.in-addr.arpa.",
                             "0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.6.9.0.0.0.1.0.0.0.0.d.f.ip6.arpa."]  # fmt: skip
    (forward,) = cluster.plugins["forward"]
    assert (forward.servers, forward.force_tcp) == ([("10.96.0.10", 53)], True)
    assert blocks(replace(WORKER, cluster=Cluster(dns=("10.96.0.10",), domain="k8s.example.")))["k8s.example."]


def test_each_block_binds_to_the_address_and_to_nothing_else() -> None:
    for spec in (STANDALONE, WORKER):
        for block in blocks(spec).values():
            assert block.hosts == ["169.254.20.10"]
            for name in ("health", "prometheus"):
                assert block.plugins.get(name, "169.254.20.10:").startswith("169.254.20.10:")


def test_each_block_that_forwards_looks_for_loops_and_reports_errors() -> None:
    for block in blocks(WORKER).values():
        assert "errors" in block.plugins
        assert ("loop" in block.plugins) == ("forward" in block.plugins)


def test_a_change_of_the_file_takes_effect_without_a_restart() -> None:
    assert blocks(WORKER)["."].plugins["reload"] <= 10


def test_only_plugins_of_coredns_own_build_are_used() -> None:
    for block in blocks(WORKER).values():
        assert set(block.plugins) <= set(coredns.DIRECTIVES)


def test_an_ipv6_address_can_be_its_address() -> None:
    found = blocks(replace(STANDALONE, local_dns=LocalDNS(True, "fd00::53")))
    assert {host for block in found.values() for host in block.hosts} == {"fd00::53"}
    assert found["."].plugins["health"] == "[fd00::53]:9254"


@pytest.mark.parametrize(
    ("spec", "reference"),
    [
        (replace(WORKER, cluster=Cluster()), "localdns-without-cluster"),
        (replace(WORKER, cluster=Cluster(dns=("169.254.20.10",))), "localdns-loop"),
        (replace(WORKER, cluster=Cluster(dns=("10.96.0.10",), domain="a {")), "bad-cluster-domain"),
        (replace(WORKER, cluster=Cluster(dns=("10.96.0.10",), domain="")), "bad-cluster-domain"),
    ],
)
def test_a_contradiction_is_refused_with_what_to_do(spec: NodeSpec, reference: str) -> None:
    with pytest.raises(StratumError) as caught:
        localdns.render_corefile(spec, UPSTREAM)
    assert caught.value.reference == reference and caught.value.hint


@given(st.ip_addresses(v=4), st.integers(0, 32))
def test_the_reverse_zones_of_a_network_hold_its_addresses_and_no_others(address: Any, length: int) -> None:
    import ipaddress

    network = ipaddress.ip_network((address, length), strict=False)
    zones = list(localdns.reverse_zones(str(network)))
    assert len(zones) <= 128
    held = [name for name in (network[0], network[-1]) if any(f".{name.reverse_pointer}".endswith(f".{zone}")
            for zone in zones)]  # fmt: skip
    assert held == [network[0], network[-1]]
    if length:
        outside = ipaddress.ip_address(int(network[0]) ^ 1 << 32 - length).reverse_pointer
        assert not any(f".{outside}".endswith(f".{zone}") for zone in zones)


# -- the file on the host -------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path) -> TreeMachine:
    return TreeMachine(str(tmp_path), {})


def settings(**changes: Any) -> Settings:
    return Settings(replace(STANDALONE, local_dns=replace(DNS, **changes)))


def test_the_corefile_can_be_read_by_a_user_of_its_own_whatever_the_umask(host: TreeMachine) -> None:
    """Row 28: umask 077 makes directories that non-root components cannot enter."""
    Path(host.root, "etc").mkdir()
    before = os.umask(0o077)
    try:
        perform(host, lambda work: localdns.plan_localdns(work, settings(), UPSTREAM))
    finally:
        os.umask(before)
    assert host.stat(COREFILE).st_mode & 0o777 == 0o644
    for path in ("/etc/stratum/localdns", "/etc/stratum"):
        assert host.stat(path).st_mode & 0o777 == 0o755
    assert perform(host, lambda work: localdns.plan_localdns(work, settings(), UPSTREAM)) == []


def test_a_directory_that_keeps_its_user_out_is_named_and_not_opened(host: TreeMachine) -> None:
    Path(host.root, "etc/stratum").mkdir(parents=True, mode=0o700)
    with pytest.raises(StratumError) as caught:
        perform(host, lambda work: localdns.plan_localdns(work, settings(), UPSTREAM))
    assert caught.value.reference == "localdns-locked-out"
    assert caught.value.hint == "run: chmod o+x /etc/stratum"
    assert host.stat("/etc/stratum").st_mode & 0o777 == 0o700
    Path(host.root, "etc/stratum").chmod(0o701)
    assert perform(host, lambda work: localdns.plan_localdns(work, settings(), UPSTREAM))


def test_a_file_of_somebody_else_is_not_replaced(host: TreeMachine) -> None:
    put(host, COREFILE, ". {\n}\n")
    with pytest.raises(StratumError, match="did not write"):
        perform(host, lambda work: localdns.plan_localdns(work, settings(), UPSTREAM))


def test_without_any_server_the_first_start_is_refused_and_a_later_one_keeps_what_it_had(host: TreeMachine) -> None:
    """At boot the lease may come later than the node."""
    with pytest.raises(StratumError) as caught:
        perform(host, lambda work: localdns.plan_localdns(work, settings(), ()))
    assert caught.value.reference == "no-upstream-dns" and "spec.localDNS.upstream" in str(caught.value.hint)
    perform(host, lambda work: localdns.plan_localdns(work, settings(), UPSTREAM))
    assert localdns.recorded_upstreams(host) == UPSTREAM
    assert perform(host, lambda work: localdns.plan_localdns(work, settings(), ())) == []
    assert localdns.corefile_differs(host, settings(), ()) == ""


def test_servers_that_changed_are_noticed_and_written(host: TreeMachine) -> None:
    """A new lease names other servers."""
    put(host, "/etc/resolv.conf", "nameserver 127.0.0.53\n")
    put(host, "/run/systemd/resolve/resolv.conf", "nameserver 192.0.2.53\n")
    host.programs = {"systemctl": lambda _: 0}
    perform(host, lambda work: script.plan_configuration(work, settings()))
    host.commands.clear()
    assert script.drift(host, settings()) == []
    assert host.commands == [], "at rest no program runs"
    put(host, "/run/systemd/resolve/resolv.conf", "nameserver 192.0.2.99\n")
    assert script.drift(host, settings()) == ["the host's DNS servers are 192.0.2.99 now, and LocalDNS asks 192.0.2.53"]
    done = perform(host, lambda work: script.plan_configuration(work, settings()))
    assert done == [f"write {COREFILE}"]
    assert script.drift(host, settings()) == []
    put(host, COREFILE, content(host, COREFILE) + b"\n")
    assert script.drift(host, settings()) == [f"{COREFILE}: it was changed"]
    Path(host.root + COREFILE).unlink()
    assert script.drift(host, settings()) == [f"{COREFILE}: it is gone"]


def test_the_servers_of_the_configuration_come_before_those_of_the_host(host: TreeMachine) -> None:
    put(host, "/etc/resolv.conf", "nameserver 192.0.2.53\n")
    assert script.upstreams_of(host, settings(upstream=("198.51.100.1", "198.51.100.1:53"))) == (
        "198.51.100.1", "198.51.100.1:53",
    )  # fmt: skip
    assert script.upstreams_of(host, settings()) == ("192.0.2.53",)
    with pytest.raises(StratumError, match="circles"):
        script.upstreams_of(host, settings(upstream=("169.254.20.10",)))


def test_a_host_that_asks_localdns_itself_is_no_upstream(host: TreeMachine) -> None:
    put(host, "/etc/resolv.conf", "nameserver 169.254.20.10\n")
    assert script.upstreams_of(host, settings()) == ()
    assert script.upstreams_of(host, settings(address="169.254.20.11")) == ("169.254.20.10",)


def test_a_node_that_goes_on_without_it_loses_its_files_and_its_network(host: TreeMachine) -> None:
    put(host, "/etc/resolv.conf", "nameserver 192.0.2.53\n")
    host.programs = {"systemctl": lambda _: 0}
    perform(host, lambda work: script.plan_configuration(work, settings()))
    done = perform(host, script.plan_withdrawal)
    assert done == [f"stop {localdnsnet.UNIT}", f"remove {localdnsnet.UNIT_PATH}", f"remove {COREFILE}"]
    assert not host.exists(COREFILE) and not host.exists(localdnsnet.UNIT_PATH)
    work = work_on(host)
    assert work.receipt.get(localdns.COREFILE) is None
    assert perform(host, script.plan_withdrawal) == []


def test_both_parts_name_the_same_unit_and_the_same_script() -> None:
    assert localdnsnet.UNIT == UNIT_LOCALDNS_NETWORK
    layout = Layout(Host("/", {}))
    record = VersionRecord("demo", "1.0", 1, "", (("containerd", "1", ""), ("coredns", "1", "")), (), ())
    spec = stackspec.unit_spec(layout, record, settings())
    assert spec.localdns == f"{layout.current_link}/{localdns.SUPERVISOR}"


# -- the supervisor script ------------------------------------------------------------------------------


SHELLS = [shell for shell in ("dash", "bash", "busybox") if shutil.which(shell)]


class Script:
    """The supervisor script in a version directory, with paths of a test. Its CoreDNS prints what it was given."""

    def __init__(self, top: Path) -> None:
        self.corefile, self.table = top / "Corefile", top / "fib_trie"
        self.path = top / "version/libexec/stratum-localdns"
        self.coredns = top / "version/bin/coredns"
        for path in (self.path, self.coredns):
            path.parent.mkdir(parents=True)
        text = localdns.render_supervisor().decode()
        for old, new in ((COREFILE, self.corefile), ("/proc/net/fib_trie", self.table), ("seconds=30", "seconds=1")):
            assert old in text
            text = text.replace(old, str(new))
        self.path.write_text(text)
        self.path.chmod(0o755)
        self.coredns.write_text('#!/bin/sh\necho "pid $$"\nfor word; do echo "$word"; done\n')
        self.coredns.chmod(0o755)
        self.corefile.write_bytes(localdns.render_corefile(STANDALONE, UPSTREAM))
        self.table.write_text(TABLE)

    def run(self, shell: str = "") -> subprocess.CompletedProcess[str]:
        argv = [shell, *(["sh"] if shell == "busybox" else []), str(self.path)] if shell else [str(self.path)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60)


# As the kernel prints it: the address twice, for two trees, and a route to it that is no address.
TABLE = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 169.254.20.0/24 2 0 1
        |-- 169.254.20.1
           /32 link UNICAST
        |-- 169.254.20.10
           /32 host LOCAL
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_becomes_coredns_with_the_corefile_and_the_port(tmp_path: Path, shell: str) -> None:
    one = Script(tmp_path)
    process = subprocess.Popen(
        [shell, *(["sh"] if shell == "busybox" else []), str(one.path)], stdout=subprocess.PIPE, text=True
    )
    said = process.communicate(timeout=60)[0].splitlines()
    # The same process: signals of systemd reach CoreDNS.
    assert said == [f"pid {process.pid}", "-conf", str(one.corefile), "-dns.port", "53"]


def test_the_script_waits_for_the_address(tmp_path: Path) -> None:
    one = Script(tmp_path)
    one.path.write_text(one.path.read_text().replace("seconds=1", "seconds=30"))
    one.table.write_text(TABLE.replace("/32 host LOCAL", "/32 link UNICAST"))
    timer = threading.Timer(0.5, lambda: one.table.write_text(TABLE))
    timer.start()
    done = one.run()
    timer.join()
    assert done.returncode == 0 and "-conf" in done.stdout


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda one: one.corefile.unlink(), "Corefile: there is no such file"),
        (lambda one: one.corefile.write_text(". {\n}\n"), "names no address to bind to"),
        (lambda one: one.coredns.unlink(), "coredns: there is no such program"),
        (lambda one: one.coredns.chmod(0o644), "coredns: there is no such program, or this user cannot run it"),
        (lambda one: one.table.write_text(TABLE.replace("20.10", "20.11")), "169.254.20.10: no interface has it"),
        (lambda one: one.table.write_text(TABLE.replace("host LOCAL", "link UNICAST")), "no interface has it"),
    ],
)
def test_the_script_says_in_one_line_why_it_cannot(tmp_path: Path, damage: Callable[[Script], Any], said: str) -> None:
    one = Script(tmp_path)
    damage(one)
    done = one.run()
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert said in line and line.startswith("stratum-localdns: ")


def test_the_script_is_plain_sh(tmp_path: Path) -> None:
    if not shutil.which("shellcheck"):
        assert not re.search(rb"\[\[|local |function |<<<|\$\(\(.*\+\+", localdns.render_supervisor())
        return
    path = tmp_path / "script"
    path.write_bytes(localdns.render_supervisor())
    subprocess.run(["shellcheck", "--shell=sh", str(path)], check=True, timeout=60)


# -- the gate, and CoreDNS behind it --------------------------------------------------------------------


class Running:
    """The stand-in as a process, on an address of the loopback of its own."""

    def __init__(self, top: Path, upstreams: tuple[str, ...]) -> None:
        self.address = "127." + ".".join(str(random.randint(1, 250)) for _ in range(3))
        self.port = random.randint(20000, 50000)
        self.spec = replace(STANDALONE, local_dns=LocalDNS(True, self.address))
        self.corefile = top / "Corefile"
        self.log = top / "coredns.log"
        self.write(upstreams)
        self.process = self.start()

    def write(self, upstreams: tuple[str, ...]) -> None:
        self.corefile.write_bytes(
            localdns.render_corefile(self.spec, upstreams).replace(b"reload 10s 5s", b"reload 2s")
        )

    def start(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, coredns.__file__, "-conf", str(self.corefile), "-dns.port", str(self.port)]
        with open(self.log, "ab") as log:
            return subprocess.Popen(argv, stdout=log, stderr=log)

    def wait(self, timeout: float = 20) -> None:
        localdns.wait_localdns(Host("/", {}), self.address, timeout, port=self.port)

    def ask(self, name: str, *, tcp: bool = False) -> tuple[int, tuple[str, ...]]:
        data = localdns.encode_query(9, name)
        answer = localdns.parse_answer(Host("/", {}).ask_dns(self.address, self.port, data, tcp=tcp, timeout=10))
        return answer.rcode, answer.addresses

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Callable[[tuple[str, ...]], Running]]:
    started: list[Running] = []

    def start(upstreams: tuple[str, ...]) -> Running:
        top = tmp_path / str(len(started))
        top.mkdir()
        started.append(Running(top, upstreams))
        return started[-1]

    yield start
    for one in started:
        one.end()


def an_upstream(top: Path, answer: str) -> Iterator[str]:
    """A server that answers every name with one address."""
    address = "127." + ".".join(str(random.randint(1, 250)) for _ in range(3))
    corefile = top / f"upstream-{answer}"
    corefile.write_text(
        f'. {{\n bind {address}\n template IN A {{\n answer "{{{{ .Name }}}} 5 IN A {answer}"\n }}\n}}\n'
    )
    port = random.randint(20000, 50000)
    argv = [sys.executable, coredns.__file__, "-conf", str(corefile), "-dns.port", str(port)]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    yield f"{address}:{port}"
    process.kill()
    process.wait()


@pytest.fixture
def first(tmp_path: Path) -> Iterator[str]:
    yield from an_upstream(tmp_path, "192.0.2.1")


@pytest.fixture
def second(tmp_path: Path) -> Iterator[str]:
    yield from an_upstream(tmp_path, "192.0.2.2")


def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_the_gate_opens_when_localdns_answers_though_no_upstream_does(running: Callable[..., Running]) -> None:
    one = running(("192.0.2.53",))
    one.wait()
    assert one.ask(localdns.HEALTH_NAME) == (0, (one.address,))


def test_questions_go_to_the_first_upstream_over_both_protocols(
    running: Callable[..., Running], first: str, second: str
) -> None:
    one = running((first, second))
    one.wait()
    until(lambda: one.ask("www.example")[1] == ("192.0.2.1",), "the upstream answers")
    assert one.ask("www.example", tcp=True) == (0, ("192.0.2.1",))


def test_a_changed_upstream_takes_effect_in_the_same_process(
    running: Callable[..., Running], first: str, second: str
) -> None:
    one = running((first,))
    one.wait()
    until(lambda: one.ask("www.example")[1] == ("192.0.2.1",), "the upstream answers")
    one.write((second,))
    until(lambda: one.ask("www.example")[1] == ("192.0.2.2",), "the new upstream answers")
    assert one.process.poll() is None


def test_a_forward_loop_would_be_found_by_the_second_line_of_defence(running: Callable[..., Running]) -> None:
    """Row 39: what our reading of resolv.conf never writes."""
    one = running(("192.0.2.53",))
    one.end()
    one.write((f"{one.address}:{one.port}",))
    one.process = one.start()
    assert one.process.wait(timeout=60) == 1
    assert b"plugin/loop: Loop (" in one.log.read_bytes()


class Unanswered(TreeMachine):
    """A machine on which something else, or nothing, answers; time passes at once."""

    answer: Callable[[bytes], bytes] = staticmethod(lambda query: query)  # type: ignore[assignment]
    clock = 0.0

    def monotonic(self) -> float:
        return self.clock

    def sleep(self, seconds: float) -> None:
        self.clock += seconds

    def ask_dns(self, address: str, port: int, query: bytes, *, tcp: bool, timeout: float) -> bytes:
        assert (address, port) == ("169.254.20.10", 53)
        return type(self).answer(query)


def refuse(_: bytes) -> bytes:
    raise ConnectionRefusedError(111, "Connection refused")


def no_answer(_: bytes) -> bytes:
    raise socket.timeout("timed out")


def nxdomain(query: bytes) -> bytes:
    return coredns.reply(coredns.decode_question(query), coredns.NXDOMAIN)


def other_address(query: bytes) -> bytes:
    question = coredns.decode_question(query)
    return coredns.reply(question, 0, [coredns.render("{{ .Name }} 5 IN A 192.0.2.1", question.name)])


def other_identifier(query: bytes) -> bytes:
    question = coredns.decode_question(bytes([query[0] ^ 1]) + query[1:])
    return coredns.reply(question, 0, [coredns.render("{{ .Name }} 5 IN A 169.254.20.10", question.name)])


@pytest.mark.parametrize(
    ("answer", "said"),
    [(refuse, "Connection refused"), (no_answer, "no answer"), (nxdomain, "another server answers there (code 3)"),
     (other_address, "another server answers there"), (other_identifier, "another server answers there"),
     (lambda query: query, "an answer that is none"), (lambda query: b"", "an answer that is none")],
)  # fmt: skip
def test_a_gate_that_stays_shut_says_why_and_quotes_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Callable[[bytes], bytes], said: str
) -> None:
    machine = Unanswered(str(tmp_path), {})
    monkeypatch.setattr(Unanswered, "answer", staticmethod(answer))
    monkeypatch.setattr(localdns.systemd, "journal_tail", lambda *_: ["listen udp: address already in use"])
    with pytest.raises(StratumError) as caught:
        localdns.wait_localdns(machine, "169.254.20.10", 5)
    assert caught.value.reference == "localdns-not-ready"
    assert said in caught.value.message and "169.254.20.10:53 over UDP" in caught.value.message
    assert "address already in use" in caught.value.message
    assert "journalctl" in str(caught.value.hint)
    assert 5 <= machine.clock < 7


def test_the_gate_wants_an_answer_over_tcp_too(tmp_path: Path) -> None:
    class DatagramsOnly(Unanswered):
        def ask_dns(self, address: str, port: int, query: bytes, *, tcp: bool, timeout: float) -> bytes:
            if tcp:
                return refuse(query)
            question = coredns.decode_question(query)
            return coredns.reply(question, 0, [coredns.render("{{ .Name }} 5 IN A 169.254.20.10", question.name)])

    machine = DatagramsOnly(str(tmp_path), {})
    with pytest.raises(StratumError, match="over TCP: Connection refused"):
        localdns.wait_localdns(machine, "169.254.20.10", 1)


# -- the stand-in is strict -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (". {\n nonsense\n}\n", "Corefile:2 - Error during parsing: Unknown directive 'nonsense'"),
        (". {\n forward .\n}\n", "Wrong argument count or unexpected line ending after '.'"),
        (". {\n forward . dns.example\n}\n", 'not an IP address or file: "dns.example"'),
        (". {\n forward . 192.0.2.1 {\n nonsense\n }\n}\n", "unknown property 'nonsense'"),
        (". {\n forward . 192.0.2.1 {\n policy first\n }\n}\n", "unknown policy 'first'"),
        (". {\n forward . " + "192.0.2.1 " * 16 + "\n}\n", "more than 15 TOs configured: 16"),
        (". {\n cache {\n serve_stale 1h verified\n }\n}\n", "invalid value for serve_stale refresh mode: verified"),
        (". {\n reload 1s\n}\n", "interval value must be greater or equal to 2s"),
        (". {\n health 192.0.2.1\n}\n", "missing port in address"),
        (". {\n loop x\n}\n", "Wrong argument count"),
        (". {\n loop\n", "Unexpected EOF"),
        (". {\n whoami\n}\n. {\n whoami\n}\n", "cannot serve dns://.:1053 - it is already defined"),
        (". {\n bind nowhere0\n}\n", "not a valid IP address"),
        (". {\n template IN A {\n }\n}\n", "no answer section for template found"),
    ],
)
def test_the_stand_in_refuses_what_coredns_refuses(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "Corefile").write_text(text)
    argv = [sys.executable, coredns.__file__, "-conf", "Corefile", "-dns.port", "1053"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.parametrize(("word", "status"), [("-nonsense", 2), ("--config=x", 2), ("extra", 1), ("-conf", 2)])
def test_the_stand_in_refuses_flags_that_coredns_has_not(word: str, status: int) -> None:
    done = subprocess.run([sys.executable, coredns.__file__, word], capture_output=True, text=True, timeout=60)
    assert done.returncode == status and word.strip("-").partition("=")[0] in done.stderr


def test_the_stand_in_ends_at_sigterm_as_a_service_should(running: Callable[..., Running]) -> None:
    one = running(("192.0.2.53",))
    one.wait()
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(timeout=20) == 0
