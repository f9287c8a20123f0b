"""Watching a node that is up: what died or came undone is reported once and, where it is ours, put right.

At rest a look reads a few small files and starts no program. Only what they show to be different is asked about, and
only that is changed, under the lock, by the plans that ``up`` has. While another run is at work nothing is said or
done: it may be what makes the difference, and the next look comes soon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Callable

from stratum import lock
from stratum.errors import AlreadyRunningError, StratumError, system_error
from stratum.host.notify import Watchdog
from stratum.node.pulse import Pulse
from stratum.node.stack import UNITS, Stack
from stratum.scripts.context import Context

__all__ = ["Trouble", "Watch"]

# One command of a bring-up may take half an hour (the import of an image), and nothing is heard of it meanwhile.
PATIENCE = 7200.0  # seconds
_DEAD = ("inactive", "failed")  # systemd restarts a unit that fails; what needs us is one that is down for good


@dataclass(frozen=True)
class Trouble:
    """Something that is not as it should be. A ``quiet`` one is for STATUS= alone."""

    what: str
    hint: str = ""
    quiet: bool = False


@dataclass
class Watch:
    """Looks at a node again and again. ``bring_up`` starts everything that the installed version needs."""

    context: Context
    stack: Stack
    bring_up: Callable[[], object]
    watchdog: Watchdog
    _pulse: Pulse = field(init=False)
    _seen: frozenset[str] = field(default=frozenset(), init=False)  # in the last look
    _reported: frozenset[str] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        self._pulse = Pulse(self.context.host)

    def look(self) -> str:
        """Look once and put right what can be; the line for systemd's STATUS=. Raises OSError from the watchdog."""
        troubles = self._guard(self._tend_units)
        return self._report(troubles)

    def _guard(self, tend: Callable[[], Sequence[Trouble]]) -> Sequence[Trouble]:
        try:
            return tend()
        except (StratumError, OSError) as cause:
            error = system_error(cause) if isinstance(cause, OSError) else cause
        # The node is broken now and may not be in a while: the supervisor goes on and says so.
        if error.message not in self._reported:
            self.context.out.error(error)
        self._reported |= {error.message}
        return [Trouble(error.message)]

    def _report(self, troubles: Sequence[Trouble]) -> str:
        loud = frozenset(trouble.what for trouble in troubles if not trouble.quiet)
        for trouble in troubles:
            if trouble.what in loud - self._reported:
                self.context.out.warn("; ".join(filter(None, (trouble.what, trouble.hint))))
        self._reported = loud
        self._seen = frozenset(trouble.what for trouble in troubles)
        words = [f"version {self.stack.layout.current()}", *(trouble.what for trouble in troubles)]
        return "; ".join(words) if troubles else f"{words[0]} is running"

    # -- units --------------------------------------------------------------------------------------

    def _tend_units(self) -> Sequence[Trouble]:
        if self._pulse.beats(UNITS):
            return []
        with self.watchdog.patience(PATIENCE):
            states = self._pulse.ask(UNITS)
            down = ", ".join(unit for unit, state in states.items() if state.active in _DEAD)
            if not down:
                return [self._waiting(f"{unit} is {state.active} ({state.sub})") for unit, state in states.items()]
            try:
                with lock.hold_lock(self.context.host, lock.SUPERVISOR):
                    self.bring_up()
            except AlreadyRunningError:
                return [Trouble(f"{down} down while another run is at work", quiet=True)]
        self.context.out.warn(f"{down} was down and has been started again")
        return [Trouble(f"{down} had to be started again", quiet=True)]

    def _waiting(self, what: str) -> Trouble:
        # Once is a restart; again is one that does not come to an end.
        return Trouble(what, quiet=what not in self._seen)
