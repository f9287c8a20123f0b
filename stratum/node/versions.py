"""Making a version directory out of components, by hard links."""

from __future__ import annotations

import json
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from stratum.errors import StratumError
from stratum.node.layout import VERSION_FILE, Layout
from stratum.receipt import Entry, Receipt, file_digest
from stratum.staging import STAGING, new_staging, reap_staging
from stratum.system import Host, HostPath

__all__ = ["VersionRecord", "assemble", "differences", "read_record"]


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


def _tree_entries(host: Host, source: HostPath, target: HostPath) -> list[Entry]:
    """The receipt's entries for a copy of ``source`` at ``target``, parents first."""
    entries = [Entry(target, "directory")]
    for name in host.listdir(source):
        path = source / name
        info = host.lstat(path)
        if stat.S_ISDIR(info.st_mode):
            entries += _tree_entries(host, path, target / name)
        elif stat.S_ISLNK(info.st_mode):
            entries.append(Entry(target / name, "link", (host.readlink(path),)))
        else:
            entries.append(Entry(target / name, "file", (file_digest(host, path),)))
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


def assemble(layout: Layout, receipt: Receipt, record: VersionRecord, components: Sequence[HostPath]) -> None:
    """Make the version directory of ``record`` out of unpacked components, by one rename.

    A directory of that name that exists and is not active is replaced. Raises OSError.
    """
    host = layout.host
    staging = new_staging(host, receipt)
    try:
        for name in ("bin", "libexec", "cni", "cni/bin"):
            host.mkdir(staging / name, 0o755)
        for component in components:
            _link_tree(host, component, staging)
        with host.open_new(staging / VERSION_FILE, 0o644) as file:
            file.write(record.to_bytes())
            host.fsync(file)
        host.fsync_dir(staging)
        target = layout.version_dir(record.version)
        if not host.is_dir(layout.base):
            receipt.record(Entry(layout.base, "directory"))
            host.makedirs(layout.base)
        receipt.record(*_tree_entries(host, staging, target))
        if host.lexists(target):
            host.rename(target, STAGING / secrets.token_hex(8))
        host.rename(staging, target)
        host.fsync_dir(layout.base)
    finally:
        reap_staging(host)


def differences(receipt: Receipt, directory: HostPath) -> list[HostPath]:
    """The recorded paths below ``directory`` that are missing or no longer hold what Stratum wrote."""
    return [
        entry.path
        for entry in receipt
        if (entry.path == directory or directory in entry.path.parents) and receipt.condition(entry) != "ours"
    ]
