"""A machine with what an admin brings to it on a USB stick: the pyz, a bundle, and the key to trust."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Optional, TypeVar, Union

from tests.lab.machine import Machine, Result
from tests.lab.snapshot import Snapshot

USB = "/root/usb"
PYZ = f"{USB}/stratum.pyz"
BUNDLE = f"{USB}/demo.tar"
IMAGE = "docker.io/library/busybox:stratum-demo"
TRUST = "/etc/stratum/trust.d"

# Databases and records with a time, an inode or a random number in them.
_UNIQUE = ("/containerd/", "/receipt.json", "/journal.json", "/history.json", "/run/stratum/lock", "/started.json")
# What running containers leaves until the node is stopped: addresses, layers.
_USED = ("/snapshots/", "/ingest/", "/run/stratum/cni", "v2.task/default")

AnyMachine = TypeVar("AnyMachine", bound=Machine)


@dataclass(frozen=True)
class Node(Generic[AnyMachine]):
    """A machine and the pyz on it."""

    machine: AnyMachine

    def stratum(
        self,
        *arguments: str,
        check: bool = True,
        env: Optional[Mapping[str, str]] = None,
        input: Union[bytes, str] = b"",  # noqa: A002 -- as Machine.run has it
        timeout: float = 300,
    ) -> Result:
        """Run the pyz from the stick; ``check`` means that its exit status must be 0."""
        return self.machine.run(
            [PYZ, *arguments], check=check, env=env, input=input, timeout=timeout, cwd=USB
        )

    def json(self, *arguments: str, check: bool = True) -> Any:
        """Run the pyz with ``--output json`` and return the document that it printed."""
        return json.loads(self.stratum(*arguments, "--output", "json", check=check).raw_stdout)

    def settle(self) -> None:
        """Wait until the supervisor, which `up` only asks for, says that the node is ready."""
        self.machine.run(["systemctl", "start", "stratum.service"])

    def receipt(self) -> dict[str, str]:
        """What Stratum says that it made: path and kind."""
        value = json.loads(self.machine.read("/var/lib/stratum/receipt.json"))
        return {entry["path"]: entry["kind"] for entry in value["entries"]}

    def ctr(self, *arguments: str, check: bool = True) -> Result:
        """Run containerd's client against the node's containerd."""
        return self.machine.run(["/usr/local/bin/stratum", "exec", "ctr", *arguments], check=check)


def bring(machine: AnyMachine, pyz: Path, key: Path, bundle: Optional[Path]) -> Node[AnyMachine]:
    """Put the pyz, the key and, if given, the bundle on a machine."""
    machine.copy_in(pyz, PYZ, 0o755)
    machine.copy_in(key, f"{TRUST}/publisher.pub")
    if bundle is not None:
        machine.copy_in(bundle, BUNDLE)
    return Node(machine)


def refusal(result: Result, *, state: bool = True) -> str:
    """The reference of the one error that a refused run printed.

    Checks its form as well: one error line, then a state (of a command that changes something) and a hint of one
    line each, and no traceback.
    """
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith("stratum: error[")]
    assert len(errors) == 1, result.describe()
    after = lines[lines.index(errors[0]) + 1 :]
    assert [line.partition(":")[0] for line in after] == (["state"] if state else []) + ["hint"], result.describe()
    assert "Traceback" not in result.stderr, result.describe()
    return errors[0].partition("[")[2].partition("]")[0]


def installed(state: Snapshot) -> dict[str, str]:
    """What Stratum placed: type, mode, owner, and the content where that is the same on every node."""
    places = ("/opt", "/etc/stratum", "/etc/cni", "/etc/systemd", "/usr/local", "/var/lib/stratum", "/run/stratum")
    found = {}
    for path, text in state["files"].items():
        if path.startswith(places) and not any(part in path for part in _USED):
            unique = path.startswith(("/var", "/run")) and any(part in path for part in _UNIQUE)
            found[path] = " ".join(text.split()[:2]) if unique else text
    return found
