"""Placing a bundle's content on a host, in one pass over the bundle: components unpacked, image blobs kept.

Each component goes to ``/opt/stratum/components/sha256-<layer>``, once; what is there already and still is as it
was written is not read again. Everything is staged, synced once, recorded, then renamed into place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Callable, Optional

from stratum.bundle.blobs import Wanted
from stratum.bundle.images import ImageStore, list_images
from stratum.bundle.oci import Component, Descriptor
from stratum.bundle.unpack import required_space, unpack_layer
from stratum.bundle.verify import VerifiedBundle
from stratum.receipt import Condition, Entry, Receipt
from stratum.staging import STAGING, new_staging, reap_staging
from stratum.system import Host, HostPath

__all__ = ["COMPONENTS", "Placement", "component_dir"]

COMPONENTS = HostPath("/opt/stratum/components")


def component_dir(layer: str) -> HostPath:
    """Where the component with the layer digest ``layer`` is unpacked."""
    return COMPONENTS / layer.replace(":", "-")


def component_entries(component: Component) -> list[Entry]:
    """The receipt's entries for an unpacked component, parents first."""
    top = component_dir(component.layer)
    directories = {top}
    leaves = []
    for item in component.files:
        path = top / item.path
        directories.update(top / parent for parent in HostPath(item.path).parents)
        if item.type == "directory":
            directories.add(path)
        elif item.type == "symlink":
            leaves.append(Entry(path, "link", (item.target or "",)))
        else:
            leaves.append(Entry(path, "file", (item.digest or "",), item.mode))
    return [*(Entry(path, "directory") for path in sorted(directories)), *leaves]


class Placement:
    """What of a verified bundle is missing on a host, and putting it there."""

    def __init__(self, host: Host, receipt: Receipt, bundle: VerifiedBundle) -> None:
        self.host = host
        self.receipt = receipt
        self.bundle = bundle
        self.store = ImageStore(host, bundle.platform)

    def missing_components(self) -> list[Component]:
        """The components that are not unpacked, or were changed since."""
        return [item for item in self.bundle.description.components if not self._intact(item)]

    def _intact(self, component: Component) -> bool:
        entries = component_entries(component)
        recorded = all(self.receipt.get(entry.path) for entry in entries)
        # The receipt may know older contents too; only what this bundle says counts here.
        return recorded and all(self.receipt.condition(entry) == Condition.OURS for entry in entries)

    def missing_images(self) -> list[Descriptor]:
        """The images of which a blob is missing in the store."""
        return [item for item in self.bundle.images if not self.store.complete(item)]

    def image_size(self) -> int:
        """The bytes of the missing images' blobs; 0 for a pipe, which cannot be asked beforehand."""
        missing = self.missing_images()
        if not missing or not self.bundle.source.random_access:
            return 0
        return sum(item.size for item in list_images(self.bundle.source, missing, self.bundle.platform))

    def size(self) -> int:
        """The bytes of the bundle that will be read for what is missing, for a progress meter."""
        return sum(self.bundle.layer_of(item).size for item in self.missing_components()) + self.image_size()

    def component_space(self) -> tuple[int, int]:
        """The bytes and inodes that the missing components take."""
        return required_space(self.missing_components())

    def run(self, advance: Optional[Callable[[int], None]] = None) -> None:
        """Read what is missing out of the bundle, verify it and put it in its place.

        Raises BundleError, DigestMismatchError and StratumError; no component has reached its place then.
        """
        missing = {self.bundle.layer_of(item).digest: item for item in self.missing_components()}
        images = self.missing_images()
        staging = new_staging(self.host, self.receipt)
        try:
            self._fill(staging, missing, images, advance)
        finally:
            reap_staging(self.host)

    def _fill(
        self,
        staging: HostPath,
        missing: dict[str, Component],
        images: Sequence[Descriptor],
        advance: Optional[Callable[[int], None]],
    ) -> None:
        wanted = Wanted(self.bundle.layer_of(item) for item in missing.values())
        with self.store.begin(images, wanted) as importer:
            for descriptor, blob in self.bundle.source.stream_blobs(wanted):
                component = missing.get(descriptor.digest)
                if component is None:
                    importer.take(descriptor, blob, advance)
                    continue
                target = staging / component_dir(component.layer).name
                self.host.mkdir(target, 0o755)
                unpack_layer(self.host, blob, descriptor.media_type, component, target, progress=advance)
            self.bundle.source.finish()
            self.host.syncfs(staging)
            self._publish(staging, list(missing.values()))
            importer.publish()

    def _publish(self, staging: PurePosixPath, components: Sequence[Component]) -> None:
        if not components:
            return
        self.receipt.record(
            Entry(COMPONENTS, "directory"), *(entry for item in components for entry in component_entries(item))
        )
        self.host.makedirs(COMPONENTS)
        for component in components:
            target = component_dir(component.layer)
            if self.host.lexists(target):
                self.host.rename(target, STAGING / f"{staging.name}.{target.name}")
            self.host.rename(staging / target.name, target)
        self.host.fsync_dir(COMPONENTS)
