"""What the layers of each kind of plan cost: seconds by the simulation's own prices, bytes and elements by its own parts.

Plans share their layer work when they differ only in what pipelines and dp ranks do; a space of 10⁵ plans has some hundred kinds.
Times are those of the compute stream with nothing in its way: kernels one after the other, and the collectives inside layers as
if their group and its siblings were alone, or where these differ (`strategies.planner.bounds.symmetric_groups`) the one that is
done first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.grid import ORDER, Grid
from sim.pricing.op_costs import OpCosts
from sim.pricing.prices import Prices
from sim.program import COMPUTE, Block, Cohort, Op, Program, Run
from strategies.job import Job
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import ModelCosts, parts
from strategies.layers.rank_shapes import accumulation
from strategies.lowering.blocks import WEIGHT, items_of
from strategies.plan.plan import Plan
from strategies.plan.resolved import NODES, Resolved
from strategies.planner.bounds.symmetric_groups import Soonest, alike, stages_alike
from strategies.planner.search.candidates import Candidates
from topologies.cluster import Cluster

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

# Fields of a plan that change no work of a layer. What a field that is not named here does is looked at.
ELSEWHERE = frozenset(
    {
        "pp",
        "dp",
        "schedule",
        "chunks",
        "data_parallel",
        "shard",
        "local_steps",
        "reshard",
        "global_batch",
        "accumulation",
        "bucket",
        "overlap",
        "overlap_p2p",
        "scatter_gather",
        "layers_per_stage",
        "optimizer",
        "offload",
        "order",
    }
)
INSIDE = ("tp", "cp", "ep", NODES)  # the axes of collectives inside layers
SPLIT = ("forward", "backward", "input", "weight")
PHASES = ("forward", "backward", "recompute")  # of kernels
QUANTITIES = (*SPLIT, *(f"{name} kernels" for name in SPLIT), "saved", "held", "parameters", "experts", "frozen")


class Priced(NamedTuple):
    """The blocks of the passes of each part of a model, the layers that are each part (see `Kind`), and what prices them."""

    pricing: OpCosts
    parts: list[dict[str, Block]]
    layers: tuple[int | None, ...]


class Kind(NamedTuple):
    """Layer work of plans alike. Each quantity of QUANTITIES is (embedding, layers summed up to each, head): seconds (of kernels
    alone, too), bytes or elements; `spaces` are bytes of workspace of (the last layer up to each, the head).
    """

    ends: dict[str, tuple[float, float]]
    sums: dict[str, Floats]  # (layers + 1,)
    spaces: dict[str, tuple[Floats, float]]
    tied: int
    priced: Priced


@dataclass(frozen=True)
class Kinds:
    """The kinds of layer work among plans, and which each plan has (−1: its layers cannot be simulated)."""

    kinds: list[Kind]
    of: Ids


def kinds_of(plans: Candidates, prices: Prices) -> Kinds:
    """Price every distinct kind of layer work."""
    free = [
        i for i, axis in enumerate(plans.axes) if any(f.removeprefix("plan.") not in ELSEWHERE for c in axis.choices for f in c)
    ]
    inner: dict[tuple[object, ...], int] = {}
    priced, on = plans.each(lambda plan: priced_on(plans.job.cluster, plan))
    shapes, has = plans.each(lambda plan: (accumulation(plan), plan.layers if plan.recompute_method else ()))
    of_rule = [
        inner.setdefault((priced[grid], shapes[shape], lacking), len(inner))
        for grid, shape, lacking in zip(on.tolist(), has.tolist(), plans.lacking.tolist(), strict=True)
    ]
    keys = np.array(of_rule, dtype=np.int64)[plans.rule] if len(plans) else plans.rule
    for i in free:
        keys = keys * len(plans.axes[i].choices) + plans.choices[i]
    _, first, of = np.unique(keys, return_index=True, return_inverse=True)
    together: dict[tuple[Grid, bool], list[tuple[int, _Work]]] = {}
    for number, example in enumerate(first.tolist()):
        job, rule = plans.job_of(example), int(plans.rule[example])
        plan = plans.resolved[rule].for_plan(job.plan)
        together.setdefault(priced[on[rule]], []).append((number, _Work.of(parts(job.model, plan), plan)))
    kinds: dict[int, Kind] = {}
    for (grid, alone), works in together.items():
        kinds |= _priced(plans.job, grid, alone, works, prices)
    return Kinds([kinds[number] for number in range(len(first))], of)


def priced_on(cluster: Cluster, plan: Resolved) -> tuple[Grid, bool]:
    """The grid by which collectives inside layers are priced, and whether groups differ there, so that each is played alone."""
    inner = inside(plan)
    together = inner.world == 1 or (alike(cluster, plan.grid) and stages_alike(cluster, plan.grid, inner))
    return (inner, False) if together else (plan.grid, True)


def inside(plan: Resolved) -> Grid:
    """The innermost axes of the grid up to the last along which layers communicate; sibling groups beyond are left out, which
    can only make a collective cheaper.
    """
    return _inside(plan.grid, plan.sync_norm)


@lru_cache(maxsize=16384)
def _inside(grid: Grid, sync_norm: bool) -> Grid:
    axes = (*INSIDE, *(("dp", "replica") if sync_norm else ()))
    last = max((i for i, (axis, degree) in enumerate(grid.sizes) if axis in axes and degree > 1), default=-1)
    rest = [axis for axis in ORDER if axis not in dict(grid.sizes[: last + 1])]
    return Grid((*grid.sizes[: last + 1], *((axis, 1) for axis in rest)))


class _Work(NamedTuple):
    """The parts of a model under one kind of plan."""

    plan: Plan
    parts: tuple[LayerCost, ...]  # the different ones: the embedding first, the head last
    layers: tuple[int | None, ...]  # for each layer its part; layers recomputed together are one, at the last of them
    tied: int

    @classmethod
    def of(cls, work: ModelCosts, plan: Resolved) -> _Work:
        """Which layers recompute what may depend on where stages begin."""
        tied = 0 if work.tied_is_frozen else work.tied
        if plan.recompute_method is None:
            return cls(work.plan, (work.embedding, *work.layers, work.head), tuple(1 + kind for kind in work.kinds), tied)
        layers: list[LayerCost | None] = []
        for count in plan.layers:
            first = len(layers)
            stage: list[LayerCost | None] = list(work.stage(first, count))
            if len(stage) < count:
                every, size = iter(stage), plan.recompute_layers or 1
                stage = [next(every) if (place + 1) % size == 0 or place + 1 == count else None for place in range(count)]
            layers += stage
        places = {part: 1 + place for place, part in enumerate(dict.fromkeys(part for part in layers if part is not None))}
        each = tuple(None if part is None else places[part] for part in layers)
        return cls(work.plan, (work.embedding, *places, work.head), each, tied)


def _priced(job: Job, grid: Grid, alone: bool, works: list[tuple[int, _Work]], prices: Prices) -> dict[int, Kind]:
    """Kinds of layer work on one grid, priced together."""
    blocks = [[_blocks(part) for part in work.parts] for _, work in works]
    ops = [Op(COMPUTE, block) for work_blocks in blocks for part in work_blocks for block in part.values()]
    pricing = pricing_of(job, grid, alone, ops, prices)
    return {
        number: _kind(work, [_seconds(pricing, part) for part in part_blocks], Priced(pricing, part_blocks, work.layers))
        for (number, work), part_blocks in zip(works, blocks, strict=True)
    }


def pricing_of(job: Job, grid: Grid, alone: bool, ops: list[Op], prices: Prices) -> OpCosts:
    """Prices of what runs inside layers. grid, alone: see `priced_on`."""
    if alone:
        return Soonest(job, grid, ops, prices)
    at = {"pp": 0} if grid.degree("pp") > 1 else {}
    return OpCosts(Program(grid, [Cohort(at, ops)]), job.cluster.topology(), prices)


def _seconds(pricing: OpCosts, blocks: dict[str, Block]) -> dict[str, float]:
    """Of each pass, with what it waits for and of its kernels alone."""
    costs = {name: pricing.block(block, 0) for name, block in blocks.items()}
    alone = {
        f"{name} kernels": sum(seconds for (part, _), seconds in cost.parts.items() if part in PHASES)
        for name, cost in costs.items()
    }
    return alone | {name: cost.busy for name, cost in costs.items()}


def _blocks(part: LayerCost) -> dict[str, Block]:
    inputs = part.recompute + part.input_gradient
    items = {"forward": part.forward, "backward": part.backward, "input": inputs, "weight": items_of(part, WEIGHT)}
    return {name: Block("work", (Run(1, sequence),)) for name, sequence in items.items()}


def _kind(work: _Work, seconds: list[dict[str, float]], priced: Priced) -> Kind:
    values = [_measure(part) | more for part, more in zip(work.parts, seconds, strict=True)]
    ends, sums = summed(values, work.layers)
    width, every = work.plan.bytes_per_gradient, [None if i is None else work.parts[i] for i in (0, *work.layers)]
    spaces = {
        name: (np.array([need(part, width) if part else 0.0 for part in every]), need(work.parts[-1], width))
        for name, need in _SPACES.items()
    }
    return Kind(ends, sums, spaces, work.tied, priced)


def summed(
    values: list[dict[str, float]], layers: tuple[int | None, ...]
) -> tuple[dict[str, tuple[float, float]], dict[str, Floats]]:
    """Quantities of each part as `Kind` has them: of the embedding and the head, and of the layers summed up to each."""
    each = [None if part is None else values[part] for part in layers]
    ends = {name: (values[0][name], values[-1][name]) for name in values[0]}
    return ends, {name: np.concatenate([[0.0], np.cumsum([part[name] if part else 0.0 for part in each])]) for name in values[0]}


# Bytes beyond all that is kept: while a pass goes forward; backward; backward where gradients are made in it.
_SPACES: dict[str, Callable[[LayerCost, int], float]] = {
    "forward": lambda part, width: max(0.0, part.temporary),
    "backward": lambda part, width: max(0.0, part.backward_peak() + part.restored),
    "passing": lambda part, width: max(0.0, part.backward_peak(width) + part.restored + width * (part.parameters - part.experts)),
}


def _measure(part: LayerCost) -> dict[str, float]:
    return {
        "saved": part.saved,
        "held": part.held,
        "parameters": float(part.parameters),
        "experts": float(part.experts),
        "frozen": part.frozen_bytes,
    }
