"""Address translation for the container network: one rule of ours, in a table or chain of its own.

The CNI bridge plugin can do it for each container, but up to 1.6 it leaves its rules behind when the container's
network namespace is gone before DEL (its ``cmdDel`` returns early). One table that is Stratum's alone leaks
nothing, is made again at each boot and goes with one command. nft is used where it is, else iptables.
"""

from __future__ import annotations

from typing import BinaryIO

from stratum.steps import Action, Call
from stratum.system import Host

__all__ = ["plan_masquerade", "plan_removal"]

TABLE = "stratum"
CHAIN = "STRATUM-POSTROUTING"
_TIMEOUT = 30.0


def _iptables(host: Host, *arguments: str, check: bool = True) -> int:
    return host.run(["iptables", "--wait", "10", "--table", "nat", *arguments], timeout=_TIMEOUT, check=check).status


def _nft_text(host: Host) -> str:
    """Our table as nft lists it; empty when there is none."""
    if host.which("nft") is None:
        return ""
    done = host.run(["nft", "list", "table", "ip", TABLE], timeout=_TIMEOUT, check=False)
    return done.text if done.status == 0 else ""


def _iptables_text(host: Host) -> str:
    """Our chain as iptables lists it; empty when there is none."""
    if host.which("iptables") is None:
        return ""
    command = ["iptables", "--wait", "10", "--table", "nat", "--list-rules", CHAIN]
    done = host.run(command, timeout=_TIMEOUT, check=False)
    return done.text if done.status == 0 else ""


def render_nft(subnet: str) -> bytes:
    """The ruleset for ``nft -f``: the table is replaced at once, whatever it held."""
    rule = f"ip saddr {subnet} ip daddr != {subnet} ip daddr != 224.0.0.0/4 masquerade"
    chain = f"chain postrouting {{ type nat hook postrouting priority 100; policy accept; {rule}; }}"
    return f"table ip {TABLE} {{}}\ndelete table ip {TABLE}\ntable ip {TABLE} {{\n{chain}\n}}\n".encode()


def _apply(host: Host, subnet: str) -> None:
    if host.which("nft"):

        def feed(pipe: BinaryIO) -> None:
            pipe.write(render_nft(subnet))

        host.run(["nft", "--file", "-"], timeout=_TIMEOUT, feed=feed)
        return
    if _iptables(host, "--new-chain", CHAIN, check=False) != 0:
        _iptables(host, "--flush", CHAIN)
    matches = ("--source", subnet, "!", "--destination", subnet)
    _iptables(host, "--append", CHAIN, "--destination", "224.0.0.0/4", "--jump", "RETURN")
    _iptables(host, "--append", CHAIN, *matches, "--jump", "MASQUERADE")
    if _iptables(host, "--check", "POSTROUTING", "--jump", CHAIN, check=False) != 0:
        _iptables(host, "--append", "POSTROUTING", "--jump", CHAIN)


def _in_force(host: Host, subnet: str) -> bool:
    if f" {subnet} " in f"{_nft_text(host)} ":
        return True
    # A chain that nothing jumps to does nothing: a run that was cut off leaves it so.
    jump = ("--check", "POSTROUTING", "--jump", CHAIN)
    return f" {subnet} " in f"{_iptables_text(host)} " and _iptables(host, *jump, check=False) == 0


def plan_masquerade(host: Host, subnet: str) -> list[Action]:
    """What makes containers in ``subnet`` leave the host under its address; nothing when it is so, or cannot be."""
    tool = next((name for name in ("nft", "iptables") if host.which(name)), None)
    if tool is None or _in_force(host, subnet):
        return []
    what = f"{subnet}, in the {'table ' + TABLE if tool == 'nft' else 'chain ' + CHAIN} of {tool}"
    return [Call("masquerade", what, lambda: _apply(host, subnet))]


def _remove_nft(host: Host) -> None:
    host.run(["nft", "delete", "table", "ip", TABLE], timeout=_TIMEOUT)


def _remove_iptables(host: Host) -> None:
    while _iptables(host, "--check", "POSTROUTING", "--jump", CHAIN, check=False) == 0:
        _iptables(host, "--delete", "POSTROUTING", "--jump", CHAIN)
    _iptables(host, "--flush", CHAIN)
    _iptables(host, "--delete-chain", CHAIN)


def plan_removal(host: Host) -> list[Action]:
    """What takes our table or chain away; other rules are not looked at."""
    actions: list[Action] = []
    if _nft_text(host):
        actions.append(Call("remove firewall table", f"ip {TABLE}", lambda: _remove_nft(host)))
    if _iptables_text(host):
        actions.append(Call("remove firewall chain", CHAIN, lambda: _remove_iptables(host)))
    return actions
