"""Changes of a job's fields by name: `plan.tp=4` as on the command line, or {"plan.tp": 4}."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from topologies.reading import UserError, parse_value

DEEPEST = 8  # fields inside each other that an option names: cluster.node.gpu.peak.bf16 are four


class Whole(dict[str, Any]):
    """A group of a plan's fields, given as a whole: it takes the place of the group that was there."""


def parse_changes(overrides: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """`["plan.tp=4", "nodes=2"]` or `{"plan.tp": 4, "nodes": 2}` as nested mappings; values of texts are YAML.

    `plan.offload={optimizer: cpu}` replaces the whole group, `plan.offload.optimizer=cpu` one field of it.
    """
    result: dict[str, Any] = {}
    if isinstance(overrides, str):
        overrides = [overrides]
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(parsed, overrides)
    for name, value in pairs:
        *path, last = str(name).split(".")
        if len(path) > DEEPEST:
            raise UserError(f"--set {name}: more than {DEEPEST} fields inside each other")
        into = result
        for part in path:
            into = into.setdefault(part, {})
            if not isinstance(into, dict):
                raise UserError(f"--set {name}: '{part}' is already set as a whole")
        into[last] = Whole(value) if isinstance(value, Mapping) and path == ["plan"] else value
    return result


def parsed(text: object) -> tuple[str, Any]:
    """`"plan.tp=4"` as ("plan.tp", 4)."""
    name, equals, value = str(text).partition("=")
    if not equals or not name:
        raise UserError(f"--set {text}: expected FIELD=VALUE, such as plan.tp=4")
    if len(fields := re.split(r"[, ]\s*(?=[a-z_]+[.][a-z_.]+=)", str(text))) > 1:
        raise UserError(f"--set {text}: names {len(fields)} fields: {' '.join(f'--set {shlex.quote(f)}' for f in fields)}")
    return name, parse_value(value, f"--set {text}")


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with changes, fields inside fields one by one."""
    merged = dict(base)
    for field, value in changes.items():
        old = merged.get(field)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and not isinstance(value, Whole):
            value = merge(old, value)
        merged[field] = value
    return merged
