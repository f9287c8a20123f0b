"""Registries and their mirrors, as containerd reads them at each pull (containerd docs/hosts.md).

Each registry has a directory below ``certs.d`` with its ``hosts.toml`` and the certificates that this names. Changing
them needs no restart. ``ctr`` reads them with ``--hosts-dir``.

Credentials are an ``Authorization`` header of the host in ``hosts.toml`` (RFC 7617), which ``ctr`` and CRI of 1.6, 1.7
and 2.x all send. A registry that demands a token of its own gets the header at its token service from 2.x alone. For
1.6 and 1.7 the credentials are therefore in the main configuration too (``registry.configs``, deprecated since 1.5 and
to go with 2.2: containerd RELEASES.md, "Deprecated config properties"), where CRI finds them and ``ctr`` does not.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from stratum.config import Containerd, Mirror, Registry, Secret
from stratum.errors import StratumError
from stratum.node.containerd import CONFIG_PATH, REGISTRY_DIR, Login, config_version, quote_toml
from stratum.steps import Action, Call, RemoveDirectory, Work, plan_file, withdraw
from stratum.system import Host, HostPath
from stratum.trust.certificates import without_keys

__all__ = ["directory_name", "plan_registries", "read_logins", "recorded_logins", "render_hosts"]

_HOSTS = "hosts.toml"
_OPEN, _PRIVATE = 0o644, 0o600
_LIMIT = 1 << 20  # bytes of a certificate or password file
_NAME = re.compile(r"(_default|\[[0-9A-Fa-f:.]+\](:\d{1,5})?|[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:\d{1,5})?)\Z")
_LOGIN = re.compile(
    r"^\[plugins\.\S+\.registry\.configs\.(\".*\")\.auth\]\n  username = (\".*\")\n  password = (\".*\")$", re.MULTILINE
)
# A mirror may say which digest a tag is: it is the admin's own, whom the image's name is trusted to as well. Nothing is
# pushed to it.
_CAPABILITIES = 'capabilities = ["pull", "resolve"]'


@dataclass(frozen=True)
class _File:
    """A file of a registry's directory."""

    name: str
    content: bytes = field(repr=False)
    mode: int


def directory_name(registry: str) -> str:
    """The directory of a registry below ``certs.d``: ``name:5000`` is ``name_5000_``, which containerd looks for first.

    Raises :class:`StratumError` for what is no registry's name.
    """
    if not _NAME.match(registry):
        raise StratumError(
            "registry-name",
            f"containerd.registries: {registry!r} is no name of a registry",
            hint="give host or host:port without a scheme, for example registry.example.com:5000, or _default",
        )
    host, colon, port = registry.rpartition(":")
    # The last colon may belong to an IPv6 address.
    return (
        f"{host}_{port}_" if colon and port.isdigit() and not (host.startswith("[") and "]" not in host) else registry
    )


def _server(name: str) -> str:
    # docker.io names a registry that answers elsewhere; containerd knows that of the name alone.
    return "https://registry-1.docker.io" if name == "docker.io" else f"https://{name}"


def render_hosts(registry: Registry, mirrors: Sequence[tuple[Mirror, Sequence[str]]]) -> bytes:
    """``hosts.toml`` of a registry; ``mirrors`` in the order of asking, each with the lines of its table.

    containerd asks ``server`` when no host had the image, and where there is none the registry itself. Without an
    upstream the last mirror is the server: so nobody else is ever asked. It is a host too: 1.6 and 1.7 take a file
    without hosts for a broken one (found with Debian's), and fall back on the registry itself.
    """
    text = "# Written by Stratum.\n"
    if not registry.upstream:
        mirror, lines = mirrors[-1]
        text += "".join(f"{line}\n" for line in (f"server = {quote_toml(mirror.url)}", *lines))
    elif registry.name != "_default":
        text += f"server = {quote_toml(_server(registry.name))}\n"
    for mirror, lines in mirrors:
        table = f"host.{quote_toml(mirror.url)}"
        text += f"\n[{table}]\n"
        text += "".join("  " + line.replace("[header]", f"[{table}.header]") + "\n" for line in lines)
    return text.encode()


