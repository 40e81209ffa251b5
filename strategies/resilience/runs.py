"""A job over days: many runs that differ by chance, what they deliver, what would deliver more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sim.analysis.summary import Summary
from sim.runs import ledger
from sim.runs.replications import Estimate, Map, half_width, replicate
from sim.runs.run import Outcome
from sim.runs.spec import RunSpec
from strategies.job import Job
from strategies.resilience.run_spec import Prepared, prepare, with_interval
from strategies.resilience.settings import RunSettings
from strategies.resilience.step_interval import with_step_interval
from topologies.costs import Cost, Rates, mean_rates
from topologies.reading import UserError

FACTORS = (0.25, 0.354, 0.5, 0.707, 1.0, 1.414, 2.0, 2.83, 4.0)  # of the interval, that are tried
COMPARED = 20  # runs of each alternative, all with the same failures


@dataclass(frozen=True)
class RunAnswer:
    """What `runs` runs of a job say. shares: of all GPU-seconds, by cause, summed over the runs; finished: part of them that did
    all their work.
    """

    runs: int
    days: Estimate
    chance: Estimate  # days, with the same step in all runs: what failures, repairs and start-ups make of them
    tokens: Estimate
    goodput: Estimate
    ettr: Estimate
    failures: Estimate
    usd: Estimate | None
    kwh: Estimate
    shares: dict[str, float]
    failures_by_part: dict[str, float]
    error: float  # half of the 95 % confidence interval of the mean goodput
    finished: float
    closes: float  # largest relative difference of a run's ledger from GPUs · time
    tokens_per_step: float
    outcomes: tuple[Outcome, ...]  # of each run
    sequence: int = 0  # tokens of a sample; 1 where it is no sequence

    def cost(self, money: Rates) -> Cost:
        """Means over the runs, as costs of a training; spares cost, too."""
        hours = math.fsum(outcome.held for outcome in self.outcomes) / len(self.outcomes) / 3600
        usd = None if self.usd is None else self.usd.mean
        return Cost(self.tokens.mean, self.days.mean * 86400, hours, usd, self.kwh.mean * 3.6e6, money)


def run_training(job: Job, summary: Summary, tokens: float, money: Rates, seed: int = 0, each: Map = map) -> RunAnswer:
    """`COMPARED` runs of a job, whose step is known, until `tokens` tokens are trained on. Raises UserError."""
    return run(prepare(job, job.run or RunSettings(), tokens=tokens, summary=summary), money, seed, COMPARED, each)


def run(prepared: Prepared, rates: Rates, seed: int = 0, count: int | None = None, each: Map = map) -> RunAnswer:
    """Play `count` runs, or as many as are needed."""
    return answer(prepared, rates, replicate(prepared.spec, seed, count, each))


def run_days(
    job: Job,
    days: float | None = None,
    tokens: float | None = None,
    *,
    price: float | None = None,
    seed: int = 0,
    count: int = COMPARED,
) -> RunAnswer:
    """What `job` delivers in so many days, or how long so many tokens take, by `count` runs as its section `run` says. Raises
    UserError.
    """
    if (days is None) == (tokens is None):
        raise UserError("run_days: give days or tokens, and not both")
    prepared = with_step_interval(prepare(job, job.run or RunSettings(), days, tokens))
    return run(prepared, mean_rates(job.cluster, price), seed, count)


def answer(prepared: Prepared, rates: Rates, outcomes: list[Outcome]) -> RunAnswer:
    """What runs say together."""
    spec, per_step = prepared.spec, prepared.tokens_per_step
    held = math.fsum(outcome.held for outcome in outcomes)
    shares = {
        cause: math.fsum(outcome.gpu_seconds[cause] for outcome in outcomes) / held if held else 0.0 for cause in ledger.CAUSES
    }
    goodputs = [outcome.goodput for outcome in outcomes]
    hours = [outcome.held / 3600 for outcome in outcomes]
    return RunAnswer(
        runs=len(outcomes),
        days=Estimate.of([outcome.seconds / 86400 for outcome in outcomes]),
        chance=Estimate.of([_by_chance(outcome, spec) / 86400 for outcome in outcomes]),
        tokens=Estimate.of([outcome.steps * per_step for outcome in outcomes]),
        goodput=Estimate.of(goodputs),
        ettr=Estimate.of([outcome.ettr for outcome in outcomes]),
        failures=Estimate.of([float(sum(outcome.failures.values())) for outcome in outcomes]),
        usd=None if rates.usd is None else Estimate.of([hour * rates.usd for hour in hours]),
        kwh=Estimate.of([hour * rates.watts / 1000 for hour in hours]),
        shares=shares,
        failures_by_part={
            component.name: sum(outcome.failures[component.name] for outcome in outcomes) / len(outcomes)
            for component in spec.components
        },
        error=half_width(goodputs) if len(goodputs) > 1 else 0.0,
        finished=sum(outcome.steps >= spec.steps for outcome in outcomes) / len(outcomes),
        closes=max(abs(outcome.held / _expected(outcome, spec) - 1) for outcome in outcomes),
        tokens_per_step=per_step,
        outcomes=tuple(outcomes),
        sequence=prepared.job.plan.sequence_of(prepared.job.model),
    )


def _by_chance(outcome: Outcome, spec: RunSpec) -> float:
    """Seconds of a run if its steps had taken as long as said."""
    useful = outcome.gpu_seconds[ledger.PRODUCTIVE] / spec.gpus
    return outcome.seconds if outcome.steps < spec.steps else outcome.seconds - useful * (1 - 1 / outcome.step_factor)


def _expected(outcome: Outcome, spec: RunSpec) -> float:
    """GPU-seconds that were held: the job's for the whole time, and spares."""
    return outcome.seconds * spec.gpus + outcome.gpu_seconds[ledger.SPARES]


