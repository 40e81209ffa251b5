"""LoRA's adapters: two thin matrices beside a frozen one, and what runs around them.

As PEFT's LoraLayer and Megatron Bridge's LoRALinear run them, kernel by kernel: dropout of the input, A, B, a product with α/r, a
sum with the frozen matrix's result; backward the same in reverse, and a sum of the input's two gradients. Adapters stay in the
plan's precision where other products are in fp8 (TELinearAdapter: "in original precision regardless of FP8 enabled").
torch.compile makes one kernel of the product with α/r and the sum, and draws dropout again in place of keeping a mask.

DoRA (arXiv:2402.09353, section 4.1) as PEFT's DoraLinearLayer runs it (src/peft/tuners/lora/dora.py): B·A as a matrix, of two
products with an identity; its sum with the frozen matrix and the norms of the rows, which no gradient passes; a magnitude over
them per output, less one of which is multiplied by the frozen result, and all of which by the adapter's. Both results are kept
for the magnitude's gradient. With dropout the frozen matrix multiplies what is left of the input, too, a second product.

With tensor parallelism as in Megatron Bridge's ParallelLinearAdapter (src/megatron/bridge/peft/utils.py):
* beside a matrix cut by columns A's rows are cut, its result is gathered, and B is cut as the matrix is. With sequence
  parallelism all tokens of the input are there, since Transformer Engine hands the gathered input on
  (return_layernorm_output_gathered); with the gather in pieces (`overlap_tp: pieces`) the adapter gathers them again.
* beside a matrix cut by rows A is cut as the matrix is, its result is summed, and B's rows are cut; the result is gathered,
  and with sequence parallelism scattered over tokens, or both in one all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sim.program import Kernel
from strategies.layers.fine_tuning.adapted_matrices import COLUMNS, MIXTURE, ROWS, Wrapped, chosen
from strategies.layers.fine_tuning.frozen import label_of
from strategies.layers.mixture_of_experts import Rows, exact
from strategies.layers.operators import Operator
from strategies.layers.rank_shapes import RankShapes
from strategies.layers.tensor_overlap import Items
from strategies.plan.fine_tuning import Lora


def adapted(rank: RankShapes, operators: Sequence[Operator]) -> list[Operator]:
    """A layer's operators with the adapters, each after the frozen product beside which it is."""
    result: list[Operator] = []
    for operator in operators:
        result.append(operator)
        label = label_of(operator)
        dense = MIXTURE.get(label, label)
        if dense in COLUMNS or dense in ROWS:
            moe = rank.model.experts if label.startswith("expert") else None
            for module in chosen(rank.resolved, rank.model, label):
                of_experts = Rows(rank, moe) if moe else None
                result += _Adapter(rank, label, module, dense in ROWS, operator, of_experts).operators()
    return result


