"""Building: the same bytes from the same inputs, a lock that is met, sources of every form, and nothing half."""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratum.bundle import write
from stratum.bundle.layer import tar_header
from stratum.bundle.sources import tar_entries
from stratum.bundle.tarstream import TarReader
from stratum.errors import BundleError, ExitCode
from stratum.system import Host, HostPath
from tests.unit.building import (
    HEAD,
    PROXY_VARIABLES,
    Desk,
    Server,
    blob,
    description_of,
    files_of,
    index_of,
    layer_of,
    placed,
    send,
    serving,
    sha256,
    special,
    tar_of,
)

PROGRAM = b"\x7fELF" + bytes(range(256)) * 40
COMPONENT = "  - name: c\n    version: 1\n    source: {%s}\n    files: [%s]\n"


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def one(source: str, *files: str) -> str:
    return COMPONENT % (source, ", ".join(files))


# -- reproducibility --------------------------------------------------------------------------------------


def fill(desk: Desk, names: list[str], mtime: int) -> None:
    for name in names:
        path = desk.write(f"tree/{name}", PROGRAM + name.encode(), 0o755 if "tool" in name else 0o644)
        os.utime(path, (mtime, mtime))
    desk.write("a.tar", tar_of(*((name, PROGRAM) for name in names)))
    parts = [f"      - {{directory: tree, files: [{{from: {name}, to: bin/}}]}}\n" for name in sorted(names)]
    desk.define(
        "  - name: tree\n    version: 1\n    sources:\n" + "".join(parts) + one("file: a.tar", '{from: "*", to: a/}')
    )


def test_another_place_time_umask_zone_locale_order_and_number_of_jobs_give_the_same_bytes(tmp_path: Path) -> None:
    names = [f"{kind}{number}" for kind in ("tool", "data") for number in range(6)]
    # Only the order of the archive's members differs: another archive has another digest, and so has its lock.
    results = []
    for number, (umask, zone, locale, jobs) in enumerate([(0o022, "UTC", "C", 1), (0o077, "Asia/Tokyo", "C.UTF-8", 4)]):
        desk = Desk(tmp_path / f"desk {number}")
        random.Random(number).shuffle(names)
        fill(desk, names, 1_000_000_000 + number)
        before = os.umask(umask)
        try:
            environ = {"TZ": zone, "LC_ALL": locale, "PYTHONHASHSEED": str(number)}
            process = desk.spawn(
                "build", "x.yaml", "-o", "out.tar", "--jobs", jobs, "--cache", desk.cache, environ=environ
            )
        finally:
            os.umask(before)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        results.append((desk.path / "out.tar").read_bytes())
    assert results[0] == results[1]


def test_directory_tar_and_pipe_hold_the_same(desk: Desk) -> None:
    fill(desk, ["tool", "data"], 1)
    archive = desk.built()
    assert desk.build("-o", "dir/").status == 0
    process = desk.spawn("build", "x.yaml", "-o", "-", "--cache", desk.cache)
    piped, err = process.communicate(timeout=120)
    assert process.returncode == 0 and piped == archive
    assert b"index: sha256:" in err
    files = {
        str(path.relative_to(desk.path / "dir")): path.read_bytes()
        for path in (desk.path / "dir").rglob("*")
        if path.is_file()
    }
    assert files == files_of(archive)


def test_what_proves_the_rest_comes_first_in_the_tar_and_manifests_before_layers(desk: Desk) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: bin/f}"), head=HEAD.replace("[linux/amd64]", "[linux/amd64, linux/arm64]"))
    desk.run("keygen", "-o", "k", "--no-password")
    archive = desk.built("--key", "k.key")
    names = list(files_of(archive))
    assert names[:3] == ["oci-layout", "index.json", "index.json.minisig"]
    manifests = [item["digest"] for item in index_of(archive)["manifests"]]
    # Both platforms have one and the same layer: a reader of a pipe must know both manifests before it comes.
    assert len(names) == 3 + 2 + 2 + 1
    assert all(f"blobs/sha256/{digest[7:]}" in names[3:-1] for digest in manifests)


