"""The summary of one step: its numbers as functions of the timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from sim.analysis.breakdown import AXES, breakdowns, busy_seconds, mean_breakdown
from sim.analysis.gpu_kinds import GpuKind, gpu_kinds, notes_on
from sim.analysis.link_load import LinkLoad, hottest
from sim.analysis.stage_memory import NodeMemory, StageMemory, node_memory, stage_memory
from sim.analysis.volume import together, volumes
from sim.program import CPU, Block, Kernel, Program
from sim.replay.waiting import GpuVariability, waiting
from sim.timeline import Timeline
from topologies.documents.cards import card
from topologies.documents.units import show
from topologies.links.topology import gpu_kind
from topologies.reading import UserError

FLOPS_RULE = (
    "matrix products only, 2 FLOPs per multiply-add, backward = 2 × forward, attention counted in full (not halved by "
    "causality); HFU adds what is recomputed"
)

VARIABILITY = "gpu variability"  # component of the breakdown: waiting for GPUs that are slower than others of their kind
LONGEST = 1e9  # seconds of a step
DOUBTFUL = 0.9  # MFU from which inputs are doubted
ATTENTION = 0.2  # share of the FLOPs above which a note gives MFU without masked attention, half of it


@dataclass(frozen=True)
class Volume:
    """Bytes and elements that one rank sends along one axis in a step; psi: elements in units of the model's parameters Ψ."""

    bytes: float
    elements: float
    psi: float


@dataclass(frozen=True)
class Interval:
    """`level` of steps take between `low` and `high` seconds, as far as the prices' own spreads tell.

    parts: standard deviation of the step's logarithm by group of prices; in squares they add up to the whole.
    """

    low: float
    high: float
    level: float
    parts: dict[str, float]


@dataclass(frozen=True)
class EffectsCost:
    """What effects do to a step. Seconds; without: the step without each effect, where there are several."""

    step_without: float  # without any effect
    without: dict[str, float]
    critical_rank: int  # for which the others wait: whose compute stream is idle least, or whose transfers a link makes longest
    critical_idle: float
    mean_idle: float  # of all ranks
    critical_transfers: float  # by which its transfers last longer than others' of its stage, where effects are on links only


@dataclass(frozen=True, repr=False)
class Summary:
    """Step time in seconds, rates per second, memory in bytes, fractions of 1."""

    gpus: int
    step_seconds: float
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    model_flops_per_gpu: float  # achieved FLOP/s
    mfu: float
    hfu: float
    flops_rule: str
    peak_dtype: str  # whose specified peak MFU and HFU are relative to
    gpu_hours_per_step: float
    breakdown: dict[str, float]  # seconds by component, mean over ranks; sums to step_seconds
    bubble: float  # fraction of the step
    uneven: float  # the part of it that is there because stages have unequal work: they wait for the busiest
    exposed: float  # fraction of the step
    volume: dict[str, Volume]  # by axis, of the rank that sends most
    links: tuple[LinkLoad, ...]  # the hottest of each kind
    memory: tuple[StageMemory, ...]
    memory_capacity: float
    fits: bool
    events: int
    profile: str
    notes: tuple[str, ...] = ()
    interval: Interval | None = None  # of step_seconds, where the spread of the prices was asked for
    offloaded: NodeMemory | None = None  # where anything is offloaded
    effects: EffectsCost | None = None  # where there are any
    gpu_kinds: tuple[GpuKind, ...] = ()  # where there are several
    variability: GpuVariability | None = None  # of GPUs that are not quite alike; None: they are taken as alike
    total: dict[str, Volume] | None = None  # by axis, of all ranks together, where that was asked for

    def __repr__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return f"<Summary {self.step_seconds:.4g} s per step on {self.gpus:,} GPUs, MFU {self.mfu:.1%}, {self._peak()}: {fits}>"

    def _repr_html_(self) -> str:
        bar = self.interval
        more = f" ({bar.low:.3g} to {bar.high:.3g} s, {bar.level:.0%} interval)" if bar else ""
        parts = {name: show(seconds, "s", 3) for name, seconds in self.breakdown.items() if seconds}
        values = {
            "tokens/s": f"{self.tokens_per_second:,.0f}",
            "MFU": f"{self.mfu:.1%} of the {self.peak_dtype} peak",
            "peak memory": self._peak() + ("" if self.fits else ": does not fit"),
            **parts,
        }
        return card(f"{self.step_seconds:.4g} s per step on {self.gpus:,} GPUs{more}", values)

    def _peak(self) -> str:
        return f"{self.worst.peak / 1e9:.1f} of {(self.worst.capacity or self.memory_capacity) / 1e9:.1f} GB"

    @property
    def ideal_seconds(self) -> float:
        """The step if all GPUs of one kind were alike."""
        return self.step_seconds - (self.variability.seconds if self.variability else 0.0)

    @property
    def worst(self) -> StageMemory:
        """The stage with the highest peak, relative to its GPU where GPUs differ."""
        return max(self.memory, key=lambda stage: stage.peak / (stage.capacity or 1.0))

    def fits_with(self, headroom: float) -> bool:
        """Whether everything fits with this part of every GPU's memory kept free."""
        worst = self.worst
        return self.fits and worst.peak <= (1 - headroom) * (worst.capacity or self.memory_capacity)

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        data = asdict(self)
        if self.effects is None:
            del data["effects"]
        if self.total is None:
            del data["total"]
        data["ideal_seconds"] = self.ideal_seconds
        if not self.gpu_kinds:
            del data["gpu_kinds"]
            for stage in data["memory"]:
                del stage["capacity"]
        worst = self.worst
        data["memory_peak"] = worst.peak
        data["memory_over"] = max(0.0, worst.peak - self.memory_capacity)
        data["memory_worst_stage"] = worst.stage
        return data


