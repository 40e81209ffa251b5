"""Lower bounds on the step and the memory of every plan at once, from the prices and parts that the simulation plays.

Step. A rank's compute stream runs its passes one after the other. The first waits for a microbatch to come through all stages
before (the fill); after its last backward pass that microbatch still goes back through them (the drain). So for every rank

    step ≥ fill + microbatches · (forward + backward of its chunks) + drain

with nothing else in the way; weight gradients of split backward passes may fill the drain. On the first rank the optimizer's pass
follows, and what is gathered after it. Steps of asynchronous schedules and local steps follow each other without fill and drain.
And the NICs of a node must carry what its ranks gather and reduce (`strategies.planner.bounds.network_bound`), where nothing runs
beside it after all passes of a rank.

Memory. What the first and the last rank, and the first of those with most layers, keep when a pass begins, by the schedule's
order, and the sharded model states.

Both are never more than what is simulated: waiting, contention, slower kernels beside communication, and gathered parameters only
add. Strategies that write their own programs are not bounded (0).

Passes that run beside each other take at least as long as the kernels of both. What is offloaded takes no memory of a GPU, and
the CPUs of a node must read and write what its ranks update. Where activations are offloaded only model states are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from sim.pricing.prices import Prices
from sim.program import Kernel
from strategies.data_parallel.hook import Hook, hook_of
from strategies.job import Job
from strategies.lowering.optimizer_step import ZEROING, passes_of
from strategies.plan.resolved import Resolved
from strategies.planner.bounds.layer_cost_table import Floats, Kinds, kinds_of, numbered
from strategies.planner.bounds.layer_layout import Layout, Moments, layout_of, moments, splits, through
from strategies.planner.bounds.plan_features import columns
from strategies.planner.search.candidates import Candidates, candidates
from strategies.planner.search.space import Space
from strategies.schedules import schedules
from topologies.reading import UserError

TWICE = 2
SLACK = 1e-6  # kernels and sums are rounded otherwise than on the simulation's grid of time
MUCH = 1e12  # bytes of a pass, so many that its rate is what counts
HOLDING = ("kept", "whole", "gathered", "passing", "owed", "after loss")  # columns by which passes hold more or less
Ids = NDArray[np.int64]


@dataclass
class Bounds:
    """Of each plan, at least: seconds of a step, seconds until the first rank's last pass ends and of its update, bytes of the
    fullest rank. `possible`: its schedule can be made; `slower`: what it offloads is updated there in at least TWICE the time.
    """

    step: Floats
    first: Floats
    update: Floats
    memory: Floats
    possible: NDArray[np.bool_]
    slower: NDArray[np.bool_]
    reasons: dict[str, int]  # of plans that are not possible


def bounds(plans: Candidates, kinds: Kinds, prices: Prices) -> Bounds:
    """Bounds of every plan."""
    return _Bounding(plans, kinds, prices).result


def least(job: Job, prices: Prices) -> tuple[float, float]:
    """Seconds of a job's step and bytes of its fullest rank, at least. Raises UserError."""
    plans = candidates(job, Space(()))
    if not len(plans):
        raise UserError(next(iter(plans.examples.values())))
    every = bounds(plans, kinds_of(plans, prices), prices)
    return float(every.step[0]), float(every.memory[0])


def bounded(plan: Resolved) -> bool:
    """Whether its schedule makes its program, of microbatches that are all full."""
    return hook_of(plan.data_parallel).program is Hook.program and not plan.sequences_per_replica


def _groups(keys: Ids) -> Iterator[tuple[int, Ids]]:
    """Each value of `keys`, and where it is."""
    order = np.argsort(keys, kind="stable")
    values, start = np.unique(keys[order], return_index=True)
    yield from zip(values.tolist(), np.split(order, start[1:]), strict=True)


def _shape(plan: Resolved) -> tuple[object, ...]:
    """What plans have in common that are bounded at once."""
    schedule = plan.schedule, plan.pp, plan.microbatches, plan.chunks, plan.layers
    return *schedule, plan.hook.local, bounded(plan), plan.offload_activations is None


