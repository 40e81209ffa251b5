"""What each field of a class means that files are read into: its description, or the comment behind it."""

from __future__ import annotations

import inspect
import io
import tokenize
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from topologies.documents.durations import Spread

_DEEPEST = 2  # groups inside groups


def described(kind: type[BaseModel], apart: Sequence[str] = (), depth: int = 0) -> Iterator[tuple[str, FieldInfo, str]]:
    """(name with dots, field, meaning) of a class's fields, below each that is a group its own, but for groups of `apart`."""
    comments = _comments(kind)
    for name, info in kind.model_fields.items():
        yield name, info, info.description or comments.get(name, "")
        group = nested(info) if depth < _DEEPEST and name not in apart else None
        if group is not None and group is not kind:
            for inner, field, about in described(group, apart, depth + 1):
                yield f"{name}.{inner}", field, about


def nested(info: FieldInfo) -> type[BaseModel] | None:
    """The class of a field that is a group of fields."""
    kinds = [kind for kind in _parts(info.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return kinds[0] if len(kinds) == 1 and kinds[0] is not Spread else None


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The types of a union; of anything else itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _parts(annotation: Any) -> Iterator[Any]:
    for part in alternatives(annotation):
        yield get_args(part)[0] if get_origin(part) is Annotated else part


def _comments(kind: type[BaseModel]) -> dict[str, str]:
    """What stands behind a field as a comment, where a class describes its fields so."""
    found: dict[str, str] = {}
    for base in kind.__mro__:
        if issubclass(base, BaseModel) and base is not BaseModel and base.model_fields:
            found |= {name: text for name, text in _comments_of(base).items() if name not in found}
    return found


@cache
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
