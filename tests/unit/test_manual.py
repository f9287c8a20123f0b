"""The manual pages and the examples in them and in the README say what the program does and takes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stratum.cli import COMMANDS
from stratum.config import WORKER
from stratum.configchecks import check_join
from stratum.configfile import ConfigFile, parse_config
from stratum.configschema import read_schema
from stratum.errors import ExitCode
from stratum.host.profiles import PROFILES
from stratum.node.containerd import CONFIG_PATH as CONTAINERD_CONFIG
from stratum.node.containerd import FRAGMENT_DIR, REGISTRY_DIR
from stratum.node.kubelet import ADMIN_CERTIFICATE, ADMIN_KEY
from stratum.node.kubeletconfig import BOOTSTRAP, CA_FILE, MANIFESTS
from stratum.node.kubeletroot import KUBELET_TREES
from stratum.node.localdns import COREFILE
from stratum.node.proxy import PROXY_FILE
from stratum.node.settings import SETTINGS_PATH
from stratum.node.units import KUBELET_CONFIG

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "man/stratum.1").read_text()
CONFIGURATION_PAGE = (ROOT / "man/stratum.yaml.5").read_text()
README = (ROOT / "README.md").read_text()


def test_the_manual_page_and_the_readme_list_every_exit_code_with_its_meaning() -> None:
    page = {int(number): text for number, text in re.findall(r"^(\d+)\|(.*)$", PAGE, re.MULTILINE)}
    assert page == {int(code): code.meaning for code in ExitCode}
    for code in ExitCode:
        assert re.search(rf"\| {int(code)} \| {re.escape(code.meaning)} \|", README), code


def test_the_manual_page_names_every_command() -> None:
    commands = PAGE.partition(".SH COMMANDS")[2].partition(".SH EXIT STATUS")[0]
    lines = re.findall(r"^\.BR? (.*)$", commands, re.MULTILINE)
    named = {word for line in lines for word in re.findall(r"[a-z]+", line)}
    assert set(COMMANDS) <= named


def plain(roff: str) -> str:
    """The text of lines of a page without escapes."""
    return re.sub(r"^\\&", "", roff, flags=re.MULTILINE).replace("\\-", "-").replace("\\e", "\\")


def field_words(schema: Mapping[str, Any], name: str, required: bool) -> str:
    """What stands behind a field's name: its type or values, its default."""
    if schema["type"] == "array":
        words = f"list of {'mappings' if schema['items']['type'] == 'object' else 'strings'}"
    elif "enum" in schema:
        words = f"{', '.join(schema['enum'][:-1])} or {schema['enum'][-1]}"
    else:
        words = {"object": "mapping", "boolean": "true or false", "string": "string"}[schema["type"]]
    default = schema.get("default")
    if default not in (None, [], {}):
        words += f"; default {str(default).lower() if isinstance(default, bool) else default}"
    return f'.BR {name} " ({words}{"; must be there" if required else ""})"'


def entries(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """The heading of each field of the schema, and its description."""
    for name, child in schema["properties"].items():
        here, items = f"{path}{name}", child.get("items", {})
        if not path and "properties" in child:
            yield f".SS {here}", child["description"]
        else:
            yield field_words(child, here, name in schema.get("required", [])), child["description"]
        if "properties" in child:
            yield from entries(child, f"{here}.")
        elif "properties" in items:
            yield from entries(items, f"{here}[].")


def test_the_page_of_the_configuration_has_every_field_with_type_default_and_meaning() -> None:
    fields = CONFIGURATION_PAGE.partition("\n.SH FIELDS\n")[2].partition("\n.SH ")[0]
    found = re.findall(r"^(\.(?:SS|BR) .*)\n(.*)$", plain(fields), re.MULTILINE)
    assert sorted(found) == sorted(entries(json.loads(read_schema())["properties"]["spec"]))


def check_example(text: str) -> ConfigFile:
    """An example has nothing wrong or odd in it, and a worker's can join."""
    config = parse_config(text.encode(), "example.yaml")
    assert config.problems(PROFILES) == []
    if config.spec.role == WORKER:
        assert check_join(config.spec.cluster) == []
    return config


def test_the_example_in_the_page_of_the_configuration_is_valid_and_has_each_section() -> None:
    example = plain(CONFIGURATION_PAGE.partition("\n.nf\n")[2].partition("\n.fi\n")[0])
    config = check_example(example)
    assert [
        name for name in json.loads(read_schema())["properties"]["spec"]["properties"] if not config.sets(name)
    ] == ["selinux"]


def test_each_configuration_in_the_readme_is_valid() -> None:
    examples = re.findall(r"^(?:    apiVersion: .*\n)(?:(?:    .*)?\n)+", README, re.MULTILINE)
    assert len(examples) == 1
    for example in examples:
        check_example(textwrap.dedent(example))


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not there")
@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "man").iterdir()))
def test_the_pages_are_without_warnings(page: str) -> None:
    argv = ["groff", "-man", "-t", "-ww", "-z", str(ROOT / "man" / page)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def spelled_out(text: str) -> set[str]:
    """What stands between backticks, each alternative in braces for itself: ``a/{b,c}`` is ``a/b`` and ``a/c``."""
    found = set(re.findall(r"`([^`\n]+)`", text))
    while braced := [word for word in found if re.search(r"\{[^{}]*\}", word)]:
        for word in braced:
            found.remove(word)
            before, inner, after = re.split(r"\{([^{}]*)\}", word, maxsplit=1)
            found.update(f"{before}{one}{after}" for one in inner.split(","))
    return found


def test_the_readme_says_where_the_files_of_a_node_are() -> None:
    own = (CONTAINERD_CONFIG, FRAGMENT_DIR, REGISTRY_DIR, KUBELET_CONFIG, CA_FILE, MANIFESTS, BOOTSTRAP, COREFILE)
    secret = (PROXY_FILE, ADMIN_CERTIFICATE, ADMIN_KEY, SETTINGS_PATH)
    assert {str(path) for path in (*own, *secret, *KUBELET_TREES)} <= spelled_out(README)
