"""Profiles and clusters as files that people read: quantities with their units, and the digest of what they say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from topologies.documents import units
from topologies.documents.syntaxes import Dumper, dump_yaml, parse_yaml
from topologies.reading import UserError

DIGITS = 5
DIGEST = "digest"


def quantity(value: float, unit: str) -> str:
    """`"412.3 us"`, `"64 KiB"`, `"1.8 GB/s"`: to five digits, and read back by `topologies.documents.units`."""
    if unit == "B" and value == int(value):
        power = next((p for p in (3, 2, 1) if value and value % 1024**p == 0), 0)
        return f"{int(value) // 1024**power} {('B', 'KiB', 'MiB', 'GiB')[power]}"
    steps = (
        (("n", 1e-9), ("u", 1e-6), ("m", 1e-3), ("", 1.0))
        if unit == "s"
        else (("", 1.0), ("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))
    )
    prefix, factor = next((step for step in reversed(steps) if abs(value) >= step[1]), steps[0])
    return f"{value / factor:.{DIGITS}g} {prefix}{unit}"


_UNITS = {units.size: "B", units.rate: "B/s", units.seconds: "s", units.flops: "FLOP/s"}


def described(config: BaseModel) -> dict[str, Any]:
    """The fields of a description as its file spells them; those at their defaults are left out."""
    result = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if field.is_required() or value != field.get_default(call_default_factory=True):
            result[name] = _spelt(value, _unit(field))
    return result


def _unit(field: FieldInfo) -> str:
    """Of a quantity, or of those that a mapping has."""
    inside = [validator for part in get_args(field.annotation) for validator in getattr(part, "__metadata__", ())]
    parsers = [validator.func for validator in (*field.metadata, *inside) if isinstance(validator, BeforeValidator)]
    return next((_UNITS[parser] for parser in parsers if parser in _UNITS), "")


def _spelt(value: Any, unit: str) -> Any:
    if isinstance(value, BaseModel):
        return described(value)
    if isinstance(value, Mapping):
        return {str(key): _spelt(item, unit) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelt(item, unit) for item in value]
    if isinstance(value, float) or (unit and isinstance(value, int)):
        return quantity(value, unit) if unit else float(f"{value:.{DIGITS}g}")
    return value


def digest(data: Mapping[str, Any]) -> str:
    """Digest of the fields of a file besides its digest; comments, order and layout do not matter."""
    text = json.dumps({key: value for key, value in data.items() if key != DIGEST}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def signed(data: Mapping[str, Any]) -> dict[str, Any]:
    """With the digest ahead, so that a file that was cut still has it."""
    plain = parse_yaml(yaml_text(data))
    return {DIGEST: digest(plain), **data}


def verified(data: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Without its digest, if there is one. Raises UserError when it is of something else."""
    if DIGEST in data and data[DIGEST] != digest(data):
        raise UserError(
            f"{path}: {DIGEST}={data[DIGEST]!r}: the file is not as it was written: cut, or edited by hand; write it again (its "
            f"samples are enough: calibrate --from), or delete the line '{DIGEST}' to use these prices as your own"
        )
    return {key: value for key, value in data.items() if key != DIGEST}


def yaml_text(data: Mapping[str, Any]) -> str:
    """YAML in the order of the fields."""
    return dump_yaml(dict(data), Dumper=_Dumper, width=130, allow_unicode=True)


class _Dumper(Dumper):
    """Mappings of plain values on one line when they stand in a list: a table's row is a row."""


def _row(dumper: yaml.SafeDumper, data: dict[str, Any]) -> yaml.Node:
    short = set(data) <= {"bytes", "step", "alone", "seconds", "m", "n", "efficiency", "latency", "fill", "fixed", "rate"}
    return dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=short)


_Dumper.add_representer(dict, _row)
