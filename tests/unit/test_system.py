"""The seam to the host: paths that stay inside the root, exact modes, commands that end."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratum.errors import CommandError, StratumError
from stratum.system import SEARCH_PATH, Host

MASKS = [0o000, 0o022, 0o027, 0o077, 0o777]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "root").mkdir()
    return Host(str(tmp_path / "root"), environ={})


@pytest.fixture
def live() -> Host:
    return Host("/", environ={"PATH": "/usr/bin:/bin", "http_proxy": "http://192.0.2.1", "LD_PRELOAD": "/x.so"})


@pytest.fixture(params=MASKS, ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# -- paths ----------------------------------------------------------------------------------------------


def test_the_root_given_as_a_link_or_with_dots_is_the_directory_itself(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert Host(str(tmp_path / "link")).root == str(tmp_path / "real")
    assert Host(f"{tmp_path}/real/../link/.").root == str(tmp_path / "real")


@pytest.mark.parametrize("root", ["/", "//", "/.", "/proc/self/root", "/usr/.."])
def test_every_spelling_of_the_running_machine_is_live(root: str) -> None:
    assert Host(root).live


def test_a_relative_path_is_a_mistake_of_ours(host: Host) -> None:
    for path in ("etc", "", ".", "../etc"):
        with pytest.raises(ValueError, match="absolute"):
            host.real(path)


def test_an_absolute_link_of_the_tree_is_followed_inside_the_tree(host: Host, tmp_path: Path) -> None:
    root = Path(host.root)
    (root / "run").mkdir()
    (root / "var").mkdir()
    (root / "var/run").symlink_to("/run")
    host.open_new("/var/run/file", 0o644).close()
    assert (root / "run/file").is_file()
    assert host.exists("/var/run/file")
    host.unlink("/var/run/file")
    assert not (root / "run/file").exists()


def test_a_link_cannot_climb_out_of_the_tree(host: Host, tmp_path: Path) -> None:
    root = Path(host.root)
    (tmp_path / "secret").write_text("outside")
    (root / "a").mkdir()
    (root / "a/up").symlink_to("../../../../../../../../..")
    (root / "a/secret").symlink_to("../../secret")
    assert host.real("/a/up", follow=True) == str(root)
    assert host.real("/a/up/secret") == str(root / "secret")
    assert not host.exists("/a/secret")
    with pytest.raises(FileNotFoundError):
        host.read_bytes("/a/secret")
    with pytest.raises(FileNotFoundError):
        host.read_bytes("/../secret")


def test_a_link_loop_is_an_error_and_not_a_hang(host: Host) -> None:
    root = Path(host.root)
    (root / "one").symlink_to("two")
    (root / "two").symlink_to("one")
    with pytest.raises(StratumError) as caught:
        host.read_bytes("/one/x")
    assert caught.value.reference == "link-loop"
    assert host.lexists("/one")


def test_changes_are_made_to_a_link_and_not_to_what_it_leads_to(host: Host) -> None:
    root = Path(host.root)
    (root / "target").write_text("kept")
    (root / "link").symlink_to("target")
    (root / "new").write_text("new")
    host.rename("/new", "/link")
    assert (root / "link").read_text() == "new"
    assert not (root / "link").is_symlink()
    assert (root / "target").read_text() == "kept"
    (root / "other").symlink_to("target")
    host.unlink("/other")
    assert (root / "target").read_text() == "kept"


def test_a_hard_link_to_a_symbolic_link_is_a_link_and_not_its_target(host: Host) -> None:
    root = Path(host.root)
    (root / "target").write_text("x")
    (root / "link").symlink_to("target")
    host.link("/link", "/again")
    assert os.readlink(root / "again") == "target"


NAMES = st.sampled_from(["a", "b", "c"])
TARGETS = st.one_of(
    st.lists(st.sampled_from(["a", "b", "c", "..", "."]), min_size=1, max_size=5).map("/".join),
    st.lists(st.sampled_from(["a", "b", "c", "..", "."]), max_size=4).map(lambda parts: "/" + "/".join(parts)),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    links=st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=3), st.one_of(st.none(), TARGETS)), max_size=8),
    path=st.lists(st.sampled_from(["a", "b", "c", "..", "."]), min_size=1, max_size=6),
    follow=st.booleans(),
)
def test_no_arrangement_of_links_leads_out_of_the_root(
    tmp_path_factory: pytest.TempPathFactory,
    links: list[tuple[list[str], str | None]],
    path: list[str],
    follow: bool,
) -> None:
    root = tmp_path_factory.mktemp("root")
    for parts, target in links:
        place = root.joinpath(*parts)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            if not str(place.parent.resolve()).startswith(str(root)):
                continue  # the test itself must stay inside as well
            if target is None:
                place.mkdir(exist_ok=True)
            else:
                place.symlink_to(target)
        except (OSError, RuntimeError):
            continue
    host = Host(str(root))
    try:
        real = host.real("/" + "/".join(path), follow=follow)
    except StratumError as error:
        assert error.reference == "link-loop"
        return
    parent = os.path.dirname(real) if real != str(root) else real
    assert os.path.realpath(parent) == parent, "a link was left in the parents"
    assert real == str(root) or real.startswith(f"{root}/")
    assert not (follow and os.path.islink(real))


# -- modes ----------------------------------------------------------------------------------------------


def test_new_directories_and_files_have_the_mode_asked_for_under_every_umask(host: Host, umask: int) -> None:
    root = Path(host.root)
    made = host.makedirs("/a/b/c")
    assert made == [PurePosixPath("/a"), PurePosixPath("/a/b"), PurePosixPath("/a/b/c")]
    host.mkdir("/a/private", 0o700)
    with host.open_new("/a/file", 0o644) as file:
        file.write(b"x")
    host.open_new("/a/key", 0o600).close()
    host.open_new("/a/program", 0o755).close()
    assert [mode(root / name) for name in ("a", "a/b", "a/b/c", "a/private")] == [0o755, 0o755, 0o755, 0o700]
    assert [mode(root / name) for name in ("a/file", "a/key", "a/program")] == [0o644, 0o600, 0o755]


def test_a_directory_that_was_there_keeps_its_mode(host: Host, umask: int) -> None:
    root = Path(host.root)
    (root / "a").mkdir()
    (root / "a").chmod(0o711)
    assert host.makedirs("/a/b") == [PurePosixPath("/a/b")]
    assert mode(root / "a") == 0o711
    assert host.makedirs("/a/b") == []


def test_a_set_group_id_parent_does_not_show_through(host: Host) -> None:
    root = Path(host.root)
    (root / "shared").mkdir()
    (root / "shared").chmod(0o2775)
    host.mkdir("/shared/ours", 0o755)
    assert mode(root / "shared/ours") == 0o755


def test_making_a_directory_that_another_process_makes_too_is_no_error(host: Host) -> None:
    class Slow(Host):
        def mkdir(self, path: object, mode: int = 0o755) -> None:
            os.mkdir(self.real(str(path)))  # the other one was faster
            super().mkdir(str(path), mode)

    slow = Slow(host.root)
    slow.makedirs("/run/stratum")
    assert slow.is_dir("/run/stratum")


def test_a_file_in_the_way_of_a_directory_is_an_error_and_stays(host: Host) -> None:
    root = Path(host.root)
    (root / "etc").write_text("a file")
    with pytest.raises(OSError):
        host.makedirs("/etc/stratum")
    assert (root / "etc").read_text() == "a file"


def test_a_new_file_is_never_written_over_or_through_what_is_there(host: Host) -> None:
    root = Path(host.root)
    (root / "file").write_text("old")
    (root / "dangling").symlink_to("nowhere")
    for name in ("/file", "/dangling"):
        with pytest.raises(FileExistsError):
            host.open_new(name, 0o644)
    assert (root / "file").read_text() == "old"
    assert not (root / "nowhere").exists()


def test_nobody_can_open_a_new_file_before_it_has_its_mode(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    before = os.fchmod
    monkeypatch.setattr(
        os, "fchmod", lambda fd, bits: (seen.append(stat.S_IMODE(os.fstat(fd).st_mode)), before(fd, bits))
    )
    host.open_new("/open", 0o666).close()
    assert seen[0] & 0o077 == 0


# -- reading --------------------------------------------------------------------------------------------


def test_bytes_that_are_not_utf8_survive_reading_as_text(host: Host) -> None:
    (Path(host.root) / "file").write_bytes(b"a\xff\xfe\n")
    assert host.read_text("/file").encode("utf-8", "surrogateescape") == b"a\xff\xfe\n"


def test_walk_gives_children_first_and_follows_no_link(host: Host, tmp_path: Path) -> None:
    root = Path(host.root)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/canary").touch()
    (root / "t/d/e").mkdir(parents=True)
    (root / "t/d/e/file").touch()
    (root / "t/out").symlink_to(tmp_path / "outside")
    names = [str(path) for path, _ in host.walk("/t")]
    assert sorted(names) == ["/t/d", "/t/d/e", "/t/d/e/file", "/t/out"]
    assert names.index("/t/d/e/file") < names.index("/t/d/e") < names.index("/t/d")


def test_a_tree_deeper_than_the_recursion_limit_is_walked(tmp_path: Path) -> None:
    top = tmp_path / "deep"
    depth = sys.getrecursionlimit() + 100
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=here)
        deeper = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    try:
        assert sum(1 for _ in Host("/").walk(str(top))) == depth
    finally:
        subprocess.run(["rm", "-rf", str(top)], check=True)


def test_a_directory_without_sync_is_no_error_but_a_failing_disk_is(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> None:
        def fsync(_descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    fail(errno.EINVAL)
    host.fsync_dir("/")
    fail(errno.EIO)
    with pytest.raises(OSError) as caught:
        host.fsync_dir("/")
    assert caught.value.errno == errno.EIO


def test_syncing_a_file_system_leaves_no_descriptor_open(host: Host) -> None:
    before = len(os.listdir("/proc/self/fd"))
    host.syncfs("/")
    assert len(os.listdir("/proc/self/fd")) == before


# -- programs -------------------------------------------------------------------------------------------


def program(path: Path, text: str = "#!/bin/sh\n", bits: int = 0o755) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(bits)


def test_programs_in_sbin_are_found_on_a_path_without_it(host: Host) -> None:
    program(Path(host.root) / "usr/sbin/modprobe")
    for environ in ({"PATH": "/usr/bin:/bin"}, {}, {"PATH": ""}):
        assert Host(host.root, environ).which("modprobe") == "/usr/sbin/modprobe"


def test_the_callers_path_comes_first_and_its_relative_entries_never_count(host: Host) -> None:
    found = Host(host.root, {"PATH": ".::bin:/opt/x/bin:/usr/bin"}).search_path()
    assert found[:2] == ["/opt/x/bin", "/usr/bin"]
    assert set(found) == {"/opt/x/bin", *SEARCH_PATH}


def test_only_an_executable_file_counts_as_a_program(host: Host) -> None:
    root = Path(host.root)
    program(root / "usr/local/sbin/tool", bits=0o644)
    (root / "usr/local/bin/tool").mkdir(parents=True)
    (root / "usr/sbin").mkdir()
    (root / "usr/sbin/tool").symlink_to("nowhere")
    assert host.which("tool") is None
    assert host.which("/usr/local/bin/tool") is None
    program(root / "bin/tool")
    assert host.which("tool") == "/bin/tool"


def test_a_link_to_a_program_is_looked_up_inside_the_tree(host: Host) -> None:
    root = Path(host.root)
    program(root / "etc/alternatives/iptables")
    (root / "usr/sbin").mkdir(parents=True)
    (root / "usr/sbin/iptables").symlink_to("/etc/alternatives/iptables")
    assert host.which("iptables") == "/usr/sbin/iptables"


def test_a_directory_tree_runs_no_commands(host: Host) -> None:
    program(Path(host.root) / "bin/true")
    with pytest.raises(RuntimeError):
        host.run(["true"], timeout=60)


def test_a_command_gets_neither_the_callers_proxy_nor_its_loader_variables(live: Host) -> None:
    lines = dict(line.partition("=")[::2] for line in live.run(["env"], timeout=60).text.splitlines())
    assert lines.pop("PATH").split(":") == live.search_path()
    assert lines == {"LC_ALL": "C", "LANG": "C"}
    assert "A=b" in live.run(["env"], timeout=60, env={"A": "b"}).text.splitlines()


def test_a_command_reads_nothing_from_the_callers_terminal_or_pipe(live: Host) -> None:
    assert live.run(["cat"], timeout=60).stdout == b""


def test_a_command_inherits_no_descriptor(live: Host, tmp_path: Path) -> None:
    with open(tmp_path / "lock", "w") as lock:
        os.set_inheritable(lock.fileno(), True)
        names = live.run(["ls", "/proc/self/fd"], timeout=60).text.split()
    assert set(names) <= {"0", "1", "2", "3"}  # 3 is the directory that ls itself reads


def test_a_failing_command_says_what_it_was_and_what_it_said_in_one_line(live: Host) -> None:
    with pytest.raises(CommandError) as caught:
        live.run(["sh", "-c", "echo out; echo one >&2; echo; echo two >&2; exit 7"], timeout=60)
    assert caught.value.status == 7
    assert caught.value.message.endswith("exit status 7: one; two")
    assert "\n" not in caught.value.message.replace("echo", "")
    assert caught.value.stderr == "one\ntwo\n"
    done = live.run(["sh", "-c", "exit 7"], timeout=60, check=False)
    assert done.status == 7


def test_a_flood_of_errors_is_cut_and_bytes_that_are_no_text_are_escaped(live: Host) -> None:
    with pytest.raises(CommandError) as caught:
        live.run(["sh", "-c", r"printf '\377\376' >&2; yes x | head -c 100000 >&2; exit 1"], timeout=60)
    assert len(caught.value.message) < 1000
    caught.value.message.encode("ascii")


def test_a_command_that_was_killed_says_by_which_signal(live: Host) -> None:
    with pytest.raises(CommandError) as caught:
        live.run(["sh", "-c", "kill -9 $$"], timeout=60)
    assert "killed by signal 9" in caught.value.message


def test_a_missing_program_is_named(live: Host) -> None:
    with pytest.raises(CommandError) as caught:
        live.run(["stratum-no-such-program"], timeout=1)
    assert caught.value.reference == "command-missing"
    assert caught.value.status is None


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF cut short", b"#!/no/such/interpreter\n", b"#!/etc/passwd\n"], ids=repr
)
def test_a_program_that_cannot_be_started_is_a_command_error(live: Host, tmp_path: Path, content: bytes) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(content)
    broken.chmod(0o755)
    with pytest.raises(CommandError) as caught:
        live.run([str(broken)], timeout=60)
    assert str(broken) in caught.value.message
    with pytest.raises(CommandError):
        live.run([str(tmp_path)], timeout=60)


def test_a_command_that_does_not_end_is_killed_with_everything_it_started(live: Host, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    start = time.monotonic()
    with pytest.raises(CommandError) as caught:
        live.run(["sh", "-c", f"echo waiting >&2; sleep 300 & echo $! > {pid}; wait"], timeout=1.5)
    assert time.monotonic() - start < 60
    assert caught.value.reference == "command-timeout"
    assert "no end after 1.5 s: waiting" in caught.value.message
    deadline = time.monotonic() + 60
    while _runs(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(int(pid.read_text()))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_daemon_that_keeps_the_output_open_does_not_hold_up_the_caller(live: Host, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    start = time.monotonic()
    done = live.run(["sh", "-c", f"sleep 600 & echo $! > {pid}; echo started"], timeout=300)
    try:
        assert done.text == "started\n"
        assert time.monotonic() - start < 200
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_what_is_fed_arrives_whole(live: Host) -> None:
    data = bytes(range(256)) * 4096
    assert live.run(["cat"], timeout=60, feed=lambda pipe: _write(pipe, data)).stdout == data


def _write(pipe: object, data: bytes) -> None:
    pipe.write(data)  # type: ignore[attr-defined]


def test_a_command_that_stops_reading_fails_by_its_own_status_and_not_by_a_broken_pipe(live: Host) -> None:
    with pytest.raises(CommandError) as caught:
        live.run(["sh", "-c", "echo no >&2; exit 3"], timeout=60, feed=lambda pipe: _write(pipe, bytes(1 << 22)))
    assert caught.value.status == 3


def test_a_command_that_never_reads_runs_out_of_time(live: Host) -> None:
    with pytest.raises(CommandError) as caught:
        live.run(["sleep", "60"], timeout=0.4, feed=lambda pipe: _write(pipe, bytes(1 << 22)))
    assert caught.value.reference == "command-timeout"


def test_an_error_while_feeding_ends_the_command_and_is_the_error(live: Host, tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def feed(pipe: object) -> None:
        while not pid.exists() or not pid.read_text().strip():
            time.sleep(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        live.run(["sh", "-c", f"echo $$ > {pid}; exec sleep 60"], timeout=60, feed=feed)
    assert not _runs(int(pid.read_text()))


def test_running_commands_leaves_no_descriptor_and_no_zombie(live: Host) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        live.run(["true"], timeout=60)
        with pytest.raises(CommandError):
            live.run(["sleep", "60"], timeout=0.05)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


# -- sockets --------------------------------------------------------------------------------------------


def test_only_a_socket_with_somebody_behind_it_listens(host: Host) -> None:
    path = Path(host.root) / "sock"
    assert not host.listens("/sock")
    path.write_text("a file")
    assert not host.listens("/sock")
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        assert not host.listens("/sock"), "bound, but not listening"
        server.listen()
        assert host.listens("/sock")
    assert path.exists()
    assert not host.listens("/sock"), "the process that served it is gone"


def test_a_server_that_is_too_busy_to_accept_still_listens(host: Host) -> None:
    path = Path(host.root) / "sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen(0)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other,
        ):
            for client in (one, other):
                client.setblocking(False)
                try:
                    client.connect(str(path))
                except BlockingIOError:
                    break
            assert host.listens("/sock")


def test_mounts_of_this_process_are_seen_at_and_below_a_path() -> None:
    machine = Host("/")
    assert "/proc" in machine.mount_points()
    assert machine.is_mount_point("/proc") and not machine.is_mount_point("/proc/self")
    assert "/proc" in machine.mounts_within("/proc")
    assert machine.mounts_within("/proc/self") == []
    assert "/proc" in machine.mounts_within("/")


def test_mounts_in_a_tree_are_seen_by_their_real_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root/data/stratum").mkdir(parents=True)
    (tmp_path / "root/opt").symlink_to("/data")
    host = Host(str(tmp_path / "root"))
    monkeypatch.setattr(host, "mount_points", lambda: [f"{tmp_path}/root/data/stratum/x", f"{tmp_path}/root/data/s"])
    assert host.mounts_within("/opt/stratum") == [f"{tmp_path}/root/data/stratum/x"]
    assert not host.is_mount_point("/opt/stratum")


def test_temporary_names_are_hidden_beside_the_file_and_never_the_same(host: Host) -> None:
    names = {host.temporary_name("/etc/file") for _ in range(100)}
    assert len(names) == 100
    assert {name.parent for name in names} == {PurePosixPath("/etc")}
    assert all(name.name.startswith(".file.") and name.name.endswith(".tmp") for name in names)


def test_threads_may_run_commands_at_the_same_time(live: Host) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda word=word: found.append(live.run(["echo", word], timeout=60).text))
        for word in ("a", "b", "c", "d")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["a\n", "b\n", "c\n", "d\n"]
