"""Bundles and keys in the hands of programs that are not ours: tar, sha256sum, zstd, minisign, skopeo, umoci."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any, Optional

import pytest

from stratum.trust.minisign import INTERACTIVE, PublicKey, generate
from tests.unit.building import Desk
from tests.unit.test_image_archive import BOTH, LAYER, docker_save, layout

PROGRAM = b"\x7fELF" + bytes(range(256)) * 40
ONE, TWO = "registry.example.org/tools/shell:1.37", "docker.io/library/saved:2"


def run(*argv: object, cwd: Optional[Path] = None, data: bytes = b"", status: int = 0) -> str:
    """Run a program that must be there; its standard output."""
    words = [str(word) for word in argv]
    environ = {"PATH": os.environ["PATH"] + ":/usr/sbin:/sbin", "LC_ALL": "C.UTF-8", "HOME": str(cwd or "/nonexistent")}
    done = subprocess.run(words, cwd=cwd, env=environ, input=data, capture_output=True, timeout=120)
    assert done.returncode == status, (words, done.stdout, done.stderr)
    return done.stdout.decode()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A signed bundle for two platforms with two images: ``b.tar``, and ``b`` as a directory."""
    made = Desk(tmp_path)
    made.write("tree/tool", PROGRAM, 0o755)
    made.write("tree/café.txt", b"x")
    made.write(f"tree/{'deep/' * 30}name", b"deep")
    (tmp_path / "tree/link").symlink_to("tool")
    for name in ("amd64", "arm64"):
        import gzip

        from tests.unit.building import tar_of

        packed = gzip.compress(tar_of(("bin/sh", b"#!/bin/sh\n")))
        made.write(f"i-{name}.tar", layout(name, media_type=LAYER + "+gzip", packed=packed).tar())
    made.write("saved.tar", docker_save(["saved:2"])[0])
    text = "  - name: c\n    version: 1\n    source: {directory: tree}\n    files: [{from: '**', to: bin/}]\n"
    text += f'images:\n  - name: {ONE}\n    source: {{file: "i-{{arch}}.tar"}}\n'
    text += f"  - name: {TWO}\n    source: {{file: saved.tar}}\n    platforms: [linux/amd64]\n"
    made.define(text, head=BOTH)
    assert made.run("keygen", "-o", "k", "--no-password").status == 0
    for output in ("b.tar", "b/"):
        ended = made.build("-o", output, "--key", "k.key")
        assert ended.status == 0, ended.err
    return made


# -- an auditor without stratum ---------------------------------------------------------------------------


def test_an_auditor_checks_a_bundle_with_tar_minisign_and_sha256sum(desk: Desk) -> None:
    (desk.path / "audit").mkdir()
    run("tar", "-C", "audit", "-xf", "b.tar", cwd=desk.path)
    audit = desk.path / "audit"
    out = run("minisign", "-Vm", "index.json", "-p", "../k.pub", cwd=audit)
    assert "Signature and comment signature verified" in out and "bundle:demo\tversion:1.0-1\tserial:7" in out
    blobs = sorted(os.listdir(audit / "blobs/sha256"))
    lines = "".join(f"{name}  blobs/sha256/{name}\n" for name in blobs)
    assert run("sha256sum", "-c", cwd=audit, data=lines.encode()).count(": OK") == len(blobs)
    manifest = json.loads((audit / "index.json").read_text())["manifests"][0]
    read = json.loads((audit / "blobs/sha256" / manifest["digest"][7:]).read_text())
    layer = audit / "blobs/sha256" / read["layers"][0]["digest"][7:]
    (desk.path / "layer").mkdir()
    run("tar", "--zstd", "-C", "layer", "-xf", layer, cwd=desk.path)
    tool = desk.path / "layer/bin/tool"
    assert tool.read_bytes() == PROGRAM and stat.S_IMODE(tool.stat().st_mode) == 0o755
    assert (desk.path / "layer/bin/café.txt").read_bytes() == b"x"
    assert (desk.path / f"layer/bin/{'deep/' * 30}name").read_bytes() == b"deep"
    assert os.readlink(desk.path / "layer/bin/link") == "tool"
    description = json.loads((audit / "blobs/sha256" / read["config"]["digest"][7:]).read_text())
    plain = run("sh", "-c", 'zstd -dc "$1" | sha256sum', "-", layer).split()[0]
    assert description["components"][0]["diffID"] == f"sha256:{plain}"


