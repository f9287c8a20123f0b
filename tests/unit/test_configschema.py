"""The JSON Schema that ships with the program: it says what the classes say, and what the reader takes it takes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from stratum.config import STANDALONE, WORKER, NodeSpec, Secret
from stratum.configcodec import camel, class_of, item_type, spec_to_json, type_hints, without_optional
from stratum.configfile import API_VERSION, KIND, parse_config
from stratum.configschema import read_schema
from stratum.errors import UsageError
from stratum.host.profiles import PROFILES
from stratum.kubenames import EFFECTS, LONGEST_NAME
from tests.unit.test_config import EVERYTHING, HEAD, TOKEN
from tests.unit.test_config import WORKER as WORKER_FILE

SCHEMA: dict[str, Any] = json.loads(read_schema())
SPEC = SCHEMA["properties"]["spec"]
CHECKER = jsonschema.Draft202012Validator(SCHEMA)


def kinds(hint: Any) -> str:
    """The JSON type of a field's type."""
    bare = without_optional(hint)
    if bare in (str, Secret):
        return "string"
    if bare is bool:
        return "boolean"
    return "array" if typing.get_origin(bare) is tuple else "object"


def walk(cls: type, schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any, dataclasses.Field[Any], Any]]:
    """Each field of a class with its place in the schema; the sets of names must be equal."""
    fields = {camel(field.name): field for field in dataclasses.fields(cls)}
    assert set(schema["properties"]) == set(fields), path
    assert schema["type"] == "object" and schema["additionalProperties"] is False, path
    required = [name for name, field in fields.items() if _is_required(field)]
    assert schema.get("required", []) == required, path
    for name, field in fields.items():
        hint, child, here = type_hints(cls)[field.name], schema["properties"][name], f"{path}.{name}"
        yield here, hint, field, child
        inner = class_of(hint) or class_of(item_type(without_optional(hint)))
        if inner is not None:
            yield from walk(inner, child.get("items", child), here)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


FIELDS = list(walk(NodeSpec, SPEC, "spec"))


def test_the_schema_is_one_of_its_draft() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert (SCHEMA["properties"]["apiVersion"]["const"], SCHEMA["properties"]["kind"]["const"]) == (API_VERSION, KIND)


@pytest.mark.parametrize(("path", "hint", "field", "schema"), FIELDS, ids=[item[0] for item in FIELDS])
def test_each_field_of_each_class_is_a_property_with_type_default_and_description(
    path: str, hint: Any, field: dataclasses.Field[Any], schema: Any
) -> None:
    assert schema["type"] == kinds(hint)
    assert len(schema["description"]) > 10 and schema["description"].endswith(".")
    if class_of(hint) or _is_required(field):
        assert "default" not in schema
        return
    default = field.default_factory() if field.default is dataclasses.MISSING else field.default
    if default is None or (default == "" and "default" not in schema):
        assert "default" not in schema, "the description says what holds without it"
    else:
        assert schema["default"] == (list(default) if isinstance(default, tuple) else default)


def test_the_words_that_a_field_may_be_are_those_of_the_program() -> None:
    words = {path: schema["enum"] for path, _, _, schema in FIELDS if "enum" in schema}
    assert words.pop("spec.cluster.exec.apiVersion") == [
        f"client.authentication.k8s.io/{name}" for name in ("v1", "v1beta1")
    ]
    assert words == {
        "spec.role": [STANDALONE, WORKER],
        "spec.profile": sorted(PROFILES),
        "spec.kubelet.taints.effect": list(EFFECTS),
        "spec.gpu.nvidia": ["auto", "on", "off"],
    }
    assert SPEC["properties"]["nodeName"]["maxLength"] == LONGEST_NAME


SAMPLES = {
    "nothing": "  {}\n",
    "everything": EVERYTHING.replace("nvidia: off", "nvidia: 'off'"),
    "worker": WORKER_FILE,
    "token": f"  role: worker\n  cluster: {{server: 'https://a', ca: x, token: {TOKEN}}}\n",
}


@pytest.mark.parametrize("body", SAMPLES.values(), ids=SAMPLES)
def test_what_the_program_reads_is_valid(body: str) -> None:
    text = HEAD + body
    CHECKER.validate(yaml.safe_load(text))
    spec = parse_config(text.encode(), "n.yaml").spec
    CHECKER.validate({"apiVersion": API_VERSION, "kind": KIND, "spec": spec_to_json(spec)})


@pytest.mark.parametrize(
    "body",
    [
        "  rol: worker\n",
        "  role: master\n",
        "  nodeName: 7\n",
        "  nodeName: Node_1\n",
        "  selinux: 'yes'\n",
        "  network: 1\n",
        "  network: {clusterCIDRs: 10.0.0.0/8}\n",
        "  cluster: {server: 'http://a'}\n",
        "  cluster: {caFile: ca.crt}\n",
        "  cluster: {exec: {}}\n",
        "  cluster: {exec: {command: x}}\n",
        "  kubelet: {taints: [{value: x}]}\n",
        "  kubelet: {taints: [{key: x, effect: Never}]}\n",
        "  kubelet: {labels: {a: 1}}\n",
        "  containerd: {registries: [{mirrors: []}]}\n",
        "  containerd: {registries: [{name: a, mirrors: [{url: 'ftp://a'}]}]}\n",
        "  gpu: {nvidia: true}\n",
    ],
)
def test_what_the_schema_refuses_the_program_refuses_too(body: str) -> None:
    assert not CHECKER.is_valid(yaml.safe_load(HEAD + body))
    try:
        config = parse_config((HEAD + body).encode(), "n.yaml")
    except UsageError:
        return
    assert [problem for problem in config.problems(PROFILES) if not problem.odd]


def run_pyz(pyz: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-I", "-S", "-B", str(pyz), "config", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env={})


def test_the_pyz_has_the_schema_and_checks_a_file_with_the_yaml_that_it_carries(pyz: Path, tmp_path: Path) -> None:
    done = run_pyz(pyz, "schema")
    assert (done.returncode, done.stdout, done.stderr) == (0, read_schema(), "")
    (tmp_path / "n.yaml").write_text(HEAD + "  profile: cis\n")
    done = run_pyz(pyz, "check", str(tmp_path / "n.yaml"))
    assert (done.returncode, done.stdout) == (0, f"checked: {tmp_path}/n.yaml: valid\n"), done.stderr
    (tmp_path / "n.yaml").write_text(HEAD + "  profil: cis\n")
    done = run_pyz(pyz, "check", str(tmp_path / "n.yaml"))
    assert done.returncode == 2 and f"{tmp_path}/n.yaml:4: spec.profil: unknown field" in done.stdout
