"""When DDP starts to reduce a bucket: after which product of the backward pass, with which gradients. Against its own reducer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sim.program import Block, Cohort, Collective, Kernel
from strategies.layers.model_costs import parts
from strategies.layers.operators import Shape
from strategies.lowering.lower import lower
from strategies.lowering.stage import Stage
from strategies.models.model import Model
from tests.conftest import LLAMA_LAYER, SMALL

GPT = SMALL | {"layers": 2, "vocabulary": 128}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "gpt without biases": GPT | {"attention_bias": False, "output_bias": False, "mlp_bias": False},
    "llama": GPT | LLAMA_LAYER | {"kv_heads": 4, "ffn": 96},
    "biased queries": GPT | LLAMA_LAYER | {"kv_heads": 2, "ffn": 80, "attention_bias": True},
}
SEQUENCE = 16
Starts = list[tuple[int, tuple[Shape, ...]]]  # of each bucket: products of the backward pass so far, shapes of its gradients


def of_the_reducer(model: Model, attention: str, bucket: float) -> Starts:
    """Of the second step, when the reducer has seen the order of gradients. gloo's group of one rank: nothing is waited for."""
    torch = pytest.importorskip("torch")
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils._python_dispatch import TorchDispatchMode

    from calibration.execute.model import Transformer, loss

    class Products(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += func.overloadpacket.__name__ in ("mm", "addmm", "bmm")
            return func(*args, **(kwargs or {}))

    result: Starts = []

    def start(products: Products, bucket: Any) -> Any:
        result.append((products.seen, tuple(tuple(gradient.shape) for gradient in bucket.gradients())))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        net = DistributedDataParallel(Transformer(model, SEQUENCE, attention=attention), bucket_cap_mb=bucket / 2**20)
        products = Products()
        net.register_comm_hook(products, lambda state, bucket: start(state, bucket))  # it reads annotations
        tokens = torch.zeros(1, SEQUENCE, dtype=torch.long)
        for _ in range(2):
            result.clear()
            error = loss(net(tokens), tokens)
            products.seen = 0
            with products:
                error.backward()
    finally:
        dist.destroy_process_group()
    return result


@pytest.mark.parametrize("bucket", [1, 10_000, 40_000])
@pytest.mark.parametrize("attention", ["flash", "materialised"])
@pytest.mark.parametrize("name", MODELS)
def test_buckets_start_where_ddp_starts_them(toy_job, name: str, attention: str, bucket: float) -> None:
    plan = {"kernels": "torch", "precision": "fp32", "data_parallel": "ddp", "sequence": SEQUENCE, "attention": attention}
    job = toy_job(8, 1, MODELS[name], bucket=f"{bucket} B", **plan)
    work = parts(job.model, job.resolve())
    stage = Stage(0, 0, 0, Cohort({}), [work.embedding, *work.stage(0, 2), work.head], job.resolve(), job.model)
    (cohort,) = lower(job.model, job.resolve()).cohorts
    ours = list(zip(starts(cohort.ops), (each.shapes for each in stage.buckets()), strict=True))
    assert ours == of_the_reducer(job.model, attention, bucket)


def starts(ops: Any) -> Iterator[int]:
    """Products of the backward pass before each reduction."""
    products = 0
    for op in ops:
        if isinstance(op.work, Collective):
            yield products
        if isinstance(op.work, Block) and op.work.name == "backward":
            kernels = ((run.times, item) for run in op.work.runs for item in run.items if isinstance(item, Kernel))
            products += sum(times for times, kernel in kernels if kernel.kind == "gemm")
