"""Hosts that are not as one would like them: refused before the first write, or made to work all the same."""

from __future__ import annotations

import fcntl
import struct
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratum.node import containerd
from tests.conftest import Machines
from tests.lab import packages
from tests.lab.cri import Cri
from tests.lab.demo import Publisher
from tests.lab.image import Image
from tests.lab.machine import BARE_ENV, Result, wait_until
from tests.lab.node import BUNDLE, IMAGE, PYZ, USB, Node, bring, refusal
from tests.lab.nspawn import NspawnMachine
from tests.lab.packages import Package
from tests.lab.snapshot import Snapshot, check_same, snapshot

MachineNode = Node[NspawnMachine]

MODE = "containerd sets the mode of its root directory, also of one that was there"

NOT_ROOT, HOST_REFUSED, LOCKED = 4, 10, 11
STAGING = "/opt/stratum/.staging"


@pytest.fixture
def before(bare: MachineNode) -> Iterator[Snapshot]:
    """The machine before the test, which must give this back."""
    state = snapshot(bare.machine)
    yield state
    check_same(state, snapshot(bare.machine))


def check_refused(done: Result, *words: str) -> None:
    """Preflight refused the host, nothing was done, and ``words`` say why."""
    assert (done.status, refusal(done)) == (HOST_REFUSED, "host-refused"), done.describe()
    assert "\nstate: nothing was changed\n" in f"\n{done.stderr}", done.describe()
    for word in words:
        assert word in done.stderr, done.describe()


def check_works(node: MachineNode, *arguments: str) -> None:
    """`up` makes a ready node, and `uninstall` runs to its end."""
    node.stratum("up", "--quiet", *arguments)
    assert node.json("status", "--wait", "30")["ready"]
    node.settle()
    node.stratum("uninstall", "--quiet")


# -- another containerd --------------------------------------------------------------------------------------


# The newest listens for plugins too, at a place of its own choice.
@pytest.mark.parametrize("suite", ["bookworm", "unstable"])
def test_a_containerd_of_the_distribution_is_respected(
    node: MachineNode, debian_packages: dict[str, Package], demo_image: Image, suite: str
) -> None:
    machine, theirs = node.machine, packages.fetch(suite)["containerd"].tree
    for name in ("containerd", "containerd-shim-runc-v2", "ctr"):
        machine.copy_in(theirs / "usr/bin" / name, f"/usr/bin/{name}", 0o755)
    machine.copy_in(debian_packages["runc"].tree / "usr/sbin/runc", "/usr/sbin/runc", 0o755)
    (unit,) = theirs.glob("**/containerd.service")
    machine.copy_in(unit, "/lib/systemd/system/containerd.service")
    machine.write("/etc/containerd/config.toml", 'disabled_plugins = ["cri"]\n')
    machine.sh("systemctl daemon-reload; systemctl start containerd")
    machine.run(["/usr/bin/ctr", "images", "import", "-"], input=demo_image.oci_archive())
    run = ["/usr/bin/ctr", "run", "--detach", "--cpu-shares", "0", IMAGE, "theirs", "sleep", "5000"]
    machine.run(run)
    pid = machine.run(["systemctl", "show", "-P", "MainPID", "containerd"]).stdout
    before = snapshot(machine)

    done = node.stratum("up", check=False)
    check_refused(done, "/lib/systemd/system/containerd.service", "/usr/bin/containerd", f"process {pid.strip()}")
    findings = node.json("preflight", "--bundle", BUNDLE, check=False)["findings"]
    assert {finding["check"] for finding in findings} == {"unmanaged"}
    check_same(before, snapshot(machine))

    node.stratum("up", "--quiet", "--skip-check", "unmanaged")
    node.settle()
    node.ctr("run", "--detach", "--cni", "--cpu-shares", "0", IMAGE, "ours", "sleep", "5001")
    assert node.ctr("tasks", "list", "--quiet").lines == ["ours"]
    # CRI is off in theirs and on in ours.
    cri = Cri(machine.path_in_machine(str(containerd.ADDRESS)))
    assert cri.version().startswith("1.6.")
    cri.close()
    node.stratum("uninstall", "--quiet")
    # Theirs has the same process, and its container runs on and can be ended through it.
    check_same(before, snapshot(machine))
    assert machine.run(["systemctl", "show", "-P", "MainPID", "containerd"]).stdout == pid
    assert machine.run(["/usr/bin/ctr", "tasks", "list", "--quiet"]).lines == ["theirs"]
    machine.sh("ctr tasks delete --force theirs; ctr containers delete theirs")