def test_an_auditor_sees_a_changed_index(desk: Desk) -> None:
    path = desk.path / "b/index.json"
    path.write_bytes(path.read_bytes().replace(b"linux", b"linuX", 1))
    run("minisign", "-Vm", "index.json", "-p", "../k.pub", cwd=desk.path / "b", status=1)


# -- skopeo and umoci -------------------------------------------------------------------------------------


def test_skopeo_reads_the_images(desk: Desk) -> None:
    for place, name in (("b", f"{ONE}-linux-arm64"), ("b", TWO)):
        found = json.loads(run("skopeo", "inspect", f"oci:{desk.path / place}:{name}", cwd=desk.path))
        assert found["Os"] == "linux" and len(found["Layers"]) in (1, 2)
    assert found["Architecture"] == "amd64"
    config = json.loads(run("skopeo", "inspect", "--config", f"oci:{desk.path}/b:{ONE}-linux-arm64", cwd=desk.path))
    assert config["architecture"] == "arm64"


def test_skopeo_reads_our_manifest_from_directory_and_tar(desk: Desk) -> None:
    for source in (f"oci:{desk.path}/b", f"oci-archive:{desk.path}/b.tar"):
        text = run("skopeo", "inspect", "--raw", f"{source}:demo-1.0-1-linux-arm64", cwd=desk.path)
        assert json.loads(text)["artifactType"] == "application/vnd.stratum.bundle.v1"


def test_skopeo_copies_an_image_out_of_a_bundle(desk: Desk) -> None:
    policy = desk.write("policy.json", '{"default": [{"type": "insecureAcceptAnything"}]}')
    source, target = f"oci:{desk.path}/b:{ONE}-linux-amd64", f"oci:{desk.path}/copy:sh"
    run("skopeo", "--policy", policy, "--override-arch", "amd64", "copy", source, target, cwd=desk.path)
    assert json.loads((desk.path / "copy/index.json").read_text())["manifests"]


def test_an_archive_by_skopeo_goes_into_a_bundle_unchanged(desk: Desk) -> None:
    policy = desk.write("policy.json", '{"default": [{"type": "insecureAcceptAnything"}]}')
    for kind in ("oci-archive", "docker-archive"):
        source, target = f"oci:{desk.path}/b:{ONE}-linux-amd64", f"{kind}:{desk.path}/{kind}.tar:tools/shell:1"
        run("skopeo", "--policy", policy, "--override-arch", "amd64", "copy", source, target, cwd=desk.path)
        text = "  - name: c\n    version: 1\n    source: {file: i-amd64.tar}\n    files: [{to: bin/x}]\n"
        text += f"images:\n  - name: {ONE}\n    source: {{file: {kind}.tar}}\n    platforms: [linux/amd64]\n"
        desk.define(text, name=f"{kind}.yaml", head=BOTH)
        assert desk.build("-o", f"{kind}/", definition=f"{kind}.yaml").status == 0
    config = json.loads(run("skopeo", "inspect", "--config", f"oci:{desk.path}/docker-archive:{ONE}", cwd=desk.path))
    assert config["architecture"] == "amd64"
    before = json.loads(run("skopeo", "inspect", f"oci:{desk.path}/b:{ONE}-linux-amd64", cwd=desk.path))
    after = json.loads(run("skopeo", "inspect", f"oci:{desk.path}/oci-archive:{ONE}", cwd=desk.path))
    assert before["Digest"] == after["Digest"]


def test_umoci_lists_and_unpacks(desk: Desk) -> None:
    names = run("umoci", "ls", "--layout", "b", cwd=desk.path).split()
    assert names == sorted(
        ["demo-1.0-1-linux-amd64", "demo-1.0-1-linux-arm64", TWO, f"{ONE}-linux-amd64", f"{ONE}-linux-arm64"]
    )
    image = f"b:{ONE}-linux-amd64"
    assert "LAYER" in run("umoci", "stat", "--image", image, cwd=desk.path)
    run("umoci", "unpack", "--rootless", "--image", image, "unpacked", cwd=desk.path)
    assert (desk.path / "unpacked/rootfs/bin/sh").read_bytes() == b"#!/bin/sh\n"


# -- minisign, both ways ----------------------------------------------------------------------------------


