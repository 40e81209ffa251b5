"""Whether two programs of one plan with unequal numbers of microbatches are the same but for ops that one has more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.program import Block, Collective, Item, Join, Op, Program, Ref, Send, SharedItems, Start, Work

Integers = NDArray[np.int64]


class Insertion(NamedTuple):
    """How the ops of a cohort differ from those of the same cohort in a longer program.

    more: ops that are put in; before: how many ops at the beginning are equal; after: the op from which on all are equal to those
    `more` further on in the longer one.
    """

    more: int
    before: int
    after: int


class Comparison:
    """Ops of two programs compared by value: stream, work, chunk, and whether they hold up their host."""

    def __init__(self) -> None:
        self._items: dict[int, int] = {}
        self._works: dict[int, int] = {}
        self._numbers: dict[object, int] = {}
        self._kept: list[object] = []  # whose ids are known

    def insertion(self, short: list[Op], long: list[Op]) -> Insertion:
        """How the ops of one cohort differ."""
        old, new = (np.array([self._op(op) for op in ops], np.int64) for ops in (short, long))
        count, more = len(old), len(new) - len(old)
        least = min(count, len(new))
        before = _first(old[:least] != new[:least], least)
        after = count - _first(old[count - least :][::-1] != new[len(new) - least :][::-1], least)
        return Insertion(more, before, after)

    def _op(self, op: Op) -> int:
        work = self._works.get(id(op.work))
        if work is None:
            work = self._works[id(op.work)] = self._number(self._work(op.work))
            self._kept.append(op.work)
        return self._number((op.stream, work, op.chunk, op.held))

    def _number(self, value: object) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _work(self, work: Work) -> object:
        if isinstance(work, Block):
            return work.name, tuple((times, self._run(items)) for times, items in work.runs)
        return _values(work)

    def _run(self, items: SharedItems) -> int:
        run = self._items.get(id(items))
        if run is None:
            run = self._items[id(items)] = self._number(tuple(_item(item) for item in items))
            self._kept.append(items)
        return run


def _item(item: Item) -> object:
    if isinstance(item, Start):
        return "start", item.stream, _values(item.collective)
    if isinstance(item, Join):
        return "join", _values(item.collective)
    return _values(item) if isinstance(item, Collective) else item


def _values(work: Collective | Send) -> tuple[object, ...]:
    return type(work), *(getattr(work, each.name) for each in fields(work))


def _first(differs: NDArray[np.bool_], count: int) -> int:
    """The first place where something differs; `count`: nowhere."""
    return int(differs.argmax()) if differs.any() else count


class Waits(NamedTuple):
    """What the ops of a cohort from number `first` on wait for: op number `by` for op `op` of cohort `cohort`, as columns."""

    by: Integers
    cohort: Integers
    op: Integers


def waits(program: Program, cohort: int, first: int) -> Waits:
    """What ops of a cohort wait for besides the one before on their stream: of several on one stream the last."""
    ops = program.cohorts[cohort].ops
    rows = [(number, *ref) for number in range(first, len(ops)) for ref in _last_on_streams(program, ops[number].after)]
    return Waits(*np.array(rows, np.int64).reshape(-1, 3).T)


def _last_on_streams(program: Program, refs: tuple[Ref, ...]) -> Iterable[Ref]:
    """Without ops that have ended when another one has, for which it waits too: an update of the gradients of many microbatches
    waits for each of their reductions.
    """
    last: dict[tuple[int, str], Ref] = {}
    for ref in refs:
        stream = ref.cohort, program.cohorts[ref.cohort].ops[ref.op].stream
        last[stream] = max(ref, last.get(stream, ref))
    return last.values()
