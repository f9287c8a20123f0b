"""Container images as CRI, and so the kubelet, sees them: their labels, and the one that holds a pod's namespaces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Optional

from stratum.errors import BundleError
from stratum.node.containerd import release_of

__all__ = ["MANAGED_LABEL", "PINNED_LABEL", "find_sandbox_image", "image_labels"]

# What CRI marks its images with: it lists those alone (containerd internal/cri/labels).
MANAGED_LABEL = "io.cri-containerd.image=managed"
# The kubelet's garbage collection spares an image with it. CRI of 1.7 and 2.x knows it, that of 1.6 does not (tried).
PINNED_LABEL = "io.cri-containerd.pinned=pinned"


def find_sandbox_image(names: Iterable[str]) -> Optional[str]:
    """The image that pods get their namespaces from: the one whose repository's last part is ``pause``.

    None without one. Raises :class:`BundleError` when there are two: which is meant cannot be told.
    """
    found = sorted({name for name in names if _repository(name).rpartition("/")[2] == "pause"})
    if len(found) > 1:
        raise BundleError(
            "sandbox-ambiguous",
            f"the bundle has more than one image for the sandbox of pods: {', '.join(found)}",
            hint="build the bundle with one image called pause",
        )
    return found[0] if found else None


def image_labels(containerd_version: str) -> frozenset[str]:
    """The labels of an image that the kubelet must see and must not remove; a 1.6 cannot keep it from removing it."""
    return frozenset({MANAGED_LABEL, PINNED_LABEL} if release_of(containerd_version) >= (1, 7) else {MANAGED_LABEL})


def _repository(name: str) -> str:
    """An image's name without digest and tag (OCI distribution-spec 1.1, "Pulling manifests")."""
    path = name.partition("@")[0]
    head, slash, last = path.rpartition("/")
    return head + slash + last.partition(":")[0]
