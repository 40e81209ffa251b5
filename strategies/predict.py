"""A job simulated with the profile that belongs to it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sim.analysis.summary import Summary, summarise
from sim.engine.player import run
from sim.pricing.prices import Prices, Profile
from sim.pricing.shipped import load_profile, profile_for
from strategies.lowering.lower import lower

if TYPE_CHECKING:
    from sim.timeline import Timeline
    from strategies.job import Job
    from topologies.hardware import Gpu

_PRICES: dict[tuple[str, Gpu], Prices] = {}


def profile_of(job: Job) -> Profile:
    """The profile that the job names, or else the shipped one of its GPU. Raises UserError."""
    return load_profile(job.profile) if job.profile else profile_for(job.cluster.node.gpu.name)


def prices_of(job: Job) -> Prices:
    """Prices remember what they have worked out, so jobs share them."""
    profile, gpu = profile_of(job), job.cluster.node.gpu
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
    prices = prices_of(job) if profile is None else Prices(profile, job.cluster.node.gpu)
    with uncollected():
        return run(lower(job.model, job.resolve()), job.cluster.topology(), prices, fold=fold, effects=job.effects)


def predict(job: Job, profile: Profile | None = None) -> Summary:
    """The summary of one simulated step of `job`."""
    with uncollected():
        return summarise(simulate(job, profile=profile))
