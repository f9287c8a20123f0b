"""SELinux: the right labels on what Stratum places, registered so that they last.

The contexts are registered as a policy module of our own (CIL, ``semodule``), not with ``semanage fcontext`` and not
by an edit of ``file_contexts.local``: semanage is in a package that small hosts do not have, its entries are mixed
with the admin's, and libsemanage writes ``file_contexts.local`` anew with each change of the policy. A module has a
name, outlives updates of the policy, goes as one, and gives way to what the admin sets with semanage.

Each context is optional in the module: one whose type this policy does not have is left out, and comes into force
by itself when the package with the type is installed.
"""

from __future__ import annotations

import errno
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Callable, Optional

from stratum.errors import StratumError
from stratum.host.finding import REJECT, WARN, Finding
from stratum.labels import SELINUXFS, SELinux, read_label, selinux_state, set_label
from stratum.receipt import STATE_DIRECTORY
from stratum.steps import Action, Call, Work, plan_file
from stratum.system import Host, HostPath

__all__ = [
    "CONTEXTS",
    "MODULE_PATH",
    "Context",
    "Policy",
    "check_policy",
    "plan_contexts",
    "plan_relabel",
    "plan_unregister",
    "render_module",
]

MODULE = "stratum"
# semodule names a module after its file.
MODULE_PATH = STATE_DIRECTORY / "selinux" / f"{MODULE}.cil"
_TIMEOUT = 900.0  # seconds: the whole policy is built anew
_ROOTS = (HostPath("/opt/stratum"), HostPath("/run/stratum"))


@dataclass(frozen=True)
class Policy:
    """What the node's settings say about SELinux.

    ``opt_out`` (``--no-selinux``): contexts and labels are the admin's. ``existing``: the node was brought up
    before, and a policy that is missing something does not stop it.
    """

    opt_out: bool = False
    existing: bool = False


@dataclass(frozen=True)
class Context:
    """A line of file contexts: which paths (a regular expression over the whole path), which files, which type."""

    pattern: str
    kind: str  # file or any, as CIL calls them
    type: str


# The types are those of container-selinux, as its own contexts use them for containerd at its usual places.
# A file in components/ is the same file as the one in node/, so both patterns must lead to one type.
_PROGRAMS = "(containerd|containerd-shim[^/]*|runc|crun|kubelet)"
CONTEXTS = (
    Context(f"/opt/stratum/(node|components)/[^/]+/bin/{_PROGRAMS}", "file", "container_runtime_exec_t"),
    Context(r"/opt/stratum/pyz/[^/]+/stratum\.pyz", "file", "bin_t"),
    Context("/var/lib/stratum/containerd(/.*)?", "any", "container_var_lib_t"),
    Context("/var/lib/stratum/containerd/[^/]+/snapshots(/.*)?", "any", "container_ro_file_t"),
    Context("/var/lib/stratum/containerd/[^/]+/sandboxes(/.*)?", "any", "container_ro_file_t"),
    # Policies differ in which of /run and /var/run they map onto the other.
    Context("/run/stratum/containerd(/.*)?", "any", "container_var_run_t"),
    Context("/var/run/stratum/containerd(/.*)?", "any", "container_var_run_t"),
)
# This one is in force under every policy.
_CERTAIN = next(context for context in CONTEXTS if context.type == "bin_t")
# Without this one the runtime runs in the domain of whoever starts it, and containers are not confined.
_NEEDED = "container_runtime_exec_t"


def render_module(contexts: Sequence[Context] = CONTEXTS) -> bytes:
    """The module in CIL. Outside behaviour: the SELinux CIL Reference Guide, ``filecon`` and ``optional``."""
    lines = ["; Written by Stratum. Removed by: stratum uninstall, or: semodule -r stratum"]
    for number, context in enumerate(contexts):
        lines.append(f"(optional stratum_{number}")
        label = f"(system_u object_r {context.type} ((s0) (s0)))"
        lines.append(f'    (filecon "{context.pattern}" {context.kind} {label}))')
    return ("\n".join(lines) + "\n").encode()


