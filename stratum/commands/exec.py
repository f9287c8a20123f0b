"""``stratum exec``: run a command in the node's environment."""

from __future__ import annotations

import argparse
import os

from stratum.errors import BundleNotFoundError
from stratum.node import cni, containerd
from stratum.node.layout import Layout
from stratum.scripts.context import Context
from stratum.system import Host


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command and its arguments")


def environment(layout: Layout) -> dict[str, str]:
    """The caller's environment with the active version's programs first and containerd's address set."""
    host = layout.host
    return {
        **host.environ,
        "PATH": ":".join([str(layout.bin_dir), *host.search_path()]),
        "CONTAINERD_ADDRESS": str(containerd.ADDRESS),
        "CONTAINERD_NAMESPACE": containerd.NAMESPACE,
        "CONTAINER_RUNTIME_ENDPOINT": f"unix://{containerd.ADDRESS}",
        "CNI_PATH": str(cni.HOST_BIN_DIR),
        "NETCONFPATH": str(cni.CONFIG_PATH.parent),
    }


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Become the command."""
    argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    layout = Layout(context.host)
    context.require_root("exec")
    context.require_installed(layout.current_link)
    values = environment(layout)
    name = argv[0] if argv else values.get("SHELL", "/bin/sh")
    program = Host(environ=values).which(name)
    if program is None:
        raise BundleNotFoundError("command-missing", f"{name}: no such program in {values['PATH']}")
    os.execve(program, [name, *argv[1:]], values)