def test_the_index_names_platforms_and_types(desk: Desk) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: bin/f}"))
    archive = desk.built()
    (entry,) = index_of(archive)["manifests"]
    assert entry["artifactType"] == "application/vnd.stratum.bundle.v1"
    assert entry["platform"] == {"os": "linux", "architecture": "amd64"}
    assert entry["annotations"] == {"org.opencontainers.image.ref.name": "demo-1.0-1-linux-amd64"}
    description = description_of(archive)
    assert (description["name"], description["version"], description["serial"]) == ("demo", "1.0-1", 7)
    assert json.loads(files_of(archive)["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}


def test_the_layer_is_what_the_description_says(desk: Desk) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: cni/bin/f}"))
    archive = desk.built()
    (component,) = description_of(archive)["components"]
    layer = layer_of(archive, "c")
    assert component["diffID"] == f"sha256:{sha256(layer)}" and component["size"] == len(layer)
    assert component["files"] == [
        {"path": "cni", "type": "directory", "mode": "0755"},
        {"path": "cni/bin", "type": "directory", "mode": "0755"},
        {
            "path": "cni/bin/f",
            "type": "file",
            "mode": "0644",
            "size": len(PROGRAM),
            "digest": f"sha256:{sha256(PROGRAM)}",
        },
    ]


def test_members_have_one_owner_one_time_and_no_special_bits(desk: Desk) -> None:
    desk.write("tree/su", PROGRAM, 0o6755)
    desk.write("tree/conf", b"x", 0o600)
    desk.write("tree/key", b"x", 0o777)
    (desk.path / "tree/link").symlink_to("su")
    desk.define(
        one(
            "directory: tree",
            "{from: '[sc]*', to: bin/}",
            "{from: link, to: bin/}",
            "{from: key, to: etc/, mode: 0400}",
        )
    )
    desk.environ["SOURCE_DATE_EPOCH"] = "1700000000"
    with tarfile.open(fileobj=io.BytesIO(layer_of(desk.built(), "c"))) as tar:
        members = tar.getmembers()
    assert [(item.name, item.mode) for item in members] == [
        ("bin", 0o755),
        ("bin/conf", 0o644),
        ("bin/link", 0o777),
        ("bin/su", 0o755),
        ("etc", 0o755),
        ("etc/key", 0o400),
    ]
    assert {(item.uid, item.gid, item.uname, item.gname, item.mtime) for item in members} == {
        (0, 0, "", "", 1700000000)
    }


def test_the_time_is_the_locks_once_there_is_one(desk: Desk) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: f}"))
    first = desk.built()
    desk.environ["SOURCE_DATE_EPOCH"] = "1700000000"
    assert desk.built() == first
    assert desk.built("--update-lock") != first


@pytest.mark.parametrize("epoch", ["soon", "-1", "99999999999", "1.5"])
def test_a_time_that_no_tar_can_hold_is_refused(desk: Desk, epoch: str) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: f}"))
    desk.environ["SOURCE_DATE_EPOCH"] = epoch
    assert desk.build("-o", "out.tar").status == ExitCode.USAGE


def test_the_frame_is_one_that_every_decoder_takes(desk: Desk) -> None:
    import zstandard

    desk.write("f", os.urandom(3 << 20))
    desk.define(one("file: f", "{to: f}"))
    archive = desk.built("--level", "19")
    manifest = json.loads(blob(archive, index_of(archive)["manifests"][0]))
    frame = zstandard.get_frame_parameters(blob(archive, manifest["layers"][0]))
    assert frame.window_size <= 128 << 20 and frame.has_checksum
    assert frame.content_size == description_of(archive)["components"][0]["size"]


# -- tar headers ------------------------------------------------------------------------------------------


@given(
    st.lists(st.text("abé.-", min_size=1, max_size=60).filter(lambda part: part.strip(".")), min_size=1, max_size=8),
    st.integers(0, 1 << 40),
    st.sampled_from(["file", "directory", "symlink"]),
)
def test_each_name_and_size_reads_back_in_our_reader_and_in_pythons(parts: list[str], size: int, kind: str) -> None:
    path = "/".join(parts)
    size = size if kind == "file" else 0
    target = "t" * (size % 300) + "é" if kind == "symlink" else ""
    data = tar_header(path, kind, mode=0o640, size=size, mtime=5, target=target)
    with tarfile.open(fileobj=io.BytesIO(data + bytes(1024))) as tar:
        info = tar.firstmember
    assert (info.name, info.size, info.linkname, info.mtime) == (path, size, target, 5)
    reader = TarReader(io.BytesIO(data), "test")
    member = reader.next()
    assert member is not None
    assert (member.name.rstrip("/"), member.size, member.link, member.kind) == (path, size, target, kind)


# -- the lock ---------------------------------------------------------------------------------------------


def lock_of(desk: Desk) -> Any:
    return json.loads((desk.path / "x.yaml.lock").read_text())


def test_the_first_build_writes_a_lock_and_the_next_one_meets_it(desk: Desk) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: f}"))
    ended = desk.build("-o", "a.tar")
    assert "x.yaml.lock (written)" in ended.out
    lock = lock_of(desk)
    assert lock["sources"] == {"f": {"sha256": sha256(PROGRAM), "size": len(PROGRAM)}}
    assert set(lock["components"]["linux/amd64"]["c"]) == {"diffID", "layer", "size", "version"}
    text = (desk.path / "x.yaml.lock").read_text()
    assert text == json.dumps(lock, indent=2, sort_keys=True) + "\n"
    assert "x.yaml.lock (met)" in desk.build("-o", "b.tar").out
    assert (desk.path / "x.yaml.lock").read_text() == text


