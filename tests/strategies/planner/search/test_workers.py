"""Threads, processes, Dask and Ray give the same answer, also when a worker dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from strategies.planner.search.workers.executors import Engine, engine
from tests.strategies.planner.conftest import find
from topologies.reading import UserError


def test_threads_find_the_same_as_the_calling_thread() -> None:
    with ThreadPoolExecutor(2) as threads:
        answer = find(Engine(threads), top=2)
    assert [row["hash"] for row in answer.rows] == [row["hash"] for row in find(top=2).rows]


def die_once(file: str, value: int) -> int:
    """Ends its process the first time."""
    if not os.path.exists(file):
        Path(file).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return value + 1


def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    with engine(workers=1) as runs:
        assert runs.submit(die_once, str(tmp_path / "died"), 1).result(60) == 2


ENDED = """
import time
from strategies.planner.search.workers.processes import Processes
def search():
    pool = Processes(2)
    futures = [pool.submit(time.sleep, 30) for _ in range(8)]
    time.sleep(0.5)
    futures[-1].cancel()
    pool.end()
search()
time.sleep(0.5)
"""


def test_processes_that_are_ended_at_work_leave_nothing_to_say() -> None:
    """Python 3.11's pool wrote to a closed pipe when the program ended, or its thread died of a cancelled call."""
    ended = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, text=True, timeout=25)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_dask_workers_find_the_same_even_when_one_dies(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, local_directory=str(tmp_path)
        ) as cluster,
        engine(dask=cluster.scheduler_address) as runs,
    ):
        assert runs.submit(die_once, str(tmp_path / "died"), 1).result(60) == 2
        answer = find(runs, top=2)
    assert [row["hash"] for row in answer.rows] == [row["hash"] for row in find(top=2).rows]


def test_ray_workers_find_the_same_even_when_one_dies(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with engine(ray="local") as runs:
        assert runs.submit(die_once, str(tmp_path / "died"), 1).result(60) == 2
        answer = find(runs, top=2)
    assert [row["hash"] for row in answer.rows] == [row["hash"] for row in find(top=2).rows]


def test_one_engine_at_a_time() -> None:
    with pytest.raises(UserError, match="only one of them"), engine(workers=2, dask="tcp://localhost:1"):
        pass
