"""LocalDNS's interface and rules: what is made, what is taken away, and that nothing else is touched."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Callable, Optional

import pytest

from stratum.cli import build_parser
from stratum.commands import localdns as command
from stratum.errors import CommandError, NotRootError, StratumError
from stratum.host import localdnsnet
from stratum.host.localdnsnet import ANSWERS, CHAIN, INTERFACE, TABLE, UNIT_PATH
from stratum.output import Output
from stratum.scripts import localdns as script
from stratum.scripts.context import Context
from stratum.system import Completed, command_failure
from tests.unit.hosting import TreeMachine, content, perform, put

ADDRESS = "169.254.20.10"
SIX = "fd00::53"


@dataclass
class Router(TreeMachine):
    """A machine with interfaces and a firewall. It plays ip, nft and iptables as far as LocalDNS uses them."""

    tools: frozenset[str] = frozenset({"ip", "nft"})
    interfaces: dict[str, list[str]] = field(default_factory=dict)  # name: addresses
    tables: dict[str, str] = field(default_factory=dict)  # of nft
    chains: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)  # tool, table, chain: rules
    dummy: bool = True  # whether the kernel has such interfaces
    stuck: str = ""  # the start of a command that fails

    def which(self, name: str) -> Optional[str]:
        return f"/usr/sbin/{name}" if name in self.tools else None

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        check: bool = True,
        env: Optional[Mapping[str, str]] = None,
        feed: Optional[Callable[[BinaryIO], None]] = None,
    ) -> Completed:
        if argv[0] not in self.tools:
            raise CommandError("command-missing", f"{argv[0]}: no such program", status=None)
        self.commands.append(" ".join(argv))
        pipe = io.BytesIO()
        if feed:
            feed(pipe)
        players = {"ip": self.ip, "nft": self.nft, "iptables": self.iptables, "ip6tables": self.iptables}
        stuck = self.stuck and self.commands[-1].startswith(self.stuck)
        status, text = (1, "") if stuck else players[argv[0]](list(argv), pipe.getvalue().decode())
        done = Completed(tuple(argv), status, text.encode(), b"" if status == 0 else b"Error: it was refused")
        if check and status != 0:
            raise command_failure(done)
        return done

    def ip(self, argv: list[str], _: str) -> tuple[int, str]:
        words = [word for word in argv[1:] if not word.startswith("-")]
        name = words[words.index("dev") + 1]
        if words[:2] == ["link", "add"]:
            if name in self.interfaces or not self.dummy or words[4:] != ["type", "dummy"]:
                return 2, ""
            self.interfaces[name] = []
            Path(self.root, "sys/class/net", name).mkdir(parents=True)
        elif name not in self.interfaces:
            return 1, ""
        elif words[:2] == ["link", "delete"]:
            del self.interfaces[name]
            Path(self.root, "sys/class/net", name).rmdir()
        elif words[:2] == ["address", "flush"]:
            self.interfaces[name].clear()
        elif words[:2] == ["address", "add"]:
            self.interfaces[name].append(words[2])
        elif words[:2] == ["address", "show"]:
            lines = [f"5: {name}    inet {one} scope global {name}" for one in self.interfaces[name]]
            return 0, "\n".join([*lines, f"5: {name}    inet6 fe80::1/64 scope link"]) + "\n"
        else:
            assert words[:2] == ["link", "set"], words
        return 0, ""

    def nft(self, argv: list[str], data: str) -> tuple[int, str]:
        if argv[1:] == ["--file", "-"]:
            lines = data.splitlines()
            family, name = lines[0].split()[1:3]
            # Replaced at once: made so that it can be deleted, deleted, made.
            assert lines[1] == f"delete table {family} {name}" and lines[2] == f"table {family} {name} {{"
            self.tables[f"{family} {name}"] = data
            return 0, ""
        key = " ".join(argv[3:5])
        if key not in self.tables:
            return 1, ""
        if argv[1] == "delete":
            del self.tables[key]
            return 0, ""
        return 0, self.tables[key].partition("\n")[2].partition("\n")[2]

    def iptables(self, argv: list[str], _: str) -> tuple[int, str]:
        assert argv[1:4] == ["--wait", "10", "--table"], "another program may hold the lock"
        table, action, chain, rest = argv[4], argv[5], argv[6], " ".join(argv[7:])
        for name in ("PREROUTING", "INPUT", "OUTPUT"):
            self.chains.setdefault((argv[0], table, name), ["--jump THEIRS"])
        key = (argv[0], table, chain)
        if action == "--new-chain":
            if key in self.chains:
                return 1, ""
            self.chains[key] = []
            return 0, ""
        if key not in self.chains:
            return 1, ""
        rules = self.chains[key]
        if action in ("--check", "--delete"):
            if rest not in rules:
                return 1, ""
            if action == "--delete":
                rules.remove(rest)
        elif action == "--append":
            rules.append(rest)
        elif action == "--insert":
            rules.insert(0, rest)
        elif action == "--flush":
            rules.clear()
        elif action == "--delete-chain":
            jumps = [one for (tool, where, _), one in self.chains.items() if (tool, where) == key[:2]]
            if rules or any(f"--jump {chain}" in one for one in jumps):
                return 1, ""
            del self.chains[key]
        else:
            assert action == "--list-rules", action
        return 0, ""

    def ours(self) -> dict[tuple[str, str, str], list[str]]:
        """What is not as it was in the chains of iptables."""
        return {key: rules for key, rules in self.chains.items() if rules != ["--jump THEIRS"]}


NFT = frozenset({"ip", "nft", "iptables"})
IPTABLES = frozenset({"ip", "iptables", "ip6tables"})
BARE = frozenset({"ip"})


@pytest.fixture(params=[NFT, IPTABLES, BARE], ids=["nft", "iptables", "neither"])
def router(tmp_path: Path, request: pytest.FixtureRequest) -> Router:
    return Router(str(tmp_path), {}, tools=request.param)


@pytest.mark.parametrize("address", [ADDRESS, SIX])
def test_what_is_made_is_there_is_not_made_twice_and_goes_again(router: Router, address: str) -> None:
    assert script.bring_up(router, address)
    assert router.interfaces == {INTERFACE: [f"{address}/{128 if address == SIX else 32}"]}
    assert script.bring_up(router, address) == []
    assert script.bring_down(router)
    assert (router.interfaces, router.tables, router.ours()) == ({}, {}, {})
    assert script.bring_down(router) == []


def test_nft_is_used_where_it_is_and_keeps_both_directions_out_of_tracking(tmp_path: Path) -> None:
    router = Router(str(tmp_path), {}, tools=NFT)
    script.bring_up(router, ADDRESS)
    assert not router.ours()
    text = router.tables[f"ip {TABLE}"]
    before, _, after = text.partition("chain output")
    for protocol in ("udp", "tcp"):
        to = f"ip daddr {ADDRESS} {protocol} dport 53 notrack"
        assert to in before and to in after, "from pods and from the host itself"
        assert f"ip saddr {ADDRESS} {protocol} sport 53 notrack" in after
    assert "hook prerouting priority -300" in before and "hook output priority -300" in after


def test_iptables_gets_chains_of_ours_that_are_jumped_to_first(tmp_path: Path) -> None:
    router = Router(str(tmp_path), {}, tools=IPTABLES)
    script.bring_up(router, ADDRESS)
    for table, callers, target in (
        ("raw", ("PREROUTING", "OUTPUT"), "CT --notrack"),
        ("filter", ("INPUT", "OUTPUT"), "ACCEPT"),
    ):
        rules = router.chains["iptables", table, CHAIN]
        answers = [f"--source {ADDRESS} --protocol {name} --sport 53 --jump {target}" for name in ("udp", "tcp")]
        assert sorted(rules) == sorted(
            [
                *(f"--destination {ADDRESS} --protocol {name} --dport 53 --jump {target}" for name in ("udp", "tcp")),
                *(f"--in-interface lo {answer}" for answer in answers),
            ]
        )
        assert router.chains["iptables", table, ANSWERS] == answers
        for caller in callers:
            out = [f"--jump {ANSWERS}"] if caller == "OUTPUT" else []
            assert router.chains["iptables", table, caller] == [*out, f"--jump {CHAIN}", "--jump THEIRS"]


def test_what_comes_in_with_the_address_of_localdns_as_its_own_gets_past_no_filter(tmp_path: Path) -> None:
    router = Router(str(tmp_path), {}, tools=IPTABLES)
    script.bring_up(router, SIX)
    jumps = [line.split()[1] for line in router.chains["ip6tables", "filter", "INPUT"]]
    rules = [rule for chain in jumps for rule in router.chains.get(("ip6tables", "filter", chain), [])]
    forged = [rule for rule in rules if "--source" in rule and "--in-interface lo" not in rule]
    assert rules and forged == []


@pytest.mark.parametrize("tools", [NFT, IPTABLES])
def test_rules_that_somebody_took_away_are_made_again(tmp_path: Path, tools: frozenset[str]) -> None:
    router = Router(str(tmp_path), {}, tools=tools)
    script.bring_up(router, ADDRESS)
    router.tables.clear()
    for key in [key for key in router.chains if key[2] not in (CHAIN, ANSWERS)]:
        router.chains[key] = ["--jump THEIRS"]
    (line,) = script.bring_up(router, ADDRESS)
    assert "connection tracking" in line
    assert script.bring_up(router, ADDRESS) == []


def test_another_address_takes_the_place_of_the_old_one(router: Router) -> None:
    script.bring_up(router, ADDRESS)
    script.bring_up(router, "169.254.20.11")
    assert router.interfaces == {INTERFACE: ["169.254.20.11/32"]}
    everything = f"{router.tables} {router.ours()}"
    assert ADDRESS not in everything
    assert script.bring_up(router, "169.254.20.11") == []


def test_interfaces_and_tables_of_others_stay(router: Router) -> None:
    router.interfaces["dummy0"] = ["192.0.2.1/32"]
    router.tables["ip stratum"] = router.tables["inet filter"] = "theirs"
    script.bring_up(router, ADDRESS)
    script.bring_down(router)
    assert router.interfaces == {"dummy0": ["192.0.2.1/32"]}
    assert set(router.tables) == {"ip stratum", "inet filter"}


def test_a_start_that_was_cut_off_is_finished(tmp_path: Path) -> None:
    router = Router(str(tmp_path), {}, tools=IPTABLES, stuck="iptables --wait 10 --table filter --append")
    with pytest.raises(CommandError):
        script.bring_up(router, ADDRESS)
    router.stuck = ""
    script.bring_up(router, ADDRESS)
    assert len(router.chains["iptables", "raw", CHAIN]) == 4, "none twice"
    assert script.bring_up(router, ADDRESS) == []


def test_a_kernel_without_dummy_interfaces_is_named_with_what_to_do(router: Router) -> None:
    router.dummy = False
    with pytest.raises(StratumError) as caught:
        script.bring_up(router, ADDRESS)
    assert caught.value.reference == "localdns-interface"
    assert INTERFACE in caught.value.message and "it was refused" in caught.value.message
    assert "modprobe dummy" in str(caught.value.hint)


@pytest.mark.parametrize("address", ["", "127.0.0.1", "::1", "0.0.0.0", "224.0.0.1", "fe80::1%eth0", "x", "10.0.0.0/8"])
def test_an_address_that_no_interface_of_its_own_can_have_is_refused(address: str) -> None:
    with pytest.raises(StratumError) as caught:
        localdnsnet.check_address(address)
    assert caught.value.reference == "bad-localdns-address"


def test_the_unit_runs_this_program_and_is_not_rewritten(tmp_path: Path) -> None:
    host = TreeMachine(str(tmp_path), {})
    assert perform(host, lambda work: localdnsnet.plan_network_unit(work, ADDRESS))[-1] == f"write {UNIT_PATH}"
    assert perform(host, lambda work: localdnsnet.plan_network_unit(work, ADDRESS)) == []
    lines = content(host, str(UNIT_PATH)).decode().splitlines()
    (up,) = [line for line in lines if line.startswith("ExecStart=")]
    (down,) = [line for line in lines if line.startswith("ExecStop=")]
    assert up.endswith(f" -IS /opt/stratum/pyz/current/stratum.pyz localdns up --address {ADDRESS}")
    assert down.endswith(" -IS /opt/stratum/pyz/current/stratum.pyz localdns down")
    assert "RemainAfterExit=yes" in lines and "[Install]" not in lines


def test_rules_come_after_whatever_loads_a_whole_ruleset_at_boot(tmp_path: Path) -> None:
    lines = localdnsnet.render_network_unit(["/x"], ADDRESS).decode().splitlines()
    after = " ".join(line.partition("After=")[2] for line in lines).split()
    for unit in ("firewalld.service", "nftables.service", "netfilter-persistent.service", "ufw.service"):
        assert unit in after


def test_a_unit_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    host = TreeMachine(str(tmp_path), {})
    put(host, str(UNIT_PATH), "[Service]\nExecStart=/bin/true\n")
    with pytest.raises(StratumError, match="did not write"):
        perform(host, lambda work: localdnsnet.plan_network_unit(work, ADDRESS))


# -- the command that the unit runs ---------------------------------------------------------------------


def run_command(host: Router, *words: str) -> list[str]:
    """Run ``stratum localdns`` on ``host``; the lines that it prints for the journal."""
    said: list[str] = []
    out = Output()
    out.note = said.append  # type: ignore[method-assign]
    arguments = build_parser("localdns").parse_args(["localdns", *words])
    assert command.run(Context(host, out), arguments) == 0
    return said


def test_the_command_of_the_unit_makes_and_removes_and_says_what(tmp_path: Path) -> None:
    host = Router(str(tmp_path), {}, tools=NFT)
    said = run_command(host, "up", "--address", "169.254.20.11")
    assert said[0] == f"make interface {INTERFACE}"
    assert host.interfaces == {INTERFACE: ["169.254.20.11/32"]}
    assert run_command(host, "up", "--address", "169.254.20.11") == []
    assert run_command(host, "down")
    assert host.interfaces == {}


def test_the_command_needs_root(tmp_path: Path) -> None:
    class Somebody(Router):
        @property
        def euid(self) -> int:
            return 1000

    with pytest.raises(NotRootError):
        run_command(Somebody(str(tmp_path), {}), "up")