def test_a_changed_file_is_one_error_that_names_source_expected_and_found(desk: Desk) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: f}"))
    before = desk.built()
    desk.write("f", PROGRAM + b"!")
    ended = desk.build("-o", "out.tar", "--force")
    assert ended.status == ExitCode.FAILED
    assert "error[lock-mismatch]: source f: the lock says sha256:" in ended.err
    assert sha256(PROGRAM) in ended.err and sha256(PROGRAM + b"!") in ended.err and "--update-lock" in ended.err
    assert (desk.path / "out.tar").read_bytes() == before
    assert desk.build("-o", "out.tar", "--force", "--update-lock").status == 0
    assert lock_of(desk)["sources"]["f"]["sha256"] == sha256(PROGRAM + b"!")


def test_a_change_in_a_directory_names_the_directory(desk: Desk) -> None:
    desk.write("tree/f", PROGRAM)
    desk.write("tree/unused", b"")
    desk.define(one("directory: tree", "{from: f, to: bin/}"))
    desk.built()
    desk.write("tree/unused", b"changed")
    desk.built()
    desk.write("tree/f", b"changed")
    ended = desk.build("-o", "out.tar", "--force")
    assert "error[lock-mismatch]: source tree" in ended.err


def test_a_source_that_is_not_in_the_lock_asks_for_update_lock(desk: Desk) -> None:
    desk.write("f", PROGRAM)
    desk.write("g", PROGRAM)
    desk.define(one("file: f", "{to: f}"))
    desk.built()
    desk.define(one("file: g", "{to: f}"))
    ended = desk.build("-o", "out.tar", "--force")
    assert "error[lock-incomplete]: g: is not in the lock" in ended.err and "--update-lock" in ended.err


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("{to: g}", "component c: diffID"),
        ("{to: f, mode: 0755}", "component c: diffID"),
    ],
)
def test_a_changed_rule_does_not_meet_the_lock(desk: Desk, change: str, what: str) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: f}"))
    desk.built()
    desk.define(one("file: f", change))
    ended = desk.build("-o", "out.tar", "--force")
    assert "error[lock-mismatch]" in ended.err and what in ended.err


def test_another_serial_needs_no_new_lock(desk: Desk) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: f}"))
    desk.built()
    desk.define(one("file: f", "{to: f}"), head=HEAD.replace("serial: 7", "serial: 8"))
    assert description_of(desk.built())["serial"] == 8


def test_the_level_is_the_locks_and_another_one_is_told_apart_from_other_content(desk: Desk) -> None:
    desk.write("f", PROGRAM * 50)
    desk.define(one("file: f", "{to: f}"))
    first = desk.built("--level", "3")
    assert desk.built() == first
    ended = desk.build("-o", "out.tar", "--force", "--level", "19")
    assert "component c: layer" in ended.err and "only its compressed form differs" in ended.err


def test_a_lock_by_another_zstd_says_so(desk: Desk) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: f}"))
    desk.built()
    lock = lock_of(desk)
    lock["compression"]["library"] = "0.9.9"
    lock["components"]["linux/amd64"]["c"]["layer"] = "sha256:" + "0" * 64
    desk.write("x.yaml.lock", json.dumps(lock))
    ended = desk.build("-o", "out.tar", "--force")
    assert "lock was made with zstd 0.9.9 level 12" in ended.err


def test_a_platform_at_a_time_completes_one_lock(desk: Desk) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: f}"), head=HEAD.replace("[linux/amd64]", "[linux/amd64, linux/arm64]"))
    desk.built("--platform", "linux/amd64")
    assert list(lock_of(desk)["components"]) == ["linux/amd64"]
    ended = desk.build("-o", "out.tar", "--force")
    assert "error[lock-incomplete]: linux/arm64 component c" in ended.err
    desk.built("--platform", "linux/arm64", "--update-lock")
    assert list(lock_of(desk)["components"]) == ["linux/amd64", "linux/arm64"]
    desk.built()


def test_an_update_forgets_sources_that_are_gone(desk: Desk) -> None:
    desk.write("f", PROGRAM)
    desk.write("g", PROGRAM)
    desk.define(one("file: f", "{to: f}"))
    desk.built()
    desk.define(one("file: g", "{to: f}"))
    desk.built("--update-lock")
    assert list(lock_of(desk)["sources"]) == ["g"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"lockVersion": 2}', '{"lockVersion": 1, "sources": []}', "null"],
)
def test_a_damaged_lock_is_an_error_and_not_a_first_build(desk: Desk, text: str) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: f}"))
    desk.write("x.yaml.lock", text)
    ended = desk.build("-o", "out.tar")
    assert ended.status == ExitCode.FAILED and "error[lock-malformed]" in ended.err
    assert (desk.path / "x.yaml.lock").read_text() == text


