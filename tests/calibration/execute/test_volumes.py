"""What the simulator says that a rank sends, against what PyTorch's own DDP, FSDP2, ZeRO, tensor parallelism and pipelines send.

PyTorch runs as one rank of a fake process group; every operation of torch.distributed in its step is counted. Equal to the byte,
per axis, except where a test says what PyTorch does otherwise and by how much.
"""

from __future__ import annotations

from typing import Any

import pytest

from sim.analysis.volume import volumes
from sim.engine.player import run
from strategies.lowering.lower import lower
from strategies.models.model import Model
from tests.calibration.execute.conftest import GPT, LLAMA, UNITS

PLAN: dict[str, Any] = {"precision": "fp32", "microbatch": 2}
ONCE = {"data_parallel": "zero3", "accumulation": 3, "gradient_sync": "last"}
KEPT_UNITS = tuple({"kernels": "torch"} | dict.fromkeys(kept, True) for kept in UNITS)
TP = {"tp": 4, "kernels": "torch"}  # gathers nothing twice; recomputation stops before the last product and its sum


@pytest.fixture
def sent(toy_job, toy_prices):
    """sent(model, gpus, stage=0, **plan): bytes by axis that a rank of the stage sends in a simulated step, but for the number
    that Megatron-LM's ranks add up for the norm of gradients, which is not counted of PyTorch's either.
    """

    def simulate(model: dict[str, Any], gpus: int, stage: int = 0, **plan: Any) -> dict[str, float]:
        job = toy_job(gpus, 1, model, algorithm="ring", **PLAN | {"clip_gradients": False} | plan)
        timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
        return {axis: size for axis, (size, _) in volumes(timeline)[stage].items()}

    return simulate


@pytest.mark.parametrize(
    ("model", "gpus", "plan"),
    [
        (GPT, 1, {}),
        (GPT, 4, {}),  # DDP
        (LLAMA, 4, {"accumulation": 3}),
        (LLAMA, 4, {"data_parallel": "zero3"}),  # FSDP2
        (GPT, 4, {"data_parallel": "zero3"}),  # its tied head is in the root's unit, gathered with the embedding
        (LLAMA, 4, {"data_parallel": "zero3", "accumulation": 2}),
        (LLAMA, 4, {"data_parallel": "zero3", "reshard": False}),
        (LLAMA, 4, ONCE),
        (GPT, 4, ONCE),
        (LLAMA, 4, ONCE | {"reshard": False}),
        (LLAMA, 4, ONCE | {"reshard_after_backward": True}),
        (GPT, 4, ONCE | {"reshard_after_backward": True}),
        (LLAMA, 4, ONCE | {"reshard": False, "reshard_after_backward": True}),
        (LLAMA, 4, {"data_parallel": "zero3", "recompute": "full"}),
        *((model, 4, {"data_parallel": "zero3", "accumulation": 2} | kept) for model in (GPT, LLAMA) for kept in KEPT_UNITS),
        (LLAMA, 4, ONCE | KEPT_UNITS[-1]),
        (LLAMA, 4, ONCE | KEPT_UNITS[-1] | {"reshard_after_backward": True}),
        (LLAMA, 8, {"data_parallel": "zero3", "shard": 4}),  # HSDP
        (LLAMA, 64, {"data_parallel": "zero3", "shard": 8}),
        (GPT, 4, {"tp": 4}),
        (LLAMA, 2, {"tp": 2}),
        (LLAMA, 8, {"tp": 4}),  # DDP × TP
        (LLAMA, 8, {"tp": 4, "data_parallel": "zero3"}),  # FSDP2 × TP
        (LLAMA, 4, TP | {"sequence_parallel": True}),
        (GPT, 4, TP | {"recompute": "full"}),
        (LLAMA, 4, TP | {"sequence_parallel": True, "recompute": "full"}),
        (LLAMA, 4, TP | {"sequence_parallel": True, "recompute": "full", "early_stop": False}),
    ],
)
def test_volumes(sent, rehearse, model, gpus, plan) -> None:
    assert sent(model, gpus, **plan) == rehearse(model, gpus, **PLAN | plan).sent


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_volumes_of_pipelines(sent, rehearse, schedule, stage) -> None:
    """The middle stage sends both ways. 2 data parallel ranks of each stage (PP × DP)."""
    plan = {"pp": 3, "accumulation": 4, "schedule": schedule}
    model = LLAMA | {"layers": 3}
    assert sent(model, 6, stage, **plan) == rehearse(model, 6, stage, **PLAN | plan).sent