def test_a_masked_unit_is_found_before_the_first_write(bare: MachineNode, before: Snapshot) -> None:
    for unit, where in (("stratum.service", "/etc"), ("stratum-containerd.service", "/run")):
        bare.machine.run(["systemctl", "mask", "--quiet", *(["--runtime"] if where == "/run" else []), unit])
        masked = snapshot(bare.machine)
        check_refused(bare.stratum("up", check=False), f"{where}/systemd/system/{unit}", f"systemctl unmask {unit}")
        check_same(masked, snapshot(bare.machine))
        bare.machine.run(["systemctl", "unmask", "--quiet", "--runtime", unit])
        bare.machine.run(["systemctl", "unmask", "--quiet", unit])


# -- mounts ---------------------------------------------------------------------------------------------------


def test_a_read_only_etc_is_refused_and_nothing_is_left_when_the_check_is_skipped(
    bare: MachineNode, before: Snapshot
) -> None:
    bare.machine.sh("mount --bind /etc /etc; mount -o remount,bind,ro /etc")
    try:
        check_refused(bare.stratum("up", check=False), "/etc/systemd/system", "read-only", "findmnt")
        done = bare.stratum("up", "--skip-check", "writable-paths", check=False)
        assert (done.status, refusal(done)) == (1, "system-error")
        assert "state: nothing was changed" in done.stderr and "Read-only file system" in done.stderr
    finally:
        bare.machine.run(["umount", "/etc"])


def test_noexec_on_the_usual_places_does_not_matter(bare: MachineNode, before: Snapshot) -> None:
    places = ("/tmp", "/var/tmp", "/home", "/var/lib")
    bare.machine.sh(
        "for d in /tmp /var/tmp /home; do mount -t tmpfs -o noexec none $d; done;"
        "mount --bind /var/lib /var/lib; mount -o remount,bind,noexec /var/lib"
    )
    try:
        check_works(bare)
    finally:
        bare.machine.sh("".join(f"umount {place};" for place in places))


def test_noexec_where_the_programs_go_is_refused_by_name(bare: MachineNode, before: Snapshot) -> None:
    bare.machine.sh("mount -t tmpfs -o noexec,mode=755 none /opt")
    try:
        mounted = snapshot(bare.machine)
        check_refused(bare.stratum("up", check=False), "noexec", "/opt/stratum", "mount -o remount,exec")
        # Who skips the check gets the unit's own words, and the host back.
        done = bare.stratum("up", "--skip-check", "noexec", check=False)
        assert (done.status, refusal(done)) == (1, "unit-failed")
        assert "/opt/stratum/node/current/bin/containerd: Permission denied" in done.stderr
        assert "state: everything that was done is taken back" in done.stderr
        check_same(mounted, snapshot(bare.machine))
    finally:
        bare.machine.run(["umount", "/opt"])


