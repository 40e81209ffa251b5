"""A job simulated with the profile that belongs to it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from sim.analysis.steady_state import is_apart, last_period, repeats, settles_after
from sim.analysis.summary import Summary, summarise
from sim.engine.player import run
from sim.pricing.fleet_prices import FleetPrices
from sim.pricing.prices import Prices, Profile
from sim.pricing.shipped import load_profile, profile_for, serves
from sim.pricing.transports import carried
from strategies.lowering.lower import lower
from strategies.lowering.repeated import lowered
from strategies.schedules import passes_of_period, schedules
from topologies.reading import UserError

if TYPE_CHECKING:
    from sim.program import Program
    from sim.timeline import Timeline
    from strategies.job import Job
    from strategies.models.model import Model
    from strategies.plan.resolved import Resolved
    from topologies.hardware import Gpu

SETTLED = 4  # microbatches of one rank after which each takes as long as the one before
SETTLING = 0.5  # part of the microbatches that is played at most where they are known to approach a steady state
LONG = 2_000  # passes of all ranks from which on a step takes long to play
WORTHWHILE = 0.3, 0.6  # part of the microbatches that is played at most to find a steady state: of a short step, of a long one
KEPT = 10_000  # passes up to which programs are kept: they depend on model and plan only, not on cluster and prices
_PRICES: dict[tuple[str, Gpu], Prices] = {}
_FLEETS: dict[tuple[Prices, ...], Prices] = {}


def profile_of(job: Job) -> Profile:
    """The profile that the job names, or else the shipped one of its GPU. Raises UserError, also for GPUs of several kinds."""
    every = profiles_of(job)
    if len(every) > 1:
        raise UserError(f"cluster {job.cluster.described}: several kinds of GPUs, which are not supported here")
    return every[0]


def profiles_of(job: Job) -> tuple[Profile, ...]:
    """The profile of each kind of GPU: of several kinds, a profile that the job names ("a100+mine.yaml") is for the GPUs that it
    names, and the others have shipped ones. Raises UserError.
    """
    gpus = job.cluster.gpu_kinds
    network = job.cluster.fabric.transport
    if len(gpus) == 1:
        return (carried(load_profile(job.profile) if job.profile else profile_for(gpus[0].model), network),)
    own = [load_profile(name) for name in (job.profile or "").split("+") if name]
    for profile in own:
        if not any(serves(profile, gpu.model) for gpu in gpus):
            names = ", ".join(gpu.name for gpu in gpus)
            raise UserError(f"{job.where}: profile {profile.name} is for {profile.gpu}, which the cluster has none of ({names})")
    named = (next((each for each in own if serves(each, gpu.model)), None) or profile_for(gpu.model) for gpu in gpus)
    return tuple(carried(profile, network) for profile in named)


def prices_of(job: Job) -> Prices:
    """Prices remember what they have worked out, so jobs share them."""
    members = tuple(_known(profile, gpu) for profile, gpu in zip(profiles_of(job), job.cluster.gpu_kinds, strict=True))
    if len(members) == 1:
        return members[0]
    if members not in _FLEETS:
        _FLEETS[members] = FleetPrices(members)
    return _FLEETS[members]


def _known(profile: Profile, gpu: Gpu) -> Prices:
    known = _PRICES.get((profile.name, gpu))
    if known is None or known.profile != profile:
        known = _PRICES[profile.name, gpu] = Prices(profile, gpu)
    return known


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the search for cyclic garbage, which looks at 10⁵ new objects again and again and finds none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def simulate(job: Job, *, fold: bool = True, profile: Profile | None = None) -> Timeline:
    """Play one training step of `job`, by default with its own profile. fold=False gives every rank its own actor.

    Raises UserError for impossible jobs.
    """
    prices = _prices(job, profile)
    with uncollected():
        return _played(job, job.resolve(), prices, fold=fold)


def predict(job: Job, profile: Profile | None = None, *, total: bool = False) -> Summary:
    """The summary of one simulated step of `job`: the expected step of so many GPUs, of which the slowest is waited for. Of many
    microbatches only some are played, where the others add the same. total: see `summarise`.

    Whoever tells a job's step tells this one: with all microbatches played, what draws of GPUs add to it is some 10⁻⁶ off.
    """
    with uncollected():
        return summarise(played(job, profile), total)


def played(job: Job, profile: Profile | None = None, whole: Timeline | None = None) -> Timeline:
    """The timeline that `predict` summarises. whole: that of `simulate` under the same prices, if it is known.

    Raises UserError for impossible jobs.
    """
    prices = _prices(job, profile)
    with uncollected():
        resolved = job.resolve()
        return from_some_microbatches(job, resolved, prices) or whole or _played(job, resolved, prices)


def variability_of(job: Job, prices: Prices) -> tuple[float, ...]:
    """By kind of GPU, the standard deviation of the logarithm of kernels' seconds among them: the job's or its profile's."""
    return tuple(each.profile.variability if job.variability is None else job.variability for each in prices.members)