def test_a_checksum_in_the_definition_must_be_the_locks(desk: Desk) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: f}"))
    desk.built()
    desk.define(one(f"file: f, sha256: {'a' * 64}", "{to: f}"))
    ended = desk.build("-o", "out.tar", "--force")
    assert "error[lock-mismatch]: source f" in ended.err and "x.yaml:8" in ended.err


# -- downloads and checksum files -------------------------------------------------------------------------


def test_a_download_is_proved_by_a_checksum_file_and_then_by_the_lock(desk: Desk, server: Server) -> None:
    url = server.put("/runc.amd64", send(PROGRAM))
    sums = server.put("/sums", send(f"{'0' * 64}  other\r\n{sha256(PROGRAM)} *runc.amd64\r\n".encode()))
    desk.define(one(f"url: {url}, checksums: {{url: {sums}}}", "{to: bin/runc}"))
    archive = desk.built()
    assert placed(archive) == {"bin/runc": PROGRAM}
    assert description_of(archive)["components"][0]["files"][1]["mode"] == "0755"
    server.asked.clear()
    desk.built("--offline")
    assert server.asked == []


def test_a_download_that_is_not_what_the_checksum_file_says_is_refused(desk: Desk, server: Server) -> None:
    url = server.put("/runc.amd64", send(b"<html>200</html>"))
    sums = server.put("/sums", send(f"{sha256(PROGRAM)}  runc.amd64\n".encode()))
    desk.define(one(f"url: {url}, checksums: {{url: {sums}}}", "{to: bin/runc}"))
    ended = desk.build("-o", "out.tar")
    assert ended.status == ExitCode.BUNDLE_MALFORMED
    assert "error[digest-mismatch]" in ended.err and url in ended.err
    assert desk.names() == ["cache", "x.yaml"]


@pytest.mark.parametrize("text", ["<html>\n", "", f"{'0' * 64}  other\n"])
def test_a_checksum_file_without_the_file_is_no_success(desk: Desk, server: Server, text: str) -> None:
    url = server.put("/runc.amd64", send(PROGRAM))
    sums = server.put("/sums", send(text.encode()))
    desk.define(one(f"url: {url}, checksums: {{url: {sums}}}", "{to: bin/runc}"))
    ended = desk.build("-o", "out.tar")
    assert ended.status == ExitCode.BUNDLE_MALFORMED and sums in ended.err
    assert desk.names() == ["x.yaml"]


def test_a_local_checksum_file_proves_a_local_file(desk: Desk) -> None:
    desk.write("f", PROGRAM)
    desk.write("sums", f"SHA256 (tool) = {sha256(PROGRAM)}\n")
    desk.define(one("file: f, checksums: {file: sums, name: tool}", "{to: f}"))
    desk.built()
    (desk.path / "x.yaml.lock").unlink()
    desk.write("f", b"other")
    ended = desk.build("-o", "out.tar", "--force")
    assert ended.status == ExitCode.BUNDLE_MALFORMED and "error[digest-mismatch]" in ended.err


# -- what sources may be ----------------------------------------------------------------------------------


def packed_by(program: str, *options: str, data: bytes) -> bytes:
    return subprocess.run([program, *options, "-c"], input=data, capture_output=True, check=True, timeout=120).stdout


PLAIN = tar_of(("tool-1/bin/a", PROGRAM), ("tool-1/bin/b", b"b"), ("tool-1/share/doc/x.txt", b"x"))
PACKED = {
    "tar": lambda: PLAIN,
    "gzip": lambda: packed_by("gzip", data=PLAIN),
    "gzip, two members": lambda: packed_by("gzip", data=PLAIN[:999]) + packed_by("gzip", data=PLAIN[999:]),
    "zstd": lambda: packed_by("zstd", data=PLAIN),
    "zstd, two frames": lambda: packed_by("zstd", data=PLAIN[:999]) + packed_by("zstd", data=PLAIN[999:]),
    "zstd, long 27": lambda: packed_by("zstd", "--long=27", data=PLAIN),
    "xz": lambda: packed_by("xz", data=PLAIN),
    "bzip2": lambda: packed_by("bzip2", data=PLAIN),
}


@pytest.mark.parametrize("form", PACKED)
def test_an_archive_of_each_form_is_opened_by_its_content(desk: Desk, form: str) -> None:
    desk.write("misnamed.bin", PACKED[form]())
    desk.define(one("file: misnamed.bin", "{from: '*/bin/*', to: bin/}", "{from: 'tool-{version}/share/', to: share/}"))
    assert placed(desk.built()) == {"bin/a": PROGRAM, "bin/b": b"b", "share/doc/x.txt": b"x"}


