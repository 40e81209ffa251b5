"""What the ops of a trace wait for, and which of them meet: the rules of the published analysis (see `calibration.stragglers`).

- Compute ops of a worker follow each other as they started. Each kind of send and receive is a stream of its own; so are
  params-all-gather and grads-reduce-scatter together.
- The i-th forward-recv comes before the i-th forward compute that receives, and after the forward compute before that one; the
  i-th forward-send comes after the i-th forward compute that sends. Backward alike. The model's first chunk receives nothing
  forwards, its last sends nothing; traces of several chunks per stage have these ops all the same, and they meet nobody.
- The first backward-send and backward-recv wait for the second compute op before the first backward compute.
- params-all-gather comes before the first forward compute of its chunk. After the last compute op come gc,
  layernorm-grads-all-reduce, embedding-grads-all-reduce, grads-reduce-scatter, optimizer-clip-main-grad, optimizer. Where the
  trace has separate-grads-all-reduce, that stands in the place of grads-reduce-scatter, which runs beside compute: after its
  chunk's last backward compute.
- Sender and receiver meet; params-all-gather, grads-reduce-scatter and separate-grads-all-reduce over the dp ranks of a stage;
  embedding-grads-all-reduce over the first and last stage of a dp rank; optimizer-clip-main-grad over all ranks; others do not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from calibration.stragglers import trace as ops
from calibration.stragglers.trace import Booleans, Trace
from sim.replay.graph import Integers

CLOCK = 5e-5  # seconds by which clocks of a worker's streams may disagree


class Waits(NamedTuple):
    """after[k] waits for before[k]; rows with the same number ≥ 0 in `rendezvous` start together. mismatched: steps (as in the
    trace) whose sends and receives do not belong to its compute ops, with the reason; their waits are incomplete.
    """

    before: Integers
    after: Integers
    rendezvous: Integers
    mismatched: dict[int, str]


class _Sequence:
    """Rows sorted by lane: the ops of one worker in one step."""

    def __init__(self, rows: Integers, lane: Integers, lanes: int) -> None:
        self.rows, self.lane = rows, lane[rows]
        self.first = np.searchsorted(self.lane, np.arange(lanes + 1))
        self.count = np.diff(self.first)
        self.place = np.arange(len(rows)) - self.first[self.lane]

    def at(self, lane: Integers, place: Integers) -> Integers:
        """Rows at these places of these lanes; −1 where a lane has no such place."""
        there = (place >= 0) & (place < self.count[lane])
        result = np.full(len(lane), -1, np.int64)
        result[there] = self.rows[(self.first[lane] + place)[there]]
        return result


class _Rules:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.workers = len(trace.dp_ranks) * trace.stages
        self.lane = trace.lane
        self.lanes = self.workers * len(trace.steps)
        self.overlaps = bool(trace.is_type(ops.SEPARATE).any())
        self.waits: list[tuple[Integers, Integers]] = []
        self.rendezvous = np.full(len(trace.step), -1, np.int64)
        self.meetings = 0
        self.mismatched: dict[int, str] = {}
        self.compute = self.sequence(ops.FORWARD, ops.BACKWARD)

    def sequence(self, *names: str, of: Booleans | None = None, by_type: bool = False) -> _Sequence:
        """Ops of these types (and of those only `of`) in the order of their starts, or first of all of their types."""
        trace = self.trace
        rows = np.flatnonzero(trace.is_type(*names) if of is None else trace.is_type(*names) & of)
        if len(names) > 1 and not by_type:  # a trace is sorted by lane, type, start
            rows = rows[np.lexsort((trace.op_type[rows], trace.seq_id[rows], trace.start[rows], self.lane[rows]))]
        return _Sequence(rows, self.lane, self.lanes)

    def wait(self, before: Integers, after: Integers) -> None:
        """after[k] waits for before[k], where neither is −1."""
        both = (before >= 0) & (after >= 0)
        self.waits.append((before[both], after[both]))

    def follow(self, sequence: _Sequence) -> None:
        """The ops of each lane follow each other."""
        self.wait(sequence.at(sequence.lane, sequence.place - 1), sequence.rows)

    def meet(self, rows: Integers, where: Integers, nth: Integers) -> Integers:
        """Rows of equal `where` and `nth` meet; returns how many meet with each."""
        key = where * (int(nth.max(initial=0)) + 1) + nth
        _, numbers, sizes = np.unique(key, return_inverse=True, return_counts=True)
        self.rendezvous[rows] = self.meetings + numbers
        self.meetings += len(sizes)
        return np.asarray(sizes[numbers])

    def mismatch(self, steps: Integers, why: str) -> None:
        """These steps' ops do not belong together."""
        self.mismatched |= {step: why for step in np.unique(steps).tolist() if step not in self.mismatched}


