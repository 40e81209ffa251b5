"""The graph of a program: ops as nodes, what each waits for, which collectives meet, and an order in which to work them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import chain, pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from sim.program import Cohort, Collective, Op, Program

INSIDE = {"tp", "cp", "ep", "pp"}  # axes along which all ranks have equally many microbatches


class Node(NamedTuple):
    """One op of one cohort in a program's graph."""

    cohort: int
    op: Op
    before: tuple[int, ...]  # nodes that it waits for
    resumption: int  # node with which the host that launches it went on, −1: it was never held up
    held_before: int  # of a node that holds up the host: the one that held it up before (−1: none)


class ProgramGraph:
    """What the replays of all plays of a program share: nodes, which of them meet, and the order of their waits."""

    def __init__(self, program: Program) -> None:
        self.first = np.cumsum([0, *(len(cohort.ops) for cohort in program.cohorts)]).tolist()
        self.nodes = [node for number in range(len(program.cohorts)) for node in self._cohort(program.cohorts[number], number)]
        self.together = self._meet(program)
        self.order = self._sorted()
        self.last = self._last()
        self.used_last = self._used_last()

    def _cohort(self, cohort: Cohort, number: int) -> Iterator[Node]:
        first = self.first
        last: dict[str, int] = {}
        resumption = -1
        for index, op in enumerate(cohort.ops, first[number]):
            before = [first[cohort] + number for cohort, number in op.after]
            stream = op.stream
            if stream in last:
                before.append(last[stream])
            last[stream] = index
            previous = resumption
            if op.held:
                resumption = index
            yield Node(number, op, tuple(before), resumption, previous)

    def _meet(self, program: Program) -> dict[int, list[int]]:
        """By node of a collective to which several cohorts come, the nodes whose ranks meet."""
        meetings: dict[Hashable, list[int]] = {}
        seen: Counter[Hashable] = Counter()
        for number, node in enumerate(self.nodes):
            work = node.op.work
            if not isinstance(work, Collective):
                continue
            at = program.cohorts[node.cohort].at
            if work.cohorts or work.axis in at:
                seen[node.cohort, work.label, work.cohorts] += 1
                key: Hashable = (work.label, work.cohorts, seen[node.cohort, work.label, work.cohorts])
            elif program.allotments and not INSIDE.issuperset(work.axes):  # ranks with other programs come, too
                seen[node.cohort, work.axes] += 1
                key = tuple(at.items()), work.axes, seen[node.cohort, work.axes]
            else:
                continue
            meetings.setdefault(key, []).append(number)
        return {each: members for members in meetings.values() for each in members}

    def _sorted(self) -> list[list[int]]:
        """Nodes in the order of their waits; collectives that meet come together."""
        count, together = len(self.nodes), self.together
        leader = list(range(count))
        for number, members in together.items():
            leader[number] = members[0]
        missing = [0] * count
        followers: list[list[int]] = [[] for _ in range(count)]
        for number, (_, op, awaited, resumption, held_before) in enumerate(self.nodes):
            lead, host = leader[number], held_before if op.held else resumption
            if host >= 0:
                followers[host].append(lead)
                missing[lead] += 1
            for before in awaited:
                followers[before].append(lead)
            missing[lead] += len(awaited)
        ready = [number for number in range(count) if leader[number] == number and not missing[number]]
        order = []
        for number in ready:
            members = together.get(number) or [number]
            order.append(members)
            for member in members:
                for follower in followers[member]:
                    missing[follower] -= 1
                    if not missing[follower]:
                        ready.append(follower)
        return order

    def _last(self) -> list[list[int]]:
        """By cohort, the nodes that no other node of it waits for."""
        result = []
        for first, end in pairwise(self.first):
            waited = set[int]().union(*(node.before for node in self.nodes[first:end]))
            result.append([number for number in range(first, end) if number not in waited])
        return result

    def _used_last(self) -> list[list[int]]:
        """By turn, the nodes that nobody waits for after it, without those of `last`."""
        nodes, turn = self.nodes, dict[int, int]()
        for at, members in enumerate(self.order):
            for member in members:
                for before in nodes[member].before:
                    turn[before] = at
        for number in chain.from_iterable(self.last):
            turn.pop(number, None)
        result: list[list[int]] = [[] for _ in self.order]
        for number, at in turn.items():
            result[at].append(number)
        return result


_GRAPHS: WeakKeyDictionary[Program, ProgramGraph] = WeakKeyDictionary()


def program_graph(program: Program) -> ProgramGraph:
    """The graph of a program to which no ops are added any more."""
    known = _GRAPHS.get(program)
    if known is None:
        known = _GRAPHS[program] = ProgramGraph(program)
    return known
