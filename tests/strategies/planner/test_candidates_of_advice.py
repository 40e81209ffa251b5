"""Which ways to train are tried, in which order, and what is kept of them: with answers that are made up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from strategies.job import Job
from strategies.planner.advise import Advice, _candidates, _contexts, advise
from strategies.read_job import read_job

PLAIN = ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3 (FSDP)"]
OFFLOADED = [f"ZeRO-{stage}, optimizer on CPUs" for stage in (1, 2, 3)] + ["ZeRO-3, everything on CPUs"]
Says = Callable[[Job], bool]


def job(nodes: int = 1, gpus: int = 4, memory: str = "999 GB", **plan: Any) -> Job:
    gpu = {"based_on": "h100-sxm", "memory": memory}
    cluster = {"based_on": "dgx-h100", "node": {"gpus": gpus, "nics": gpus, "gpu": gpu}}
    given = {"auto": False, "global_batch": 64, "sequence": 4096} | plan
    return read_job(model="llama-3.1-8b", cluster=cluster, nodes=nodes, plan=given)


def advised(
    of: Job, fits: Says, step: Callable[[Job], float] = lambda job: 1.0, comfortable: Says | None = None, **options: Any
) -> tuple[Advice, list[Job]]:
    """comfortable: with memory kept free, by default what fits."""
    asked: list[Job] = []
    comfortable = comfortable or fits

    def answer(job: Job) -> Any:
        asked.append(job)
        seconds, peak = step(job), 1e9 if fits(job) else 1e12
        speed = {"tokens_per_second": 1 / seconds, "tokens_per_second_per_gpu": 1 / seconds / job.cluster.gpus}
        held = SimpleNamespace(peak=peak)
        return SimpleNamespace(
            fits=fits(job), fits_with=lambda _: comfortable(job), step_seconds=seconds, worst=held, events=1, **speed
        )

    return advise(of, answer, **options), asked


def test_degrees_that_are_tried() -> None:
    """2 nodes of 4 GPUs: pipelines of at most as many stages as are asked for."""
    ways = dict(_candidates(job(2), 4))
    pipelines = [f"{degrees} + ZeRO-1" for degrees in ("PP2", "PP4", "TP2", "TP2 × PP2", "TP2 × PP4", "TP4", "TP4 × PP2")]
    assert list(ways) == [*PLAIN, "HSDP, shards of 4", *pipelines]
    assert ways["HSDP, shards of 4"]["shard"] == 4
    assert ways["TP2 × PP4 + ZeRO-1"] | {"tp": 2, "pp": 4, "sequence_parallel": True} == ways["TP2 × PP4 + ZeRO-1"]
    assert "sequence_parallel" not in ways["PP2 + ZeRO-1"]
    assert {way["data_parallel"] for name, way in ways.items() if name.endswith("+ ZeRO-1")} == {"zero1"}
    assert list(dict(_candidates(job(1), 1))) == [*PLAIN, "TP2 + ZeRO-1", "TP4 + ZeRO-1"]


def test_what_cannot_fit_is_not_simulated() -> None:
    """Activations of 8 sequences of all layers: bounds say so. Its variant with recomputation is asked for, and kept."""
    advice, asked = advised(job(memory="80 GB", data_parallel="zero3", microbatch=8), lambda job: True, depth=1)
    ddp = [each.plan.recompute for each in asked if each.plan.data_parallel == "ddp" and each.plan.tp == each.plan.pp == 1]
    assert "none" not in ddp[:-1]  # the last is asked whether the model fits one GPU
    assert {candidate.name for candidate in advice.candidates} >= {"DDP + recompute", "ZeRO-1 + recompute"}
    advice, asked = advised(job(data_parallel="zero3", microbatch=8), lambda job: True, depth=1)
    assert {candidate.name for candidate in advice.candidates} >= {"DDP", "ZeRO-1"}


def test_sequences_are_shared_where_each_rank_has_8192_tokens_of_one() -> None:
    assert list(_contexts(job(sequence=8192))) == []
    names = [f"{degrees} + {hook}" for degrees in ("CP2", "TP2 × CP2", "CP4") for hook in ("ZeRO-1", "ZeRO-3 (FSDP)")]
    ways = dict(_contexts(job(sequence=65536)))
    assert list(ways) == names
    assert ways["TP2 × CP2 + ZeRO-1"] | {"cp": 2, "tp": 2, "pp": 1, "sequence_parallel": True} == ways["TP2 × CP2 + ZeRO-1"]
    assert {way["cp"] for way in dict(_contexts(job(sequence=16384))).values()} == {2}


def test_recomputation_is_tried_where_a_way_does_not_fit_without() -> None:
    """And a larger microbatch as long as it fits and is faster, of ways without a pipeline."""
    advice, _ = advised(job(), lambda job: job.plan.recompute == "full" and job.plan.microbatch < 4, depth=1)
    again = [f"{name} + recompute, microbatch 2" for name in (*PLAIN, "TP2 + ZeRO-1", "TP4 + ZeRO-1")]
    plain = [name.removesuffix(", microbatch 2") for name in again]
    assert {candidate.name for candidate in advice.candidates if candidate.summary.fits} == set(
        plain
    )  # as fast with 2: not faster
    faster, _ = advised(
        job(),
        lambda job: job.plan.recompute == "full" and job.plan.microbatch < 4,
        lambda job: 1 / job.plan.microbatch,
        depth=1,
    )
    assert {candidate.name for candidate in faster.candidates if candidate.summary.fits} == set(again)


def test_pipelines_keep_their_microbatch() -> None:
    advice, asked = advised(job(), lambda job: True, lambda job: 1 / job.plan.microbatch, depth=2)
    assert {job.plan.microbatch for job in asked if job.plan.pp > 1} == {1}
    assert {candidate.name for candidate in advice.candidates if "PP" in candidate.name} == {"PP2 + ZeRO-1", "TP2 × PP2 + ZeRO-1"}
    assert {job.plan.microbatch for job in asked if job.plan.pp == 1} == {1, 2, 4}


def test_the_cpus_help_only_where_nothing_else_fits() -> None:
    fitting, _ = advised(job(), lambda job: job.plan.tp == 4, depth=1)
    assert not any("CPUs" in candidate.name for candidate in fitting.candidates)
    offloaded, _ = advised(job(), lambda job: job.plan.offload is not None, depth=1)
    helped = [candidate.name for candidate in offloaded.candidates if candidate.summary.fits]
    assert {name.removesuffix(", microbatch 2") for name in helped} == set(OFFLOADED)
    best = offloaded.best
    assert best is not None
    assert best.name == helped[0]
    none, _ = advised(job(), lambda job: False, depth=1)
    assert none.best is None


def test_two_ways_that_are_one_plan_are_named_once() -> None:
    """The job's own plan is DDP without recomputation."""
    advice, _ = advised(job(data_parallel="ddp"), lambda job: True, depth=1)
    assert len({candidate.job.hash for candidate in advice.candidates}) == len(advice.candidates)
    assert "the job's plan" not in [candidate.name for candidate in advice.candidates]
    own, _ = advised(job(data_parallel="zero1", overlap=False, order="dp-tp-pp-cp-ep", tp=2), lambda job: True, depth=1)
    assert "the job's plan" in [candidate.name for candidate in own.candidates]


