"""The door for files and values that a user writes: one clear line for every mistake.

Everything a user can get wrong ends as a `UserError` whose text names the file, the field, the value and the rule. The
command line prints that line and exits with code 2; nothing else in the project formats errors for people.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from topologies.documents import limits, syntaxes
from topologies.documents.errors import CompleteError, UserError, folded, kind_of, nearest, part_of, shown
from topologies.documents.syntaxes import MalformedError

__all__ = [
    "CompleteError",
    "Config",
    "UserError",
    "argument",
    "as_argument",
    "build",
    "folded",
    "is_there",
    "kind_of",
    "line_of",
    "lines_of",
    "load_text",
    "load_yaml",
    "nearest",
    "parse_document",
    "parse_line",
    "parse_value",
    "parse_yaml",
    "part_of",
    "plain",
    "shown",
]


class Config(BaseModel):
    """Base of everything read from a file: frozen, keyword-only, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    other_names: ClassVar[Mapping[str, str]] = {}  # what others call fields, folded, for hints

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy; what was worked out of fields and kept beside them is worked out anew where some are other ones."""
        copied = super().model_copy(update=update, deep=deep)
        for kept in copied.__dict__.keys() - type(self).model_fields.keys() if update else ():
            del copied.__dict__[kept]
        return copied

    @model_validator(mode="before")  # of all fields at once: a validator of each would double the time to build the model's
    @classmethod
    def _truth_is_no_number(cls, data: Any) -> Any:
        """`tp: true` would be read as 1."""
        truths = [name for name, value in data.items() if isinstance(value, bool)] if isinstance(data, Mapping) else []
        for name in truths:
            field = next((field for own, field in cls.model_fields.items() if name in (own, field.alias)), None)
            if field is not None and "bool" not in str(field.annotation):
                values = ", ".join(str(value) for value in get_args(field.annotation) if isinstance(value, str))
                group = _group(field.annotation)
                rule = f"must be one of {values}, not true or false" if values else "must not be true or false"
                rule = _as_group(group) if group else rule
                mistake = PydanticCustomError("value_error", f"Value error, {rule}")
                details = InitErrorDetails(type=mistake, loc=(name,), input=data[name])
                raise ValidationError.from_exception_data(cls.__name__, [details])
        return data


C = TypeVar("C", bound=BaseModel)


def load_yaml(path: Path, suffix: str | None = None, constants: bool = False) -> dict[str, Any]:
    """The mapping in a YAML, JSON or TOML file; suffix: in place of its ending; constants: as in `syntaxes.parse_json`. Raises
    UserError when it is missing, malformed or not a mapping.
    """
    return _mapping(parse_document(load_text(path), path, suffix, constants), path)


def load_text(path: Path, most: int = limits.BYTES) -> str:
    """The text of a file within the limit of bytes. Raises UserError when it is missing, larger or not text."""
    try:
        return syntaxes.read_text(path, most)
    except (OSError, MalformedError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: cannot be read: {reason}") from None


def lines_of(path: Path, most: int, longest: int = limits.LINE) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers and ends, as `syntaxes.read_lines`. Raises UserError."""
    try:
        yield from enumerate(syntaxes.read_lines(path, most, longest), 1)
    except (OSError, ValueError) as error:  # also a NUL in the name
        at = f"line {error.line}: " if isinstance(error, MalformedError) and error.line else ""
        raise UserError(f"{path}: {at}cannot be read: {getattr(error, 'strerror', None) or error}") from None


def parse_line(text: str, where: str) -> dict[str, Any]:
    """The object of JSON that a line is. Raises UserError that begins with `where`."""
    try:
        data = syntaxes.parse_json(text)
    except MalformedError as error:
        raise UserError(f"{where}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{where}: must be an object")
    return data


def is_there(path: Path, folder: bool = True) -> bool:
    """Whether there is a file or, unless that does not count, a folder of that name; not when no file can have it."""
    try:
        return path.exists() and (folder or not path.is_dir())
    except (OSError, ValueError):  # longer than the system allows, or with a NUL
        return False


