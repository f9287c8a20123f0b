"""LocalDNS on a machine with a kernel of its own: real systemd, systemd-resolved, dummy interface, conntrack.

CoreDNS and the host's DNS servers are stand-ins (tests/standins/coredns.py); the units, the interface, the rules, the
resolver and the dynamic user are real.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Machines
from tests.lab import demo, roots
from tests.lab.image import Image
from tests.lab.inside import PLACE, SOURCES, ask, python
from tests.lab.machine import wait_until
from tests.lab.packages import Package
from tests.lab.qemu import STEADY_CLOCK, QemuMachine
from tests.pyz import ROOT, built_pyz, default_cache

ADDRESS = "169.254.20.10"
NAME = "www.upstream.lab"
FIRST, SECOND = ("192.0.2.53", "198.51.100.1"), ("192.0.2.54", "198.51.100.2")
UNIT, NETWORK = "stratum-localdns.service", "stratum-localdns-network.service"
STAND_IN = "/opt/stratum/components/dns/bin/coredns"

# The host's DNS server has an address of its own, and answers this name only.
SERVER = """[Service]
ExecStartPre=/bin/ip address replace {address}/32 dev lo
ExecStart={program} -conf /etc/lab-{address} -dns.port 53
[Install]
WantedBy=multi-user.target
"""
COREFILE = """{name} {{
    bind {address}
    template IN A {{
        answer "{{{{ .Name }}}} 5 IN A {answer}"
    }}
}}
"""
RESOLVED = "[Resolve]\nDNS={address}\nDNSSEC=no\nLLMNR=no\nMulticastDNS=no\nCache=no\n"

# As `up` does it: the version, the configuration, the units; with the umask of a hardened host.
PRELUDE = """
import os
from stratum import systemd
from stratum.config import LocalDNS, NodeSpec
from stratum.host import localdnsnet
from stratum.node import localdns
from stratum.node.dnsquery import encode_query, parse_answer
from stratum.node.layout import Layout
from stratum.node.settings import Settings
from stratum.node.units import UNIT_LOCALDNS, UnitSpec, render_units
from stratum.node.versions import VersionRecord, assemble
from stratum.scripts import localdns as script
from stratum.steps import plan_file
from stratum.system import Host, HostPath
os.umask(0o027)
def lost():
    return [action.subject for action in localdnsnet.plan_network(host, settings.spec.local_dns.address)]
settings = Settings(NodeSpec(local_dns=LocalDNS(enabled=True)))
layout = Layout(host)
def addresses(server, tcp=False):
    query = encode_query(5, "www.upstream.lab")
    return parse_answer(host.ask_dns(server, 53, query, tcp=tcp, timeout=20)).addresses
"""
INSTALL = """
components = (("coredns", "1.12.1", "sha256:" + "a" * 64),)
record = VersionRecord("demo", "1.0", 1, "sha256:" + "b" * 64, components, (), ())
assemble(layout, work_on().receipt, record, [HostPath("/opt/stratum/components/dns")])
layout.flip("1.0")
def plan(work):
    spec = UnitSpec(layout.bin_dir, localdns=str(layout.current_link / localdns.SUPERVISOR))
    files = [file for file in render_units(spec) if UNIT_LOCALDNS in str(file.path) and "20-" not in file.path.name]
    return [action for file in files for action in plan_file(work, file.path, file.content)]
