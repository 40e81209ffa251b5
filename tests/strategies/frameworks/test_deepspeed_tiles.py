"""Memory-centric tiling: what tiles move, hold and compute, by hand."""

from __future__ import annotations

import pytest

from sim.analysis.memory import ledger
from sim.analysis.summary import summarise
from sim.engine.player import run
from sim.program import Block, Collective, Kernel
from sim.timeline import Timeline
from strategies.layers.model_costs import parts
from strategies.lowering.lower import lower
from topologies.reading import UserError

EACH = {"stage3_param_persistence_threshold": 64, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
HIDDEN, LAYERS, TOKENS = 64, 4, 8 * 32  # of a rank and microbatch
MATRICES = {"qkv": 3 * HIDDEN * HIDDEN, "attention output": HIDDEN * HIDDEN, "mlp up": 4 * HIDDEN**2, "mlp down": 4 * HIDDEN**2}


@pytest.fixture
def played(toy_job, toy_prices):
    def play(tiles: int, gpus: int = 4, node=None, **plan) -> Timeline:
        options = EACH | plan.pop("deepspeed", {}) | {"tiles": tiles}
        job = toy_job(gpus, 1, {"tied": False}, node, data_parallel="zero3", deepspeed=options, microbatch=8, **plan)
        return run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())

    return play


def layer(toy_job, tiles: int, **plan):
    job = toy_job(4, 1, {"tied": False}, data_parallel="zero3", deepspeed={"tiles": tiles}, microbatch=8, **plan)
    return parts(job.model, job.resolve()).layer(0)


def collectives(timeline: Timeline, operation: str) -> list[float]:
    works = [op.work for op in timeline.program.cohorts[0].ops]
    return [work.bytes for work in works if isinstance(work, Collective) and work.operation == operation]


@pytest.mark.parametrize("tiles", [2, 4])
def test_each_tile_is_gathered_forward_and_backward(played, tiles) -> None:
    """Tiles of a matrix are 1/tiles of its 16-bit parameters; with what else there is, each parameter moves three times."""
    timeline, whole = played(tiles), played(1)
    gathers = collectives(timeline, "all_gather")
    for size in set(MATRICES.values()):
        matrices = sum(other == size for other in MATRICES.values())
        assert gathers.count(2 * size / tiles) == 2 * LAYERS * matrices * tiles
    assert summarise(timeline).volume["dp"].elements == pytest.approx(summarise(whole).volume["dp"].elements, rel=1e-12)


def test_products_are_smaller_and_as_many_flops(toy_job) -> None:
    """mlp up: 256 outputs in 4 tiles; each gradient of the input but the first is added to those before."""
    whole, tiled = layer(toy_job, 1), layer(toy_job, 4)
    assert tiled.model_flops == whole.model_flops
    assert tiled.parameters == whole.parameters
    up = [item for item in tiled.forward if isinstance(item, Kernel) and item.label == "mlp up"]
    assert [item.shape for item in up] == [(1, TOKENS, HIDDEN, HIDDEN)] * 4
    (joined,) = [item for item in tiled.forward if isinstance(item, Kernel) and item.label == "mlp up tiles"]
    assert joined.bytes == 2 * 2 * TOKENS * 4 * HIDDEN * 2  # two copies, each read and written, in 16 bits
    order = [item.label for item in tiled.backward if isinstance(item, Kernel) and item.label.startswith("mlp up")]
    each = ["mlp up", "mlp up gradients", "mlp up weight", "mlp up weight sum"]
    kept = [label for label in each if label in order]
    assert order[:2] == ["mlp up", "mlp up weight"]
    assert order.count("mlp up gradients") == 3
    added = [item.bytes for item in tiled.backward if isinstance(item, Kernel) and item.label == "mlp up gradients"]
    assert added == [3 * TOKENS * HIDDEN * 2] * 3
    assert [order.count(label) for label in kept] == [4, 3, 4, *([4] if "mlp up weight sum" in kept else [])]


