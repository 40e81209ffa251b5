"""Every plan of a small space simulated; what the job's own plan says and does not apply to one of them is left out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from strategies.planner.applicable import applicable
from strategies.planner.search.evaluate import evaluate
from strategies.planner.search.results import Row
from strategies.planner.search.space import Space
from strategies.planner.search.workers.executors import Engine, Task
from strategies.planner.whatif import Read, combinations
from topologies.reading import UserError, plain

AHEAD = 16  # simulations that may be under way or waiting for a worker


def sweep(
    read: Read, space: Space, engine: Engine, tell: Callable[[int], None] = lambda _: None, until: float = float("inf")
) -> tuple[list[Row], int]:
    """A row per combination, as a search keeps them: refused ones have an "error" and no "step". And how many were left out
    because the clock (`time.monotonic`) had reached `until`; what is under way then is given up.

    tell: hears how many are done.
    """
    changes, started, rows = combinations(space.axes), list[Row | Task](), list[Row]()
    for number in range(len(changes)):
        while len(started) < len(changes) and len(started) < number + AHEAD and time.monotonic() < until:
            begun, changes[len(started)] = _begun(read, engine, changes[len(started)])
            started.append(begun)
        if number == len(started):
            break
        try:
            rows.append(_done(started[number], until) | {"changes": changes[number]})
        except TimeoutError:
            _give_up(engine, started[number:])
            break
        tell(len(rows))
    return rows, len(changes) - len(rows)


def _done(row: Row | Task, until: float) -> Row:
    if not isinstance(row, Task):
        return row
    done: Row = row.result(None if until == float("inf") else max(0.0, until - time.monotonic()))
    return done


def _give_up(engine: Engine, rows: list[Row | Task]) -> None:
    for row in rows:
        if isinstance(row, Task):
            row.cancel()
    engine.abandon()


def _begun(read: Read, engine: Engine, changes: dict[str, Any]) -> tuple[Row | Task, dict[str, Any]]:
    """The simulation that was asked for, or why there is none; and all that changes."""
    try:
        plan = {field: value for field, value in read(changes).plan if f"plan.{field}" in changes}
        base = read({name: value for name, value in changes.items() if not name.startswith("plan.")})
        asked, _, dropped = applicable(base, plan)
    except UserError as error:
        return {"hash": "", "step": None, "error": str(error)}, changes
    return engine.submit(evaluate, asked), changes | {f"plan.{field}": plain(value) for field, value in dropped.items()}
