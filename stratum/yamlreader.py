"""Typed, strict reading of one YAML document that remembers its lines.

PyYAML is used only up to the node tree (``yaml.compose``): no value is constructed, no tag is obeyed, each node
knows its line. Aliases stay references; what limits a document that unfolds without end is the number of nodes
that may be looked at.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Optional, Union

from stratum.errors import UsageError

if TYPE_CHECKING:
    from yaml.nodes import Node

__all__ = ["Free", "Place", "YamlNode", "parse_yaml"]

# What a value without a schema may be: what JSON has.
Free = Union[None, bool, int, float, str, "list[Free]", "dict[str, Free]"]

_SIZE_LIMIT = 1 << 20
_NODE_LIMIT = 20_000
_STRING = "tag:yaml.org,2002:str"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_BOOLEAN = "tag:yaml.org,2002:bool"
_NULL = "tag:yaml.org,2002:null"
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})\Z")
_BROKEN = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+([eE][-+]?[0-9]{1,2})?\Z")
# Bootstrap tokens (Kubernetes, "Authenticating with Bootstrap Tokens"), and what PyYAML repeats of a document.
_TOKEN = re.compile(r"[a-z0-9]{6}\.[a-z0-9]{16}")
_REPEATED = re.compile(r"(undefined alias|undefined tag handle|duplicate anchor) '.*'")
_KINDS = {"MappingNode": "a mapping", "SequenceNode": "a list", "ScalarNode": "a single value"}


@dataclass(frozen=True)
class Place:
    """A place in a file: ``bundles/x.yaml:12: components[0].source``. ``reference`` is that of its errors."""

    file: str
    line: int
    path: str
    reference: str = "definition-invalid"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.path}" if self.path else f"{self.file}:{self.line}"

    def error(self, why: str, *, hint: Optional[str] = None) -> UsageError:
        """The error that says ``why`` what stands here cannot be used."""
        return UsageError(self.reference, f"{self}: {why}", hint=hint or f"correct {self.file}")


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
            raise self.place.error(f"must be {_KINDS[kind]}, not {'nothing' if self.is_null() else _KINDS[found]}")
        return self._node

    def _child(self, node: Node, path: str) -> YamlNode:
        return YamlNode(node, replace(self.place, line=node.start_mark.line + 1, path=path), self._budget)

    def mapping(self, required: Collection[str], optional: Collection[str] = ()) -> dict[str, YamlNode]:
        """The fields of a mapping; one that is unknown, missing or there twice is an error."""
        found = self.entries()
        known = [*required, *optional]
        for name, child in found.items():
            if name not in known:
                if ":" in name:  # `token:abc` without a space is one word, of which the end may be a secret
                    place = replace(child.place, path=child.place.path[: child.place.path.index(":") + 1] + "…")
                    raise place.error("unknown field (a space is missing behind its colon)")
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
            shown = _TOKEN.sub("(a token)", name)
            path = f"{self.place.path}.{shown}" if self.place.path else shown
            here = replace(self.place, line=key.start_mark.line + 1, path=path)
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

    def text(self, *, number: bool = False, boolean: bool = False, empty: bool = False, lines: bool = False) -> str:
        """A string that can be printed.

        With ``number`` or ``boolean`` also what YAML takes for one, as it is written; with ``empty`` an empty one, with
        ``lines`` one of several lines.
        """
        node = self._expect("ScalarNode")
        tags = {_STRING, *(_NUMBERS if number else ()), *((_BOOLEAN,) if boolean else ())}
        if node.tag not in tags:
            shown = str(node.value) or "nothing"
            raise self.place.error(f"must be a string, not {shown} (put it in quotes if it is meant as text)")
        value = str(node.value)
        if not value and not empty:
            raise self.place.error("must not be empty")
        if not all(part.isprintable() for part in (value.split("\n") if lines else [value])):
            raise self.place.error("has a character that cannot be printed")
        return value

    def secret(self) -> str:
        """A string that is never shown, in no error either: printable ASCII without spaces."""
        node = self._expect("ScalarNode")
        if node.tag != _STRING:
            raise self.place.error("must be a string (put it in quotes)")
        value = str(node.value)
        if not re.match(r"[!-~]+\Z", value):
            raise self.place.error("must not be empty" if not value else "has a space or a character that is not ASCII")
        return value

    def boolean(self) -> bool:
        """``true`` or ``false``; the other words of YAML 1.1 (yes, on) are text to other readers."""
        value = str(self._expect("ScalarNode").value)
        if self._node.tag != _BOOLEAN or value.lower() not in ("true", "false"):
            raise self.place.error(f"must be true or false, not {value or 'nothing'}")
        return value.lower() == "true"

    def free(self) -> Free:
        """Any value that JSON has too. What YAML 1.1 takes for another kind (a date, ``yes``, ``0x10``) is refused."""
        kind = type(self._node).__name__
        if kind == "MappingNode":
            return {name: child.free() for name, child in self.entries().items()}
        if kind == "SequenceNode":
            return [child.free() for child in self.sequence()]
        value, tag = str(self._node.value), self._node.tag
        if tag == _STRING:
            return self.text(empty=True, lines=True)
        if tag == _NULL:
            return None
        if tag == _BOOLEAN:
            return self.boolean()
        if tag in _NUMBERS and _WHOLE.match(value):
            return int(value)
        if tag in _NUMBERS and _BROKEN.match(value):
            return float(value)
        raise self.place.error(f"{value} is not the same to all readers: put it in quotes, or write it out")

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

    def is_null(self) -> bool:
        """Whether nothing stands here."""
        return bool(self._node.tag == _NULL)

    def is_mapping(self) -> bool:
        """Whether this node is a mapping."""
        return type(self._node).__name__ == "MappingNode"


def parse_yaml(data: bytes, file: str, *, reference: str = Place.reference) -> YamlNode:
    """The one document in ``data``; ``file`` and ``reference`` are what errors call it. Raises UsageError."""
    import yaml

    start = Place(file, 1, "", reference)
    if len(data) > _SIZE_LIMIT:
        raise start.error(f"longer than {_SIZE_LIMIT} bytes")
    try:
        node = yaml.compose(data, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problem = _REPEATED.sub(r"\1", str(error.problem or error.context))
        raise replace(start, line=line).error(f"not YAML: {problem}") from None
    except yaml.reader.ReaderError as error:
        line = data[: error.position].count(b"\n") + 1 if isinstance(error.position, int) else 1
        raise replace(start, line=line).error(f"not YAML: {error.reason}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise start.error(f"not YAML: {type(error).__name__}") from None
    if node is None:
        raise start.error("the file is empty")
    return YamlNode(node, start, _Budget())
