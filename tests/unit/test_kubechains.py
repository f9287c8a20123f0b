"""The kubelet's firewall chains go with it; nobody else's rule is touched."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Callable, Optional

from stratum.host.kubechains import find_chains, find_others, plan_removal, render_removal
from stratum.journal import Journal
from stratum.receipt import Receipt
from stratum.steps import Work
from stratum.system import Completed, Host

LOCALNET = (
    '-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" '
    "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP"
)
# As iptables 1.8.9 lists what a kubelet 1.34 makes, and what kube-proxy and an admin do.
FILTER = [
    "-P INPUT ACCEPT",
    "-P OUTPUT ACCEPT",
    "-N KUBE-FIREWALL",
    "-N KUBE-KUBELET-CANARY",
    "-N KUBE-SERVICES",
    "-N ADMIN",
    "-A INPUT -j KUBE-FIREWALL",
    "-A INPUT -s 192.0.2.0/24 -j ADMIN",
    '-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
    "-A OUTPUT -j KUBE-FIREWALL",
    LOCALNET,
]
MANGLE = ["-P FORWARD ACCEPT", "-N KUBE-IPTABLES-HINT", "-N KUBE-KUBELET-CANARY"]
NAT = ["-P PREROUTING ACCEPT", "-N KUBE-KUBELET-CANARY", "-N KUBE-MARK-MASQ"]


@dataclass
class FirewallHost(Host):
    """A stand-in for iptables: its tables as text, and what was committed."""

    tables: dict[str, list[str]] = field(default_factory=dict)
    committed: list[str] = field(default_factory=list)

    def which(self, name: str) -> Optional[str]:
        return f"/usr/sbin/{name}" if name.replace("-restore", "") == "iptables" and self.tables else None

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        check: bool = True,
        env: Optional[Mapping[str, str]] = None,
        feed: Optional[Callable[[BinaryIO], None]] = None,
    ) -> Completed:
        if argv[0] == "iptables-restore":
            assert "--noflush" in argv, "else it would drop everything of everybody"
            assert feed is not None
            pipe = io.BytesIO()
            feed(pipe)
            self._commit(pipe.getvalue().decode())
            return Completed(tuple(argv), 0, b"", b"")
        table = argv[argv.index("--table") + 1]
        return Completed(tuple(argv), 0, "\n".join(self.tables[table]).encode() + b"\n", b"")

    def _commit(self, text: str) -> None:
        self.committed.append(text)
        table, *lines, end = text.strip().split("\n")
        rules = self.tables[table[1:]]
        assert end == "COMMIT"
        for line in lines:
            verb, _, rest = line.partition(" ")
            if verb == "-D":
                rules.remove(f"-A {rest}")
            elif verb == "-F":
                rules[:] = [rule for rule in rules if not rule.startswith(f"-A {rest} ")]
            else:
                assert verb == "-X" and not any(rest in rule.split() for rule in rules if rule.startswith("-A"))
                rules.remove(f"-N {rest}")


def host_with(tmp_path: Path, tables: dict[str, list[str]]) -> FirewallHost:
    (tmp_path / "root").mkdir()
    return FirewallHost(str(tmp_path / "root"), tables=tables)


def perform(host: FirewallHost) -> None:
    work = Work(host, Receipt.load(host), Journal(host))
    for action in plan_removal(host):
        action.perform(work)


def test_its_chains_and_the_jumps_to_them_go_and_nothing_else(tmp_path: Path) -> None:
    host = host_with(tmp_path, {"filter": [*FILTER], "mangle": [*MANGLE], "nat": [*NAT]})
    assert set(find_chains(host)) == {("iptables", "filter"), ("iptables", "mangle"), ("iptables", "nat")}
    perform(host)
    assert host.tables["filter"] == [
        "-P INPUT ACCEPT",
        "-P OUTPUT ACCEPT",
        "-N KUBE-SERVICES",
        "-N ADMIN",
        "-A INPUT -s 192.0.2.0/24 -j ADMIN",
        '-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES',
    ]
    assert host.tables["mangle"] == ["-P FORWARD ACCEPT"]
    assert host.tables["nat"] == ["-P PREROUTING ACCEPT", "-N KUBE-MARK-MASQ"]
    assert plan_removal(host) == []


def test_what_pods_of_the_cluster_made_is_named(tmp_path: Path) -> None:
    host = host_with(tmp_path, {"filter": [*FILTER], "mangle": [*MANGLE], "nat": [*NAT]})
    assert find_others(host) == [
        "KUBE-MARK-MASQ in the table nat of iptables",
        "KUBE-SERVICES in the table filter of iptables",
    ]


def test_a_host_without_them_or_without_iptables_is_left_alone(tmp_path: Path) -> None:
    plain = {"filter": ["-N ADMIN", "-N KUBE-SERVICES"], "mangle": [], "nat": []}
    host = host_with(tmp_path, plain)
    assert plan_removal(host) == [] and host.committed == []
    host.tables = {}
    assert plan_removal(host) == [] and find_others(host) == []


def test_a_chain_is_emptied_before_it_goes() -> None:
    lines = ["-N KUBE-FIREWALL", "-A INPUT -j KUBE-FIREWALL"]
    assert render_removal("filter", lines).decode().split("\n") == [
        "*filter",
        "-D INPUT -j KUBE-FIREWALL",
        "-F KUBE-FIREWALL",
        "-X KUBE-FIREWALL",
        "COMMIT",
        "",
    ]