# -- what the policy knows --------------------------------------------------------------------------------


def knows_type(host: Host, name: str) -> bool:
    """Whether the policy in the kernel has the type ``name``: it is asked by writing a label to ``context``."""
    try:
        leveled = host.read_text(SELINUXFS / "mls").strip() == "1"
        label = f"system_u:object_r:{name}" + (":s0" if leveled else "")
        host.write_control(SELINUXFS / "context", label.encode() + b"\0")
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def check_policy(host: Host, policy: Policy) -> list[Finding]:
    """Whether the policy has what a node needs: no finding where SELinux is off or the admin opted out.

    A new node on an enforcing host is rejected without the types for containers; an existing one goes on.
    """
    state = selinux_state(host)
    if state is SELinux.OFF or policy.opt_out:
        return []
    findings = []
    if not knows_type(host, _NEEDED):
        fatal = state is SELinux.ENFORCING and not policy.existing
        findings.append(
            Finding(
                "selinux-policy",
                REJECT if fatal else WARN,
                f"SELinux is {state.value} and its policy has no {_NEEDED}: containers would not be confined",
                "install container-selinux, or opt out with --no-selinux",
            )
        )
    if host.which("semodule") is None:
        findings.append(
            Finding(
                "selinux-tools",
                WARN,
                "SELinux is on and there is no semodule: file contexts cannot be registered and a relabelling of "
                "the host takes the labels away",
                "install policycoreutils",
            )
        )
    return findings


# -- contexts -----------------------------------------------------------------------------------------------


def _register_command() -> list[str]:
    return ["semodule", "--install", str(MODULE_PATH)]


def plan_contexts(work: Work, policy: Policy, warn: Callable[[str], object]) -> list[Action]:
    """Register the contexts where SELinux is on; nothing when they are.

    Where that cannot be done a warning with the exact command is given: the node runs with the labels that the
    policy has by itself. An opt-out takes back what was registered before it.
    """
    host = work.host
    if policy.opt_out:
        return plan_unregister(work)
    if selinux_state(host) is SELinux.OFF:
        return []
    if host.which("semodule") is None:
        warn(f"no semodule here: SELinux file contexts are not registered; run later: {' '.join(_register_command())}")
        return []
    written = plan_file(work, MODULE_PATH, render_module(), 0o600)
    if not written and _is_registered(host):
        return []
    return [*written, Call("register", "SELinux file contexts (module stratum)", lambda: _register(host, warn))]


def _is_registered(host: Host) -> bool:
    """Whether the file contexts of the policy in use have ours. An admin's own (semanage) are in another file."""
    try:
        config = host.read_text("/etc/selinux/config")
        found = re.search(r"^SELINUXTYPE=(\S+)", config, re.MULTILINE)
        name = found[1] if found else "targeted"
        text = host.read_text(f"/etc/selinux/{name}/contexts/files/file_contexts")
    except OSError:
        return False
    return any(line.split()[:1] == [_CERTAIN.pattern] for line in text.splitlines())


def _register(host: Host, warn: Callable[[str], object]) -> None:
    try:
        host.run(_register_command(), timeout=_TIMEOUT)
    except StratumError as error:
        warn(f"SELinux file contexts are not registered: {error.message}; run: {' '.join(_register_command())}")


def plan_unregister(work: Work) -> list[Action]:
    """Remove our module from the policy, where we installed it; the receipt's removal takes its file.

    Raises :class:`StratumError` when it is performed and fails, with the exact command.
    """
    if not work.host.live or work.receipt.get(MODULE_PATH) is None:
        return []
    return [Call("unregister", "SELinux file contexts (module stratum)", lambda: _unregister(work.host))]