def test_a_read_only_place_for_the_command_is_no_obstacle(bare: MachineNode, before: Snapshot) -> None:
    command = "/opt/stratum/pyz/current/stratum.pyz"
    # All of /usr, as images that are never written have it, and noexec where the command would be.
    bare.machine.sh(
        "mount --bind /usr /usr; mount -o remount,bind,ro /usr;"
        "mount --bind /usr/local /usr/local; mount -o remount,bind,ro,noexec /usr/local"
    )
    try:
        assert bare.json("preflight", "--bundle", BUNDLE)["fit"]
        dry = bare.stratum("up", "--dry-run")
        done = bare.stratum("up")
        for words in (dry, done):
            (warning,) = [line for line in words.stderr.splitlines() if "warning" in line]
            assert "/usr/local/bin/stratum" in warning and f"run {command} instead" in warning
        assert f"try: {command} exec" in done.stdout
        assert not bare.machine.exists("/usr/local/bin/stratum")
        bare.settle()
        argv = bare.machine.run(["systemctl", "show", "-P", "ExecStart", "stratum.service"]).stdout
        assert f"argv[]=/usr/bin/python3 -IS {command} up --supervise" in argv
        assert bare.machine.run([command, "status"]).status == 0
        assert bare.stratum("up").lines[0] == "nothing to do"
        bare.machine.sh("umount /usr/local; mount -o remount,bind,rw /usr")
        assert "warning" not in bare.stratum("up").stderr
        assert bare.machine.run(["stratum", "status"]).status == 0
        bare.machine.run(["stratum", "uninstall", "--quiet"])
    finally:
        # Lazily: a service of the machine that was started meanwhile goes on running from it.
        bare.machine.sh("if mountpoint -q /usr/local; then umount /usr/local; fi; umount --lazy /usr")


def test_without_the_command_uninstall_takes_all_away(bare: MachineNode, before: Snapshot) -> None:
    bare.machine.sh("mount --bind /usr/local/bin /usr/local/bin; mount -o remount,bind,ro /usr/local/bin")
    try:
        check_works(bare)
    finally:
        bare.machine.run(["umount", "/usr/local/bin"])


def test_a_full_tmp_is_not_needed(bare: MachineNode, before: Snapshot) -> None:
    bare.machine.sh("mount -t tmpfs -o size=16m none /tmp; dd if=/dev/zero of=/tmp/full bs=1M 2>/dev/null || true")
    try:
        env = {**BARE_ENV, "TMPDIR": "/tmp"}
        assert bare.machine.run(["stat", "-f", "-c", "%f", "/tmp"]).stdout == "0\n"
        bare.stratum("up", "--quiet", "--bundle", "-", env=env, input=bare.machine.run(["cat", BUNDLE]).raw_stdout)
        bare.settle()
        assert bare.machine.run(["ls", "-A", "/tmp"]).lines == ["full"]
        bare.stratum("uninstall", "--quiet", env=env)
    finally:
        bare.machine.run(["umount", "/tmp"])


def test_a_file_system_that_is_too_small_is_refused_and_one_that_fills_is_left_as_it_was(
    bare: MachineNode, before: Snapshot
) -> None:
    # What fills: the components, then the images of a node that runs already.
    cases = [
        ("/opt/stratum", "size=64m", "disk-space", "disk-full"),
        ("/opt/stratum", "size=300m,nr_inodes=40", "inodes", "system-error"),
        ("/var/lib/stratum/containerd", "size=1m", "disk-space", "command-failed"),
    ]
    for place, options, check, reference in cases:
        bare.machine.sh(f"mkdir -p {place}; mount -t tmpfs -o mode=755,{options} none {place}")
        try:
            mounted = snapshot(bare.machine)
            check_refused(bare.stratum("up", check=False), f"{check}: {place}")
            check_same(mounted, snapshot(bare.machine))
            done = bare.stratum("up", "--skip-check", check, check=False)
            assert (done.status, refusal(done)) == (1, reference), done.describe()
            assert "no space left on device" in done.stderr.lower()
            assert "taken back" in done.stderr or "state: nothing was changed" in done.stderr
            check_same(mounted, snapshot(bare.machine), ignore=[("files", place, MODE)])
        finally:
            bare.machine.sh(f"umount {place}; rmdir {place}; rmdir /var/lib/stratum 2>/dev/null || true")


