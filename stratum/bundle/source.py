"""Where a bundle comes from: a directory, a tar file, or a pipe that can be read once.

All three hold an OCI image layout (image-spec 1.1, image-layout.md). A :class:`BundleSource` hands out the
unparsed ``index.json`` with its signatures, then blobs. A blob is hashed while it is read, and its last bytes
are only handed out when the digest is right. Nothing here decides about trust.

A tar file is indexed by its headers first, so the order of its members does not matter. A pipe must bring
``oci-layout``, ``index.json`` and the signatures first and each blob after the one that names it, as
``stratum bundle build`` writes them.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import BinaryIO, Optional

from stratum.bundle.blobs import (
    INDEX_NAME,
    LAYOUT_LIMIT,
    LAYOUT_NAME,
    SIGNATURE_LIMIT,
    SIGNATURES_MOST,
    Blob,
    BundleSource,
    Wanted,
    check_layout,
    no_layout,
    reading,
)
from stratum.bundle.document import malformed
from stratum.bundle.oci import INDEX_LIMIT, Descriptor
from stratum.bundle.tarsource import SIGNATURE_NAME, Pipe, TarFile
from stratum.bundle.tarstream import shown
from stratum.errors import BundleNotFoundError

__all__ = ["Blob", "BundleSource", "Wanted", "open_bundle"]


class _Directory(BundleSource):
    """A layout in a directory. Links are not followed: what they lead to is not in the bundle."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__(name)
        self._top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        names = sorted(os.listdir(self._top))
        if LAYOUT_NAME not in names:
            nested = [item for item in names if self._holds_layout(item)]
            raise no_layout(self.name, nested[0] if nested else None)
        check_layout(self._small(LAYOUT_NAME, LAYOUT_LIMIT), self.name)
        if INDEX_NAME not in names:
            raise malformed(self.name, f"no {INDEX_NAME}")
        self.index_bytes = self._small(INDEX_NAME, INDEX_LIMIT)
        found = [item for item in names if SIGNATURE_NAME.match(item)]
        if len(found) > SIGNATURES_MOST:
            raise malformed(self.name, f"{len(found)} signatures; at most {SIGNATURES_MOST} are read")
        self.signatures = [self._small(item, SIGNATURE_LIMIT) for item in found]

    def _holds_layout(self, name: str) -> bool:
        try:
            return stat.S_ISREG(os.stat(f"{name}/{LAYOUT_NAME}", dir_fd=self._top, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def _open(self, path: str) -> int:
        """Open a file of the layout, following no link on the way. Raises OSError and :class:`BundleError`."""
        *parents, name = path.split("/")
        opened: list[int] = []
        here = self._top
        try:
            for parent in parents:
                here = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
                opened.append(here)
            # Not blocking: a FIFO without a writer would never open.
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
        finally:
            for item in opened:
                os.close(item)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise malformed(self.name, f"{path} is not a regular file")
        return descriptor

    def _small(self, path: str, limit: int) -> bytes:
        try:
            with os.fdopen(self._open(path), "rb") as file:
                data = file.read(limit + 1)
        except OSError as error:
            raise malformed(self.name, f"{path} cannot be read: {error.strerror}") from None
        if len(data) > limit:
            raise malformed(self.name, f"{path} is over {limit} bytes")
        return data

    def open_blob(self, descriptor: Descriptor) -> Blob:
        """See :meth:`BundleSource.open_blob`."""
        try:
            file = os.fdopen(self._open(f"blobs/sha256/{descriptor.hex}"), "rb", buffering=0)
        except FileNotFoundError:
            raise self._missing(descriptor) from None
        except OSError as error:
            raise malformed(f"blob {descriptor.digest} of {self.name}", f"cannot be read: {error.strerror}") from None
        size = os.fstat(file.fileno()).st_size
        if size != descriptor.size:
            file.close()
            raise self._wrong_size(descriptor, size)
        return Blob(reading(file, self.name), descriptor, self.name, file.close)

    def finish(self) -> None:
        """A directory has no end that could be missing."""

    def close(self) -> None:
        """Close what was opened."""
        if self._top >= 0:
            os.close(self._top)
            self._top = -1


def open_bundle(path: str, *, stdin: Optional[BinaryIO] = None) -> BundleSource:
    """Open the bundle at ``path``; ``-`` is standard input (``stdin`` when given).

    A path that leads to a FIFO (``<(command)`` of a shell) is read as a pipe. Raises
    :class:`BundleNotFoundError` when there is nothing, and :class:`BundleError` when it is no bundle.
    """
    if path == "-":
        stream = stdin if stdin is not None else getattr(sys.stdin, "buffer", None)
        if stream is None:
            raise BundleNotFoundError(
                "no-stdin", "standard input is closed", hint="give --bundle a file or a directory"
            )
        if stream.isatty():
            raise BundleNotFoundError("no-stdin", "standard input is a terminal", hint="pipe a bundle into it")
        _make_blocking(stream)
        return Pipe(stream, "standard input")
    name = shown(os.path.basename(os.path.abspath(path)))
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return _Directory(path, name)
        if stat.S_ISFIFO(mode):
            pipe = open(path, "rb", buffering=0)  # noqa: SIM115 - the source closes it
            return Pipe(pipe, name, pipe.close)
        if not stat.S_ISREG(mode):
            raise malformed(name, "is neither a file nor a directory")
        return TarFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC), name)
    except (FileNotFoundError, NotADirectoryError):
        raise BundleNotFoundError(
            "bundle-not-found", f"{shown(path)}: there is no such file or directory", hint="check --bundle"
        ) from None
    except OSError as error:
        raise BundleNotFoundError(
            "bundle-not-found", f"{shown(path)}: cannot be opened: {error.strerror}", hint="check --bundle"
        ) from None


def _make_blocking(stream: BinaryIO) -> None:
    # ssh and others leave a shared pipe non-blocking; a read that finds nothing would look like the end.
    try:
        os.set_blocking(stream.fileno(), True)
    except (AttributeError, OSError):
        pass
