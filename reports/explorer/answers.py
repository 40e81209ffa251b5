"""What the page shows of a job, as plain data: the answer, the step over time, values of a field beside each other, days."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.figures import COLOURS, MEMORY
from reports.formatting import KINDS, TOKENS, components, digits, held, percent, seconds, size, stages, unit_of_job
from reports.inputs import describe
from reports.metrics import hint
from reports.page.step_view import step_view
from reports.tables.step import headline, verdict
from strategies.overrides import merge, parse_changes
from strategies.planner.effects_cost import with_effects
from strategies.planner.uncertainty import with_interval
from strategies.predict import predict, simulate
from topologies.costs import mean_rates
from topologies.reading import UserError, argument, load_yaml, parse_value

if TYPE_CHECKING:
    from reports.explorer.session import Session
    from sim.analysis.summary import Summary
    from sim.timeline import Timeline
    from strategies.job import Job

PLAYED = 100_000  # passes of a step up to which its timeline is drawn
OF_THE_PAGE = ("tokens", "price")  # what is asked of a job beside its fields
VALUES = 24  # of a field, that are compared at once


def asked(texts: Sequence[str]) -> tuple[list[str], dict[str, float]]:
    """Changes of the job, and what the page itself asks: tokens and price."""
    changes, own = [], {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in OF_THE_PAGE:
            changes.append(text)
            continue
        number = parse_value(value, name)
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < 1e30:
            raise UserError(f"{name}={value}: must be a positive number")
        own[name] = float(number)
    return changes, own


def answer(job: Job, own: Mapping[str, float]) -> dict[str, Any]:
    """Verdict, headline, breakdown, memory, volumes, links and notes; the interval takes longer, see `interval`."""
    summary = _predicted(_of_a_step(job))
    if job.effects:
        summary = with_effects(job, _played(_of_a_step(job)), summary)
    inputs = describe(job)
    priced = inputs | _prices(job, own)
    return {
        "verdict": verdict(summary, inputs),
        "fits": summary.fits,
        "cards": _cards(summary, priced),
        "step": summary.step_seconds,
        "tokens_per_second": summary.tokens_per_second,
        "unit": unit_of_job(job),
        "mfu": summary.mfu,
        "breakdown": [
            {
                "name": name,
                "seconds": summary.breakdown[name],
                "text": seconds(summary.breakdown[name]),
                "colour": COLOURS[name.removesuffix(" exposed")],
            }
            for name in components([summary.breakdown])
        ],
        "memory": _memory(summary),
        "capacity": summary.memory_capacity,
        "volume": [[axis, size(volume.bytes), f"{digits(volume.psi)} Ψ"] for axis, volume in summary.volume.items()],
        "links": [[load.name, percent(load.utilisation)] for load in summary.links],
        "notes": [*inputs["notes"], *summary.notes],
        "resolved": {name: value for name, value in inputs["plan"].items() if isinstance(value, int | str)},
        "hash": job.hash,
        "profile": inputs["profile"],
    }


def interval(job: Job, own: Mapping[str, float]) -> dict[str, Any]:
    """The headline again, with the interval around the step."""
    return {"cards": _cards(with_interval(job, _predicted(_of_a_step(job))), describe(job) | _prices(job, own)), "hash": job.hash}


def _prices(job: Job, own: Mapping[str, float]) -> dict[str, Any]:
    return {"tokens": own.get("tokens", TOKENS), "rates": mean_rates(job.cluster, own.get("price"))}


def _cards(summary: Summary, inputs: Mapping[str, Any]) -> list[list[str]]:
    return [[label, value, hint(label.partition(" (")[0])] for label, value in headline(summary, inputs)]


def _memory(summary: Summary) -> list[dict[str, Any]]:
    return [
        {"stage": entry.stage, "peak": entry.peak, "kinds": [[kind, held(entry)[kind], MEMORY[kind]] for kind in KINDS]}
        for entry in stages(summary)
    ]


def taken_away(session: Session, changes: Sequence[str], job: Job) -> dict[str, str]:
    """The job as a command, in Python and, where its fields say all of it, as YAML for a file."""
    given = {name: value for name, value in session.given.items() if value not in (None, (), "")}
    arguments = [session.path] if session.path else []
    for name, value in given.items():
        option = {"effects": "--effect", "variability": "--ideal"}.get(name, f"--{name.replace('_', '-')}")
        several = value if isinstance(value, list | tuple) else [value]
        arguments += [option] if name == "variability" else [word for each in several for word in (option, str(each))]
    every = [*session.overrides, *changes]
    arguments += [word for text in every for word in ("--set", text)]
    call = [repr(session.path)] if session.path else []
    call += [f"overrides={every!r}"] if every else []
    call += [f"{name}={value!r}" for name, value in given.items()]
    return {
        "command": f"shardyard simulate {shlex.join(arguments)}",
        "python": f"import shardyard\n\njob = shardyard.read_job({', '.join(call)})\nsummary = shardyard.predict(job)\n",
        "yaml": _yaml(session, every, job),
    }


def _yaml(session: Session, changes: Sequence[str], job: Job) -> str:
    """A job file; "" where the command line says what a file cannot."""
    import yaml

    own = load_yaml(Path(session.path)) if session.path else {}
    data = own | {name: value for name, value in session.given.items() if value not in (None, ())}
    parsed = parse_changes(changes)
    if any(isinstance(value, Mapping) and name not in ("plan", "run") for name, value in parsed.items()):
        return ""
    data = merge(data, parsed)
    if any(name.startswith(("from_", "input")) for name in data):
        return ""
    data["plan"] = job.plan.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


@lru_cache(maxsize=4)
def _predicted(job: Job) -> Summary:
    return predict(job)


@lru_cache(maxsize=4)
def _played(job: Job) -> Timeline:
    return simulate(job)


def _of_a_step(job: Job) -> Job:
    """The job without what happens over days, which changes no step and is no key of a cache."""
    return replace(job, run=None)


def timeline(job: Job, window: tuple[float, float] | None = None, lane: int | None = None) -> dict[str, Any]:
    """One step between two moments, and what a row's GPU holds over the step: see `step_view`."""
    plan = job.resolve()
    passes = plan.microbatches * plan.pp * plan.chunks
    if passes > PLAYED:
        raise UserError(f"the step has {passes:,} passes: too many to draw; fewer microbatches look alike")
    return step_view(_played(_of_a_step(job)), window, lane)


