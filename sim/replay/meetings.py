"""Where the ranks of a program meet, by node of its graph."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, cast

from sim.op_index import op_index
from sim.program import Collective, Program
from sim.remembered import remembered
from sim.replay.places import Groups, Places
from sim.replay.program_graph import program_graph


class Meeting(NamedTuple):
    """Nodes that start together, in the order of evaluation, and the groups in which their ranks meet; None: by themselves."""

    members: list[int]
    groups: Groups | None


class Meetings(NamedTuple):
    """By node to which ranks of other cohorts come, too, where they meet; and by any other whose ranks meet, their groups."""

    across: dict[int, Meeting]
    alone: dict[int, Groups]


@remembered
def meetings(program: Program) -> Meetings:
    """Those of a program to which no ops are added any more."""
    graph, groups = program_graph(program), _Groups(program)
    across, alone = dict[int, Meeting](), dict[int, Groups]()
    for cohort, first in enumerate(graph.first[:-1]):
        for _, op, ops in op_index(program.cohorts[cohort]).works:
            if not isinstance(op.work, Collective):
                continue
            nodes = (first + ops).tolist()
            if nodes[0] not in graph.together:
                own = groups.of([(op.work, cohort)])
                alone |= dict.fromkeys(nodes, own) if own else {}
                continue
            for members in map(graph.together.__getitem__, nodes):
                if members[0] not in across:
                    across |= dict.fromkeys(members, Meeting(members, groups.of([groups.work(each) for each in members])))
    return Meetings(across, alone)


class _Groups:
    """The groups in which ranks of cohorts meet."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph, self.places = program, program_graph(program), Places(program)
        self._known: dict[Hashable, Groups | None] = {}

    def work(self, node: int) -> tuple[Collective, int]:
        """The collective of a node, and its cohort."""
        cohort = self.graph.cohort(node)
        return cast(Collective, self.program.cohorts[cohort].like(node - self.graph.first[cohort]).work), cohort

    def of(self, works: list[tuple[Collective, int]]) -> Groups | None:
        """The groups in which ranks meet, of the collectives of one or several cohorts."""
        # groups are numbered by the other coordinates: alike in cohorts that fix the same axes, unless they share their ranks
        own, cohorts = bool(self.program.allotments), self.program.cohorts
        axes = [() if work.cohorts else work.axes for work, _ in works]
        key = tuple((each, cohort if own else tuple(cohorts[cohort].at)) for each, (_, cohort) in zip(axes, works, strict=True))
        if key not in self._known:
            self._known[key] = Groups.of([self.places.groups(*each) for each in works])
        return self._known[key]
