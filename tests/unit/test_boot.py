"""The first steps of a run: version gate, streams, and where the compiled parts are loaded from."""

from __future__ import annotations

import ast
import errno
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from stratum import boot, compiled
from stratum.boot import vendor_paths
from stratum.compiled import Runtime, Target, places_for
from stratum.errors import StratumError
from stratum.runtimedir import Part, Place
from tests.pyz import ROOT

OWNERS = frozenset({0, os.geteuid()})
CONTENT = {"a": b"a" * 3000, "b": b"b" * 9000}
PARTS = [Part("a", "a", 3000, hashlib.sha256(CONTENT["a"]).hexdigest())]
PARTS += [Part("pkg.b", "b", 9000, hashlib.sha256(CONTENT["b"]).hexdigest())]
KEYS = [f"cp3{minor}-{machine}" for minor in range(9, 15) for machine in ("x86_64", "aarch64")]


# The version gate


def test_the_first_file_keeps_to_what_old_interpreters_parse() -> None:
    source = (ROOT / "stratum" / "__main__.py").read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 4))
    for node in ast.walk(tree):
        # Python 2.7 has none of these; 3.6 has no such __future__.
        assert not isinstance(node, (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.AsyncFunctionDef, ast.Nonlocal))
        if isinstance(node, ast.FunctionDef):
            assert node.returns is None
            assert not any(argument.annotation for argument in node.args.args)
        if isinstance(node, ast.ImportFrom):
            assert node.module != "__future__"
    source.encode("ascii")  # Python 2.7 wants a declaration for anything else


def test_the_gate_comes_before_every_other_import() -> None:
    tree = ast.parse((ROOT / "stratum" / "__main__.py").read_text(encoding="utf-8"))
    kinds = [type(node) for node in tree.body]
    assert kinds[:3] == [ast.Expr, ast.Import, ast.If]


# The search path and the source tree


def test_the_search_path_begins_with_the_most_particular_directory() -> None:
    names = ["cp39", "cp310", "cp313"]
    assert vendor_paths("/s.pyz", names, 9) == ["/s.pyz/vendor/cp39"]
    assert vendor_paths("/s.pyz", names, 12) == ["/s.pyz/vendor/cp310", "/s.pyz/vendor/cp39"]
    assert vendor_paths("/s.pyz", names, 20)[0] == "/s.pyz/vendor/cp313"


def test_outside_a_pyz_nothing_is_unpacked_and_no_key_is_built_in() -> None:
    before = list(sys.path), list(sys.meta_path)
    boot.start()
    boot.require_compiled(persist=True)
    assert boot.created_paths() == ()
    assert boot.builtin_keys() == []
    assert boot.prune_runtime() == []
    boot.undo_created()
    assert (list(sys.path), list(sys.meta_path)) == before


# Streams


def run_in_source_tree(code: str, *, shell: str = '"$@"', **environ: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["sh", "-c", f"exec {shell}", "sh", sys.executable, "-B", "-c", code],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **environ},
        capture_output=True,
        check=False,
        timeout=60,
    )


