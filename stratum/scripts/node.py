"""The plans behind the steps of ``up``: what of each part is left to do on this host."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Callable, Optional

from stratum import boot, systemd
from stratum.bundle.images import IMAGES_DIRECTORY
from stratum.bundle.oci import Description
from stratum.bundle.place import COMPONENTS, Placement, component_dir
from stratum.bundle.verify import VerifiedBundle
from stratum.errors import BundleError, StratumError
from stratum.host import firewalld, masquerade, network, persistence, program
from stratum.host.preflight import Need
from stratum.node import cni, containerd, proxy
from stratum.node.backend import Backend
from stratum.node.history import note_activation, read_history
from stratum.node.layout import Layout
from stratum.node.settings import Settings
from stratum.node.stack import Stack
from stratum.node.units import UNIT_LOCALDNS, UNIT_LOCALDNS_NETWORK, stack_units
from stratum.node.versions import VersionRecord, assemble, differences, outdated, read_record, relink, usable_record
from stratum.receipt import STATE_DIRECTORY, Entry
from stratum.scripts import kubelet, localdns
from stratum.scripts.context import Context
from stratum.scripts.goal import Goal
from stratum.scripts.runtime import plan_runtime
from stratum.staging import OWN_ROOT
from stratum.steps import RELOAD_SYSTEMD, Action, Call, PlaceLink, SetMode, Work, plan_directory, plan_file, withdraw
from stratum.system import Host, HostPath

# Directories that fill while the node runs; whatever is in them is Stratum's to remove.
DATA_TREES = (containerd.DATA_ROOT, HostPath("/run/stratum"), STATE_DIRECTORY / "images", STATE_DIRECTORY / "runtime")
# An image takes its own size in containerd's content store and, unpacked, about three times that (an estimate:
# only the layers themselves know).
_IMAGE_FACTOR = 4
_PLACES = 32  # directories of a version, of staging, and the programs' own


def record_of(bundle: VerifiedBundle) -> VersionRecord:
    """What the version directory will say of itself."""
    description = bundle.description
    return VersionRecord(
        description.name,
        description.version,
        description.serial,
        bundle.index.bundle_for(bundle.platform).digest,
        tuple((item.name, item.version, item.layer) for item in description.components),
        tuple(item.to_json() for item in bundle.images),
        tuple(dict.fromkeys(signer.key_id for signer in bundle.verdict.signers)) if bundle.verdict else (),
    )


def plugins_of(description: Description) -> tuple[str, ...]:
    """The names of the CNI plugins that a bundle places."""
    paths = (HostPath(entry.path) for component in description.components for entry in component.files)
    return tuple(sorted(path.name for path in paths if path.parent == HostPath("cni/bin")))


def needs(context: Context, placement: Placement) -> list[Need]:
    """What an installation takes of each file system."""
    images = placement.image_size()
    size, inodes = placement.component_space()
    # The version has each file under a second name, which takes an inode on some file systems (tmpfs).
    names = inodes + _PLACES if inodes else 0
    fresh = context.archive is not None and not context.host.lexists(program.CURRENT)
    return [
        Need(COMPONENTS, size, inodes + names),
        Need(program.PROGRAMS, os.stat(context.archive).st_size if fresh and context.archive else 0, 0),
        Need(IMAGES_DIRECTORY, images, len(placement.missing_images()) * 8),
        Need(containerd.DATA_ROOT, images * _IMAGE_FACTOR, 0),
    ]


def plan_state(work: Work) -> list[Action]:
    """Record the trees that will fill, before they do; make the directory where libcni keeps its results."""
    trees = [Entry(path, "tree") for path in DATA_TREES if work.receipt.get(path) is None]
    trees += [entry for entry in _runtime_entries() if work.receipt.get(entry.path) is None]
    actions: list[Action] = []
    if trees:
        names = ", ".join(str(entry.path) for entry in trees)
        actions.append(Call("record", names, lambda: work.receipt.record(*trees)))
    return [*actions, *plan_directory(work.host, OWN_ROOT), *plan_directory(work.host, cni.RESULTS)]


def _runtime_entries() -> list[Entry]:
    """Entries for what unpacking the compiled parts made, where that is not in a tree of ours already."""
    # The state directory has an entry of its own: it is what holds the record.
    made = [HostPath(path) for path in boot.created_paths() if HostPath(path) != STATE_DIRECTORY]
    outside = [path for path in made if not any(tree in (path, *path.parents) for tree in DATA_TREES)]
    leaves = [path for path in outside if not any(path in other.parents for other in made)]
    return [Entry(path, "tree" if path in leaves else "directory") for path in outside]


def plan_modes(work: Work) -> list[Action]:
    """Give the files of versions, components and the program their modes again; one file may have several names."""
    actions: dict[tuple[int, int], Action] = {}
    for entry in work.receipt:
        if entry.is_below(OWN_ROOT) and entry.mode is not None and work.receipt.changed_mode(entry) is not None:
            info = work.host.lstat(entry.path)
            actions.setdefault((info.st_dev, info.st_ino), SetMode(entry.path, entry.mode))
    return list(actions.values())


def plan_unpack(context: Context, placement: Optional[Placement]) -> list[Action]:
    """One pass over the bundle for everything that is missing."""
    if placement is None:
        return []
    names = [f"{item.name} {item.version}" for item in placement.missing_components()]
    names += [f"image {item.name or item.digest}" for item in placement.missing_images()]
    if not names:
        return []

    def unpack() -> None:
        with context.out.progress("verify and unpack", placement.size()) as progress:
            placement.run(progress.advance)

    return [Call("verify and unpack", ", ".join(names), unpack)]


def plan_version(work: Work, layout: Layout, record: VersionRecord) -> list[Action]:
    """Make the version directory, or put back what is missing or changed in it."""
    directory = layout.version_dir(record.version)
    components = [component_dir(layer) for _, _, layer in record.components]
    if work.receipt.get(directory) is None and layout.host.lexists(directory):
        raise StratumError(
            "foreign-file", f"{directory}: there is an entry that Stratum did not make", hint=f"move {directory} away"
        )
    known = usable_record(layout, record.version)
    # The directory of the active version is not replaced, not even for a moment: its programs run.
    active = layout.current() == record.version
    if not active and (known is None or known.manifest != record.manifest):
        return [Call("assemble", str(directory), lambda: assemble(layout, work.receipt, record, components))]
    if differences(work.receipt, directory) or known != record or outdated(layout, record, components):
        return [Call("repair", str(directory), lambda: relink(layout, work.receipt, record, components))]
    return []


def plan_configuration(work: Work, goal: Goal, warn: Optional[Callable[[str], object]] = None) -> list[Action]:
    """The configuration of each program of the stack, in the format of its release; ``warn`` as in plan_runtime.

    Raises :class:`StratumError` for settings that a program would not take, and a worker without a way to join.
    """
    containerd_version(goal.record)
    actions = [*plan_runtime(work, goal.record, goal.settings, warn), *proxy.plan_proxy(work, goal.settings)]
    plans = [functools.partial(kubelet.plan_files, work, goal)]
    if goal.serves_dns:
        plans.append(functools.partial(localdns.plan_configuration, work, goal.settings))
    for plan in plans:
        try:
            actions += plan()
        except StratumError as error:
            if warn is None:
                raise
            # One part that cannot be as it was must not keep the others from it.
            warn(f"{error.message}; what there is of it stays as it is")
    return list(dict.fromkeys(actions))


def containerd_version(record: VersionRecord) -> str:
    """The version of containerd, without which there is no node; raises :class:`BundleError`."""
    version = record.component_version("containerd")
    if version is None:
        raise BundleError(
            "no-containerd",
            f"bundle {record.bundle} {record.version} has no component called containerd",
            hint="every bundle needs one; see the definitions that come with Stratum",
        )
    return version


def bridge_subnet(host: Host, settings: Settings) -> str:
    """The subnet of the bridge network under these settings. Raises :class:`StratumError`."""
    return cni.choose_subnet(host, settings.spec.network.bridge_subnet, settings.cluster_cidrs)


def plan_network(work: Work, layout: Layout, goal: Goal) -> list[Action]:
    """The links to the plugins, and the bridge network for a version that has the plugin for it."""
    links = cni.plan_plugin_links(work, goal.plugins, layout.cni_bin_dir)
    if goal.bridged:
        subnet = bridge_subnet(work.host, goal.settings)
        actions = plan_file(work, cni.CONFIG_PATH, cni.render_network(subnet))
        known = cni.subnet_in_force(work.host)
        if known not in (None, subnet) and network.interface_exists(work.host, cni.BRIDGE):
            # The plugin refuses a bridge with another address than the subnet's first.
            remove = functools.partial(network.remove_bridge, work.host, cni.BRIDGE)
            actions.append(Call("remove bridge", f"{cni.BRIDGE} of {known}", remove))
        return actions + links
    if goal.settings.spec.network.bridge and "bridge" not in goal.plugins:
        raise StratumError(
            "no-bridge-plugin",
            "network.bridge is true, and the bundle has no CNI plugin called bridge",
            hint="take a bundle with the CNI plugins, or take network.bridge out of the configuration",
        )
    actions = plan_directory(work.host, cni.CONFIG_PATH.parent)
    if work.receipt.owns(cni.CONFIG_PATH):
        # The version before had it; without its plugin every container would fail to start.
        actions += _plan_unbridge(work)
        actions.append(Call("remove", str(cni.CONFIG_PATH), lambda: withdraw(work, cni.CONFIG_PATH)))
    return actions + links


def _plan_unbridge(work: Work) -> list[Action]:
    """Take the bridge and its part of the firewall away; while containers are attached they keep their network."""
    host = work.host
    if not host.live or cni.read_attachments(host):
        return []
    actions = [*firewalld.plan_untrust(work), *masquerade.plan_removal(host)]
    if network.interface_exists(host, cni.BRIDGE):
        actions.append(Call("remove bridge", cni.BRIDGE, lambda: network.remove_bridge(host, cni.BRIDGE)))
    return actions


def plan_units(work: Work, layout: Layout, goal: Goal) -> list[Action]:
    """The units of the stack and the supervisor's; systemd reads them again when one is new.

    Units that the node had and has no more go, stopped first.
    """
    spec = goal.unit_spec(layout)
    actions = Backend(work, layout, spec).plan_units(spec, stop_removed=True, reload=False)
    actions += persistence.plan_unit(work, program.supervisor_argv(work.host))
    actions = list(dict.fromkeys(actions))
    if work.host.live and (actions or _needs_reload(work, stack_units(spec))):
        actions.append(RELOAD_SYSTEMD)
    return actions


def _needs_reload(work: Work, units: Sequence[str]) -> bool:
    # A run that was cut off between a unit file and the reload leaves this behind.
    known = [UNIT_LOCALDNS_NETWORK] if UNIT_LOCALDNS in units else []
    states = systemd.read_units(work.host, (*known, *units, persistence.UNIT))
    return any(state.needs_reload or not state.installed for state in states.values())


def plan_program(context: Context, work: Work) -> list[Action]:
    """The pyz that runs, in its place."""
    if context.archive is None:
        raise StratumError(
            "not-a-pyz",
            "stratum runs from a source tree and cannot install itself",
            hint="build the file (python3 build_zipapp.py), then run dist/stratum.pyz up",
        )
    return program.plan_program(work, context.archive)


def plan_old_programs(context: Context, work: Work) -> list[Action]:
    """Remove the copies of the pyz that nothing will go back to."""
    return program.plan_prune(work, context.archive) if context.archive else []


def plan_activate(work: Work, layout: Layout, record: VersionRecord) -> list[Action]:
    """Turn the link to the version."""
    if layout.current() == record.version:
        return []
    return [PlaceLink(layout.current_link, record.version)]


def plan_history(work: Work, record: VersionRecord) -> list[Action]:
    """Note the version that was seen ready, for ``rollback``."""
    history = read_history(work.host)
    if history and history[-1].version == record.version:
        return []
    return [Call("note", record.version, lambda: note_activation(work.host, work.receipt, record.version))]


def print_running(context: Context, stack: Stack) -> None:
    """What runs now, in a few lines."""
    version = stack.layout.current()
    record = read_record(stack.layout, version) if version else None
    if record is None:
        return
    out = context.out
    out.result(f"running: {record.bundle} {record.version}")
    out.result("  " + ", ".join(f"{name} {number}" for name, number, _ in record.components))
    command = program.COMMAND if program.why_no_link(context.host) else "stratum"
    out.result(f"  containerd at {containerd.ADDRESS}; try: {command} exec ctr version")
