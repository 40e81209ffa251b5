"""Pipeline sends that tp ranks share out: a part each over the NICs, the rest among themselves."""

from __future__ import annotations

import pytest

from sim.analysis.volume import volumes
from sim.engine.player import run
from strategies.lowering.lower import lower
from topologies.reading import UserError


def play(job, prices):
    timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), prices)
    return timeline, *([stage[axis][0] for stage in volumes(timeline)] for axis in ("pp", "tp"))


@pytest.mark.parametrize(
    ("way", "parts", "gathers"),
    [
        ("megatron", (1 / 4, 1 / 4), (1, 1)),
        ("deepspeed_forward", (1 / 4, 1), (1, 1)),  # which keeps a part of its own result and gathers that
        ("deepspeed", (1 / 4, 1 / 4), (2, 1)),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_each_rank_sends_a_part_and_gathers_the_rest(toy_job, toy_prices, way, parts, gathers, schedule) -> None:
    """Narayanan et al. 2021, arXiv:2104.04473, section 4.1: 1/tp of what was sent crosses the NICs; an all-gather sends
    (tp − 1)/tp of it from each rank.
    """
    common = {"tp": 4, "pp": 2, "microbatch": 2, "accumulation": 4, "schedule": schedule}
    (_, whole, plain), (_, split, more) = (
        play(toy_job(4, 2, {"tied": False}, **common, scatter_gather=asked), toy_prices()) for asked in ("none", way)
    )
    each = whole[0]  # of all microbatches
    assert split == [each * part for part in parts]
    gathered = [each * 3 / 4 * times for times in gathers]
    assert [b - a for a, b in zip(plain, more, strict=True)] == pytest.approx(gathered)


def test_it_is_worth_it_where_nics_are_slow(toy_job, toy_prices) -> None:
    common = {"tp": 4, "pp": 2, "microbatch": 8, "node": {"nvlink": "1 TB/s", "nic": "1 GB/s"}}
    steps = [
        play(toy_job(4, 2, **common, scatter_gather=way), toy_prices())[0].step
        for way in ("none", "deepspeed_forward", "deepspeed")
    ]
    assert steps[0] > steps[1] > steps[2]


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"tp": 1, "pp": 2}, "needs tp > 1 and pp > 1, and tp=1, pp=2"),
        ({"tp": 2, "pp": 1}, "needs tp > 1 and pp > 1, and tp=2, pp=1"),
        ({"tp": 4, "pp": 2, "sequence_parallel": True}, "contradicts sequence_parallel=true"),
    ],
)
def test_what_it_goes_with(toy_job, plan, said) -> None:
    with pytest.raises(UserError, match=f"scatter_gather=megatron {said}"):
        toy_job(4, 2, **plan, scatter_gather="megatron").resolve()
