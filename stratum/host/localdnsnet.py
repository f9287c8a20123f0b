"""The network of LocalDNS: a dummy interface with its address, and rules that keep its traffic out of conntrack.

Questions and answers on port 53 of the address are not tracked (NOTRACK), in both directions, for pods and for the
host itself: each would take an entry of the connection table, and racing entries lose packets (kubernetes #56903).
Interface, address and rules are those of NodeLocal DNSCache (kubernetes/dns, cmd/node-cache). They are made by a unit
at each boot, which every mode shares (seed 000, UnitLocalDNSNetwork); nft is used where it is, else iptables.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Sequence
from typing import BinaryIO

from stratum import systemd
from stratum.errors import CommandError, StratumError
from stratum.host.finding import REJECT, Finding
from stratum.host.network import interface_exists
from stratum.host.program import program_argv
from stratum.steps import Action, Call, Work, plan_file
from stratum.system import Host, HostPath

__all__ = [
    "INTERFACE",
    "UNIT",
    "UNIT_PATH",
    "check_address",
    "check_port",
    "plan_network",
    "plan_network_removal",
    "plan_network_unit",
    "render_network_unit",
]

UNIT = "stratum-localdns-network.service"
UNIT_PATH = HostPath("/etc/systemd/system") / UNIT
INTERFACE = "stratum-dns0"
TABLE = "stratum_localdns"
CHAIN = "STRATUM-LOCALDNS"
ANSWERS = "STRATUM-LOCALDNS-OUT"
_TIMEOUT = 30.0
# Each chain of ours in iptables with its table, who jumps to it there, and what its rules do. Packets that are not
# tracked are no part of an established connection, which is what a filter lets in; so the filter has rules of its own
# for them. What answers is this host: anything else that comes in from LocalDNS's address is forged, and must not get
# past the filter to another port.
_NOTRACK, _ACCEPT = ("CT", "--notrack"), ("ACCEPT",)
_CHAINS = (
    ("raw", CHAIN, ("PREROUTING", "OUTPUT"), _NOTRACK),
    ("raw", ANSWERS, ("OUTPUT",), _NOTRACK),
    ("filter", CHAIN, ("INPUT", "OUTPUT"), _ACCEPT),
    ("filter", ANSWERS, ("OUTPUT",), _ACCEPT),
)
_RULES = 6  # in the table of nft: two protocols, to the address twice and from it once


def check_address(address: str) -> str:
    """LocalDNS's address, if it can be one: raises :class:`StratumError` otherwise."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        parsed = None
    if parsed is None or "%" in address or parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast:
        raise StratumError(
            "bad-localdns-address",
            f"spec.localDNS.address: {address!r} is no address that an interface of its own can have",
            hint="leave it out for 169.254.20.10, or name another link-local address that nobody uses",
        )
    return str(parsed)


# -- the unit -------------------------------------------------------------------------------------------


def render_network_unit(argv: Sequence[str], address: str) -> bytes:
    """The unit that makes the network of LocalDNS and takes it away.

    It comes after whatever loads a whole ruleset at boot, which would take our rules with it. ``argv`` starts this
    program. Nothing enables it: LocalDNS's own unit requires it.
    """
    up = systemd.render_command([*argv, "localdns", "up", "--address", address])
    down = systemd.render_command([*argv, "localdns", "down"])
    return f"""# Written by Stratum; put changes into a drop-in of your own (systemctl edit).
[Unit]
Description=network of the Stratum node's LocalDNS
After=network.target systemd-modules-load.service NetworkManager.service systemd-networkd.service
After=firewalld.service nftables.service iptables.service netfilter-persistent.service ufw.service
RequiresMountsFor=/opt/stratum
StartLimitIntervalSec=0

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={up}
ExecStop={down}
TimeoutStartSec=2min
TimeoutStopSec=2min
""".encode()


def plan_network_unit(work: Work, address: str) -> list[Action]:
    """What writes the unit; nothing when it is there. systemd must be told to read it.

    Raises :class:`StratumError` for an address that cannot be, and when somebody else's file is in the way.
    """
    content = render_network_unit(program_argv(work.host), check_address(address))
    return plan_file(work, UNIT_PATH, content)


# -- checks ---------------------------------------------------------------------------------------------


