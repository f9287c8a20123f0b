"""LocalDNS: a CoreDNS on the node that pods ask (seed 000, UnitLocalDNS).

What the cluster's DNS service answers is asked there, everything else of the servers that the host itself uses. The
arrangement is NodeLocal DNSCache's (kubernetes, cluster/addons/dns/nodelocaldns), with plugins of CoreDNS's default
build only. The host's own resolver is not touched: it works when LocalDNS does not.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence

from stratum import systemd
from stratum.config import CONFIG_PATH, WORKER, NodeSpec
from stratum.errors import StratumError
from stratum.node.dnsquery import AAAA, A, encode_query, parse_answer
from stratum.node.settings import Settings
from stratum.node.units import UNIT_LOCALDNS, UNIT_LOCALDNS_NETWORK
from stratum.steps import Action, Work, plan_file
from stratum.system import Host, HostPath, unguessable

__all__ = [
    "COMPONENT",
    "COREFILE",
    "HEALTH_NAME",
    "SUPERVISOR",
    "corefile_differs",
    "plan_localdns",
    "recorded_upstreams",
    "render_corefile",
    "render_supervisor",
    "wait_localdns",
]

COMPONENT = "coredns"  # of a bundle; it places bin/coredns
COREFILE = HostPath("/etc/stratum/localdns/Corefile")
SUPERVISOR = HostPath("libexec/stratum-localdns")  # in a version directory
# Answered by LocalDNS itself. Nobody else has it: the top-level domain is reserved (RFC 2606), so an answer is ours.
HEALTH_NAME = "health-check.stratum.invalid"
# On LocalDNS's own address. A pod of the host's network that listens on a port of every address cannot have one that
# is taken here, so 8080 is left to those. 9253 is NodeLocal DNSCache's.
METRICS_PORT = 9253
HEALTH_PORT = 9254
READY_TIMEOUT = 60.0  # seconds
_ASK_TIMEOUT = 2.0
_POLL = 0.5
_DOMAIN = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*", re.IGNORECASE)
_UPSTREAM = re.compile(r"^    forward \. (?P<servers>[^\n{]+?) \{$", re.MULTILINE)


# -- the configuration ----------------------------------------------------------------------------------


def reverse_zones(cidr: str) -> Iterator[str]:
    """The zones that hold the names of a network's addresses: one, or as many as its length is off a whole label."""
    network = ipaddress.ip_network(cidr, strict=False)
    bits = 8 if network.version == 4 else 4
    length = -(-network.prefixlen // bits) * bits
    left_out = (network.max_prefixlen - length) // bits
    for part in network.subnets(new_prefix=length):
        yield part.network_address.reverse_pointer.split(".", left_out)[-1]


def _cluster_block(spec: NodeSpec) -> str:
    """The zones of the cluster, asked of its DNS service. Over TCP, as NodeLocal DNSCache does: it is there, and its
    connections do not race for entries of conntrack on their way through the service's address."""
    address, domain, servers = spec.local_dns.address, spec.cluster.domain.rstrip("."), spec.cluster.dns
    if not servers:
        raise StratumError(
            "localdns-without-cluster",
            "spec.localDNS: a worker's LocalDNS must know the DNS service of its cluster",
            hint="set spec.cluster.dns, for example [10.96.0.10]; see: kubectl -n kube-system get service kube-dns",
        )
    if address in servers:
        raise StratumError(
            "localdns-loop",
            f"spec.cluster.dns: {address} is LocalDNS's own address, so that questions would go round in circles",
            hint="name the address of the cluster's DNS service there",
        )
    if not _DOMAIN.fullmatch(domain):
        raise StratumError("bad-cluster-domain", f"spec.cluster.domain: {domain!r} is no domain", hint="correct it")
    zones = [domain, *(zone for cidr in spec.network.cluster_cidrs for zone in reverse_zones(cidr))]
    return f"""{" ".join(dict.fromkeys(zones))} {{
    bind {address}
    errors
    cache {{
        success 9984 30
        denial 9984 5
    }}
    loop
    forward . {" ".join(servers)} {{
        force_tcp
        policy sequential
        max_concurrent 1000
    }}
    prometheus {_join(address, METRICS_PORT)}
}}
"""


def _join(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def render_corefile(spec: NodeSpec, upstreams: Sequence[str]) -> bytes:
    """The Corefile. ``upstreams`` are asked in their order: the first knows names that the others may not.

    Without ports, so that the port is an argument of CoreDNS. Raises :class:`StratumError` for a contradiction.
    """
    address = spec.local_dns.address
    kind = "AAAA" if ":" in address else "A"
    cluster = _cluster_block(spec) if spec.role == WORKER else ""
    # An answer that is too old is better than none while the upstreams are away ("verify": only then).
    return f"""# Written by Stratum, from {CONFIG_PATH} and the host's DNS servers; changes are lost.
{HEALTH_NAME} {{
    bind {address}
    errors
    template IN {kind} {{
        answer "{{{{ .Name }}}} 5 IN {kind} {address}"
    }}
}}
{cluster}. {{
    bind {address}
    errors
    health {_join(address, HEALTH_PORT)}
    prometheus {_join(address, METRICS_PORT)}
    reload 10s 5s
    cache {{
        success 9984 30
        denial 9984 5
        serve_stale 1h verify
    }}
    loop
    forward . {" ".join(upstreams)} {{
        policy sequential
        max_concurrent 1000
    }}
}}
""".encode()


def recorded_upstreams(host: Host) -> tuple[str, ...]:
    """The servers that the Corefile on the disk asks; empty without one."""
    try:
        found = _UPSTREAM.findall(host.read_text(COREFILE))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return tuple(found[-1].split()) if found else ()


def plan_localdns(work: Work, settings: Settings, upstreams: Sequence[str]) -> list[Action]:
    """What makes the Corefile that of ``settings``; CoreDNS reads a changed one by itself.

    Without ``upstreams``, as early at boot when no address was given yet, those of the file that is there stay. Raises
    :class:`StratumError` when there are none of either, and when LocalDNS's user cannot get to the file.
    """
    known = tuple(upstreams) or recorded_upstreams(work.host)
    if not known:
        raise StratumError(
            "no-upstream-dns",
            "spec.localDNS: this host names no DNS server that is not on itself, and LocalDNS needs one to ask",
            hint="set spec.localDNS.upstream, for example [192.0.2.53]",
        )
    content = render_corefile(settings.spec, known)
    check_traversable(work.host, COREFILE.parent)
    return plan_file(work, COREFILE, content)


def corefile_differs(host: Host, settings: Settings, upstreams: Sequence[str]) -> str:
    """Why the Corefile on the disk is not that of ``settings``, in words; empty when it is. Reads that file only."""
    known = recorded_upstreams(host)
    wanted = tuple(upstreams) or known
    try:
        if wanted and host.read_bytes(COREFILE) == render_corefile(settings.spec, wanted):
            return ""
    except (FileNotFoundError, NotADirectoryError):
        return f"{COREFILE}: it is gone"
    if known and known != wanted:
        return f"the host's DNS servers are {', '.join(wanted)} now, and LocalDNS asks {', '.join(known)}"
    return f"{COREFILE}: it was changed"


def check_traversable(host: Host, directory: HostPath) -> None:
    """Raise :class:`StratumError` when LocalDNS's user, which is nobody else's, could not get into ``directory``.

    Directories that are missing will be made right. One that exists keeps its mode: it is not ours to change (seed
    000, MkdirTraversable).
    """
    for path in (*reversed(directory.parents), directory):
        if path != HostPath("/") and host.is_dir(path) and not host.stat(path).st_mode & 0o001:
            raise StratumError(
                "localdns-locked-out",
                f"{path}: lets nobody but its owner in, and LocalDNS runs as a user of its own that has to get to "
                f"{directory}",
                hint=f"run: chmod o+x {path}",
            )


# -- the supervisor script ------------------------------------------------------------------------------

_SUPERVISOR = f"""#!/bin/sh
# Written by Stratum. {UNIT_LOCALDNS} runs it: it waits for LocalDNS's address and becomes CoreDNS.
set -u
corefile={COREFILE}
coredns=${{0%/*}}/../bin/coredns
seconds=30

fail() {{
    echo "stratum-localdns: $1" >&2
    exit 1
}}

# The address that the Corefile binds to.
find_address() {{
    address=
    while read -r word value _; do
        if [ "$word" = bind ]; then
            address=$value
            return
        fi
    done <"$corefile"
}}

# Whether an interface has it. The kernel's table, because a small host has no program for it: below the line of an
# address there is one "/32 host LOCAL" for each interface that has it.
has_address() {{
    case $address in
    *:*) return 0 ;;
    esac
    [ -r /proc/net/fib_trie ] || return 0
    seen=no
    while read -r mark name kind _; do
        if [ "$mark" = "|--" ]; then
            seen=no
            [ "$name" != "$address" ] || seen=yes
        elif [ "$seen $mark $name $kind" = "yes /32 host LOCAL" ]; then
            return 0
        fi
    done </proc/net/fib_trie
    return 1
}}

[ -r "$corefile" ] || fail "$corefile: there is no such file, or this user cannot read it; run: stratum up"
[ -x "$coredns" ] || fail "$coredns: there is no such program, or this user cannot run it; run: stratum up"
find_address
[ -n "$address" ] || fail "$corefile: names no address to bind to; run: stratum up"
until has_address; do
    [ "$seconds" -gt 0 ] || fail "$address: no interface has it; see: systemctl status {UNIT_LOCALDNS_NETWORK}"
    seconds=$((seconds - 1))
    sleep 1
done
exec "$coredns" -conf "$corefile" -dns.port 53
"""


def render_supervisor() -> bytes:
    """The supervisor script of a version. Flags of CoreDNS: its coremain/run.go, core/dnsserver/register.go."""
    return _SUPERVISOR.encode()


# -- the gate -------------------------------------------------------------------------------------------


def _ask(host: Host, address: str, port: int, *, tcp: bool, timeout: float) -> str:
    """What is wrong with the answer to the health check; empty when it is right."""
    identifier = int(unguessable()[:4], 16)
    query = encode_query(identifier, HEALTH_NAME, AAAA if ":" in address else A)
    try:
        answer = parse_answer(host.ask_dns(address, port, query, tcp=tcp, timeout=timeout))
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:
        return f"an answer that is none: {error}"
    if answer.identifier != identifier or answer.rcode != 0 or answer.addresses != (address,):
        return f"another server answers there (code {answer.rcode})"
    return ""


def wait_localdns(host: Host, address: str, timeout: float = READY_TIMEOUT, *, port: int = 53) -> None:
    """The gate behind LocalDNS: it answers its own name at ``address``, over UDP and over TCP.

    Nothing else needs to be there for that answer: an upstream that is away does not keep a node from starting. Raises
    :class:`StratumError` with the last lines of the unit's journal.
    """
    deadline = host.monotonic() + timeout
    while True:
        said = ""
        for tcp in (False, True):
            wrong = _ask(host, address, port, tcp=tcp, timeout=_ASK_TIMEOUT)
            if wrong:
                said = f"{_join(address, port)} over {'TCP' if tcp else 'UDP'}: {wrong}"
                break
        if not said:
            return
        if host.monotonic() >= deadline:
            break
        host.sleep(_POLL)
    tail = " | ".join(systemd.journal_tail(host, UNIT_LOCALDNS, 5)) or "it said nothing"
    raise StratumError(
        "localdns-not-ready",
        f"{UNIT_LOCALDNS}: does not answer after {timeout:g} s: {said}; its journal: {tail}",
        hint=f"read all of it: journalctl --boot --unit {UNIT_LOCALDNS}; port 53 may be taken: ss -lnup 'sport = :53'",
    )
