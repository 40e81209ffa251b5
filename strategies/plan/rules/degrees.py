"""What of a model tensor, sequence and context parallelism can divide, and what their ranks can send and overlap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strategies.models.delta_net import DeltaNet
from strategies.models.model import Model

if TYPE_CHECKING:
    from strategies.plan.plan import Plan


def divides(model: Model, plan: Plan, sequence: int) -> Iterator[str]:
    """What tp and cp ranks share must divide by their number."""
    sizes = [
        size
        for own, _ in model.distinct_layers
        for size in (
            *(((own.heads, "attention heads"), (own.kv_heads, "key-value heads")) if own.has_attention else ()),
            *([(own.ffn, "MLP columns")] if own.feed_forward else []),
            *_of_recurrence(own, model.name),
        )
    ]
    for count, what in dict.fromkeys(sizes if model.module is None else ()):
        if what == "key-value heads" and count < plan.tp:
            yield from _shared_heads(model, plan, count)
        elif count % plan.tp:
            yield f"tp={plan.tp} does not divide {count} {what}"
    if plan.tp > 1 and model.qk_norm == "whole":
        yield f"tp={plan.tp} is not simulated for {model.name}, which norms queries over all heads, of which tp ranks have a part"
    if model.patches and sequence != model.context:
        yield f"sequence={sequence} contradicts the {model.context} tokens of an image of {model.name}; set model.patches.image"
    if plan.sequence_parallel and plan.tp == 1:
        yield "sequence_parallel=true needs tp > 1, and tp=1"
    if plan.sequence_parallel and sequence % plan.tp:
        yield f"tp={plan.tp} does not divide {sequence} tokens, which sequence_parallel needs"
    if model.family == "encoder_decoder" and (plan.pp > 1 or plan.cp > 1):
        yield f"the encoder and decoder of {model.name} with pp={plan.pp}, cp={plan.cp} are not simulated: only pp=1, cp=1 are"
    if plan.cp > 1:
        yield from _context(model, plan, sequence)
    if model.positions == "learned" and sequence > model.context:
        yield f"sequence={sequence} exceeds the {model.context} learned positions of {model.name}"


def _shared_heads(model: Model, plan: Plan, heads: int) -> Iterator[str]:
    """Of more tp ranks than key-value heads, which Megatron-Core has in self-attention only: its CrossAttention refuses heads
    that queries share (megatron/core/transformer/attention.py).
    """
    said = f"tp={plan.tp} exceeds {heads} key-value heads"
    if plan.tp % heads:
        yield f"{said}, and does not divide by them"
    elif not plan.kernel_set.splits_shared_heads:
        yield f"{said}: with kernels={plan.kernels} each rank needs one of its own"
    elif model.family == "encoder_decoder":
        yield f"{said}: the cross attention of {model.name} needs one of its own on each rank"


def _of_recurrence(own: Model, name: str) -> Iterator[tuple[int, str]]:
    """What tp ranks share of a mixer that keeps a state."""
    mixer = own.recurrence
    if isinstance(mixer, DeltaNet):
        yield mixer.key_heads, f"key heads of the delta-net layers of {name}"
    elif mixer is not None and not mixer.step_rank:
        yield mixer.heads, f"heads of the state-space layers of {name}"
        yield mixer.groups, f"groups of the state-space layers of {name}"


def _context(model: Model, plan: Plan, sequence: int) -> Iterator[str]:
    """Rules of context parallelism."""
    if not plan.fused_attention:
        yield f"cp={plan.cp} needs attention=flash, and attention={plan.attention}"
    if model.pooler:
        yield f"cp={plan.cp} is not simulated for {model.name}: its pooler works on the first token alone"
    if plan.cp_method == "all_gather" and plan.of_pytorch:
        yield f"cp_method=all_gather contradicts kernels={plan.kernels}: it is Transformer Engine's"
    if plan.cp_method != "ulysses":  # zig-zag: a rank has a block from the start and one from the end
        pieces, what = 2 * plan.cp, f"2·cp = 2·{plan.cp}"
    else:
        pieces, what = plan.cp, f"cp = {plan.cp}"
        for count, of in ((model.heads, "attention heads"), (model.kv_heads, "key-value heads")):
            if count % (plan.tp * plan.cp):
                product = f"tp·cp = {plan.tp}·{plan.cp} = {plan.tp * plan.cp}"
                yield f"{product} does not divide {count} {of}, which cp_method=ulysses spreads"
    if sequence % pieces:
        yield f"{what} does not divide sequence={sequence}, which cp_method={plan.cp_method} needs"
    if plan.sequence_parallel and sequence // plan.cp % plan.tp:
        has = f"sequence/cp = {sequence}/{plan.cp} tokens"
        yield f"tp={plan.tp} does not divide {has}, which sequence_parallel needs"


def exchanges(plan: Plan) -> Iterator[str]:
    """What tp ranks can send in parts, or beside products."""
    if plan.scatter_gather not in (None, "none"):
        said = f"scatter_gather={plan.scatter_gather}"
        if plan.tp == 1 or plan.pp == 1:
            yield f"{said} needs tp > 1 and pp > 1, and tp={plan.tp}, pp={plan.pp}"
        if plan.sequence_parallel:
            yield f"{said} contradicts sequence_parallel=true, with which tp ranks have different tokens to send"
    refused = plan.kernel_set.refused_overlaps.get(plan.overlap_tp or "none")
    if refused:
        yield f"overlap_tp={plan.overlap_tp} contradicts kernels={plan.kernels}: {refused}"
    if plan.overlap_tp == "pieces" and not plan.sequence_parallel:
        yield "overlap_tp=pieces needs sequence_parallel=true: an all-reduce has no pieces to wait for"


def synchronised(plan: Plan, dp: int) -> Iterator[str]:
    """Rules of norms over all ranks."""
    if not plan.sync_norm:
        return
    if dp * plan.cp == 1:
        yield "sync_norm=true needs dp or cp above 1"
    if plan.local_steps:
        yield f"sync_norm=true contradicts local_steps={plan.local_steps}: dp ranks would meet in every layer"
    if plan.sequence_parallel:
        yield "sync_norm=true with sequence_parallel=true is not simulated: tp ranks would share statistics too"