perform(plan)
"""
CONFIGURE = "perform(lambda work: script.plan_configuration(work, settings))"
START = f"""
host.run(["systemctl", "daemon-reload"], timeout=120)
perform(lambda work: script.plan_network(host, settings))
systemd.start_unit(host, UNIT_LOCALDNS)
localdns.wait_localdns(host, "{ADDRESS}", 120)
"""
# Without nft, as on a host that has the older program alone.
ONLY_IPTABLES = "host.which = lambda name: None if name == 'nft' else Host.which(host, name)"


def boot(machines: Machines, name: str, files: Mapping[str, Path]) -> QemuMachine:
    """A machine whose resolv.conf names only the stub of systemd-resolved, with two DNS servers of its own."""
    shared = {"/usr/local/bin/lab-dns": ROOT / "tests/standins/coredns.py", PLACE: SOURCES}
    vm = machines.boot(QemuMachine(roots.root_disk(roots.KUBERNETES), name, files={**files, **shared}, memory=1536,
                                    options=STEADY_CLOCK))
    vm.sh("chmod 0755 /usr/local/bin/lab-dns")
    for address, answer in (FIRST, SECOND):
        vm.write(f"/etc/lab-{address}", COREFILE.format(name=NAME, address=address, answer=answer))
        unit = f"lab-{address}.service"
        vm.write(f"/etc/systemd/system/{unit}", SERVER.format(address=address, program="/usr/local/bin/lab-dns"))
        vm.sh(f"systemctl daemon-reload; systemctl enable --now {unit}")
    use_server(vm, FIRST[0])
    vm.sh("rm /etc/resolv.conf; ln -s ../run/systemd/resolve/stub-resolv.conf /etc/resolv.conf")
    assert "nameserver 127.0.0.53" in vm.read("/etc/resolv.conf")
    return vm


@pytest.fixture
def host(machines: Machines) -> QemuMachine:
    """With a firewall that tracks connections, and a pod: a namespace behind a veth."""
    files = {
        "/opt/stratum/pyz/test/stratum.pyz": built_pyz(default_cache()),
        STAND_IN: ROOT / "tests/standins/coredns.py",
    }
    vm = boot(machines, "localdns", files)
    vm.sh(f"chmod 0755 {STAND_IN}; ln -s test /opt/stratum/pyz/current")
    vm.write("/etc/nftables.conf", "flush ruleset\ntable inet lab { chain input { type filter hook input priority 0; "
             "ct state established counter accept; }; }\n")
    vm.sh("systemctl enable --now nftables")
    make_pod(vm)
    return vm


def use_server(vm: QemuMachine, address: str) -> None:
    vm.sh("mkdir -p /etc/systemd/resolved.conf.d")
    vm.write("/etc/systemd/resolved.conf.d/lab.conf", RESOLVED.format(address=address))
    vm.sh("systemctl enable systemd-resolved; systemctl restart systemd-resolved")


def make_pod(vm: QemuMachine) -> None:
    vm.sh(
        "ip netns add pod; ip link add pod0 type veth peer name eth0 netns pod; ip address add 10.9.0.1/24 dev pod0; "
        "ip link set pod0 up; ip -n pod address add 10.9.0.2/24 dev eth0; ip -n pod link set eth0 up; "
        "ip -n pod route add default via 10.9.0.1"
    )


def value(vm: QemuMachine, expression: str) -> Any:
    return ask(vm, PRELUDE, expression, timeout=300)


def do(vm: QemuMachine, code: str) -> None:
    python(vm, f"{PRELUDE}\n{code}", timeout=600)


def answers(vm: QemuMachine, *, pod: bool = False, tcp: bool = False, server: str = ADDRESS) -> list[str]:
    if not pod:
        return list(value(vm, f"addresses({server!r}, {tcp})"))
    code = (
        "import sys; sys.path.insert(0, '/opt/sources'); sys.dont_write_bytecode = True\n"
        "from stratum.system import Host\nfrom stratum.node.dnsquery import encode_query, parse_answer\n"
        f"data = Host('/').ask_dns({server!r}, 53, encode_query(5, {NAME!r}), tcp={tcp}, timeout=20)\n"
        "print(*parse_answer(data).addresses)"
    )
    return vm.run(["ip", "netns", "exec", "pod", "python3", "-c", code], timeout=120).stdout.split()


def tracked(vm: QemuMachine) -> str:
    return vm.run(["conntrack", "-L"], check=False).stdout


def main_pid(vm: QemuMachine) -> str:
    return vm.run(["systemctl", "show", "-p", "MainPID", "--value", UNIT]).stdout.strip()


def network_state(vm: QemuMachine) -> tuple[list[str], list[str], list[str]]:
    """Interfaces, tables of nft, and our chains of iptables."""
    return (
        sorted(line.split(":")[1].strip() for line in vm.run(["ip", "-o", "link"]).lines),
        sorted(vm.run(["nft", "list", "tables"]).lines),
        [line for line in vm.sh("iptables-save; ip6tables-save").lines if "STRATUM" in line],
    )


@pytest.mark.timeout(2400)
def test_localdns_answers_through_the_hosts_real_servers_and_leaves_the_host_alone(host: QemuMachine) -> None:
    before = network_state(host)
    do(host, INSTALL + CONFIGURE + START)

    # Row 39: resolv.conf names the stub alone, and the real server is asked.
    assert value(host, "localdns.recorded_upstreams(host)") == [FIRST[0]]
    for pod in (False, True):
        for tcp in (False, True):
            assert answers(host, pod=pod, tcp=tcp) == [FIRST[1]], (pod, tcp)
    assert "plugin/loop" not in host.run(["journalctl", "--boot", "--unit", UNIT]).stdout

    # Row 28: a user of its own, under the umask of a hardened host.
    user = host.run(["ps", "-o", "user=", "-p", main_pid(host)]).stdout.strip()
    assert user not in ("root", ""), user
    assert host.run(["stat", "-c", "%a", "/etc/stratum/localdns/Corefile"]).stdout.strip() == "644"

    # Connections are tracked on this machine, LocalDNS's are not.
    host.run(["conntrack", "-F"])
    for pod in (False, True):
        for tcp in (False, True):
            answers(host, pod=pod, tcp=tcp)
    answers(host, server=FIRST[0])
    table = tracked(host)
    assert FIRST[0] in table
    assert ADDRESS not in table, table

    # The host's own resolver is another, and works when LocalDNS does not.
    assert host.read("/etc/resolv.conf").count("nameserver") == 1
    host.run(["systemctl", "stop", UNIT])
    assert host.run(["getent", "ahostsv4", NAME]).stdout.split()[0] == FIRST[1]
    do(host, START)

    # A lease with another server: noticed, written, and in force without a restart.
    pid = main_pid(host)
    assert value(host, "lost()") == []
    use_server(host, SECOND[0])
    (said,) = value(host, "script.drift(host, settings)")
    assert SECOND[0] in said and FIRST[0] in said
    do(host, CONFIGURE)
    wait_until("the new server is asked", lambda: answers(host) == [SECOND[1]], 120, pause=1)
    assert main_pid(host) == pid

    # Rules that a firewall's restart takes away are missed, and made again.
    host.run(["systemctl", "restart", "nftables"])
    (said,) = value(host, "lost()")
    assert "stratum_localdns" in said
    do(host, "perform(lambda work: script.plan_network(host, settings))")
    assert value(host, "lost()") == []

    # A reboot brings it back in order, after the firewall has loaded its rules.
    host.sh(f"systemctl add-wants multi-user.target {UNIT}")
    host.reboot()
    make_pod(host)
    do(host, f'localdns.wait_localdns(host, "{ADDRESS}", 120)')
    wait_until("the server is up", lambda: answers(host, pod=True) == [SECOND[1]], 120, pause=1)
    assert value(host, "lost()") == []
    shown = host.run(["systemctl", "show", "-p", "ActiveEnterTimestampMonotonic", "--value", NETWORK, UNIT]).stdout
    network, dns = map(int, shown.split())
    assert 0 < network <= dns
    assert "failed" not in host.run(["systemctl", "is-failed", NETWORK, UNIT], check=False).stdout

    # A start that cannot be is an error that says why: the interface is gone, and port 53 is somebody else's.
    host.run(["systemctl", "stop", UNIT])
    host.write("/etc/lab-taken", COREFILE.format(name=NAME, address=ADDRESS, answer="192.0.2.1"))
    host.run(["systemd-run", "--quiet", "--unit", "taken", "/usr/local/bin/lab-dns", "-conf", "/etc/lab-taken"])
    wait_until("port 53 is taken", lambda: ADDRESS in host.run(["ss", "-lnu"]).stdout, 60, pause=0.5)
    host.run(["systemctl", "start", UNIT])
    done = python(host, f'{PRELUDE}\nlocaldns.wait_localdns(host, "{ADDRESS}", 15)', check=False, timeout=300)
    assert "localdns-not-ready" in done.stderr and "address already in use" in done.stderr, done.describe()
    host.run(["systemctl", "stop", "taken"])
    do(host, START)

    # The same with the older firewall program, made and taken away.
    do(host, f"script.bring_down(host)\n{ONLY_IPTABLES}\nscript.bring_up(host, '{ADDRESS}')")
    assert any("STRATUM-LOCALDNS" in line and "--notrack" in line for line in network_state(host)[2])
    host.run(["systemctl", "restart", UNIT])
    do(host, f'localdns.wait_localdns(host, "{ADDRESS}", 120)')
    host.run(["conntrack", "-F"])
    assert [answers(host, pod=pod, tcp=tcp) for pod in (False, True) for tcp in (False, True)] == [[SECOND[1]]] * 4
    assert ADDRESS not in tracked(host)
    do(host, f"{ONLY_IPTABLES}\nassert lost() == []")

    # Taken off: no interface, no rule, no unit, and the host resolves as ever.
    host.sh(f"systemctl stop {UNIT}; rm -f /etc/systemd/system/multi-user.target.wants/{UNIT}")
    do(host, "perform(script.plan_withdrawal)")
    host.run(["systemctl", "daemon-reload"])
    after = network_state(host)
    assert (after[0], [line for line in after[1] if "stratum" in line], after[2]) == (before[0], [], [])
    assert not host.exists("/etc/stratum/localdns/Corefile") and not host.exists(f"/etc/systemd/system/{NETWORK}")
    assert host.run(["getent", "ahostsv4", NAME]).stdout.split()[0] == SECOND[1]


def named(vm: QemuMachine) -> list[str]:
    """Every path with a name of ours in it, but for the lab's own files and what systemd keeps of units."""
    places = "/etc /opt /run /usr/local /var/lib"
    kept = ("/run/stratum-lab", "/run/systemd/propagate/")
    found = vm.sh(f"find {places} -xdev \\( -iname '*stratum*' -o -iname '*localdns*' \\)").lines
    return sorted(path for path in found if not path.startswith(kept))