def waits_of(trace: Trace) -> Waits:
    """Waits and rendezvous of every row."""
    rules = _Rules(trace)
    rules.follow(rules.compute)
    for direction in ("forward", "backward"):
        _sends_and_receives(rules, direction)
    _first_of_backward(rules)
    _beside_compute(rules)
    _after_compute(rules)
    _collectives(rules)
    before, after = (np.concatenate(ends) for ends in zip(*rules.waits, strict=True))
    return Waits(before, after, rules.rendezvous, rules.mismatched)


def _sends_and_receives(rules: _Rules, direction: str) -> None:
    trace, onward = rules.trace, 1 if direction == "forward" else -1
    chunks = trace.model_chunk[rules.compute.rows]
    meeting = [
        _matched(rules, direction, "send", chunks.max() if onward > 0 else 0),
        _matched(rules, direction, "recv", 0 if onward > 0 else chunks.max()),
    ]
    rows, nth = (np.concatenate([getattr(each, field) for each in meeting]) for field in ("rows", "place"))
    sender = np.where(trace.is_type(f"{direction}-send")[rows], trace.stage[rows], (trace.stage[rows] - onward) % trace.stages)
    sizes = rules.meet(rows, trace.lane[rows] - trace.stage[rows] + sender, nth)
    rules.mismatch(trace.step[rows[sizes != 2]], f"a {direction}-send without its {direction}-recv, or the other way round")


