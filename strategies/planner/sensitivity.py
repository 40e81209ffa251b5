"""Which price moves an answer: a job is played again with one price changed, everything else as it was.

Times are scaled, not efficiencies: `gemm` at 1.1 makes every matrix product 10 % longer, `bandwidth inside nodes` at 1.1 the
transfers on every NVLink. One rule for algorithms and protocols of collectives: what asks how wrong a price may be (`swings`,
intervals) keeps them as they were chosen, because a library does not know of our errors; what asks for other hardware (`faster`,
as `strategies.planner.whatif`) chooses them anew, because a library would.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from sim.analysis.link_load import link_kinds
from sim.analysis.summary import wait_for_slower
from sim.engine.player import run
from sim.pricing.fleet_prices import FleetPrices
from sim.pricing.prices import Prices, Profile
from sim.pricing.transfers.protocols import BETWEEN
from sim.program import Block, Kernel
from strategies.schedules import schedules
from topologies.links.topology import kind_of_link

if TYPE_CHECKING:
    from sim.pricing.transfers.protocols import LinkPrice
    from sim.timeline import Timeline
    from strategies.job import Job

INSIDE = ("nvlink", "pcie", "host", "loopback")


@dataclass(frozen=True)
class Price:
    """A group of prices that are wrong together. kernels: whose seconds it scales; profile: how it scales a profile; launches,
    transfers: whether it changes what the host takes to launch, and what collectives and sends take and slow down.
    """

    name: str
    kernels: frozenset[str] = frozenset()
    profile: Callable[[Profile, float], Profile] | None = None
    launches: bool = False
    transfers: bool = False


@dataclass(frozen=True)
class PriceSwing:
    """What one price does to a step: seconds of the step with the price divided and multiplied by `factor`."""

    name: str
    factor: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Seconds between the two."""
        return abs(self.high - self.low)


def group_of(kernel: Kernel) -> str:
    """The price group of a kernel; whatever is bound by memory traffic is `memory`."""
    kind = kernel.kind
    return "attention" if kind.startswith("attention") else kind if kind in ("gemm", "optimizer") else "memory"


def _bandwidth(kinds: tuple[str, ...]) -> Callable[[Profile, float], Profile]:
    return lambda profile, factor: _links(profile, kinds, {"efficiency": 1 / factor})


def _latency(kinds: tuple[str, ...]) -> Callable[[Profile, float], Profile]:
    return lambda profile, factor: _links(profile, kinds, {"latency": factor, "fill": factor})


def _links(profile: Profile, kinds: tuple[str, ...], factors: Mapping[str, float]) -> Profile:
    """A profile whose links of these kinds, under every protocol, have fields multiplied."""

    def times(price: LinkPrice) -> LinkPrice:
        return price.model_copy(update={name: getattr(price, name) * by for name, by in factors.items()})

    def scaled(links: Mapping[str, LinkPrice]) -> dict[str, LinkPrice]:
        return {kind: times(price) if kind in kinds else price for kind, price in links.items()}

    protocols = {
        name: protocol.model_copy(update={"links": scaled(protocol.links)}) for name, protocol in profile.protocols.items()
    }
    rings = {name: times(price) for name, price in profile.rings.items()} if "nic" in kinds else profile.rings
    return profile.model_copy(update={"links": scaled(profile.links), "protocols": protocols, "rings": rings})


def _start(profile: Profile, factor: float) -> Profile:
    protocols = {
        name: protocol.model_copy(update={"base": protocol.base * factor}) for name, protocol in profile.protocols.items()
    }
    return profile.model_copy(update={"collective_launch": profile.collective_launch * factor, "protocols": protocols})


PRICES = (
    Price("kernels", frozenset({"gemm", "attention", "memory", "optimizer"})),
    Price("clock", frozenset({"gemm", "attention"})),
    Price("gemm", frozenset({"gemm"})),
    Price("attention", frozenset({"attention"})),
    Price("memory", frozenset({"memory"})),
    Price("optimizer", frozenset({"optimizer"})),
    Price(
        "launch",
        profile=lambda profile, factor: profile.model_copy(
            update={name: getattr(profile, name) * factor for name in ("launch", "eager", "collective_call")}
        ),
        launches=True,
    ),
    Price(
        "slowdown",
        profile=lambda profile, factor: profile.model_copy(update={"slowdown": 1 + (profile.slowdown - 1) * factor}),
        transfers=True,
    ),
    Price("bandwidth inside nodes", profile=_bandwidth(INSIDE), transfers=True),
    Price("latency inside nodes", profile=_latency(INSIDE), transfers=True),
    Price("bandwidth between nodes", profile=_bandwidth(BETWEEN), transfers=True),
    Price("latency between nodes", profile=_latency(BETWEEN), transfers=True),
    Price("collective start", profile=_start, transfers=True),
)


