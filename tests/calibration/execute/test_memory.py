"""The simulator's peak memory, with `kernels: torch`, against all tensors that are alive in a step of PyTorch's own parts.

`Holding` equals the allocator's level in PyTorch's profiler to the byte where no operator has workspace of its own. What PyTorch
does by default, such as gradients that are freed between steps and DDP's buckets beside them, is the plan's default.
"""

from __future__ import annotations

from typing import Any

import pytest

from sim.analysis.memory import ledger
from sim.engine.player import run
from strategies.lowering.lower import lower
from tests.calibration.execute.conftest import LLAMA_FIELDS, UNITS
from topologies.reading import UserError

GPT: dict[str, Any] = {"name": "gpt", "hidden": 64, "layers": 2, "heads": 8, "vocabulary": 512, "context": 128}
LLAMA = GPT | LLAMA_FIELDS
FEW_TOKENS = LLAMA | {"hidden": 128, "kv_heads": 8, "ffn": 512, "layers": 6, "vocabulary": 64, "context": 32}
PLAN: dict[str, Any] = {"precision": "fp32", "microbatch": 4}
ZRO = {"data_parallel": "zero_redundancy_optimizer"}
ONCE = {"data_parallel": "zero3", "gradient_sync": "last"}
TP_SP = {"tp": 4, "sequence_parallel": True}
KEPT_UNITS = tuple(dict.fromkeys(kept, True) for kept in UNITS)
DEEP = LLAMA | {"layers": 4}
PIPELINE = {"pp": 2, "accumulation": 4, "microbatch": 1}


@pytest.fixture
def peak(toy_job, toy_prices):
    """peak(model, gpus, stage=0, **plan): bytes that a rank of the stage holds at most in a simulated step."""

    def simulate(model: dict[str, Any], gpus: int, stage: int = 0, **plan: Any) -> float:
        if plan.get("data_parallel") == "zero3":  # rehearsed on a CPU, where FSDP2 waits for every collective
            plan |= {"overlap": False}
        job = toy_job(gpus, 1, model, **PLAN | {"kernels": "torch"} | plan)
        return ledger(run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices()), stage).peak

    return simulate


@pytest.mark.parametrize(
    ("model", "gpus", "plan"),
    [
        (GPT, 1, {}),
        (LLAMA, 1, {}),
        (GPT, 1, {"attention": "materialised"}),
        (LLAMA, 1, {"recompute": "full"}),
        (FEW_TOKENS, 1, {}),  # the peak is not at the loss: gradients grow while activations shrink
        (GPT, 4, {}),  # DDP
        (LLAMA, 4, {"accumulation": 2}),
        (FEW_TOKENS, 4, {}),
        (FEW_TOKENS, 4, {"bucket": "64 KiB"}),  # cut inside layers
        (LLAMA, 4, ZRO),
        (FEW_TOKENS, 3, ZRO | {"accumulation": 2}),
        (GPT, 4, {"data_parallel": "zero3"}),  # FSDP2
        (LLAMA, 4, {"data_parallel": "zero3"}),
        (LLAMA, 4, {"data_parallel": "zero3", "reshard": False}),
        (LLAMA, 4, {"data_parallel": "zero3", "accumulation": 2}),
        (FEW_TOKENS, 4, ONCE | {"accumulation": 3}),
        (FEW_TOKENS, 4, ONCE | {"accumulation": 3, "reshard": False}),
        (FEW_TOKENS, 4, ONCE | {"accumulation": 3, "reshard_after_backward": True}),
        (LLAMA, 4, ONCE | {"accumulation": 3, "reshard_after_backward": True}),
        (LLAMA, 3, {"data_parallel": "zero3"}),  # rows that ranks do not divide
        (FEW_TOKENS, 3, {"data_parallel": "zero3"}),
        (FEW_TOKENS, 8, {"data_parallel": "zero3", "shard": 4}),  # HSDP
        (FEW_TOKENS, 4, {"data_parallel": "zero3"}),  # gathered parameters and whole gradients weigh more than activations
        (FEW_TOKENS, 4, {"data_parallel": "zero3", "reshard": False}),
        (FEW_TOKENS, 4, {"data_parallel": "zero3", "recompute": "full"}),
        *((model, 4, {"data_parallel": "zero3"} | kept) for model in (GPT, LLAMA, FEW_TOKENS) for kept in KEPT_UNITS),
        (FEW_TOKENS, 4, ONCE | {"accumulation": 3, "reshard_after_backward": True} | KEPT_UNITS[-1]),
        (FEW_TOKENS, 4, ONCE | {"accumulation": 3} | KEPT_UNITS[0]),
        (GPT, 4, {"data_parallel": "zero3", "recompute": "full"}),  # the loss is over when parameters are gathered
        (GPT, 4, {"tp": 4}),
        (LLAMA, 4, {"tp": 4}),
        (LLAMA, 4, TP_SP),
        (LLAMA, 8, {"tp": 4}),
        (LLAMA, 8, TP_SP | {"data_parallel": "zero3"}),
    ],
)
def test_peaks(peak, rehearse, model, gpus, plan) -> None:
    assert peak(model, gpus, **plan) == pytest.approx(rehearse(model, gpus, **PLAN | plan).peak, rel=0.05)


