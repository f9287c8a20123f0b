"""The node's name (report rows 9 and 10): from the host's, in lower case, or refused where it can be said."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stratum.errors import HostRefusedError, UsageError
from stratum.host.nodename import CONFIGURED, FLAG, HOST_NAME, RECORDED, choose_node_name
from stratum.kubenames import why_no_node_name
from stratum.system import Host
from tests.unit.hosting import content, put

NAME = "/proc/sys/kernel/hostname"
FIVE = ".".join(["a23456789-b2"] * 6)  # 77 characters, each label short


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(str(tmp_path), {})


@pytest.mark.parametrize("name", ["node-1", "node-1.example.com", "1node", "10.0.0.1", "a" * 63])
def test_a_legal_name_of_the_host_is_the_nodes(host: Host, name: str) -> None:
    put(host, NAME, name + "\n")
    choice = choose_node_name(host, "", "")
    assert (choice.name, choice.source, choice.note) == (name, HOST_NAME, "")


def test_upper_case_is_lowered_said_and_left_to_the_host(host: Host) -> None:
    put(host, NAME, "PHost01\n")
    choice = choose_node_name(host, "", "")
    assert choice.name == "phost01" and "PHost01 in lower case" in choice.note
    assert content(host, NAME) == b"PHost01\n"


@pytest.mark.parametrize(
    ("name", "why", "near"),
    [
        ("node_1", "must consist of a-z, 0-9, - and .", "node-1"),
        ("Node_1.Example", "it has '_'", "node-1.example"),
        ("-node-", "must begin and end with a letter or digit", "node"),
        ("a..b", "must begin and end", "a.b"),
        ("caf\u00e9", r"it has '\xe9'", "caf"),
        ("a" * 64, "has 64 characters; the name becomes a label, which has at most 63", "a" * 63),
        (FIVE, "has 77 characters", "a23456789-b2"),
        ("localhost", "no name that tells one host from another", "NAME"),
        ("LOCALHOST.localdomain", "no name that tells one host from another", "NAME"),
        ("(none)", "no name that tells one host from another", "NAME"),
        ("linux", "no name that tells one host from another", "NAME"),
        ("", "no name that tells one host from another", "NAME"),
        ("___", "must consist of", "NAME"),
    ],
)
def test_a_name_that_no_node_can_have_is_refused_with_a_legal_one(host: Host, name: str, why: str, near: str) -> None:
    put(host, NAME, name + "\n")
    with pytest.raises(HostRefusedError) as caught:
        choose_node_name(host, "", "")
    assert why in caught.value.message
    assert caught.value.hint == f"give the node a name: {FLAG} {near} (the host keeps its own)"


def test_a_host_whose_name_cannot_be_read_has_none(host: Host) -> None:
    with pytest.raises(HostRefusedError):
        choose_node_name(host, "", "")


def test_a_configured_name_wins_over_the_hosts(host: Host) -> None:
    put(host, NAME, "node_1\n")
    choice = choose_node_name(host, "other", "")
    assert (choice.name, choice.source) == ("other", CONFIGURED)


@pytest.mark.parametrize("name", ["Other", "a_b", "localhost", "a" * 64])
def test_a_configured_name_that_no_node_can_have_is_a_usage_error(host: Host, name: str) -> None:
    put(host, NAME, "node\n")
    for recorded in ("", "node"):
        with pytest.raises(UsageError) as caught:
            choose_node_name(host, name, recorded)
        assert caught.value.reference == "node-name"


def test_a_recorded_name_outlives_a_new_name_of_the_host(host: Host) -> None:
    put(host, NAME, "renamed\n")
    for configured in ("", "first"):
        choice = choose_node_name(host, configured, "first")
        assert (choice.name, choice.source) == ("first", RECORDED)


def test_another_name_than_the_recorded_one_is_an_error_that_says_how_to_move(host: Host) -> None:
    put(host, NAME, "second\n")
    with pytest.raises(UsageError) as caught:
        choose_node_name(host, "second", "first")
    assert caught.value.reference == "node-name-differs"
    assert "brought up as first" in caught.value.message
    assert "stratum uninstall, then join again" in (caught.value.hint or "")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text(alphabet=st.characters(blacklist_characters="\n\x00", blacklist_categories=["Cs"]), max_size=80))
def test_whatever_the_host_is_called_the_name_is_legal_or_refused_with_a_hint(host: Host, name: str) -> None:
    put(host, NAME, name + "\n")
    try:
        choice = choose_node_name(host, "", "")
    except HostRefusedError as error:
        proposed = (error.hint or "").partition(f"{FLAG} ")[2].split(" ")[0]
        assert proposed == "NAME" or why_no_node_name(proposed) == ""
        return
    assert why_no_node_name(choice.name) == ""
    assert choice.name == name.strip().lower()
    assert (choice.note == "") == (choice.name == name.strip())
