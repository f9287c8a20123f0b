"""Watching a node that is up: what died or came undone is reported once and, where it is ours, put right.

At rest a look reads a few small files and starts no program. What they show to be different is asked about and put
right under the lock, by the plans that ``up`` has. While another run is at work nothing is said or done: it may be what
makes the difference, and the next look comes soon.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Callable, Union

from stratum import lock
from stratum.errors import AlreadyRunningError, StratumError, system_error
from stratum.host.notify import Watchdog
from stratum.node.launchcheck import read_launch_check, refusal
from stratum.node.pulse import Pulse
from stratum.node.stack import Stack
from stratum.node.units import UNIT_KUBELET
from stratum.scripts.context import Context
from stratum.scripts.drift import Drift, Trouble

__all__ = ["PATIENCE", "Watch"]

# One command of a bring-up may take half an hour (the import of an image), and nothing is heard of it meanwhile.
PATIENCE = 7200.0  # seconds
_TRIES = 3  # how often one thing is put right in _TRIES_WITHIN: somebody may work against us
_TRIES_WITHIN = 3600.0  # seconds

PutRight = Callable[[], Sequence[StratumError]]


@dataclass
class Watch:
    """Looks at a node again and again.

    ``bring_up`` starts everything that the installed version needs, ``put_right`` does what :class:`Drift` finds to be
    undone; it tries each step and returns what failed. Both are called with the lock held.
    """

    context: Context
    stack: Stack
    bring_up: Callable[[], object]
    put_right: PutRight
    watchdog: Watchdog
    _pulse: Pulse = field(init=False)
    _drift: Drift = field(init=False)
    _seen: frozenset[str] = field(default=frozenset(), init=False)  # in the last look
    _reported: frozenset[str] = field(default=frozenset(), init=False)
    _tried: dict[str, list[float]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._pulse = Pulse(self.context.host)
        self._drift = Drift(self.context, self.stack, self._patience)

    def look(self) -> str:
        """Look once and put right what can be; the line for systemd's STATUS=. Raises OSError from the watchdog."""
        troubles = [*self._guard(self._tend_units), *self._guard(self._tend_host)]
        for trouble in troubles:
            if not trouble.quiet and trouble.what not in self._reported:
                self.context.out.warn("; ".join(filter(None, (trouble.what, trouble.hint))))
        self._reported = frozenset(trouble.what for trouble in troubles if not trouble.quiet)
        self._seen = frozenset(trouble.what for trouble in troubles)
        words = [f"version {self.stack.layout.current()}", *(trouble.what for trouble in troubles)]
        # STATUS= is one line, and what a program or a file name says may have more.
        return " ".join("; ".join(words).split()) if troubles else f"{words[0]} is running"

    def _patience(self) -> AbstractContextManager[None]:
        return self.watchdog.patience(PATIENCE)

    def _guard(self, tend: Callable[[], Sequence[Trouble]]) -> Sequence[Trouble]:
        try:
            return tend()
        except (StratumError, OSError) as error:
            # The node is broken now and may not be in a while: the supervisor goes on and says so.
            return [self._failure(error)]

    def _failure(self, cause: Union[StratumError, OSError]) -> Trouble:
        error = system_error(cause) if isinstance(cause, OSError) else cause
        if error.message not in self._reported:
            self.context.out.error(error)
        self._reported |= {error.message}
        return Trouble(error.message)

    # -- units --------------------------------------------------------------------------------------

    def _tend_units(self) -> Sequence[Trouble]:
        units = self.stack.units
        if self._pulse.beats(units):
            return []
        with self._patience():
            states = self._pulse.ask(units)
            down = ", ".join(unit for unit, state in states.items() if state.stopped)
            if not down:
                return [self._waiting(f"{unit} is {state.active} ({state.sub})") for unit, state in states.items()]
            if down == UNIT_KUBELET:
                # Starting it would only ask the check once more: a refusal is final, and else it asks by itself.
                check = read_launch_check(self.context.host)
                if check.refused:
                    error = refusal(self.context.host)
                    return [Trouble(error.message, error.hint or "")]
                if check.trying:
                    return [self._waiting(f"{UNIT_KUBELET} waits for its launch check to agree")]
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

    # -- the host -----------------------------------------------------------------------------------

    def _tend_host(self) -> Sequence[Trouble]:
        troubles = self._drift.find()
        if not troubles:
            return []
        if lock.is_held(self.context.host):
            return [replace(trouble, quiet=True) for trouble in troubles]
        if not any(self._may_try(trouble) for trouble in troubles):
            return troubles
        with self._patience():
            try:
                with lock.hold_lock(self.context.host, lock.SUPERVISOR):
                    return self._put_right()
            except AlreadyRunningError:
                return [replace(trouble, quiet=True) for trouble in troubles]

    def _may_try(self, trouble: Trouble) -> bool:
        return trouble.ours and len(self._recent_tries(trouble)) < _TRIES

    def _recent_tries(self, trouble: Trouble) -> list[float]:
        since = self.context.host.monotonic() - _TRIES_WITHIN
        return [when for when in self._tried.get(trouble.what, []) if when > since]

    def _put_right(self) -> Sequence[Trouble]:
        # Whoever had the lock until now may have put it right.
        before = [trouble for trouble in self._drift.find(ask=True) if trouble.ours]
        if not before:
            return self._drift.find()
        now = self.context.host.monotonic()
        for trouble in before:
            self._tried[trouble.what] = [*self._recent_tries(trouble), now]
        failures = [self._failure(error) for error in self.put_right()]
        after = self._drift.find(ask=True)
        left = {trouble.what for trouble in after}
        done = [f"{trouble.what}: put right" for trouble in before if trouble.what not in left]
        for what in done:
            self.context.out.warn(what)
        return [*(Trouble(what, quiet=True) for what in done), *failures, *after]
