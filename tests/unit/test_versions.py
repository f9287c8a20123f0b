"""Version directories: hard links of unpacked components, made by one rename, put right in place."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from stratum.errors import StratumError
from stratum.node import localdns
from stratum.node.layout import Layout
from stratum.node.versions import (
    VersionRecord,
    assemble,
    differences,
    outdated,
    read_record,
    relink,
    usable_record,
)
from stratum.receipt import Entry, Receipt, content_digest
from stratum.system import HostPath
from tests.bundles import snapshot
from tests.fakes import FaultHost, Killed

COMPONENTS = HostPath("/opt/stratum/components")


def record(version: str = "1.0", **changes: object) -> VersionRecord:
    values: dict[str, object] = {
        "bundle": "demo",
        "version": version,
        "serial": 1,
        "manifest": "sha256:" + "a" * 64,
        "components": (("containerd", "1.7.24", "sha256:" + "b" * 64),),
        "images": ({"digest": "sha256:" + "c" * 64},),
        "signers": ("ABCDEF",),
    }
    return VersionRecord(**{**values, **changes})  # type: ignore[arg-type]


class Lab:
    """A tree with components in it, as unpacking leaves them."""

    def __init__(self, root: Path, dies_at: int | None = None) -> None:
        self.root = root
        (root / "var/lib/stratum").mkdir(parents=True, exist_ok=True)
        self.host = FaultHost(str(root), {}, dies_at)
        self.receipt = Receipt.load(self.host)
        self.layout = Layout(self.host)

    def component(self, name: str, files: dict[str, bytes], links: dict[str, str] | None = None) -> HostPath:
        top = COMPONENTS / name
        for path, content in files.items():
            real = Path(self.host.real(top / path))
            real.parent.mkdir(parents=True, exist_ok=True)
            real.write_bytes(content)
            real.chmod(0o755)
            self.receipt.record(Entry(top / path, "file", (content_digest(content),)))
        for path, target in (links or {}).items():
            real = Path(self.host.real(top / path))
            real.parent.mkdir(parents=True, exist_ok=True)
            real.symlink_to(target)
            self.receipt.record(Entry(top / path, "link", (target,)))
        return top

    def standard(self) -> list[HostPath]:
        return [
            self.component(
                "one", {"bin/containerd": b"daemon", "share/doc/readme": b"text"}, {"bin/ctr": "containerd"}
            ),
            self.component("two", {"cni/bin/bridge": b"plugin"}, {"cni/bin/portmap": "bridge"}),
        ]

    def version(self, name: str = "1.0") -> Path:
        return self.root / "opt/stratum/node" / name

    def names(self, name: str = "1.0") -> list[str]:
        return sorted(str(path.relative_to(self.version(name))) for path in self.version(name).rglob("*"))


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path / "root")


WHOLE = [
    "bin",
    "bin/containerd",
    "bin/ctr",
    "bundle.json",
    "cni",
    "cni/bin",
    "cni/bin/bridge",
    "cni/bin/portmap",
    "libexec",
    "share",
    "share/doc",
    "share/doc/readme",
]


# -- the record -----------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written() -> None:
    assert VersionRecord.from_bytes(record().to_bytes(), HostPath("/x")) == record()


def test_a_component_is_found_by_its_name() -> None:
    assert record().component_version("containerd") == "1.7.24"
    assert record().component_version("kubelet") is None


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"{}", b"\xff", b'{"components": 7}', b'"text"'])
def test_a_damaged_record_is_an_error_that_names_it_and_a_way_out(lab: Lab, data: bytes) -> None:
    lab.version().mkdir(parents=True)
    (lab.version() / "bundle.json").write_bytes(data)
    with pytest.raises(StratumError) as caught:
        read_record(lab.layout, "1.0")
    assert "/opt/stratum/node/1.0/bundle.json" in caught.value.message
    assert caught.value.hint
    assert usable_record(lab.layout, "1.0") is None


def test_a_missing_record_is_none(lab: Lab) -> None:
    assert read_record(lab.layout, "1.0") is None
    lab.version().mkdir(parents=True)
    assert read_record(lab.layout, "1.0") is None


# -- making ---------------------------------------------------------------------------------------------


def test_a_version_is_hard_links_of_its_components_and_costs_no_space(lab: Lab) -> None:
    assemble(lab.layout, lab.receipt, record(), lab.standard())
    assert lab.names() == WHOLE
    for name, component in (("bin/containerd", "one"), ("cni/bin/bridge", "two")):
        source = lab.root / "opt/stratum/components" / component / name
        assert source.stat().st_ino == (lab.version() / name).stat().st_ino
    assert os.readlink(lab.version() / "bin/ctr") == "containerd"
    assert read_record(lab.layout, "1.0") == record()
    assert not (lab.root / "opt/stratum/.staging").exists()


@pytest.mark.parametrize("mask", [0o000, 0o077, 0o777], ids=oct)
def test_every_directory_can_be_entered_under_every_umask(lab: Lab, mask: int) -> None:
    components = lab.standard()
    before = os.umask(mask)
    try:
        assemble(lab.layout, lab.receipt, record(), components)
    finally:
        os.umask(before)
    for path in [lab.version(), *lab.version().rglob("*")]:
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o755, path
    assert stat.S_IMODE((lab.version() / "bundle.json").stat().st_mode) == 0o644


def test_everything_in_it_is_recorded_before_it_is_there(lab: Lab) -> None:
    assemble(lab.layout, lab.receipt, record(), lab.standard())
    known = {str(entry.path) for entry in Receipt.load(lab.host)}
    assert {f"/opt/stratum/node/1.0/{name}" for name in WHOLE} | {"/opt/stratum/node/1.0"} <= known
    assert differences(lab.receipt, HostPath("/opt/stratum/node/1.0")) == []
    renamed = next(i for i, line in enumerate(lab.host.mutations) if line.endswith(" /opt/stratum/node/1.0"))
    assert any("receipt.json" in line for line in lab.host.mutations[:renamed])


def test_it_appears_by_one_rename(lab: Lab) -> None:
    assemble(lab.layout, lab.receipt, record(), lab.standard())
    inside = [line for line in lab.host.mutations if "/opt/stratum/node/1.0/" in line]
    assert inside == []


def test_a_version_that_is_made_again_is_replaced_whole(lab: Lab) -> None:
    components = lab.standard()
    assemble(lab.layout, lab.receipt, record(), components)
    (lab.version() / "bin/ctr").unlink()
    assemble(lab.layout, lab.receipt, record(serial=2), components[:1])
    assert lab.names() == [name for name in WHOLE if name not in ("cni/bin/bridge", "cni/bin/portmap")]
    found = read_record(lab.layout, "1.0")
    assert found and found.serial == 2


def test_two_components_that_place_the_same_file_are_an_error_and_leave_nothing(lab: Lab) -> None:
    one = lab.component("one", {"bin/x": b"1"})
    two = lab.component("two", {"bin/x": b"2"})
    with pytest.raises(FileExistsError):
        assemble(lab.layout, lab.receipt, record(), [one, two])
    assert not lab.version().exists()
    assert not (lab.root / "opt/stratum/.staging").exists()


def test_a_killed_run_leaves_no_part_of_a_version_under_its_name(tmp_path: Path) -> None:
    for number in range(200):
        root = tmp_path / str(number)
        lab = Lab(root)
        components = lab.standard()
        dying = Lab(root, number)
        try:
            assemble(dying.layout, dying.receipt, record(), components)
        except Killed:
            assert not lab.version().exists() or lab.names() == WHOLE
            continue
        assert number > 10
        return
    pytest.fail("it never came to an end")


# -- putting right --------------------------------------------------------------------------------------


@pytest.fixture
def made(lab: Lab) -> tuple[Lab, list[HostPath]]:
    components = lab.standard()
    assemble(lab.layout, lab.receipt, record(), components)
    lab.host.mutations.clear()
    return lab, components


def test_what_is_missing_or_changed_is_put_back(made: tuple[Lab, list[HostPath]]) -> None:
    lab, components = made
    before = {name: os.lstat(lab.version() / name).st_ino for name in WHOLE}
    (lab.version() / "bin/containerd").unlink()
    (lab.version() / "bin/containerd").write_text("theirs")
    (lab.version() / "cni/bin/portmap").unlink()
    (lab.version() / "libexec").rmdir()
    (lab.version() / "bundle.json").write_text("{")
    directory = HostPath("/opt/stratum/node/1.0")
    assert {str(path.relative_to(directory)) for path in differences(lab.receipt, directory)} == {
        "bin/containerd",
        "cni/bin/portmap",
        "libexec",
        "bundle.json",
    }
    relink(lab.layout, lab.receipt, record(), components)
    assert lab.names() == WHOLE
    assert differences(lab.receipt, directory) == []
    assert read_record(lab.layout, "1.0") == record()
    assert os.lstat(lab.version() / "bin/containerd").st_ino == before["bin/containerd"]
    assert os.lstat(lab.version() / "cni/bin/bridge").st_ino == before["cni/bin/bridge"], "untouched"


def test_what_is_right_is_not_touched(made: tuple[Lab, list[HostPath]]) -> None:
    lab, components = made
    relink(lab.layout, lab.receipt, record(), components)
    assert [line for line in lab.host.mutations if "/node/1.0/" in line and "bundle.json" not in line] == []


def test_files_that_others_added_stay(made: tuple[Lab, list[HostPath]]) -> None:
    lab, components = made
    (lab.version() / "bin/extra").write_text("theirs")
    (lab.version() / "bin/ctr").unlink()
    relink(lab.layout, lab.receipt, record(), components)
    assert (lab.version() / "bin/extra").read_text() == "theirs"
    assert os.readlink(lab.version() / "bin/ctr") == "containerd"


def test_a_program_in_use_is_replaced_by_a_rename_and_never_missing(made: tuple[Lab, list[HostPath]]) -> None:
    lab, components = made
    (lab.version() / "bin/containerd").unlink()
    (lab.version() / "bin/containerd").write_bytes(b"old")
    for number in range(50):
        dying = Lab(lab.root, number)
        try:
            relink(dying.layout, dying.receipt, record(), components)
        except Killed:
            assert (lab.version() / "bin/containerd").read_bytes() in (b"old", b"daemon")
            continue
        assert (lab.version() / "bin/containerd").read_bytes() == b"daemon"
        return
    pytest.fail("it never came to an end")


@pytest.mark.parametrize("name", ["cni", "cni/bin", "bin", "share/doc"])
def test_a_directory_that_is_a_link_now_is_not_written_through(
    made: tuple[Lab, list[HostPath]], tmp_path: Path, name: str
) -> None:
    lab, components = made
    (lab.root / "srv").mkdir()
    os.rename(lab.version() / name, lab.root / "srv/moved")
    (lab.version() / name).symlink_to("/srv/moved")
    for path in (lab.root / "srv/moved").rglob("*"):
        if path.is_file():
            path.unlink()
    before = snapshot(lab.root / "srv")
    with pytest.raises(StratumError) as caught:
        relink(lab.layout, lab.receipt, record(), components)
    assert caught.value.reference == "link-in-the-way"
    assert snapshot(lab.root / "srv") == before


@pytest.mark.parametrize("damage", ["edited in place", "gone"])
def test_a_damaged_component_is_not_called_repaired(made: tuple[Lab, list[HostPath]], damage: str) -> None:
    """The version's file is the same file: writing to one of them changes both."""
    lab, components = made
    path = lab.root / "opt/stratum/components/one/bin/containerd"
    if damage == "gone":
        path.unlink()
    else:
        with open(lab.version() / "bin/containerd", "ab") as file:
            file.write(b"x")
    with pytest.raises(StratumError) as caught:
        relink(lab.layout, lab.receipt, record(), components)
    assert caught.value.reference == "component-damaged"
    assert "--bundle" in str(caught.value.hint)


