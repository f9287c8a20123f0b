"""The pyz itself: what is in it, that it is the same each time, and that it runs on each interpreter."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Optional

import pytest

import build_zipapp
from pyzbuild import elf, lock
from pyzbuild.archive import SHEBANG, TooLargeError, write_archive
from pyzbuild.wheels import COMPILED_MODULES
from tests.pyz import ROOT, USE_EVERYTHING, built_pyz, default_cache
from tests.unit.conftest import interpreters

EMPTY_ENVIRONMENT = {"PATH": "/usr/bin:/bin"}
SETS = [f"cp3{minor}-{machine}" for minor in range(9, 15) for machine in ("x86_64", "aarch64")]
INTERPRETERS = interpreters()
FIT = {v: path for v, path in INTERPRETERS.items() if (3, 9, 2) <= tuple(map(int, v.split("."))) < (3, 15)}
TOO_OLD = {v: path for v, path in INTERPRETERS.items() if tuple(map(int, v.split("."))) < (3, 9, 2)}

# A key in minisign's format: "Ed", the id, and 32 zero bytes.
PUBLIC_KEY = (
    b"untrusted comment: minisign public key 0807060504030201\n"
    b"RWQBAgMEBQYHCAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\n"
)


def run(
    *command: str, env: Optional[dict[str, str]] = None, cwd: Optional[Path] = None
) -> subprocess.CompletedProcess[str]:
    env = EMPTY_ENVIRONMENT if env is None else env
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)


def python_command(interpreter: str, pyz: Path, code: str, *places: Path) -> list[str]:
    """Return the command for ``code`` with the modules of the pyz and no others, and other places to unpack into."""
    paths = [str(place) for place in places]
    start = f"""
