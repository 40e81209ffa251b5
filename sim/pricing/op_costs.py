"""Costs of ops without contention: blocks fused to three numbers, collectives and sends as `sim.pricing.transfers` has them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple, Self

import numpy as np

from sim.analysis.notes import joined
from sim.clock import on_grid
from sim.collectives import Ids
from sim.op_index import UPDATE
from sim.pricing.block_costs import BlockCost, chained, fused
from sim.pricing.prices import Extrapolation, Prices, Profile
from sim.pricing.transfers.collective_costs import CollectiveCosts
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.program import SIDE_STREAM, Block, Collective, Item, Join, Kernel, Program, Send, SharedItems, Start
from sim.remembered import kept
from topologies.links.impaired import nominal
from topologies.links.topology import Topology, gpu_kind, is_unequal

FACTOR = 1.125  # at which blocks are priced to know how their seconds grow with that of their kernels
SPLIT = "pp/weight_gradient"  # what stands in a profile's `wrapping` for the second half of a split backward pass
REMEMBERED = 4096  # prices of blocks, and of runs of items
PYTHON = ("forward", "recompute")  # phases whose kernels Python modules launch
# Host seconds of what Python modules do besides launching: medians of seven rounds of 2,000 calls on a server's CPU (AMD EPYC,
# torch 2.13). Generators were the CPU's; a GPU's, too, has its state in the host's memory (ATen's CUDAGeneratorImpl).
CALLS = {
    # two states got and two set around a random kernel, in a context manager (megatron/mpu/random.py, CudaRNGStatesTracker.fork)
    "generator fork": 4.7e-6,
    # an autograd function that keeps and restores generators and runs autograd inside of itself (CheckpointFunction there and in
    # deepspeed/runtime/activation_checkpointing): 87 us around one product, of which 26 and 5 are its passes and its repetition
    "checkpoint": 56e-6,
}
# What kernels take that neither a module nor the gradient of one launches, as parts of what `Profile.eager` has over
# `Profile.launch`: where a launch of Megatron-LM's modules took 23 us (`python -m calibration.measure.launches`).
LAUNCHERS = {
    # autograd adds a gradient to the one that is there (AccumulateGrad): 1 to 3 us
    "accumulation": 0.0,
    # a hook in Python adds it to a buffer (main_grad.add_ in megatron/model/distributed.py): 4.3 to 5.6 us
    "hook": 1 / 3,
    # a function in Python calls an operator by itself, as the steps of a loss or of a batch: half a module's
    "operator": 0.8,
}
VIEW = 2e-6  # host seconds for a view made in Python: 2.1 us of narrow, append and get_rank (torch 2.13, on a server's CPU)

# Seconds until a kernel that is launched on an idle GPU starts, and until the host knows that it has ended: on a V100 kernels of
# 2.9 us take 3.8 us each in a row and 9.6 us where the host waits for each (developer.nvidia.com/blog/cuda-graphs).
ROUND_TRIP = 9.6e-6 - 3.8e-6 - 2.9e-6

Outside = dict[str, Extrapolation]  # by kind: the farthest


class Where(NamedTuple):
    """Whose prices a block has: those of a cohort's ranks, or of one rank, and with lanes its place among its cohort's ranks;
    clock: part of its clock at which the GPU runs.
    """

    cohort: int
    rank: int = -1
    place: int = -1
    clock: float = 1.0


class OpCosts(CollectiveCosts):
    """Prices of one program on one topology; each distinct piece of work is priced once."""

    def __init__(self, program: Program, topology: Topology, prices: Prices, lane: Ids | None = None) -> None:
        super().__init__(program, topology, prices, lane)
        self.unequal = is_unequal(nominal(topology))  # nodes are not alike
        self._blocks: dict[tuple[Block, Where, float], BlockCost] = {}
        self._slower: dict[tuple[int, float], BlockCost] = {}  # by the usual cost, an object of `_blocks`
        self._growth: dict[int, tuple[float, float]] = {}  # by the usual cost
        self._alone: dict[Where, dict[Collective, float]] = {}
        self._outside: Outside = {}

    @property
    def every_note(self) -> list[str]:
        """Caveats of these prices, for the reader; of kernels outside of what was measured one of a kind, the farthest first."""
        outside = sorted(self._outside.values(), key=lambda each: -each.far)
        return [*joined(self.notes), *(each.note for each in outside)]

    def under(self, prices: Prices) -> Self:
        """See `CollectiveCosts.under`."""
        other = super().under(prices)
        other._forget()
        if all(each.blocks is usual.blocks for each, usual in zip(prices.members, self.prices.members, strict=True)):
            other._blocks = {key: cost for key, cost in self._blocks.items() if not key[0].meetings}  # of kernels alone
        return other

    def _forget(self) -> None:
        """Price blocks anew."""
        self._blocks, self._slower, self._growth, self._alone, self._outside = {}, {}, {}, {}, {}

    def on(self, rank: int) -> Prices:
        """The prices of a rank's GPU."""
        members = self.prices.members
        return members[int(gpu_kind(self.topology, np.array([rank]))[0])] if len(members) > 1 else self.prices

    def _where(self, cohort: int, rank: int, clock: float = 1.0) -> Where:
        """Whose prices a block on a rank has: all ranks of its cohort have the same where all nodes are alike."""
        if rank < 0 or not self.unequal:
            return Where(cohort, clock=clock)
        if self.lane is None:
            return Where(cohort, rank, clock=clock)
        ranks = self.grid.groups((), dict(self._at[cohort])).ravel()
        return Where(cohort, rank, int(np.searchsorted(ranks, rank)), clock)

    def block(self, block: Block, cohort: int, factor: float = 1.0, rank: int = -1, clock: float = 1.0) -> BlockCost:
        """`block` as one sequence, its collectives at their price without contention, on a rank (−1: the first kind of GPU).
        factor: by which kernels take longer; clock: part of its clock at which the GPU runs.
        """
        where = self._where(cohort, rank, clock)
        key = (block, where, factor)
        cost = self._blocks.get(key)
        if cost is None:
            if factor == 1.0:
                cost = self._chained(block, where, factor)
            else:  # stages with runs of one price have them of one price when kernels take longer, too
                alike = id(self.block(block, cohort, rank=rank, clock=clock)), factor
                cost = self._slower[alike] = self._slower.get(alike) or self._chained(block, where, factor)
            self._blocks[key] = cost
        return cost

    def growth(self, block: Block, usual: BlockCost, cohort: int, rank: int = -1) -> tuple[float, float]:
        """By how much `busy` and `critical` of a block grow when its kernels take twice as long. usual: its cost; blocks of one
        price share it.
        """
        known = self._growth.get(id(usual))
        if known is None:
            slower = self._chained(block, self._where(cohort, rank), FACTOR)
            more = FACTOR - 1
            known = self._growth[id(usual)] = (slower.busy - usual.busy) / more, (slower.critical - usual.critical) / more
        return known

    def _chained(self, block: Block, where: Where, factor: float) -> BlockCost:
        """A block where its collectives take so long: one price for stages, and plans, that have it."""
        prices = self._prices(where)
        equal = self._priced_by(block, block.meetings, where, factor)
        known = prices.blocks.get(equal)
        if known is None:
            known = kept(prices.blocks, equal, self._in_a_row(block, where, factor), REMEMBERED)
        _add_farther(self._outside, known[1].values())
        cost: BlockCost = known[0]
        return cost

    def _in_a_row(self, block: Block, where: Where, factor: float) -> tuple[BlockCost, Outside]:
        """The runs of a block one after the other, and notes on them; blocks whose runs have one price share it."""
        runs, outside, prices = [], Outside(), self._prices(where)
        graphed = self.program.graphed and block.name != UPDATE
        for times, items in block.runs:
            once, notes = self._items(items, where, factor, graphed)
            runs.append((times, once))
            _add_farther(outside, notes.values())
        alike = tuple((times, id(once)) for times, once in runs)
        known = prices.chains.get(alike) or kept(prices.chains, alike, (runs, chained(runs)), REMEMBERED)
        return known[1], outside

    def _items(self, items: SharedItems, where: Where, factor: float, graphed: bool) -> tuple[BlockCost, Outside]:
        """One run of `items`, and notes on them; layers share theirs, and so do stages whose collectives take as long. graphed:
        whether a CUDA graph launches them.
        """
        prices = self._prices(where)
        equal = self._priced_by(items, items.collectives, where, factor), graphed
        known = prices.runs.get(equal)
        if known is None:
            outside = prices.outside.get(items)
            if outside is None:
                outside = kept(prices.outside, items, _outside(items, prices), REMEMBERED)
            known = kept(prices.runs, equal, (self._play(items, where, factor, graphed), outside), REMEMBERED)
        return known

    def _priced_by(self, work: Block | SharedItems, inside: tuple[Collective, ...], where: Where, factor: float) -> Hashable:
        """What the price of a block, or of one run of items, follows from, besides what kernels and launches take. inside: its
        collectives.
        """
        program = self.program
        habits = program.eager, program.launching, program.threads, program.blocking, program.graphed
        slowdown = self._prices(where).profile.slowdown if work.beside else 1.0
        return work, factor, self._alone_inside(inside, where), slowdown, habits

    def _alone_inside(self, works: tuple[Collective, ...], where: Where) -> tuple[float, ...]:
        """Seconds of each collective without contention."""
        known = self._alone.setdefault(where, {})
        for work in works:
            if work not in known:
                known[work] = self._inside_block(work, where).alone
        return tuple(map(known.__getitem__, works))

    def _prices(self, where: Where) -> Prices:
        prices = self.prices.members[0] if where.rank < 0 else self.on(where.rank)
        return prices if where.clock == 1 else prices.at_clock(where.clock)

    def _inside_block(self, work: Collective, where: Where) -> TransferCost:
        """A collective that the rank's block waits for: of its own group, where groups are on GPUs of several kinds."""
        group = int(self.groups(work, where.cohort)[where.place]) if where.place >= 0 else -1
        return self.collective(work, where.cohort, group)

    def _play(self, items: SharedItems, where: Where, factor: float, graphed: bool) -> BlockCost:
        prices = self._prices(where)
        profile = prices.profile
        ahead = 0.0 if graphed else self.launching(profile)
        wrapping = [0.0 if graphed else self.wrapping(item, prices) for item in items]
        if profile.synchronous or self.program.blocking:  # the host's work is the item's own
            each, slower = ahead, 1.0
            if profile.synchronous:  # by the core that computes, which is as slow then
                each, slower = profile.launch, factor / where.clock
            wrapping, each = [more * slower for more in wrapping], each * slower
            works = [(item, self._seconds(item, where, factor, each + more)) for item, more in zip(items, wrapping, strict=True)]
            return fused(works, 0.0, profile.slowdown)
        started = (item.collective for item in items if isinstance(item, Start) and item.collective.sms is not None)
        slowing = {work: prices.slowing(work) or 1.0 for work in started}
        return fused([(item, self._seconds(item, where, factor)) for item in items], ahead, profile.slowdown, wrapping, slowing)

    def launching(self, profile: Profile) -> float:
        """Host seconds of a module's launch; where it waits for each kernel, also those in which neither it nor the GPU does
        anything.
        """
        waits = self.program.blocking and not profile.synchronous
        return on_grid(profile.launching(self.program.eager) + (ROUND_TRIP if waits else 0.0))

    def _seconds(self, item: Item, where: Where, factor: float, extra: float = 0.0) -> float:
        """Seconds of an item by itself. factor: by which a kernel takes longer; extra: seconds besides."""
        if isinstance(item, Kernel):
            prices = self._prices(where)
            return on_grid(prices.seconds(item) * factor + extra)
        if isinstance(item, Join):
            return 0.0
        return on_grid(self._inside_block(item.collective if isinstance(item, Start) else item, where).alone + extra)

    def wrapping(self, item: Item | Send, prices: Prices | None = None) -> float:
        """Host seconds that PyTorch adds to the launch of a collective when it is started: Python and c10d, what a wrapper does,
        and to a list a view and a copy per piece. To that of a weight's gradient by itself a call of autograd; the further
        launches of a call that has several; and what a framework's modules, or its pipeline, do around a kernel (`CALLS`, or
        measured). Less than nothing where a kernel's launch takes less than a module's.
        """
        work = item.collective if isinstance(item, Start) else item
        profile = (prices or self.prices).profile
        if isinstance(work, Kernel):
            python = self._in_python(work, profile)
            waits = python - profile.interpreted(self.program.eager) + self._others(work, profile, python)
            if not (work.kept or work.calls or waits or work.launches > 1):
                return 0.0
            split, called = (profile.wrapping.get(name) for name in (SPLIT, work.calls))
            more = split.seconds(work.kept) if split and work.kept else 0.0
            more += (work.launches - 1) * profile.launch
            return on_grid(more + (called.fixed if called else CALLS.get(work.calls, 0.0)) * self.program.threads + waits)
        if not isinstance(work, Collective):
            return 0.0
        measured = profile.wrapping.get(f"{work.axis}/{work.operation}")
        listed = profile.calling(self.program.eager) if self.program.threads == 1 else 0.0  # by C++ there, not by c10d
        if work.pieces:
            listed += work.pieces * (VIEW + profile.launch)
        return on_grid((measured.seconds(work.bytes) + listed if measured else listed) * work.repeat)

    def _in_python(self, kernel: Kernel, profile: Profile) -> float:
        """Host seconds of a kernel's launch in which Python or autograd runs."""
        whole = profile.interpreted(self.program.eager)
        if not (self.program.eager and profile.eager) or profile.synchronous:
            return whole
        if kernel.launcher:
            return whole * LAUNCHERS[kernel.launcher]
        forward, backward = self.program.launching
        return whole * (forward if kernel.phase in PYTHON else backward if kernel.phase == "backward" else 1.0)

    def _others(self, kernel: Kernel, profile: Profile, python: float) -> float:
        """Host seconds that a launch takes longer as the Python of other threads runs meanwhile. Only in passes that Python runs:
        autograd's threads, one for each GPU, do without (torch/csrc/autograd/python_engine.cpp). python: `_in_python`.
        """
        if self.program.threads == 1 or kernel.phase not in PYTHON or profile.synchronous:
            return 0.0
        eager = self.program.eager
        alone = profile.launching(eager) - profile.interpreted(eager) + python
        return max(0.0, self.program.threads * python - alone)

    @property
    def links(self) -> frozenset[int]:
        """Links of the wiring that the program uses."""
        every = (priced for work, cohort, _, _ in self._communications for priced in self.each(work, cohort))
        return frozenset(link for priced in every for link in priced.links)

    def touched(self, others: frozenset[int] = frozenset()) -> set[int]:
        """Cohorts whose blocks contain collectives on links that other traffic may use at the same time: they must be played
        item by item. others: links that other jobs use.

        Collectives inside blocks of one cohort run one after the other, on its compute stream or its side stream, and cannot
        meet each other, except on another side stream. Links that change while the step runs are like those with other traffic.
        """
        number = {at: number for number, at in enumerate(self._at)}
        place = [number[at] for at in self._at]  # equal for cohorts that share their ranks, which have their own groups each
        users: dict[int, set[tuple[int, str, int]]] = {}  # by link
        for work, cohort, inside, _ in self._communications:
            for kind, priced in enumerate(self.each(work, cohort)):
                for link in priced.links:
                    users.setdefault(link, set()).add((place[cohort], inside, kind))
        shared = [uses for link, uses in users.items() if len(uses) > 1 or self.wiring.varying[link] or link in others]
        where = {each for uses in shared for each, inside, _ in uses if inside}
        return {cohort for cohort, each in enumerate(place) if each in where}

    def inside(self, block: Block, cohort: int) -> list[tuple[TransferCost, str]]:
        """The distinct collectives of a block, each with the stream that it is on or keeps in step with."""
        return [(self.collective(work, cohort), block.beside.get(work, SIDE_STREAM)) for work in block.meetings]

    def divided(self, lane: Ids) -> set[int]:
        """Cohorts whose blocks contain collectives that do not take as long for all, or to which ranks of several lanes come:
        they must be played item by item. Where nodes are not alike each lane's blocks are priced by its own groups.
        """
        result = set()
        for work, cohort, inside, _ in self._communications:
            if inside and cohort not in result:
                group = self.groups(work, cohort)
                first = np.zeros(int(group.max()) + 1, np.int64)
                first[group] = lane
                unlike = len(self.kinds(work, cohort)) > 1 and not self.unequal
                if unlike or (first[group] != lane).any():
                    result.add(cohort)
        return result


def _outside(items: SharedItems, prices: Prices) -> Outside:
    """Kernels that are outside of what was measured."""
    result: Outside = {}
    found = (prices.extrapolation(item) for item in items if isinstance(item, Kernel))
    _add_farther(result, (each for each in found if each is not None))
    return result


def _add_farther(known: Outside, others: Iterable[Extrapolation]) -> None:
    for each in others:
        if each.kind not in known or each.far > known[each.kind].far:
            known[each.kind] = each
