"""SELinux: contexts registered, labels right, and a host without it left alone."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stratum.errors import StratumError
from stratum.host import selinux
from stratum.host.selinux import CONTEXTS, MODULE_PATH, Policy
from stratum.journal import Journal
from stratum.receipt import STATE_DIRECTORY, Entry, Receipt
from stratum.steps import Action, Work
from stratum.system import Host, HostPath, PathLike
from tests.fakes import MachineHost, make_tree

NEW, EXISTING = Policy(), Policy(existing=True)
BASE = [(r"/opt(/.*)?", "usr_t"), (r"/opt/(.*/)?bin(/.*)?", "bin_t"), (r"/var/lib(/.*)?", "var_lib_t")]


@dataclass
class SELinuxHost(MachineHost):
    """A machine with SELinux: labels are kept beside the files, the policy is a list of patterns."""

    types: set[str] = field(
        default_factory=lambda: {"bin_t", "usr_t", "container_runtime_exec_t", "container_var_lib_t"}
    )
    labels: dict[int, str] = field(default_factory=dict)
    modules: dict[str, bytes] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)  # path: error of setxattr
    ignores: bool = False  # setxattr succeeds and does nothing
    relabelled: list[str] = field(default_factory=list)

    def switch(self, enforce: str | None) -> SELinuxHost:
        directory = Path(self.root, "sys/fs/selinux")
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in (("enforce", enforce), ("mls", "1"), ("context", "")):
            if text is not None:
                (directory / name).write_text(text)
        contexts = Path(self.root, "etc/selinux/strict/contexts/files")
        contexts.mkdir(parents=True, exist_ok=True)
        (contexts.parents[2] / "config").write_text("# x\nSELINUX=enforcing\nSELINUXTYPE=strict\n")
        self.build()
        return self

    def build(self) -> None:
        lines = [f"{pattern}\tsystem_u:object_r:{kind}:s0" for pattern, kind in BASE]
        for text in self.modules.values():
            for pattern, _, kind in re.findall(rb'filecon "(.*?)" (\w+) \(system_u object_r (\w+)', text):
                if kind.decode() in self.types:
                    lines.append(f"{pattern.decode()}\t--\tsystem_u:object_r:{kind.decode()}:s0")
        Path(self.root, "etc/selinux/strict/contexts/files/file_contexts").write_text("\n".join(lines) + "\n")

    def open_new(self, path, mode):  # type: ignore[no-untyped-def]
        file = super().open_new(path, mode)
        self.labels.pop(os.fstat(file.fileno()).st_ino, None)  # a number that another file had before
        return file

    def policy_label(self, path: PathLike, mode: int) -> str | None:
        text = Path(self.root, "etc/selinux/strict/contexts/files/file_contexts").read_text()
        for line in reversed(text.splitlines()):
            fields = line.split()
            if re.fullmatch(fields[0], str(path)):
                return fields[-1]
        return None

    def write_control(self, path: PathLike, data: bytes) -> None:
        assert str(path) == "/sys/fs/selinux/context"
        if data.rstrip(b"\0").decode().split(":")[2] not in self.types:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def getxattr(self, path: PathLike, name: str) -> bytes | None:
        label = self.labels.get(self.lstat(path).st_ino, "system_u:object_r:tmp_t:s0")
        return label.encode() + b"\0"

    def setxattr(self, path: PathLike, name: str, value: bytes) -> None:
        if str(path) in self.refused:
            raise OSError(self.refused[str(path)], os.strerror(self.refused[str(path)]))
        if not self.ignores:
            self.labels[self.lstat(path).st_ino] = value.rstrip(b"\0").decode()
        if self.temporary_of(HostPath(str(path)).name) is None:  # what atomicfile does is its own matter
            self.relabelled.append(str(path))

    def type_of(self, path: str) -> str:
        return (self.getxattr(path, "security.selinux") or b"").decode().split(":")[2]

    def _answer(self, line: str, argv: list[str], data: bytes) -> tuple[int, str]:
        status, text = super()._answer(line, argv, data)
        if argv[0] != "semodule" or status != 0:
            return status, text
        if argv[1] == "--install":
            self.modules[Path(argv[2]).stem] = self.read_bytes(argv[2])
        elif argv[1] == "--remove":
            del self.modules[argv[2]]
        self.build()
        return 0, "".join(f"{name}\n" for name in ["base", *self.modules]) if argv[1] == "--list-modules" else ""


@pytest.fixture
def host(tmp_path: Path) -> SELinuxHost:
    """An enforcing machine with the policy of container-selinux."""
    root = make_tree(tmp_path / "root", live=True)
    program = root / "usr/sbin/semodule"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    host = SELinuxHost(str(root), {}).switch("1")
    host.makedirs(STATE_DIRECTORY)
    host.labels.clear()
    return host


def work_on(host: Host) -> Work:
    return Work(host, Receipt.load(host), Journal(host))


def perform(work: Work, actions: list[Action]) -> list[str]:
    for action in actions:
        action.perform(work)
    return [action.describe() for action in actions]


def refuse(text: str) -> None:
    pytest.fail(f"a warning: {text}")


def contexts(host: Host, policy: Policy = NEW, warn: Callable[[str], object] = refuse) -> list[str]:
    work = work_on(host)
    return perform(work, selinux.plan_contexts(work, policy, warn))


def relabel(host: Host, policy: Policy = NEW, warn: Callable[[str], object] = refuse) -> list[str]:
    work = work_on(host)
    return perform(work, selinux.plan_relabel(work, policy, warn))


def place(host: Host, path: str, kind: str = "file") -> None:
    real = Path(host.real(path))
    real.parent.mkdir(parents=True, exist_ok=True)
    if kind == "file":
        real.write_text("x")
    else:
        real.mkdir(exist_ok=True)
    work_on(host).receipt.record(Entry(HostPath(path), kind))


# -- a host without SELinux, an admin without it ----------------------------------------------------------


@pytest.mark.parametrize("make", ["none", "off", "tree"])
def test_where_selinux_is_off_nothing_is_done_or_found(tmp_path: Path, make: str) -> None:
    root = make_tree(tmp_path / "root", live=True)
    host: Host = Host(str(root), {}) if make == "tree" else SELinuxHost(str(root), {})
    if make == "off":
        assert isinstance(host, SELinuxHost)
        host.switch(None)
    host.makedirs(STATE_DIRECTORY)
    place(host, "/opt/stratum/node/1/bin/containerd")
    assert selinux.check_policy(host, NEW) == []
    assert contexts(host) == [] and relabel(host) == []


def test_an_admin_who_opted_out_is_left_alone(host: SELinuxHost) -> None:
    host.types.clear()
    place(host, "/opt/stratum/node/1/bin/containerd")
    policy = Policy(opt_out=True)
    assert selinux.check_policy(host, policy) == []
    assert contexts(host, policy) == [] and relabel(host, policy) == []
    assert host.modules == {} and host.relabelled == []


def test_an_opt_out_takes_back_what_was_registered_before_it(host: SELinuxHost) -> None:
    contexts(host)
    assert "stratum" in host.modules
    contexts(host, Policy(opt_out=True))
    assert host.modules == {}


# -- the policy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("enforce", "policy", "severity"),
    [("1", NEW, "reject"), ("1", EXISTING, "warn"), ("0", NEW, "warn"), ("0", EXISTING, "warn")],
)
def test_a_policy_without_containers_stops_a_new_enforcing_node_only(
    host: SELinuxHost, enforce: str, policy: Policy, severity: str
) -> None:
    host.switch(enforce)
    host.types.remove("container_runtime_exec_t")
    (finding,) = selinux.check_policy(host, policy)
    assert (finding.check, finding.severity) == ("selinux-policy", severity)
    assert "container-selinux" in finding.hint


def test_a_policy_that_has_everything_gives_no_finding(host: SELinuxHost) -> None:
    assert selinux.check_policy(host, NEW) == []


def test_the_state_needs_no_program_on_the_path(host: SELinuxHost) -> None:
    host.types.remove("container_runtime_exec_t")
    host.environ = {"PATH": "/nowhere"}
    assert host.which("getenforce") is None
    assert selinux.check_policy(host, NEW)[0].severity == "reject"


def test_an_error_of_the_kernel_is_not_taken_for_a_missing_type(host: SELinuxHost) -> None:
    class Broken(SELinuxHost):
        def write_control(self, path: PathLike, data: bytes) -> None:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with pytest.raises(PermissionError):
        selinux.knows_type(Broken(host.root, {}), "bin_t")


# -- contexts ---------------------------------------------------------------------------------------------


def test_contexts_are_registered_once_and_last(host: SELinuxHost) -> None:
    assert contexts(host)
    assert host.commands == [f"semodule --install {MODULE_PATH}"]
    assert host.modules["stratum"] == selinux.render_module()
    assert work_on(host).receipt.owns(MODULE_PATH), "what was added is on record"
    assert contexts(host) == []


def test_contexts_that_were_lost_are_registered_again(host: SELinuxHost) -> None:
    contexts(host)
    host.modules.clear()
    host.build()
    assert contexts(host) == ["register SELinux file contexts (module stratum)"]
    assert "stratum" in host.modules


def test_a_module_of_an_older_release_is_replaced(host: SELinuxHost) -> None:
    contexts(host)
    old = b"; older\n" + selinux.render_module()
    work = work_on(host)
    work.receipt.record(Entry(MODULE_PATH, "file", (selinux_digest(old),)))
    Path(host.real(MODULE_PATH)).write_bytes(old)
    assert len(contexts(host)) == 2
    assert host.modules["stratum"] == selinux.render_module()


def selinux_digest(content: bytes) -> str:
    from stratum.receipt import content_digest

    return content_digest(content)


@pytest.mark.parametrize("how", ["missing", "failing"])
def test_a_registration_that_cannot_be_done_is_a_warning_with_the_command(host: SELinuxHost, how: str) -> None:
    if how == "missing":
        host.unlink("/usr/sbin/semodule")
        assert [finding.check for finding in selinux.check_policy(host, NEW)] == ["selinux-tools"]
    else:
        host.failing["semodule"] = 1
    warnings: list[str] = []
    contexts(host, NEW, warnings.append)
    assert len(warnings) == 1
    assert f"semodule --install {MODULE_PATH}" in warnings[0]
    if how == "failing":
        assert contexts(host), "the next start tries again"
        assert "stratum" in host.modules


def test_the_module_is_removed_by_uninstall_and_only_where_it_was_ours(host: SELinuxHost) -> None:
    work = work_on(host)
    assert selinux.plan_unregister(work) == []
    contexts(host)
    host.modules["theirs"] = b""
    work = work_on(host)
    assert perform(work, selinux.plan_unregister(work)) == ["unregister SELinux file contexts (module stratum)"]
    assert list(host.modules) == ["theirs"]
    perform(work, selinux.plan_unregister(work))
    assert host.commands.count("semodule --remove stratum") == 1, "one that is gone is not removed"


def test_a_removal_that_fails_says_the_command(host: SELinuxHost) -> None:
    contexts(host)
    host.failing["semodule --remove"] = 1
    work = work_on(host)
    with pytest.raises(StratumError) as caught:
        perform(work, selinux.plan_unregister(work))
    assert caught.value.hint == "run: semodule --remove stratum"


def test_a_host_whose_selinux_was_taken_off_has_nothing_to_unregister(host: SELinuxHost) -> None:
    contexts(host)
    os.unlink(host.real("/sys/fs/selinux/enforce"))
    host.unlink("/usr/sbin/semodule")
    work = work_on(host)
    perform(work, selinux.plan_unregister(work))


def test_each_context_is_optional_so_a_type_that_is_missing_breaks_no_policy() -> None:
    text = selinux.render_module().decode()
    assert text.count("(optional ") == text.count("(filecon ") == len(CONTEXTS)
    assert text.count("(") == text.count(")") + sum(
        item.pattern.count("(") - item.pattern.count(")") for item in CONTEXTS
    )


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/opt/stratum/node/1.2/bin/containerd", "container_runtime_exec_t"),
        ("/opt/stratum/components/sha256-ab/bin/containerd", "container_runtime_exec_t"),
        ("/opt/stratum/node/1.2/bin/containerd-shim-runc-v2", "container_runtime_exec_t"),
        ("/opt/stratum/node/1.2/bin/ctr", None),
        ("/opt/stratum/node/1.2/cni/bin/bridge", None),
        ("/opt/stratum/pyz/1-ab/stratum.pyz", "bin_t"),
        ("/var/lib/stratum/containerd", "container_var_lib_t"),
        ("/var/lib/stratum/containerd/x/y", "container_var_lib_t"),
        ("/var/lib/stratum/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots/1/fs", "container_ro_file_t"),
        ("/run/stratum/containerd/containerd.sock", "container_var_run_t"),
        ("/var/lib/stratum/receipt.json", None),
        ("/opt/stratumx/node/1/bin/containerd", None),
    ],
)
def test_the_patterns_match_what_they_should(path: str, wanted: str | None) -> None:
    kinds = [context.type for context in CONTEXTS if re.fullmatch(context.pattern, path)]
    assert (kinds[-1] if kinds else None) == wanted


# -- labels -----------------------------------------------------------------------------------------------


def test_a_file_renamed_into_place_gets_the_label_of_its_place(host: SELinuxHost) -> None:
    contexts(host)
    for path in ("/opt/stratum/node/1/bin/containerd", "/opt/stratum/node/1/bin/ctr"):
        real = Path(host.real(path))
        real.parent.mkdir(parents=True, exist_ok=True)
        (Path(host.root) / "tmp").mkdir(exist_ok=True)
        (Path(host.root) / "tmp/x").write_text("x")
        host.labels[(Path(host.root) / "tmp/x").stat().st_ino] = "unconfined_u:object_r:user_tmp_t:s0"
        (Path(host.root) / "tmp/x").rename(real)
    assert host.type_of("/opt/stratum/node/1/bin/containerd") == "user_tmp_t"
    relabel(host)
    assert host.type_of("/opt/stratum/node/1/bin/containerd") == "container_runtime_exec_t"
    assert host.type_of("/opt/stratum/node/1/bin/ctr") == "bin_t"
    assert relabel(host) == [], "a second time there is nothing to do"


def test_only_the_type_counts_as_with_restorecon(host: SELinuxHost) -> None:
    place(host, "/opt/stratum/node/1/bin/ctr")
    host.labels[os.stat(host.real("/opt/stratum/node/1/bin/ctr")).st_ino] = "unconfined_u:object_r:bin_t:s0:c1"
    relabel(host)
    assert "/opt/stratum/node/1/bin/ctr" not in host.relabelled


def test_what_the_receipt_names_anywhere_is_relabelled_and_nothing_else(host: SELinuxHost) -> None:
    place(host, "/opt/cni/bin/bridge")
    (Path(host.root) / "opt/cni/bin/theirs").write_text("x")
    work_on(host).receipt.record(Entry(HostPath("/opt/gone"), "file"))
    relabel(host)
    assert host.relabelled == ["/opt/cni/bin/bridge"]
    assert host.type_of("/opt/cni/bin/bridge") == "bin_t"


def test_containerds_data_is_relabelled_whole_when_its_top_is_wrong_and_never_after(host: SELinuxHost) -> None:
    contexts(host)
    place(host, "/var/lib/stratum/containerd", "tree")
    inside = "/var/lib/stratum/containerd/meta.db"
    Path(host.real(inside)).write_text("x")
    relabel(host)
    assert host.type_of(inside) == "container_var_lib_t"
    host.labels[os.stat(host.real(inside)).st_ino] = "system_u:object_r:container_file_t:s0:c1,c2"
    host.relabelled.clear()
    relabel(host)
    assert host.relabelled == [], "what containerd labelled itself stays"


@pytest.mark.parametrize("how", ["refused", "ignored"])
@pytest.mark.parametrize(("enforce", "policy", "stops"), [("1", NEW, True), ("1", EXISTING, False), ("0", NEW, False)])
def test_a_label_that_does_not_take_stops_a_new_enforcing_node_and_is_named(
    host: SELinuxHost, how: str, enforce: str, policy: Policy, stops: bool
) -> None:
    host.switch(enforce)
    path = "/opt/stratum/node/1/bin/ctr"
    place(host, path)
    if how == "refused":
        host.refused[path] = errno.EACCES
    else:
        host.ignores = True
    warnings: list[str] = []
    if stops:
        with pytest.raises(StratumError) as caught:
            relabel(host, policy)
        assert caught.value.reference == "selinux-label"
        message = f"{caught.value.message}; {caught.value.hint}"
    else:
        relabel(host, policy, warnings.append)
        message = next(text for text in warnings if path in text)
    assert f"{path}: cannot be labelled bin_t" in message and f"restorecon -v {path}" in message


def test_a_path_that_goes_meanwhile_and_a_file_system_without_labels_are_no_matter(host: SELinuxHost) -> None:
    path = "/opt/stratum/node/1/bin/ctr"
    place(host, path)
    host.refused[path] = errno.ENOTSUP
    relabel(host)
    work = work_on(host)
    actions = selinux.plan_relabel(work, NEW, refuse)
    assert actions
    host.unlink(path)
    perform(work, actions)


def test_a_link_is_labelled_itself(host: SELinuxHost) -> None:
    place(host, "/opt/stratum/node/1/bin/ctr")
    Path(host.real("/opt/stratum/node/current")).symlink_to("1")
    relabel(host)
    assert "/opt/stratum/node/current" in host.relabelled
    assert stat.S_ISLNK(host.lstat("/opt/stratum/node/current").st_mode)
