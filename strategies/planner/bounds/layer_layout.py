"""Where the layers of a plan are: virtual stages, the pipeline ranks that have them, and what a rank keeps from pass to pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strategies.plan.resolved import Resolved
from strategies.planner.bounds.layer_cost_table import SPLIT, Floats, Kind
from strategies.schedules import actions, schedules
from topologies.reading import UserError

AT_ONCE = 256  # moments that are compared with each other


class Layout(NamedTuple):
    """Virtual stages of a pipeline: the first layer of each and the one after its last; the stages of each rank by chunk."""

    bounds: tuple[int, ...]  # stages + 1
    stages: tuple[tuple[int, ...], ...]  # [rank][chunk]
    paired: bool = False  # whether passes run beside each other

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.stages)

    @property
    def last(self) -> int:
        """The last virtual stage."""
        return len(self.bounds) - 2

    @property
    def fullest(self) -> int:
        """The first rank with most layers: the first rank of all has fewer where the embedding counts as one, or they do not come
        out even.
        """
        layers = [sum(self.bounds[stage + 1] - self.bounds[stage] for stage in mine) for mine in self.stages]
        return layers.index(max(layers))

    def times(self, kinds: Sequence[Kind]) -> dict[str, Floats]:
        """Seconds of the passes of each stage, at least; in a pair those of the kernels, since collectives run beside."""
        return {name: self.quantity(f"{name} kernels" if self.paired else name, kinds) for name in SPLIT}

    def quantity(self, name: str, kinds: Sequence[Kind]) -> Floats:
        """A quantity of QUANTITIES of each stage, shape (kinds, stages)."""
        ends = np.array(self.bounds)
        sums = np.array([kind.sums[name] for kind in kinds])
        result: Floats = sums[:, ends[1:]] - sums[:, ends[:-1]]
        result[:, 0] += [kind.ends[name][0] for kind in kinds]
        result[:, -1] += [kind.ends[name][1] for kind in kinds]
        return result

    def workspace(self, name: str, kinds: Sequence[Kind]) -> Floats:
        """Workspace of the last part of each stage, shape (kinds, stages), bytes."""
        space = [kind.spaces[name] for kind in kinds]
        result: Floats = np.array([layers for layers, _ in space])[:, np.array(self.bounds[1:])]
        result[:, -1] = [head for _, head in space]
        return result

    def last_part(self, kinds: Sequence[Kind]) -> Floats:
        """Parameters of the last part of each stage without experts, shape (kinds, stages), elements."""
        ends = np.array(self.bounds[1:])
        sums = np.array([kind.sums["parameters"] - kind.sums["experts"] for kind in kinds])
        result: Floats = sums[:, ends] - sums[:, np.maximum(ends - 1, 0)]
        result[:, 0] += [kind.ends["parameters"][0] if not ends[0] else 0 for kind in kinds]  # the embedding alone
        result[:, -1] = [kind.ends["parameters"][1] - kind.ends["experts"][1] for kind in kinds]
        return result


def layout_of(plan: Resolved) -> Layout:
    """Of one plan."""
    name, ranks, count = plan.schedule, plan.pp, len(plan.layers)
    stage = schedules[name].stage  # stages of a second copy of the model count on
    stages = tuple(tuple(stage(rank, ranks, chunk) % count for chunk in range(plan.chunks)) for rank in range(ranks))
    return Layout((0, *accumulate(plan.layers)), stages, paired(name, ranks, plan.microbatches, plan.chunks))


def through(plan: Resolved) -> int:
    """Microbatches of a step that pass each chunk."""
    return plan.microbatches // schedules[plan.schedule].copies


class Moments(NamedTuple):
    """What a rank holds when its passes begin: for each different moment, microbatches whose activations are kept by chunk
    (`saved`), those whose weight gradients are still to come (`held`), whether a forward pass of the chunk has gathered what no
    backward pass has released (`there`), whether it has gradients of weights of some microbatches, not of all (`owed`), and the
    pass: its chunk, whether it goes forward, and whether it makes gradients of weights.
    """

    saved: NDArray[np.float64]  # (moments, chunks)
    held: NDArray[np.float64]  # (moments, chunks)
    there: NDArray[np.float64]  # (moments, chunks), 0 or 1
    owed: NDArray[np.float64]  # (moments, chunks), 0 or 1
    chunk: NDArray[np.int64]  # (moments,)
    forward: NDArray[np.bool_]  # (moments,)
    makes: NDArray[np.bool_]  # (moments,)


@lru_cache(maxsize=8192)
def moments(schedule: str, rank: int, ranks: int, microbatches: int, chunks: int) -> Moments | str:
    """The moments of one step of a rank; why there are none when the schedule cannot be made."""
    try:
        order = actions(schedule, rank, ranks, microbatches, chunks)
    except UserError as error:
        return str(error).removeprefix("plan: ")
    saved, held, there, owed = [0] * chunks, [0] * chunks, [0] * chunks, [0] * chunks
    left = Counter(chunk for kind, _, chunk, _ in order if kind in "BW")
    seen: dict[tuple[int, ...], None] = {}
    for kind, _, chunk, _ in order:
        if kind == "F":
            saved[chunk] += 1
            there[chunk] = 1
        if kind != "W":
            seen[(*saved, *held, *there, *owed, chunk, "FBI".index(kind))] = None
        if kind in "BI":
            saved[chunk] -= 1
            there[chunk] = 0
            held[chunk] += kind == "I"
        held[chunk] -= kind == "W"
        if kind in "BW":
            left[chunk] -= 1
            owed[chunk] = left[chunk] > 0
    table = _largest(np.array(list(seen), dtype=np.float64).reshape(-1, 4 * chunks + 2))
    kept, halves, gathered, made = np.split(table[:, :-2], 4, axis=1)
    return Moments(kept, halves, gathered, made, table[:, -2].astype(np.int64), table[:, -1] == 0, table[:, -1] == 1)


def _largest(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Without the moments at which no more of anything is kept than at another in the same kind of pass."""
    table = table[np.argsort(-table[:, :-2].sum(axis=1), kind="stable")]
    _, kind = np.unique(table[:, -2:], axis=0, return_inverse=True)
    largest = np.zeros(len(table), dtype=bool)
    for number in range(kind.max(initial=-1) + 1):
        rows = np.flatnonzero(kind == number)
        for some in np.split(rows, range(AT_ONCE, len(rows), AT_ONCE)):  # what is more than a moment comes before it
            others = table[np.concatenate([rows[largest[rows]], some])]
            as_much = (table[some][:, None] <= others).all(axis=2).sum(axis=1)
            largest[some] = as_much == 1  # itself
    return table[largest]


@lru_cache(maxsize=8192)
def paired(schedule: str, ranks: int, microbatches: int, chunks: int) -> bool:
    """Whether passes run beside each other; not when the schedule cannot be made."""
    try:
        return any(action.beside for rank in {0, ranks - 1} for action in actions(schedule, rank, ranks, microbatches, chunks))
    except UserError:
        return False


@lru_cache(maxsize=8192)
def gatherings(schedule: str, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[int, int], ...]:
    """Of each chunk of the first rank, how many forward and how many backward passes find the parameters gone that a forward
    pass leaves there and a backward pass releases.
    """
    there, counts = [False] * chunks, [[0, 0] for _ in range(chunks)]
    for kind, _, chunk, _ in actions(schedule, 0, ranks, microbatches, chunks):
        if kind != "W":
            counts[chunk][kind != "F"] += not there[chunk]
            there[chunk] = kind == "F"
    return tuple((forward, backward) for forward, backward in counts)


@lru_cache(maxsize=8192)
def splits(schedule: str, ranks: int, microbatches: int, chunks: int) -> bool:
    """Whether backward passes come in two halves."""
    return any(action.kind == "I" for action in actions(schedule, 0, ranks, microbatches, chunks))
