"""Container images of a bundle: kept on the host by digest, handed to containerd as an OCI layout.

The blobs lie under ``images/blobs/sha256/<hex>``. A blob is hashed while it is written, synced, and renamed to
its name only then, so a name never stands for other bytes, whenever the power goes. ``write_image_tar`` makes
the archive that ``ctr images import -`` takes (containerd, docs/images: OCI layout, image name in the
annotation ``io.containerd.image.name``), hashing each blob again as it goes out.
"""

from __future__ import annotations

import contextlib
import re
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO, Callable, Optional

from stratum.bundle.blobs import Blob, BundleSource, Wanted, read_whole
from stratum.bundle.document import canonical_json, malformed
from stratum.bundle.graph import children, is_index, is_manifest
from stratum.bundle.oci import (
    CONTAINERD_NAME,
    MANIFEST_LIMIT,
    REF_NAME,
    Descriptor,
    Index,
    Platform,
)
from stratum.bundle.tarstream import BLOCK, shown
from stratum.bundle.unpack import disk_failure
from stratum.errors import BundleError
from stratum.system import Host, HostPath

__all__ = ["IMAGES_DIRECTORY", "Image", "ImageStore", "list_images", "write_image_tar"]

IMAGES_DIRECTORY = HostPath("/var/lib/stratum/images")
_DEPTH_MOST = 4  # an index in an index in an index: nobody nests deeper
# What containerd takes as a name: the characters of a reference, which are ASCII and no space.
_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,510}\Z")
_UNNAMED = "localhost/stratum"


@dataclass(frozen=True)
class Image:
    """One container image for one platform. ``blobs`` are its manifest, config and layers, in this order."""

    name: str
    blobs: tuple[Descriptor, ...]

    @property
    def manifest(self) -> Descriptor:
        """The manifest's descriptor."""
        return self.blobs[0]

    @property
    def size(self) -> int:
        """The bytes of all its blobs."""
        return sum(item.size for item in self.blobs)


def _image_name(top: Descriptor, manifest: Descriptor) -> str:
    """The reference that the signed index gives the image; one made of the digest when it gives none.

    ``ref.name`` may be a mere tag (image-spec, annotations.md): that names no image.
    """
    name = top.annotations.get(CONTAINERD_NAME)
    if name is None:
        name = top.annotations.get(REF_NAME, "")
        if "/" not in name and ":" not in name:
            return f"{_UNNAMED}@{manifest.digest}"
    if not _REFERENCE.match(name):
        raise malformed("index.json", f"{shown(name)} cannot name an image")
    return name


class _Walk:
    """What was read of the graph from the index to the images' blobs."""

    def __init__(self, tops: Iterable[Descriptor], platform: Platform, where: str) -> None:
        self.tops = list(tops)
        self.platform = platform
        self.where = where
        self.children: dict[str, list[Descriptor]] = {}

    def visit(self, descriptor: Descriptor, data: bytes) -> list[Descriptor]:
        """Note what an index or manifest names; that."""
        where = f"blob {descriptor.digest} of {self.where}"
        found = children(descriptor, data, where, [self.platform])
        if is_index(descriptor):
            # The first match is the one that containerd would take; attestations have no platform of ours.
            found = found[:1]
            if not found:
                raise malformed(where, f"an image index with nothing for {self.platform}")
        self.children[descriptor.digest] = found
        return found

    def images(self) -> list[Image]:
        """The images, once everything was visited; raises :class:`BundleError` for two of one name."""
        found: dict[str, Image] = {}
        for top in self.tops:
            manifest = self._manifest(top)
            image = Image(_image_name(top, manifest), (manifest, *self.children[manifest.digest]))
            if found.setdefault(image.name, image).manifest.digest != manifest.digest:
                raise malformed(self.where, f"two images are called {image.name}")
        return list(found.values())

    def _manifest(self, top: Descriptor) -> Descriptor:
        here = top
        for _ in range(_DEPTH_MOST):
            if is_manifest(here):
                return here
            if not is_index(here):
                break
            here = self.children[here.digest][0]
        raise malformed(self.where, f"{top.digest} ({shown(top.media_type)}) leads to no image manifest")


def list_images(source: BundleSource, images: Iterable[Descriptor], platform: Platform) -> list[Image]:
    """The images and their blobs, from their manifests alone; not of a pipe. Raises :class:`BundleError`."""
    walk = _Walk(images, platform, source.name)
    wanted = Wanted(walk.tops)
    for descriptor, blob in source.stream_blobs(wanted):
        for child in walk.visit(descriptor, read_whole(blob, MANIFEST_LIMIT)):
            if is_index(child) or (is_index(descriptor) and is_manifest(child)):
                wanted.add(child)
    return walk.images()


