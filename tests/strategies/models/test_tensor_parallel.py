"""Modules that PyTorch itself cuts over tp ranks, traced: as CommDebugMode sees them, and as a transformer is described."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardyard import Job, read_job, simulate, summarise
from sim.program import Collective, Kernel
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import parts
from strategies.models.tracing.tracer import trace_of
from topologies.reading import UserError

FOLDER = Path(__file__).parents[3] / "examples/modules"
PLAN: dict[str, Any] = {"microbatch": 2, "global_batch": 16, "kernels": "torch"}
SIZES: dict[str, Any] = {
    "name": "transformer",
    "hidden": 256,
    "layers": 3,
    "heads": 4,
    "kv_heads": 4,
    "ffn": 1024,
    "gated": False,
    "vocabulary": 1024,
    "context": 256,
    "positions": "none",
    "norm": "layernorm",
    "attention_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "tied": False,
}


@pytest.fixture(scope="module")
def example() -> Any:
    sys.path.insert(0, str(FOLDER))
    import transformer  # type: ignore[import-not-found]

    sys.path.remove(str(FOLDER))
    return transformer


def small(example: Any) -> Any:
    return example.Transformer(256, 3, 1024)


def traced(example: Any, how: Any, tp: int, **plan: Any) -> Job:
    return read_job(
        None,
        model=lambda: small(example),
        input="256:int64",
        parallelize=how,
        cluster="dgx-h100",
        plan=PLAN | {"tp": tp} | plan,
    )


def collectives(part: LayerCost, way: str) -> list[tuple[str, float]]:
    return [(item.operation, item.bytes) for item in getattr(part, way) if isinstance(item, Collective)]


def moved(part: LayerCost, way: str) -> tuple[float, float]:
    """FLOPs and bytes of its kernels."""
    kernels = [item for item in getattr(part, way) if isinstance(item, Kernel)]
    return sum(kernel.flops for kernel in kernels), sum(kernel.bytes for kernel in kernels)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_block_cut_by_pytorch_is_the_layer_described(example: Any, tp: int) -> None:
    """With sequence parallelism: collectives, products, bytes, what is kept, parameters, to the last digit."""
    own = traced(example, example.with_sequence_parallel, tp)
    described = read_job(
        None, model=SIZES, cluster="dgx-h100", plan=PLAN | {"tp": tp, "sequence_parallel": True, "sequence": 256}
    )
    block, layer = (parts(job.model, job.resolve()).layer(1) for job in (own, described))
    for way in ("forward", "backward"):
        assert collectives(block, way) == collectives(layer, way)
        assert moved(block, way)[0] == moved(layer, way)[0]
        assert moved(block, way)[1] == pytest.approx(moved(layer, way)[1], rel=0.001)  # gradients of norms are added up apart
    assert (block.parameters, block.replicated, block.saved) == (layer.parameters, layer.replicated, layer.saved)
    assert block.model_flops == layer.model_flops
    assert block.partial == layer.replicated
    traced_step, described_step = (summarise(simulate(job)) for job in (own, described))
    assert traced_step.step_seconds == pytest.approx(described_step.step_seconds, rel=0.05)


@pytest.mark.parametrize("how", ["parallelize", "with_sequence_parallel"])
def test_collectives_are_those_that_comm_debug_mode_counts(example: Any, how: str) -> None:
    """In forward and backward of the whole module, on a process group of four that sends nothing."""
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.nn import functional
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        net, mode = small(example), CommDebugMode()
        getattr(example, how)(net, init_device_mesh("cpu", (4,)))
        with mode:
            logits = net(torch.zeros(2, 256, dtype=torch.long))
            functional.cross_entropy(logits.flatten(0, 1), torch.zeros(512, dtype=torch.long)).backward()
        counted = {str(operation).rpartition(".")[2]: number for operation, number in mode.get_comm_counts().items()}
    finally:
        distributed.destroy_process_group()
    job = traced(example, getattr(example, how), 4)
    assert job.model.module is not None
    trace = trace_of(job.model.module, 2, "bf16", tp=4)
    found = Counter(op.name.partition(".")[2] for op in trace.ops if op.name.startswith("_c10d_functional"))
    assert found == counted


def test_parameters_and_flops_are_of_the_whole_module(example: Any) -> None:
    whole, cut = traced(example, None, 1), traced(example, example.with_sequence_parallel, 4)
    assert whole.model.parameters == cut.model.parameters
    one, four = (summarise(simulate(job)) for job in (whole, cut))
    assert four.worst.kinds["optimizer"] == pytest.approx(one.worst.kinds["optimizer"] / 4, rel=0.01)
    assert cut.resolve().dp == 2
    each = [parts(job.model, job.resolve()) for job in (whole, cut)]
    assert each[0].head.model_flops == each[1].head.model_flops


@pytest.mark.parametrize(
    "plan", [{"data_parallel": "zero3"}, {"pp": 2}, {"recompute": "full"}, {"data_parallel": "zero1", "tp": 2}], ids=str
)
def test_it_goes_with_the_rest_of_a_plan(example: Any, plan: dict[str, Any]) -> None:
    job = traced(example, example.parallelize, **{"tp": 4} | plan)
    folded, unfolded = (summarise(simulate(job, fold=fold)) for fold in (True, False))
    assert folded.ideal_seconds == unfolded.ideal_seconds
    assert folded.volume["tp"].bytes > 0


def test_what_cannot_be_cut_says_so(example: Any) -> None:
    with pytest.raises(UserError, match="tp=2: how tp ranks cut a traced module has to be said: --parallelize FILE.py:NAME"):
        traced(example, None, 2).resolve()

    def broken(net: Any, mesh: Any) -> None:
        raise RuntimeError("no such layer")

    with pytest.raises(UserError, match=r"tp=2: model.parallelize broken.*: failed on tp=2 ranks: RuntimeError: no such layer"):
        traced(example, broken, 2).resolve()
    with pytest.raises(UserError, match="sequence_parallel=True: is not done to a traced module"):
        traced(example, example.parallelize, 2, sequence_parallel=True).resolve()
    with pytest.raises(UserError, match="--parallelize .* is for a module"):
        read_job(None, model="llama-3.1-8b", parallelize="x.py:cut", cluster="dgx-h100")


def test_named_in_a_job_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        (FOLDER / "transformer.py").read_text().replace("Transformer(2048, 24, 32_768)", "Transformer(256, 2, 512)")
    )
    text = "model: {module: 'mine.py:transformer', input: '64:int64', parallelize: 'mine.py:parallelize'}\ncluster: dgx-h100\n"
    (tmp_path / "job.yaml").write_text(text + "plan: {tp: 2, global_batch: 16}\n")
    job = read_job(tmp_path / "job.yaml")
    assert "tp" in summarise(simulate(job)).volume
