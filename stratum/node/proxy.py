"""The way out through a proxy for containerd and the kubelet, as a file that only root can read.

A proxy's address may hold a password, and systemd shows everybody what stands in a unit.
"""

from __future__ import annotations

import functools
from typing import Optional

from stratum.node.settings import Settings
from stratum.node.units import PROXY_VARIABLES
from stratum.steps import Action, Call, Work, plan_file, withdraw
from stratum.system import HostPath

__all__ = ["PROXY_FILE", "no_proxy", "plan_proxy", "proxy_file", "render_proxy"]

PROXY_FILE = HostPath("/etc/stratum/proxy.env")
_ALWAYS = ("localhost", "127.0.0.1", "127.0.0.0/8", "::1", ".svc")


def proxy_file(settings: Settings) -> Optional[HostPath]:
    """The file for :class:`stratum.node.units.UnitSpec`; None without a proxy."""
    return PROXY_FILE if settings.spec.proxy.http or settings.spec.proxy.https else None


def no_proxy(settings: Settings) -> str:
    """What never goes through the proxy: the node itself, its cluster's networks and names, then the user's own.

    The form is that of golang.org/x/net/http/httpproxy: addresses, networks, and names that begin with a dot.
    """
    own = [*_ALWAYS, *settings.node_ip.split(","), *settings.cluster_cidrs, f".{settings.spec.cluster.domain}"]
    return ",".join(dict.fromkeys(word for word in (*own, *settings.spec.proxy.no_proxy) if word))


def render_proxy(settings: Settings) -> bytes:
    """The file's content, systemd.exec(5) "EnvironmentFile=": each variable in both cases, so that no other wins."""
    proxy = settings.spec.proxy
    lines = ["# Written by Stratum."]
    for name, value in zip(PROXY_VARIABLES, (proxy.http, proxy.https, no_proxy(settings))):
        lines += [f"{word}={_quoted(value)}" for word in (name, name.lower())]
    return "\n".join(lines).encode() + b"\n"


def _quoted(value: str) -> str:
    escaped = value
    for char in '\\"`$':
        escaped = escaped.replace(char, f"\\{char}")
    return f'"{escaped}"'


def plan_proxy(work: Work, settings: Settings) -> list[Action]:
    """Write the file, or take it away when there is no proxy any more."""
    if proxy_file(settings):
        return plan_file(work, PROXY_FILE, render_proxy(settings), 0o600)
    if work.receipt.get(PROXY_FILE) is None:
        return []
    return [Call("remove", str(PROXY_FILE), functools.partial(withdraw, work, PROXY_FILE))]
