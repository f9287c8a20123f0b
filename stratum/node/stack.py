"""The running stack: its units in order, the gates between them, and its end (seed 000, type Backend).

Which units there are follows the active version and the settings in force. Start order is that of
:attr:`Stack.units`, stop order the reverse.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stratum import systemd
from stratum.errors import CommandError, StratumError
from stratum.node import cni, containerd, localdns, pods, reaper
from stratum.node.kubelet import kubelet_inputs
from stratum.node.kubeletready import wait_kubelet
from stratum.node.layout import Layout
from stratum.node.localdns import wait_localdns
from stratum.node.proxy import PROXY_FILE
from stratum.node.settings import Settings, read_settings
from stratum.node.stackspec import unit_spec
from stratum.node.units import (
    SYSTEMD_DIR,
    UNIT_CONTAINERD,
    UNIT_KUBELET,
    UNIT_LOCALDNS,
    drop_in_dir,
    stack_units,
)
from stratum.node.versions import usable_record
from stratum.receipt import file_digest
from stratum.system import Host, HostPath

__all__ = ["CONTAINER_CGROUPS", "Stack"]

STARTED = HostPath("/run/stratum/started.json")
GATE_TIMEOUT = 120.0  # seconds that containerd has to answer its first call
STEADY_TIME = 3.0  # seconds that a new version must go on for after its first answer
_STEADY_POLL = 0.5
_GRACE = 10.0  # seconds that containers have to end by themselves
_DYING = 3.0  # seconds that a killed process may keep its cgroup busy
# containerd puts containers without a systemd slice below a group named after their namespace.
CONTAINER_CGROUPS = tuple(HostPath("/sys/fs/cgroup") / name for name in (containerd.NAMESPACE, "k8s.io"))


@dataclass(frozen=True)
class Stack:
    """The node's units on a live host, with the versions below ``layout``."""

    layout: Layout

    @property
    def host(self) -> Host:
        """The host that it runs on."""
        return self.layout.host

    @property
    def ctr(self) -> containerd.Ctr:
        """containerd's client, of the active version."""
        return containerd.Ctr(self.host, self.layout.bin_dir)

    @property
    def units(self) -> tuple[str, ...]:
        """The units of the active version, in start order. Raises :class:`StratumError`.

        They are read anew each time: a switch, or another configuration, changes them under a running supervisor.
        """
        version = self.layout.current()
        record = usable_record(self.layout, version) if version else None
        if record is None:
            return (UNIT_CONTAINERD,)  # without which there is no node
        return stack_units(unit_spec(self.layout, record, read_settings(self.host)))

    # -- what it was started with -------------------------------------------------------------------

    def inputs(self, unit: str) -> dict[str, str]:
        """What a running unit depends on: the version, the digests of its files, and which program file it is."""
        found = {"version": self.layout.current() or ""}
        program, files = self._reads(unit, read_settings(self.host))
        for path in (SYSTEMD_DIR / unit, *self._drop_ins(unit), *files):
            if self.host.exists(path):
                found[str(path)] = file_digest(self.host, path)
        path = self.layout.bin_dir / program
        if self.host.exists(path):
            # Not its digest: that takes long. Whoever replaces it, `up` too, makes it another file.
            info = self.host.stat(path)
            found[str(path)] = f"{info.st_dev}:{info.st_ino}:{info.st_mtime_ns}"
        return found

    def depends_on(self, unit: str, settings: Settings, paths: Collection[str]) -> bool:
        """Whether one of ``paths`` is among the inputs of a unit, under ``settings``."""
        _, files = self._reads(unit, settings)
        drop_ins = f"{drop_in_dir(unit)}/"
        return any(str(path) in paths for path in (SYSTEMD_DIR / unit, *files)) or any(
            path.startswith(drop_ins) for path in paths
        )

    def _reads(self, unit: str, settings: Settings) -> tuple[str, Sequence[HostPath]]:
        """The program of a unit, and the files that it reads at its start and not later."""
        if unit == UNIT_KUBELET:
            return "kubelet", (PROXY_FILE, *kubelet_inputs(settings))
        if unit == UNIT_LOCALDNS:
            return "coredns", (self.layout.current_link / localdns.SUPERVISOR,)
        return "containerd", (containerd.CONFIG_PATH, PROXY_FILE, *containerd.fragments(self.host))

    def _drop_ins(self, unit: str) -> list[HostPath]:
        directory = drop_in_dir(unit)
        names = self.host.listdir(directory) if self.host.is_dir(directory) else []
        return [directory / name for name in names if name.endswith(".conf")]

    def started_with(self, unit: str) -> dict[str, str]:
        """The inputs of the unit's last start in this boot; empty when there was none."""
        return self._started().get(unit, {})

    def _started(self) -> dict[str, dict[str, str]]:
        try:
            value = json.loads(self.host.read_bytes(STARTED))
            return {str(unit): {str(key): str(item) for key, item in inputs.items()} for unit, inputs in value.items()}
        except (OSError, ValueError, AttributeError):
            return {}

    def note_started(self, unit: str) -> None:
        """Remember the inputs of this start, under /run: they hold for this boot."""
        from stratum import atomicfile

        self.host.makedirs(STARTED.parent)
        value = {**self._started(), unit: self.inputs(unit)}
        # Digests of files with a password in them, which nobody else needs to have.
        atomicfile.write_file(self.host, STARTED, json.dumps(value).encode() + b"\n", 0o600)

    # -- gates --------------------------------------------------------------------------------------

    def wait_ready(self, unit: str, timeout: float = GATE_TIMEOUT) -> None:
        """The gate behind a unit: it answers. Raises :class:`StratumError`."""
        if unit == UNIT_CONTAINERD:
            self.ctr.wait_until_answers(timeout)
        elif unit == UNIT_KUBELET:
            wait_kubelet(self.host, read_settings(self.host))
        elif unit == UNIT_LOCALDNS:
            wait_localdns(self.host, read_settings(self.host).spec.local_dns.address)

    def wait_steady(self, seconds: float = STEADY_TIME) -> None:
        """See that units which answered do not end right after it. Raises :class:`StratumError`."""
        units = self.units
        before = systemd.read_units(self.host, units)
        deadline = self.host.monotonic() + seconds
        while self.host.monotonic() < deadline:
            self.host.sleep(_STEADY_POLL)
            now = systemd.read_units(self.host, units)
            for unit in units:
                if now[unit].active != "active" or now[unit].main_pid != before[unit].main_pid:
                    raise StratumError(
                        "unit-unsteady",
                        f"{unit}: ended again within {seconds:g} s of its first answer",
                        hint=f"read all of it: journalctl --boot --unit {unit}",
                    )
        for unit in units:
            self.wait_ready(unit)

    # -- the end ------------------------------------------------------------------------------------

    def end_containers(self) -> list[StratumError]:
        """End every container through containerd while it answers: asked first, killed after a grace."""
        errors: list[StratumError] = []
        if not self.host.exists(containerd.ADDRESS) or not self.ctr.answers():
            return errors
        for namespace in self.ctr.namespaces():
            try:
                errors += self.ctr.end_tasks(namespace, _GRACE)
                errors += self.ctr.delete_containers(namespace)
            except CommandError as error:
                errors.append(error)
        return errors

    def shims(self) -> list[reaper.Process]:
        """The shims of our containerd, and every process below them."""
        return pods.find_pods(self.host)

    def release(self) -> list[StratumError]:
        """Give back what containers that are gone held: addresses, rules, empty cgroups."""
        errors: list[StratumError] = []
        for group in CONTAINER_CGROUPS:
            remove_empty_cgroups(self.host, group)
        for attachment in cni.read_attachments(self.host):
            try:
                cni.release_attachment(self.host, attachment, self.layout.cni_bin_dir)
            except CommandError as error:
                errors.append(error)
        return errors


def remove_empty_cgroups(host: Host, path: HostPath) -> None:
    """Remove a cgroup and those below it, as far as no process is in them."""
    if not host.is_dir(path):
        return
    for name in host.listdir(path):
        if host.is_dir(path / name) and not host.is_link(path / name):
            remove_empty_cgroups(host, path / name)
    deadline = host.monotonic() + _DYING
    while True:
        try:
            host.rmdir(path)
            return
        except OSError as error:
            # A process lives there: it is not ours to end here. But one that was killed just now keeps its cgroup
            # busy, and is even listed, until the kernel is done with it.
            if error.errno != errno.EBUSY or host.monotonic() >= deadline:
                return
        host.sleep(0.05)
