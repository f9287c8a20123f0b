"""Which bundle a command works with, and whom to trust: options, search, verification."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Optional

from stratum.bundle.oci import Platform
from stratum.bundle.source import open_bundle
from stratum.bundle.verify import VerifiedBundle, open_verified
from stratum.errors import BundleError, BundleNotFoundError, HostRefusedError, UsageError
from stratum.host import preflight
from stratum.node.layout import Layout
from stratum.receipt import STATE_DIRECTORY
from stratum.scripts import node as node_script
from stratum.scripts.context import Context
from stratum.trust.keyring import load_keyring

__all__ = ["BUNDLES", "add_bundle_arguments", "find_bundle", "open_trusted"]

BUNDLES = STATE_DIRECTORY / "bundles"


def add_bundle_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which bundle, and whom to trust; ``preflight`` has the same."""
    parser.add_argument(
        "--bundle",
        metavar="BUNDLE",
        help=f"a tar file, a directory, or - for standard input (default: the only one beside the pyz or in {BUNDLES})",
    )
    parser.add_argument(
        "--trust", metavar="KEY.pub", action="append", default=[], help="trust this public key too, for this run"
    )
    parser.add_argument(
        "--insecure-skip-verify", action="store_true", help="DANGEROUS: accept a bundle that nobody trusted signed"
    )
    parser.add_argument(
        "--skip-check",
        metavar="NAME",
        action="append",
        default=[],
        choices=sorted(preflight.CHECKS),
        help="leave out one check of preflight (may be repeated)",
    )


def read_keys(paths: Sequence[str]) -> list[bytes]:
    """The key files that ``--trust`` names; raises :class:`UsageError`."""
    keys = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                keys.append(file.read(1 << 16))
        except OSError as error:
            raise UsageError("key-unreadable", f"--trust {path}: {error.strerror}") from None
    return keys


@contextlib.contextmanager
def open_trusted(context: Context, arguments: argparse.Namespace) -> Iterator[Optional[VerifiedBundle]]:
    """The bundle, verified down to its description; None when there is none and a node is there already.

    Raises :class:`HostRefusedError` for one that is made for other machines, :class:`BundleError` for one that makes
    no node, and what :func:`open_verified` raises.
    """
    path = find_bundle(context, arguments.bundle, installed=Layout(context.host).current() is not None)
    if path is None:
        yield None
        return
    keys = load_keyring(context.host, read_keys(arguments.trust))
    insecure = arguments.insecure_skip_verify
    if insecure:
        context.out.warn(f"{path}: the signature is NOT checked; whoever made this bundle becomes root here")
    with open_bundle(path, stdin=context.stdin) as source:
        platform = Platform.of_machine(context.host.machine())
        try:
            bundle = open_verified(source, keys, platform=platform, insecure=insecure)
        except BundleError as error:
            if error.reference != "wrong-platform":
                raise
            # Nothing is wrong with the bundle: it is this host that it does not fit.
            raise HostRefusedError(error.reference, error.message, hint=error.hint) from None
        node_script.containerd_version(node_script.record_of(bundle))
        yield bundle


def _candidates(directory: str) -> list[str]:
    """The bundles in ``directory``: tar files, and directories that hold an OCI layout."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    paths = [os.path.join(directory, name) for name in names if not name.startswith(".")]
    return [
        path
        for path in paths
        if (path.endswith(".tar") and os.path.isfile(path)) or os.path.isfile(os.path.join(path, "oci-layout"))
    ]


def find_bundle(context: Context, given: Optional[str], *, installed: bool) -> Optional[str]:
    """The bundle to use: the one given, else the only one beside the pyz or under /var/lib/stratum/bundles.

    None when there is none and a node is ``installed``: it is brought up as it is. Raises
    :class:`BundleNotFoundError` (exit 14) that lists what was found.
    """
    if given is not None:
        return given
    places = [context.host.real(BUNDLES, follow=True)]
    if context.archive:
        places.insert(0, os.path.dirname(os.path.realpath(context.archive)))
    found = [path for place in places for path in _candidates(place)]
    if len(found) == 1:
        return found[0]
    if not found and installed:
        return None
    listed = ", ".join(found) if found else "nothing"
    raise BundleNotFoundError(
        "bundle-missing" if not found else "bundle-ambiguous",
        f"no --bundle given, and looking in {' and '.join(places)} found {listed}",
        hint="run: stratum up --bundle FILE",
    )
