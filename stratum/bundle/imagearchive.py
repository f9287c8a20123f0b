"""Container image archives: OCI image layouts (tar or directory) and what ``docker save`` writes.

The image's config, and so its image ID, is kept byte for byte; of an OCI archive everything is. A docker archive
has no compressed layers: they are compressed here, which changes neither the config nor the diff IDs in it.

Every layer is unpacked once while building and compared with the diff ID of the config, so an image that would
fail on the host fails here: a wrong codec, a zstd window that decoders refuse, a damaged file.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Callable, Optional

from stratum.bundle.codec import HEAD
from stratum.bundle.compression import LayerReader, identify
from stratum.bundle.definition import ImageRule
from stratum.bundle.layer import compress_stream
from stratum.bundle.oci import (
    CONFIG_LIMIT,
    CONTAINERD_NAME,
    DOCKER_INDEX_TYPE,
    DOCKER_MANIFEST_TYPE,
    INDEX_LIMIT,
    INDEX_TYPE,
    LAYER_GZIP,
    LAYER_TAR,
    LAYER_ZSTD,
    MANIFEST_LIMIT,
    MANIFEST_TYPE,
    REF_NAME,
    Descriptor,
    Index,
    Manifest,
    Platform,
    canonical_json,
    parse_json,
)
from stratum.bundle.sources import Entry
from stratum.bundle.write import BlobStore, descriptor_of
from stratum.errors import BundleError, DigestMismatchError

__all__ = ["StoredImage", "store_image"]

_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
_LAYER_LIMIT = 64 << 30
_DEPTH = 3
_LAYERS_LIMIT = 512
_DOCKER_LAYERS = {
    "application/vnd.docker.image.rootfs.diff.tar": LAYER_TAR,
    "application/vnd.docker.image.rootfs.diff.tar.gzip": LAYER_GZIP,
    "application/vnd.docker.image.rootfs.diff.tar.zstd": LAYER_ZSTD,
}


@dataclass(frozen=True)
class StoredImage:
    """An image for one platform, in the store: its manifest's descriptor and its other blobs in order of use."""

    manifest: Descriptor
    blobs: tuple[Descriptor, ...]


@dataclass(frozen=True)
class _Archive:
    """What is needed to read one image archive and to complain about it."""

    entries: Mapping[str, Entry]
    rule: ImageRule
    platform: Platform
    where: str

    def error(self, why: str, hint: str = "export the image again") -> BundleError:
        return BundleError("image-archive", f"{self.where}: {why}", hint=hint)

    def open(self, name: str) -> tuple[BinaryIO, int]:
        """A file of the archive and its size; links in old docker archives lead to another layer."""
        for _ in range(4):
            entry = self.entries.get(posixpath.normpath(name))
            if entry is not None and entry.kind == "file" and entry.open is not None:
                return entry.open(), entry.size
            if entry is None or entry.kind != "symlink":
                break
            name = posixpath.join(posixpath.dirname(entry.path), entry.target)
        raise self.error(f"{name} is missing in the archive")

    def read(self, name: str, limit: int) -> bytes:
        file, size = self.open(name)
        with file:
            if size > limit:
                raise self.error(f"{name} has {size} bytes, the limit is {limit}")
            return file.read(limit + 1)

    def read_blob(self, descriptor: Descriptor, limit: int) -> bytes:
        data = self.read(f"blobs/sha256/{descriptor.hex}", limit)
        found = "sha256:" + hashlib.sha256(data).hexdigest()
        if found != descriptor.digest or len(data) != descriptor.size:
            raise DigestMismatchError(f"{self.where}: a blob", descriptor.digest, found, hint="export the image again")
        return data


def store_image(
    entries: Mapping[str, Entry],
    rule: ImageRule,
    platform: Platform,
    store: BlobStore,
    *,
    where: str,
    level: int,
    tick: Callable[[int], None],
) -> StoredImage:
    """Put the image of ``rule`` for ``platform`` into ``store``. ``entries`` are the archive's files by path.

    Raises :class:`BundleError` when the archive is malformed, does not hold the image, or not for that platform.
    """
    archive = _Archive(entries, rule, platform, where)
    if "index.json" in entries and "oci-layout" in entries:
        stored = _store_oci(archive, store, tick)
    elif "manifest.json" in entries:
        stored = _store_docker(archive, store, level, tick)
    else:
        raise _no_archive(archive)
    names = {REF_NAME: rule.name, CONTAINERD_NAME: rule.name}
    return replace(stored, manifest=replace(stored.manifest, platform=platform, annotations=names))


def _no_archive(archive: _Archive) -> BundleError:
    nested = sorted(name for name in archive.entries if name.endswith(("/index.json", "/manifest.json")))
    if nested:
        folder = posixpath.dirname(nested[0])
        return archive.error(
            f"the image is in the folder {folder}/ of the archive, not at its top",
            f"pack it without the folder: tar -C {folder} -cf IMAGE.tar .",
        )
    return archive.error("neither an OCI layout (oci-layout, index.json) nor a docker archive (manifest.json)")


