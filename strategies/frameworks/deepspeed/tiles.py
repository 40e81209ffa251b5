"""DeepSpeed's ZeRO-3 with memory-centric tiling: matrices are gathered, used and released tile by tile.

Each tile is a module of its own (`strategies.layers.tiling`), so that DeepSpeed's limits act on tiles: what is gathered ahead,
what stays, and what a bucket of gradients has room for (`strategies.frameworks.deepspeed.prefetch`). A pass is cut before each
product with a weight; norms and biases that are not kept are gathered with a part's first piece and released by the limits, too.
A tile's gradient is copied into the bucket as soon as it is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from sim.program import COMPUTE, Block, Kernel, Memory, Op, Ref, Run
from strategies.data_parallel.shard_padding import padded
from strategies.data_parallel.sharded_parameters import ShardedParameters, Turn
from strategies.frameworks.deepspeed.parameter_gather import DeepSpeedGather
from strategies.frameworks.deepspeed.prefetch import Step, steps_of
from strategies.layers.weight_matrices import weights
from strategies.lowering.blocks import BACKWARD, FORWARD, items_of
from strategies.lowering.stage import Stage


class Piece(NamedTuple):
    """A part of a pass: what runs, the tiles that it uses, and the elements of gradients that it makes."""

    block: Block
    tiles: tuple[int, ...]
    gradients: int


class TiledPasses:
    """Passes of a stage's parts, tile by tile."""

    def __init__(self, stage: Stage, gathering: DeepSpeedGather) -> None:
        self.stage, self.gathering = stage, gathering
        self.sizes: list[int] = []  # elements of each tile
        self._there: dict[int, Ref] = {}  # the gathers of tiles
        self._blocks: dict[tuple[str, int, int, int], Block] = {}  # one for all layers that are equal, which are one object
        numbers = [self._numbered(part) for part in range(len(stage.parts))]
        order = [(FORWARD, part) for part in range(len(numbers))]
        order += [(BACKWARD, part) for part in reversed(range(stage.lowest, len(numbers)))]
        self._pieces = {(way, part): list(self._cut(way, part, numbers[part])) for way, part in order}
        trace = [tile for key in order for piece in self._pieces[key] for tile in piece.tiles]
        coming = iter(steps_of(trace, self.sizes, gathering.options))
        self._steps = {key: [[next(coming) for _ in piece.tiles] for piece in self._pieces[key]] for key in order}

    def play(self, turn: Turn, part: int, after: tuple[Ref, ...]) -> Iterator[tuple[Ref, int]]:
        """Add a part's pass; yields the op of each piece, and the elements of gradients that it has made."""
        stage, overlap, key = self.stage, self.stage.plan.overlap, (turn.way, part)
        (allocated, freed), pieces = stage.memory(turn.way, part), self._pieces[key]
        for number, (piece, steps) in enumerate(zip(pieces, self._steps[key], strict=True)):
            last = number == len(pieces) - 1
            mine = self._gathered(steps, ShardedParameters.begin(stage, after if not overlap else ()))
            waits = (*after, *mine, *(stage.crowded if turn.backward else ()))
            released = sum(self._bytes(step.part) for step in steps if step.release)
            made: Memory = (("temporary", float(piece.gradients * stage.plan.bytes_per_gradient)),) if piece.gradients else ()
            free = made + ((("temporary", released),) if released else ()) + (freed if last else ())
            ref = stage.add(Op(COMPUTE, piece.block, waits, allocated + made, free, turn.microbatch))
            for step in steps:
                if step.release:
                    del self._there[step.part]
            allocated, after = (), () if overlap else tuple(stage.reduced[-1:])
            yield ref, piece.gradients

    def _gathered(self, steps: list[Step], begin: tuple[Ref, ...]) -> tuple[Ref, ...]:
        """Gather what a piece needs and what is to be gathered ahead; what the piece waits for: without overlap, all of it."""
        ahead: list[int] = []
        for step in steps:
            for tile in (step.part, *step.ahead) if step.needed else step.ahead:
                self._there[tile] = self._gather(tile, begin)
            ahead += step.ahead
        waits = [step.part for step in steps] + ([] if self.stage.plan.overlap else ahead)
        return tuple(self._there[tile] for tile in waits)

    def _gather(self, tile: int, after: tuple[Ref, ...]) -> Ref:
        """Bring a tile here, from the host and from the other ranks."""
        stage, plan, size = self.stage, self.stage.plan, self.sizes[tile]
        memory: Memory = (("temporary", self._bytes(tile)),)
        if stage.host.has_parameters:
            alone = plan.copies == 1
            after = (stage.host.fetch(size / plan.shards, after, memory if alone else ()),)
            if alone:
                return after[0]
        return self.gathering.all_gather(size, plan.sharing, after, memory, plan.bytes_per_element)

    def _bytes(self, tile: int) -> float:
        return float(self.sizes[tile] * self.stage.plan.bytes_per_element)

    def _numbered(self, part: int) -> dict[str, list[int]]:
        """Numbers of the part's tiles by the label of their product, "" of what has none."""
        stage, numbers = self.stage, dict[str, list[int]]()
        least, shards = self.gathering.options.stage3_param_persistence_threshold, stage.plan.shards
        left, last = self.gathering.moving(part), part == len(stage.parts) - 1
        for weight in weights(stage.parts[part], stage.model, stage.tied if last else 0):
            label, shape = weight.label.removesuffix(" weight"), (weight.rows, weight.columns)
            if label == weight.label or math.prod(shape) <= least:  # embeddings have no product; what is small stays
                continue
            numbers.setdefault(label, []).append(len(self.sizes))
            self.sizes.append(padded(stage.plan, [shape], shards))
            left -= self.sizes[-1]
        if left > 0:
            numbers[""] = [len(self.sizes)]
            self.sizes.append(left)
        return numbers

    def _cut(self, way: str, part: int, numbers: dict[str, list[int]]) -> Iterator[Piece]:
        """A pass cut before each product with a weight that comes and goes."""
        items, begun, tiles = items_of(self.stage.parts[part], way), 0, tuple(numbers.get("", ()))
        used: dict[tuple[str, str], int] = {}  # products of each label and phase so far
        for number, item in enumerate(items):
            if isinstance(item, Kernel) and item.kind == "gemm" and item.label in numbers:
                own, key = numbers[item.label], (item.label, item.phase)
                used[key] = used.get(key, -1) + 1
                if number > begun and (tiles or begun):
                    yield self._piece(way, part, tiles, begun, number)
                    begun, tiles = number, ()
                tiles += (own[used[key] % len(own)],)
        yield self._piece(way, part, tiles, begun, len(items))

    def _piece(self, way: str, part: int, tiles: tuple[int, ...], begin: int, end: int) -> Piece:
        """Items `begin` to `end` of a part's pass."""
        stage, layer = self.stage, self.stage.parts[part]
        items, key = items_of(layer, way), (way, id(layer), begin, end)
        if key not in self._blocks:
            self._blocks[key] = Block(way, (Run(1, items[begin:end]),))
        if way == FORWARD or (stage.plan.copies == 1 and not stage.host.updates):
            return Piece(self._blocks[key], tiles, 0)
        own = [each for each in layer.gradients if not each.spread and (stage.tied or not each.tied)]
        made = [each.shape for each in own if len(items) - end <= each.left < len(items) - begin]
        return Piece(self._blocks[key], tiles, padded(stage.plan, made, stage.plan.shards))
