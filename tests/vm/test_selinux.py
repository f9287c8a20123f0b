"""Real SELinux, Debian's policy in the kernel, permissive and enforcing: what `up` does with it, and gives back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Machines
from tests.lab import demo
from tests.lab.image import Image
from tests.lab.inside import PLACE, SOURCES, ask, python
from tests.lab.machine import Machine, Result
from tests.lab.packages import Package
from tests.lab.qemu import STEADY_CLOCK, QemuMachine
from tests.lab.selinux import CONTAINER_TYPES, OPTIONS, selinux_disk
from tests.pyz import built_pyz, default_cache

IMPORTS = """
from stratum import atomicfile, labels
from stratum.host import selinux
"""
NEW, EXISTING = "selinux.Policy()", "selinux.Policy(existing=True)"
PROBE = "/opt/stratum/node/1/bin/probe"
CONTAINERD = "/opt/stratum/node/current/bin/containerd"
CONTEXTS = "/etc/selinux/default/contexts/files/file_contexts"


@pytest.fixture(scope="module")
def host(
    module_machines: Machines,
    debian_packages: dict[str, Package],
    demo_image: Image,
    tmp_path_factory: pytest.TempPathFactory,
) -> QemuMachine:
    """A machine that boots permissive (the tests switch), with the stick's content and a trusted key."""
    scratch = tmp_path_factory.mktemp("files")
    (scratch / "container.cil").write_text(CONTAINER_TYPES)
    pyz = built_pyz(default_cache())
    publisher, bundle = demo.cached_bundle(pyz, debian_packages, [demo_image])
    files: dict[str, Path] = {
        "/root/usb/stratum.pyz": pyz,
        "/root/usb/demo.tar": bundle,
        "/etc/stratum/trust.d/publisher.pub": publisher.public,
        "/root/container.cil": scratch / "container.cil",
        PLACE: SOURCES,
    }
    options = f"{OPTIONS} {STEADY_CLOCK}"
    machine = module_machines.boot(QemuMachine(selinux_disk(), "selinux", files=files, options=options))
    machine.sh("chmod 0755 /root/usb/stratum.pyz; chmod 0644 /etc/stratum/trust.d/publisher.pub")
    return machine


def call(host: Machine, value: str) -> Any:
    return ask(host, IMPORTS, value, timeout=1800)


def label(host: Machine, path: str) -> str:
    """The type of a file, of what a link leads to."""
    return host.run(["stat", "--dereference", "--format=%C", path]).stdout.strip().split(":")[2]


def enforce(host: Machine, value: int) -> None:
    host.sh(f"echo {value} >/sys/fs/selinux/enforce")


def relabel(policy: str = NEW) -> str:
    return f"perform(lambda work: selinux.plan_relabel(work, {policy}, warnings.append)) + warnings"


def checks(host: Machine, policy: str) -> list[list[str]]:
    found: list[list[str]] = call(
        host, f"[[item.check, item.severity] for item in selinux.check_policy(host, {policy})]"
    )
    return found


def up(host: Machine, *arguments: str, check: bool = True) -> Result:
    program = ["./stratum.pyz", "up", "--quiet", *arguments]
    return host.run(program, cwd="/root/usb", timeout=1800, check=check)


def modules(host: Machine) -> list[str]:
    return host.run(["semodule", "--list-modules"], timeout=600).lines


def wrong_labels(host: Machine, *places: str) -> str:
    """What restorecon would change; keys are the admin's, and containerd's data is containerd's."""
    spared = ("-e", "/etc/stratum/trust.d", "-e", "/run/stratum/containerd")
    return host.run(["restorecon", "-n", "-v", "-R", *spared, *places]).stdout


def test_a_policy_that_knows_no_containers_stops_a_new_node_on_an_enforcing_host_only(host: QemuMachine) -> None:
    assert call(host, "labels.selinux_state(host).value") == "permissive"
    known = call(host, '[selinux.knows_type(host, name) for name in ("bin_t", "container_runtime_exec_t")]')
    assert known == [True, False], "Debian's policy knows no containers"
    assert checks(host, NEW) == [["selinux-policy", "warn"]]
    enforce(host, 1)
    try:
        assert checks(host, EXISTING) == [["selinux-policy", "warn"]], "an existing node is not stopped"
        refused = up(host, check=False)
    finally:
        enforce(host, 0)
    assert refused.status == 10, refused.describe()
    assert "error[host-refused]: this host is not fit: selinux-policy: SELinux is enforcing" in refused.stderr
    hint = "hint: install container-selinux, or opt out with --no-selinux"
    assert refused.stderr.splitlines()[-1] == hint, refused.describe()
    assert not host.exists("/opt/stratum") and not host.exists("/var/lib/stratum")


