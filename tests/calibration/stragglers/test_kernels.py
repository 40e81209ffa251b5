"""Profiler traces of all ranks replayed; those here are made up in their form, with times that can be worked out by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner

import shardyard
from calibration.readers.kineto_ops import Kernel, RankTrace, kineto_files, read_ranks
from calibration.stragglers.analysis import Analysis
from calibration.stragglers.kernels import analyse_kernels, replay_of_kernels
from strategies.predict import simulate
from topologies.reading import UserError

COMPUTE, COMMUNICATION = 7, 20  # streams
MILLI = 1e3  # microseconds


class Rank:
    """Events of a rank: kernels are launched a microsecond after each other."""

    def __init__(self, rank: int) -> None:
        self.rank, self.launched, self.events = rank, 0, list[dict[str, Any]]()

    def step(self, number: int, begin: float) -> Rank:
        """Kernels that follow are launched in a step that the CPU begins at `begin` ms."""
        self.launched = int(begin * MILLI)
        window = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", "ts": self.launched, "dur": MILLI}
        self.events.append(window)
        return self

    def run(self, start: float, end: float, collective: str = "", **more: Any) -> Rank:
        """A kernel from `start` to `end` ms."""
        self.launched += 1
        ids = {"correlation": len(self.events), "stream": COMMUNICATION if collective else COMPUTE}
        group = {"Collective name": collective, "Process Group Name": "0", "Process Group Ranks": "[0, 1]"} if collective else {}
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": self.launched, "dur": 1, "args": ids}
        name = "ncclDevKernel" if collective else "gemm"
        times = {"ts": start * MILLI, "dur": (end - start) * MILLI}
        self.events += [launch, {"ph": "X", "cat": "kernel", "name": name, **times, "args": ids | group | more}]
        return self

    def write(self, folder: Path, **more: Any) -> Path:
        path = folder / f"rank{self.rank}.json.gz"
        events = self.events[::-1]  # their order in the file means nothing
        data = {"distributedInfo": {"rank": self.rank, "world_size": 2}, "traceEvents": events} | more
        path.write_bytes(gzip.compress(json.dumps(data).encode()))
        return path


def training(rank: int, slow: float, begin: float = 0.0, step: int = 3) -> Rank:
    """2 ms of backward, an all-reduce of 1 ms that is hidden by another 1 ms of it, an update of 1 ms that waits for both. Rank 1
    is `slow` times as slow, and rank 0 waits for it in the all-reduce.
    """
    return again(Rank(rank), slow, begin, step)


def again(rank: Rank, slow: float, begin: float, step: int) -> Rank:
    own = slow if rank.rank else 1.0
    arrives, reduced = begin + 2 * own, begin + 2 * max(slow, 1) + 1
    update = max(reduced, arrives + own)
    rank.step(step, begin).run(begin, arrives).run(arrives, reduced, "allreduce")
    return rank.run(arrives, arrives + own).run(update, update + own)


def analysed(*ranks: Rank, folder: Path) -> Analysis:
    return analyse_kernels(read_ranks([rank.write(folder) for rank in ranks]), "traces")


def test_a_slow_rank(tmp_path: Path) -> None:
    """Rank 1 takes 4, 2 and 2 ms, rank 0 half: 8 ms. Without stragglers 3, 1.5 and 1.5 ms, and 1 ms of all-reduce beside: 6
    ms.
    """
    answer = analysed(training(0, 2), training(1, 2), folder=tmp_path)
    for times, expected in ((answer.measured, 8e-3), (answer.with_delays, 8e-3), (answer.replayed, 8e-3), (answer.ideal, 6e-3)):
        assert times.tolist() == [pytest.approx(expected)]
    first, second = answer.workers
    assert (first.rank, first.slowdown, first.fixed, first.share) == (
        1,
        pytest.approx(8 / 6),
        pytest.approx(6e-3),
        pytest.approx(1),
    )
    assert (second.rank, second.slowdown, second.share) == (0, pytest.approx(1), pytest.approx(0))
    assert [part.name for part in answer.op_types] == ["compute", "allreduce"]
    assert answer.steps.tolist() == [3]


def test_what_waits_for_a_collective_is_found_over_ranks(tmp_path: Path) -> None:
    """On rank 0 the all-reduce ended before the second kernel began; on rank 1 beside it, so that only the third waits."""
    first = Rank(0).step(0, 0).run(0, 1).run(1, 4, "allreduce").run(5, 6).run(6, 7)
    second = Rank(1).step(0, 0).run(0, 3).run(3, 4, "allreduce").run(3, 6).run(6, 7)
    replay, ops = replay_of_kernels(read_ranks([first.write(tmp_path), second.write(tmp_path)]), "traces")
    times = replay.graph.times(replay.own)
    ends = {(op.rank, op.kind, op.alike[1]): round(1e3 * end, 6) for op, end in zip(ops, times.end.tolist(), strict=True)}
    assert ends[0, "compute", 1] == 2  # does not wait for 4 ms
    assert ends[0, "compute", 2] == 5
    assert ends[1, "compute", 2] == 7


def test_steps_are_replayed_each(tmp_path: Path) -> None:
    ranks = [again(again(Rank(rank), 2, 0, 3), 1, 100, 4) for rank in (0, 1)]
    answer = analysed(*ranks, folder=tmp_path)
    assert answer.steps.tolist() == [3, 4]
    assert answer.measured == pytest.approx([8e-3, 4e-3])
    assert answer.per_step == pytest.approx([8e-3 / 5e-3, 4e-3 / 5e-3])  # 2.5, 1.25 and 1.25 ms
    lonely = analysed(training(0, 2), again(training(1, 2), 2, 100, 4), folder=tmp_path)
    assert lonely.left_out == {4: "rank 0 has no kernel in it"}


def test_send_and_receive_meet(tmp_path: Path) -> None:
    """Rank 0 computes for 2 ms and sends for 1 ms; rank 1 waited for it since the beginning, then computes for 4 ms."""
    first = Rank(0).step(0, 0).run(0, 2).run(2, 3, "send", **{"Dst Rank": "1"})
    second = Rank(1).step(0, 0).run(0, 3, "recv", **{"Src Rank": "0"}).run(3, 7)
    replay, ops = replay_of_kernels(read_ranks([first.write(tmp_path), second.write(tmp_path)]), "traces")
    transfers = [own for op, own in zip(ops, replay.own, strict=True) if op.kind == "send and receive"]
    assert transfers == pytest.approx([1e-3, 1e-3])
    assert replay.steps(replay.own) == pytest.approx([7e-3])


def test_what_a_trace_does_not_say_is_a_note(tmp_path: Path) -> None:
    unnamed = {"Process Group Name": "", "Process Group Ranks": ""}
    answer = analysed(Rank(0).step(0, 0).run(0, 1).run(1, 2, "allreduce", **unnamed), folder=tmp_path)
    assert [note.split(":")[0] for note in answer.notes] == [
        "a trace of one rank",
        "1 NCCL kernels do not name their group or peer",
        "1 of 1 steps of a rank launch kernels as no other does",
    ]


def test_the_command_reads_a_folder(tmp_path: Path) -> None:
    for rank in (0, 1):
        training(rank, 2).write(tmp_path)
    result = CliRunner().invoke(shardyard.main, ["straggler", str(tmp_path), "--plot", str(tmp_path / "map.png")])
    assert result.exit_code == 0, result.output
    assert "1 step, 2 ranks, 8 ops" in result.output
    assert "rank 1: alone it makes a step 1.33 times as long; without its excess a step takes 6.00 ms" in result.output
    data = json.loads(CliRunner().invoke(shardyard.main, ["straggler", str(tmp_path), "--json"]).stdout)
    assert (data["slowdown"], data["dp"], data["last_stage"]) == (pytest.approx(4 / 3), None, None)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"distributedInfo": {"world_size": 2}}, "distributedInfo.rank=None: must be the number of the rank"),
        ({"traceEvents": 3}, "no list 'traceEvents'"),
        ({"traceEvents": []}, "has no kernels"),
        ({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": "soon"}]}, "event 1: ts='soon': must be microseconds"),
    ],
)
def test_what_is_wrong_with_a_trace_is_one_line(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = training(0, 1).write(tmp_path, **more)
    result = CliRunner().invoke(shardyard.main, ["straggler", str(path)])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert message in result.output
    assert str(path) in result.output


def test_ranks_of_one_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no .json"):
        kineto_files([tmp_path / "empty"])
    path = training(0, 1).write(tmp_path)
    with pytest.raises(UserError, match="rank 0 has another trace already"):
        read_ranks([path, path])
    with pytest.raises(UserError, match="no step that all 2 ranks recorded"):
        analysed(training(0, 1, step=1), training(1, 1, step=2), folder=tmp_path)


@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 8, "microbatch": 4},
        {"dp": 8, "microbatch": 4, "data_parallel": "zero3"},
        {"tp": 8, "global_batch": 4, "microbatch": 4, "sequence_parallel": True},
    ],
)
def test_a_simulated_straggler_is_found(plan: dict[str, Any]) -> None:
    """A simulated step of 8 ranks as profilers would record it: which waits there are is found from the times alone, and the
    slow GPU by what it costs.
    """
    fields = dict(overrides={"model.layers": 4}, model="llama-3.1-8b", cluster="dgx-h100", plan={"sequence": 1024} | plan)
    timeline = simulate(shardyard.read_job(effects=["gpu 3: speed 0.5"], **fields), fold=False)
    traces = [RankTrace(rank, {0: _kernels(rows)}) for rank, rows in timeline.frame().groupby("rank")]
    answer = analyse_kernels(traces, "simulated")
    assert answer.measured == pytest.approx([timeline.step], rel=1e-3)
    assert answer.with_delays == pytest.approx(answer.measured, rel=1e-9)
    assert (answer.workers[0].rank, answer.workers[0].share) == (3, pytest.approx(1, abs=0.01))
    alike = simulate(shardyard.read_job(**fields)).step  # without stragglers means compute of 9/8 the time
    assert alike < answer.workers[0].fixed < 1.126 * alike < 1.5 * alike < answer.replayed[0]


def _kernels(rows: pd.DataFrame) -> list[Kernel]:
    """The ops of a rank, in the order of its program; collectives on a stream of their own."""
    return [
        Kernel(place, start, end, COMMUNICATION, kind, f"{stream} {label}")
        if kind not in ("forward", "backward", "optimizer")
        else Kernel(place, start, end, COMPUTE)
        for place, (stream, label, kind, start, end) in enumerate(
            rows[["stream", "op", "kind", "start", "end"]].itertuples(index=False)
        )
    ]
