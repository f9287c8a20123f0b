"""What people and programs see, also when nobody reads it."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import sys

import pytest

from stratum.errors import BundleError, ExitCode, StratumError
from stratum.output import API_VERSION, Output

ERROR = StratumError("broken", "what is broken", hint="do this", state="nothing was changed")


class FailingStream(io.StringIO):
    """A stream behind which a disk is full, a reader left or a terminal is gone."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.tries = 0

    def write(self, text: str) -> int:
        self.tries += 1
        raise OSError(self.number, os.strerror(self.number))


def make(**options: object) -> tuple[Output, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Output(stdout=out, stderr=err, **options), out, err  # type: ignore[arg-type]


def test_results_go_to_stdout_and_everything_else_to_stderr() -> None:
    output, out, err = make()
    output.result("the result")
    output.note("working")
    output.warn("careful")
    output.error(ERROR)
    output.document("Status", {"a": 1})
    assert out.getvalue() == "the result\n"
    assert err.getvalue() == (
        "working\nstratum: warning: careful\nstratum: error[broken]: what is broken\n"
        "state: nothing was changed\nhint: do this\n"
    )


def test_what_a_pod_or_a_server_named_reaches_no_terminal_as_a_control_sequence() -> None:
    output, out, err = make()
    output.result("remove tree /var/lib/kubelet/\x1b]0;x\x07\u202e\nsecond line")
    output.note("unmount /var/lib/kubelet/\x1b[2J")
    assert out.getvalue() == "remove tree /var/lib/kubelet/\\x1b]0;x\\x07\\u202e\nsecond line\n"
    assert err.getvalue() == "unmount /var/lib/kubelet/\\x1b[2J\n"


def test_quiet_keeps_results_warnings_and_errors() -> None:
    output, out, err = make(quiet=True)
    output.note("working")
    output.result("the result")
    output.warn("careful")
    output.error(ERROR)
    assert out.getvalue() == "the result\n"
    assert "working" not in err.getvalue()
    assert "careful" in err.getvalue() and "what is broken" in err.getvalue()


def test_with_json_stdout_is_one_document_that_says_what_it_is() -> None:
    output, out, _err = make(as_json=True)
    output.result("for people")
    output.document("Status", {"ready": True})
    assert json.loads(out.getvalue()) == {"apiVersion": API_VERSION, "kind": "Status", "ready": True}


def test_with_json_an_error_is_a_document_too() -> None:
    output, out, err = make(as_json=True)
    output.error(BundleError("bad", "why"))
    value = json.loads(out.getvalue())
    assert value["kind"] == "Error"
    assert value["error"] == {
        "reference": "bad",
        "message": "why",
        "state": None,
        "hint": None,
        "exitCode": int(ExitCode.BUNDLE_MALFORMED),
    }
    assert err.getvalue() == "stratum: error[bad]: why\n"


@pytest.mark.parametrize("text", ["a\nb", "a\r\x1b[2Jb", "caf\udce9", "\x00", "\u202eabc", "tab\there"])
def test_whatever_a_file_is_called_an_error_stays_one_line_without_control_sequences(text: str) -> None:
    output, _out, err = make()
    output.error(StratumError("x", text, hint=text, state=text))
    output.warn(text)
    lines = err.getvalue().splitlines()
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)


def test_ordinary_letters_of_every_language_are_printed_as_they_are() -> None:
    output, _out, err = make()
    output.warn("größe 大小 → é")
    assert err.getvalue() == "stratum: warning: größe 大小 → é\n"


def test_closed_streams_are_nobody_to_tell() -> None:
    before = sys.stdout, sys.stderr
    try:
        sys.stdout = sys.stderr = None  # type: ignore[assignment]
        output = Output()
        output.result("x")
        output.error(ERROR)
        with output.progress("work", 10) as meter:
            meter.advance(10)
    finally:
        sys.stdout, sys.stderr = before


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO, errno.ENOSPC])
def test_a_stream_that_fails_stops_no_work_and_is_tried_once(number: int) -> None:
    out, err = FailingStream(number), FailingStream(number)
    output = Output(stdout=out, stderr=err)
    for _ in range(3):
        output.result("x")
        output.note("y")
        output.warn("z")
        output.error(ERROR)
    assert (out.tries, err.tries) == (1, 1)
    assert output.lost == [out, err]
    assert output.cut_off == (number != errno.EPIPE), "a reader that left has what it wanted"


def test_a_lost_stderr_does_not_take_stdout_with_it() -> None:
    out = io.StringIO()
    output = Output(stdout=out, stderr=FailingStream(errno.EIO))
    output.note("x")
    output.result("the result")
    assert out.getvalue() == "the result\n"
    assert not output.cut_off


# -- progress -------------------------------------------------------------------------------------------


def test_without_a_terminal_progress_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("stratum.output.time.monotonic", lambda: clock[0])
    output, out, err = make()
    with output.progress("unpack", 200) as meter:
        for _ in range(100):
            clock[0] += 0.25
            meter.advance(2)
    assert err.getvalue() == "unpack: 40 %\nunpack: 80 %\n"
    assert out.getvalue() == ""


@pytest.mark.parametrize(("total", "said"), [(0, "unpack: 3 MiB\n"), (1 << 20, "unpack: 300 %\n")])
def test_a_wrong_or_unknown_total_is_no_error(total: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 100.0])
    monkeypatch.setattr("stratum.output.time.monotonic", lambda: next(clock))
    output, _out, err = make()
    with output.progress("unpack", total) as meter:
        meter.advance(3 << 20)
    assert err.getvalue() == said


def test_quiet_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 100.0])
    monkeypatch.setattr("stratum.output.time.monotonic", lambda: next(clock))
    output, _out, err = make(quiet=True)
    with output.progress("unpack", 10) as meter:
        meter.advance(10)
    assert err.getvalue() == ""


def test_on_a_terminal_progress_is_a_bar_that_is_gone_afterwards() -> None:
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        output = Output(stdout=io.StringIO(), stderr=stream)
        with output.progress("unpack", 1 << 20) as meter:
            meter.advance(1 << 19)
            meter.advance(1 << 19)
        shown = os.read(controller, 65536).decode()
    os.close(controller)
    assert "unpack" in shown and "%" in shown
    assert not shown.rstrip(" ").endswith("\n"), "nothing of it stays on the screen"


def test_a_terminal_that_goes_away_in_the_middle_stops_no_work() -> None:
    controller, terminal = pty.openpty()
    stream = os.fdopen(terminal, "w")
    output = Output(stdout=io.StringIO(), stderr=stream)
    with output.progress("unpack", 1 << 30) as meter:
        meter.advance(1)
        os.close(controller)
        for _ in range(50):
            meter.advance(1 << 24)
    output.note("still here")
    output.error(ERROR)
    assert output.lost == [stream]
    try:
        stream.close()
    except OSError:
        pass


def test_an_error_inside_the_meter_is_the_error() -> None:
    output, _out, _err = make()
    with pytest.raises(StratumError), output.progress("x", 1):
        raise ERROR
