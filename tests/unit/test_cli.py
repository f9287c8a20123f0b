"""The command line: help, lazy modules, and one boundary where errors become exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stratum import cli
from stratum.commands import preflight as preflight_command
from stratum.commands import status, versions
from stratum.errors import BundleError, ExitCode, StratumError
from tests.fakes import make_tree
from tests.pyz import ROOT


def stratum(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "stratum", *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload,no-any-return]


def usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == ExitCode.USAGE
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


# -- words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_explains_itself_and_the_exit_codes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for code in ExitCode:
        assert re.search(rf"^ +{int(code)} {re.escape(code.meaning)}$", text, re.MULTILINE)
    assert name in text


def test_help_names_every_command_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys\nfrom stratum.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in sys.modules if name.startswith('stratum.commands.') or name in"
        " ('yaml', 'requests', 'zstandard', 'cryptography', 'tqdm')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"
    for name, (_, summary) in cli.COMMANDS.items():
        assert re.search(rf"^ +{name}\s", done.stdout, re.MULTILINE), summary


@pytest.mark.parametrize("name", ["status", "uninstall", "versions", "start", "logs", "localdns"])
def test_commands_that_need_no_compiled_part_import_none(name: str) -> None:
    code = (
        "import sys\nfrom stratum.cli import build_parser, _module\n"
        f"build_parser({name!r}); _module({name!r})\n"
        "print([name for name in sys.modules if name.partition('.')[0] in"
        " ('yaml', 'requests', 'zstandard', 'cryptography', 'tqdm', '_cffi_backend')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["no-such-command"],
        ["--no-such-option"],
        ["--"],
        ["up", "--no-such-option"],
        ["up", "extra"],
        ["up", "--bund", "x"],  # no abbreviations: a script must not change its meaning with a new option
        ["up", "--skip-check", "no-such-check"],
        ["status", "--output", "yaml"],
        ["status", "--wait", "soon"],
        ["--debug", "status"],
    ],
    ids=" ".join,
)
def test_a_wrong_word_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "usage: stratum" in usage_error(words, capsys)


def test_the_version_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    done = stratum("--version")
    assert re.fullmatch(r"stratum \d+\.\d+\S*\n", done.stdout)
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == done.stdout


# -- errors ---------------------------------------------------------------------------------------------


def run_failing(
    error: BaseException, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    def run(*_: object) -> int:
        raise error

    monkeypatch.setattr(versions, "run", run)
    code = cli.main(["versions", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (BundleError("bad", "why", hint="do"), 12, "stratum: error[bad]: why"),
        (StratumError("x", "why\nnot"), 1, r"stratum: error[x]: why\nnot"),
        (FileNotFoundError(2, "No such file", "/a"), 1, "stratum: error[system-error]: /a: No such file"),
        (OSError(18, "cross", "/a", None, "/b"), 1, "stratum: error[system-error]: /a -> /b: cross"),
        (OSError("just words"), 1, "stratum: error[system-error]: just words"),
        (OSError(5, "io", b"/a\xff"), 1, "stratum: error[system-error]: b'/a\\xff': io"),
        (KeyError("x"), 1, "stratum: error[internal-error]: KeyError: 'x'"),
        (RecursionError("deep"), 1, "stratum: error[internal-error]: RecursionError: deep"),
        (MemoryError(), 1, "stratum: error[internal-error]: MemoryError: "),
        (BrokenPipeError(32, "Broken pipe"), 1, "stratum: error[system-error]: Broken pipe"),
    ],
)
def test_an_error_is_one_line_with_its_code_and_a_traceback_only_for_debug(
    error: BaseException,
    code: int,
    line: str,
    debug: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, out, err = run_failing(error, ["--debug"] if debug else [], monkeypatch, capsys)
    assert found == code
    assert line in err.splitlines()
    assert ("Traceback" in err) == debug
    assert out == ""


def test_with_json_the_error_is_on_stdout_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run_failing(BundleError("bad", "why"), ["--output", "json"], monkeypatch, capsys)
    assert json.loads(out)["error"]["exitCode"] == code == 12


@pytest.mark.parametrize(
    ("error", "code", "word"), [(KeyboardInterrupt(), 130, "interrupted"), (cli.Terminated(), 143, "terminated")]
)
def test_a_signal_has_its_own_code_and_says_what_to_do(
    error: BaseException, code: int, word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, err = run_failing(error, [], monkeypatch, capsys)
    assert found == code
    assert word in err and "run the same command again" in err


def test_every_code_of_the_design_has_a_meaning_and_none_is_used_twice() -> None:
    assert {int(code) for code in ExitCode} == {0, 1, 2, 4, 5, 10, 11, 12, 13, 14, 20, 21, 130, 143}
    assert len({code.meaning for code in ExitCode}) == len(ExitCode)


def test_a_root_that_is_no_directory_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for name in (str(tmp_path / "none"), str(tmp_path / "file"), ""):
        assert cli.main(["versions", "--root", name]) == ExitCode.FAILED
        assert "no such directory" in capsys.readouterr().err


def test_the_umask_and_the_signals_of_the_caller_are_dealt_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, object] = {}

    def run(*_: object) -> int:
        mask = os.umask(0)
        os.umask(mask)
        seen["mask"] = mask
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    os.umask(0o077)
    monkeypatch.setattr(versions, "run", run)
    assert cli.main(["versions"]) == ExitCode.TERMINATED
    assert seen["mask"] == 0o022


def test_a_second_signal_does_not_cut_off_what_the_first_one_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned = []

    def run(*_: object) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            cleaned.append(True)
        return 0

    monkeypatch.setattr(versions, "run", run)
    assert cli.main(["versions"]) == ExitCode.TERMINATED
    assert cleaned == [True]


def test_a_hang_up_that_nohup_ignores_stays_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: object) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        return 0

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(versions, "run", run)
    assert cli.main(["versions"]) == ExitCode.DONE


# -- the process ----------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = make_tree(tmp_path / "root")
    (root / "opt/stratum/node/1.0").mkdir(parents=True)
    return root


def test_a_reader_that_leaves_is_no_error(tree: Path) -> None:
    for number in range(1, 2000):
        (tree / f"opt/stratum/node/1.{number}").mkdir()
    argv = [sys.executable, "-m", "stratum", "versions", "--root", str(tree)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
        assert process.wait(timeout=60) == ExitCode.DONE
    assert said == ""


def test_a_result_that_does_not_fit_on_the_disk_is_a_failure_without_a_traceback(tree: Path) -> None:
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-m", "stratum", "versions", "--root", str(tree)]
        done = subprocess.run(argv, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == ExitCode.FAILED
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_closed_streams_no_home_and_an_empty_environment_are_enough(tree: Path) -> None:
    code = (
        "import os, sys\n"
        "for number in (0, 1, 2): os.close(number)\n"
        f"os.execve(sys.executable, [sys.executable, '-m', 'stratum', 'versions', '--root', {str(tree)!r}], {{}})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={}, timeout=60)
    assert done.returncode == ExitCode.DONE


def test_a_name_that_the_locale_cannot_say_is_escaped(tree: Path) -> None:
    os.mkdir(os.fsencode(tree / "opt/stratum/node") + b"/1.\xff")
    (tree / "opt/stratum/node/1.é").mkdir()
    argv = [sys.executable, "-X", "utf8=0", "-m", "stratum", "versions", "--root", str(tree)]
    environment = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert b"1.0" in done.stdout
    done.stdout.decode("ascii")


# -- commands that only look ----------------------------------------------------------------------------


def test_where_nothing_is_installed_a_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = make_tree(tmp_path / "root")
    assert cli.main(["versions", "--root", str(root)]) == ExitCode.NOT_INSTALLED
    assert "stratum up" in capsys.readouterr().err


def test_the_versions_are_listed_and_the_active_one_is_marked(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "opt/stratum/node/2.0").mkdir()
    (tree / "opt/stratum/node/.hidden").mkdir()
    (tree / "opt/stratum/node/file").touch()
    (tree / "opt/stratum/node/current").symlink_to("2.0")
    assert cli.main(["versions", "--root", str(tree)]) == 0
    assert capsys.readouterr().out == "  1.0  \n* 2.0  \n"
    assert cli.main(["versions", "--root", str(tree), "--output", "json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [(item["version"], item["active"]) for item in value["versions"]] == [("1.0", False), ("2.0", True)]


def test_commands_that_report_have_json_and_those_that_change_have_a_dry_run() -> None:
    reporting = {"preflight", "status", "versions", "up", "uninstall", "start", "stop", "restart"}
    changing = {"up", "uninstall", "start", "stop", "restart", "upgrade", "rollback", "prune", "remove"}
    for name in cli.COMMANDS:
        text = cli.build_parser(name).format_help()
        parser = next(
            action.choices[name]
            for action in cli.build_parser(name)._actions
            if isinstance(action.choices, dict) and name in action.choices
        )
        options = {word for action in parser._actions for word in action.option_strings}
        assert name in text
        assert name not in reporting or "--output" in options, name
        assert name not in changing or "--dry-run" in options, name


def test_modules_of_commands_have_what_the_table_needs() -> None:
    for module in (status, versions, preflight_command):
        assert callable(module.add_arguments) and callable(module.run)
