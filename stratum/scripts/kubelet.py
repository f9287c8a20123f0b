"""The kubelet, joined from its parts: facts of the host, the node's settings, and what this run joins with."""

from __future__ import annotations

from typing import Optional

from stratum.config import WORKER
from stratum.errors import UsageError
from stratum.host import resolvers
from stratum.host.finding import REJECT, WARN, Finding
from stratum.host.kubeletstate import check_kubelet_port, check_kubelet_state
from stratum.node.kubeconfig import Join, make_join
from stratum.node.kubelet import (
    KubeletFacts,
    leaves_cluster,
    plan_finish_join,
    plan_kubelet,
    plan_without_kubelet,
    read_facts,
)
from stratum.node.kubeletconfig import CA_FILE, HEALTHZ_PORT, KUBELET_PORT, check_kubelet
from stratum.node.settings import Settings, read_settings
from stratum.node.stackspec import is_kubernetes_node, serves_dns
from stratum.node.versions import VersionRecord
from stratum.receipt import Receipt
from stratum.scripts.context import Context
from stratum.scripts.goal import Goal
from stratum.scripts.settings import Chosen
from stratum.steps import Action, Work
from stratum.system import Host

__all__ = ["check_kubernetes", "check_stays", "finish_join", "join_of", "plan_files"]


def join_of(host: Host, chosen: Chosen, record: VersionRecord) -> Optional[Join]:
    """What this run joins a cluster with; None when it names no credential. Raises :class:`StratumError`."""
    spec = chosen.settings.spec
    if not is_kubernetes_node(record) or spec.role != WORKER:
        return None
    ca = chosen.ca
    if not ca and host.exists(CA_FILE):
        # A node that has joined keeps the CA that it was given.
        ca = host.read_bytes(CA_FILE)
    return make_join(host, spec.cluster, chosen.token, ca)


def _facts(host: Host, goal: Goal) -> KubeletFacts:
    version = goal.record.component_version("kubelet") or ""
    local = (goal.settings.spec.local_dns.address,) if serves_dns(goal.record, goal.settings) else ()
    return read_facts(host, version, resolvers.kubelet_resolv_conf(host, local), local_dns=local)


def check_kubernetes(context: Context, settings: Settings, record: VersionRecord) -> list[Finding]:
    """What is to be said before a kubelet comes to this host; nothing for a container host.

    Raises :class:`StratumError` for settings that the kubelet would not take.
    """
    version = record.component_version("kubelet")
    if version is None:
        return []
    findings = [
        Finding("kubelet-config", WARN, what, "see the release notes of this kubelet")
        for what in check_kubelet(settings.spec, version)
    ]
    if settings.spec.local_dns.enabled and not serves_dns(record, settings):
        hint = "give a bundle with the component coredns, or set spec.localDNS.enabled to false"
        findings.append(
            Finding("localdns", REJECT, "LocalDNS is asked for, and the bundle has no component coredns", hint)
        )
    findings += _check_programs(context.host, settings)
    receipt = Receipt.load(context.host)
    if context.host.live:
        findings += check_kubelet_port(context.host, receipt, (_port(settings), HEALTHZ_PORT))
    return [*findings, *check_kubelet_state(context.host, receipt)]


def _port(settings: Settings) -> int:
    """The port of the kubelet's API: 10250, but for a configuration that says otherwise."""
    port = settings.spec.kubelet.config.get("port", KUBELET_PORT)
    return port if isinstance(port, int) else KUBELET_PORT


def _check_programs(host: Host, settings: Settings) -> list[Finding]:
    """Programs that the configuration names; one may still come, so a missing one is only said."""
    spec = settings.spec
    named = {"spec.kubelet.launchCheck": "".join(spec.kubelet.launch_check[:1])}
    if spec.role == WORKER and spec.cluster.exec:
        named["spec.cluster.exec"] = spec.cluster.exec.command
    return [
        Finding("kubelet-program", WARN, f"{field}: {program}: no such program", "put it there: the kubelet needs it")
        for field, program in named.items()
        if program and not host.exists(program)
    ]


def plan_files(work: Work, goal: Goal) -> list[Action]:
    """The kubelet's files; on a container host that was a node, what takes the token away. Raises StratumError."""
    if not is_kubernetes_node(goal.record):
        return plan_without_kubelet(work)
    return plan_kubelet(work, goal.settings, _facts(work.host, goal), goal.join)


def check_stays(work: Work, before: Optional[Goal], goal: Goal) -> None:
    """A switch of versions leaves a node in its cluster: else there would be no way back. Raises UsageError."""
    if before is None or not (is_kubernetes_node(before.record) and is_kubernetes_node(goal.record)):
        return
    if leaves_cluster(work, before.settings, goal.settings, goal.join):
        raise UsageError(
            "other-cluster",
            "the configuration gives this node another role or cluster, and a change of versions keeps both: "
            "a node that joined anew could not go back",
            hint="run: stratum up, which makes it so; then: stratum upgrade",
        )


def finish_join(work: Work) -> None:
    """Behind the kubelet's gate: the token leaves the disk. Raises OSError."""
    for action in plan_finish_join(work, read_settings(work.host)):
        action.perform(work)
