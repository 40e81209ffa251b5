"""All-reduces round by round: who sends to whom, and what of the result each member has then. No network, no time.

Members are each on a node of their own. Of an algorithm that works in pieces the rounds of one piece are shown, which the others
follow like a pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.collectives import Ids, Place, Schedule, algorithms
from sim.pricing.transfers.path_latency import Floats
from topologies.reading import UserError

SUM, SPREAD = ("reduce", "reduce_scatter"), ("broadcast", "all_gather")  # the two halves of an all-reduce


@dataclass(frozen=True)
class Round:
    """Transfers at one time. source, destination, share: (transfers,), share of the buffer S; reduce: receivers add; has: (n,),
    the part of the finished sum that each member has after it.
    """

    source: Ids
    destination: Ids
    share: Floats
    reduce: bool
    has: Floats


@dataclass(frozen=True)
class Rounds:
    """An all-reduce of `ranks` members. sent, received: by each member, shape (n,), in buffers S."""

    name: str
    ranks: int
    rounds: tuple[Round, ...]
    sent: Floats
    received: Floats

    def to_dict(self) -> dict[str, object]:
        """Plain data with stable keys: rounds; of the member that sends or receives most; of all together."""
        sums = {"sent": float(self.sent.max()), "received": float(self.received.max()), "together": float(self.sent.sum())}
        return {"name": self.name, "ranks": self.ranks, "rounds": len(self.rounds), **sums}


def collective_rounds(name: str, ranks: int) -> Rounds:
    """The rounds of "all_reduce/ring", or of two halves joined by "+": "reduce/flat+broadcast/flat", which is what one parameter
    server does. Raises UserError for other operations and for algorithms that do not work for as many members.
    """
    halves = [part.strip() for part in name.split("+")]
    operations = [part.partition("/")[0] for part in halves]
    if operations != ["all_reduce"] and (len(halves) != 2 or operations[0] not in SUM or operations[1] not in SPREAD):
        raise UserError(f"{name!r}: must be all_reduce/ALGORITHM, or reduce/… or reduce_scatter/… + broadcast/… or all_gather/…")
    schedules = [algorithms[part](Place(np.arange(ranks))) for part in halves]
    if len({schedule.chunks for schedule in schedules}) > 1:
        raise UserError(f"{name!r}: its halves cut the buffer into {' and '.join(str(s.chunks) for s in schedules)} chunks")
    added = np.zeros((ranks, schedules[0].chunks, ranks), bool)  # member, chunk, whose contribution is in it
    added[np.arange(ranks), :, np.arange(ranks)] = True
    rounds = [each for schedule in schedules for each in _play(schedule, added)]
    if not added.all():
        raise UserError(f"{name!r}: not every member has the sum at the end")
    sent, received = np.zeros(ranks), np.zeros(ranks)
    for each in rounds:
        np.add.at(sent, each.source, each.share)
        np.add.at(received, each.destination, each.share)
    return Rounds(name, ranks, tuple(rounds), sent, received)


def _play(schedule: Schedule, added: np.ndarray[tuple[int, int, int], np.dtype[np.bool_]]) -> list[Round]:
    """Moves contributions, and keeps what each member has after each round."""
    rounds = []
    for phase in schedule.phases:
        for turn in range(phase.times):
            before, chunks = added.copy(), phase.chunk(turn).reshape(len(phase.source), -1)
            for source, destination, own in zip(phase.source, phase.destination, chunks, strict=True):
                moved = own[own >= 0]
                added[destination, moved] = before[source, moved] | (added[destination, moved] & phase.reduce)
            share = phase.amounts / schedule.chunks
            rounds.append(Round(phase.source, phase.destination, share, phase.reduce, added.all(axis=2).mean(axis=1)))
    return rounds
