"""The graph of a program: ops as nodes, what each waits for, which collectives meet, and an order in which to work them out."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from sim.program import Collective, Program, Ref
from sim.remembered import remembered

INSIDE = {"tp", "cp", "ep", "pp"}  # axes along which all ranks have equally many microbatches
KEPT = 10_000  # ops up to which a graph is kept for programs with the same outline


class Outline(NamedTuple):
    """What the graph of a program depends on, of one cohort. ops: their streams, what they wait for, whether they hold up their
    host; meetings: collectives to which several cohorts come, and what those that meet have in common.
    """

    ops: tuple[tuple[str, tuple[Ref, ...], bool], ...]
    meetings: tuple[tuple[int, Hashable], ...]


class Turn(NamedTuple):
    """A node being worked out. Ends are kept until nobody waits for them any more: place: where its own is; first, others: those
    that it waits for. Place 0 has the time at which the step begins.
    """

    node: int
    place: int
    first: int
    others: tuple[int, ...]


class ProgramGraph:
    """What the replays of all plays of programs with one outline share. Nodes are the ops of all cohorts, one cohort after the
    other.

    first: by cohort, its first node, and in the end their number; before: by node, the nodes that it waits for, of one stream the
    last; together: by node of a collective to which several cohorts come, the nodes whose ranks meet; last: by cohort, the nodes
    that no other node of it waits for. resumption: by node, the node with which the host that launches it went on, −1: it was
    never held up; held_before: of a node that holds up the host, the one that held it up before, −1: none. Both are empty where
    no node holds up a host. turns: every node, after all that it waits for; place: by node, see `Turn`; places: how many there
    are.
    """

    def __init__(self, outlines: tuple[Outline, ...]) -> None:
        self.first: list[int] = np.cumsum([0, *(len(outline.ops) for outline in outlines)]).tolist()
        self.count = self.first[-1]
        self.before = self._waits(outlines)
        self.resumption: list[int] = []
        self.held_before: dict[int, int] = {}
        held = [held for outline in outlines for _, _, held in outline.ops]
        if any(held):
            self._hold(held)
        meetings: dict[Hashable, list[int]] = {}
        for base, outline in zip(self.first, outlines, strict=False):
            for number, key in outline.meetings:
                meetings.setdefault(key, []).append(base + number)
        self.together = {each: members for members in meetings.values() for each in members}
        self.last = self._last()
        self.place = [0] * self.count
        self.turns = list(self._take_turns())
        self.places = 1 + max(self.place, default=0)

    @cached_property
    def resumed(self) -> list[int]:
        """Nodes that a host launches when it has been held up."""
        return [node for node, resumption in enumerate(self.resumption) if resumption >= 0]

    def cohort(self, node: int) -> int:
        """The cohort of a node."""
        return bisect_right(self.first, node) - 1

    def _waits(self, outlines: tuple[Outline, ...]) -> list[list[int]]:
        first, before = self.first, list[list[int]]()
        on = [(number, stream) for number, outline in enumerate(outlines) for stream, _, _ in outline.ops]
        last: dict[tuple[int, str], int] = {}
        for node, (_, after, _) in enumerate(chain.from_iterable(outline.ops for outline in outlines)):
            waits = [first[other] + number for other, number in after]
            if on[node] in last:
                waits.append(last[on[node]])
            last[on[node]] = node
            before.append(waits if len(waits) < 2 else list({on[each]: each for each in sorted(waits)}.values()))
        return before

    def _hold(self, held: list[bool]) -> None:
        for first, end in pairwise(self.first):
            resumption = -1
            for number in range(first, end):
                if held[number]:
                    self.held_before[number], resumption = resumption, number
                self.resumption.append(resumption)

    def _sorted(self) -> list[int]:
        """Nodes in the order of their waits; of collectives that meet only the first, by which the others come, too."""
        count, together = self.count, self.together
        leader = list(range(count))
        for number, members in together.items():
            leader[number] = members[0]
        missing = [0] * count
        followers: list[list[int]] = [[] for _ in range(count)]
        for lead, awaited, host in zip(leader, self.before, self._hosts(), strict=True):
            if host >= 0:
                followers[host].append(lead)
                missing[lead] += 1
            for before in awaited:
                followers[before].append(lead)
            missing[lead] += len(awaited)
        ready = [number for number in range(count) if not missing[number] and leader[number] == number]
        for number in ready:
            after = followers[number]
            for member in together.get(number, ())[1:]:
                after = after + followers[member]
            for follower in after:
                missing[follower] -= 1
                if not missing[follower]:
                    ready.append(follower)
        return ready

    def _take_turns(self) -> Iterator[Turn]:
        uses, place, free, places = self._uses(), self.place, list[int](), 1
        for number in chain.from_iterable(self.together.get(first, (first,)) for first in self._sorted()):
            waits = [place[awaited] for awaited in self.before[number]] or [0]
            if not free:
                free.append(places)
                places += 1
            place[number] = free.pop()  # before those that it waits for are free: it may be written while they are read
            for awaited in self.before[number]:
                uses[awaited] -= 1
                if not uses[awaited]:
                    free.append(place[awaited])
            yield Turn(number, place[number], waits[0], tuple(waits[1:]))

    def _hosts(self) -> list[int]:
        """By node, the one that its host waits for before it launches it, -1: none."""
        if not self.held_before:
            return [-1] * self.count
        return [self.held_before.get(number, resumption) for number, resumption in enumerate(self.resumption)]

    def _last(self) -> list[list[int]]:
        result = []
        for first, end in pairwise(self.first):
            waited = set(chain.from_iterable(self.before[first:end]))
            result.append([number for number in range(first, end) if number not in waited])
        return result

    def _uses(self) -> list[int]:
        """By node, how many nodes wait for it, and one more of those of `last`, which are looked at in the end."""
        result = [0] * self.count
        for number in chain(chain.from_iterable(self.before), chain.from_iterable(self.last)):
            result[number] += 1
        return result


@remembered
def program_graph(program: Program) -> ProgramGraph:
    """The graph of a program to which no ops are added any more."""
    outlines = tuple(_outlines(program))
    return (_kept if sum(len(outline.ops) for outline in outlines) <= KEPT else ProgramGraph)(outlines)


_kept = lru_cache(maxsize=16)(ProgramGraph)


def _outlines(program: Program) -> Iterator[Outline]:
    seen: Counter[Hashable] = Counter()
    for number, cohort in enumerate(program.cohorts):
        at, meetings = cohort.at, []
        for index, op in enumerate(cohort.ops):
            work = op.work
            if not isinstance(work, Collective):
                continue
            if work.cohorts or work.axis in at:
                seen[number, work.label, work.cohorts] += 1
                key: Hashable = (work.label, work.cohorts, seen[number, work.label, work.cohorts])
            elif program.allotments and not INSIDE.issuperset(work.axes):  # ranks with other programs come, too
                seen[number, work.axes] += 1
                key = tuple(at.items()), work.axes, seen[number, work.axes]
            else:
                continue
            meetings.append((index, key))
        yield Outline(tuple([(op.stream, op.after, op.held) for op in cohort.ops]), tuple(meetings))
