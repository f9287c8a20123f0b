"""The order in which processes that share the tests begin them."""

from __future__ import annotations

from tests.order import LONG, long_first
from tests.pyz import ROOT

FILES = [str(path.relative_to(ROOT / "tests")) for path in sorted((ROOT / "tests").rglob("test_*.py"))]


def test_every_file_is_begun_once() -> None:
    assert sorted(long_first(FILES + FILES)) == FILES


def test_what_is_called_long_is_there_and_comes_before_the_rest_of_its_tier() -> None:
    assert set(LONG) <= set(FILES)
    for tier in ("vm", "nspawn", "unit"):
        begun = [file for file in long_first(FILES) if file.startswith(f"{tier}/")]
        long = [file for file in LONG if file.startswith(f"{tier}/")]
        assert begun[: len(long)] == long


def test_machines_under_qemu_begin_early_and_one_at_a_time() -> None:
    machines = [file for file in FILES if file.startswith("vm/")]
    begin = long_first(FILES)[: 2 * len(machines)]
    assert [file in machines for file in begin] == [True, False] * len(machines)
    assert long_first(machines) == [file for file in LONG if file in machines] + [f for f in machines if f not in LONG]