@dataclass(frozen=True)
class Alternative:
    """Something changed, and the mean goodput with it, of runs with the same failures. base: without the change; fields: what
    makes the change where a job's fields do (and no better hardware).
    """

    change: str
    goodput: float
    base: float
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """Goodput that the change brings."""
        return self.goodput - self.base


def best_interval(prepared: Prepared, seed: int = 0, each: Map = map) -> list[tuple[int, float]]:
    """(steps, mean goodput) of intervals around the present one of the first place, from the shortest to the longest."""
    if not prepared.spec.savings or not prepared.spec.components:
        return []
    present = prepared.spec.savings[0].steps
    tried = sorted({max(1, round(present * factor)) for factor in FACTORS})
    return [(steps, _goodput(with_interval(prepared, steps), seed, each)) for steps in tried]


def _goodput(spec: RunSpec, seed: int, each: Map) -> float:
    outcomes = replicate(spec, seed, COMPARED, each)
    return math.fsum(outcome.goodput for outcome in outcomes) / len(outcomes)


def alternatives(
    prepared: Prepared, days: float | None, tokens: float | None, seed: int = 0, each: Map = map
) -> list[Alternative]:
    """What to change first: each alone, the largest gain first; those that this job or cluster cannot have are left out."""
    base = _goodput(prepared.spec, seed, each)
    result = []
    for change, settings, fields in changes_of(prepared.settings):
        try:
            other = prepare(prepared.job, settings, days, tokens, prepared.summary)
        except UserError:
            continue
        if other.spec != prepared.spec:
            result.append(Alternative(change, _goodput(other.spec, seed, each), base, fields))
    return sorted(result, key=lambda each: -each.gain)


def changes_of(settings: RunSettings) -> list[tuple[str, RunSettings, dict[str, Any]]]:
    """What may be changed of a run: in words, the settings with it, and the fields that say it (none for better hardware)."""
    checkpoint, failures = settings.checkpoint, settings.failures
    storage = checkpoint.shared
    faster = storage.model_copy(
        update={field: 2 * getattr(storage, field) for field in ("write", "read", "node_write", "node_read")}
    )
    halved = failures.model_copy(update={"mtbf_factor": 2 * failures.mtbf_factor})

    def with_checkpoint(**fields: object) -> RunSettings:
        other = checkpoint.model_copy(update=fields)
        if other.policy != checkpoint.policy:
            other.model_fields_set.discard("storage_interval")  # of a second place, which another policy may not have
        return settings.model_copy(update={"checkpoint": other})

    places = "storage_interval" in checkpoint.model_fields_set  # which another policy may not have
    changes: list[tuple[str, RunSettings, dict[str, Any]]] = [
        (f"checkpoint.policy={name}", with_checkpoint(policy=name), {} if places else {"run.checkpoint.policy": name})
        for name in ("synchronous", "asynchronous", "multi_tier", "in_memory")
        if name != checkpoint.policy
    ]
    fewer, sooner = max(0, settings.spares - 1), min(60.0, settings.timeout)
    free = settings.diagnosis.model_copy(update={"mean": 0.0})
    changes += [
        ("storage twice as fast", with_checkpoint(storage=faster), {}),
        ("checkpoint.parallel_load=true", with_checkpoint(parallel_load=True), {"run.checkpoint.parallel_load": True}),
        ("recovery=elastic", settings.model_copy(update={"recovery": "elastic"}), {"run.recovery": "elastic"}),
        ("one spare node more", _spared(settings, settings.spares + 1), {"run.spares": settings.spares + 1}),
        ("one spare node fewer", _spared(settings, fewer), {"run.spares": fewer}),
        ("hangs noticed in a minute", settings.model_copy(update={"timeout": sooner}), {"run.timeout": f"{sooner:g} s"}),
        ("diagnosis in no time", settings.model_copy(update={"diagnosis": free}), {}),
        *_input_changes(settings),
        ("half as many failures", settings.model_copy(update={"failures": halved}), {}),
    ]
    return changes


def _spared(settings: RunSettings, nodes: int) -> RunSettings:
    return settings.model_copy(update={"spares": nodes})


def _input_changes(settings: RunSettings) -> list[tuple[str, RunSettings, dict[str, Any]]]:
    """What would bring data sooner, and sum losses less often."""
    changes, loader, loss = list[tuple[str, RunSettings, dict[str, Any]]](), settings.input, settings.loss
    if loader is not None:
        faster: dict[str, dict[str, object]] = {
            "twice as many input workers": {"workers": 2 * loader.workers},
            "input.pinned=true": {"pinned": True},
            "input.prefetch=true": {"prefetch": True},
        }
        for name, fields in faster.items():
            said = {f"run.input.{field}": value for field, value in fields.items()}
            changes.append((name, settings.model_copy(update={"input": loader.model_copy(update=fields)}), said))
    if loss is not None:
        rarer = loss.model_copy(update={"steps": 10 * loss.steps})
        said = {"run.loss.steps": 10 * loss.steps}
        changes.append(("losses a tenth as often", settings.model_copy(update={"loss": rarer}), said))
    return changes
