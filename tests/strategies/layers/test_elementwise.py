"""Kernels between matrix products against what PyTorch dispatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strategies.frameworks import kernel_set
from strategies.frameworks.passes import Ways
from strategies.lowering.optimizer_step import before_reduction, passes_of
from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved

ROWS, WIDTH = 64, 2048
OWN = ("new_empty", "copy_", "add_.")  # gradients of the test's inputs being put into place


def moved(function: Callable[..., Any], inputs: list[Any]) -> tuple[float, float]:
    """Bytes per element that the operators of `function` and of its backward read and write, vectors left out."""
    from torch import Tensor, ones_like
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        total = 0.0

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = op(*args, **(kwargs or {}))
            if not op.is_view and not any(own in str(op) for own in OWN):
                flat = [*args, result, *(t for each in args if isinstance(each, list) for t in each)]
                tensors = [t for t in flat if isinstance(t, Tensor)]
                large = [t.numel() * t.element_size() for t in tensors if 4 * t.numel() >= inputs[0].numel()]
                self.total += sum(large) / inputs[0].numel()
            return result

    with Count() as forward:
        result = function(*inputs)
    gradient = ones_like(result)
    with Count() as backward:
        result.backward(gradient)
    return forward.total, backward.total


def halves(count: int, dtype: str = "bfloat16") -> list[Any]:
    import torch

    return [torch.randn(ROWS, WIDTH, dtype=getattr(torch, dtype), requires_grad=True) for _ in range(count)]


def rms_norm(x: Any, weight: Any) -> Any:
    y = x.float()
    y = y * (y.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    return weight * y.to(x.dtype)


def silu_gate(gate: Any, up: Any) -> Any:
    from torch.nn.functional import silu

    return silu(gate) * up


def turn(x: Any, angle: Any) -> Any:
    from torch import cat

    half = x.shape[-1] // 2
    return x * angle + cat((-x[..., half:], x[..., :half]), -1) * angle


def total(ways: Ways) -> tuple[float, float]:
    return sum(kernel.moved for kernel in ways.forward), sum(kernel.moved for kernel in ways.backward)


def test_eager_kernels_move_what_pytorch_moves() -> None:
    import torch

    vector = torch.ones(WIDTH, dtype=torch.bfloat16)
    assert moved(lambda x: rms_norm(x, vector.requires_grad_()), halves(1)) == total(kernel_set("torch").norm(True, 2))
    assert moved(silu_gate, halves(2)) == total(kernel_set("torch").gate(2))
    assert moved(lambda x: turn(x, vector.detach()), halves(1)) == total(kernel_set("torch").rotary(2))


def test_eager_norms_of_fp32_need_no_cast() -> None:
    import torch

    weight = torch.ones(WIDTH, requires_grad=True)
    ways = kernel_set("torch").norm(True, 4)
    assert moved(lambda x: rms_norm(x, weight), halves(1, "float32")) == total(ways)
    assert [kernel.moved for kernel in ways.forward] == [8, 4, 8, 8]  # the square, its mean, the scale by that and by the weight


@pytest.mark.parametrize("width", [2, 4])
def test_fused_kernels_move_less(width: int) -> None:
    for fused, eager in (
        (kernel_set("megatron").norm(True, width), kernel_set("torch").norm(True, width)),
        (kernel_set("compiled").gate(width), kernel_set("torch").gate(width)),
        (kernel_set("megatron").softmax(True, width), kernel_set("torch").softmax(True, width)),
        (kernel_set("compiled").residual(width, True), kernel_set("torch").residual(width, True)),
    ):
        assert sum(total(fused)) < sum(total(eager))
        assert len(fused.forward) <= len(eager.forward)


def test_an_update_by_hand() -> None:
    """fp16 with fp32 gradients: unscaled in place, normed, read with three fp32 states, copied to 16 bits, set to zero."""
    assert passes_of(Plan(precision="fp16", gradients="fp32")) == [
        ("loss unscaling", 8),
        ("gradient norm", 4),
        ("adam", 4 + 2 * 12),
        ("parameter copy", 6),
        ("gradient zeroing", 4),
    ]
    assert passes_of(Plan(precision="bf16")) == [
        ("gradient copy", 6),
        ("gradient norm", 4),
        ("adam", 4 + 2 * 12),
        ("parameter copy", 6),
        ("gradient zeroing", 2),
    ]
    sgd = ("sgd", 4 + 8), ("gradient zeroing", 4)
    assert passes_of(Plan(precision="fp32", optimizer="sgd")) == [("gradient norm", 4), *sgd]
    assert passes_of(Plan(precision="fp32", optimizer="sgd", clip_gradients=False)) == [*sgd]


def test_gradients_before_they_are_reduced_by_hand() -> None:
    """A norm and a scaling in place of each bucket (start_grad_sync); in 2021 a division, and copies of 16-bit gradients."""
    fp32 = {"precision": "bf16", "gradients": "fp32"}
    check, scale = ("gradient check", 4), ("gradient scale", 8)
    apex = {"kernels": "apex"}
    for plan, copies, expected in (
        (fp32, 8, [check, scale]),
        (fp32, 1, [check]),  # the factor is 1
        (fp32 | {"average_in_collective": True}, 8, [check]),
        (fp32 | {"check_gradients": False}, 8, [scale]),
        ({"precision": "fp16", "gradients": "fp32"}, 8, [scale]),  # infinities are the loss scaler's
        (fp32 | {"data_parallel": "zero3"}, 8, []),
        (fp32 | {"kernels": "torch"}, 8, [("gradients from buckets", 8)]),
        (fp32 | {"kernels": "torch", "gradient_as_bucket_view": True}, 8, []),
        (fp32 | {"kernels": "torch"}, 1, []),
        (fp32 | apex, 1, [scale]),
        ({"precision": "fp16"} | apex, 8, [("gradient joining", 4), ("gradient scale", 4), ("gradient parting", 4)]),
    ):
        assert before_reduction(Plan.model_validate(plan), copies) == expected


def test_what_runs_changes_the_kernels_of_a_layer() -> None:
    from strategies.layers.model_costs import parts

    model = Model(name="m", source="", hidden=64, layers=2, heads=8, ffn=256, vocabulary=512, context=32)
    count = {}
    for kernels in ("compiled", "megatron", "torch"):
        options = {} if kernels == "megatron" else {"joined_products": True}
        work = parts(model, Resolved.of(Plan.model_validate({"kernels": kernels, "framework": options}), model, 1)).layer(0)
        count[kernels] = len(work.forward + work.backward)
    assert count["compiled"] < count["megatron"] < count["torch"]