BUCKETS, PASSES = (FEW_TOKENS, {"bucket": "64 KiB"}), (LLAMA, {"accumulation": 2})


@pytest.mark.parametrize(
    ("model", "plan", "view", "set_to_none"),
    [
        *((FEW_TOKENS, {}, view, set_to_none) for view in (True, False) for set_to_none in (True, False)),
        *((*BUCKETS, view, view) for view in (True, False)),
        *((*PASSES, view, not view) for view in (True, False)),
        *((LLAMA, ZRO, view, view) for view in (True, False)),
    ],
)
def test_peaks_of_what_becomes_of_gradients(peak, rehearse, model, plan, view, set_to_none) -> None:
    """DDP's buckets stay; gradients live there or beside them, and stay or are freed."""
    plan = plan | {"gradient_as_bucket_view": view, "set_to_none": set_to_none}
    assert peak(model, 4, **plan) == pytest.approx(rehearse(model, 4, **PLAN | plan).peak, rel=0.02)


@pytest.mark.parametrize(("gpus", "plan"), [(1, {}), (4, {"data_parallel": "zero3"}), (4, {"data_parallel": "zero3", "tp": 2})])
def test_peaks_with_gradients_that_stay(peak, rehearse, gpus, plan) -> None:
    plan = plan | {"set_to_none": False}
    assert peak(FEW_TOKENS, gpus, **plan) == pytest.approx(rehearse(FEW_TOKENS, gpus, **PLAN | plan).peak, rel=0.03)


def test_what_is_between_steps(toy_job) -> None:
    """Bytes a parameter: 4 of fp32 parameters and 8 of Adam's states; 4 of gradients that stay; 4 of DDP's buckets, if they are
    not the gradients.
    """
    held = {}
    for view in (True, False):
        for set_to_none in (True, False):
            fields = {"gradient_as_bucket_view": view, "set_to_none": set_to_none, "kernels": "torch"}
            job = toy_job(4, 1, LLAMA, precision="fp32", **fields)
            (cohort,) = lower(job.model, job.resolve()).cohorts
            held[view, set_to_none] = sum(size for _, size in cohort.resident) / job.model.parameters
    assert held == {(True, True): 16, (True, False): 16, (False, True): 16, (False, False): 20}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"set_to_none": True}, "set_to_none=true contradicts data_parallel=ddp, kernels=megatron"),
        (
            {"set_to_none": False, "data_parallel": "zero1", "kernels": "torch"},
            "set_to_none=false contradicts data_parallel=zero1",
        ),
        ({"set_to_none": True, "data_parallel": "zero3", "deepspeed": {}}, "set_to_none=true contradicts deepspeed"),
        ({"gradient_as_bucket_view": True, "kernels": "torch", "data_parallel": "zero3"}, "it is a choice of PyTorch's DDP"),
        ({"gradient_as_bucket_view": False}, "gradient_as_bucket_view=false contradicts data_parallel=ddp, kernels=megatron"),
    ],
)
def test_choices_that_mean_nothing_are_refused(toy_job, plan, message) -> None:
    with pytest.raises(UserError, match=message):
        toy_job(4, 1, **plan).resolve()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stage", [0, 1])
def test_peaks_of_pipelines(peak, rehearse, schedule, stage) -> None:
    plan = PIPELINE | {"schedule": schedule}
    assert peak(DEEP, 2, stage, **plan) == pytest.approx(rehearse(DEEP, 2, stage, **PLAN | plan).peak, rel=0.05)


def test_peak_in_the_middle_of_a_pipeline(peak, rehearse) -> None:
    plan = {"pp": 4, "accumulation": 8, "microbatch": 1}
    assert peak(DEEP, 4, 1, **plan) == pytest.approx(rehearse(DEEP, 4, 1, **PLAN | plan).peak, rel=0.05)


@pytest.mark.parametrize(("schedule", "model"), [("gpipe", DEEP), ("1f1b", FEW_TOKENS)])
@pytest.mark.parametrize("stage", [0, 1])
def test_peaks_of_sharded_pipelines(peak, rehearse, model, schedule, stage) -> None:
    """Whole gradients, and parameters from one pass to the next."""
    plan = PIPELINE | {"data_parallel": "zero3", "schedule": schedule}
    assert peak(model, 4, stage, **plan | ONCE) == pytest.approx(rehearse(model, 4, stage, **PLAN | plan).peak, rel=0.05)


def test_holding_is_what_the_profiler_sees_allocated() -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    from calibration.devices.holding import Holding
    from calibration.execute.model import Transformer, loss
    from strategies.models.model import Model

    net = Transformer(Model(**LLAMA), 128)
    tokens = torch.randint(0, 512, (1, 128))

    def step() -> None:
        loss(net(tokens), tokens).backward()
        net.zero_grad(set_to_none=False)

    step()
    with Holding() as holding:
        holding.add([tokens, *net.parameters(), *net.buffers(), *(p.grad for p in net.parameters() if p.grad is not None)])
        before = holding.held
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = sorted((e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    level = peak = 0
    for event in events:
        level += event.nbytes()
        peak = max(peak, level)
    assert holding.peak - before == peak


def test_refused(peak) -> None:
    with pytest.raises(UserError, match="kernels=torch is not simulated with recompute=selective"):
        peak(GPT, 1, recompute="selective")
