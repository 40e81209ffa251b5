"""What the layers of each kind of plan cost: seconds by the simulation's own prices, bytes and elements by its own parts.

Plans share their layer work when they differ only in what pipelines and dp ranks do; a space of 10⁵ plans has some hundred kinds.
Times are those of the compute stream with nothing in its way: kernels one after the other, and the collectives inside layers as
if their group and its siblings were alone, or where these differ (`strategies.planner.bounds.symmetric_groups`) the one that is
done first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sim.grid import ORDER, Grid
from sim.pricing.op_costs import OpCosts
from sim.pricing.prices import Prices
from sim.program import COMPUTE, Block, Cohort, Collective, Item, Kernel, Op, Program, Run, Start
from strategies.job import Job
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import ModelCosts, parts
from strategies.layers.rank_shapes import accumulation
from strategies.lowering.blocks import WEIGHT, items_of
from strategies.plan.resolved import NODES, Resolved
from strategies.planner.bounds.symmetric_groups import Soonest, alike, stages_alike
from strategies.planner.search.candidates import Candidates
from topologies.cluster import Cluster

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
H = TypeVar("H", bound=Hashable)

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
        "reshard_after_backward",
        "global_batch",
        "accumulation",
        "bucket",
        "overlap",
        "overlap_p2p",
        "scatter_gather",
        "layers_per_stage",
        "first_stage_layers",
        "last_stage_layers",
        "embedding_as_layer",
        "loss_as_layer",
        "gradient_sync",  # but see `accumulation`
        "optimizer",
        "outside_optimizer",
        "offload",
        "order",
    }
)
INSIDE = ("tp", "cp", "ep", NODES)  # the axes of collectives inside layers
SPLIT = ("forward", "backward", "input", "weight")
PHASES = ("forward", "backward", "recompute")  # of kernels
QUANTITIES = (*SPLIT, *(f"{name} kernels" for name in SPLIT), "saved", "held", "parameters", "experts", "frozen")


_COLLECTIVE = attrgetter(*(field.name for field in fields(Collective)))


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
    shapes, has = plans.each(lambda plan: (accumulation(plan), plan.layers if plan.recompute_method else ()))
    lacking = plans.lacking(ELSEWHERE).tolist()
    _, of_rule = numbered((shapes[shape], less) for shape, less in zip(has.tolist(), lacking, strict=True))
    keys = of_rule[plans.rule]
    for i in free:
        keys = keys * len(plans.axes[i].choices) + plans.choices[i]
    _, examples, work_of = np.unique(keys, return_index=True, return_inverse=True)
    works = [_work(plans, example) for example in examples.tolist()]
    priced, on = plans.each(lambda plan: priced_on(plans.job.cluster, plan))
    grids, grid_of = numbered(priced[grid] for grid in on.tolist())
    every, of = np.unique(np.stack([grid_of[plans.rule], work_of]), axis=1, return_inverse=True)
    together: dict[int, list[tuple[int, _Work]]] = {}
    for number, (on_grid, work) in enumerate(every.T.tolist()):
        together.setdefault(on_grid, []).append((number, works[work]))
    kinds: dict[int, Kind] = {}
    blocks = _Blocks()
    for number, members in together.items():
        grid, alone = grids[number]
        with_blocks = [(kind, work, list(map(blocks.of, work.parts))) for kind, work in members]
        kinds |= _priced(plans.job, grid, alone, with_blocks, prices)
    return Kinds([kinds[number] for number in range(every.shape[1])], of.ravel())


def numbered(values: Iterable[H]) -> tuple[list[H], Ids]:
    """Different values in order, and which of them each is."""
    numbers: dict[H, int] = {}
    which = np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
    return list(numbers), which


def _work(plans: Candidates, plan: int) -> _Work:
    """The layer work of plan i."""
    job = plans.job_of(plan)
    resolved = plans.resolved[int(plans.rule[plan])].for_plan(job.plan)
    return _Work.of(parts(job.model, resolved), resolved)


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

    parts: tuple[LayerCost, ...]  # the different ones: the embedding first, the head last
    layers: tuple[int | None, ...]  # for each layer its part; layers recomputed together are one, at the last of them
    tied: int
    measures: list[dict[str, float]]  # of each part, quantities that have no price
    spaces: dict[str, tuple[Floats, float]]  # see `Kind`

    @classmethod
    def of(cls, work: ModelCosts, plan: Resolved) -> _Work:
        """Which layers recompute what may depend on where stages begin."""
        tied = 0 if work.tied_is_frozen else work.tied
        if plan.recompute_method is None:
            return cls._measured(work, work.layers, tuple(1 + kind for kind in work.kinds), tied)
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
        return cls._measured(work, places, each, tied)

    @classmethod
    def _measured(cls, work: ModelCosts, kinds: Iterable[LayerCost], layers: tuple[int | None, ...], tied: int) -> _Work:
        parts, width = (work.embedding, *kinds, work.head), work.plan.bytes_per_gradient
        spaces = {}
        for name, need in _SPACES.items():
            table = np.array([*(need(part, width) for part in parts), 0.0])
            spaces[name] = table[_rows((0, *layers))], float(table[-2])
        return cls(parts, layers, tied, [_measure(part) for part in parts], spaces)


def _priced(
    job: Job, grid: Grid, alone: bool, works: list[tuple[int, _Work, list[dict[str, Block]]]], prices: Prices
) -> dict[int, Kind]:
    """Kinds of layer work on one grid, with the blocks of each part, priced together."""
    blocks = dict.fromkeys(block for *_, parts in works for part in parts for block in part.values())
    pricing = pricing_of(job, grid, alone, [Op(COMPUTE, block) for block in blocks], prices)
    return {
        number: _kind(work, [_seconds(pricing, part) for part in parts], Priced(pricing, parts, work.layers))
        for number, work, parts in works
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


class _Blocks:
    """Blocks of parts. Those that do the same are one and priced once: plans that recompute more or less go forward alike."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Block] = {}

    def of(self, part: LayerCost) -> dict[str, Block]:
        """Of each pass."""
        inputs = part.recompute + part.input_gradient
        items = {"forward": part.forward, "backward": part.backward, "input": inputs, "weight": items_of(part, WEIGHT)}
        return {name: self._block(sequence) for name, sequence in items.items()}

    def _block(self, items: Sequence[Item]) -> Block:
        key = tuple(_done(items))
        if key not in self._known:
            self._known[key] = Block("work", (Run(1, items),))
        return self._known[key]


