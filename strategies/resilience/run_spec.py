"""From a job and its section `run` to the numbers that a run is made of: steps as predicted, checkpoints by the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from sim.analysis.summary import Summary
from sim.runs.spec import Component, Repair, RunSpec, Saving
from strategies.job import Job
from strategies.predict import predict
from strategies.resilience.checkpoint_size import CheckpointSize, checkpoint_size
from strategies.resilience.checkpointing import Place, SaveCosts, policies
from strategies.resilience.initialization import published
from strategies.resilience.intervals import intervals
from strategies.resilience.recovery import recoveries
from strategies.resilience.save_costs import save_costs
from strategies.resilience.settings import RunSettings
from strategies.resilience.training_loop import Loop, training_loop
from topologies.documents.durations import Spread
from topologies.documents.units import duration, show
from topologies.reading import UserError
from topologies.reliability import Reliability

NEVER = 10**15  # steps
_AS_SAID = """
    spares pool reserve allocation preemption heartbeat timeout diagnosis misdiagnosis restart evaluation_steps
    idle_failures
""".split()
MOST_TAKEN = 0.9  # of NICs by a flush: collectives get something
MOST_FAILURES = 1_000_000  # in one run: a minute's work
HOPELESS = 50  # times as long as the steps alone take: then a run is given up


@dataclass(frozen=True)
class Prepared:
    """A job ready to be run over days: what its step and its checkpoint are, and the spec that they make."""

    job: Job
    settings: RunSettings
    summary: Summary
    size: CheckpointSize
    costs: SaveCosts
    mtbf: float  # seconds between failures that stop the job, infinite without any
    restart: float  # seconds of one, in the middle
    spec: RunSpec
    loop: Loop
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_step(self) -> float:
        """Of the whole job."""
        return self.summary.tokens_per_second * self.summary.step_seconds


def prepare(
    job: Job, settings: RunSettings, days: float | None = None, tokens: float | None = None, summary: Summary | None = None
) -> Prepared:
    """A run of `days` days, or until `tokens` tokens are trained on. summary: of the job's step, where it is known already."""
    settings, summary = settings.on(job.cluster), summary or predict(job)
    if not summary.fits:
        raise UserError(f"{job.name}: runs out of memory in its first step (shardyard simulate says where)")
    size = checkpoint_size(job, settings.checkpoint.parallel)
    costs = save_costs(job, size, settings.checkpoint.shared, settings.checkpoint.overhead, settings.checkpoint.parallel_load)
    gpus = job.cluster.gpus
    initialization = settings.initialization or Spread(mean=published().seconds(gpus))
    restart = initialization.mean + settings.heartbeat + settings.diagnosis.mean
    mtbf = settings.failures.mtbf(job.cluster.nodes, job.cluster.node.gpus)
    slowed = _slowed(job, summary, costs, size, settings)
    savings = tuple(_savings(settings, costs, mtbf, restart, summary.step_seconds, job, slowed))
    per_step = round(summary.tokens_per_second * summary.step_seconds, 3)  # nothing comes after the last step, which is whole
    if tokens is not None:
        work = summary.step_seconds * tokens / per_step  # as topologies.costs.cost has it
        steps, deadline = tokens / per_step, max(HOPELESS * work, 30 * 86400.0)
    else:
        deadline = (days or 0.0) * 86400.0
        steps = deadline / summary.step_seconds + 1
        work = steps * summary.step_seconds
    if deadline * settings.failures.rate(job.cluster.nodes, job.cluster.node.gpus) > MOST_FAILURES:
        every = f"one every {show(1 / settings.failures.rate(job.cluster.nodes, job.cluster.node.gpus), 's')}"
        raise UserError(f"{job.name}: run.failures: {every} in up to {deadline / 86400:,.0f} days: more than {MOST_FAILURES:,}")
    spec = _spec(job, settings, savings, initialization)
    loop = training_loop(job, settings, summary)
    spec = replace(spec, step=summary.step_seconds, work=work, steps=steps, deadline=deadline, **_paused(settings, loop))
    spec = recoveries[settings.recovery](spec, job)
    return Prepared(job, settings, summary, size, costs, mtbf, restart, spec, loop, tuple(_notes(job, settings)))


def _paused(settings: RunSettings, loop: Loop) -> dict[str, Any]:
    """What stops training besides saves."""
    summed = [(each.steps, seconds) for each, seconds in ((settings.loss, loop.loss), (settings.metrics, loop.metrics)) if each]
    summed += [(1, loop.buffers)]
    return {
        "first_batch": loop.input.first,
        "stall": loop.input.exposed,
        "evaluation": loop.evaluation,
        "reductions": tuple((steps, seconds) for steps, seconds in summed if seconds),
    }


