"""What a rank holds beside activations: states, an update's own tensors, the loss; what the caching allocator keeps of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sim.analysis.memory import ledger, tensor_capacity
from sim.analysis.summary import summarise
from sim.engine.player import run
from sim.grid import Grid
from sim.pricing.prices import Prices
from sim.timeline import Timeline
from strategies.layers.weight_matrices import tensors
from strategies.lowering.lower import lower
from strategies.models.model import Model
from strategies.plan.plan import Plan
from tests.conftest import GPU

HALF = {"precision": "fp16", "global_batch": 8}


@pytest.fixture
def played(toy_job, toy_prices) -> Callable[..., Timeline]:
    def play(gpus: int = 4, model: dict[str, Any] | None = None, prices: dict[str, Any] | None = None, **plan: Any) -> Timeline:
        job = toy_job(gpus, 1, {"tied": False} | (model or {}), **HALF | plan)
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices(**(prices or {})))

    return play


def updating(timeline: Timeline) -> float:
    return float(ledger(timeline, 0).updating.max())


def test_pytorchs_fsdp_shards_masters_and_their_gradients() -> None:
    """4 + 4 + 8 bytes per parameter of Adam in 16 bits; others have 16-bit parameters besides masters: 2 + 2 + 12, 2 + 4 + 12."""
    for gradients, others in (("same", 16), ("fp32", 18)):
        sizes = {
            kernels: Plan(data_parallel="zero3", kernels=kernels, gradients=gradients).bytes_of_states
            for kernels in ("torch", "compiled", "megatron")
        }
        assert sizes["torch"] == sizes["compiled"] == {"parameter": 4, "gradient": 4, "optimizer": 8}
        assert sum(sizes["megatron"].values()) == others


def test_tensors_may_take_what_the_context_and_the_allocator_leave(played) -> None:
    """Of 1 PB: 25 % of what tensors take are lost between blocks, unless segments of the allocator grow."""
    prices = {"overhead": {"context": "1 TB", "communicator": "0 B", "reserve": 0.25}}
    assert tensor_capacity(played(prices=prices)) == pytest.approx(999e12 / 1.25, rel=1e-12)
    assert tensor_capacity(played(prices=prices, expandable_segments=True)) == pytest.approx(999e12, rel=1e-12)


@pytest.mark.parametrize(("plan", "width"), [({}, 4), ({"gradients": "fp32"}, 0), ({"precision": "fp32"}, 0)])
def test_16_bit_gradients_are_copied_to_fp32(played, plan, width) -> None:
    timeline = played(1, **plan)
    assert updating(timeline) == width * timeline.program.parameters


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_deepspeed_joins_gradients_in_16_bits_then_in_32(played, toy_job, dp) -> None:
    """Before that the norm takes each gradient as fp64."""
    timeline = played(dp, data_parallel="zero1", deepspeed={})
    own = timeline.program.parameters / dp
    job = toy_job(dp, 1, {"tied": False}, **HALF)
    parts = lower_parts(job.model, job.resolve())
    assert updating(timeline) == max((2 + 4) * own, 8 * min(own, max(tensors(parts, job.model, 0, False))))


def lower_parts(model: Model, plan: Any) -> list[Any]:
    from strategies.layers.model_costs import parts

    work = parts(model, plan)
    return [work.embedding, *work.stage(0, model.layers), work.head]


def test_the_allocator_keeps_what_passes_gave_back(played) -> None:
    """An update's tensors find no block among activations: what is reserved is what both took."""
    timeline = played(1, global_batch=1)
    book, states = ledger(timeline, 0), 16 * timeline.program.parameters
    passes = (book.held.sum(axis=1) - book.updating).max()
    assert passes > states
    assert book.reserved == passes + 4 * timeline.program.parameters + book.cached.max()
    memory = summarise(timeline).memory[0]
    assert memory.allocated == book.peak
    assert memory.reserved == pytest.approx(book.reserved)
    assert memory.peak == pytest.approx(book.peak)  # what is only kept is given back before memory runs out


@pytest.mark.parametrize("flat", [False, True])
def test_blocks_of_another_stream_are_not_used_for_compute(played, flat) -> None:
    """FSDP's gathers and gradients: at the loss, with which most is held, neither is there, and yet their blocks are kept.

    FSDP2 copies parameters out of its gathers; FSDP1's are there, two parts at once.
    """
    words = {"vocabulary": 10_000}
    timeline = played(4, words, data_parallel="zero3", kernels="torch", flat_parameters=flat, global_batch=4)
    book, shard = ledger(timeline, 0), timeline.program.parameters / 4
    gathered, gradients = book.pools.max(axis=0)
    assert gradients == pytest.approx(4 * shard)
    at_loss = book.held.sum(axis=1).argmax()
    assert book.pools[at_loss, 1] == 0
    computing = (book.held.sum(axis=1) + book.cached - book.pools.sum(axis=1)).max()
    assert book.reserved == pytest.approx(computing + gathered + gradients)
    assert book.reserved > book.held.sum(axis=1).max() + gradients


def test_other_frameworks_gather_and_reduce_where_they_compute(played) -> None:
    """Or in buffers that stay."""
    for plan in ({}, {"data_parallel": "zero1"}, {"data_parallel": "zero3", "kernels": "megatron"}):
        assert not ledger(played(4, **plan), 0).pools.any()


def test_a_gpu_that_is_too_small_has_nothing_left_for_the_allocator_to_keep(toy_job, toy_prices) -> None:
    """What is reserved is what tensors take, to the byte."""
    job = toy_job(1, node={"gpu": GPU | {"memory": "1 MB"}})
    prices = Prices(toy_prices().profile, job.cluster.node.gpu)
    memory = summarise(run(lower(job.model, job.resolve()), job.cluster.topology(), prices)).worst
    assert memory.peak > 1e6
    assert memory.reserved == memory.allocated


