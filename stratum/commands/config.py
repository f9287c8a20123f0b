"""``stratum config``: the schema of the configuration file, a check of one, and what is in force on this host.

All three only look, and need neither compiled parts nor root; a file that only root may read is root's to show.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Callable

from stratum.config import CONFIG_PATH, WORKER, NodeSpec, Secret
from stratum.configchecks import Problem
from stratum.configcodec import field_paths, get_field, value_to_json
from stratum.configfile import REFERENCE, UNREADABLE, ConfigFile, read_config
from stratum.configschema import read_schema
from stratum.errors import ExitCode, UsageError
from stratum.host.nodeip import check_argument
from stratum.host.profiles import PROFILES
from stratum.node.kubeletfields import ANY, check_fields
from stratum.node.layout import Layout
from stratum.node.settings import SETTINGS_PATH, Settings, read_settings
from stratum.scripts.context import Context, add_output, add_root, add_subcommand
from stratum.scripts.settings import merge

_HIDDEN = "(secret)"
_NO_VALUE = "-"
_WIDTH = 100


def _schema_arguments(_parser: argparse.ArgumentParser) -> None:
    """None."""


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", nargs="?", help=f"the configuration (default: {CONFIG_PATH})")
    add_output(parser)
    add_root(parser)


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    add_output(parser)
    add_root(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    commands = parser.add_subparsers(dest="config_command", metavar="SUBCOMMAND", required=True)
    for name, (summary, declare, _) in _SUBCOMMANDS.items():
        add_subcommand(commands, parser, name, summary, declare)


def run(context: Context, arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    return int(_SUBCOMMANDS[arguments.config_command][2](context, arguments))


# -- schema -----------------------------------------------------------------------------------------------


def run_schema(context: Context, arguments: argparse.Namespace) -> int:
    """Print the JSON Schema."""
    context.out.result(read_schema().rstrip("\n"))
    return int(ExitCode.DONE)


# -- check ------------------------------------------------------------------------------------------------


def find_problems(config: ConfigFile, known: Settings) -> list[Problem]:
    """What is wrong with a file, then what is only odd; ``known`` is what is in force on this host."""
    found = config.problems(PROFILES)
    if config.spec.network.node_ip and not any(problem.path == "network.nodeIP" for problem in found):
        try:
            check_argument(config.spec.network.node_ip)
        except UsageError as error:
            found.insert(0, Problem("network.nodeIP", error.message, error.hint or ""))
    if config.spec.role == WORKER:
        for problem in merge(known, config, {}).check_join():
            # A credential often comes with an option, or is removed when it is used up.
            found.append(replace(problem, odd=problem.path == "cluster.tokenFile"))
    found += [problem for problem in _find_kubelet_problems(config) if problem.path not in {one.path for one in found}]
    return sorted(found, key=lambda problem: problem.odd)


def _find_kubelet_problems(config: ConfigFile) -> list[Problem]:
    """What no kubelet would take, or none is known to have; which one it will be is the bundle's to say."""
    try:
        lines = [(line, True) for line in check_fields(config.spec.kubelet.config, ANY)]
    except UsageError as error:
        lines = [(error.message, False)]
    parts = [(line[len("spec.") :].partition(": "), odd) for line, odd in lines]
    return [Problem(path, why, odd=odd) for (path, _, why), odd in parts]


def run_check(context: Context, arguments: argparse.Namespace) -> int:
    """Check a file; exit status 2 when something is wrong."""
    name = arguments.file or str(CONFIG_PATH)
    try:
        config = read_config(context.host, arguments.file)
    except UsageError as error:
        if error.reference not in (REFERENCE, UNREADABLE):
            raise
        return _report(context, name, [(error.message, Problem("", error.message, error.hint or ""), 0)])
    if config is None:
        raise UsageError(
            "config-missing",
            f"{CONFIG_PATH}: no such file: every field has its default",
            hint="run: stratum config check FILE",
        )
    problems = find_problems(config, _known(context))
    return _report(context, name, [_line(config, problem) for problem in problems])


def _known(context: Context) -> Settings:
    try:
        return read_settings(context.host)
    except PermissionError:
        return Settings()


