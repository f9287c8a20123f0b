"""The fields of the configuration by their names in files, and the form that records have: JSON.

Everything is read off the classes of :mod:`stratum.config`, so that a field is written down once.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Optional, Union

from stratum.config import Cluster, NodeSpec, Secret

__all__ = [
    "camel",
    "class_of",
    "field_paths",
    "get_field",
    "item_type",
    "python_name",
    "set_field",
    "spec_from_json",
    "spec_to_json",
    "type_hints",
    "value_to_json",
    "without_optional",
]

_ABBREVIATIONS = {"ip": "IP", "cidrs": "CIDRs", "dns": "DNS"}
# What makes a node join once is never on the disk, and neither is the name of the file that it was in.
_NEVER: Mapping[type, tuple[str, ...]] = {Cluster: ("token", "token_file")}


@functools.cache
def camel(name: str) -> str:
    """The name of a field in files: ``node_ip`` is ``nodeIP``."""
    first, *rest = name.split("_")
    return first + "".join(_ABBREVIATIONS.get(part, part.capitalize()) for part in rest)


@functools.cache
def type_hints(cls: type) -> Mapping[str, Any]:
    """The types of a class's fields, by their names in Python."""
    return typing.get_type_hints(cls)


def python_name(cls: type, name: str) -> str:
    """The name in Python of the field that files call ``name``. Raises KeyError."""
    return {camel(field.name): field.name for field in dataclasses.fields(cls)}[name]


def without_optional(hint: Any) -> Any:
    """``X`` for ``Optional[X]``, any other type as it is."""
    if typing.get_origin(hint) is Union:
        return next(item for item in typing.get_args(hint) if item is not type(None))
    return hint


def class_of(hint: Any) -> Optional[type]:
    """The class of a field that has fields itself; None for any other field."""
    bare = without_optional(hint)
    return bare if dataclasses.is_dataclass(bare) and bare is not Secret else None  # type: ignore[return-value]


def item_type(hint: Any) -> Any:
    """The type of the items of a list or of the values of a mapping; None for any other type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return arguments[0]
    return arguments[1] if origin is not None and issubclass(origin, Mapping) else None


# -- fields by path ---------------------------------------------------------------------------------------


def field_paths() -> Iterator[str]:
    """The path of each field that has a value and a source of its own: ``role``, ``network.nodeIP``."""
    for name, hint in type_hints(NodeSpec).items():
        if dataclasses.is_dataclass(hint):
            for field in dataclasses.fields(hint):
                yield f"{camel(name)}.{camel(field.name)}"
        else:
            yield camel(name)


def get_field(spec: NodeSpec, path: str) -> Any:
    """The value of the field at ``path``."""
    value: Any = spec
    for name in path.split("."):
        value = getattr(value, python_name(type(value), name))
    return value


def set_field(spec: NodeSpec, path: str, value: object) -> NodeSpec:
    """``spec`` with another value at ``path``."""
    first, _, rest = path.partition(".")
    name = python_name(NodeSpec, first)
    if rest:
        section: Any = getattr(spec, name)
        value = dataclasses.replace(section, **{python_name(type(section), rest): value})
    return dataclasses.replace(spec, **{name: value})  # type: ignore[arg-type]


# -- JSON -------------------------------------------------------------------------------------------------


def spec_to_json(spec: NodeSpec) -> dict[str, object]:
    """What is recorded of a configuration: fields that are not at their default, and no token."""
    found = _to_json(spec)
    assert isinstance(found, dict)
    return found


def value_to_json(value: Any) -> Any:
    """The form in JSON of a field's value that is no token, without the defaults in it."""
    return _to_json(value)


def _to_json(value: Any) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        never = _NEVER.get(type(value), ())
        return {
            camel(field.name): _to_json(item)
            for field in dataclasses.fields(value)
            if field.name not in never
            and (item := getattr(value, field.name)) != _default(field)
            # A section in which only a token stands has nothing to record.
            and not (dataclasses.is_dataclass(item) and not _to_json(item) and _default(field) is not None)
        }
    if isinstance(value, Mapping):
        return {str(key): _to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    return value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def spec_from_json(value: object) -> NodeSpec:
    """The configuration that :func:`spec_to_json` recorded. Raises ValueError for anything else."""
    found = _from_json(NodeSpec, value, "spec")
    assert isinstance(found, NodeSpec)
    return found


def _from_json(hint: Any, value: object, path: str) -> Any:
    bare = without_optional(hint)
    cls = class_of(bare)
    if cls is not None:
        return _class_from_json(cls, value, path)
    item = item_type(bare)
    if typing.get_origin(bare) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{path}: not a list")
        return tuple(_from_json(item, one, f"{path}[{number}]") for number, one in enumerate(value))
    if item is not None:
        if not isinstance(value, dict):
            raise ValueError(f"{path}: not a mapping")
        return {key: _from_json(item, one, f"{path}.{key}") for key, one in value.items()}
    if bare is not Any and (bare is Secret or type(value) is not bare):
        raise ValueError(f"{path}: not a value of this field")
    return value


def _class_from_json(cls: type, value: object, path: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a mapping")
    hints = type_hints(cls)
    names = {camel(name): name for name in hints}
    unknown = sorted(set(value) - set(names))
    if unknown:
        raise ValueError(f"{path}.{unknown[0]}: not a field that is known")
    try:
        return cls(**{names[key]: _from_json(hints[names[key]], one, f"{path}.{key}") for key, one in value.items()})
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None
