"""Our policy module, built into a real policy by real semodule. No kernel with SELinux is needed for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratum.host.selinux import MODULE_PATH
from tests.conftest import Machines
from tests.lab import roots
from tests.lab.inside import PLACE, SOURCES, ask
from tests.lab.nspawn import NspawnMachine
from tests.lab.selinux import CONTAINER_TYPES

# The machine says that SELinux is on; this kernel's is not.
IMPORTS = """
from stratum.host import selinux
from stratum.labels import SELinux
selinux.selinux_state = lambda host: SELinux.PERMISSIVE
"""
REGISTER = "perform(lambda work: selinux.plan_contexts(work, selinux.Policy(), warnings.append)) + warnings"
REGISTERED = ["register SELinux file contexts (module stratum)"]
LOOKED_UP = {
    "/opt/stratum/node/1/bin/containerd": ("bin_t", "container_runtime_exec_t"),
    "/opt/stratum/components/sha256-ab/bin/containerd": ("bin_t", "container_runtime_exec_t"),
    "/opt/stratum/node/1/bin/ctr": ("bin_t", "bin_t"),
    "/opt/stratum/pyz/1-ab/stratum.pyz": ("bin_t", "bin_t"),
    "/var/lib/stratum/containerd/meta.db": ("var_lib_t", "container_var_lib_t"),
    "/var/lib/stratum/containerd/overlayfs/snapshots/1/fs/bin/sh": ("var_lib_t", "container_ro_file_t"),
    "/var/lib/stratum/receipt.json": ("var_lib_t", "var_lib_t"),
    "/run/stratum/containerd/containerd.sock": (None, "container_var_run_t"),
    "/usr/local/bin/stratum": ("bin_t", "bin_t"),
}


@pytest.fixture(scope="module")
def policy_root() -> Path:
    return roots.root_directory(roots.SELINUX)


def types(machine: NspawnMachine) -> dict[str, str | None]:
    """What the policy wants for each path, asked of libselinux through the host."""
    found = {}
    for path in LOOKED_UP:
        label = ask(machine, "import stat", f"host.policy_label({path!r}, stat.S_IFREG)")
        found[path] = label.split(":")[2] if label else None
    return found


def digests(machine: NspawnMachine) -> str:
    return machine.sh("sha256sum /etc/selinux/default/contexts/files/* /etc/selinux/default/policy/*").stdout


def test_the_module_gives_what_the_policy_can_and_goes_without_a_trace(machines: Machines, policy_root: Path) -> None:
    machine = machines.boot(NspawnMachine(policy_root))
    machine.copy_tree_in(SOURCES, PLACE)
    before = digests(machine)

    # A policy without the types of containers takes the module; the contexts that it knows are in force.
    done = ask(machine, IMPORTS, REGISTER, timeout=900)
    assert done[-1:] == REGISTERED
    assert machine.run(["semodule", "--list-modules"]).lines.count("stratum") == 1
    assert types(machine) == {path: before for path, (before, _) in LOOKED_UP.items()}
    assert "/opt/stratum/pyz/" in machine.read("/etc/selinux/default/contexts/files/file_contexts")
    assert ask(machine, IMPORTS, REGISTER) == [], "a second time there is nothing to do"

    # The types come later, with a package: nothing of ours has to be done again.
    machine.write("/root/container.cil", CONTAINER_TYPES)
    machine.run(["semodule", "--install", "/root/container.cil"], timeout=900)
    assert types(machine) == {path: after for path, (_, after) in LOOKED_UP.items()}
    assert ask(machine, IMPORTS, REGISTER) == []

    machine.run(["semodule", "--remove", "container"], timeout=900)
    assert ask(machine, IMPORTS, "perform(selinux.plan_unregister)", timeout=900) == [
        "unregister SELinux file contexts (module stratum)"
    ]
    assert digests(machine) == before
    assert machine.exists(MODULE_PATH), "the file is the receipt's to remove"