def _line(config: ConfigFile, problem: Problem) -> tuple[str, Problem, int]:
    place = config.place(problem.path)
    return f"{place}: {'warning: ' if problem.odd else ''}{problem.why}", problem, place.line


def _report(context: Context, name: str, found: list[tuple[str, Problem, int]]) -> int:
    wrong = sum(not problem.odd for _, problem, _ in found)
    for line, problem, _ in found:
        context.out.result(line)
        if problem.hint:
            context.out.result(f"    do: {problem.hint}")
    context.out.result(f"checked: {name}: {f'{wrong} to correct' if wrong else 'valid'}")
    document = [
        {
            "line": number or None,
            "path": problem.path or None,
            "severity": "warn" if problem.odd else "reject",
            "message": problem.why,
            "hint": problem.hint or None,
        }
        for _, problem, number in found
    ]
    context.out.document("ConfigCheck", {"file": name, "valid": not wrong, "problems": document})
    return int(ExitCode.USAGE if wrong else ExitCode.DONE)


# -- show -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shown:
    """A value as it may be shown, and where it came from."""

    value: object
    source: str

    def text(self) -> str:
        """The value for people."""
        if isinstance(self.value, list) and all(isinstance(item, str) for item in self.value):
            return ",".join(map(str, self.value)) or _NO_VALUE
        if isinstance(self.value, bool):
            return str(self.value).lower()
        if self.value in ("", None, {}, []):
            return _NO_VALUE
        line = " ".join(str(self.value).split())
        return line if len(line) <= _WIDTH else f"{line[:_WIDTH]}…"


def show_values(spec: NodeSpec, sources: Mapping[str, str]) -> dict[str, Shown]:
    """Each field with its value and source; what is secret is not in it."""
    return {path: Shown(hide(path, get_field(spec, path)), sources.get(path, "default")) for path in field_paths()}


def hide(path: str, value: Any) -> object:
    """``value`` as it may be shown: no token, no password of a proxy, no variable of a program, no header."""
    if isinstance(value, Secret):
        return _HIDDEN
    if path.startswith("proxy.") and isinstance(value, str):
        return re.sub(r"(?<=//)[^/]*@", f"{_HIDDEN}@", value)
    found = value_to_json(value)
    if path == "cluster.exec" and isinstance(found, dict) and found.get("env"):
        found["env"] = dict.fromkeys(found["env"], _HIDDEN)
    if path == "kubelet.config" and isinstance(found, dict) and "staticPodURLHeader" in found:
        found["staticPodURLHeader"] = _HIDDEN
    return found


def run_show(context: Context, arguments: argparse.Namespace) -> int:
    """Show what is in force, or what the file would give."""
    host = context.host
    installed = host.lexists(Layout(host).current_link) or host.lexists(SETTINGS_PATH)
    settings = read_settings(host) if installed else _would_be(context)
    values = show_values(settings.spec, settings.sources)
    resolved = {
        "nodeIP": Shown(settings.node_ip, settings.sources.get("nodeIP", "not yet known")),
        "nodeName": Shown(settings.node_name, settings.sources.get("nodeName", "not yet known")),
    }
    context.out.result("in force on this node:" if installed else "no node here; what it would be given:")
    for path, shown in values.items():
        context.out.result(f"  {path} = {shown.text()}  ({shown.source})")
    for name, shown in resolved.items() if installed else ():
        context.out.result(f"  the node's {name} = {shown.text()}  ({shown.source})")
    context.out.document(
        "Config",
        {
            "installed": installed,
            "fields": {path: {"value": shown.value, "source": shown.source} for path, shown in values.items()},
            **{name: {"value": shown.value or None, "source": shown.source} for name, shown in resolved.items()},
        },
    )
    return int(ExitCode.DONE)


def _would_be(context: Context) -> Settings:
    merged = merge(Settings(), read_config(context.host), {})
    merged.check(kubelet=False)
    return Settings(merged.spec, "", "", merged.sources)


_SUBCOMMANDS: dict[
    str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[Context, argparse.Namespace], int]]
] = {
    "schema": ("print the JSON Schema of the configuration file", _schema_arguments, run_schema),
    "check": ("check a configuration file", _check_arguments, run_check),
    "show": ("show what is in force, and where each value came from", _show_arguments, run_show),
}