def test_differences_are_those_below_the_directory_alone(lab: Lab) -> None:
    for name in ("/opt/a/f", "/opt/ab/f", "/opt/a"):
        lab.receipt.record(Entry(HostPath(name), "file", ("sha256:x",)))
    assert differences(lab.receipt, HostPath("/opt/a")) == [HostPath("/opt/a/f"), HostPath("/opt/a")]


# -- the script that supervises CoreDNS -----------------------------------------------------------------


def with_coredns() -> VersionRecord:
    return record(
        components=(("containerd", "1.7.24", "sha256:" + "b" * 64), ("coredns", "1.12.1", "sha256:" + "d" * 64))
    )


SCRIPT = "/opt/stratum/node/1.0/libexec/stratum-localdns"


def test_a_version_with_coredns_has_the_script_that_supervises_it(lab: Lab) -> None:
    components = [*lab.standard(), lab.component("d", {"bin/coredns": b"program"})]
    assemble(lab.layout, lab.receipt, with_coredns(), components)
    assert lab.host.read_bytes(SCRIPT) == localdns.render_supervisor()
    assert stat.S_IMODE(lab.host.stat(SCRIPT).st_mode) == 0o755
    assert lab.receipt.owns(HostPath(SCRIPT))
    assert lab.host.stat(SCRIPT).st_nlink == 1, "no component's file is touched"
    assert differences(lab.receipt, lab.layout.version_dir("1.0")) == []
    assert outdated(lab.layout, with_coredns(), components) == []