class _Scaled(Prices):
    """`base` with the seconds of some kernels, and some of the profile, multiplied. anew: collectives are chosen by these."""

    def __init__(self, base: Prices, price: Price, factor: float, anew: bool) -> None:
        super().__init__(price.profile(base.profile, factor) if price.profile else base.profile, base.gpu)
        self._base, self._price, self._factor = base, price, factor
        if not anew:
            self.choices = base.choices
        self.outside = base.outside
        if not price.kernels:
            self.seconds = base.seconds
            if not price.launches:  # blocks are remembered by what their collectives take and slow down
                self.blocks, self.runs, self.chains = base.blocks, base.runs, base.chains
        if not price.transfers:
            self.transfers = base.transfers

    def _seconds(self, kernel: Kernel) -> float:
        return self._base.seconds(kernel) * (self._factor if group_of(kernel) in self._price.kernels else 1.0)

    def at_clock(self, clock: float) -> Prices:
        """`base` at a part of the clock, with as much multiplied."""
        return scaled(self._base.at_clock(clock), self._price, self._factor)


def scaled(base: Prices, price: Price, factor: float, kind: int | None = None) -> Prices:
    """`base` with one price multiplied, of GPUs of several kinds that of one kind (None: of all); it remembers what it has worked
    out, and steps share it.
    """
    key = price.name, factor, kind
    if key not in base.scaled:
        base.scaled[key] = _scaled(base, price, factor, kind)
    return base.scaled[key]


def _scaled(base: Prices, price: Price, factor: float, kind: int | None = None, anew: bool = False) -> Prices:
    members = base.members
    if len(members) == 1:
        return _Scaled(base, price, factor, anew)
    times = partial(_scaled, anew=True) if anew else scaled
    several = [times(each, price, factor) if kind in (None, number) else each for number, each in enumerate(members)]
    fleet = FleetPrices(several)
    if not anew:
        fleet.choices = base.choices
    return fleet


class Play:
    """A job lowered once and played under many prices.

    A step of many microbatches is longer by the same time for each more: then two short ones are played, of m₁ and m₂
    microbatches, and the step is step(m₂) + (m − m₂)·(step(m₂) − step(m₁))/(m₂ − m₁).

    expected: GPUs of one kind differ as in `predict`, whose step is then the one under the job's own prices; otherwise they are
    alike. Prices of GPUs of several kinds are moved together.
    """

    def __init__(self, job: Job, prices: Prices, expected: bool = False) -> None:
        from strategies.lowering.lower import lower
        from strategies.predict import predict, variability_of

        self.prices, self.topology = prices, job.cluster.topology()
        pairs = [(weight, lower(brief.model, brief.resolve())) for weight, brief in _brief(job)]
        self.programs = [(weight, program) for weight, program in pairs if weight]
        self.effects, self._differ = job.effects, variability_of(job, prices) if expected else ()
        self.timelines = [run(program, self.topology, prices, effects=self.effects) for _, program in self.programs]
        self._base = [self._step(timeline) for timeline in self.timelines]
        self._scale = predict(job).step_seconds / self._sum(self._base) if any(self._differ) else 1.0

    @classmethod
    def of(cls, job: Job, expected: bool = False) -> Play:
        """The job under its own prices. Raises UserError."""
        from strategies.predict import prices_of

        return cls(job, prices_of(job), expected)

    @property
    def seconds(self) -> float:
        """Seconds of a step under the job's own prices."""
        return self._total(self._base)

    def at(self, price: Price, factor: float, anew: bool = False) -> float:
        """Seconds of a step with one price multiplied; anew: collectives are chosen by what they cost then."""
        scaled = _scaled(self.prices, price, factor, anew=anew)
        return self._total(
            [self._step(run(program, self.topology, scaled, effects=self.effects)) for _, program in self.programs]
        )

    def _step(self, timeline: Timeline) -> float:
        """Seconds of all that was played, with what it waits for slower GPUs where that is asked for and can be said."""
        timeline.variability = self._differ
        wait, _ = wait_for_slower(timeline)
        return timeline.step + (timeline.program.steps * wait.seconds if wait else 0.0)

    def _total(self, steps: Sequence[float]) -> float:
        return self._scale * self._sum(steps)

    def _sum(self, steps: Sequence[float]) -> float:
        return sum(weight * step / program.steps for (weight, program), step in zip(self.programs, steps, strict=True))

    def swings(self, factors: Mapping[str, float]) -> list[PriceSwing]:
        """What each price does when divided and multiplied by its factor; the strongest first, without those that do nothing."""
        swings = []
        for price in self.relevant():
            if price.name in factors:
                by = factors[price.name]
                swings.append(PriceSwing(price.name, by, self.at(price, 1 / by), self.at(price, by)))
        return sorted((swing for swing in swings if swing.width), key=lambda swing: -swing.width)

    def faster(self, by: float) -> list[tuple[str, float]]:
        """Seconds of a step when one thing is `by` times as fast: kernels, launches, latencies, each kind of link, all of them
        inside nodes or between. A kind of link that is the only one of its group is listed once. Collectives are chosen anew.
        """
        kinds = sorted({kind_of_link(kind) for timeline in self.timelines for kind in link_kinds(timeline)})
        single = [Price(kind, profile=_bandwidth((kind,)), transfers=True) for kind in kinds]
        every = [price for price in self.relevant() if price.name not in ("kernels", "clock", "slowdown")]
        grouped = {price.name: self.at(price, 1 / by, anew=True) for price in every}
        alone = {price.name: self.at(price, 1 / by, anew=True) for price in single}
        return [*grouped.items(), *((name, step) for name, step in alone.items() if step not in grouped.values())]

    def relevant(self) -> Iterable[Price]:
        """Prices of which the program has something to pay."""
        kinds = {kind for timeline in self.timelines for kind in link_kinds(timeline)}
        return relevant(kernels_of(self.timelines[-1]), kinds)


