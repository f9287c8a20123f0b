"""What a node is to be: the version that it runs, and the settings that hold for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from stratum.config import WORKER
from stratum.node.kubeconfig import Join
from stratum.node.layout import Layout
from stratum.node.settings import Settings, read_settings
from stratum.node.stackspec import is_kubernetes_node, serves_dns, unit_spec
from stratum.node.units import UnitSpec
from stratum.node.versions import VersionRecord, read_record
from stratum.scripts.runtime import gpu_setup

__all__ = ["Goal", "goal_in_force"]


@dataclass(frozen=True)
class Goal:
    """A version with its CNI plugins, and the settings. Everything that is written for a node follows from these."""

    record: VersionRecord
    plugins: tuple[str, ...]
    settings: Settings
    join: Optional[Join] = None  # what this run joins a cluster with; nothing of it is recorded

    @property
    def bridged(self) -> bool:
        """Whether the node has the bridge network: no worker has it unasked, whose cluster brings a network."""
        wanted = self.settings.spec.network.bridge
        if wanted is None:
            wanted = not (is_kubernetes_node(self.record) and self.settings.spec.role == WORKER)
        return wanted and "bridge" in self.plugins

    @property
    def serves_dns(self) -> bool:
        """Whether the node has LocalDNS."""
        return serves_dns(self.record, self.settings)

    def unit_spec(self, layout: Layout) -> UnitSpec:
        """What its units are rendered from."""
        return unit_spec(layout, self.record, self.settings, gpu_setup=gpu_setup(layout.host, self.settings))


def goal_in_force(layout: Layout, version: Optional[str] = None) -> Optional[Goal]:
    """The goal of the active version (or another installed one) under the recorded settings; None without a version.

    Raises :class:`StratumError` for a record or settings that cannot be read.
    """
    chosen = version or layout.current()
    record = read_record(layout, chosen) if chosen else None
    if record is None:
        return None
    return Goal(record, layout.plugins(record.version), read_settings(layout.host))
