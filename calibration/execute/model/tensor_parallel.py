"""A transformer cut over tp ranks by torch.distributed.tensor.parallel.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from typing import Any

from calibration.execute.model import Transformer
from topologies.reading import UserError


def tensor_parallel(net: Transformer, mesh: Any, sequence_parallel: bool = False) -> Transformer:
    """Cut `net` in place over the one-dimensional device mesh, as Megatron-LM does, with torch.distributed.tensor.parallel.

    Embedding, head and the matrices of every layer are cut; norms and, without sequence parallelism, the residual stream are
    whole. The loss must run in `torch.distributed.tensor.parallel.loss_parallel()`: logits are a DTensor cut over the vocabulary.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as style

    stream = Shard(1) if sequence_parallel else Replicate()
    if sequence_parallel and net.embedding is not None and net.embedding.positions is not None:
        raise UserError("sequence_parallel=true is not executed with positions=learned: each rank would need its own rows")
    prepare = style.PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {
        "embedding.tokens": style.RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head.logits": style.ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
        "layers.*.attention": prepare,
        "layers.*.feed_forward": prepare,
        "layers.*.attention.output": style.RowwiseParallel(output_layouts=stream),
        "layers.*.feed_forward.down": style.RowwiseParallel(output_layouts=stream),
    }
    columns = ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up")
    plan |= {f"layers.*.{name}": style.ColwiseParallel() for name in columns}
    if sequence_parallel:
        norms = ("layers.*.attention_norm", "layers.*.feed_forward_norm", "head.norm")
        plan |= {name: style.SequenceParallel(use_local_output=True) for name in norms}
    held = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name, _ in net.named_modules()}
    style.parallelize_module(net, mesh, {name: how for name, how in plan.items() if name in held})
    net.tie()  # each got a parameter of its own
    return net
