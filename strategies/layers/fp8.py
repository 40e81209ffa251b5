"""Linear layers in fp8 or nvfp4 (`plan.fp8`): what is cast, how often, and in how many passes over memory.

Forward and both gradients of a linear layer are products of fp8 operands, with results of 16 bits; the attention core, norms, the
router and the head stay as they are (Transformer Engine's `fp8_autocast` in Megatron-LM, torchao's `convert_to_float8_training`
with torchtitan's filter). Every operand is cast by kernels of its own, bound by memory:

* `kernels: megatron` and `torch` are Transformer Engine. A cast reads 16 bits and writes two copies, one by rows and one by
  columns, as the weight gradient needs the other (in mxfp8 scales belong to rows or columns; where a tensor has one scale,
  Blackwell's products take either, and one copy is made: is_non_tn_fp8_gemm_supported in transformer_engine/pytorch/utils.py).
  What tp ranks gather of tensors with one scale comes by rows (supports_only_rowwise_all_gather) and is turned by each of them
  before the weight gradient, all tokens (fp8_transpose in module/linear.py and layernorm_linear.py, since 1.0). The fp8 input is
  what a layer keeps for backward. Weights are cast in the first microbatch of a step and stay (`is_first_microbatch`), but for
  zero3. With delayed scaling the norm before Megatron-LM's products writes fp8 itself (layernorm_fwd in
  pytorch/csrc/extensions/normalization.cpp), but for latent attention, experts and where an adapter reads its result, too.
* `kernels: compiled` is torchao under torch.compile. Inputs are kept in 16 bits and cast again for the weight gradient, weights
  in every pass (torchao/float8/float8_linear.py); experts stay in 16 bits. With rowwise scales
  both backward products are those of whole-tensor scales, and their results are multiplied by the scales of rows and columns
  afterwards, as the product that knows them is slow where it sums in fp32 (addmm_float8_unwrapped in torchao/float8/float8_ops.py
  of 2024 and 2025; github.com/pytorch/ao issue 2184): by a kernel of its own, unless another one reads the result anyway.

nvfp4 is Transformer Engine's NVFP4BlockScaling (transformer_engine/common/recipe; NVIDIA 2025, arXiv:2509.25149): operands of
all three products have 4 bits and a scale of 8 bits per 16 numbers, and a scale of the whole tensor in fp32, for whose maximum
all of it is read first. The copies by rows and by columns are both made of the 16-bit tensor (weights' scales are of 16 × 16
blocks). Of what weight gradients multiply the copy by columns is that of 16 numbers multiplied by a random Hadamard matrix, and
has a maximum of its own; gradients are rounded stochastically. Both are in the same passes: nvte_hadamard_transform_amax reads
a tensor once for both maxima, nvte_quantize_with_hadamard_transform once for both copies (NVFP4Quantizer in
transformer_engine/pytorch/csrc/quantizer.cpp). Until its pull request 2555 (January 2026) each copy had a kernel that read all of
it; this, and kernels that lay scales as products want them, are left out. Weights that are gathered in 4 bits (`fp8.gather`,
Megatron-LM's --fp4-param-gather) are cast by the optimizer and turned once a step, as their scales are those of squares. Masters,
gradients and the optimizer stay as they are. First and last layers may stay in 16 bits (`fp8.layers_at_start_in_bf16`,
`fp8.layers_at_end_in_bf16`).

delayed takes scales from past steps; tensorwise reads the whole tensor for its maximum first; blockwise (1 × 128), mxfp8 (1 × 32)
and rowwise find theirs on the way, rowwise of columns with a read before. Scales themselves are left out. Products in fp8 have
one price for all recipes, that of whole-tensor scales (in mxfp8 they took 1.05 times as long on a B300: see below).

What casts take was published of a B300: te.Linear with and without them, four matrices of a layer of 15,872 tokens, forward and
as the shapes of both gradients (NVIDIA/TransformerEngine docs/examples/gemm_profiling/gemm_profiling.rst at 8f2e6357). They take
2.69 ms in nvfp4, 2.34 with one scale and 1.82 in mxfp8, with hosts that may have been late for the smallest. In mxfp8 that is
0.81 of the rate at which others stream, and a price of its own (`MXFP8_CAST`).

Ranks agree on maxima. tensorwise and nvfp4: tp ranks, before they gather a tensor. delayed: the ranks that `fp8.amax_reduction`
names, when a microbatch leaves the layers of a stage, forward and again backward: all maxima of a rank at once, three per product
forward (input, weight, output), two backward, by an all-reduce that the compute stream waits for (FP8GlobalStateManager in
transformer_engine/pytorch/fp8.py, reduce_and_update_fp8_tensors; get_amax_reduction_group in megatron/core/parallel_state.py).
Left out are the two kernels that gather the maxima and make scales of them, and that Transformer Engine before 1.6 made scales of
each module before its own passes, and could agree on maxima beside compute (NVTE_ASYNC_AMAX_REDUCTION).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from strategies.frameworks.passes import Pass, Passes
from strategies.layers.rank_shapes import RankShapes
from strategies.layers.tensor_overlap import Items
from strategies.plan.fine_tuning import Lora
from strategies.plan.options import FP8_WIDTH, Fp8

MXFP8_CAST = "mxfp8 cast"  # finds a scale for each 32 numbers on the way, and writes it
TURNED: Passes = (Pass("memory", 2.0 * FP8_WIDTH),)  # what is there by rows is written by columns


class Casts(NamedTuple):
    """Passes over each operand, bytes per element: of the input forward and again for the weight gradient, of the output's
    gradient, of the weight forward and again backward.
    """

    input: Passes = ()
    again: Passes = ()
    gradient: Passes = ()
    weight: Passes = ()
    weight_again: Passes = ()


def _engine(fp8: Fp8, width: float, copies: int) -> Casts:
    """Transformer Engine's. copies: see `Resolved.fp8_copies`."""
    cast = _cast(fp8, width, copies)
    turned: Passes = (Pass("memory", 2.0 * fp8.width),) if copies > 1 else ()
    return Casts(cast, (), cast, turned if fp8.gather else cast)