@pytest.mark.parametrize("form", [name for name in PACKED if name != "tar"])
def test_an_archive_that_is_cut_short_is_refused_wherever_it_ends(desk: Desk, form: str) -> None:
    data = PACKED[form]()
    for end in range(1, len(data), max(1, len(data) // 12)):
        desk.write("a", data[:end])
        desk.define(one("file: a", "{from: '**', to: x/}"))
        ended = desk.build("-o", "out.tar")
        assert ended.status in (ExitCode.BUNDLE_MALFORMED, ExitCode.USAGE), (end, ended.err)
        assert desk.names() == ["a", "x.yaml"]


def test_a_plain_tar_that_is_cut_short_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for end in [*range(0, len(PLAIN) - 1024 + 1, 97), len(PLAIN) - 1]:
        path.write_bytes(PLAIN[:end])
        with path.open("rb") as file, pytest.raises(BundleError):
            tar_entries(file, "a")


def test_a_zstd_window_that_decoders_refuse_is_refused(desk: Desk) -> None:
    desk.write("a", packed_by("zstd", "--ultra", "-22", "--long=28", data=PLAIN))
    desk.define(one("file: a", "{from: '**', to: x/}"))
    ended = desk.build("-o", "out.tar")
    assert ended.status == ExitCode.BUNDLE_MALFORMED and "window" in ended.err and "134217728" in ended.err


def test_names_with_a_leading_dot_are_the_same_names(desk: Desk) -> None:
    desk.write("a.tar", tar_of(("./bridge", PROGRAM), ("./LICENSE", b"x"), ("./README.md", b"x")))
    desk.define(one("file: a.tar", "{from: '[a-z]*', to: cni/bin/}"))
    assert placed(desk.built()) == {"cni/bin/bridge": PROGRAM}


def test_a_hard_link_is_the_file_it_names(desk: Desk) -> None:
    desk.write("a.tar", tar_of(("outside/tool", PROGRAM), ("bin/tool", special(tarfile.LNKTYPE, "outside/tool"))))
    desk.define(one("file: a.tar", "{from: bin/tool, to: bin/}"))
    assert placed(desk.built()) == {"bin/tool": PROGRAM}


REFUSED_MEMBERS = {
    "hard link to a symlink": [
        ("s", special(tarfile.SYMTYPE, "/etc/shadow")),
        ("x", special(tarfile.LNKTYPE, "s")),
    ],
    "hard link to nothing": [("x", special(tarfile.LNKTYPE, "missing"))],
    "device": [("x", special(tarfile.CHRTYPE))],
    "fifo": [("x", special(tarfile.FIFOTYPE))],
    "absolute symlink": [("x", special(tarfile.SYMTYPE, "/etc/shadow"))],
    "symlink that climbs": [("x", special(tarfile.SYMTYPE, "../../etc/shadow"))],
    "symlink to what is not taken": [("x", special(tarfile.SYMTYPE, "y")), ("y", PROGRAM)],
}


@pytest.mark.parametrize("case", REFUSED_MEMBERS)
def test_a_member_that_no_host_should_get_is_refused_with_its_rule(desk: Desk, case: str) -> None:
    desk.write("a.tar", tar_of(*REFUSED_MEMBERS[case]))
    desk.define(one("file: a.tar", "{from: x, to: bin/}"))
    ended = desk.build("-o", "out.tar")
    assert ended.status == ExitCode.USAGE and "x.yaml:9: components[0].files[0]" in ended.err, ended.err
    assert desk.names() == ["a.tar", "x.yaml"]


def test_a_symlink_inside_the_component_is_kept(desk: Desk) -> None:
    desk.write("a.tar", tar_of(("lib/tool", PROGRAM), ("bin/tool", special(tarfile.SYMTYPE, "../lib/tool"))))
    desk.define(one("file: a.tar", "{from: '**', to: x/}"))
    archive = desk.built()
    files = {item["path"]: item for item in description_of(archive)["components"][0]["files"]}
    assert files["x/bin/tool"] == {"path": "x/bin/tool", "type": "symlink", "target": "../lib/tool"}


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("{from: nothing, to: bin/}", "nothing in tree matches 'nothing'"),
        ("{from: 'x*', to: bin/}", "nothing in tree matches 'x*'"),
        ("{from: sub, to: bin/}", "'sub' is a directory in tree"),
        ("{from: '*', to: bin}", "2 paths in tree match '*', but 'bin' names one file"),
        ("{from: a, to: bin/a}, {from: b, to: bin/a}", "'bin/a' is already placed by line 9"),
        ("{from: a, to: x}, {from: b, to: x/b}", "'x' would be a file and a directory"),
        ("{from: pipe, to: bin/}", "neither a file nor a symbolic link"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_named(desk: Desk, rule: str, why: str) -> None:
    for name in ("a", "b", "sub/c"):
        desk.write(f"tree/{name}", PROGRAM)
    if "pipe" in rule:
        os.mkfifo(desk.path / "tree/pipe")
    desk.define(one("directory: tree", rule))
    ended = desk.build("-o", "out.tar")
    assert ended.status == ExitCode.USAGE and why in ended.err, ended.err
    assert "x.yaml:9: " in ended.err


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("sub/", {"sub/c": "bin/c", "sub/deep/d": "bin/deep/d"}),
        ("sub/**", {"sub/c": "bin/c", "sub/deep/d": "bin/deep/d"}),
        ("**/d", {"sub/deep/d": "bin/sub/deep/d"}),
        ("*", {"a": "bin/a", "[b]": "bin/[b]"}),
        ("sub/*", {"sub/c": "bin/c"}),
        ("[!a]*", {"[b]": "bin/[b]"}),
    ],
)
def test_globs_select_and_strip(desk: Desk, glob: str, expected: dict[str, str]) -> None:
    for name in ("a", "[b]", "sub/c", "sub/deep/d"):
        desk.write(f"tree/{name}", name)
    desk.define(one("directory: tree", f"{{from: '{glob}', to: bin/}}"))
    assert placed(desk.built()) == {new: old.encode() for old, new in expected.items()}


def test_two_components_that_place_one_path_are_refused(desk: Desk) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: bin/f}") + one("file: f", "{to: bin/f}").replace("name: c", "name: d"))
    ended = desk.build("-o", "out.tar")
    assert ended.status == ExitCode.BUNDLE_MALFORMED and "bin/f" in ended.err


