"""Traces of gloo on CPUs and of a single process, as PyTorch's profiler writes them.

tests/data/gloo: four steps of DDP over four nn.Linear(256, 256), two processes, PyTorch 2.13, without fields that nobody reads.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from calibration.readers.kineto import read_traces
from calibration.readers.kineto_ops import read_ranks
from calibration.stragglers.kernels import analyse_kernels
from topologies.reading import UserError

REAL = [Path(__file__).parents[2] / f"data/gloo/rank{rank}.json.gz" for rank in (0, 1)]
PARAMETERS = 4 * (256 * 256 + 256)


def changed(path: Path, change: Any) -> Path:
    """A copy of the first real trace, after `change`."""
    data = json.loads(gzip.decompress(REAL[0].read_bytes()))
    change(data)
    path.write_text(json.dumps(data))
    return path


def test_collectives_have_their_size_and_group() -> None:
    rows = {(row.operation, row.bytes): row for row in read_traces(REAL, per_node=2).rows}
    gradients = rows["all_reduce", 4.0 * PARAMETERS]
    assert (gradients.ranks, gradients.nodes) == (2, 1)
    assert 1e-4 < gradients.seconds < 1e-2


def test_groups_that_differ_are_not_guessed(tmp_path: Path) -> None:
    path = changed(tmp_path / "a.json", lambda data: data["distributedInfo"]["pg_config"].append({"pg_name": "1", "ranks": [0]}))
    with pytest.raises(UserError, match="6 do not say their collective, size or group"):
        read_traces([path], per_node=2)


def test_stragglers_among_processes_on_cpus() -> None:
    """Both ranks, all that DDP reduced, and a step as long as the trace."""
    traces = read_ranks(REAL)
    kernels = traces[0].steps[0]
    assert sum(kernel.collective == "all_reduce" for kernel in kernels) == 4
    assert all(kernel.launched <= kernel.start for kernel in kernels)
    analysis = analyse_kernels(traces, "gloo")
    assert {worker.rank for worker in analysis.workers} == {0, 1}
    whole = max(k.end for t in traces for k in t.steps[0]) - min(k.start for t in traces for k in t.steps[0])
    assert float(analysis.measured[0]) == pytest.approx(whole)


def test_a_single_process_is_rank_0(tmp_path: Path) -> None:
    def alone(data: dict[str, Any]) -> None:
        del data["distributedInfo"]
        data["traceEvents"] = [each for each in data["traceEvents"] if not each["name"].startswith(("gloo:", "c10d::"))]

    (trace,) = read_ranks([changed(tmp_path / "one.json", alone)])
    assert trace.rank == 0
    assert not any(kernel.collective for kernel in trace.steps[0])
    assert len(trace.steps[0]) > 100
