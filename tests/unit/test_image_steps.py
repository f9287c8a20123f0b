"""The bundle's images in containerd: where they go, how they are marked, and that they come back."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from stratum.bundle.blobs import Blob
from stratum.bundle.images import IMAGES_DIRECTORY, ImageStore
from stratum.bundle.oci import Descriptor
from stratum.errors import BundleError, ExitCode, StratumError
from stratum.node import containerd
from stratum.node.criimages import MANAGED_LABEL, PINNED_LABEL, find_sandbox_image, image_labels
from stratum.node.layout import Layout
from stratum.node.stack import Stack
from stratum.node.units import UNIT_KUBELET
from stratum.node.versions import VersionRecord, read_record
from stratum.output import Output
from stratum.scripts import images, supervise
from stratum.scripts.context import Context
from tests.fakes import Desk, MachineHost
from tests.unit import test_prerequisites, test_watch
from tests.unit.test_prerequisites import bundle_of
from tests.unit.test_watch import CONTAINERD, LivingHost, NodeHost, Post, at_rest

kubernetes_host = test_prerequisites.host  # fixtures under their names
kubernetes, node, desk, root = test_watch.kubernetes, test_watch.node, test_watch.desk, test_watch.root

DEMO = "example.test/demo:1"


def plan(host: MachineHost) -> list[str]:
    context = Context(host, Output(stdout=io.StringIO(), stderr=io.StringIO()), None, None)
    stack = Stack(Layout(host))
    record = read_record(stack.layout, stack.layout.current() or "")
    assert record is not None
    actions = images.plan_import(context, stack, record)
    for action in actions:
        action.function()  # type: ignore[attr-defined]
    return [action.describe() for action in actions]


def test_images_of_a_container_host_go_where_ctr_looks_first_without_marks(node: LivingHost) -> None:
    assert node.image_namespaces[DEMO] == "default"
    assert node.image_labels[DEMO] == set()
    assert plan(node) == []


def test_images_of_a_kubernetes_node_go_where_cri_looks_and_are_marked(kubernetes: NodeHost) -> None:
    assert kubernetes.image_namespaces[DEMO] == "k8s.io"
    assert kubernetes.image_labels[DEMO] == {MANAGED_LABEL, PINNED_LABEL}
    assert plan(kubernetes) == []


def test_marks_that_were_lost_are_put_back_without_another_import(kubernetes: NodeHost) -> None:
    kubernetes.image_labels[DEMO] = {MANAGED_LABEL, "io.example=other"}
    assert plan(kubernetes) == [f"mark image {DEMO}"]
    assert kubernetes.image_labels[DEMO] == {MANAGED_LABEL, PINNED_LABEL, "io.example=other"}


@pytest.mark.parametrize("digest", [None, "sha256:" + "0" * 64])
def test_an_image_that_is_gone_or_another_one_is_imported_again(kubernetes: NodeHost, digest: Any) -> None:
    before = kubernetes.images.pop(DEMO)
    if digest:
        kubernetes.images[DEMO] = digest
    assert plan(kubernetes) == [f"import image {DEMO}"]
    assert kubernetes.images[DEMO] == before
    assert PINNED_LABEL in kubernetes.image_labels[DEMO]


def test_a_mark_waits_for_cri_which_takes_away_what_it_finds_on_a_new_image(
    kubernetes: NodeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    del kubernetes.images[DEMO]
    late = kubernetes.clock + 2.0
    sleep = kubernetes.sleep

    def slow_cri(seconds: float) -> None:
        sleep(seconds)
        if kubernetes.clock >= late and DEMO in kubernetes.images:
            kubernetes.image_labels[DEMO] = {MANAGED_LABEL}

    def list_images(namespace: str) -> dict[str, containerd.ImageState]:
        if kubernetes.clock < late:
            kubernetes.image_labels[DEMO] = set()
        return found(stack_ctr, namespace)

    found = containerd.Ctr.images
    stack_ctr = Stack(Layout(kubernetes)).ctr
    monkeypatch.setattr(kubernetes, "sleep", slow_cri)
    monkeypatch.setattr(containerd.Ctr, "images", lambda self, namespace: list_images(namespace))
    plan(kubernetes)
    assert kubernetes.clock >= late
    assert kubernetes.image_labels[DEMO] == {MANAGED_LABEL, PINNED_LABEL}


def test_marks_that_containerd_does_not_keep_are_an_error(
    kubernetes: NodeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubernetes.image_labels[DEMO] = {MANAGED_LABEL}
    monkeypatch.setattr(containerd.Ctr, "label_image", lambda self, namespace, name, labels: None)
    with pytest.raises(StratumError) as caught:
        plan(kubernetes)
    assert caught.value.reference == "image-mark"
    assert PINNED_LABEL in caught.value.message


@pytest.mark.parametrize(("release", "pinned"), [("1.6.20~ds1", False), ("1.7.24", True), ("2.1.9", True)])
def test_a_release_is_asked_for_the_marks_that_it_knows(release: str, pinned: bool) -> None:
    assert (PINNED_LABEL in image_labels(release)) == pinned
    assert MANAGED_LABEL in image_labels(release)


# -- the watch ------------------------------------------------------------------------------------------


def database_changes(host: MachineHost) -> None:
    path = Path(host.root + str(containerd.DATABASE))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * (path.stat().st_size + 1 if path.exists() else 1))


def watched(host: LivingHost) -> Post:
    """A watch at rest; importing and marking change containerd's database."""
    database_changes(host)
    for command in ("import", "label"):
        start = f"/opt/stratum/node/current/bin/ctr --address {containerd.ADDRESS} --namespace"
        for namespace in ("default", "k8s.io"):
            host.hooks[f"{start} {namespace} images {command}"] = lambda: database_changes(host)
    return at_rest(host)


