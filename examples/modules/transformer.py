"""A transformer of one's own, cut over tp ranks by PyTorch itself (`parallelize_module`), as its documentation has it.

    shardyard simulate --model examples/modules/transformer.py:transformer --input 1024:int64 --cluster dgx-h100 \
        --parallelize examples/modules/transformer.py:parallelize --set plan.tp=4 --set plan.microbatch=4
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

HEAD = 64  # features of an attention head
COLUMNS = ("attention.query", "attention.key", "attention.value", "up")
ROWS = ("attention.output", "down")


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same; with -1 heads, of which a tp rank has its own."""
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.query, self.key, self.value))
        core = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.output(core.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = Attention(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to the same."""
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return result


class Transformer(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self, hidden: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.Sequential(*(Block(hidden) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens) to (batch, tokens, vocabulary)."""
        result: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return result


def transformer() -> Transformer:
    """1.3 billion parameters."""
    return Transformer(2048, 24, 32_768)


def parallelize(net: Transformer, mesh: Any) -> None:
    """Queries, keys, values and the MLP's first matrix by columns, the others by rows: an all-reduce after each pair, and
    backward one for each matrix that is cut by columns.
    """
    for block in net.blocks:
        parallelize_module(block, mesh, dict.fromkeys(COLUMNS, ColwiseParallel()) | dict.fromkeys(ROWS, RowwiseParallel()))


def with_sequence_parallel(net: Transformer, mesh: Any) -> None:
    """The same, and between the pairs each rank has its part of the tokens: a gather before them, a reduce-scatter after them."""
    tokens, whole = Shard(1), Replicate()
    for block in net.blocks:
        plan = dict.fromkeys(COLUMNS[:3], ColwiseParallel()) | {"up": ColwiseParallel(input_layouts=tokens)}
        plan |= dict.fromkeys(ROWS, RowwiseParallel(output_layouts=tokens))
        plan |= dict.fromkeys(("attention_norm", "mlp_norm"), SequenceParallel())
        plan |= {"attention": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole)}  # one gather for three
        parallelize_module(block, mesh, plan)
    plan = {"embedding": RowwiseParallel(input_layouts=whole, output_layouts=tokens), "norm": SequenceParallel()}
    parallelize_module(net, mesh, plan | {"head": ColwiseParallel(input_layouts=tokens, output_layouts=whole)})


def main() -> None:
    """The step on one node as tp grows, and what a rank sends for it."""
    from shardyard import read_job, simulate, summarise

    print("tp  how               step in ms  tp sent in GB  peak in GB")
    for tp, how in ((1, None), (2, parallelize), (4, parallelize), (4, with_sequence_parallel), (8, with_sequence_parallel)):
        job = read_job(
            None,
            model=transformer,
            input="1024:int64",
            parallelize=how,
            cluster="dgx-h100",
            plan={"tp": tp, "microbatch": 4, "global_batch": 32},
        )
        summary = summarise(simulate(job))
        sent = summary.volume["tp"].bytes / 1e9 if "tp" in summary.volume else 0.0
        name = "" if how is None else "all-reduces" if how is parallelize else "sequence parallel"
        print(f"{tp:2}  {name:17} {1e3 * summary.step_seconds:10.1f}  {sent:13.2f}  {summary.worst.peak / 1e9:10.1f}")


if __name__ == "__main__":
    main()
