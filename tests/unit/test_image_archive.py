"""Container images in bundles: archives of every form, proved while building."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import pytest

from stratum.errors import ExitCode
from tests.unit.building import HEAD, Desk, blob, files_of, index_of, sha256, special, tar_of

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
NAME = "docker.io/library/busybox:1.37"
BOTH = HEAD.replace("[linux/amd64]", "[linux/amd64, linux/arm64]")


def as_json(value: object) -> bytes:
    return json.dumps(value, indent=1).encode()  # not our form: bytes must be kept as they are


@dataclass
class Layout:
    """An OCI layout that can be bent."""

    manifests: list[dict[str, Any]] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def add(self, data: bytes, media_type: str, **more: Any) -> dict[str, Any]:
        self.blobs[sha256(data)] = data
        return {"mediaType": media_type, "digest": f"sha256:{sha256(data)}", "size": len(data), **more}

    def image(
        self,
        architecture: str = "amd64",
        *,
        content: bytes = b"#!/bin/sh\n",
        media_type: str = LAYER,
        packed: Optional[bytes] = None,
        diff_id: Optional[str] = None,
        **more: Any,
    ) -> dict[str, Any]:
        layer = tar_of(("bin/sh", content), mode="w")
        diff_ids = [f"sha256:{diff_id or sha256(layer)}"]
        config = {"os": "linux", "architecture": architecture, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
        manifest = {
            "schemaVersion": 2,
            "config": self.add(as_json(config), CONFIG),
            "layers": [self.add(layer if packed is None else packed, media_type)],
        }
        return self.add(as_json(manifest), MANIFEST, **more)

    def index(self, *manifests: dict[str, Any], **more: Any) -> dict[str, Any]:
        return self.add(as_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": list(manifests)}), INDEX, **more)

    def files(self) -> dict[str, bytes]:
        return {
            "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
            "index.json": as_json({"schemaVersion": 2, "manifests": self.manifests}),
            **{f"blobs/sha256/{name}": data for name, data in self.blobs.items()},
        }

    def tar(self, prefix: str = "") -> bytes:
        return tar_of(*((prefix + name, data) for name, data in self.files().items()))


def layout(*architectures: str, **more: Any) -> Layout:
    made = Layout()
    made.manifests = [made.image(name, **more) for name in architectures or ("amd64",)]
    return made


def platform(architecture: str) -> dict[str, str]:
    return {"os": "linux", "architecture": architecture}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path)
    made.write("f", b"program")
    return made


def build(desk: Desk, data: Optional[bytes], image: str = "", *words: str, head: str = HEAD) -> Any:
    if data is not None:
        desk.write("i.tar", data)
    text = "  - name: c\n    version: 1\n    source: {file: f}\n    files: [{to: bin/f}]\n"
    text += f"images:\n  - name: {NAME}\n" + (image or "    source: {file: i.tar}\n")
    desk.define(text, head=head)
    return desk.build("-o", "out.tar", "--force", "--update-lock", *words)


def images(desk: Desk) -> list[dict[str, Any]]:
    archive = (desk.path / "out.tar").read_bytes()
    return [item for item in index_of(archive)["manifests"] if "artifactType" not in item]


def built(desk: Desk, data: Optional[bytes], image: str = "", head: str = HEAD) -> list[dict[str, Any]]:
    ended = build(desk, data, image, head=head)
    assert ended.status == 0, ended.err
    return images(desk)


def refused(desk: Desk, data: Optional[bytes], why: str, image: str = "", head: str = HEAD) -> None:
    (desk.path / "out.tar").unlink(missing_ok=True)
    ended = build(desk, data, image, head=head)
    assert ended.status == ExitCode.BUNDLE_MALFORMED, ended.err
    assert why in ended.err
    assert "Traceback" not in ended.err and "out.tar" not in desk.names()


def test_an_oci_archive_is_kept_byte_for_byte(desk: Desk) -> None:
    source = layout()
    (found,) = built(desk, source.tar())
    assert found["digest"] == source.manifests[0]["digest"] and found["platform"] == platform("amd64")
    assert found["annotations"] == {
        "io.containerd.image.name": NAME,
        "org.opencontainers.image.ref.name": NAME,
    }
    files = files_of((desk.path / "out.tar").read_bytes())
    for name, data in source.blobs.items():
        assert files[f"blobs/sha256/{name}"] == data


@pytest.mark.parametrize("prefix", ["./", ""])
def test_names_may_start_with_a_dot(desk: Desk, prefix: str) -> None:
    assert len(built(desk, layout().tar(prefix))) == 1


def test_a_compressed_archive_and_a_directory_are_the_same_image(desk: Desk) -> None:
    source = layout()
    first = built(desk, source.tar())
    assert built(desk, gzip.compress(source.tar())) == first
    for name, data in source.files().items():
        desk.write(f"layout/{name}", data)
    assert built(desk, None, "    source: {directory: layout}\n") == first


def test_a_layout_in_a_folder_is_refused_with_the_reason(desk: Desk) -> None:
    refused(desk, layout().tar("img/"), "the image is in the folder img/ of the archive, not at its top")


def test_an_archive_of_something_else_is_refused(desk: Desk) -> None:
    refused(desk, tar_of(("etc/passwd", b"")), "neither an OCI layout (oci-layout, index.json) nor a docker archive")


def test_each_platform_gets_its_own_from_one_archive(desk: Desk) -> None:
    found = built(desk, layout("arm64", "amd64").tar(), head=BOTH)
    assert [item["platform"]["architecture"] for item in found] == ["amd64", "arm64"]
    # umoci takes no layout in which a name stands twice.
    assert [item["annotations"]["org.opencontainers.image.ref.name"] for item in found] == [
        f"{NAME}-linux-amd64",
        f"{NAME}-linux-arm64",
    ]
    assert {item["annotations"]["io.containerd.image.name"] for item in found} == {NAME}


def test_each_platform_gets_its_own_archive(desk: Desk) -> None:
    for name in ("amd64", "arm64"):
        desk.write(f"i-{name}.tar", layout(name).tar())
    assert len(built(desk, None, '    source: {file: "i-{arch}.tar"}\n', head=BOTH)) == 2


def test_an_image_may_be_for_one_platform_only(desk: Desk) -> None:
    found = built(desk, layout("arm64").tar(), "    source: {file: i.tar}\n    platforms: [linux/arm64]\n", head=BOTH)
    assert [item["platform"]["architecture"] for item in found] == ["arm64"]
    assert found[0]["annotations"]["org.opencontainers.image.ref.name"] == NAME


def test_a_nested_index_is_searched_and_attestations_are_passed_over(desk: Desk) -> None:
    source = Layout()
    arm, amd = source.image("arm64", platform=platform("arm64")), source.image(platform=platform("amd64"))
    unknown = {"os": "unknown", "architecture": "unknown"}
    proof = source.add(
        b"{}", MANIFEST, platform=unknown, annotations={"vnd.docker.reference.type": "attestation-manifest"}
    )
    source.manifests = [source.index(source.index(arm, proof), amd)]
    assert [item["digest"] for item in built(desk, source.tar(), head=BOTH)] == [amd["digest"], arm["digest"]]


def test_an_index_may_name_other_platforms_whose_blobs_are_not_there(desk: Desk) -> None:
    source = Layout()
    amd = source.image(platform=platform("amd64"))
    gone = {"mediaType": MANIFEST, "digest": f"sha256:{'0' * 64}", "size": 7, "platform": platform("s390x")}
    source.manifests = [source.index(gone, amd)]
    assert built(desk, source.tar())[0]["digest"] == amd["digest"]


def test_indexes_that_nest_without_end_are_refused(desk: Desk) -> None:
    source = Layout()
    inner = source.image()
    for _ in range(5):
        inner = source.index(inner)
    source.manifests = [inner]
    refused(desk, source.tar(), "indexes within each other")


def test_an_image_for_another_platform_is_refused_and_says_for_which(desk: Desk) -> None:
    refused(desk, layout("arm64").tar(), "no image for linux/amd64, only for linux/arm64")


def test_an_image_whose_config_is_for_another_platform_is_refused(desk: Desk) -> None:
    source = Layout()
    source.manifests = [source.image("arm64", platform=platform("amd64"))]
    refused(desk, source.tar(), "the image is for linux/arm64, not for linux/amd64")


def several() -> Layout:
    source = Layout()
    source.manifests = [
        source.image(content=name.encode(), annotations={"org.opencontainers.image.ref.name": name})
        for name in ("a", "b")
    ]
    return source


def test_one_of_several_images_is_chosen_by_its_name(desk: Desk) -> None:
    source = several()
    found = built(desk, source.tar(), "    source: {file: i.tar}\n    reference: b\n")
    assert found[0]["digest"] == source.manifests[1]["digest"]
    source.manifests[0]["annotations"] = {"io.containerd.image.name": NAME}
    assert built(desk, source.tar())[0]["digest"] == source.manifests[0]["digest"]


def test_several_images_and_no_choice_is_an_error_that_lists_them(desk: Desk) -> None:
    refused(desk, several().tar(), f"no image called {NAME} (it holds a, b)")
    refused(desk, several().tar(), "no image called c", "    source: {file: i.tar}\n    reference: c\n")


def test_unnamed_images_are_never_skipped(desk: Desk) -> None:
    source = Layout()
    source.manifests = [source.image(content=b"1"), source.image(content=b"2")]
    refused(desk, source.tar(), "2 different images for linux/amd64")


def test_an_empty_archive_is_an_error(desk: Desk) -> None:
    refused(desk, Layout().tar(), "it holds none")


def packed_by_zstd(*options: str) -> bytes:
    data = tar_of(("bin/sh", b"#!/bin/sh\n"))
    return subprocess.run(["zstd", *options, "-c"], input=data, capture_output=True, check=True, timeout=60).stdout


def test_layers_in_gzip_and_zstd_are_kept(desk: Desk) -> None:
    packed = gzip.compress(tar_of(("bin/sh", b"#!/bin/sh\n")))
    built(desk, layout(media_type=LAYER + "+gzip", packed=packed).tar())
    docker = "application/vnd.docker.image.rootfs.diff.tar.gzip"
    built(desk, layout(media_type=docker, packed=packed).tar())
    built(desk, layout(media_type=LAYER + "+zstd", packed=packed_by_zstd("--long=27")).tar())


def test_a_zstd_layer_with_a_window_that_decoders_refuse_is_refused(desk: Desk) -> None:
    packed = packed_by_zstd("--ultra", "-22", "--long=28")
    refused(desk, layout(media_type=LAYER + "+zstd", packed=packed).tar(), "window")


def test_a_zstd_layer_typed_gzip_is_refused(desk: Desk) -> None:
    refused(desk, layout(media_type=LAYER + "+gzip", packed=packed_by_zstd()).tar(), "but holds zstd")


def test_a_layer_of_an_unknown_kind_is_refused(desk: Desk) -> None:
    refused(desk, layout(media_type="application/x-tar").tar(), "application/x-tar")


def test_a_layer_that_unpacks_to_something_else_is_refused(desk: Desk) -> None:
    refused(desk, layout(diff_id="0" * 64).tar(), "digest-mismatch")


@pytest.mark.parametrize("kind", [MANIFEST, CONFIG, LAYER])
@pytest.mark.parametrize("change", ["flip", "drop", "cut"])
def test_a_damaged_blob_is_refused(desk: Desk, kind: str, change: str) -> None:
    source = layout()
    manifest = json.loads(source.blobs[source.manifests[0]["digest"][7:]])
    digest = {MANIFEST: source.manifests[0], CONFIG: manifest["config"], LAYER: manifest["layers"][0]}[kind]["digest"][
        7:
    ]
    data = source.blobs.pop(digest)
    if change != "drop":
        source.blobs[digest] = data[:-1] if change == "cut" else data[:-1] + bytes([data[-1] ^ 1])
    refused(desk, source.tar(), digest)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("index.json", b"[]"),
        ("index.json", b'{"schemaVersion": 2, "manifests": [{}]}'),
        ("index.json", b'{"schemaVersion": 1, "manifests": []}'),
        ("oci-layout", b'{"imageLayoutVersion": "2.0.0"}'),
        ("oci-layout", b"\xff"),
    ],
)
def test_a_malformed_layout_is_refused(desk: Desk, name: str, data: bytes) -> None:
    files = {**layout().files(), name: data}
    refused(desk, tar_of(*files.items()), name.split(".")[0] if name == "index.json" else "layout")


# -- docker save ------------------------------------------------------------------------------------------


def docker_save(tags: Optional[list[str]] = None, architecture: str = "amd64", **bend: Any) -> tuple[bytes, bytes]:
    """What docker save writes, and the config in it."""
    layer = tar_of(("bin/sh", b"#!/bin/sh\n"))
    diff_ids = [f"sha256:{sha256(layer)}"] * 2
    config = as_json({"os": "linux", "architecture": architecture, "rootfs": {"type": "layers", "diff_ids": diff_ids}})
    manifest = [{"Config": f"{sha256(config)}.json", "RepoTags": tags, "Layers": ["1/layer.tar", "2/layer.tar"]}]
    members: dict[str, Any] = {
        "1/layer.tar": layer,
        # An old docker writes an equal layer as a link to the first one.
        "2/layer.tar": special(tarfile.SYMTYPE, "../1/layer.tar"),
        f"{sha256(config)}.json": config,
        "manifest.json": json.dumps(manifest).encode(),
        **bend,
    }
    return tar_of(*((name, data) for name, data in members.items() if data is not None)), config


def test_a_docker_archive_becomes_an_oci_image_with_the_same_id(desk: Desk) -> None:
    data, config = docker_save(["busybox:1.37"])
    (found,) = built(desk, data)
    archive = (desk.path / "out.tar").read_bytes()
    manifest = json.loads(blob(archive, found))
    assert manifest["config"] == {"mediaType": CONFIG, "digest": f"sha256:{sha256(config)}", "size": len(config)}
    assert blob(archive, manifest["config"]) == config
    assert found["mediaType"] == manifest["mediaType"] == MANIFEST
    for layer, diff_id in zip(manifest["layers"], json.loads(config)["rootfs"]["diff_ids"]):
        assert layer["mediaType"] == LAYER + "+zstd"
        plain = subprocess.run(["zstd", "-dc"], input=blob(archive, layer), capture_output=True, check=True).stdout
        assert f"sha256:{hashlib.sha256(plain).hexdigest()}" == diff_id


def test_a_docker_archive_with_one_image_needs_no_name(desk: Desk) -> None:
    built(desk, docker_save(None)[0])
    built(desk, docker_save(["other:1"])[0])
    refused(desk, docker_save(["other:1"])[0], "no image(s) called x", "    source: {file: i.tar}\n    reference: x\n")


def test_a_docker_archive_for_another_platform_is_refused(desk: Desk) -> None:
    refused(desk, docker_save(architecture="arm64")[0], "the image is for linux/arm64")


@pytest.mark.parametrize(
    "bend",
    [
        {"manifest.json": b"{}"},
        {"manifest.json": b"[{}]"},
        {"manifest.json": b"[[[["},
        {"manifest.json": b"[]"},
        {"manifest.json": b'[{"Config": 1, "Layers": []}]'},
        {"manifest.json": b'[{"Config": "../../etc/passwd", "Layers": []}]'},
        {"1/layer.tar": None},
        {"2/layer.tar": special(tarfile.SYMTYPE, "/etc/passwd")},
        {"2/layer.tar": special(tarfile.SYMTYPE, "layer.tar")},
        {"1/layer.tar": tar_of(("other", b""))},
        {"1/layer.tar": b"no tar at all"},
    ],
)
def test_a_malformed_docker_archive_is_refused(desk: Desk, bend: dict[str, Any]) -> None:
    refused(desk, docker_save(["busybox:1.37"], **bend)[0], "i.tar")


def test_an_archive_that_is_both_is_read_as_oci(desk: Desk) -> None:
    source = layout()
    files = {**source.files(), "manifest.json": b"[]"}
    assert built(desk, tar_of(*files.items()))[0]["digest"] == source.manifests[0]["digest"]


def test_an_archive_cut_short_is_refused_wherever_it_ends(desk: Desk) -> None:
    data = layout().tar()
    for end in range(0, len(data) - 1024, len(data) // 15):
        ended = build(desk, data[:end])
        assert ended.status == ExitCode.BUNDLE_MALFORMED, (end, ended.err)


def test_the_lock_pins_the_image(desk: Desk) -> None:
    built(desk, layout().tar())
    lock = json.loads((desk.path / "x.yaml.lock").read_text())
    assert lock["images"]["linux/amd64"][NAME] == {"manifest": images(desk)[0]["digest"]}
    desk.write("i.tar", layout(content=b"other").tar())
    ended = desk.build("-o", "out.tar", "--force")
    assert "error[lock-mismatch]: source i.tar" in ended.err


def test_the_tar_has_the_image_after_the_components(desk: Desk) -> None:
    built(desk, layout().tar())
    with tarfile.open(fileobj=io.BytesIO((desk.path / "out.tar").read_bytes())) as tar:
        names = tar.getnames()
    digest = images(desk)[0]["digest"][7:]
    assert names[-3] == f"blobs/sha256/{digest}"
