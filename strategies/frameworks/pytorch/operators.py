"""PyTorch's own operators, one by one, in place of Megatron-LM's fused kernels: `kernels: torch` in a plan.

What torch 2.13 runs and keeps for backward on a CPU (tests/calibration/execute compare peaks with PyTorch's own):
* a layernorm is one operator and keeps its mean and deviation; an rmsnorm is written out (power, mean, reciprocal root, two
  products) and keeps what was normed before its weight too. On a GPU it is one kernel;
* a gated activation is an operator and a product: both of its factors and the product are kept;
* rotary positions are two products, a negation, a concatenation and a sum;
* the loss is log-softmax and a choice, of which the first is kept in fp32; forward there are logits besides (and in 16 bits their
  copy in fp32), backward both make a gradient of all logits, for which the block of 16-bit logits is too small. Cut over the
  vocabulary (loss_parallel) it is written out, and three tensors of all logits exist at once besides what is kept;
* dropout keeps a mask of a byte per element (native_dropout on GPUs; on a CPU the mask has the input's type, and attention that
  drops probabilities is written out);
* a matrix keeps its whole input, also what sequence parallelism gathered: nothing is gathered twice.
"""

from __future__ import annotations

from sim.program import Kernel
from strategies.frameworks import passes
from strategies.frameworks.pytorch.kernels import PyTorch
from strategies.layers.operators import Operator
from strategies.layers.rank_shapes import FLOAT, RankShapes
from strategies.layers.tensor_overlap import Items

PYTORCH = PyTorch()


def gated(rank: RankShapes, label: str, elements: int, saved: str) -> Operator:
    """silu(gate) · up of so many elements each, kept as `saved`: one operator and a product."""
    width, ways = rank.element * elements, PYTORCH.gate(rank.element)
    return Operator(
        forward=rank.run(label, "forward", elements, ways.forward),
        input_gradient=rank.run(label, "backward", elements, ways.backward),
        saved={saved: 2 * width, f"{label} gate": width},
        temporary=4 * width,  # gradients of the product, of its two factors and of the gate
    )


def rotary(rank: RankShapes, elements: int) -> Operator:
    """Rotary positions of queries and keys: x · cosine + rotated(x) · sine, each operator with its result; nothing is kept but
    tables.
    """
    ways = rank.kernels.rotary(rank.element)
    return Operator(
        forward=rank.run("rotary", "forward", elements, ways.forward),
        input_gradient=rank.run("rotary", "backward", elements, ways.backward),
        temporary=3 * rank.element * elements,
    )


def loss(rank: RankShapes) -> Operator:
    """Cross-entropy in fp32. Logits of 16 bits are cast first, and their gradient last."""
    logits = rank.tokens * rank.rows
    small = {
        name: rank.collective("all_reduce", f"loss {name}", FLOAT * rank.tokens, FLOAT) for name in ("maximum", "sum", "target")
    }

    def run(label: str, phase: str, *moved: float) -> tuple[Kernel, ...]:
        return rank.run(label, phase, logits, tuple(passes.Pass("reduction", FLOAT * elements) for elements in moved))

    ways = PYTORCH.loss(rank.element)
    parallel = rank.tp > 1
    forward: Items = rank.run("loss", "forward", logits, ways.forward)
    backward: Items = rank.run("loss", "backward", logits, ways.backward)
    if parallel:
        widened = (passes.Pass("memory", rank.element + FLOAT),) * (rank.element != FLOAT)
        cast = rank.run("logits in fp32", "forward", logits, widened)
        first, second = run("loss maximum", "forward", 1), run("loss exponential", "forward", 2, 2, 1)
        forward = (*cast, *first, *small["maximum"], *second, *small["sum"], *run("log-softmax", "forward", 2), *small["target"])
        backward = (*run("loss", "backward", 1), *run("log-softmax", "backward", 2, 3, 2), *cast)
    return Operator(
        forward=forward,
        input_gradient=backward,
        saved={"log-probabilities": FLOAT * logits},
        temporary=(3 if parallel else 2) * FLOAT * logits,
        stranded=rank.element * logits if rank.element != FLOAT else 0.0,
        before=None if parallel else (rank.element + (FLOAT if rank.element != FLOAT else 0)) * logits,
    )
