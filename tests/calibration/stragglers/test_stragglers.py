"""Op-level traces replayed: jobs whose times can be worked out by hand, random ones against a simulation by microbatches, and
published ones where their traces are at hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

import shardyard
from calibration.readers.op_trace import read_op_trace
from calibration.stragglers import reading
from calibration.stragglers.analysis import Analysis, analyse
from calibration.stragglers.replay import Replay, replay_of
from calibration.stragglers.trace import COLUMNS, Trace
from calibration.stragglers.waits import waits_of
from reports.tables.stragglers import as_data, worst_part
from topologies.reading import UserError

Pass = tuple[str, int, int]  # "forward" or "backward", microbatch, chunk of the stage
Duration = Callable[[int, int, int, Pass], float]  # of step, dp rank, stage, pass


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Pass]:
    warm = min(stages - 1 - stage, microbatches)
    forward = [("forward", number, 0) for number in range(microbatches)]
    backward = [("backward", number, 0) for number in range(microbatches)]
    steady = [each for pair in zip(forward[warm:], backward, strict=False) for each in pair]
    return forward[:warm] + steady + backward[microbatches - warm :]


def interleaved(stage: int, stages: int, microbatches: int, chunks: int = 2) -> list[Pass]:
    """All forward passes, then all backward passes, chunks in turns of as many microbatches as there are stages."""
    turns = [
        (number, chunk)
        for first in range(0, microbatches, stages)
        for chunk in range(chunks)
        for number in range(first, first + stages)
    ]
    back = [(number, chunks - 1 - chunk) for number, chunk in turns]
    return [("forward", *turn) for turn in turns] + [("backward", *turn) for turn in back]


def trace_of(
    duration: Duration,
    dp: int = 1,
    pp: int = 1,
    microbatches: int = 1,
    steps: Iterable[int] = (7,),
    order: Callable[[int, int, int], list[Pass]] = one_f_one_b,
    tail: float = 1.0,
    idle_peers: bool = False,
) -> pd.DataFrame:
    """A trace whose transfers take no time. Ranks reduce gradients for `tail` seconds after the slowest of their stage, then
    update for `tail` seconds after the slowest of all. idle_peers: what receives and sends nothing has such ops all the same.
    """
    rows: list[dict[str, Any]] = []
    for step in steps:
        ends = {rank: _pipeline(rows, duration, step, rank, pp, microbatches, order, idle_peers) for rank in range(dp)}
        reduced = [max(ends[rank][stage] for rank in range(dp)) + tail for stage in range(pp)]
        for rank in range(dp):
            for stage in range(pp):
                place = dict(dp_rank=rank, stage=stage, rank=rank * pp + stage, step=step, seq_id=0, mc=0, gmc=-1)
                ready = ends[rank][stage]
                scatter = dict(optype="grads-reduce-scatter", start_ts=ready, duration=reduced[stage] - ready)
                clip = dict(optype="optimizer-clip-main-grad", start_ts=reduced[stage], duration=max(reduced) - reduced[stage])
                update = dict(optype="optimizer", start_ts=max(reduced), duration=tail)
                rows += [place | op for op in (scatter, clip, update)]
    frame = pd.DataFrame(rows)
    return frame.assign(seq_id=frame.groupby(["step", "rank", "optype"]).cumcount(), mb_id=-1)[[*COLUMNS, "mb_id"]]


def _pipeline(
    rows: list[dict[str, Any]],
    duration: Duration,
    step: int,
    rank: int,
    pp: int,
    microbatches: int,
    order: Callable[[int, int, int], list[Pass]],
    idle_peers: bool,
) -> list[float]:
    """Rows of compute, sends and receives of one step of a dp rank; returns when each stage has ended its last pass."""
    orders = [order(stage, pp, microbatches) for stage in range(pp)]
    chunks = 1 + max(chunk for passes in orders for _, _, chunk in passes)
    ended: dict[tuple[str, int, int], float] = {}  # kind, microbatch, chunk of the model
    free, done = [0.0] * pp, [0] * pp
    while any(done[stage] < len(orders[stage]) for stage in range(pp)):
        for stage in range(pp):
            while done[stage] < len(orders[stage]):
                kind, number, chunk = orders[stage][done[stage]]
                model_chunk, onward = chunk * pp + stage, 1 if kind == "forward" else -1
                first = 0 if onward > 0 else chunks * pp - 1
                last = chunks * pp - 1 - first
                before = (kind, number, model_chunk - onward) if model_chunk != first else ("forward", number, model_chunk)
                if (model_chunk != first or onward < 0) and before not in ended:
                    break
                arrived = ended.get(before, 0.0)
                start = max(free[stage], arrived)
                end = free[stage] = ended[kind, number, model_chunk] = start + duration(step, rank, stage, (kind, number, chunk))
                place = dict(dp_rank=rank, stage=stage, rank=rank * pp + stage, step=step, mc=-1, gmc=-1, duration=0.0)
                if model_chunk != first or idle_peers:
                    rows.append(place | dict(optype=f"{kind}-recv", start_ts=arrived if model_chunk != first else start))
                rows.append(
                    place | dict(optype=f"{kind}-compute", start_ts=start, duration=end - start, mc=chunk, gmc=model_chunk)
                )
                if model_chunk != last or idle_peers:
                    rows.append(place | dict(optype=f"{kind}-send", start_ts=end))
                done[stage] += 1
    return free


def read(frame: pd.DataFrame, folder: Path) -> Trace:
    frame.to_csv(folder / "trace.csv", index=False)
    return read_op_trace(folder / "trace.csv")


def replayed(frame: pd.DataFrame, folder: Path) -> Replay:
    return replay_of(read(frame, folder), "trace.csv")[1]


def analysed(frame: pd.DataFrame, folder: Path) -> Analysis:
    return analyse(read(frame, folder), "trace.csv")


def usual(slow: float, dp_rank: int, stage: int) -> Duration:
    """Forward passes take 1 s and backward passes 2 s; on one worker `slow` times as long."""

    def duration(_: int, rank: int, at: int, which: Pass) -> float:
        return (1.0 if which[0] == "forward" else 2.0) * (slow if (rank, at) == (dp_rank, stage) else 1.0)

    return duration


def test_a_slow_dp_rank(tmp_path: Path) -> None:
    """dp 1 takes 2 + 4 s, dp 0 1 + 2 s, then both 2 s. Without stragglers both take 1.5 + 3 s."""
    answer = analysed(trace_of(usual(2, 1, 0), dp=2), tmp_path)
    assert answer.measured.tolist() == [8]
    assert answer.with_delays.tolist() == [8]
    assert answer.replayed.tolist() == [8]
    assert answer.ideal.tolist() == [6.5]
    assert answer.slowdown == 8 / 6.5
    parts = {part.name: part for part in answer.dp_ranks}
    assert (parts["1"].slowdown, parts["1"].fixed, parts["1"].share) == (8 / 6.5, 6.5, 1)
    assert (parts["0"].slowdown, parts["0"].fixed, parts["0"].share) == (1, 8, 0)
    forward = next(part for part in answer.op_types if part.name == "forward-compute")
    assert (forward.slowdown, forward.fixed) == (7 / 6.5, 7.5)  # 2 + 3 s of compute; 1.5 + 4 s
    kind, part = worst_part(answer) or ("", None)
    assert (kind, part and part.name) == ("worker", "1")
    assert (answer.slowest, answer.slowest_part.share) == ([1], 1)


def test_a_slow_last_stage(tmp_path: Path) -> None:
    """Two stages, two microbatches: (2 + 2 − 1) · 3 s = 9 s; with a last stage of half the speed 15 s; at its mean speed, and the
    first stage at its own, 12 s; both at the mean speed 13.5 s. Two seconds more for gradients and update.
    """
    frame = trace_of(usual(2, 0, 1), pp=2, microbatches=2)
    answer = analysed(frame, tmp_path)
    assert (answer.measured[0], answer.replayed[0], answer.ideal[0]) == (17, 17, 15.5)
    last = answer.stages[0]
    assert (last.name, last.fixed, last.share) == ("1", 14, 2)
    assert analysed(trace_of(usual(1, 0, 1), pp=2, microbatches=2), tmp_path).slowdown == 1
    assert as_data(answer, "x")["last_stage"]["share"] == 2


def test_workers_with_the_same_work_differ(tmp_path: Path) -> None:
    """Passes of 1 + 2 s on dp rank 0 and 4 % more on dp rank 1, for which both wait; 2 s more for gradients and update."""
    found = analysed(trace_of(usual(1.04, 1, 0), dp=2, steps=(1, 2)), tmp_path).spread
    assert found is not None
    deviation = math.sqrt(math.log(1 / 1.02) ** 2 + math.log(1.04 / 1.02) ** 2)  # of two, whose mean is known
    assert found == pytest.approx((deviation, 0, 5.12 / 5.06 - 1, 5.12 / 5.06 - 1), abs=1e-12)


def test_single_passes_differ(tmp_path: Path) -> None:
    """Both dp ranks take 1 + 2 s on the mean of two steps, one of them 0.9 and 1.1 of it, for which the other waits once."""

    def duration(step: int, rank: int, _: int, which: Pass) -> float:
        return (1.0 if which[0] == "forward" else 2.0) * (1.0 if rank == 0 else 0.9 if step == 1 else 1.1)

    found = analysed(trace_of(duration, dp=2, steps=(1, 2)), tmp_path).spread
    assert found is not None
    around = math.sqrt((math.log(0.9) ** 2 + math.log(1.1) ** 2) / 4)
    assert found == pytest.approx((0, around, 0, (5 + 5.3) / 10 - 1), abs=1e-12)


def test_stragglers_are_not_spread(tmp_path: Path) -> None:
    found = analysed(trace_of(usual(2, 1, 0), dp=3), tmp_path).spread
    assert found == pytest.approx((0, 0, 0, 0), abs=1e-12)
    assert analysed(trace_of(usual(1, 0, 0), pp=2), tmp_path).spread is None


def test_without_stragglers_nothing_has_a_share(tmp_path: Path) -> None:
    answer = analysed(trace_of(usual(1, 0, 0), dp=2, pp=2, microbatches=4), tmp_path)
    assert answer.slowdown == 1
    assert answer.stages[0].share is None
    assert worst_part(answer) is None


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 1), (4, 1), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("idle_peers", [False, True])
def test_random_jobs_replay_to_what_was_measured(pp: int, chunks: int, idle_peers: bool, tmp_path: Path) -> None:
    """Without gaps and transfers, only passes' dependencies by microbatch set the times, and replay must find them from the
    order.
    """
    random = np.random.default_rng(pp * chunks)

    def order(stage: int, stages: int, microbatches: int) -> list[Pass]:
        return one_f_one_b(stage, stages, microbatches) if chunks == 1 else interleaved(stage, stages, microbatches, chunks)

    frame = trace_of(
        lambda *_: float(random.uniform(1, 3)), dp=2, pp=pp, microbatches=2 * pp, steps=(3, 5), order=order, idle_peers=idle_peers
    )
    replay = replayed(frame.sample(frac=1, random_state=0), tmp_path)  # the order of rows means nothing
    assert replay.steps(replay.own) == pytest.approx(replay.measured(), rel=1e-12)
    assert replay.with_launch_delays() == pytest.approx(replay.measured(), rel=1e-12)
    assert replay.left_out == {}


def test_ops_that_were_recorded_but_not_launched(tmp_path: Path) -> None:
    """Profilers of interleaved schedules leave out the first receive, which has no sender, record sends before the first pass and
    receives after the last: none of that changes what waits for what.
    """
    random = np.random.default_rng(0)
    frame = trace_of(
        lambda *_: float(random.uniform(1, 3)), dp=2, pp=2, microbatches=4, steps=(3, 5), order=interleaved, idle_peers=True
    )
    usual_steps = replayed(frame, tmp_path)
    first = (frame.stage == 0) & (frame.optype == "forward-recv") & (frame.seq_id == 0)
    extra = frame[frame.optype.isin(["forward-send", "backward-recv"])].groupby(["step", "rank", "optype"]).head(1).copy()
    last = frame[frame.optype == "backward-compute"].groupby(["step", "rank"]).start_ts.max()
    early = extra.optype == "forward-send"
    extra.loc[early, "start_ts"] = 0.0
    places = pd.MultiIndex.from_frame(extra.loc[~early, ["step", "rank"]])
    extra.loc[~early, "start_ts"] = last[places].to_numpy() + 0.01
    near = ~early & (extra.step == 3) & (extra["rank"] == 0)
    extra.loc[near, "start_ts"] -= 0.01  # as the last pass began: in one of four steps of the stage clocks err
    changed = pd.concat([frame[~first], extra]).sort_values("start_ts", kind="stable")
    changed["seq_id"] = changed.groupby(["step", "rank", "optype"]).cumcount()
    replay = replayed(changed, tmp_path)
    assert replay.steps(replay.own) == pytest.approx(usual_steps.steps(usual_steps.own), rel=1e-12)


def test_a_gap_is_a_launch_delay(tmp_path: Path) -> None:
    """The backward pass starts half a second after the forward pass ended."""
    frame = trace_of(usual(1, 0, 0))
    frame.loc[frame.optype != "forward-compute", "start_ts"] += 0.5
    answer = analysed(frame, tmp_path)
    assert (answer.measured[0], answer.with_delays[0], answer.replayed[0]) == (5.5, 5.5, 5)


def test_overlapped_gradients_wait_for_their_chunk(tmp_path: Path) -> None:
    """Chunk 1's backward pass ends at 5 s and its reduce-scatter takes 3 s beside chunk 0's, which ends at 7 s; then chunk 0's
    takes 1 s and what is separate 1 s.
    """
    place = dict(dp_rank=0, stage=0, rank=0, step=0, mb_id=-1)
    ops = [
        ("params-all-gather", 0.0, 1.0, 0, -1),
        ("params-all-gather", 1.0, 1.0, 1, -1),
        ("forward-compute", 1.0, 1.0, 0, 0),
        ("forward-compute", 2.0, 1.0, 1, 1),
        ("backward-compute", 3.0, 2.0, 1, 1),
        ("backward-compute", 5.0, 2.0, 0, 0),
        ("grads-reduce-scatter", 5.0, 3.0, 1, -1),
        ("grads-reduce-scatter", 8.0, 1.0, 0, -1),
        ("gc", 7.0, 0.0, -1, -1),
        ("separate-grads-all-reduce", 9.0, 1.0, -1, -1),
        ("optimizer", 10.0, 1.0, -1, -1),
    ]
    fields = ("optype", "start_ts", "duration", "mc", "gmc")
    frame = pd.DataFrame([place | dict(zip(fields, op, strict=True)) for op in ops])
    frame["seq_id"] = frame.groupby("optype").cumcount()
    replay = replayed(frame, tmp_path)
    times = replay.graph.times(replay.own)
    assert times.start == pytest.approx(replay.ops.start)
    assert times.end == pytest.approx(replay.ops.end)


def test_unlike_microbatches_are_told(tmp_path: Path) -> None:
    """Passes of odd microbatches take twice as long, forward and backward: 1 and 2 s are 1.5 s ± a third."""
    frame = trace_of(lambda *at: (1.0 + at[3][1] % 2) * (2 if at[3][0] == "backward" else 1), pp=2, microbatches=4)
    answer = analysed(frame, tmp_path)
    assert answer.microbatches == (pytest.approx(1 / 3), pytest.approx(1))
    even = analysed(trace_of(usual(2, 0, 1), pp=2, microbatches=4), tmp_path)
    assert even.microbatches == (0, None)


def test_steps_that_are_not_whole_are_left_out(tmp_path: Path) -> None:
    frame = trace_of(usual(2, 0, 1), dp=2, pp=2, microbatches=2, steps=(1, 2, 3, 4, 5))
    at = {step: frame.index[(frame.step == step) & (frame["rank"] == 0)] for step in (2, 3, 4)}
    gone = [
        next(row for row in at[2] if frame.optype[row] == "optimizer"),
        next(row for row in at[3] if frame.optype[row] == "backward-compute"),
        next(row for row in at[4] if frame.optype[row] == "forward-send"),
    ]
    answer = analysed(frame.drop(index=gone), tmp_path)
    assert answer.steps.tolist() == [1, 5]
    assert answer.left_out == {
        2: "dp rank 0, stage 0 has 0 optimizer, and 1 in other steps",
        3: "dp rank 0, stage 0 has 2 forward-compute and 1 backward-compute",
        4: "forward-send and forward-compute of a worker do not match in number",
    }
    assert (answer.measured == 17).all()
    with pytest.raises(UserError, match="trace.csv: step 3: .* no step can be replayed"):
        analysed(frame.drop(index=gone)[lambda rows: rows.step == 3], tmp_path)


def test_a_step_that_waits_in_a_circle_is_left_out(tmp_path: Path) -> None:
    """In step 2 stage 0 seems to run backward before the forward passes that its gradients come from."""
    frame = trace_of(usual(1, 0, 0), pp=2, microbatches=2, steps=(1, 2))
    bad = (frame.step == 2) & (frame.stage == 0) & frame.optype.isin(["backward-recv", "backward-compute"])
    frame.loc[bad, "start_ts"] -= 100
    answer = analysed(frame, tmp_path)
    assert answer.steps.tolist() == [1]
    assert "never starts: what it waits for waits in a circle" in answer.left_out[2]


def test_types_of_ops_may_be_missing(tmp_path: Path) -> None:
    frame = trace_of(usual(2, 0, 1), dp=2, pp=2, microbatches=2)
    compute_and_peers = frame[~frame.optype.isin(["grads-reduce-scatter", "optimizer-clip-main-grad", "optimizer"])]
    assert analysed(compute_and_peers, tmp_path).replayed.tolist() == [15]
    with pytest.raises(UserError, match="forward-recv and forward-compute of a worker do not match"):
        analysed(frame[frame.optype != "forward-recv"], tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("optype", "forward", "row 0: optype='forward': unknown; did you mean 'forward-"),
        ("duration", -1.0, "row 0: duration=-1.0: must be seconds from 0"),
        ("duration", float("inf"), "row 0: duration=inf: must be seconds"),
        ("start_ts", float("nan"), "column 'start_ts': 1 values are missing"),
        ("start_ts", "soon", "column 'start_ts': must hold numbers"),
        ("stage", 5, "stages are numbered from 0, and no op is of stage 2"),
        ("stage", -1, "row 0: stage=-1: must be a whole number from 0"),
        ("rank", 2, "a rank is one worker"),
        ("step", 1.5, "row 0: step=1.5: must be a whole number"),
        ("gmc", -1, "row 0: gmc=-1: a compute op belongs to a chunk of the model"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(column: str, value: Any, message: str, tmp_path: Path) -> None:
    frame = trace_of(usual(1, 0, 0), dp=2, pp=2)
    frame = frame.astype({column: object})
    frame.loc[0, column] = value
    path = tmp_path / "trace.csv"
    frame.to_csv(path, index=False)
    result = CliRunner().invoke(shardyard.main, ["straggler", str(path)])
    assert result.exit_code == 2
    assert message in result.output
    assert str(path) in result.output
    assert result.output.count("\n") == 1


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    for name, text, message in (
        ("x.csv", "", "cannot be read"),
        ("x.csv", "a,b\n1,2\n", "no column 'dp_rank'"),
        ("x.csv", ",".join(COLUMNS) + "\n", "has no rows"),
        ("x.json", "{}", "must end in .parquet or .csv"),
        ("x.parquet", "no", "cannot be read"),
    ):
        if name.endswith(".parquet"):
            pytest.importorskip("pyarrow")
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=message):
            read_op_trace(tmp_path / name)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_op_trace(tmp_path / "y.csv")


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("mc", ["x" * 2**20] * 2, "column 'mc': must hold numbers, and holds .*string"),
        ("optype", [1, 2], "column 'optype': must hold text, and holds int64"),
        ("optype", [["forward-compute"]] * 2, "column 'optype': must hold text, and holds list"),
        ("optype", ["forward-compute", None], "column 'optype': 1 values are missing"),
        ("optype", ["y" * 2**20] * 2, "unknown"),
        ("stage", [0.0, None], "column 'stage': 1 values are missing"),
        ("mc", [0, 65535], "2 rows are too few for 1 steps of 1 dp ranks × 1 stages × 65536 chunks"),
    ],
)
def test_hostile_parquet(column: str, values: list[Any], message: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    frame = trace_of(usual(1, 0, 0)).head(2)
    frame.assign(**{column: values}).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(UserError, match=message) as caught:
        read_op_trace(tmp_path / "x.parquet")
    assert len(str(caught.value)) < 3000


def test_an_op_that_is_there_twice(tmp_path: Path) -> None:
    frame = trace_of(usual(1, 0, 0))
    with pytest.raises(UserError, match="another op of this type, step and rank has the same number"):
        replayed(pd.concat([frame, frame.tail(1)]), tmp_path)


def test_workers_and_steps_need_rows(tmp_path: Path) -> None:
    """Otherwise a small file could ask for much memory."""
    frame = trace_of(usual(1, 0, 0)).head(1)
    rows = [frame.assign(step=number, dp_rank=number, stage=number, rank=number) for number in range(9)]
    with pytest.raises(UserError, match="9 rows are too few for 9 steps of 9 dp ranks × 9 stages × 1 chunks"):
        replayed(pd.concat(rows), tmp_path)


def test_parquet_is_read_as_csv_is(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    frame = trace_of(usual(2, 0, 1), dp=2, pp=2, microbatches=2, steps=(1, 2))
    frame.loc[frame.gmc < 0, ["mc", "gmc"]] = None  # as much as −1
    types = {"optype": "category", "start_ts": "float32", "stage": "int8", "mc": "Int8"}
    frame.astype(types).to_parquet(tmp_path / "trace.parquet")
    frame.to_csv(tmp_path / "trace.csv", index=False)
    first, second = (read_op_trace(tmp_path / f"trace.{ending}") for ending in ("parquet", "csv"))
    for column, other in zip(first, second, strict=True):
        assert (column == other).all()
    waits = waits_of(first)
    assert len(waits.before) == len(waits.after) > 0
    assert set(first.model_chunk.tolist()) == {-1, 0, 1}


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"pip install 'shardyard\[parquet\]'"):
        read_op_trace(tmp_path / "x.parquet")


def test_the_command_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    trace_of(usual(2, 1, 1), dp=2, pp=2, microbatches=2, steps=(1, 2)).to_csv(path, index=False)
    result = CliRunner().invoke(shardyard.main, ["straggler", str(path), "--steps", "--plot", str(tmp_path / "map.png")])
    assert result.exit_code == 0, result.output
    assert "2 steps, dp 2 × pp 2" in result.output
    assert "rank 3 (dp rank 1, stage 1): alone it makes a step" in result.output
    assert (tmp_path / "map.png").stat().st_size > 1000
    result = CliRunner().invoke(shardyard.main, ["straggler", str(path), "--json"])
    data = json.loads(result.stdout)
    assert data["slowdown"] == data["by_step"][0]["slowdown"] > 1
    assert data["worst"]["rank"] == 3
    assert list(data["by_dp_rank"]) == ["1", "0"]


def test_the_example_is_as_published() -> None:
    """Job "ST" of github.com/ByteDance-Seed/StragglerAnalysis 8efcd7f, data/result-ST.json, ms-ST.json and mw-ST.json."""
    pytest.importorskip("pyarrow")
    trace = Path(__file__).parents[3] / "examples/traces/uneven-stages.parquet"
    data = json.loads(CliRunner().invoke(shardyard.main, ["straggler", str(trace), "--json"]).stdout)
    assert data["step_seconds"] == pytest.approx(
        {
            "measured": 2.2144477888941765,
            "with_launch_delays": 2.2144477888941765,
            "without_launch_delays": 2.172696813310722,
            "without_stragglers": 1.843295824372035,
        },
        rel=1e-6,
    )
    assert data["slowdown"] == pytest.approx(1.1787021836556841, rel=1e-6)
    assert {name: part["slowdown"] for name, part in data["by_stage"].items()} == pytest.approx(
        {"3": 1.2322559543157936, "0": 0.9980450635272368, "1": 0.9830562530894704, "2": 0.9824931309511952}, rel=1e-6
    )
    assert data["by_op_type"]["forward-compute"]["slowdown"] == pytest.approx(1.0874989663025318, rel=1e-6)
    assert data["last_stage"]["share"] == pytest.approx(1.2193563788811714, rel=1e-5)
    assert data["slowest_workers"]["share"] == pytest.approx(0.031404269124045224, rel=1e-5)
    assert (data["spread"]["workers"], data["spread"]["cost"]) == pytest.approx((0.0043, 0.0014), abs=5e-5)
    assert (data["spread"]["ops"], data["spread"]["cost_of_ops"]) == pytest.approx((0.0272, 0.0017), abs=5e-5)
    assert (data["worst"]["kind"], data["worst"]["name"]) == ("stage", "3")
    assert set(data) == {
        *("trace", "ops", "dp", "pp", "workers", "slowdown", "launch_slowdown", "step_seconds", "worst", "last_stage"),
        *("slowest_workers", "microbatches", "spread", "by_op_type", "by_dp_rank", "by_stage", "by_worker", "by_step"),
        *("notes", "steps_left_out"),
    }


PUBLISHED = Path(__file__).parents[4] / "shared/data/stragglers"


@pytest.mark.parametrize("name", ["AR", "ST"])
def test_published_traces(name: str) -> None:
    """github.com/ByteDance-Seed/StragglerAnalysis 8efcd7f (Apache-2.0): every figure of its results."""
    pytest.importorskip("pyarrow")
    trace = PUBLISHED / f"trace-{name}.parquet"
    if not trace.exists():
        pytest.skip("the traces are not at hand")
    theirs, last, slowest = (json.loads((PUBLISHED / f"{kind}-{name}.json").read_text()) for kind in ("result", "ms", "mw"))
    answer = analyse(read_op_trace(trace), name)
    steps = [str(step) for step in answer.steps]
    for key, times in (("step_t_base", answer.measured), ("step_t_nodelay", answer.replayed), ("step_t_noblk", answer.ideal)):
        assert times == pytest.approx([theirs[key][step] for step in steps], rel=1e-6)
    assert answer.slowdown == pytest.approx(theirs["blocking_slowdown"], rel=1e-6)
    for kind, parts in (("dp_rank", answer.dp_ranks), ("stage", answer.stages), ("optype", answer.op_types)):
        assert {part.name: part.slowdown for part in parts} == pytest.approx(theirs[f"blocking_decompose_by_{kind}"], rel=1e-6)
        per_step = theirs[f"blocking_decompose_by_{kind}_per_step"]
        for part in parts:
            assert part.per_step == pytest.approx([per_step[step][part.name] for step in steps], rel=1e-5)
    stage = next(part for part in answer.stages if part.name == str(len(answer.stages) - 1))
    assert (stage.fixed, stage.share) == pytest.approx((last["trem"], last["Ms"]), rel=1e-5)
    assert (answer.slowest_part.fixed, answer.slowest_part.share) == pytest.approx((slowest["trem"], slowest["Mw"]), rel=1e-5)


def test_a_file_of_another_kind_is_no_trace(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: llama-3.1-8b\n")
    with pytest.raises(UserError, match=r"job.yaml: is no trace: must end in .parquet or .csv \(a row per op\), or .json"):
        reading.analysed([file], "job.yaml")
