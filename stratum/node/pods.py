"""Ending the pods: containers' processes and cgroups that outlive containerd (seed 000, Destroy and Upgrade).

Only what hangs below a shim of our own containerd is touched: the shims are found by their socket address, and
the cgroups are those that their descendants are in.
"""

from __future__ import annotations

from stratum.errors import StratumError
from stratum.node import containerd, reaper
from stratum.system import Host, HostPath

__all__ = ["CGROUP_ROOT", "end_pods", "find_pods", "pod_cgroups"]

CGROUP_ROOT = HostPath("/sys/fs/cgroup")
_UNIT_SUFFIXES = (".service", ".scope")


def find_pods(host: Host) -> list[reaper.Process]:
    """The shims of our containerd, and every process below them, shims first."""
    everybody = reaper.read_processes(host)
    return reaper.with_descendants(everybody, reaper.find_shims(everybody, containerd.ADDRESS))


def _cgroup_of(host: Host, process: reaper.Process) -> HostPath:
    """The cgroup v2 of a process, cgroups(7): the line ``0::/path``; the root when it is gone."""
    try:
        lines = host.read_text(reaper.PROC / str(process.pid) / "cgroup").splitlines()
    except OSError:
        return CGROUP_ROOT
    path = next((line[3:] for line in lines if line.startswith("0::/")), "/")
    return CGROUP_ROOT / path.lstrip("/")


def pod_cgroups(host: Host, processes: list[reaper.Process]) -> list[HostPath]:
    """The cgroups that the containers among ``processes`` are in; never the root, nor a unit's own group.

    The shims themselves live in containerd's unit, which systemd manages.
    """
    groups = {_cgroup_of(host, process) for process in processes if not _is_shim(process)}
    shims = {_cgroup_of(host, process) for process in processes if _is_shim(process)}
    return sorted(
        group
        for group in groups - shims
        if group != CGROUP_ROOT and not (group.name.startswith("stratum") and group.name.endswith(_UNIT_SUFFIXES))
    )


def _is_shim(process: reaper.Process) -> bool:
    return bool(reaper.find_shims([process], containerd.ADDRESS))


def _kill_group(host: Host, group: HostPath) -> None:
    """Kill everything in a cgroup at once: cgroup.kill, Linux 5.14; older kernels have no such file."""
    path = group / "cgroup.kill"
    if host.exists(path):
        host.write_control(path, b"1")


def end_pods(host: Host) -> list[StratumError]:
    """Kill the shims of our containerd, their descendants and their cgroups; what failed is returned."""
    processes = find_pods(host)
    if not processes:
        return []
    errors: list[StratumError] = []
    for group in pod_cgroups(host, processes):
        try:
            _kill_group(host, group)
        except FileNotFoundError:
            continue
        except OSError as error:
            errors.append(StratumError("kill-failed", f"{group}: {error.strerror}"))
    return errors + reaper.end_processes(host, processes)
