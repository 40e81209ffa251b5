"""A small space, and searches of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from shardyard import read_job
from strategies.planner.search.answer import Answer
from strategies.planner.search.objective import objective
from strategies.planner.search.search import Search
from strategies.planner.search.space import read_space
from strategies.planner.search.workers.executors import Engine

MODEL = {"name": "small", "hidden": 1024, "layers": 8, "heads": 16, "vocabulary": 32000, "context": 2048}

SPACE = {
    "plan.tp": [1, 2, 4],
    "plan.pp": [1, 2, 4],
    "plan.microbatch": [1, 2],
    "plan.recompute": ["none", "full"],
    "plan.schedule": ["1f1b", {"plan.schedule": "interleaved", "plan.chunks": 2}, "zb-h1"],
    "plan.data_parallel": ["ddp", "zero1", "zero2", "zero3"],
}


def read(changes: dict[str, Any], **fields: Any) -> Any:
    return read_job(
        overrides=changes, model=MODEL, cluster="dgx-h100", nodes=2, plan={"auto": False, "global_batch": 32} | fields
    )


def here() -> Engine:
    return Engine(_Inline())


class _Inline(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def find(runs: Engine | None = None, space: dict[str, Any] = SPACE, goal: str = "step", **options: Any) -> Answer:
    return Search(read, read_space(space, "space"), objective(goal), runs or here(), **options).run()
