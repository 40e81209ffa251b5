"""Whose workers run simulations, and what happens when they die; libraries of clusters are stood in for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace
from typing import Any

import pytest

from strategies.planner.search.workers.executors import Engine, engine
from strategies.planner.search.workers.in_process import in_process
from topologies.reading import UserError

Outcome = Any  # of a call: what it returns, or the exception that it ends with


class Scripted(Executor):
    """Calls end as they are told to, one after the other; counts them."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes, self.calls, self.closed = list(outcomes), list[tuple[Any, ...]](), False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls.append((fn, *args))
        future: Future[Any] = Future()
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.closed = True


class Broken(Executor):
    """A pool whose workers are gone takes no calls."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        raise BrokenProcessPool


def lost(name: str) -> Exception:
    return type(name, (Exception,), {})()


def test_a_call_is_asked_for_again_when_its_worker_dies_three_times_at_most() -> None:
    """The first attempt and two more."""
    twice = Scripted(BrokenProcessPool(), BrokenProcessPool(), "done")
    assert Engine(twice).submit(abs, -1).result() == "done"
    assert twice.calls == [(abs, -1)] * 3
    always = Scripted(*[BrokenProcessPool()] * 9)
    with pytest.raises(UserError, match="a simulation ended its worker 3 times"):
        Engine(always).submit(abs, -1).result()


@pytest.mark.parametrize("name", ["KilledWorker", "WorkerCrashedError"])
def test_clusters_that_have_tried_again_themselves_are_not_asked_again(name: str) -> None:
    cluster = Scripted(lost(name), "done")
    with pytest.raises(UserError, match="ended its worker"):
        Engine(cluster).submit(abs, -1).result()
    assert len(cluster.calls) == 1


def test_other_errors_are_the_call_s() -> None:
    with pytest.raises(ZeroDivisionError):
        Engine(Scripted(ZeroDivisionError())).submit(abs, -1).result()


def test_a_pool_that_is_broken_is_made_anew_where_that_is_possible() -> None:
    new = Scripted("done")
    assert Engine(Broken(), lambda: new).submit(abs, -1).result() == "done"
    with pytest.raises(BrokenProcessPool):
        Engine(Broken()).submit(abs, -1)


def test_a_result_is_waited_for_as_long_as_is_said() -> None:
    class Never(Executor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            return Future()

    with pytest.raises(TimeoutError):
        Engine(Never()).submit(abs, -1).result(0.01)


def test_results_are_in_the_order_of_the_items() -> None:
    runs = Scripted("first", "second")
    assert Engine(runs).map(abs, [1, 2]) == ["first", "second"]
    assert runs.calls == [(abs, 1), (abs, 2)]


@pytest.mark.parametrize("immediate", [False, True])
def test_it_is_told_how_many_results_are_there(immediate: bool) -> None:
    told: list[tuple[int, int]] = []
    each = in_process() if immediate else Engine(ThreadPoolExecutor(2))
    assert each.results(pow, [(2, 3), (3, 2)], lambda number, of: told.append((number, of))) == [8, 9]
    each.close()
    assert told == [(1, 2), (2, 2)]


def test_dask_s_workers_run_what_is_asked_of_dask(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, events = Scripted("done"), list[Any]()

    class Client:
        def __init__(self, address: str, **options: Any) -> None:
            events.append((address, options["set_as_default"]))

        def get_executor(self, retries: int) -> Executor:
            events.append(retries)
            return runs

        def close(self) -> None:
            events.append("closed")

    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(Client=Client))
    with engine(dask="tcp://there:8786") as created:
        assert created.submit(abs, -1).result() == "done"
        assert "closed" not in events
    assert events == [("tcp://there:8786", False), 3, "closed"]
    assert runs.closed


def test_ray_s_workers_run_what_is_asked_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, events = Scripted("done"), list[Any]()

    def remote(function: Callable[..., Any]) -> Any:
        def options(max_retries: int) -> Any:
            events.append(max_retries)
            return SimpleNamespace(remote=lambda *items: SimpleNamespace(future=lambda: runs.submit(function, *items)))

        return SimpleNamespace(options=options)

    def init(address: str, ignore_reinit_error: bool, log_to_driver: bool) -> None:
        events.append((address, ignore_reinit_error, log_to_driver))

    ray = SimpleNamespace(remote=remote, init=init, shutdown=lambda: events.append("closed"))
    monkeypatch.setitem(sys.modules, "ray", ray)
    with engine(ray="local") as created:
        assert created.submit(abs, -1).result() == "done"
        assert "closed" not in events
    assert events == [("local", True, False), 3, "closed"]
    assert runs.calls == [(abs, -1)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"workers": 1, "dask": "there"}, "only one of them"),
        ({"dask": "there", "ray": "there"}, "only one of them"),
        ({"workers": 0}, "--workers 0: must be at least 1"),
    ],
)
def test_what_cannot_run_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message), engine(**asked):
        pass


@pytest.mark.parametrize("error", [ConnectionError(), ValueError()])
def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=fails))
    with pytest.raises(UserError, match=f"--ray there: no cluster answers .{type(error).__name__}."), engine(ray="there"):
        pass
    monkeypatch.setitem(sys.modules, "distributed", SimpleNamespace(Client=type("Client", (), {"__init__": fails})))
    with pytest.raises(UserError, match=f"--dask there: no scheduler answers .{type(error).__name__}."), engine(dask="there"):
        pass


@pytest.mark.parametrize("option", ["dask", "ray"])
def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setitem(sys.modules, {"dask": "distributed"}.get(option, option), None)
    with pytest.raises(UserError, match=f"--{option}: needs the package"), engine(**{option: "there"}):
        pass
