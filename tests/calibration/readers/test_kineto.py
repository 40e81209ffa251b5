"""Traces of the PyTorch profiler; those here are made up in its form."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from calibration.readers.kineto import read_traces
from topologies.reading import UserError


def event(
    collective: str, elements: int, micro: float, at: float, size: int = 2, ranks: str = "[0, 1]", **more: Any
) -> dict[str, Any]:
    args = {
        "Collective name": collective,
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "Group size": size,
        "dtype": "BFloat16",
        "Process Group Name": "default_pg",
        "Process Group Ranks": ranks,
    }
    return {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_x", "ts": at, "dur": micro, "args": args | more}


def trace(folder: Path, rank: int, events: list[dict[str, Any]], **more: Any) -> Path:
    path = folder / f"rank{rank}.json.gz"
    data = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
        "traceEvents": events,
    } | more
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    return path


def test_transfer_is_what_the_last_rank_sees(tmp_path: Path) -> None:
    """The first all-reduce: rank 0 waited; the second: rank 1 waited. Events that carry nothing of their own are left out."""
    first = [event("allreduce", 1024, 900, 10), event("allreduce", 1024, 60, 2000), event("barrier", 1, 5, 4000)]
    second = [event("allreduce", 1024, 700, 2000), event("allreduce", 1024, 40, 10)]
    traced = read_traces([trace(tmp_path, 0, first), trace(tmp_path, 1, second)], 8)
    (row,) = traced.rows
    assert (row.operation, row.ranks, row.nodes, row.bytes) == ("all_reduce", 2, 1, 2048.0)
    assert row.seconds == pytest.approx(50e-6)
    assert not traced.notes


def test_full_buffer_is_the_larger_side(tmp_path: Path) -> None:
    events = [event("_allgather_base", 512, 50, 1, **{"Out msg nelems": 1024}), event("_reduce_scatter_base", 1024, 70, 99)]
    traced = read_traces([trace(tmp_path, 0, events)], 8)
    assert [(row.operation, row.bytes) for row in traced.rows] == [("all_gather", 2048.0), ("reduce_scatter", 2048.0)]
    assert "a trace of one rank" in traced.notes[0]


@pytest.mark.parametrize(("ranks", "nodes"), [("[0, 8, 16, 24]", 4), ("[0, 8, ...]", 4), ("[0, 1, 2, 3]", 1), ("", 1)])
def test_nodes_of_a_group(ranks: str, nodes: int, tmp_path: Path) -> None:
    traced = read_traces([trace(tmp_path, 0, [event("allreduce", 1024, 9, 1, size=4, ranks=ranks)])], 8)
    assert (traced.rows[0].ranks, traced.rows[0].nodes) == (4, nodes)


def test_ranks_of_the_header_go_first(tmp_path: Path) -> None:
    groups = {"backend": "nccl", "rank": 0, "world_size": 16, "pg_config": [{"pg_name": "default_pg", "ranks": [0, 8]}]}
    traced = read_traces([trace(tmp_path, 0, [event("allreduce", 1024, 9, 1)], distributedInfo=groups)], 8)
    assert traced.rows[0].nodes == 2


def test_uneven_all_to_all_is_left_out(tmp_path: Path) -> None:
    uneven = event("all_to_allv", 1024, 9, 1, **{"In split size": "[1000, 24]"})
    traced = read_traces([trace(tmp_path, 0, [uneven, event("allreduce", 1024, 9, 5)])], 8)
    assert [row.operation for row in traced.rows] == ["all_reduce"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"traceEvents": None}, "no list 'traceEvents'"),
        ({"traceEvents": []}, "no collective to learn from: no collective of NCCL or gloo"),
        ({"traceEvents": [{"cat": "kernel", "name": "ncclKernel_AllReduce", "dur": 3}]}, "1 do not say"),
        ({"distributedInfo": None}, "does not say its rank"),
        ({"distributedInfo": None, "traceEvents": []}, "a trace of one process: it has no collectives"),
    ],
)
def test_what_cannot_be_learnt_from(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"rank0\.json\.gz: .*{message}"):
        read_traces([trace(tmp_path, 0, [event("allreduce", 8, 1, 1)], **change)], 8)


def test_two_traces_of_one_rank_and_broken_files(tmp_path: Path) -> None:
    path = trace(tmp_path, 0, [event("allreduce", 8, 1, 1)])
    with pytest.raises(UserError, match="rank 0 has another trace already"):
        read_traces([path, path], 8)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(UserError, match="broken gzip"):
        read_traces([path], 8)
    path.write_text('{"traceEvents": [')
    with pytest.raises(UserError, match="broken JSON"):
        read_traces([path], 8)
