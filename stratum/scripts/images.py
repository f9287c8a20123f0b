"""Importing the bundle's container images into containerd, and keeping them there.

On a Kubernetes node they go where CRI keeps its own, marked so that the kubelet sees them and its garbage collection
spares them. containerd 1.6 has no such mark: what the kubelet removes there, the watch imports again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Optional

from stratum.bundle.graph import is_manifest
from stratum.bundle.images import IMAGES_DIRECTORY, Image, ImageStore, image_name, write_image_tar
from stratum.bundle.oci import Descriptor
from stratum.errors import CommandError, StratumError
from stratum.host.finding import WARN, Finding
from stratum.node import containerd, criimages
from stratum.node.containerd import ImageState
from stratum.node.stack import Stack
from stratum.node.stackspec import is_kubernetes_node
from stratum.node.versions import VersionRecord, read_record
from stratum.scripts.context import Context
from stratum.steps import Action, Call, Step, Work
from stratum.system import Host

__all__ = [
    "check_sandbox",
    "find_missing",
    "image_digests",
    "import_now",
    "import_steps",
    "namespace_of",
    "plan_import",
    "sandbox_image",
]

_MARK_WAIT = 10.0  # seconds that CRI has to take notice of a new image
_MARK_POLL = 0.1


def namespace_of(record: VersionRecord) -> str:
    """The namespace of containerd's that the version's images go into: CRI's own where there is a kubelet."""
    return containerd.KUBERNETES_NAMESPACE if is_kubernetes_node(record) else containerd.NAMESPACE


def _labels_of(record: VersionRecord) -> frozenset[str]:
    if namespace_of(record) != containerd.KUBERNETES_NAMESPACE:
        return frozenset()
    return criimages.image_labels(record.component_version("containerd") or "")


def _names(record: VersionRecord) -> list[str]:
    """The names that the images of a version will have in containerd."""
    return [image_name(top, top) for top in map(Descriptor.from_json, record.images)]


def sandbox_image(record: VersionRecord) -> str:
    """The image that pods get their namespaces from; empty for a container host, and for a bundle without one.

    Raises :class:`BundleError` for a bundle with two.
    """
    if not is_kubernetes_node(record):
        return ""
    return criimages.find_sandbox_image(_names(record)) or ""


def check_sandbox(record: VersionRecord) -> list[Finding]:
    """A kubelet without an image for the sandbox needs a registry for each pod. Raises as :func:`sandbox_image`."""
    if not is_kubernetes_node(record) or sandbox_image(record):
        return []
    return [
        Finding(
            "sandbox-image",
            WARN,
            "the bundle has a kubelet and no image called pause, so that pods start only where a registry is reached",
            "add the pause image to the bundle's definition, or a mirror that has it to containerd.registries",
        )
    ]


def image_digests(host: Host, record: VersionRecord) -> dict[str, str]:
    """Name and digest of the version's images as containerd must have them; manifests are read, and nothing else.

    Images whose manifests are not here are left out: there is nothing to import them from.
    """
    store = ImageStore(host)
    found: dict[str, str] = {}
    for top in map(Descriptor.from_json, record.images):
        try:
            found.update({image.name: image.manifest.digest for image in store.images([top])})
        except StratumError:
            continue
    return found


def find_missing(stack: Stack, record: VersionRecord, wanted: Mapping[str, str]) -> list[str]:
    """Those of ``wanted`` (name and digest) that containerd does not have as it should. Raises CommandError."""
    present, labels = stack.ctr.images(namespace_of(record)), _labels_of(record)
    return [name for name, digest in wanted.items() if _lacks(present.get(name), digest, labels)]


def _lacks(state: Optional[ImageState], digest: str, labels: Iterable[str]) -> bool:
    return state is None or state.digest != digest or not state.labels.issuperset(labels)


def plan_import(context: Context, stack: Stack, record: VersionRecord) -> list[Action]:
    """Import each image that containerd does not have by that name and digest, and mark those that lost their marks."""
    if not record.images:
        return []
    store, namespace, labels = ImageStore(context.host), namespace_of(record), _labels_of(record)
    present = stack.ctr.images(namespace) if stack.ctr.answers() else {}
    actions: list[Action] = []
    for value in record.images:
        top = Descriptor.from_json(value)
        image = _named(store, top)
        state = present.get(image.name if image else image_name(top, top))
        if state is not None and image is None and not _differs(top, state):
            continue  # there is nothing to compare it with, or to import instead of it
        if state is not None and image is not None and state.digest == image.manifest.digest:
            if _lacks(state, image.manifest.digest, labels):
                marking = functools.partial(_mark, stack, namespace, image.name, labels)
                actions.append(Call("mark image", image.name, marking))
        elif image is not None and store.complete(top):
            doing = functools.partial(_import, stack, namespace, image, str(store.platform), labels)
            actions.append(Call("import image", image.name, doing))
        else:
            # In a dry run nothing is in the store yet; in a real one the step before would have failed.
            actions.append(Call("import image", top.name or top.digest, functools.partial(_missing, top)))
    return actions


def _named(store: ImageStore, top: Descriptor) -> Optional[Image]:
    """The image that ``top`` stands for; None when its manifests are not here. They alone are read: the layers of an
    image that containerd has would keep each start of a node waiting, and damage to them is no reason not to start."""
    try:
        return store.images([top])[0]
    except StratumError:
        return None


def _differs(top: Descriptor, state: ImageState) -> bool:
    """Whether containerd is seen to have another image; of an index that is not here that cannot be told."""
    return is_manifest(top) and state.digest != top.digest


def _missing(top: Descriptor) -> None:
    raise StratumError(
        "image-missing",
        f"image {top.name or top.digest}: its blobs are not under {IMAGES_DIRECTORY}, or were changed",
        hint="run: stratum up --bundle FILE",
    )


def _import(stack: Stack, namespace: str, image: Image, platform: str, labels: frozenset[str]) -> None:
    try:
        stack.ctr.import_image(namespace, platform, lambda pipe: write_image_tar(stack.host, image, pipe))
    except CommandError as error:
        error.hint = f"look for a full or broken disk under {containerd.DATA_ROOT}, and read: stratum logs containerd"
        raise
    state = stack.ctr.images(namespace).get(image.name)
    if state is None or state.digest != image.manifest.digest:
        found = state.digest if state else "nothing"
        raise StratumError(
            "image-import",
            f"image {image.name}: containerd has {found} after the import, not {image.manifest.digest}",
            hint="read: stratum logs containerd",
        )
    if labels:
        _wait_managed(stack, namespace, image.name)
        _mark(stack, namespace, image.name, labels)


def _wait_managed(stack: Stack, namespace: str, name: str) -> None:
    """CRI marks a new image as its own by itself, and may take away what was marked before it did."""
    deadline = stack.host.monotonic() + _MARK_WAIT
    while stack.host.monotonic() < deadline:
        state = stack.ctr.images(namespace).get(name)
        if state is not None and criimages.MANAGED_LABEL in state.labels:
            return
        stack.host.sleep(_MARK_POLL)


def _mark(stack: Stack, namespace: str, name: str, labels: frozenset[str]) -> None:
    stack.ctr.label_image(namespace, name, sorted(labels))
    state = stack.ctr.images(namespace).get(name)
    lost = labels - (state.labels if state else frozenset())
    if lost:
        raise StratumError(
            "image-mark",
            f"image {name}: containerd does not keep {', '.join(sorted(lost))}",
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
