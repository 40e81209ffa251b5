"""The whole report of a job: everything that `shardyard report` shows, simulated and put in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.formatting import TOKENS, unit_of_job
from reports.page import alternatives, trust
from reports.page.page import Report, Section, write_report
from reports.page.winner import Entry, winner
from strategies.planner.arguments import arguments_of, as_arguments, stated_otherwise
from strategies.planner.ranking import rank, rank_row
from topologies.reading import UserError

if TYPE_CHECKING:
    from calibration.published.comparison import Compared
    from reports.page.simulated_plans import Plans
    from sim.analysis.summary import Summary
    from sim.timeline import Timeline
    from strategies.job import Job
    from strategies.planner.search.space import Space
    from strategies.planner.search.workers.executors import Engine
    from strategies.planner.whatif import Read
    from topologies.costs import Rates

DEPTH = 8  # pipeline stages of the usual candidates
BESIDE = 7  # candidates that are shown
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """What is shown besides the step itself. variants: jobs to be shown beside it in place of the usual ones; search: seconds
    that the sweep of degrees may take (None: no sweep); results, validation: the files that are shown, and what they hold.
    """

    rates: Rates
    tokens: float | None = None
    price: float | None = None
    without: frozenset[str] = frozenset()
    variants: Sequence[Job] = ()
    search: float | None = None
    results: tuple[str, Sequence[Mapping[str, Any]]] | None = None
    validation: tuple[str, Sequence[Compared]] | None = None

    @property
    def total(self) -> float:
        """Tokens that prices are told for."""
        return self.tokens or TOKENS


def write_job_report(
    folder: Path,
    job: Job,
    read: Read,
    wanted: Wanted,
    engine: Engine,
    command: str = "",
    formats: Sequence[str] = ("png",),
    tell: Tell = lambda _: None,
) -> tuple[list[Path], Summary]:
    """Simulate `job`, and write its page and the files beside it into `folder`: their paths, and the answer. command: that asked;
    formats: of figures; read, tell: see `report`. Raises UserError.
    """
    from reports.inputs import describe
    from strategies.planner.fixes import fixes
    from strategies.planner.uncertainty import predict_with_interval
    from strategies.predict import predict, simulate

    tell("simulating the step")
    timeline = simulate(job)
    summary = predict_with_interval(job, whole=timeline)
    inputs = describe(job, command)
    if not summary.fits:
        inputs["fixes"] = [str(fix) for fix in fixes(job, summary, predict)]
    page = report(job, read, timeline, summary, inputs, wanted, engine, tell)
    tell("drawing")
    return write_report(folder, page, formats), summary


def report(
    job: Job, read: Read, played: Timeline, answer: Summary, inputs: Mapping[str, Any], wanted: Wanted, engine: Engine, tell: Tell
) -> Report:
    """The report of `job`, whose step has been played. read: the job with other fields; tell: hears what is being done."""
    sections: list[Section] = []
    beside: dict[str, Summary] = {}
    others: list[Entry] = []
    if wanted.variants:
        beside = _variants(job, answer, wanted.variants, engine, tell, others)
    elif "runs" not in wanted.without:
        beside = _usual(job, answer, engine, tell, sections, others)
    if "scaling" not in wanted.without:
        tell("scaling")
        sections.append(alternatives.scaling(read, job, engine, wanted.total, wanted.price))
    if "clusters" not in wanted.without:
        tell("other clusters")
        sections.append(alternatives.clusters(read, job, engine, wanted.total, wanted.price))
    sections += _plans(job, read, wanted, engine, tell, others)
    if "sensitivity" not in wanted.without:
        tell("what limits the step")
        sections.append(alternatives.limits(job, answer.step_seconds))
    money = {"rates": wanted.rates} | ({"tokens": wanted.tokens} if wanted.tokens else {})
    return Report(
        played,
        answer,
        {**inputs, **money},
        job.cluster,
        beside,
        tuple(sections),
        _evidence(job, wanted, engine, tell),
        alternatives.launches(job),
        alternatives.collectives(played),
        winner(_entry(job.name, job, answer, ""), others, unit_of_job(job)),
    )


def _entry(name: str, job: Job, summary: Summary, arguments: str) -> Entry:
    return Entry(name, rank(summary, dict(job.plan), job.hash), summary.tokens_per_second_per_gpu, arguments)


def _entries(plans: Plans, job: Job, read: Read) -> list[Entry]:
    """Rows of plans that fit and that are this job with other fields: a table of another job is none of the page's plans."""
    entries = []
    for row in plans.fitting:
        changes = stated_otherwise(job, row["changes"])
        try:
            if read(changes).hash != row["hash"]:
                continue
        except UserError:
            continue
        rate = row["tokens_per_second_per_gpu"]
        entries.append(Entry(plans.name(row), rank_row(row, 1 / rate), rate, as_arguments(changes)))
    return entries


