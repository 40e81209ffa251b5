"""The fluid network: flows on links, shared max-min fairly; rates change only when a flow starts or ends, or a link changes.

A flow alone on its links is one SimPy event. When another one touches a link of it, the rates of all flows that are connected by
shared links are worked out anew by progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2); the others are
not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar, cast

from simpy import Environment, Event

from sim.clock import on_grid
from sim.engine.task import cancel
from sim.remembered import kept

F = TypeVar("F")
ROUNDING = 1e-12  # part of a rate by which sums of rates are off
REMEMBERED = 4096  # rates of flows that meet


class FlowPart(NamedTuple):
    """`bytes` carried by each of `flows[l]` equal flows over each link l."""

    bytes: float
    flows: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class Flow:
    """Traffic in flight: its parts one after the other, then `left_sender()`, then `latency` seconds, then `done()`."""

    parts: Sequence[FlowPart]
    latency: float
    done: Callable[[], None]
    left_sender: Callable[[], None] | None = None
    part: int = 0
    left: float = 0.0  # bytes left of the current part, per flow, at time `since`
    rate: float = 0.0
    since: float = 0.0
    drain: float = float("inf")  # when its bytes have left, at the present rate
    event: Event | None = field(default=None, repr=False)

    @property
    def flows(self) -> tuple[tuple[int, float], ...]:
        """Links of the current part."""
        return self.parts[self.part].flows


class Visitor(Protocol):
    """Who may put flows on links at any time, and must know when others do."""

    def disturb(self, link: int) -> None:
        """A flow, or another visitor, comes to a link."""


class Link:
    """A capacity in one direction, bytes per second, the flows on it with their multiplicity, and its visitors."""

    __slots__ = ("capacity", "flows", "visitors")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.flows: dict[Flow, float] = {}
        self.visitors: dict[Visitor, None] = {}


class Network:
    """Links of given capacities (bytes per second), numbered from 0, and the flows on them."""

    def __init__(self, env: Environment, capacity: Sequence[float]) -> None:
        self.env = env
        self.links = [Link(each) for each in capacity]
        self.scheduled: list[float] = []  # when each event so far was scheduled
        self._full: dict[tuple[tuple[int, float], ...], float] = {}
        self._fair: dict[tuple[tuple[tuple[int, float], ...], ...], list[float]] = {}  # by the links of each flow

    def start(
        self, parts: Sequence[FlowPart], latency: float, done: Callable[[], None], left_sender: Callable[[], None] | None = None
    ) -> None:
        """Begin a transfer now. left_sender is called when its last byte has left, `done` `latency` seconds later."""
        self._enter(Flow(parts, latency, done, left_sender))

    def visit(self, visitor: Visitor, links: Sequence[int]) -> None:
        """Come to `links`, and disturb who is there."""
        for link in links:
            visitors = self.links[link].visitors
            for other in list(visitors):
                other.disturb(link)
            visitors[visitor] = None

    def leave(self, visitor: Visitor, links: Sequence[int]) -> None:
        """Go away."""
        for link in links:
            del self.links[link].visitors[visitor]

    def busy(self, links: Sequence[int]) -> list[int]:
        """Which of `links` have more on them than one visitor."""
        now, every = self.env.now, self.links
        return [
            link
            for link in links
            if len(every[link].visitors) > 1 or (every[link].flows and any(flow.drain > now for flow in every[link].flows))
        ]

    def alone(self, parts: Sequence[FlowPart]) -> list[float]:
        """Seconds of each of `parts` with nothing else on its links."""
        return [on_grid(part.bytes / self._full_rate(part.flows)) if part.flows else 0.0 for part in parts]

    def change(self, link: int, capacity: float) -> None:
        """From now on `link` has another capacity; 0: nothing goes over it."""
        changed = self.links[link]
        changed.capacity = capacity
        self._full.clear()
        self._fair.clear()
        flows = [flow for flow in changed.flows if flow.drain > self.env.now]
        if flows:
            self._share(flows)

    def _full_rate(self, flows: tuple[tuple[int, float], ...]) -> float:
        """The rate of a flow that is alone on its links."""
        rate = self._full.get(flows)
        if rate is None:
            rate = self._full[flows] = min(self.links[link].capacity / count for link, count in flows)
        return rate

    def _enter(self, flow: Flow) -> None:
        part = flow.parts[flow.part]
        now = self.env.now
        for link, _ in part.flows:
            if self.links[link].visitors:
                for visitor in list(self.links[link].visitors):
                    visitor.disturb(link)
        flow.left, flow.since, flow.drain = part.bytes, now, float("inf")
        lonely = True
        for link, count in part.flows:
            others = self.links[link].flows
            if others:
                for other in [other for other in others if other.drain <= now]:
                    del others[other]  # has left the link and only waits for its latency
                lonely = lonely and not others
            others[flow] = count
        if lonely:
            flow.rate = self._full_rate(part.flows) if part.flows else float("inf")
            self._expect(flow, now, alone=True)
        else:
            self._share([flow])

    def _expect(self, flow: Flow, now: float, alone: bool = False) -> None:
        """(Re)schedule the end of the current part; a flow alone in its last part is one event, latency included."""
        cancel(flow.event)
        if not flow.rate:
            flow.event, flow.drain = None, float("inf")
            return
        wait = on_grid(flow.left / flow.rate)
        flow.drain = now + wait
        self._end_after(flow, now, wait, whole=alone and flow.part == len(flow.parts) - 1 and flow.left_sender is None)

    def _end_after(self, flow: Flow, now: float, wait: float, whole: bool) -> None:
        """The bytes of the current part have left after `wait` seconds; whole: its latency is over in the same event."""
        self.scheduled.append(now)
        flow.event = self.env.timeout(wait + flow.latency if whole else wait, (flow, whole))
        flow.event.callbacks.append(self._drained)

    def _drained(self, event: Event) -> None:
        flow, whole = cast(tuple[Flow, bool], event.value)
        flow.event = None
        now = self.env.now
        neighbours: dict[Flow, None] = {}
        for link, _ in flow.parts[flow.part].flows:
            others = self.links[link].flows
            others.pop(flow, None)
            if others and not whole:  # a flow that was alone to its end has slowed no other
                for other in others:
                    if other.drain > now:
                        neighbours[other] = None
        if neighbours:
            self._share(list(neighbours))
        flow.part += 1
        if flow.part < len(flow.parts):
            self._enter(flow)
            return
        if flow.left_sender is not None:
            flow.left_sender()
        if whole or not flow.latency:
            flow.done()
        else:
            self.scheduled.append(self.env.now)
            self.env.timeout(flow.latency).callbacks.append(lambda _: flow.done())

    def _share(self, touched: list[Flow]) -> None:
        """Max-min fair rates of every flow connected with the `touched` ones."""
        now = self.env.now
        flows = self._component(touched)
        for flow, rate in zip(flows, self._rates(flows), strict=True):
            full = self._full_rate(flow.flows)
            if rate > full * (1 - ROUNDING):
                rate = full
            if rate != flow.rate or flow.event is None:
                flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
                flow.since, flow.rate = now, rate
                self._expect(flow, now)
            elif cast(tuple[Flow, bool], flow.event.value)[1]:  # it needs an event for its end, without its latency
                cancel(flow.event)
                self._end_after(flow, now, flow.drain - now, whole=False)

    def _rates(self, flows: list[Flow]) -> list[float]:
        """Of flows that are connected: the same flows meet in every microbatch."""
        if len(flows) == 1:
            return [self._full_rate(flows[0].flows)]
        key = tuple(flow.flows for flow in flows)
        rates = self._fair.get(key)
        if rates is None:
            capacity = {link: self.links[link].capacity for links in key for link, _ in links}
            fair = fair_rates(capacity, dict(enumerate(key)))
            rates = kept(self._fair, key, [fair[number] for number in range(len(key))], REMEMBERED)
        return rates

    def _component(self, touched: list[Flow]) -> list[Flow]:
        component, now = dict.fromkeys(touched), self.env.now
        queue = list(component)
        for flow in queue:
            for link, _ in flow.flows:
                for other in self.links[link].flows:
                    if other not in component and other.drain > now:
                        component[other] = None
                        queue.append(other)
        return queue


def fair_rates(capacity: Sequence[float] | Mapping[int, float], flows: dict[F, tuple[tuple[int, float], ...]]) -> dict[F, float]:
    """Max-min fair rate of each flow: all rise together until a link is full; the flows on it stop; the rest rise on.

    flows[f] = ((link, multiplicity), …): f counts `multiplicity` times on the link.
    """
    rates: dict[F, float] = {}
    on: dict[int, dict[F, float]] = {}
    for flow, links in flows.items():
        for link, count in links:
            on.setdefault(link, {})[flow] = count
    room = {link: capacity[link] for link in on}
    levels = {link: room[link] / sum(counts.values()) for link, counts in on.items()}  # at which each link will be full
    while len(rates) < len(flows):
        if not levels:
            rates |= {flow: float("inf") for flow in flows if flow not in rates}
            break
        level, tightest = min(zip(levels.values(), levels, strict=True))
        touched: dict[int, None] = {}
        for flow in list(on[tightest]):
            rates[flow] = level
            for link, count in flows[flow]:
                room[link] = max(0.0, room[link] - level * count)
                del on[link][flow]
                touched[link] = None
        for link in touched:
            if on[link]:
                levels[link] = room[link] / sum(on[link].values())
            else:
                del levels[link]
    return rates
