"""Recomputation of chosen operators: `recompute: operators`, PyTorch's selective activation checkpointing as torchtitan sets it.

The policy goes by operators, not by modules: results of the attention kernel, of reduce-scatters and of matrix products are kept,
but of every second product, as they come in a layer; all else runs again (pytorch/torchtitan, parallelize_llama.py,
`selective_ac_option = 'op'`). Of a dense layer, in the order of its model.py: queries are kept, keys run again, values are kept,
the attention output runs again; of a gated MLP the gate is kept, the other factor runs again, the last product is kept, and of
one without a gate the first is kept. With fp8 the maxima that scales come from are kept too.

Eager PyTorch stops when the last tensor that backward needs is there, but runs all before it, needed or not, and keeps what the
policy says; torch.compile runs and keeps only what backward uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sim.program import Item, Kernel
from strategies.layers.operators import Operator
from strategies.layers.rank_shapes import RankShapes
from strategies.layers.tensor_overlap import Items
from topologies.reading import UserError


def check(rank: RankShapes) -> None:
    """Raise UserError for what the policy is not written down for."""
    model, plan = rank.model, rank.resolved
    biased = model.attention_bias or model.output_bias or model.mlp_bias
    for wrong, why in (
        (not rank.gathers_once, f"contradicts kernels={plan.kernels}: it is PyTorch's, with kernels=torch or compiled"),
        (not plan.fused_attention, f"needs fused attention, and attention={plan.attention}"),
        (not rank.kernels.separate_products, "is not simulated with joined_products=true: the policy counts products"),
        (biased, f"is not simulated with biases, which {model.name} has: their products are another operator"),
        (bool(model.norms != 2 or model.parallel or model.pattern), f"is written down for plain layers, unlike {model.name}'s"),
        (model.experts is not None, f"is not simulated with experts, which {model.name} has"),
        (model.latent is not None, f"is not simulated with latent attention, which {model.name} has"),
        (plan.cp > 1, f"with cp={plan.cp} is not simulated"),
        (plan.fp8 is not None and rank.eager, "with fp8 needs kernels=compiled: the policy has no name for others' products"),
    ):
        if wrong:
            raise UserError(f"plan: recompute=operators {why}")


def chosen(rank: RankShapes, operators: list[Operator]) -> list[Operator]:
    """The pieces of a dense layer, each with what it keeps and what of it runs again."""
    changes = {
        "qkv input": _qkv,
        "queries": _core,
        "attention output input": _output,
        "mlp up input": _up,
        "mlp down input": _down,
    }
    repeated = [
        replace(operator, again=tuple(item for item in operator.forward if not _maximum(rank, item))) for operator in operators
    ]
    return [
        next((changes[name](rank, operator) for name in operator.saved if name in changes), operator) for operator in repeated
    ]


def repeated(operators: Sequence[Operator]) -> list[Operator]:
    """Operators with only the work that runs again, and its part of their FLOPs."""
    result = []
    for operator in operators:
        assert operator.again is not None
        all_of_it, rest = _flops(operator.forward), _flops(operator.again)
        result.append(replace(operator, forward=operator.again, flops=operator.flops * (rest / all_of_it if all_of_it else 0.0)))
    return result


def _flops(items: Items) -> float:
    return sum(item.flops for item in items if isinstance(item, Kernel))


def _maximum(rank: RankShapes, item: Item) -> bool:
    """Whether it only finds the maximum of a tensor that is cast to fp8 next: rows find theirs while they are cast."""
    fp8 = rank.resolved.fp8
    by_maximum = fp8 is not None and fp8.scaling == "tensorwise"
    return by_maximum and isinstance(item, Kernel) and item.kind == "reduction" and item.label.endswith("in fp8")


def _qkv(rank: RankShapes, operator: Operator) -> Operator:
    dim, element = rank.model.head_dim, rank.element * rank.tokens
    kept = {"query product": element * rank.heads * dim, "values": element * rank.kv_heads * dim}
    return replace(operator, again=_second(operator, 3), kept_results=kept)


def _core(rank: RankShapes, operator: Operator) -> Operator:
    return replace(operator, again=(), kept_results={**operator.inner, "attention output input": operator.saved["queries"]})


def _output(rank: RankShapes, operator: Operator) -> Operator:
    """Its sum over tp ranks is kept when it is a reduce-scatter; of what is compiled nothing is then left to run."""
    if not rank.resolved.sequence_parallel:
        return operator
    again = tuple(item for item in operator.forward if isinstance(item, Kernel)) if rank.eager else ()
    return replace(operator, again=again, kept_results={"attention output": rank.element * rank.stream})


def _up(rank: RankShapes, operator: Operator) -> Operator:
    kept = {"mlp up output": float(rank.element * rank.tokens * (rank.model.ffn // rank.tp))}
    return replace(operator, again=_second(operator, 2 if rank.model.gated else 1), kept_results=kept)


def _down(rank: RankShapes, operator: Operator) -> Operator:
    """Nothing needs its result, which an eager layer keeps all the same when it is the seventh product, before any sum."""
    if not (rank.eager and rank.model.gated):
        return operator
    hidden = rank.model.hidden
    scattered = rank.stream if rank.resolved.sequence_parallel else 0
    return replace(operator, kept_results={"mlp down output": float(rank.element * (rank.tokens * hidden + scattered))})


def _second(operator: Operator, products: int) -> Items:
    """What runs again of so many products of one input, of which the second is not kept, and of what it needs."""
    assert operator.again is not None
    number, again = 0, list[Item]()
    for item in operator.again:
        if isinstance(item, Kernel) and item.kind == "gemm":
            number += 1
            if number % products != 2 % products or products == 1:
                continue
        again.append(item)
    return tuple(again)
