"""A small decoder in plain PyTorch with LoRA as PEFT wraps linear layers: W·x frozen, plus B(A(dropout(x))) · α/r."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HIDDEN, HEADS, FFN, LAYERS, VOCABULARY = 256, 4, 1024, 4, 1024
EXPERTS, CHOSEN = 4, 2
SIZES: Mapping[str, Any] = {
    "name": "small decoder",
    "hidden": HIDDEN,
    "layers": LAYERS,
    "heads": HEADS,
    "kv_heads": HEADS,
    "ffn": FFN,
    "gated": False,
    "vocabulary": VOCABULARY,
    "context": 512,
    "positions": "none",
    "norm": "layernorm",
    "attention_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "tied": False,
}


class Adapted(nn.Module):
    """A linear layer with an adapter; dora: and magnitudes of its rows, as PEFT's DoraLinearLayer has them."""

    def __init__(self, base: nn.Linear, rank: int, dropout: float, dora: bool = False) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.lora_magnitude = nn.Parameter(torch.ones(base.out_features)) if dora else None

    def forward(self, x: torch.Tensor) -> Any:
        if self.lora_magnitude is not None:
            dropped, result = self.dropout(x), self.base(x)
            eye = torch.eye(self.base.in_features, device=x.device, dtype=x.dtype)
            with torch.no_grad():
                matrix = self.lora_B(self.lora_A(eye)).T
                length = torch.linalg.norm(self.base.weight + 2.0 * matrix, dim=1)
            scale = (self.lora_magnitude / length).view(1, -1)
            again = result if isinstance(self.dropout, nn.Identity) else functional.linear(dropped, self.base.weight)
            return result + ((scale - 1) * again + scale * self.lora_B(self.lora_A(dropped)) * 2.0)
        return self.base(x) + self.lora_B(self.lora_A(self.dropout(x))) * 2.0


class Block(nn.Module):
    def __init__(self, adapted: Collection[str], rank: int, dropout: float, dora: bool) -> None:
        super().__init__()

        def linear(name: str, inputs: int, outputs: int) -> nn.Module:
            base = nn.Linear(inputs, outputs, bias=False)
            return Adapted(base, rank, dropout, dora) if name in adapted else base

        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(name, HIDDEN, HIDDEN) for name in "qkvo")
        self.up, self.down = linear("up", HIDDEN, FFN), linear("down", FFN, HIDDEN)

    def forward(self, x: torch.Tensor) -> Any:
        batch, tokens, _ = x.shape
        normed = self.attention_norm(x)
        q, k, v = (
            each(normed).view(batch, tokens, HEADS, -1).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        core = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(core.transpose(1, 2).reshape(batch, tokens, HIDDEN))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """adapted: linear layers with adapters, beside which all is frozen; frozen_layers: with the embedding."""

    def __init__(
        self,
        adapted: Collection[str] = (),
        rank: int = 8,
        dropout: float = 0.0,
        frozen_layers: int = 0,
        dora: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(adapted, rank, dropout, dora) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not adapted or "lora_" in name)
        for part in (self.embedding, *self.blocks[:frozen_layers]) if frozen_layers else ():
            part.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class MixtureBlock(nn.Module):
    """Experts beside a shared one, all frozen: token t goes to the experts t, t + 1, … of which it takes the router's weights."""

    def __init__(self, adapted: Collection[str], rank: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(HIDDEN, FFN, bias=False), "down": nn.Linear(FFN, HIDDEN, bias=False)})
            for _ in range(EXPERTS + 1)
        )
        self.requires_grad_(False)
        for expert in self.experts:
            for name in adapted:
                expert[name] = Adapted(expert[name], rank, dropout=0.0)

    def forward(self, x: torch.Tensor) -> Any:
        weights = self.router(x).softmax(-1)
        result = x + self._of(EXPERTS, x)
        for number in range(EXPERTS):
            mine = torch.cat([torch.arange((number - place) % EXPERTS, len(x), EXPERTS) for place in range(CHOSEN)])
            result = result.index_add(0, mine, self._of(number, x[mine]) * weights[mine, number, None])
        return result

    def _of(self, number: int, x: torch.Tensor) -> Any:
        expert = self.experts[number]
        return expert["down"](functional.gelu(expert["up"](x)))
