"""Measurements as they come from a machine, and the command line."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result

import shardyard
from calibration.samples import Merged

MODEL = {"name": "tiny", "layers": 2, "hidden": 128, "heads": 2, "vocabulary": 256, "context": 64}


def case(part: str, value: float, context: str = "alone", **sizes: Any) -> Merged:
    return Merged(part, sizes, context, value, value, 0.0, 1, 0)


def collective(seconds: Any, operation: str = "all_reduce", ranks: int = 2) -> list[Merged]:
    """In a step twice as dear as alone; sizes of 1 KiB to 64 MiB."""
    sizes = [2.0**power for power in range(10, 27)]
    return [
        case("collective", factor * seconds(size), context, operation=operation, bytes=size, ranks=ranks, nodes=1)
        for size in sizes
        for context, factor in (("alone", 1.0), ("step", 2.0))
    ]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(shardyard.main, list(arguments))
