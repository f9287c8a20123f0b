"""Making a version directory out of components, by hard links."""

from __future__ import annotations

import json
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from stratum import atomicfile
from stratum.errors import StratumError
from stratum.node import localdns
from stratum.node.layout import VERSION_FILE, Layout
from stratum.receipt import Entry, Receipt, content_digest
from stratum.staging import STAGING, new_staging, reap_staging
from stratum.system import Host, HostPath, unguessable

__all__ = [
    "VersionRecord",
    "assemble",
    "differences",
    "generated",
    "outdated",
    "read_record",
    "relink",
    "usable_record",
]

_DIRECTORIES = ("bin", "libexec", "cni", "cni/bin")  # that every version has


@dataclass(frozen=True)
class VersionRecord:
    """What a version directory says of itself, in its ``bundle.json``."""

    bundle: str
    version: str
    serial: int
    manifest: str  # digest of the bundle's manifest for this platform
    components: tuple[tuple[str, str, str], ...]  # name, version, layer digest
    images: tuple[dict[str, Any], ...]  # OCI descriptors
    signers: tuple[str, ...]  # key ids; empty when the check was skipped

    def to_bytes(self) -> bytes:
        """The file's content."""
        value = {
            "format": 1,
            "bundle": self.bundle,
            "version": self.version,
            "serial": self.serial,
            "manifest": self.manifest,
            "components": [
                {"name": name, "version": version, "layer": layer} for name, version, layer in self.components
            ],
            "images": list(self.images),
            "signers": list(self.signers),
        }
        return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, where: HostPath) -> VersionRecord:
        """Parse the file; raises :class:`StratumError`."""
        try:
            value = json.loads(data)
            return cls(
                value["bundle"],
                value["version"],
                value["serial"],
                value["manifest"],
                tuple((item["name"], item["version"], item["layer"]) for item in value["components"]),
                tuple(value["images"]),
                tuple(value["signers"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise StratumError(
                "version-unreadable", f"{where}: {error!r}", hint="run `stratum up --bundle FILE` to repair it"
            ) from None

    def component_version(self, name: str) -> Optional[str]:
        """The version of a component, or None when the bundle has none of that name."""
        return next((version for component, version, _ in self.components if component == name), None)


def read_record(layout: Layout, version: str) -> Optional[VersionRecord]:
    """The record of an installed version, or None when the file is missing; raises :class:`StratumError`."""
    path = layout.version_dir(version) / VERSION_FILE
    try:
        return VersionRecord.from_bytes(layout.host.read_bytes(path), path)
    except FileNotFoundError:
        return None


def usable_record(layout: Layout, version: str) -> Optional[VersionRecord]:
    """The record of an installed version, or None when it is missing or damaged: for who has another to put there."""
    try:
        return read_record(layout, version)
    except (StratumError, OSError):
        return None


def _tree_entries(host: Host, receipt: Receipt, source: HostPath, target: HostPath) -> list[Entry]:
    """The receipt's entries for a copy of ``source`` at ``target``, parents first."""
    entries = [Entry(target, "directory")]
    for name in host.listdir(source):
        path = source / name
        info = host.lstat(path)
        if stat.S_ISDIR(info.st_mode):
            entries += _tree_entries(host, receipt, path, target / name)
        elif stat.S_ISLNK(info.st_mode):
            entries.append(Entry(target / name, "link", (host.readlink(path),)))
        else:
            # No file of a bundle has a special bit.
            entries.append(Entry(target / name, "file", (receipt.digest(path),), info.st_mode & 0o777))
    return entries


def _link_tree(host: Host, source: HostPath, target: HostPath) -> None:
    for name in host.listdir(source):
        path, there = source / name, target / name
        info = host.lstat(path)
        if stat.S_ISDIR(info.st_mode):
            if not host.is_dir(there):
                host.mkdir(there, 0o755)
            _link_tree(host, path, there)
        elif stat.S_ISLNK(info.st_mode):
            host.symlink(host.readlink(path), there)
        else:
            host.link(path, there)
    host.fsync_dir(target)


def generated(host: Host, record: VersionRecord, components: Sequence[HostPath]) -> dict[HostPath, tuple[bytes, int]]:
    """What a version has beside its components' files: path in the version, content and mode.

    CoreDNS needs a script that supervises it. A bundle that places one of its own keeps it.
    """
    if record.component_version(localdns.COMPONENT) is None:
        return {}
    if any(host.lexists(component / localdns.SUPERVISOR) for component in components):
        return {}
    return {localdns.SUPERVISOR: (localdns.render_supervisor(), 0o755)}


def outdated(layout: Layout, record: VersionRecord, components: Sequence[HostPath]) -> list[HostPath]:
    """The generated files of an installed version that another release of this program wrote, or nobody did."""
    host, target = layout.host, layout.version_dir(record.version)
    wanted = generated(host, record, components)
    return [
        target / path
        for path, (content, _) in wanted.items()
        if not host.exists(target / path) or host.read_bytes(target / path) != content
    ]


def assemble(layout: Layout, receipt: Receipt, record: VersionRecord, components: Sequence[HostPath]) -> None:
    """Make the version directory of ``record`` out of unpacked components, by one rename.

    A directory of that name that exists and is not active is replaced. Raises OSError.
    """
    host = layout.host
    staging = new_staging(host, receipt)
    try:
        for name in _DIRECTORIES:
            host.mkdir(staging / name, 0o755)
        for component in components:
            _link_tree(host, component, staging)
        for path, (content, mode) in generated(host, record, components).items():
            with host.open_new(staging / path, mode) as file:
                file.write(content)
                host.fsync(file)
            host.fsync_dir((staging / path).parent)
        with host.open_new(staging / VERSION_FILE, 0o644) as file:
            file.write(record.to_bytes())
            host.fsync(file)
        host.fsync_dir(staging)
        target = layout.version_dir(record.version)
        if not host.is_dir(layout.base):
            receipt.record(Entry(layout.base, "directory"))
            host.makedirs(layout.base)
        receipt.record(*_tree_entries(host, receipt, staging, target))
        if host.lexists(target):
            host.rename(target, STAGING / unguessable())
        host.rename(staging, target)
        host.fsync_dir(layout.base)
    finally:
        reap_staging(host)


def relink(layout: Layout, receipt: Receipt, record: VersionRecord, components: Sequence[HostPath]) -> None:
    """Put every file of ``components`` back into an installed version, each by one rename. Raises OSError.

    For a version that may be in use: at no moment is a program of it missing. Raises :class:`StratumError` when a
    directory of it is a link now, or when a component itself is damaged.
    """
    host, target = layout.host, layout.version_dir(record.version)
    for path in (target, *(target / name for name in _DIRECTORIES)):
        _make_directory(host, target, path)
    for component in components:
        damaged = differences(receipt, component)
        if damaged or not host.is_dir(component):
            raise StratumError(
                "component-damaged",
                f"{damaged[0] if damaged else component}: is not what the bundle placed there",
                hint="give the bundle: stratum up --bundle FILE, or stratum upgrade --bundle FILE if it is not active",
            )
        receipt.record(*_tree_entries(host, receipt, component, target))
        for source, info in host.walk(component):
            there = target / source.relative_to(component)
            if stat.S_ISDIR(info.st_mode):
                _make_directory(host, target, there)
                continue
            _make_directory(host, target, there.parent)
            if _same(host, source, there):
                continue
            temporary = host.temporary_name(there)
            if stat.S_ISLNK(info.st_mode):
                host.symlink(host.readlink(source), temporary)
            else:
                host.link(source, temporary)
            host.rename(temporary, there)
            host.fsync_dir(there.parent)
    files = {**generated(host, record, components), HostPath(VERSION_FILE): (record.to_bytes(), 0o644)}
    for path, (content, mode) in files.items():
        receipt.record(Entry(target / path, "file", (content_digest(content),), mode))
        atomicfile.write_file(host, target / path, content, mode)


def _make_directory(host: Host, top: HostPath, path: HostPath) -> None:
    for directory in (path, *path.parents):
        if host.is_link(directory) and top in (directory, *directory.parents):
            # What it leads to is somebody else's.
            raise StratumError(
                "link-in-the-way", f"{directory}: was a directory and is a link now", hint=f"remove {directory}"
            )
    host.makedirs(path)


def _same(host: Host, source: HostPath, there: HostPath) -> bool:
    if not host.lexists(there):
        return False
    if host.is_link(source):
        return host.is_link(there) and host.readlink(there) == host.readlink(source)
    one, other = host.lstat(source), host.lstat(there)
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def differences(receipt: Receipt, directory: HostPath) -> list[HostPath]:
    """The recorded paths below ``directory`` that are missing or no longer hold what Stratum wrote."""
    return [
        entry.path
        for entry in receipt
        if (entry.path == directory or entry.is_below(directory)) and receipt.condition(entry) != "ours"
    ]
