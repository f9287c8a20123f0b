"""The generation of the firewall's rules, as the kernel tells it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stratum.host.rulesets import read_generation
from tests import netlink
from tests.fakes import MachineHost, make_tree


@dataclass
class AnsweringHost(MachineHost):
    """A machine whose kernel answers with ``datagrams``."""

    datagrams: list[bytes] = field(default_factory=list)
    asked: list[bytes] = field(default_factory=list)

    def ask_netlink(self, protocol: int, request: bytes, is_last: Callable[[bytes], bool]) -> list[bytes]:
        assert protocol == netlink.NETFILTER
        assert [is_last(datagram) for datagram in self.datagrams] == [False] * (len(self.datagrams) - 1) + [True]
        self.asked.append(request)
        return self.datagrams


@pytest.fixture
def host(tmp_path: Path) -> AnsweringHost:
    made = AnsweringHost(str(make_tree(tmp_path / "root", live=True)), {})
    made.datagrams = [netlink.generation(0x01020304)]
    return made


def test_the_number_is_read_with_one_question(host: AnsweringHost) -> None:
    assert read_generation(host) == 0x01020304
    assert [struct.unpack_from("=IHH", request) for request in host.asked] == [(20, 0x0A10, 1)]
    assert host.commands == []


def test_what_comes_before_the_answer_is_passed_over(host: AnsweringHost) -> None:
    host.datagrams = [netlink.message(99, bytes(8)), *host.datagrams]
    assert read_generation(host) == 0x01020304


@pytest.mark.parametrize("code", [-22, -1])
def test_a_kernel_that_does_not_tell_has_no_number(host: AnsweringHost, code: int) -> None:
    host.datagrams = [netlink.message(2, struct.pack("=i", code) + bytes(16))]
    assert read_generation(host) is None


def test_a_host_without_netlink_has_no_number(host: AnsweringHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[bytes]:
        raise OSError(93, "Protocol not supported")

    monkeypatch.setattr(host, "ask_netlink", refuse)
    assert read_generation(host) is None


def test_a_kernel_that_would_load_a_module_for_the_answer_is_not_asked(host: AnsweringHost) -> None:
    modules = Path(host.root, "proc/modules")
    modules.write_text("ip_tables 1 0 - Live 0x0\n")
    assert read_generation(host) is None and host.asked == []
    Path(host.root, "sys/module/nf_tables").mkdir(parents=True)
    assert read_generation(host) is not None