@pytest.mark.parametrize("name", ["missing.tar", "tree"])
def test_a_file_that_is_not_there_is_named_with_its_line(desk: Desk, name: str) -> None:
    (desk.path / "tree").mkdir()
    desk.define(one(f"file: {name}", "{to: f}"))
    ended = desk.build("-o", "out.tar")
    assert ended.status == ExitCode.USAGE
    assert f"x.yaml:8: components[0].source: {desk.path}/{name}: no such file" in ended.err


@pytest.mark.parametrize("data", [PROGRAM, b"PK\3\4" + bytes(600), b"text\n", b""])
def test_what_is_no_archive_is_not_opened(desk: Desk, data: bytes) -> None:
    desk.write("a", data)
    desk.define(one("file: a", "{from: x, to: bin/}"))
    ended = desk.build("-o", "out.tar")
    assert ended.status == ExitCode.BUNDLE_MALFORMED and "not a tar archive" in ended.err


def test_a_name_that_is_not_utf8_is_refused_and_shown_escaped(desk: Desk) -> None:
    os.makedirs(desk.path / "tree")
    with open(os.fsencode(desk.path / "tree") + b"/caf\xe9", "wb"):
        pass
    desk.define(one("directory: tree", "{from: '*', to: bin/}"))
    ended = desk.build("-o", "out.tar")
    assert ended.status == ExitCode.USAGE and "not UTF-8" in ended.err and "caf\\udce9" in ended.err