def _prices(job: Job, profile: Profile | None) -> Prices:
    if profile is None:
        return prices_of(job)
    if len(job.cluster.gpu_kinds) > 1:
        raise UserError(f"cluster {job.cluster.described}: one profile for several kinds of GPUs is not supported here")
    return Prices(carried(profile, job.cluster.fabric.transport), job.cluster.gpu_kinds[0])


def _played(job: Job, resolved: Resolved, prices: Prices, microbatches: int | None = None, fold: bool = True) -> Timeline:
    program = program_of(job.model, resolved, microbatches)
    timeline = run(program, job.cluster.topology(), prices, fold=fold, effects=job.effects)
    timeline.variability = variability_of(job, prices)
    return timeline


def program_of(model: Model, resolved: Resolved, microbatches: int | None = None) -> Program:
    """The program of a plan, by default with all of its microbatches."""
    passes = (microbatches or resolved.microbatches) * resolved.pp * resolved.chunks
    return (programs if passes <= KEPT else lowered)(model, resolved, microbatches)


@lru_cache(maxsize=16)
def programs(model: Model, resolved: Resolved, microbatches: int | None) -> Program:
    """The programs of the latest plans."""
    return lower(model, resolved, microbatches)


def from_some_microbatches(job: Job, resolved: Resolved, prices: Prices) -> Timeline | None:
    """The timeline of a step in a steady state; None where too many would have to be played, or it is none."""
    if not all(effect.constant for effect in job.effects) or not may_settle(resolved):
        return None
    played = 0
    for count, periods in _counts(resolved):
        played += count
        if played > _worthwhile(resolved):
            break
        timeline = _played(job, resolved, prices, count)
        for period in periods:
            repeated = _repeated(resolved, timeline, (count, period))
            if repeated is not None:
                return repeated
        if any(is_apart(timeline, period) for period in periods):
            break
        more = settles_after(timeline) if 1 in periods else None
        if more is not None and count + more <= SETTLING * resolved.microbatches:
            return _repeated(resolved, _played(job, resolved, prices, count + more), (count + more, 1))
    return None


def _repeated(resolved: Resolved, played: Timeline, few: tuple[int, int]) -> Timeline | None:
    """The timeline of a step that goes on like the played one of `few` microbatches and a period; None if it does not."""
    (count, period), copies = few, schedules[resolved.schedule].copies
    more, rest = divmod(resolved.microbatches - count, period)
    if rest or not more or not played.program.cohorts[0].passes or not repeats(played, period // copies):
        return None
    passes = passes_of_period(resolved.schedule, resolved.pp, count, resolved.chunks, period)
    last = last_period(played, passes) if passes else None
    if last is None:
        return None
    result = replace(played, period=last, periods=more, events=played.events + more * last.events)
    result.peaks = played.peaks
    return result


def may_settle(resolved: Resolved) -> bool:
    """Whether further microbatches may do what those before them do, and few enough need to be played to know."""
    schedule = schedules[resolved.schedule]
    if schedule.microbatches or schedule.versions or resolved.local_steps > 1 or resolved.dealt:
        return False
    return next(_counts(resolved))[0] <= _worthwhile(resolved)


def _worthwhile(resolved: Resolved) -> float:
    """Microbatches that are played at most to find a steady state."""
    return WORTHWHILE[resolved.microbatches * resolved.pp * resolved.chunks >= LONG] * resolved.microbatches


def _counts(resolved: Resolved) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Numbers of microbatches to be played, and how many may be a period: a few, or as many as ranks, which orders with several
    chunks or copies go by, and in which transfers of neighbours meet each other anew.
    """
    schedule, ranks, every = schedules[resolved.schedule], resolved.pp, resolved.microbatches
    group = ranks * schedule.copies
    filled = max(SETTLED, schedule.settled * ranks + 3)
    if resolved.chunks > 1 or schedule.copies > 1:
        for least in (filled + 2 * group, filled + 6 * group, 9 * filled):
            yield least + (every - least) % group, (group,)
        return
    for least in (filled, 2 * filled, 4 * filled):
        count = least + (every - least) % 2
        of_ranks = count + (every - count) % ranks
        yield count, tuple(dict.fromkeys((1, 2, ranks) if of_ranks == count else (1, 2)))
        if of_ranks > count and least > filled:  # after one filling few are in step with those as many as ranks before
            yield of_ranks, (ranks,)
