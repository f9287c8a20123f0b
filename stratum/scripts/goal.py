"""What a node is to be: the version that it runs, and the settings that hold for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from stratum.config import WORKER
from stratum.node.layout import Layout
from stratum.node.settings import Settings, read_settings
from stratum.node.stackspec import is_kubernetes_node, unit_spec
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

    @property
    def bridged(self) -> bool:
        """Whether the node has the bridge network: a worker's cluster brings a network of its own."""
        if "bridge" not in self.plugins:
            return False
        spec = self.settings.spec
        worker = is_kubernetes_node(self.record) and spec.role == WORKER
        return not worker if spec.network.bridge is None else spec.network.bridge

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
