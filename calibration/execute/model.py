"""The transformer of a `Model` in plain PyTorch: as many parameters, the same matrix products, nothing fused by hand.

Imports torch: import this module inside the function that needs it.

    net = Transformer(model, sequence)                 # or one pipeline stage: layers=range(4, 8), head=False …
    loss(net(tokens), labels).backward()               # tokens, labels: (batch, sequence) integers

Query, key, value, gate and up are matrices of their own, as in most PyTorch code, so that tensor parallelism cuts each by
columns; `tensor_parallel` gives them one common input, and so one reduction of its gradient.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from calibration.execute.limits import check_model
from calibration.execute.recomputation import Recomputation
from strategies.models.model import Model
from topologies.reading import UserError

BASE = 10000.0  # of rotary frequencies (arXiv:2104.09864); it changes no size


class Attention(nn.Module):
    """Causal attention: flash calls scaled_dot_product_attention, materialised writes scores and probabilities to memory."""

    cosine: Tensor
    sine: Tensor
    future: Tensor

    def __init__(self, model: Model, sequence: int, attention: str, dropout: float) -> None:
        super().__init__()
        self.dim, self.flash, self.dropout = model.head_dim, attention == "flash", dropout
        self.repeat = model.heads // model.kv_heads
        width, shared = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.query = nn.Linear(model.hidden, width, model.attention_bias)
        self.key = nn.Linear(model.hidden, shared, model.attention_bias)
        self.value = nn.Linear(model.hidden, shared, model.attention_bias)
        self.output = nn.Linear(width, model.hidden, model.output_bias)
        self.rotary = model.positions == "rotary"
        if self.rotary:
            self.register_buffer("cosine", torch.empty(sequence, self.dim), persistent=False)
            self.register_buffer("sine", torch.empty(sequence, self.dim), persistent=False)
        if not self.flash:
            self.register_buffer("future", torch.empty(sequence, sequence), persistent=False)
        self.fill_tables()

    @torch.no_grad()
    def fill_tables(self) -> None:
        """Set rotary positions and the mask of the future, which a module that was built on the meta device does not have."""
        if self.rotary:
            rows = torch.arange(len(self.cosine), device=self.cosine.device)
            frequency = BASE ** -(torch.arange(0, self.dim, 2, device=self.cosine.device).float() / self.dim)
            angle = torch.outer(rows.float(), frequency).repeat(1, 2)
            self.cosine.copy_(angle.cos())
            self.sine.copy_(angle.sin())
        if not self.flash:
            self.future.fill_(-math.inf).triu_(1)

    def _turn(self, x: Tensor) -> Tensor:
        """Rotary positions: (batch, heads, sequence, dim)."""
        left, right = x.chunk(2, -1)
        return x * self.cosine.to(x.dtype) + torch.cat((-right, left), -1) * self.sine.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        q, k, v = (part(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for part in (self.query, self.key, self.value))
        if self.rotary:
            q, k = self._turn(q), self._turn(k)
        dropout = self.dropout if self.training else 0.0
        if self.flash:
            y = functional.scaled_dot_product_attention(q, k, v, None, dropout, True, enable_gqa=self.repeat > 1)
        else:
            if self.repeat > 1:
                k, v = k.repeat_interleave(self.repeat, 1), v.repeat_interleave(self.repeat, 1)
            scores = (q / math.sqrt(self.dim)) @ k.transpose(2, 3) + self.future.to(q.dtype)
            y = functional.dropout(scores.softmax(-1), dropout) @ v
        result: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    """GELU of one matrix, or SwiGLU of two, and the matrix back."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.ffn, model.mlp_bias) if model.gated else None
        self.up = nn.Linear(model.hidden, model.ffn, model.mlp_bias)
        self.down = nn.Linear(model.ffn, model.hidden, model.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        y = functional.silu(self.gate(x)) * self.up(x) if self.gate else functional.gelu(self.up(x))
        result: Tensor = self.down(y)
        return result


def _norm(model: Model) -> nn.Module:
    return nn.LayerNorm(model.hidden) if model.norm == "layernorm" else nn.RMSNorm(model.hidden, 1e-5)


class Layer(nn.Module):
    """Norm, attention, residual, norm, feed-forward, residual."""

    def __init__(self, model: Model, sequence: int, attention: str, dropout: bool) -> None:
        super().__init__()
        chance = 0.1 if dropout else 0.0
        self.attention_norm, self.feed_forward_norm = _norm(model), _norm(model)
        self.attention = Attention(model, sequence, attention, chance)
        self.feed_forward = FeedForward(model)
        self.dropout = nn.Dropout(chance) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return cast(Tensor, x + self.dropout(self.feed_forward(self.feed_forward_norm(x))))


class Embedding(nn.Module):
    """Token ids to features, with learned positions if the model has them."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.padded_vocabulary, model.hidden)
        self.positions = nn.Embedding(model.context, model.hidden) if model.positions == "learned" else None

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, sequence) integers to (batch, sequence, hidden)."""
        x: Tensor = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return x


class Head(nn.Module):
    """Final norm and the matrix to the vocabulary, each if the model has it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = _norm(model) if model.final_norm else nn.Identity()
        self.logits = nn.Linear(model.hidden, model.padded_vocabulary, bias=False) if model.head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to (batch, sequence, vocabulary)."""
        result: Tensor = self.logits(self.norm(x))
        return result


class Transformer(nn.Module):
    """A whole model, or the stage of a pipeline that has `layers`, and the embedding and the head where asked.

    attention: as the plan's. dropout: with probability 0.1. A tied head shares the embedding's matrix where both are in the same
    stage.
    """

    def __init__(
        self,
        model: Model,
        sequence: int,
        layers: range | None = None,
        *,
        embedding: bool = True,
        head: bool = True,
        attention: str = "flash",
        dropout: bool = False,
        recompute: Recomputation | None = None,
    ) -> None:
        check_model(model)
        super().__init__()
        self.recompute = recompute or Recomputation()
        self.embedding = Embedding(model) if embedding else None
        count = len(range(model.layers) if layers is None else layers)
        self.layers = nn.ModuleList(Layer(model, sequence, attention, dropout) for _ in range(count))
        self.head = Head(model) if head else None
        self.tied = model.tied and model.head
        for matrix in self.modules():
            if isinstance(matrix, nn.Linear | nn.Embedding):
                nn.init.normal_(matrix.weight, std=0.02)  # GPT-2's, so that the loss starts near log(vocabulary)
        self.tie()

    def tie(self) -> None:
        """Make the head's matrix the embedding's where the model says so and both are here."""
        if self.tied and self.embedding is not None and self.head is not None:
            self.head.logits.weight = self.embedding.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Token ids, or features where the embedding is elsewhere, to logits, or features where the head is elsewhere."""
        if self.embedding is not None:
            x = self.embedding(x)
        x = self.recompute.forward(x, list(self.layers))
        return x if self.head is None else cast(Tensor, self.head(x))


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens, in fp32. logits: (batch, sequence, vocabulary)."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


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