def _check_mirror(registry: Registry, mirror: Mirror) -> None:
    parts = urlsplit(mirror.url)
    problem = ""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        problem = "is no http or https URL"
    elif "@" in parts.netloc:
        problem = "has credentials in it, which containerd does not send"
    elif parts.query or parts.fragment or re.search(r"[\s\"\\\x00-\x1f\x7f]", mirror.url):
        problem = "has what no address of a registry has"
    elif bool(mirror.client_certificate_file) != bool(mirror.client_key_file):
        problem = "has a client certificate without its key, or a key without its certificate"
    elif bool(mirror.username) != bool(mirror.password_file):
        problem = "has a user name without a password file, or a password file without a user name"
    if problem:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise StratumError(
            "registry-mirror",
            f"containerd.registries: {registry.name}: mirror {shown} {problem}",
            hint="see spec.containerd.registries in the configuration",
        )


def _read(host: Host, registry: Registry, path: str, what: str) -> bytes:
    """A file that the configuration names; raises :class:`StratumError`."""
    try:
        with host.open(HostPath(path)) as file:
            data = file.read(_LIMIT + 1)
        if len(data) > _LIMIT:
            raise ValueError(f"has more than {_LIMIT} bytes")
        return data
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise StratumError(
            "registry-file",
            f"containerd.registries: {registry.name}: {what} {path}: {why}",
            hint="put the file there, or take it out of the configuration",
        ) from None


def _certificate(host: Host, registry: Registry, path: str, what: str, mark: bytes) -> bytes:
    data = _read(host, registry, path, what)
    if mark not in data:
        # containerd would fail each pull with words of its own.
        raise StratumError(
            "registry-file",
            f"containerd.registries: {registry.name}: {what} {path}: is no PEM file with {mark.decode()}",
            hint="convert it, for example: openssl x509 -in FILE -out FILE.pem",
        )
    return data


def _password(host: Host, registry: Registry, mirror: Mirror) -> str:
    data = _read(host, registry, mirror.password_file, "password file")
    try:
        # The line's end is not part of it, and nothing else is taken away.
        password = data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        password = ""
    if not password or ":" in mirror.username:
        raise StratumError(
            "registry-file",
            f"containerd.registries: {registry.name}: password file {mirror.password_file} is empty or no text, "
            "or the user name has a colon",
            hint="put the password into the file, as one line",
        )
    return password


def read_logins(host: Host, spec: Containerd, containerd_version: str) -> tuple[Login, ...]:
    """What containerd's main configuration must say of credentials: nothing from 2.x on.

    Raises :class:`StratumError` as :func:`plan_registries` does.
    """
    if config_version(containerd_version) != 2:
        return ()
    found: dict[str, Login] = {}
    for registry in spec.registries:
        for mirror in registry.mirrors:
            _check_mirror(registry, mirror)
            if mirror.username:
                place = urlsplit(mirror.url).netloc
                login = Login(place, mirror.username, Secret(_password(host, registry, mirror)))
                if found.setdefault(place, login) != login:
                    raise StratumError(
                        "registry-mirror",
                        f"containerd.registries: {registry.name}: mirror {mirror.url} has other credentials elsewhere, "
                        f"and containerd {containerd_version} knows those of a host once",
                        hint="give each entry of that host the same user name and password",
                    )
    return tuple(found.values())


def recorded_logins(host: Host, containerd_version: str) -> tuple[Login, ...]:
    """The credentials in the main configuration on the disk, as Stratum wrote them there; none for 2.x.

    For a start at which their files are gone: what containerd knows by now must not get lost with them.
    """
    if config_version(containerd_version) != 2:
        return ()
    try:
        text = host.read_text(CONFIG_PATH)
        found = [tuple(map(json.loads, match.groups())) for match in _LOGIN.finditer(text)]
    except (OSError, ValueError):
        return ()
    return tuple(Login(place, username, Secret(password)) for place, username, password in found)


