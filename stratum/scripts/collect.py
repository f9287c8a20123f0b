"""Removing versions, and what only they used: components and image blobs."""

from __future__ import annotations

from collections.abc import Sequence

from stratum.bundle.images import IMAGES_DIRECTORY, ImageStore
from stratum.bundle.oci import Descriptor
from stratum.bundle.place import COMPONENTS, component_dir
from stratum.errors import StratumError
from stratum.node.layout import Layout
from stratum.node.versions import read_record
from stratum.steps import Action, Call, Work, remove_at_once
from stratum.system import HostPath

__all__ = ["plan_collect"]


def plan_collect(work: Work, layout: Layout, removed: Sequence[str]) -> list[Action]:
    """Remove the versions ``removed``, then the components and blobs that no other version uses.

    Raises :class:`VersionActiveError` through the layout, and StratumError when a record cannot be read.
    """
    kept = [version for version in layout.versions() if version not in removed]
    records = [record for record in (read_record(layout, version) for version in kept) if record]
    if len(records) != len(kept):
        raise StratumError(
            "version-unreadable",
            f"{layout.base}: a version has no bundle.json, so what it uses is not known",
            hint="repair it with `stratum up --bundle FILE`, or remove it first",
        )
    actions: list[Action] = [
        Call("remove version", str(layout.version_dir(version)), lambda version=version: _remove(work, layout, version))  # type: ignore[misc]
        for version in removed
    ]
    used = {component_dir(layer) for record in records for _, _, layer in record.components}
    present = [COMPONENTS / name for name in work.host.listdir(COMPONENTS)] if work.host.is_dir(COMPONENTS) else []
    actions += [
        Call("remove component", str(path), lambda path=path: _remove_component(work, path))  # type: ignore[misc]
        for path in present
        if path not in used
    ]
    return actions + _plan_blobs(work, [Descriptor.from_json(item) for record in records for item in record.images])


def _plan_blobs(work: Work, tops: Sequence[Descriptor]) -> list[Action]:
    store = ImageStore(work.host)
    complete = [top for top in tops if store.complete(top)]
    if len(complete) != len(tops):
        return []  # what a damaged image still needs is not known; `up` repairs it
    used = {item.hex for image in store.images(complete) for item in image.blobs} | {top.hex for top in complete}
    directory = IMAGES_DIRECTORY / "blobs/sha256"
    names = work.host.listdir(directory) if work.host.is_dir(directory) else []
    return [
        Call("remove blob", str(directory / name), lambda path=directory / name: work.host.unlink(path))  # type: ignore[misc]
        for name in names
        if name not in used
    ]


def _forget_below(work: Work, path: HostPath) -> None:
    work.receipt.forget(*(entry.path for entry in work.receipt if path in (entry.path, *entry.path.parents)))


def _remove(work: Work, layout: Layout, version: str) -> None:
    layout.remove(version)
    _forget_below(work, layout.version_dir(version))


def _remove_component(work: Work, path: HostPath) -> None:
    remove_at_once(work.host, path)
    _forget_below(work, path)
