"""Addresses that can never name one node to all others (seed 004, UnreachableKind)."""

from __future__ import annotations

import ipaddress

from stratum.host.addresses import IPAddress

__all__ = ["unmapped", "unreachable_kind"]

_BROADCAST = ipaddress.IPv4Address("255.255.255.255")


def unmapped(address: IPAddress) -> IPAddress:
    """The IPv4 address that an IPv4-mapped IPv6 address names; any other as it is."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def unreachable_kind(address: IPAddress) -> str:
    """What ``address`` is when no other host can reach one node by it; empty for any other address.

    The words follow "is": ``127.0.0.1 is a loopback address``. An IPv4-mapped address is judged as the IPv4 that
    it names. A subnet's own broadcast is not known here: a bare address does not carry a prefix length. A zone is
    not judged.
    """
    bare = unmapped(address)
    kinds = (
        (bare.is_unspecified, "the all-zeros address"),
        (bare.is_loopback, "a loopback address"),
        (bare == _BROADCAST, "the broadcast address"),
        (bare.is_multicast, "a multicast address"),
        (bare.is_link_local, "a link-local address"),
    )
    return next((words for holds, words in kinds if holds), "")
