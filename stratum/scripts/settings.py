"""Where the settings of a node come from: options, the configuration file, what is recorded, defaults.

For each field the first of these that says something wins. What an option gave is recorded and stays; what the file
gave goes with it. What a node joins with is used once, handed on in memory, and never recorded.
"""

from __future__ import annotations

import argparse
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from stratum.config import CONFIG_PATH, STANDALONE, WORKER, NodeSpec, Secret
from stratum.configchecks import Problem, check_join, check_spec
from stratum.configcodec import field_paths, get_field, set_field
from stratum.configfile import REFERENCE, ConfigFile, read_config, read_given_file
from stratum.errors import UsageError
from stratum.host.profiles import PROFILES
from stratum.node.settings import FROM_BEFORE, SETTINGS_PATH, Settings, read_settings
from stratum.scripts.context import Context

__all__ = ["Chosen", "Merged", "add_settings_arguments", "find_differing", "merge", "read_join", "read_merged"]

_OPTION = "option "
_FILE = "file "
_DEFAULT = NodeSpec()
_STANDARD_INPUT = "-"
_TOKEN_LIMIT = 1 << 16
# What a node joins with: a later run has no use for where it came from.
_ONCE = ("cluster.token", "cluster.tokenFile")
_ONCE_AS_OPTION = ("cluster.caFile",)
_CREDENTIALS = ("cluster.token", "cluster.clientCertificateFile", "cluster.clientKeyFile", "cluster.exec")


@dataclass(frozen=True)
class Chosen:
    """The settings that a node will have, and what only this run knows: a token to join with, and the cluster's CA.

    ``ca`` (PEM) is empty where the CA's file that the node has is to be kept.
    """

    settings: Settings
    token: Optional[Secret] = None
    ca: bytes = b""


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that are recorded and hold for each later start, and those that join a cluster once."""
    group = parser.add_argument_group("settings of the node (recorded; one that is not given stays as it is)")
    group.add_argument("--config", metavar="FILE", help="the configuration (default: /etc/stratum/stratum.yaml)")
    group.add_argument(
        "--role",
        choices=(STANDALONE, WORKER),
        help="with a kubelet in the bundle: a node on its own, or a worker of a cluster (default: standalone)",
    )
    group.add_argument("--node-name", metavar="NAME", help="the node's name (default: the host's, in lower case)")
    group.add_argument("--profile", choices=sorted(PROFILES), help="kernel settings of a profile (default: default)")
    group.add_argument("--node-ip", metavar="ADDRESS[,ADDRESS]", help="the node's address (default: detected)")
    group.add_argument(
        "--cluster-cidr",
        metavar="CIDR[,CIDR]",
        help="networks of pods and services, whose families the node's addresses have (default: IPv4)",
    )
    group.add_argument(
        "--selinux",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="file contexts and labels where SELinux is on (default: yes)",
    )
    join = parser.add_argument_group("joining a cluster (used once)")
    join.add_argument("--server", metavar="URL", help="the API server of the cluster (recorded)")
    join.add_argument("--ca-file", metavar="FILE", help="the cluster's CA, in PEM form")
    join.add_argument("--token-file", metavar="FILE", help="a file with a bootstrap token, or - for standard input")


@dataclass(frozen=True)
class Merged:
    """The whole configuration of one run, with where each value came from. It may hold a token."""

    spec: NodeSpec
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    file: Optional[ConfigFile] = None
    known: Settings = field(default_factory=Settings)

    @property
    def joined(self) -> bool:
        """Whether the node has joined this cluster in an earlier run."""
        before = self.known.spec
        server = before.cluster.server
        return before.role == WORKER and bool(server) and server == self.spec.cluster.server

    def check_join(self) -> list[Problem]:
        """What the node lacks to join, or to go on in, its cluster."""
        before = self.known.spec.cluster
        lasting = bool(before.client_certificate_file or before.exec)
        return check_join(self.spec.cluster, has_ca=self.joined, has_certificate=self.joined and not lasting)

    def is_option(self, path: str) -> bool:
        """Whether the field's value came with an option of this run."""
        return self.sources.get(path, "").startswith(_OPTION)

    def check(self, *, kubelet: bool) -> None:
        """Refuse what is wrong, or missing for a node with a ``kubelet``; raises :class:`UsageError`."""
        # A path on the command line is one of this process, from where it stands.
        paths = [path for path in ("cluster.caFile", "cluster.tokenFile") if self.is_option(path)]
        spec = self.spec
        for path in paths:
            spec = set_field(spec, path, f"/{path}")
        problems = [problem for problem in check_spec(spec, PROFILES) if not problem.odd]
        if kubelet and self.spec.role == WORKER:
            problems += self.check_join()
        if problems:
            raise self._error(problems)

    def _error(self, problems: list[Problem]) -> UsageError:
        first = problems[0]
        more = self._more(problems[1:])
        path = next((name for name in field_paths() if _is_in(first.path, name)), first.path)
        source = self.sources.get(path, "")
        if self.file and not source.startswith((_OPTION, FROM_BEFORE)):
            error = self.file.error(first)
            error.message += more
            return error
        where = source[len(_OPTION) :] if source.startswith(_OPTION) else first.path
        return UsageError(REFERENCE, f"{where}: {first.why}{more}", hint=first.hint or f"change what {where} says")

    def _more(self, others: list[Problem]) -> str:
        """The end of an error's message when more than one thing is wrong."""
        if not others:
            return ""
        if self.file is None:
            return f" (and also: {', '.join(problem.path for problem in others)})"
        given = "" if self.file.name == str(CONFIG_PATH) else f" {self.file.name}"
        return f" (and {len(others)} more; see: stratum config check{given})"

    def recorded(self) -> tuple[NodeSpec, dict[str, str]]:
        """The configuration as later starts need it, and its sources: without what the node joins with."""
        spec, sources = self.spec, dict(self.sources)
        for path in (*_ONCE, *(path for path in _ONCE_AS_OPTION if self.is_option(path))):
            spec = set_field(spec, path, get_field(_DEFAULT, path))
            sources.pop(path, None)
        return spec, sources


