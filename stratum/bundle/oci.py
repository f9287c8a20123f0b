"""The types of a bundle: OCI descriptors, manifests and indexes, and the bundle's description.

Field names and media types are those of the OCI image specification 1.1 (image-layout, image-index,
manifest, descriptor). Parsing is strict where something is used and silent where the specification lets
others add fields. Every ``from_json`` raises :class:`BundleError` and names the place in the document.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Optional

from stratum.bundle.document import Reader, canonical_json, digest_of, malformed, parse_json
from stratum.bundle.paths import safe_relative, unsafe_target
from stratum.errors import BundleError

__all__ = [
    "ARTIFACT_TYPE",
    "CONFIG_TYPE",
    "Component",
    "Description",
    "Descriptor",
    "FileEntry",
    "Index",
    "Manifest",
    "Platform",
    "canonical_json",
    "digest_of",
    "parse_json",
    "safe_relative",
    "unsafe_target",
]

ARTIFACT_TYPE = "application/vnd.stratum.bundle.v1"
CONFIG_TYPE = "application/vnd.stratum.bundle.config.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
DOCKER_INDEX_TYPE = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
LAYER_TAR = "application/vnd.oci.image.layer.v1.tar"
LAYER_GZIP = LAYER_TAR + "+gzip"
LAYER_ZSTD = LAYER_TAR + "+zstd"
REF_NAME = "org.opencontainers.image.ref.name"
CONTAINERD_NAME = "io.containerd.image.name"
COMPONENT_NAME = "dev.stratum.component"

# Everything that is held in memory has a limit (CVE-2021-41190 taught registries 4 MiB for a manifest).
INDEX_LIMIT = 4 << 20
MANIFEST_LIMIT = 4 << 20
CONFIG_LIMIT = 32 << 20

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?\Z")
_VERSION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._+~-]{0,126}[A-Za-z0-9])?\Z")
# Names that would collide with entries that the node's base directory has for itself.
_RESERVED_VERSIONS = frozenset({"current", "components"})
# What a version directory has of its own, whatever its components place.
_RESERVED_PATHS = frozenset({"bundle.json"})
_DIRECTORIES = frozenset({"bin", "libexec", "cni", "cni/bin"})


@dataclass(frozen=True)
class Platform:
    """An OCI platform; ``architecture`` as Go names it (``amd64``, ``arm64``)."""

    os: str
    architecture: str

    def __str__(self) -> str:
        return f"{self.os}/{self.architecture}"

    def to_json(self) -> dict[str, object]:
        """The OCI form."""
        return {"os": self.os, "architecture": self.architecture}

    @classmethod
    def of_machine(cls, machine: str) -> Platform:
        """The platform of a kernel's machine name, uname(2)."""
        return cls("linux", {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine))


@dataclass(frozen=True)
class Descriptor:
    """An OCI content descriptor: what, how long, which digest."""

    media_type: str
    digest: str
    size: int
    artifact_type: Optional[str] = None
    platform: Optional[Platform] = None
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def hex(self) -> str:
        """The digest without its algorithm."""
        return self.digest.partition(":")[2]

    @property
    def name(self) -> Optional[str]:
        """The reference that the layout gives this content, if any."""
        return self.annotations.get(CONTAINERD_NAME) or self.annotations.get(REF_NAME)

    def to_json(self) -> dict[str, object]:
        """The OCI form."""
        value: dict[str, object] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        if self.artifact_type:
            value["artifactType"] = self.artifact_type
        if self.platform:
            value["platform"] = self.platform.to_json()
        if self.annotations:
            value["annotations"] = dict(self.annotations)
        return value

    @classmethod
    def from_json(cls, value: object, where: str = "descriptor") -> Descriptor:
        """Parse a descriptor that is JSON already; raises :class:`BundleError`."""
        return cls._read(Reader(value, where))

    @classmethod
    def _read(cls, reader: Reader) -> Descriptor:
        platform = None
        if "platform" in reader.value:
            inner = reader.child("platform")
            platform = Platform(inner.text("os"), inner.text("architecture"))
        return cls(
            reader.text("mediaType"),
            reader.digest("digest"),
            reader.size("size"),
            reader.optional_text("artifactType"),
            platform,
            reader.texts("annotations"),
        )