class ImageStore:
    """The directory of image blobs on the host. Only for the holder of the lock."""

    def __init__(self, host: Host, directory: HostPath = IMAGES_DIRECTORY) -> None:
        self._host = host
        self._blobs = directory / "blobs/sha256"

    def path(self, descriptor: Descriptor) -> HostPath:
        """Where a blob lies, or would."""
        return self._blobs / descriptor.hex

    def has(self, descriptor: Descriptor) -> bool:
        """Whether the blob is there, whole and unchanged: it is read and hashed."""
        try:
            with contextlib.closing(self.open(descriptor)) as blob:
                blob.finish()
        except (OSError, BundleError):
            return False
        return True

    def open(self, descriptor: Descriptor) -> Blob:
        """Read a blob, hashed on the way. Raises OSError and :class:`BundleError`."""
        path = self.path(descriptor)
        file = self._host.open(path)
        if self._host.lstat(path).st_size != descriptor.size:
            file.close()
            raise malformed(
                str(path), f"has not the {descriptor.size} bytes of its blob", "run: stratum up --bundle FILE"
            )
        return Blob(file.read, descriptor, str(path), file.close)

    def store(
        self,
        source: BundleSource,
        images: Iterable[Descriptor],
        platform: Platform,
        *,
        progress: Optional[Callable[[int], None]] = None,
    ) -> list[Image]:
        """Bring the blobs of ``images`` for ``platform`` here from ``source``, and say what the images are.

        What is here already, and right, is not written again. ``progress`` is told of bytes. Raises
        :class:`BundleError`, and :class:`StratumError` when the disk fails; blobs that were complete stay.
        """
        try:
            return self._store(source, _Walk(images, platform, source.name), progress)
        except OSError as error:
            raise disk_failure(self._blobs, error) from error

    def _store(self, source: BundleSource, walk: _Walk, progress: Optional[Callable[[int], None]]) -> list[Image]:
        self._host.makedirs(self._blobs, 0o700)
        self._remove_leftovers()
        wanted = Wanted(walk.tops)
        for descriptor, blob in source.stream_blobs(wanted):
            if is_index(descriptor) or is_manifest(descriptor):
                data = read_whole(blob, MANIFEST_LIMIT)
                self._add(descriptor, [data], progress)
                for child in walk.visit(descriptor, data):
                    if not self._complete(child):
                        wanted.add(child)
            else:
                self._add(descriptor, blob.chunks(), progress)
        self._host.fsync_dir(self._blobs)
        return walk.images()

    def _complete(self, descriptor: Descriptor) -> bool:
        parsed = is_index(descriptor) or is_manifest(descriptor)
        return not parsed and self._host.lexists(self.path(descriptor)) and self.has(descriptor)

    def _remove_leftovers(self) -> None:
        for name in self._host.listdir(self._blobs):
            if name.startswith(".") and name.endswith(".tmp"):
                self._host.unlink(self._blobs / name)

    def _add(self, descriptor: Descriptor, chunks: Iterable[bytes], progress: Optional[Callable[[int], None]]) -> None:
        temporary = self._host.temporary_name(self.path(descriptor))
        try:
            with self._host.open_new(temporary, 0o600) as file:
                for chunk in chunks:
                    file.write(chunk)
                    if progress:
                        progress(len(chunk))
                self._host.fsync(file)
            self._host.rename(temporary, self.path(descriptor))
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                self._host.unlink(temporary)
            raise


def write_image_tar(host: Host, image: Image, out: BinaryIO, directory: HostPath = IMAGES_DIRECTORY) -> None:
    """Write ``image`` to ``out`` as a tar of an OCI layout, for ``ctr images import -``.

    The layout names the image's manifest for this platform, not an index that the image may have come in: the
    other platforms' blobs are not here. Raises OSError and :class:`BundleError`.
    """
    store = ImageStore(host, directory)
    annotations = {CONTAINERD_NAME: image.name, REF_NAME: image.name}
    manifest = image.manifest
    index = Index((Descriptor(manifest.media_type, manifest.digest, manifest.size, annotations=annotations),))
    _write_member(out, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
    _write_member(out, "index.json", canonical_json(index.to_json()))
    for descriptor in {item.digest: item for item in image.blobs}.values():
        out.write(_header(f"blobs/sha256/{descriptor.hex}", descriptor.size))
        with contextlib.closing(store.open(descriptor)) as blob:
            for chunk in blob.chunks():
                out.write(chunk)
        out.write(bytes(-descriptor.size % BLOCK))
    out.write(bytes(2 * BLOCK))


def _write_member(out: BinaryIO, name: str, data: bytes) -> None:
    out.write(_header(name, len(data)) + data + bytes(-len(data) % BLOCK))


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    member.mode = 0o644
    return member.tobuf(tarfile.GNU_FORMAT)  # base-256 for a layer over 8 GiB, which Go reads
