"""The chains that the portmap plugin shares: taken away only where they are ours alone."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Callable, Optional

import pytest

from stratum.errors import CommandError
from stratum.host import portchains
from stratum.host.portchains import REMEMBERED, find_chains, plan_remember, plan_removal
from stratum.journal import Journal
from stratum.node import cni
from stratum.receipt import Receipt
from stratum.steps import Action, Work
from stratum.system import Completed, Host

# As iptables 1.8.9 lists it after the portmap plugin 1.1.1 had published a port of a container, and after its DEL.
BUILT_IN = [f"-P {chain} ACCEPT" for chain in ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING")]
SHARED = [
    "-N CNI-HOSTPORT-DNAT",
    "-N CNI-HOSTPORT-MASQ",
    "-N CNI-HOSTPORT-SETMARK",
    "-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT",
    "-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT",
    '-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ',
    "-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE",
    '-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000',
]
ADMIN = ["-N ADMIN", "-A POSTROUTING -s 192.0.2.0/24 -j ADMIN"]


def of_container(network: str, chain: str = "CNI-DN-db2c059139ec11eb48b78") -> list[str]:
    comment = f'-m comment --comment "dnat name: \\"{network}\\" id: \\"one\\""'
    return [
        f"-N {chain}",
        f"-A {chain} -s 10.215.0.0/16 -p tcp -m tcp --dport 8080 -j CNI-HOSTPORT-SETMARK",
        f"-A {chain} -p tcp -m tcp --dport 8080 -j DNAT --to-destination 10.215.0.5:80",
        f"-A CNI-HOSTPORT-DNAT -p tcp {comment} -m multiport --dports 8080 -j {chain}",
    ]


@dataclass
class FirewallHost(Host):
    """A stand-in for iptables and iptables-restore: the table nat as text, and transactions on it."""

    rules: dict[str, list[str]] = field(default_factory=dict)
    transactions: list[str] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)

    def which(self, name: str) -> Optional[str]:
        known = name.replace("-restore", "") in self.rules and name not in self.absent
        return f"/usr/sbin/{name}" if known else None

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        check: bool = True,
        env: Optional[Mapping[str, str]] = None,
        feed: Optional[Callable[[BinaryIO], None]] = None,
    ) -> Completed:
        if self.which(argv[0]) is None:
            raise CommandError("command-missing", f"{argv[0]}: no such program", status=None)
        if argv[0].endswith("-restore"):
            assert "--noflush" in argv, "else it would drop everything of everybody"
            pipe = io.BytesIO()
            assert feed is not None
            feed(pipe)
            done = self._commit(argv[0].replace("-restore", ""), pipe.getvalue().decode())
            return Completed(tuple(argv), 0 if done else 1, b"", b"")
        assert list(argv[1:]) == ["--wait", "10", "--table", "nat", "--list-rules"]
        return Completed(tuple(argv), 0, "\n".join(self.rules[argv[0]]).encode() + b"\n", b"")

    def _commit(self, tool: str, text: str) -> bool:
        """All of a transaction or nothing of it, as the kernel does it."""
        self.transactions.append(text)
        first, *lines, last = text.splitlines()
        assert (first, last) == ("*nat", "COMMIT")
        rules = list(self.rules[tool])
        for line in lines:
            verb, rest = line.split(" ", 1)
            wanted = f"-A {rest}" if verb == "-D" else f"-N {rest}"
            used = verb == "-X" and any(f"-A {rest} " in item or item.endswith(f"-j {rest}") for item in rules)
            if verb not in ("-D", "-X") or wanted not in rules or used:
                return False
            rules.remove(wanted)
        self.rules[tool] = rules
        return True


@pytest.fixture
def host(tmp_path: Path) -> FirewallHost:
    (tmp_path / "run").mkdir()
    return FirewallHost(str(tmp_path), {}, rules={"iptables": [*BUILT_IN, *ADMIN], "ip6tables": list(BUILT_IN)})


def perform(host: Host, actions: Sequence[Action]) -> list[str]:
    for action in actions:
        action.perform(Work(host, Receipt(host), Journal(host)))
    return [action.describe() for action in actions]


def removal(host: Host, *, shared: bool = False) -> tuple[list[str], list[str]]:
    actions, left = plan_removal(host, "stratum", shared=shared)
    return perform(host, actions), left


def test_chains_that_came_after_us_go_and_every_other_rule_stays(host: FirewallHost) -> None:
    before = {tool: list(rules) for tool, rules in host.rules.items()}
    assert perform(host, plan_remember(host)) == ["note which chains for published ports are there"]
    assert plan_remember(host) == [], "once in a boot: by the next time they may be ours"
    for rules in host.rules.values():
        rules += SHARED
    assert removal(host) == (
        [f"remove firewall chains CNI-HOSTPORT-* in the table nat of {tool}" for tool in ("iptables", "ip6tables")],
        [],
    )
    assert host.rules == before
    assert removal(host) == ([], [])


def test_a_dry_run_sees_through_the_containers_that_will_be_gone(host: FirewallHost) -> None:
    perform(host, plan_remember(host))
    host.rules["iptables"] += [*SHARED, *of_container("stratum")]
    actions, left = plan_removal(host, "stratum", shared=False)
    assert (len(actions), left) == (1, [])
    # While they are there nothing goes, not even in part.
    rules = list(host.rules["iptables"])
    perform(host, actions)
    assert host.rules["iptables"] == rules and len(host.transactions) == 1


def test_chains_that_were_there_before_are_not_ours_and_not_named(host: FirewallHost) -> None:
    host.rules["iptables"] += SHARED
    perform(host, plan_remember(host))
    assert removal(host) == ([], [])
    assert host.transactions == []


def test_chains_of_which_nobody_knows_who_made_them_stay_and_are_named(host: FirewallHost) -> None:
    host.rules["iptables"] += SHARED
    done, left = removal(host)
    assert (done, host.transactions) == ([], [])
    assert left == ["chains for published ports in the table nat of iptables: it is not known who made them"]
    Path(host.real(REMEMBERED)).parent.mkdir()
    Path(host.real(REMEMBERED)).write_text("damaged")
    assert removal(host) == ([], left)


FOREIGN = {
    "a container of another network": of_container("podman"),
    "one whose network only begins like ours": of_container("stratum2"),
    "a jump of the admin": ["-A PREROUTING -i eth7 -j CNI-HOSTPORT-DNAT"],
    "a rule of the admin": ["-A CNI-HOSTPORT-MASQ -s 192.0.2.0/24 -j RETURN"],
    "a rule of the admin among the published ports": ["-A CNI-HOSTPORT-DNAT -p tcp -m tcp --dport 22 -j RETURN"],
    "a container's chain that marks": ["-A CNI-DN-00000000000000000000a -p tcp -j CNI-HOSTPORT-SETMARK"],
    "another mark": ["-A CNI-HOSTPORT-SETMARK -j MARK --set-xmark 0x4000/0x4000"],
    "a chain that we do not know": ["-N CNI-HOSTPORT-OTHER"],
}


@pytest.mark.parametrize("more", FOREIGN.values(), ids=FOREIGN.keys())
def test_with_anything_of_others_in_them_all_stay_and_are_named(host: FirewallHost, more: list[str]) -> None:
    perform(host, plan_remember(host))
    host.rules["iptables"] += [*SHARED, *more]
    done, (left,) = removal(host)
    assert (done, host.transactions) == ([], [])
    assert "rules of others" in left


def test_where_others_use_cni_they_stay_and_are_named(host: FirewallHost) -> None:
    perform(host, plan_remember(host))
    host.rules["ip6tables"] += SHARED
    assert removal(host, shared=True) == (
        [], ["chains for published ports in the table nat of ip6tables: others use CNI on this host"]
    )


def test_a_rule_that_comes_between_look_and_removal_keeps_everything(host: FirewallHost) -> None:
    perform(host, plan_remember(host))
    host.rules["iptables"] += SHARED
    actions, _ = plan_removal(host, "stratum", shared=False)
    host.rules["iptables"] += of_container("podman")
    rules = list(host.rules["iptables"])
    perform(host, actions)
    assert host.rules["iptables"] == rules


def test_without_the_program_for_transactions_they_stay_and_are_named(host: FirewallHost) -> None:
    perform(host, plan_remember(host))
    host.rules["iptables"] += SHARED
    host.absent.add("iptables-restore")
    reason = "chains for published ports in the table nat of iptables: iptables-restore is not installed"
    assert removal(host) == ([], [reason])


def test_without_iptables_there_is_nothing_to_note_or_to_remove(tmp_path: Path) -> None:
    host = FirewallHost(str(tmp_path), {})
    assert (plan_remember(host), find_chains(host), plan_removal(host, "stratum", shared=False)) == ([], {}, ([], []))
    assert list(tmp_path.iterdir()) == []


# -- who else uses CNI ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "others"),
    [
        ("etc/cni/net.d/10-stratum.conflist", False),
        ("etc/cni/net.d/87-podman.conflist", True),
        ("var/lib/cni/results/podman-x-eth0", True),
        ("var/lib/cni/results/stratum-junk", True),
    ],
)
def test_a_configuration_or_an_attachment_of_others_is_a_use_by_others(tmp_path: Path, path: str, others: bool) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("{}")
    host = Host(str(tmp_path), {})
    assert cni.others_use_cni(Work(host, Receipt(host), Journal(host))) is others


def test_what_is_remembered_is_a_small_file_for_this_boot(host: FirewallHost) -> None:
    perform(host, plan_remember(host))
    assert str(REMEMBERED).startswith("/run/stratum/")
    assert json.loads(host.read_bytes(REMEMBERED)) == {"iptables": False, "ip6tables": False}
    assert portchains.find_chains(host) == {}
