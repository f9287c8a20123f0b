"""A publisher of bundles in memory, that can also misbehave on purpose.

``Publisher`` makes what an honest release engineer would ship. Every part can be bent before it is put together:
the tar of a layer, its compression and media type, the file list, the description, the manifest, the index, the
signatures, single blobs, and the archive around them. Its tar writer writes what it is told, not what is right.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional, Union

from stratum.bundle.oci import (
    ARTIFACT_TYPE,
    COMPONENT_NAME,
    CONFIG_TYPE,
    CONTAINERD_NAME,
    INDEX_TYPE,
    LAYER_GZIP,
    LAYER_TAR,
    LAYER_ZSTD,
    MANIFEST_TYPE,
    REF_NAME,
    Platform,
    canonical_json,
    digest_of,
)
from stratum.trust.minisign import PublicKey, SecretKey, generate, sign

AMD64 = Platform("linux", "amd64")
ARM64 = Platform("linux", "arm64")
IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
BLOCK = 512
# Tests that cut or change a bundle take a sample of the places; all of them take minutes.
EVERY_BYTE = os.environ.get("STRATUM_TEST_EVERY_BYTE") == "1"


@functools.cache
def _key_pair(name: str) -> tuple[SecretKey, PublicKey]:
    return generate(None)


def key_pair(name: str = "publisher") -> tuple[SecretKey, PublicKey]:
    """A key pair without a password, the same for one ``name`` as long as the tests run."""
    return _key_pair(name)


# -- tar members ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One member of a tar, as it will be written, right or wrong."""

    name: Union[str, bytes]
    content: bytes = b""
    mode: int = 0o755
    flag: bytes = b"0"
    link: Union[str, bytes] = b""
    size: Optional[int] = None  # what the header says, when that is not the truth
    mtime: int = 1_700_000_000
    magic: bytes = b"ustar\x0000"
    prefix: bytes = b""
    spoil_checksum: bool = False

    def to_bytes(self) -> bytes:
        size = len(self.content) if self.size is None else self.size
        return (
            header(
                _raw(self.name),
                flag=self.flag,
                size=size,
                mode=self.mode,
                link=_raw(self.link),
                mtime=self.mtime,
                magic=self.magic,
                prefix=self.prefix,
                spoil_checksum=self.spoil_checksum,
            )
            + self.content
            + bytes(-len(self.content) % BLOCK)
        )


def _raw(name: Union[str, bytes]) -> bytes:
    return name.encode("utf-8") if isinstance(name, str) else name


def number(value: int, width: int) -> bytes:
    """A header number: octal, or base-256 where that does not fit."""
    if 0 <= value < 8 ** (width - 1):
        return b"%0*o\0" % (width - 1, value)
    return bytes([0x80 if value >= 0 else 0xFF]) + (value & (256 ** (width - 1) - 1)).to_bytes(width - 1, "big")


def header(
    name: bytes,
    *,
    flag: bytes = b"0",
    size: int = 0,
    mode: int = 0o755,
    link: bytes = b"",
    mtime: int = 0,
    magic: bytes = b"ustar\x0000",
    prefix: bytes = b"",
    spoil_checksum: bool = False,
) -> bytes:
    """One header block; names that are too long are cut."""
    block = bytearray(
        name[:100].ljust(100, b"\0")
        + number(mode, 8)
        + number(0, 8)
        + number(0, 8)
        + number(size, 12)
        + number(mtime, 12)
        + b" " * 8
        + flag
        + link[:100].ljust(100, b"\0")
        + magic
        + b"root".ljust(32, b"\0") * 2
        + number(0, 8) * 2
        + prefix.ljust(155, b"\0")
        + bytes(12)
    )
    assert len(block) == BLOCK
    block[148:156] = b"%06o\0 " % (sum(block) + (1 if spoil_checksum else 0))
    return bytes(block)


def directory(name: str, mode: int = 0o755) -> Entry:
    return Entry(name + "/", flag=b"5", mode=mode)


def symlink(name: str, target: str) -> Entry:
    return Entry(name, flag=b"2", link=target, mode=0o777)


def hard_link(name: str, target: str, mode: int = 0o755) -> Entry:
    return Entry(name, flag=b"1", link=target, mode=mode)


def pax_records(records: Iterable[tuple[str, Union[str, bytes]]]) -> bytes:
    data = b""
    for key, value in records:
        rest = b" " + key.encode() + b"=" + _raw(value) + b"\n"
        length = len(rest)
        while len(str(length)) + len(rest) != length:
            length = len(str(length)) + len(rest)
        data += str(length).encode() + rest
    return data


def pax(records: Mapping[str, Union[str, bytes]], *, flag: bytes = b"x") -> Entry:
    """An extended header for the member after it (``flag`` b"g": for all)."""
    return Entry("PaxHeaders/x", pax_records(records.items()), flag=flag, mode=0o644)


