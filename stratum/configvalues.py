"""Values of the configuration: addresses, networks, URLs, paths. Each check says why a text is none, or nothing."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Optional, Union
from urllib.parse import SplitResult, urlsplit

from stratum.kubenames import why_no_domain

__all__ = [
    "IPAddress",
    "IPNetwork",
    "families",
    "has_password",
    "overlaps",
    "parse_address",
    "parse_network",
    "why_no_address",
    "why_no_network",
    "why_no_path",
    "why_no_registry",
    "why_no_server",
    "why_no_url",
]

IPAddress = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]
IPNetwork = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]

_PORT = re.compile(r"[1-9][0-9]{0,4}\Z")


def parse_address(text: str) -> Optional[IPAddress]:
    """The address; None for what is none, or has a zone or leading zeros."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    # The oldest Python that we run on takes 010.0.0.1 for 10.0.0.1; other programs take it for 8.0.0.1.
    return None if "%" in text or (address.version == 4 and str(address) != text) else address


def why_no_address(text: str) -> str:
    """Why ``text`` is no IP address; empty when it is one."""
    return "" if parse_address(text) else f"{text!r} is not an IP address, such as 192.0.2.10 or 2001:db8::10"


def parse_network(text: str) -> Optional[IPNetwork]:
    """The network in CIDR form with all host bits zero; None for what is none."""
    address, slash, length = text.partition("/")
    if not slash or not length.isdigit() or not parse_address(address):
        return None
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


def why_no_network(text: str) -> str:
    """Why ``text`` is no network; empty when it is one."""
    if parse_network(text):
        return ""
    try:
        meant = ipaddress.ip_network(text, strict=False)
    except ValueError:
        return f"{text!r} is not a network, such as 10.244.0.0/16"
    return f"{text!r} has bits set behind its prefix; the network is {meant}"


def overlaps(one: IPNetwork, other: IPNetwork) -> bool:
    """Whether two networks have addresses in common."""
    return one.version == other.version and one.overlaps(other)


def families(cidrs: Sequence[str]) -> tuple[int, ...]:
    """The address families of networks, IPv4 first; IPv4 without any."""
    found = {network.version for network in map(parse_network, cidrs) if network}
    return tuple(sorted(found)) or (4,)


def why_no_path(text: str) -> str:
    """Why ``text`` is no absolute path of a file; empty when it is one."""
    if not text.startswith("/") or text.endswith("/"):
        return f"{text!r} must be an absolute path of a file"
    return f"{text!r} must not have . or .. in it" if {".", ".."} & set(text.split("/")) else ""


# -- URLs -------------------------------------------------------------------------------------------------


def _split(text: str) -> Optional[SplitResult]:
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises for what is no port
    except ValueError:
        return None
    return parts if parts.hostname and text.isascii() and not re.search(r"\s", text) else None


def why_no_url(text: str, schemes: Sequence[str], *, password: bool = False) -> str:
    """Why ``text`` is no URL of one of ``schemes``; empty when it is one. It may have a password only with that word.

    The text is not repeated: it may have one.
    """
    parts = _split(text)
    if parts is None or parts.scheme not in schemes:
        return f"must be a URL that starts with {' or '.join(f'{scheme}://' for scheme in schemes)}"
    if "@" in parts.netloc and not password:
        return "must have no user name or password in it"
    if parts.query or parts.fragment or text.endswith(("?", "#")):
        return "must have no ? and no # in it"
    if parts.port == 0 or parts.netloc.endswith(":"):
        return "has no port that can be used behind its :"
    return _why_no_host(parts.hostname or "")


def why_no_server(text: str) -> str:
    """Why ``text`` is no address of an API server; empty when it is one."""
    return why_no_url(text, ("https",))


def has_password(text: str) -> bool:
    """Whether a URL has a user name or password in it."""
    parts = _split(text)
    return parts is None or "@" in parts.netloc


def _why_no_host(name: str) -> str:
    if parse_address(name) or not why_no_domain(name.rstrip(".").lower()):
        return ""
    return f"{name!r} is no host name and no address"


def why_no_registry(name: str) -> str:
    """Why ``name`` is no registry's; empty when it is one: a host, with a port if need be, or ``_default``."""
    if name == "_default":
        return ""
    match = re.match(r"(\[[0-9a-fA-F:.]+\]|[^:/\[\]]+)(?::([0-9]+))?\Z", name)
    host = match.group(1).strip("[]") if match else ""
    port = match.group(2) if match else None
    if not match or (port is not None and not (_PORT.match(port) and int(port) < 65536)):
        return f"{name!r} is no registry, such as docker.io or registry.example.com:5000"
    return _why_no_host(host)