def test_a_version_without_coredns_has_no_such_script(lab: Lab) -> None:
    components = lab.standard()
    assemble(lab.layout, lab.receipt, record(), components)
    assert not lab.host.lexists(SCRIPT)
    assert outdated(lab.layout, record(), components) == []


@pytest.mark.parametrize("text", [b"#!/bin/sh\n", None])
def test_a_script_that_somebody_changed_or_an_older_release_wrote_is_put_right(lab: Lab, text: bytes | None) -> None:
    components = [*lab.standard(), lab.component("d", {"bin/coredns": b"program"})]
    assemble(lab.layout, lab.receipt, with_coredns(), components)
    real = Path(lab.host.real(SCRIPT))
    real.unlink()
    if text is not None:
        real.write_bytes(text)
    assert outdated(lab.layout, with_coredns(), components) == [HostPath(SCRIPT)]
    relink(lab.layout, lab.receipt, with_coredns(), components)
    assert lab.host.read_bytes(SCRIPT) == localdns.render_supervisor()
    assert stat.S_IMODE(lab.host.stat(SCRIPT).st_mode) == 0o755
    assert differences(lab.receipt, lab.layout.version_dir("1.0")) == []


def test_a_bundle_that_places_a_script_of_its_own_keeps_it(lab: Lab) -> None:
    files = {"bin/coredns": b"program", "libexec/stratum-localdns": b"#!/bin/sh\n"}
    components = [*lab.standard(), lab.component("d", files)]
    for make in (assemble, relink):
        make(lab.layout, lab.receipt, with_coredns(), components)
        assert lab.host.read_bytes(SCRIPT) == b"#!/bin/sh\n"
    assert outdated(lab.layout, with_coredns(), components) == []
