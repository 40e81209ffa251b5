"""Cutting blocks at their collectives, for cohorts whose collectives meet other traffic on the network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sim.program import COMPUTE, SIDE_STREAM, Block, Cohort, Collective, Item, Join, Kernel, Op, Program, Ref, Run, Start

Piece = Block | Collective | Start | Join


def expand(program: Program, cohorts: set[int]) -> Program:
    """`program` with the blocks of `cohorts` cut at their collectives, so that these meet other traffic on the network."""
    cut = [_Cut(cohort, number in cohorts) for number, cohort in enumerate(program.cohorts)]
    result = []
    for number, cohort in enumerate(program.cohorts):
        ops, last = cut[number].ops, cut[number].last
        for op, own in zip(ops, cut[number].own, strict=True):
            others = (Ref(other, cut[other].last[position]) for other, position in op.after)
            op.after = (*others, *(Ref(number, position) for position in own))
        steady = cohort.steady and (last[cohort.steady[0] - 1] + 1, last[cohort.steady[1] - 1] + 1)
        passes = [last[begin - 1] + 1 if begin else 0 for begin in cohort.passes]
        result.append(replace(cohort, ops=ops, steady=steady, passes=passes))
    return replace(program, cohorts=result)


class _Cut:
    """A cohort's new ops; own: which of them each waits for besides `after`, which still has the old numbers; last: for each old
    op the number of its last piece.
    """

    def __init__(self, cohort: Cohort, blocks: bool) -> None:
        self.ops: list[Op] = []
        self.own: list[tuple[int, ...]] = []
        self.last: list[int] = []
        self._computed: tuple[int, ...] = ()  # the latest op of the compute stream
        pieces: dict[Block, list[Piece]] = {}
        for op in cohort.ops:
            if not blocks or not isinstance(op.work, Block):
                self._add(Op(*(getattr(op, name) for name in Op.__slots__)))
            else:
                if op.work not in pieces:
                    pieces[op.work] = _pieces(op.work)
                self._block(op, pieces[op.work])
            self.last.append(len(self.ops) - 1)

    def _add(self, op: Op, own: tuple[int, ...] = ()) -> int:
        self.ops.append(op)
        self.own.append(own)
        if op.stream == COMPUTE:
            self._computed = (len(self.ops) - 1,)
        return len(self.ops) - 1

    def _block(self, op: Op, pieces: list[Piece]) -> None:
        """Add the pieces of a block; what it waits for, takes and holds the host up for is the first one's, what it gives
        back the last one's."""
        started: dict[Collective, list[int]] = {}
        joins: tuple[int, ...] = ()
        beside: dict[str, tuple[int, ...]] = {}  # the latest collective of each stream beside
        for number, piece in enumerate(pieces):
            first, last = number == 0, number == len(pieces) - 1
            if isinstance(piece, Join):
                joins = (*joins, started[piece.collective].pop(0))
            elif isinstance(piece, Start):
                begun = Op(piece.stream, piece.collective, microbatch=op.microbatch, chunk=op.chunk)
                beside[piece.stream] = (self._add(begun, self._computed),)
                started.setdefault(piece.collective, []).extend(beside[piece.stream])
            else:
                after, allocate, free = op.after if first else (), op.allocate if first else (), op.free if last else ()
                own = (*joins, *beside.get(SIDE_STREAM, ())) if isinstance(piece, Collective) else joins
                part = Op(op.stream, piece, after, allocate, free, op.microbatch, op.chunk, held=op.held and first)
                self._add(part, tuple(dict.fromkeys(own)))
                joins = ()


def _pieces(block: Block) -> list[Piece]:
    """Kernels between collectives, and the collectives, in order; the first and the last are no start nor join."""
    result: list[Piece] = []
    for times, items in block.runs:
        if all(isinstance(item, Kernel) for item in items):
            result.append(Block(block.name, (Run(times, items),)))
        else:
            result += _once(block.name, items) * times
    nothing = Block(block.name, ())
    if not result or isinstance(result[0], (Start, Join)):
        result.insert(0, nothing)
    return [*result, nothing] if isinstance(result[-1], (Start, Join)) else result


def _once(name: str, items: tuple[Item, ...]) -> list[Piece]:
    pieces = grouped(items)
    return [piece if isinstance(piece, (Collective, Start, Join)) else Block(name, (Run(1, piece),)) for piece in pieces]


def grouped(items: tuple[Item, ...]) -> Iterator[tuple[Kernel, ...] | Collective | Start | Join]:
    """Kernels in a row as one."""
    kernels: list[Kernel] = []
    for item in items:
        if isinstance(item, Kernel):
            kernels.append(item)
            continue
        if kernels:
            yield tuple(kernels)
            kernels = []
        yield item
    if kernels:
        yield tuple(kernels)
