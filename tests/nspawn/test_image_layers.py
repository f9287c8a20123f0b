"""Images of a bundle reach containers as their layers say, whatever the order of members (row 59)."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.lab import demo
from tests.lab.image import Image
from tests.lab.node import bring
from tests.lab.nspawn import NspawnMachine
from tests.lab.packages import Package
from tests.pyz import built_pyz, default_cache

LOWER = "docker.io/library/opaque-{}:1"
Members = Sequence[tuple[str, str]]  # name, and "dir", "link:TARGET" or the content


def layer(members: Members) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, what in members:
            entry = tarfile.TarInfo(name)
            entry.mode = 0o755
            if what == "dir":
                entry.type = tarfile.DIRTYPE
            elif what.startswith("link:"):
                entry.type, entry.linkname = tarfile.SYMTYPE, what.partition(":")[2]
            else:
                entry.size = len(what)
            tar.addfile(entry, io.BytesIO(what.encode()) if entry.isreg() else None)
    return buffer.getvalue()


class LayeredImage:
    """An OCI archive of several layers, in the form that the bundle's definition takes."""

    def __init__(self, reference: str, layers: Sequence[bytes]) -> None:
        self.reference = reference
        self.layers = layers

    def oci_archive(self) -> bytes:
        packed = [gzip.compress(item, mtime=0) for item in self.layers]
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {},
                "rootfs": {"type": "layers", "diff_ids": [_digest(item) for item in self.layers]},
            }
        ).encode()
        layer_type = "application/vnd.oci.image.layer.v1.tar+gzip"
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
                "layers": [_descriptor(layer_type, item) for item in packed],
            }
        ).encode()
        top = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
        top["annotations"] = {"io.containerd.image.name": self.reference, "org.opencontainers.image.ref.name": "1"}
        files = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}'}
        files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [top]}).encode()
        files |= {f"blobs/sha256/{hashlib.sha256(item).hexdigest()}": item for item in (*packed, config, manifest)}
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for name, content in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
        return buffer.getvalue()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _descriptor(media_type: str, data: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(data), "size": len(data)}


@pytest.fixture
def images(demo_image: Image) -> list[LayeredImage]:
    lower = layer([("d", "dir"), ("d/a", "old"), ("d/hidden", "old"), ("kept", "old")])
    upper = [("d", "dir"), ("d/.wh..wh..opq", ""), ("d/a", "link:b"), ("d/b", "new")]
    return [
        LayeredImage(LOWER.format("first"), [lower, layer(upper)]),
        LayeredImage(LOWER.format("last"), [lower, layer([upper[0], *upper[2:], upper[1]])]),
    ]


def test_an_opaque_directory_hides_what_is_below_and_nothing_beside_it_in_either_order(
    machine: NspawnMachine, debian_packages: dict[str, Package], images: list[LayeredImage], tmp_path: Path
) -> None:
    pyz = built_pyz(default_cache())
    publisher = demo.make_publisher(pyz, tmp_path)
    bundle = demo.build_bundle(publisher, tmp_path, debian_packages, images)  # type: ignore[arg-type]
    node = bring(machine, pyz, publisher.public, bundle)
    node.stratum("up")
    seen = []
    for image in images:
        machine.run(["mkdir", "-p", "/mnt/image"])
        node.ctr("images", "mount", image.reference, "/mnt/image")
        seen.append(machine.sh("cd /mnt/image && find . | sort && readlink d/a && cat d/a kept").stdout)
        node.ctr("images", "unmount", "--rm", "/mnt/image")
    assert seen[0] == "\n".join([".", "./d", "./d/a", "./d/b", "./kept", "b", "newold"])
    assert seen[1] == seen[0]
