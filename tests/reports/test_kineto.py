"""Traces in the form of PyTorch's profiler, read by Holistic Trace Analysis itself."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from calibration.readers.kineto import read_traces
from reports.kineto import write_kineto
from sim.analysis.breakdown import breakdowns
from sim.program import Collective
from sim.timeline import Timeline
from strategies.predict import simulate
from strategies.read_job import read_job

PLANS = {
    "ddp": {"data_parallel": "ddp", "accumulation": 2},
    "zero3": {"data_parallel": "zero3", "accumulation": 2},
    "tensor": {"tp": 4, "sequence_parallel": True, "data_parallel": "zero1", "accumulation": 2},
    "pipeline": {"pp": 4, "tp": 2, "accumulation": 6},
}


def step(plan: dict[str, object]) -> Timeline:
    return simulate(read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=2, plan={"auto": False, "sequence": 2048, **plan}))


def compute_and_idle(parts: dict[str, float]) -> tuple[float, float]:
    """Of our breakdown: seconds of kernels that compute, and in which nothing runs."""
    compute = sum(parts[name] for name in ("forward", "backward", "recompute", "optimizer", "slowdown"))
    return compute, parts["bubble"] + parts["wait"] + parts["launch"]


@pytest.mark.parametrize("name", PLANS)
def test_kernels_add_up_to_the_breakdown(name: str, tmp_path: Path) -> None:
    """Computing kernels do not overlap, and last as long as the breakdown says."""
    timeline = step(PLANS[name])
    for path, parts in zip(write_kineto(timeline, tmp_path), breakdowns(timeline), strict=True):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        kernels = [each for each in events if each["cat"] == "kernel"]
        computing = sum(each["dur"] for each in kernels if not each["name"].startswith("nccl")) / 1e6
        assert computing == pytest.approx(compute_and_idle(parts)[0], abs=parts["launch"] + 1e-6)
        launches = {each["args"]["correlation"]: each for each in events if each["cat"] == "cuda_runtime"}
        launched = [each for each in kernels if each["args"].get("Collective name") != "recv"]
        assert all(launches[each["args"]["correlation"]]["ts"] <= each["ts"] + 1e-3 for each in launched)


@pytest.mark.parametrize("name", PLANS)
def test_hta_says_what_we_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temporal breakdown of each rank: computing, idle and neither, within 1 % of the step."""
    pytest.importorskip("hta", reason="needs pip install HolisticTraceAnalysis")
    from hta.trace_analysis import TraceAnalysis

    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    timeline = step(PLANS[name])
    write_kineto(timeline, tmp_path)
    rows = TraceAnalysis(trace_dir=str(tmp_path)).get_temporal_breakdown(visualize=False).set_index("rank")
    assert len(rows) == len(timeline.lanes)
    for lane, parts in zip(timeline.lanes, breakdowns(timeline), strict=True):
        row = rows.loc[lane.rank]
        compute, idle = compute_and_idle(parts)
        before = timeline.step - row["kernel_time(us)"] / 1e6  # HTA counts from the first kernel to the last
        assert row["compute_time(us)"] / 1e6 == pytest.approx(compute, abs=0.01 * timeline.step)
        assert row["idle_time(us)"] / 1e6 + before == pytest.approx(idle, abs=0.01 * timeline.step)
        assert row["non_compute_time(us)"] / 1e6 == pytest.approx(timeline.step - compute - idle, abs=0.01 * timeline.step)


SHARES = {  # what a rank's collectives are, by hand: 32 layers, 2,048 tokens of 4,096 values in bf16
    "tensor": {
        ("all_gather", 4, 1, 2048 * 4096 * 2): 32,
        ("reduce_scatter", 4, 1, 2048 * 4096 * 2): 32,
    },
    "pipeline": {("all_reduce", 2, 1, 2048 * 4096 * 2): 8, ("send", 2, 1, 2048 * 4096 * 2): 1},
}


@pytest.mark.parametrize("name", SHARES)
def test_collectives_are_read_as_those_of_real_traces(name: str, tmp_path: Path) -> None:
    """Operation, ranks, nodes and bytes; each call is a kernel of its own, at least one in every layer."""
    timeline = step(PLANS[name])
    paths = write_kineto(timeline, tmp_path)
    traced = read_traces(paths, per_node=8)
    assert traced.ranks == len(timeline.lanes)
    kernels = [
        event
        for event in json.loads(gzip.decompress(paths[0].read_bytes()))["traceEvents"]
        if event["args"].get("Collective name") not in (None, "recv")
    ]
    rows = {(row.operation, row.ranks, row.nodes, row.bytes): row.seconds for row in traced.rows}
    for key, least in SHARES[name].items():
        assert rows[key] > 0
        same = [each for each in kernels if 2 * max(each["args"]["In msg nelems"], each["args"]["Out msg nelems"]) == key[3]]
        assert len(same) >= 2 * least
    assert all(int(event["args"]["Process Group Ranks"][1]) == 0 for event in kernels)  # rank 0 is the first of its groups


def test_a_profile_of_a_simulated_trace_has_its_prices(tmp_path: Path) -> None:
    """The way there and back: every collective that is read takes what the profile says, without contention."""
    timeline = step({"data_parallel": "zero3", "microbatch": 1, "overlap": False})
    traced = read_traces(write_kineto(timeline, tmp_path), per_node=8)
    alone = {
        (op.work.operation, op.work.bytes): timeline.op_costs.collective(op.work, 0).alone / op.work.repeat
        for _, op in timeline.ops(0)
        if isinstance(op.work, Collective)
    }
    assert {(row.ranks, row.nodes) for row in traced.rows} == {(16, 2)}
    assert len(traced.rows) > 2
    for row in traced.rows:
        assert row.seconds == pytest.approx(alone[row.operation, row.bytes], rel=1e-3)
