"""The container network: a bridge of our own, plugin links, and taking attachments back.

Formats: CNI specification 1.0.0 (network configuration lists, execution protocol) and the result cache that
libcni keeps under ``/var/lib/cni/results``, which ``containerd`` and ``ctr`` both write.
"""

from __future__ import annotations

import base64
import functools
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Optional

from stratum.errors import CommandError, StratumError
from stratum.steps import Action, Call, PlaceLink, Work, plan_directory, plan_link, withdraw
from stratum.system import Host, HostPath

__all__ = [
    "BRIDGE",
    "CONFIG_PATH",
    "HOST_BIN_DIR",
    "NETWORK",
    "RESULTS",
    "choose_subnet",
    "is_ours",
    "others_use_cni",
    "plan_plugin_links",
    "read_attachments",
    "release_attachment",
    "render_network",
    "subnet_in_force",
]

NETWORK = "stratum"
BRIDGE = "stratum0"
CONFIG_PATH = HostPath("/etc/cni/net.d/10-stratum.conflist")
# It stays CNI's default: cluster add-ons install their plugins there from a hostPath mount (seed 000).
HOST_BIN_DIR = HostPath("/opt/cni/bin")
RESULTS = HostPath("/var/lib/cni/results")
# Addresses are given out under /run: a reboot ends every container, so it must free every address.
ADDRESSES = HostPath("/run/stratum/cni")

_CANDIDATES = ("10.215.0.0/16", "10.216.0.0/16", "172.27.0.0/16", "192.168.215.0/24")
_PLUGIN_TIMEOUT = 30.0