def tar(entries: Iterable[Union[Entry, bytes]], *, end: bytes = bytes(2 * BLOCK)) -> bytes:
    """The archive of ``entries``; a bytes object is put in as it is."""
    return b"".join(item if isinstance(item, bytes) else item.to_bytes() for item in entries) + end


def listing(entries: Iterable[Union[Entry, bytes]]) -> list[dict[str, Any]]:
    """The honest file list of plain ``entries``."""
    contents: dict[str, bytes] = {}
    result: list[dict[str, Any]] = []
    for item in entries:
        if isinstance(item, bytes):
            continue
        name = _raw(item.name).decode("utf-8", "backslashreplace").rstrip("/")
        if name.startswith("./"):
            name = name[2:]
        link = _raw(item.link).decode("utf-8", "backslashreplace")
        mode = f"{item.mode:04o}"
        if item.flag == b"5":
            result.append({"path": name, "type": "directory", "mode": mode})
        elif item.flag == b"2":
            result.append({"path": name, "type": "symlink", "target": link})
        elif item.flag in (b"0", b"\0", b"1"):
            content = contents.get(link, b"") if item.flag == b"1" else item.content
            contents[name] = content
            size = len(content)
            result.append({"path": name, "type": "file", "mode": mode, "size": size, "digest": digest_of(content)})
    return result


# -- compression ----------------------------------------------------------------------------------------


def zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def plain(data: bytes) -> bytes:
    return data


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {LAYER_ZSTD: zstd, LAYER_GZIP: gzipped, LAYER_TAR: plain}


# -- the publisher --------------------------------------------------------------------------------------


@dataclass
class Part:
    """A component before it becomes a layer. What is None is made honestly."""

    name: str
    entries: Sequence[Union[Entry, bytes]]
    version: str = "1.0.0"
    media_type: str = LAYER_ZSTD
    compress: Optional[Callable[[bytes], bytes]] = None
    archive: Optional[bytes] = None  # the tar, instead of the one of ``entries``
    files: Optional[list[dict[str, Any]]] = None
    size: Optional[int] = None
    changes: Mapping[str, Any] = field(default_factory=dict)  # to its part of the description
    layer_changes: Mapping[str, Any] = field(default_factory=dict)  # to its descriptor


def _nothing(value: dict[str, Any]) -> None:
    """Leave a document as it is."""


@dataclass
class Publisher:
    """Makes one bundle. The ``bend_`` functions may change a document in place before it is hashed."""

    name: str = "demo"
    version: str = "1.0.0"
    serial: int = 1
    platforms: Sequence[Platform] = (AMD64,)
    parts: list[Part] = field(default_factory=list)
    images: list[tuple[Optional[str], Sequence[bytes]]] = field(default_factory=list)
    signers: Sequence[str] = ("publisher",)
    bend_description: Callable[[dict[str, Any]], None] = _nothing
    bend_manifest: Callable[[dict[str, Any]], None] = _nothing
    bend_index: Callable[[dict[str, Any]], None] = _nothing

    @classmethod
    def of(cls, entries: Sequence[Union[Entry, bytes]], **part: Any) -> Publisher:
        """A publisher of one component ``tool`` with these entries."""
        return cls(parts=[Part("tool", entries, **part)])

    @classmethod
    def demo(cls) -> Publisher:
        """A small bundle with two components, in files, directories and links, and one image."""
        tool = [
            directory("bin"),
            Entry("bin/tool", b"#!/bin/sh\necho tool\n"),
            symlink("bin/alias", "tool"),
            directory("share"),
            Entry("share/empty", b"", mode=0o644),
        ]
        daemon = [directory("bin"), Entry("bin/daemon", bytes(range(256)) * 500), directory("libexec")]
        layer = tar([Entry("etc/motd", b"hello\n", mode=0o644)])
        return cls(parts=[Part("tool", tool), Part("daemon", daemon)], images=[("example.test/demo:1", [layer])])

    def build(self) -> Bundle:
        bundle = Bundle()
        manifests = [self._platform(bundle, platform) for platform in self.platforms]
        for name, layers in self.images:
            manifests += [self._image(bundle, platform, name, layers) for platform in self.platforms]
        index: dict[str, Any] = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": manifests}
        self.bend_index(index)
        bundle.index = canonical_json(index)
        for signer in self.signers:
            bundle.sign(signer)
        return bundle

    def _platform(self, bundle: Bundle, platform: Platform) -> dict[str, Any]:
        built = [self._part(part) for part in self.parts]
        description = {
            "name": self.name,
            "version": self.version,
            "serial": self.serial,
            "platform": platform.to_json(),
            "components": [item[1] for item in built],
        }
        self.bend_description(description)
        manifest: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": _descriptor(canonical_json(description), CONFIG_TYPE),
            "layers": [item[2] for item in built],
        }
        self.bend_manifest(manifest)
        raw = canonical_json(manifest)
        for data in (raw, canonical_json(description), *(item[0] for item in built)):
            bundle.add(data)
        ref = f"{self.name}-{self.version}-{platform.os}-{platform.architecture}"
        found = _descriptor(raw, MANIFEST_TYPE)
        found.update(artifactType=ARTIFACT_TYPE, platform=platform.to_json(), annotations={REF_NAME: ref})
        return found

    def _part(self, part: Part) -> tuple[bytes, dict[str, Any], dict[str, Any]]:
        archive = tar(part.entries) if part.archive is None else part.archive
        layer = (part.compress or COMPRESSIONS.get(part.media_type, plain))(archive)
        described: dict[str, Any] = {
            "name": part.name,
            "version": part.version,
            "layer": digest_of(layer),
            "diffID": digest_of(archive),
            "size": len(archive) if part.size is None else part.size,
            "files": listing(part.entries) if part.files is None else part.files,
        }
        described.update(part.changes)
        descriptor = _descriptor(layer, part.media_type)
        descriptor["annotations"] = {COMPONENT_NAME: part.name}
        descriptor.update(part.layer_changes)
        return layer, described, descriptor

    def _image(
        self, bundle: Bundle, platform: Platform, name: Optional[str], layers: Sequence[bytes]
    ) -> dict[str, Any]:
        config = canonical_json(
            {
                "architecture": platform.architecture,
                "os": platform.os,
                "config": {},
                "rootfs": {"type": "layers", "diff_ids": [digest_of(item) for item in layers]},
            }
        )
        packed = [gzipped(item) for item in layers]
        manifest = canonical_json(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "config": _descriptor(config, IMAGE_CONFIG),
                "layers": [_descriptor(item, LAYER_GZIP) for item in packed],
            }
        )
        for data in (manifest, config, *packed):
            bundle.add(data)
        found = _descriptor(manifest, MANIFEST_TYPE)
        found["platform"] = platform.to_json()
        if name is not None:
            found["annotations"] = {REF_NAME: name, CONTAINERD_NAME: name}
        return found


