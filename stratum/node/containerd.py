"""containerd: its configuration, and talking to it with its own ``ctr``.

Everything of it is ours alone (socket, root, state, configuration), so that a containerd of the distribution
is never met. Configuration format: version 2 for containerd 1.6 and 1.7, version 3 for 2.x
(containerd docs/man/containerd-config.toml.5.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, Callable, Optional

from stratum.errors import BundleError, CommandError, StratumError
from stratum.system import Completed, Host, HostPath

__all__ = ["ADDRESS", "CONFIG_PATH", "DATA_ROOT", "NAMESPACE", "STATE_ROOT", "Ctr", "Task", "render_config"]

CONFIG_PATH = HostPath("/etc/stratum/containerd/config.toml")
DATA_ROOT = HostPath("/var/lib/stratum/containerd")
STATE_ROOT = HostPath("/run/stratum/containerd")
ADDRESS = STATE_ROOT / "containerd.sock"
# Where images of the bundle go on a container host; it is what ctr and nerdctl look at first.
NAMESPACE = "default"
CNI_CONF_DIR = HostPath("/etc/cni/net.d")
CNI_BIN_DIR = HostPath("/opt/cni/bin")

_CALL_TIMEOUT = 60.0
_IMPORT_TIMEOUT = 1800.0


def _release(containerd_version: str) -> tuple[int, int]:
    found = re.match(r"v?(\d+)\.(\d+)", containerd_version)
    if not found:
        raise BundleError("containerd-version", f"containerd {containerd_version!r}: cannot read its version")
    return int(found[1]), int(found[2])


def config_version(containerd_version: str) -> int:
    """The configuration format of a containerd release; raises :class:`BundleError` for an unknown one."""
    major, minor = _release(containerd_version)
    if (major, minor) in ((1, 6), (1, 7)):
        return 2
    if major == 2:
        return 3
    raise BundleError("containerd-version", f"containerd {containerd_version}: only 1.6, 1.7 and 2.x are supported")


def render_config(containerd_version: str) -> bytes:
    """containerd's configuration for a release. Raises :class:`BundleError` for an unknown one."""
    version = config_version(containerd_version)
    cri = "io.containerd.grpc.v1.cri" if version == 2 else "io.containerd.cri.v1.runtime"
    # 2.1 renamed bin_dir, warns of the old name at each call of ctr and says that 2.3 knows it no more.
    renamed = _release(containerd_version) >= (2, 1)
    bin_dir = f'bin_dirs = ["{CNI_BIN_DIR}"]' if renamed else f'bin_dir = "{CNI_BIN_DIR}"'
    # containerd 2 listens for NRI plugins by default, at a fixed place that another containerd may want.
    nri = f"""
[plugins."io.containerd.nri.v1.nri"]
  socket_path = "{STATE_ROOT}/nri.sock"
"""
    return f"""# Written by Stratum.
version = {version}
root = "{DATA_ROOT}"
state = "{STATE_ROOT}"

[grpc]
  address = "{ADDRESS}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{DATA_ROOT}/opt"

[plugins."{cri}".cni]
  {bin_dir}
  conf_dir = "{CNI_CONF_DIR}"

[plugins."{cri}".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."{cri}".containerd.runtimes.runc.options]
  SystemdCgroup = true
{nri if version == 3 else ""}""".encode()


@dataclass(frozen=True)
class Task:
    """A container's process as containerd sees it."""

    namespace: str
    container: str
    pid: int
    status: str


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

    def images(self, namespace: str) -> dict[str, str]:
        """The images of a namespace: name and digest of each."""
        found = {}
        for line in self.run("--namespace", namespace, "images", "list").text.splitlines()[1:]:
            words = line.split()
            digest = next((word for word in words if word.startswith("sha256:")), None)
            if words and digest:
                found[words[0]] = digest
        return found

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
            return [error]
        return []
