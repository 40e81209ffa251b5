"""Training frameworks: a folder each, with its kernels and habits (`kernels.py`), its options (`options.py`) and its settings
(`settings.py`).

`kernel_sets` has what runs between matrix products, by the name that `plan.kernels` says. A set is asked what it does; nobody
compares its name. What is written here is what most do, Megatron-LM's fused kernels; a folder says what is otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

from sim.program import Launching
from strategies.frameworks.options import Options
from strategies.frameworks.passes import FLOAT, Passes, Ways, persistent_norm, reduce, stream
from strategies.frameworks.runtime import Runtime
from topologies.registry import Registry

TRANSFORMER_ENGINE = ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")  # its fp8 scalings


class Alignment(NamedTuple):
    """Elements at whose multiples a parameter starts in its bucket, and a bucket ends; shared_apart: whether an embedding that
    two pipeline stages have is a bucket of its own.
    """

    start: int = 1
    end: int = 1
    shared_apart: bool = False


class Routing(NamedTuple):
    """Kernels of few bytes that the host launches one by one around the experts' work, besides the softmax of scores and what
    copies tokens. scores: over tokens and experts, to choose and to balance; counts: over experts, and copies of counts to the
    host; places: to find the order of copies; backward: gradients of scores.
    """

    scores: int = 0
    counts: int = 0
    places: int = 0
    backward: int = 0


class KernelSet:
    """Kernels of a framework between matrix products, what autograd keeps for them, and the framework's defaults.

    options: what the plan says under `framework`; the default of a class tells which options it has.
    """

    options: Options = Options.model_validate({})
    runtime: ClassVar[Runtime] = Runtime()  # what keeps gradients and model states

    of_pytorch: ClassVar[bool] = False  # the model is written in PyTorch's operators: gradients are parameters' .grad
    eager: ClassVar[bool] = False  # an operator is a kernel, and keeps what it needs for backward
    compiled: ClassVar[bool] = False  # torch.compile launches the kernels, and fuses sums of gradients with what reads them
    prefetches_backward: ClassVar[bool] = False  # zero3: a backward pass gathers one part ahead, even without overlap (FSDP2)
    pipeline_buffers: ClassVar[bool] = False  # pipeline stages hold buffers for what they receive
    pipeline_modules: ClassVar[bool] = False  # with DeepSpeed its pipeline engine runs one stage, too; logits leave that in fp32
    replicas_last: ClassVar[bool] = False  # of shards that every microbatch reduces, replicas sum those of the last one (HSDP)
    splits_shared_heads: ClassVar[bool] = False  # more tp ranks than key-value heads share out the matrix, and gather its results
    asks_late: ClassVar[frozenset[str]] = frozenset()  # schedules whose receives begin when the pass before them is over
    waits_for_sends: ClassVar[frozenset[str]] = frozenset()  # schedules that send and receive at once, and wait for both

    # thread blocks of a launch of a multi-tensor update at most (multi_tensor_apply.cuh of Apex, DeepSpeed, Transformer Engine)
    update_blocks: ClassVar[int] = 320
    accumulates_in_products: ClassVar[bool] = False  # products accumulate weight gradients (gradient accumulation fusion)
    beside_products: ClassVar[Literal["none", "weight_gradient", "pieces"]] = "none"  # the default of plan.overlap_tp
    hides_ring: ClassVar[bool] = False  # ring attention attends to a block while it passes the block on (Transformer Engine)
    refused_overlaps: ClassVar[Mapping[str, str]] = {}  # values of plan.overlap_tp that it does not have, and why

    fp8_scalings: ClassVar[tuple[str, ...]] = ()  # plan.fp8.scaling that it has
    torchao: ClassVar[bool] = False  # fp8 is torchao's; otherwise Transformer Engine's
    norms_in_fp8: ClassVar[bool] = False  # a norm before a matrix is its module's, and may write fp8
    fp8_experts: ClassVar[bool] = False  # experts multiply in fp8; fp8.dispatch and fp8 storage are simulated
    fp8_gathers: ClassVar[str] = "optimizer"  # model state that a hook must shard for fp8.gather

    deterministic: ClassVar[bool] = False  # plan.deterministic is simulated
    sequences_first: ClassVar[bool] = False  # tensors have tokens first: FlashAttention-2's inputs and results are copied
    weighs_before_combining: ClassVar[bool] = False  # results of experts are weighted inside their products
    experts_apart: ClassVar[bool] = False  # products of experts, and their casts, are launched one by one from one call
    pads_experts: ClassVar[bool] = False  # in fp8 tokens of each expert are copied with padding, and results without
    sorts_copies: ClassVar[bool] = False  # copies of tokens that have come are copied again in the order of experts
    early_cublas: ClassVar[bool] = False  # cuBLAS before CUDA 11.7
    adds_qkv_bias: ClassVar[bool] = False  # the bias of queries, keys and values is added by a kernel of its own
    scales_score_gradients: ClassVar[bool] = False  # gradients of scaled scores are scaled by kernels of their own
    small_kernels: ClassVar[bool] = False  # batches, masks and losses take many kernels of few bytes
    tracks_generators: ClassVar[bool] = False  # attention's dropout has a generator of its own; checkpoints restore all of them
    softmax_rows: ClassVar[int] = 1  # rows that the fused softmax takes at a time; other numbers are left to PyTorch

    separate_products: bool = False  # queries, keys, values, gate and up are products of their own
    repeats_keys: bool = False  # key and value heads are copied for each of their query heads before fused attention
    unpads: bool = False  # fused attention is given tokens that are gathered before it and put back after it
    loss_metrics: int = 0  # how many times more the cross entropy is computed
    waits_before_passes: bool = False  # the host waits for the GPU before every pass
    times_parts: bool = False  # and before every layer, the embedding and the head, whose collectives follow their kernels
    fp16_loss: bool = False  # logits are not cast to fp32

    flat_parameters: bool = False  # zero3 is FSDP1, whose units are flat parameters
    root_unit: bool = False  # embedding and head are one unit of zero3, which stays from the first pass to the last
    keeps_last_unit: bool = False  # zero3 does not release the unit that a forward pass ends with
    frees_gradients: bool = True  # after the update, where gradients are PyTorch's .grad
    bucket_views: bool = False  # gradients live in DDP's buckets
    broadcast_buffers: bool = True  # DDP sends buffers of a traced module in every step
    overlap_param_gather: bool = False  # zero1 gathers parameters beside the next step's first forward pass
    routing: Routing = Routing()
    graphed: bool = False  # all passes of a step are launched as one CUDA graph
    launching: ClassVar[Launching] = Launching()  # of its kernels by the host; Transformer Engine's backward passes are Python's

    def __init__(self, options: Options | None = None) -> None:
        if options is not None:
            self.options = options

    def norm(self, rms: bool, width: float) -> Ways:
        """A norm over features, per element."""
        return persistent_norm(width)

    def gate(self, width: float) -> Ways:
        """A gated activation, per element of its result."""
        return Ways(stream(3 * width), stream(5 * width))

    def rotary(self, width: float) -> Ways:
        """Rotary embedding of queries and keys, per element."""
        return Ways(stream(2 * width), stream(2 * width))

    def residual(self, width: float, mask: bool) -> Ways:
        """Bias, dropout with a mask of a byte per element, and the sum with the residual stream."""
        return Ways(stream(3 * width + mask), dropout_backward(width, mask))

    def softmax(self, causal: bool, width: float) -> Ways:
        """Scale, mask and softmax of scores, per score. A fused causal one loads what the mask leaves, half, and stores whole
        rows (megatron/fused_kernels/scaled_upper_triang_masked_softmax.h); backward, it loads half of gradient and result.
        """
        read = 0.5 if causal else 1.0
        mask = 0.0 if causal else 1.0  # a byte per score is read where some are padding
        return Ways(reduce((read + 1) * width + mask), reduce((2 * read + 1) * width))

    def loss(self, width: float) -> Ways:
        """Cross-entropy, per logit. Megatron-LM computes it in fp32: a pass that casts and takes the maximum, one for
        exponentials and their sum, one that divides; the gradient is made from the probabilities.
        """
        first = width + FLOAT * (width != FLOAT)
        return Ways(reduce(first, 2 * FLOAT, 2 * FLOAT), stream(FLOAT + width))

    def waits_for_counts(self, exchanged: bool) -> bool:
        """Whether the host waits in every mixture of experts for how many tokens each expert has. exchanged: the experts are on
        several ranks.
        """
        return False

    def bucket(self, overlap: bool, first: bool, dp: int) -> float | None:
        """Parameters whose gradients are reduced at once, unless the plan says; None: as PyTorch's DDP. first: the first chunk of
        the first pipeline rank.
        """
        return None

    def alignment(self, ranks: int) -> Alignment:
        """Of buckets that so many ranks share out evenly."""
        return Alignment()

    def before_reduction(self, gradient: int, joined: bool, copies: int, scaled: bool) -> list[tuple[str, int]]:
        """Kernels on a rank's whole gradients of `gradient` bytes before they are summed over `copies` ranks: names, bytes per
        parameter. joined: gradients of the parameters' type, each by itself; scaled: the loss is (fp16), so that infinities are
        looked for after the reduction.
        """
        return []


def dropout_backward(width: float, mask: bool) -> Passes:
    """Without dropout the gradient passes unchanged."""
    return stream(2 * width + 1) if mask else ()


kernel_sets: Registry[type[KernelSet]] = Registry("kernels", package="strategies.frameworks", module="kernels")


@lru_cache(maxsize=256)
def kernel_set(name: str, options: Options | None = None) -> KernelSet:
    """The set of that name with the options that it has. Raises UserError for an unknown name."""
    known = kernel_sets[name]
    kind = type(known.options)
    if options is None or isinstance(options, kind):
        return known(options)
    return known(kind.model_validate(options.model_dump(include=options.model_fields_set & kind.model_fields.keys())))


def sets_with(fields: Iterable[str]) -> list[str]:
    """Names of the kernel sets that have all these options."""
    wanted = set(fields)
    return [name for name in kernel_sets if wanted <= type(kernel_sets[name].options).model_fields.keys()]
