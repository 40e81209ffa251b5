"""What the layers of each kind of plan cost: seconds by the simulation's own prices, bytes and elements by its own parts.

Plans share their layer work when they differ only in what pipelines and dp ranks do; a space of 10⁵ plans has some hundred kinds.
Times are those of the compute stream with nothing in its way: kernels one after the other, and the collectives inside layers as
if their group and its siblings were alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.grid import ORDER, Grid
from sim.prices import Prices
from sim.pricing import Pricing
from sim.program import COMPUTE, Block, Cohort, Op, Program, Run
from strategies.job import Job
from strategies.layers import Part, Parts, parts
from strategies.search.candidates import Candidates

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

# Fields of a plan that change no work of a layer. What a field that is not named here does is looked at.
ELSEWHERE = frozenset({
    "pp", "dp", "schedule", "chunks", "data_parallel", "shard", "local_steps", "reshard", "global_batch", "accumulation",
    "bucket", "overlap", "overlap_p2p", "layers_per_stage", "optimizer", "order",
})  # fmt: skip
INSIDE = ("tp", "cp", "ep")  # the axes of collectives inside layers
QUANTITIES = ("forward", "backward", "input", "weight", "saved", "held", "parameters", "experts")


class Kind(NamedTuple):
    """Layer work of plans alike. Each quantity of QUANTITIES is (embedding, layers summed up to each, head): seconds, bytes or
    elements; `spaces` are bytes of workspace of (the last layer up to each, the head).
    """

    ends: dict[str, tuple[float, float]]
    sums: dict[str, Floats]  # (layers + 1,)
    spaces: dict[str, tuple[Floats, float]]
    tied: int


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
    grids = [inside(one.grid) for one in plans.resolved]
    of_rule = [
        inner.setdefault((grid, one.microbatches == 1), len(inner)) for grid, one in zip(grids, plans.resolved, strict=True)
    ]
    keys = np.array(of_rule, dtype=np.int64)[plans.rule] if len(plans) else plans.rule
    for i in free:
        keys = keys * len(plans.axes[i].choices) + plans.choices[i]
    _, first, of = np.unique(keys, return_index=True, return_inverse=True)
    together: dict[Grid, list[tuple[int, Parts]]] = {}
    for number, example in enumerate(first.tolist()):
        job, rule = plans.job_of(example), int(plans.rule[example])
        work = parts(job.model, plans.resolved[rule].model_copy(update={"plan": job.plan}))
        together.setdefault(grids[rule], []).append((number, work))
    kinds: dict[int, Kind] = {}
    for grid, works in together.items():
        kinds |= _priced(plans.job, grid, works, prices)
    return Kinds([kinds[number] for number in range(len(first))], of)


def inside(grid: Grid) -> Grid:
    """The innermost axes of the grid up to the last along which layers communicate; sibling groups beyond are left out, which
    can only make a collective cheaper.
    """
    last = max((i for i, (axis, degree) in enumerate(grid.sizes) if axis in INSIDE and degree > 1), default=-1)
    rest = [axis for axis in ORDER if axis not in dict(grid.sizes[: last + 1])]
    return Grid((*grid.sizes[: last + 1], *((axis, 1) for axis in rest)))


def _priced(job: Job, grid: Grid, works: list[tuple[int, Parts]], prices: Prices) -> dict[int, Kind]:
    """Kinds of layer work on one grid, priced together."""
    blocks = [[_blocks(part) for part in (work.embedding, *work.layers, work.head)] for _, work in works]
    ops = [Op(COMPUTE, block) for one in blocks for part in one for block in part.values()]
    at = {"pp": 0} if grid.degree("pp") > 1 else {}
    pricing = Pricing(Program(grid, [Cohort(at, ops)], 1, 1, job.plan.precision, 1, 1), job.cluster.topology(), prices)
    return {
        number: _kind(work, [{name: pricing.block(block, 0).busy for name, block in part.items()} for part in those])
        for (number, work), those in zip(works, blocks, strict=True)
    }


def _blocks(part: Part) -> dict[str, Block]:
    inputs = part.recompute + part.input_gradient
    items = {"forward": part.forward, "backward": part.backward, "input": inputs, "weight": part.weight_gradient}
    return {name: Block("work", (Run(1, those),)) for name, those in items.items()}


def _kind(work: Parts, seconds: list[dict[str, float]]) -> Kind:
    distinct = (work.embedding, *work.layers, work.head)
    values = [_measure(part) | more for part, more in zip(distinct, seconds, strict=True)]
    of_layer = [1 + kind for kind in work.kinds]
    sums = {q: np.concatenate([[0.0], np.cumsum([values[i][q] for i in of_layer])]) for q in QUANTITIES}
    ends = {q: (values[0][q], values[-1][q]) for q in QUANTITIES}
    width, every = work.plan.bytes_per_gradient, [work.embedding, *(distinct[i] for i in of_layer)]
    spaces = {name: (np.array([need(part, width) for part in every]), need(work.head, width)) for name, need in _SPACES.items()}
    return Kind(ends, sums, spaces, work.tied)


# Bytes beyond all that is kept: while a pass goes forward; backward; backward where gradients are made in it.
_SPACES: dict[str, Callable[[Part, int], float]] = {
    "forward": lambda part, width: max(0.0, part.temporary),
    "backward": lambda part, width: max(0.0, part.undo() + part.restored),
    "passing": lambda part, width: max(0.0, part.undo(width) + part.restored + width * (part.parameters - part.experts)),
}


def _measure(part: Part) -> dict[str, float]:
    return {"saved": part.saved, "held": part.held, "parameters": float(part.parameters), "experts": float(part.experts)}
