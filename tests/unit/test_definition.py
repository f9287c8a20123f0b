"""Definitions are read strictly: what is wrong is named with file and line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratum.bundle.definition import Definition, parse_definition
from stratum.bundle.oci import Platform
from stratum.errors import ExitCode, UsageError
from stratum.node.containerd import config_version
from stratum.node.criimages import find_sandbox_image
from stratum.node.kubeletfields import OLDEST, parse_release

AMD64, ARM64 = Platform("linux", "amd64"), Platform("linux", "arm64")
BUNDLES = Path(__file__).resolve().parents[2] / "bundles"

GOOD = """\
name: container-host
version: 2.4.1-1
serial: 3
platforms: [linux/arm64, linux/amd64]
components:
  - name: containerd
    version: 2.10
    source:
      url: https://example.org/v{version}/containerd-{version}-linux-{arch}.tar.gz
      checksums: {url: "https://example.org/v{version}/sums-{machine}", name: "containerd-{arch}"}
    files:
      - {from: "bin/*", to: bin/}
      - {from: bin/helper, to: libexec/helper, mode: 0700}
  - name: tools
    version: "1"
    platforms: [linux/amd64]
    sources:
      - file: tools.tar
        sha256: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA
        files: [{from: a, to: bin/}]
      - directory: ../tree
        files: [{from: b, to: bin/}]
images:
  - name: registry.example.org/pause:3.10
    source: {file: "pause-{arch}.tar"}