@pytest.mark.parametrize(
    "environ", [{"LC_ALL": "C.UTF-8"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_a_name_outside_ascii_keeps_its_bytes_in_any_locale(desk: Desk, environ: dict[str, str]) -> None:
    desk.write("tree/café.txt", b"x")
    desk.define(one("directory: tree", "{from: '*', to: share/}"))
    process = desk.spawn("build", "x.yaml", "-o", "out.tar", "--cache", desk.cache, environ=environ)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    archive = (desk.path / "out.tar").read_bytes()
    assert placed(archive) == {"share/café.txt": b"x"}
    process = desk.spawn("inspect", "out.tar", "--files", environ=environ)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and b"UnicodeEncodeError" not in err, err
    assert b"share/caf\\xe9.txt" in out
    (desk.path / "tree").rename(desk.path / "träger")
    desk.define(one("directory: träger", "{from: caf*.txt, to: share/}"))
    (desk.path / "x.yaml.lock").unlink()
    process = desk.spawn("build", "x.yaml", "-o", "again.tar", "--cache", desk.cache, environ=environ)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert (desk.path / "again.tar").read_bytes() == archive


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    from stratum.bundle.layer import Member, write_layer

    for content in (b"longer", b"x"):
        member = Member("f", "file", 0o644, 3, open=lambda content=content: io.BytesIO(content))  # type: ignore[misc]
        with pytest.raises(BundleError, match="changed while it was read"):
            write_layer([member], bytearray().extend, level=1, mtime=0, tick=lambda amount: None, subject="component c")


# -- output -----------------------------------------------------------------------------------------------


def simple(desk: Desk) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: f}"))


def test_the_default_output_is_named_by_the_bundle(desk: Desk) -> None:
    simple(desk)
    assert desk.build().status == 0
    assert desk.names() == ["demo-1.0-1.tar", "f", "x.yaml", "x.yaml.lock"]


@pytest.mark.parametrize("output", ["out.tar", "dir/"])
def test_what_is_there_is_replaced_only_by_force(desk: Desk, output: str) -> None:
    simple(desk)
    assert desk.build("-o", output).status == 0
    ended = desk.build("-o", output)
    assert ended.status == ExitCode.USAGE and "exists already" in ended.err and "--force" in ended.err
    desk.define(one("file: f", "{to: f}"), head=HEAD.replace("serial: 7", "serial: 8"))
    before = desk.names()
    assert desk.build("-o", output, "--force").status == 0
    assert desk.names() == before
    index = desk.path / output / "index.json" if output.endswith("/") else None
    data = index.read_bytes() if index else files_of((desk.path / output).read_bytes())["index.json"]
    assert json.loads(data)["manifests"]


def test_a_directory_that_is_no_bundle_is_never_replaced(desk: Desk) -> None:
    simple(desk)
    desk.write("home/precious", b"x")
    ended = desk.build("-o", "home", "--force")
    assert ended.status == ExitCode.USAGE and "is no bundle" in ended.err
    assert desk.names("home") == ["precious"]
    assert desk.build("-o", "home", "--format", "tar", "--force").status == ExitCode.USAGE
    desk.write("file", b"x")
    assert desk.build("-o", "file", "--format", "directory", "--force").status == ExitCode.USAGE
    assert (desk.path / "file").read_bytes() == b"x"


@pytest.mark.parametrize("kind", ["fifo", "link to a device"])
def test_what_is_no_regular_file_is_never_replaced(desk: Desk, kind: str) -> None:
    simple(desk)
    path = desk.path / "out"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")
    ended = desk.build("-o", "out", "--force")
    assert ended.status == ExitCode.USAGE and "no regular file" in ended.err
    assert path.is_fifo() or path.is_symlink()


@pytest.mark.timeout(60)
def test_a_device_is_no_source(desk: Desk) -> None:
    desk.define(one("file: /dev/zero", "{to: f}"))
    assert desk.build("-o", "out.tar").status == ExitCode.USAGE


def test_modes_do_not_depend_on_the_umask(desk: Desk) -> None:
    simple(desk)
    before = os.umask(0o077)
    try:
        assert desk.build("-o", "dir/").status == 0
        assert desk.build("-o", "out.tar").status == 0
    finally:
        os.umask(before)
    assert (desk.path / "dir").stat().st_mode & 0o777 == 0o755
    for path in (desk.path / "dir").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644)
    assert (desk.path / "out.tar").stat().st_mode & 0o777 == 0o644
    assert (desk.path / "x.yaml.lock").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("output", ["out.tar", "dir/", "none/out.tar"])
def test_a_failure_leaves_no_trace_and_no_lock(desk: Desk, output: str) -> None:
    desk.write("f", PROGRAM)
    desk.define(one("file: f", "{to: f}") + one("file: missing", "{to: g}").replace("name: c", "name: d"))
    assert desk.build("-o", output).status == ExitCode.USAGE
    assert desk.names() == ["f", "x.yaml"]


@pytest.mark.parametrize("output", ["out.tar", "dir/"])
def test_a_full_disk_leaves_what_was_there(desk: Desk, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    simple(desk)
    assert desk.build("-o", output).status == 0
    before = {name: desk.names(output)[:] if output == "dir/" else b"" for name in desk.names()}
    calls = 0
    real = Host.fsync

    for allowed in range(8):
        calls = 0

        def full(self: Host, file: Any, allowed: int = allowed) -> None:
            nonlocal calls
            calls += 1
            if calls > allowed:
                raise OSError(28, "No space left on device")
            real(self, file)

        monkeypatch.setattr(Host, "fsync", full)
        try:
            desk.build("-o", output, "--force")
        except OSError as error:
            assert error.errno == 28
        else:
            break
        finally:
            monkeypatch.setattr(Host, "fsync", real)
        assert {name: desk.names(output)[:] if output == "dir/" else b"" for name in desk.names()} == before
    assert calls <= 8 and allowed > 2


def test_a_full_device_as_output_is_one_line(desk: Desk) -> None:
    simple(desk)
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [*desk_argv(), "build", "x.yaml", "-o", "-", "--cache", str(desk.cache)],
            cwd=desk.path,
            env=desk_environ(),
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=120,
        )
    assert process.returncode == ExitCode.FAILED
    assert b"No space left" in process.stderr and b"Traceback" not in process.stderr


def test_a_reader_that_leaves_is_one_line(desk: Desk) -> None:
    desk.write("f", os.urandom(1 << 20))
    desk.define(one("file: f", "{to: f}"))
    process = desk.spawn("build", "x.yaml", "-o", "-", "--cache", desk.cache)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(512)
    process.stdout.close()
    assert process.wait(timeout=120) == ExitCode.FAILED
    err = process.stderr.read()
    assert b"the reader left" in err and b"Traceback" not in err
    process.stderr.close()


def desk_argv() -> list[str]:
    import sys

    return [sys.executable, "-m", "stratum", "bundle"]


def desk_environ() -> dict[str, str]:
    from tests.unit.building import ROOT

    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}


