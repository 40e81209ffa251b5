"""What an optimizer step runs on the parameters of a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strategies.plan import Plan

ZEROING = "gradient zeroing"


# An operator at a time, all in place but one: (name, fp32 numbers read and written). PyTorch's single-tensor loops, and as many
# bytes with its foreach kernels (torch/optim/adam.py, sgd.py); Adam with decoupled weight decay.
OPERATORS = {
    "adam": (("decay", 2), ("first moment scale", 2), ("first moment", 3), ("second moment scale", 2), ("second moment", 3),
             ("root", 2), ("root scale", 2), ("epsilon", 2), ("update", 4)),
    "momentum": (("scale", 2), ("momentum", 3), ("update", 3)),
    "sgd": (("update", 3),),
}  # fmt: skip


def passes_of(plan: Plan) -> list[tuple[str, int]]:
    """The multi-tensor kernels of an update in order, and the bytes per parameter that each moves.

    Mixed precision, as Megatron-LM does it (megatron/optimizer/optimizer.py): gradients of 16 bits are copied to fp32; in fp16
    they are divided by the loss scale and checked for infinities, in place; their norm is taken, to clip them (they are scaled
    only when it is too large, which is left out); each optimizer state is read and written with the fp32 master, whose copy in
    16 bits is then made; a buffer in which gradients are accumulated is set to zero.
    """
    width, gradient, mixed = plan.bytes_per_element, plan.bytes_per_gradient, plan.bytes_per_element == 2
    main = 4 if mixed else gradient  # bytes of the gradients that the optimizer reads
    update: list[tuple[str, int]] = [(plan.optimizer, main + 2 * plan.bytes_per_optimizer_state + (0 if mixed else 2 * width))]
    if not plan.fused_optimizer:
        update = [(f"{plan.optimizer} {name}", 4 * moved) for name, moved in OPERATORS[plan.optimizer]]
    steps: list[tuple[str, int]] = [
        ("gradient copy", gradient + main if mixed and gradient != main else 0),
        ("loss unscaling", 2 * main if plan.precision == "fp16" else 0),
        ("gradient norm", main if plan.clip_gradients else 0),
        *update,
        ("parameter copy", 4 + width if mixed else 0),
        (ZEROING, gradient if gradient != width else 0),
    ]
    return [(label, moved) for label, moved in steps if moved]


def on_the_cpus(plan: Plan) -> int:
    """Bytes per parameter of an update in one pass: the gradient is read, states are read and written, the weight is written."""
    width = plan.bytes_per_element
    return plan.bytes_per_gradient + 2 * plan.bytes_per_optimizer_state + (width if width == 2 else 2 * width)