def check_port(host: Host) -> list[Finding]:
    """Whether a program holds port 53 of every address (proc(5), ``/proc/net``): LocalDNS could not have its own."""
    taken = []
    for protocol, listening in (("udp", "07"), ("udp6", "07"), ("tcp", "0A"), ("tcp6", "0A")):
        try:
            lines = host.read_text(f"/proc/net/{protocol}").splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            address, _, port = fields[1].partition(":") if len(fields) > 3 else ("", "", "")
            if port == "0035" and address and not address.strip("0") and fields[3] == listening:
                taken.append(protocol)
                break
    if not taken:
        return []
    return [
        Finding(
            "localdns-port",
            REJECT,
            f"port 53 of every address is taken ({', '.join(taken)}), LocalDNS's among them",
            "find the program with: ss -lntup 'sport = :53'; let it listen on its own addresses only (dnsmasq: "
            "bind-interfaces)",
        )
    ]


# -- the interface --------------------------------------------------------------------------------------


def _prefix(address: str) -> str:
    return f"{address}/{128 if ':' in address else 32}"


def _add_interface(host: Host) -> None:
    try:
        host.run(["ip", "link", "add", "dev", INTERFACE, "type", "dummy"], timeout=_TIMEOUT)
    except CommandError as error:
        raise StratumError(
            "localdns-interface",
            f"{INTERFACE}: the interface of LocalDNS cannot be made: {error.message}",
            hint="the kernel needs its module for dummy interfaces: modprobe dummy",
        ) from None


def _set_address(host: Host, address: str) -> None:
    # An address of an earlier configuration must not stay: nobody would answer there.
    host.run(["ip", "address", "flush", "dev", INTERFACE], timeout=_TIMEOUT)
    host.run(["ip", "link", "set", "dev", INTERFACE, "up"], timeout=_TIMEOUT)
    at_once = ["nodad"] if ":" in address else []  # nobody else can have it
    host.run(["ip", "address", "add", _prefix(address), "dev", INTERFACE, *at_once], timeout=_TIMEOUT)


def _has_address(host: Host, address: str) -> bool:
    if not interface_exists(host, INTERFACE):
        return False
    done = host.run(["ip", "-o", "address", "show", "dev", INTERFACE, "up"], timeout=_TIMEOUT, check=False)
    given = [line.split()[3] for line in done.text.splitlines() if len(line.split()) > 3 and "scope link" not in line]
    return done.status == 0 and given == [_prefix(address)]


# -- the rules ------------------------------------------------------------------------------------------


def render_nft(address: str) -> bytes:
    """The ruleset for ``nft -f``: the table is replaced at once, whatever it held."""
    family = "ip6" if ":" in address else "ip"
    to = "; ".join(f"{family} daddr {address} {protocol} dport 53 notrack" for protocol in ("udp", "tcp"))
    back = "; ".join(f"{family} saddr {address} {protocol} sport 53 notrack" for protocol in ("udp", "tcp"))
    hook = "type filter hook {} priority -300; policy accept; {};"
    chains = (
        f"chain prerouting {{ {hook.format('prerouting', to)} }}\n"
        f"chain output {{ {hook.format('output', f'{to}; {back}')} }}"
    )
    table = f"{family} {TABLE}"
    return f"table {table} {{}}\ndelete table {table}\ntable {table} {{\n{chains}\n}}\n".encode()


def _nft_text(host: Host, family: str) -> str:
    """Our table as nft lists it; empty when there is none."""
    if host.which("nft") is None:
        return ""
    done = host.run(["nft", "list", "table", family, TABLE], timeout=_TIMEOUT, check=False)
    return done.text if done.status == 0 else ""


def _iptables_tool(address: str) -> str:
    return "ip6tables" if ":" in address else "iptables"


def _iptables(host: Host, tool: str, table: str, *arguments: str, check: bool = True) -> int:
    command = [tool, "--wait", "10", "--table", table, *arguments]
    return host.run(command, timeout=_TIMEOUT, check=check).status


def _matches(chain: str, address: str) -> list[tuple[str, ...]]:
    protocols = ("udp", "tcp")
    answers = [("--source", address, "--protocol", name, "--sport", "53") for name in protocols]
    if chain == ANSWERS:
        return list(answers)
    return [
        *(("--destination", address, "--protocol", name, "--dport", "53") for name in protocols),
        *(("--in-interface", "lo", *answer) for answer in answers),  # to programs of the host itself
    ]


