"""Tables of the fields of a class that files are read into: names, values, defaults, what each means."""

from __future__ import annotations

import inspect
import io
import tokenize
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

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


def described(kind: type[BaseModel]) -> dict[str, str]:
    """What each field means, by its name with dots."""
    return {field: about for field, _, _, about in _rows(kind, "", ())}


def nested(info: FieldInfo) -> type[BaseModel] | None:
    """The class of a field that is a group of fields."""
    kinds = [kind for kind in _parts(info.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return kinds[0] if len(kinds) == 1 and kinds[0] is not Spread else None


def _rows(kind: type[BaseModel], prefix: str, apart: Sequence[str], depth: int = 0) -> Iterator[tuple[str, str, str, str]]:
    comments = _comments(kind)
    for name, info in kind.model_fields.items():
        about = info.description or comments.get(name, "")
        yield f"{prefix}{name}", values(info), _default(info), plain(about)
        if depth < 2 and name not in apart and (group := nested(info)) is not None and group is not kind and group.model_fields:
            yield from _rows(group, f"{prefix}{name}.", apart, depth + 1)


def values(info: FieldInfo) -> str:
    """What a field takes, for people."""
    for part in info.metadata:
        if (reader := getattr(part, "func", None)) in _QUANTITIES:
            return _QUANTITIES[reader]
    return ", ".join(dict.fromkeys(filter(None, (_kind(part) for part in _alternatives(info.annotation)))))


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


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _parts(annotation: Any) -> Iterator[Any]:
    for part in _alternatives(annotation):
        yield get_args(part)[0] if get_origin(part) is Annotated else part


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


def _comments(kind: type[BaseModel]) -> dict[str, str]:
    """What stands behind a field as a comment, where a class describes its fields so."""
    found: dict[str, str] = {}
    for base in kind.__mro__:
        if issubclass(base, BaseModel) and base is not BaseModel and base.model_fields:
            found |= {name: text for name, text in _comments_of(base).items() if name not in found}
    return found


def _comments_of(kind: type) -> dict[str, str]:
    found: dict[str, str] = {}
    field, depth = "", 0
    tokens = list(tokenize.generate_tokens(io.StringIO(inspect.getsource(kind)).readline))
    for before, token in pairwise(tokens):
        depth += (token.type == tokenize.OP) * ((token.string in "([{") - (token.string in ")]}"))
        if token.string == ":" and before.type == tokenize.NAME and depth == 0 and before.start[1] == 4:
            field = before.string
        elif token.type == tokenize.COMMENT and field:
            found[field] = f"{found.get(field, '')} {token.string.lstrip('# ')}".strip()
        elif token.type == tokenize.NEWLINE and depth == 0 and before.type != tokenize.COMMENT:
            field = ""
    return found