def test_a_disk_mounted_where_the_data_goes_stays_mounted(bare: MachineNode, before: Snapshot) -> None:
    place = "/var/lib/stratum/containerd"
    bare.machine.sh(f"mkdir -p {place}; mount -t tmpfs -o mode=755 none {place}")
    try:
        mounted = snapshot(bare.machine)
        bare.stratum("up", "--quiet")
        bare.settle()
        assert bare.machine.run(["ls", place]).lines != []
        assert f"unmount {place}" not in bare.stratum("uninstall", "--dry-run").stdout
        left = {item["path"] for item in bare.json("uninstall")["left"]}
        assert left == {place, "/var/lib/stratum"}
        check_same(mounted, snapshot(bare.machine), ignore=[("files", place, MODE)])
    finally:
        bare.machine.sh(f"umount {place}; rmdir {place} /var/lib/stratum")


def test_opt_on_a_file_system_of_its_own_survives_a_reboot(node: MachineNode) -> None:
    machine = node.machine
    machine.sh("mkdir /srv/opt; echo '/srv/opt /opt none bind 0 0' >>/etc/fstab; systemctl daemon-reload; mount /opt")
    before = snapshot(machine)
    node.stratum("up", "--quiet")
    # systemd reads units before it mounts: what is linked from another file system is not there yet.
    units = machine.sh("cd /etc/systemd/system; ls stratum*.service; find . -name 'stratum*' -type l").lines
    assert units == ["stratum-containerd.service", "stratum.service", "./multi-user.target.wants/stratum.service"]
    assert machine.run(["stat", "-c", "%F", "/etc/systemd/system/stratum.service"]).stdout == "regular file\n"
    machine.reboot()
    assert machine.run(["findmnt", "-n", "-o", "TARGET", "/opt"]).stdout == "/opt\n"
    assert node.json("status", "--wait", "30")["ready"]
    node.settle()
    node.stratum("uninstall", "--quiet")
    after = snapshot(machine)
    for section in ("unit files", "firewall", "interfaces", "processes", "forwarding"):
        assert after[section] == before[section]
    mine = {path for path in after["files"] if "stratum" in path or path.startswith(("/opt", "/srv", "/etc"))}
    assert {path: after["files"][path] for path in mine if path not in ("/etc/machine-id",)} == {
        path: before["files"].get(path) for path in mine if path not in ("/etc/machine-id",)
    }


READ_ONLY = """
mount --bind / /mnt
mount -o remount,bind,ro /mnt
mount -t proc none /mnt/proc
for d in /dev /sys /run /var/lib; do mount --rbind $d /mnt$d; done
mount -o remount,bind,ro /mnt/var/lib
mount -o remount,bind,ro /mnt/run
"""


def test_with_a_read_only_root_and_no_home_all_that_only_looks_works(running: MachineNode) -> None:
    machine = running.machine
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    before = snapshot(machine)

    def look(*words: str) -> Result:
        # In mounts of its own, so that the node itself does not notice.
        script = f'{READ_ONLY} cd {USB}; exec /usr/sbin/chroot /mnt {PYZ} "$@"'
        inner = ["unshare", "--mount", "sh", "-ec", script, "sh", *words]
        return machine.run(inner, env=environment, check=False)

    for words in (["--version"], ["--help"], ["status"], ["versions"], ["logs", "-n", "1"], ["uninstall", "--dry-run"]):
        done = look(*words)
        assert (done.status, "Traceback" in done.stderr) == (0, False), done.describe()
    done = look("up", "--dry-run", "--bundle", BUNDLE, "--skip-check", "writable-paths")
    assert (done.status, done.lines[0]) == (0, "nothing to do"), done.describe()
    done = look("preflight", "--bundle", BUNDLE)
    assert done.status == HOST_REFUSED and "writable-paths" in done.stdout and not done.stderr, done.describe()
    for words, expected in ((["up"], (1, "read-only")), (["up", "--dry-run"], (HOST_REFUSED, "host-refused"))):
        done = look(*words)
        assert (done.status, refusal(done, state=False)) == expected, done.describe()
    check_same(before, snapshot(machine))


