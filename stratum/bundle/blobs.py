"""What all sources of a bundle share: blobs that are hashed while they are read, and the wish list of blobs."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Callable, Optional, Union

from stratum.bundle.document import malformed, parse_json
from stratum.bundle.oci import Descriptor
from stratum.bundle.tarstream import CHUNK, Readable, shown
from stratum.errors import BundleError, DigestMismatchError

__all__ = ["Blob", "BundleSource", "Wanted", "check_layout", "malformed", "no_layout", "read_whole", "reading"]

SIGNATURE_LIMIT = 16384
SIGNATURES_MOST = 16
LAYOUT_LIMIT = 4096
LAYOUT_NAME = "oci-layout"
INDEX_NAME = "index.json"


class Blob:
    """One blob being read: at most ``descriptor.size`` bytes, hashed on the way.

    ``read`` raises :class:`DigestMismatchError` instead of handing out the last bytes of a blob that is not the
    one that its digest names, and :class:`BundleError` when it ends early.
    """

    def __init__(
        self,
        read: Callable[[int], bytes],
        descriptor: Descriptor,
        where: str,
        close: Optional[Callable[[], None]] = None,
    ) -> None:
        self.descriptor = descriptor
        self.where = f"blob {descriptor.digest} of {where}"
        self._read = read
        self._close = close
        self._left = descriptor.size
        self._hash = hashlib.sha256()
        self._proved = False
        if not self._left:
            self._prove()

    def read(self, size: int = -1, /) -> bytes:
        """At most ``size`` bytes (all that is left, when negative), none at the end."""
        if not self._left:
            if not self._proved:
                self._prove()
            return b""
        if size < 0:
            return b"".join(self.chunks())
        if not size:
            return b""
        data = self._read(min(size, self._left))
        if not data:
            raise BundleError(
                "cut-short",
                f"{self.where}: ends {self._left} bytes early",
                hint="the copy is not complete: copy the bundle again",
            )
        self._hash.update(data)
        self._left -= len(data)
        if not self._left:
            self._prove()
        return data

    def _prove(self) -> None:
        actual = "sha256:" + self._hash.hexdigest()
        if actual != self.descriptor.digest:
            raise DigestMismatchError(self.where, self.descriptor.digest, actual)
        self._proved = True

    def finish(self) -> None:
        """Read what is left and prove the digest; raises :class:`DigestMismatchError`."""
        for _ in self.chunks():
            pass

    def chunks(self) -> Iterator[bytes]:
        """What is left, in pieces of at most 1 MiB."""
        while True:
            data = self.read(CHUNK)
            if not data:
                return
            yield data

    def close(self) -> None:
        """Give back what reading needs; proves nothing."""
        if self._close:
            self._close()
            self._close = None


def read_whole(blob: Blob, limit: int) -> bytes:
    """All of ``blob``, proved; raises :class:`BundleError`, also when it is over ``limit`` bytes."""
    if blob.descriptor.size > limit:
        raise malformed(blob.where, f"has {blob.descriptor.size} bytes; at most {limit} are read")
    return blob.read()


class Wanted:
    """The blobs that somebody waits for. More may be added while they arrive, as manifests name them."""

    def __init__(self, descriptors: Iterable[Descriptor] = ()) -> None:
        self._waiting: dict[str, Descriptor] = {}
        self._sizes: dict[str, int] = {}
        for item in descriptors:
            self.add(item)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, descriptor: Descriptor) -> bool:
        """Wait for ``descriptor`` too; False when it was asked for before. A digest with two sizes is an error."""
        known = self._sizes.get(descriptor.digest)
        if known is None:
            self._sizes[descriptor.digest] = descriptor.size
            self._waiting[descriptor.digest] = descriptor
        elif known != descriptor.size:
            raise malformed(f"blob {descriptor.digest}", f"is said to have {known} and {descriptor.size} bytes")
        return known is None

    def take(self, digest: Optional[str] = None) -> Optional[Descriptor]:
        """Stop waiting for ``digest``, or for the one added first; what it was, or None."""
        if digest is None:
            digest = next(iter(self._waiting), "")
        return self._waiting.pop(digest, None)

    def waiting(self) -> list[Descriptor]:
        """What has not arrived yet."""
        return list(self._waiting.values())


class BundleSource(ABC):
    """A bundle that can be read. ``name`` is for messages; a context manager that closes what it opened."""

    # Whether blobs can be had in any order and more than once.
    random_access = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.index_bytes = b""
        self.signatures: list[bytes] = []

    def __enter__(self) -> BundleSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close files."""

    @abstractmethod
    def open_blob(self, descriptor: Descriptor) -> Blob:
        """The blob ``descriptor``; of a pipe, which then stands behind it. Raises :class:`BundleError`."""

    def read_blob(self, descriptor: Descriptor, limit: int) -> bytes:
        """The whole blob, proved; raises :class:`BundleError`, also when it is over ``limit`` bytes."""
        blob = self.open_blob(descriptor)
        try:
            return read_whole(blob, limit)
        finally:
            blob.close()

    def has_passed(self, descriptor: Descriptor) -> bool:  # noqa: ARG002
        """Whether the blob has gone by and cannot be had any more."""
        return False

    def stream_blobs(self, wanted: Union[Wanted, Iterable[Descriptor]]) -> Iterator[tuple[Descriptor, Blob]]:
        """Every wanted blob once, in the order in which the source can give them.

        A blob must be read before the next one is asked for; what is left of it is read then, and its digest
        proved. Blobs that are added to a :class:`Wanted` on the way come too. Raises :class:`BundleError`.
        """
        queue = wanted if isinstance(wanted, Wanted) else Wanted(wanted)
        while queue:
            descriptor, blob = self._next_of(queue)
            try:
                yield descriptor, blob
                blob.finish()
            finally:
                blob.close()

    def _next_of(self, queue: Wanted) -> tuple[Descriptor, Blob]:
        descriptor = queue.take()
        assert descriptor is not None
        return descriptor, self.open_blob(descriptor)

    @abstractmethod
    def finish(self) -> None:
        """Read the source to its end, when that was not done: proves that a pipe was not cut short."""

    def _missing(self, descriptor: Descriptor) -> BundleError:
        return malformed(f"blob {descriptor.digest} of {self.name}", "is not in the bundle")

    def _wrong_size(self, descriptor: Descriptor, size: int) -> BundleError:
        return malformed(f"blob {descriptor.digest} of {self.name}", f"has {size} bytes instead of {descriptor.size}")