def remove(host: MachineHost) -> None:
    del host.images[DEMO]
    database_changes(host)


def asked(host: MachineHost) -> int:
    return len([line for line in host.commands if line.endswith("images list")])


@pytest.mark.parametrize("name", ["node", "kubernetes"])
def test_an_image_that_was_removed_comes_back(name: str, request: pytest.FixtureRequest) -> None:
    host: LivingHost = request.getfixturevalue(name)
    watch = watched(host)
    before = host.images[DEMO]
    remove(host)
    assert watch.look().endswith(": put right")
    assert host.images[DEMO] == before
    (said,) = watch.said()
    assert DEMO in said
    host.clock += 60
    assert watch.look() == "version 1.0.0 is running"
    assert watch.said() == []


def test_a_mark_that_was_taken_away_comes_back(kubernetes: NodeHost) -> None:
    watch = watched(kubernetes)
    kubernetes.image_labels[DEMO].discard(PINNED_LABEL)
    database_changes(kubernetes)
    watch.look()
    assert PINNED_LABEL in kubernetes.image_labels[DEMO]


def test_containerd_is_asked_once_a_minute_where_its_database_changes_all_the_time(node: LivingHost) -> None:
    watch = watched(node)
    for _ in range(40):
        database_changes(node)
        node.clock += 15
        watch.look()
    assert 9 <= asked(node) <= 11
    node.commands.clear()
    for _ in range(40):
        node.clock += 15
        watch.look()
    assert asked(node) <= 1, "no more than what was due"


def test_a_change_within_the_minute_is_not_forgotten(node: LivingHost) -> None:
    watch = watched(node)
    database_changes(node)
    watch.look()
    remove(node)
    watch.look()
    assert DEMO not in node.images
    node.clock += 60
    watch.look()
    assert DEMO in node.images


def test_who_removes_it_again_and_again_is_left_to_it_and_named(node: LivingHost) -> None:
    watch = watched(node)
    for _ in range(8):
        if DEMO in node.images:
            remove(node)
        node.clock += 61
        status = watch.look()
    assert "was removed from containerd" in status
    assert DEMO not in node.images
    assert len([line for line in watch.said() if line.endswith(": put right")]) == 3


def test_while_containerd_is_down_its_images_are_not_asked_for(node: LivingHost) -> None:
    watch = watched(node)
    remove(node)
    node.silent = True
    node.commands.clear()
    watch.look()
    assert asked(node) == 0
    node.silent = False
    watch.look()
    assert DEMO in node.images


def test_an_import_that_fails_is_said_and_tried_again(node: LivingHost) -> None:
    watch = watched(node)
    start = f"/opt/stratum/node/current/bin/ctr --address {containerd.ADDRESS} --namespace default images import"
    node.failing[start] = 1
    remove(node)
    assert "was removed from containerd" in watch.look()
    node.clock += 61
    watch.look()
    assert DEMO in node.images


# -- the sandbox ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["registry.k8s.io/pause:3.10", "pause:3", "pause", "registry:5000/pause", "r.test/a/pause@sha256:" + "0" * 64],
)
def test_the_sandbox_is_the_image_called_pause(name: str) -> None:
    assert find_sandbox_image(["example.test/demo:1", name, "r.test/pause/other:1", "r.test/pause-win:1"]) == name


def test_without_an_image_called_pause_there_is_none() -> None:
    assert find_sandbox_image(["example.test/demo:pause", "pause.test:5000/demo", "r.test/unpause:1"]) is None


def test_two_of_them_are_an_error_that_names_both() -> None:
    with pytest.raises(BundleError) as caught:
        find_sandbox_image(["r.test/pause:3.9", "r.test/pause:3.10"])
    assert caught.value.reference == "sandbox-ambiguous"
    assert "r.test/pause:3.9" in caught.value.message
    assert "r.test/pause:3.10" in caught.value.message


