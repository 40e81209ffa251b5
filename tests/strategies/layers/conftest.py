"""Small models, and what is counted of their layers."""

from __future__ import annotations

import math
from typing import Any

from sim.program import Kernel
from strategies.layers.tensor_overlap import Items
from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from tests.conftest import LLAMA_LAYER

GPT: dict[str, Any] = {"name": "gpt", "hidden": 64, "layers": 3, "heads": 8, "vocabulary": 512, "context": 32}

LLAMA: dict[str, Any] = GPT | {
    "name": "llama",
    "kv_heads": 2,
    "ffn": 96,
    **LLAMA_LAYER,
}

KORTHIKANTI: dict[str, Any] = {"attention": "materialised", "dropout": True}


def resolved(model: Model, **plan: Any) -> Resolved:
    return Resolved.of(Plan(**plan), model, plan.get("tp", 1))


def flops(items: Items) -> float:
    return sum(item.flops for item in items if isinstance(item, Kernel))


class Torch:
    """One tp rank's layer and head, written with plain torch functions on the meta device."""

    def __init__(self, model: Model, tp: int, batch: int, sequence: int) -> None:
        import torch

        self.heads, self.kv, self.dim = model.heads // tp, model.kv_heads // tp, model.head_dim
        self.model, self.torch, self.shape = model, torch, (batch, sequence)
        hidden, ffn = model.hidden, model.ffn // tp
        sizes = {
            "qkv": (hidden, (self.heads + 2 * self.kv) * self.dim),
            "output": (self.heads * self.dim, hidden),
            "up": (hidden, ffn * (1 + model.gated)),
            "down": (ffn, hidden),
            "head": (hidden, model.padded_vocabulary // tp),
        }
        self.weights = {name: self.tensor(size[1], size[0]) for name, size in sizes.items()}
        self.norms = [self.tensor(hidden) for _ in range(4)]

    def tensor(self, *size: int) -> Any:
        return self.torch.empty(*size, device="meta", dtype=self.torch.bfloat16, requires_grad=True)

    def layer(self, x: Any) -> Any:
        functional, (batch, sequence) = self.torch.nn.functional, self.shape
        y = functional.layer_norm(x, x.shape[-1:], self.norms[0], self.norms[1])
        widths = [self.heads * self.dim, self.kv * self.dim, self.kv * self.dim]
        q, k, v = (
            t.view(batch, sequence, -1, self.dim).transpose(1, 2)
            for t in functional.linear(y, self.weights["qkv"]).split(widths, -1)
        )
        if self.kv < self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
        y = (q @ k.transpose(2, 3) / math.sqrt(self.dim)).softmax(-1) @ v
        x = x + functional.linear(y.transpose(1, 2).reshape(batch, sequence, -1), self.weights["output"])
        y = functional.linear(functional.layer_norm(x, x.shape[-1:], self.norms[2], self.norms[3]), self.weights["up"])
        if self.model.gated:
            gate, up = y.chunk(2, -1)
            return x + functional.linear(functional.silu(gate) * up, self.weights["down"])
        return x + functional.linear(functional.gelu(y), self.weights["down"])


def kernels(items: Items, label: str) -> list[Kernel]:
    return [item for item in items if isinstance(item, Kernel) and item.label == label]
