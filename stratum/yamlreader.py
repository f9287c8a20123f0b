"""Typed, strict reading of one YAML document that remembers its lines.

PyYAML is used only up to the node tree (``yaml.compose``): no value is constructed, no tag is obeyed, each node
knows its line. Aliases stay references; what limits a document that unfolds without end is the number of nodes
that may be looked at.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from stratum.errors import UsageError

if TYPE_CHECKING:
    from yaml.nodes import Node

__all__ = ["Place", "YamlNode", "parse_yaml"]

_SIZE_LIMIT = 1 << 20
_NODE_LIMIT = 20_000
_STRING = "tag:yaml.org,2002:str"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_KINDS = {"MappingNode": "a mapping", "SequenceNode": "a list", "ScalarNode": "a single value"}


@dataclass(frozen=True)
class Place:
    """A place in a file: ``bundles/x.yaml:12: components[0].source``."""

    file: str
    line: int
    path: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.path}" if self.path else f"{self.file}:{self.line}"

    def error(self, why: str, *, hint: Optional[str] = None) -> UsageError:
        """The error that says ``why`` what stands here cannot be used."""
        return UsageError("definition-invalid", f"{self}: {why}", hint=hint or f"correct {self.file}")


@dataclass
class _Budget:
    left: int = _NODE_LIMIT


class YamlNode:
    """One node, its place in the document and how it may be read. Every method raises UsageError."""

    def __init__(self, node: Node, place: Place, budget: _Budget) -> None:
        budget.left -= 1
        if budget.left < 0:
            raise place.error(f"the document unfolds to more than {_NODE_LIMIT} values")
        self._node = node
        self._budget = budget
        self.place = place

    def _expect(self, kind: str) -> Node:
        found = type(self._node).__name__
        if found != kind:
            raise self.place.error(f"must be {_KINDS[kind]}, not {_KINDS[found]}")
        return self._node

    def _child(self, node: Node, path: str) -> YamlNode:
        return YamlNode(node, Place(self.place.file, node.start_mark.line + 1, path), self._budget)

    def mapping(self, required: Collection[str], optional: Collection[str] = ()) -> dict[str, YamlNode]:
        """The fields of a mapping; one that is unknown, missing or there twice is an error."""
        found = self.entries()
        known = [*required, *optional]
        for name, child in found.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, 0.5)
                offer = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
                raise child.place.error(f"unknown field ({offer})")
        for name in required:
            if name not in found:
                raise self.place.error(f"the field {name} is missing")
        return found

    def entries(self) -> dict[str, YamlNode]:
        """The entries of a mapping whose keys are free; a key that is there twice is an error."""
        found: dict[str, YamlNode] = {}
        first: dict[str, int] = {}
        for key, value in self._expect("MappingNode").value:
            # A key that YAML 1.1 takes for a number or a boolean (`on:`) is the text that stands there.
            name = str(key.value) if isinstance(key.value, str) else "?"
            path = f"{self.place.path}.{name}" if self.place.path else name
            here = Place(self.place.file, key.start_mark.line + 1, path)
            if not isinstance(key.value, str):
                raise here.error("a key must be a single value")
            if name in found:
                raise here.error(f"stands twice (first in line {first[name]})")
            first[name] = here.line
            found[name] = YamlNode(value, here, self._budget)
        return found

    def sequence(self) -> list[YamlNode]:
        """The items of a list."""
        items = self._expect("SequenceNode").value
        return [self._child(item, f"{self.place.path}[{number}]") for number, item in enumerate(items)]

    def text(self, *, number: bool = False) -> str:
        """A string that is not empty; with ``number``, also what YAML takes for a number, as it is written."""
        node = self._expect("ScalarNode")
        if node.tag != _STRING and not (number and node.tag in _NUMBERS):
            shown = str(node.value) or "nothing"
            raise self.place.error(f"must be a string, not {shown} (put it in quotes if it is meant as text)")
        value = str(node.value)
        if not value or not value.isprintable():
            raise self.place.error("must not be empty" if not value else "has a character that cannot be printed")
        return value

    def integer(self) -> int:
        """A whole number in decimal digits."""
        value = str(self._expect("ScalarNode").value)
        if not re.match(r"(0|[1-9][0-9]{0,15})\Z", value):
            raise self.place.error(f"must be a whole number, not {value!r}")
        return int(value)

    def mode(self) -> int:
        """A file mode in octal digits: ``0755`` or ``"755"``."""
        value = str(self._expect("ScalarNode").value)
        if not re.match(r"(0o|0)?[0-7]{3}\Z", value):
            raise self.place.error(f"must be an octal mode without special bits, such as 0755, not {value!r}")
        return int(value[-3:], 8)

    def is_mapping(self) -> bool:
        """Whether this node is a mapping."""
        return type(self._node).__name__ == "MappingNode"


def parse_yaml(data: bytes, file: str) -> YamlNode:
    """The one document in ``data``; ``file`` is what errors call it. Raises UsageError."""
    import yaml

    start = Place(file, 1, "")
    if len(data) > _SIZE_LIMIT:
        raise start.error(f"longer than {_SIZE_LIMIT} bytes")
    try:
        node = yaml.compose(data, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise Place(file, line, "").error(f"not YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = data[: error.position].count(b"\n") + 1 if isinstance(error.position, int) else 1
        raise Place(file, line, "").error(f"not YAML: {error.reason}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise start.error(f"not YAML: {type(error).__name__}") from None
    if node is None:
        raise start.error("the file is empty")
    return YamlNode(node, start, _Budget())
