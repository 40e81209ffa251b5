"""DeepSpeed's ZeRO-3 of 2021: one tensor at a time, in lists with a piece per rank, with a host that waits.

What is gathered when was followed by hand through deepspeed/runtime/zero/stage3.py of 0.3.15.
"""

from __future__ import annotations

import pytest

from sim.analysis.summary import summarise
from sim.engine.player import run
from sim.pricing.op_costs import VIEW
from sim.program import Op
from sim.timeline import Timeline
from strategies.frameworks.deepspeed.options import DeepSpeed
from strategies.frameworks.deepspeed_2021.zero3 import uses
from strategies.frameworks.export import export
from strategies.lowering.lower import lower
from topologies.reading import UserError

QKV, OUT, UP, DOWN = 0, 1, 2, 3
LAYER = [3, 1, 4, 4]  # in units of the square of the width
RECOMPUTED = [(0,), (1,), (2,), (3,), (0,), (1,), (2,), (3,), (3,), (2,), (1,), (0,)]  # forward, again, and back


def followed(width: int, version: str = "0.3.13") -> tuple[list[int], list[int], list[int]]:
    """Tensors gathered when needed, ahead, and how often each is gathered."""
    limits = DeepSpeed.model_validate({"version": version})
    steps = uses(RECOMPUTED, [count * width**2 for count in LAYER], limits)
    needed = [tensor for use in steps for tensor in use.needed]
    ahead = [tensor for use in steps for tensor in use.ahead]
    return needed, ahead, [(needed + ahead).count(tensor) for tensor in range(4)]


def test_the_next_tensor_is_gathered_beside_a_module() -> None:
    """At 12,288 features every tensor has more than 50 million elements: one is on its way at a time. The last is used again at
    once; between the two uses of the others lie more than 10⁹ elements.
    """
    assert followed(12288) == ([QKV], [OUT, UP, DOWN, QKV, OUT, UP, DOWN, UP, OUT, QKV], [3, 3, 3, 2])


def test_nothing_is_gathered_ahead_while_too_much_is_there() -> None:
    """At 20,480 features queries, keys and values have 1.26 · 10⁹ elements, up and down 1.68 · 10⁹."""
    needed, ahead, _ = followed(20480)
    assert ahead == [UP, UP, QKV]
    assert needed == [QKV, OUT, DOWN, QKV, OUT, DOWN, UP, OUT]


def test_small_layers_stay_between_recomputation_and_backward() -> None:
    """At 4,096 features a layer has 0.2 · 10⁹ elements, which are kept from the first use to the last."""
    assert followed(4096)[2] == [1, 1, 1, 1]


def test_a_trace_that_fails_gathers_nothing_ahead_and_keeps_nothing() -> None:
    """Hooks in the order of 0.3.14 and 0.3.15 around their own PrefetchCoordinator find a parameter to gather ahead for the first
    module, which is the model, and for none of the others.
    """
    assert followed(4096, "0.5") == ([tensor for (tensor,) in RECOMPUTED], [], [3, 3, 3, 3])


@pytest.fixture
def played(toy_job, toy_prices):
    def play(options: dict, gpus: int = 4, nodes: int = 4, prices: dict | None = None, **plan) -> Timeline:
        asked = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, **options}
        job = toy_job(gpus, nodes, {"tied": False}, data_parallel="zero3", deepspeed=asked, algorithm="ring", **plan)
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices(**(prices or {})))

    return play


def gathers(timeline: Timeline) -> list[Op]:
    return [op for op in timeline.program.cohorts[0].ops if getattr(op.work, "operation", "") == "all_gather"]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_recomputation_gathers_once_more(played, recompute) -> None:
    """ZeRO-3 moves 3Ψ; here the matrices of recomputed layers, 12 times the width squared each, once more."""
    timeline = played({"version": "0.3.13"}, recompute=recompute)
    more = 4 * 12 * 64**2 if recompute == "full" else 0
    assert summarise(timeline).volume["dp"].elements == pytest.approx((3 * timeline.program.parameters + more) * 15 / 16)