def check_layout(data: bytes, where: str) -> None:
    """Raise :class:`BundleError` unless ``data`` is the ``oci-layout`` file of a version that we know."""
    version = parse_json(data, f"{where}: {LAYOUT_NAME}").get("imageLayoutVersion")
    if version != "1.0.0":
        raise malformed(f"{where}: {LAYOUT_NAME}", f"image layout version {version!r}; only 1.0.0 is known")


def no_layout(where: str, nested: Optional[str]) -> BundleError:
    """The error for a place without a layout; ``nested`` is the directory in it that has one."""
    if nested is not None:
        return malformed(
            where,
            f"the image layout is in {shown(nested)}/ and not at the top",
            hint=f"pack it again with: tar -C {shown(nested)} -cf BUNDLE.tar .",
        )
    return malformed(where, f"no {LAYOUT_NAME}: this is no OCI image layout", hint="is it a Stratum bundle?")


def reading(file: Readable, where: str) -> Callable[[int], bytes]:
    """``file.read``, with errors of the medium told as :class:`BundleError`."""

    def read(size: int) -> bytes:
        try:
            return file.read(size) or b""
        except OSError as error:
            raise BundleError(
                "unreadable", f"{where}: cannot be read: {error.strerror}", hint="check the medium"
            ) from None

    return read