def summarise(timeline: Timeline, total: bool = False) -> Summary:
    """The summary of a played step: the expected one, where GPUs of one kind are not quite alike. total: also what all ranks
    send together.
    """
    program, prices = timeline.program, timeline.op_costs.prices
    variability, alike = wait_for_slower(timeline)
    lost = variability.seconds * program.steps if variability else 0.0
    world, step = program.grid.world, (timeline.step + lost) / program.steps
    if not 0 < step < LONGEST:
        wrong = f"is more than {LONGEST / 3.15e7:.0f} years" if step > 0 else "takes no time"
        raise UserError(f"a step of {step:.3g} s {wrong}: a rate of the cluster, or a size of the model or plan, is a mistake")
    per_lane = breakdowns(timeline)
    mean = mean_breakdown(timeline, per_lane) | ({VARIABILITY: lost} if variability else {})
    breakdown = _mean(mean, program.steps, step)
    memory = tuple(stage_memory(timeline, lane) for lane in range(len(timeline.lanes)))
    host, peaks = node_memory(timeline), np.array([member.gpu.peak[program.dtype] for member in prices.members])
    counts = (
        np.bincount(gpu_kind(timeline.op_costs.topology, np.arange(world)), minlength=len(peaks)) if len(peaks) > 1 else [world]
    )
    peak = float(counts @ peaks) * step
    notes = [*_masked(program, peak), *timeline.op_costs.every_note]
    if program.steps > 1:
        notes.append(f"a step is the mean of a round: {program.steps} local steps and a synchronisation, all of them played")
    if program.hardware_flops > peak:
        notes.insert(0, f"HFU above 100 %: {_above(timeline)}")
    elif program.model_flops > DOUBTFUL * peak:
        doubt = "no published training has reached that: are the GPU's peak, its profile and the model's sizes right?"
        notes.insert(0, f"MFU above {100 * DOUBTFUL:.0f} %: {_faster(timeline) or doubt}")
    kinds = tuple(gpu_kinds(timeline, per_lane, memory)) if len(prices.members) > 1 else ()
    notes = [*notes_on(kinds), *notes, *alike]
    limiting = max(memory, key=lambda stage: stage.peak / (stage.capacity or 1.0))
    return Summary(
        gpus=world,
        step_seconds=step,
        tokens_per_second=program.tokens / step,
        tokens_per_second_per_gpu=program.tokens / step / world,
        model_flops_per_gpu=program.model_flops / step / world,
        mfu=program.model_flops / peak,
        hfu=program.hardware_flops / peak,
        flops_rule=FLOPS_RULE,
        peak_dtype=program.dtype,
        gpu_hours_per_step=world * step / 3600,
        breakdown=breakdown,
        bubble=breakdown["bubble"] / step,
        uneven=_uneven(busy_seconds(timeline, per_lane), timeline.step + lost, breakdown["bubble"] / step),
        exposed=sum(breakdown[f"{axis} exposed"] for axis in AXES if axis != CPU) / step,
        volume=_volumes(timeline),
        links=tuple(
            replace(load, utilisation=load.utilisation * timeline.step / (timeline.step + lost)) for load in hottest(timeline)
        ),
        memory=memory,
        memory_capacity=limiting.capacity or prices.gpu.memory,
        fits=all(stage.peak <= (stage.capacity or prices.gpu.memory) for stage in memory) and (host is None or host.fits),
        events=timeline.events,
        profile=prices.profile.name,
        notes=tuple(notes),
        offloaded=host,
        gpu_kinds=kinds,
        variability=variability,
        total=_per_axis(timeline, together(timeline)) if total else None,
    )