CONFIG = """apiVersion: stratum.dev/v1
kind: Node
spec:
  network:
    nodeIP: 192.0.2.53
  localDNS:
    enabled: true
"""


@pytest.mark.timeout(2400)
def test_up_makes_a_node_with_localdns_that_survives_a_reboot_and_goes_without_a_trace(
    machines: Machines, debian_packages: dict[str, Package], demo_image: Image
) -> None:
    pyz = built_pyz(default_cache())
    publisher, bundle = demo.cached_bundle(pyz, debian_packages, [], kubelet=True)
    files = {
        "/root/usb/stratum.pyz": pyz,
        "/root/usb/demo.tar": bundle,
        "/etc/stratum/trust.d/publisher.pub": publisher.public,
    }
    vm = boot(machines, "localdns-up", files)
    vm.sh("chmod 0755 /root/usb/stratum.pyz; chmod 0644 /etc/stratum/trust.d/publisher.pub")
    vm.write("/etc/stratum/stratum.yaml", CONFIG)
    before, names = network_state(vm), named(vm)

    # Row 28: as on a hardened host.
    vm.sh("umask 077; cd /root/usb; ./stratum.pyz up --quiet", timeout=900)
    assert answers(vm) == [FIRST[1]]
    user = vm.run(["ps", "-o", "user=", "-p", main_pid(vm)]).stdout.strip()
    assert user not in ("root", ""), user
    again = vm.sh("cd /root/usb; ./stratum.pyz up", timeout=900)
    assert "nothing to do" in again.stdout, again.describe()

    # The supervisor follows the host's servers by itself.
    vm.run(["systemctl", "start", "stratum.service"], timeout=300)
    use_server(vm, SECOND[0])
    wait_until("the new server is asked", lambda: answers(vm) == [SECOND[1]], 240, pause=2)

    vm.reboot()
    make_pod(vm)  # an interface besides lo and LocalDNS's: without one systemd-resolved says that the network is down
    vm.run(["stratum", "status", "--wait", "240"], timeout=300)
    wait_until("the server is up", lambda: answers(vm) == [SECOND[1]], 120, pause=1)
    units = (NETWORK, UNIT, "stratum-containerd.service", "stratum-kubelet.service")
    shown = vm.run(["systemctl", "show", "-p", "ActiveEnterTimestampMonotonic", "--value", *units]).stdout
    times = [int(time) for time in shown.split()]
    assert times == sorted(times) and times[0] > 0, times

    vm.run(["stratum", "uninstall", "--quiet"], timeout=900)
    after = network_state(vm)
    assert [name for name in after[0] if not name.startswith("pod0@")] == before[0]
    assert (before[0], [line for line in after[1] if "stratum" in line], after[2]) == (before[0], [], [])
    assert [path for path in named(vm) if path not in names] == []
    assert sorted(vm.run(["ls", "/etc/stratum"]).lines) == ["stratum.yaml", "trust.d"]
    assert vm.run(["getent", "ahostsv4", NAME]).stdout.split()[0] == SECOND[1]