def _apply_iptables(host: Host, address: str) -> None:
    tool = _iptables_tool(address)
    for table, chain, jumpers, target in _CHAINS:
        if _iptables(host, tool, table, "--new-chain", chain, check=False) != 0:
            _iptables(host, tool, table, "--flush", chain)
        for match in _matches(chain, address):
            _iptables(host, tool, table, "--append", chain, *match, "--jump", *target)
        for jumper in jumpers:
            if _iptables(host, tool, table, "--check", jumper, "--jump", chain, check=False) != 0:
                _iptables(host, tool, table, "--insert", jumper, "--jump", chain)


def _iptables_in_force(host: Host, address: str) -> bool:
    tool = _iptables_tool(address)
    return all(
        all(
            _iptables(host, tool, table, "--check", chain, *match, "--jump", *target, check=False) == 0
            for match in _matches(chain, address)
        )
        and all(_iptables(host, tool, table, "--check", name, "--jump", chain, check=False) == 0 for name in jumpers)
        for table, chain, jumpers, target in _CHAINS
    )


def _apply_nft(host: Host, address: str) -> None:
    def feed(pipe: BinaryIO) -> None:
        pipe.write(render_nft(address))

    host.run(["nft", "--file", "-"], timeout=_TIMEOUT, feed=feed)


def _plan_rules(host: Host, address: str) -> list[Action]:
    if host.which("nft"):
        text = _nft_text(host, "ip6" if ":" in address else "ip")
        if text.count(f"addr {address} ") == text.count("notrack") == _RULES:
            return []
        what = f"port 53 of {address}, in the table {TABLE} of nft"
        return [Call("keep out of connection tracking", what, functools.partial(_apply_nft, host, address))]
    tool = _iptables_tool(address)
    if host.which(tool) is None or _iptables_in_force(host, address):
        return []
    what = f"port 53 of {address}, in chains {CHAIN} of {tool}"
    return [Call("keep out of connection tracking", what, functools.partial(_apply_iptables, host, address))]


# -- both -----------------------------------------------------------------------------------------------


def plan_network(host: Host, address: str) -> list[Action]:
    """What makes interface, address and rules on this running machine; nothing when all is there.

    Without nft and iptables there are no rules, and LocalDNS works all the same. Raises :class:`StratumError`.
    """
    address = check_address(address)
    actions: list[Action] = []
    if not interface_exists(host, INTERFACE):
        actions.append(Call("make interface", INTERFACE, functools.partial(_add_interface, host)))
    if not _has_address(host, address):
        what = f"{_prefix(address)} on {INTERFACE}"
        actions.append(Call("set address", what, functools.partial(_set_address, host, address)))
    return [*actions, *_plan_rules(host, address)]


def _remove_chains(host: Host, tool: str) -> None:
    for table, chain, jumpers, _ in _CHAINS:
        for jumper in jumpers:
            while _iptables(host, tool, table, "--check", jumper, "--jump", chain, check=False) == 0:
                _iptables(host, tool, table, "--delete", jumper, "--jump", chain)
        if _iptables(host, tool, table, "--list-rules", chain, check=False) == 0:
            _iptables(host, tool, table, "--flush", chain)
            _iptables(host, tool, table, "--delete-chain", chain)


def plan_network_removal(host: Host) -> list[Action]:
    """What takes interface and rules away, of any address; what others made is not looked at."""
    actions: list[Action] = []
    for family in ("ip", "ip6"):
        if _nft_text(host, family):
            delete = ["nft", "delete", "table", family, TABLE]
            run = functools.partial(host.run, delete, timeout=_TIMEOUT)
            actions.append(Call("remove firewall table", f"{family} {TABLE}", run))
    for tool in ("iptables", "ip6tables"):
        if host.which(tool) is None:
            continue
        if any(_iptables(host, tool, table, "--list-rules", chain, check=False) == 0 for table, chain, _, _ in _CHAINS):
            remove = functools.partial(_remove_chains, host, tool)
            actions.append(Call("remove firewall chains", f"{CHAIN} of {tool}", remove))
    if interface_exists(host, INTERFACE):
        delete = ["ip", "link", "delete", "dev", INTERFACE, "type", "dummy"]
        actions.append(Call("remove interface", INTERFACE, functools.partial(host.run, delete, timeout=_TIMEOUT)))
    return actions