def test_json_and_the_bundle_cannot_share_standard_output(desk: Desk) -> None:
    simple(desk)
    ended = desk.build("-o", "-", "--output", "json")
    assert ended.status == ExitCode.USAGE


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_while_a_download_hangs_ends_at_once_and_cleans_up(
    desk: Desk, server: Server, number: int, status: int
) -> None:
    asked, release = threading.Event(), threading.Event()

    def hang(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", "1000000")
        request.end_headers()
        request.wfile.write(b"x" * 1000)
        asked.set()
        release.wait(60)

    url = server.put("/x", hang)
    desk.define(one(f"url: {url}, sha256: {'a' * 64}", "{to: f}"))
    process = desk.spawn("build", "x.yaml", "-o", "out.tar", "--cache", desk.cache)
    try:
        assert asked.wait(60)
        time.sleep(0.3)
        process.send_signal(number)
        began = time.monotonic()
        _, err = process.communicate(timeout=60)
        assert process.returncode == status, err
        assert time.monotonic() - began < 20
        left = [name for name in desk.names() if name not in ("cache", "x.yaml")]
        if number != signal.SIGKILL:
            assert left == []
            return
        # A kill leaves the staging directory; the next run takes it away.
        assert len(left) == 1 and re.match(r"\.out\.tar\.[0-9a-f]{16}\.tmp\Z", left[0])
    finally:
        release.set()
        process.kill()
        process.communicate()
    simple(desk)
    assert desk.build("-o", "out.tar").status == 0
    assert desk.names() == ["cache", "f", "out.tar", "x.yaml", "x.yaml.lock"]


def test_the_staging_of_a_live_run_is_not_touched(tmp_path: Path) -> None:
    host, parent = Host(), HostPath(str(tmp_path))
    (tmp_path / ".out.tar.0011223344556677.tmp").mkdir()
    (tmp_path / ".out.tar.link.tmp").symlink_to("/etc")
    with write.staging_directory(host, parent, "out.tar") as first:
        with write.staging_directory(host, parent, "out.tar") as second:
            assert host.is_dir(first) and host.is_dir(second) and first != second
        assert host.is_dir(first)
        assert sorted(os.listdir(tmp_path)) == sorted([first.name, ".out.tar.link.tmp"])
    assert os.listdir(tmp_path) == [".out.tar.link.tmp"]


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(desk: Desk, server: Server) -> None:
    url = server.put("/x", send(PROGRAM))
    desk.write("f", PROGRAM)
    desk.define(
        one("file: f", "{to: f}") + one(f"url: {url}, sha256: {sha256(PROGRAM)}", "{to: g}").replace("c\n", "d\n", 1)
    )
    ended = desk.build("-o", "out.tar", "--dry-run", "--output", "json")
    assert ended.status == 0, ended.err
    document = ended.document()
    assert document["dryRun"] and document["lockWritten"] and document["form"] == "tar"
    assert [item["from"] for item in document["sources"]] == ["file", "would download"]
    assert desk.names() == ["f", "x.yaml"] and server.asked == []


def test_a_dry_run_finds_what_is_missing(desk: Desk) -> None:
    desk.define(one("file: f", "{to: f}"))
    assert desk.build("-o", "out.tar", "--dry-run").status == ExitCode.USAGE


@pytest.mark.parametrize(
    "words", [("--level", "0"), ("--level", "20"), ("--jobs", "0"), ("--platform", "linux/arm64"), ("--platform", "x")]
)
def test_an_option_out_of_range_is_a_usage_error(desk: Desk, words: tuple[str, str]) -> None:
    simple(desk)
    assert desk.build("-o", "out.tar", *words).status == ExitCode.USAGE


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, len(PLAIN) - 1), value=st.integers(0, 255))
def test_a_changed_byte_in_an_archive_never_ends_in_another_error(tmp_path: Path, position: int, value: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(PLAIN[:position] + bytes([value]) + PLAIN[position + 1 :])
    with path.open("rb") as file:
        try:
            for entry in tar_entries(file, "a").values():
                if entry.open:
                    with entry.open() as content:
                        assert len(content.read()) <= entry.size
        except BundleError:
            pass
