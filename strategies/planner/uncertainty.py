"""Error bars: how wrong each group of prices may be, and what that does to a step.

Each group has one unknown factor, 1 in the middle and log-normal; its spread σ (of the logarithm) comes from measurements of
kernels and collectives. The step follows each factor by its elasticity ∂ ln step / ∂ ln price, worked out anew from the played
step (`strategies.planner.elasticity`); independent groups add in squares:

    σ_step² = Σ (elasticity · σ)²,    80 % interval: step · exp(±1.2816 σ_step)

GPUs of several kinds have factors of their own, kind by kind; the network between nodes, the slowdown of kernels and what
frameworks do have one for all.

What a simulation leaves out of the step, and how it puts kernels and collectives together, has its own σ (COMPOSITION). It and
that of host launches are the only widths that published steps choose.

Two plans of one model on one cluster share most of this: their difference is surer than either step. How sure, published pairs of
plans say (TIE, ORDERED).

Within a group, errors of single shapes are independent (those kept out of the fit show them) and average out over the shapes of a
step, as Σ w² for shares w of the group's seconds; what all shapes share (clock, fused or not, another network) does not. Kernels
of one shape, type and variant have one price, whatever they are called, and one error.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from sim.analysis.summary import VARIABILITY, Interval, Summary, summarise
from sim.pricing.prices import Profile
from sim.pricing.provenance import Provenance
from sim.program import Kernel
from sim.timeline import Timeline
from strategies.planner.elasticity import elasticities, elasticities_by_kind, paid
from strategies.planner.sensitivity import Price, group_of, kernels_of
from strategies.predict import played, uncollected

if TYPE_CHECKING:
    from strategies.job import Job

LEVEL = 0.8  # of the intervals
NORMAL = 1.2815515655446004  # half of a normal distribution's central 80 %, in standard deviations
MEDIAN = 0.6744897501960817  # median of its absolute value

# Standard deviations of the logarithm of what all kernels or collectives of a group share, with where each comes from.
CLOCK = 0.04  # another card, room and power limit than measured: GPUs of one kind differ by 8 % on average (arXiv:2208.11035)
FUSED = 0.25  # bytes that memory-bound kernels move: fused or not is the framework's matter (assumed: a quarter more or less)
UNMEASURED = 0.15  # a part of a profile that was derived by rule: what the V100's profile says of itself
LAUNCH = 0.1  # host seconds per kernel, on hosts of all makes (chosen: see below)
SLOWDOWN = 0.5  # of what collectives take from compute: one published coefficient is used for every GPU
BACKWARD = 0.1  # of attention: backward passes are priced by one ratio to forward passes (assumed)
OUTSIDE = 0.1  # per factor e outside the measured range (assumed)
NETWORK = 0.15  # another fabric than the one measured (median error 5 % on 32 to 1,024 H100, to 25 % on single sweeps)
COMPOSITION = 0.045  # of the step (chosen: see below)

# Nothing but steps says these two. They are chosen so that 80 % intervals hold 80 % of the published rows, each source with the
# same weight (`calibration.published.reliability`, which `shardyard validate --published` prints, with what is held of each
# source when all others choose). No prediction moves. On executed jobs, none of them published, COMPOSITION was 0.08: on a CPU,
# 18 strategies with a median error of 2.6 %, 10 of another model's shape with 8.1 %, as root mean square of both.

# Of 2,771 pairs of plans of one model on the same A100 with the same batch (vTrain's 386 rows) 372 were predicted less than TIE
# apart: ORDERED of them came out in that order; of the 333 that were 10 to 20 % apart 86 %, of the 2,066 others 99.7 %.
TIE = 0.1
ORDERED = 0.6
KERNELS = ("gemm", "attention", "memory", "optimizer")
# of kernels on all GPUs alike: how attention's backward passes are priced, and what a framework fuses
SHARED = {"attention": BACKWARD, "memory": FUSED, "optimizer": FUSED / 2}
# of one network, and of a coefficient that all GPUs have
COMMON = {"slowdown": SLOWDOWN, "bandwidth between nodes": NETWORK, "latency between nodes": 2 * NETWORK}


def with_interval(job: Job, summary: Summary, timeline: Timeline | None = None) -> Summary:
    """The summary of `job` with the interval around its step. timeline: the one that was summarised, if it is known. Raises
    UserError for impossible jobs.
    """
    differ = {VARIABILITY: summary.variability.deviation} if summary.variability else {}
    return replace(summary, interval=interval_of(timeline or played(job), summary.step_seconds, differ))


def predict_with_interval(job: Job, total: bool = False, whole: Timeline | None = None) -> Summary:
    """`strategies.predict.predict` with the interval around the step, which is played once for both. whole: that step, where it
    was played with all microbatches. Raises UserError.
    """
    with uncollected():
        timeline = played(job, whole=whole)
        return with_interval(job, summarise(timeline, total), timeline)


def interval_of(timeline: Timeline, step: float, others: Mapping[str, float] = MappingProxyType({})) -> Interval:
    """The interval around `step` of a job whose timeline (see `strategies.predict.played`) is known. others: standard deviations
    of its logarithm that are no prices'.
    """
    return around(step, {**deviations(timeline), **others})


def around(step: float, parts: Mapping[str, float]) -> Interval:
    """The interval around `step` of whose logarithm `parts` are standard deviations, independent of each other."""
    both = math.hypot(*parts.values())
    return Interval(step * math.exp(-NORMAL * both), step * math.exp(NORMAL * both), LEVEL, dict(parts))


def deviations(timeline: Timeline, launch: float = LAUNCH) -> dict[str, float]:
    """σ of the step's logarithm by each group of prices, and what a simulation leaves out. launch: σ of the price of launches."""
    several = len(timeline.op_costs.prices.members) > 1
    return {**(_of_kinds if several else _of_groups)(timeline, launch), "composition": COMPOSITION}