def _is_in(path: str, name: str) -> bool:
    return path == name or path.startswith((f"{name}.", f"{name}["))


# -- merging ----------------------------------------------------------------------------------------------


def _options(arguments: argparse.Namespace) -> dict[str, tuple[str, Any]]:
    """The options that were given: for each field, the option's name and its value."""
    given = {
        "role": ("--role", arguments.role),
        "nodeName": ("--node-name", arguments.node_name),
        "profile": ("--profile", arguments.profile),
        "selinux": ("--selinux" if arguments.selinux else "--no-selinux", arguments.selinux),
        "network.clusterCIDRs": ("--cluster-cidr", _split(arguments.cluster_cidr)),
        "cluster.server": ("--server", arguments.server),
        "cluster.caFile": ("--ca-file", arguments.ca_file),
        "cluster.tokenFile": ("--token-file", arguments.token_file),
    }
    for name, value in given.values():
        if value == "":
            raise UsageError(REFERENCE, f"{name}: must not be empty", hint=f"give {name} a value, or leave it out")
    return {path: (name, value) for path, (name, value) in given.items() if value is not None}


def _split(text: Optional[str]) -> Optional[tuple[str, ...]]:
    return None if text is None else tuple(text.split(","))


def merge(known: Settings, file: Optional[ConfigFile], options: Mapping[str, tuple[str, Any]]) -> Merged:
    """The configuration by the one precedence: option, file, what an option gave earlier, default."""
    spec, sources = _DEFAULT, {}
    for path in field_paths():  # the role comes first
        source = known.sources.get(path, "")
        if path in options:
            name, value = options[path]
            spec, sources[path] = set_field(spec, path, value), _OPTION + name
        elif file is not None and file.sets(path):
            if _stands_aside(path, options):
                continue
            spec, sources[path] = set_field(spec, path, get_field(file.spec, path)), _FILE + file.name
        elif source.startswith((_OPTION, FROM_BEFORE)) and (spec.role == WORKER or not path.startswith("cluster.")):
            spec, sources[path] = set_field(spec, path, get_field(known.spec, path)), source
    return Merged(spec, sources, file, known)


def _stands_aside(path: str, options: Mapping[str, object]) -> bool:
    """Whether an option that says the same in another way wins over the file's field."""
    return (path in _CREDENTIALS and "cluster.tokenFile" in options) or (
        path == "cluster.ca" and "cluster.caFile" in options
    )