def test_a_new_file_has_the_label_of_its_name_and_not_of_the_temporary_one(host: QemuMachine) -> None:
    # The policy has a type of its own for this file; whatever else this domain makes in /etc gets another.
    assert host.run(["matchpathcon", "-n", "/etc/resolv.conf"]).stdout.split(":")[2] == "net_conf_t"
    host.sh("rm -f /etc/resolv.conf; echo plain >/etc/plain")
    python(host, f'{IMPORTS}\natomicfile.write_file(host, "/etc/resolv.conf", b"")')
    assert label(host, "/etc/plain") != "net_conf_t", "the kernel would not do it by itself"
    assert label(host, "/etc/resolv.conf") == "net_conf_t"
    python(host, f'{IMPORTS}\natomicfile.write_file(host, "/etc/resolv.conf", b"again")')
    assert label(host, "/etc/resolv.conf") == "net_conf_t"


def test_a_program_renamed_into_place_is_labelled_and_can_then_be_executed(host: QemuMachine) -> None:
    host.sh(f"mkdir -p {PROBE.rpartition('/')[0]}; cp /bin/true /root/probe; chcon -t tmp_t /root/probe")
    host.sh(f"mv /root/probe {PROBE}")
    # Debian's policy lets init itself run anything; this is the domain of services in others.
    unit = f"[Service]\nType=oneshot\nSELinuxContext=system_u:system_r:unconfined_t:s0\nExecStart={PROBE}\n"
    host.write("/run/systemd/system/probe.service", unit)
    host.run(["systemctl", "daemon-reload"])
    enforce(host, 1)
    try:
        refused = host.run(["systemctl", "start", "probe"], check=False)
        said = host.run(["journalctl", "-u", "probe", "-o", "cat"]).stdout
        done = call(host, relabel())
        started = host.run(["systemctl", "start", "probe"], check=False)
    finally:
        enforce(host, 0)
    assert refused.status != 0 and "Permission denied" in said, f"the case that this is about: {said}"
    assert f"relabel {PROBE} as bin_t" in done
    assert started.status == 0
    assert label(host, PROBE) == "bin_t"
    # restorecon is of the same opinion about everything of ours.
    assert wrong_labels(host, "/opt/stratum") == ""
    assert call(host, relabel()) == []
    host.sh("rm -r /opt/stratum /var/lib/stratum; rm /run/systemd/system/probe.service; systemctl daemon-reload")


@pytest.mark.timeout(3600)  # seconds; each change of the policy is built anew by an emulated processor
def test_a_node_on_an_enforcing_host_has_its_labels_keeps_them_and_gives_the_policy_back(
    host: QemuMachine, demo_image: Image
) -> None:
    before = host.sh(f"sha256sum {CONTEXTS}").stdout
    host.run(["semodule", "--install", "/root/container.cil"], timeout=1800)
    enforce(host, 1)
    try:
        # Registered, labelled, and running: nothing to complain about.
        done = up(host)
        assert done.stderr == "", done.describe()
        assert "stratum" in modules(host)
        # What containerd made itself is labelled too, before anything is imported into it.
        assert label(host, CONTAINERD) == "container_runtime_exec_t"
        assert label(host, "/opt/stratum/node/current/bin/ctr") == "bin_t"
        assert label(host, "/usr/local/bin/stratum") == "bin_t"
        assert label(host, "/var/lib/stratum/containerd") == "container_var_lib_t"
        host.run(["systemctl", "start", "stratum.service"], timeout=600)
        assert wrong_labels(host, "/opt/stratum", "/etc/stratum", "/usr/local/bin", "/run/stratum") == ""
        command = ["ctr", "run", "--rm", demo_image.reference, "hello", "echo", "hello"]
        assert host.run(["stratum", "exec", *command], timeout=600).stdout == "hello\n"

        # The package with the types goes, and what was labelled with them has no valid label; /run is as a reboot
        # leaves it. The next start labels the node as the policy can, and it goes on.
        host.run(["semodule", "--remove", "container"], timeout=1800)
        host.run(["systemctl", "stop", "stratum.service", "stratum-containerd.service"], timeout=600)
        host.run(["rm", "-r", "/run/stratum/containerd"])
        host.run(["systemctl", "start", "stratum.service"], timeout=1200)
        status = host.run(["stratum", "status", "--wait", "120"], timeout=600, check=False)
        assert status.status == 0, status.describe()
        assert label(host, CONTAINERD) == "bin_t"

        # An admin who opts out has the contexts taken back and the labels left alone.
        listed = host.run(["stratum", "uninstall", "--dry-run"], timeout=600).stdout
        assert "unregister SELinux file contexts (module stratum)" in listed
        host.run(["chcon", "-t", "usr_t", "/opt/stratum/node/current/bin/ctr"])
        up(host, "--no-selinux")
        assert "stratum" not in modules(host)
        assert host.sh(f"sha256sum {CONTEXTS}").stdout == before
        assert label(host, "/opt/stratum/node/current/bin/ctr") == "usr_t"

        done = host.run(["stratum", "uninstall", "--quiet"], timeout=1200)
        assert (done.stderr, "left:" in done.stdout) == ("", False), done.describe()
    finally:
        enforce(host, 0)
    assert host.sh(f"sha256sum {CONTEXTS}").stdout == before
