"""A plan's options of its framework, as the class of its kernel set has them (`strategies.frameworks.options`)."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Set
from typing import Any

from pydantic import ValidationError

from strategies.frameworks import kernel_set, kernel_sets, sets_with
from strategies.frameworks.options import Options
from topologies.reading import CompleteError, line_of, nearest

FIELD = "framework"


def options_in_group(data: Mapping[Any, Any], fields: Container[str]) -> Mapping[Any, Any]:
    """Fields of a plan with options that are written beside them in the group; an option that is null is left at its default."""
    beside = {name: value for name, value in data.items() if isinstance(name, str) and name not in fields and sets_with([name])}
    if not beside:
        return data
    rest = {name: value for name, value in data.items() if name not in beside}
    group = rest.get(FIELD)
    if isinstance(group, Options):
        group = group.model_dump(exclude_unset=True)
    stated = {name: value for name, value in beside.items() if value is not None}
    if not isinstance(group, Mapping | None) or not (group or stated):
        return rest
    return rest | {FIELD: {**(group or {}), **stated}}


def read_options(kernels: str, given: Mapping[str, Any]) -> Options | None:
    """Options of the kernel set, or of the first set that has them all, as a plan's kernels may be stated later. None when none
    is given. Raises CompleteError.
    """
    if not given:
        return None
    sets = [kernels, *sets_with(given)]
    known = next((name for name in sets if given.keys() <= _names(name)), None)
    if known is None:
        own = _names(kernels)
        name = next((str(name) for name in given if name not in own and not sets_with([str(name)])), None)
        if name is not None:
            raise CompleteError(f"unknown field '{FIELD}.{name}'{nearest(name, own)}")
        which = ", ".join(f"{name} (kernels={' or '.join(sets_with([name]))})" for name in given)
        raise CompleteError(f"{FIELD}: no framework has all of these options: {which}")
    kind = type(kernel_sets[known].options)
    try:
        return kind.model_validate(dict(given))
    except ValidationError as error:
        raise CompleteError(line_of(error, kind, FIELD)) from None


def foreign_options(kernels: str, options: Options | None) -> Iterator[str]:
    """Stated options that the kernel set does not have."""
    if options is not None:
        yield from (name for name in sorted(options.model_fields_set) if name not in _names(kernels))


def all_options() -> Iterator[tuple[str, type[Options], list[str]]]:
    """Every option of any framework once: its name, the class that has it, and the kernel sets that take it."""
    seen = set[str]()
    for name in kernel_sets:
        kind = type(kernel_sets[name].options)
        for option in kind.model_fields:
            if option not in seen:
                seen.add(option)
                yield option, kind, sets_with([option])


def _names(kernels: str) -> Set[str]:
    return type(kernel_set(kernels).options).model_fields.keys()
