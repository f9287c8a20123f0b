"""A directory of compiled parts: who may have written it, and what happens when it cannot be made."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stratum import runtimedir
from stratum.runtimedir import Part, Place, UnusableError, find_unpacked, open_trusted, prune_beside, unpack

OWNERS = frozenset({0, os.geteuid()})
CONTENT = {"compiled/a.so": b"first module" * 400, "compiled/b.so": b"second module" * 9000}
PARTS = [
    Part(module, member, len(CONTENT[member]), hashlib.sha256(CONTENT[member]).hexdigest())
    for module, member in (("a", "compiled/a.so"), ("pkg.b", "compiled/b.so"))
]
NAME = "cp311-x86_64-0123"


def unpack_into(place: Place, read: Callable[[str], bytes] = CONTENT.__getitem__) -> tuple[Path, list[str]]:
    created: list[str] = []
    return Path(unpack(place, NAME, PARTS, OWNERS, read=read, created=created)), created


@pytest.fixture
def place(safe_dir: Path) -> Place:
    return Place(str(safe_dir / "stratum" / "runtime"), 0o755)


@pytest.fixture
def restore_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_unpacking_makes_the_missing_directories_and_says_which(place: Place, safe_dir: Path) -> None:
    path, created = unpack_into(place)
    assert created == [str(safe_dir / "stratum"), str(safe_dir / "stratum/runtime"), str(path)]
    assert (path / "pkg.b.so").read_bytes() == CONTENT["compiled/b.so"]
    assert sorted(os.listdir(path.parent)) == [NAME]


def test_a_second_run_finds_what_the_first_unpacked(place: Place) -> None:
    path, _ = unpack_into(place)
    assert find_unpacked(place, NAME, PARTS, OWNERS) == str(path)
    again, created = unpack_into(place)
    assert again == path
    assert created == []


def test_looking_for_a_directory_that_is_not_there_makes_nothing(place: Place, safe_dir: Path) -> None:
    assert find_unpacked(place, NAME, PARTS, OWNERS) is None
    assert os.listdir(safe_dir) == []


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o077])
@pytest.mark.usefixtures("restore_umask")
def test_modes_do_not_depend_on_the_umask(safe_dir: Path, umask: int) -> None:
    os.umask(umask)
    path, created = unpack_into(Place(str(safe_dir / "runtime"), 0o755))
    for directory in created:
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o755
    for file in path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
    private, created = unpack_into(Place(str(safe_dir / "private"), 0o700))
    for directory in created:
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    for file in private.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_directory_above_that_the_group_can_write_to_is_refused(place: Place, safe_dir: Path) -> None:
    unpack_into(place)
    os.chmod(safe_dir / "stratum", 0o775)
    with pytest.raises(UnusableError, match=r"/stratum is writable by others than its owner \(mode 0775\)"):
        find_unpacked(place, NAME, PARTS, OWNERS)
    with pytest.raises(UnusableError, match="writable by others"):
        unpack_into(place)


def test_a_world_writable_directory_is_refused_also_with_the_sticky_bit(safe_dir: Path) -> None:
    shared = safe_dir / "shared"
    shared.mkdir()
    os.chmod(shared, 0o1777)
    with pytest.raises(UnusableError, match="writable by others"):
        unpack_into(Place(str(shared / "stratum"), 0o755))
    assert os.listdir(shared) == []


def test_tmp_is_refused() -> None:
    with pytest.raises(UnusableError, match="/tmp is writable by others"):
        open_trusted(Place("/tmp", 0o755), OWNERS, create=False, created=[])


def test_a_directory_of_another_owner_is_refused(place: Place) -> None:
    unpack_into(place)
    strangers = frozenset({os.geteuid() + 4000})
    with pytest.raises(UnusableError, match=r"^/ belongs to user 0$"):
        find_unpacked(place, NAME, PARTS, strangers)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("victim", ["stratum", f"stratum/runtime/{NAME}", f"stratum/runtime/{NAME}/a.so"])
def test_what_belongs_to_another_user_is_refused_at_each_level(place: Place, safe_dir: Path, victim: str) -> None:
    unpack_into(place)
    os.chown(safe_dir / victim, 4000, 4000)
    with pytest.raises(UnusableError, match=f"{victim} (belongs to user 4000|is not a file that only its owner)"):
        find_unpacked(place, NAME, PARTS, frozenset({0}))


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "pkg.b.so").read_bytes())
    data[5000] ^= 1
    (path / "pkg.b.so").write_bytes(data)


def cut_short(path: Path) -> None:
    with open(path / "a.so", "r+b") as stream:
        stream.truncate(100)


def change_the_list(path: Path) -> None:
    (path / "list").write_text("")


def remove_a_file(path: Path) -> None:
    (path / "a.so").unlink()


def add_a_file(path: Path) -> None:
    (path / "zstandard.so").write_bytes(b"planted")


def link_a_file(path: Path) -> None:
    (path / "a.so").rename(path.parent / "elsewhere")
    (path / "a.so").symlink_to(path.parent / "elsewhere")


def make_a_file_writable(path: Path) -> None:
    os.chmod(path / "a.so", 0o666)


def make_a_file_a_fifo(path: Path) -> None:
    (path / "a.so").unlink()
    os.mkfifo(path / "a.so")


def open_the_directory(path: Path) -> None:
    os.chmod(path, 0o777)


def link_the_directory(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def put_a_file_in_its_place(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "tamper",
    [
        flip_a_bit,
        cut_short,
        change_the_list,
        remove_a_file,
        add_a_file,
        link_a_file,
        make_a_file_writable,
        make_a_file_a_fifo,
        open_the_directory,
        link_the_directory,
        put_a_file_in_its_place,
    ],
)
def test_a_changed_directory_is_not_used_and_is_replaced_by_the_next_unpacking(
    place: Place, tamper: Callable[[Path], None]
) -> None:
    path, _ = unpack_into(place)
    tamper(path)
    with pytest.raises(UnusableError):
        find_unpacked(place, NAME, PARTS, OWNERS)
    again, _ = unpack_into(place)
    assert again == path
    assert find_unpacked(place, NAME, PARTS, OWNERS) == str(path)
    assert [name for name in os.listdir(path.parent) if name.startswith(".")] == []


def test_replacing_a_link_leaves_alone_what_it_points_to(place: Place, safe_dir: Path) -> None:
    path, _ = unpack_into(place)
    target = safe_dir / "precious"
    path.rename(target)
    path.symlink_to(target)
    unpack_into(place)
    assert sorted(os.listdir(target)) == ["a.so", "list", "pkg.b.so"]


def test_an_admins_link_to_another_safe_directory_is_followed(safe_dir: Path) -> None:
    (safe_dir / "disk").mkdir(mode=0o755)
    (safe_dir / "stratum").symlink_to(safe_dir / "disk")
    path, _ = unpack_into(Place(str(safe_dir / "stratum/runtime"), 0o755))
    assert path == safe_dir / "disk/runtime" / NAME


def test_a_link_into_a_world_writable_directory_is_refused(safe_dir: Path) -> None:
    (safe_dir / "shared").mkdir()
    os.chmod(safe_dir / "shared", 0o1777)
    (safe_dir / "stratum").symlink_to(safe_dir / "shared")
    with pytest.raises(UnusableError, match="writable by others"):
        unpack_into(Place(str(safe_dir / "stratum/runtime"), 0o755))


def test_a_file_where_a_directory_should_be_is_an_error_that_names_it(safe_dir: Path) -> None:
    (safe_dir / "stratum").write_bytes(b"")
    with pytest.raises(UnusableError, match="/stratum is not a directory"):
        unpack_into(Place(str(safe_dir / "stratum/runtime"), 0o755))


def test_the_base_of_a_place_is_never_made(safe_dir: Path) -> None:
    home = safe_dir / "home"
    with pytest.raises(FileNotFoundError):
        unpack_into(Place(str(home / ".cache/stratum"), 0o700, base=str(home)))
    assert os.listdir(safe_dir) == []


def test_a_full_disk_leaves_no_partial_directory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(directory: int, name: str, data: bytes, mode: int, *, probe: object) -> None:
        real(directory, name, data[:100], mode, probe=None)
        if name == "pkg.b.so":
            raise OSError(errno.ENOSPC, "No space left on device")

    real = runtimedir._write_file
    monkeypatch.setattr(runtimedir, "_write_file", write_half)
    with pytest.raises(OSError, match="No space left"):
        unpack_into(place)
    assert os.listdir(place.path) == []


def test_an_interrupt_leaves_no_partial_directory(place: Place) -> None:
    def interrupted(member: str) -> bytes:
        if member == "compiled/b.so":
            raise KeyboardInterrupt
        return CONTENT[member]

    with pytest.raises(KeyboardInterrupt):
        unpack_into(place, interrupted)
    assert os.listdir(place.path) == []


def test_a_damaged_member_of_the_pyz_is_not_unpacked(place: Place) -> None:
    with pytest.raises(UnusableError, match=r"compiled/a\.so in the pyz is damaged"):
        unpack_into(place, lambda member: CONTENT[member][:-1] + b"!")
    assert os.listdir(place.path) == []


def test_what_another_process_put_there_first_is_used(place: Place) -> None:
    inner: list[tuple[Path, list[str]]] = []

    def read_while_another_finishes(member: str) -> bytes:
        if not inner:
            inner.append((Path(), []))
            inner[0] = unpack_into(place)
        return CONTENT[member]

    path, created = unpack_into(place, read_while_another_finishes)
    assert path == inner[0][0]
    assert str(path) in inner[0][1]
    assert str(path) not in created
    assert os.listdir(place.path) == [NAME]


def test_a_half_filled_sibling_of_a_crash_is_removed_and_one_in_use_is_not(place: Place) -> None:
    os.makedirs(place.path)
    old = time.time() - 3600
    for name in (f".{NAME}.crashed", f".{NAME}.young"):
        Path(place.path, name).mkdir(mode=0o700)
        Path(place.path, name, "a.so").write_bytes(b"half")
    os.utime(Path(place.path, f".{NAME}.crashed"), (old, old))

    def age_our_own_and_let_another_clean_up(member: str) -> bytes:
        ours = [name for name in os.listdir(place.path) if name.count(".") == 2 and "young" not in name]
        for name in ours:
            os.utime(Path(place.path, name), (old, old))
        parent = os.open(place.path, os.O_RDONLY)
        runtimedir._remove_stale(parent, OWNERS)
        os.close(parent)
        return CONTENT[member]

    unpack_into(place, age_our_own_and_let_another_clean_up)
    assert sorted(os.listdir(place.path)) == [f".{NAME}.young", NAME]


def test_pruning_removes_other_builds_and_nothing_else(place: Place) -> None:
    path, _ = unpack_into(place)
    (path.parent / "cp39-x86_64-old").mkdir()
    (path.parent / "cp39-x86_64-old" / "a.so").write_bytes(b"old")
    (path.parent / "notes").write_text("an admin's")
    assert prune_beside(str(path), OWNERS) == [str(path.parent / "cp39-x86_64-old")]
    assert sorted(os.listdir(path.parent)) == [NAME, "notes"]


def test_removing_a_tree_follows_no_link(safe_dir: Path) -> None:
    (safe_dir / "keep").mkdir()
    (safe_dir / "keep" / "file").write_bytes(b"")
    (safe_dir / "tree" / "deep").mkdir(parents=True)
    (safe_dir / "tree" / "deep" / "link").symlink_to(safe_dir / "keep")
    parent = os.open(safe_dir, os.O_RDONLY)
    runtimedir.remove_tree(parent, "tree")
    runtimedir.remove_tree(parent, "not there")
    os.close(parent)
    assert os.listdir(safe_dir) == ["keep"]
    assert os.listdir(safe_dir / "keep") == ["file"]


def test_the_mount_of_a_path_has_its_options() -> None:
    assert runtimedir.mount_of("/proc/self")[0] == "/proc"
    assert "rw" in runtimedir.mount_of("/proc/self")[1] or "ro" in runtimedir.mount_of("/proc/self")[1]


def test_descriptors_are_closed_on_success_and_on_error(place: Place) -> None:
    before = os.listdir("/proc/self/fd")
    unpack_into(place)
    find_unpacked(place, NAME, PARTS, OWNERS)
    with pytest.raises(UnusableError):
        open_trusted(Place("/tmp/x", 0o755), OWNERS, create=True, created=[])
    with pytest.raises(FileNotFoundError):
        open_trusted(Place(place.path + "/not/there", 0o755), OWNERS, create=False, created=[])
    assert os.listdir("/proc/self/fd") == before
