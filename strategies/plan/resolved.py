"""A plan with what depends on the model and the cluster filled in; every rule that is broken is a UserError with the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from sim.grid import Grid
from strategies.models.model import Model
from strategies.plan.allotment import allotment, sequences
from strategies.plan.layer_placement import placement
from strategies.plan.packing import busiest, mean_length
from strategies.plan.plan import Plan
from strategies.plan.rules import refuse
from strategies.plan.rules.computing import computes, recomputed
from strategies.plan.rules.data_parallel import belongs, neighbours, quantises, shares
from strategies.plan.rules.degrees import divides, exchanges, synchronised
from strategies.plan.rules.experts import experts
from strategies.plan.rules.fine_tuning import fine_tunes, leaves_out
from strategies.plan.rules.modules import traceable
from strategies.plan.rules.schedules import asynchronous, blocks, partial
from strategies.schedules import schedules
from topologies.reading import UserError

NODES = "ep_node"  # the axis of nodes over which ep ranks are spread
PASSES = 600_000  # of all stages in one step


class Resolved(Plan):
    """A plan with every default filled in for one model and one cluster."""

    dp: int
    sequence: int
    global_batch: int
    microbatches: int
    local_steps: int  # played one after the other; 1 unless dp ranks train by themselves
    chunks: int  # virtual stages of each pipeline rank
    layers: tuple[int, ...]  # per virtual stage
    allotted: tuple[int, ...] = ()  # microbatches of each dp rank where not all have as many; `microbatches` is the most
    sequences_per_replica: tuple[int, ...] = ()  # of each dp rank in a step, where the last microbatch of some is not full
    fp8_columns: bool = False  # the GPUs multiply fp8 numbers that lie by columns, too
    inner: int = 1  # ZeRO++: dp ranks of a node, which gather or reduce among themselves; 1 without

    @classmethod
    def of(cls, plan: Plan, model: Model, gpus: int, where: str = "plan", per_node: int | None = None) -> Resolved:
        """Fill in what depends on model and cluster; every rule that is broken is a UserError with the numbers.

        per_node: GPUs of a node, by default all.
        """
        return cls.by(STEPS, plan, Target(model, gpus, per_node or gpus, where))

    @classmethod
    def by(cls, steps: Sequence[Step], plan: Plan, target: Target) -> Resolved:
        """What steps, those of `STEPS` among them, fill in. Raises UserError."""
        filled: dict[str, Any] = {}
        for field, of in steps:
            value = of(plan, filled, target)
            if field:
                filled[field] = value
        return cls.with_fields(plan, {name: filled[name] for name in FILLED})

    def with_microbatches(self, microbatches: int) -> Resolved:
        """The same plan with so many microbatches in a step."""
        batch = self.dp * self.microbatch * microbatches
        return self.with_fields(self, {"microbatches": microbatches, "global_batch": batch} | ALL_ALIKE)

    @property
    def passes(self) -> float:
        """Microbatches of all dp ranks together in a step; of one that is not full its part."""
        if self.sequences_per_replica:
            return sum(self.sequences_per_replica) / self.microbatch
        return sum(self.allotted) or self.microbatches * self.dp

    @property
    def dealt(self) -> tuple[tuple[int, int], ...]:
        """Of each dp rank, its microbatches in a step and the sequences of the last one; () where all are alike and full."""
        if not self.sequences_per_replica:
            return tuple((count, self.microbatch) for count in self.allotted)
        return tuple((-(-count // self.microbatch), (count - 1) % self.microbatch + 1) for count in self.sequences_per_replica)

    @classmethod
    def with_fields(cls, plan: Plan, fields: dict[str, Any]) -> Resolved:
        """A plan with these fields, all that it lacks among them, without the checks that `model_validate` makes."""
        resolved = cls.__new__(cls)
        for name, value in (
            ("__dict__", plan.__dict__ | fields),
            ("__pydantic_fields_set__", plan.model_fields_set),
            ("__pydantic_extra__", None),
            ("__pydantic_private__", None),
        ):
            object.__setattr__(resolved, name, value)
        return resolved

    def for_plan(self, plan: Plan) -> Resolved:
        """Another plan with equal degrees, schedule and layers, with these values filled in."""
        return self.with_fields(plan, {name: getattr(self, name) for name in FILLED})

    @property
    def grid(self) -> Grid:
        """The rank grid in the plan's order; replicas of a sharded copy are an axis outside the dp ranks that share it, the ep
        ranks one of their own (of fewer than there are cp ranks, inside the others of these), and the nodes that they are on one
        outside it.
        """
        outside = self.replicas if self.inner == 1 else self.dp // self.inner
        ep = self.ep_of_copies if self.ep_inside_cp else self.ep_of_dp
        return _grid(self.order, self.tp, self.cp, ep, self.ep_inside_cp, self.ep_nodes, self.dp, outside, self.pp)

    @property
    def copies(self) -> int:
        """How many ranks hold the same parameters before any sharding: they are replicated along dp and cp."""
        return self.dp * self.cp

    @property
    def reduces_each(self) -> bool:
        """Whether every microbatch reduces its gradients: only a rank's shard is accumulated."""
        sharded = "gradient" in self.hook.shards and self.syncs_gradients == "every"
        return sharded and self.copies > 1

    @property
    def fp8_copies(self) -> int:
        """Copies of an operand that Transformer Engine's products take: one by rows and one by columns, or one for both where it
        has one scale and GPUs multiply it as it lies.
        """
        return 1 if self.fp8_columns and self.fp8 is not None and self.fp8.of_tensors else 2

    @property
    def document(self) -> float | None:
        """Tokens of a packed document, as its attention costs in the mean; None where sequences attend as one."""
        return None if self.packing is None else mean_length(self.packing.lengths, self.sequence)

    @property
    def longest_documents(self) -> float | None:
        """The same on the dp rank whose documents are longest, for which the others wait: in every microbatch where parameters or
        gradients are sharded, otherwise at the end of a step.
        """
        if self.packing is None or self.document is None:
            return None
        each = self.shards_parameters or self.reduces_each
        sequences = self.microbatch * (1 if each else self.microbatches)
        return self.document * busiest(self.packing.lengths, self.sequence, self.dp, sequences)

    @property
    def expert_copies(self) -> int:
        """How many ranks hold the same routed experts, which differ from ep rank to ep rank."""
        return self.copies // self.ep_of_copies

    @property
    def shards(self) -> int:
        """How many ranks share one sharded copy of the states that the hook shards; all cp ranks are among them."""
        return (self.shard or self.dp) * self.cp

    @property
    def replicas(self) -> int:
        """How many sharded copies of the states there are."""
        return self.copies // self.shards

    @property
    def sharing(self) -> tuple[str, ...]:
        """The axes along which ranks differ that share a sharded copy."""
        if 1 < self.inner < self.dp:
            return ("dp", "replica")
        if self.ep_of_copies == 1:
            return self.expert_sharing
        nodes = (NODES,) if self.ep_nodes > 1 else ()
        return (*(("cp",) if self.cp > 1 else ()), "ep", *nodes, "dp")

    @property
    def summing(self) -> tuple[str, ...]:
        """The axes along which gradients are summed in every step: only cp where dp ranks train by themselves."""
        return self.sharing if not self.hook.local else ("cp",)

    @property
    def expert_sharing(self) -> tuple[str, ...]:
        """The axes along which ranks differ that hold the same routed experts."""
        return ("cp", "dp") if self.ep_of_copies < self.cp else ("dp",)

    @property
    def spreading(self) -> tuple[str, ...]:
        """The axes along which ranks differ that experts are spread over, but for nodes that tokens are sent to first."""
        inside = (("tp",) if self.whole_experts else ()) + (("cp",) if 1 < self.cp <= self.ep_of_copies else ())
        return (*inside, "ep")


