"""Where simulations run: any `concurrent.futures.Executor`. Processes of this machine, a Dask scheduler, a Ray cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from strategies.planner.search.workers.processes import Processes
from topologies.reading import UserError

ATTEMPTS = 3  # at a simulation whose worker died
GIVEN_UP = ("KilledWorker", "WorkerCrashedError")  # of Dask and Ray, which ask for it again themselves


class Engine:
    """An executor whose work is asked for again when a worker dies with it. `remake` makes a new executor where one breaks."""

    def __init__(self, executor: Executor, remake: Callable[[], Executor] | None = None) -> None:
        self._executor, self._remake = executor, remake

    @property
    def immediate(self) -> bool:
        """Whether a call is over when it has been submitted."""
        return bool(getattr(self._executor, "immediate", False))

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Task:
        """Start a call."""
        return Task(self, function, arguments)

    def map(self, function: Callable[..., Any], items: Iterable[Any]) -> list[Any]:
        """A call per item, and what they return, in order."""
        return [task.result() for task in [self.submit(function, item) for item in items]]

    def results(
        self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], tell: Callable[[int, int], None] | None = None
    ) -> list[Any]:
        """What calls return, in order; tell: how many of how many are over."""
        told = tell or (lambda *_: None)
        tasks = []
        for number, arguments in enumerate(calls, 1):
            tasks.append(self.submit(function, *arguments))
            if self.immediate:
                told(number, len(calls))
        answers = []
        for number, task in enumerate(tasks, 1):
            answers.append(task.result())
            if not self.immediate:
                told(number, len(calls))
        return answers

    def start(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        """Hand a call to the executor, to a new one when the old one is broken."""
        try:
            return self._executor.submit(function, *arguments)
        except BrokenProcessPool:
            if self._remake is None:
                raise
            self._executor = self._remake()
            return self._executor.submit(function, *arguments)

    def abandon(self) -> None:
        """End what is under way; what is asked for later starts anew."""
        if isinstance(self._executor, Processes) and self._remake is not None:
            self._executor.end()
            self._executor = self._remake()

    def close(self) -> None:
        """Give up what is not done."""
        if isinstance(self._executor, Processes):
            self._executor.end()
        else:
            self._executor.shutdown(wait=False)


class Task:
    """A call that is under way."""

    def __init__(self, engine: Engine, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._engine, self._call = engine, (function, arguments)
        self._future = engine.start(*self._call)

    def cancel(self) -> None:
        """It is not wanted any more: it does not start if it has not. One that has ends with `Engine.abandon`."""
        self._future.cancel()

    def result(self, timeout: float | None = None) -> Any:
        """What it returns. Raises UserError when every worker that tried it died, TimeoutError after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        for _ in range(ATTEMPTS):
            try:
                return self._future.result(None if until is None else max(0.0, until - time.monotonic()))
            except BrokenProcessPool:
                self._future = self._engine.start(*self._call)
            except Exception as error:
                if type(error).__name__ not in GIVEN_UP:
                    raise
                break
        raise UserError(f"a simulation ended its worker {ATTEMPTS} times: is there enough memory?")


class RayExecutor(Executor):
    """Ray's tasks as an executor."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run it as a Ray task, again when its worker dies."""
        future: Future[Any] = self._ray.remote(fn).options(max_retries=ATTEMPTS).remote(*args, **kwargs).future()
        return future


@contextmanager
def engine(workers: int | None = None, dask: str | None = None, ray: str | None = None) -> Iterator[Engine]:
    """The engine that is asked for: `workers` processes here (as many as CPUs), or the cluster at an address ("local": a Ray
    that is started here).

    Raises UserError for two engines, a library that is missing, or an address where nobody answers.
    """
    if sum(asked is not None for asked in (workers, dask, ray)) > 1:
        raise UserError("--workers, --dask and --ray: only one of them can run the simulations")
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers}: must be at least 1")
    executor, close = _dask(dask) if dask is not None else _ray(ray) if ray is not None else (None, lambda: None)
    result = Engine(executor) if executor is not None else _processes(workers or os.cpu_count() or 1)
    try:
        yield result
    finally:
        result.close()
        close()


def _processes(workers: int) -> Engine:
    return Engine(Processes(workers), lambda: Processes(workers))


def _dask(address: str) -> tuple[Executor, Callable[[], None]]:
    try:
        client_of: Any = import_module("distributed").Client  # its annotations come and go
    except ImportError:
        raise UserError("--dask: needs the package distributed: pip install 'shardyard[dask]'") from None
    try:
        # closed here; one that never reached a scheduler would wait for it when it is deleted, and end in a traceback
        client = type("Client", (client_of,), {"__del__": lambda _: None})(address, timeout=10, set_as_default=False)
    except (OSError, ValueError, TypeError, ImportError, RuntimeError) as error:
        raise UserError(f"--dask {address}: no scheduler answers ({type(error).__name__})") from None
    return client.get_executor(retries=ATTEMPTS), client.close


def _ray(address: str) -> tuple[Executor, Callable[[], None]]:
    try:
        import ray
    except ImportError:
        raise UserError("--ray: needs the package ray: pip install 'shardyard[ray]'") from None
    try:
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        raise UserError(f"--ray {address}: no cluster answers ({type(error).__name__})") from None
    return RayExecutor(ray), ray.shutdown
