"""Several programs on one cluster, each on GPUs of its own, on one network: how they slow each other down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from simpy import Environment, Event

from sim.engine.folding import folded
from sim.engine.lanes import Lanes
from sim.engine.network import Network
from sim.engine.perturbation import Perturbation
from sim.engine.player import Player, since
from sim.engine.uncontended import Times
from sim.pricing.op_costs import OpCosts
from sim.pricing.prices import Prices
from sim.pricing.transfers.link_merging import wire_together
from sim.program import Program
from sim.timeline import Timeline
from topologies.links.placed import PlacedTopology
from topologies.reading import UserError

LONGEST = 10_000  # steps of one job, while another one does its few


class Together(NamedTuple):
    """By job: seconds of its steps, and the kinds of links that it shares with others."""

    steps: list[list[float]]
    kinds: list[tuple[str, ...]]


def as_played(_job: int, timeline: Timeline) -> float:
    """Seconds of a step as it was played."""
    return timeline.step


def play_together(
    jobs: Sequence[tuple[Program, PlacedTopology]],
    prices: Prices,
    steps: int,
    seconds: Callable[[int, Timeline], float] = as_played,
) -> Together:
    """Play the steps of each job, which come one after the other without a pause, until every job has done `steps` of them;
    a step that is not over then is left out. All begin their first step at once. seconds: what is said of a played step, given
    the number of its job.

    Flows of all jobs share links max-min fairly. Ranks of a job that move together are as fast as those of them that share links
    with other jobs. Raises UserError when a program waits for itself.
    """
    if any(program.cohorts[0].steady for program, _ in jobs):
        raise UserError("a steady state of an asynchronous schedule is not played beside other jobs")
    costs = [OpCosts(program, place, prices) for program, place in jobs]
    _lay(costs)
    used, kinds = [cost.links for cost in costs], costs[0].wiring.shared_kind
    others = [frozenset[int]().union(*used[:number], *used[number + 1 :]) for number in range(len(jobs))]
    met = [tuple(sorted({kinds[link] for link in mine & theirs})) for mine, theirs in zip(used, others, strict=True)]
    for number, (program, place) in enumerate(jobs):
        whole, lane = folded(program, costs[number], Perturbation((), place), others[number])
        costs[number] = OpCosts(whole, place, prices, lane)
    _lay(costs)
    env = Environment()
    network = Network(env, costs[0].capacity)
    every: list[list[float]] = [[] for _ in jobs]
    over = env.event()

    def begin(number: int) -> None:
        begun = env.now
        lanes = Lanes(costs[number].program, costs[number])
        player = Player(lanes, Times.none(lanes.ops), Perturbation((), jobs[number][1]), network)
        player.begin().callbacks.append(_then(lambda: ended(number, player, begun)))

    def ended(number: int, player: Player, begun: float) -> None:
        every[number].append(seconds(number, since(begun, player.timeline())))
        if min(map(len, every)) >= steps:
            if not over.triggered:
                over.succeed()
        elif len(every[number]) < LONGEST:
            begin(number)

    for number in range(len(jobs)):
        begin(number)
    try:
        env.run(until=over)
    except RuntimeError:  # simpy: no scheduled events left
        raise UserError(
            f"steps of these jobs do not go on together: a schedule deadlocks, or one job does {LONGEST:,} steps while another "
            f"does not do {steps}"
        ) from None
    return Together(every, met)


def _lay(costs: Sequence[OpCosts]) -> None:
    """One set of links for the traffic of all jobs."""
    wirings = wire_together([(cost.topology, cost.grid, cost.traffics) for cost in costs])
    for cost, wiring in zip(costs, wirings, strict=True):
        cost.lay_beside(wiring)


def _then(action: Callable[[], None]) -> Callable[[Event], None]:
    return lambda _: action()