def _matched(rules: _Rules, direction: str, kind: str, outermost: int) -> _Sequence:
    """Sends or receives wait for compute, or compute for them; returns those that meet a peer. The outermost chunk has none."""
    trace, name = rules.trace, f"{direction}-{kind}"
    every, passes = rules.sequence(name), rules.sequence(f"{direction}-compute")
    moves = (trace.model_chunk != outermost) & (trace.stages > 1)
    moving = rules.sequence(f"{direction}-compute", of=moves)
    launched = _Sequence(_launched(rules, every, passes, kind), rules.lane, rules.lanes)
    partner, wrong = _partners(launched, passes, moving, kind)
    rules.mismatch(np.flatnonzero(wrong) // rules.workers, f"{name} and {direction}-compute of a worker do not match in number")
    rules.follow(every)
    if kind == "send":
        rules.wait(partner, launched.rows)
    else:
        place = np.full(len(trace.step), -1, np.int64)
        place[passes.rows] = passes.place
        rules.wait(launched.rows, partner)
        rules.wait(passes.at(launched.lane, place[partner] - 1), launched.rows)
    meets = np.zeros(len(trace.step), bool)
    meets[launched.rows] = moves[partner] & (partner >= 0)
    return rules.sequence(name, of=meets)


def _launched(rules: _Rules, every: _Sequence, passes: _Sequence, kind: str) -> Integers:
    """Sends or receives without what was recorded but not launched: receives that start after the last compute op of their
    direction did, and sends that end before its first one did. The majority of the stage's lanes that have as many decides, since
    clocks err.
    """
    trace, rows = rules.trace, every.rows
    if kind == "recv":
        last = np.full(rules.lanes, -np.inf)
        np.maximum.at(last, passes.lane, trace.start[passes.rows])
        launched = trace.start[rows] <= last[every.lane] + CLOCK
    else:
        first = np.full(rules.lanes, np.inf)
        np.minimum.at(first, passes.lane, trace.end[passes.rows])
        launched = trace.end[rows] >= first[every.lane] - CLOCK
    most = int(every.count.max(initial=0)) + 1
    key = (trace.stage[rows] * most + every.count[every.lane]) * most + every.place
    _, alike = np.unique(key, return_inverse=True)
    votes = np.bincount(alike, np.where(launched, 1.0, -1.0))
    return np.asarray(rows[votes[alike] >= 0])


def _partners(launched: _Sequence, passes: _Sequence, moving: _Sequence, kind: str) -> tuple[Integers, Booleans]:
    """(compute op of each send or receive, or −1; lanes whose numbers do not match). A lane has one for each compute op that
    moves data, or for each compute op at all, of which the first receive may be missing.
    """
    exact = launched.count == moving.count
    later = ~exact & (launched.count == passes.count - 1) & (kind == "recv")
    every = ~exact & (launched.count == passes.count) | later
    lane, place = launched.lane, launched.place
    of_all = np.where(every[lane], passes.at(lane, place + later[lane]), -1)
    return np.where(exact[lane], moving.at(lane, place), of_all), ~(exact | every)


def _first_of_backward(rules: _Rules) -> None:
    """The first backward-send and backward-recv wait for the second compute op before the first backward compute."""
    compute, lanes = rules.compute, np.arange(rules.lanes)
    place = np.full(len(rules.trace.step), -1, np.int64)
    place[compute.rows] = compute.place
    first = rules.sequence(ops.BACKWARD).at(lanes, np.zeros_like(lanes))
    second_before = np.where(first >= 0, place[first] - 2, -1)
    for name in ("backward-send", "backward-recv"):
        rules.wait(compute.at(lanes, second_before), rules.sequence(name).at(lanes, np.zeros_like(lanes)))


def _beside_compute(rules: _Rules) -> None:
    """params-all-gather before its chunk's first forward compute; overlapped grads-reduce-scatter after its last backward
    compute.
    """
    trace = rules.trace
    gather, scatter = rules.sequence(ops.GATHER).rows, rules.sequence(ops.SCATTER).rows
    rules.follow(rules.sequence(ops.GATHER, ops.SCATTER))
    chunks = int(trace.chunk.max(initial=0)) + 1
    key = rules.lane * chunks + np.maximum(trace.chunk, 0)

    def last(rows: Integers) -> Integers:
        result = np.full(rules.lanes * chunks, -1, np.int64)
        result[key[rows]] = rows
        return result

    forward, backward = rules.sequence(ops.FORWARD).rows, rules.sequence(ops.BACKWARD).rows
    rules.wait(last(gather), last(forward[::-1]))
    if rules.overlaps:
        rules.wait(last(backward), last(scatter[::-1]))


def _after_compute(rules: _Rules) -> None:
    """The chain after the last compute op."""
    trace, compute = rules.trace, rules.compute
    lanes = np.arange(rules.lanes)
    types = [ops.GC, ops.LAYERNORM, ops.EMBEDDING, ops.SEPARATE if rules.overlaps else ops.SCATTER, ops.CLIP, ops.OPTIMIZER]
    chain = rules.sequence(*types, by_type=True)
    rules.follow(chain)
    first = chain.at(lanes, np.zeros_like(lanes))
    rules.wait(compute.at(lanes, compute.count - 1), first)
    if rules.overlaps:
        scatter = rules.sequence(ops.SCATTER)
        has_gc = (first >= 0) & trace.is_type(ops.GC)[first]
        rules.wait(scatter.at(lanes, scatter.count - 1), chain.at(lanes, has_gc.astype(np.int64)))


def _collectives(rules: _Rules) -> None:
    """Who meets: over dp ranks, over the first and last stage, over all."""
    trace = rules.trace
    for name in (ops.GATHER, ops.SCATTER, ops.SEPARATE):
        of = rules.sequence(name)
        rules.meet(of.rows, (trace.step * trace.stages + trace.stage)[of.rows], of.place)
    of = rules.sequence(ops.EMBEDDING)
    rules.meet(of.rows, (trace.step * len(trace.dp_ranks) + trace.dp_rank)[of.rows], of.place)
    of = rules.sequence(ops.CLIP)
    rules.meet(of.rows, trace.step[of.rows], of.place)
