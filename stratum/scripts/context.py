"""What every command is given."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import BinaryIO, Callable, Optional

from stratum.errors import NotInstalledError, NotRootError
from stratum.output import Output
from stratum.system import Host, HostPath

__all__ = ["Context", "add_dry_run", "add_output", "add_root", "add_subcommand"]


@dataclass(frozen=True)
class Context:
    """The host, where to speak, and what the process was started from.

    ``archive`` is the pyz that runs, None when Stratum runs from a source tree.
    """

    host: Host
    out: Output
    archive: Optional[str] = None
    stdin: Optional[BinaryIO] = None

    def require_root(self, command: str) -> None:
        """Raise :class:`NotRootError` unless this process may change the machine."""
        if self.host.live and self.host.euid != 0:
            raise NotRootError(
                "not-root", f"stratum {command}: must be run by root", hint=f"run: sudo stratum {command}"
            )

    def require_installed(self, base: HostPath) -> None:
        """Raise :class:`NotInstalledError` unless there is a node."""
        if not self.host.lexists(base):
            raise NotInstalledError(
                "not-installed", f"{base}: there is no Stratum node here", hint="run: stratum up --bundle FILE"
            )


def add_output(parser: argparse.ArgumentParser) -> None:
    """``--output``, for a command that reports."""
    parser.add_argument("--output", choices=("text", "json"), default="text", help="form of the result (default: text)")


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """``--dry-run``, for a command that changes something."""
    parser.add_argument("--dry-run", action="store_true", help="print what would be done and change nothing")


def add_subcommand(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    parent: argparse.ArgumentParser,
    name: str,
    summary: str,
    declare: Callable[[argparse.ArgumentParser], object],
) -> None:
    """A command below ``parent``, in its form; ``declare`` adds its options. Those of all may stand behind it too."""
    child = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=parent.epilog,
        formatter_class=parent.formatter_class,
        allow_abbrev=False,
    )
    declare(child)
    for flag, text in (
        ("--debug", "show the traceback of an error"),
        ("--quiet", "print only results, warnings and errors"),
    ):
        # Without a default here, so that the place before it still counts.
        child.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)


def add_root(parser: argparse.ArgumentParser) -> None:
    """``--root``, for a command that also works on a directory tree."""
    parser.add_argument(
        "--root", metavar="DIR", default="/", help="work on the system tree in DIR and start nothing (default: /)"
    )
