"""Simulations in this process, one after the other: for small searches, and for Python sessions that start no processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from strategies.planner.search.workers.executors import Engine


class InProcess(Executor):
    """An executor whose calls are over when they are submitted."""

    immediate = True

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it now; what it raises is raised by the future's `result`."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def in_process() -> Engine:
    """An engine that needs no workers."""
    return Engine(InProcess())
