"""Every plan of a small space simulated."""

from __future__ import annotations

from collections.abc import Callable

from calibration.engines import Engine, Task
from calibration.evaluate import evaluate
from calibration.results import Row
from calibration.whatif import Read, combinations
from strategies.search.space import Space
from topologies.reading import UserError


def sweep(read: Read, space: Space, engine: Engine, tell: Callable[[int], None] = lambda _: None) -> list[Row]:
    """A row per combination, as a search keeps them: refused ones have an "error" and no "step".

    tell: hears how many are done.
    """
    changes, started = combinations(space.axes), list[Row | Task]()
    for one in changes:
        try:
            started.append(engine.submit(evaluate, read(one)))
        except UserError as error:
            started.append({"hash": "", "step": None, "error": str(error)})
    rows = []
    for one, row in zip(changes, started, strict=True):
        rows.append((row.result() if isinstance(row, Task) else row) | {"changes": one})
        tell(len(rows))
    return rows
