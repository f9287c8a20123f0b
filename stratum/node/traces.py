"""What dead containers leave below /run/containerd.

containerd's shims, runc and ``ctr`` keep sockets, states and FIFOs there, outside of the state directory that our
containerd is told, and so do those of any other containerd of the host. A container that ended in order takes
them along; one that was killed does not. Each thing is traced back to a container of ours before it goes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from stratum.node import containerd, pods
from stratum.steps import Action, RemoveDirectory, RemoveFile, RemoveTree
from stratum.system import Host, HostPath

__all__ = ["plan_traces"]

ROOT = HostPath("/run/containerd")
TASKS = containerd.STATE_ROOT / "io.containerd.runtime.v2.task"
_FIFOS = ("-stdin", "-stdout", "-stderr")

Container = tuple[str, str]  # namespace, id


def plan_traces(host: Host) -> list[Action]:
    """What removes the traces of our dead containers; none while one of ours lives, which takes its own along."""
    if not host.is_dir(ROOT) or pods.find_pods(host):
        return []
    states = _runc_states(host)
    tasks = [(namespace, name) for namespace in _names(host, TASKS) for name in _names(host, TASKS / namespace)]
    containers = sorted({*states, *tasks})
    actions: list[Action] = [RemoveTree(path) for path in states.values()]
    actions += [RemoveFile(path) for path in map(_socket, containers) if host.lexists(path)]
    actions += [RemoveTree(path) for path in _fifo_directories(host, {name for _, name in containers})]
    gone = {HostPath(action.subject) for action in actions}
    namespaces = [ROOT / "runc" / name for name in sorted({*_names(host, TASKS), *(space for space, _ in states)})]
    for path in (*namespaces, ROOT / "runc", ROOT / "s", ROOT / "fifo", ROOT):
        if host.is_dir(path) and all(path / name in gone for name in host.listdir(path)):
            actions.append(RemoveDirectory(path))
            gone.add(path)
    return actions


def _names(host: Host, path: HostPath) -> list[str]:
    return host.listdir(path) if host.is_dir(path) else []


def _runc_states(host: Host) -> dict[Container, HostPath]:
    """The state directories that runc made for our containers: their bundles lie below our containerd's state."""
    found = {}
    for namespace in _names(host, ROOT / "runc"):
        for name in _names(host, ROOT / "runc" / namespace):
            path = ROOT / "runc" / namespace / name
            if any(TASKS in HostPath(bundle).parents for bundle in _bundles(host, path / "state.json")):
                found[namespace, name] = path
    return found


def _bundles(host: Host, path: HostPath) -> list[str]:
    """The ``bundle`` label in a runc state; empty when it cannot be read."""
    try:
        labels = json.loads(host.read_bytes(path))["config"]["labels"]
        return [label.partition("=")[2] for label in labels if label.startswith("bundle=")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _socket(container: Container) -> HostPath:
    """The socket of a shim: containerd's SocketAddress (runtime/v2/shim/util_unix.go, 1.6 to 2.x)."""
    name = HostPath(containerd.ADDRESS, *container)
    return ROOT / "s" / hashlib.sha256(str(name).encode()).hexdigest()


def _fifo_directories(host: Host, names: Iterable[str]) -> list[HostPath]:
    """The directories in which ``ctr`` made FIFOs for containers of ours only."""
    fifos = {name + end for name in names for end in _FIFOS}
    directories = [ROOT / "fifo" / name for name in _names(host, ROOT / "fifo")]
    return [path for path in directories if host.is_dir(path) and set(host.listdir(path)) <= fifos]