def _spec(job: Job, settings: RunSettings, savings: tuple[Saving, ...], initialization: Spread) -> RunSpec:
    """Everything but how long it lasts."""
    failures, gpus = settings.failures, job.cluster.node.gpus
    as_said = {field: getattr(settings, field) for field in _AS_SAID}
    return RunSpec(
        step=0.0,
        work=0.0,
        steps=0.0,
        nodes=job.cluster.nodes,
        gpus_per_node=gpus,
        components=tuple(_components(failures, gpus)),
        savings=savings,
        repair=_repair(settings),
        bad=failures.bad,
        bad_factor=failures.bad_factor,
        rate_spread=failures.rate_spread,
        initialization=initialization,
        initialization_spread=0.0 if settings.initialization else published().spread,
        **as_said,
    )


def _components(failures: Reliability, gpus: int) -> list[Component]:
    result = []
    for name, part in failures.parts.items():
        more = (part.replace, part.hang, part.slow, part.lasts, part.notice)
        result.append(Component(name, failures.life(part, gpus), part.unit, part.nodes, *more))
    return result


def _repair(settings: RunSettings) -> Repair:
    repair = settings.repair
    return Repair(
        repair.automatic, repair.manual, repair.escalates, repair.cures, repair.cures_manually, technicians=repair.technicians
    )


def _savings(
    settings: RunSettings, costs: SaveCosts, mtbf: float, restart: float, step: float, job: Job, slowed: float
) -> list[Saving]:
    """Each place of the policy with its interval in steps: a rule's for the failures that it is there for."""
    places = policies[settings.checkpoint.policy](costs)
    asked = [settings.checkpoint.interval, settings.checkpoint.storage_interval][-len(places) :]
    if len(places) == 1:
        if "storage_interval" in settings.checkpoint.model_fields_set:
            single = f"policy={settings.checkpoint.policy} saves to one place only"
            raise UserError(f"run.checkpoint.storage_interval: {single}, at run.checkpoint.interval")
        asked = [settings.checkpoint.interval]
    result: list[Saving] = []
    for place, interval in zip(places, asked, strict=True):
        between = _mtbf_of(settings.failures, job, result[-1].copies) if result else mtbf
        steps = _steps(interval, place, between, restart, step)
        if result:  # at every so many saves of the quicker place
            steps = -(-steps // result[-1].steps) * result[-1].steps
        waits = place.blocking + place.flush * slowed * (place.copies is None)
        result.append(Saving(place.name, steps, waits, place.flush, place.restore, place.copies))
    return result


def _slowed(job: Job, summary: Summary, costs: SaveCosts, size: CheckpointSize, settings: RunSettings) -> float:
    """The part of the time of a flush by which training falls behind, where it crosses the NICs of training: a step played with
    what the flush leaves of them.
    """
    node = job.cluster.node
    if not settings.checkpoint.shared.shares_nics or not node.nics or not costs.write:
        return 0.0
    share = min(MOST_TAKEN, size.busiest_node / costs.write / (node.nic * node.nics))
    less = node.model_copy(update={"nic": node.nic * (1 - share)})
    beside = predict(replace(job, cluster=job.cluster.model_copy(update={"node": less})))
    return max(0.0, 1 - summary.step_seconds / beside.step_seconds)


def _mtbf_of(failures: Reliability, job: Job, copies: int | None) -> float:
    """Mean seconds between failures that take at least `copies` nodes away."""
    rate = 0.0
    for part in failures.parts.values():
        if copies is not None and part.nodes >= copies and not part.slow:
            alone = failures.model_copy(update={"parts": {"part": part}})
            rate += part.replace / alone.mtbf(job.cluster.nodes, job.cluster.node.gpus)
    return 1 / rate if rate else math.inf


def _steps(interval: int | str, place: Place, mtbf: float, restart: float, step: float) -> int:
    if isinstance(interval, int):
        return interval
    seconds = intervals[interval](place.blocking, mtbf, restart) if interval in intervals else duration(interval)
    if interval in intervals:
        seconds = max(seconds, place.flush)  # saves that are not over cannot be repeated
    return NEVER if seconds == math.inf else min(NEVER, max(1, round(seconds / step)))


def _notes(job: Job, settings: RunSettings) -> list[str]:
    failures, notes = settings.failures, []
    if failures.unknown:
        notes.append(f"failures '{failures.name}': not published are {'; '.join(failures.unknown)}")
    if settings.initialization is None and job.cluster.gpus > published().most:
        notes.append(f"start-up: beyond the {published().most:,} GPUs of the largest published submission")
    if settings.pool is None and failures.parts:
        notes.append(
            "run.pool: there is always a free node; say how many there are (0: spares alone) to see jobs wait for repairs"
        )
    return notes


def with_interval(prepared: Prepared, steps: int) -> RunSpec:
    """The same run with its first place saved to every so many steps."""
    first, *rest = prepared.spec.savings
    changed = [replace(first, steps=steps)]
    changed += [replace(saving, steps=max(1, saving.steps // steps) * steps) for saving in rest]
    return replace(prepared.spec, savings=tuple(changed))