FILLED = tuple(Resolved.__annotations__)
ALL_ALIKE = {"allotted": (), "sequences_per_replica": ()}  # dp ranks with equally many microbatches, all of them full


@lru_cache(maxsize=16384)
def _grid(ranks: str, tp: int, cp: int, ep: int, inside: bool, ep_nodes: int, dp: int, outside: int, pp: int) -> Grid:
    """See `Resolved.grid`. inside: the ep ranks are among the cp ranks, not the dp ranks; outside: replicas of a sharded copy."""
    degrees = {"tp": tp, "cp": cp, "ep": ep // ep_nodes, "dp": dp // outside // ep, "pp": pp}
    order = ranks.split("-")
    if inside:
        degrees |= {"cp": cp // ep, "dp": dp // outside}
        order.remove("ep")
        order.insert(order.index("cp"), "ep")
    for inner, outer, degree in (("dp", "replica", outside), ("ep", NODES, ep_nodes)):
        if degree > 1:
            order.insert(order.index(inner) + 1, outer)
            degrees[outer] = degree
    return Grid.of(tuple(order), **degrees)


def _data_parallel(plan: Plan, gpus: int, where: str) -> int:
    degrees = {"tp": plan.tp, "cp": plan.cp, "pp": plan.pp}
    if plan.dp is not None:
        degrees["dp"] = plan.dp
    product = math.prod(degrees.values())
    if product == gpus or (plan.dp is None and gpus % product == 0):
        return plan.dp or gpus // product
    axes = [axis for axis in degrees if axis != "cp" or plan.cp > 1]
    formula = f"{'·'.join(axes)} = {'·'.join(str(degrees[axis]) for axis in axes)} = {product}"
    raise UserError(f"{where}: {formula} {'does not divide' if plan.dp is None else '≠'} {gpus} GPUs")


def _local_steps(plan: Plan, microbatches: int, where: str) -> int:
    local = plan.hook.local
    if local and plan.local_steps is None:
        raise UserError(f"{where}: data_parallel={plan.data_parallel} needs local_steps, such as local_steps=100")
    if plan.local_steps is not None and not local:
        raise UserError(f"{where}: local_steps={plan.local_steps} contradicts data_parallel={plan.data_parallel}")
    _playable(microbatches * (plan.local_steps or 1), plan, where)
    return plan.local_steps or 1


def _playable(microbatches: int, plan: Plan, where: str) -> int:
    """Every pass of every stage is played; a schedule that was written down has so many and no others."""
    written = schedules[plan.schedule]
    for name, is_for, asked in (("pp", written.ranks, plan.pp), ("microbatches", written.microbatches, microbatches)):
        if is_for not in (None, asked):
            raise UserError(f"{where}: {name}={asked} contradicts schedule={plan.schedule}, which is for {name}={is_for}")
    if microbatches * plan.pp > PASSES:
        product = f"microbatches·pp = {microbatches}·{plan.pp}"
        raise UserError(
            f"{where}: {product} passes in a step are too many to play (at most {PASSES:,}); take a larger microbatch"
        )
    return microbatches


def _chunks(plan: Plan, where: str) -> int:
    """Virtual stages per rank: what the schedule needs, or what the plan says where it takes any number."""
    needed = schedules[plan.schedule].chunks
    if needed is None:
        if plan.chunks == 1:
            raise UserError(f"{where}: chunks=1 contradicts schedule={plan.schedule}, which takes 2 or more")
        return plan.chunks or 2
    if plan.chunks not in (None, needed):
        raise UserError(f"{where}: chunks={plan.chunks} contradicts schedule={plan.schedule}, which takes {needed}")
    return needed


class Target(NamedTuple):
    """What a plan is resolved for. per_node: GPUs of a node; where: what errors name; fp8_columns: see `Gpu`."""

    model: Model
    gpus: int
    per_node: int
    where: str
    fp8_columns: bool = False


class Step(NamedTuple):
    """A step of resolving plans. of: what a plan's `field` is on a target, by what the steps before have filled in; `field` is ""
    of a rule, which fills in nothing, and raises UserError where the plan breaks it.
    """

    field: str
    of: Callable[[Plan, Mapping[str, Any], Target], Any]


def _rule(reasons: Callable[[Plan, Mapping[str, Any], Target], Iterable[str]]) -> Step:
    return Step("", lambda plan, filled, to: refuse(to.where, reasons(plan, filled, to)))


def _stages(plan: Plan, chunks: int) -> int:
    """Virtual stages that have layers of their own."""
    return plan.pp * chunks // schedules[plan.schedule].copies


def _sequences(plan: Plan, dealt: tuple[int, ...], dp: int) -> int:
    return plan.microbatch * (sum(dealt) if len(dealt) > 1 else dp * dealt[0])


# Each is asked by itself, and looks at few fields: a search asks it once for each of their combinations
# (`strategies.planner.search.by_fields`). dealt: see `allotment`.
STEPS: tuple[Step, ...] = (
    Step("dp", lambda plan, filled, to: _data_parallel(plan, to.gpus, to.where)),
    Step("sequence", lambda plan, filled, to: plan.sequence_of(to.model)),
    Step("dealt", lambda plan, filled, to: allotment(plan, filled["dp"], to.where)),
    Step("sequences_per_replica", lambda plan, filled, to: sequences(plan, filled["dp"])),
    Step("microbatches", lambda plan, filled, to: _playable(max(filled["dealt"]), plan, to.where)),
    _rule(lambda plan, filled, to: traceable(plan, to.model, filled["sequence"])),
    _rule(lambda plan, filled, to: divides(to.model, plan, filled["sequence"])),
    _rule(lambda plan, filled, to: exchanges(plan)),
    Step("chunks", lambda plan, filled, to: _chunks(plan, to.where)),
    _rule(lambda plan, filled, to: shares(plan, filled["dp"])),
    _rule(lambda plan, filled, to: chain(*(asynchronous(plan, to.model, count) for count in sorted(set(filled["dealt"]))))),
    _rule(lambda plan, filled, to: belongs(plan, to.model)),
    _rule(lambda plan, filled, to: computes(plan, to.model)),
    _rule(lambda plan, filled, to: chain(*(blocks(plan, count, filled["chunks"]) for count in sorted(set(filled["dealt"]))))),
    _rule(lambda plan, filled, to: partial(plan, filled["sequences_per_replica"], filled["microbatches"], filled["chunks"])),
    _rule(lambda plan, filled, to: experts(to.model, plan, filled["dp"])),
    Step("local_steps", lambda plan, filled, to: _local_steps(plan, filled["microbatches"], to.where)),
    Step("layers", lambda plan, filled, to: placement(plan, _stages(plan, filled["chunks"]), to.model, to.where)),
    _rule(lambda plan, filled, to: recomputed(plan, filled["layers"])),
    _rule(lambda plan, filled, to: synchronised(plan, filled["dp"])),
    _rule(lambda plan, filled, to: quantises(plan, filled["dp"], to.per_node)),
    _rule(lambda plan, filled, to: fine_tunes(plan, to.model, filled["layers"])),
    _rule(lambda plan, filled, to: leaves_out(plan, to.model)),
    Step(
        "global_batch",
        lambda plan, filled, to: sum(filled["sequences_per_replica"]) or _sequences(plan, filled["dealt"], filled["dp"]),
    ),
    Step("allotted", lambda plan, filled, to: filled["dealt"] if len(set(filled["dealt"])) > 1 else ()),
    Step("fp8_columns", lambda plan, filled, to: to.fp8_columns),
    Step("inner", lambda plan, filled, to: neighbours(plan, filled["dp"], to.per_node)),
)
