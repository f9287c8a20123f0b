"""The running stack: its units in order, the gates between them, and its end (seed 000, type Backend).

Start order is :data:`UNITS`; stop order the reverse. Every unit is tried when stopping, so that a failure on
one does not leave the others running; the errors are joined.
"""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass

from stratum import systemd
from stratum.errors import CommandError, StratumError
from stratum.node import cni, containerd, pods, reaper
from stratum.node.layout import Layout
from stratum.node.units import SYSTEMD_DIR, UNIT_CONTAINERD
from stratum.receipt import file_digest
from stratum.system import Host, HostPath

__all__ = ["CONTAINER_CGROUPS", "UNITS", "Stack"]

UNITS = (UNIT_CONTAINERD,)
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

    # -- what it was started with -------------------------------------------------------------------

    def inputs(self) -> dict[str, str]:
        """What the running units depend on: the version, the digests of their files, and which program file it is."""
        found = {"version": self.layout.current() or ""}
        for path in (containerd.CONFIG_PATH, SYSTEMD_DIR / UNIT_CONTAINERD):
            if self.host.exists(path):
                found[str(path)] = file_digest(self.host, path)
        program = self.layout.bin_dir / "containerd"
        if self.host.exists(program):
            # Not its digest: that takes long. Whoever replaces it, `up` too, makes it another file.
            info = self.host.stat(program)
            found[str(program)] = f"{info.st_dev}:{info.st_ino}:{info.st_mtime_ns}"
        return found

    def started_with(self) -> dict[str, str]:
        """The inputs of the last start in this boot; empty when there was none."""
        try:
            value = json.loads(self.host.read_bytes(STARTED))
            return {str(key): str(item) for key, item in value.items()}
        except (OSError, ValueError, AttributeError):
            return {}

    def note_started(self) -> None:
        """Remember the inputs of this start, under /run: they hold for this boot."""
        from stratum import atomicfile

        self.host.makedirs(STARTED.parent)
        atomicfile.write_file(self.host, STARTED, json.dumps(self.inputs()).encode() + b"\n")

    # -- gates --------------------------------------------------------------------------------------

    def wait_ready(self, unit: str, timeout: float = GATE_TIMEOUT) -> None:
        """The gate behind a unit: containerd answers a call. Raises :class:`StratumError`."""
        if unit == UNIT_CONTAINERD:
            self.ctr.wait_until_answers(timeout)

    def wait_steady(self, seconds: float = STEADY_TIME) -> None:
        """See that units which answered do not end right after it. Raises :class:`StratumError`."""
        before = systemd.read_units(self.host, UNITS)
        deadline = self.host.monotonic() + seconds
        while self.host.monotonic() < deadline:
            self.host.sleep(_STEADY_POLL)
            now = systemd.read_units(self.host, UNITS)
            for unit in UNITS:
                if now[unit].active != "active" or now[unit].main_pid != before[unit].main_pid:
                    raise StratumError(
                        "unit-unsteady",
                        f"{unit}: ended again within {seconds:g} s of its first answer",
                        hint=f"read all of it: journalctl --boot --unit {unit}",
                    )
        for unit in UNITS:
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
