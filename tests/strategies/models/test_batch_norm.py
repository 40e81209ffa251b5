"""Batch normalisation of traced modules: what PyTorch's DDP sends of buffers, and what SyncBatchNorm exchanges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardyard import Job, read_job, simulate, summarise
from sim.program import Block, Collective
from strategies.layers.model_costs import parts
from strategies.lowering.lower import lower
from topologies.reading import UserError

EXAMPLES = Path(__file__).parents[3] / "examples/modules"
CHANNELS = (8, 16)


def net(synchronised: bool = False) -> Any:
    """Two convolutions, each with a batch normalisation."""
    from torch import nn

    norm = nn.SyncBatchNorm if synchronised else nn.BatchNorm2d
    first, second = CHANNELS
    return nn.Sequential(
        nn.Conv2d(3, first, 3), norm(first), nn.ReLU(), nn.Conv2d(first, second, 3), norm(second), nn.Flatten(), nn.LazyLinear(10)
    )


def built(synchronised: bool = False) -> Any:
    import torch

    whole = net(synchronised)
    whole.eval()(torch.zeros(1, 3, 8, 8))  # how many features the last layer has
    return whole


def job(module: Any, nodes: int = 1, **plan: Any) -> Job:
    plan = {"microbatch": 4, "accumulation": 1, "precision": "fp32"} | plan
    return read_job(None, model=module, input="3x8x8", cluster="dgx-a100", nodes=nodes, plan=plan)


def sent(asked: Job, label: str) -> list[Collective]:
    """Collectives of a step by label, those inside blocks too."""
    program = lower(asked.model, asked.resolve())
    works = [op.work for op in program.cohorts[0].ops]
    inside = [item for work in works if isinstance(work, Block) for times, item in work.items() for _ in range(times)]
    return [each for each in (*works, *inside) if isinstance(each, Collective) and each.label.endswith(label)]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_buffers_are_sent_as_ddp_sends_them(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own DDP, on a process group of eight that sends nothing, over two steps; no_sync before the last microbatch."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        wrapped, calls = DistributedDataParallel(built()), list[dict[torch.dtype, int]]()

        def counted(_: Any, tensors: list[torch.Tensor], *__: Any) -> None:
            sizes: dict[torch.dtype, int] = {}
            for tensor in tensors:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel() * tensor.element_size()
            calls.append(sizes)

        def reduced(_, bucket):  # type: ignore[no-untyped-def]
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        monkeypatch.setattr(distributed, "_broadcast_coalesced", counted)
        wrapped.register_comm_hook(None, reduced)
        for _ in range(2):
            with wrapped.no_sync():
                for _ in range(microbatches - 1):
                    wrapped(torch.zeros(4, 3, 8, 8)).sum().backward()
            wrapped(torch.zeros(4, 3, 8, 8)).sum().backward()
    finally:
        distributed.destroy_process_group()
    simulated = sent(job(built(), accumulation=microbatches), "buffers")
    assert len(calls) == 2
    assert calls[0] == calls[1]
    assert sorted(each.bytes * each.repeat for each in simulated) == sorted(calls[0].values())
    assert {each.operation for each in simulated} == {"broadcast"}


def test_more_buffers_than_go_together_are_sent_in_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means and variances of 8 + 16 channels are 192 bytes, two counters 16: of at most 100 bytes, 2 · 96 and 16."""
    monkeypatch.setattr("strategies.data_parallel.ddp.BROADCAST", 100.0)
    assert sorted((each.bytes, each.repeat) for each in sent(job(built()), "buffers")) == [(16.0, 1), (96.0, 2)]


def test_who_sends_no_buffers() -> None:
    assert not sent(job(built(), broadcast_buffers=False), "buffers")
    assert not sent(job(built(), data_parallel="zero3"), "buffers")
    with pytest.raises(UserError, match="broadcast_buffers=false contradicts data_parallel=zero3"):
        job(built(), data_parallel="zero3", broadcast_buffers=False).resolve()


def test_sync_batch_norm_exchanges_statistics_of_every_norm() -> None:
    """2·channels + 1 fp32 numbers of each rank forward, 2·channels backward (torch/nn/modules/_functions.py)."""
    for asked in (job(built(synchronised=True)), job(built(), sync_norm=True)):
        assert [each.bytes for each in sent(asked, "statistics")] == [8 * 4 * (2 * channels + 1) for channels in CHANNELS]
        assert [each.bytes for each in sent(asked, "sums")] == [4 * 2 * channels for channels in reversed(CHANNELS)]
    assert not sent(job(built()), "statistics")
    single = {"based_on": "dgx-a100", "node": {"gpus": 1, "nics": 1}}
    one = read_job(None, model=built(synchronised=True), input="3x8x8", cluster=single, plan={})
    assert not sent(one, "statistics")
    with pytest.raises(UserError, match="sync_norm=true: .* has no batch normalisation"):
        read_job(
            None, model=f"{EXAMPLES}/lenet.py:lenet", input="3x32x32", cluster="dgx-a100", plan={"sync_norm": True}
        ).resolve()


def test_what_a_synchronised_norm_waits_for_is_exposed() -> None:
    plain, synchronised = (summarise(simulate(job(built(each), nodes=4))) for each in (False, True))
    assert synchronised.step_seconds > plain.step_seconds


@pytest.mark.parametrize(("name", "sample", "parameters"), [("lenet", "3x32x32", 62_006), ("mnist", "1x28x28", 44_426)])
def test_the_courses_nets_have_their_parameters(name: str, sample: str, parameters: int) -> None:
    asked = read_job(None, model=f"{EXAMPLES}/lenet.py:{name}", input=sample, cluster="dgx-a100", plan={})
    costs = parts(asked.model, asked.resolve())
    assert asked.model.parameters == parameters
    assert (
        sum(part.parameters for part in (costs.embedding, *map(costs.layer, range(asked.model.layers)), costs.head)) == parameters
    )


def test_small_batches_on_many_gpus_are_bound_by_launches() -> None:
    """With 8 images of 32 × 32 on each of eight GPUs most of the step waits for the host, and more GPUs gain nothing."""
    whole = read_job(
        None, model=f"{EXAMPLES}/lenet.py:lenet", input="3x32x32", cluster="dgx-a100", plan={"microbatch": 8, "accumulation": 1}
    )
    summary = summarise(simulate(whole))
    assert summary.breakdown["launch"] > 0.5 * summary.step_seconds