def wait_for_slower(timeline: Timeline) -> tuple[GpuVariability | None, list[str]]:
    """What a step waits for slower GPUs of one kind, by `Timeline.variability`; a note where that cannot be said."""
    if not any(timeline.variability):
        return None, []
    try:
        return waiting(timeline), []
    except UserError as error:
        return None, [f"GPUs of one kind are taken as alike: {error}"]


def _above(timeline: Timeline) -> str:
    """The reason why a step counts more FLOPs than the peak allows."""
    return _faster(timeline) or "the counting rule takes causal attention in full, of which kernels execute about half"


def _faster(timeline: Timeline) -> str:
    """What products run in that have a higher peak than the step's precision; "" of none."""
    dtype, peak = timeline.program.dtype, timeline.op_costs.prices.members[0].gpu.peak
    blocks = [op.work for cohort in timeline.program.cohorts for op in cohort.kinds if isinstance(op.work, Block)]
    items = dict.fromkeys(run.items for block in blocks for run in block.runs)
    others = {item.dtype for sequence in items for item in sequence if isinstance(item, Kernel) and item.kind == "gemm"}
    faster = sorted(other for other in others if peak[other] > peak[dtype])
    return f"it is of the {dtype} peak, and products are in {', '.join(faster)}" if faster else ""


def _masked(program: Program, peak: float) -> Iterator[str]:
    """A note with MFU by the other counting rule, where the two differ much. peak: FLOPs of all GPUs in a step at their peak."""
    left = program.masked_flops
    if left is not None and left < program.model_flops * (1 - ATTENTION / 2):
        mfu = f"{100 * left / peak:.1f} %"
        yield f"attention is counted in full: MFU is about {mfu} when only what the causal mask leaves is counted"


def _uneven(busy: list[float], step: float, bubble: float) -> float:
    """A stage that is busy for b of the step waits for step − b = (step − most) + (most − b): the mean of the second part."""
    return min(bubble, (max(busy) - sum(busy) / len(busy)) / step)


def _mean(breakdown: dict[str, float], steps: int, step: float) -> dict[str, float]:
    """Seconds per step of a round of `steps`; the largest component takes the rounding."""
    mean = {name: seconds / steps for name, seconds in breakdown.items()}
    mean[max(mean, key=lambda name: mean[name])] += step - sum(mean.values())
    return mean


def _volumes(timeline: Timeline) -> dict[str, Volume]:
    most: dict[str, tuple[float, float]] = {}
    for volume in volumes(timeline):
        for axis, sent in volume.items():
            most[axis] = max(most.get(axis, (0.0, 0.0)), sent)
    return _per_axis(timeline, most)


def _per_axis(timeline: Timeline, sent: dict[str, tuple[float, float]]) -> dict[str, Volume]:
    """Bytes and elements of a round as those of a step, axes in their order."""
    psi, steps = timeline.program.parameters, timeline.program.steps
    return {
        axis: Volume(size / steps, count / steps, count / steps / psi)
        for axis in AXES
        if axis in sent
        for size, count in [sent[axis]]
    }
