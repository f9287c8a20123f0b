"""Real SELinux: Debian's policy in the kernel, permissive and enforcing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import Machines
from tests.lab import roots
from tests.lab.inside import PLACE, SOURCES, ask, python
from tests.lab.machine import Machine
from tests.lab.qemu import QemuMachine

IMPORTS = "from stratum import atomicfile, labels\nfrom stratum.host import selinux\nfrom stratum.receipt import Entry"
NEW, EXISTING = "selinux.Policy()", "selinux.Policy(existing=True)"
PROGRAM = "/opt/stratum/node/1/bin/probe"


@pytest.fixture(scope="module")
def host(module_machines: Machines) -> QemuMachine:
    """A machine whose kernel has Debian's policy. It boots permissive; the tests switch."""
    disk = roots.root_disk(roots.SELINUX)
    options = "security=selinux selinux=1 enforcing=0"
    return module_machines.boot(QemuMachine(disk, "selinux", files={PLACE: SOURCES}, options=options))


def call(host: Machine, value: str) -> Any:
    return ask(host, IMPORTS, value, timeout=1800)


def label(host: Machine, path: str) -> str:
    """The type of a file."""
    return host.run(["stat", "--format=%C", path]).stdout.strip().split(":")[2]


def enforce(host: Machine, value: int) -> None:
    host.sh(f"echo {value} >/sys/fs/selinux/enforce")


def relabel(policy: str = NEW) -> str:
    return f"perform(lambda work: selinux.plan_relabel(work, {policy}, warnings.append)) + warnings"


def checks(host: Machine, policy: str) -> list[list[str]]:
    found: list[list[str]] = call(
        host, f"[[item.check, item.severity] for item in selinux.check_policy(host, {policy})]"
    )
    return found


def test_state_and_types_are_those_of_the_kernel(host: QemuMachine) -> None:
    assert call(host, "labels.selinux_state(host).value") == "permissive"
    known = call(host, '[selinux.knows_type(host, name) for name in ("bin_t", "container_runtime_exec_t")]')
    assert known == [True, False], "Debian's policy knows no containers"
    assert checks(host, NEW) == [["selinux-policy", "warn"]]
    enforce(host, 1)
    try:
        assert call(host, "labels.selinux_state(host).value") == "enforcing"
        assert checks(host, NEW) == [["selinux-policy", "reject"]]
        assert checks(host, EXISTING) == [["selinux-policy", "warn"]], "an existing node is not stopped"
    finally:
        enforce(host, 0)


def test_a_new_file_has_the_label_of_its_name_and_not_of_the_temporary_one(host: QemuMachine) -> None:
    # The policy has a type of its own for this file; whatever else is made in /etc gets etc_t.
    assert host.run(["matchpathcon", "-n", "/etc/resolv.conf"]).stdout.split(":")[2] == "net_conf_t"
    host.sh("rm -f /etc/resolv.conf; echo plain >/etc/plain")
    python(host, f'{IMPORTS}\natomicfile.write_file(host, "/etc/resolv.conf", b"")')
    assert (label(host, "/etc/plain"), label(host, "/etc/resolv.conf")) == ("etc_t", "net_conf_t")
    python(host, f'{IMPORTS}\natomicfile.write_file(host, "/etc/resolv.conf", b"again")')
    assert label(host, "/etc/resolv.conf") == "net_conf_t"


def test_a_program_renamed_into_place_is_labelled_and_can_then_be_executed(host: QemuMachine) -> None:
    host.sh(f"mkdir -p {PROGRAM.rpartition('/')[0]}; cp /bin/true /root/probe; mv /root/probe {PROGRAM}")
    host.sh(f"chcon -t shadow_t {PROGRAM}")
    unit = f"[Service]\nType=oneshot\nExecStart={PROGRAM}\n"
    host.write("/etc/systemd/system/probe.service", unit)
    host.run(["systemctl", "daemon-reload"])
    enforce(host, 1)
    try:
        refused = host.run(["systemctl", "start", "probe"], check=False)
        said = host.run(["journalctl", "-u", "probe", "-o", "cat"]).stdout
        done = call(host, relabel())
        started = host.run(["systemctl", "start", "probe"], check=False)
    finally:
        enforce(host, 0)
    assert refused.status != 0 and "Permission denied" in said, "the case that this is about"
    assert f"relabel {PROGRAM} as bin_t" in done
    assert started.status == 0
    assert label(host, PROGRAM) == "bin_t"
    # restorecon is of the same opinion about everything of ours.
    assert host.run(["restorecon", "-n", "-v", "-R", "/opt/stratum"]).stdout == ""
    assert call(host, relabel()) == []


def test_contexts_are_registered_in_the_running_policy_and_taken_back(host: QemuMachine) -> None:
    before = host.sh("sha256sum /etc/selinux/default/contexts/files/file_contexts").stdout
    python(
        host, 'import os; os.makedirs("/opt/stratum/pyz/1-a"); open("/opt/stratum/pyz/1-a/stratum.pyz", "w").close()'
    )
    assert label(host, "/opt/stratum/pyz/1-a/stratum.pyz") == "usr_t"
    register = f"perform(lambda work: selinux.plan_contexts(work, {NEW}, warnings.append)) + warnings"
    assert call(host, register)[-1] == "register SELinux file contexts (module stratum)"
    assert "relabel /opt/stratum/pyz/1-a/stratum.pyz as bin_t" in call(host, relabel())
    assert label(host, "/opt/stratum/pyz/1-a/stratum.pyz") == "bin_t"
    assert label(host, "/var/lib/stratum/selinux/stratum.cil") == "var_lib_t"
    assert call(host, register) == []
    call(host, "perform(selinux.plan_unregister)")
    assert host.sh("sha256sum /etc/selinux/default/contexts/files/file_contexts").stdout == before
