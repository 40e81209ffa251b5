"""What the host takes to launch the kernels of a layer: modules in Python forward, autograd's engine backward; without a GPU.

`python -m calibration.measure.launches` prints it in CPU time, which others that compute beside it do not lengthen. The layer is
made as Megatron-LM's of 2021 (megatron/model/transformer.py), on tensors so small that next to nothing is computed.
Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, HIDDEN, HEADS = 4, 8, 2
PASSES, ROUNDS = 40, 12  # of each kind between two looks at the clock; of which the least counts
VIEWS = set("_unsafe_view detach empty empty_like expand lift_fresh permute select split t transpose view".split())


class _Fused(torch.autograd.Function):
    """A kernel that a function in Python launches, with a vector of parameters or without, and one or two for its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, vector: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, vector)
        return torch.neg(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        _, vector = ctx.saved_tensors
        return torch.neg(gradient), None if vector is None else gradient.sum((0, 1))


class _Region(torch.autograd.Function):
    """Where tensor parallel ranks would sum: nothing with one rank, but called."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return _Fused.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(nn.Module):
    """A matrix between two regions, whose bias is added by it or by what follows."""

    def __init__(self, inputs: int, outputs: int, adds: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.zeros(outputs))
        self.adds = adds

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        result = linear(_Region.apply(x), self.weight, self.bias if self.adds else None)  # type: ignore[no-untyped-call]
        return result, None if self.adds else self.bias


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.output = _Linear(HIDDEN, 3 * HIDDEN, True), _Linear(HIDDEN, HIDDEN, False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        mixed, _ = self.qkv(x)
        mixed = mixed.view(TOKENS, 1, HEADS, 3 * HIDDEN // HEADS)
        query, key, value = (each.view(TOKENS, HEADS, -1).transpose(0, 1) for each in mixed.split(HIDDEN // HEADS, -1))
        empty = torch.empty(HEADS, TOKENS, TOKENS)
        scores = torch.baddbmm(empty, query, key.transpose(1, 2), beta=0.0, alpha=0.5).view(1, HEADS, TOKENS, TOKENS)
        chances = torch.native_dropout(_Fused.apply(scores, None), 0.1, True)[0]  # type: ignore[no-untyped-call]
        context = torch.bmm(chances.view(HEADS, TOKENS, TOKENS), value).view(1, HEADS, TOKENS, -1)
        return self.output(context.permute(2, 0, 1, 3).contiguous().view(TOKENS, 1, HIDDEN))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Norm, attention, residual, norm, MLP, residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.attention = _Norm(), _Norm(), _Attention()
        self.up, self.down = _Linear(HIDDEN, 4 * HIDDEN, False), _Linear(4 * HIDDEN, HIDDEN, False)

    def forward(self, x: Tensor) -> Tensor:
        result, bias = self.attention(self.first(x))
        x = x + (result + bias)
        inner, bias = self.up(self.second(x))
        result, bias = self.down(_Fused.apply(inner, bias))  # type: ignore[no-untyped-call]
        return x + (result + bias)  # type: ignore[no-any-return]


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators that would launch a kernel."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func).split(".")[1] not in VIEWS
        return func(*args, **(kwargs or {}))


def counted(action: Callable[[], object]) -> int:
    """Kernels that an action would launch on a GPU."""
    with _Kernels() as kernels:  # type: ignore[no-untyped-call]
        action()
    return int(kernels.count)


def _steps(logits: Tensor, targets: Tensor) -> Tensor:
    """Steps of a loss that a function in Python calls one by one (megatron/mpu/cross_entropy.py)."""
    logits = logits - logits.max(-1)[0].unsqueeze(-1)
    outside = (targets < 0) | (targets >= HIDDEN)
    places = targets.clone()
    places[outside] = 0
    chosen = logits[torch.arange(TOKENS), places]
    chosen[outside] = 0.0
    return logits.exp().sum(-1).log() - chosen


def launches() -> dict[str, float]:
    """Seconds of CPU time for each kernel of the forward and of the backward pass, for each gradient that is added to the one
    before, and for each step of a loss.
    """
    torch.set_num_threads(1)
    layer, x = Layer(), torch.randn(TOKENS, 1, HIDDEN, requires_grad=True)
    targets, one = torch.zeros(TOKENS, dtype=torch.long), torch.ones(TOKENS, 1, HIDDEN)
    parameters = [*layer.parameters(), x]

    def free() -> None:
        for parameter in parameters:
            parameter.grad = None

    taken: dict[str, list[float]] = {"forward": [], "backward": [], "added": [], "steps": []}
    for _ in range(ROUNDS):
        forward = backward = added = steps = 0.0
        for _ in range(PASSES):
            free()
            start = time.process_time()
            result = layer(x)
            middle = time.process_time()
            torch.autograd.backward(result, one)
            end = time.process_time()
            forward, backward = forward + middle - start, backward + end - middle
            result = layer(x)
            start = time.process_time()
            torch.autograd.backward(result, one)
            middle = time.process_time()
            _steps(x[:, 0].detach(), targets)
            end = time.process_time()
            added, steps = added + middle - start, steps + end - middle
        for name, seconds in zip(taken, (forward, backward, added, steps), strict=True):
            taken[name].append(seconds / PASSES)
    least = {name: min(seconds) for name, seconds in taken.items()}
    free()
    result = layer(x)
    return {
        "forward": least["forward"] / counted(lambda: layer(x)),
        "backward": least["backward"] / counted(lambda: torch.autograd.backward(result, one)),
        "addition": max(0.0, least["added"] - least["backward"]) / len(parameters),
        "operator": least["steps"] / counted(lambda: _steps(x[:, 0].detach(), targets)),
    }


if __name__ == "__main__":
    each = launches()
    ratio = each["backward"] / each["forward"]
    figures = ", ".join(f"{name} {1e6 * seconds:.1f} us" for name, seconds in each.items())
    print(f"CPU time of a launch with torch {torch.__version__}: {figures}; backward over forward {ratio:.2f}")
