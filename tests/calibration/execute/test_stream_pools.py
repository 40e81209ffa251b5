"""What lies in blocks of other streams than compute's, against the streams on which PyTorch's own FSDP2 makes its tensors.

A block of PyTorch's caching allocator is used again only on the stream on which it was allocated (c10/cuda/
CUDACachingAllocator.cpp: BlockComparatorSize orders by stream first, get_free_block refuses another stream's).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from sim.analysis.memory import ledger
from sim.engine.player import run
from strategies.lowering.lower import lower
from tests.calibration.execute.test_memory import FEW_TOKENS, GPT, KEPT_UNITS, LLAMA, ONCE, PLAN

ZERO3 = {"data_parallel": "zero3"}
GATHER, REDUCE = 0, 2  # as FSDPCommContext makes its streams: copy-in, all-gather, reduce-scatter, all-reduce


@pytest.fixture
def pools(monkeypatch) -> Counter[int]:
    """Most bytes of tensors made on each stream; −1: compute's. PyTorch's streams of CPUs do nothing."""
    import torch

    from calibration.devices import holding

    made: list[Any] = []
    active = [-1]
    most = Counter[int]()

    class Stream(torch.cpu.Stream):
        def __init__(self, priority: int = -1) -> None:
            super().__init__(priority)
            self.number = len(made)
            made.append(self)

    @contextlib.contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        active.append(getattr(chosen, "number", -1))
        yield
        active.pop()

    class Holding(holding.Holding):
        """By the stream that was active when a storage was first seen."""

        def __init__(self) -> None:
            super().__init__()
            self._made_on: dict[int, int] = {}
            self._of = Counter[int]()

        def _see(self, storage: torch.UntypedStorage) -> None:
            before = self.held
            super()._see(storage)
            number = self._made_on.setdefault(storage._cdata, active[-1])
            self._of[number] += self.held - before
            most[number] = max(most[number], self._of[number])

        def _gone(self, key: int) -> None:
            before = self.held
            super()._gone(key)
            self._of[self._made_on.pop(key)] += self.held - before

    monkeypatch.setattr(torch.cpu, "Stream", Stream)
    monkeypatch.setattr(torch.cpu, "stream", stream)
    monkeypatch.setattr(holding, "Holding", Holding)
    return most


@pytest.mark.parametrize(
    ("model", "gpus", "plan"),
    [
        (GPT, 4, {}),
        (FEW_TOKENS, 4, {}),
        (LLAMA, 3, {}),  # rows that ranks do not divide
        (FEW_TOKENS, 4, {"reshard": False}),
        (FEW_TOKENS, 4, {"recompute": "full"}),
        (FEW_TOKENS, 4, ONCE | {"accumulation": 2}),
        (FEW_TOKENS, 8, {"shard": 4}),  # HSDP
        *((model, 4, kept) for model in (FEW_TOKENS, LLAMA) for kept in KEPT_UNITS),
    ],
)
def test_gathers_and_gradients_have_blocks_of_their_own(pools, rehearse, toy_job, toy_prices, model, gpus, plan) -> None:
    rehearse(model, gpus, **PLAN | ZERO3 | plan)
    job = toy_job(gpus, 1, model, **PLAN | ZERO3 | {"kernels": "torch"} | plan)
    book = ledger(run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices()), 0)
    assert book.pools.max(axis=0).tolist() == [pools[GATHER], pools[REDUCE]]
