"""Images that are imported for a Kubernetes node, as CRI of each containerd release shows them to the kubelet."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Callable, Optional, cast

import pytest

from stratum.bundle.images import IMAGES_DIRECTORY
from stratum.bundle.oci import digest_of
from stratum.node import containerd
from stratum.node.containerd import Ctr
from stratum.node.stack import Stack
from stratum.node.versions import VersionRecord
from stratum.output import Output
from stratum.scripts import images
from stratum.scripts.context import Context
from stratum.system import Completed, Host, HostPath, PathLike, command_failure
from tests.lab import packages
from tests.lab.cri import Cri
from tests.lab.image import Image
from tests.lab.machine import wait_until
from tests.lab.nspawn import NspawnMachine
from tests.unit.hosting import put

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass
class Inside(Host):
    """A host whose files are a tree here, and whose commands run in a machine."""

    lab: Optional[NspawnMachine] = None

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def listens(self, path: PathLike) -> bool:
        return True

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        check: bool = True,
        env: Optional[Mapping[str, str]] = None,
        feed: Optional[Callable[[BinaryIO], None]] = None,
    ) -> Completed:
        assert self.lab is not None
        pipe = io.BytesIO()
        if feed:
            feed(pipe)
        ran = self.lab.run(argv, timeout=timeout, check=False, input=pipe.getvalue())
        done = Completed(tuple(argv), ran.status, ran.raw_stdout, ran.raw_stderr)
        if check and ran.status:
            raise command_failure(done)
        return done


@dataclass
class Part:
    """As much of a stack as an import asks for."""

    host: Host

    @property
    def ctr(self) -> Ctr:
        return Ctr(self.host, HostPath("/opt/lab"))


@pytest.mark.parametrize("suite", ["bookworm", "trixie", "unstable"])
def test_the_kubelet_sees_imported_images_at_once_and_as_pinned_where_the_release_can(
    suite: str, machine: NspawnMachine, demo_image: Image, tmp_path: Path
) -> None:
    found = packages.fetch(suite)["containerd"]
    for name in ("containerd", "ctr", "containerd-shim-runc-v2"):
        machine.copy_in(found.tree / "usr/bin" / name, f"/opt/lab/{name}", 0o755)
    machine.write(str(containerd.CONFIG_PATH), containerd.render_config(found.version))
    start = ["systemd-run", "--unit=node-containerd", "/opt/lab/containerd", "--config", str(containerd.CONFIG_PATH)]
    machine.run(start)

    host = Inside(str(tmp_path), lab=machine)
    for digits, blob in demo_image.blobs().items():
        put(host, str(IMAGES_DIRECTORY / "blobs/sha256" / digits), blob)
    top = {
        "mediaType": MANIFEST,
        "digest": digest_of(demo_image.manifest),
        "size": len(demo_image.manifest),
        "annotations": {"io.containerd.image.name": demo_image.reference},
    }
    components = (("containerd", found.version, ""), ("kubelet", "1.34.1", ""))
    record = VersionRecord("demo", "1", 1, "", components, (top,), ())
    context = Context(host, Output(stdout=io.StringIO(), stderr=io.StringIO()), None, None)
    stack = cast(Stack, Part(host))
    wait_until("containerd answers", stack.ctr.answers, 60)

    def bring() -> list[str]:
        actions = images.plan_import(context, stack, record)
        for action in actions:
            action.function()  # type: ignore[attr-defined]
        return [action.describe() for action in actions]

    pinned = found.version >= "1.7"
    cri = Cri(machine.path_in_machine(str(containerd.ADDRESS)))
    assert bring() == [f"import image {demo_image.reference}"]
    assert cri.images() == {demo_image.reference: pinned}
    assert bring() == []

    # A restart of containerd leaves it so, and what is removed behind its back comes back.
    machine.run(["systemctl", "stop", "node-containerd"])
    machine.run(start)
    wait_until("containerd answers", stack.ctr.answers, 60)
    assert bring() == []
    cri.close()
    cri = Cri(machine.path_in_machine(str(containerd.ADDRESS)))
    assert cri.images() == {demo_image.reference: pinned}
    machine.run(
        ["/opt/lab/ctr", "-a", containerd.ADDRESS, "-n", "k8s.io", "images", "rm", "--sync", demo_image.reference]
    )
    assert images.find_missing(stack, record, images.image_digests(host, record)) == [demo_image.reference]
    bring()
    assert cri.images() == {demo_image.reference: pinned}

    # As the kubelet removes one (ImageService/RemoveImage), by its name.
    database = machine.run(["stat", "-c", "%Y %s", containerd.DATABASE]).stdout
    assert database.split()[1] != "0"
    cri.remove(demo_image.reference)
    assert cri.images() == {}
    assert bring() == [f"import image {demo_image.reference}"]
    assert cri.images() == {demo_image.reference: pinned}
    cri.close()
