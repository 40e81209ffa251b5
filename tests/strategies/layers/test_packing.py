"""Documents packed into sequences: attention by the squares of their lengths, and dp ranks that wait for the longest."""

from __future__ import annotations

from typing import Any

import pytest

from shardyard import Job, read_job, simulate, summarise
from sim.program import Kernel
from strategies.layers.model_costs import parts
from strategies.plan.packing import busiest, mean_length
from topologies.reading import UserError

MIXED = (100, 300, 800, 2000, 8000)


def job(lengths: tuple[int, ...] | None, nodes: int = 1, **plan: Any) -> Job:
    packing = {} if lengths is None else {"packing": {"lengths": lengths}}
    plan = {"sequence": 8192, "global_batch": 8 * nodes, "data_parallel": "zero1", **packing, **plan}
    return read_job(None, model="llama-3.1-8b", cluster="dgx-h100", nodes=nodes, plan=plan)


def attention(asked: Job) -> list[Kernel]:
    layer = parts(asked.model, asked.resolve()).layer(0)
    items = (*layer.forward, *layer.backward)
    return [item for item in items if isinstance(item, Kernel) and item.kind.startswith("attention")]


@pytest.mark.parametrize("length", [512, 2048])
def test_documents_of_one_length_are_sequences_of_their_own(length: int) -> None:
    """As many kernels as with shorter sequences in a larger microbatch, and equal ones; all else goes by tokens."""
    number = 8192 // length
    packed = job((length,))
    short = job(None, sequence=length, microbatch=number, global_batch=8 * number)
    assert attention(packed) == attention(short)
    one, other = (parts(each.model, each.resolve()).layer(0) for each in (packed, short))
    assert one.model_flops == other.model_flops
    assert summarise(simulate(packed)).step_seconds == pytest.approx(summarise(simulate(short)).step_seconds, rel=1e-6)


def test_documents_as_long_as_the_sequence_change_nothing() -> None:
    assert summarise(simulate(job((8192,)))).step_seconds == summarise(simulate(job(None))).step_seconds


def test_the_mean_by_hand() -> None:
    """Documents of 64 and of 192 tokens, in sequences so long that few are cut: (64² + 192²) / (64 + 192) = 160."""
    assert mean_length((64, 192), 2**16) == pytest.approx(160, rel=0.01)
    assert mean_length((128,), 1024) == 128
    assert mean_length((1000,), 1024) < 1000  # most are cut in two


def test_the_busiest_of_more_ranks_has_more_and_over_more_sequences_less() -> None:
    by_ranks = [busiest(MIXED, 8192, ranks, 1) for ranks in (1, 8, 64)]
    assert by_ranks[0] == 1
    assert sorted(by_ranks) == by_ranks
    assert busiest(MIXED, 8192, 8, 16) < busiest(MIXED, 8192, 8, 1)
    assert busiest((512,), 8192, 64, 1) == 1


def test_ranks_that_meet_in_every_microbatch_wait_longer() -> None:
    """ZeRO-3 gathers in every layer; with ZeRO-1 what is long in one microbatch is made up for in another."""
    often, once = (job(MIXED, global_batch=64, data_parallel=hook).resolve() for hook in ("zero3", "zero1"))
    assert often.document == once.document
    assert often.longest_documents is not None
    assert once.longest_documents is not None
    assert often.longest_documents > once.longest_documents > 0


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"attention": "materialised"}, "packing is not simulated with attention=materialised"),
        ({"cp": 2}, "packing is not simulated with cp=2"),
    ],
    ids=str,
)
def test_what_is_not_simulated_is_refused(plan: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        job(MIXED, **plan).resolve()
