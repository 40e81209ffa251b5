"""Long lists of whole numbers, in which runs of equal ones may be written as one: [7, 510x8, 7]."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

SHORT = 8  # numbers that are written one by one
_RUN = re.compile(r"\s*(\d{1,9})\s*[x×*]\s*(\d{1,18})\s*")


def spelt_out(value: object, most: int) -> object:
    """A list with its runs as numbers; what is no list, or no run, as it is. Raises ValueError for more than `most` numbers."""
    if not isinstance(value, list | tuple):
        return value
    result: list[object] = []
    for item in value:
        run = _RUN.fullmatch(item) if isinstance(item, str) else None
        times = int(run[1]) if run else 1
        if len(result) + times > most:
            raise ValueError(f"must be at most {most:,} numbers")
        result += [int(run[2])] * times if run else [item]
    return result


def in_runs(numbers: Sequence[int]) -> list[int | str]:
    """The numbers, of many in runs."""
    return list(numbers) if len(numbers) <= SHORT else list(_runs(numbers))


def _runs(numbers: Sequence[int]) -> Iterator[int | str]:
    for number, run in groupby(numbers):
        count = len(list(run))
        yield number if count == 1 else f"{count}x{number}"