def varied(session: Session, changes: Sequence[str], field: str, values: Sequence[Any]) -> dict[str, Callable[[], Job]]:
    """By value, what reads the job with it; values that are texts such as "nodes=4" are read as `--set` reads them."""
    if len(values) > VALUES:
        raise UserError(f"{len(values)} values: at most {VALUES} at once")
    rest = [text for text in changes if not text.startswith(f"{field}=")]

    def reader(value: Any) -> Callable[[], Job]:
        text = value if isinstance(value, str) and "=" in value else argument(field, value)
        return lambda: session.job([*rest, text])

    return {str(value): reader(value) for value in values}


def curve(jobs: Mapping[str, Callable[[], Job]]) -> list[dict[str, Any]]:
    """Answers of jobs by the value that they differ in; why a job is impossible, where it is."""
    points: list[dict[str, Any]] = []
    for value, read in jobs.items():
        try:
            summary = predict(read())
        except UserError as error:
            points.append({"value": value, "error": str(error)})
            continue
        points.append(
            {
                "value": value,
                "step": summary.step_seconds,
                "tokens_per_second": summary.tokens_per_second,
                "mfu": summary.mfu,
                "memory": summary.worst.peak,
                "fits": summary.fits,
            }
        )
    return points


def days(job: Job, own: Mapping[str, float]) -> dict[str, Any]:
    """What some runs of the whole training deliver: headline, where GPU-time goes, how they end."""
    from reports.formatting import dollars, span
    from sim.runs import ledger
    from strategies.resilience.run_spec import prepare
    from strategies.resilience.runs import COMPARED, run
    from strategies.resilience.settings import RunSettings
    from strategies.resilience.step_interval import with_step_interval

    tokens = own.get("tokens", TOKENS)
    prepared = with_step_interval(prepare(job, job.run or RunSettings(), tokens=tokens))
    result = run(prepared, mean_rates(job.cluster, own.get("price")), count=COMPARED)
    cards = [
        ["days", digits(result.days.mean), f"80 % between {digits(result.days.low)} and {digits(result.days.high)}"],
        ["goodput", percent(result.goodput.mean), "share of GPU-time that advances training"],
        ["interruptions", digits(result.failures.mean), "mean of the runs"],
        *([["cost", dollars(result.usd.mean), "all GPU-hours, spares too"]] if result.usd is not None else []),
        ["checkpoint every", span(prepared.spec.savings[0].steps * prepared.spec.step) if prepared.spec.savings else "–", ""],
    ]
    return {
        "cards": cards,
        "shares": [[cause, result.shares[cause]] for cause in ledger.CAUSES if result.shares[cause] > 0],
        "notes": list(prepared.notes),
        "runs": result.runs,
    }


def text_of(data: Any) -> str:
    """JSON that any parser reads: no NaN."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, default=str)
