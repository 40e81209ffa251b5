"""Advice is what the simulations say: the winner fits and is the fastest that does; the questions have the right answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

import shardyard
from reports.tables.advice import advice, verdict
from sim.analysis.summary import summarise
from strategies.planner.advise import advise
from strategies.planner.applicable import applicable
from strategies.planner.auto_plan import quick_way
from strategies.planner.bounds.every_plan import least
from strategies.planner.fixes import fixes
from strategies.planner.search.candidates import candidates
from strategies.planner.search.site import started
from strategies.planner.search.space import default_space
from strategies.predict import predict, prices_of
from tests.conftest import SMALL
from topologies.costs import mean_rates


def advised(**given):
    return advise(shardyard.read_job(**given), predict)


def test_a_model_that_fits_one_gpu() -> None:
    """GPT-2 1.5B: 16 bytes per parameter are 25 GB, which an A100 of 80 GB holds; nobody needs tensor parallelism."""
    proposed = advised(model="gpt2-1.5b", cluster="dgx-a100")
    answers = dict(proposed.questions)
    assert answers["fits one GPU"].startswith("yes")
    assert proposed.best is not None
    assert "TP" not in proposed.best.name
    assert "PP" not in proposed.best.name
    rates = [candidate.summary.tokens_per_second for candidate in proposed.candidates if candidate.summary.fits]
    assert rates == sorted(rates, reverse=True)


def test_a_model_that_needs_its_states_sharded() -> None:
    """Llama-3.1 8B: 128 GB of states fit no GPU, but a node: DDP is not among those that fit."""
    asked = {"model": "llama-3.1-8b", "cluster": "dgx-h100"}
    proposed = advised(**asked)
    answers = dict(proposed.questions)
    assert answers["fits one GPU"].startswith("no")
    assert answers["fits one node when everything is sharded"].startswith("yes")
    fits = {candidate.name: candidate.summary.fits for candidate in proposed.candidates}
    assert not any(fit for name, fit in fits.items() if name.startswith("DDP"))
    assert any(fit for name, fit in fits.items() if name.startswith("ZeRO-3"))
    text = verdict(proposed, shardyard.read_job(**asked))
    assert "8 GPUs), 32 sequences of 8,192 tokens: " in text
    assert "faster than" in text


def test_questions_are_answered_by_one_gpu_and_by_one_node() -> None:
    """Full recomputation and one microbatch, on 1 GPU as it is and on the 8 of a node with everything sharded."""
    job = shardyard.read_job(model="gpt2-1.5b", cluster="dgx-a100", nodes=2)
    played = []

    def answer(asked):
        if asked.plan.recompute == "full" and asked.plan.accumulation == 1:
            played.append((asked.cluster.nodes, asked.cluster.node.gpus, asked.cluster.node.nics, asked.plan.data_parallel))
        return summarise(shardyard.simulate(asked))

    questions = dict(advise(job, answer).questions)
    assert played[:2] == [(1, 1, 0, "ddp"), (1, 8, 8, "zero3")]
    gpu, largest, node = (float(text.split()[1]) for text in questions.values())
    assert largest < gpu  # the embedding alone against the whole model
    assert node < gpu
    assert [text.split(" of ")[1] for text in questions.values()] == ["85.1 GB"] * 3


def test_nothing_fits() -> None:
    result = CliRunner().invoke(
        shardyard.main,
        [
            "advise",
            "--model",
            "llama-3.1-405b",
            "--cluster",
            "dgx-h100",
            "--set",
            "plan.sequence=8192",
            "--set",
            "model.layers=64",
            "--json",
        ],
    )
    assert result.exit_code == 2
    answer = json.loads(result.stdout)
    assert not any(candidate["fits"] for candidate in answer["candidates"])
    needed = [candidate["memory_peak"] for candidate in answer["candidates"]]
    assert needed == sorted(needed)
    assert answer["fixes"]
    assert all("nodes=" in fix for fix in answer["fixes"])  # 64 of its layers are 206 B parameters: too many for the CPUs, too


def test_what_fits_only_with_the_help_of_the_cpus() -> None:
    """Turing-NLG 17.2B in mixed precision: 16 bytes per parameter, 275 GB, are too many for two GPUs of 80 GB, of which 2 remain
    with the optimizer's states and the gradients on the CPUs (ZeRO-Offload, arXiv:2101.06840).
    """
    given = {
        "model": "turing-nlg-17b",
        "cluster": {"based_on": "dgx-a100", "node": {"gpus": 2, "nics": 2}},
        "plan": {"auto": False, "global_batch": 8},
    }
    proposed = advised(**given)
    assert proposed.best is not None
    assert "CPUs" in proposed.best.name
    assert not any(candidate.summary.fits for candidate in proposed.candidates if "CPUs" not in candidate.name)
    job = shardyard.read_job(**given | {"plan": {"global_batch": 8, "data_parallel": "zero2"}})

    def answer(changed):
        return summarise(shardyard.simulate(changed))

    assert "offload={optimizer: cpu" in " ".join(map(str, fixes(job, answer(job), answer)))


@pytest.mark.parametrize(("sequence", "shared"), [(8192, False), (16384, True)])
def test_long_sequences_may_be_shared(sequence: int, shared: bool) -> None:
    cluster = {"based_on": "dgx-h100", "node": {"gpus": 2, "nics": 2}}
    model = "llama-3.1-8b"
    job = shardyard.read_job(
        model=model, cluster=cluster, plan={"auto": False, "sequence": sequence}, overrides={"model.layers": 2}
    )
    proposed = advise(job, lambda changed: summarise(shardyard.simulate(changed)))
    assert any(candidate.name.startswith("CP2") for candidate in proposed.candidates) == shared


@pytest.mark.parametrize("offload", [None, {"optimizer": "cpu", "parameters": "cpu"}], ids=str)
def test_bounds_of_activations_on_the_cpus(offload) -> None:
    """Of 12 layers 2 keep theirs on the GPU; bounds of such a plan are never more than what is simulated, and not far."""
    plan = {"sequence": 8192, "data_parallel": "zero3", "offload": offload, "offload_activations": 10, "global_batch": 8}
    job = shardyard.read_job(None, model=SMALL | {"layers": 12, "context": 8192}, cluster="dgx-a100", plan=plan)
    summary, (step, memory) = predict(job), least(job, prices_of(job))
    assert 0.25 * summary.step_seconds < step <= summary.step_seconds
    assert 0 < memory <= summary.worst.peak


def test_a_batch_that_nothing_divides_is_a_mistake() -> None:
    with pytest.raises(shardyard.UserError, match="set global_batch"):
        advised(model="gpt2-1.5b", cluster="dgx-a100", plan={"global_batch": 1, "microbatch": 2})


def test_experts_may_be_spread() -> None:
    """The questions are about one GPU, which has no expert parallelism; the candidates keep it where it divides dp."""
    proposed = advised(model="mixtral-8x7b", cluster="dgx-h100", nodes=2, plan={"ep": 8, "imbalance": 1.1, "sequence": 1024})
    assert dict(proposed.questions)["fits one GPU"].startswith("no")
    assert proposed.candidates


def pretended(fits: bool):
    """An answer without a simulation: every plan takes a second, and fits or not."""
    worst = SimpleNamespace(peak=1.0)
    rate = {"step_seconds": 1.0, "tokens_per_second_per_gpu": 1.0}
    return lambda job: SimpleNamespace(fits=fits, fits_with=lambda _: fits, worst=worst, **rate)


def test_a_microbatch_that_fits_with_recomputation_only_says_both() -> None:
    """Of plans that fit with recomputation and take half as long with twice the microbatch."""
    job = shardyard.read_job(model="gpt2-1.5b", cluster="dgx-h100", plan={"auto": False, "global_batch": 16})

    def answer(changed):
        summary = pretended(changed.plan.recompute == "full")(changed)
        return SimpleNamespace(**vars(summary) | {"step_seconds": 1.0 / changed.plan.microbatch})

    names = [candidate.name for candidate in advise(job, answer, depth=1).candidates]
    assert "DDP + recompute, microbatch 2" in names


LONG = {"sequence": 131072, "tp": 8, "sequence_parallel": True}
JOBS = [
    {"model": "llama-3.1-70b", "nodes": 4, "plan": {"tp": 8, "sequence_parallel": True, "overlap_tp": "pieces", "microbatch": 8}},
    {"model": "llama-3.1-70b", "nodes": 4, "plan": {"pp": 4, "schedule": "gpipe", "layers_per_stage": [18, 22, 22, 18]}},
    {
        "model": "llama-3.1-8b",
        "nodes": 2,
        "plan": {
            "data_parallel": "zero3",
            "reshard": False,
            "recompute": "full",
            "recompute_method": "block",
            "recompute_layers": 2,
            "accumulation": 3,
        },
    },
    {"model": "llama-3.1-8b", "nodes": 2, "plan": LONG | {"order": "tp-cp-pp-ep-dp"}},
    {"model": "mixtral-8x7b", "nodes": 2, "plan": {"ep": 8, "imbalance": 1.1, "sequence": 4096}},
    {"model": "llama-3.1-8b", "nodes": 1, "plan": {"data_parallel": "zero1", "deepspeed": {"allgather_bucket_size": 1000000}}},
    {
        "model": "llama-3.1-405b",
        "nodes": 2,
        "overrides": {"model.hidden": 32768, "model.ffn": 131072},
        "plan": {"auto": False, "sequence": 4096},
    },
    {"model": "llama-3.1-8b", "nodes": 2, "plan": {"data_parallel": "zero3", "fp8": {"gather": True}, "fused_optimizer": False}},
]


@pytest.mark.parametrize("given", JOBS, ids=lambda given: ",".join(given["plan"]))
def test_every_candidate_is_a_plan_of_the_space_that_plan_searches(given) -> None:
    job = started(shardyard.read_job(cluster="dgx-h100", **given))
    axes = [
        [{field.removeprefix("plan."): value for field, value in choice.items()} for choice in axis.choices]
        for axis in candidates(job, default_space(job)).axes
    ]
    fitting, others = (advise(job, pretended(fits)).candidates for fits in (True, False))
    assert min(len(fitting), len(others)) > 4
    for candidate in (*fitting, *others):
        plan: dict[str, object] = {}
        for choices in axes:
            (chosen,) = [
                choice for choice in choices if all(getattr(candidate.job.plan, name) == choice[name] for name in choice)
            ]
            plan |= chosen
        assert applicable(job, plan).job.plan.model_dump() == candidate.job.plan.model_dump(), candidate.name


def test_what_does_not_apply_to_a_candidate_is_left_out_and_said() -> None:
    """A job with tensor and sequence parallelism is no reason not to try FSDP."""
    given = {"model": "llama-3.1-8b", "cluster": "dgx-h100", "plan": {"tp": 8, "sequence_parallel": True}}
    proposed = advised(**given)
    fsdp = next(candidate for candidate in proposed.candidates if candidate.name.startswith("ZeRO-3 (FSDP)"))
    assert (fsdp.job.plan.tp, fsdp.job.plan.sequence_parallel, fsdp.dropped) == (1, False, ("sequence_parallel",))
    assert "the job's plan" in [candidate.name for candidate in proposed.candidates]
    own = shardyard.read_job(**given)
    screen = "\n".join(map(str, advice(proposed, own, mean_rates(own.cluster, None), 1e12).renderables))
    assert "plan.sequence_parallel=true does not apply to, and is left out of: " in screen


def test_the_shipped_example_that_a_job_with_tensor_parallelism_never_tried() -> None:
    """examples/llama-3.1-70b-zero3.yaml is one of the ways to train examples/llama-3.1-70b.yaml, and not slower than the best."""
    job, other = (shardyard.read_job(f"examples/{name}.yaml") for name in ("llama-3.1-70b", "llama-3.1-70b-zero3"))
    proposed = advise(job, predict, depth=1)  # without pipelines, which take long
    assert proposed.best is not None
    assert proposed.best.summary.step_seconds <= predict(other).step_seconds


@pytest.mark.parametrize("cluster", ["pcie-l40s", "dgx-1v", "mi300x", "examples/clusters/nvlink-pairs.yaml", "dgx-h100"])
def test_one_gpu_is_taken_out_of_a_node_however_it_is_wired(cluster: str) -> None:
    """A PCIe tree, a cube mesh, a full mesh and a drawn graph have no form with one GPU; its memory needs no links."""
    plan = {"global_batch": 64, "sequence": 128, "precision": "fp16", "data_parallel": "ddp"}
    job = shardyard.read_job(model="gpt2-1.5b", overrides={"model.layers": 2}, cluster=cluster, plan=plan)
    questions = dict(advise(job, predict, depth=1).questions)
    assert [text.partition(":")[0] for text in questions.values()] == ["yes", "yes", "yes"]


def test_accelerators_that_only_a_torus_joins_make_no_node() -> None:
    plan = {"global_batch": 256, "sequence": 128, "data_parallel": "ddp"}
    job = shardyard.read_job(
        model="gpt2-1.5b", overrides={"model.layers": 2}, cluster="examples/clusters/tpu-v5e-pod.yaml", plan=plan
    )
    assert [question for question, _ in advise(job, predict, depth=1).questions][-1].endswith("everything else is elsewhere")


@pytest.mark.parametrize(("own", "slower"), [("ddp", ["PP16 + ZeRO-1"]), ("zero1", [])])
def test_long_pipelines_that_are_proven_slower_than_what_is_shown_are_not_simulated(own: str, slower: list[str]) -> None:
    """The others are those of all ways simulated, in their order; the job's own plan is one way, whatever it is called."""
    plan = {"global_batch": 64, "sequence": 512, "pp": 16, "data_parallel": own}
    job = shardyard.read_job(model="gpt2-1.5b", cluster="dgx-a100", nodes=4, overrides={"model.layers": 16}, plan=plan)
    every, some = advise(job, predict), advise(job, predict, shown=3)
    assert list(some.slower) == slower
    names = [each.name for each in every.candidates]
    assert {"PP16 + ZeRO-1"} <= set(names[3:])
    assert [each.name for each in some.candidates] == [name for name in names if name not in slower]


def test_a_schedule_that_the_small_space_has_not_stays() -> None:
    plan = {"global_batch": 64, "sequence": 128, "schedule": "interleaved-zb"}
    job = shardyard.read_job(model="gpt2-1.5b", overrides={"model.layers": 4}, cluster="dgx-h100", plan=plan)
    assert len(list(quick_way(job))) == 1  # without a pipeline no schedule applies; with none to try it was an IndexError


def test_workers_have_ways_before_the_last_is_known() -> None:
    """What `quick_way` looks for takes a sixth of the work of `advise`, by itself."""
    order: list[str] = []

    def run(way: Callable[..., Any], ways: Iterable[Any]) -> Iterator[Any]:
        for name, changes in ways:
            order.append(name)
            yield way((name, changes))

    def more() -> Iterator[tuple[str, dict[str, Any]]]:
        order.append("looked for")
        yield "more", {"data_parallel": "zero1", "microbatch": 1}

    job = shardyard.read_job(model="gpt2-1.5b", cluster="dgx-a100", overrides={"model.layers": 2, "cluster.node.gpus": 2})
    advise(job, predict, run, more=more())
    assert order.index("DDP") < order.index("looked for") < order.index("more")