def _unregister(host: Host) -> None:
    command = ["semodule", "--remove", MODULE]
    try:
        if MODULE in host.run(["semodule", "--list-modules"], timeout=_TIMEOUT).text.split():
            host.run(command, timeout=_TIMEOUT)
    except StratumError as error:
        if selinux_state(host) is SELinux.OFF and host.which("semodule") is None:
            return  # SELinux was taken off the host, and the policy with it
        raise StratumError(
            "selinux-contexts",
            f"SELinux module {MODULE}: not removed: {error.message}",
            hint=f"run: {' '.join(command)}",
        ) from error


# -- labels -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relabel(Action):
    """Give one entry the label that the policy wants for its path."""

    path: HostPath
    label: str
    warn: Optional[Callable[[str], object]] = field(default=None, repr=False, compare=False)
    verb = "relabel"

    @property
    def subject(self) -> str:
        """The path and its type to be."""
        return f"{self.path} as {_type_of(self.label)}"

    def perform(self, work: Work) -> None:
        """Set it and read it back. A path that is gone is fine; raises :class:`StratumError`, or tells ``warn``."""
        try:
            self._set(work.host)
        except FileNotFoundError:
            pass
        except StratumError as error:
            if self.warn is None:
                raise
            self.warn(f"{error.message}; {error.hint}")

    def _set(self, host: Host) -> None:
        try:
            set_label(host, self.path, self.label)
            found = read_label(host, self.path)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno == errno.ENOTSUP:
                return  # a file system without labels has one for all its files, from its mount
            raise _mislabelled(self.path, self.label, error.strerror or str(error)) from error
        if found is None or _type_of(found) != _type_of(self.label):
            raise _mislabelled(self.path, self.label, f"it has {found}")


def _mislabelled(path: HostPath, label: str, why: str) -> StratumError:
    return StratumError(
        "selinux-label",
        f"{path}: cannot be labelled {_type_of(label)}: {why}",
        hint=f"run: restorecon -v {path}; the audit log has what was denied",
    )


def _type_of(label: str) -> str:
    """The type in ``user:role:type:level``."""
    fields = label.split(":")
    return fields[2] if len(fields) > 2 else label


def _wanted(host: Host, path: HostPath, mode: int) -> Optional[str]:
    """The label to set, None when the one there is right. Like restorecon, only the type counts."""
    label = host.policy_label(path, mode)
    if label is None:
        return None
    found = read_label(host, path)
    return None if found is not None and _type_of(found) == _type_of(label) else label


def _entries(work: Work) -> Iterator[tuple[HostPath, int]]:
    """What Stratum placed: the paths of the receipt, then everything in its own directories."""
    host = work.host
    for entry in work.receipt:
        try:
            yield entry.path, host.lstat(entry.path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
    for root in _ROOTS:
        if host.is_dir(root) and not host.is_link(root):
            for path, info in host.walk(root):
                yield path, info.st_mode


def plan_relabel(work: Work, policy: Policy, warn: Callable[[str], object]) -> list[Action]:
    """What gives everything of ours its label: a file that was renamed into place still has that of its old place.

    Of containerd's data only the top is looked at; when that is wrong (it was made before the contexts were
    registered) all below is relabelled, once. Nothing where SELinux is off or the admin opted out.

    A label that cannot be set stops a new node on an enforcing host, whose services could not be executed; in any
    other case ``warn`` is told.
    """
    host = work.host
    state = selinux_state(host)
    if policy.opt_out or state is SELinux.OFF:
        return []
    told = None if state is SELinux.ENFORCING and not policy.existing else warn
    wanted: dict[HostPath, str] = {}
    for path, mode in _entries(work):
        label = _wanted(host, path, mode)
        if label is not None and path not in wanted:
            wanted[path] = label
            entry = work.receipt.get(path)
            if entry is not None and entry.kind == "tree" and stat.S_ISDIR(mode) and path not in _ROOTS:
                wanted.update(_below(host, path))
    return [Relabel(path, label, told) for path, label in wanted.items()]


def _below(host: Host, top: HostPath) -> Iterator[tuple[HostPath, str]]:
    for path, info in host.walk(top):
        label = _wanted(host, path, info.st_mode)
        if label is not None:
            yield path, label