def _variants(
    job: Job, answer: Summary, variants: Sequence[Job], engine: Engine, tell: Tell, others: list[Entry]
) -> dict[str, Summary]:
    """The job, and beside it what was asked for."""
    from strategies.predict import predict

    tell("other runs")
    summaries = dict(zip((variant.name for variant in variants), engine.map(predict, variants), strict=True))
    for variant in variants:
        others.append(_entry(variant.name, variant, summaries[variant.name], ""))
    return {job.name: answer, **summaries}


def _usual(
    job: Job, answer: Summary, engine: Engine, tell: Tell, sections: list[Section], others: list[Entry]
) -> dict[str, Summary]:
    """The job, and beside it the fastest of the other usual ways to train; a section says so when none of them is possible."""
    from strategies.planner.advise import advise
    from strategies.planner.search.site import started
    from strategies.predict import predict

    tell("other runs")
    try:
        own = started(job).hash  # which a usual way may be
        candidates = [each for each in advise(job, predict, engine.map, DEPTH).candidates if each.job.hash != own]
    except UserError as error:
        sections.append(Section("Beside other runs", text=(f"The usual ways to train are left out: {error}.",)))
        return {}
    others += [
        _entry(candidate.name, candidate.job, candidate.summary, arguments_of(job, candidate.job)) for candidate in candidates
    ]
    return {job.name: answer, **{candidate.name: candidate.summary for candidate in candidates[:BESIDE]}}


def _plans(job: Job, read: Read, wanted: Wanted, engine: Engine, tell: Tell, others: list[Entry]) -> list[Section]:
    """Of a table of results, and of a sweep."""
    from reports.page.simulated_plans import Plans, section

    plan = job.plan.model_dump(mode="json") | {"nodes": job.cluster.nodes, "sequence": job.plan.sequence_of(job.model)}
    capacity, sections = job.cluster.node.gpu.memory, list[Section]()
    if wanted.results is not None:
        name, rows = wanted.results
        plans = Plans(rows, plan, wanted.total, wanted.rates, capacity)
        sections.append(section(plans, f"Plans of {name}"))
        others += _entries(plans, job, read)
    if wanted.search is not None:
        from strategies.planner.small_space import sweep

        space, until = _small(job), time.monotonic() + wanted.search
        plans_found, left = sweep(read, space, engine, lambda done: tell(f"plans {done} of {space.size}"), until)
        plans = Plans(plans_found, plan, wanted.total, wanted.rates, capacity)
        others += _entries(plans, job, read)
        degrees = section(plans, "Other degrees") if plans_found else Section("Other degrees")
        late = f"{left:,} more plans were not simulated: the {wanted.search:g} s of --search-seconds were over."
        sections.append(Section(degrees.title, degrees.pictures, (*degrees.text, late), degrees.sheet) if left else degrees)
    return sections


def _small(job: Job) -> Space:
    """Every pp, every tp of a node, and three settings of data parallelism; everything else as the job has it.

    Long pipelines, which take longest to simulate, come last.
    """
    from strategies.planner.search.space import Axis, Space, default_space, parse_axis

    usual = {axis.name: axis for axis in default_space(job).axes}
    sharding = parse_axis("plan.data_parallel=ddp,zero1,zero3")
    batch = parse_axis(f"plan.global_batch={job.resolve().global_batch}")
    free = [parse_axis(f"plan.{name}=null") for name in ("dp", "accumulation")]
    shortest = Axis("plan.pp", tuple(sorted(usual["plan.pp"].choices, key=lambda choice: int(choice["plan.pp"]))))
    widest = Axis("plan.tp", usual["plan.tp"].choices[::-1])
    return Space((shortest, widest, sharding, batch, *free))


def _evidence(job: Job, wanted: Wanted, engine: Engine, tell: Tell) -> tuple[Section, ...]:
    from strategies.predict import profile_of

    sections = [trust.profile_errors(profile_of(job))]
    if wanted.validation is not None:
        name, rows = wanted.validation
        sections.append(trust.measured(rows, name))
    if "published" not in wanted.without:
        tell("published runs")
        sections.append(trust.published(job, engine))
    return tuple(sections)


def results_of(file: str) -> Sequence[Mapping[str, Any]]:
    """The rows of a table that `shardyard plan --results` wrote. Raises UserError."""
    from strategies.planner.search.results import Results

    if not Path(file).is_file():
        raise UserError(f"--results {file}: no such file; `shardyard plan --results {file}` makes one")
    return list(Results(file).rows.values())
