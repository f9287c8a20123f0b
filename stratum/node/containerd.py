"""containerd: its configuration, and talking to it with its own ``ctr``.

Everything of it is ours alone (socket, root, state, configuration), so that a containerd of the distribution
is never met. Configuration format: version 2 for containerd 1.6 and 1.7, version 3 for 2.x
(containerd docs/man/containerd-config.toml.5.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Callable, Optional

from stratum.config import Secret
from stratum.errors import BundleError, CommandError, StratumError
from stratum.steps import Action, Work, plan_directory, plan_file
from stratum.system import Completed, Host, HostPath

__all__ = [
    "ADDRESS",
    "CONFIG_PATH",
    "DATA_ROOT",
    "FRAGMENT_DIR",
    "KUBERNETES_NAMESPACE",
    "NAMESPACE",
    "REGISTRY_DIR",
    "STATE_ROOT",
    "ContainerdOptions",
    "Ctr",
    "ImageState",
    "Login",
    "Task",
    "fragments",
    "overriding_fragments",
    "plan_configuration",
    "quote_toml",
    "release_of",
    "render_config",
]

CONFIG_PATH = HostPath("/etc/stratum/containerd/config.toml")
DATA_ROOT = HostPath("/var/lib/stratum/containerd")
STATE_ROOT = HostPath("/run/stratum/containerd")
ADDRESS = STATE_ROOT / "containerd.sock"
# Where images of the bundle go on a container host; it is what ctr and nerdctl look at first.
NAMESPACE = "default"
# The one that CRI, and so the kubelet, keeps its images and containers in.
KUBERNETES_NAMESPACE = "k8s.io"
# Files of the admin's, which containerd reads after ours.
FRAGMENT_DIR = HostPath("/etc/stratum/containerd/conf.d")
REGISTRY_DIR = HostPath("/etc/stratum/containerd/certs.d")
# Where containerd keeps the names of images, containers and leases: it changes with each of them.
DATABASE = DATA_ROOT / "io.containerd.metadata.v1.bolt/meta.db"
CDI_SPEC_DIRS = ("/etc/cdi", "/var/run/cdi")
CNI_CONF_DIR = HostPath("/etc/cni/net.d")
CNI_BIN_DIR = HostPath("/opt/cni/bin")

_CALL_TIMEOUT = 60.0
_IMPORT_TIMEOUT = 1800.0


def release_of(containerd_version: str) -> tuple[int, int]:
    """Major and minor number of a release; raises :class:`BundleError` for what is none."""
    found = re.match(r"v?(\d+)\.(\d+)", containerd_version)
    if not found:
        raise BundleError("containerd-version", f"containerd {containerd_version!r}: cannot read its version")
    return int(found[1]), int(found[2])


def config_version(containerd_version: str) -> int:
    """The configuration format of a containerd release; raises :class:`BundleError` for an unknown one."""
    major, minor = release_of(containerd_version)
    if (major, minor) in ((1, 6), (1, 7)):
        return 2
    if major == 2:
        return 3
    raise BundleError("containerd-version", f"containerd {containerd_version}: only 1.6, 1.7 and 2.x are supported")


@dataclass(frozen=True)
class Login:
    """Credentials for a host of a registry, as ``host:port``."""

    host: str
    username: str
    password: Secret


@dataclass(frozen=True)
class ContainerdOptions:
    """What a node's containerd has beyond what its release decides.

    ``sandbox_image`` is the image that holds a pod's namespaces, by the name that it is imported under; empty leaves
    containerd's own, which it pulls. ``nvidia_runtime`` is the path of nvidia-container-runtime; empty without GPUs.
    ``logins`` are for 1.6 and 1.7 alone, see registries.py: a configuration with one is for root to read.
    """

    sandbox_image: str = ""
    nvidia_runtime: str = ""
    logins: tuple[Login, ...] = ()


_PLAIN = ContainerdOptions()


def quote_toml(text: str) -> str:
    """``text`` as a basic string (TOML 1.0.0, "String")."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def render_config(containerd_version: str, options: ContainerdOptions = _PLAIN) -> bytes:
    """containerd's configuration for a release. Raises :class:`BundleError` for an unknown one.

    Nothing in it is a secret but the passwords of ``logins``. The names of tables and fields are those of
    ``containerd config default`` of each release; where a release has no field, the field is not written: 2.x warns of
    each that it does not know.
    """
    version = config_version(containerd_version)
    sections = [
        _render_base(version),
        *_render_cri(version, release_of(containerd_version), options),
        *(_render_shared_places() if version == 3 else ()),
    ]
    return "\n".join(sections).encode()


def _render_base(version: int) -> str:
    return f"""# Written by Stratum. Put settings of your own into a file in {FRAGMENT_DIR}.
version = {version}
root = "{DATA_ROOT}"
state = "{STATE_ROOT}"
imports = ["{FRAGMENT_DIR}/*.toml"]

[grpc]
  address = "{ADDRESS}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{DATA_ROOT}/opt"
"""