# -- DeepSpeed's pipeline engine -----------------------------------------------------------------------------------------------

ENGINE = {"deepspeed": {}, "data_parallel": "zero1", "kernels": "apex", "attention": "materialised", "overlap": False}


def buffers_of(timeline: Timeline) -> list[float]:
    """Bytes of buffers that each lane has all the time, without those into which gradients are copied."""
    bucket = 2 * 500_000_000
    return [
        sum(size for kind, size in timeline.cohort(lane).resident if kind == "buffer") - bucket
        for lane in range(len(timeline.lanes))
    ]


@pytest.mark.parametrize(
    ("plan", "width"),
    [
        ({"pp": 2}, 4 + 4),
        ({}, 4 + 4),  # Megatron-DeepSpeed's model is a PipelineModule with one stage, too
        ({"global_batch": 4}, 4),  # one microbatch a step
        ({"kernels": "megatron", "pp": 2}, 2 + 2),
        ({"kernels": "megatron"}, 0),
        ({"data_parallel": "zero2"}, 0),  # which that engine refuses
    ],
)
def test_the_last_stage_has_logits_of_the_two_microbatches_before(played, plan, width) -> None:
    """They are the engine's results, which others replace two microbatches later (pipe/engine.py, schedule.py)."""
    timeline = played(4, {"vocabulary": 1024}, **ENGINE | {"microbatch": 1} | plan)
    assert buffers_of(timeline)[-1] == width * 32 * 1024


@pytest.mark.parametrize(("tp", "part"), [(1, 1), (2, 2)])
def test_stages_keep_their_results_until_the_backward_pass(played, tp, part) -> None:
    """Of two stages the first has two microbatches under way, and its result of each; tp ranks keep a part each."""
    plan = {"pp": 2, "tp": tp, "recompute": "full", "microbatch": 1}
    held = [ledger(played(4, **ENGINE | plan | more), 0).held[:, 3].max() for more in ({}, {"deepspeed": None})]
    assert held[0] - held[1] == 2 * 2 * 32 * 64 / part


# -- the loss ----------------------------------------------------------------------------------------------------------------


def bytes_of(played: Callable[..., Timeline], loss: str | None, words: int, **plan: Any) -> float:
    """Peak of one GPU with so many words."""
    plan = {"sequence": 8, "global_batch": 1, "kernels": "compiled", "set_to_none": False} | plan  # the peak is at the loss
    return ledger(played(1, {"vocabulary": words, "hidden": 64, "layers": 1}, loss=loss, **plan), 0).reserved


@pytest.mark.parametrize(("loss", "width"), [("torch", 14), ("fused", 4), (None, 6)])
def test_bytes_of_a_logit(played, loss, width) -> None:
    """In 16 bits. torch: three of fp32 backward, and what logits were in; fused: logits and their gradient; otherwise both in 16
    bits in turns, and probabilities. A word more is also 64 parameters of embedding and head, and 20 bytes of each.
    """
    words = 100_000
    step = bytes_of(played, loss, 2 * words) - bytes_of(played, loss, words)
    assert step == pytest.approx(words * (8 * width + 2 * 64 * 20))


def test_torch_holds_as_much_for_its_loss() -> None:
    """Twelve bytes of a logit backward; the logits themselves, two, are gone by then."""
    import torch
    from torch.nn.functional import cross_entropy

    from calibration.devices.holding import Holding

    features, matrix = torch.randn(64, 8, dtype=torch.bfloat16), torch.randn(8, 4096, dtype=torch.bfloat16, requires_grad=True)
    with Holding() as holding:
        loss = cross_entropy((features @ matrix).float(), torch.zeros(64, dtype=torch.long))
        before, holding.peak = holding.held, 0
        loss.backward()
    assert before == pytest.approx(4 * 64 * 4096, rel=0.02)  # log-probabilities
    assert holding.peak == pytest.approx(12 * 64 * 4096, rel=0.05)


# -- communicators -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "groups"), [({}, 0), ({"dp": 8}, 1), ({"tp": 2, "dp": 4}, 3), ({"tp": 2, "dp": 4, "pp": 2}, 4)]
)
def test_a_rank_talks_along_each_axis_and_with_all(degrees, groups) -> None:
    assert Grid.of(**degrees).communicators == groups


def test_zero_bubble_h1_holds_what_1f1b_holds(played) -> None:
    """In stages alike: Qi et al. 2023 (arXiv:2401.10241), where weight gradients wait for no more than 1F1B's next pass."""
    model = {"layers": 32, "vocabulary": 64, "head": False}
    peaks = [
        max(ledger(timeline, lane).peak - sum(size for _, size in timeline.program.cohorts[lane].resident) for lane in range(4))
        for timeline in (played(4, model, pp=4, schedule=name) for name in ("1f1b", "zb-h1"))
    ]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.05)


def test_segments_that_grow_lose_nothing(toy_job, toy_prices) -> None:
    """A twentieth of what tensors take is lost between blocks, or nothing; tensors are the same."""
    prices = toy_prices(overhead={"context": "1 MB", "communicator": "0 B", "reserve": 0.05})
    peaks = []
    for grows in (False, True):
        job = toy_job(2, expandable_segments=grows)
        peaks.append(summarise(run(lower(job.model, job.resolve()), job.cluster.topology(), prices)).worst)
    assert peaks[0].allocated == peaks[1].allocated
    assert (peaks[0].overheads["reserve"], peaks[1].overheads["reserve"]) == (pytest.approx(0.05 * peaks[0].allocated), 0)
    assert peaks[1].peak == peaks[1].allocated + 1e6
