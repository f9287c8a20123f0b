"""Container images of a bundle: kept on the host by digest, handed to containerd as an OCI layout.

The blobs lie under ``images/blobs/sha256/<hex>``. A blob is hashed while it is written under a hidden name, and
gets its own only after a sync, so a name never stands for other bytes, whenever the power goes.

``write_image_tar`` makes the archive that ``ctr images import -`` takes (containerd: OCI layout, the image's name
in the annotation ``io.containerd.image.name``), hashing each blob again as it goes out.
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
from stratum.staging import make_private
from stratum.system import Host, HostPath

__all__ = [
    "IMAGES_DIRECTORY",
    "Image",
    "ImageStore",
    "Importer",
    "image_name",
    "list_images",
    "reap_blobs",
    "write_image_tar",
]

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


def image_name(top: Descriptor, manifest: Descriptor) -> str:
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


def _named(descriptor: Descriptor, data: bytes, where: str, platform: Platform) -> list[Descriptor]:
    """What an index or manifest leads to: of an index one manifest or index, that for ``platform``."""
    found = children(descriptor, data, where, [platform])
    if not is_index(descriptor):
        return found
    if not found:
        raise malformed(where, f"an image index with nothing for {platform}")
    # The first match is the one that containerd would take; attestations have no platform of ours.
    return [_check_image(found[0])]


def _check_image(descriptor: Descriptor) -> Descriptor:
    if not is_index(descriptor) and not is_manifest(descriptor):
        raise malformed("index.json", f"{descriptor.digest} ({shown(descriptor.media_type)}) is no container image")
    return descriptor


def _resolve(top: Descriptor, read: Callable[[Descriptor], bytes], platform: Platform) -> Image:
    here = _check_image(top)
    for _ in range(_DEPTH_MOST):
        named = _named(here, read(here), f"blob {here.digest}", platform)
        if is_manifest(here):
            manifest = Descriptor(here.media_type, here.digest, here.size)
            return Image(image_name(top, here), (manifest, *named))
        here = named[0]
    raise malformed("index.json", f"{top.digest} is an index of indexes, more than {_DEPTH_MOST} deep")


def _distinct(images: Iterable[Image]) -> list[Image]:
    found: dict[str, Image] = {}
    for image in images:
        if found.setdefault(image.name, image).manifest.digest != image.manifest.digest:
            raise malformed("index.json", f"two images are called {image.name}")
    return list(found.values())


def list_images(source: BundleSource, images: Iterable[Descriptor], platform: Platform) -> list[Image]:
    """The images and their blobs, from their manifests alone; not of a pipe. Raises :class:`BundleError`."""
    return _distinct(_resolve(top, lambda item: source.read_blob(item, MANIFEST_LIMIT), platform) for top in images)


def reap_blobs(host: Host, blobs: HostPath = IMAGES_DIRECTORY / "blobs/sha256") -> None:
    """Remove what an import that was cut off left in the directory of blobs. Raises OSError."""
    for name in host.listdir(blobs) if host.is_dir(blobs) else ():
        if host.temporary_of(name):
            host.unlink(blobs / name)


class ImageStore:
    """The directory of image blobs on the host, for one platform (by default the host's).

    Only for the holder of the lock. What was read and proved once is not read again by the same object.
    """

    def __init__(self, host: Host, platform: Optional[Platform] = None, directory: HostPath = IMAGES_DIRECTORY) -> None:
        self._host = host
        self.platform = platform or Platform.of_machine(host.machine())
        self._blobs = directory / "blobs/sha256"
        self._proved: set[str] = set()

    def path(self, descriptor: Descriptor) -> HostPath:
        """Where a blob lies, or would."""
        return self._blobs / descriptor.hex

    def open(self, descriptor: Descriptor) -> Blob:
        """Read a blob, hashed on the way. Raises OSError and :class:`BundleError`."""
        path = self.path(descriptor)
        size = self._host.lstat(path).st_size
        if size != descriptor.size:
            raise malformed(
                str(path), f"has {size} bytes instead of {descriptor.size}", "run: stratum up --bundle FILE"
            )
        file = self._host.open(path)
        return Blob(file.read, descriptor, str(path), file.close)

    def has(self, descriptor: Descriptor) -> bool:
        """Whether the blob is there, whole and unchanged: it is read and hashed."""
        if descriptor.digest not in self._proved:
            try:
                with contextlib.closing(self.open(descriptor)) as blob:
                    blob.finish()
            except (OSError, BundleError):
                return False
            self._proved.add(descriptor.digest)
        return True

    def _read(self, descriptor: Descriptor) -> bytes:
        with contextlib.closing(self.open(descriptor)) as blob:
            return read_whole(blob, MANIFEST_LIMIT)

    def complete(self, top: Descriptor) -> bool:
        """Whether everything of the image that the index calls ``top`` is there, whole and unchanged."""
        try:
            image = _resolve(top, self._read, self.platform)
        except (OSError, BundleError):
            return False
        return all(self.has(item) for item in image.blobs)

    def images(self, tops: Iterable[Descriptor]) -> list[Image]:
        """The images that the index calls ``tops``, from what is here.

        Raises :class:`BundleError` for what is wrong, and :class:`StratumError` for what cannot be read.
        """
        try:
            return _distinct(_resolve(top, self._read, self.platform) for top in tops)
        except OSError as error:
            raise disk_failure(self._blobs, error) from error

    def begin(self, tops: Iterable[Descriptor], wanted: Wanted) -> Importer:
        """Start to bring the images ``tops`` here: the blobs that are missing are added to ``wanted``.

        Removes what an earlier run, cut off in the middle, left behind. Raises :class:`BundleError`, and
        :class:`StratumError` when the disk fails.
        """
        tops = [_check_image(top) for top in tops]
        try:
            self._prepare()
        except OSError as error:
            raise disk_failure(self._blobs, error) from error
        for top in tops:
            wanted.add(top)
        return Importer(self._host, self, wanted)

    def _prepare(self) -> None:
        directory = self._blobs.parent.parent
        self._host.makedirs(directory.parent)
        make_private(self._host, self._blobs)
        reap_blobs(self._host, self._blobs)

    def store(
        self,
        source: BundleSource,
        tops: Iterable[Descriptor],
        *,
        progress: Optional[Callable[[int], None]] = None,
    ) -> list[Image]:
        """Bring the images ``tops`` here from ``source``; what they are.

        ``progress`` is told of bytes. Raises :class:`BundleError`, and :class:`StratumError` when the disk
        fails; nothing has changed then.
        """
        tops, wanted = list(tops), Wanted()
        with self.begin(tops, wanted) as importer:
            for descriptor, blob in source.stream_blobs(wanted):
                importer.take(descriptor, blob, progress)
            importer.publish()
        return self.images(tops)


class Importer:
    """Image blobs on their way into the store: written under hidden names, published all at once.

    A context manager that removes what was not published.
    """

    def __init__(self, host: Host, store: ImageStore, wanted: Wanted) -> None:
        self._host = host
        self._store = store
        self._wanted = wanted
        self._staged: dict[HostPath, HostPath] = {}

    def __enter__(self) -> Importer:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def take(self, descriptor: Descriptor, blob: Blob, progress: Optional[Callable[[int], None]] = None) -> None:
        """Write one blob, and wait for those that it names and that are not here. Raises as ``store`` does."""
        if is_index(descriptor) or is_manifest(descriptor):
            data = read_whole(blob, MANIFEST_LIMIT)
            for child in _named(descriptor, data, blob.where, self._store.platform):
                if is_index(child) or is_manifest(child) or not self._store.has(child):
                    self._wanted.add(child)
            self._write(descriptor, [data], progress)
        else:
            self._write(descriptor, blob.chunks(), progress)

    def _write(
        self, descriptor: Descriptor, chunks: Iterable[bytes], progress: Optional[Callable[[int], None]]
    ) -> None:
        path = self._store.path(descriptor)
        temporary = self._host.temporary_name(path)
        try:
            with self._host.open_new(temporary, 0o600) as file:
                self._staged[path] = temporary
                for chunk in chunks:
                    file.write(chunk)
                    if progress:
                        progress(len(chunk))
        except OSError as error:
            raise disk_failure(path, error) from error

    def publish(self) -> None:
        """Give every blob its name, once all are on the disk. Raises :class:`StratumError` when the disk fails."""
        if not self._staged:
            return
        directory = next(iter(self._staged)).parent
        try:
            self._host.syncfs(directory)
            for path, temporary in list(self._staged.items()):
                self._host.rename(temporary, path)
                del self._staged[path]
            self._host.fsync_dir(directory)
        except OSError as error:
            raise disk_failure(directory, error) from error

    def discard(self) -> None:
        """Remove what was not published. Raises OSError."""
        while self._staged:
            with contextlib.suppress(FileNotFoundError):
                self._host.unlink(self._staged.popitem()[1])


def write_image_tar(host: Host, image: Image, out: BinaryIO, directory: HostPath = IMAGES_DIRECTORY) -> None:
    """Write ``image`` to ``out`` as a tar of an OCI layout, for ``ctr images import -``.

    The layout names the image's manifest for this platform, not an index that the image may have come in: the
    other platforms' blobs are not here. Raises OSError and :class:`BundleError`.
    """
    store = ImageStore(host, directory=directory)
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