# -- where it runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["no systemd", "cgroup v1", "hybrid cgroups"])
def test_a_host_without_systemd_or_with_old_cgroups_is_refused(
    machines: Machines, lab_root: Path, pyz: Path, shipped: tuple[Publisher, Path], kind: str
) -> None:
    made = NspawnMachine(lab_root, boot=kind != "no systemd", cgroup=1 if kind == "cgroup v1" else 2)
    node = bring(machines.boot(made), pyz, shipped[0].public, shipped[1])
    if kind == "hybrid cgroups":
        # systemd's hybrid layout: a tmpfs, with version 2 for systemd's own use below it.
        node.machine.sh(
            "mount -t tmpfs none /sys/fs/cgroup; mkdir /sys/fs/cgroup/unified;"
            "mount -t cgroup2 none /sys/fs/cgroup/unified"
        )
    before = snapshot(node.machine)
    word = "systemd is not PID 1" if kind == "no systemd" else "cgroup v2"
    check_refused(node.stratum("up", check=False), word)
    assert node.stratum("up", "--dry-run", check=False).status == HOST_REFUSED
    assert node.stratum("preflight", check=False).status == HOST_REFUSED
    check_same(before, snapshot(node.machine))


def test_somebody_who_is_not_root_is_told_so(bare: MachineNode, before: Snapshot) -> None:
    bare.machine.sh(f"mkdir -m 755 /srv/usb; cp {PYZ} {BUNDLE} /srv/usb")
    prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/srv/usb/stratum.pyz"]

    def run(*words: str) -> Result:
        return bare.machine.run([*prefix, *words], check=False, cwd="/srv/usb", env=BARE_ENV)

    for command in ("up", "uninstall", "start", "stop", "restart", "status"):
        done = run(command)
        assert (done.status, refusal(done, state=False)) == (NOT_ROOT, "not-root"), done.describe()
    done = run("preflight")
    assert done.status == HOST_REFUSED and "reject  root: running as user 65534, not root" in done.lines
    assert run("--version").status == 0
    bare.machine.run(["rm", "-r", "/srv/usb"])


def test_preflight_finds_everything_at_once_and_changes_nothing(bare: MachineNode, before: Snapshot) -> None:
    bare.machine.sh(
        "systemctl mask --quiet stratum.service; cp /bin/true /usr/local/bin/kubelet;"
        "mkdir -p /opt/stratum /etc/stratum; mount -t tmpfs -o noexec,mode=755,size=1m none /opt/stratum;"
        "mount --bind /usr/local/bin /usr/local/bin; mount -o remount,bind,ro /usr/local/bin"
    )
    try:
        spoiled = snapshot(bare.machine)
        report = bare.json("preflight", "--bundle", BUNDLE, check=False)
        assert not report["fit"]
        found = {finding["check"] for finding in report["findings"]}
        assert found == {"masked-unit", "unmanaged", "noexec", "disk-space", "writable-paths"}
        assert all(finding["message"] and finding["hint"] for finding in report["findings"])
        words = [word for check in found for word in ("--skip-check", check)]
        assert bare.stratum("preflight", "--bundle", BUNDLE, *words).status == 0
        check_same(spoiled, snapshot(bare.machine))
    finally:
        bare.machine.sh(
            "umount /opt/stratum /usr/local/bin; rmdir /opt/stratum; rm /usr/local/bin/kubelet;"
            "systemctl unmask --quiet stratum.service"
        )


def test_programs_in_sbin_are_found_on_a_short_path(bare: MachineNode, before: Snapshot) -> None:
    for program in ("nft", "modprobe", "iptables"):
        assert bare.machine.run(["sh", "-c", f"command -v {program}"], env=BARE_ENV, check=False).status != 0
    done = bare.stratum("preflight", "--bundle", BUNDLE, env=BARE_ENV)
    assert done.lines == ["checked: this host and demo 1.0: fit"]


