"""The directories that a kubelet fills outside of Stratum's own: what in them is ours, and what was there before.

Where a directory was missing or empty, all of it is ours (a tree of the receipt). Where something was in it, the names
that were there are written down before the first start, and stay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from stratum.errors import StratumError
from stratum.receipt import STATE_DIRECTORY, Entry
from stratum.steps import Action, Call, RemoveTree, Work, plan_file
from stratum.system import Host, HostPath

__all__ = ["BEFORE_PATH", "KUBELET_TREES", "kubelet_mount_roots", "plan_kubelet_remains", "plan_kubelet_root"]

#: Where a kubelet keeps its state, the logs of pods and the links to them (its defaults, which other programs read).
KUBELET_TREES = (HostPath("/var/lib/kubelet"), HostPath("/var/log/pods"), HostPath("/var/log/containers"))
BEFORE_PATH = STATE_DIRECTORY / "kubelet-before.json"


def plan_kubelet_root(work: Work) -> list[Action]:
    """Record, once, whose each directory is. Before the first start of a kubelet; later runs find it recorded."""
    host, receipt = work.host, work.receipt
    before = _read_before(host)
    new = [path for path in KUBELET_TREES if receipt.get(path) is None and str(path) not in before]
    held = {str(path): host.listdir(path) for path in new if host.is_dir(path)}
    held = {path: names for path, names in held.items() if names}
    trees = [Entry(path, "tree") for path in new if str(path) not in held]
    actions: list[Action] = []
    if held:
        content = json.dumps({**before, **held}, indent=1, sort_keys=True).encode() + b"\n"
        actions += plan_file(work, BEFORE_PATH, content)
    if trees:
        names = ", ".join(str(entry.path) for entry in trees)
        actions.append(Call("record", names, lambda: receipt.record(*trees)))
    return actions


def _read_before(host: Host) -> Mapping[str, list[str]]:
    """What was in the directories before us; raises :class:`StratumError` when the record cannot be read."""
    try:
        value = json.loads(host.read_bytes(BEFORE_PATH))
        return {str(path): [str(name) for name in names] for path, names in value.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        # Without it what is somebody else's could not be told from ours.
        raise StratumError(
            "kubelet-record-unreadable", f"{BEFORE_PATH}: {error}", hint="put it back from a backup"
        ) from None


def _shared(host: Host) -> list[HostPath]:
    """Our part of the directories in which something was before us."""
    found = []
    for path, names in sorted(_read_before(host).items()):
        directory = HostPath(path)
        if directory in KUBELET_TREES and host.is_dir(directory) and not host.is_link(directory):
            found += [directory / name for name in host.listdir(directory) if name not in names]
    return found


def plan_kubelet_remains(work: Work) -> list[Action]:
    """What removes our part of directories that are not ours alone, for uninstall; trees go with the receipt.

    A mount below is never entered: RemoveTree refuses it.
    """
    return [RemoveTree(path) for path in _shared(work.host)]


def kubelet_mount_roots(work: Work) -> tuple[HostPath, ...]:
    """Below which directories uninstall takes mounts away (volumes of pods): the trees that are ours, and our parts.

    A link is none of them. Pods write here (hostPath: drivers, collectors of logs), and one to ``/`` would take every
    mount of the host along.
    """
    found = (*(path for path in KUBELET_TREES if work.receipt.get(path)), *_shared(work.host))
    return tuple(path for path in found if not work.host.is_link(path))
