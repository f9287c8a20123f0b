"""How blobs name blobs: indexes and manifests, OCI's and Docker's, and what they lead to."""

from __future__ import annotations

from collections.abc import Collection
from typing import Optional

from stratum.bundle.document import malformed
from stratum.bundle.oci import (
    DOCKER_INDEX_TYPE,
    DOCKER_MANIFEST_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    Index,
    Manifest,
    Platform,
)

__all__ = ["children", "is_index", "is_manifest"]


def is_index(descriptor: Descriptor) -> bool:
    """Whether ``descriptor`` is an index or Docker's manifest list."""
    return descriptor.media_type in (INDEX_TYPE, DOCKER_INDEX_TYPE)


def is_manifest(descriptor: Descriptor) -> bool:
    """Whether ``descriptor`` is an image manifest, OCI's or Docker's version 2, schema 2."""
    return descriptor.media_type in (MANIFEST_TYPE, DOCKER_MANIFEST_TYPE)


def children(
    descriptor: Descriptor, data: bytes, where: str, platforms: Optional[Collection[Platform]] = None
) -> list[Descriptor]:
    """What the index or manifest ``data`` names; of an index only what is for ``platforms``, when given.

    Entries of an index without a platform are for all. Raises :class:`BundleError`.
    """
    if is_manifest(descriptor):
        manifest = Manifest.from_json(data, where)
        return [manifest.config, *manifest.layers]
    if not is_index(descriptor):
        raise malformed(where, f"media type {descriptor.media_type!a} is neither an index nor a manifest")
    found = Index.from_json(data, where).manifests
    return [item for item in found if platforms is None or item.platform is None or item.platform in platforms]