def _cast(fp8: Fp8, width: float, copies: int) -> Passes:
    """Transformer Engine's cast into so many copies."""
    maximum: Passes = (Pass("reduction", width),) if fp8.scaling in ("tensorwise", "nvfp4") else ()
    return (*maximum, Pass("memory", width + copies * fp8.width, MXFP8_CAST if fp8.scaling == "mxfp8" else ""))


def _frozen(fp8: Fp8, width: float, lora: Lora | None, copies: int) -> Casts:
    """Transformer Engine's where the weight has no gradient: nothing needs operands by columns (requires_dgrad alone in
    transformer_engine/pytorch/module/linear.py) but, on Hopper, the weight.
    """
    cast = _cast(fp8, width, 1)
    if lora is None or lora.weights != "fp8":
        return _engine(fp8, width, copies)._replace(input=cast, gradient=cast)
    return Casts(cast, (), cast, (), TURNED if lora.fp8_transposes == "made" else ())


def _torchao(fp8: Fp8, width: float) -> Casts:
    """torchao's; a weight that is gathered in fp8 was cast before, and is only turned for the input gradient."""
    turned = TURNED
    cast_once: Passes = (Pass("memory", width + FP8_WIDTH),)
    if fp8.scaling == "tensorwise":
        cast: Passes = (Pass("reduction", width), *cast_once)
        weight, again = ((), turned) if fp8.gather else (cast, cast)
        return Casts(cast, cast, (*cast, *turned), weight, again)
    rows: Passes = (Pass("reduction", width + FP8_WIDTH),)
    columns: Passes = (Pass("reduction", width), *cast_once)
    if fp8.scaling == "mxfp8":
        rows = columns = cast_once
    return Casts(rows, columns, (*rows, *columns), rows, columns)


