"""The door for files and values that a user writes: one clear line for every mistake.

Everything a user can get wrong ends as a `UserError` whose text names the file, the field, the value and the rule. The
command line prints that line and exits with code 2; nothing else in the project formats errors for people.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from topologies import documents
from topologies.documents import MalformedError, limits

LONGEST = 2_000  # letters of an error
FEW = 8  # names that are offered in place of one


def on_one_line(text: str, most: int = LONGEST) -> str:
    """A text for people: what steers a terminal or ends a line is spelt out, and of a long text the middle is left out."""
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return text if len(text) <= most else f"{text[: most - most // 3]} … {text[-(most // 3) :]}"


def shown(value: object, most: int = 80) -> str:
    """A value as Python spells it, for an error."""
    try:
        return on_one_line(repr(value), most)
    except ValueError:  # Python spells no number of more than 4,300 digits
        return "a number of thousands of digits"


class UserError(ValueError):
    """A mistake in what the user gave; the message is one complete line."""

    def __init__(self, message: str) -> None:
        super().__init__(on_one_line(message))


class CompleteError(ValueError):
    """Raised by a check whose message already names field, value and rule."""


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
                rule = f"must be one of {values}, not true or false" if values else "must not be true or false"
                mistake = PydanticCustomError("value_error", f"Value error, {rule}")
                details = InitErrorDetails(type=mistake, loc=(name,), input=data[name])
                raise ValidationError.from_exception_data(cls.__name__, [details])
        return data


C = TypeVar("C", bound=BaseModel)


def folded(name: str) -> str:
    """A name without what people write in several ways: capitals, hyphens, underscores, spaces."""
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == "+")


def part_of(word: str, name: str) -> bool:
    """Whether a word begins a name, or a part of it behind a hyphen, and ends where a part, a letter or a number does: h100 is in
    dgx-h100 and h100-sxm, gaudi in gaudi2, a10 not in a100.
    """
    word, name = word.strip().lower().replace(" ", "-").replace("_", "-"), name.lower()
    if len(word) < 2:
        return False
    starts = [0, *(at + 1 for at, letter in enumerate(name) if letter == "-")]
    rests = [name[at + len(word) :] for at in starts if name.startswith(word, at)]
    return any(not rest or not (rest[0].isalnum() and rest[0].isdigit() == word[-1].isdigit()) for rest in rests)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A hint for a misspelt name: `; did you mean 'x'?`, or the known names when none is near. cutoff: how near, 1 is the same.

    Case does not count. A name that is part of others (h200 of h200-sxm) means these, before any that only looks like it.
    """
    import difflib

    names, short = {each.casefold(): each for each in sorted(known)}, name[: 2 * limits.KEY].casefold()
    whole = [each for each in names.values() if part_of(short, each)] if short not in names else []
    if 0 < len(whole) <= FEW:
        quoted = [f"'{each}'" for each in whole]
        return f"; did you mean {' or '.join([', '.join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)}?"
    close = difflib.get_close_matches(short, names, n=1, cutoff=cutoff)
    return f"; did you mean '{names[close[0]]}'?" if close else f"; known: {', '.join(names.values())}"


def load_yaml(path: Path, suffix: str | None = None, constants: bool = False) -> dict[str, Any]:
    """The mapping in a YAML, JSON or TOML file; suffix: in place of its ending; constants: as in `documents.parse_json`. Raises
    UserError when it is missing, malformed or not a mapping.
    """
    return _mapping(parse_document(load_text(path), path, suffix, constants), path)


def load_text(path: Path, most: int = limits.BYTES) -> str:
    """The text of a file within the limit of bytes. Raises UserError when it is missing, larger or not text."""
    try:
        return documents.read_text(path, most)
    except (OSError, MalformedError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: cannot be read: {reason}") from None


def lines_of(path: Path, most: int, longest: int = limits.LINE) -> Iterator[tuple[int, str]]:
    """The lines of a text file with their numbers and ends, as `documents.read_lines`. Raises UserError."""
    try:
        yield from enumerate(documents.read_lines(path, most, longest), 1)
    except (OSError, ValueError) as error:  # also a NUL in the name
        at = f"line {error.line}: " if isinstance(error, MalformedError) and error.line else ""
        raise UserError(f"{path}: {at}cannot be read: {getattr(error, 'strerror', None) or error}") from None


def parse_line(text: str, where: str) -> dict[str, Any]:
    """The object of JSON that a line is. Raises UserError that begins with `where`."""
    try:
        data = documents.parse_json(text)
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
    text = documents.dump_yaml(plain(value), default_flow_style=True, width=9999).removesuffix("\n").removesuffix("\n...")
    return f"{name}={text}"


def as_argument(name: str, value: Any) -> str:
    """The same, quoted for a shell where that is needed."""
    return shlex.quote(argument(name, value))


def parse_yaml(text: str, path: Path) -> dict[str, Any]:
    """The mapping in a text; `path` is named in errors, and its ending tells JSON and TOML from YAML."""
    return _mapping(parse_document(text, path), path)


def _mapping(data: Any, path: Path) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping of fields, found {type(data).__name__}")
    return data


def parse_document(text: str, path: Path, suffix: str | None = None, constants: bool = False) -> Any:
    """Whatever value a text has, as `parse_yaml`; constants: as in `documents.parse_json`."""
    try:
        return documents.parse(text, path.suffix if suffix is None else suffix, constants)
    except MalformedError as error:
        raise UserError(f"{path}: {error}") from None


def parse_value(text: str, where: str) -> Any:
    """The value that an option says in YAML; `where` names it in errors."""
    try:
        return documents.parse_yaml(text)
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
    return f"{field}={shown(value)}: {message[0].lower()}{message[1:]}" if message else f"{field}={shown(value)} is invalid"


def _described(config: type[BaseModel], path: Sequence[int | str]) -> type[BaseModel]:
    """The (nested) model that `path` leads to."""
    for part in path:
        field = config.model_fields.get(str(part))
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()  # also of `X | None`
        config = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), config)
    return config
