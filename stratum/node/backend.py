"""The node stack run directly on the host as our own systemd units (seed 000, type Backend).

Each operation is a list of named steps in the contract's order. Stopping and going back try every step and
join the errors, so that none hides another; starting and switching stop at the first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Callable, Optional

from stratum import atomicfile, systemd
from stratum.errors import CommandError, ExitCode, StratumError, join_errors
from stratum.node import cni, pods
from stratum.node.launchcheck import start_failure
from stratum.node.layout import Layout
from stratum.node.units import (
    EVERY_UNIT,
    SYSTEMD_DIR,
    UNIT_KUBELET,
    UNIT_KUBELET_LAUNCH_CHECK,
    UNIT_LOCALDNS,
    UnitSpec,
    render_units,
    stack_units,
)
from stratum.steps import RELOAD_SYSTEMD, Action, Call, PlaceLink, RemoveDirectory, Step, Work, plan_file, withdraw
from stratum.system import Host, HostPath

__all__ = ["Backend", "Hook", "Hooks", "UpgradeError"]

Hook = Callable[[], object]
OnStep = Callable[[Step, Sequence[Action]], object]


@dataclass(frozen=True)
class Hooks:
    """What the node's owner does at fixed points; every one may be absent."""

    # Places a version's artifacts and the node's configuration: after its directory exists, before the units.
    install: Optional[Callable[[str], object]] = None
    # At the start of start and restart, before any unit is touched; a failure stops the start.
    before_start: Optional[Hook] = None
    # Readiness gates, by unit: run when the unit has started, before the next one; a failure stops the start.
    after_start: Mapping[str, Hook] = field(default_factory=dict)
    after_restart: Mapping[str, Hook] = field(default_factory=dict)
    # In an upgrade, when the old version has stopped and the link is turned, before the new one starts.
    before_upgrade_start: Optional[Hook] = None
    # The same as actions, planned at that moment: what a dry run can list one by one.
    plan_upgrade_start: Optional[Callable[[], Sequence[Action]]] = None
    # When an upgrade goes back, before the previous version starts; a failure is reported and stops nothing.
    before_rollback_start: Optional[Hook] = None


class UpgradeError(StratumError):
    """An upgrade failed past its preparation; ``exit_code`` says whether the way back worked."""

    def __init__(self, failure: BaseException, rollback: Sequence[StratumError], previous: Optional[str]) -> None:
        said = failure.message if isinstance(failure, StratumError) else str(failure)
        if not isinstance(failure, Exception):
            said = f"cut off: {type(failure).__name__}"
        reference = failure.reference if isinstance(failure, StratumError) else "upgrade-failed"
        hint = failure.hint if isinstance(failure, StratumError) else None
        super().__init__(reference, said, hint=hint)
        self.rolled_back = not rollback
        self.exit_code = ExitCode.ROLLBACK_FAILED if rollback else ExitCode.ROLLED_BACK
        self.state = f"version {previous} runs again"
        if rollback:
            self.state = f"going back to {previous} failed too: " + "; ".join(error.message for error in rollback)