def _files_of(host: Host, registry: Registry) -> list[_File]:
    """Everything in a registry's directory."""
    if not registry.mirrors:
        raise StratumError(
            "registry-mirror",
            f"containerd.registries: {registry.name}: has no mirrors",
            hint="name one, or take the registry out of the configuration",
        )
    if len({mirror.url for mirror in registry.mirrors}) < len(registry.mirrors):
        # A table that is there twice makes hosts.toml a broken file, which containerd passes over.
        raise StratumError(
            "registry-mirror",
            f"containerd.registries: {registry.name}: a mirror is there twice",
            hint="name each mirror once",
        )
    files: list[_File] = []
    tables: list[tuple[Mirror, Sequence[str]]] = []
    private = False
    for number, mirror in enumerate(registry.mirrors, 1):
        _check_mirror(registry, mirror)
        lines = [_CAPABILITIES]
        if mirror.ca_file:
            name = f"mirror{number}-ca.pem"
            ca = _certificate(host, registry, mirror.ca_file, "caFile", b"-----BEGIN CERTIFICATE-----")
            files.append(_File(name, without_keys(ca), _OPEN))
            lines.append(f'ca = "{name}"')
        if mirror.client_certificate_file:
            pair = (f"mirror{number}-client.pem", f"mirror{number}-client-key.pem")
            given = (
                _certificate(host, registry, mirror.client_certificate_file, "certificate", b"-----BEGIN CERTIFICATE"),
                _certificate(host, registry, mirror.client_key_file, "key", b"PRIVATE KEY-----"),
            )
            files += [_File(pair[0], without_keys(given[0]), _OPEN), _File(pair[1], given[1], _PRIVATE)]
            lines.append(f'client = [["{pair[0]}", "{pair[1]}"]]')
        if mirror.skip_verify:
            lines.append("skip_verify = true")
        if mirror.override_path:
            lines.append("override_path = true")
        if mirror.username:
            private = True
            given_pair = f"{mirror.username}:{_password(host, registry, mirror)}"
            value = base64.b64encode(given_pair.encode()).decode()
            # A table ends what is above it: it comes last.
            lines += ["[header]", f'Authorization = "Basic {value}"']
        tables.append((mirror, lines))
    hosts = render_hosts(registry, tables)
    return [*files, _File(_HOSTS, hosts, _PRIVATE if private else _OPEN)]


def plan_registries(work: Work, spec: Containerd, containerd_version: str) -> list[Action]:
    """What makes ``certs.d`` say what the configuration does; what it said before and does not now goes.

    Directories of others in there stay. ``hosts.toml`` comes last of a directory's files: it names the others.
    Raises :class:`StratumError` for a name, a mirror or a file that is no use, and for a file that is not ours;
    :class:`BundleError` for an unknown containerd.
    """
    config_version(containerd_version)
    wanted: dict[HostPath, _File] = {}
    for registry in spec.registries:
        directory = REGISTRY_DIR / directory_name(registry.name)
        if directory / _HOSTS in wanted:
            raise StratumError(
                "registry-name",
                f"containerd.registries: {registry.name} is there twice",
                hint="put all its mirrors into one entry",
            )
        wanted.update({directory / file.name: file for file in _files_of(work.host, registry)})
    actions: list[Action] = []
    for path, file in wanted.items():
        actions += plan_file(work, path, file.content, file.mode)
    return list(dict.fromkeys(actions)) + _plan_stale(work, set(wanted))


def _plan_stale(work: Work, wanted: set[HostPath]) -> list[Action]:
    """Remove our files of registries that are no longer configured, hosts.toml first, then directories of ours."""
    ours = [entry for entry in work.receipt if entry.is_below(REGISTRY_DIR)]
    # What somebody changed is theirs by now, and `uninstall` names it.
    stale = [
        entry.path
        for entry in ours
        if entry.kind == "file" and entry.path not in wanted and work.receipt.owns(entry.path)
    ]
    stale.sort(key=lambda path: (path.parent, path.name != _HOSTS, path.name))
    actions: list[Action] = [Call("remove", str(path), functools.partial(withdraw, work, path)) for path in stale]
    kept = {path.parent for path in wanted}
    for entry in ours:
        if entry.kind == "directory" and entry.path not in kept and _will_be_empty(work.host, entry.path, stale):
            actions.append(
                Call("remove directory", str(entry.path), functools.partial(_forget_empty, work, entry.path))
            )
    return actions


def _will_be_empty(host: Host, path: HostPath, gone: Sequence[HostPath]) -> bool:
    return host.is_dir(path) and all(path / name in gone for name in host.listdir(path))


def _forget_empty(work: Work, path: HostPath) -> None:
    RemoveDirectory(path).perform(work)
    if not work.host.lexists(path):
        # On the disk before its record goes: a power cut must not bring it back without one.
        work.host.fsync_dir(path.parent)
        work.receipt.forget(path)
