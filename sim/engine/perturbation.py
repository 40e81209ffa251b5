"""Effects at work: the devices, hosts and links of one step on which they act."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import cast

import numpy as np
from simpy import Environment, Event

from sim.engine.device import Device
from sim.engine.effects import Effect, Steps, follow
from sim.engine.effects.failure import WATCHDOG, StepHangsError
from sim.engine.host import Host, Pauses
from sim.engine.network import Network
from sim.engine.perturbed_device import PREEMPTION, Cores, PerturbedDevice, Price
from sim.pricing.transfers.sibling_groups import numbered
from sim.program import Program
from topologies.links.impaired import ImpairedTopology, LinkChange
from topologies.links.nics import sharing_nics
from topologies.links.topology import Ids, Topology, gpu_kind, is_unequal
from topologies.reading import UserError

EVERY = 1009  # see `Perturbation.vary`: more than there may be effects


class Perturbation:
    """The effects of a job on one topology. Raises UserError where a target is not there."""

    def __init__(self, effects: Sequence[Effect], topology: Topology) -> None:
        self.effects = tuple(effects)
        self._gpus = [effect.gpus(topology) for effect in effects]
        self._cores: dict[int, Cores] = {}  # by effect
        changes: list[LinkChange] = []
        gone: set[int] = set()
        for number, effect in enumerate(self.effects, 1):
            changes += effect.links(topology)
            gone |= effect.gone(topology)
            changes += [LinkChange(link, varying=number) for link in effect.varying(topology)]
        detours: dict[int, int] = {}
        for effect in self.effects:
            detours |= effect.detours(topology, frozenset(gone))
        self._detours = bool(detours)
        self.topology = ImpairedTopology(topology, changes, detours) if changes or detours else topology

    @cached_property
    def _sharing(self) -> Ids:
        """How many GPUs send through the NIC of each GPU, where that may differ and does; else nothing."""
        if not (self._detours or is_unequal(self.topology)):
            return np.empty(0, dtype=np.int64)
        sharing = sharing_nics(self.topology)
        return sharing if (sharing != sharing[0]).any() else sharing[:0]

    def unlike(self, program: Program) -> Ids:
        """Equal numbers for places on which equal effects act, with equal GPUs and as many microbatches; a place is a rank of
        each cohort.
        """
        if not (self.effects or program.allotments or is_unequal(self.topology)):
            return np.zeros(program.grid.groups((), program.cohorts[0].at).size, dtype=np.int64)
        ranks = [program.grid.groups((), cohort.at).ravel() for cohort in program.cohorts]
        own = [np.array([program.allotments])] if program.allotments else []
        own += [kinds[None] for each in ranks if (kinds := gpu_kind(self.topology, each)).any()]
        own += [self._sharing[None, each] for each in ranks if len(self._sharing)]
        if not self.effects:
            return numbered(np.concatenate(own).T) if own else np.zeros(len(ranks[0]), dtype=np.int64)
        colour = np.zeros((self.topology.gpus, len(self.effects)), dtype=np.int64)
        for number, (effect, gpus) in enumerate(zip(self.effects, self._gpus, strict=True)):
            colour[gpus, number] = 1 if effect.alike else 1 + np.arange(len(gpus))
        return numbered(np.concatenate([*(colour[each] for each in ranks), *(each.T for each in own)], axis=1))

    def device(self, env: Environment, rank: int, slowdown: float, synchronous: bool, price: Price, processes: int = 1) -> Device:
        """The device of a rank, with its host. processes: that do the same at the same times. Raises UserError."""
        acting = [effect for effect, gpus in zip(self.effects, self._gpus, strict=True) if rank in gpus]
        if not acting:
            return Device(env, slowdown)
        device = PerturbedDevice(env, slowdown, price, processes)
        pauses = Pauses(heapq.merge(*(effect.pauses() for effect in acting)))
        if not synchronous:
            device.host = Host(pauses or ())
            follow(env, _standing(pauses), device.lose_core)
        elif pauses:  # the thread that launches computes
            follow(env, _standing(pauses), partial(device.change, PREEMPTION))
        kinds = {effect.component: _Factors(device, effect.component) for effect in acting}
        for number, effect in enumerate(acting):
            noise = effect.noise(rank)
            if noise is not None:
                kinds[effect.component].draws(noise)
            follow(env, effect.kernels(), partial(kinds[effect.component].change, number))
            follow(env, effect.clocks(), partial(kinds[effect.component].clock, number))
            if effect.shared:
                if not synchronous:
                    raise UserError(f"effect '{effect}': GPUs compute by themselves: only processes on cores share them")
                if device.cores is not None:
                    raise UserError(f"effect '{effect}': rank {rank} has its cores by another effect already")
                device.cores = self._cores.setdefault(id(effect), Cores(effect.shared, effect.component))
        return device

    def vary(self, env: Environment, network: Network, varying: Sequence[int]) -> None:
        """Let links change while the step runs. varying: of each link of the network, see `ImpairedTopology.varying`."""
        for link in np.flatnonzero(varying).tolist():
            there, code = _Part(network, link), varying[link]
            while code:
                code, number = divmod(code, EVERY)
                follow(env, self.effects[number - 1].capacity(), partial(there.change, number))

    def run(self, env: Environment, end: Event) -> None:
        """Run until `end`, or until nothing happens any more, or somebody notices that a GPU has failed."""
        failures = [effect.failure for effect in self.effects if effect.failure is not None]
        until = end | env.timeout(min(failures) + WATCHDOG) if failures else end
        with suppress(RuntimeError):  # simpy: no scheduled events left
            env.run(until=until)

    def explain(self, waits: dict[int, tuple[float, float]]) -> None:
        """Raise StepHangsError if a failed GPU is why ranks wait for ever. waits: by rank, when it began to, and when its last op
        ended.
        """
        failed = [effect for effect in self.effects if effect.failure is not None]
        if failed:
            first = min(failed, key=lambda effect: cast(float, effect.failure))
            gone = {
                gpu for effect, gpus in zip(self.effects, self._gpus, strict=True) if effect in failed for gpu in gpus.tolist()
            }
            begun = [begin for rank, (begin, _) in waits.items() if rank not in gone]
            last = max(end for _, end in waits.values())
            raise StepHangsError(str(first), cast(float, first.failure), min(begun, default=0.0), last)


class _Factors:
    """By which several effects of one kind lengthen the kernels of a device, and the clock that they leave it."""

    def __init__(self, device: PerturbedDevice, component: str) -> None:
        self.device, self.component = device, component
        self.clocks: dict[int, float] = {}
        self.factors: dict[int, float] = {}
        self.noises: list[Callable[[], float]] = []

    def change(self, effect: int, factor: float) -> None:
        """From now on an effect has another factor."""
        self.factors[effect] = factor
        self.device.change(self.component, math.prod(self.factors.values()))

    def clock(self, effect: int, part: float) -> None:
        """From now on an effect leaves another part of the clock."""
        self.clocks[effect] = part
        self.device.clock(self.component, math.prod(self.clocks.values()))

    def draws(self, noise: Callable[[], float]) -> None:
        """An effect draws a factor for each block."""
        self.noises.append(noise)
        self.device.noises[self.component] = lambda: math.prod(each() for each in self.noises)


class _Part:
    """The part of a link's capacity that several effects leave."""

    def __init__(self, network: Network, link: int) -> None:
        self.network, self.link, self.usual = network, link, network.links[link].capacity
        self.parts: dict[int, float] = {}

    def change(self, effect: int, part: float) -> None:
        """An effect leaves another part of it."""
        self.parts[effect] = part
        self.network.change(self.link, self.usual * math.prod(self.parts.values()))


def _standing(pauses: Pauses) -> Steps:
    """Pauses as factors by which kernels take longer."""
    for start, seconds in pauses:
        yield start, math.inf
        yield start + seconds, 1.0
