"""What came undone on a host that was made fit for a node. It looks, says what it saw, and changes nothing.

A look reads a few small files. The directories of settings are read when a live value differs, and the firewall is
asked, which starts programs, when its rules have a new generation or firewalld was started anew. containerd is asked
for the bundle's images when its database has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Callable, Optional

from stratum.errors import HostRefusedError
from stratum.host import firewalld, forwarding, hostports, localdnsnet, masquerade, rulesets, swap, sysctls
from stratum.host.addresses import read_network
from stratum.host.finding import Finding
from stratum.host.network import interface_exists
from stratum.host.nodeip import check_pinned
from stratum.host.profiles import find_profile
from stratum.node import cni, containerd
from stratum.node.settings import Settings, read_settings
from stratum.node.stack import Stack
from stratum.node.stackspec import is_kubernetes_node, serves_dns
from stratum.node.versions import VersionRecord, read_record
from stratum.scripts import images, localdns
from stratum.scripts.context import Context
from stratum.scripts.prerequisites import base_sysctls
from stratum.scripts.run import load_work

__all__ = ["Drift", "Trouble"]

_ADDRESS_EVERY = 60.0  # seconds: a host with many containers has many addresses
_FIREWALL_EVERY = 30.0  # at most: where many containers start and end, the rules change all the time
_IMAGES_EVERY = 60.0  # at most: the database changes with each container too
_FIREWALL_BLIND = 300.0  # where the kernel does not say that rules have changed

_AGAIN = "find out who takes it away, then run: stratum up"


@dataclass(frozen=True)
class Trouble:
    """Something that is not as it should be.

    A ``quiet`` one is for STATUS= alone. What is ``ours`` the steps of ``up`` put right.
    """

    what: str
    hint: str = ""
    quiet: bool = False
    ours: bool = False


@dataclass
class Drift:
    """Looks at one host again and again. ``patience`` is around what may take longer than reading a file."""

    context: Context
    stack: Stack
    patience: Callable[[], AbstractContextManager[None]]
    _record: Optional[VersionRecord] = field(default=None, init=False)
    _found: dict[str, tuple[object, list[Trouble]]] = field(default_factory=dict, init=False)
    _stamp: Optional[tuple[str, Optional[int], bool]] = field(default=None, init=False)
    _asked: Optional[float] = field(default=None, init=False)
    _rounds: int = field(default=0, init=False)
    _database: Optional[tuple[int, int]] = field(default=None, init=False)
    _listed: float = field(default=0.0, init=False)
    _wanted: tuple[str, dict[str, str]] = field(default=("", {}), init=False)

    def find(self, *, ask: bool = False) -> list[Trouble]:
        """What is wrong now; with ``ask`` the firewall too is asked anew. Raises StratumError, OSError."""
        record = self._current()
        if record is None:
            return [Trouble(f"{self.stack.layout.current_link}: no version is active", "run: stratum up --bundle FILE")]
        settings = read_settings(self.context.host)
        troubles = list(self._sysctls(settings, record))
        if is_kubernetes_node(record):
            troubles += [*self._swap(), *self._address(settings)]
        bridged, dns = cni.subnet_in_force(self.context.host) is not None, serves_dns(record, settings)
        if bridged:
            troubles += self._forwarding(record)
        if dns:
            # Files alone are read for it: a lease that came names other servers.
            troubles += [Trouble(what, ours=True) for what in localdns.drift(self.context.host, settings)]
        if bridged or dns:
            troubles += self._firewall(ask, bridged, settings.spec.local_dns.address if dns else "")
        return [*troubles, *self._images(record, ask)]

    def _current(self) -> Optional[VersionRecord]:
        version = self.stack.layout.current()
        if self._record is None or self._record.version != version:
            self._record = read_record(self.stack.layout, version) if version else None
        return self._record

    def _unless_same(self, name: str, state: object, explain: Callable[[], Sequence[Trouble]]) -> list[Trouble]:
        """What ``explain`` found when ``state`` was last another one: it may be expensive."""
        if name not in self._found or self._found[name][0] != state:
            self._found[name] = (state, list(explain()))
        return self._found[name][1]

    # -- images -------------------------------------------------------------------------------------

    def _images(self, record: VersionRecord, ask: bool) -> list[Trouble]:
        """Images of the version that are no more; the first look is the measure, after a bring-up that saw to them."""
        host, known = self.context.host, self._found.get("images", (None, []))[1]
        if not record.images or not host.exists(containerd.DATABASE):
            return []
        info = host.stat(containerd.DATABASE)
        stamp = (info.st_mtime_ns, info.st_size)
        if self._database is None:
            self._database = stamp
        due = host.monotonic() - self._listed >= _IMAGES_EVERY or (ask and known)
        # What is down cannot be asked; the units are looked after elsewhere.
        if stamp == self._database or not due or not host.listens(containerd.ADDRESS):
            return known
        self._database, self._listed = stamp, host.monotonic()
        if self._wanted[0] != record.version:
            self._wanted = (record.version, images.image_digests(host, record))
        with self.patience():
            missing = images.find_missing(self.stack, record, self._wanted[1])
        what = "image {} was removed from containerd, or lost the marks that keep it there"
        again = "find out who removes it; on a full disk the kubelet does"
        self._found["images"] = (None, [Trouble(what.format(name), again, ours=True) for name in missing])
        return self._found["images"][1]

    # -- settings of the kernel ---------------------------------------------------------------------

    def _sysctls(self, settings: Settings, record: VersionRecord) -> list[Trouble]:
        host, profile, base = self.context.host, find_profile(settings.profile), base_sysctls(record)
        differing = sysctls.find_differing(host, (*base, *profile.sysctls))

        def explain() -> list[Trouble]:
            findings = sysctls.check_sysctls(host, profile, base) if differing else []
            return _ours([finding for finding in findings if finding.check == "sysctl"])

        return self._unless_same("sysctls", differing, explain)

    def _swap(self) -> list[Trouble]:
        host = self.context.host
        swaps = swap.read_swaps(host)
        return self._unless_same("swap", swaps, lambda: _ours(swap.check_swap(host) if swaps else ()))

    def _forwarding(self, record: VersionRecord) -> list[Trouble]:
        known = {setting.key for setting in base_sysctls(record)}
        if forwarding.KEY in known or not forwarding.plan_forwarding(self.context.host):
            return []
        what = f"{forwarding.KEY} is 0, so that containers cannot reach out"
        return [Trouble(what, f"find out who changed it, then run: sysctl -w {forwarding.KEY}=1", ours=True)]

    # -- the network --------------------------------------------------------------------------------

    def _address(self, settings: Settings) -> list[Trouble]:
        host = self.context.host

        def explain() -> list[Trouble]:
            try:
                check_pinned(settings.node_ip, read_network(host))
            except HostRefusedError as error:
                return [Trouble(error.message, error.hint or "")]
            return []

        if not settings.node_ip:
            return []
        return self._unless_same("address", (settings.node_ip, host.monotonic() // _ADDRESS_EVERY), explain)

    def _firewall(self, ask: bool, bridged: bool, dns: str) -> list[Trouble]:
        """Rules that are lost: the bridge's; and LocalDNS's with its interface, where ``dns`` is its address."""
        host = self.context.host
        interface = interface_exists(host, localdnsnet.INTERFACE) == bool(dns)
        stamp = (firewalld.firewall_stamp(host), rulesets.read_generation(host), interface)
        since = _FIREWALL_BLIND if self._asked is None else host.monotonic() - self._asked
        if self._stamp is None or stamp != self._stamp:
            # Whoever changed something may not be done with it: firewalld takes seconds to start.
            self._rounds = 2
        elif stamp[1] is None and since >= _FIREWALL_BLIND:
            self._rounds = 1
        self._stamp = stamp
        if ask or (self._rounds and since >= _FIREWALL_EVERY):
            self._rounds = max(self._rounds - 1, 0)
            self._asked = host.monotonic()
            with self.patience():
                found = [*self._rules(), *self._published()] if bridged else []
                self._found["firewall"] = (None, [*found, *self._dns_network(dns)])
        return self._found.get("firewall", (None, []))[1]

    def _rules(self) -> list[Trouble]:
        host, work = self.context.host, load_work(self.context)
        warnings: list[str] = []
        actions = firewalld.plan_trust(work, [cni.BRIDGE], warnings.append)
        actions += masquerade.plan_masquerade(host, cni.subnet_in_force(host) or "")
        lost = [Trouble(f"not in force in the firewall: {action.subject}", _AGAIN, ours=True) for action in actions]
        return [*lost, *(Trouble(warning) for warning in warnings)]

    def _dns_network(self, address: str) -> list[Trouble]:
        lost = localdnsnet.plan_network(self.context.host, address) if address else []
        return [Trouble(f"not in force for LocalDNS: {action.subject}", _AGAIN, ours=True) for action in lost]

    def _published(self) -> list[Trouble]:
        """The plugin made the rules when the container started; nobody but a new start makes them again."""
        host = self.context.host
        names = [item.container for item in cni.read_attachments(host) if item.capabilities.get("portMappings")]
        if not names or hostports.rules_present(host):
            return []
        what = f"published ports are dead, their rules were taken out of the firewall: container {', '.join(names)}"
        return [Trouble(what, "stop, delete and start it again; firewall-cmd --reload takes such rules away")]


def _ours(findings: Sequence[Finding]) -> list[Trouble]:
    return [Trouble(finding.message, finding.hint, ours=True) for finding in findings]