def _descriptor(data: bytes, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}


@dataclass
class Bundle:
    """A bundle as it ships; every part may still be spoiled."""

    layout: Optional[bytes] = b'{"imageLayoutVersion":"1.0.0"}'
    index: bytes = b""
    signatures: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)  # by digest, in the order of the archive

    def add(self, data: bytes) -> str:
        digest = digest_of(data)
        self.blobs.setdefault(digest, data)
        return digest

    def sign(self, signer: str = "publisher", *, data: Optional[bytes] = None) -> None:
        """Add the signature of ``signer``; over other bytes than the index, when given."""
        secret, public = key_pair(signer)
        name = "index.json.minisig" if not self.signatures else f"index.json.{public.key_id}.minisig"
        self.signatures[name] = sign(secret, self.index if data is None else data)

    def json(self, digest: str) -> Any:
        return json.loads(self.blobs[digest])

    def files(self) -> dict[str, bytes]:
        """Every file of the layout, in the order of the archive."""
        result = {} if self.layout is None else {"oci-layout": self.layout}
        result["index.json"] = self.index
        result.update(self.signatures)
        result.update({f"blobs/sha256/{digest.partition(':')[2]}": data for digest, data in self.blobs.items()})
        return result

    def entries(self) -> list[Union[Entry, bytes]]:
        return [Entry(name, data, mode=0o644) for name, data in self.files().items()]

    def tar(self, *, prefix: str = "", order: Callable[[list[Any]], list[Any]] = list) -> bytes:
        """The bundle as a tar; ``order`` may shuffle its members, ``prefix`` goes before each name."""
        entries = [Entry(prefix + name, data, mode=0o644) for name, data in order(list(self.files().items()))]
        return tar(entries)

    def write_tar(self, path: Path, **options: Any) -> Path:
        path.write_bytes(self.tar(**options))
        return path

    def write_directory(self, path: Path) -> Path:
        for name, data in self.files().items():
            target = path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        return path

    def spoil(self, digest: str, bit: int = 0) -> None:
        """Turn one bit of a blob over, under its old name."""
        self.blobs[digest] = flipped(self.blobs[digest], bit)


def flipped(data: bytes, bit: int) -> bytes:
    """``data`` with one bit turned over; ``bit`` counts from the start, round and round."""
    changed = bytearray(data)
    position = bit % (len(data) * 8)
    changed[position // 8] ^= 1 << position % 8
    return bytes(changed)


def snapshot(top: Path) -> dict[str, tuple[Any, ...]]:
    """What is below ``top``: kind, mode, owner, time, size and content of everything, links not followed."""
    found: dict[str, tuple[Any, ...]] = {}
    for base, directories, names in os.walk(top):
        for name in [*directories, *names, "."]:
            path = Path(base, name)
            info = path.lstat()
            extra: Any = None
            if path.is_symlink():
                extra = os.readlink(path)
            elif path.is_file():
                extra = hashlib.sha256(path.read_bytes()).hexdigest()
            time = None if path.is_dir() and not path.is_symlink() else info.st_mtime_ns
            found[str(path)] = (info.st_mode, info.st_uid, info.st_gid, time, extra)
    return found
