"""The graph of a program: ops as nodes, what each waits for, which collectives meet, and an order in which to work them out."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import chain, pairwise

import numpy as np

from sim.program import Cohort, Collective, Op, Program
from sim.remembered import remembered

INSIDE = {"tp", "cp", "ep", "pp"}  # axes along which all ranks have equally many microbatches


class ProgramGraph:
    """What the replays of all plays of a program share. Nodes are the ops of all cohorts, one cohort after the other.

    first: by cohort, its first node, and in the end their number; before: by node, the nodes that it waits for; together: by node
    of a collective to which several cohorts come, the nodes whose ranks meet; last: by cohort, the nodes that no other node of it
    waits for. resumption: by node, the node with which the host that launches it went on, −1: it was never held up; held_before:
    of a node that holds up the host, the one that held it up before, −1: none. Both are empty where no node holds up a host.
    """

    def __init__(self, program: Program) -> None:
        self.first: list[int] = np.cumsum([0, *(len(cohort.ops) for cohort in program.cohorts)]).tolist()
        self.ops: list[Op] = list(chain.from_iterable(cohort.ops for cohort in program.cohorts))
        self.before: list[list[int]] = []
        for number, cohort in enumerate(program.cohorts):
            self._waits(cohort, self.first[number])
        self.resumption: list[int] = []
        self.held_before: dict[int, int] = {}
        if any(op.held for op in self.ops):
            self._hold()
        self.together = self._meet(program)
        self.last = self._last()
        self.uses = self._uses()
        self.order = self._sorted()

    def cohort(self, node: int) -> int:
        """The cohort of a node."""
        return bisect_right(self.first, node) - 1

    def _waits(self, cohort: Cohort, base: int) -> None:
        first, before = self.first, self.before
        last: dict[str, int] = {}
        for index, op in enumerate(cohort.ops, base):
            waits = [first[other] + number for other, number in op.after]
            stream = op.stream
            if stream in last:
                waits.append(last[stream])
            last[stream] = index
            before.append(waits)

    def _hold(self) -> None:
        for first, end in pairwise(self.first):
            resumption = -1
            for number in range(first, end):
                if self.ops[number].held:
                    self.held_before[number], resumption = resumption, number
                self.resumption.append(resumption)

    def _meet(self, program: Program) -> dict[int, list[int]]:
        meetings: dict[Hashable, list[int]] = {}
        seen: Counter[Hashable] = Counter()
        for number, cohort in enumerate(program.cohorts):
            at = cohort.at
            for node, op in enumerate(cohort.ops, self.first[number]):
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
                meetings.setdefault(key, []).append(node)
        return {each: members for members in meetings.values() for each in members}

    def _sorted(self) -> list[int]:
        """Nodes in the order of their waits; of collectives that meet only the first, by which the others come, too."""
        count, together = len(self.ops), self.together
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

    def nodes_in_order(self) -> Iterator[int]:
        """Every node, after all that it waits for."""
        for first in self.order:
            yield from self.together.get(first, (first,))

    def _hosts(self) -> list[int]:
        """By node, the one that its host waits for before it launches it, -1: none."""
        if not self.held_before:
            return [-1] * len(self.ops)
        return [self.held_before.get(number, resumption) for number, resumption in enumerate(self.resumption)]

    def _last(self) -> list[list[int]]:
        result = []
        for first, end in pairwise(self.first):
            waited = set(chain.from_iterable(self.before[first:end]))
            result.append([number for number in range(first, end) if number not in waited])
        return result

    def _uses(self) -> list[int]:
        """By node, how many nodes wait for it, and one more of those of `last`, which are looked at in the end."""
        result = [0] * len(self.ops)
        for number in chain(chain.from_iterable(self.before), chain.from_iterable(self.last)):
            result[number] += 1
        return result


@remembered
def program_graph(program: Program) -> ProgramGraph:
    """The graph of a program to which no ops are added any more."""
    return ProgramGraph(program)