"""


def parse(text: str) -> Definition:
    return parse_definition(text.encode(), "bundles/x.yaml")


def test_a_definition_is_read() -> None:
    found = parse(GOOD)
    assert (found.name, found.version, found.serial) == ("container-host", "2.4.1-1", 3)
    assert found.platforms == (AMD64, ARM64)
    assert [item.name for item in found.components_for(ARM64)] == ["containerd"]
    _, rules = found.components[0].parts[0]
    assert [(rule.source_path, rule.target, rule.mode) for rule in rules] == [
        ("bin/*", "bin/", None),
        ("bin/helper", "libexec/helper", 0o700),
    ]
    assert found.images[0].source.for_platform(ARM64).location == "pause-arm64.tar"
    assert found.components[1].parts[0][0].for_platform(AMD64).expected == "a" * 64


def test_a_version_that_looks_like_a_number_keeps_its_zero() -> None:
    assert parse(GOOD).components[0].version == "2.10"


def test_placeholders_are_filled_in_for_each_platform() -> None:
    source = parse(GOOD).components[0].parts[0][0].for_platform(ARM64)
    assert source.location == "https://example.org/v2.10/containerd-2.10-linux-arm64.tar.gz"
    assert source.checksums is not None
    assert source.checksums.location == "https://example.org/v2.10/sums-aarch64"
    assert source.checksums.name == "containerd-arm64"


@pytest.mark.parametrize("path", sorted(BUNDLES.glob("*.yaml")), ids=lambda path: str(path.name))
def test_the_shipped_definitions_are_sound(path: Path) -> None:
    found = parse_definition(path.read_bytes(), path.name)
    names = {item.name for item in found.components}
    assert {"containerd", "runc", "cni-plugins"} <= names
    assert found.platforms == (AMD64, ARM64)
    for component in found.components:
        for source, _ in component.parts:
            if source.kind == "url":
                assert (
                    source.location.startswith("https://") and component.version in source.for_platform(AMD64).location
                )
                assert source.for_platform(AMD64).location != source.for_platform(ARM64).location
    if "kubelet" in names:
        versions = {item.name: item.version for item in found.components}
        assert {"kubectl", "crictl", "coredns"} <= names
        assert parse_release(versions["kubelet"]) >= OLDEST and config_version(versions["containerd"]) in (2, 3)
        assert find_sandbox_image([image.name for image in found.images]) is not None
        programs = {rule.target for item in found.components for _, rules in item.parts for rule in rules}
        # Where the units look for them.
        assert {"bin/kubelet", "cni/bin/"} <= programs


def test_there_is_a_definition_for_a_host_and_for_a_node() -> None:
    found = [parse_definition(path.read_bytes(), path.name) for path in BUNDLES.glob("*.yaml")]
    assert any(item.name == "container-host" for item in found)
    assert any("kubelet" in {component.name for component in item.components} for item in found)


def with_line(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


SOURCE = "      url: https://example.org/v{version}/containerd-{version}-linux-{arch}.tar.gz\n"
SUMS = '      checksums: {url: "https://example.org/v{version}/sums-{machine}", name: "containerd-{arch}"}\n'

# what is changed: (text, line, what the error says)
BROKEN = {
    "unknown field": (
        with_line("serial: 3", "serial: 3\nserail: 4"),
        4,
        "serail: unknown field (did you mean serial?)",
    ),
    "unknown field, deep": (
        with_line("        sha256: AAAA", "        sha: 1\n        sha256: AAAA"),
        19,
        "components[1].sources[0].sha: unknown field (did you mean sha256?)",
    ),
    "unknown field, nothing near": (
        with_line("serial: 3", "serial: 3\nzzz: 4"),
        4,
        "zzz: unknown field (known: components, images, name, platforms, serial, version)",
    ),
    "duplicate key": (with_line("serial: 3", "serial: 3\nname: other"), 4, "name: stands twice (first in line 1)"),
    "missing field": (with_line("serial: 3\n", ""), 1, "the field serial is missing"),
    "missing field, deep": (
        with_line("    version: 2.10\n", ""),
        6,
        "components[0]: the field version is missing",
    ),
    "list for a mapping": (
        with_line("    source:\n" + SOURCE + SUMS, "    source: [a]\n"),
        8,
        "must be a mapping, not a list",
    ),
    "text for a list": (
        with_line("platforms: [linux/arm64, linux/amd64]", "platforms: linux/amd64"),
        4,
        "must be a list",
    ),
    "number for text": (with_line("name: container-host", "name: 5"), 1, "must be a string, not 5"),
    "null": (with_line("name: container-host", "name:"), 1, "must be a string, not nothing"),
    "text for a number": (with_line("serial: 3", "serial: three"), 3, "must be a whole number, not 'three'"),
    "negative": (with_line("serial: 3", "serial: -3"), 3, "must be a whole number"),
    "hexadecimal": (with_line("serial: 3", "serial: 0x10"), 3, "must be a whole number"),
    "boolean": (with_line("serial: 3", "serial: yes"), 3, "must be a whole number"),
    "bad name": (with_line("name: container-host", "name: Container Host"), 1, "is no name"),
    "version that is a path": (with_line("version: 2.4.1-1", "version: ../../etc"), 2, "cannot name a version"),
    "reserved version": (with_line("version: 2.4.1-1", "version: current"), 2, "cannot name a version"),
    "platform": (with_line("[linux/arm64, linux/amd64]", "[linux/x86_64]"), 4, "'linux/x86_64' is not one of"),
    "platform twice": (with_line("[linux/arm64, linux/amd64]", "[linux/amd64, linux/amd64]"), 4, "stands twice"),
    "no platform": (with_line("[linux/arm64, linux/amd64]", "[]"), 4, "has no platform"),
    "platform of nobody": (
        with_line("    platforms: [linux/amd64]", "    platforms: [linux/386]"),
        16,
        "is not one of",
    ),
    "component twice": (
        with_line("  - name: tools", "  - name: containerd"),
        14,
        "the name containerd is taken by line 6",
    ),
    "no source": (with_line(SOURCE + SUMS, "      {}\n"), 8, "must have just one of url, file, directory, not 0"),
    "two sources": (with_line(SUMS, SUMS + "      file: x\n"), 8, "must have just one of url, file, directory, not 2"),
    "URL without checksum": (with_line(SUMS, ""), 8, "a URL needs sha256 or checksums"),
    "URL of another kind": (
        with_line(SOURCE, "      url: ftp://example.org/x\n"),
        9,
        "must be a URL that starts with https://",
    ),
    "URL with a password": (with_line(SOURCE, "      url: https://me:secret@example.org/x\n"), 9, "with a password"),
    "unknown placeholder": (
        with_line(SOURCE, '      url: "https://example.org/{os}"\n'),
        9,
        "unknown placeholder {os}",
    ),
    "attribute in a placeholder": (
        with_line(SOURCE, '      url: "https://example.org/{version.__class__}"\n'),
        9,
        "unknown placeholder",
    ),
    "format in a placeholder": (
        with_line(SOURCE, '      url: "https://example.org/{version:>99999999}"\n'),
        9,
        "unknown placeholder",
    ),
    "single brace": (with_line(SOURCE, '      url: "https://example.org/{version"\n'), 9, "braces"),
    "short checksum": (with_line("A" * 64, "abcd"), 19, "64 hexadecimal digits"),
    "one checksum for two": (
        with_line(SUMS, f"      sha256: {'b' * 64}\n"),
        10,
        "one checksum for a location that differs by architecture",
    ),
    "checksum of nobody": (
        with_line(SUMS, f"      sha256: {{amd64: {'b' * 64}, riscv64: {'b' * 64}}}\n"),
        10,
        "sha256.riscv64: unknown field",
    ),
    "checksum file nowhere": (with_line(SUMS, "      checksums: {name: x}\n"), 10, "must have just one of url, file"),
    "directory with a checksum": (
        with_line("directory: ../tree", f"directory: ../tree\n        sha256: {'b' * 64}"),
        21,
        "a directory has no checksum",
    ),
    "absolute target": (with_line("to: libexec/helper", "to: /usr/bin/x"), 13, "'/usr/bin/x': absolute or empty"),
    "target that climbs": (with_line("to: libexec/helper", "to: bin/../../x"), 13, "not a normal relative path"),
    "origin that climbs": (with_line("from: bin/helper", "from: ../helper"), 13, "not a normal relative path"),
    "setuid": (with_line("mode: 0700", "mode: 4755"), 13, "octal mode without special bits"),
    "mode that is not octal": (with_line("mode: 0700", "mode: 0788"), 13, "octal mode"),
    "no files": (with_line("files: [{from: b, to: bin/}]", "files: []"), 22, "has no file"),
    "directory as one file": (with_line("{from: b, to: bin/}", "{to: bin/b}"), 22, "the field from is missing"),
    "short image name": (with_line("registry.example.org/pause:3.10", "busybox:1"), 24, "no complete image reference"),
    "image without a tag": (with_line("pause:3.10", "pause"), 24, "no complete image reference"),
    "not YAML": (with_line("serial: 3", "serial: 3\n\tname: x"), 4, "not YAML"),
    "unclosed": (GOOD + "  - {name: [", 26, "not YAML"),
    "control character": (with_line("name: container-host", "name: a\x07b"), 1, "not YAML"),
    "escape sequence": (with_line("name: container-host", 'name: "a\\eb"'), 1, "cannot be printed"),
    "a tag": (
        with_line("name: container-host", "name: !!python/object/apply:os.system [id]"),
        1,
        "must be a single value",
    ),
    "merge key": (with_line("serial: 3", "serial: 3\n<<: {a: 1}"), 4, "<<: unknown field"),
    "second document": (GOOD + "---\nname: x\n", 26, "not YAML"),
    "a list": ("- a\n", 1, "must be a mapping"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_is_named_with_its_line(case: str) -> None:
    text, line, why = BROKEN[case]
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.exit_code == ExitCode.USAGE
    match = re.match(r"bundles/x\.yaml:(\d+): ", caught.value.message)
    assert match, caught.value.message
    assert why in caught.value.message
    assert int(match[1]) == line, caught.value.message


@pytest.mark.parametrize("data", [b"", b"\n# nothing\n", b"\xff\xfe\xfa", b"name: \xff", b"a: " + b"x" * (1 << 20)])
def test_a_file_that_is_no_document_is_named(data: bytes) -> None:
    with pytest.raises(UsageError, match=r"x\.yaml:\d"):
        parse_definition(data, "x.yaml")


def test_an_alias_bomb_is_bounded() -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(UsageError):
        parse("\n".join(rows))


def test_aliases_in_the_places_that_are_read_are_bounded() -> None:
    platforms = ", ".join(["*p"] * 300)
    text = GOOD.replace("[linux/arm64, linux/amd64]", f"[&p linux/amd64, {platforms}]")
    with pytest.raises(UsageError, match="stands twice"):
        parse(text)
    part = "{file: f, files: &f [" + ", ".join(["{from: a, to: b/}"] * 500) + "]}"
    many = ", ".join(["{file: f, files: *f}"] * 500)
    head = "name: a\nversion: 1\nserial: 1\nplatforms: [linux/amd64]\n"
    text = f"{head}components: [{{name: a, version: 1, sources: [{part}, {many}]}}]"
    with pytest.raises(UsageError, match="unfolds to more than"):
        parse(text)


def test_a_document_that_contains_itself_is_an_error() -> None:
    with pytest.raises(UsageError):
        parse("name: &a [*a]\nversion: 1\nserial: 1\nplatforms: []\ncomponents: []\n")


def test_deep_nesting_is_an_error() -> None:
    with pytest.raises(UsageError):
        parse("name: " + "[" * 5000)


@given(st.text(alphabet="abc:- []{}&*!|>'\"\n\t#,?%@0123", max_size=200))
def test_noise_is_an_error_of_the_definition_and_never_another(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)
