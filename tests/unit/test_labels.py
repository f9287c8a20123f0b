"""SELinux without SELinux: what its state is, and libselinux' answer for a path."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from stratum.labels import SELinux, read_label, selinux_state, set_label
from stratum.libselinux import FileContexts
from stratum.system import Host, PathLike

CONTEXTS = """\
/opt(/.*)?		system_u:object_r:usr_t:s0
/opt/(.*/)?bin(/.*)?		system_u:object_r:bin_t:s0
/opt/stratum/[^/]+/bin/containerd	--	system_u:object_r:container_runtime_exec_t:s0
/opt/stratum/scratch(/.*)?		<<none>>
"""


class Machine(Host):
    @property
    def live(self) -> bool:
        return True

    def real(self, path: PathLike, *, follow: bool = False) -> str:
        return self._resolve(str(path), follow)


@pytest.mark.parametrize(
    ("content", "state"), [(None, SELinux.OFF), ("0", SELinux.PERMISSIVE), ("1", SELinux.ENFORCING)]
)
def test_the_state_is_what_the_kernel_says_and_needs_no_program(
    tmp_path: Path, content: str | None, state: SELinux
) -> None:
    host = Machine(str(tmp_path), {"PATH": "/nowhere"})
    if content is not None:
        (tmp_path / "sys/fs/selinux").mkdir(parents=True)
        (tmp_path / "sys/fs/selinux/enforce").write_text(content)
    assert selinux_state(host) is state
    assert selinux_state(Host(str(tmp_path))) is SELinux.OFF, "a tree has no SELinux, whatever lies in it"


def test_labels_are_written_as_the_kernel_keeps_them_and_read_without_the_nul(tmp_path: Path) -> None:
    class Kept(Host):
        kept: bytes | None = None

        def setxattr(self, path: PathLike, name: str, value: bytes) -> None:
            self.kept = value

        def getxattr(self, path: PathLike, name: str) -> bytes | None:
            return self.kept

    host = Kept(str(tmp_path))
    assert read_label(host, "/file") is None
    set_label(host, "/file", "u:r:t:s0")
    assert host.kept == b"u:r:t:s0\0"
    assert read_label(host, "/file") == "u:r:t:s0"


def test_an_attribute_that_is_not_there_is_none_and_a_missing_file_is_an_error(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    (tmp_path / "file").touch()
    assert host.getxattr("/file", "user.stratum-none") is None
    with pytest.raises(FileNotFoundError):
        host.getxattr("/missing", "user.stratum-none")


def test_attributes_of_a_link_are_never_those_of_its_target(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    host.setxattr("/file", "user.stratum", b"x")
    assert host.getxattr("/file", "user.stratum") == b"x"
    with pytest.raises(OSError) as caught:  # user attributes on links do not exist, xattr(7)
        host.setxattr("/link", "user.stratum", b"y")
    assert caught.value.errno in (errno.EPERM, errno.ENOTSUP)


def test_libselinux_is_asked_for_the_path_and_its_type(tmp_path: Path) -> None:
    (tmp_path / "contexts").write_text(CONTEXTS)
    contexts = FileContexts(str(tmp_path / "contexts"))
    wanted = {
        ("/opt/x", stat.S_IFREG): "usr_t",
        ("/opt/stratum/a/bin/ctr", stat.S_IFREG): "bin_t",
        ("/opt/stratum/a/bin/containerd", stat.S_IFREG): "container_runtime_exec_t",
        ("/opt/stratum/a/bin/containerd", stat.S_IFDIR): "bin_t",
        ("/opt/stratum/scratch/x", stat.S_IFREG): None,
        ("/srv", stat.S_IFDIR): None,
    }
    for (path, mode), kind in wanted.items():
        label = contexts.lookup(path, mode)
        assert (label.split(":")[2] if label else None) == kind, path
    contexts.close()
    contexts.close()
    with pytest.raises(ValueError):
        contexts.lookup("/opt", stat.S_IFDIR)


def test_file_contexts_that_are_missing_are_an_error_with_a_name(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        FileContexts(str(tmp_path / "missing"))
    assert caught.value.errno == errno.ENOENT


def test_a_machine_without_libselinux_or_without_a_policy_knows_no_label(monkeypatch: pytest.MonkeyPatch) -> None:
    import stratum.libselinux

    def missing() -> object:
        raise OSError("libselinux.so.1: cannot open shared object file")

    monkeypatch.setattr(stratum.libselinux, "_load", missing)
    assert Host("/").policy_label("/etc/passwd", stat.S_IFREG) is None
    assert Host("/tmp").policy_label("/etc/passwd", stat.S_IFREG) is None


def test_the_contexts_are_read_again_when_the_policy_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import stratum.libselinux

    opened: list[int] = []

    class Contexts:
        def __init__(self) -> None:
            opened.append(len(opened))

        def lookup(self, path: str, mode: int) -> str:
            return f"u:r:t{len(opened)}:s0"

        def close(self) -> None:
            opened[-1] = -1

    times = {"/etc/selinux/x/contexts/files": 1}
    monkeypatch.setattr(stratum.libselinux, "FileContexts", Contexts)
    monkeypatch.setattr(os, "listdir", lambda path: ["x"])
    real = os.stat

    def fake(path, *rest, **more):  # type: ignore[no-untyped-def]
        if path in times:
            (tmp_path / "stamp").touch()
            os.utime(tmp_path / "stamp", ns=(times[path], times[path]))
            return real(tmp_path / "stamp")
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "stat", fake)
    host = Host("/")
    assert [host.policy_label("/a", 0), host.policy_label("/b", 0)] == ["u:r:t1:s0", "u:r:t1:s0"]
    times["/etc/selinux/x/contexts/files"] = 5
    assert host.policy_label("/a", 0) == "u:r:t2:s0"
    assert opened == [-1, 1], "the old ones were closed"