def test_the_host_makes_a_view_and_a_copy_of_each_piece(played) -> None:
    """And does so while the GPU waits, but for reductions, which it prepares beside the backward pass."""
    timeline = played({"version": "0.3.13"}, prices={"launch": "1 ms"})
    gathered = gathers(timeline)
    assert all(op.held and op.work.pieces == 16 for op in gathered)
    assert timeline.op_costs.wrapping(gathered[0].work) == pytest.approx(16 * (1e-3 + VIEW))
    assert timeline.step > len(gathered) * 16 * 1e-3


@pytest.mark.parametrize(("least", "kept"), [(63, 0), (64, 4 * 6 + 2), (191, 4 * 6 + 2), (192, 4 * 7 + 2), (1000, 4 * 8 + 2)])
def test_what_is_never_released_is_gathered_after_the_update_as_one_list(played, least, kept) -> None:
    """A tensor per rank, and a copy of each rank's part of each norm and bias: in each of four layers two norms of 2 · 64, biases
    of 64, 64, 192 and 256, a norm at the end.
    """
    timeline = played({"version": "0.3.13", "stage3_param_persistence_threshold": least})
    assert gathers(timeline)[-1].work.pieces == 16 * (1 + kept)


def test_more_ranks_take_the_host_longer(played) -> None:
    """The same bytes per node and second: only lists grow with ranks."""
    steps = {
        version: [played({"version": version}, nodes=nodes, prices={"launch": "1 us"}).step for nodes in (2, 8)]
        for version in ("0.5", "0.6")
    }
    assert steps["0.5"][1] - steps["0.5"][0] > 2 * (steps["0.6"][1] - steps["0.6"][0])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data_parallel": "zero1"}, "zero1; it describes zero3"),
        ({"deepspeed": {"version": "0.3.13", "zero_quantized_weights": True}}, "which is of 2023"),
        ({"recompute": "full", "recompute_method": "uniform", "recompute_layers": 2}, "this recomputation"),
    ],
)
def test_what_it_had_not_is_refused(toy_job, change, reason) -> None:
    with pytest.raises(UserError, match=f"deepspeed.version=0.3.13 contradicts .*{reason}"):
        toy_job(4, 1, **{"data_parallel": "zero3", "deepspeed": {"version": "0.3.13"}} | change).resolve()


def test_a_configuration_says_no_version(toy_job) -> None:
    job = toy_job(4, 1, data_parallel="zero3", deepspeed={"version": "0.3.13", "reduce_bucket_size": 10**6})
    written = export("deepspeed", job)
    assert "version" not in written.text
    assert "deepspeed.version=0.3.13: it has 0.6" in written.unexpressed


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("distance", [0, 20_000, 10**9])
def test_all_that_is_gathered_is_given_back(played, recompute, distance) -> None:
    timeline = played({"version": "0.3.13", "stage3_max_reuse_distance": distance}, recompute=recompute, accumulation=2)
    ops = timeline.program.cohorts[0].ops
    allocated, back = (sum(size for op in ops for _, size in getattr(op, way)) for way in ("allocate", "free"))
    assert allocated == pytest.approx(back)


def test_a_gathered_tensor_takes_what_its_collective_brings(played) -> None:
    """2 bytes of each element of a tensor."""
    gathered = gathers(played({"version": "0.3.13"}))
    assert len(gathered) > 10
    for op in gathered:
        assert sum(size for _, size in op.allocate) == pytest.approx(op.work.bytes * op.work.repeat)


def test_every_tensor_of_a_bucket_is_reduced_by_itself(played) -> None:
    """Four matrices and eight norms and biases in each of four layers, two of the final norm, two embeddings and the head."""
    ops = played({"version": "0.3.13"}).program.cohorts[0].ops
    reduced = [op.work for op in ops if getattr(op.work, "operation", "") == "reduce_scatter"]
    assert sum(work.repeat for work in reduced) == 4 * (4 + 8) + 2 + 2 + 1