def _render_cri(version: int, release: tuple[int, int], options: ContainerdOptions) -> list[str]:
    """What the kubelet's side of containerd is set to; 2.0 divided its one table into two."""
    runtime = "io.containerd.grpc.v1.cri" if version == 2 else "io.containerd.cri.v1.runtime"
    images = "io.containerd.grpc.v1.cri" if version == 2 else "io.containerd.cri.v1.images"
    # 2.1 renamed bin_dir, warns of the old name at each call of ctr and says that 2.3 knows it no more.
    bin_dir = f'bin_dirs = ["{CNI_BIN_DIR}"]' if release >= (2, 1) else f'bin_dir = "{CNI_BIN_DIR}"'
    lines = []
    if version == 2 and options.sandbox_image:
        lines.append(f"  sandbox_image = {quote_toml(options.sandbox_image)}\n")
    if release >= (1, 7):
        # 1.6 has no CDI. The directories are the defaults of the CDI specification.
        spec_dirs = ", ".join(f'"{path}"' for path in CDI_SPEC_DIRS)
        lines.append(f"  enable_cdi = true\n  cdi_spec_dirs = [{spec_dirs}]\n")
    sections = [f'[plugins."{runtime}"]\n{"".join(lines)}'] if lines else []
    if version == 3 and options.sandbox_image:
        pinned = f"  sandbox = {quote_toml(options.sandbox_image)}\n"
        sections.append(f'[plugins."{images}".pinned_images]\n{pinned}')
    sections += [
        f'[plugins."{images}".registry]\n  config_path = "{REGISTRY_DIR}"\n',
        *(_render_login(images, login) for login in (options.logins if version == 2 else ())),
        f'[plugins."{runtime}".cni]\n  {bin_dir}\n  conf_dir = "{CNI_CONF_DIR}"\n',
        f'[plugins."{runtime}".containerd]\n  default_runtime_name = "runc"\n',
        _render_runtime(runtime, "runc"),
    ]
    if options.nvidia_runtime:
        sections.append(_render_runtime(runtime, "nvidia", options.nvidia_runtime))
    return sections


def _render_login(plugin: str, login: Login) -> str:
    return f"""[plugins."{plugin}".registry.configs.{quote_toml(login.host)}.auth]
  username = {quote_toml(login.username)}
  password = {quote_toml(login.password.value)}
"""


def _render_runtime(plugin: str, name: str, program: str = "") -> str:
    binary = f"  BinaryName = {quote_toml(program)}\n" if program else ""
    return f"""[plugins."{plugin}".containerd.runtimes.{name}]
  runtime_type = "io.containerd.runc.v2"

[plugins."{plugin}".containerd.runtimes.{name}.options]
{binary}  SystemdCgroup = true
"""


def _render_shared_places() -> list[str]:
    """containerd 2 listens for NRI plugins, and runs NRI plugins and image verifiers that it finds.

    Its own places for them belong to every containerd of the host: each of two would run what is there.
    """
    nri = f"""[plugins."io.containerd.nri.v1.nri"]
  socket_path = "{STATE_ROOT}/nri.sock"
  plugin_path = "{DATA_ROOT}/nri/plugins"
  plugin_config_path = "{CONFIG_PATH.parent}/nri.d"
"""
    verifier = f"""[plugins."io.containerd.image-verifier.v1.bindir"]
  bin_dir = "{DATA_ROOT}/image-verifier"
"""
    return [nri, verifier]


def plan_configuration(work: Work, containerd_version: str, options: ContainerdOptions = _PLAIN) -> list[Action]:
    """containerd's configuration, and the directory for fragments of the admin's, which stay theirs.

    Raises :class:`StratumError` for a file there that is not ours, :class:`BundleError` for an unknown release.
    """
    mode = 0o600 if options.logins and config_version(containerd_version) == 2 else 0o644
    actions = plan_file(work, CONFIG_PATH, render_config(containerd_version, options), mode)
    made = {action.subject for action in actions}
    return actions + [item for item in plan_directory(work.host, FRAGMENT_DIR) if item.subject not in made]


def fragments(host: Host) -> list[HostPath]:
    """The files of the admin's that containerd reads after ours, in its order."""
    names = host.listdir(FRAGMENT_DIR) if host.is_dir(FRAGMENT_DIR) else []
    paths = [FRAGMENT_DIR / name for name in sorted(names) if name.endswith(".toml")]
    return [path for path in paths if not host.is_dir(path)]


def overriding_fragments(host: Host, containerd_version: str) -> list[HostPath]:
    """Fragments that take the place of our settings of CRI rather than being added to them.

    containerd 1.6 and 1.7 merge a fragment by whole plugins: a table of CRI in one drops all that Stratum set for
    CRI, the sandbox image and the registries among it. 2.x merges each field (tried with the releases of Debian).
    """
    if config_version(containerd_version) != 2:
        return []
    found = []
    for path in fragments(host):
        try:
            text = host.read_text(path)
        except (OSError, ValueError):
            continue
        if re.search(r"^[ \t]*\[+[^]#\n]*io\.containerd\.grpc\.v1\.cri[\"']", text, re.MULTILINE):
            found.append(path)
    return found