def test_tiles_need_no_equal_rows(toy_job) -> None:
    """192 rows of queries, keys and values in 5 tiles."""
    products = [item.shape[2] for item in layer(toy_job, 5).forward if isinstance(item, Kernel) and item.label == "qkv"]
    assert products == [39, 39, 38, 38, 38]


@pytest.mark.parametrize("tiles", [2, 4, 16])
def test_what_the_largest_matrix_needs_falls_with_its_tiles(played, tiles) -> None:
    """ZeRO-Infinity's model state working memory (arXiv:2104.07857, section 3, equation 4): the parameters and gradients of the
    matrix hidden → 4 · hidden in 16 bits, 4 · hidden · 4 · hidden bytes; with tiles, a part of it (section 5.1.3).
    """
    ops = played(tiles).program.cohorts[0].ops
    compute = [op for op in ops if isinstance(op.work, Block)]
    gathered = [op for op in ops if isinstance(op.work, Collective) and op.work.operation == "all_gather"]
    largest = max(MATRICES.values())
    of_tile = max(size for op in gathered for _, size in op.allocate if op.work.bytes <= 2 * largest)
    gradients = {size for op in compute for kind, size in op.allocate if kind == "temporary"}
    assert of_tile == 2 * largest / tiles
    assert 2 * largest / tiles in gradients
    assert of_tile + 2 * largest / tiles == 4 * HIDDEN * 4 * HIDDEN / tiles


def test_all_that_is_taken_is_given_back(played) -> None:
    """Also where tiles stay until they are used again, with recomputation and with parameters on the CPUs."""
    cpu = {"cpu": {"memory": "1 TB", "memory_bandwidth": "100 GB/s"}}
    cases = [
        {},
        {"recompute": "full"},
        {"overlap": False},
        {"deepspeed": {"stage3_max_reuse_distance": 10**9, "stage3_prefetch_bucket_size": 5000}},
        {"node": cpu, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
        {"accumulation": 2, "deepspeed": {"stage3_param_persistence_threshold": 0}},
    ]
    for case in cases:
        for op_kind in ("temporary", "activation"):
            ops = played(3, **dict(case)).program.cohorts[0].ops
            taken = sum(size for op in ops for kind, size in op.allocate if kind == op_kind)
            given = sum(size for op in ops for kind, size in op.free if kind == op_kind)
            assert given == pytest.approx(taken, rel=1e-12), case


def test_a_layer_that_does_not_fit_fits_in_tiles(toy_job, toy_prices) -> None:
    """A layer of hidden size 512 on 64 ranks with a vocabulary of 256: most is its matrices."""
    peaks = []
    for tiles in (1, 8):
        model = {"tied": False, "hidden": 512, "vocabulary": 256, "context": 32, "layers": 1}
        options = EACH | {"tiles": tiles, "reduce_bucket_size": 1000}
        job = toy_job(8, 8, model, data_parallel="zero3", deepspeed=options)
        peaks.append(ledger(run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices()), 0).peak)
    layer_bytes = 12 * 512**2 * 2
    assert peaks[0] - peaks[1] > layer_bytes  # parameters, and most of the gradients


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"data_parallel": "zero1"}, "deepspeed.tiles contradicts data_parallel=zero1; it describes zero3"),
        ({"tp": 2}, "deepspeed.tiles=2 is not simulated with tp=2"),
        ({"deepspeed": {"tiles": 2, "version": "0.5"}}, "deepspeed.tiles=2 is not simulated with deepspeed.version=0.5"),
        ({"deepspeed": {"tiles": 2, "zero_quantized_weights": True}}, "deepspeed.tiles=2 is not simulated with ZeRO++"),
        ({"lora": {"rank": 4, "targets": ["qkv"]}}, "deepspeed.tiles=2 is not simulated with lora"),
        ({"recompute": "operators", "kernels": "torch"}, "deepspeed.tiles=2 is not simulated with recompute=operators"),
    ],
)
def test_what_tiles_are_not_simulated_with_is_refused(toy_job, plan, said) -> None:
    with pytest.raises(UserError, match=said):
        toy_job(4, 1, {"tied": False}, **{"data_parallel": "zero3", "deepspeed": {"tiles": 2}} | plan).resolve()
