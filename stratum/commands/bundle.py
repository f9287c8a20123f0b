"""`stratum bundle`: make, sign, verify and read bundles. One module for each group of subcommands."""

from __future__ import annotations

import argparse
import importlib
from typing import cast

from stratum.scripts.context import Context, add_dry_run, add_output, add_subcommand

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "make, sign, verify and read bundles"

# name: (module, function, summary)
SUBCOMMANDS = {
    "keygen": ("bundle_keys", "run_keygen", "make a key pair for signing, in minisign's format"),
    "build": ("bundle_build", "run_build", "build a bundle from a definition"),
    "sign": ("bundle_keys", "run_sign", "sign a bundle (directory or tar file)"),
    "verify": ("bundle_read", "run_verify", "verify the signature and every digest of a bundle"),
    "inspect": ("bundle_read", "run_inspect", "show what a bundle holds"),
    "extract": ("bundle_read", "run_extract", "unpack components of a bundle into a new directory"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    commands = parser.add_subparsers(dest="bundle_command", metavar="SUBCOMMAND", required=True)
    for name, (_, _, summary) in SUBCOMMANDS.items():
        add_subcommand(commands, parser, name, summary, _ARGUMENTS[name])


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Run the subcommand; its module is imported only now."""
    module, function, _ = SUBCOMMANDS[arguments.bundle_command]
    command = getattr(importlib.import_module(f"stratum.commands.{module}"), function)
    return cast(int, command(context, arguments))


def _bundle(parser: argparse.ArgumentParser, *, pipe: bool = True) -> None:
    text = "the bundle: a directory or a tar file" + (", - for standard input" if pipe else "")
    parser.add_argument("bundle", metavar="BUNDLE", help=text)


def _password(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--password-file", metavar="FILE", help="read the key's password from the first line of FILE, not a terminal"
    )


def _trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust",
        metavar="KEY.pub",
        action="append",
        default=[],
        help="trust this public key, and not the host's keyring; may be given several times",
    )


def _keygen(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--to", metavar="NAME", required=True, help="write NAME.key (mode 0600) and NAME.pub; they must not exist"
    )
    how = parser.add_mutually_exclusive_group()
    _password(how)  # type: ignore[arg-type]  # a group has add_argument too
    how.add_argument("--no-password", action="store_true", help="store the secret key without a password")
    parser.add_argument("--comment", help="comment in the public key's file, shown when a signature is verified")
    add_dry_run(parser)
    add_output(parser)


def _build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("definition", metavar="DEFINITION", help="the definition (YAML)")
    parser.add_argument(
        "-o",
        "--to",
        metavar="OUT",
        help="where to write: a tar file, a directory (with / at its end), - for a pipe (default: NAME-VERSION.tar)",
    )
    parser.add_argument("--format", choices=("tar", "directory"), help="form of OUT (default: from its name)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a file or a bundle directory")
    parser.add_argument(
        "--platform",
        metavar="OS/ARCH",
        action="append",
        help="build for this platform only; may be given several times (default: all of the definition)",
    )
    parser.add_argument("--lock", metavar="FILE", help="the lock (default: DEFINITION.lock)")
    parser.add_argument("--update-lock", action="store_true", help="write the lock anew instead of comparing with it")
    parser.add_argument("--cache", metavar="DIR", help="keep downloads here (default: ~/.cache/stratum)")
    parser.add_argument("--offline", action="store_true", help="use the cache only")
    parser.add_argument("--level", type=int, metavar="N", help="zstd level, 1 to 19 (default: the lock's, else 12)")
    parser.add_argument("--jobs", type=int, metavar="N", help="work at the same time (default: the processors)")
    parser.add_argument("--key", metavar="FILE", help="sign the bundle with this secret key")
    _password(parser)
    add_dry_run(parser)
    add_output(parser)


def _sign(parser: argparse.ArgumentParser) -> None:
    _bundle(parser, pipe=False)
    parser.add_argument("--key", metavar="FILE", required=True, help="the secret key (NAME.key)")
    _password(parser)
    add_dry_run(parser)
    add_output(parser)


def _verify(parser: argparse.ArgumentParser) -> None:
    _bundle(parser)
    _trust(parser)
    add_output(parser)


def _inspect(parser: argparse.ArgumentParser) -> None:
    _bundle(parser)
    _trust(parser)
    parser.add_argument("--files", action="store_true", help="list the files of each component")
    add_output(parser)


def _extract(parser: argparse.ArgumentParser) -> None:
    _bundle(parser)
    _trust(parser)
    parser.add_argument("-o", "--to", metavar="DIR", required=True, help="the directory to make")
    parser.add_argument("--platform", metavar="OS/ARCH", help="take this platform (default: this machine's)")
    parser.add_argument(
        "--component", metavar="NAME", action="append", help="take this component only; may be given several times"
    )
    parser.add_argument(
        "--insecure-skip-verify",
        action="store_true",
        help="do not verify the signature: anyone may have made this bundle (digests are still proved)",
    )
    add_dry_run(parser)
    add_output(parser)


_ARGUMENTS = {
    "keygen": _keygen,
    "build": _build,
    "sign": _sign,
    "verify": _verify,
    "inspect": _inspect,
    "extract": _extract,
}
