"""What one tp rank works on: sizes of its part of a microbatch, and makers of kernels and collectives in the plan's types."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from sim.program import ALIGNED, EARLY_CUBLAS, Collective, Kernel
from strategies.frameworks import KernelSet, passes
from strategies.layers.tensor_overlap import Items, gathered, scattered, scattered_behind
from strategies.models.model import Model
from strategies.plan.options import WIDTHS
from strategies.plan.resolved import Resolved

VECTOR = 16  # bytes that a kernel loads at once
FLOAT = 4  # bytes of fp32, in which statistics and the loss are computed whatever the precision
# Pieces of a product whose sums Transformer Engine scatters one behind the other (num_splits of its method "pipeline", which it
# takes for proj_fprop and fc2_fprop: initialize_ub in transformer_engine/pytorch/module/base.py, split_overlap_rs in
# transformer_engine/common/comm_gemm_overlap). Submitters of MLPerf (v3.1, conf/tp_overlap/h100tp4pp8mbs1.yaml) and NeMo's
# recipes (tp_overlap_configs/userbuffers.py) name the same number.
SPLITS = 4


def accumulation(resolved: Resolved) -> tuple[int, bool, bool, bool, bool, float | None, tuple[int, tuple[str, ...]] | None]:
    """What layer work depends on of the step's microbatches and of data parallelism: plans that differ in nothing else of them
    have equal layer work. A kernel that adds to gradients of the parameters' type moves (m − 1)/m of them in each of m
    microbatches, and Transformer Engine casts weights in the first; others only do something else when there is but one.
    Norms over all ranks exchange statistics of each of these.
    """
    plan, each = resolved, resolved.reduces_each
    shared = plan.fp8 is not None or (plan.bytes_per_gradient == plan.bytes_per_element and not each)
    count = resolved.microbatches if shared else 1 if each else min(2, resolved.microbatches)
    cast_once = plan.fp8 is not None and not plan.shards_parameters
    met = (plan.copies, plan.sharing) if plan.sync_norm else None
    return count, each, cast_once, plan.casts_gradients, each and plan.pytorch_fsdp, plan.longest_documents, met


def called(kernels: tuple[Kernel, ...], launcher: str = "operator") -> tuple[Kernel, ...]:
    """Kernels that no module launches, but functions in Python one by one, or autograd."""
    return tuple(replace(kernel, launcher=launcher) for kernel in kernels)


@dataclass(frozen=True)
class RankShapes:
    """What one tp rank works on: sizes of its part of a microbatch, and makers of kernels and collectives in the plan's types."""

    model: Model
    resolved: Resolved
    frozen: bool = False  # parameters have no gradients

    @property
    def tp(self) -> int:
        """Tensor parallel degree."""
        return self.resolved.tp

    @property
    def cp(self) -> int:
        """Context parallel degree."""
        return self.resolved.cp

    @property
    def element(self) -> int:
        """Bytes of an activation element."""
        return self.resolved.bytes_per_element

    @property
    def kernels(self) -> KernelSet:
        """What runs between matrix products."""
        return self.resolved.kernel_set

    @property
    def eager(self) -> bool:
        """PyTorch's own operators in place of fused kernels."""
        return self.kernels.eager

    @property
    def gathers_once(self) -> bool:
        """A matrix keeps all of the input that sequence parallelism gathered for it: PyTorch's own and compiled operators."""
        return self.resolved.of_pytorch

    @property
    def norms_in_fp8(self) -> bool:
        """Whether a norm that is part of a product's module writes fp8."""
        plan = self.resolved
        return self.kernels.norms_in_fp8 and plan.fp8 is not None and plan.fp8.scaling == "delayed" and plan.lora is None

    @property
    def batch(self) -> int:
        """Sequences of the microbatch."""
        return self.resolved.microbatch

    @property
    def sequence(self) -> int:
        """Tokens of one sequence, on all cp ranks together; beside an encoder a decoder may have others."""
        return (self.model.family != "encoder" and self.model.targets) or self.resolved.sequence

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch on this cp rank."""
        return self.batch * self.sequence // self.cp

    @property
    def local_tokens(self) -> int:
        """Tokens of the rank outside attention and MLP: 1/tp of all with sequence parallelism."""
        return self.tokens // self.tp if self.resolved.sequence_parallel else self.tokens

    @property
    def stream(self) -> int:
        """Elements of the residual stream on this rank."""
        return self.local_tokens * self.model.hidden

    @property
    def dropout(self) -> bool:
        """Dropout on the residual stream."""
        asked = self.resolved.dropout
        return self.model.dropout if asked is None else asked

    @property
    def attention_dropout(self) -> bool:
        """Dropout on attention probabilities."""
        asked = self.resolved.dropout
        return self.model.attention_dropout if asked is None else asked

    @property
    def heads(self) -> int:
        """Query heads of the rank."""
        return self.model.heads // self.tp

    @property
    def kv_heads(self) -> int:
        """Key and value heads that the rank attends with: at least one; of more ranks than heads, several have the same."""
        return max(1, self.model.kv_heads // self.tp)

    @property
    def rows(self) -> int:
        """Rows of the vocabulary on this rank, padded up when tp does not divide them (as Megatron-LM pads)."""
        return -(-self.model.padded_vocabulary // self.tp)

    def gemm(
        self, label: str, phase: str, m: int, n: int, k: int, batch: int = 1, rows: tuple[int, ...] = (), dtype: str = ""
    ) -> Kernel:
        """`batch` products of (m, k) by (k, n) of type `dtype` (the plan's precision). rows: elements in a row of each matrix, by
        default n and k: m are tokens. Kernels of 2020 to 2022 came with a cuBLAS that had few kernels for batches of products
        whose rows are no multiple of 16 bytes.
        """
        width, dtype = WIDTHS.get(dtype, self.element), dtype or self.resolved.precision
        moved = float(batch * (width * (m * k + k * n) + self.element * m * n))
        flops, shape, alignment = 2.0 * batch * m * n * k, (batch, m, n, k), math.gcd(ALIGNED, *(rows or (n, k)))
        early = self.kernels.early_cublas and batch > 1 and alignment * width % VECTOR
        return Kernel("gemm", label, phase, flops, moved, dtype, shape, EARLY_CUBLAS if early else "", alignment)

    def weight_gemm(
        self, label: str, outputs: int, inputs: int, tokens: int, batch: int = 1, dtype: str = ""
    ) -> tuple[Kernel, ...]:
        """Gradient of a matrix (of `batch` of them), accumulated in the gradient's type by the product or by a second kernel."""
        fused, elements = self.resolved.fused_accumulation, batch * outputs * inputs
        written = self.accumulated(elements) if fused else self.element * elements
        fills = () if fused or label == "head weight" else self.fills(label, "backward", self.element * elements)
        width, dtype = WIDTHS.get(dtype, self.element), dtype or self.resolved.precision
        moved = float(batch * width * tokens * (outputs + inputs) + written)
        flops, shape = 2.0 * batch * outputs * inputs * tokens, (batch, outputs, inputs, tokens)
        alignment = math.gcd(ALIGNED, outputs, inputs)
        product = Kernel("gemm", label, "backward", flops, moved, dtype, shape, alignment=alignment)
        return (*fills, product, *(() if fused else self._sum(label, elements)))

    def _sum(self, label: str, elements: int) -> tuple[Kernel, ...]:
        """Kernels that accumulate a gradient. DeepSpeed's optimizer of 16-bit parameters with fp32 gradients casts it in
        one and adds in another (deepspeed/runtime/bf16_optimizer.py of 0.6.5, update_hp_grads).
        """
        plan, moved = self.resolved, self._added(elements)
        if plan.casts_gradients:
            width = plan.bytes_per_gradient
            cast = self.memory(f"{label} cast", "backward", elements * (self.element + width))
            return called((cast, self.memory(f"{label} sum", "backward", 3 * elements * width)), "hook")
        kernels = (self.memory(f"{label} sum", "backward", moved),) if moved else ()
        by_autograd = plan.bytes_per_gradient == self.element or plan.own_gradients
        return called(kernels, "accumulation" if by_autograd else "hook")

    def _added(self, elements: int) -> float:
        """Bytes that a kernel moves to accumulate a gradient: read, and their sum read and written.

        Gradients of the parameters' type are left where they are in the first microbatch (PyTorch's autograd), unless there are
        zeros (the option `set_to_none`); gradients of another type are added to a buffer of zeros (Megatron-LM's
        megatron/model/distributed.py). What every microbatch reduces is only cast, which PyTorch's FSDP does with all gradients
        of a unit (`strategies.data_parallel.parameter_gather`); a rank's part of the sum is added up beside the reductions, on
        their stream, which is left out.
        """
        plan, count = self.resolved, self.resolved.microbatches
        if self.resolved.reduces_each:
            cast = plan.bytes_per_gradient != self.element and not plan.pytorch_fsdp
            return float(elements * (self.element + plan.bytes_per_gradient) * cast)
        if plan.kernel_set.times_parts:  # of one microbatch
            count = 1
        moved = elements * (self.element + 2 * plan.bytes_per_gradient)
        stay = plan.bytes_per_gradient != self.element or (plan.own_gradients and not plan.frees_gradients)
        return float(moved if stay else moved * (count - 1) / count)

    def vectors(self, label: str, elements: int, count: int = 1) -> tuple[Kernel, ...]:
        """Kernels that accumulate the gradients of `count` vectors of parameters."""
        return () if self.kernels.compiled or self.frozen else self._sum(label, elements) * count

    def accumulated(self, elements: int) -> int:
        """Bytes moved to accumulate so many gradient elements: written, and read when there are some of microbatches before."""
        anew = self.resolved.microbatches == 1 or self.resolved.reduces_each or self.kernels.times_parts
        return self.resolved.bytes_per_gradient * elements * (1 if anew else 2)

    def memory(self, label: str, phase: str, moved: float) -> Kernel:
        """A kernel bound by `moved` bytes."""
        return Kernel("memory", label, phase, 0.0, float(moved), self.resolved.precision)

    def reduction(self, label: str, phase: str, moved: float) -> Kernel:
        """A kernel bound by `moved` bytes that needs all of a row or column."""
        return Kernel("reduction", label, phase, 0.0, float(moved), self.resolved.precision)

    def fills(self, label: str, phase: str, size: float) -> tuple[Kernel, ...]:
        """With `plan.deterministic`, the kernel that fills a new tensor of `size` bytes before its contents are made.

        torch.empty and all that calls it fill (ATen's empty_cuda and empty_strided_cuda): results of Transformer Engine and
        FlashAttention, casts, copies. What ATen's structured operators make is not filled: products, sums, activations; nor
        what compiled functions make (Inductor allocates below torch.empty), such as bias, dropout and residual addition.
        """
        return (self.memory(f"{label} fill", phase, size),) if self.resolved.deterministic else ()

    def run(self, label: str, phase: str, elements: float, ways: passes.Passes) -> tuple[Kernel, ...]:
        """A kernel per pass over so many elements."""
        dtype = self.resolved.precision
        return tuple(Kernel(way.kind, label, phase, 0.0, float(elements * way.moved), dtype, (), way.operator) for way in ways)

    def collective(self, operation: str, label: str, size: float, width: float = 0) -> Items:
        """A collective of the tp group over a full buffer of `size` bytes; nothing when tp is 1."""
        return self.along("tp", self.tp, operation, label, size, width=width)

    def along(
        self,
        axis: str,
        degree: int,
        operation: str,
        label: str,
        size: float,
        algorithm: str = "",
        width: float = 0,
        *,
        axes: tuple[str, ...] = (),
    ) -> Items:
        """A collective along `axis` over a full buffer of `size` bytes, in elements of `width` bytes (an activation's);
        nothing when its degree is 1. axes: those of its group where they are others (`Collective.along`).
        """
        if degree == 1:
            return ()
        algorithm, width = algorithm or self.resolved.algorithm, width or self.element
        return (Collective(operation, float(size), axis, label, algorithm, width=width, along=axes),)

    def gather(self, label: str, phase: str, features: int = 0, width: float = 0, fused: bool = True) -> Items:
        """All tokens of `features` (hidden) from the 1/tp of every rank, elements of `width` bytes (an activation's); nothing
        without sequence parallelism. fused: asynchronous tensor parallelism joins it with the products beside it.
        """
        if not self.resolved.sequence_parallel:
            return ()
        size = (width or self.element) * self.tokens * (features or self.model.hidden)
        return (*self.collective("all_gather", label, size, width), *self._turned(label, phase, size, fused))

    def _turned(self, label: str, phase: str, size: float, fused: bool) -> tuple[Kernel, ...]:
        """PyTorch gathers and scatters tensors along their first dimension: with several sequences tokens are the second, and all
        is copied (torch/distributed/_functional_collectives.py), but not by asynchronous tensor parallelism.
        """
        asked = self.gathers_once and self.batch > 1 and not (fused and self.overlap("pieces"))
        return (self.memory(f"{label} turned", phase, 2 * size),) if asked else ()

    def statistics(self, label: str, features: int) -> tuple[Collective, Collective]:
        """What a norm over the tokens of all dp and cp ranks exchanges: mean, inverse deviation and count of each rank forward,
        the sums of the gradient and of its product with the input backward (torch/nn/modules/_functions.py, SyncBatchNorm).
        """
        plan, along, width = self.resolved, self.resolved.sharing, 4  # fp32
        size = width * (2 * features + 1) * self.resolved.copies
        return (
            Collective("all_gather", size, "dp", f"{label} statistics", plan.algorithm, width=width, along=along),
            Collective("all_reduce", width * 2 * features, "dp", f"{label} sums", plan.algorithm, width=width, along=along),
        )

    def overlap(self, what: Literal["weight_gradient", "pieces"]) -> bool:
        """Whether collectives of the tp group run beside products: gradients' when pieces' do."""
        return self.tp > 1 and self.resolved.beside_products in (what, "pieces")

    def after_gather(self, gather: Items, products: tuple[Kernel, ...], fused: bool = True) -> Items:
        """Products of tokens (their m) that are gathered."""
        if not (gather and self.overlap("pieces") and (fused or not self.gathers_once)):
            return (*gather, *products)
        pieces = tuple(zip(*(self._cut(product, self.tp) for product in products), strict=True))
        return gathered(pieces, self._round(gather))

    def before_reduce(self, kernels: tuple[Kernel, ...], reduce: Items, fused: bool = True) -> Items:
        """A product of tokens (its m) whose sums are reduced, in pieces: Transformer Engine's, of which each is scattered behind
        the one that made it, or PyTorch's, which go round a ring.

        PyTorch's asynchronous tensor parallelism brings the parts of all ranks together and sums them in one kernel
        (fused_matmul_reduce_scatter in torch/distributed/_symmetric_memory); it does so where the reduction takes a product's
        result, not the sum of several (fuse_matmul_reduce_scatter in torch/_inductor/fx_passes/micro_pipeline_tp.py). Of so few
        numbers each, the sums (torch.sum) reach 23 to 43 % of the memory's bandwidth (github.com/pytorch/pytorch pull 191803),
        half of what other reductions do.
        """
        kernel = kernels[0]
        if not (reduce and self.overlap("pieces")) or (self.gathers_once and (len(kernels) > 1 or not fused)):
            return (*kernels, *reduce)
        if not self.gathers_once:
            assert isinstance(reduce[0], Collective)
            splits = math.gcd(SPLITS, kernel.shape[1])
            return scattered_behind(self._cut(kernel, splits), replace(reduce[0], bytes=reduce[0].bytes / splits))
        ring = self._round(reduce)
        moved = 2 * ring.bytes * (1 + 1 / self.tp)
        sums = (self.reduction(f"{kernel.label} sums", kernel.phase, moved),)
        return (*scattered(self._cut(kernel, self.tp), ring), *sums)

    def _cut(self, kernel: Kernel, pieces: int) -> tuple[Kernel, ...]:
        """The product in so many kernels, each for as many tokens."""
        batch, m, n, k = kernel.shape
        return (self.gemm(kernel.label, kernel.phase, m // pieces, n, k, batch, dtype=kernel.dtype),) * pieces

    def _round(self, collective: Items) -> Collective:
        """One of the tp − 1 rounds of a ring all-gather or reduce-scatter."""
        assert isinstance(collective[0], Collective)
        return replace(collective[0], algorithm=f"{collective[0].operation}/ring", repeat=1 / (self.tp - 1))

    def reduce(self, label: str, phase: str, features: int = 0, fused: bool = True) -> Items:
        """The sum of all ranks' partial results, on every rank or (sequence parallelism) a part of the tokens on each. fused: as
        in `gather`.
        """
        size = self.element * self.tokens * (features or self.model.hidden)
        if not self.resolved.sequence_parallel:
            return self.collective("all_reduce", label, size)
        return (*self._turned(label, phase, size, fused), *self.collective("reduce_scatter", label, size))
