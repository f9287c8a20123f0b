"""Bundle definitions: the YAML files that say what goes into a bundle and where it comes from.

::

    name: container-host
    version: 2.4.1-1
    serial: 1
    platforms: [linux/amd64, linux/arm64]
    components:
      - name: containerd
        version: 2.4.1
        source:
          url: https://example.org/containerd-{version}-linux-{arch}.tar.gz
          checksums: {url: "https://example.org/containerd-{version}-linux-{arch}.tar.gz.sha256sum"}
        files:
          - {from: bin/*, to: bin/}
    images:
      - name: registry.example.org/pause:3.10
        source: {file: "images/pause-{arch}.tar"}

Reading is strict: what is unknown, missing, of the wrong type or there twice is an error with file and line.
"""

from __future__ import annotations

import posixpath
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Callable, Optional
from urllib.parse import unquote, urlsplit

from stratum.bundle.oci import Platform, check_name, check_version, safe_relative
from stratum.errors import BundleError, UsageError
from stratum.yamlreader import Place, YamlNode, parse_yaml

__all__ = ["Checksums", "ComponentRule", "Definition", "FileRule", "ImageRule", "Source", "parse_definition"]

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_PLATFORMS = {f"linux/{name}": Platform("linux", name) for name in _MACHINES}
_VARIABLES = ("version", "arch", "machine")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}\Z")
# The reference grammar of the OCI distribution specification, with a registry and a tag or digest demanded: a
# container runtime completes a short name in its own way, and then asks for an image that has another name.
_REFERENCE = re.compile(
    r"(?=[^/]*[.:]|localhost/)[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?(/[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*)+"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?\Z"
)


@dataclass(frozen=True)
class Checksums:
    """A checksum file: where it is, and by which name it lists the source (default: the source's own)."""

    place: Place
    url: Optional[str] = None
    file: Optional[str] = None
    name: Optional[str] = None

    @property
    def location(self) -> str:
        """The URL or path."""
        return self.url or self.file or ""


@dataclass(frozen=True)
class Source:
    """Where bytes come from: just one of ``url``, ``file`` and ``directory``.

    Locations may hold ``{version}``, ``{arch}`` and ``{machine}`` until :meth:`for_platform` fills them in.
    """

    place: Place
    kind: str
    location: str
    sha256: Mapping[str, str] = field(default_factory=dict, hash=False)  # by architecture; "" stands for each one
    checksums: Optional[Checksums] = None
    version: str = ""

    def for_platform(self, platform: Platform) -> Source:
        """This source with its placeholders filled in."""
        checksums = self.checksums
        if checksums:
            url, file, name = (
                self.fill(text, platform) if text else None for text in (checksums.url, checksums.file, checksums.name)
            )
            checksums = Checksums(checksums.place, url, file, name)
        digest = self.sha256.get(platform.architecture) or self.sha256.get("")
        location = self.fill(self.location, platform)
        return Source(self.place, self.kind, location, {"": digest} if digest else {}, checksums, self.version)

    def fill(self, text: str, platform: Platform) -> str:
        """``text`` with its placeholders filled in."""
        architecture = platform.architecture
        return text.format_map(
            {"version": self.version, "arch": architecture, "machine": _MACHINES.get(architecture, architecture)}
        )

    @property
    def expected(self) -> Optional[str]:
        """The hexadecimal SHA-256 that the definition demands, after :meth:`for_platform`."""
        return self.sha256.get("")

    @property
    def file_name(self) -> str:
        """The last part of the location."""
        path = unquote(urlsplit(self.location).path) if self.kind == "url" else self.location
        return posixpath.basename(path.rstrip("/"))


@dataclass(frozen=True)
class FileRule:
    """What to take from a source, and where in the version directory it goes.

    ``source_path`` may hold placeholders and globs; None: the source itself, unopened. A ``target`` that ends
    with ``/`` is a directory.
    """

    place: Place
    source_path: Optional[str]
    target: str
    mode: Optional[int] = None


@dataclass(frozen=True)
class ComponentRule:
    """One component: its sources, and the files to take from each."""

    place: Place
    name: str
    version: str
    platforms: tuple[Platform, ...]
    parts: tuple[tuple[Source, tuple[FileRule, ...]], ...]


@dataclass(frozen=True)
class ImageRule:
    """One container image: ``reference`` chooses among several that an archive holds."""

    place: Place
    name: str
    platforms: tuple[Platform, ...]
    source: Source
    reference: Optional[str] = None