def test_names_that_the_locale_cannot_say_are_no_obstacle(bare: MachineNode, before: Snapshot) -> None:
    environment = {**BARE_ENV, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    # One name in UTF-8, one with a line feed, one in Latin-1; a node is made from the last.
    for name in ("caf\\303\\251", "a\\nb", "caf\\351"):
        given = f'd=$(printf "/root/{name}");'
        bare.machine.sh(
            f'{given} mkdir "$d"; mv {BUNDLE} "$d/it.tar"; {PYZ} preflight --bundle "$d/it.tar"', env=environment
        )
        if name == "caf\\351":
            bare.machine.sh(f'{given} {PYZ} up --quiet --bundle "$d/it.tar"', env=environment)
            assert bare.json("status")["ready"]
            bare.stratum("uninstall", "--quiet", env=environment)
        bare.machine.sh(f'{given} mv "$d/it.tar" {BUNDLE}; rmdir "$d"')
        missing = bare.machine.sh(f'{given} {PYZ} up --bundle "$d/it.tar"', env=environment, check=False)
        assert missing.status == 14 and missing.stderr.isascii(), missing.describe()
        refusal(missing)


# -- more than one run --------------------------------------------------------------------------------------------


def held_up(node: MachineNode, share: float) -> subprocess.Popen[bytes]:
    """An `up` that has been given a share of the bundle through a pipe, has unpacked that, and waits for the rest."""
    process = node.machine.popen(
        [PYZ, "up", "--bundle", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    bundle = node.machine.path_in_machine(BUNDLE).read_bytes()
    process.stdin.write(bundle[: int(len(bundle) * share)])
    process.stdin.flush()
    wait_until("something is staged", lambda: node.machine.exists(STAGING), 60)
    pipe, looks = process.stdin.fileno(), [""]

    def waits() -> bool:
        # It has read all that there is, and writes no more.
        unread = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]
        looks.append(node.machine.run(["du", "-ab", STAGING], check=False).stdout)
        return unread == 0 and looks[-1] == looks[-2]

    wait_until("it waits for the rest", waits, 60, pause=0.3)
    return process


def test_a_second_run_at_the_same_time_is_refused_and_disturbs_nothing(bare: MachineNode, before: Snapshot) -> None:
    with held_up(bare, 0.9) as first:
        staged = bare.machine.run(["find", STAGING]).stdout
        assert "containerd" in staged
        for words in (["up"], ["uninstall"], ["stop"], ["start"]):
            done = bare.stratum(*words, check=False)
            if words[0] in ("up", "uninstall"):
                assert (done.status, refusal(done, state=False)) == (LOCKED, "locked"), done.describe()
                assert " up)" in done.stderr
            assert done.status != 0
        bare.stratum("up", "--dry-run")
        assert bare.machine.run(["find", STAGING]).stdout == staged
        assert first.stdin is not None
        bundle = bare.machine.path_in_machine(BUNDLE).read_bytes()
        _, words_of_first = first.communicate(bundle[int(len(bundle) * 0.9) :], timeout=300)
        assert first.returncode == 0, words_of_first
    assert bare.json("status")["ready"]
    bare.stratum("uninstall")


def test_what_killed_runs_leave_in_staging_is_cleared_by_the_next(bare: MachineNode, before: Snapshot) -> None:
    sizes = []
    for _ in range(3):
        with held_up(bare, 0.9) as process:
            bare.machine.run(["pkill", "-KILL", "-f", f"{PYZ} up"])
            process.communicate()
        sizes.append(int(bare.machine.run(["du", "-s", "/opt/stratum"]).stdout.split()[0]))
    assert min(sizes) > 20_000, "each was killed after it had unpacked something"
    assert max(sizes) < 1.2 * min(sizes), f"leftovers pile up: {sizes}"
    bare.stratum("up", "--quiet")
    assert not bare.machine.exists(STAGING)
    assert bare.json("status")["ready"]
    bare.stratum("uninstall")
