"""What an optimizer step runs on the parameters of a rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sim.program import Kernel, Run
from strategies.layers.layer_cost import LayerCost
from strategies.optimizers import FLOAT, Matrices, matrices_of, optimizer_called
from strategies.plan.plan import Plan

ZEROING, NORM, UNSCALING = "gradient zeroing", "gradient norm", "loss unscaling"
GRADIENT_COPY, PARAMETER_COPY = "gradient copy", "parameter copy"


def passes_of(plan: Plan) -> list[tuple[str, float]]:
    """The multi-tensor kernels of an update in order, and the bytes per parameter that each moves.

    Mixed precision, as Megatron-LM does it (megatron/optimizer/optimizer.py): gradients of 16 bits are copied to fp32; in fp16
    they are divided by the loss scale and checked for infinities, in place; their norm is taken, to clip them (they are scaled
    only when it is too large, which is left out); each optimizer state is read and written with the fp32 master, whose copy in
    16 bits is then made; buffers in which gradients are accumulated are set to zero (zero_grad_buffer of its
    DistributedDataParallel). PyTorch's FSDP shards masters and their gradients: nothing is copied, and gradients are dropped.
    Without masters the update reads and writes weights as they are.
    """
    width, gradient, mixed = plan.bytes_per_element, plan.bytes_per_gradient, plan.has_masters
    copied = mixed and not plan.masters_only
    main = 4 if mixed else gradient  # bytes of the gradients that the optimizer reads
    kind, states = optimizer_called(plan.optimizer), plan.bytes_per_optimizer_state
    update: list[tuple[str, float]] = [(plan.optimizer, main + 2 * states + (0 if mixed else 2 * width)), *kind.after]
    if not (plan.fused_optimizer and kind.fused):
        update = [(f"{plan.optimizer} {name}", (FLOAT if mixed else width) * moved) for name, moved in kind.operators]
    steps: list[tuple[str, float]] = [
        (GRADIENT_COPY, gradient + main if copied and gradient != main else 0),
        (UNSCALING, 2 * main if plan.precision == "fp16" and mixed else 0),
        (NORM, main if plan.clip_gradients else 0),
        ("gradient clipping", 2 * main if _clipped(plan) else 0),
        *update,
        (PARAMETER_COPY, 4 + width if copied else 0),
        (ZEROING, gradient if _zeroed(plan) else 0),
    ]
    return [(label, moved) for label, moved in steps if moved]


def _clipped(plan: Plan) -> bool:
    """Whether gradients are scaled in every step: PyTorch multiplies them by 1 at most, so that no host waits for their norm
    (torch/nn/utils/clip_grad.py, _clip_grads_with_norm_).
    """
    return plan.clip_gradients and plan.of_pytorch and plan.deepspeed is None


def _zeroed(plan: Plan) -> bool:
    """Whether gradients stay: in a framework's buffer, in one of another type than the parameters', or by
    zero_grad(set_to_none=False).
    """
    if plan.own_gradients:
        return not plan.frees_gradients
    return plan.runtime.zeroes_gradients or plan.bytes_per_gradient != plan.bytes_per_element


def before_reduction(plan: Plan, copies: int) -> list[tuple[str, int]]:
    """What a framework runs on a rank's whole gradients before they are summed over `copies` ranks: names, bytes per parameter.

    PyTorch's DDP copies them out of its buckets; Megatron-LM's FSDP (zero2, zero3) scales in NCCL.
    """
    hook = plan.hook
    alone = copies == 1 or hook.local  # where all ways are one
    if plan.copies_gradients and not alone:
        return [("gradients from buckets", 2 * plan.bytes_per_gradient)]
    if not plan.runtime.passes_over_gradients or not (alone or hook.whole_gradients):
        return []
    joined = plan.bytes_per_gradient == plan.bytes_per_element and (alone or not hook.shards)
    return plan.kernel_set.before_reduction(plan.bytes_per_gradient, joined, 1 if alone else copies, plan.precision == "fp16")


def kernels_of(plan: Plan, copies: int, groups: Sequence[float], gradients: float, tensors: int) -> list[tuple[int, Kernel]]:
    """The kernels of a step on a rank that updates groups of parameters, each by itself, and how often each is launched; copies:
    ranks that have the same `gradients` gradients; tensors: that it copies one by one, taken as equally large.

    Where each tensor is copied by itself, parameters in fp16 are so only where ranks share the optimizer's states: otherwise
    their copies are one launch (megatron/core/optimizer/optimizer.py, _multi_tensor_copy_this_to_that).
    """
    blocks = plan.kernel_set.update_blocks if plan.fused_optimizer and optimizer_called(plan.optimizer).fused else 0
    at_once = plan.precision == "fp16" and "optimizer" not in plan.hook.shards
    launches = {GRADIENT_COPY: tensors, PARAMETER_COPY: 1 if at_once else tensors}
    result = [(1, update_pass(label, moved * gradients)) for label, moved in before_reduction(plan, copies)]
    for label, moved in passes_of(plan):
        if label == plan.optimizer and blocks:
            result += [(1, update_pass(label, moved * count, (math.ceil(count), blocks))) for count in groups]
        else:
            times = launches.get(label, 1)
            result.append((times, update_pass(label, moved * (gradients if label == ZEROING else sum(groups)) / times)))
    return result


def update_pass(label: str, moved: float, shape: tuple[int, ...] = ()) -> Kernel:
    """A kernel of the update that moves so many bytes."""
    return Kernel("optimizer", label, "optimizer", 0.0, moved, "fp32", shape)


def matrix_products(plan: Plan, parts: Sequence[LayerCost], ranks: int) -> list[Run]:
    """What the optimizer runs on whole matrices of `parts`, dealt out among `ranks` ranks, besides passes over all parameters.
    Those of experts that are spread over ep ranks are dealt out among the fewer ranks that have them.
    """
    whole = optimizer_called(plan.optimizer).of_matrices
    if whole is None:
        return []
    dense, spread = (_matrices(parts, spread) for spread in (False, True))
    return whole.kernels(dense, ranks) + (whole.kernels(spread, plan.expert_sharers(ranks)) if spread else [])


def _matrices(parts: Sequence[LayerCost], spread: bool) -> Matrices:
    """Of layers between embedding and head. spread: of experts that are spread over ep ranks, or all others."""
    gradients = (gradient for part in parts if part.name == "layer" for gradient in part.gradients)
    return matrices_of(gradient.shape for gradient in gradients if gradient.spread == spread)


def left_to_adam(plan: Plan, parts: Sequence[LayerCost]) -> float:
    """Bytes that Adam keeps more of what are no matrices between embedding and head, where those have another optimizer."""
    whole = optimizer_called(plan.optimizer).of_matrices
    if whole is None or not whole.rest:
        return 0.0
    matrices = _matrices(parts, False) + _matrices(parts, True)
    elements = sum(count * rows * columns for (rows, columns), count in matrices.items())
    return float(whole.rest * (sum(part.parameters for part in parts) - elements))


class StatesBeside(NamedTuple):
    """Bytes of optimizer state of a rank that do not go by parameters, and those of experts that are spread over ep ranks."""

    dense: float = 0.0
    experts: float = 0.0

    def sharded(self, plan: Plan, shards: float) -> float:
        """Bytes of a rank when `shards` ranks share them, of experts fewer."""
        return self.dense / shards + self.experts / plan.expert_sharers(shards)


def states_beside(plan: Plan, parts: Sequence[LayerCost]) -> StatesBeside:
    """Those of `parts`."""
    whole = optimizer_called(plan.optimizer).of_matrices
    if whole is None:
        return StatesBeside()
    dense, experts = (
        float(sum(count * whole.states(shape) for shape, count in _matrices(parts, spread).items())) for spread in (False, True)
    )
    return StatesBeside(left_to_adam(plan, parts) + dense, experts)


def update_workspace(plan: Plan, count: float, largest: float) -> float:
    """Bytes that an update of `count` parameters takes for itself; of their tensors the largest has `largest` elements."""
    if plan.bytes_per_gradient != 2 or plan.masters_only or not plan.has_masters:
        return 0.0
    return plan.runtime.update_workspace(count, largest, plan.clip_gradients, plan.shards_parameters)


def on_the_cpus(plan: Plan) -> float:
    """Bytes per parameter of an update in one pass: the gradient is read, states are read and written, the weight is written."""
    width = plan.bytes_per_element
    return plan.bytes_per_gradient + 2 * plan.bytes_per_optimizer_state + (width if width == 2 else 2 * width)
