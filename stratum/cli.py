"""The command line: a lazy table of commands, and the one boundary where errors become exit codes."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Optional

from stratum import __version__, boot
from stratum.errors import ExitCode, StratumError, system_error
from stratum.output import Output
from stratum.scripts.context import Context
from stratum.system import Host

__all__ = ["COMMANDS", "build_parser", "main"]

# name: (module below stratum.commands, summary). A module is imported only when its command runs.
COMMANDS = {
    "up": ("up", "make this host a container host or node from a bundle"),
    "upgrade": ("upgrade", "switch to a new version; go back by itself when that fails"),
    "rollback": ("rollback", "go back to the version that ran before, or to a named one"),
    "preflight": ("preflight", "say whether this host and a bundle are fit for `up`; change nothing"),
    "status": ("status", "show what is installed and running"),
    "start": ("start", "start the node's units"),
    "stop": ("stop", "stop the node's units"),
    "restart": ("restart", "restart the node's units"),
    "versions": ("versions", "list the installed versions"),
    "remove": ("remove", "remove an installed version"),
    "prune": ("prune", "remove old versions"),
    "logs": ("logs", "show the journal of the node's units"),
    "exec": ("exec", "run a command in the node's environment"),
    "localdns": ("localdns", "make or remove the interface and rules of LocalDNS, as its unit does"),
    "uninstall": ("uninstall", "remove what Stratum made, and nothing else"),
    "config": ("config", "check the configuration, and show what is in force"),
    "bundle": ("bundle", "make, sign, verify and read bundles"),
}


class Terminated(BaseException):
    """SIGTERM or SIGHUP came; like KeyboardInterrupt it unwinds through every clean-up."""


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _on_signal(number: int, _frame: Optional[FrameType]) -> None:
    # A second signal must not cut off the clean-up that the first one started.
    for one in _ENDING:
        signal.signal(one, signal.SIG_IGN)
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def _epilog() -> str:
    codes = "\n".join(f"  {int(code):3} {code.meaning}" for code in ExitCode)
    return f"exit status:\n{codes}\n"


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"stratum.commands.{COMMANDS[name][0]}")


def build_parser(only: Optional[str] = None) -> argparse.ArgumentParser:
    """The parser; with ``only``, just that command has its arguments (and its module is imported)."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="stratum",
        description="Turn a bare Linux host into a container host or Kubernetes node, from one signed bundle.",
        epilog=_epilog(),
        formatter_class=form,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"stratum {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, summary) in COMMANDS.items():
        child = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=_epilog(),
            formatter_class=form,
            allow_abbrev=False,
        )
        if only in (None, name):
            _module(name).add_arguments(child)
            child.add_argument("--debug", action="store_true", help="show the traceback of an error")
            child.add_argument("--quiet", action="store_true", help="print only results, warnings and errors")
    return parser


def _stopped(out: Output, reference: str, code: ExitCode) -> int:
    out.warn(f"{reference}; run the same command again to go on")
    return int(code)


def _context(arguments: argparse.Namespace, out: Output) -> Context:
    root = getattr(arguments, "root", "/")
    if not os.path.isdir(root):
        raise StratumError("root-missing", f"--root {root}: no such directory")
    stdin = sys.stdin.buffer if sys.stdin is not None else None
    pyz = boot.Pyz.running()
    return Context(Host(root), out, pyz.path if pyz else None, stdin)


def _run(arguments: argparse.Namespace, out: Output) -> int:
    try:
        return int(_module(arguments.command).run(_context(arguments, out), arguments))
    except StratumError as error:
        return _failed(out, error)
    except OSError as error:
        return _failed(out, system_error(error))
    except Exception as error:  # noqa: BLE001 - a fault of ours is one line too; the traceback is for --debug
        said = f"{type(error).__name__}: {error}"
        return _failed(out, StratumError("internal-error", said, hint="this is a fault of stratum: add --debug"))
    except KeyboardInterrupt:
        return _stopped(out, "interrupted", ExitCode.INTERRUPTED)
    except Terminated:
        return _stopped(out, "terminated", ExitCode.TERMINATED)


def _failed(out: Output, error: StratumError) -> int:
    if out.debug:
        import traceback

        out.trace(traceback.format_exc())
    out.error(error)
    return int(error.exit_code)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run ``stratum`` with ``argv`` (without the program's name); return the exit status."""
    boot.setup_streams()
    os.umask(0o022)
    words = list(sys.argv[1:] if argv is None else argv)
    only = next((word for word in words if not word.startswith("-")), None)
    parser = build_parser(only if only in COMMANDS else "")
    arguments = parser.parse_args(words)
    out = Output(as_json=getattr(arguments, "output", "text") == "json", quiet=arguments.quiet, debug=arguments.debug)
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup(1) and shells (in the background) want it so
            signal.signal(number, _on_signal)
    status = _run(arguments, out)
    for file in out.lost:
        # What is still in its buffer must not fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
    return status or int(ExitCode.FAILED if out.cut_off else ExitCode.DONE)
