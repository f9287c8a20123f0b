"""Whether published ports still work is seen in the rules of either backend of the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratum.host.hostports import rules_present
from tests.fakes import MachineHost, make_tree


@pytest.mark.parametrize("backend", ["iptables", "nft", None])
def test_the_rules_of_either_backend_count(tmp_path: Path, backend: str | None) -> None:
    host = MachineHost(str(make_tree(tmp_path / "root", live=True)), {})
    (tmp_path / "root/usr/bin/nft").write_text("#!")
    (tmp_path / "root/usr/bin/nft").chmod(0o755)
    host.chains["CNI-HOSTPORT-DNAT"] = []
    host.failing = {name: 9 for name in ("iptables", "nft") if name != backend}
    assert rules_present(host) is (backend is not None)
    assert all("list" in line for line in host.commands), "it only looks"


def test_a_host_with_neither_program_has_no_rules(tmp_path: Path) -> None:
    host = MachineHost(str(make_tree(tmp_path / "root", live=True)), {})
    host.unlink("/usr/bin/iptables")
    assert not rules_present(host)
    assert host.commands == []