@dataclass(frozen=True)
class Backend:
    """The stack of one host. ``spec`` is what the units are rendered from.

    ``rollback_spec`` is the one of the version that a rollback returns to; None leaves the unit files as they
    are, which is right when they were never rewritten.
    """

    work: Work
    layout: Layout
    spec: UnitSpec
    hooks: Hooks = field(default_factory=Hooks)
    rollback_spec: Optional[UnitSpec] = None
    unit_dir: HostPath = SYSTEMD_DIR
    # Host paths that must exist for GPU workloads; looked at only when ``gpu`` was granted.
    gpu: bool = False
    gpu_host_paths: tuple[HostPath, ...] = ()

    @property
    def host(self) -> Host:
        """The host that it runs on."""
        return self.layout.host

    @property
    def units(self) -> tuple[str, ...]:
        """The units of the stack in start order."""
        return stack_units(self.spec)

    @property
    def _every_spec(self) -> UnitSpec:
        """A specification with everything in it, whose files are all that we ever write."""
        return UnitSpec(self.spec.bin_dir, kubelet=True, localdns="/x", gpu_setup=(("/x",),), launch_check="/x")

    def _installed(self, units: Sequence[str]) -> list[str]:
        """Those of ``units`` that systemd has, the last to start first; all of them when it does not say."""
        try:
            states = systemd.read_units(self.host, units)
        except CommandError:
            return list(reversed(units))  # what is wrong shows when they are stopped
        # A unit whose file somebody deleted may well run.
        return [unit for unit in reversed(units) if states[unit].installed or states[unit].active != "inactive"]

    # -- preparing ----------------------------------------------------------------------------------

    def prepare_version(self, version: str) -> HostPath:
        """Make the version's directory and let ``install`` fill it; no unit is touched. Raises what that raises."""
        self.check_gpu()
        directory = self.layout.ensure(version)
        if self.hooks.install:
            self.hooks.install(version)
        return directory

    def prepare(self, version: str) -> HostPath:
        """Prepare a version and write the units, for a node that is not running; the link is not turned."""
        directory = self.prepare_version(version)
        for action in self.plan_units(self.spec, stop_removed=True):
            action.perform(self.work)
        return directory

    def check_gpu(self) -> None:
        """A granted GPU has its tools on the host; raises :class:`StratumError` naming what is missing."""
        missing = [str(path) for path in self.gpu_host_paths if self.gpu and not self.host.exists(path)]
        if missing:
            raise StratumError(
                "gpu-tools-missing",
                f"{', '.join(missing)}: needed for GPU workloads and not there",
                hint="install the NVIDIA Container Toolkit",
            )

    def plan_units(self, spec: UnitSpec, *, stop_removed: bool = False, reload: bool = True) -> list[Action]:
        """Write the unit files that differ, remove those that ``spec`` has no more, and let systemd read them.

        With ``stop_removed`` a unit that goes is stopped before; without ``reload`` the caller tells systemd.
        """
        actions: list[Action] = []
        files = render_units(spec, self.unit_dir)
        for file in files:
            actions += plan_file(self.work, file.path, file.content)
        actions = list(dict.fromkeys(actions))
        stale = self._stale({file.path for file in files})
        if stop_removed and self.host.live:
            # Removed while it runs, a unit would go on without a unit file.
            gone = [unit for unit in EVERY_UNIT if self.unit_dir / unit in stale]
            # A run that was cut off may have taken the file already.
            known = self._installed(gone) if gone else []
            stops = [Call("stop", unit, functools.partial(systemd.stop_unit, self.host, unit)) for unit in known]
            actions = [*stops, *actions]
        actions += [_Withdraw(path) for path in stale]
        if actions and self.host.live and reload:
            actions.append(RELOAD_SYSTEMD)
        return actions

    def _stale(self, wanted: set[HostPath]) -> list[HostPath]:
        """Unit files of ours that ``wanted`` has no more."""
        known = [file.path for file in render_units(self._every_spec, self.unit_dir)]
        return [path for path in known if path not in wanted and self.work.receipt.get(path)]

    # -- starting and stopping ----------------------------------------------------------------------

    def start_steps(self) -> list[Step]:
        """Start the stack in order, each unit behind its gate. Units that are active are left alone."""

        def plan() -> list[Action]:
            states = systemd.read_units(self.host, self.units)
            return self._start_actions([unit for unit in self.units if states[unit].active != "active"])

        return [Step("start", "start the units and wait until they answer", plan)]

    def _before_start(self) -> list[Action]:
        return [Call("prepare", "the start", self.hooks.before_start)] if self.hooks.before_start else []

    def _start_actions(self, units: Sequence[str], *, forget: bool = True) -> list[Action]:
        if not units:
            return []
        return self._before_start() + [
            Call("start", unit, functools.partial(self._start, unit, forget)) for unit in units
        ]

    def _start(self, unit: str, forget: bool) -> None:
        self._through(
            unit, self.hooks.after_start, functools.partial(systemd.start_unit, self.host, unit, forget=forget)
        )

    def _through(self, unit: str, gates: Mapping[str, Hook], begin: Hook) -> None:
        """Begin a unit and wait behind its gate. A kubelet whose launch check goes on trying may still get there."""
        gate = gates.get(unit)
        try:
            begin()
        except StratumError as error:
            failure = start_failure(self.host, error) if unit == UNIT_KUBELET else error
            if failure is not None or gate is None:
                raise failure or error from None
        if gate:
            gate()

    def start(self) -> None:
        """Start the whole stack; raises :class:`StratumError` at the first unit or gate that fails."""
        for action in self._start_actions(self.units):
            action.perform(self.work)

    def plan_bring_up(self, down: Sequence[str], stale: Sequence[str]) -> list[Action]:
        """Start the units that are ``down`` and restart the ``stale`` ones, in start order, each behind its gate.

        systemd restarts what requires LocalDNS along with it: the gates of those are waited for too.
        """
        actions: list[Action] = []
        for unit in self.units:
            gate = self.hooks.after_restart.get(unit)
            if unit in down:
                actions.append(Call("start", unit, functools.partial(self._start, unit, True)))
            elif unit in stale:
                actions.append(Call("restart", unit, functools.partial(self._restart, unit)))
            elif UNIT_LOCALDNS in stale and gate:
                actions.append(Call("wait for", unit, gate))
        return [*self._before_start(), *actions] if actions else []

    def restart_steps(self) -> list[Step]:
        """Restart the stack in start order. The host and the containers go on."""

        def plan() -> list[Action]:
            return self._before_start() + [
                Call("restart", unit, functools.partial(self._restart, unit)) for unit in self.units
            ]

        return [Step("restart", "restart the units", plan)]

    def _restart(self, unit: str) -> None:
        self._through(unit, self.hooks.after_restart, functools.partial(systemd.restart_unit, self.host, unit))

    def restart(self) -> None:
        """Restart the whole stack; raises :class:`StratumError`."""
        for step in self.restart_steps():
            for action in step.plan():
                action.perform(self.work)

    def stop(self) -> None:
        """Stop every unit in reverse order; each is tried. Raises :class:`StratumError` with all that failed."""
        join_errors(systemd.stop_units(self.host, tuple(reversed(self.units))), "stop")

    def _stop_for_switch(self) -> None:
        """Do what need not wait until nothing runs, then stop. Raises :class:`StratumError`."""
        systemd.forget_failures(self.host, self.units)
        self._stop_either()

    def _stop_either(self) -> None:
        """Stop what runs of the version that a switch leaves, whichever units that has; raises as ``stop``."""
        join_errors(systemd.stop_units(self.host, self._installed(stack_units(self._every_spec))), "stop")

    def status(self) -> bool:
        """Whether every unit is active; raises CommandError."""
        states = systemd.read_units(self.host, self.units)
        return all(states[unit].active == "active" for unit in self.units)

    def end_pods(self) -> None:
        """End what outlives the units; raises :class:`StratumError` with all that failed."""
        join_errors(pods.end_pods(self.host), "end pods")

    # -- switching versions -------------------------------------------------------------------------

    def activate(self, version: str) -> Optional[str]:
        """Turn the link to ``version`` and return the version it replaced."""
        previous = self.layout.current()
        self._turn(version)
        return previous

    def _turn(self, version: str) -> None:
        """Turn the link, wherever it leads now."""
        if version not in self.layout.versions():
            self.layout.flip(version)  # raises: it is not installed
        known = self.work.receipt.get(self.layout.current_link)
        if known and version in known.contents:
            # Nothing is to be recorded, so a disk that is full by now does not keep a node from going back.
            atomicfile.replace_link(self.host, self.layout.current_link, version)
        else:
            PlaceLink(self.layout.current_link, version).perform(self.work)

    def switch_steps(self, version: str, wait_ready: Hook) -> list[Step]:
        """From the running version to ``version``, which is prepared: the contract's Upgrade."""
        units = " ".join(reversed(self.units))

        def configure() -> list[Action]:
            hook, plan = self.hooks.before_upgrade_start, self.hooks.plan_upgrade_start
            before: list[Action] = [Call("configure", f"the node for {version}", hook)] if hook else []
            return [*before, *(plan() if plan else ())]

        return [
            Step("stop", "stop the units", lambda: [Call("stop", units, self._stop_for_switch)]),
            Step("end-pods", "end the containers", lambda: [Call("end", "the containers", self.end_pods)]),
            Step(
                "activate",
                "make the version current",
                lambda: [
                    Call("link", f"{self.layout.current_link} -> {version}", functools.partial(self.activate, version))
                ],
            ),
            Step("units", "write the units that differ", lambda: self.plan_units(self.spec)),
            Step("configure", "write what the new version needs", configure),
            Step("start", "start the units", lambda: self._start_actions(self.units, forget=False)),
            Step(
                "ready", "wait until the node is ready", lambda: [Call("wait", "until the node is ready", wait_ready)]
            ),
        ]

    def rollback_steps(self, previous: str, *, flip: bool = True) -> list[Step]:
        """Back to ``previous``: stop, end pods, turn the link, units, hook, start. Every one is to be tried.

        Without ``flip`` the link never turned: the stop or the activation had failed.
        """
        hook = self.hooks.before_rollback_start
        back = replace(self, spec=self.rollback_spec) if self.rollback_spec else self
        steps = []
        if flip:
            steps = [
                Step("rollback-stop", "stop the units", lambda: [Call("stop", "the units", self._stop_either)]),
                Step("rollback-end-pods", "end the containers", lambda: [Call("end", "the containers", self.end_pods)]),
                Step(
                    "rollback-activate",
                    "make the previous version current",
                    lambda: [Call("link", f"current -> {previous}", functools.partial(self._turn, previous))],
                ),
            ]
        if self.rollback_spec:
            steps.append(Step("rollback-units", "write the units", lambda: self.plan_units(back.spec)))
        if hook:
            steps.append(
                Step(
                    "rollback-configure",
                    "write what the previous version needs",
                    lambda: [Call("configure", f"the node for {previous}", hook)],
                )
            )
        steps.append(Step("rollback-start", "start the units", lambda: back._start_actions(back.units)))
        return steps

    def _do(self, step: Step, on_step: Optional[OnStep], unrecorded: Optional[list[StratumError]] = None) -> None:
        """Do a step; with ``unrecorded`` also when the journal cannot be written, and say so there."""
        actions = step.plan()
        if not actions:
            return
        try:
            self.work.journal.step(step.name)
        except OSError as error:
            if unrecorded is None:
                raise
            unrecorded.append(StratumError("journal-unwritten", f"{step.name}: the journal: {error}"))
        if on_step:
            on_step(step, actions)
        for action in actions:
            action.perform(self.work)

    def rollback(self, previous: str, *, flip: bool = True, on_step: Optional[OnStep] = None) -> None:
        """Go back to ``previous``; every step is tried. Raises :class:`StratumError` with all that failed."""
        join_errors(self._rollback_errors(previous, flip, on_step), "rollback")

    def _rollback_errors(self, previous: str, flip: bool, on_step: Optional[OnStep] = None) -> list[StratumError]:
        errors: list[StratumError] = []
        for step in self.rollback_steps(previous, flip=flip):
            try:
                self._do(step, on_step, errors)
            except StratumError as error:
                errors.append(error)
            except Exception as error:  # noqa: BLE001 - whatever went wrong, the previous version is to start
                errors.append(StratumError("system-error", f"{step.name}: {error}"))
        return errors

    def upgrade(
        self,
        version: str,
        wait_ready: Hook,
        *,
        on_step: Optional[OnStep] = None,
        on_failure: Optional[Callable[[BaseException], object]] = None,
    ) -> None:
        """Switch to a prepared version; on a failure past the stop the previous one runs again.

        ``on_failure`` hears of the failure before the way back starts. Raises :class:`UpgradeError`; a signal that
        cut the switch off is raised again when the previous version runs.
        """
        previous = self.layout.current()
        try:
            for step in self.switch_steps(version, wait_ready):
                self._do(step, on_step)
        except BaseException as failure:
            if on_failure:
                on_failure(failure)
            if previous is None:
                raise
            flipped = self._turned_from(previous)
            errors = self._rollback_errors(previous, flipped, on_step)
            if errors or isinstance(failure, (StratumError, OSError)):
                raise UpgradeError(failure, errors, previous) from failure
            raise

    def _turned_from(self, previous: str) -> bool:
        try:
            return self.layout.current() != previous
        except StratumError:
            return True  # the link is broken: turning it is what it needs

    # -- the end ------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Stop and disable the units, remove them with their drop-ins, end shims and pods, remove the versions.

        Units that were never installed are skipped. Every step is tried; the errors are joined.
        """
        installed = self._installed((UNIT_KUBELET_LAUNCH_CHECK, *stack_units(self._every_spec)))
        errors = systemd.stop_units(self.host, installed)
        for unit in installed:
            try:
                self.host.run(["systemctl", "disable", "--quiet", unit], timeout=60.0)
            except CommandError as error:
                errors.append(error)
        errors += pods.end_pods(self.host)
        for remove in (self._remove_units, self.unlink_cni_plugins, self.layout.remove_all):
            try:
                remove()
            except StratumError as error:
                errors.append(error)
            except OSError as error:
                errors.append(StratumError("system-error", str(error)))
        join_errors(errors, "destroy")

    def _remove_units(self) -> None:
        for path in self._stale(set()):
            _Withdraw(path).perform(self.work)
        if self.host.live:
            RELOAD_SYSTEMD.perform(self.work)

    # -- CNI plugins --------------------------------------------------------------------------------

    def link_cni_plugins(self, version: str) -> None:
        """Link every plugin of ``version`` into the host's plugin directory, through the ``current`` link."""
        plugins = self.host.listdir(self.layout.version_dir(version) / "cni/bin")
        for action in cni.plan_plugin_links(self.work, plugins, self.layout.cni_bin_dir):
            action.perform(self.work)

    def unlink_cni_plugins(self) -> None:
        """Remove the links that we made and nothing else, then the directory when that leaves it empty."""
        if not self.host.is_dir(cni.HOST_BIN_DIR):
            return
        for name in self.host.listdir(cni.HOST_BIN_DIR):
            path = cni.HOST_BIN_DIR / name
            if cni.is_ours(self.host, path, self.layout.cni_bin_dir):
                withdraw(self.work, path)
        if not self.host.listdir(cni.HOST_BIN_DIR):
            RemoveDirectory(cni.HOST_BIN_DIR).perform(self.work)
            self.work.receipt.forget(cni.HOST_BIN_DIR)


@dataclass(frozen=True)
class _Withdraw(Action):
    """Remove a unit file of ours and its drop-in directory when that is empty then."""

    path: HostPath
    verb = "remove"

    @property
    def subject(self) -> str:
        """The file."""
        return str(self.path)

    def perform(self, work: Work) -> None:
        """Remove a file that is as we wrote it; one that somebody changed stays. Raises OSError."""
        if work.receipt.owns(self.path):
            withdraw(work, self.path)
        work.receipt.forget(self.path)
        parent = self.path.parent
        if parent.name.endswith(".d") and work.host.is_dir(parent) and not work.host.listdir(parent):
            RemoveDirectory(parent).perform(work)
            work.host.fsync_dir(parent.parent)
            work.receipt.forget(parent)