def test_the_fastest_that_fits_is_the_best_and_comes_first() -> None:
    advice, _ = advised(job(), lambda job: job.plan.tp < 4, lambda job: 1.0 / job.plan.tp, depth=1)
    assert [candidate.summary.fits for candidate in advice.candidates] == sorted(
        (candidate.summary.fits for candidate in advice.candidates), reverse=True
    )
    assert advice.best is not None
    assert advice.best.name == "TP2 + ZeRO-1"


def test_questions() -> None:
    """The peak of a GPU by itself, and of a node when everything is sharded, against 80 GB (85.9 GB with 80 GiB)."""
    advice, asked = advised(job(2), lambda job: job.cluster.gpus != 1, depth=1)
    answers = dict(advice.questions)
    assert answers["fits one GPU"].startswith("no: 1,000.0 of ")
    assert answers["fits one node when everything is sharded"].startswith("yes: 1.0 of ")
    alone, node = asked[-2:]
    assert (alone.cluster.gpus, alone.plan.recompute, alone.plan.accumulation) == (1, "full", 1)
    assert (node.cluster.nodes, node.cluster.gpus, node.plan.data_parallel) == (1, 4, "zero3")
    single, _ = advised(job(gpus=1), lambda job: True, depth=1)
    assert "fits one node when everything is sharded" not in dict(single.questions)


def test_what_keeps_memory_free_comes_before_what_is_faster_and_tight() -> None:
    def with_tp(job: Job) -> bool:
        return job.plan.tp > 1

    advice, _ = advised(job(), lambda job: True, lambda job: float(job.plan.tp), comfortable=with_tp, depth=1)
    assert advice.best is not None
    assert advice.best.name == "TP2 + ZeRO-1"
    tight = [candidate.name for candidate in advice.candidates if not candidate.comfortable]
    assert [candidate.name for candidate in advice.candidates][-len(tight) :] == tight
    advice, _ = advised(job(), lambda job: job.plan.tp == 1, comfortable=lambda job: False, depth=1)
    assert advice.best is not None
    assert advice.best.job.plan.tp == 1  # where nothing keeps memory free, what fits at all
