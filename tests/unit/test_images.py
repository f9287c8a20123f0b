"""Container images: kept by digest, complete or not there, and handed out as a layout that containerd imports."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import pytest

from stratum.bundle.images import IMAGES_DIRECTORY, Image, ImageStore, list_images, write_image_tar
from stratum.bundle.oci import (
    CONTAINERD_NAME,
    DOCKER_INDEX_TYPE,
    DOCKER_MANIFEST_TYPE,
    INDEX_TYPE,
    LAYER_GZIP,
    MANIFEST_TYPE,
    REF_NAME,
    Descriptor,
    Index,
    canonical_json,
    digest_of,
)
from stratum.bundle.source import BundleSource, Wanted, open_bundle
from stratum.errors import BundleError, DigestMismatchError, StratumError
from stratum.system import Host, HostPath, PathLike
from tests.bundles import AMD64, ARM64, IMAGE_CONFIG, Bundle, Publisher, flipped, gzipped

DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


class Layout:
    """A layout with images only, put together piece by piece."""

    def __init__(self) -> None:
        self.bundle = Bundle()
        self.tops: list[dict[str, Any]] = []

    def blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        self.bundle.add(data)
        return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}

    def manifest(self, layers: Sequence[bytes], *, docker: bool = False, tag: str = "") -> dict[str, Any]:
        media_type = DOCKER_MANIFEST_TYPE if docker else MANIFEST_TYPE
        config = canonical_json({"architecture": "amd64", "os": "linux", "tag": tag})
        document = {
            "schemaVersion": 2,
            "mediaType": media_type,
            "config": _descriptor(config, "application/vnd.docker.container.image.v1+json" if docker else IMAGE_CONFIG),
            "layers": [_descriptor(data, DOCKER_LAYER if docker else LAYER_GZIP) for data in layers],
        }
        found = self.blob(canonical_json(document), media_type)
        self.bundle.add(config)
        for data in layers:
            self.bundle.add(data)
        return found

    def index(self, entries: Sequence[dict[str, Any]], *, docker: bool = False) -> dict[str, Any]:
        media_type = DOCKER_INDEX_TYPE if docker else INDEX_TYPE
        document = {"schemaVersion": 2, "mediaType": media_type, "manifests": list(entries)}
        return self.blob(canonical_json(document), media_type)

    def name(self, descriptor: dict[str, Any], name: Optional[str], key: str = CONTAINERD_NAME) -> None:
        annotations = {} if name is None else {key: name}
        self.tops.append({**descriptor, "annotations": annotations, "platform": AMD64.to_json()})

    def open(self, form: str, tmp_path: Path) -> tuple[BundleSource, list[Descriptor]]:
        self.bundle.index = canonical_json({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": self.tops})
        # As a publisher orders them: what names comes before what is named.
        rank = {item["digest"]: 0 for item in self.tops}
        blobs = sorted(
            self.bundle.blobs,
            key=lambda digest: (
                rank.get(digest, 1),
                b'"manifests"' not in self.bundle.blobs[digest],
                b'"layers"' not in self.bundle.blobs[digest],
            ),
        )
        self.bundle.blobs = {digest: self.bundle.blobs[digest] for digest in blobs}
        if form == "pipe":
            source = open_bundle("-", stdin=io.BytesIO(self.bundle.tar()))
        else:
            source = open_bundle(str(self.bundle.write_tar(tmp_path / "images.tar")))
        return source, list(Index.from_json(source.index_bytes).manifests)


def _descriptor(data: bytes, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


def layer(text: str) -> bytes:
    return gzipped(text.encode() * 100)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    root = tmp_path / "root"
    root.mkdir()
    return Host(str(root))


def stored(host: Host) -> dict[str, bytes]:
    top = Path(host.root + str(IMAGES_DIRECTORY / "blobs/sha256"))
    return {path.name: path.read_bytes() for path in top.iterdir()} if top.exists() else {}


def exported(host: Host, image: Image) -> dict[str, bytes]:
    out = io.BytesIO()
    write_image_tar(host, image, out)
    out.seek(0)
    with tarfile.open(fileobj=out) as archive:
        found = {}
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found[member.name] = file.read()
        return found


def demo() -> Layout:
    layout = Layout()
    layout.name(layout.manifest([layer("one"), layer("two")]), "example.test/demo:1")
    return layout


# -- storing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["tar", "pipe"])
def test_blobs_are_kept_under_their_digests_for_root_only(form: str, host: Host, tmp_path: Path) -> None:
    layout = demo()
    source, tops = layout.open(form, tmp_path)
    old = os.umask(0)
    try:
        (image,) = ImageStore(host).store(source, tops)
    finally:
        os.umask(old)
    assert image.name == "example.test/demo:1"
    assert stored(host) == {digest[7:]: data for digest, data in layout.bundle.blobs.items()}
    assert image.size == sum(len(data) for data in layout.bundle.blobs.values())
    assert host.lstat(ImageStore(host).path(image.manifest)).st_mode & 0o777 == 0o600
    assert host.lstat(IMAGES_DIRECTORY).st_mode & 0o777 == 0o700
    assert host.lstat(IMAGES_DIRECTORY.parent).st_mode & 0o777 == 0o755


def test_what_is_stored_is_complete_and_lists_the_same(host: Host, tmp_path: Path) -> None:
    source, tops = demo().open("tar", tmp_path)
    store = ImageStore(host)
    assert not any(store.complete(top) for top in tops)
    images = store.store(source, tops)
    assert all(ImageStore(host).complete(top) for top in tops)
    assert ImageStore(host).images(tops) == images == list_images(source, tops, AMD64)


def test_what_is_here_already_is_not_written_again(host: Host, tmp_path: Path) -> None:
    source, tops = demo().open("tar", tmp_path)
    (image,) = ImageStore(host).store(source, tops)
    before = {item.digest: host.lstat(ImageStore(host).path(item)).st_ino for item in image.blobs[1:]}
    seen: list[int] = []
    ImageStore(host).store(source, tops, progress=seen.append)
    assert {item.digest: host.lstat(ImageStore(host).path(item)).st_ino for item in image.blobs[1:]} == before
    assert sum(seen) == image.manifest.size


def test_a_damaged_blob_is_noticed_and_written_again(host: Host, tmp_path: Path) -> None:
    source, tops = demo().open("tar", tmp_path)
    (image,) = ImageStore(host).store(source, tops)
    for item in image.blobs:
        path = Path(host.real(ImageStore(host).path(item)))
        good = path.read_bytes()
        for bad in (flipped(good, 77), good[:-1], b""):
            path.write_bytes(bad)
            assert not ImageStore(host).complete(tops[0])
            ImageStore(host).store(source, tops)
            assert path.read_bytes() == good


@pytest.mark.parametrize("form", ["tar", "pipe"])
def test_images_may_share_blobs(form: str, host: Host, tmp_path: Path) -> None:
    layout = Layout()
    shared = layer("shared")
    layout.name(layout.manifest([shared, layer("a")], tag="a"), "example.test/a:1")
    layout.name(layout.manifest([shared, shared, layer("b")], tag="b"), "example.test/b:1")
    layout.name(layout.manifest([shared, layer("a")], tag="a"), "example.test/alias:1")
    source, tops = layout.open(form, tmp_path)
    images = ImageStore(host).store(source, tops)
    assert [item.name for item in images] == ["example.test/a:1", "example.test/b:1", "example.test/alias:1"]
    assert images[0].blobs == images[2].blobs
    for image in images:
        assert f"blobs/{digest_of(shared).replace(':', '/')}" in exported(host, image)


@pytest.mark.parametrize("form", ["tar", "pipe"])
def test_a_wrong_blob_leaves_the_store_as_it_was(form: str, host: Host, tmp_path: Path) -> None:
    for digest in demo().bundle.blobs:
        layout = demo()
        layout.bundle.spoil(digest, 50)
        source, tops = layout.open(form, tmp_path)
        with pytest.raises(DigestMismatchError):
            ImageStore(host).store(source, tops)
        assert stored(host) == {}


class FullDisk(Host):
    def open_new(self, path: PathLike, mode: int) -> Any:
        super().open_new(path, mode).close()
        return open("/dev/full", "wb")


def test_a_full_disk_leaves_the_store_as_it_was(host: Host, tmp_path: Path) -> None:
    source, tops = demo().open("tar", tmp_path)
    with pytest.raises(StratumError, match="disk-full"):
        ImageStore(FullDisk(host.root)).store(source, tops)
    assert stored(host) == {}


def test_what_a_killed_run_left_is_removed(host: Host, tmp_path: Path) -> None:
    source, tops = demo().open("tar", tmp_path)
    store = ImageStore(host)
    host.makedirs(IMAGES_DIRECTORY / "blobs/sha256")
    with host.open_new(host.temporary_name(store.path(tops[0])), 0o600) as file:
        file.write(b"half")
    store.store(source, tops)
    assert not [name for name in stored(host) if name.startswith(".")]


def test_an_importer_that_is_not_published_leaves_nothing(host: Host, tmp_path: Path) -> None:
    source, tops = demo().open("tar", tmp_path)
    wanted = Wanted()
    with ImageStore(host).begin(tops, wanted) as importer:
        for descriptor, blob in source.stream_blobs(wanted):
            importer.take(descriptor, blob)
        assert len(stored(host)) == 4
    assert stored(host) == {}


def test_nothing_has_its_name_before_everything_is_synced(host: Host, tmp_path: Path) -> None:
    events: list[str] = []

    class Watched(Host):
        def rename(self, source: PathLike, target: PathLike) -> None:
            events.append("rename")
            super().rename(source, target)

        def syncfs(self, path: PathLike) -> None:
            events.append("sync")

        def fsync_dir(self, path: PathLike) -> None:
            events.append("sync directory")

    source, tops = demo().open("tar", tmp_path)
    ImageStore(Watched(host.root)).store(source, tops)
    moves = [item for item in events if item != "sync directory"]
    assert moves == ["sync"] + ["rename"] * 4
    assert events[-1] == "sync directory"


# -- indexes and names ----------------------------------------------------------------------------------


@pytest.mark.parametrize("docker", [False, True], ids=["oci", "docker"])
@pytest.mark.parametrize("form", ["tar", "pipe"])
def test_an_index_leads_to_the_manifest_of_the_platform(docker: bool, form: str, host: Host, tmp_path: Path) -> None:
    layout = Layout()
    ours = layout.manifest([layer("amd64")], docker=docker)
    absent = _descriptor(b"not in the bundle", MANIFEST_TYPE)
    entries = [
        {**absent, "platform": ARM64.to_json()},
        {**absent, "platform": {"os": "unknown", "architecture": "unknown"}},
        {**ours, "platform": {**AMD64.to_json(), "variant": "v2"}},
    ]
    layout.name(layout.index(entries, docker=docker), "example.test/multi:1")
    source, tops = layout.open(form, tmp_path)
    (image,) = ImageStore(host, AMD64).store(source, tops)
    assert image.manifest.digest == ours["digest"]
    assert len(image.blobs) == 3
    found = json.loads(exported(host, image)["index.json"])["manifests"]
    assert [item["digest"] for item in found] == [ours["digest"]]


def test_an_index_without_our_platform_is_an_error(host: Host, tmp_path: Path) -> None:
    layout = Layout()
    layout.name(layout.index([{**layout.manifest([]), "platform": ARM64.to_json()}]), "example.test/arm:1")
    source, tops = layout.open("tar", tmp_path)
    with pytest.raises(BundleError, match="nothing for linux/amd64"):
        ImageStore(host, AMD64).store(source, tops)
    assert stored(host) == {}


def test_indexes_do_not_nest_for_ever(host: Host, tmp_path: Path) -> None:
    layout = Layout()
    here = layout.manifest([])
    for _ in range(5):
        here = layout.index([{**here, "platform": AMD64.to_json()}])
    layout.name(here, "example.test/deep:1")
    source, tops = layout.open("tar", tmp_path)
    with pytest.raises(BundleError, match="more than 4 deep"):
        list_images(source, tops, AMD64)


def test_what_is_no_image_is_an_error(host: Host, tmp_path: Path) -> None:
    layout = Layout()
    layout.name(layout.blob(b"{}", "text/plain"), "example.test/x:1")
    source, tops = layout.open("tar", tmp_path)
    with pytest.raises(BundleError, match="is no container image"):
        ImageStore(host).store(source, tops)
    assert stored(host) == {}


@pytest.mark.parametrize(("key", "name"), [(CONTAINERD_NAME, None), (REF_NAME, "latest")])
def test_an_image_without_a_name_is_called_by_its_digest(
    key: str, name: Optional[str], host: Host, tmp_path: Path
) -> None:
    layout = Layout()
    manifest = layout.manifest([layer("x")])
    layout.name(manifest, name, key)
    source, tops = layout.open("tar", tmp_path)
    (image,) = ImageStore(host).store(source, tops)
    assert image.name == f"localhost/stratum@{manifest['digest']}"
    annotations = json.loads(exported(host, image)["index.json"])["manifests"][0]["annotations"]
    assert annotations[CONTAINERD_NAME] == image.name


@pytest.mark.parametrize("name", ["", " x", "example.test/a b:1", "x\ny", "-rm", "x" * 512, "café:1"])
def test_a_name_that_containerd_would_not_take_is_refused(name: str, host: Host, tmp_path: Path) -> None:
    layout = Layout()
    layout.name(layout.manifest([]), name)
    source, tops = layout.open("tar", tmp_path)
    with pytest.raises(BundleError, match="cannot name an image"):
        list_images(source, tops, AMD64)


def test_one_name_stands_for_one_image(host: Host, tmp_path: Path) -> None:
    layout = Layout()
    layout.name(layout.manifest([], tag="a"), "example.test/x:1")
    layout.name(layout.manifest([], tag="b"), "example.test/x:1")
    source, tops = layout.open("tar", tmp_path)
    with pytest.raises(BundleError, match=r"two images are called example\.test/x:1"):
        list_images(source, tops, AMD64)


# -- handing out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("docker", [False, True], ids=["oci", "docker"])
def test_the_archive_is_a_layout_of_one_image(docker: bool, host: Host, tmp_path: Path) -> None:
    layout = Layout()
    layout.name(layout.manifest([layer("x"), layer("y")], docker=docker), "example.test/demo:1")
    source, tops = layout.open("tar", tmp_path)
    (image,) = ImageStore(host).store(source, tops)
    found = exported(host, image)
    assert list(found)[:2] == ["oci-layout", "index.json"]
    index = json.loads(found.pop("index.json"))
    assert json.loads(found.pop("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
    assert index["manifests"] == [
        {
            **_descriptor(layout.bundle.blobs[tops[0].digest], DOCKER_MANIFEST_TYPE if docker else MANIFEST_TYPE),
            "annotations": {CONTAINERD_NAME: "example.test/demo:1", REF_NAME: "example.test/demo:1"},
        }
    ]
    assert found == {f"blobs/{digest.replace(':', '/')}": data for digest, data in layout.bundle.blobs.items()}


def test_our_own_reader_reads_the_archive(host: Host, tmp_path: Path) -> None:
    source, tops = demo().open("tar", tmp_path)
    (image,) = ImageStore(host).store(source, tops)
    out = io.BytesIO()
    write_image_tar(host, image, out)
    out.seek(0)
    with open_bundle("-", stdin=out) as again:
        images = ImageStore(host, AMD64, HostPath("/elsewhere")).store(
            again, Index.from_json(again.index_bytes).manifests
        )
        again.finish()
    assert [item.digest for item in images[0].blobs] == [item.digest for item in image.blobs]


def test_a_blob_that_was_changed_on_the_disk_is_not_handed_out(host: Host, tmp_path: Path) -> None:
    source, tops = demo().open("tar", tmp_path)
    (image,) = ImageStore(host).store(source, tops)
    path = Path(host.real(ImageStore(host).path(image.blobs[-1])))
    path.write_bytes(flipped(path.read_bytes(), 9))
    with pytest.raises(DigestMismatchError):
        write_image_tar(host, image, io.BytesIO())
    path.write_bytes(b"short")
    with pytest.raises(BundleError, match="has 5 bytes instead of"):
        write_image_tar(host, image, io.BytesIO())


def test_the_images_of_a_bundle_are_those_for_its_platform(tmp_path: Path) -> None:
    publisher = Publisher.demo()
    publisher.platforms = [AMD64, ARM64]
    with open_bundle(str(publisher.build().write_tar(tmp_path / "b.tar"))) as source:
        index = Index.from_json(source.index_bytes)
        ours = list_images(source, index.images_for(AMD64), AMD64)
        theirs = list_images(source, index.images_for(ARM64), ARM64)
    assert [item.name for item in ours] == [item.name for item in theirs] == ["example.test/demo:1"]
    assert ours[0].manifest != theirs[0].manifest