import sys
sys.path.insert(0, {str(pyz)!r})
from stratum import boot, compiled
from stratum.runtimedir import Place
compiled.places_for = lambda uid, environ: [Place(path, 0o755) for path in {paths!r}]
boot.start()
"""
    return [interpreter, "-I", "-S", "-B", "-c", start + code]


def python(
    interpreter: str,
    pyz: Path,
    code: str,
    *places: Path,
    env: Optional[dict[str, str]] = None,
    cwd: Optional[Path] = None,
) -> subprocess.CompletedProcess[str]:
    return run(*python_command(interpreter, pyz, code, *places), env=env, cwd=cwd)


# It runs everywhere


def test_this_machine_has_an_interpreter_to_test_with() -> None:
    assert FIT


@pytest.mark.parametrize("version", sorted(FIT))
def test_every_package_works_from_memory(pyz: Path, safe_dir: Path, version: str) -> None:
    done = python(FIT[version], pyz, USE_EVERYTHING.format(persist=False), safe_dir / "runtime", cwd=safe_dir)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("/proc/self/fd/")
    assert done.stderr == ""
    assert os.listdir(safe_dir) == []


@pytest.mark.parametrize("version", sorted(FIT))
def test_every_package_works_unpacked(pyz: Path, safe_dir: Path, version: str) -> None:
    for _ in range(2):
        done = python(FIT[version], pyz, USE_EVERYTHING.format(persist=True), safe_dir / "runtime")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{safe_dir}/runtime/cp3")
    assert len(os.listdir(safe_dir / "runtime")) == 1


@pytest.mark.parametrize("version", sorted(FIT))
def test_an_import_that_did_not_ask_first_works_and_writes_nothing(pyz: Path, safe_dir: Path, version: str) -> None:
    done = python(FIT[version], pyz, "import zstandard; print(zstandard.backend_c.__file__)", safe_dir / "runtime")
    assert done.returncode == 0, done.stderr
    assert os.listdir(safe_dir) == []


@pytest.mark.parametrize("flags", [(), ("-I", "-S"), ("-I",), ("-E",)])
@pytest.mark.parametrize("version", sorted(FIT))
def test_the_version_is_printed_by_each_interpreter(pyz: Path, version: str, flags: tuple[str, ...]) -> None:
    done = run(FIT[version], *flags, str(pyz), "--version")
    assert (done.stdout, done.stderr, done.returncode) == ("stratum 0.1.0\n", "", 0)


@pytest.mark.parametrize("version", sorted(TOO_OLD))
def test_an_interpreter_that_is_too_old_gets_one_clear_line(pyz: Path, version: str) -> None:
    for arguments in (["--version"], ["up"], []):
        done = run(TOO_OLD[version], str(pyz), *arguments)
        assert done.returncode == 1
        assert done.stdout == ""
        assert re.fullmatch(
            rf"stratum: error\[python-too-old\]: this is Python {re.escape(version)}\S* \(.*\); "
            r"stratum needs CPython 3\.9\.2 or later\n",
            done.stderr,
        )


def test_the_file_runs_by_itself(pyz: Path) -> None:
    done = run(str(pyz), "--version")
    assert (done.stdout, done.stderr, done.returncode) == ("stratum 0.1.0\n", "", 0)


def test_the_version_imports_nothing_heavy(pyz: Path) -> None:
    done = run(sys.executable, "-I", "-S", "-X", "importtime", str(pyz), "--version")
    imported = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines()}
    assert "stratum" in imported
    assert not imported & {"argparse", "typing", "dataclasses", "json", "re", "stratum.boot", "stratum.cli"}


def test_starting_imports_no_compiled_part(pyz: Path) -> None:
    done = python(sys.executable, pyz, "print([m for m in sys.modules if m.startswith(('crypto', 'zstd', '_cffi'))])")
    assert done.stdout == "[]\n", done.stderr


def test_the_version_with_a_closed_stdout_does_not_crash(pyz: Path) -> None:
    done = run("sh", "-c", f"'{pyz}' --version <&- >&-")
    assert "Traceback" not in done.stderr


def test_a_hostile_directory_and_environment_do_not_get_in(pyz: Path, tmp_path: Path) -> None:
    for name in ("stratum", "yaml", "os", "runpy", "sitecustomize", "usercustomize"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('planted')\n")
    env = {**EMPTY_ENVIRONMENT, "PYTHONPATH": str(tmp_path), "PYTHONHOME": "/nonexistent", "PYTHONSTARTUP": "x"}
    done = run(str(pyz), "--version", env=env, cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("stratum 0.1.0\n", 0), done.stderr


def test_the_machines_own_packages_do_not_hide_ours(pyz: Path, tmp_path: Path) -> None:
    # As run by "python3 stratum.pyz", where neither -I nor -S is given.
    for name in ("yaml", "requests", "zstandard", "_cffi_backend"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('planted')\n")
    code = f"import sys; sys.path.insert(0, {str(pyz)!r}); from stratum import boot; boot.start(); "
    code += "import yaml, requests, zstandard, _cffi_backend; print('ours')"
    done = run(sys.executable, "-B", "-c", code, env={**EMPTY_ENVIRONMENT, "PYTHONPATH": str(tmp_path)})
    assert done.stdout == "ours\n", done.stderr


def test_a_run_through_a_link_goes_on_when_the_link_turns_and_the_directory_changes(tmp_path: Path) -> None:
    source = source_copy(tmp_path / "source")
    (source / "stratum" / "cli.py").write_text(
        "import os\n"
        "def main(argv):\n"
        "    os.unlink('stratum')\n"
        "    os.symlink('/dev/null', 'stratum')\n"
        "    os.chdir('/')\n"
        "    import yaml\n"
        "    print(yaml.__file__, argv)\n"
        "    return 7\n"
    )
    built = build_slim(source)
    (tmp_path / "stratum").symlink_to(built)
    done = run(sys.executable, "-I", "-S", "stratum", "up", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (7, "")
    assert re.fullmatch(rf"{built}/vendor/cp3\d+/yaml/__init__\.py \['up'\]\n", done.stdout)


def test_importing_requests_writes_no_certificates(pyz: Path, tmp_path: Path) -> None:
    code = "import requests; print(requests.certs.where())"
    done = python(sys.executable, pyz, code, env={**EMPTY_ENVIRONMENT, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == []


def test_a_machine_without_certificates_gets_the_list_of_certifi(pyz: Path, tmp_path: Path) -> None:
    code = """