def tied(first: float, second: float) -> bool:
    """Whether steps (or costs) of two plans, priced by one profile, are too near to each other for their order to mean much."""
    return max(first, second) < (1 + TIE) * min(first, second)


def spreads(timeline: Timeline, kernels: Mapping[Kernel, float], launch: float = LAUNCH) -> dict[str, float]:
    """σ of each group of prices that the step pays; `clock` is what matrix products and attention share. kernels: seconds of each
    in the step (`strategies.planner.sensitivity.kernels_of`); launch: σ of the price of launches.
    """
    profile = timeline.op_costs.prices.profile
    return _spreads(profile, kernels, paid(timeline, kernels), SHARED, launch)


def _spreads(
    profile: Profile, kernels: Mapping[Kernel, float], pays: Collection[str], shared: Mapping[str, float], launch: float
) -> dict[str, float]:
    """σ of the groups of a profile's prices that a step pays. shared: see `_kernel_spreads`; launch: σ of that price."""
    links = profile.provenance.get("links")
    inside = _shape_error(links, "heldout") if links and links.measured else UNMEASURED
    every = {
        "launch": launch,
        "bandwidth inside nodes": inside,
        "latency inside nodes": 2 * inside,
        "collective start": 2 * inside,
        **COMMON,
    }
    others = {name: every[name] for name in pays if name in every}
    return {"clock": CLOCK, **_kernel_spreads(profile, kernels, shared), **others}


def _of_groups(timeline: Timeline, launch: float) -> dict[str, float]:
    """Elasticity times σ of each group."""
    seconds = kernels_of(timeline)
    sigmas = spreads(timeline, seconds, launch)
    moved = _moved(paid(timeline, seconds), sigmas)
    found = _by_group(elasticities(timeline, moved), seconds, sigmas)
    return {name: abs(found[name]) * sigma for name, sigma in sigmas.items()}


def _of_kinds(timeline: Timeline, launch: float) -> dict[str, float]:
    """The same where GPUs are of several kinds. Each kind's prices are wrong by themselves; what is no kind's (COMMON, SHARED) is
    wrong for all together.
    """
    members = timeline.op_costs.prices.members
    pays = paid(timeline, kernels_of(timeline))
    own = {name: price for name, price in pays.items() if name not in COMMON}
    seconds = [kernels_of(timeline, kind) for kind in range(len(members))]
    sigmas = [_spreads(prices.profile, each, own, {}, launch) for prices, each in zip(members, seconds, strict=True)]
    moved = elasticities_by_kind(timeline, _moved(own, own))
    found = [_by_group(*each) for each in zip(moved, seconds, sigmas, strict=True)]
    parts: dict[str, list[float]] = {}
    for elasticity, sigma in zip(found, sigmas, strict=True):
        for name in sigma:
            parts.setdefault(name, []).append(elasticity[name] * sigma[name])
    for name in SHARED.keys() & parts.keys():
        parts[name].append(SHARED[name] * sum(each.get(name, 0.0) for each in found))
    together = elasticities(timeline, {name: pays[name] for name in COMMON if name in pays})
    return {name: math.hypot(*several) for name, several in parts.items()} | {
        name: abs(elasticity) * COMMON[name] for name, elasticity in together.items()
    }