@dataclass(frozen=True)
class Fp8Products:
    """A linear layer's casts: matrix `outputs` × `inputs` on this rank, `count` of them."""

    rank: RankShapes
    label: str
    outputs: int
    inputs: int
    on: bool = True  # False: this layer stays in the plan's precision whatever the plan says
    count: int = 1

    @property
    def fp8(self) -> Fp8 | None:
        """The plan's, if this layer has any."""
        return self.rank.resolved.fp8 if self.on else None

    @property
    def dtype(self) -> str:
        """Type of the operands of its products."""
        return self.fp8.dtype if self.fp8 else self.rank.resolved.precision

    @property
    def engine(self) -> bool:
        """Transformer Engine in place of torchao."""
        return not self.rank.kernels.torchao

    @property
    def kept(self) -> float:
        """Bytes of an element of the input that backward keeps."""
        return self.fp8.width if self.fp8 and self.engine else self.rank.element

    @property
    def moved(self) -> float:
        """Bytes of an element that tp ranks gather; torchao's Float8ColwiseParallel gathers fp8 with scales of whole tensors."""
        return self.fp8.width if self.fp8 and (self.engine or self.fp8.scaling == "tensorwise") else self.rank.element

    @property
    def sums_in_casts(self) -> bool:
        """Whether the cast of a gradient that nobody gathers adds it up over tokens for the bias: Transformer Engine's
        (fp8_cast_transpose_bgrad_fused in grad_output_preprocess of pytorch/module/base.py; bgrad_quantize of later versions).
        Megatron-LM leaves it the bias of queries, keys and values alone, others are added by kernels of its own (skip_bias_add).
        """
        fused = self.rank.kernels.norms_in_fp8 and self.fp8 is not None and self.fp8.scaling in ("delayed", "mxfp8")
        return fused and not self.rank.frozen

    @property
    def late(self) -> bool:
        """Whether what tp ranks gather is cast only then, all tokens on every rank: where scales belong to rows or blocks,
        torchtitan takes PyTorch's own tensor parallelism (apply_tp in torchtitan/models/llama3/infra/parallelize.py), and its
        asynchronous one finds no product behind the gather (github.com/pytorch/torchtitan issue 866).
        """
        return self.fp8 is not None and self.moved == self.rank.element

    @property
    def elements(self) -> int:
        """Parameters that are multiplied in fp8."""
        return self.count * self.outputs * self.inputs if self.fp8 else 0

    def copies(self, elements: float) -> float:
        """Bytes of an operand's copies in fp8."""
        return self.rank.resolved.fp8_copies * self.fp8.width * elements if self.fp8 else 0.0

    def _run(self, what: str, phase: str, elements: float, passes: Passes) -> Items:
        return self.rank.run(f"{self.label} {what} in fp8", phase, elements, passes) if elements else ()

    @property
    def _casts(self) -> Casts:
        if self.fp8 is None:
            return Casts()
        if self.rank.frozen and self.engine:
            return _frozen(self.fp8, self.rank.element, self.rank.resolved.lora, self.rank.resolved.fp8_copies)
        if self.engine:
            return _engine(self.fp8, self.rank.element, self.rank.resolved.fp8_copies)
        return _torchao(self.fp8, self.rank.element)

    def _cast(self, usual: Passes, gathered: bool, in_fp8: bool) -> Passes:
        """Passes over an operand of the rank: as `usual`, unless tp ranks gather it by rows, or it is in fp8 by rows already."""
        if self.fp8 is None or not self.engine:
            return usual
        by_rows = gathered and self.fp8.of_tensors
        if in_fp8:
            turned = self.rank.resolved.fp8_copies > 1 and not by_rows and not (self.rank.frozen and self.fp8.of_tensors)
            return TURNED if turned else ()
        return _cast(self.fp8, self.rank.element, 1) if by_rows else usual

    def input_casts(self, elements: float, gathered: bool = False, in_fp8: bool = False) -> Items:
        """Before the forward product: the input (so many elements) and, where it is not there yet, the weight. in_fp8: the input
        came in fp8, by rows.
        """
        casts, rank = self._casts, self.rank
        first = rank.resolved.microbatches if self.engine and not rank.resolved.shards_parameters else 1
        weight = self._run("weight", "forward", self.elements / first, casts.weight)
        cast = self._run("input", "forward", elements, self._cast(casts.input, gathered, in_fp8))
        return (*cast, *self._maximum(gathered), *weight)

    def gradient(self, elements: float, gathered: bool = False, in_fp8: bool = False) -> Items:
        """Before the product that makes the input gradient: the output's gradient, and the weight if it did not stay."""
        weight = self._run("weight", "backward", self.elements, self._casts.weight_again)
        cast = self._run("gradient", "backward", elements, self._cast(self._casts.gradient, gathered, in_fp8))
        return (*cast, *self._maximum(gathered), *weight)

    def turned(self, what: str, elements: float, gathered: bool) -> Items:
        """Before the product that makes the weight gradient: an operand of so many elements on all tp ranks that was gathered by
        rows.
        """
        by_rows = gathered and self.engine and self.fp8 is not None and self.fp8.of_tensors and not self.rank.frozen
        return self._run(what, "backward", elements, TURNED) if by_rows and self.rank.resolved.fp8_copies > 1 else ()

    def again(self, elements: float, gathered: bool = False) -> Items:
        """Before the product that makes the weight gradient: the input, if it was not kept in fp8; one that was gathered in fp8
        is turned, as torchao's product takes columns.
        """
        turned = gathered and not self.engine and not self.late and self.fp8 is not None
        return self._run("input", "backward", elements, TURNED if turned else self._casts.again)

    def rescaled(self, what: str, elements: int) -> Items:
        """After a backward product, whose result of so many elements no other kernel reads: the scales of rows and columns."""
        if self.fp8 is None or self.engine or self.fp8.scaling != "rowwise":
            return ()
        return self._run(f"{what} scales", "backward", elements, (Pass("memory", 2.0 * self.rank.element),))

    def _maximum(self, gathered: bool) -> Items:
        """What tp ranks that gather parts of a tensor agree on before: its maximum."""
        if not gathered or self.fp8 is None or self.fp8.scaling not in ("tensorwise", "nvfp4") or self.late:
            return ()
        return self.rank.collective("all_reduce", f"{self.label} maximum", 4.0, 4)