def render_network(subnet: str) -> bytes:
    """The bridge network for containers that no cluster network serves.

    ``ipMasq`` is off: the rules that it makes for each container outlive the container, see host/masquerade.py.
    """
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(ADDRESSES),
            "ranges": [[{"subnet": subnet}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    value = {"cniVersion": "1.0.0", "name": NETWORK, "plugins": [bridge, portmap]}
    return json.dumps(value, indent=2).encode() + b"\n"


def _routed(host: Host) -> list[ipaddress.IPv4Network]:
    """The IPv4 networks that the host has routes to: /proc/net/route, proc(5)."""
    try:
        lines = host.read_text("/proc/net/route").splitlines()[1:]
    except OSError:
        return []
    found = []
    for line in lines:
        fields = line.split()
        if len(fields) < 8 or fields[0] == BRIDGE:
            continue
        # The numbers are hexadecimal in the machine's byte order, which is little on both that we support.
        address = int.from_bytes(bytes.fromhex(fields[1]), "little")
        mask = int.from_bytes(bytes.fromhex(fields[7]), "little")
        # Not the default route, nor its two halves, with which a VPN goes before it.
        if bin(mask).count("1") > 1:
            found.append(ipaddress.IPv4Network((address, bin(mask).count("1"))))
    return found


def subnet_in_force(host: Host) -> Optional[str]:
    """The subnet of the bridge network that is configured, None when there is none or it is not ours to read."""
    try:
        known = json.loads(host.read_bytes(CONFIG_PATH))["plugins"][0]["ipam"]["ranges"][0][0]["subnet"]
        return str(ipaddress.IPv4Network(known))
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None


def choose_subnet(host: Host, wanted: str = "", avoid: Sequence[str] = ()) -> str:
    """The subnet for the bridge: ``wanted``, else the one in force, else the first that overlaps nothing.

    ``avoid`` are networks of the cluster. Raises :class:`StratumError` when every candidate overlaps, when ``wanted``
    overlaps a route of the host, and when it is another one than that which containers are attached to.
    """
    known = subnet_in_force(host)
    if wanted and wanted != known:
        _check_wanted(host, wanted, known)
        return wanted
    if known is not None:
        return known
    taken = [*_routed(host), *_networks(avoid)]
    for candidate in _CANDIDATES:
        if not any(ipaddress.IPv4Network(candidate).overlaps(network) for network in taken):
            return candidate
    raise StratumError(
        "no-subnet",
        f"each of {', '.join(_CANDIDATES)} overlaps a route of this host or a network of the cluster",
        hint="set network.bridgeSubnet in the configuration; `ip route` shows the routes of this host",
    )


def _networks(names: Sequence[str]) -> list[ipaddress.IPv4Network]:
    parsed = (ipaddress.ip_network(name, strict=False) for name in names)
    return [network for network in parsed if isinstance(network, ipaddress.IPv4Network)]


def _check_wanted(host: Host, wanted: str, known: Optional[str]) -> None:
    """Raise :class:`StratumError` where the bridge cannot get the subnet, or not now."""
    try:
        subnet = ipaddress.IPv4Network(wanted)
    except ValueError as error:
        raise StratumError(
            "subnet-invalid",
            f"network.bridgeSubnet: {wanted}: {error}",
            hint="give a network of IPv4, for example 10.215.0.0/16",
        ) from None
    attached = sorted({attachment.container for attachment in read_attachments(host)})
    if known is not None and attached:
        raise StratumError(
            "subnet-in-use",
            f"network.bridgeSubnet: {wanted}, and containers have addresses of {known}: {', '.join(attached)}",
            hint=f"stop and delete these containers first, or set network.bridgeSubnet to {known}",
        )
    for network in _routed(host):
        if network.overlaps(subnet):
            raise StratumError(
                "subnet-overlaps",
                f"network.bridgeSubnet: {wanted} overlaps {network}, which this host has a route to",
                hint="choose another one; `ip route` shows the routes of this host",
            )


def plan_plugin_links(work: Work, plugins: Sequence[str], active: HostPath) -> list[Action]:
    """Links in the host's plugin directory, each to the plugin of its name below the ``current`` link.

    A flip then switches the plugins too; links of ours to plugins that are no more go. A file that is no link, or a
    link that leads out of our versions, belongs to somebody else and is left alone (seed 000, LinkCNIPlugins).
    """
    actions: list[Action] = []
    for name in plugins:
        path, target = HOST_BIN_DIR / name, str(active / name)
        if not work.host.lexists(path):
            actions += plan_link(work, path, target)
        elif _leads_into(work.host, path, active.parents[2]) and not (
            work.host.readlink(path) == target and work.receipt.get(path)
        ):
            actions.append(PlaceLink(path, target))
    names = work.host.listdir(HOST_BIN_DIR) if work.host.is_dir(HOST_BIN_DIR) else []
    stale = [HOST_BIN_DIR / name for name in names if name not in plugins]
    actions += [
        Call("remove", str(path), functools.partial(withdraw, work, path))
        for path in stale
        if is_ours(work.host, path, active)
    ]
    made = {action.subject for action in actions}
    parents = plan_directory(work.host, HOST_BIN_DIR) if plugins else []
    directories = [item for item in parents if item.subject not in made]
    return directories + _without_repeats(actions)


def _without_repeats(actions: Sequence[Action]) -> list[Action]:
    return list(dict.fromkeys(actions))


def _leads_into(host: Host, path: HostPath, base: HostPath) -> bool:
    return host.is_link(path) and base in HostPath(host.readlink(path)).parents


def is_ours(host: Host, path: HostPath, active: HostPath) -> bool:
    """Whether ``path`` is a link to a plugin of the active version, as :func:`plan_plugin_links` makes it."""
    return host.is_link(path) and HostPath(host.readlink(path)).parent == active


@dataclass(frozen=True)
class Attachment:
    """A container's place in our network, from libcni's result cache."""

    path: HostPath
    container: str
    interface: str
    configuration: dict[str, Any]
    result: Optional[dict[str, Any]]
    arguments: str
    capabilities: dict[str, Any]


def _parse_attachment(path: HostPath, value: dict[str, Any]) -> Attachment:
    """Read a file of the cache; raises ValueError, KeyError, TypeError or AttributeError for any other file."""
    configuration = json.loads(base64.b64decode(value["config"]))
    capabilities = value.get("capabilityArgs") or {}
    if not isinstance(capabilities, dict):
        raise ValueError("capabilityArgs")
    for plugin in configuration.get("plugins", []):
        plugin.get("capabilities", {}).get("x")
        if not isinstance(plugin["type"], str):
            raise ValueError("type")
    arguments = ";".join(f"{key}={item}" for key, item in value.get("cniArgs") or [])
    return Attachment(
        path,
        str(value["containerId"]),
        str(value["ifName"]),
        configuration,
        value.get("result"),
        arguments,
        capabilities,
    )


def read_attachments(host: Host) -> list[Attachment]:
    """The attachments to our network that libcni remembers; files that are not its own are passed over."""
    if not host.is_dir(RESULTS):
        return []
    found = []
    for name in host.listdir(RESULTS):
        if not name.startswith(f"{NETWORK}-"):
            continue
        try:
            value = json.loads(host.read_bytes(RESULTS / name))
            if value.get("networkName") == NETWORK:
                found.append(_parse_attachment(RESULTS / name, value))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def others_use_cni(work: Work) -> bool:
    """Whether this host has a CNI network that is not ours, or something that is attached to one. Raises OSError."""
    host, known = work.host, {CONFIG_PATH, *(item.path for item in read_attachments(work.host))}
    places = [place for place in (CONFIG_PATH.parent, RESULTS) if host.is_dir(place)]
    return any(place / name not in known for place in places for name in host.listdir(place))


def _write(data: bytes, pipe: BinaryIO) -> None:
    pipe.write(data)


def release_attachment(host: Host, attachment: Attachment, plugin_dir: HostPath) -> None:
    """Run DEL of each plugin of the network, the last first, then forget the attachment.

    The plugin that made a rule or an address takes it away (CNI specification, section 2 and 3). The
    network namespace is gone, as it is after a crash, so CNI_NETNS is empty. Raises CommandError.
    """
    environment = {
        "CNI_COMMAND": "DEL",
        "CNI_CONTAINERID": attachment.container,
        "CNI_IFNAME": attachment.interface,
        "CNI_NETNS": "",
        "CNI_PATH": str(plugin_dir),
        "CNI_ARGS": attachment.arguments,
    }
    shared = {key: attachment.configuration[key] for key in ("name", "cniVersion") if key in attachment.configuration}
    for plugin in reversed(attachment.configuration.get("plugins", [])):
        request = {**plugin, **shared}
        if attachment.result:
            request["prevResult"] = attachment.result
        wanted = plugin.get("capabilities", {})
        request["runtimeConfig"] = {key: value for key, value in attachment.capabilities.items() if wanted.get(key)}
        data = json.dumps(request).encode()
        program = str(plugin_dir / HostPath(plugin["type"]).name)
        try:
            host.run([program], timeout=_PLUGIN_TIMEOUT, env=environment, feed=functools.partial(_write, data))
        except CommandError as error:
            # A plugin that is gone or damaged can take nothing back. A node that is broken must still be removable.
            if error.reference not in ("command-missing", "command-not-started"):
                raise
    try:
        host.unlink(attachment.path)
    except FileNotFoundError:
        pass
