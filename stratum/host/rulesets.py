"""Whether anybody changed the firewall's rules: the generation of the kernel's nf_tables.

Each change of a ruleset, by nft, firewalld or the iptables that is built on nf_tables, gives it a new number. To read
the number takes one message and starts no program. The older iptables has nothing like it.
"""

from __future__ import annotations

import struct
from typing import Optional

from stratum.host.rtnetlink import ERROR, HEADER, attributes, messages
from stratum.system import Host

__all__ = ["read_generation"]

# Numbers of linux/netlink.h, linux/netfilter/nfnetlink.h and nf_tables.h.
_NETLINK_NETFILTER = 12
_NEWGEN, _GETGEN = 10 << 8 | 15, 10 << 8 | 16
_GEN_ID = 1
_REQUEST = 1
_FAMILY = struct.Struct("=BBH")  # family, version, resource


def _is_last(datagram: bytes) -> bool:
    return any(kind in (_NEWGEN, ERROR) for kind, _, _ in messages(datagram))


def _is_used(host: Host) -> bool:
    """Whether a question loads no module: it is loaded, the kernel loads none, or our own rules are made with nft."""
    return host.is_dir("/sys/module/nf_tables") or not host.exists("/proc/modules") or host.which("nft") is not None


def read_generation(host: Host) -> Optional[int]:
    """The number of the ruleset in force; None where the kernel has no nf_tables, or does not say."""
    if not _is_used(host):
        return None
    size = HEADER.size + _FAMILY.size
    request = HEADER.pack(size, _GETGEN, _REQUEST, 1, 0) + _FAMILY.pack(0, 0, 0)
    try:
        datagrams = host.ask_netlink(_NETLINK_NETFILTER, request, _is_last)
    except OSError:
        return None
    for kind, _, body in (message for datagram in datagrams for message in messages(datagram)):
        if kind == _NEWGEN:
            found = dict(attributes(body[_FAMILY.size :])).get(_GEN_ID)
            if found is not None and len(found) == 4:
                return int.from_bytes(found, "big")
    return None