@dataclass(frozen=True)
class Definition:
    """A bundle definition."""

    file: str
    name: str
    version: str
    serial: int
    platforms: tuple[Platform, ...]
    components: tuple[ComponentRule, ...]
    images: tuple[ImageRule, ...] = ()

    def components_for(self, platform: Platform) -> list[ComponentRule]:
        """The components that ``platform`` gets."""
        return [item for item in self.components if platform in item.platforms]

    def images_for(self, platform: Platform) -> list[ImageRule]:
        """The images that ``platform`` gets."""
        return [item for item in self.images if platform in item.platforms]


def parse_definition(data: bytes, file: str) -> Definition:
    """Read a definition; ``file`` is what errors call it. Raises UsageError with file and line."""
    top = parse_yaml(data, file)
    fields = top.mapping(("name", "version", "serial", "platforms", "components"), ("images",))
    name, version = _checked(fields["name"], check_name), _checked(fields["version"], check_version, number=True)
    platforms = _platforms(fields["platforms"])
    components = tuple(_component(item, platforms) for item in fields["components"].sequence())
    images = (
        tuple(_image(item, version, platforms) for item in fields["images"].sequence()) if "images" in fields else ()
    )
    if not components:
        raise fields["components"].place.error("has no component")
    _only_once((item.place, item.name) for item in components)
    _only_once((item.place, item.name) for item in images)
    for platform in platforms:
        if not any(platform in item.platforms for item in components):
            raise fields["platforms"].place.error(f"no component is for {platform}")
    return Definition(file, name, version, fields["serial"].integer(), platforms, components, images)


def _checked(node: YamlNode, check: Callable[[str, str], None], *, number: bool = False) -> str:
    value = node.text(number=number)
    try:
        check(value, node.place.path)
    except BundleError as error:
        raise UsageError(
            "definition-invalid",
            f"{node.place.file}:{node.place.line}: {error.message}",
            hint=f"correct {node.place.file}",
        ) from None
    return value


def _only_once(named: Iterator[tuple[Place, str]]) -> None:
    first: dict[str, Place] = {}
    for place, name in named:
        if name in first:
            raise place.error(f"the name {name} is taken by line {first[name].line}")
        first[name] = place


def _platforms(node: YamlNode, among: Optional[tuple[Platform, ...]] = None) -> tuple[Platform, ...]:
    found: list[Platform] = []
    for item in node.sequence():
        platform = _PLATFORMS.get(item.text())
        if platform is None:
            raise item.place.error(f"{item.text()!r} is not one of {', '.join(_PLATFORMS)}")
        if platform in found:
            raise item.place.error(f"{platform} stands twice")
        if among is not None and platform not in among:
            raise item.place.error(f"{platform} is none of the bundle's platforms")
        found.append(platform)
    if not found:
        raise node.place.error("has no platform")
    return tuple(sorted(found, key=str))


def _component(node: YamlNode, platforms: tuple[Platform, ...]) -> ComponentRule:
    fields = node.mapping(("name", "version"), ("platforms", "source", "files", "sources"))
    version = fields["version"].text(number=True)
    if "sources" in fields:
        for name in ("source", "files"):
            if name in fields:
                raise fields[name].place.error(f"cannot stand beside sources; write {name} inside each of them")
        parts = []
        for item in fields["sources"].sequence():
            inner = item.mapping(("files",), _SOURCE_FIELDS)
            parts.append((_source(item, inner, version, platforms), inner["files"]))
        if not parts:
            raise fields["sources"].place.error("has no source")
    else:
        for name in ("source", "files"):
            if name not in fields:
                raise node.place.error(f"the field {name} is missing")
        inner = fields["source"].mapping((), _SOURCE_FIELDS)
        parts = [(_source(fields["source"], inner, version, platforms), fields["files"])]
    own = _platforms(fields["platforms"], platforms) if "platforms" in fields else platforms
    rules = tuple((source, _file_rules(files, source)) for source, files in parts)
    return ComponentRule(node.place, _checked(fields["name"], check_name), version, own, rules)


def _image(node: YamlNode, version: str, platforms: tuple[Platform, ...]) -> ImageRule:
    fields = node.mapping(("name", "source"), ("platforms", "reference"))
    name = fields["name"].text()
    if not _REFERENCE.match(name) or not re.search(r":[^/]+\Z", name):
        raise fields["name"].place.error(
            f"{name!r} is no complete image reference",
            hint="write registry, path and tag, for example docker.io/library/busybox:1.37",
        )
    source = _source(fields["source"], fields["source"].mapping((), _SOURCE_FIELDS), version, platforms)
    own = _platforms(fields["platforms"], platforms) if "platforms" in fields else platforms
    reference = fields["reference"].text() if "reference" in fields else None
    return ImageRule(node.place, name, own, source, reference)


