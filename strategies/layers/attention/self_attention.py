"""Attention of one layer: queries, keys and values, the attention core, the output matrix.

The core is one fused (flash) kernel or scores written to memory. How cp ranks share it is in
`strategies.layers.attention.context_parallel`.
"""

from __future__ import annotations

from dataclasses import replace

from sim.program import Kernel
from strategies.frameworks import passes
from strategies.frameworks.pytorch import operators as eager
from strategies.layers.attention.context_parallel import Shape, around, blocks, exchanged, gathers, rings
from strategies.layers.attention.latent_attention import projections
from strategies.layers.attention.rotary import rotary
from strategies.layers.operators import Operator, column_linear, pointwise, row_linear
from strategies.layers.rank_shapes import RankShapes
from strategies.plan.options import FP8_WIDTH, Fp8

CORE = ("core_attn",)
E5M6 = 1.5  # bytes of a number with 5 bits of exponent and 6 of mantissa
LOG_SUM_EXP = 4  # bytes: flash attention keeps one fp32 number per query and head (arXiv:2205.14135)


def attention(rank: RankShapes, features: int = 0, normed: bool = False) -> list[Operator]:
    """The pieces of attention, in the order of the forward pass. features: of a token that queries, keys and values are made of
    (hidden). normed: as of `column_linear`.
    """
    model = rank.model
    before = projections(rank, model.latent) if model.latent else _projections(rank, features, normed)
    if model.sinks:
        before.append(Operator(weight_gradient=rank.vectors("sinks", rank.heads), shapes=((rank.heads,),)))
    flash = rank.resolved.fused_attention
    core = exchanged(rank, _flash(rank)) if flash else materialised_core(rank, rank.sequence)
    core = _unpadded(rank, core) if rank.kernels.unpads else core
    if rank.kernels.sequences_first and (rank.resolved.attention, rank.cp) == ("flash2", 1):
        core = _sequences_first(rank, core)
    after = row_linear(rank, "attention output", model.heads * model.v_head_dim, model.output_bias)
    return [*before, *core, *([_gated(rank)] if model.attention_gate else []), *_output(rank, after)]


def _gated(rank: RankShapes) -> Operator:
    """The core's result times a sigmoid of the gate, which are both kept: one compiled kernel (Megatron-LM's _apply_output_gate)
    or PyTorch's operators, which keep the sigmoid in place of the gate.
    """
    size = float(rank.element * rank.tokens * rank.heads * rank.model.head_dim)
    forward, backward = ((2, 3), (3, 3, 3)) if rank.eager else ((3,), (5,))
    return Operator(
        forward=tuple(rank.memory("attention gate", "forward", times * size) for times in forward),
        input_gradient=tuple(rank.memory("attention gate", "backward", times * size) for times in backward),
        saved={"attention result": size, "attention gate": size},
        temporary=2 * size,
    )


def _output(rank: RankShapes, after: Operator) -> list[Operator]:
    """The product after the core. Where it keeps its input in fp8, a fused core keeps its result too, for its own backward pass
    (Transformer Engine's DotProductAttention); DeepSeek-V3 keeps 12 bits for both (arXiv:2412.19437, section 3.3.3).
    """
    plan = rank.resolved
    if plan.fp8 is None or not plan.fused_attention or rank.kernels.torchao:
        return [after]
    results = rank.tokens * rank.heads * rank.model.v_head_dim
    if plan.fp8.attention_output == "bf16":
        return [Operator(modules=CORE, inner={"attention result": _width(rank) * results}), after]
    moved = (rank.element + E5M6) * results
    there, back = (rank.memory("attention output in e5m6", phase, moved) for phase in ("forward", "backward"))
    kept = replace(after, saved={"attention output input": E5M6 * results})
    return [Operator(forward=(there,), input_gradient=(back,)), kept]