class _Bounding:
    """One evaluation: plans by the shape of their pipeline, and within it all at once."""

    def __init__(self, plans: Candidates, kinds: Kinds, prices: Prices) -> None:
        self.plans, self.kinds, self.prices = plans, kinds, prices
        count = len(plans)
        step, first, update, memory = np.zeros((4, count))
        possible, slower = np.ones(count, dtype=bool), np.zeros(count, dtype=bool)
        self.result = Bounds(step, first, update, memory, possible, slower, {})
        shapes, which = plans.each(_shape)
        of_rule = numbered(shapes)[1][which]
        self.shapes = [plans.resolved[rule] for rule in np.unique(of_rule, return_index=True)[1].tolist()]
        self.shape_of = of_rule[plans.rule] if count else plans.rule
        self.rules = columns(plans, prices.profile)
        self.in_turn = self.rules["in turn"][plans.rule] * (plans.column("overlap") == 0)
        held = np.stack([self.rules[name] for name in HOLDING])
        self.holdings, self.holding = np.unique(held, axis=1, return_inverse=True)  # the different ones, and which of each rule
        for shape, members in _groups(self.shape_of):
            if bounded(self.shapes[shape]):
                self._bound(self.shapes[shape], members)

    def _bound(self, plan: Resolved, members: Ids) -> None:
        layout, pp, m = layout_of(plan), plan.pp, plan.microbatches
        copies = schedules[plan.schedule].copies
        by_rank = {rank: moments(plan.schedule, rank, pp, m, plan.chunks) for rank in sorted({0, layout.fullest, pp - 1})}
        wrong = next((text for text in by_rank.values() if isinstance(text, str)), None)
        if wrong is not None:
            self.result.possible[members] = False
            self.result.reasons[wrong] = self.result.reasons.get(wrong, 0) + len(members)
            return
        kinds, of = np.unique(self.kinds.of[members], return_inverse=True)
        chosen = [self.kinds.kinds[kind] for kind in kinds.tolist()]
        time = layout.times(chosen)
        elements, experts = layout.quantity("parameters", chosen), layout.quantity("experts", chosen)
        own = elements - experts  # without the embedding's matrix that the head uses
        if pp > 1 and layout.last not in layout.stages[0] and copies == 1:
            elements[:, -1] += [kind.tied for kind in chosen]
        rule = {name: column[self.plans.rule[members]] for name, column in self.rules.items()}
        self._step(plan, layout, members, of, rule, time, elements, experts)
        spaces = {name: layout.quantity(name, chosen) for name in ("saved", "held", "frozen")}
        spaces |= {name: layout.workspace(name, chosen) for name in ("forward", "backward", "passing")}
        if plan.offload_activations:  # how many are on the GPU depends on how soon copies end
            spaces = {name: value if name == "frozen" else np.zeros_like(value) for name, value in spaces.items()}
        spaces |= {"last": layout.last_part(chosen), "own": own}
        spaces |= {"dense": elements - experts, "experts": experts}
        versions = schedules[plan.schedule].versions
        for rank, starts in by_rank.items():
            assert isinstance(starts, Moments)
            held = {name: value[:, list(layout.stages[rank])] for name, value in spaces.items()}
            self._memory(members, of, rule, starts, held, versions(rank, pp) if versions else 1)

    def _step(
        self,
        plan: Resolved,
        layout: Layout,
        members: Ids,
        of: Ids,
        rule: dict[str, Floats],
        time: dict[str, Floats],
        elements: Floats,
        experts: Floats,
    ) -> None:
        flowing = not schedules[plan.schedule].versions and not plan.hook.local
        split = splits(plan.schedule, plan.pp, plan.microbatches, plan.chunks)
        mine, passes = list(layout.stages[0]), through(plan)
        anywhere, first, own = compute(passes, layout, time, split, flowing)
        in_turn = self.in_turn[members]
        dense, spread = (elements - experts)[:, mine][of], experts[:, mine][of]
        alone = rule["dense alone"][:, None] * dense + rule["experts alone"][:, None] * spread  # of the quickest group
        # seconds, of each chunk, once for a byte: of all groups of a node, unless these are not played at the same time
        crossing = rule["dense"][:, None] * dense + rule["experts"][:, None] * spread
        crossing = np.where(rule["unlike"][:, None] > 0, alone, crossing)
        step = np.maximum(anywhere[of], crossing.sum(axis=1) * (rule["moved"] + rule["last"]))
        end = first[of]
        if flowing:
            last = time["weight" if split else "backward"][:, mine][of]
            late = (crossing * (rule["moved"] * rule["late"])[:, None] - last * (1 - in_turn)[:, None]).min(axis=1)
            updated, zeroed = (
                dense.sum(axis=1) / shards + spread.sum(axis=1) / np.maximum(1, shards // rule["ep"])
                for shards in (rule["updated"], rule["zeroed"])
            )
            update, hosted = self._updates(members, updated, zeroed), rule["host"] * updated
            self.result.slower[members] = (hosted == 0) | (hosted >= TWICE * update)
            update = np.where(hosted > 0, hosted, update)
            self.result.first[members], self.result.update[members] = first[of], update
            late = np.maximum(0, late)  # of several chunks, one may be updated while gradients of another are reduced
            end = first[of] + (late + update if plan.chunks == 1 else np.maximum(late, update)) + crossing[:, -1] * rule["last"]
            step = np.maximum(step, first[of] + crossing.sum(axis=1) * rule["last"])
            exchange = alone.sum(axis=1) * (rule["moved"] + rule["last"])
            step = np.maximum(step, in_turn * (own[of] + exchange + (update if plan.chunks == 1 else 0.0)))
        self.result.step[members] = np.maximum(step, end) * (1 - SLACK)

    def _memory(
        self, members: Ids, of: Ids, rule: dict[str, Floats], starts: Moments, spaces: dict[str, Floats], versions: int
    ) -> None:
        """Memory of a rank. of: the kind of each member; spaces: of each kind, by chunk of the rank."""
        holding, count = self.holding[self.plans.rule[members]], self.holdings.shape[1]
        alike, which = np.unique(of * count + holding, return_inverse=True)  # members of a kind that hold the same
        total = self._most(starts, {name: value[alike // count] for name, value in spaces.items()}, alike % count)[which]
        parameter, gradient, optimizer = self._widths[members, :3].T
        dense, spread = spaces["dense"].sum(axis=1)[of], spaces["experts"].sum(axis=1)[of]
        for state, width in (
            ("parameter", parameter * versions),
            ("gradient", gradient),
            ("optimizer", optimizer + rule["outer"]),
        ):
            total += width * (dense / rule[state] + spread / np.maximum(1, rule[state] // rule["ep"]))
        total += spaces["frozen"].sum(axis=1)[of] / rule["parameter"]
        overhead = self.prices.profile.overhead
        total += rule["reserve"] * overhead.reserve * total + overhead.context + rule["communicators"] * overhead.communicator
        self.result.memory[members] = np.maximum(self.result.memory[members], total * (1 - SLACK))

    def _most(self, starts: Moments, spaces: dict[str, Floats], holding: Ids) -> Floats:
        """The most that plans with these spaces hold besides their states; holding: numbers of `holdings`."""
        rule = dict(zip(HOLDING, self.holdings[:, holding, None], strict=True))
        kept = rule["kept"] * rule["gathered"] * spaces["dense"]  # gathered, not released
        whole = rule["whole"] * (1 - rule["kept"]) * rule["gathered"] * spaces["last"]
        with_gradients = np.where(rule["passing"] > 0, spaces["passing"], spaces["backward"])
        makes = starts.makes
        if rule["owed"].any():  # passes add to the gradients of those before
            makes = makes & (rule["owed"] * starts.owed[np.arange(len(makes)), starts.chunk] == 0)
        back = np.where(makes, with_gradients[:, starts.chunk], spaces["backward"][:, starts.chunk])
        early = whole * (1 - rule["after loss"])  # when a backward pass begins
        space = np.where(starts.forward, (spaces["forward"] + whole)[:, starts.chunk], back + early[:, starts.chunk])
        if rule["owed"].any():
            space += (rule["owed"] * spaces["own"]) @ starts.owed.T
        most: Floats = (spaces["saved"] @ starts.saved.T + kept @ starts.there.T + spaces["held"] @ starts.held.T + space).max(
            axis=1
        )
        return most

    def _updates(self, members: Ids, updated: Floats, zeroed: Floats) -> Floats:
        """Seconds of the optimizer's passes over so many parameters, by their bytes, without what blocks of an update wait."""
        fixed, update, zeroing = self._widths[members, 3:].T
        result: Floats = fixed + update * updated + zeroing * zeroed
        return result

    def _pass(self, name: str, size: float) -> float:
        """Seconds of one of the optimizer's passes."""
        return self.prices.seconds(Kernel("optimizer", name, "optimizer", 0.0, size, "fp32"))

    @cached_property
    def _widths(self) -> Floats:
        """Of each plan: bytes per parameter of weight, gradient and optimizer states; seconds of an update of nothing, and more
        for each parameter that is updated, and for each gradient that is set to zero.
        """
        rows, which = self.plans.each(lambda plan: (*plan.bytes_that_stay.values(), *self._prices_of(tuple(passes_of(plan)))))
        result: Floats = np.array(rows, dtype=np.float64).reshape(-1, 6)[which][self.plans.rule]
        return result

    def _prices_of(self, passes: tuple[tuple[str, float], ...]) -> tuple[float, float, float]:
        """The last three of `_widths`."""
        fixed = {name: self._pass(name, 0.0) for name, _ in passes}
        each = {name: moved * (self._pass(name, MUCH) - fixed[name]) / MUCH for name, moved in passes}
        zeroing = each.pop(ZEROING, 0.0)
        return sum(fixed.values()), sum(each.values()), zeroing


def compute(
    microbatches: int, layout: Layout, time: dict[str, Floats], split: bool, flowing: bool
) -> tuple[Floats, Floats, Floats]:
    """(end of the last pass on any rank, end of the last on the first rank, time of all passes of the first rank), at least;
    seconds, for each row of `time`'s (kinds, stages).
    """
    forward, back = time["forward"], time["input"] + time["weight"] if split else time["backward"]
    anywhere = first = own = np.zeros(len(forward))
    for rank, mine in enumerate(map(list, layout.stages)):
        before = slice(0, min(mine))
        work = microbatches * (forward[:, mine] + back[:, mine]).sum(axis=1)
        if flowing:
            fill = forward[:, before].sum(axis=1)
            drain = (time["input"] if split else back)[:, before].sum(axis=1)
            inputs = work - microbatches * time["weight"][:, mine].sum(axis=1) if split else work
            anywhere = np.maximum(anywhere, fill + work)
            first = np.maximum(first, fill + inputs + drain)
        else:
            anywhere = np.maximum(anywhere, work)
        if rank == 0:
            own, first = work, np.maximum(first, work)
    return np.maximum(anywhere, first), first, own
