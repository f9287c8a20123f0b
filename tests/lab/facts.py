"""What a node is at one moment, seen from outside of Stratum: links, processes, files, records.

A version that was switched to or from is wholly there or it is not: ``check_whole`` compares everything that
must agree with everything else. One script in the machine collects it, so a look costs one command.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.lab.machine import Machine

_SCRIPT = r"""
import json, os, subprocess

def read(path):
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return None

def show(unit):
    words = ["systemctl", "show", "--property=ActiveState,MainPID,NeedDaemonReload", unit]
    text = subprocess.run(words, stdout=subprocess.PIPE, universal_newlines=True).stdout
    return dict(line.split("=", 1) for line in text.splitlines())

def tree(top, skip=()):
    found = []
    for directory, names, files in os.walk(top):
        names[:] = [name for name in names if os.path.join(directory, name) not in skip]
        found += [os.path.join(directory, name) for name in names + files]
    return found

receipt = json.loads(read("/var/lib/stratum/receipt.json") or '{"entries": []}')["entries"]
known = {entry["path"] for entry in receipt}
trees = {entry["path"] for entry in receipt if entry["kind"] == "tree"}
own = [path for top in ("/opt/stratum", "/opt/cni", "/etc/stratum", "/etc/cni", "/var/lib/stratum", "/usr/local/bin")
       for path in tree(top, skip=trees)]
units = "/etc/systemd/system"
own += [path for path in tree(units) if os.path.relpath(path, units).startswith("stratum")]
containerd = show("stratum-containerd.service")
pid = int(containerd.get("MainPID") or 0)
try:
    program = os.readlink("/proc/%d/exe" % pid) if pid else None
except OSError:
    program = None
try:
    current = os.readlink("/opt/stratum/node/current")
except OSError:
    current = None
server = subprocess.run(["/opt/stratum/node/current/bin/ctr", "--address", "/run/stratum/containerd/containerd.sock",
    "--timeout", "10s", "version"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True).stdout
print(json.dumps({
    "current": current, "pid": pid, "program": program, "active": containerd.get("ActiveState"),
    "reload": containerd.get("NeedDaemonReload"), "config": read("/etc/stratum/containerd/config.toml"),
    "server": server, "journal": json.loads(read("/var/lib/stratum/journal.json") or "null"),
    "history": json.loads(read("/var/lib/stratum/history.json") or "[]"),
    "staging": os.path.lexists("/opt/stratum/.staging"),
    "temporary": [path for path in own if path.endswith(".tmp")],
    "dangling": [path for path in own if os.path.islink(path) and not os.path.exists(path)],
    "unrecorded": sorted(path for path in own if path not in known),
    "gone": sorted(path for path in known - trees if not os.path.lexists(path)),
    "versions": sorted(name for name in os.listdir("/opt/stratum/node") if name != "current"),
}))
"""

# What is in those places and is not Stratum's: the admin's keys, and the records themselves.
_OTHERS = ("/etc/stratum/trust.d", "/var/lib/stratum/receipt.json", "/var/lib/stratum/journal.json")


@dataclass(frozen=True)
class Facts:
    """One look at a node."""

    current: str
    pid: int
    program: str
    active: str
    reload: str
    config: str
    server: str
    journal: dict[str, Any]
    history: list[dict[str, Any]]
    staging: bool
    temporary: list[str]
    dangling: list[str]
    unrecorded: list[str]
    gone: list[str]
    versions: list[str]

    @property
    def settled(self) -> bool:
        """Whether the journal knows of nothing that was cut off."""
        return self.journal["state"] in ("done", "rolled-back")


def look(machine: Machine) -> Facts:
    """Collect the facts."""
    return Facts(**json.loads(machine.run(["python3", "-c", _SCRIPT]).stdout))


def check_whole(machine: Machine, releases: dict[str, str]) -> Facts:
    """Check that a node is wholly one of some versions and that nothing is left of any other; return the facts.

    :param releases: the versions that it may be, with the release of containerd of each.
    """
    facts = look(machine)
    assert facts.current in releases, facts
    release = releases[facts.current]
    assert facts.active == "active", facts
    assert facts.program == f"/opt/stratum/node/{facts.current}/bin/containerd", facts
    assert f"Version:  {release}" in facts.server.partition("Server:")[2], facts
    assert f"\nversion = {2 if release.startswith('1.') else 3}\n" in facts.config, facts
    assert facts.reload == "no", facts
    assert facts.settled, facts
    assert facts.history[-1]["version"] == facts.current, facts
    assert not facts.staging, facts
    assert facts.temporary == [], facts
    assert facts.dangling == [], facts
    assert [path for path in facts.unrecorded if not path.startswith(_OTHERS)] == [], facts
    assert facts.gone == [], facts
    return facts
