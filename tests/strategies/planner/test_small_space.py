"""A sweep keeps to its time: what has not started by then is left out and counted."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shardyard import read_job
from strategies.planner import small_space as module
from strategies.planner.search.space import Space, parse_axis
from strategies.planner.search.workers.executors import Engine, engine
from strategies.planner.small_space import AHEAD, sweep


def read(changes: dict[str, Any]) -> Any:
    plan = {"auto": False, "global_batch": 64, "sequence": 256}
    return read_job(overrides=changes | {"model.layers": 2}, model="gpt2-1.5b", cluster="dgx-a100", plan=plan)


SPACE = Space((parse_axis(f"plan.microbatch={','.join(map(str, range(1, 33)))}"),))


def sleep(_: Any) -> None:
    time.sleep(600)


def test_without_a_limit_every_combination_has_a_row() -> None:
    with ThreadPoolExecutor(1) as threads:
        rows, left = sweep(read, SPACE, Engine(threads))
    assert [row["changes"]["plan.microbatch"] for row in rows] == list(range(1, 33))
    assert left == 0
    assert rows[2]["error"]  # microbatches of 3 do not divide 64 sequences over 8 GPUs
    assert rows[1]["step"] > 0


def test_when_the_time_is_over_nothing_more_starts() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert sweep(read, SPACE, Engine(threads), until=time.monotonic()) == ([], 32)
        rows, left = sweep(read, SPACE, Engine(threads), until=time.monotonic() + 1e-3)
    assert len(rows) <= AHEAD
    assert len(rows) + left == 32


def test_when_the_time_is_over_what_is_under_way_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "evaluate", sleep)
    with engine(workers=1) as runs:
        assert sweep(read, SPACE, runs, until=time.monotonic() + 1) == ([], 32)
        assert runs.submit(abs, -1).result(60) == 1
