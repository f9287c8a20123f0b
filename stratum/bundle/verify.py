"""From an opened bundle to a description that can be trusted.

The order holds, and nothing is parsed deeper before the step above it is good: the bytes of the index, its
signatures, the policy; then the index; the manifest for the platform, by its digest; the description, by its
digest; and that both fit together. ``insecure`` leaves out the signatures and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, Optional

from stratum.bundle.blobs import BundleSource, Wanted, read_whole
from stratum.bundle.compression import check_media_type
from stratum.bundle.document import malformed
from stratum.bundle.graph import children, is_index, is_manifest
from stratum.bundle.oci import (
    ARTIFACT_TYPE,
    COMPONENT_NAME,
    CONFIG_LIMIT,
    CONFIG_TYPE,
    MANIFEST_LIMIT,
    MANIFEST_TYPE,
    Component,
    Description,
    Descriptor,
    Index,
    Manifest,
    Platform,
)
from stratum.trust.minisign import PublicKey
from stratum.trust.policy import Verdict, verify_index

__all__ = ["Content", "VerifiedBundle", "check_all_digests", "open_verified", "verify_signatures"]


@dataclass(frozen=True)
class Content:
    """What a bundle has for one platform. ``layers`` are the descriptors of its components, by name."""

    manifest: Manifest
    description: Description
    layers: Mapping[str, Descriptor]

    def layer_of(self, component: Component) -> Descriptor:
        """The layer that holds ``component``."""
        return self.layers[component.name]


@dataclass(frozen=True)
class VerifiedBundle:
    """An index that is trusted (``verdict`` is None when nobody looked) and what it has for one platform."""

    source: BundleSource
    index: Index
    verdict: Optional[Verdict]
    platform: Platform
    content: Content

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest for the platform."""
        return self.content.manifest

    @property
    def description(self) -> Description:
        """What the bundle is, for the platform."""
        return self.content.description

    @property
    def images(self) -> list[Descriptor]:
        """The container images that ride along for the platform."""
        return self.index.images_for(self.platform)

    def layer_of(self, component: Component) -> Descriptor:
        """The layer that holds ``component``."""
        return self.content.layer_of(component)

    def content_for(self, platform: Platform) -> Content:
        """The same for another platform; not of a pipe, which has gone by. Raises :class:`BundleError`."""
        if platform == self.platform:
            return self.content
        return _read_content(self.source, self.index.bundle_for(platform), platform)


def verify_signatures(source: BundleSource, keys: Sequence[PublicKey]) -> Verdict:
    """The policy's verdict on the index of ``source``; raises :class:`NotTrustedError`."""
    return verify_index(source.index_bytes, source.signatures, keys)


def open_verified(
    source: BundleSource,
    keys: Sequence[PublicKey],
    *,
    platform: Optional[Platform] = None,
    insecure: bool = False,
) -> VerifiedBundle:
    """Verify ``source`` and read its description for ``platform`` (by default the first that the index names).

    Raises :class:`NotTrustedError` before anything is parsed, and :class:`BundleError` for what is malformed.
    Blobs are proved by their digests also when ``insecure``.
    """
    verdict = None if insecure else verify_signatures(source, keys)
    index = Index.from_json(source.index_bytes, f"{source.name}: index.json")
    if platform is None:
        platform = next((item.platform for item in index.bundles() if item.platform), Platform("linux", "amd64"))
    content = _read_content(source, index.bundle_for(platform), platform)
    return VerifiedBundle(source, index, verdict, platform, content)


def _read_content(source: BundleSource, descriptor: Descriptor, platform: Platform) -> Content:
    manifest = Manifest.from_json(
        source.read_blob(descriptor, MANIFEST_LIMIT), f"{source.name}: manifest for {platform}"
    )
    description = Description.from_json(
        source.read_blob(manifest.config, CONFIG_LIMIT), f"{source.name}: description for {platform}"
    )
    return Content(manifest, description, _check_content(source.name, descriptor, platform, manifest, description))


def _check_content(
    name: str, descriptor: Descriptor, platform: Platform, manifest: Manifest, description: Description
) -> dict[str, Descriptor]:
    where = f"{name}: manifest for {platform}"
    if descriptor.media_type != MANIFEST_TYPE or manifest.artifact_type != ARTIFACT_TYPE:
        raise malformed(where, f"is no image manifest with the artifact type {ARTIFACT_TYPE}")
    if manifest.config.media_type != CONFIG_TYPE:
        raise malformed(where, f"its config is no {CONFIG_TYPE}")
    if description.platform != platform:
        raise malformed(where, f"its description is for {description.platform}")
    by_digest = {item.digest: item for item in manifest.layers}
    if len(by_digest) != len(manifest.layers):
        raise malformed(where, "one layer stands twice")
    layers = {}
    for component in description.components:
        layer = by_digest.pop(component.layer, None)
        if layer is None:
            raise malformed(where, f"no layer of its own for component {component.name}")
        if layer.annotations.get(COMPONENT_NAME, component.name) != component.name:
            raise malformed(where, f"the layer of component {component.name} is marked as another's")
        check_media_type(layer.media_type, f"{name}: layer of {component.name}")
        layers[component.name] = layer
    if by_digest:
        raise malformed(where, f"layer {next(iter(by_digest))} belongs to no component")
    return layers


def check_all_digests(bundle: VerifiedBundle, advance: Optional[Callable[[int], None]] = None) -> int:
    """Read every blob that the index leads to, for all its platforms, and prove its digest; how many there are.

    Descriptions are compared with their manifests as :func:`open_verified` does. A pipe gives only what has not
    gone by yet. ``advance`` is told of each blob's bytes. Raises :class:`BundleError`.
    """
    source = bundle.source
    platforms = [item.platform for item in bundle.index.bundles() if item.platform]
    if source.random_access:
        for platform in platforms:
            bundle.content_for(platform)
    wanted = Wanted(item for item in bundle.index.manifests if not source.has_passed(item))
    if not source.random_access:
        for layer in bundle.manifest.layers:
            wanted.add(layer)
    count = 0
    for descriptor, blob in source.stream_blobs(wanted):
        if is_index(descriptor) or is_manifest(descriptor):
            for child in children(descriptor, read_whole(blob, MANIFEST_LIMIT), blob.where, platforms):
                wanted.add(child)
        blob.finish()
        count += 1
        if advance:
            advance(descriptor.size)
    source.finish()
    return count
