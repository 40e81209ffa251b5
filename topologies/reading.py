"""The door for files and values that a user writes: one clear line for every mistake.

Everything a user can get wrong ends as a `UserError` whose text names the file, the field, the value and the rule. The
command line prints that line and exits with code 2; nothing else in the project formats errors for people.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator


class UserError(ValueError):
    """A mistake in what the user gave; the message is one complete line."""


class CompleteError(ValueError):
    """Raised by a check whose message already names field, value and rule."""


class Config(BaseModel):
    """Base of everything read from a file: frozen, keyword-only, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """`tp: true` would be read as 1."""
        field = cls.model_fields[str(info.field_name)]
        if isinstance(value, bool) and "bool" not in str(field.annotation):
            raise ValueError("must not be true or false")
        return value


C = TypeVar("C", bound=BaseModel)
_SAFE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same safe loader in C, ten times faster, where it was built


class _Loader(_SAFE):  # type: ignore[misc]
    """Safe, and a key that is given twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping, if its keys differ."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(problem=f"field '{key.value}' is given twice", problem_mark=key.start_mark)
            seen.add(key.value if isinstance(key.value, str) else id(key))
        result: dict[Any, Any] = super().construct_mapping(node, deep)
        return result


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: `; did you mean 'x'?`, or the known names when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(names)}"


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file. Raises UserError when it is missing, malformed or not a mapping."""
    return parse_yaml(load_text(path), path)


def load_text(path: Path) -> str:
    """The text of a file. Raises UserError when it is missing or not text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UserError(f"{path}: cannot be read: {reason}") from None


def plain(value: Any) -> Any:
    """A field's value as YAML and JSON have it: groups of fields as mappings of those that are set, tuples as lists."""
    if isinstance(value, Config):
        return value.model_dump(mode="json", exclude_unset=True)
    return list(value) if isinstance(value, tuple) else value


def as_argument(name: str, value: Any) -> str:
    """`name=value` as `--set` reads it, quoted for a shell where that is needed."""
    text = yaml.safe_dump(plain(value), default_flow_style=True, width=9999).removesuffix("\n").removesuffix("\n...")
    return shlex.quote(f"{name}={text}")


def parse_yaml(text: str, path: Path) -> dict[str, Any]:
    """The mapping in a text; `path` is named in errors."""
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        what = " ".join(str(getattr(error, "problem", error)).split())
        raise UserError(f"{path}: not valid YAML or JSON{where}: {what}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping of fields, found {type(data).__name__}")
    return data


def build(config: type[C], data: Mapping[str, Any], where: str) -> C:
    """Validate `data` as `config`; the first mistake becomes one line that starts with `where`."""
    try:
        return config.model_validate(dict(data))
    except ValidationError as error:
        raise UserError(f"{where}: {line_of(error, config)}") from None


def line_of(error: ValidationError, config: type[BaseModel], inside: str = "") -> str:
    """The first mistake as a line without the file; inside: the field that `config` describes."""
    first = error.errors(include_url=False)[0]
    field = ".".join([inside] * bool(inside) + [str(part) for part in first["loc"]])
    if isinstance(first.get("ctx", {}).get("error"), CompleteError):
        return str(first["ctx"]["error"])
    if first["type"] == "extra_forbidden":
        return f"unknown field '{field}'{nearest(str(first['loc'][-1]), _fields(config, first['loc'][:-1]))}"
    if first["type"] == "missing":
        return f"field '{field}' is required"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and isinstance(first.get("input"), Mapping):  # a check across the fields of a description
        return message
    if not field or (first["type"] == "value_error" and "=" in message and message.startswith(field.split(".")[-1])):
        return message
    value = first.get("input")
    return f"{field}={value!r}: {message[0].lower()}{message[1:]}" if message else f"{field}={value!r} is invalid"


def _fields(config: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Field names of the (nested) model that `path` leads to."""
    for part in path:
        field = config.model_fields.get(str(part))
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()  # also of `X | None`
        config = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), config)
    return list(config.model_fields)
