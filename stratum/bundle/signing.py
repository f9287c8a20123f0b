"""Adding a signature to a bundle that exists: a new file in a directory, a new whole for a tar file.

The first signature is ``index.json.minisig``, which is what ``minisign -Vm index.json`` looks for; the others are
``index.json.<KEYID>.minisig``. A key that signs again replaces its own signature.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from typing import BinaryIO, Callable, cast

from stratum.atomicfile import write_file
from stratum.bundle.blobs import INDEX_NAME, LAYOUT_NAME, SIGNATURE_LIMIT
from stratum.bundle.layer import padding, tar_header
from stratum.bundle.sources import FilePart
from stratum.bundle.tarsource import SIGNATURE_NAME
from stratum.bundle.tarstream import Member, TarReader
from stratum.bundle.write import publish_file
from stratum.system import Host, HostPath
from stratum.trust.minisign import Signature

__all__ = ["add_signature", "read_signatures", "signature_name"]

FIRST = f"{INDEX_NAME}.minisig"
_CHUNK = 1 << 20


def signature_name(existing: Mapping[str, bytes], key_id: str) -> str:
    """The file name for a signature by ``key_id`` beside ``existing`` ones. Raises NotTrustedError."""
    for name, data in existing.items():
        if Signature.parse(data).key_id == key_id:
            return name
    return f"{INDEX_NAME}.{key_id}.minisig" if FIRST in existing else FIRST


def read_signatures(host: Host, path: HostPath) -> dict[str, bytes]:
    """The signatures of the bundle at ``path``, by file name. Raises OSError, :class:`BundleError`."""
    if host.is_dir(path):
        names = [name for name in host.listdir(path) if SIGNATURE_NAME.match(name)]
        return {name: host.read_bytes(path / name) for name in names}
    with host.open(path) as file:
        found = {}
        for member in _members(file, str(path)):
            name = posixpath.normpath(member.name)
            if SIGNATURE_NAME.match(name) and member.size <= SIGNATURE_LIMIT:
                found[name] = FilePart(file, member.offset, member.size).read()
        return found


def add_signature(host: Host, path: HostPath, name: str, signature: bytes, tick: Callable[[int], None]) -> None:
    """Put ``signature`` into the bundle at ``path`` under ``name``, atomically. Raises OSError, BundleError."""
    if host.is_dir(path):
        write_file(host, path / name, signature, 0o644)
        return
    mode = host.stat(path).st_mode & 0o777
    with host.open(path) as file:
        members = _members(file, str(path))
        publish_file(host, path, lambda output: _rewrite(file, members, output, name, signature, tick), mode)


def _members(file: BinaryIO, where: str) -> list[Member]:
    def skip(amount: int) -> None:
        file.seek(amount, os.SEEK_CUR)

    found = [item for item in TarReader(file, where, chunk=64 << 10, skip=skip) if item.kind == "file"]
    file.seek(0)
    return found


def _rewrite(
    file: BinaryIO, members: list[Member], output: BinaryIO, name: str, signature: bytes, tick: Callable[[int], None]
) -> None:
    kept = [item for item in members if posixpath.normpath(item.name) != name]
    # What proves the rest comes first; everything else keeps its order.
    head = [item for item in kept if _rank(item) < _BLOBS]
    for item in sorted(head, key=_rank):
        _copy(file, item, output, tick)
    output.write(tar_header(name, "file", mode=0o644, size=len(signature)) + signature + padding(len(signature)))
    for item in kept:
        if _rank(item) == _BLOBS:
            _copy(file, item, output, tick)
    output.write(b"\0" * 1024)


_BLOBS = 3


def _rank(member: Member) -> int:
    name = posixpath.normpath(member.name)
    if SIGNATURE_NAME.match(name):
        return 2
    return {LAYOUT_NAME: 0, INDEX_NAME: 1}.get(name, _BLOBS)


def _copy(file: BinaryIO, member: Member, output: BinaryIO, tick: Callable[[int], None]) -> None:
    name = posixpath.normpath(member.name)
    output.write(tar_header(name, "file", mode=0o644, size=member.size))
    part = cast(BinaryIO, FilePart(file, member.offset, member.size))
    for chunk in iter(lambda: part.read(_CHUNK), b""):
        output.write(chunk)
        tick(len(chunk))
    output.write(padding(member.size))