import certifi.core
certifi.core._STORES = ("/nonexistent",)
path = certifi.core.where()
assert "BEGIN CERTIFICATE" in open(path).read() and certifi.core.where() == path
print(path)
"""
    done = python(sys.executable, pyz, code, env={**EMPTY_ENVIRONMENT, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
    assert os.listdir(tmp_path) == []


# Two at once, full disks, noexec


def test_two_processes_at_once_make_one_directory_and_both_work(pyz: Path, safe_dir: Path) -> None:
    # Both wait for the same moment, so that neither is done before the other begins.
    code = f"import time; time.sleep(max(0, {time.time() + 1.0} - time.time()))\n" + USE_EVERYTHING.format(persist=True)
    commands = [python_command(sys.executable, pyz, code, safe_dir / "runtime") for _ in range(2)]
    running = [
        subprocess.Popen(c, env=EMPTY_ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for c in commands
    ]
    results = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert len(os.listdir(safe_dir / "runtime")) == 1


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts in a namespace of their own need root")


def in_own_mounts(script: str, pyz: Path, code: str, *places: Path) -> subprocess.CompletedProcess[str]:
    """Run code after a shell script in a private mount name space; nothing of it is seen outside."""
    command = python_command(sys.executable, pyz, code, *places)
    return run("unshare", "--mount", "--propagation", "private", "sh", "-ec", script + '\nexec "$@"', "sh", *command)


@needs_root
def test_a_noexec_directory_is_passed_over_and_left_empty(pyz: Path, safe_dir: Path) -> None:
    (safe_dir / "noexec").mkdir(mode=0o755)
    code = USE_EVERYTHING.format(persist=True) + f"import os\nprint(os.listdir({str(safe_dir / 'noexec')!r}))"
    script = f"mount -t tmpfs -o noexec,mode=0755 none '{safe_dir}/noexec'"
    done = in_own_mounts(script, pyz, code, safe_dir / "noexec/stratum", safe_dir / "good")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith(f"{safe_dir}/good/")
    assert done.stdout.splitlines()[1] == "[]"


@needs_root
def test_when_only_noexec_is_left_memory_serves_and_without_it_the_error_names_the_mount(
    pyz: Path, safe_dir: Path
) -> None:
    (safe_dir / "noexec").mkdir(mode=0o755)
    script = f"mount -t tmpfs -o noexec,mode=0755 none '{safe_dir}/noexec'"
    done = in_own_mounts(script, pyz, USE_EVERYTHING.format(persist=True), safe_dir / "noexec/stratum")
    assert done.stdout.startswith("/proc/self/fd/"), done.stderr
    no_memory = "import os\ndef no(*a): raise PermissionError(13, 'Permission denied')\nos.memfd_create = no\n"
    done = in_own_mounts(script, pyz, no_memory + USE_EVERYTHING.format(persist=True), safe_dir / "noexec/stratum")
    assert f"{safe_dir}/noexec/stratum: cannot load code from it, {safe_dir}/noexec is mounted noexec" in done.stderr
    assert done.returncode == 1


@needs_root
def test_a_directory_that_became_noexec_after_unpacking_is_passed_over(pyz: Path, safe_dir: Path) -> None:
    place = safe_dir / "runtime"
    assert python(sys.executable, pyz, USE_EVERYTHING.format(persist=True), place).returncode == 0
    script = f"mount --bind '{place}' '{place}'; mount -o remount,bind,noexec '{place}'"
    done = in_own_mounts(script, pyz, USE_EVERYTHING.format(persist=False), place)
    assert done.stdout.startswith("/proc/self/fd/"), done.stderr


@needs_root
def test_a_full_file_system_is_passed_over_and_left_empty(pyz: Path, safe_dir: Path) -> None:
    (safe_dir / "small").mkdir(mode=0o755)
    code = USE_EVERYTHING.format(persist=True) + f"import os\nprint(os.listdir({str(safe_dir / 'small')!r}))"
    script = f"mount -t tmpfs -o size=4m,mode=0755 none '{safe_dir}/small'"
    done = in_own_mounts(script, pyz, code, safe_dir / "small/stratum", safe_dir / "good")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith(f"{safe_dir}/good/")
    assert done.stdout.splitlines()[1] == "[]"


@needs_root
def test_a_read_only_file_system_is_passed_over(pyz: Path, safe_dir: Path) -> None:
    (safe_dir / "ro").mkdir(mode=0o755)
    script = f"mount -t tmpfs -o ro,mode=0755 none '{safe_dir}/ro'"
    done = in_own_mounts(script, pyz, USE_EVERYTHING.format(persist=True), safe_dir / "ro/stratum")
    assert done.stdout.startswith("/proc/self/fd/"), done.stderr


@needs_root
def test_memory_serves_also_where_the_kernel_forbids_executable_memfds(pyz: Path, safe_dir: Path) -> None:
    knob = Path("/proc/sys/vm/memfd_noexec")
    if not knob.exists():
        pytest.skip("this kernel is older than 6.3 and has no vm.memfd_noexec")
    command = python_command(sys.executable, pyz, USE_EVERYTHING.format(persist=False))
    script = f'echo 2 > {knob}\nexec "$@"'
    # The setting belongs to the process name space.
    done = run("unshare", "--pid", "--fork", "--mount-proc", "sh", "-ec", script, "sh", *command)
    assert done.stdout.startswith("/proc/self/fd/"), done.stderr
    assert knob.read_text() != "2\n"


@needs_root
def test_a_user_without_a_home_can_run_it(pyz: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(pyz, tmp_path))
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == os.geteuid() and directory not in (Path("/"), Path("/tmp")):
            os.chmod(directory, stat.S_IMODE(directory.stat().st_mode) | 0o011)
    code = "import sys; sys.path.insert(0, sys.argv[1])\nfrom stratum import boot; boot.start()\n"
    code += USE_EVERYTHING.format(persist=True)
    command = ["/usr/bin/python3", "-I", "-S", "-B", "-c", code, str(copy)]
    done = run("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command)
    assert done.stdout.startswith("/proc/self/fd/"), done.stderr


# What is in it


@pytest.fixture(scope="module")
def archive(pyz: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(pyz)


def facts(archive: zipfile.ZipFile, kind: str) -> list[list[str]]:
    lines = archive.read("stratum/pyz.list").decode().splitlines()
    return [line.split(" ")[1:] for line in lines if line.split(" ")[0] == kind]


def test_each_interpreter_and_machine_has_its_own_compiled_modules(archive: zipfile.ZipFile) -> None:
    parts = facts(archive, "part")
    assert sorted({key for key, *_ in parts}) == sorted(SETS)
    for key in SETS:
        tag, machine = key.split("-")
        assert {module for k, module, *_ in parts if k == key} == COMPILED_MODULES
        for member in [fields[2] for fields in parts if fields[0] == key]:
            assert member.split("/")[:2] == ["compiled", machine]
            assert member.split("/")[2] in (tag, "abi3")


def test_compiled_modules_are_for_the_machine_that_their_directory_says(archive: zipfile.ZipFile) -> None:
    machines = {"x86_64": 62, "aarch64": 183}  # e_machine of elf.h
    members = [name for name in archive.namelist() if name.endswith(".so")]
    assert len(members) == 2 * (1 + 2 * 6)
    for name in members:
        data = archive.read(name)
        assert data[:6] == b"\x7fELF\x02\x01"
        assert struct.unpack_from("<HH", data, 16) == (3, machines[name.split("/")[1]])


def test_compiled_modules_are_those_of_the_wheels_with_the_right_abi(archive: zipfile.ZipFile) -> None:
    wheels = lock.Lock.read(build_zipapp.LOCK)
    for key, module, member, size, digest in facts(archive, "part"):
        data = archive.read(member)
        assert (len(data), hashlib.sha256(data).hexdigest()) == (int(size), digest)
        project = {"_cffi_backend": "cffi"}.get(module, module.split(".")[0])
        (wheel,) = [wheel for wheel in wheels.sets[key] if wheel.distribution == project]
        python, abi, platform = wheel.tags
        assert key.split("-")[1] in platform
        assert abi == key.split("-")[0] or (abi == "abi3" and int(python[3:]) <= int(key.split("-")[0][3:]))
        with zipfile.ZipFile(build_zipapp.default_cache() / wheel.file) as opened:
            suffix = ".abi3.so" if abi == "abi3" else f".cpython-{abi[2:]}-{key.split('-')[1]}-linux-gnu.so"
            original = opened.read(module.replace(".", "/") + suffix)
        # All but the section header fields is as it was in the wheel.
        assert data[64:] == original[64 : len(data)]


def test_no_compiled_module_needs_a_newer_glibc_than_we_say(archive: zipfile.ZipFile) -> None:
    for name in archive.namelist():
        if name.endswith(".so"):
            versions = {int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", archive.read(name))}
            assert versions
            assert max(versions) <= 28


def test_the_file_is_small_enough_and_carries_the_stable_abi_once(pyz: Path, archive: zipfile.ZipFile) -> None:
    assert pyz.stat().st_size <= 60_000_000
    rust = [name for name in archive.namelist() if "_rust" in name and name.endswith(".so")]
    assert rust == [f"compiled/{m}/abi3/cryptography.hazmat.bindings._rust.so" for m in ("aarch64", "x86_64")]


def test_nothing_is_in_it_that_is_not_used(archive: zipfile.ZipFile) -> None:
    for name in archive.namelist():
        assert not re.search(r"\.pyi$|\.pyc$|py\.typed$|pycparser|/cffi/|_cffi\.|dist-info|/tests/|\.[ch]$", name), name


def test_licences_of_what_is_carried_are_in_it(archive: zipfile.ZipFile) -> None:
    text = archive.read("vendor/LICENCES").decode()
    for project in ("certifi", "cffi", "charset_normalizer", "cryptography", "idna", "pyyaml", "requests", "tqdm"):
        assert re.search(rf"^== {project}-", text, re.MULTILINE), project


def test_the_zip_is_sound_executable_and_starts_with_the_shebang(pyz: Path, archive: zipfile.ZipFile) -> None:
    assert archive.testzip() is None
    assert pyz.read_bytes().startswith(SHEBANG)
    assert stat.S_IMODE(pyz.stat().st_mode) == 0o755
    assert archive.namelist() == sorted(archive.namelist())
    assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert {info.external_attr for info in archive.infolist()} == {0o100644 << 16}


# Building it


def source_copy(directory: Path) -> Path:
    directory.mkdir()
    for name in ("stratum", "pyzbuild", "man"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("build_zipapp.py", "zipapp.lock"):
        shutil.copy(ROOT / name, directory)
    return directory


def build_slim(source: Path, *arguments: str, **environ: str) -> Path:
    command = [
        sys.executable,
        "build_zipapp.py",
        "--python",
        f"3.{sys.version_info[1]}",
        "--arch",
        "x86_64",
        *arguments,
    ]
    command += ["--cache", str(build_zipapp.default_cache())]
    done = subprocess.run(
        command, cwd=source, env={**os.environ, **environ}, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return source / "dist" / "stratum.pyz"


def test_the_same_sources_give_the_same_bytes_in_another_directory(tmp_path: Path) -> None:
    first = build_slim(source_copy(tmp_path / "one"), TZ="UTC", LC_ALL="C")
    other = source_copy(tmp_path / "a second place")
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
    os.chmod(other / "stratum" / "cli.py", 0o600)
    second = build_slim(other, TZ="Pacific/Auckland", LC_ALL="C.UTF-8", PYTHONHASHSEED="7")
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size <= 10_000_000


def test_source_date_epoch_is_the_time_of_the_members(tmp_path: Path) -> None:
    built = build_slim(source_copy(tmp_path / "one"), SOURCE_DATE_EPOCH="1700000000")
    with zipfile.ZipFile(built) as archive:
        assert {info.date_time for info in archive.infolist()} == {(2023, 11, 14, 22, 13, 20)}


def test_keys_to_trust_are_built_in(tmp_path: Path) -> None:
    source = source_copy(tmp_path / "one")
    (tmp_path / "release.pub").write_bytes(PUBLIC_KEY)
    built = build_slim(source, "--trust", str(tmp_path / "release.pub"))
    done = python(sys.executable, built, "print(boot.builtin_keys())")
    assert done.stdout == f"{[PUBLIC_KEY]!r}\n", done.stderr


def test_a_build_without_keys_trusts_none(pyz: Path) -> None:
    assert python(sys.executable, pyz, "print(boot.builtin_keys())").stdout == "[]\n"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"untrusted comment: minisign encrypted secret key\nRWRTY0IyAAAA\n",
        b"untrusted comment: x\n\xff\xfe\n",
        PUBLIC_KEY.replace(b"RWQ", b"RUQ"),
        PUBLIC_KEY.splitlines()[1],
    ],
)
def test_a_file_that_is_not_a_public_key_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(build_zipapp.BuildError, match="key: not a minisign public key"):
        build_zipapp.add_keys({}, [tmp_path / "key"])


def test_a_slim_pyz_says_what_it_is_for_on_another_interpreter(tmp_path: Path) -> None:
    others = [path for version, path in FIT.items() if not version.startswith("3.11.")]
    if not others:
        pytest.skip("this machine has no second interpreter")
    built = built_pyz(default_cache(), ["--python", "3.11", "--arch", "x86_64"])
    assert run(others[0], str(built), "--version").returncode == 0
    done = python(others[0], built, "boot.require_compiled(persist=False)")
    assert done.returncode == 1
    assert "[no-compiled-parts] this is cpython 3." in done.stderr
    assert "need CPython 3.11" in done.stderr


def test_a_wheel_that_is_not_that_of_the_lock_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = lock.Wheel("idna-3.20-py3-none-any.whl", "0" * 64)
    (tmp_path / wheel.file).write_bytes(b"not it")
    with pytest.raises(lock.LockError, match="SHA-256 is not that of the lock"):
        lock.read_wheel(wheel, tmp_path)

    def a_mirror_that_lies(directory: Path, *_: object) -> None:
        (directory / wheel.file).write_bytes(b"also not it")

    monkeypatch.setattr(lock, "_pip_download", a_mirror_that_lies)
    with pytest.raises(lock.LockError, match="pip did not download idna-3"):
        lock.fetch_wheels(lock.Lock({"cp311-x86_64": (wheel,)}), ["3.11"], ["x86_64"], tmp_path)
    assert os.listdir(tmp_path) == [wheel.file]


def test_a_build_that_grows_too_large_fails_and_keeps_the_old_file(tmp_path: Path) -> None:
    output = tmp_path / "stratum.pyz"
    output.write_bytes(b"old")
    with pytest.raises(TooLargeError, match="more than the limit of 1000"):
        write_archive({"a": os.urandom(2000)}, output, epoch=0, limit=1000)
    assert output.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["stratum.pyz"]


def test_limits_are_those_of_the_design(tmp_path: Path) -> None:
    assert build_zipapp.Options(tmp_path, tmp_path).limit == 60_000_000
    assert build_zipapp.Options(tmp_path, tmp_path, pythons=["3.9"], machines=["x86_64"]).limit == 10_000_000


def test_a_damaged_lock_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "zipapp.lock").write_text('{"wheels": []}')
    with pytest.raises(lock.LockError, match="not a lock of wheels") as caught:
        lock.Lock.read(tmp_path / "zipapp.lock")
    assert "\n" not in str(caught.value)


def test_the_lock_names_wheels_for_glibc_2_28_or_earlier_and_all_are_used() -> None:
    locked = lock.Lock.read(build_zipapp.LOCK)
    assert sorted(locked.sets) == sorted(SETS)
    for wheels in locked.sets.values():
        for wheel in wheels:
            lowest = min(
                (int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", wheel.file)),
                default=0 if wheel.file.endswith("-none-any.whl") else 99,
            )
            assert lowest <= 28, wheel.file


def test_debug_data_is_left_out_and_other_files_are_refused() -> None:
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<HH", header, 16, 3, 183)
    struct.pack_into("<Q", header, 32, 64)  # e_phoff
    struct.pack_into("<Q", header, 40, 500)  # e_shoff
    struct.pack_into("<HHHHH", header, 54, 56, 1, 64, 9, 8)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 300, 300, 4096)
    library = bytes(header) + segment + b"x" * 400
    stripped = elf.without_debug_data(library)
    assert len(stripped) == 300
    assert struct.unpack_from("<Q", stripped, 40) == (0,)
    assert struct.unpack_from("<HHH", stripped, 58) == (0, 0, 0)
    assert stripped[64:] == library[64:300]
    for wrong in (b"", b"\x7fELF\x01\x01" + bytes(60), library[:18] + b"\x03\x00" + library[20:]):
        with pytest.raises(ValueError, match="ELF"):
            elf.without_debug_data(wrong)
