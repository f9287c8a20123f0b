"""The order of test files when several processes share them: what takes long begins early.

Whichever process is free takes the next file, so the small ones at the end let all processes end together. Files of
the qemu tier, whose machines keep both cores busy, alternate with others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest

#: Files that take more than half a minute, in each tier the longest first.
LONG = (
    "vm/test_power_cut.py",
    "vm/test_kubernetes_node.py",
    "vm/test_whole_way.py",
    "vm/test_selinux.py",
    "vm/test_prerequisites.py",
    "vm/test_firewalld.py",
    "vm/test_busybox.py",
    "vm/test_lab.py",
    "nspawn/test_upgrade_killed.py",
    "nspawn/test_upgrade.py",
    "nspawn/test_interruptions.py",
    "unit/test_faults.py",
    "nspawn/test_selinux_module.py",
    "nspawn/test_uninstall.py",
    "nspawn/test_hostile_hosts.py",
    "nspawn/test_commands.py",
    "nspawn/test_supervisor_firewalld.py",
    "nspawn/test_supervisor.py",
    "unit/test_walks.py",
    "unit/test_zipapp.py",
)

_TIERS = ("vm", "nspawn", "unit")


def long_first(files: Iterable[str]) -> list[str]:
    """Return test files, given by their path below ``tests``, in the order in which to begin them."""
    chosen = sorted(set(files), key=_rank)
    machines = [file for file in chosen if file.startswith("vm/")]
    others = [file for file in chosen if not file.startswith("vm/")]
    return [file for file in chain.from_iterable(zip_longest(machines, others)) if file is not None]


def _rank(file: str) -> tuple[int, int, str]:
    tier = file.partition("/")[0]
    return _place(LONG, file), _place(_TIERS, tier), file


def _place(known: Sequence[str], value: str) -> int:
    return known.index(value) if value in known else len(known)
