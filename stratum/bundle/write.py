"""Writing bundles: a layout that is filled in a staging directory, and its publication as a directory or a tar.

Nothing is ever seen half: a directory gets its name by one rename, a tar file too. The staging directory stands
beside the target, on its file system; what a killed build leaves of it is removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import posixpath
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Callable, Optional

from stratum.bundle.layer import padding, tar_header
from stratum.bundle.oci import ARTIFACT_TYPE, Descriptor, digest_of
from stratum.errors import StratumError, UsageError
from stratum.steps import remove_tree
from stratum.system import Host, HostPath

__all__ = [
    "LAYOUT",
    "BlobStore",
    "BlobWriter",
    "Contents",
    "check_replaceable",
    "publish_directory",
    "publish_file",
    "staging_directory",
    "write_tar",
]

LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Contents:
    """What a bundle consists of: its index, its signatures by file name, its blobs in the order of the tar."""

    index: bytes
    signatures: Sequence[tuple[str, bytes]]
    blobs: Sequence[Descriptor]

    def unique_blobs(self) -> list[Descriptor]:
        """The blobs, each once, at its first place."""
        return list({item.digest: item for item in self.blobs}.values())


class BlobWriter:
    """A blob being written: it gets its name when it is whole."""

    def __init__(self, host: Host, directory: HostPath) -> None:
        self._host = host
        self._directory = directory
        self._temporary = directory / f".{secrets.token_hex(8)}.part"
        self._file = host.open_new(self._temporary, 0o644)
        self._digest = hashlib.sha256()
        self.size = 0

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._host.unlink(self._temporary)

    def write(self, data: bytes) -> int:
        """Append ``data``."""
        self._digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def finish(self) -> str:
        """Give the blob its name; its digest. Raises OSError."""
        digest = self._digest.hexdigest()
        self._host.fsync(self._file)
        self._file.close()
        self._host.rename(self._temporary, self._directory / digest)
        return f"sha256:{digest}"


class BlobStore:
    """An image layout being filled. Safe to use from several threads."""

    def __init__(self, host: Host, root: HostPath) -> None:
        self.host = host
        self.root = root
        self._blobs = root / "blobs" / "sha256"
        host.makedirs(self._blobs, 0o755)

    def writer(self) -> BlobWriter:
        """A new blob."""
        return BlobWriter(self.host, self._blobs)

    def add(self, data: bytes) -> str:
        """Store ``data``; its digest. Raises OSError."""
        with self.writer() as writer:
            writer.write(data)
            return writer.finish()

    def open(self, digest: str) -> BinaryIO:
        """A blob that was stored; raises OSError."""
        return self.host.open(self._blobs / digest.partition(":")[2])

    def complete(self, contents: Contents) -> None:
        """Write the files beside the blobs, and make everything last. Raises OSError."""
        for name, data in _small_files(contents):
            with self.host.open_new(self.root / name, 0o644) as file:
                file.write(data)
                self.host.fsync(file)
        for directory in (self._blobs, self._blobs.parent, self.root):
            self.host.fsync_dir(directory)


def _small_files(contents: Contents) -> list[tuple[str, bytes]]:
    return [("oci-layout", LAYOUT), ("index.json", contents.index), *contents.signatures]


# -- staging ----------------------------------------------------------------------------------------


def _locked(host: Host, path: HostPath) -> Optional[int]:
    """A descriptor of the directory with its lock, or None when somebody else has it (or has removed it)."""
    try:
        descriptor = os.open(host.real(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_ino == host.lstat(path).st_ino:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _reap(host: Host, parent: HostPath, prefix: str) -> None:
    """Remove what killed runs left: a staging directory whose lock nobody holds."""
    for name in host.listdir(parent):
        if name.startswith(prefix) and name.endswith(".tmp") and not host.is_link(parent / name):
            descriptor = _locked(host, parent / name)
            if descriptor is not None:
                try:
                    remove_tree(host, parent / name)
                finally:
                    os.close(descriptor)


@contextlib.contextmanager
def staging_directory(host: Host, parent: HostPath, name: str) -> Iterator[HostPath]:
    """A new directory in ``parent`` for what will be called ``name``, removed at the end if it is still there.

    It holds a lock as long as it is in use, so the next run can tell a leftover from a live one. Raises OSError.
    """
    prefix = f".{name}."
    _reap(host, parent, prefix)
    descriptor = None
    while descriptor is None:
        path = parent / f"{prefix}{secrets.token_hex(8)}.tmp"
        host.mkdir(path, 0o700)
        # Another run may have taken it for a leftover between the two calls; then there is nothing to lock.
        descriptor = _locked(host, path)
    try:
        yield path
    finally:
        try:
            if host.lexists(path):
                remove_tree(host, path)
        finally:
            os.close(descriptor)


# -- publication ------------------------------------------------------------------------------------


def is_bundle_directory(host: Host, path: HostPath) -> bool:
    """Whether ``path`` is a directory that holds a bundle of ours, and so may be replaced by one."""
    try:
        index = json.loads(host.read_bytes(path / "index.json"))
        manifests = index["manifests"]
        return host.exists(path / "oci-layout") and any(item.get("artifactType") == ARTIFACT_TYPE for item in manifests)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def check_replaceable(host: Host, target: HostPath, *, directory: bool, force: bool) -> None:
    """Raise UsageError unless ``target`` is free, or may be replaced because ``force`` says so."""
    if not host.is_dir(target.parent):
        raise UsageError(
            "output-parent-missing", f"{target.parent}: no such directory", hint="make it, or write elsewhere"
        )
    if not host.lexists(target):
        return
    if directory != (host.is_dir(target) and not host.is_link(target)):
        kind = "not a directory" if directory else "a directory"
        raise UsageError("output-exists", f"{target}: exists and is {kind}", hint="give another output")
    if not directory and not stat.S_ISREG(host.stat(target).st_mode if host.exists(target) else stat.S_IFREG):
        # As root, a rename over /dev/null would be the end of it.
        raise UsageError("output-exists", f"{target}: exists and is no regular file", hint="give another output, or -")
    if directory and not is_bundle_directory(host, target):
        raise UsageError("output-exists", f"{target}: exists and is no bundle", hint="give another output")
    if not force:
        raise UsageError(
            "output-exists", f"{target}: exists already", hint="replace it with --force, or give another output"
        )


def publish_directory(host: Host, staged: HostPath, target: HostPath) -> None:
    """Give the layout in ``staged`` its name ``target``; a bundle that is there is moved aside, then removed.

    Raises OSError, with the old bundle back in its place.
    """
    host.chmod(staged, 0o755)
    old = None
    if host.lexists(target):
        old = host.temporary_name(target)
        host.rename(target, old)
    try:
        host.rename(staged, target)
    except BaseException:
        if old is not None:
            host.rename(old, target)
        raise
    host.fsync_dir(target.parent)
    if old is not None:
        remove_tree(host, old)


def publish_file(host: Host, target: HostPath, write: Callable[[BinaryIO], None], mode: int = 0o644) -> None:
    """Let ``write`` fill a new file, then give it the name ``target``. Raises OSError and what ``write`` raises."""
    temporary = host.temporary_name(target)
    try:
        with host.open_new(temporary, mode) as file:
            write(file)
            host.fsync(file)
        host.rename(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            host.unlink(temporary)
    host.fsync_dir(target.parent)


def write_tar(
    output: BinaryIO,
    contents: Contents,
    open_blob: Callable[[Descriptor], BinaryIO],
    tick: Callable[[int], None],
) -> None:
    """Write a bundle as a tar: what proves the rest comes first, then the blobs in the order of use.

    The same bundle gives the same bytes. Raises OSError.
    """
    for name, data in _small_files(contents):
        output.write(tar_header(name, "file", mode=0o644, size=len(data)) + data + padding(len(data)))
    for blob in contents.unique_blobs():
        output.write(tar_header(f"blobs/sha256/{blob.hex}", "file", mode=0o644, size=blob.size))
        with open_blob(blob) as file:
            _copy(file, output, blob, tick)
        output.write(padding(blob.size))
    output.write(b"\0" * 1024)
    output.flush()


def _copy(file: BinaryIO, output: BinaryIO, blob: Descriptor, tick: Callable[[int], None]) -> None:
    left = blob.size
    while left:
        chunk = file.read(min(_CHUNK, left))
        if not chunk:
            raise StratumError("blob-cut-short", f"blob {blob.digest}: {left} of {blob.size} bytes are missing")
        output.write(chunk)
        tick(len(chunk))
        left -= len(chunk)


def descriptor_of(data: bytes, media_type: str) -> Descriptor:
    """The descriptor of a small blob."""
    return Descriptor(media_type, digest_of(data), len(data))


def output_form(host: Host, output: str, form: Optional[str]) -> str:
    """``pipe``, ``directory`` or ``tar``, from what the user wrote and what is there."""
    if output == "-":
        return "pipe"
    if form:
        return form
    if output.endswith("/") or host.is_dir(HostPath(posixpath.abspath(output))):
        return "directory"
    return "tar"
