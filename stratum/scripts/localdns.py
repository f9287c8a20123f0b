"""LocalDNS, joined from its parts: the host's DNS servers and network, the node's CoreDNS."""

from __future__ import annotations

from collections.abc import Sequence

from stratum import systemd
from stratum.errors import StratumError
from stratum.host import localdnsnet, resolvers
from stratum.host.finding import REJECT, Finding
from stratum.node import localdns
from stratum.node.layout import DEFAULT_BASE
from stratum.node.settings import Settings
from stratum.steps import RELOAD_SYSTEMD, Action, Call, Work, withdraw
from stratum.system import Host

__all__ = [
    "bring_down",
    "bring_up",
    "check_host",
    "drift",
    "plan_configuration",
    "plan_network",
    "plan_teardown",
    "plan_withdrawal",
    "upstreams_of",
]


def upstreams_of(host: Host, settings: Settings) -> tuple[str, ...]:
    """The servers that LocalDNS asks: those of the configuration, else the host's own. Empty when there are none.

    Raises :class:`StratumError` for a server in the configuration that is none, or is this host itself.
    """
    given, own = settings.spec.local_dns.upstream, (settings.spec.local_dns.address,)
    if given:
        return tuple(dict.fromkeys(resolvers.check_server(server, own) for server in given))[: resolvers.SERVERS_MAX]
    found = resolvers.find_upstreams(host, own)
    return found.servers if found else ()


def check_host(host: Host, settings: Settings) -> list[Finding]:
    """What stands in the way of LocalDNS on this host, before anything is written.

    Raises :class:`StratumError` for settings that contradict each other.
    """
    address = localdnsnet.check_address(settings.spec.local_dns.address)
    upstreams = upstreams_of(host, settings) or localdns.recorded_upstreams(host)
    findings = localdnsnet.check_port(host)
    if upstreams:
        localdns.render_corefile(settings.spec, upstreams)
    else:
        found = f"this host names no DNS server that is not on itself, and LocalDNS at {address} needs one to ask"
        hint = "set spec.localDNS.upstream, for example [192.0.2.53]"
        findings.append(Finding("localdns-upstream", REJECT, found, hint))
    for directory in (localdns.COREFILE.parent, DEFAULT_BASE):
        try:
            localdns.check_traversable(host, directory)
        except StratumError as error:
            findings.append(Finding(error.reference, REJECT, error.message, error.hint or ""))
    return findings


def plan_configuration(work: Work, settings: Settings) -> list[Action]:
    """The Corefile and the unit of the network, which systemd is told of."""
    address = localdnsnet.check_address(settings.spec.local_dns.address)
    unit = localdnsnet.plan_network_unit(work, address)
    if unit and work.host.live:
        unit.append(RELOAD_SYSTEMD)
    return [*localdns.plan_localdns(work, settings, upstreams_of(work.host, settings)), *unit]


def plan_network(host: Host, settings: Settings) -> list[Action]:
    """Start the unit of the network, or put right what somebody took away of it; before LocalDNS starts.

    Started by itself, and not only as what LocalDNS requires: then an error quotes the journal that says why.
    """
    address = localdnsnet.check_address(settings.spec.local_dns.address)
    state = systemd.read_units(host, [localdnsnet.UNIT])[localdnsnet.UNIT]
    if state.active != "active":
        return [Call("start", localdnsnet.UNIT, lambda: systemd.start_unit(host, localdnsnet.UNIT))]
    return localdnsnet.plan_network(host, address)


def plan_teardown(work: Work) -> list[Action]:
    """What ends the network of LocalDNS, on a node that has none any more or is taken off. LocalDNS has stopped.

    The unit file is left to the receipt's removal, or to :func:`plan_withdrawal` on a node that goes on.
    """
    host = work.host
    actions: list[Action] = []
    if not host.live:
        return actions
    if host.lexists(localdnsnet.UNIT_PATH):
        state = systemd.read_units(host, [localdnsnet.UNIT])[localdnsnet.UNIT]
        if not state.stopped:
            actions.append(Call("stop", localdnsnet.UNIT, lambda: systemd.stop_unit(host, localdnsnet.UNIT)))
    # Of a unit that failed, or whose file somebody deleted; after the stop nothing is left to do.
    if localdnsnet.plan_network_removal(host):
        what = f"{localdnsnet.INTERFACE} and its rules"
        actions.append(Call("remove", what, lambda: bring_down(host)))
    return actions


def plan_withdrawal(work: Work) -> list[Action]:
    """On a node that goes on without LocalDNS: its network, and its files; and systemd forgets the unit."""
    paths = [path for path in (localdnsnet.UNIT_PATH, localdns.COREFILE) if work.receipt.get(path) is not None]
    files = [Call("remove", str(path), lambda path=path: withdraw(work, path)) for path in paths]  # type: ignore[misc]
    reload = [RELOAD_SYSTEMD] if work.host.live and files else []
    return [*plan_teardown(work), *files, *reload]


def bring_up(host: Host, address: str) -> list[str]:
    """Make the interface and the rules now; what was done, in words. Raises :class:`StratumError`."""
    return _perform(localdnsnet.plan_network(host, address))


def bring_down(host: Host) -> list[str]:
    """Take them away now; what was done, in words. Raises CommandError."""
    return _perform(localdnsnet.plan_network_removal(host))


def _perform(actions: Sequence[Action]) -> list[str]:
    # These change the running kernel only, which no receipt records.
    done = []
    for action in actions:
        assert isinstance(action, Call)
        action.function()
        done.append(action.describe())
    return done


def drift(host: Host, settings: Settings) -> list[str]:
    """What is wrong with the Corefile of a node that has LocalDNS, in words; :func:`plan_configuration` puts it right.

    It reads a few small files.
    """
    differs = localdns.corefile_differs(host, settings, upstreams_of(host, settings))
    return [differs] if differs else []