@pytest.mark.parametrize(("gpus", "plan"), [(4, {}), (4, {"accumulation": 2}), (3, {})])
def test_zero_redundancy_optimizer(sent, rehearse, gpus, plan) -> None:
    """DDP all-reduces gradients (2Ψ), each rank in turn broadcasts its parameters (Ψ in all): half as much again as ZeRO-1."""
    fields = plan | {"data_parallel": "zero_redundancy_optimizer"}
    theirs, ours = rehearse(LLAMA, gpus, **PLAN | fields), sent(LLAMA, gpus, **fields)
    assert ours["dp"] == pytest.approx(theirs.sent["dp"], abs=1e-6)
    assert ours["dp"] == 1.5 * sent(LLAMA, gpus, **plan | {"data_parallel": "zero1", "kernels": "torch"})["dp"]
    count = {
        operation: sum(n for (_, name, _), n in theirs.operations.items() if name == operation)
        for _, operation, _ in theirs.operations
    }
    assert count["broadcast"] == gpus


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("stage", [0, 1])
def test_pipelining_reduces_fully_sharded_gradients_once(sent, rehearse, schedule, reshard, stage) -> None:
    """PyTorch's pipeline stages keep FSDP2's gradients whole until the last microbatch, and its parameters after a backward pass.

    In 1F1B's order F F B F B F B B the third and fourth forward and the last backward pass find them gathered.
    """
    plan = {"pp": 2, "accumulation": 4, "data_parallel": "zero3", "schedule": schedule, "reshard": reshard}
    theirs = rehearse(LLAMA, 4, stage, **PLAN | plan)
    assert sent(LLAMA, 4, stage, gradient_sync="last", **plan) == theirs.sent
    part = 4 * 512 * 64 + (4 * 64 if stage else 0)  # the embedding; head and norm
    counts = theirs.operations["dp", "all_gather", part], theirs.operations["dp", "reduce_scatter", part]
    assert counts == ((5, 1) if reshard else (1, 1))


UNEVEN = LLAMA | {"ffn": 97, "vocabulary": 513}


@pytest.mark.parametrize(
    ("model", "gpus", "plan"),
    [
        (LLAMA, 3, {}),
        (GPT, 3, {"accumulation": 2}),  # a tied head, biases
        (LLAMA, 7, {"reshard": False}),
        (UNEVEN, 4, {}),
        (UNEVEN, 6, {"shard": 3}),
        (LLAMA, 6, {"tp": 2}),
        (UNEVEN, 3, {"accumulation": 3, "gradient_sync": "last"}),
        (LLAMA, 512, {}),  # more ranks than most matrices have rows
    ],
)
def test_rows_that_ranks_do_not_divide_are_padded(sent, rehearse, model, gpus, plan) -> None:
    """FSDP2 cuts each parameter along its first dimension, padded to the next multiple of the ranks."""
    plan = {"data_parallel": "zero3", "kernels": "torch"} | plan
    theirs = rehearse(model, gpus, **PLAN | plan).sent
    assert sent(model, gpus, **plan) == theirs
    if gpus == 512:  # of every matrix of d < 512 rows, 512 are sent
        assert theirs["dp"] > 3 * 4 * Model(**model).parameters