def relevant(kernels: Iterable[Kernel], links: Collection[str]) -> Iterator[Price]:
    """Prices of which a step of these kernels has something to pay, whose transfers are on links of these kinds."""
    kinds = {kind_of_link(kind) for kind in links}
    groups = {group_of(kernel) for kernel in kernels}
    for price in PRICES:
        if price.kernels:
            if price.kernels & groups:
                yield price
        elif price.name.endswith("between nodes"):
            if kinds & set(BETWEEN):
                yield price
        elif price.name == "launch" or links:
            yield price


def _brief(job: Job) -> list[tuple[float, Job]]:
    """The job itself, or two with few microbatches whose weighted sum is its step."""
    from strategies.predict import SETTLED

    resolved = job.resolve()
    schedule, ranks = schedules[resolved.schedule], resolved.pp
    period = ranks * -(-SETTLED // ranks)  # a host that is slower than the GPU is ahead of it in the first microbatches
    short, longer = schedule.settled * period, (schedule.settled + 1) * period
    if resolved.dealt or resolved.microbatches <= short + longer or resolved.local_steps > 1 or schedule.microbatches:
        return [(1.0, job)]
    rest = (resolved.microbatches - longer) / (longer - short)
    return [(-rest, _with(job, short)), (1 + rest, _with(job, longer))]


def _with(job: Job, microbatches: int) -> Job:
    return replace(job, plan=job.plan.model_copy(update={"global_batch": None, "accumulation": microbatches}))


def kernels_of(timeline: Timeline, kind: int | None = None) -> dict[Kernel, float]:
    """Seconds that each distinct kernel takes in a step, on all lanes together. kind: on those whose GPUs are of that kind."""
    members = timeline.op_costs.prices.members
    numbers, seconds = dict[Kernel, int](), list[float]()
    priced: dict[Prices, dict[int, tuple[int, float]]] = {}  # by object: a hash of its value takes long
    for lane, _, op, times in timeline.distinct:
        if isinstance(op.work, Block):
            prices = timeline.prices(lane)
            if kind is not None and prices is not members[kind]:
                continue
            known = priced.setdefault(prices, {})
            for repeat, item in op.work.items():
                if isinstance(item, Kernel):
                    if id(item) not in known:
                        known[id(item)] = numbers.setdefault(item, len(numbers)), prices.seconds(item)
                        seconds += [0.0] * (len(numbers) - len(seconds))
                    number, once = known[id(item)]
                    seconds[number] += times * repeat * once
    return dict(zip(numbers, seconds, strict=True))