@dataclass(frozen=True)
class Task:
    """A container's process as containerd sees it."""

    namespace: str
    container: str
    pid: int
    status: str


@dataclass(frozen=True)
class ImageState:
    """An image as containerd has it: what its name stands for, and its labels as ``key=value``."""

    digest: str
    labels: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Ctr:
    """containerd's own client of one version, talking to our socket."""

    host: Host
    bin_dir: HostPath

    @property
    def program(self) -> str:
        """Where the client is."""
        return str(self.bin_dir / "ctr")

    def run(
        self,
        *arguments: str,
        timeout: float = _CALL_TIMEOUT,
        check: bool = True,
        feed: Optional[Callable[[BinaryIO], None]] = None,
    ) -> Completed:
        """Run the client; raises :class:`CommandError`."""
        return self.host.run(
            [self.program, "--address", str(ADDRESS), *arguments], timeout=timeout, check=check, feed=feed
        )

    def answers(self) -> bool:
        """Whether containerd answers a call now."""
        # The client waits ten seconds for a socket that nobody listens on.
        if not self.host.listens(ADDRESS):
            return False
        try:
            return self.run("version", timeout=10.0, check=False).status == 0
        except CommandError:
            return False

    def wait_until_answers(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for an answer; raises :class:`StratumError`."""
        deadline = self.host.monotonic() + timeout
        while not self.answers():
            if self.host.monotonic() >= deadline:
                raise StratumError(
                    "containerd-silent",
                    f"containerd at {ADDRESS} did not answer within {timeout:g} s",
                    hint="read: stratum logs containerd",
                )
            self.host.sleep(0.25)

    def namespaces(self) -> list[str]:
        """The names of containerd's namespaces."""
        return self.run("namespaces", "list", "--quiet").text.split()

    def tasks(self, namespace: str) -> list[Task]:
        """The processes of the containers in a namespace."""
        found = []
        for line in self.run("--namespace", namespace, "tasks", "list").text.splitlines()[1:]:
            words = line.split()
            if len(words) >= 3 and words[1].isdigit():
                found.append(Task(namespace, words[0], int(words[1]), words[2]))
        return found

    def images(self, namespace: str) -> dict[str, ImageState]:
        """The images of a namespace, by name."""
        found = {}
        for line in self.run("--namespace", namespace, "images", "list").text.splitlines()[1:]:
            words = line.split()
            digest = next((word for word in words if word.startswith("sha256:")), None)
            if words and digest:
                # The last column: key=value,key=value, or - for none.
                labels = frozenset(words[-1].split(",")) if "=" in words[-1] else frozenset()
                found[words[0]] = ImageState(digest, labels)
        return found

    def label_image(self, namespace: str, name: str, labels: Iterable[str]) -> None:
        """Add ``labels`` (``key=value``) to an image; raises :class:`CommandError`."""
        self.run("--namespace", namespace, "images", "label", name, *labels)

    def import_image(self, namespace: str, platform: str, feed: Callable[[BinaryIO], None]) -> None:
        """Import an OCI layout as a tar, which ``feed`` writes; raises :class:`CommandError`."""
        self.run(
            "--namespace",
            namespace,
            "images",
            "import",
            "--platform",
            platform,
            "-",
            timeout=_IMPORT_TIMEOUT,
            feed=feed,
        )

    def end_tasks(self, namespace: str, grace: float) -> list[StratumError]:
        """Ask every container of a namespace to end, then kill what is left after ``grace`` seconds."""
        errors: list[StratumError] = []
        for signal, patience in (("SIGTERM", grace), ("SIGKILL", grace)):
            running = [task for task in self.tasks(namespace) if task.status in ("RUNNING", "PAUSED")]
            for task in running:
                if task.status == "PAUSED":
                    self.run("--namespace", namespace, "tasks", "resume", task.container, check=False)
                self.run(
                    "--namespace", namespace, "tasks", "kill", "--all", "--signal", signal, task.container, check=False
                )
            self._wait_ended(namespace, patience if running else 0.0)
        for task in self.tasks(namespace):
            errors += self._try("--namespace", namespace, "tasks", "delete", "--force", task.container)
        return errors

    def _wait_ended(self, namespace: str, patience: float) -> None:
        deadline = self.host.monotonic() + patience
        while self.host.monotonic() < deadline and any(
            task.status in ("RUNNING", "PAUSED") for task in self.tasks(namespace)
        ):
            self.host.sleep(0.2)

    def delete_containers(self, namespace: str) -> list[StratumError]:
        """Delete the containers of a namespace, whose tasks have ended."""
        errors: list[StratumError] = []
        for name in self.run("--namespace", namespace, "containers", "list", "--quiet").text.split():
            errors += self._try("--namespace", namespace, "containers", "delete", name)
        return errors

    def _try(self, *arguments: str) -> Sequence[StratumError]:
        try:
            self.run(*arguments)
        except CommandError as error:
            # CRI clears away what has ended at the same time.
            return [] if "not found" in error.stderr else [error]
        return []