def _moved(pays: Mapping[str, Price], sigmas: Mapping[str, object]) -> dict[str, Price]:
    """Prices that are moved to know the elasticities of all groups: kernels are moved together."""
    return {name: price for name, price in pays.items() if name == "kernels" or name in sigmas.keys() - {"clock", *KERNELS}}


def _by_group(found: Mapping[str, float], seconds: Mapping[Kernel, float], sigmas: Mapping[str, float]) -> dict[str, float]:
    """Elasticity of each group: that of all kernels together is shared out by their seconds."""
    total = sum(seconds.values())
    shares = {name: sum(time for kernel, time in seconds.items() if group_of(kernel) == name) / total for name in KERNELS}
    shares["clock"] = shares["gemm"] + shares["attention"]
    return {name: found[name] if name in found else shares[name] * found["kernels"] for name in sigmas}


def _kernel_spreads(profile: Profile, seconds: Mapping[Kernel, float], shared: Mapping[str, float]) -> dict[str, float]:
    """σ of kernels by group, given their seconds: what single shapes miss, averaged over the step's shapes, and what all of them
    share, of which `shared` is no matter of the GPU's.
    """
    gemm = profile.provenance.get("gemm")
    fp8 = _shape_error(gemm, "fp8 large")
    fp4 = _shape_error(gemm, "fp4 large") if "fp4" in profile.gemm else math.hypot(fp8, UNMEASURED)
    own = {
        "gemm": _shape_error(gemm, "large"),
        "attention": _shape_error(profile.provenance.get("attention"), "large"),
        "memory": CLOCK,
        "optimizer": CLOCK,
    }
    result = {}
    for group, single in own.items():
        priced: dict[tuple[tuple[int, ...], str, str], float] = {}
        for kernel, time in seconds.items():
            if group_of(kernel) == group:
                price = kernel.shape, kernel.dtype, kernel.variant
                priced[price] = priced.get(price, 0.0) + time
        total = sum(priced.values())
        if total:
            of_type = {"fp8": fp8, "fp4": fp4}
            alone = math.hypot(*(time / total * of_type.get(dtype, single) for (_, dtype, _), time in priced.items()))
            part = profile.provenance.get(group if group in ("gemm", "attention") else "memory")
            derived = 0.0 if part is not None and part.measured else UNMEASURED
            outside = sum(time * _distance(shape, part, group) for (shape, _, _), time in priced.items()) / total
            result[group] = math.hypot(alone, shared.get(group, 0.0), derived, OUTSIDE * outside)
    return result


def _shape_error(part: Provenance | None, kind: str) -> float:
    """σ of single shapes or sizes kept out of the fit: from percentiles where a profile has them, else from the median error."""
    if part is None:
        return UNMEASURED
    for low, _, high in (part.spread[name] for name in (kind, "all") if name in part.spread):
        return (math.log1p(high) - math.log1p(low)) / (2 * NORMAL)
    median = part.errors.get(kind, part.heldout_error)
    return UNMEASURED if median is None else median / MEDIAN


NAMES: Mapping[str, tuple[str, ...]] = {
    "gemm": ("batch", "m", "n", "k"),
    "attention": ("batch", "heads", "kv_heads", "queries", "keys", "head_dim"),
}


def _distance(shape: tuple[float, ...], part: Provenance | None, group: str) -> float:
    """By how many factors of e a shape lies outside what was measured, over all its sizes."""
    if part is None or group not in NAMES:
        return 0.0
    result = 0.0
    for name, value in zip(NAMES[group], shape, strict=False):
        low, high = part.measured_range.get(name, (value, value))
        result += max(0.0, math.log(low / value), math.log(value / high))
    return result