def read_merged(context: Context, arguments: argparse.Namespace) -> Merged:
    """The configuration of this run; looks only. Raises :class:`StratumError`."""
    known = read_settings(context.host)
    file = read_config(context.host, arguments.config)
    merged = merge(known, file, _options(arguments))
    gone = {source for source in known.sources.values() if source.startswith(_FILE)} - set(merged.sources.values())
    for source in sorted(gone):
        if file is None or source != _FILE + file.name:
            context.out.warn(
                f"settings came from {source[len(_FILE) :]}, which is not read now: they are defaults again"
            )
    return merged


def find_differing(context: Context, settings: Settings) -> list[str]:
    """The fields that the next ``up`` would change, because the file says other than what is in force.

    Raises :class:`UsageError` for a file that is broken.
    """
    file = read_config(context.host)
    if file is None and not any(source.startswith(_FILE) for source in settings.sources.values()):
        return []
    spec, _ = merge(settings, file, {}).recorded()
    return [path for path in field_paths() if get_field(spec, path) != get_field(settings.spec, path)]


# -- joining ----------------------------------------------------------------------------------------------


def read_join(context: Context, merged: Merged, *, bundle: Optional[str]) -> tuple[Optional[Secret], bytes]:
    """The token and the CA that a worker joins with. Raises :class:`UsageError`.

    Both may be gone when the node has joined: it keeps its certificate and the CA's copy. ``bundle`` is the option's
    value, which may name standard input too.
    """
    if merged.spec.role != WORKER:
        return None, b""
    return _read_token(context, merged, bundle), _read_ca(context, merged)


def _read_token(context: Context, merged: Merged, bundle: Optional[str]) -> Optional[Secret]:
    cluster, path = merged.spec.cluster, "cluster.tokenFile"
    if cluster.token is not None or not cluster.token_file:
        return cluster.token
    if merged.is_option(path) and cluster.token_file == _STANDARD_INPUT:
        if bundle == _STANDARD_INPUT:
            raise UsageError(
                "two-on-stdin",
                "--bundle - and --token-file - both want standard input",
                hint="put one of them in a file",
            )
        return _parse_token(_read_stdin(context), "standard input")
    data = _read_file(context, merged, path, cluster.token_file)
    if data is None:
        return None
    status = os.stat if merged.is_option(path) else context.host.stat
    mode = stat.S_IMODE(status(cluster.token_file).st_mode)
    if mode & 0o077:
        context.out.warn(f"{cluster.token_file}: has a token and mode {mode:04o}: others can read it")
    return _parse_token(data, cluster.token_file)


def _read_stdin(context: Context) -> bytes:
    if context.stdin is None:
        raise UsageError("no-stdin", "--token-file -: standard input is closed", hint="give --token-file a file")
    return context.stdin.read(_TOKEN_LIMIT + 1)


def _parse_token(data: bytes, name: str) -> Secret:
    text = data.strip()
    if not text or len(text) > _TOKEN_LIMIT or any(not 0x21 <= byte <= 0x7E for byte in text):
        why = "is empty" if not text else "is not one token: one word of printable ASCII"
        raise UsageError("token-invalid", f"{name}: {why}", hint="write the token alone into the file")
    return Secret(text.decode("ascii"))


def _read_ca(context: Context, merged: Merged) -> bytes:
    cluster, path = merged.spec.cluster, "cluster.caFile"
    if cluster.ca or not cluster.ca_file:
        return cluster.ca.encode()
    data = _read_file(context, merged, path, cluster.ca_file)
    if data is not None and b"-----BEGIN CERTIFICATE-----" not in data:
        why = "has no certificate in PEM form (-----BEGIN CERTIFICATE-----)"
        raise UsageError(
            "ca-invalid", f"{cluster.ca_file}: {why}", hint="give the cluster's CA, for example its ca.crt"
        )
    return data or b""


def _read_file(context: Context, merged: Merged, path: str, name: str) -> Optional[bytes]:
    """A file that a field names; None when it is gone and the node has joined."""
    if merged.is_option(path):
        return read_given_file(name, REFERENCE)[0]
    if merged.joined and not context.host.exists(name):
        return None
    try:
        return context.host.read_bytes(name)
    except OSError as error:
        why = f"{name}: cannot be read: {error.strerror or error}"
        if merged.file is None:
            raise UsageError(REFERENCE, why, hint=f"mend {name}; {SETTINGS_PATH} names it") from None
        raise merged.file.place(path).error(why, hint=f"put the file there, or change {path}") from None
