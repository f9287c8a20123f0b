"""The command of a unit file is read as systemd reads it. tests/nspawn asks systemd about the same lines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.errors import StratumError
from stratum.host.persistence import render_unit
from stratum.host.unitfile import UnitCommand, UnitFileError, UnitMissingError, is_masked, parse_unit, read_command
from stratum.host.unitwords import split_words
from stratum.system import Host, HostPath
from stratum.systemd import quote_argument, render_command
from tests.unitlines import BROKEN, COMMANDS

UNIT = HostPath("/etc/systemd/system/stratum.service")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    return Host(str(tmp_path), {})


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """One tree for all examples of a property; only the unit file in it changes."""
    return Host(str(tmp_path_factory.mktemp("root")), {})


def put(host: Host, text: str | bytes, path: str = str(UNIT)) -> None:
    real = Path(host.real(path))
    real.parent.mkdir(parents=True, exist_ok=True)
    real.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape"))


def command(host: Host, text: str | bytes) -> UnitCommand:
    put(host, text)
    return read_command(host, UNIT)


# -- the lines that the lab asks systemd about too ------------------------------------------------------


@pytest.mark.parametrize("line", COMMANDS, ids=list(COMMANDS))
def test_a_line_gives_the_program_and_the_arguments_that_systemd_runs(host: Host, line: str) -> None:
    text, executable, argv = COMMANDS[line]
    assert command(host, text) == UnitCommand(executable, argv)


@pytest.mark.parametrize("line", BROKEN, ids=list(BROKEN))
def test_a_file_that_systemd_refuses_or_that_does_not_tell_is_an_error(host: Host, line: str) -> None:
    with pytest.raises(UnitFileError) as caught:
        command(host, BROKEN[line])
    assert str(UNIT) in caught.value.message
    assert caught.value.reference == "unit-unreadable"
    assert "\n" not in caught.value.message


# -- specifiers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("100%%", "100%"), ("%n", "stratum.service"), ("%N %p", "stratum stratum"), ("%i%I", ""), ("%f", "/stratum"),
        ("%t/x", "/run/x"), ("%S%C%L%E", "/var/lib/var/cache/var/log/etc"), ("%u:%U:%g:%G:%h", "root:0:root:0:/root"),
        ("%Y", "/etc/systemd/system"), ("%y", str(UNIT)), ("%%n", "%n"), ("%-%/", "%-%/"), ("end %", "end %"),
        ("%m", "6a1f3c625f5d4e6a9d0c1b1f5c0e7a11"), ("%H", "node.example"), ("%l", "node"),
        ("%b", "11111111222233334444555555555555"), (r"\x25n", "stratum.service"), (r"\x25%n", "%n"),
    ],
)  # fmt: skip
def test_specifiers_are_replaced(host: Host, written: str, read: str) -> None:
    put(host, "6a1f3c625f5d4e6a9d0c1b1f5c0e7a11\n", "/etc/machine-id")
    put(host, "node.example\n", "/proc/sys/kernel/hostname")
    put(host, "11111111-2222-3333-4444-555555555555\n", "/proc/sys/kernel/random/boot_id")
    assert command(host, f'[Service]\nExecStart=/bin/x "{written}"\n').argv == ("/bin/x", read)


@pytest.mark.parametrize("letter", "aABdDMoqsTwWzZ1")
def test_a_specifier_that_depends_on_more_than_the_file_is_an_error_or_known(host: Host, letter: str) -> None:
    text = f"[Service]\nExecStart=/bin/x %{letter}\n"
    if letter == "T":
        assert command(host, text).argv[1] == "/tmp"
    else:
        with pytest.raises(UnitFileError, match=f"%{letter}"):
            command(host, text)


def test_a_specifier_whose_file_is_missing_is_an_error(host: Host) -> None:
    with pytest.raises(UnitFileError, match="%m cannot be told: No such file"):
        command(host, "[Service]\nExecStart=/bin/x %m\n")


def test_the_program_has_specifiers_and_no_variables(host: Host) -> None:
    found = command(host, "[Service]\nExecStart=/opt/100%%/$x\n")
    assert found == UnitCommand("/opt/100%/$x", ("/opt/100%/$x",))


def test_a_program_without_a_directory_is_looked_up_where_systemd_does(host: Host) -> None:
    for place in ("usr/bin", "usr/local/bin"):
        put(host, "#!", f"/{place}/tool")
        Path(host.real(f"/{place}/tool")).chmod(0o755)
    host.environ = {"PATH": "/nowhere"}
    assert command(host, "[Service]\nExecStart=tool a\n") == UnitCommand("/usr/local/bin/tool", ("tool", "a"))
    with pytest.raises(UnitFileError, match="other: no such program"):
        command(host, "[Service]\nExecStart=other\n")


# -- missing, masked, unreadable --------------------------------------------------------------------------


def test_a_unit_that_is_not_there_has_an_error_of_its_own(host: Host) -> None:
    with pytest.raises(UnitMissingError) as caught:
        read_command(host, UNIT)
    assert caught.value.reference == "unit-missing"
    (Path(host.root) / "etc/systemd/system/stratum.service").symlink_to("gone.service")
    with pytest.raises(UnitMissingError):
        read_command(host, UNIT)
    with pytest.raises(UnitMissingError):
        read_command(Host(f"{host.root}/etc/systemd", {}), UNIT)


@pytest.mark.parametrize("target", ["/dev/null", "//dev/./null", "../../../dev/null", None])
def test_a_masked_unit_counts_as_missing(host: Host, target: str | None) -> None:
    path = Path(host.root) / "etc/systemd/system/stratum.service"
    if target:
        path.symlink_to(target)
    else:
        path.touch()
    assert is_masked(host, UNIT)
    with pytest.raises(UnitMissingError, match="masked"):
        read_command(host, UNIT)


def test_a_link_to_a_unit_file_is_no_mask(host: Host) -> None:
    put(host, "[Service]\nExecStart=/bin/x\n", "/opt/stratum.service")
    (Path(host.root) / "etc/systemd/system/stratum.service").symlink_to("/opt/stratum.service")
    assert not is_masked(host, UNIT)
    assert read_command(host, UNIT).argv == ("/bin/x",)


def test_a_unit_file_that_cannot_be_read_is_neither_missing_nor_a_traceback(host: Host) -> None:
    (Path(host.root) / "etc/systemd/system/stratum.service").mkdir()
    with pytest.raises(UnitFileError, match="cannot be read: Is a directory"):
        read_command(host, UNIT)


# -- drop-ins ---------------------------------------------------------------------------------------------

GOOD = "[Service]\nExecStart=/bin/x\n"


@pytest.mark.parametrize(
    "place",
    [
        "/etc/systemd/system/stratum.service.d/x.conf", "/run/systemd/system/stratum.service.d/x.conf",
        "/usr/lib/systemd/system/stratum.service.d/x.conf", "/usr/local/lib/systemd/system/stratum.service.d/x.conf",
        "/etc/systemd/system/service.d/x.conf", "/etc/systemd/system.control/stratum.service.d/x.conf",
        "/run/systemd/transient/stratum.service.d/x.conf",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", ["/bin/other", "", "/bin/x"])
def test_a_drop_in_that_sets_the_command_is_an_error_whatever_it_sets(host: Host, place: str, value: str) -> None:
    put(host, f"# by the admin\n[Service]\nExecStart={value}\n", place)
    with pytest.raises(UnitFileError) as caught:
        command(host, GOOD)
    assert caught.value.message.startswith(f"{place}: line 3:")


@pytest.mark.parametrize(
    "text",
    ["[Service]\nExecStartPre=/bin/y\nRestart=no\n", "ExecStart=/bin/y\n", "[Unit]\nExecStart=/bin/y\n", "",
     "[X-Mine]\nExecStart=/bin/y\n", "[Service]\n#ExecStart=/bin/y\n ;ExecStart=\n", "[service]\nExecStart=/bin/y\n"],
)  # fmt: skip
def test_a_drop_in_that_sets_something_else_is_no_matter(host: Host, text: str) -> None:
    put(host, text, "/etc/systemd/system/stratum.service.d/x.conf")
    assert command(host, GOOD).argv == ("/bin/x",)


def test_only_files_that_end_in_conf_count(host: Host) -> None:
    for name in ("x.conf.bak", "x", ".x.conf"):
        put(host, "[Service]\nExecStart=/bin/y\n", f"/etc/systemd/system/stratum.service.d/{name}")
    put(host, "[Service]\nExecStart=/bin/y\n", "/etc/systemd/system/other.service.d/x.conf")
    assert command(host, GOOD).argv == ("/bin/x",)


def test_a_drop_in_that_is_gone_is_skipped(host: Host) -> None:
    directory = Path(host.root) / "etc/systemd/system/stratum.service.d"
    directory.mkdir()
    (directory / "dangling.conf").symlink_to("/nowhere")
    assert command(host, GOOD).argv == ("/bin/x",)


def test_a_drop_in_that_goes_between_the_listing_and_the_reading_is_skipped(host: Host) -> None:
    place = "/run/systemd/system/stratum.service.d/x.conf"
    put(host, "[Service]\nExecStart=/bin/y\n", place)

    class Racing(Host):
        def listdir(self, path):  # type: ignore[no-untyped-def]
            names = super().listdir(path)
            if str(path).endswith("stratum.service.d"):
                os.unlink(self.real(place))
            return names

    put(host, GOOD)
    assert read_command(Racing(host.root, {}), UNIT).argv == ("/bin/x",)


def test_a_drop_in_of_a_higher_directory_hides_those_of_its_name(host: Host) -> None:
    put(host, "[Service]\nExecStart=/bin/y\n", "/usr/lib/systemd/system/stratum.service.d/x.conf")
    directory = Path(host.root) / "etc/systemd/system/stratum.service.d"
    directory.mkdir()
    (directory / "x.conf").symlink_to("/dev/null")
    assert command(host, GOOD).argv == ("/bin/x",)


def test_a_drop_in_that_cannot_be_read_is_an_error(host: Host) -> None:
    (Path(host.root) / "etc/systemd/system/stratum.service.d/x.conf").mkdir(parents=True)
    with pytest.raises(UnitFileError, match=r"x\.conf: cannot be read"):
        command(host, GOOD)


# -- what is written is what is read ----------------------------------------------------------------------

ARGUMENT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=30)
AWKWARD = st.text(st.sampled_from(list("ab \t\n\r\\\"'%$;{}#@-:+!|=[]\x7f\u00a0\u20ac")), max_size=12)
PROGRAM = st.text(st.sampled_from(list("abc-@:+!|%$ {};#=.")), min_size=1, max_size=12).map(
    lambda text: f"/opt/{text}x"
)


@given(program=PROGRAM, arguments=st.lists(ARGUMENT | AWKWARD, max_size=6))
def test_every_command_line_that_is_rendered_is_read_back(shared: Host, program: str, arguments: list[str]) -> None:
    argv = (program, *arguments)
    assert command(shared, render_unit(argv)) == UnitCommand(program.replace("/./", "/"), argv)


@given(st.lists(AWKWARD, min_size=1, max_size=5))
def test_quoted_words_are_split_into_the_words_they_were(words: list[str]) -> None:
    (found,) = split_words(" ".join(["x", *(quote_argument(word) for word in words)]))
    assert [word.replace("%%", "%").replace("$$", "$") for word in found[1:]] == words


@given(st.text(max_size=60))
def test_no_line_is_a_traceback(shared: Host, value: str) -> None:
    try:
        command(shared, f"[Service]\nExecStart=/bin/x {value}\n".encode("utf-8", "surrogatepass"))
    except StratumError:
        pass


@given(st.binary(max_size=200))
def test_no_file_is_a_traceback(data: bytes) -> None:
    try:
        parse_unit(UNIT, data)
    except UnitFileError:
        pass


@pytest.mark.parametrize("program", ["python3", "/opt/", '/a"b', "/a'b", "/a\\b", "/a\nb", "", "./x"])
def test_a_program_that_systemd_refuses_is_refused_before_it_is_written(program: str) -> None:
    with pytest.raises(StratumError) as caught:
        render_command([program, "x"])
    assert caught.value.reference == "unit-command"


def test_words_that_systemctl_could_not_show_are_refused() -> None:
    with pytest.raises(StratumError, match="not UTF-8"):
        render_command(["/bin/x", "a\udcff"])