def plain(value: Any) -> Any:
    """A field's value as YAML and JSON have it: groups of fields as mappings of the fields that are set, tuples as lists."""
    if isinstance(value, Config):
        return value.model_dump(mode="json", exclude_unset=True)
    return list(value) if isinstance(value, tuple) else value


def argument(name: str, value: Any) -> str:
    """`name=value` as `--set` reads it."""
    text = syntaxes.dump_yaml(plain(value), default_flow_style=True, width=9999).removesuffix("\n").removesuffix("\n...")
    return f"{name}={text}"


def as_argument(name: str, value: Any) -> str:
    """The same, quoted for a shell where that is needed."""
    return shlex.quote(argument(name, value))


def parse_yaml(text: str, path: Path) -> dict[str, Any]:
    """The mapping in a text; `path` is named in errors, and its ending tells JSON and TOML from YAML."""
    return _mapping(parse_document(text, path), path)


def _mapping(data: Any, path: Path) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping of fields, found {kind_of(data)}")
    return data


def parse_document(text: str, path: Path, suffix: str | None = None, constants: bool = False) -> Any:
    """Whatever value a text has, as `parse_yaml`; constants: as in `syntaxes.parse_json`."""
    try:
        return syntaxes.parse(text, path.suffix if suffix is None else suffix, constants)
    except MalformedError as error:
        raise UserError(f"{path}: {error}") from None


def parse_value(text: str, where: str) -> Any:
    """The value that an option says in YAML; `where` names it in errors."""
    try:
        return syntaxes.parse_yaml(text)
    except MalformedError as error:
        raise UserError(f"{where}: the value is not valid YAML: {error}") from None


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
        *path, name = first["loc"]
        described = _described(config, path)
        meant = described.other_names.get(folded(str(name))) if issubclass(described, Config) else None
        hint = f"; here it is '{meant}'" if meant else nearest(str(name), described.model_fields)
        return f"unknown field '{field}'{hint}"
    if first["type"] == "missing":
        return f"field '{field}' is required"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and isinstance(first.get("input"), Mapping):  # a check across the fields of a description
        return message
    if not field or (first["type"] == "value_error" and "=" in message and message.startswith(field.split(".")[-1])):
        return message
    value = first.get("input")
    message = _rule(first, config) or message
    return f"{field}={shown(value)}: {message[0].lower()}{message[1:]}" if message else f"{field}={shown(value)} is invalid"


_RULES = {
    "int": "must be a whole number",
    "float": "must be a number",
    "bool": "must be true or false",
    "string": "must be a text",
}


def _rule(first: ErrorDetails, config: type[BaseModel]) -> str | None:
    """What a field must be whose value is of another kind, in the words of who writes files."""
    kind, _, how = first["type"].partition("_")
    if how in ("type", "parsing", "from_float") and kind in _RULES:
        return _RULES[kind]
    if first["type"] in ("tuple_type", "list_type"):
        return f"must be a list, such as [{shown(first['input']).strip(chr(39))}]"
    group = _group(_annotation(config, first["loc"]))
    return _as_group(group) if group and first["type"] == "model_type" else None


def _group(annotation: Any) -> type[BaseModel] | None:
    """The model whose fields a field has; also of `X | None`."""
    kinds = (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _as_group(group: type[BaseModel]) -> str:
    """That a value must be a group of fields, and how it is written."""
    names = [*group.model_fields][:3]
    rest = ", …" if len(group.model_fields) > len(names) else ""
    written = f"must be fields in braces: {{{', '.join(f'{name}: …' for name in names)}{rest}}}"
    try:
        group.model_validate({})
    except ValidationError:
        return written
    return f"{written}; {{}} takes their defaults"


def _described(config: type[BaseModel], path: Sequence[int | str]) -> type[BaseModel]:
    """The (nested) model that `path` leads to."""
    for part in path:
        field = config.model_fields.get(str(part))
        config = (_group(field.annotation) if field else None) or config
    return config


def _annotation(config: type[BaseModel], path: Sequence[int | str]) -> Any:
    """The type of the field that `path` leads to; None where it leads to no field."""
    field = _described(config, path[:-1]).model_fields.get(str(path[-1])) if path else None
    return field.annotation if field else None