@dataclass(frozen=True)
class _Adapter:
    """One adapter on one rank, beside the product `label`, whose operator is `base`."""

    rank: RankShapes
    label: str
    module: Wrapped
    by_rows: bool
    base: Operator
    rows: Rows | None = None  # of routed experts, each of which has such an adapter; tp is 1 then

    @property
    def lora(self) -> Lora:
        """What the plan says."""
        assert self.rank.resolved.lora is not None
        return self.rank.resolved.lora

    @property
    def name(self) -> str:
        """For labels of its kernels."""
        mixture = f"{self.label.split()[0]} " if self.label in MIXTURE else ""
        return f"{mixture}{self.module.name.removeprefix('linear_')} lora"

    @property
    def tokens(self) -> int:
        """Tokens of its input on this rank; of experts, copies of tokens."""
        return self.rows.held if self.rows else self.rank.tokens

    @property
    def counted(self) -> int:
        """Tokens whose products the model's FLOPs are of."""
        return self.rank.tokens * (self.rows.moe.chosen if self.rows else 1)

    def _gemm(self, label: str, phase: str, outputs: int, inputs: int) -> Kernel:
        """Tokens by a matrix `inputs` → `outputs`; each expert's by its own."""
        if self.rows is None:
            return self.rank.gemm(label, phase, self.tokens, outputs, inputs)
        return exact(self.rank.gemm(label, phase, self.rows.each, outputs, inputs, self.rows.busy), self.rows)

    def _weight_gemm(self, label: str, outputs: int, inputs: int) -> Items:
        """The gradient of such a matrix."""
        if self.rows is None:
            return self.rank.weight_gemm(label, outputs, inputs, self.tokens)
        kernels = self.rank.weight_gemm(label, outputs, inputs, self.rows.each, self.rows.busy)
        return tuple(exact(kernel, self.rows) if kernel.kind == "gemm" else kernel for kernel in kernels)

    def _held(self, outputs: int, inputs: int) -> dict[str, Any]:
        """Fields of an operator about its matrix."""
        copies = self.rows.experts if self.rows else 1
        spread = copies * outputs * inputs if self.rows and self.rank.resolved.ep_of_copies > 1 else 0
        return {"shapes": ((outputs, inputs),) * copies, "experts": spread}

    @property
    def inputs(self) -> int:
        """Features of its input on this rank."""
        return self.module.inputs // (self.rank.tp if self.by_rows else 1)

    @property
    def outputs(self) -> int:
        """Features of B's result on this rank, before it is gathered."""
        return self.module.outputs // self.rank.tp

    @property
    def source(self) -> str:
        """The name of the tensor that it reads where it drops nothing of it."""
        plan = self.rank.resolved
        if self.label == "attention output" and plan.fp8 is not None and plan.fused_attention and not self.rank.kernels.torchao:
            return "attention result"
        gathered = not self.by_rows and plan.sequence_parallel and self.rank.tp > 1
        return f"{self.label} input of all tokens" if gathered else (self.base.for_weights or (f"{self.label} input",))[0]

    def operators(self) -> list[Operator]:
        """Dropout, A, B with the sum."""
        modules = self.base.modules
        reading = [replace(operator, modules=modules, beside=self.label) for operator in (self._dropout(), self._down())]
        norms = [self._norms()] if self.lora.dora else []
        if self.lora.dora and self.lora.dropout:
            norms.append(replace(self._frozen_again(), beside=self.label))
        after = self._magnitude(self._up()) if self.lora.dora else self._up()
        return [*reading, *(replace(operator, modules=modules) for operator in (*norms, after))]

    def _norms(self) -> Operator:
        """DoRA: the adapter as a matrix, its sum with the frozen one, and the norms of the rows."""
        rank, (_, inputs, outputs) = self.rank, self.module
        elements, square, label = rank.element * inputs * outputs, rank.element * inputs**2, f"{self.name} weight"
        products = (
            rank.gemm(label, "forward", inputs, self.lora.rank, inputs),
            rank.gemm(label, "forward", inputs, outputs, self.lora.rank),
        )
        summed = (rank.memory(label, "forward", 2 * elements), rank.memory(label, "forward", 3 * elements))
        return Operator(
            forward=(rank.memory(label, "forward", square), *products, *summed, rank.reduction(label, "forward", elements)),
            temporary=float(square + 3 * elements),
            flops=sum(product.flops for product in products),
            passes=1,
        )

    def _frozen_again(self) -> Operator:
        """DoRA: the frozen matrix times what dropout has left."""
        rank, tokens, (_, inputs, outputs) = self.rank, self.rank.tokens, self.module
        label = f"{self.name} frozen"
        added = rank.memory(label, "backward", 3 * rank.element * tokens * inputs)
        return Operator(
            forward=(rank.gemm(label, "forward", tokens, outputs, inputs),),
            input_gradient=(rank.gemm(label, "backward", tokens, inputs, outputs), added),
            temporary=float(rank.element * tokens * max(inputs, outputs)),
            flops=2.0 * tokens * inputs * outputs,
            passes=2,
        )

    def _magnitude(self, up: Operator) -> Operator:
        """DoRA: B with what scales both results."""
        rank, outputs = self.rank, self.module.outputs
        size, label = float(rank.element * rank.tokens * outputs), f"{self.name} magnitude"
        scale = float(rank.element * outputs)  # of each output; small kernels, but launched as any other
        # over the norms, less one; times the frozen result, the adapter's and α/r; their sum, and that with the frozen result
        there = (3 * scale, 2 * scale, 2 * size, 2 * size, 2 * size, 3 * size, 3 * size)
        # of α/r and of both results; of the magnitude by way of both; the sum of two of the frozen result; of the magnitude
        back = (2 * size, 2 * size, 2 * size, 3 * size, 3 * size, 3 * size, 3 * scale, 3 * scale)
        gradients = (
            *(rank.memory(label, "backward", moved) for moved in back),
            *(rank.reduction(label, "backward", size),) * 2,
        )
        product = tuple(item for item in up.input_gradient if isinstance(item, Kernel) and item.kind == "gemm")
        return replace(
            up,
            forward=(up.forward[0], *(rank.memory(label, "forward", moved) for moved in there)),
            input_gradient=(*gradients, *product),
            weight_gradient=(*up.weight_gradient, *replace(rank, frozen=False).vectors(label, outputs)),
            saved={**up.saved, f"{self.name} frozen result": size, f"{self.name} result": size},
            for_weights=(*up.for_weights, f"{self.name} frozen result", f"{self.name} result"),
            temporary=4.0 * size,
            shapes=(*up.shapes, (outputs,)),
        )

    def _dropout(self) -> Operator:
        """The input, dropped in part, or as it is; backward, its gradient is added to that of the frozen product."""
        rank, width = self.rank, self.rank.element
        gather, scatter = self._gathered()
        elements = (rank.local_tokens if gather else self.tokens) * self.inputs
        summed = (rank.memory(f"{self.name} input gradient", "backward", (1 if rank.kernels.compiled else 3) * width * elements),)
        if not self.lora.dropout:
            return Operator(gather, (*scatter, *summed), temporary=float(width * elements))
        mask = 0 if rank.kernels.compiled else 1
        there = replace(rank.memory(f"{self.name} dropout", "forward", (2 * width + mask) * elements), variant="dropout")
        back = rank.memory(f"{self.name} dropout", "backward", (2 * width + mask) * elements)
        kept = {f"{self.name} dropout mask": float(elements)} if mask else {}
        return Operator((there, *gather), (*scatter, back, *summed), saved=kept, temporary=2.0 * width * elements)

    def _gathered(self) -> tuple[Items, Items]:
        """What brings all tokens of the input here, and takes their gradients back."""
        rank = self.rank
        if self.by_rows or not (rank.resolved.sequence_parallel and rank.overlap("pieces")):
            return (), ()  # what the frozen product has gathered is there, and its gradient is reduced with that one's
        gather = rank.gather(f"{self.name} input", "forward", self.inputs)
        return gather, rank.reduce(f"{self.name} input gradient", "backward", self.inputs)

    def _down(self) -> Operator:
        """A, whose result all tp ranks have whole."""
        rank, lora, tokens = self.rank, self.lora, self.tokens
        rows, size = (lora.rank if self.by_rows else lora.rank // rank.tp), float(rank.element * tokens * lora.rank)
        label = f"{self.name} A"
        whole = rank.collective("all_reduce" if self.by_rows else "all_gather", f"{label} result", size)
        reduced = self._alone(rank.element * tokens * self.inputs)
        source = f"{self.name} input" if lora.dropout else self.source
        return Operator(
            forward=(self._gemm(label, "forward", rows, self.inputs), *whole),
            input_gradient=(self._gemm(label, "backward", self.inputs, rows), *reduced),
            weight_gradient=self._weight_gemm(f"{label} weight", rows, self.inputs),
            saved={source: float(rank.element * tokens * self.inputs)},
            for_weights=(source,),
            temporary=float(rank.element * tokens * self.inputs),
            flops=2.0 * self.counted * self.module.inputs * lora.rank,
            **self._held(rows, self.inputs),
        )

    def _alone(self, size: float) -> Items:
        """Without sequence parallelism A's part of the input's gradient is summed by itself."""
        if self.by_rows or self.rank.resolved.sequence_parallel:
            return ()
        return self.rank.collective("all_reduce", f"{self.name} input gradient", float(size))

    def _up(self) -> Operator:
        """B, the product with α/r, and the sum with the frozen product's result."""
        rank, lora, tokens = self.rank, self.lora, self.tokens
        label, size = f"{self.name} B", float(rank.element * tokens * lora.rank)
        here, back = self._exchanged()
        kept = rank.stream if self.by_rows and not self.rows else tokens * self.outputs  # elements of the result that are added
        scaled = rank.memory(f"{self.name} scaling", "backward", 2.0 * rank.element * kept)
        gradient = self._gemm(label, "backward", lora.rank, self.outputs)
        return Operator(
            forward=(self._gemm(label, "forward", self.outputs, lora.rank), *here, *self._sum(kept)),
            input_gradient=(scaled, *back, gradient, *rank.collective("all_reduce", f"{label} input gradient", size)),
            weight_gradient=self._weight_gemm(f"{label} weight", self.outputs, lora.rank),
            saved={f"{self.name} A result": size},
            for_weights=(f"{self.name} A result",),
            temporary=2.0 * rank.element * kept,
            flops=2.0 * self.counted * self.module.outputs * lora.rank,
            **self._held(self.outputs, lora.rank),
        )

    def _sum(self, elements: int) -> tuple[Kernel, ...]:
        moved = float(self.rank.element * elements)
        label = f"{self.name} sum"
        if self.rank.kernels.compiled:
            return (self.rank.memory(label, "forward", 3 * moved),)
        scaling = self.rank.memory(f"{self.name} scaling", "forward", 2 * moved)
        return scaling, self.rank.memory(label, "forward", 3 * moved)

    def _exchanged(self) -> tuple[Items, Items]:
        """Beside a matrix cut by rows: what gives every rank all features of B's result, or of its own tokens, and the gradient's
        way back.
        """
        rank, plan = self.rank, self.rank.resolved
        size, label = float(rank.element * rank.tokens * self.module.outputs), f"{self.name} result"
        if not self.by_rows or rank.tp == 1:
            return (), ()
        if plan.sequence_parallel and self.lora.all_to_all:
            swap = rank.collective("all_to_all", label, size / rank.tp)
            return swap, swap
        gather = rank.collective("all_gather", label, size)
        return gather, gather if plan.sequence_parallel else ()
