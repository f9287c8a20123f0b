"""Which file decides a sysctl: order, precedence and syntax of sysctl.d(5)."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.host.sysctlfiles import (
    CONTROLS,
    Assignment,
    control_path,
    find_winner,
    normalize_key,
    parse_assignments,
    read_assignments,
    same_value,
)
from stratum.system import Host, HostPath
from tests.unit.hosting import link, put

FILE = HostPath("/etc/sysctl.d/x.conf")
FORWARD = "net.ipv4.ip_forward"


def winner(host: Host, key: str = FORWARD) -> Optional[tuple[str, Optional[str]]]:
    found = find_winner(read_assignments(host), key)
    return (str(found.path), found.value) if found else None


def parse(text: str) -> list[tuple[str, Optional[str], int]]:
    return [(item.key, item.value, item.line) for item in parse_assignments(text, FILE)]


@pytest.mark.parametrize(
    ("key", "normal"),
    [
        ("net.ipv4.ip_forward", "net/ipv4/ip_forward"),
        ("net/ipv4/ip_forward", "net/ipv4/ip_forward"),
        ("/net//ipv4/ip_forward", "net/ipv4/ip_forward"),
        ("net.ipv4.conf.eth0/100.rp_filter", "net/ipv4/conf/eth0.100/rp_filter"),
        ("net/ipv4/conf/eth0.100/rp_filter", "net/ipv4/conf/eth0.100/rp_filter"),
        ("hung_task", "hung_task"),
        ("", ""),
    ],
)
def test_both_spellings_of_a_key_are_one(key: str, normal: str) -> None:
    assert normalize_key(key) == normal


def test_a_key_is_found_below_proc_sys() -> None:
    assert control_path("net.ipv4.conf.eth0/1.forwarding") == CONTROLS / "net/ipv4/conf/eth0.1/forwarding"


def test_comments_blank_lines_and_nonsense_are_passed_over() -> None:
    text = "# a = 1\n;b = 1\n\n   \nno assignment\n= 3\n  c.d =  4  5 \r\n"
    assert parse(text) == [("c/d", "4  5", 7)]


def test_a_dash_ignores_failures_and_alone_takes_the_key_out() -> None:
    assert parse("-a.b = 1\n- c.d = 2\n-e.f\n-\n") == [("a/b", "1", 1), ("c/d", "2", 2), ("e/f", None, 3)]


def test_a_value_may_hold_an_equals_sign_and_be_empty() -> None:
    assert parse("a=b=c\nd=\n") == [("a", "b=c", 1), ("d", "", 2)]


def test_the_file_that_is_last_by_name_wins_whatever_its_directory(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    put(host, "/etc/sysctl.d/90-stratum.conf", "net.ipv4.ip_forward = 1\n")
    put(host, "/usr/lib/sysctl.d/99-zz.conf", "net/ipv4/ip_forward=0\n")
    put(host, "/run/sysctl.d/50-run.conf", "net.ipv4.ip_forward = 1\n")
    assert winner(host) == ("/usr/lib/sysctl.d/99-zz.conf", "0")


def test_a_file_hides_its_namesakes_in_later_directories(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    for directory, value in (("/usr/lib", 1), ("/usr/local/lib", 2), ("/run", 3), ("/etc", 4)):
        put(host, f"{directory}/sysctl.d/99-zz.conf", f"kernel.panic = {value}\n")
        assert winner(host, "kernel.panic") == (f"{directory}/sysctl.d/99-zz.conf", str(value))


def test_a_link_to_dev_null_hides_its_namesakes(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    put(host, "/dev/null")
    put(host, "/usr/lib/sysctl.d/99-zz.conf", "net.ipv4.ip_forward = 0\n")
    link(host, "/etc/sysctl.d/99-zz.conf", "/dev/null")
    assert winner(host) is None


def test_only_files_that_end_in_conf_are_read(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    for name in ("README", "99-a.conf.rpmsave", ".99-hidden.conf", "99-a.conf~"):
        put(host, f"/etc/sysctl.d/{name}", "net.ipv4.ip_forward = 0\n")
    assert winner(host) is None


def test_a_dangling_link_is_passed_over(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    link(host, "/etc/sysctl.d/99-sysctl.conf", "../sysctl.conf")
    assert winner(host) is None


def test_sysctl_conf_keeps_the_place_of_the_link_to_it(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    put(host, "/etc/sysctl.conf", "net.ipv4.ip_forward = 0\n")
    link(host, "/etc/sysctl.d/99-sysctl.conf", "../sysctl.conf")
    assert winner(host) == ("/etc/sysctl.d/99-sysctl.conf", "0")
    put(host, "/etc/sysctl.d/99-zz.conf", "net.ipv4.ip_forward = 1\n")
    assert winner(host) == ("/etc/sysctl.d/99-zz.conf", "1")


def test_sysctl_conf_without_a_link_is_applied_last(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    put(host, "/etc/sysctl.conf", "net.ipv4.ip_forward = 0\n")
    put(host, "/etc/sysctl.d/99-zz.conf", "net.ipv4.ip_forward = 1\n")
    assert winner(host) == ("/etc/sysctl.conf", "0")


def test_an_explicit_line_wins_over_a_later_pattern(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    key = "net.ipv4.conf.all.rp_filter"
    put(host, "/etc/sysctl.d/99-zz.conf", "net.ipv4.conf.*.rp_filter = 2\n")
    assert winner(host, key) == ("/etc/sysctl.d/99-zz.conf", "2")
    put(host, "/etc/sysctl.d/10-a.conf", f"{key} = 0\n")
    assert winner(host, key) == ("/etc/sysctl.d/10-a.conf", "0")


def test_no_pattern_goes_over_a_slash_or_into_a_key_that_was_taken_out(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    put(host, "/etc/sysctl.d/50.conf", "net.*.rp_filter = 2\n")
    assert winner(host, "net.ipv4.conf.all.rp_filter") is None
    put(host, "/etc/sysctl.d/50.conf", "net.ipv4.conf.*.rp_filter = 2\n-net.ipv4.conf.all.rp_filter\n")
    assert winner(host, "net.ipv4.conf.all.rp_filter") is None
    assert winner(host, "net.ipv4.conf.lo.rp_filter") == ("/etc/sysctl.d/50.conf", "2")


def test_taking_a_key_out_undoes_earlier_files(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    put(host, "/etc/sysctl.d/50.conf", "net.ipv4.ip_forward = 1\n")
    put(host, "/etc/sysctl.d/60.conf", "-net.ipv4.ip_forward\n")
    assert winner(host) is None


def test_bytes_that_are_not_text_do_not_stop_the_reading(tmp_path: Path) -> None:
    host = Host(str(tmp_path))
    put(host, "/etc/sysctl.d/50.conf", b"# caf\xe9\nkernel.hostname = \xff\nnet.ipv4.ip_forward = 0\n")
    assert winner(host) == ("/etc/sysctl.d/50.conf", "0")


def test_values_are_compared_word_by_word() -> None:
    assert same_value("32768\t60999\n", "32768 60999")
    assert not same_value("1", "11")


@given(st.text())
def test_no_text_makes_the_parser_fail(text: str) -> None:
    lines = text.split("\n")
    for item in parse_assignments(text, FILE):
        assert item.key
        assert lines[item.line - 1].strip()[0] not in "#;"


NAMES = st.text(st.characters(whitelist_categories=("Ll", "Nd"), max_codepoint=127), min_size=1)


@given(st.lists(NAMES, min_size=1, max_size=5), st.lists(NAMES, max_size=4), st.booleans(), st.text(" \t", max_size=3))
def test_what_is_written_is_read_back(parts: list[str], words: list[str], slashes: bool, blank: str) -> None:
    key, value = ("/" if slashes else ".").join(parts), " ".join(words)
    (item,) = parse_assignments(f"{blank}{key}{blank}={blank}{value}{blank}\n", FILE)
    assert item == Assignment("/".join(parts), value, FILE, 1)
    assert find_winner([item], key) == item


@given(st.lists(st.tuples(st.sampled_from(["a.b", "a/b", "a.*", "a.c"]), st.sampled_from("012")), max_size=8))
def test_the_last_explicit_assignment_decides(lines: list[tuple[str, str]]) -> None:
    text = "".join(f"{key} = {value}\n" for key, value in lines)
    explicit = [value for key, value in lines if key in ("a.b", "a/b")]
    patterns = [value for key, value in lines if key == "a.*"]
    found = find_winner(list(parse_assignments(text, FILE)), "a.b")
    assert (found.value if found else None) == next(iter([*explicit[-1:], *patterns[-1:]]), None)
