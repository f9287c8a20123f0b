"""Reading the configuration file: strictly, with file and line in every error.

The checks that the values need are :mod:`stratum.configchecks`; here stands what a field's kind demands.
"""

from __future__ import annotations

import dataclasses
import os
import stat
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Callable, Optional

from stratum.config import CONFIG_PATH, NodeSpec, Secret
from stratum.configchecks import Problem, check_spec
from stratum.configcodec import camel, class_of, item_type, type_hints, without_optional
from stratum.errors import UsageError
from stratum.system import Host
from stratum.yamlreader import Place, YamlNode, parse_yaml

__all__ = [
    "API_VERSION",
    "KIND",
    "REFERENCE",
    "UNREADABLE",
    "ConfigFile",
    "parse_config",
    "read_config",
    "read_given_file",
]

API_VERSION = "stratum.dev/v1"
KIND = "Node"
REFERENCE = "config-invalid"
UNREADABLE = "config-unreadable"  # for this user

_SIZE_LIMIT = 1 << 20
# YAML 1.1 takes these words for booleans; the field means the words.
_WORDS = ("gpu.nvidia",)
_PEM = ("cluster.ca",)
# Values of labels, taints and variables may be empty.
_EMPTY = ("kubelet.labels.", "kubelet.taints[", "cluster.exec.env.")


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file: what it says, and where each value stands, by its path below ``spec``."""

    name: str
    spec: NodeSpec
    places: Mapping[str, Place] = field(default_factory=dict, hash=False)
    mode: int = 0o600

    def sets(self, path: str) -> bool:
        """Whether the file has the field."""
        return path in self.places

    def place(self, path: str) -> Place:
        """Where ``path`` stands, or would: the nearest field around it that is there."""
        return _nearest(self.places, path, Place(self.name, 1, "", REFERENCE))

    def problems(self, profiles: Iterable[str]) -> list[Problem]:
        """What is wrong with the values, worst first, apart from what an option may still add."""
        return check_spec(self.spec, profiles)

    def error(self, problem: Problem) -> UsageError:
        """The error that says ``problem`` with its file and line."""
        return self.place(problem.path).error(problem.why, hint=problem.hint or None)


def _nearest(places: Mapping[str, Place], path: str, top: Place) -> Place:
    here = path
    while here:
        if here in places:
            found = places[here]
            wanted = f"spec.{path}"
            return found if found.path == wanted else dataclasses.replace(found, path=wanted)
        here = here[: max(here.rfind("."), here.rfind("["), 0)]
    return dataclasses.replace(places.get("", top), path=f"spec.{path}" if path else "spec")


# -- the file ---------------------------------------------------------------------------------------------


def read_config(host: Host, given: Optional[str] = None) -> Optional[ConfigFile]:
    """The configuration: the file that was ``given`` on the command line, else the host's own.

    None where the host has none. Raises :class:`UsageError` for one that cannot be used.
    """
    if given is not None:
        data, mode = read_given_file(given, REFERENCE)
        return _checked(parse_config(data, given, mode=mode))
    name = str(CONFIG_PATH)
    if not host.lexists(CONFIG_PATH):
        return None
    _check_owner(host)
    data, mode = _read_regular(name, lambda: host.open(CONFIG_PATH), host.stat, REFERENCE)
    return _checked(parse_config(data, name, mode=mode))


def read_given_file(name: str, reference: str) -> tuple[bytes, int]:
    """Content and mode of a file that an option names, by the paths of this process. Raises :class:`UsageError`."""
    return _read_regular(name, lambda: open(name, "rb"), os.stat, reference)


def _read_regular(
    name: str, opener: Callable[[], BinaryIO], status: Callable[[str], os.stat_result], reference: str
) -> tuple[bytes, int]:
    try:
        # A pipe that nobody writes to would block the open.
        if not stat.S_ISREG(status(name).st_mode):
            raise UsageError(reference, f"{name}: not a regular file", hint="name a file")
        with opener() as file:
            # The mode of the file that is read, whatever links led to it.
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read(_SIZE_LIMIT + 1)
    except OSError as error:
        why = error.strerror or str(error)
        hint = f"put {name} there, or name another file"
        if isinstance(error, PermissionError):
            reference, hint = UNREADABLE, f"run as root, or as who may read {name}"
        raise UsageError(reference, f"{name}: cannot be read: {why}", hint=hint) from None
    if len(data) > _SIZE_LIMIT:
        raise UsageError(reference, f"{name}: longer than {_SIZE_LIMIT} bytes", hint="name the right file")
    return data, mode


def _check_owner(host: Host) -> None:
    """Refuse the host's own file where it is somebody else's to change, as the keys of the keyring are.

    A tree that will become a machine may belong to whoever builds it. What cannot be looked at is the reader's to say.
    """
    try:
        info = host.stat(CONFIG_PATH)
    except OSError:
        return
    if host.live and info.st_uid not in (0, os.geteuid()):
        raise UsageError(
            REFERENCE,
            f"{CONFIG_PATH}: belongs to user {info.st_uid}, who could change what root will run",
            hint=f"run: chown root: {CONFIG_PATH}",
        )


def _checked(config: ConfigFile) -> ConfigFile:
    """Refuse a file that gives a token away, or that anybody may write; raises :class:`UsageError`."""
    if config.spec.cluster.token and config.mode & 0o077:
        raise config.place("cluster.token").error(
            f"the file has a token and mode {config.mode:04o}: others can read it",
            hint=f"run: chmod 0600 {config.name}, or put the token in a file of its own (cluster.tokenFile)",
        )
    if config.mode & stat.S_IWOTH:
        raise UsageError(
            REFERENCE,
            f"{config.name}: has mode {config.mode:04o}: anybody could change what root will run",
            hint=f"run: chmod o-w {config.name}",
        )
    return config


# -- the document -----------------------------------------------------------------------------------------


def parse_config(data: bytes, name: str, *, mode: int = 0o600) -> ConfigFile:
    """The configuration in ``data``; ``name`` is what errors call its file. Raises :class:`UsageError`."""
    top = parse_yaml(data, name, reference=REFERENCE)
    fields = top.mapping(["apiVersion", "kind", "spec"])
    for key, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        found = fields[key].text()
        if found != wanted:
            raise fields[key].place.error(f"must be {wanted}, not {found!r}")
    reader = _Reader()
    spec = reader.read(NodeSpec, fields["spec"], "")
    return ConfigFile(name, spec, reader.places, mode)


class _Reader:
    """Makes values of the classes' types from nodes, and notes where each stands."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}

    def read(self, hint: Any, node: YamlNode, path: str) -> Any:
        """The value of type ``hint`` at ``path``. Raises :class:`UsageError`."""
        self.places[path] = node.place
        bare = without_optional(hint)
        cls = class_of(bare)
        if cls is not None:
            return self._record(cls, node, path)
        if typing.get_origin(bare) is tuple:
            items = enumerate(node.sequence())
            return tuple(self.read(item_type(bare), item, f"{path}[{number}]") for number, item in items)
        if item_type(bare) is not None:
            return {key: self.read(item_type(bare), item, f"{path}.{key}") for key, item in node.entries().items()}
        return self._scalar(bare, node, path)

    def _record(self, cls: type, node: YamlNode, path: str) -> Any:
        hints = type_hints(cls)
        required = [camel(name) for name in hints if _is_required(cls, name)]
        names = {camel(name): name for name in hints}
        fields = node.mapping(required, [name for name in names if name not in required])
        start = f"{path}." if path else ""
        return cls(**{names[key]: self.read(hints[names[key]], one, start + key) for key, one in fields.items()})

    def _scalar(self, bare: Any, node: YamlNode, path: str) -> Any:
        if bare is Any:
            if node.is_mapping():
                return {key: self.read(Any, item, f"{path}.{key}") for key, item in node.entries().items()}
            return node.free()
        if bare is Secret:
            return Secret(node.secret())
        if bare is bool:
            return node.boolean()
        return node.text(boolean=path in _WORDS, lines=path in _PEM, empty=path.startswith(_EMPTY))


def _is_required(cls: type, name: str) -> bool:
    found = next(item for item in dataclasses.fields(cls) if item.name == name)
    return found.default is dataclasses.MISSING and found.default_factory is dataclasses.MISSING
