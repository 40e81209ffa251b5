"""Small modules that are traced: each by what it has that others have not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Row(nn.Module):
    """Calls a function of its parts and its inputs."""

    def __init__(self, call: Any, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.call = call

    def forward(self, *inputs: Any) -> Any:
        """What `call` returns."""
        return self.call(self, *inputs)


def images() -> nn.Module:
    """Convolutions: padded, in groups, depthwise, transposed; norms over batches and groups."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8, padding=1),
        nn.Conv2d(8, 16, 1, groups=2, stride=2, bias=False),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.ConvTranspose2d(16, 6, 2, stride=2),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 10),
    )


def pixels() -> nn.Module:
    """A class for each pixel: the loss has a row for each. Volumes, too."""

    def call(own: Any, image: Any) -> Any:
        volume = own.deep(image.unsqueeze(1)).squeeze(1)
        return SimpleNamespace(loss=functional.cross_entropy(volume, volume.detach()[:, 0].long()), logits=volume)

    return Row(call, deep=nn.Conv3d(1, 1, 3, padding=1))


class Block(nn.Module):
    """Attention of which the plan says whether it is one kernel, a norm and a perceptron with dropout."""

    def __init__(self, width: int, heads: int, mask: bool, cross: bool) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.heads, self.mask, self.cross = heads, mask, cross
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Any) -> Any:
        """A layer's result."""
        batch, tokens, width = x.shape
        shape = batch, tokens, self.heads, width // self.heads
        q, k, v = (each.reshape(shape).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        if self.cross:
            k, v = k[:, :, ::2], v[:, :, ::2]
        mask = x.new_zeros(tokens, k.shape[2]) if self.mask else None
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not (self.mask or self.cross))
        x = x + functional.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)), 0.1, self.training)
        return x + self.down(functional.gelu(self.up(self.last(x) * self.scale)))


def _language(mask: bool = False, cross: bool = False, tied: bool = False, frozen: bool = False) -> nn.Module:
    words, head = nn.Embedding(96, 32), nn.Linear(32, 96, bias=False)
    if tied:
        head.weight = words.weight
    words.weight.requires_grad_(not frozen)
    blocks = [Block(32, 4, mask, cross) for _ in range(3)]
    if frozen:
        for each in blocks[:1]:
            each.requires_grad_(False)
        blocks[1].qkv.requires_grad_(False)
    return nn.Sequential(words, nn.Sequential(*blocks), nn.LayerNorm(32), head)


def causal() -> nn.Module:
    """A decoder of three blocks."""
    return _language()


def masked() -> nn.Module:
    """With a mask attention is operators; the embedding is the head, too."""
    return _language(mask=True, tied=True)


def crossed() -> nn.Module:
    """Half as many keys as queries."""
    return _language(cross=True)


def partly_frozen() -> nn.Module:
    """The embedding, a block and a matrix of the next have no gradients."""
    return _language(frozen=True)


def operators() -> nn.Module:
    """Reductions, products of batches, binary and other operators; a part that runs twice."""

    def call(own: Any, x: Any, y: Any) -> Any:
        x = own.first(x) * own.first(y) - x / (y + 1)
        scores = torch.baddbmm(x, x, x.transpose(1, 2)) + torch.bmm(x, x)
        weights = torch.softmax(scores, -1) + torch.log_softmax(scores, 1).exp()
        mean = weights.mean(-1, keepdim=True) + weights.amax(1, keepdim=True) + weights.std(2, keepdim=True)
        norm = torch.linalg.vector_norm(weights, dim=-1, keepdim=True) + weights.cumsum(1) + weights.var((1, 2), keepdim=True)
        largest = weights.topk(2, -1).values.sum(-1, keepdim=True) + weights.logsumexp(1, keepdim=True)
        return own.last((mean + norm + largest + functional.silu(x)).clamp(0, 1).float().to(x.dtype))

    return Row(call, first=nn.Linear(12, 12), last=nn.Linear(12, 5))


def statistics_of_all() -> nn.Module:
    """Batch norms over all ranks, in two blocks that are alike and one that is not."""

    class Cell(nn.Module):
        def __init__(self, channels: int, kernel: int) -> None:
            super().__init__()
            self.turn = nn.Conv1d(channels, channels, kernel, padding=kernel // 2, bias=False)
            self.norm = nn.SyncBatchNorm(channels)

        def forward(self, x: Any) -> Any:
            return functional.relu(self.norm(self.turn(x)))

    return nn.Sequential(Cell(6, 3), Cell(6, 3), Cell(6, 5), nn.Flatten(), nn.Linear(6 * 20, 3))


def bags() -> nn.Module:
    """Rows of a table looked up twice, and a number for each sample."""

    def call(own: Any, numbers: Any, weights: Any) -> Any:
        rows = own.table(numbers) + own.table(numbers.flip(1))
        return own.one(functional.dropout(rows.mean(1), 0.3) * weights)

    return Row(call, table=nn.Embedding(50, 16), one=nn.Linear(16, 1))
