"""Debian's own containerd, runc and CNI plugins, downloaded and unpacked once.

They go into demo bundles as real programs. Nothing is installed: each package
is a directory tree as ``dpkg-deb -x`` makes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.lab import tools
from tests.lab.roots import apt_sources

STACK = ("containerd", "runc", "containernetworking-plugins", "busybox-static")

#: Counted up when the way of unpacking changes.
_FORMAT = "1"


@dataclass(frozen=True)
class Package:
    """A Debian package, unpacked: ``tree`` looks like ``/`` and is only read."""

    name: str
    version: str
    tree: Path


def fetch(
    suite: str = "bookworm", names: tuple[str, ...] = STACK, architecture: str = "amd64"
) -> dict[str, Package]:
    """Return packages of a Debian suite by name; download them if need be.

    :raises LabError: if apt cannot get them.
    """
    tools.require("apt-get", "dpkg-deb")
    label = f"{suite}-{architecture}-{tools.key(_FORMAT, *names)}"
    target = tools.cache_directory() / "packages" / label
    with tools.building(target) as new:
        if new is not None:
            new.mkdir()
            _download(new, suite, names, architecture)
    listing = json.loads((target / "packages.json").read_text())
    return {name: Package(name, listing[name], target / name) for name in names}


def _download(target: Path, suite: str, names: tuple[str, ...], architecture: str) -> None:
    """Fill ``target`` through an apt with directories of its own."""
    state = target.parent / "apt"
    for directory in ("lists/partial", "cache/archives/partial", "debs"):
        (state / directory).mkdir(parents=True)
    (state / "sources.list").write_text("".join(f"{line}\n" for line in apt_sources(suite)))
    (state / "status").touch()
    options = {
        "Dir::Etc::sourcelist": state / "sources.list", "Dir::Etc::sourceparts": "-",
        "Dir::State::Lists": state / "lists", "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache", "APT::Architecture": architecture,
        "APT::Architectures": architecture, "APT::Sandbox::User": "root", "Acquire::Languages": "none",
        "Acquire::Retries": "3", "Acquire::Check-Valid-Until": "false",
    }
    apt = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in options.items())]
    tools.tool([*apt, "update"], timeout=600)
    tools.tool([*apt, "download", *names], timeout=900, cwd=state / "debs")
    versions = {}
    for deb in sorted((state / "debs").glob("*.deb")):
        name, version = tools.tool(
            ["dpkg-deb", "--show", "--showformat=${Package} ${Version}", str(deb)], timeout=60
        ).split()
        tools.tool(["dpkg-deb", "-x", str(deb), str(target / name)], timeout=120)
        versions[name] = version
    (target / "packages.json").write_text(json.dumps(versions, indent=2))
