"""What one rank does: three steps under the memory profiler, comparison with one process, a counted step, timed steps.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from calibration.execute.compare import distance, mean_loss
from calibration.execute.counting import Counting, Moved
from calibration.execute.memory import Memory
from calibration.execute.runner import Runner
from calibration.execute.setup import Setup
from calibration.execute.timing import measure
from calibration.launch import Place
from strategies.job import Job

CHECKED = 3  # steps that are compared with one process; the memory is that of the last one


def work(place: Place, job: Job, seconds: float) -> dict[str, Any]:
    """Carry out `job`; plain data. Times and distances are the same on all ranks."""
    setup = Setup.of(place, job)
    losses = []
    with Memory(setup.device) as memory:
        runner = Runner(setup)
        for number in range(CHECKED):
            if number == CHECKED - 1:
                setup.barrier()
                memory.mark()
            losses.append(runner.step())
    means = [mean_loss(setup, one) for one in losses]
    compared = distance(runner, means, CHECKED)
    if compared.wrong:
        return {"compared": asdict(compared), "wrong": compared.wrong}
    with Counting() as counting:
        runner.step()
    times = measure(runner, seconds)
    place.tell({"step": times.step})
    return {
        "compared": asdict(compared), "times": asdict(times), "stage": setup.at["pp"], "memory": memory.peak,
        "resident": memory.base, "volume": volumes(setup, counting), "operations": operations(setup, counting.moved),
    }  # fmt: skip


def volumes(setup: Setup, counting: Counting) -> dict[str, float]:
    """Bytes that this rank sent in a step along each axis that has more than one rank."""
    axes = [axis for axis, degree in setup.grid.sizes if degree > 1]
    result = dict.fromkeys(axes, 0.0)
    for one in counting.moved:
        result[axis_of(setup, one)] += one.sent / setup.resolved.local_steps
    return result


def axis_of(setup: Setup, moved: Moved) -> str:
    """The axis along which the ranks of a group differ (of tied embeddings: pp, of which two ranks are a part)."""
    for axis, degree in setup.grid.sizes:
        if degree > 1 and any(set(moved.ranks) <= set(group) for group in setup.groups(axis)):
            return axis
    raise ValueError(f"{moved.operation} among ranks {moved.ranks}, which are no group of the plan")


def operations(setup: Setup, moved: list[Moved]) -> list[Mapping[str, Any]]:
    """How often each operation was asked for along each axis, its bytes and what was sent."""
    result: dict[tuple[str, str], dict[str, Any]] = {}
    for one in moved:
        axis = axis_of(setup, one)
        entry = result.setdefault((axis, one.operation), {"axis": axis, "operation": one.operation, "count": 0, "sent": 0.0})
        entry["count"] += 1
        entry["sent"] += one.sent
    return list(result.values())