# -- OCI --------------------------------------------------------------------------------------------


def _store_oci(archive: _Archive, store: BlobStore, tick: Callable[[int], None]) -> StoredImage:
    layout = parse_json(archive.read("oci-layout", 4096), f"{archive.where}: oci-layout")
    if layout.get("imageLayoutVersion") != "1.0.0":
        raise archive.error(f"layout version {layout.get('imageLayoutVersion')!r}, only 1.0.0 is known")
    index = Index.from_json(archive.read("index.json", INDEX_LIMIT), f"{archive.where}: index.json")
    descriptor = _for_platform(archive, _named(archive, index.manifests))
    data = archive.read_blob(descriptor, MANIFEST_LIMIT)
    manifest = Manifest.from_json(data, f"{archive.where}: manifest {descriptor.digest}")
    config = archive.read_blob(manifest.config, CONFIG_LIMIT)
    diff_ids = _diff_ids(archive, config)
    if len(diff_ids) != len(manifest.layers):
        raise archive.error(f"{len(manifest.layers)} layers, but {len(diff_ids)} diff IDs in its config")
    store.add(data)
    store.add(config)
    for layer, diff_id in zip(manifest.layers, diff_ids):
        _store_layer(archive, store, layer, diff_id, tick)
    return StoredImage(
        Descriptor(descriptor.media_type, descriptor.digest, descriptor.size), (manifest.config, *manifest.layers)
    )


def _is_attestation(descriptor: Descriptor) -> bool:
    # BuildKit puts provenance beside the images, for the platform "unknown".
    unknown = descriptor.platform is not None and descriptor.platform.os == "unknown"
    return unknown or "vnd.docker.reference.type" in descriptor.annotations


def _named(archive: _Archive, candidates: tuple[Descriptor, ...]) -> list[Descriptor]:
    """Those of ``candidates`` that are the wanted image; an archive of one image needs no name for it."""
    found = [item for item in candidates if not _is_attestation(item)]
    wanted = archive.rule.reference or archive.rule.name
    exact = [
        item for item in found if wanted in (item.annotations.get(CONTAINERD_NAME), item.annotations.get(REF_NAME))
    ]
    if exact:
        return exact
    names = {item.name or item.digest for item in found}
    if archive.rule.reference or len({item.name for item in found}) > 1 or not found:
        raise archive.error(
            f"no image called {wanted} (it holds {', '.join(sorted(names)) or 'none'})",
            f"name one of them with `reference` ({archive.rule.place})",
        )
    return found


def _for_platform(archive: _Archive, candidates: list[Descriptor]) -> Descriptor:
    found: dict[str, Descriptor] = {}
    seen: set[str] = set()
    for candidate in candidates:
        for descriptor, platform in _manifests(archive, candidate, _DEPTH):
            seen.add(str(platform))
            if platform == archive.platform:
                found[descriptor.digest] = descriptor
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise archive.error(f"{len(found)} different images for {archive.platform}", "name one with `reference`")
    raise archive.error(
        f"no image for {archive.platform}, only for {', '.join(sorted(seen)) or 'no platform'}",
        f"put {{arch}} into the path for an archive each, or limit the image with `platforms` ({archive.rule.place})",
    )


def _manifests(archive: _Archive, descriptor: Descriptor, depth: int) -> list[tuple[Descriptor, Platform]]:
    if descriptor.media_type in (MANIFEST_TYPE, DOCKER_MANIFEST_TYPE):
        return [(descriptor, descriptor.platform or _config_platform(archive, descriptor))]
    if descriptor.media_type not in (INDEX_TYPE, DOCKER_INDEX_TYPE):
        raise archive.error(f"{descriptor.digest}: media type {descriptor.media_type} is no image")
    if depth == 0:
        raise archive.error(f"more than {_DEPTH} indexes within each other")
    data = archive.read_blob(descriptor, INDEX_LIMIT)
    index = Index.from_json(data, f"{archive.where}: index {descriptor.digest}")
    found: list[tuple[Descriptor, Platform]] = []
    for item in index.manifests:
        # `ctr image export` of one platform leaves the others in the index, without their blobs.
        present = f"blobs/sha256/{item.hex}" in archive.entries
        if not _is_attestation(item) and (present or item.platform == archive.platform):
            found += _manifests(archive, item, depth - 1)
    return found


def _config_platform(archive: _Archive, descriptor: Descriptor) -> Platform:
    data = archive.read_blob(descriptor, MANIFEST_LIMIT)
    manifest = Manifest.from_json(data, f"{archive.where}: manifest {descriptor.digest}")
    return _platform_of(
        archive, parse_json(archive.read_blob(manifest.config, CONFIG_LIMIT), f"{archive.where}: config")
    )