def record_of(*names: str, kubelet: bool = True) -> VersionRecord:
    tops = tuple(
        {
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": f"sha256:{number:064x}",
            "size": 1,
            "annotations": {"io.containerd.image.name": name},
        }
        for number, name in enumerate(names)
    )
    components = (("containerd", "1.7.24", "x"), *((("kubelet", "1.34.1", "y"),) if kubelet else ()))
    return VersionRecord("demo", "1", 1, "sha256:0", components, tops, ())


def test_a_kubelet_without_it_is_warned_of_and_a_container_host_needs_none() -> None:
    pause = "registry.k8s.io/pause:3.10"
    assert images.sandbox_image(record_of(pause, DEMO)) == pause
    assert images.check_sandbox(record_of(pause, DEMO)) == []
    (finding,) = images.check_sandbox(record_of(DEMO))
    assert finding.severity == "warn"
    assert "pause" in finding.message
    assert images.check_sandbox(record_of(DEMO, kubelet=False)) == []
    assert images.sandbox_image(record_of(pause, kubelet=False)) == ""


def test_a_first_up_that_is_repeated_has_nothing_to_do(desk: Desk, kubernetes: NodeHost) -> None:
    bundle = bundle_of(desk, kubelet=True, version="1.0.0")
    kubernetes.commands.clear()
    assert desk.up(kubernetes, bundle).status == ExitCode.DONE
    assert not [line for line in kubernetes.commands if "import" in line or "label" in line]
    assert kubernetes.active(CONTAINERD)


def test_a_boot_imports_only_what_is_not_there_and_before_the_kubelet_starts(kubernetes: NodeHost) -> None:
    def booted() -> list[str]:
        for unit in (UNIT_KUBELET, CONTAINERD):
            kubernetes.run(["systemctl", "stop", unit], timeout=60)
        kubernetes.commands.clear()
        context = Context(kubernetes, Output(stdout=io.StringIO(), stderr=io.StringIO()))
        supervise.bring_up(context, Stack(Layout(kubernetes)))
        lines = [line for line in kubernetes.commands if "systemctl start " in line or " images import " in line]
        return ["import" if " import " in line else line.split()[-1] for line in lines]

    assert booted() == [CONTAINERD, UNIT_KUBELET]
    del kubernetes.images[DEMO]
    assert booted() == [CONTAINERD, "import", UNIT_KUBELET]


# -- what of it is read ---------------------------------------------------------------------------------


def blobs(host: MachineHost) -> list[Path]:
    """The blobs in the store, layers first; configurations and manifests are JSON."""
    directory = Path(host.root + str(IMAGES_DIRECTORY), "blobs/sha256")
    return sorted(directory.iterdir(), key=lambda path: path.read_bytes().startswith(b"{"))


def test_layers_of_an_image_that_containerd_has_are_not_read(
    kubernetes: NodeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are gigabytes, and each start of the node would wait for them."""
    read: list[str] = []
    opened = ImageStore.open

    def noting(store: ImageStore, descriptor: Descriptor) -> Blob:
        read.append(descriptor.hex)
        return opened(store, descriptor)

    monkeypatch.setattr(ImageStore, "open", noting)
    layer = blobs(kubernetes)[0].name
    assert plan(kubernetes) == []
    assert read and layer not in read
    del kubernetes.images[DEMO]
    assert plan(kubernetes) == [f"import image {DEMO}"]
    assert layer in read


@pytest.mark.parametrize("what", ["a layer cut short", "all of it gone"])
def test_damage_to_the_copy_of_an_image_that_containerd_has_keeps_no_node_down(kubernetes: NodeHost, what: str) -> None:
    for path in blobs(kubernetes)[: 1 if what == "a layer cut short" else None]:
        path.write_bytes(b"cut") if what == "a layer cut short" else path.unlink()
    for unit in (UNIT_KUBELET, CONTAINERD):
        kubernetes.run(["systemctl", "stop", unit], timeout=60)
    context = Context(kubernetes, Output(stdout=io.StringIO(), stderr=io.StringIO()))
    supervise.bring_up(context, Stack(Layout(kubernetes)))
    assert kubernetes.active(UNIT_KUBELET)
    # Once it has to be imported there is an error that says what to do.
    del kubernetes.images[DEMO]
    with pytest.raises(StratumError) as caught:
        plan(kubernetes)
    assert (caught.value.reference, caught.value.hint) == ("image-missing", "run: stratum up --bundle FILE")


def test_another_image_under_the_name_is_seen_without_the_copy_where_its_digest_is_known(kubernetes: NodeHost) -> None:
    for path in blobs(kubernetes):
        path.unlink()
    kubernetes.images[DEMO] = "sha256:" + "f" * 64
    with pytest.raises(StratumError, match=r"its blobs are not under"):
        plan(kubernetes)