def _done(items: Iterable[Item]) -> Iterator[Hashable]:
    """What each item does; collectives compare by identity, and are told apart by where they are first."""
    first: dict[Collective, int] = {}
    for item in items:
        if isinstance(item, Kernel):
            yield item
            continue
        work = item if isinstance(item, Collective) else item.collective
        stream = item.stream if isinstance(item, Start) else None
        yield type(item), stream, _COLLECTIVE(work), first.setdefault(work, len(first))


def _kind(work: _Work, seconds: list[dict[str, float]], priced: Priced) -> Kind:
    ends, sums = summed([measures | more for measures, more in zip(work.measures, seconds, strict=True)], work.layers)
    return Kind(ends, sums, work.spaces, work.tied, priced)


def summed(
    values: list[dict[str, float]], layers: tuple[int | None, ...]
) -> tuple[dict[str, tuple[float, float]], dict[str, Floats]]:
    """Quantities of each part as `Kind` has them: of the embedding and the head, and of the layers summed up to each."""
    table = np.array([*([part[name] for name in values[0]] for part in values), [0.0] * len(values[0])])
    sums = np.cumsum(table[_rows((None, *layers))], axis=0)
    ends = {name: (values[0][name], values[-1][name]) for name in values[0]}
    return ends, dict(zip(values[0], np.ascontiguousarray(sums.T), strict=True))


def _rows(layers: Iterable[int | None]) -> list[int]:
    """Rows of a table of parts, whose last row is of no part."""
    return [-1 if part is None else part for part in layers]


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
