"""A search that runs out of time says how far it got."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from reports.tables.search import overview, verdict
from strategies.planner.search import search as module
from strategies.planner.search.answer import Progress
from strategies.planner.search.objective import Limits, objective
from strategies.planner.search.search import Search
from strategies.planner.search.selection import Selection
from strategies.planner.search.site import Site
from strategies.planner.search.space import read_space
from strategies.planner.search.workers.executors import Engine, engine
from tests.strategies.planner.conftest import SPACE, find, here, read


def test_a_deadline_that_nothing_keeps_is_proven_without_simulating_everything() -> None:
    """Bounds rule plans out as they are tightened: one second less than the best plan needs leaves few to simulate."""
    best = find().rows[0]
    days = 1e12 / best["tokens_per_second"] / 86400
    late = find(tokens=1e12, limits=Limits(days=days * (1 - 1e-6)))
    assert late.best is None
    assert late.pruned["days"] == late.counts["bounded"] - late.pruned["memory"]
    assert late.counts["simulated"] < late.counts["bounded"] / 4
    assert f"{days:,.5g} days" in late.nearest["days"]
    assert find(tokens=1e12, limits=Limits(days=days * (1 + 1e-6))).best is not None


def limited(runs: Engine | None = None, space: dict[str, Any] = SPACE, **options: Any) -> Search:
    """A search whose time the test ends."""
    return Search(read, read_space(space, "space"), objective("step"), runs or here(), seconds=1e6, **options)


def test_a_time_limit_says_how_far_it_got() -> None:
    search, whole = limited(top=4), find(top=4)

    def end(state: Progress) -> None:
        if state.simulated == 2:
            search.deadline.at = 0.0

    search.tell = end
    answer = search.run()
    assert answer.interrupted == "the time limit of 1e+06 s"
    assert answer.counts["simulated"] == len(answer.rows) < whole.counts["simulated"]
    assert answer.counts["open"] > 0
    assert answer.proven < 4 <= whole.proven
    assert answer.rows[: answer.proven] == whole.rows[: answer.proven]
    assert answer.rows[0]["value"] * (1 - answer.gap) <= whole.rows[0]["value"] <= answer.rows[0]["value"]


def sleep(file: str, job: Any) -> Any:
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)


def test_a_time_limit_ends_the_worker_that_simulates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pid"
    monkeypatch.setattr(module, "evaluate", partial(sleep, str(file)))
    with engine(workers=1) as runs:
        search = limited(runs)

        def start(plan: tuple[int, int, Any]) -> None:
            task = runs.submit(module.evaluate, plan[2])
            while not file.exists():
                time.sleep(0.01)
            search.deadline.at = time.perf_counter() + 0.1
            return *plan[:2], task

        monkeypatch.setattr(search, "_start", lambda *plan: start(plan))
        answer = search.run()
        assert answer.best is None
        assert "none found yet (the time limit of" in verdict(answer, read({}))
        assert answer.counts["open"] == answer.counts["bounded"] - answer.pruned["memory"]
        assert runs.submit(abs, -1).result(60) == 1  # others go on
    worker = int(file.read_text())
    until = time.monotonic() + 60
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{worker}")


def spin(*_: Any) -> Any:
    while True:
        pass


def test_a_time_limit_holds_while_bounds_are_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "of", spin)
    answer = find(seconds=0.5)
    assert (answer.best, answer.interrupted) == (None, "the time limit of 0.5 s, before all bounds were known")
    assert "all of 432 combinations are open" in verdict(answer, read({}))
    console = Console(width=120)
    with console.capture() as printed:
        console.print(overview(answer, read({}), None, 1))
    assert "--plan auto" in printed.get()
    assert answer.bound == 0.0


def test_a_time_limit_holds_while_a_bound_is_tightened(monkeypatch: pytest.MonkeyPatch) -> None:
    search, look = limited(), Selection._look

    def late(self: Selection, *entry: Any) -> Any:
        self.deadline.at = time.perf_counter() + 0.1
        return look(self, *entry)

    monkeypatch.setattr(Selection, "_look", late)
    monkeypatch.setattr(Site, "tighter", spin)
    answer = search.run()
    assert (answer.best, answer.interrupted) == (None, "the time limit of 1e+06 s")
    assert "none found yet" in verdict(answer, read({}))
    assert answer.counts["open"] == answer.counts["allowed"] - answer.pruned["memory"] > 0


def test_time_that_is_up_before_all_clusters_were_looked_at_proves_nothing() -> None:
    search, seen = limited(space={"nodes": [1, 2, 4], "plan.tp": [1, 2]}), list[str]()

    def end(state: Progress) -> None:
        seen.append(state.stage)
        if len(seen) == 2:
            search.deadline.at = 0.0

    search.tell = end
    answer = search.run()
    assert answer.interrupted == "the time limit of 1e+06 s, 1 of 3 clusters not looked at"
    assert answer.bound == 0.0
    assert answer.best is None
