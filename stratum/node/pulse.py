"""Whether the units live, told from /proc: systemd is asked only when a process that it runs is gone.

The main process is what is looked at, and not whether the unit's cgroup is empty: the shims of running containers
stay in containerd's cgroup when containerd itself is dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stratum import systemd
from stratum.node.reaper import Process, read_process
from stratum.system import Host

__all__ = ["Pulse"]

# systemd.unit(5) has more states than these; "reloading" and "refreshing" units run.
_RUNNING = ("active", "reloading", "refreshing")


@dataclass
class Pulse:
    """The main process of each unit, as systemd named it last."""

    host: Host
    _known: dict[str, Process] = field(default_factory=dict, init=False)

    def beats(self, units: Sequence[str]) -> bool:
        """Whether the main process of each unit is the one that it was; reads two small files for each.

        Not so before the first :meth:`ask`, and never for a unit without a process of its own.
        """
        return all(self._lives(unit) for unit in units)

    def ask(self, units: Sequence[str]) -> dict[str, systemd.UnitState]:
        """Ask systemd; those of ``units`` that do not run, in their order. Raises CommandError."""
        states = systemd.read_units(self.host, units)
        self._known.clear()
        for unit, state in states.items():
            process = read_process(self.host, state.main_pid) if state.main_pid else None
            if process is not None and state.active in _RUNNING:
                self._known[unit] = process
        return {unit: state for unit, state in states.items() if state.active not in _RUNNING}

    def _lives(self, unit: str) -> bool:
        known = self._known.get(unit)
        now = read_process(self.host, known.pid) if known else None
        return now is not None and known is not None and now.started == known.started
