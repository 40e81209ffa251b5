"""PyTorch's ZeroRedundancyOptimizer: whole parameters have owners. Against torch's own partition, and closed forms."""

from __future__ import annotations

import pytest

from sim.analysis.breakdown import breakdown
from sim.analysis.memory import ledger
from sim.engine.player import run
from strategies.data_parallel.zero_redundancy_optimizer import most_owned
from strategies.lowering.lower import lower
from tests.conftest import LLAMA_LAYER
from topologies.reading import UserError

LLAMA = {
    "name": "llama",
    "hidden": 64,
    "layers": 3,
    "heads": 8,
    "kv_heads": 4,
    "ffn": 96,
    **LLAMA_LAYER,
    "vocabulary": 256,
    "context": 32,
}
STOCK = {"data_parallel": "zero_redundancy_optimizer", "precision": "fp32", "kernels": "torch"}


@pytest.fixture
def played(toy_job, toy_prices):
    def play(gpus: int, **plan):
        job = toy_job(gpus, 1, LLAMA, **STOCK | plan)
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())

    return play


@pytest.mark.parametrize("ranks", [2, 3, 5, 16])
def test_owners_are_those_of_torch(ranks) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.testing._internal.distributed.fake_pg import FakeStore

    sizes = [64 * 256, *[64 * 64, 64 * 32, 64 * 32, 64, 7 * 64] * 3, 64 * 256]
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        stock = ZeroRedundancyOptimizer([torch.zeros(size, requires_grad=True) for size in sizes], torch.optim.SGD, lr=0.1)
        owned = [
            sum(parameter.numel() for group in groups for parameter in group["params"])
            for groups in stock._partition_parameters()
        ]
    finally:
        dist.destroy_process_group()
    assert most_owned(tuple(sizes), ranks) == max(owned)


def test_a_large_matrix_has_one_owner(played) -> None:
    """On 16 ranks whoever owns the embedding, or the head, has Adam's two states of all of it, and nothing else."""
    assert ledger(played(16), 0).at_peak["optimizer"] == 2 * 4 * 64 * 256


def test_everybody_waits_for_the_owner_of_most(played) -> None:
    """Its update takes as long as the largest matrix has bytes; ZeRO-1 cuts it."""
    assert breakdown(played(16))["optimizer"] > 2 * breakdown(played(16, data_parallel="zero1"))["optimizer"]


def test_one_rank_has_everything(played) -> None:
    assert played(1).step == played(1, data_parallel="ddp").step


@pytest.mark.parametrize(("plan", "message"), [({"shard": 2}, "which shard=2 contradicts"), ({"ep": 2}, "ep=2 spreads experts")])
def test_refused(toy_job, plan, message) -> None:
    with pytest.raises(UserError, match=message):
        toy_job(4, 1, **STOCK | plan).resolve()
