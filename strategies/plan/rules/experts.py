"""What mixtures of experts and expert parallelism exclude."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from strategies.models.model import Model
from strategies.models.parts import Experts
from strategies.plan.routing import DISPATCHER_SMS

if TYPE_CHECKING:
    from strategies.plan.plan import Plan


def experts(model: Model, plan: Plan, dp: int) -> Iterator[str]:
    """Rules of mixtures of experts and expert parallelism."""
    moe, ep = model.experts, plan.ep
    asked = {"capacity_factor": plan.capacity_factor, "expert_tp": plan.expert_tp, "ep": ep if ep > 1 else None}
    for name, value in asked.items():
        if moe is None and value is not None:
            yield f"{name}={value:g} needs a mixture of experts, and {model.name} has none"
    if moe is None or (ep == 1 and not plan.whole_experts):
        if plan.imbalance != 1:
            yield f"imbalance={plan.imbalance:g} needs ep > 1: with ep=1 a rank has every expert of its tokens"
        if plan.token_dispatcher != "alltoall" and not (moe and plan.tp > 1 and plan.token_dispatcher == "allgather"):
            yield f"token_dispatcher={plan.token_dispatcher} needs ep > 1: with ep=1 nothing is exchanged"
        if plan.dispatcher_sms is not None:
            yield f"dispatcher_sms={plan.dispatcher_sms} needs ep > 1: with ep=1 nothing is exchanged"
        if plan.expert_spread is not None:
            yield f"expert_spread={plan.expert_spread:g} needs ep > 1: with ep=1 a rank has every expert of its tokens"
    else:
        yield from _spread(moe, plan, dp)
        if plan.dispatcher_sms is not None and plan.token_dispatcher not in DISPATCHER_SMS:
            yield f"dispatcher_sms={plan.dispatcher_sms} needs token_dispatcher=deepep or hybridep"
    if plan.expert_spread is not None and plan.imbalance != 1:
        yield f"expert_spread={plan.expert_spread:g} contradicts imbalance={plan.imbalance:g}: both say how busy a rank is"
    if moe:
        yield from _expert_columns(moe, plan)
    if plan.token_dispatcher == "allgather":
        yield from _gathered(plan)
    if plan.pad_to_capacity and plan.capacity_factor is None:
        yield "pad_to_capacity=true needs capacity_factor"
    if moe and plan.kernel_set.graphed and not plan.pad_to_capacity:
        yield "cuda_graph=true with experts needs pad_to_capacity=true: otherwise the host waits for how many tokens each has"
    yield from _nodes(moe, plan)


def _gathered(plan: Plan) -> Iterator[str]:
    """What the dispatcher that gathers all tokens has none of (megatron/core/transformer/transformer_config.py)."""
    if plan.tp > 1 and not plan.sequence_parallel:
        yield f"token_dispatcher=allgather with tp={plan.tp} needs sequence_parallel=true, as in Megatron-LM"
    without = {
        f"capacity_factor={plan.capacity_factor}": plan.capacity_factor is not None,
        f"ep_nodes={plan.ep_nodes}": plan.ep_nodes > 1,
        "fp8.dispatch=true": plan.fp8 is not None and plan.fp8.dispatch,
        f"kernels={plan.kernels}": plan.of_pytorch,
    }
    yield from (f"token_dispatcher=allgather contradicts {what}: take alltoall" for what, there in without.items() if there)


def _spread(moe: Experts, plan: Plan, dp: int) -> Iterator[str]:
    """Experts on several ranks: as many ranks as divide the experts and the dp (with whole experts the tp·dp) ranks."""
    ep, whole_experts = plan.ep, plan.whole_experts
    if plan.tp > 1 and not plan.sequence_parallel:
        asking = f"ep={ep}" if ep > 1 else "expert_tp=1"
        yield f"{asking} with tp={plan.tp} needs sequence_parallel=true, as in Megatron-LM"
    if whole_experts and ep % plan.tp:
        yield f"ep={ep} with expert_tp=1 must be a multiple of tp={plan.tp}: a part of the tp ranks as ep ranks is not simulated"
    elif plan.ep_of_copies % plan.cp and plan.cp % plan.ep_of_copies:
        ranks, unit = ("tp·cp", plan.tp * plan.cp) if whole_experts else ("cp", plan.cp)
        yield f"ep={ep} must be a multiple of {ranks}={unit} or divide it: ep ranks in several rows of cp ranks are not simulated"
    degrees = {"tp": plan.tp if whole_experts else 1, "cp": plan.cp, "dp": dp}
    axes = [axis for axis, degree in degrees.items() if degree > 1 or axis == "dp"]
    every = math.prod(degrees.values())
    ranks = f"{'·'.join(axes)} = {'·'.join(str(degrees[axis]) for axis in axes)} = {every} ranks" if axes[1:] else f"dp={dp}"
    for count, what in ((moe.experts, f"{moe.experts} experts"), (every, ranks)):
        if count % ep:
            yield f"ep={ep} does not divide {what}: {count} % {ep} = {count % ep}"
    if plan.shard and plan.ep_of_copies > 1:
        yield f"shard={plan.shard} with ep={ep} is not simulated yet"


def _expert_columns(moe: Experts, plan: Plan) -> Iterator[str]:
    """How experts are cut, or spread, over the tp ranks."""
    if plan.expert_tp not in (None, 1, plan.tp):
        yield f"expert_tp={plan.expert_tp} is not simulated: only tp={plan.tp} and 1 are"
    for count in (*(() if plan.expert_tp == 1 else (moe.ffn,)), moe.shared * moe.shared_ffn):
        if count % plan.tp:
            yield f"tp={plan.tp} does not divide {count} columns of an expert"


def _nodes(moe: Experts | None, plan: Plan) -> Iterator[str]:
    """Exchanges in two steps, across nodes and inside them."""
    if (plan.ep_nodes == 1) != (plan.routed_nodes is None):
        wanted = "routed_nodes: to how many of these nodes each token goes" if plan.routed_nodes is None else "ep_nodes above 1"
        given = f"ep_nodes={plan.ep_nodes}" if plan.routed_nodes is None else f"routed_nodes={plan.routed_nodes}"
        yield f"{given} needs {wanted}"
    if plan.ep_nodes == 1:
        return
    if plan.ep % plan.ep_nodes:
        yield f"ep_nodes={plan.ep_nodes} does not divide ep={plan.ep}"
    elif plan.ep_of_dp % plan.ep_nodes:
        yield f"ep_nodes={plan.ep_nodes} does not divide ep/cp = {plan.ep_of_dp}: cp ranks on several nodes are not simulated"
    if plan.whole_experts:
        yield f"ep_nodes={plan.ep_nodes} with expert_tp=1 is not simulated yet"
    most = min(moe.chosen if moe else 1, plan.ep_nodes)
    if plan.routed_nodes is not None and plan.routed_nodes > most:
        yield f"routed_nodes={plan.routed_nodes} exceeds {most}, the least of a token's experts and ep_nodes"