_KINDS = ("url", "file", "directory")
_SOURCE_FIELDS = (*_KINDS, "sha256", "checksums")


def _source(node: YamlNode, fields: Mapping[str, YamlNode], version: str, platforms: tuple[Platform, ...]) -> Source:
    kinds = [kind for kind in _KINDS if kind in fields]
    if len(kinds) != 1:
        raise node.place.error(f"must have just one of {', '.join(_KINDS)}, not {len(kinds)}")
    kind = kinds[0]
    location = _location(fields[kind], kind)
    sha256 = _sha256(fields["sha256"], platforms) if "sha256" in fields else {}
    checksums = _checksums(fields["checksums"]) if "checksums" in fields else None
    if kind == "directory" and (sha256 or checksums):
        raise node.place.error("a directory has no checksum; the lock pins its content")
    if kind == "url" and not sha256 and not checksums:
        raise node.place.error(
            "a URL needs sha256 or checksums", hint="add the checksum, or the checksum file, that its publisher names"
        )
    if "" in sha256 and len(platforms) > 1 and ("{arch}" in location or "{machine}" in location):
        raise fields["sha256"].place.error(
            "one checksum for a location that differs by architecture", hint="write sha256: {amd64: ..., arm64: ...}"
        )
    return Source(node.place, kind, location, sha256, checksums, version)


def _location(node: YamlNode, kind: str) -> str:
    text = _with_placeholders(node)
    if kind != "url":
        return text
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise node.place.error(f"not a URL: {error}") from None
    if parts.scheme not in ("https", "http") or not parts.hostname:
        raise node.place.error("must be a URL that starts with https:// (or http://)")
    if parts.username is not None or parts.password is not None:
        raise node.place.error(
            "a URL with a password ends up in locks and logs", hint="put the credentials in ~/.netrc"
        )
    return text


def _with_placeholders(node: YamlNode) -> str:
    text = node.text()
    try:
        names = [(name, bool(spec or conversion)) for _, name, spec, conversion in string.Formatter().parse(text)]
    except ValueError as error:
        raise node.place.error(f"braces: {error}") from None
    for name, extra in names:
        if name is not None and (name not in _VARIABLES or extra):
            raise node.place.error(f"unknown placeholder {{{name}}} (known: {', '.join(_VARIABLES)})")
    return text


def _sha256(node: YamlNode, platforms: tuple[Platform, ...]) -> dict[str, str]:
    def one(item: YamlNode) -> str:
        value = item.text(number=True)
        if not _SHA256.match(value):
            raise item.place.error("must be the 64 hexadecimal digits of a SHA-256")
        return value.lower()

    if not node.is_mapping():
        return {"": one(node)}
    fields = node.mapping([platform.architecture for platform in platforms])
    return {name: one(item) for name, item in fields.items()}


def _checksums(node: YamlNode) -> Checksums:
    fields = node.mapping((), ("url", "file", "name"))
    if ("url" in fields) == ("file" in fields):
        raise node.place.error("must have just one of url, file")
    name = _with_placeholders(fields["name"]) if "name" in fields else None
    if "url" in fields:
        return Checksums(node.place, url=_location(fields["url"], "url"), name=name)
    return Checksums(node.place, file=_with_placeholders(fields["file"]), name=name)


def _file_rules(node: YamlNode, source: Source) -> tuple[FileRule, ...]:
    rules = []
    for item in node.sequence():
        fields = item.mapping(("to",), ("from", "mode"))
        origin = _with_placeholders(fields["from"]) if "from" in fields else None
        if origin is None and source.kind == "directory":
            raise item.place.error("the field from is missing (a directory is not one file)")
        if origin is not None:
            why = safe_relative(origin.rstrip("/") if origin != "/" else origin)
            if why:
                raise fields["from"].place.error(f"{origin!r}: {why}")
        target = fields["to"].text()
        why = safe_relative(target[:-1] if target.endswith("/") else target)
        if why:
            raise fields["to"].place.error(f"{target!r}: {why}")
        rules.append(FileRule(item.place, origin, target, fields["mode"].mode() if "mode" in fields else None))
    if not rules:
        raise node.place.error("has no file")
    return tuple(rules)
