"""Building a bundle: find the sources, make the layers, store the images, name it all in one index.

The same definition, lock and inputs give the same ``index.json``, whatever the machine, the umask, the time zone
or the order of files. Work is done on all processors; the order of the result never depends on who was first.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Callable, Optional, TypeVar

from stratum.bundle.definition import ComponentRule, Definition, ImageRule, Source
from stratum.bundle.imagearchive import StoredImage, store_image
from stratum.bundle.layer import (
    LayerResult,
    collect_members,
    compression_library,
    select,
    write_layer,
)
from stratum.bundle.lock import Compression, Lock
from stratum.bundle.oci import (
    ARTIFACT_TYPE,
    COMPONENT_NAME,
    CONFIG_TYPE,
    LAYER_ZSTD,
    MANIFEST_TYPE,
    REF_NAME,
    Component,
    Description,
    Descriptor,
    Index,
    Manifest,
    Platform,
    canonical_json,
    digest_of,
)
from stratum.bundle.sources import Entry, Located, SourceFinder, open_entries
from stratum.bundle.write import BlobStore, descriptor_of
from stratum.errors import BundleError
from stratum.system import Host, HostPath

__all__ = ["BuiltBundle", "Builder", "Options", "Work"]

_T = TypeVar("_T")
_PATIENCE = 3.0  # seconds for a thread to notice that it must stop


@dataclass(frozen=True)
class Options:
    """``level`` of zstd; ``mtime`` of all files, in seconds since 1970; ``jobs`` at the same time."""

    platforms: tuple[Platform, ...]
    level: int
    mtime: int = 0
    jobs: int = field(default_factory=lambda: os.cpu_count() or 1)


@dataclass(frozen=True)
class BuiltBundle:
    """A bundle whose blobs are in the store: its index, its blobs in the order of the tar, its lock."""

    index: bytes
    blobs: tuple[Descriptor, ...]
    descriptions: tuple[Description, ...]
    lock: Lock


class StoppedError(Exception):
    """The work of a thread was cut off because another one failed, or by a signal."""


class Work:
    """What the threads share: whom they tell how far they are, and whether they must stop."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def tick(self, amount: int) -> None:
        """``amount`` bytes more are done. Raises :class:`StoppedError` when all is to stop."""
        self.check()
        with self._lock:
            self._advance(amount)

    def check(self) -> None:
        """Raise :class:`StoppedError` when all is to stop."""
        if self._stopped.is_set():
            raise StoppedError

    def all(self, jobs: int, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        """The results of ``calls``, in their order. The first failure stops the others and is raised.

        The threads are daemons and not a pool: one that hangs in the network must not hold up the end.
        """
        results: dict[int, _T] = {}
        errors: dict[int, BaseException] = {}
        pending: queue.SimpleQueue[int] = queue.SimpleQueue()
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()

        def serve() -> None:
            with contextlib.suppress(queue.Empty):
                while True:
                    number = pending.get_nowait()
                    try:
                        self.check()
                        results[number] = calls[number]()
                    except BaseException as error:  # noqa: BLE001 - it is raised again, in the thread that waits
                        errors[number] = error
                    ended.put(number)

        for number in range(len(calls)):
            pending.put(number)
        threads = [threading.Thread(target=serve, daemon=True) for _ in range(min(jobs, len(calls)))]
        for thread in threads:
            thread.start()
        try:
            for _ in calls:
                if ended.get() in errors:
                    break
        finally:
            if errors or len(results) < len(calls):
                self._stopped.set()
                for thread in threads:
                    thread.join(_PATIENCE)
        if errors:
            # Which one came first is chance; the first in order that has a reason of its own is not.
            causes = [errors[number] for number in sorted(errors) if not isinstance(errors[number], StoppedError)]
            raise (causes or list(errors.values()))[0]
        return [results[number] for number in range(len(calls))]


@dataclass(frozen=True)
class _BuiltComponent:
    component: Component
    layer: Descriptor
    directories: dict[str, set[bytes]]  # what was taken from each local directory


@dataclass
class Builder:
    """Builds one definition into ``store``. ``scratch`` is for files that have no name (unpacked archives)."""

    host: Host
    definition: Definition
    finder: SourceFinder
    store: BlobStore
    scratch: HostPath
    options: Options
    work: Work

    def find_sources(self) -> dict[Source, Located]:
        """Download and hash what the chosen platforms need, each source once. Raises StratumError."""
        wanted = list(dict.fromkeys(source for _, source in self._sources()))

        def find(source: Source) -> Callable[[], Located]:
            return lambda: self.finder.find(source)

        return dict(zip(wanted, self.work.all(self.options.jobs, [find(item) for item in wanted])))

    def _sources(self) -> Iterator[tuple[Platform, Source]]:
        for platform in self.options.platforms:
            for component in self.definition.components_for(platform):
                for source, _ in component.parts:
                    yield platform, source.for_platform(platform)
            for image in self.definition.images_for(platform):
                yield platform, image.source.for_platform(platform)

    def build(self, located: dict[Source, Located]) -> BuiltBundle:
        """Make layers, images and index; :meth:`find_sources` comes first. Raises StratumError, OSError."""
        component_jobs = [
            (platform, rule) for platform in self.options.platforms for rule in self.definition.components_for(platform)
        ]
        image_jobs = [
            (platform, rule) for platform in self.options.platforms for rule in self.definition.images_for(platform)
        ]

        def component(platform: Platform, rule: ComponentRule) -> Callable[[], object]:
            return lambda: self._component(platform, rule, located)

        def image(platform: Platform, rule: ImageRule) -> Callable[[], object]:
            return lambda: self._image(platform, rule, located)

        calls = [component(*job) for job in component_jobs] + [image(*job) for job in image_jobs]
        results = self.work.all(self.options.jobs, calls)
        components = {
            (platform, rule.name): item
            for (platform, rule), item in zip(component_jobs, results)
            if isinstance(item, _BuiltComponent)
        }
        images = {
            (platform, rule.name): item
            for (platform, rule), item in zip(image_jobs, results[len(component_jobs) :])
            if isinstance(item, StoredImage)
        }
        return self._assemble(components, images, located)

    # -- one component, one image -------------------------------------------------------------------

    def _component(self, platform: Platform, rule: ComponentRule, located: dict[Source, Located]) -> _BuiltComponent:
        with contextlib.ExitStack() as stack:
            named, origin = [], {}
            for template, file_rules in rule.parts:
                source = template.for_platform(platform)
                self.work.check()
                entries = self._entries(stack, located[source], any(item.source_path for item in file_rules))
                for file_rule in file_rules:
                    if file_rule.source_path is None:
                        glob, held = source.file_name, {source.file_name: self._whole(located[source])}
                    else:
                        glob, held = source.fill(file_rule.source_path, platform), entries
                    for member in select(file_rule, glob, held, source.location):
                        named.append((file_rule, member))
                        origin[member.path] = source
            members = collect_members(named)
            with self.store.writer() as writer:
                result = write_layer(
                    members,
                    writer.write,
                    level=self.options.level,
                    mtime=self.options.mtime,
                    tick=self.work.tick,
                    subject=f"component {rule.name}",
                )
                digest = writer.finish()
                layer = Descriptor(LAYER_ZSTD, digest, writer.size, annotations={COMPONENT_NAME: rule.name})
        component = Component(rule.name, rule.version, digest, result.diff_id, result.size, result.files)
        return _BuiltComponent(component, layer, _from_directories(result, origin))

    def _entries(self, stack: contextlib.ExitStack, located: Located, opened: bool) -> dict[str, Entry]:
        if not opened:
            return {}
        return dict(stack.enter_context(open_entries(self.host, located, self.scratch)))

    def _whole(self, located: Located) -> Entry:
        # A download has no mode of its own; what is taken whole is a program, unless `mode` says otherwise.
        source, path = located.source, located.path
        executable = source.kind == "url" or bool(self.host.stat(path).st_mode & 0o111)
        return Entry(source.file_name, "file", executable, located.size or 0, open=lambda: self.host.open(path))

    def _image(self, platform: Platform, rule: ImageRule, located: dict[Source, Located]) -> StoredImage:
        source = rule.source.for_platform(platform)
        with open_entries(self.host, located[source], self.scratch) as entries:
            return store_image(
                entries,
                rule,
                platform,
                self.store,
                where=source.location,
                level=self.options.level,
                tick=self.work.tick,
            )

    # -- the whole ----------------------------------------------------------------------------------

    def _assemble(
        self,
        components: dict[tuple[Platform, str], _BuiltComponent],
        images: dict[tuple[Platform, str], StoredImage],
        located: dict[Source, Located],
    ) -> BuiltBundle:
        manifests: list[Descriptor] = []
        # Manifests before layers: a reader of a pipe for the second platform must know that a layer which both
        # platforms have, and which comes once, is one of its own.
        heads: list[Descriptor] = []
        layers: list[Descriptor] = []
        descriptions = []
        for platform in self.options.platforms:
            chosen = [components[platform, rule.name] for rule in self.definition.components_for(platform)]
            description = self._description(platform, [item.component for item in chosen])
            config = canonical_json(description.to_json())
            manifest = Manifest(descriptor_of(config, CONFIG_TYPE), tuple(item.layer for item in chosen), ARTIFACT_TYPE)
            data = canonical_json(manifest.to_json())
            self.store.add(config)
            self.store.add(data)
            name = f"{self.definition.name}-{self.definition.version}-{platform.os}-{platform.architecture}"
            descriptor = replace(
                descriptor_of(data, MANIFEST_TYPE),
                artifact_type=ARTIFACT_TYPE,
                platform=platform,
                annotations={REF_NAME: name},
            )
            manifests.append(descriptor)
            heads += [descriptor, manifest.config]
            layers += manifest.layers
            descriptions.append(description)
        riding = _named_apart(images)
        manifests += [image.manifest for image in riding]
        blobs = [*heads, *layers, *(image.manifest for image in riding)]
        for image in riding:
            blobs += image.blobs
        index = canonical_json(Index(tuple(manifests)).to_json())
        lock = self._lock(components, images, located)
        return BuiltBundle(index, tuple(blobs), tuple(descriptions), lock)

    def _description(self, platform: Platform, components: list[Component]) -> Description:
        description = Description(
            self.definition.name, self.definition.version, self.definition.serial, platform, tuple(components)
        )
        try:
            # What a host will refuse must not be built: the reader's own rules judge it.
            return Description.from_json(canonical_json(description.to_json()), f"the bundle for {platform}")
        except BundleError as error:
            raise BundleError(error.reference, error.message, hint=f"correct {self.definition.file}") from None

    def _lock(
        self,
        components: dict[tuple[Platform, str], _BuiltComponent],
        images: dict[tuple[Platform, str], StoredImage],
        located: dict[Source, Located],
    ) -> Lock:
        lock = Lock(Compression(self.options.level, compression_library()), self.options.mtime)
        for source, found in located.items():
            if found.sha256 is not None:
                lock.sources[source.location] = {"sha256": found.sha256, "size": found.size}
        taken: dict[str, set[bytes]] = {}
        for (platform, name), item in components.items():
            lock.components.setdefault(str(platform), {})[name] = {
                "version": item.component.version,
                "diffID": item.component.diff_id,
                "layer": item.component.layer,
                "size": item.layer.size,
            }
            for location, entries in item.directories.items():
                taken.setdefault(location, set()).update(entries)
        for location, entries in taken.items():
            lock.sources[location] = {"sha256": digest_of(b"\n".join(sorted(entries)))[7:], "files": len(entries)}
        for (platform, name), image in images.items():
            lock.images.setdefault(str(platform), {})[name] = {"manifest": image.manifest.digest}
        return lock


def _named_apart(images: dict[tuple[Platform, str], StoredImage]) -> list[StoredImage]:
    """The images in their order, each with a name of its own: umoci takes no layout that has one twice.

    containerd goes by its own annotation, where the name is the same for all.
    """
    found = []
    for (platform, name), image in sorted(images.items(), key=lambda item: (item[0][1], str(item[0][0]))):
        several = sum(other == name for _, other in images) > 1
        label = f"{name}-{platform.os}-{platform.architecture}" if several else name
        annotations = {**image.manifest.annotations, REF_NAME: label}
        found.append(replace(image, manifest=replace(image.manifest, annotations=annotations)))
    return found


def _from_directories(result: LayerResult, origin: dict[str, Source]) -> dict[str, set[bytes]]:
    found: dict[str, set[bytes]] = {}
    for entry in result.files:
        source: Optional[Source] = origin.get(entry.path)
        if source is not None and source.kind == "directory":
            found.setdefault(source.location, set()).add(canonical_json(entry.to_json()))
    return found
