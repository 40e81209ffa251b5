"""Traces in the form of PyTorch's profiler, read by Holistic Trace Analysis itself."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from reports.kineto import write_kineto
from sim.analysis.breakdown import breakdowns
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
    return simulate(read_job(model="llama-3.1-8b", cluster="dgx-h100", nodes=2, plan={"sequence": 2048, **plan}))


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
