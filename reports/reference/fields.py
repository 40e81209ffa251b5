"""Tables of the fields of a class that files are read into: names, values, defaults, what each means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from reports.fields import alternatives, described
from reports.formatting import span
from reports.reference.markdown import code, plain, table
from topologies.documents import units
from topologies.documents.durations import Spread

_QUANTITIES = {
    units.size: "bytes, as `80 GiB`",
    units.rate: "bytes/s, as `25 GB/s` or `400 Gb/s`",
    units.seconds: "seconds, as `1.2 us`",
    units.duration: "a time, as `30 min`",
    units.flops: "FLOP/s, as `989 TFLOP/s`",
    units.elements: "elements, as `7e9`",
    units.watts: "watts",
}
_HEAD = "field", "values", "default", ""


def fields_table(kind: type[BaseModel], prefix: str = "", apart: Sequence[str] = ()) -> str:
    """The fields of a class and, below each that is a group, those of the group, with dots; but for groups of `apart`, which have
    tables of their own.
    """
    return table(_HEAD, ((code(field), *rest) for field, *rest in _rows(kind, prefix, apart)))


def _rows(kind: type[BaseModel], prefix: str, apart: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    for name, info, about in described(kind, apart):
        yield f"{prefix}{name}", values(info), _default(info), plain(about)


def values(info: FieldInfo) -> str:
    """What a field takes, for people."""
    for part in info.metadata:
        if (reader := getattr(part, "func", None)) in _QUANTITIES:
            return _QUANTITIES[reader]
    return ", ".join(dict.fromkeys(filter(None, (_kind(part) for part in alternatives(info.annotation)))))


def _kind(annotation: Any) -> str:
    if annotation is NoneType:
        return ""
    if get_origin(annotation) is Annotated:
        for part in get_args(annotation)[1:]:
            if (reader := getattr(part, "func", None)) in _QUANTITIES:
                return _QUANTITIES[reader]
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return ", ".join(code(value) for value in get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a time, or how it is spread: `exponential 2 days`" if annotation is Spread else "a group of fields"
    origin = get_origin(annotation)
    if origin in (tuple, list, frozenset, set):
        inner = [_kind(part) for part in get_args(annotation) if part is not Ellipsis]
        return f"list of {inner[0]}" if inner else "list"
    names = {bool: "true, false", int: "whole number", float: "number", str: "text", dict: "fields and values"}
    return names.get(origin or annotation, "any")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    if info.default_factory is not None:
        return ""  # it follows from other fields, or is a group of defaults
    default = info.default
    if default is None or default is PydanticUndefined or default == "" or default == () or isinstance(default, BaseModel):
        return _spread(default) if isinstance(default, Spread) else ""
    if isinstance(default, bool):
        return code(str(default).lower())
    readers = {getattr(part, "func", None) for part in info.metadata}
    if isinstance(default, float) and readers & {units.duration, units.seconds}:
        return code(span(default)) if default else "`0 s`"
    if default == 0 and readers & set(_QUANTITIES):
        return "absent"
    return code(f"{default:g}" if isinstance(default, float) else default)


def _spread(times: Spread) -> str:
    return code(span(times.mean) if times.kind == "constant" else f"{times.kind} {span(times.mean)}") if times.mean else ""
