"""The ops that a pipeline stage adds to the program of its rank."""

from __future__ import annotations

from sim.op_columns import OPS, too_many
from sim.program import Block, Cohort, Op, Ref, Work
from strategies.lowering.blocks import at_waits


class StageOps:
    """Adds ops of chunk `chunk` to `cohort`, the program of pipeline rank `rank`. most: ops that it may have; in_pieces: blocks
    are cut where the host waits for some of their kernels.
    """

    def __init__(self, cohort: Cohort, rank: int, chunk: int, most: float, in_pieces: bool) -> None:
        self._ops, self._rank, self._chunk, self._most, self._in_pieces = cohort.ops, rank, chunk, most, in_pieces
        self._begun: dict[int, int] = {}  # the first piece of a pass that is in several, by its last one

    def add(self, op: Op) -> Ref:
        """Append an op, in pieces where the host waits for some of its kernels; the address of its last piece. Raises UserError
        when a step has more than can be played in seconds and a gigabyte.
        """
        ops, op.chunk = self._ops, self._chunk
        if self._in_pieces and isinstance(op.work, Block):
            self._add_pieces(op, at_waits(op.work))
        else:
            ops.append(op)
        if len(ops) > self._most:
            raise too_many(OPS)
        return Ref(self._rank, len(ops) - 1)

    def _add_pieces(self, op: Op, pieces: tuple[Work, ...]) -> None:
        ops, first, last = self._ops, len(self._ops), len(self._ops) + len(pieces) - 1
        ops.append(op)
        if last > first:
            self._begun[last] = first
            ops += [Op(op.stream, piece, microbatch=op.microbatch, chunk=op.chunk, held=True) for piece in pieces[1:]]
            op.work, ops[-1].free, op.free = pieces[0], op.free, ()

    def first(self, ref: Ref) -> Op:
        """The first piece of a pass, by the address of its last one."""
        return self._ops[self._begun.get(ref.op, ref.op)]