CLOSED = """
import os, sys
from stratum import boot
assert sys.stdin is None or sys.stdout is None or sys.stderr is None
boot.setup_streams()
print("to stdout")
print("to stderr", file=sys.stderr)
sys.stdout.flush()
fd = os.open(os.environ["OUT"], os.O_WRONLY | os.O_CREAT)
assert fd > 2, fd
assert sys.stdin.read() == ""
assert all(os.get_inheritable(fd) for fd in range(3))
os.write(fd, b"done")
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_filled_and_never_taken_by_a_file(tmp_path: Path, closed: str) -> None:
    out = tmp_path / "out"
    shell = f'"$@" {closed}' + ("" if "<" in closed else " </dev/null")
    run = run_in_source_tree(CLOSED, shell=shell, OUT=str(out))
    assert out.read_bytes() == b"done", run.stderr


def test_a_locale_without_the_character_gets_an_escape_and_no_error() -> None:
    code = "from stratum import boot; boot.setup_streams(); print('caf\\xe9 \\u2192'); raise SystemExit('\\u2713')"
    run = run_in_source_tree(code, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (run.stdout, run.stderr, run.returncode) == (b"caf\\xe9 \\u2192\n", b"\\u2713\n", 1)


def test_undecodable_file_names_can_be_printed() -> None:
    code = "from stratum import boot; boot.setup_streams(); print('name-\\udcff')"
    assert run_in_source_tree(code, LC_ALL="C.UTF-8").stdout == b"name-\\udcff\n"


# Which compiled parts fit


def target(**different: Any) -> Target:
    usual: dict[str, Any] = {
        "implementation": "cpython",
        "version": (3, 11, 2),
        "abiflags": "",
        "machine": "x86_64",
        "bits": 64,
        "libc": "glibc 2.28",
        "suffix": ".cpython-311-x86_64-linux-gnu.so",
    }
    return Target(**{**usual, **different})


@pytest.mark.parametrize("version", [(3, minor, 2) for minor in range(9, 15)])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_carried_interpreter_and_machine_fits(version: tuple[int, ...], machine: str) -> None:
    assert target(version=version, machine=machine).unfit(KEYS) is None


@pytest.mark.parametrize(
    ("different", "message", "hint"),
    [
        (
            {"version": (3, 15, 0)},
            r"cpython 3\.15\.0 .*need CPython 3\.9 to 3\.14",
            r"built for it, or run .*python3\.14",
        ),
        ({"machine": "riscv64"}, "riscv64 .*for aarch64 and x86_64", "stratum.pyz built for it"),
        ({"bits": 32}, "x86_64 with a 32-bit interpreter", "built for it"),
        ({"libc": ""}, "not glibc", "glibc 2.28"),
        ({"suffix": ".cpython-311-x86_64-linux-musl.so"}, "not glibc", "glibc 2.28"),
        ({"libc": "glibc 2.17"}, r"glibc 2\.17; the compiled parts need 2\.28", "newer release"),
        ({"abiflags": "t", "version": (3, 14, 0)}, "free-threaded", "another interpreter"),
        ({"implementation": "pypy"}, "not CPython", "another interpreter"),
    ],
)
def test_what_does_not_fit_gets_one_line_and_a_hint(different: dict[str, Any], message: str, hint: str) -> None:
    import re

    unfit = target(**different).unfit(KEYS)
    assert unfit is not None
    assert re.search(message, unfit[0]), unfit
    assert re.search(hint, unfit[1]), unfit
    assert "\n" not in unfit[0] + unfit[1]


def test_a_slim_pyz_names_the_one_interpreter_that_it_is_for() -> None:
    unfit = target(version=(3, 13, 0)).unfit(["cp311-x86_64"])
    assert unfit is not None
    assert "need CPython 3.11" in unfit[0]


def test_a_newer_glibc_with_three_parts_fits() -> None:
    assert target(libc="glibc 2.39.9000").unfit(KEYS) is None


def test_the_running_interpreter_describes_itself() -> None:
    assert Target().key == f"cp{sys.version_info[0]}{sys.version_info[1]}-{os.uname().machine}"


# Where they are loaded from


def test_root_has_places_that_do_not_depend_on_the_environment() -> None:
    paths = [place.path for place in places_for(0, lambda name: "/tmp/evil")]
    assert paths == [
        "/var/lib/stratum/runtime",
        "/opt/stratum/runtime",
        "/usr/local/lib/stratum/runtime",
        "/run/stratum/runtime",
    ]


def test_a_user_without_home_still_has_places() -> None:
    paths = [place.path for place in places_for(424242, lambda name: None)]
    assert paths == ["/run/user/424242/stratum"]
    relative = [place.path for place in places_for(424242, lambda name: "cache")]
    assert relative == paths
    absolute = places_for(424242, lambda name: "/c/cache")[0]
    assert absolute == Place("/c/cache/stratum", 0o700, base="/c")


class Loaded:
    """Takes the place of the dynamic linker; refuses the paths that begin with one of ``refused``."""

    def __init__(self, *refused: str) -> None:
        self.paths: list[str] = []
        self._refused = refused

    def __call__(self, spec: ModuleSpec) -> None:
        assert spec.origin is not None
        if spec.origin.startswith(self._refused or ("\0",)):
            raise ImportError("failed to map segment from shared object")
        self.paths.append(spec.origin)


def runtime(
    *places: Path, load: Callable[[ModuleSpec], None], read: Callable[[str], bytes] = CONTENT.__getitem__
) -> Runtime:
    return Runtime(
        "cp311-x86_64",
        PARTS,
        read=read,
        places=[Place(str(path), 0o755) for path in places],
        owners=OWNERS,
        load=load,
    )


def test_persisting_unpacks_once_and_later_runs_load_from_there(safe_dir: Path) -> None:
    first, second, loaded = (
        runtime(safe_dir / "r", load=Loaded()),
        runtime(safe_dir / "r", load=Loaded()),
        Loaded(),
    )
    first.prepare(persist=True)
    second.prepare(persist=True)
    third = runtime(safe_dir / "r", load=loaded)
    third.prepare(persist=False)
    assert first.directory == second.directory == third.directory
    assert first.created[-1] == first.directory
    assert second.created == third.created == []
    assert loaded.paths == [f"{first.directory}/a.so"]
    assert third.spec("pkg.b").origin == f"{first.directory}/pkg.b.so"


def test_without_persisting_nothing_is_written_and_memory_is_used(safe_dir: Path) -> None:
    loaded = Loaded()
    read_only = runtime(safe_dir / "r", load=loaded)
    read_only.prepare(persist=False)
    assert os.listdir(safe_dir) == []
    assert read_only.created == []
    assert read_only.directory is None
    assert Path(loaded.paths[0]).read_bytes() == CONTENT["a"]
    assert Path(read_only.spec("pkg.b").origin or "").read_bytes() == CONTENT["b"]
    assert not os.get_inheritable(int(loaded.paths[0].rsplit("/", 1)[1]))


def test_memory_is_replaced_when_a_later_step_may_persist(safe_dir: Path) -> None:
    both = runtime(safe_dir / "r", load=Loaded())
    both.prepare(persist=False)
    both.prepare(persist=True)
    assert both.directory is not None


def test_a_place_that_refuses_leads_to_the_next_and_leaves_nothing(safe_dir: Path) -> None:
    for name in ("noexec", "good"):
        (safe_dir / name).mkdir(mode=0o755)
    tried = runtime(safe_dir / "noexec/r/s", safe_dir / "good/r", load=Loaded(str(safe_dir / "noexec")))
    tried.prepare(persist=True)
    assert str(tried.directory).startswith(str(safe_dir / "good"))
    assert os.listdir(safe_dir / "noexec") == []
    assert all(path.startswith(str(safe_dir / "good")) for path in tried.created)


def test_a_full_disk_leads_to_the_next_place(safe_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def full_once(fd: int) -> None:
        calls.append("")
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd)

    real = os.fsync
    monkeypatch.setattr(os, "fsync", full_once)
    tried = runtime(safe_dir / "full", safe_dir / "good", load=Loaded())
    tried.prepare(persist=True)
    assert os.listdir(safe_dir) == ["good"]


def test_a_planted_directory_is_not_loaded_from_and_memory_serves_a_read_only_command(safe_dir: Path) -> None:
    first = runtime(safe_dir / "r", load=Loaded())
    first.prepare(persist=True)
    (Path(str(first.directory)) / "a.so").write_bytes(b"e" * 3000)
    loaded = Loaded()
    runtime(safe_dir / "r", load=loaded).prepare(persist=False)
    assert loaded.paths[0].startswith("/proc/self/fd/")
    assert (Path(str(first.directory)) / "a.so").read_bytes() == b"e" * 3000


def test_when_no_place_will_do_one_line_says_why_for_each(safe_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str, flags: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    (safe_dir / "shared").mkdir()
    os.chmod(safe_dir / "shared", 0o777)
    (safe_dir / "refused").mkdir(mode=0o755)
    failing = runtime(safe_dir / "shared/r", safe_dir / "refused/r", load=Loaded(str(safe_dir / "refused")))
    with pytest.raises(StratumError) as caught:
        failing.prepare(persist=True)
    assert caught.value.reference == "compiled-parts"
    for text in ("/shared is writable by others", "/refused/r", "failed to map segment", "memory: "):
        assert text in caught.value.message
    assert "\n" not in caught.value.message
    assert str(safe_dir / "shared/r") in str(caught.value.hint)
    assert os.listdir(safe_dir / "refused") == []


def test_undoing_removes_what_was_made_and_keeps_what_came_later(safe_dir: Path) -> None:
    undone = runtime(safe_dir / "stratum/runtime", load=Loaded())
    undone.prepare(persist=True)
    undone.undo_created()
    assert os.listdir(safe_dir) == []
    again = runtime(safe_dir / "stratum/runtime", load=Loaded())
    again.prepare(persist=True)
    (safe_dir / "stratum/receipt.json").write_text("{}")
    again.undo_created()
    assert os.listdir(safe_dir / "stratum") == ["receipt.json"]
    assert again.created == []


def test_undoing_keeps_a_directory_that_was_there_before(safe_dir: Path) -> None:
    runtime(safe_dir / "r", load=Loaded()).prepare(persist=True)
    second = runtime(safe_dir / "r", load=Loaded())
    second.prepare(persist=True)
    second.undo_created()
    assert len(os.listdir(safe_dir / "r")) == 1


def test_an_interrupt_while_unpacking_leaves_nothing(safe_dir: Path) -> None:
    def interrupted(member: str) -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runtime(safe_dir / "stratum/runtime", load=Loaded(), read=interrupted).prepare(persist=True)
    assert os.listdir(safe_dir) == []


def test_an_interpreter_without_parts_gets_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [[f"cp39-{os.uname().machine}", "a", "a", "3000", PARTS[0].sha256]]
    monkeypatch.setattr(compiled, "Target", lambda: target(version=(3, 15, 1), machine=os.uname().machine))
    with pytest.raises(StratumError, match=r"this is cpython 3\.15\.1") as caught:
        Runtime.for_this_process(lines, CONTENT.__getitem__)
    assert caught.value.reference == "no-compiled-parts"