def _projections(rank: RankShapes, features: int, after_norm: bool) -> list[Operator]:
    model, dim = rank.model, rank.model.head_dim
    queries, keys = rank.tokens * rank.heads * dim, rank.tokens * rank.kv_heads * dim
    outputs = model.query_features + 2 * model.kv_heads * dim
    parts = (model.query_features // rank.tp, *(model.kv_heads * dim // rank.tp,) * 2)
    gate = queries * model.attention_gate
    # autograd joins the gradients of queries, keys and values before the one product that takes them
    apart = rank.kernels.compiled or rank.kernels.separate_products
    joined = () if apart else (2 * rank.element * (queries + gate + 2 * keys),)
    operators = [
        column_linear(rank, "qkv", outputs, model.attention_bias, sum(parts), inputs=features, parts=parts, normed=after_norm),
        *([_of_shared_heads(rank, outputs)] if model.kv_heads < rank.tp else []),
        Operator(input_gradient=tuple(rank.memory("qkv gradients", "backward", moved) for moved in joined)),
    ]
    if model.qk_norm:
        normed = pointwise(rank, "qk norm", queries + keys, queries + keys, saved="queries and keys before norm")
        whole = model.qk_norm == "whole"
        sizes = (queries // rank.tokens, keys // rank.tokens) if whole else (dim, dim)
        count = model.norm_parameters(dim) // dim if model.qk_norm != "unweighted" else 0
        shapes = tuple((size,) for size in sizes for _ in range(count))
        operators.append(replace(normed, shapes=shapes, replicated=0 if whole else dim * len(shapes)))
    if model.positions == "rotary":
        turned = (queries + keys) * (model.rotary_dim or dim) // dim
        operators.append(eager.rotary(rank, turned) if rank.eager else rotary(rank, turned))
    if rank.kernels.repeats_keys and rank.kv_heads < rank.heads:
        operators.append(_repeated(rank, queries, keys))
    return operators


def _of_shared_heads(rank: RankShapes, outputs: int) -> Operator:
    """With more tp ranks than key-value heads, a rank's part of the matrix is no whole head: the results of all ranks are
    gathered, and each takes its queries, and the keys and values that they share. Backward, their gradients are put among zeros
    and reduce-scattered (Megatron-Core from 0.16 on, SelfAttention.get_query_key_value_tensors; NVIDIA/Megatron-LM pull request
    2565). Both collectives are along the last dimension, for which all is copied (_gather_along_last_dim and
    _reduce_scatter_along_last_dim in megatron/core/tensor_parallel/mappings.py).
    """
    size, label = rank.element * rank.tokens * outputs, "shared key-value heads"
    copied = rank.memory(label, "forward", 2 * size)
    zeros = rank.memory(label, "backward", size + 2 * size // rank.model.kv_heads)
    turned = rank.memory(label, "backward", 2 * size)
    return Operator(
        forward=(*rank.collective("all_gather", label, size), copied),
        input_gradient=(zeros, turned, *rank.collective("reduce_scatter", f"{label} gradient", size)),
        temporary=2 * size,
    )


def _repeated(rank: RankShapes, queries: int, keys: int) -> Operator:
    """Keys and values copied for each of their query heads; backward, the gradients of the copies are summed. torch.compile
    writes the copies where rotary positions and the product would have written one.
    """
    moved = 2 * rank.element * (queries + (keys if rank.eager else 0))
    summed = rank.reduction if rank.eager else rank.memory
    return Operator(
        forward=(rank.memory("repeat keys and values", "forward", moved),),
        input_gradient=(summed("repeat keys and values", "backward", moved),),
        temporary=2 * rank.element * queries,
    )


def _flash(rank: RankShapes) -> Operator:
    """One fused kernel each way. Causal attention executes half of the products; backward 5 products where forward has 2.

    Dropout is drawn again in backward: no mask is kept. The backward kernel sums query gradients in fp32 (FlashAttention-2).
    With ring attention there is a kernel per block of keys and values; a rank keeps its own block. Where value heads are
    narrower than key heads (latent attention), a kernel's head_dim is their mean: it has as many products.
    """
    return fused_core(rank, blocks(rank), rank.sequence)


def fused_core(rank: RankShapes, shapes: list[Shape], key_sequence: int) -> Operator:
    """Fused kernels of `shapes`; key_sequence: tokens of one sequence of keys, on all cp ranks together."""
    model, dim, element = rank.model, rank.model.head_dim, rank.element
    tokens = rank.batch * key_sequence // rank.cp
    queries, keys = rank.tokens * rank.heads * dim, tokens * rank.kv_heads * dim
    values, results = tokens * rank.kv_heads * model.v_head_dim, rank.tokens * rank.heads * model.v_head_dim
    repeated = rank.kernels.repeats_keys and rank.kv_heads < rank.heads
    if repeated and rank.eager:  # torch.compile keeps them as they were, and repeats them again
        keys = values = queries
    both = 2 * queries if repeated else keys + values
    sums = LOG_SUM_EXP * rank.tokens * rank.heads
    seen = rank.resolved.document or model.counted_keys(key_sequence)
    forward, backward = around(
        rank,
        [_fused(rank, shape, key_sequence, backward=False) for shape in shapes],
        [_fused(rank, shape, key_sequence, backward=True) for shape in shapes],
        (queries, both, results),
    )
    result = rank.fills("attention", "forward", element * results)
    gradients = rank.fills("attention", "backward", element * (queries + keys + values))
    width, given = _width(rank), queries + keys + values
    return Operator(
        forward=(
            *_cast(rank, "forward", given),
            *result,
            *forward,
            *_restored(rank, "forward", results),
        ),
        input_gradient=(
            *_cast(rank, "backward", results),
            *gradients,
            *backward,
            *_restored(rank, "backward", given),
        ),
        saved={"queries": width * queries, "keys": width * keys, "values": width * values},
        modules=CORE,
        inner={"log-sum-exp": sums},
        temporary=element * (given + results)
        + (width * (given + results) if width < element else 0)
        + 4 * queries
        + (element * 2 * both if rings(rank) else 0)
        + (element * 3 * both * rank.cp if gathers(rank) else 0),  # all of them, in order, and their gradients
        flops=2.0 * rank.tokens * model.heads * (dim + model.v_head_dim) * seen,
    )


def _width(rank: RankShapes) -> int:
    """Bytes of what the core multiplies and keeps."""
    return FP8_WIDTH if _in_fp8(rank) else rank.element


def _in_fp8(rank: RankShapes) -> Fp8 | None:
    """The recipe by which the core multiplies in fp8, if it does."""
    fp8 = rank.resolved.fp8
    return fp8 if fp8 is not None and fp8.attention else None


def _cast(rank: RankShapes, phase: str, elements: int) -> tuple[Kernel, ...]:
    """The core's operands as they become fp8: queries, keys and values are one tensor, the result's gradient another
    (transformer_engine/pytorch/attention/dot_product_attention/backends.py, FusedAttnFunc).
    """
    fp8 = _in_fp8(rank)
    if fp8 is None:
        return ()
    maximum = (rank.reduction("attention maximum", phase, rank.element * elements),) if fp8.scaling == "tensorwise" else ()
    return (*maximum, rank.memory("attention cast", phase, (rank.element + FP8_WIDTH) * elements))


def _restored(rank: RankShapes, phase: str, elements: int) -> tuple[Kernel, ...]:
    """What comes out of the core, as 16 bits again."""
    if _in_fp8(rank) is None:
        return ()
    return (rank.memory("attention cast back", phase, (rank.element + FP8_WIDTH) * elements),)


def _sequences_first(rank: RankShapes, core: list[Operator]) -> list[Operator]:
    """FlashAttention-2 by Transformer Engine: Megatron-LM's tensors have tokens first, FlashAttention's have sequences. Queries,
    keys and values are copied, and so is the result of several sequences, which both keep; gradients pass as views
    (transformer_engine/pytorch/attention/dot_product_attention/backends.py, FlashAttention.forward).
    """

    def copied(elements: int) -> tuple[Kernel, ...]:
        size = rank.element * elements
        return *rank.fills("attention copy", "forward", size), rank.memory("attention copy", "forward", 2 * size)

    dim, result = rank.model.head_dim, rank.tokens * rank.heads * rank.model.head_dim
    given = (result, *(rank.tokens * rank.kv_heads * dim,) * 2)
    before = Operator(forward=tuple(kernel for each in given for kernel in copied(each)), temporary=rank.element * sum(given))
    if rank.batch == 1:
        return [before, *core]
    return [before, *core, Operator(forward=copied(result), saved={"attention result": rank.element * result})]


def _unpadded(rank: RankShapes, core: list[Operator]) -> list[Operator]:
    """Tokens gathered before the core, and its result put back among zeros after it; gradients the other way round. The host's
    waits for the number of tokens are left out.
    """

    def gathered(phase: str, elements: int) -> Kernel:
        return rank.memory("unpad", phase, 2 * rank.element * elements)

    def put(phase: str, elements: int) -> tuple[Kernel, ...]:
        zeros = rank.memory("pad zeros", phase, rank.element * elements)
        return zeros, rank.memory("pad", phase, 2 * rank.element * elements)

    result = rank.tokens * rank.heads * rank.model.head_dim
    given = (result, *(rank.tokens * rank.kv_heads * rank.model.head_dim,) * 2)
    before = Operator(
        forward=tuple(gathered("forward", size) for size in given),
        input_gradient=tuple(kernel for size in given for kernel in put("backward", size)),
        temporary=rank.element * sum(given),
    )
    after = Operator(forward=put("forward", result), input_gradient=(gathered("backward", result),))
    return [before, *core, after]


def _fused(rank: RankShapes, shape: Shape, key_sequence: int, backward: bool) -> Kernel:
    """A flash kernel: reads queries, keys, values, writes the result; backward reads these and the result's gradient too, and
    writes three gradients. A window's keys are all read, though each query sees few. Learned relative positions are an operand,
    read for every sequence, whose gradient is written (cuDNN's fused attention with a bias).
    """
    batch, heads, kv_heads, rows, columns, dim, causal = shape
    windowed = rank.model.window is not None and rank.model.window < key_sequence
    queries, keys = batch * heads * rows * dim, batch * kv_heads * (key_sequence if windowed else columns) * dim
    flops = 4.0 * batch * heads * rows * dim * columns * (0.5 if causal else 1.0)
    moved = float(_width(rank) * (4 if backward else 2) * (queries + keys) + LOG_SUM_EXP * batch * heads * rows)
    if rank.model.positions == "relative" and rows == columns:
        moved += rank.element * batch * heads * rows * columns * (2 if backward else 1)
    plan, name = rank.resolved, "backward" if backward else "forward"
    variant = "" if plan.attention == "flash" else plan.attention
    work = flops * (2.5 if backward else 1.0)
    ordered = backward and plan.deterministic
    dtype = "fp8" if _in_fp8(rank) else plan.precision
    return Kernel(f"attention_{name}", "attention", name, work, moved, dtype, shape, variant, ordered=ordered)


def materialised_core(rank: RankShapes, key_sequence: int) -> list[Operator]:
    """Scores and probabilities as tensors in memory, sequence × key_sequence for every head, in full even when causal.

    Shared key and value heads are repeated for each query head first, as the batched product needs them.
    """
    dim, width = rank.model.head_dim, rank.model.v_head_dim
    element, tokens = rank.element, rank.batch * key_sequence // rank.cp
    plan, itself = rank.resolved, key_sequence == rank.sequence
    queries, results = (element * rank.tokens * rank.heads * features for features in (dim, width))
    keys, values = (element * tokens * rank.kv_heads * features for features in (dim, width))
    repeats = element * tokens * rank.heads * dim  # bytes of keys for each query head
    matrices = rank.batch * rank.heads
    scores = matrices * rank.sequence * key_sequence
    repeated = rank.kv_heads < rank.heads
    # the attention core gets keys and values as they are: repeated ones are its own, and then only selective recomputation
    # needs those that were not
    inputs = {"keys": keys, "values": values} if not repeated or "core_attn" in plan.recomputed_modules else {}
    operators = []
    if repeated:
        forward = rank.memory("repeat keys and values", "forward", 2 * (keys + repeats))
        backward = rank.memory("repeat keys and values", "backward", 2 * (keys + repeats))
        operators.append(
            Operator((forward,), (backward,), modules=CORE, inner={"repeated keys": repeats, "repeated values": repeats})
        )
    ways = _softmax(rank)
    softmax = Operator(
        forward=rank.run("softmax", "forward", scores, ways.forward),
        input_gradient=rank.run("softmax", "backward", scores, ways.backward),
        modules=CORE,
        inner={"probabilities": element * scores},
        temporary=2 * element * scores,
    )
    product = _product(rank, "scores", key_sequence, key_sequence, dim, {"queries": queries, **inputs})
    scaled = (rank.memory("score gradient scale", "backward", 2 * queries),) * 2 if rank.kernels.scales_score_gradients else ()
    operators += [
        Operator(input_gradient=scaled, modules=CORE),
        _biased(rank, product, element * scores) if rank.model.positions == "alibi" else product,
        *([_relative(rank, scores)] if rank.model.positions == "relative" and itself else []),
        softmax,
    ]
    if rank.attention_dropout:
        operators.append(_dropped(rank, scores))
    # heads by tokens become tokens by heads, a copy each way
    turned = [(rank.memory("context copy", phase, 2 * results),) for phase in ("forward", "backward")]
    context = _product(rank, "context", key_sequence, width, key_sequence, inputs)
    return [*operators, context, Operator(turned[0], turned[1], modules=CORE)]


def _relative(rank: RankShapes, scores: int) -> Operator:
    """Learned numbers of distances (T5) are added to all sequences' scores; backward, gradients are summed over sequences."""
    table = scores // rank.batch
    there = rank.memory("relative positions", "forward", rank.element * (2 * scores + table))
    back = rank.reduction("relative positions", "backward", rank.element * (scores + 2 * table))
    return Operator((there,), (back,), modules=CORE, temporary=rank.element * scores)


def _dropped(rank: RankShapes, scores: int) -> Operator:
    """Dropout of so many probabilities, by PyTorch, of which each tp rank may draw its own."""
    moved = (2 * rank.element + 1) * scores
    fork = "generator fork" if rank.kernels.tracks_generators else ""
    return Operator(
        forward=(replace(rank.memory("attention dropout", "forward", moved), variant="dropout", calls=fork),),
        input_gradient=(rank.memory("attention dropout", "backward", moved),),
        modules=CORE,
        inner={"attention dropout mask": scores, "dropped probabilities": rank.element * scores},
        temporary=2 * rank.element * scores,
    )


def _biased(rank: RankShapes, product: Operator, scores: float) -> Operator:
    """ALiBi as an operand of torch.baddbmm (Megatron-DeepSpeed megatron/model/transformer.py at c839a8aa): a row of every head is
    copied to all of its scores, to which the product is added. A fused kernel makes it as it goes.
    """
    kernel = product.forward[0]
    assert isinstance(kernel, Kernel)
    return replace(product, forward=(rank.memory("alibi", "forward", scores), replace(kernel, bytes=kernel.bytes + scores)))


def _softmax(rank: RankShapes) -> passes.Ways:
    """Megatron-LM's fused softmax takes four rows of scores at a time, one of four heads or sequences; other numbers of them on a
    rank are left to PyTorch (megatron/model/fused_softmax.py, is_kernel_available).
    """
    if rank.batch * rank.heads % rank.kernels.softmax_rows:
        return passes.pytorch_softmax(rank.element)
    return rank.kernels.softmax(rank.model.family == "decoder", rank.element)


def _product(rank: RankShapes, label: str, keys: int, columns: int, depth: int, saved: dict[str, int]) -> Operator:
    """For every head sequence × depth by depth × columns, one of which are `keys`; both operands have gradients."""
    sequence, matrices, rows = rank.sequence, rank.batch * rank.heads, (columns, depth)
    left = rank.gemm(f"{label} gradient left", "backward", sequence, depth, columns, matrices, rows)
    right = rank.gemm(f"{label} gradient right", "backward", depth, columns, sequence, matrices, rows)
    return Operator(
        forward=(rank.gemm(label, "forward", sequence, columns, depth, matrices, rows),),
        input_gradient=(left, right),
        saved=dict(saved),
        modules=CORE,
        temporary=rank.element * matrices * sequence * (columns + depth),
        flops=2.0 * rank.batch * rank.model.heads * sequence * rank.model.counted_keys(keys) * (columns * depth // keys),
    )