@dataclass(frozen=True)
class Index:
    """An OCI image index."""

    manifests: tuple[Descriptor, ...]
    annotations: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """The OCI form."""
        value: dict[str, object] = {
            "schemaVersion": 2,
            "mediaType": INDEX_TYPE,
            "manifests": [item.to_json() for item in self.manifests],
        }
        if self.annotations:
            value["annotations"] = dict(self.annotations)
        return value

    @classmethod
    def from_json(cls, data: bytes, where: str = "index.json") -> Index:
        """Parse an index; raises :class:`BundleError`."""
        reader = Reader(parse_json(data, where), where)
        if reader.size("schemaVersion") != 2:
            raise malformed(f"{where}.schemaVersion", "must be 2")
        manifests = tuple(Descriptor._read(item) for item in reader.items("manifests"))
        return cls(manifests, reader.texts("annotations"))

    def bundles(self) -> list[Descriptor]:
        """The descriptors of Stratum's own manifests, one for each platform."""
        return [item for item in self.manifests if item.artifact_type == ARTIFACT_TYPE]

    def bundle_for(self, platform: Platform) -> Descriptor:
        """The manifest for ``platform``; raises :class:`BundleError` when there is not exactly one."""
        found = [item for item in self.bundles() if item.platform == platform]
        if len(found) == 1:
            return found[0]
        if found:
            raise malformed("index.json", f"{len(found)} manifests for {platform}")
        if not self.bundles():
            raise malformed("index.json", f"no manifest of type {ARTIFACT_TYPE}: this is no Stratum bundle")
        others = ", ".join(sorted(str(item.platform) for item in self.bundles()))
        raise BundleError(
            "wrong-platform",
            f"the bundle has nothing for {platform}, only for {others}",
            hint=f"get the bundle that was built for {platform}",
        )

    def images_for(self, platform: Platform) -> list[Descriptor]:
        """The container images that ride along for ``platform`` (those without a platform are for all)."""
        return [
            item for item in self.manifests if item.artifact_type != ARTIFACT_TYPE and item.platform in (None, platform)
        ]


@dataclass(frozen=True)
class Manifest:
    """An OCI image manifest."""

    config: Descriptor
    layers: tuple[Descriptor, ...]
    artifact_type: Optional[str] = None
    annotations: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """The OCI form."""
        value: dict[str, object] = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": self.config.to_json(),
            "layers": [item.to_json() for item in self.layers],
        }
        if self.artifact_type:
            value["artifactType"] = self.artifact_type
        if self.annotations:
            value["annotations"] = dict(self.annotations)
        return value

    @classmethod
    def from_json(cls, data: bytes, where: str = "manifest") -> Manifest:
        """Parse a manifest; raises :class:`BundleError`."""
        reader = Reader(parse_json(data, where), where)
        if reader.size("schemaVersion") != 2:
            raise malformed(f"{where}.schemaVersion", "must be 2")
        layers = tuple(Descriptor._read(item) for item in reader.items("layers"))
        config = Descriptor._read(reader.child("config"))
        return cls(config, layers, reader.optional_text("artifactType"), reader.texts("annotations"))


@dataclass(frozen=True)
class FileEntry:
    """One path that a component places, relative to the version directory."""

    path: str
    type: str  # file, directory or symlink
    mode: int = 0
    size: int = 0
    digest: Optional[str] = None
    target: Optional[str] = None

    def to_json(self) -> dict[str, object]:
        """The form of the description."""
        value: dict[str, object] = {"path": self.path, "type": self.type}
        if self.type != "symlink":
            value["mode"] = f"{self.mode:04o}"
        if self.type == "file":
            value.update(size=self.size, digest=self.digest)
        if self.type == "symlink":
            value["target"] = self.target
        return value

    @classmethod
    def _read(cls, reader: Reader) -> FileEntry:
        path, kind = reader.text("path"), reader.text("type")
        why = safe_relative(path)
        if why:
            raise malformed(f"{reader.where}.path", f"{path!r}: {why}")
        if kind not in ("file", "directory", "symlink"):
            raise malformed(f"{reader.where}.type", f"{kind!r} is not file, directory or symlink")
        if kind == "symlink":
            target = reader.text("target")
            why = unsafe_target(path, target)
            if why:
                raise malformed(f"{reader.where}.target", f"{target!r}: {why}")
            return cls(path, kind, target=target)
        mode = reader.text("mode")
        if not re.match(r"0[0-7]{3}\Z", mode):
            raise malformed(f"{reader.where}.mode", f"{mode!r} is no mode without special bits")
        if kind == "directory":
            return cls(path, kind, int(mode, 8))
        return cls(path, kind, int(mode, 8), reader.size("size"), reader.digest("digest"))