def test_minisign_signs_what_we_verify(desk: Desk) -> None:
    assert desk.build("-o", "u/").status == 0
    run("minisign", "-G", "-W", "-p", "m.pub", "-s", "m.key", cwd=desk.path)
    for flags in ((), ("-l",)):
        run("minisign", "-S", *flags, "-m", "u/index.json", "-s", "m.key", cwd=desk.path)
        ended = desk.run("verify", "u", "--trust", "m.pub", "--output", "json")
        assert ended.status == 0, ended.err
        key_id = PublicKey.parse((desk.path / "m.pub").read_bytes()).key_id
        assert ended.document()["signers"][0]["keyId"] == key_id
        # In its comment minisign writes it as a number, without zeros in front.
        assert f" {key_id.lstrip('0')}\n" in (desk.path / "m.pub").read_text()


def test_our_key_signs_with_minisign_and_minisigns_key_with_us(desk: Desk) -> None:
    run("minisign", "-S", "-m", "f", "-s", "../k.key", cwd=desk.write("w/f", b"x").parent)
    run("minisign", "-Vm", "f", "-p", "../k.pub", cwd=desk.path / "w")
    run("minisign", "-G", "-W", "-p", "m.pub", "-s", "m.key", cwd=desk.path)
    assert desk.run("sign", "b", "--key", "m.key").status == 0
    (other,) = [path for path in (desk.path / "b").iterdir() if path.name.count(".") == 3]
    run("minisign", "-Vm", "b/index.json", "-x", other, "-p", "m.pub", cwd=desk.path)
    run("minisign", "-Vm", "b/index.json", "-p", "k.pub", cwd=desk.path)


def test_a_key_with_a_password_signs_with_minisign(desk: Desk) -> None:
    secret, public = generate(b"hunter two", cost=INTERACTIVE)
    desk.write("s.key", secret.to_bytes(), 0o600)
    desk.write("s.pub", public.to_bytes())
    desk.write("f", b"x")
    run("minisign", "-S", "-m", "f", "-s", "s.key", cwd=desk.path, data=b"hunter two\n")
    run("minisign", "-Vm", "f", "-p", "s.pub", cwd=desk.path)


def test_a_key_of_minisign_with_a_password_signs_with_us(desk: Desk) -> None:
    run("minisign", "-G", "-p", "m.pub", "-s", "m.key", cwd=desk.path, data=b"hunter two\nhunter two\n")
    desk.write("pw", "hunter two\n", 0o600)
    ended = desk.run("sign", "b", "--key", "m.key", "--password-file", "pw")
    assert ended.status == 0, ended.err
    assert desk.run("verify", "b", "--trust", "m.pub").status == 0


# -- other writers ----------------------------------------------------------------------------------------


def again(desk: Desk, *options: str) -> Any:
    """The bundle, unpacked and packed again by tar."""
    run("tar", *options, "-C", "b", "-cf", "again.tar", ".", cwd=desk.path)
    return desk.run("verify", "again.tar", "--trust", "k.pub")


@pytest.mark.parametrize("form", ["gnu", "pax", "ustar"])
def test_a_bundle_packed_again_by_gnu_tar_is_still_one(desk: Desk, form: str) -> None:
    ended = again(desk, f"--format={form}")
    assert ended.status == 0, ended.err
    assert desk.run("sign", "again.tar", "--key", "k.key").status == 0
    assert desk.run("verify", "again.tar", "--trust", "k.pub").status == 0


def test_a_bundle_packed_with_its_folder_is_refused_with_the_reason(desk: Desk) -> None:
    run("tar", "-cf", "again.tar", "b", cwd=desk.path)
    ended = desk.run("verify", "again.tar", "--trust", "k.pub")
    assert ended.status == 12 and "b/" in ended.err and "tar -C b -cf" in ended.err


@pytest.mark.parametrize("form", ["gnu", "pax", "ustar"])
def test_source_archives_of_every_tar_format_give_the_same_component(desk: Desk, form: str) -> None:
    desk.write("short/bin/tool", PROGRAM, 0o755)
    run("tar", f"--format={form}", "-C", "short", "-czf", "s.tgz", "bin", cwd=desk.path)
    desk.define(
        "  - name: c\n    version: 1\n    source: {file: s.tgz}\n    files: [{from: bin/tool, to: bin/}]\n", "s.yaml"
    )
    ended = desk.build("-o", "s.tar", definition="s.yaml")
    assert ended.status == 0, ended.err
    lock = json.loads((desk.path / "s.yaml.lock").read_text())
    desk.define(
        "  - name: c\n    version: 1\n    source: {directory: short}\n    files: [{from: bin/tool, to: bin/}]\n",
        "d.yaml",
    )
    assert desk.build("-o", "d.tar", definition="d.yaml").status == 0
    other = json.loads((desk.path / "d.yaml.lock").read_text())
    assert lock["components"] == other["components"]
