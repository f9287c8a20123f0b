"""Which DNS servers the host asks itself, read past a stub resolver.

``/etc/resolv.conf`` often names only a stub on this host: systemd-resolved (127.0.0.53), dnsmasq, unbound (127.0.0.1).
A name server that forwards to such an address forwards to whoever answers there, in the worst case to itself (coredns
#2087, k0s #390). So no address of the loopback and none of ours is ever given: without another one there is none.
Format: resolv.conf(5), and what Go's resolver, which CoreDNS and the kubelet use, makes of it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional, Union

from stratum.errors import StratumError
from stratum.system import Host, HostPath

__all__ = [
    "Resolvers",
    "check_server",
    "find_upstreams",
    "is_local",
    "kubelet_resolv_conf",
    "parse_resolv_conf",
    "read_upstreams",
]

RESOLV_CONF = HostPath("/etc/resolv.conf")
# Where the programs behind a stub say what they ask: systemd-resolved.service(8), NetworkManager.conf(5) (rc-manager),
# Debian's dnsmasq and resolvconf, connman.
RESOLVED = HostPath("/run/systemd/resolve/resolv.conf")
_BEHIND = (
    HostPath("/run/NetworkManager/no-stub-resolv.conf"),
    HostPath("/run/dnsmasq/resolv.conf"),
    HostPath("/run/resolvconf/resolv.conf"),
    HostPath("/run/connman/resolv.conf"),
)
_RESOLVED_STUBS = ("127.0.0.53", "127.0.0.54")
SERVERS_MAX = 15  # CoreDNS, plugin forward, refuses more
_SIZE_MAX = 1 << 16

Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]


@dataclass(frozen=True)
class Resolvers:
    """The servers that the host asks, in its order, with its search list, and the file that says so."""

    servers: tuple[str, ...]
    search: tuple[str, ...] = ()
    ndots: Optional[int] = None
    source: HostPath = RESOLV_CONF


def _address(text: str) -> Optional[Address]:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _plain(address: Address) -> Address:
    """Without a zone, and an IPv4-mapped one as the IPv4 that it is."""
    if isinstance(address, ipaddress.IPv6Address):
        return address.ipv4_mapped or ipaddress.IPv6Address(int(address))
    return address


def is_local(server: str, own: Sequence[str] = ()) -> bool:
    """Whether ``server`` is this host: of the loopback, unspecified, one of ``own``; or no server, or no address."""
    address = _address(server)
    if address is None:
        return True
    plain = _plain(address)
    mine = {_plain(one) for one in map(_address, own) if one is not None}
    return plain.is_loopback or plain.is_unspecified or plain.is_multicast or plain in mine


def parse_resolv_conf(text: str, source: HostPath = RESOLV_CONF) -> Resolvers:
    """What a resolv.conf says, every server that is an address among it. What it does not know it passes over."""
    servers: list[str] = []
    search: tuple[str, ...] = ()
    ndots = None
    for line in text.replace("\r", "\n").split("\n"):
        words = line.split("#")[0].split(";")[0].split()
        if len(words) < 2:
            continue
        keyword, values = words[0], words[1:]
        if keyword == "nameserver" and _address(values[0]) is not None and values[0] not in servers:
            servers.append(values[0])
        elif keyword == "search":
            search = tuple(dict.fromkeys(values))  # the last line counts
        elif keyword == "domain":
            search = (values[0],)
        elif keyword == "options":
            for value in values:
                name, _, number = value.partition(":")
                # glibc takes at most 15.
                if name == "ndots" and number.isascii() and number.isdigit():
                    ndots = min(int(number[:4]), 15)
    return Resolvers(tuple(servers), tuple(name for name in search if name != "."), ndots, source)


def _read(host: Host, path: HostPath) -> Optional[Resolvers]:
    """What a file says; None for one that is missing, a dangling link, or cannot be read."""
    try:
        with host.open(path) as file:
            text = file.read(_SIZE_MAX).decode("utf-8", "replace")
    except (OSError, StratumError):
        return None
    return parse_resolv_conf(text, path)


def _candidates(first: Optional[Resolvers]) -> list[HostPath]:
    """The files to look into, likeliest first.

    systemd-resolved leaves its file behind when it stops, so where the stub is not its own that file comes last.
    """
    stubs = first.servers if first else ()
    if any(server in _RESOLVED_STUBS for server in stubs):
        return [RESOLV_CONF, RESOLVED, *_BEHIND]
    return [RESOLV_CONF, *_BEHIND, RESOLVED]


def find_upstreams(host: Host, own: Sequence[str] = ()) -> Optional[Resolvers]:
    """The host's real servers, or None when no file names one. ``own`` are LocalDNS's addresses, never among them.

    Each file is read whole for its search list; a stub in it is left out.
    """
    first = _read(host, RESOLV_CONF)
    for path in _candidates(first):
        found = first if path == RESOLV_CONF else _read(host, path)
        if found is None:
            continue
        servers = tuple(server for server in found.servers if not is_local(server, own))[:SERVERS_MAX]
        if servers:
            return Resolvers(servers, found.search, found.ndots, found.source)
    return None


def read_upstreams(host: Host, own: Sequence[str] = ()) -> Resolvers:
    """Like :func:`find_upstreams`; raises :class:`StratumError` when there is none."""
    found = find_upstreams(host, own)
    if found is None:
        raise StratumError(
            "no-upstream-dns",
            f"{RESOLV_CONF}: names no DNS server but stubs on this host, and no other file does",
            hint="set spec.localDNS.upstream to the servers to ask, for example [192.0.2.53]",
        )
    return found


def kubelet_resolv_conf(host: Host, own: Sequence[str] = ()) -> Optional[HostPath]:
    """The file for the kubelet's ``resolvConf``: the one with real servers, for pods cannot reach a stub.

    Without any it is ``/etc/resolv.conf``, and None where that does not exist: the kubelet starts no pod then, unless
    it is told that there is no file.
    """
    found = find_upstreams(host, own)
    if found is not None:
        return found.source
    return RESOLV_CONF if _read(host, RESOLV_CONF) is not None else None


def check_server(text: str, own: Sequence[str] = ()) -> str:
    """A server of ``spec.localDNS.upstream``: an address, or ``address:port`` with an IPv6 one in brackets.

    Returns it as CoreDNS takes it. Raises :class:`StratumError` for what is none, and for one that would be a loop.
    """
    address, port = text, ""
    bracketed = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?", text)
    if bracketed:
        address, port = bracketed[1], bracketed[2] or ""
    elif text.count(":") == 1:
        address, _, port = text.partition(":")
        port = port or "none"
    if _address(address) is None or (port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536)):
        raise StratumError(
            "bad-upstream-dns",
            f"spec.localDNS.upstream: {text!r} is neither an address nor address:port",
            hint="write 192.0.2.53, 192.0.2.53:5353, 2001:db8::53 or [2001:db8::53]:5353",
        )
    # A server on another port of the loopback is another server; on port 53 of any of it, it may be the host's stub.
    if is_local(address, own) and (port in ("", "53") or not _is_loopback(address)):
        raise StratumError(
            "upstream-dns-loop",
            f"spec.localDNS.upstream: {text} is this host itself, so that questions would go round in circles",
            hint="name the servers that the stub on this host asks",
        )
    if not port:
        return address
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _is_loopback(address: str) -> bool:
    parsed = _address(address)
    return parsed is not None and _plain(parsed).is_loopback