def _platform_of(archive: _Archive, config: Mapping[str, Any]) -> Platform:
    system, architecture = config.get("os"), config.get("architecture")
    if not isinstance(system, str) or not isinstance(architecture, str):
        raise archive.error("the config says neither os nor architecture")
    return Platform(system, architecture)


def _diff_ids(archive: _Archive, config: bytes) -> list[str]:
    value = parse_json(config, f"{archive.where}: config")
    platform = _platform_of(archive, value)
    if platform != archive.platform:
        raise archive.error(f"the image is for {platform}, not for {archive.platform}")
    rootfs = value.get("rootfs")
    found = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found) or len(found) > _LAYERS_LIMIT:
        raise archive.error("the config has no list of diff IDs")
    return found


def _store_layer(
    archive: _Archive, store: BlobStore, layer: Descriptor, diff_id: str, tick: Callable[[int], None]
) -> None:
    file, size = archive.open(f"blobs/sha256/{layer.hex}")
    with file, store.writer() as writer:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            writer.write(chunk)
            tick(len(chunk))
        digest = writer.finish()
    if digest != layer.digest or size != layer.size:
        raise DigestMismatchError(f"{archive.where}: a layer", layer.digest, digest, hint="export the image again")
    with store.open(digest) as stored:
        _check_diff_id(archive, stored, layer, diff_id)


def _check_diff_id(archive: _Archive, file: BinaryIO, layer: Descriptor, diff_id: str) -> None:
    where = f"{archive.where}: layer {layer.digest}"
    reader = LayerReader(file, _DOCKER_LAYERS.get(layer.media_type, layer.media_type), _LAYER_LIMIT, where)
    digest = hashlib.sha256()
    for chunk in iter(lambda: reader.read(1 << 20), b""):
        digest.update(chunk)
    found = "sha256:" + digest.hexdigest()
    if found != diff_id:
        raise DigestMismatchError(f"{where}, unpacked", diff_id, found, hint="export the image again")


# -- docker save ------------------------------------------------------------------------------------


def _store_docker(archive: _Archive, store: BlobStore, level: int, tick: Callable[[int], None]) -> StoredImage:
    image = _docker_image(archive)
    config = archive.read(image["Config"], CONFIG_LIMIT)
    diff_ids = _diff_ids(archive, config)
    if len(diff_ids) != len(image["Layers"]):
        raise archive.error(f"{len(image['Layers'])} layers, but {len(diff_ids)} diff IDs in its config")
    layers = tuple(
        _convert_layer(archive, store, name, diff_id, level, tick) for name, diff_id in zip(image["Layers"], diff_ids)
    )
    store.add(config)
    manifest = Manifest(descriptor_of(config, _CONFIG_TYPE), layers)
    data = canonical_json(manifest.to_json())
    store.add(data)
    return StoredImage(descriptor_of(data, MANIFEST_TYPE), (manifest.config, *layers))


def _docker_image(archive: _Archive) -> Mapping[str, Any]:
    try:
        images = json.loads(archive.read("manifest.json", MANIFEST_LIMIT))
        sound = [
            item
            for item in images
            if isinstance(item["Config"], str) and all(isinstance(name, str) for name in item["Layers"])
        ]
        tags = {id(item): list(item.get("RepoTags") or []) for item in sound}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise archive.error("manifest.json is not what docker save writes") from None
    wanted = archive.rule.reference or archive.rule.name
    # Docker leaves out its own registry and `library/`.
    short = wanted[len("docker.io/") :] if wanted.startswith("docker.io/") else wanted
    short = short[len("library/") :] if short.startswith("library/") else short
    found = [item for item in sound if wanted in tags[id(item)] or short in tags[id(item)]]
    if not found and not archive.rule.reference and len(sound) == 1:
        found = sound
    if len(found) != 1:
        names = sorted(str(tag) for item in sound for tag in tags[id(item)])
        raise archive.error(
            f"{len(found) or 'no'} image(s) called {wanted} (it holds {', '.join(names) or 'none with a name'})",
            f"name one of them with `reference` ({archive.rule.place})",
        )
    return dict(found[0])


def _convert_layer(
    archive: _Archive, store: BlobStore, name: str, diff_id: str, level: int, tick: Callable[[int], None]
) -> Descriptor:
    file, size = archive.open(name)
    with file:
        head = file.read(HEAD)
    codec: Optional[str] = identify(head)
    file, _ = archive.open(name)
    with file, store.writer() as writer:
        if codec in ("gzip", "zstd"):
            for chunk in iter(lambda: file.read(1 << 20), b""):
                writer.write(chunk)
                tick(len(chunk))
            media_type = LAYER_GZIP if codec == "gzip" else LAYER_ZSTD
        else:
            compress_stream(file, writer.write, size=size, level=level, tick=tick)
            media_type = LAYER_ZSTD
        digest = writer.finish()
        layer = Descriptor(media_type, digest, writer.size)
    with store.open(digest) as stored:
        _check_diff_id(archive, stored, layer, diff_id)
    return layer
