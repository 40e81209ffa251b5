"""Recomputing some of the layers of a stage: what is kept, made anew and run again, counted by hand."""

from __future__ import annotations

import pytest

from shardyard import simulate, summarise
from strategies.layers import parts
from strategies.lower import lower
from topologies.reading import UserError


def stage(toy_job, layers: int = 6, **plan):
    job = toy_job(1, model={"layers": layers}, **plan)
    return parts(job.model, job.resolve()).stage(0, layers)


@pytest.fixture
def full(toy_job):
    return stage(toy_job, recompute="full")[0]


@pytest.fixture
def none(toy_job):
    return stage(toy_job)[0]


@pytest.mark.parametrize(("method", "number", "again"), [
    ("block", 2, [0, 1]), ("block", 6, range(6)), ("every", 2, [1, 3, 5]), ("every", 4, [3]), ("every", 1, range(6)),
])  # fmt: skip
def test_these_layers_are_recomputed_and_the_others_kept(toy_job, full, none, method, number, again) -> None:
    """Megatron-LM's block: the first ones; torchtitan's option: each so many-th."""
    chosen = stage(toy_job, recompute="full", recompute_method=method, recompute_layers=number)
    assert chosen == [full if layer in again else none for layer in range(6)]


@pytest.mark.parametrize(("number", "chunks"), [(1, [1] * 6), (2, [2] * 3), (4, [4, 2]), (6, [6])])
def test_uniform_keeps_one_input_for_so_many_layers(toy_job, full, none, number, chunks) -> None:
    """Megatron-LM's uniform: 1/number of the inputs are kept, and the activations of so many layers exist at a time."""
    chosen = stage(toy_job, recompute="full", recompute_method="uniform", recompute_layers=number)
    for part, count in zip(chosen, chunks, strict=True):
        assert part.saved == full.saved
        assert part.saved + part.restored == count * none.saved
        assert (part.parameters, part.model_flops) == (count * full.parameters, count * full.model_flops)
        assert part.recompute == count * full.recompute
        assert part.backward == count * full.recompute + count * none.backward


def test_torch_repeats_no_last_product(toy_job) -> None:
    """Of two layers that are recomputed together, the first is repeated to its end, which is the input of the second."""
    ours = {"recompute": "full", "kernels": "torch"}
    one = stage(toy_job, **ours)[0]
    two = stage(toy_job, recompute_method="uniform", recompute_layers=2, **ours)[0]
    assert [item.label for item in one.forward[len(one.recompute) :]] == ["mlp down", "mlp residual"]
    assert [item.label for item in two.recompute] == [item.label for item in one.forward + one.recompute]


def test_time_and_memory_emerge(toy_job) -> None:
    """Between none and full in both; hardware FLOPs count what runs again."""

    def told(**plan):
        job = toy_job(2, model={"layers": 8}, pp=2, accumulation=4, microbatch=4, **plan)
        timeline = simulate(job)
        return timeline.step, summarise(timeline).worst.kinds["activation"], lower(job.model, job.resolve()).hardware_flops

    none, half, full = told(), told(recompute="full", recompute_method="block", recompute_layers=2), told(recompute="full")
    assert none[0] < half[0] < full[0]
    assert none[1] > half[1] > full[1]
    assert half[2] == pytest.approx((none[2] + full[2]) / 2)


@pytest.mark.parametrize(("plan", "message"), [
    ({"recompute": "full", "recompute_method": "block"}, "recompute_method=block needs recompute_layers"),
    ({"early_stop": False}, "early_stop=false needs recompute=full"),
    ({"recompute": "full", "recompute_layers": 2}, "recompute_layers=2 needs recompute_method"),
    ({"recompute_method": "block", "recompute_layers": 2}, "recompute_method=block needs recompute=full"),
    ({"recompute": "full", "recompute_method": "block", "recompute_layers": 5}, "recompute_layers=5 exceeds the 4 layers"),
    ({"recompute": "full", "recompute_method": "uniform", "recompute_layers": 2, "data_parallel": "zero3"}, "one layer at a"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(toy_job, plan, message) -> None:
    with pytest.raises(UserError, match=message):
        toy_job(1, **plan).resolve()
