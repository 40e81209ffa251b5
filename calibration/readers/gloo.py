"""Collectives of gloo in traces of the PyTorch profiler: user annotations "gloo:all_reduce" of the threads that run them.

They say the sizes and types of their inputs (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, recorded with record_shapes), but
not their group: it is known where all groups of the process have the same ranks. A reduce-scatter runs as an all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

PREFIX = "gloo:"
CALLS = "c10d::"  # what the program called, of every backend
WIDTHS = {
    "float": 4,
    "double": 8,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "int": 4,
    "long int": 8,
    "long": 8,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}


def is_gloo(event: Mapping[str, Any]) -> bool:
    """Whether an event is a collective of gloo."""
    return event.get("cat") == "user_annotation" and str(event.get("name", "")).startswith(PREFIX)


def input_bytes(args: Mapping[str, Any]) -> float | None:
    """Bytes of the first input; None where the trace does not say them."""
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not (isinstance(dims, list) and isinstance(types, list) and dims and types and isinstance(dims[0], list)):
        return None
    width = WIDTHS.get(str(types[0]))
    if width is None or not all(type(length) is int and length >= 0 for length in dims[0]):
        return None
    return float(width * prod(dims[0]))


def only_group(own: Mapping[str, Any]) -> tuple[int, ...]:
    """The ranks of all groups of a trace's distributedInfo where they are the same; () where they are not, or not said."""
    groups = own.get("pg_config")
    ranks = {
        tuple(group["ranks"])
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, Mapping) and isinstance(group.get("ranks"), list) and all(type(r) is int for r in group["ranks"])
    }
    return ranks.pop() if len(ranks) == 1 else ()
