"""Importing the bundle's container images into containerd."""

from __future__ import annotations

import functools

from stratum.bundle.images import IMAGES_DIRECTORY, Image, ImageStore, write_image_tar
from stratum.bundle.oci import Descriptor
from stratum.errors import CommandError, StratumError
from stratum.node import containerd
from stratum.node.stack import Stack
from stratum.node.versions import VersionRecord, read_record
from stratum.scripts.context import Context
from stratum.steps import Action, Call, Step, Work

__all__ = ["import_now", "import_steps"]


def plan_import(context: Context, stack: Stack, record: VersionRecord) -> list[Action]:
    """Import each image that containerd does not have by that name and digest."""
    if not record.images:
        return []
    store = ImageStore(context.host)
    present = stack.ctr.images(containerd.NAMESPACE) if stack.ctr.answers() else {}
    actions: list[Action] = []
    for value in record.images:
        top = Descriptor.from_json(value)
        if not store.complete(top):
            # In a dry run nothing is in the store yet; in a real one the step before would have failed.
            actions.append(Call("import image", top.name or top.digest, functools.partial(_missing, top)))
            continue
        (image,) = store.images([top])
        if present.get(image.name) != image.manifest.digest:
            doing = functools.partial(_import, stack, image, str(store.platform))
            actions.append(Call("import image", image.name, doing))
    return actions


def _missing(top: Descriptor) -> None:
    raise StratumError(
        "image-missing",
        f"image {top.name or top.digest}: its blobs are not under {IMAGES_DIRECTORY}, or were changed",
        hint="run: stratum up --bundle FILE",
    )


def _import(stack: Stack, image: Image, platform: str) -> None:
    try:
        stack.ctr.import_image(containerd.NAMESPACE, platform, lambda pipe: write_image_tar(stack.host, image, pipe))
    except CommandError as error:
        error.hint = f"look for a full or broken disk under {containerd.DATA_ROOT}, and read: stratum logs containerd"
        raise
    found = stack.ctr.images(containerd.NAMESPACE).get(image.name)
    if found != image.manifest.digest:
        raise StratumError(
            "image-import",
            f"image {image.name}: containerd has {found or 'nothing'} after the import, not {image.manifest.digest}",
            hint="read: stratum logs containerd",
        )


def import_now(context: Context, work: Work, stack: Stack) -> None:
    """Import what the active version has and containerd has not. Raises :class:`StratumError`."""
    version = stack.layout.current()
    record = read_record(stack.layout, version) if version else None
    for action in plan_import(context, stack, record) if record else ():
        context.out.note(action.describe())
        action.perform(work)


def import_steps(context: Context, stack: Stack, record: VersionRecord) -> list[Step]:
    """The step that imports what is missing."""
    return [Step("images", "import the container images", lambda: plan_import(context, stack, record))]
