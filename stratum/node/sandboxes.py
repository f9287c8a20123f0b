"""What pods leave in the network when they are killed rather than taken down through CRI.

containerd binds a pod's network namespace to ``/run/netns/cni-UUID`` (pkg/netns, 1.6 to 2.x), and libcni remembers what
each plugin did for it. The kubelet has both taken back, one pod after the other; on a node that is taken off nobody is
left to. Each is traced to a sandbox of our own containerd: another containerd's pods look the same.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any, Optional

from stratum.errors import CommandError
from stratum.node import containerd
from stratum.node.cni import RESULTS
from stratum.steps import Action, Call, RemoveDirectory, RemoveFile
from stratum.system import Host, HostPath

__all__ = ["NETNS", "plan_sandboxes"]

NETNS = HostPath("/run/netns")
_SANDBOXES = containerd.DATA_ROOT / "io.containerd.grpc.v1.cri/sandboxes"
_NAMESPACE = re.compile(r"(?:/var)?/run/netns/(cni-[0-9a-f-]{36})")
_TIMEOUT = 30.0


def _read(host: Host, path: HostPath) -> Optional[Any]:
    try:
        return json.loads(host.read_bytes(path))
    except (OSError, ValueError):
        return None


def _namespaces(result: Any) -> set[HostPath]:
    """The namespaces that a plugin's result names (CNI specification 1.0.0, "Success": interfaces, sandbox)."""
    try:
        names = [_NAMESPACE.fullmatch(str(item.get("sandbox", ""))) for item in result["interfaces"]]
    except (KeyError, TypeError, AttributeError):
        return set()
    return {NETNS / name[1] for name in names if name}


def _unmount(host: Host, path: HostPath) -> None:
    try:
        host.run(["umount", "--no-canonicalize", str(path)], timeout=_TIMEOUT)
    except CommandError as error:
        # One that is not mounted is the file alone.
        if "not mounted" not in error.stderr:
            raise
    host.unlink(path)


def plan_sandboxes(host: Host) -> list[Action]:
    """Remove the network namespaces of our pods, with the interfaces in them, and what libcni remembers of them.

    The pods are dead by then. What a cluster's own plugins keep elsewhere is theirs.
    """
    known = set(host.listdir(_SANDBOXES)) if host.is_dir(_SANDBOXES) else set()
    results = [RESULTS / name for name in host.listdir(RESULTS)] if known and host.is_dir(RESULTS) else []
    namespaces: set[HostPath] = set()
    records: list[Action] = []
    for path in results:
        value = _read(host, path)
        if isinstance(value, dict) and str(value.get("containerId")) in known:
            namespaces |= _namespaces(value.get("result"))
            records.append(RemoveFile(path))
    actions: list[Action] = [
        Call("remove network namespace", str(path), functools.partial(_unmount, host, path))
        for path in sorted(namespaces)
        if host.lexists(path)
    ]
    if actions and set(host.listdir(NETNS)) <= {path.name for path in namespaces}:
        actions.append(RemoveDirectory(NETNS))
    return [*actions, *records]
