"""How a Kubernetes node is, for ``status``: what can be seen on the node itself, in the time of a few system calls."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Optional

from stratum.config import WORKER
from stratum.node.kubeletconfig import CLIENT_CERTIFICATE, uses_token
from stratum.node.kubeletready import kubelet_answers
from stratum.node.localdns import why_silent
from stratum.node.settings import Settings
from stratum.node.stackspec import is_kubernetes_node, serves_dns
from stratum.node.versions import VersionRecord
from stratum.system import Host
from stratum.trust.validity import valid_until

__all__ = ["NodeStatus", "read_node"]


@dataclass(frozen=True)
class NodeStatus:
    """A Kubernetes node. What is wrong with a part is said in words, empty when it is well."""

    role: str
    name: str
    kubelet: str
    dns: Optional[str]  # None without LocalDNS
    dns_address: str
    until: Optional[float]  # how long a worker's own certificate holds, in seconds since 1970
    certificate: str

    @property
    def troubles(self) -> list[str]:
        """Why the node is not ready."""
        kubelet = f"the kubelet does not answer: {self.kubelet}" if self.kubelet else ""
        dns = f"LocalDNS does not answer: {self.dns}" if self.dns else ""
        return [what for what in (kubelet, dns, self.certificate) if what]

    def lines(self) -> list[str]:
        """The lines of the report for people."""
        found = [f"role       {self.role}", f"kubelet    {_say(self.kubelet)}"]
        if self.dns is not None:
            found.append(f"LocalDNS   {_say(self.dns)}" + ("" if self.dns else f" at {self.dns_address}"))
        if self.role == WORKER and (self.until or self.certificate):
            valid = f"valid until {_date(self.until)}" if self.until and not self.certificate else self.certificate
            found.append(f"identity   {valid}")
        return found

    def to_json(self) -> dict[str, object]:
        """The part of ``--output json``."""
        return {
            "role": self.role,
            "kubeletAnswers": not self.kubelet,
            "localDNSAnswers": None if self.dns is None else not self.dns,
            "certificateValidUntil": _date(self.until) if self.until else None,
        }


def _say(trouble: str) -> str:
    return f"does not answer: {trouble}" if trouble else "answers"


def _date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))


def read_node(host: Host, record: Optional[VersionRecord], settings: Settings) -> Optional[NodeStatus]:
    """Look at the node; None for a container host."""
    if record is None or not is_kubernetes_node(record):
        return None
    spec, until, certificate = settings.spec, None, ""
    if spec.role == WORKER and uses_token(spec):
        until, certificate = _certificate(host)
    return NodeStatus(
        spec.role,
        settings.node_name,
        kubelet_answers(host) or "",
        why_silent(host, spec.local_dns.address) if serves_dns(record, settings) else None,
        spec.local_dns.address,
        until,
        certificate,
    )


def _certificate(host: Host) -> tuple[Optional[float], str]:
    """Until when the node's own certificate holds, and what is wrong with it."""
    try:
        until = valid_until(host.read_bytes(CLIENT_CERTIFICATE))
    except (FileNotFoundError, NotADirectoryError):
        return None, "this node has not joined its cluster yet: it has no certificate"
    except (OSError, ValueError) as error:
        return None, f"{CLIENT_CERTIFICATE}: {error}"
    if until < host.now():
        return until, f"the certificate of this node expired at {_date(until)}; join again with a new token"
    return until, ""