@dataclass(frozen=True)
class Component:
    """One component of a bundle: a layer and what it places."""

    name: str
    version: str
    layer: str
    diff_id: str
    size: int  # bytes of the uncompressed tar
    files: tuple[FileEntry, ...]

    def to_json(self) -> dict[str, object]:
        """The form of the description."""
        return {
            "name": self.name,
            "version": self.version,
            "layer": self.layer,
            "diffID": self.diff_id,
            "size": self.size,
            "files": [item.to_json() for item in self.files],
        }

    @classmethod
    def _read(cls, reader: Reader) -> Component:
        name = reader.text("name")
        if not _NAME.match(name):
            raise malformed(f"{reader.where}.name", f"{name!r} is no name")
        return cls(
            name,
            reader.text("version"),
            reader.digest("layer"),
            reader.digest("diffID"),
            reader.size("size"),
            tuple(FileEntry._read(item) for item in reader.items("files")),
        )


@dataclass(frozen=True)
class Description:
    """What a bundle is: the config blob of its manifest for one platform."""

    name: str
    version: str
    serial: int
    platform: Platform
    components: tuple[Component, ...]

    def component(self, name: str) -> Optional[Component]:
        """The component called ``name``, or None."""
        return next((item for item in self.components if item.name == name), None)

    def to_json(self) -> dict[str, object]:
        """The form of the config blob."""
        return {
            "name": self.name,
            "version": self.version,
            "serial": self.serial,
            "platform": self.platform.to_json(),
            "components": [item.to_json() for item in self.components],
        }

    @classmethod
    def from_json(cls, data: bytes, where: str = "description") -> Description:
        """Parse a description; raises :class:`BundleError`."""
        reader = Reader(parse_json(data, where), where)
        name, version = reader.text("name"), reader.text("version")
        check_name(name, f"{where}.name")
        check_version(version, f"{where}.version")
        platform = reader.child("platform")
        components = tuple(Component._read(item) for item in reader.items("components"))
        _check_tree(components, where)
        if len({item.name for item in components}) != len(components):
            raise malformed(where, "two components have one name")
        return cls(
            name,
            version,
            reader.size("serial"),
            Platform(platform.text("os"), platform.text("architecture")),
            components,
        )


def _check_tree(components: Iterable[Component], where: str) -> None:
    """Raise :class:`BundleError` unless the components fit together in one version directory."""
    kinds: dict[str, FileEntry] = {}
    for component in components:
        paths = {entry.path for entry in component.files}
        if len(paths) != len(component.files):
            raise malformed(where, f"component {component.name} places a path twice")
        if sum(entry.size for entry in component.files) > component.size:
            raise malformed(where, f"component {component.name} has more in its files than in its layer")
        for entry in component.files:
            other = kinds.setdefault(entry.path, entry)
            # Two components may share a directory; nothing else may have two owners.
            if other is not entry and not (entry.type == other.type == "directory"):
                raise malformed(where, f"two components place {entry.path}")
            if other.mode != entry.mode:
                raise malformed(where, f"two components give {entry.path} different modes")
    for path in _RESERVED_PATHS & set(kinds):
        raise malformed(where, f"{path} is placed by Stratum itself")
    for path in _DIRECTORIES & set(kinds):
        if kinds[path].type != "directory":
            raise malformed(where, f"{path} is a {kinds[path].type} and must be a directory")
    for path in kinds:
        for parent in itertools.accumulate(path.split("/")[:-1], posixpath.join):
            if parent in kinds and kinds[parent].type != "directory":
                raise malformed(where, f"{path} is placed below {parent}, a {kinds[parent].type}")


def check_name(name: str, where: str) -> None:
    """Raise :class:`BundleError` unless ``name`` can name a bundle or a component."""
    if not _NAME.match(name):
        raise malformed(where, f"{name!r} is no name (lower-case letters, digits, '.', '_', '-')")


def check_version(version: str, where: str) -> None:
    """Raise :class:`BundleError` unless ``version`` can name a version directory."""
    if not _VERSION.match(version) or version in _RESERVED_VERSIONS:
        raise malformed(where, f"{version!r} cannot name a version")
