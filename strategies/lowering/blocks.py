"""A pass over the parts of a stage as a block: what runs in which order, and the workspace that it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, pairwise, zip_longest
from typing import NamedTuple

from sim.program import Block, Collective, Item, Join, Kernel, Run, SharedItems, Start
from strategies.layers.layer_cost import LayerCost
from strategies.layers.tensor_overlap import Items, interleaved
from strategies.plan.computing import BYTES
from strategies.plan.options import WIDTHS

FORWARD, BACKWARD, INPUT, WEIGHT = "forward", "backward", "input gradient", "weight gradient"


def taking_turns(ahead: Sequence[LayerCost], back: Sequence[LayerCost], full: bool) -> Block:
    """A forward pass of one stage and a backward pass (`full`, or its first half) of another: their layers, one of each at a
    time, take turns at their collectives, the backward pass first. Embedding and head stand alone.
    """
    direction = BACKWARD if full else INPUT
    layers = [part for part in ahead if part.name == "layer"], [part for part in back[::-1] if part.name == "layer"]
    first = [(FORWARD, part) for part in ahead if part.name == "embedding"]
    first += [(direction, part) for part in back if part.name == "head"]
    last = [(FORWARD, part) for part in ahead if part.name == "head"]
    last += [(direction, part) for part in back if part.name == "embedding"]
    runs = [Run(1, items_of(part, way)) for way, part in first]
    for pair, same in groupby(zip_longest(*layers)):
        there, here = pair
        items = items_of(here, direction) if here else ()
        runs.append(Run(len(list(same)), interleaved(items, items_of(there, FORWARD)) if there else items))
    return Block("forward + backward", (*runs, *(Run(1, items_of(part, way)) for way, part in last)))


def runs(parts: Sequence[LayerCost], direction: str, start: int = 0, end: int = 0) -> tuple[Run, ...]:
    """A pass over parts, each time as often as they follow each other; of a backward pass the last part's last `start` items only
    (0: all), and of the first part all but the last `end`.
    """
    if direction == FORWARD or not (start or end):
        order = parts if direction == FORWARD else parts[::-1]
        return tuple(Run(len(list(same)), items_of(part, direction)) for part, same in groupby(order))
    result: list[Run] = []
    for number in range(len(parts) - 1, -1, -1):
        items = items_of(parts[number], direction)
        begin = len(items) - start if start and number == len(parts) - 1 else 0
        items = _cut(items, begin, len(items) - (0 if number else end))
        if result and result[-1].items is items:
            result[-1] = Run(result[-1].times + 1, items)
        elif items:
            result.append(Run(1, items))
    return tuple(result)


def called(every: tuple[Run, ...], calls: str) -> tuple[Run, ...]:
    """Runs before whose first kernel, of those before which it makes none yet, the host makes calls of that name."""
    for at, (times, items) in enumerate(every):
        if any(isinstance(item, Kernel) and not item.calls for item in items):
            left = (Run(times - 1, items),) if times > 1 else ()
            return (*every[:at], Run(1, _called(items, calls)), *left, *every[at + 1 :])
    return every


def collectives_last(every: tuple[Run, ...]) -> tuple[Run, ...]:
    """Runs in each of which the collectives that kernels wait for follow all kernels."""
    return tuple(Run(times, _collectives_last(items)) for times, items in every)


@lru_cache(maxsize=4096)
def _collectives_last(items: Items) -> Items:
    """One object for all stages: see `_cut`."""
    last = [item for item in items if isinstance(item, Collective)]
    return SharedItems((*(item for item in items if not isinstance(item, Collective)), *last)) if last else items


@lru_cache(maxsize=4096)
def at_waits(block: Block) -> tuple[Block, ...]:
    """The block in pieces, each but the first of which the host launches when the one before it has ended: cut behind the kernels
    for which it waits, but for those beside which a collective runs. Equal pieces are one object.
    """
    pieces: list[tuple[Run, ...]] = [()]
    for times, items in block.runs:
        first, *others = _parted(items)
        if not others:
            pieces[-1] += (Run(times, items),)
            continue
        for _ in range(times):
            pieces[-1] += (Run(1, first),)
            pieces += [(Run(1, other),) for other in others]
    if len(pieces) == 1:
        return (block,)
    blocks = {each: Block(block.name, each) for each in dict.fromkeys(pieces)}
    return tuple(map(blocks.__getitem__, pieces))


@lru_cache(maxsize=4096)
def _parted(items: SharedItems) -> tuple[SharedItems, ...]:
    """Items up to each wait of the host, and those that are left."""
    ends, beside = [0], 0
    for number, item in enumerate(items, 1):
        beside += isinstance(item, Start) - isinstance(item, Join)
        if isinstance(item, Kernel) and item.waits and not beside and number < len(items):
            ends.append(number)
    return tuple(SharedItems(items[begin:end]) for begin, end in pairwise((*ends, len(items)))) if len(ends) > 1 else (items,)


@lru_cache(maxsize=4096)
def _called(items: Items, calls: str) -> Items:
    """One object for all stages: see `_cut`."""
    number, kernel = next((at, item) for at, item in enumerate(items) if isinstance(item, Kernel) and not item.calls)
    return SharedItems((*items[:number], replace(kernel, calls=calls), *items[number + 1 :]))


@lru_cache(maxsize=4096)
def _cut(items: Items, begin: int, end: int) -> Items:
    """One object for all layers and stages that are cut alike: each distinct piece of work is priced once."""
    return items if (begin, end) == (0, len(items)) else SharedItems(items[begin:end])


@lru_cache(maxsize=4096)
def shared(items: tuple[Item, ...]) -> Items:
    """One object for all stages and plans that run equal items."""
    return SharedItems(items)


@lru_cache(maxsize=4096)
def _joined(first: Items, second: Items) -> Items:
    return SharedItems((*first, *second))


class Making(NamedTuple):
    """Gradients that a piece of a backward pass takes at its start, and makes one by one: bytes per parameter, of each part that
    it touches the bytes that it makes, and bytes of its earliest part that later pieces make.
    """

    width: int
    completed: tuple[float, ...]
    later: float


def workspace(
    parts: Sequence[LayerCost],
    direction: str,
    absent: float,
    stranded: float = 0.0,
    making: Making | None = None,
    begun: bool = False,
) -> float:
    """Bytes that a pass needs besides the activations that it takes at its start or gives back at its end.

    A pass goes from part to part: forward, the activations of later parts are not there yet; backward, they are gone already.
    making: gradients of which not all are there yet, so that less than nothing may be needed besides all of them. absent: as in
    `LayerCost.backward_peak`. stranded: bytes that are counted where the loss runs. begun: the last part's pass has begun, with
    its loss.
    """
    if direction == INPUT:
        return _halved(parts, absent, stranded)
    most, after = (-math.inf, 0.0) if making else (0.0, 0.0)
    width = making.width if making else 0
    unmade = list(making.completed) if making else [0.0] * len(parts)
    for number in range(len(parts) - 1, -1, -1):
        part, earlier = parts[number], sum(unmade[:number])
        lost = stranded if part.loss_workspace > 0 else 0.0
        if direction == FORWARD:
            work = part.temporary + lost
        elif begun and number == len(parts) - 1:
            work = (part.gradient_workspace if width else part.backward_workspace) + part.restored
        else:
            work = part.backward_peak(width, absent - lost) + part.restored
        more = making.later if making and not number else 0.0
        most = max(most, work + more - after - earlier)
        after += part.saved
    return most


def _halved(parts: Sequence[LayerCost], absent: float, stranded: float) -> float:
    """Workspace of the first half of a split pass: inputs of weight gradients take the place of activations that are gone, so
    that less than nothing may be needed besides all of both.
    """
    later, unmade = 0.0, sum(part.held for part in parts)
    most = -sum(part.saved for part in parts)
    for part in reversed(parts):
        lost = stranded if part.loss_workspace > 0 else 0.0
        most = max(most, part.input_gradient_peak(absent - lost) + part.restored - later - unmade)
        later += part.saved
        unmade -= part.held
    return most


def items_of(part: LayerCost, direction: str) -> Items:
    """What runs in one direction of a part, in order."""
    if direction == INPUT:
        return _joined(part.recompute, part.input_gradient)
    if direction == WEIGHT:
        return _alone(part.weight_gradient)
    return {FORWARD: part.forward, BACKWARD: part.backward}[direction]


@lru_cache(maxsize=4096)
def _alone(items: Items) -> Items:
    """Weight gradients in a pass of their own: autograd is asked for each, with its output's gradient that was kept."""
    return SharedItems(
        replace(item, kept=float((BYTES | WIDTHS)[item.dtype] * math.prod(item.shape[:2]) * item.shape[3]))
        if isinstance(item, Kernel) and item.kind == "gemm"
        else item
        for item in items
    )
