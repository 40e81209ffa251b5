"""`advise`, `plan`, `whatif`, `compare`, `buy` and `budget` as functions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from reports.api.jobs import Asked, Vary, axes_of, engine_of, job_of, reader, stated
from reports.api.result import Result
from reports.formatting import TOKENS, training_cost, unit_of_job
from reports.inputs import describe
from strategies.job import Job
from strategies.planner.arguments import arguments_of
from strategies.planner.ranking import HEADROOM, rank
from strategies.planner.search.objective import Limits
from strategies.planner.search.objective import objective as objective_of
from strategies.planner.search.search import Search
from strategies.planner.search.space import default_space, load_space, read_space
from strategies.planner.uncertainty import predict_with_interval, with_interval
from strategies.predict import predict
from topologies.costs import mean_rates


def advise(
    job: Asked, *, headroom: float = HEADROOM, tokens: float = TOKENS, price: float | None = None, workers: int | None = None
) -> Result:
    """The usual ways to train, simulated, the fastest that fits first. tokens, price: of what days and dollars are told. Raises
    UserError where none can be simulated.
    """
    from reports.tables.advice import verdict
    from strategies.planner.advise import advise as ways_to_train
    from strategies.planner.auto_plan import quick_way

    own = stated(job_of(job))
    with engine_of(workers) as runs:
        answer = ways_to_train(own, predict, runs.map, headroom=headroom, more=quick_way(own))
    if (best := answer.best) is not None:
        best = replace(best, summary=with_interval(best.job, best.summary))
        answer = replace(answer, candidates=(best, *answer.candidates[1:]))
    money = {"rates": mean_rates(own.cluster, price), "tokens": tokens}
    rows = tuple(
        {
            "name": each.name,
            "arguments": arguments_of(own, each.job),
            "comfortable": each.comfortable,
            **each.summary.to_dict(),
            "training": training_cost(each.summary, money).to_dict(),
        }
        for each in answer.candidates
    )
    shown = ("name", "step_seconds", "tokens_per_second_per_gpu", "mfu", "memory_peak", "fits")
    return Result(
        verdict(answer, own), rows, shown, best.job if best else None, arguments_of(own, best.job) if best else "", answer
    )


def plan(
    job: Asked,
    *,
    space: str | Mapping[str, Sequence[Any]] | None = None,
    vary: Vary = (),
    objective: str = "step",
    tokens: float = TOKENS,
    price: float | None = None,
    headroom: float = HEADROOM,
    max_gpus: int | None = None,
    max_days: float | None = None,
    max_cost: float | None = None,
    top: int = 1,
    seconds: float = float("inf"),
    within: float = 0.0,
    workers: int | None = None,
) -> Result:
    """The best plan of a declared space, proven by bounds and simulations; rows of all plans that were simulated and keep to
    everything. space: a file or axes; vary: axes in place of the usual ones, or more. Raises UserError for a space without plans.
    """
    from reports.tables.search import arguments, verdict

    began, own = time.perf_counter(), stated(job_of(job))
    read = reader(own)
    axes = default_space(own) if space is None else load_space(space) if isinstance(space, str) else read_space(space, "space")
    axes = axes.varied(axes_of(vary))
    limits = Limits(gpus=max_gpus, days=max_days, cost=max_cost, headroom=headroom)
    with engine_of(workers) as runs:
        answer = Search(
            read, axes, objective_of(objective), runs, limits, tokens, price, top, False, seconds, within, began=began
        ).run()
    best = read(answer.best["changes"]) if answer.best else None
    shown = ("step", "tokens_per_second_per_gpu", "mfu", "memory", "changes")
    words = arguments(answer.best, own) if answer.best else ""
    return Result(verdict(answer, own), tuple(answer.rows), shown, best, words, answer)


def whatif(
    job: Asked,
    vary: Vary,
    *,
    one_at_a_time: bool = False,
    batch: str | None = None,
    replan: bool = False,
    runs: bool = False,
    tokens: float = TOKENS,
    price: float | None = None,
    seed: int = 0,
    workers: int | None = None,
) -> Result:
    """The job with other inputs: {"nodes": [8, 16], "cluster.node.nic": ["x2"]}; the first row is the job itself.

    batch: "keep" or "scale"; replan: the best plan at every point; runs: with failures and checkpoints. Raises UserError.
    """
    from reports.tables.whatif import as_data
    from strategies.planner import whatif as cases_of
    from strategies.planner.multiples import absolute

    own = job_of(job)
    read, axes = reader(own), axes_of(vary)
    axes = [absolute(axis, own, price) for axis in axes]
    several = cases_of.one_at_a_time(axes) if one_at_a_time else cases_of.combinations(axes)
    inputs = cases_of.batched(read, [*([{}] if replan else []), *several], batch)
    with engine_of(workers) as each:
        cases = cases_of.ask(
            read, [(case, "", {}) for case in ({}, *inputs)], each, tokens, price, seed if runs else None, replan
        )
    rows = tuple(as_data(case, own) for case in cases)
    named = tuple({**row, "step": (row["summary"] or {}).get("step_seconds")} for row in rows)
    title = f"{own.model.name} on {own.cluster.described}: {', '.join(axis.name for axis in axes)} changed, {len(inputs)} cases"
    return Result(title, named, ("changes", "step", "refused"), None, "", cases)


def compare(
    *jobs: Asked, tokens: float = TOKENS, price: float | None = None, seed: int = 0, runs: bool = False, total: bool = False
) -> Result:
    """Jobs side by side, in the order given; `best` is that with most tokens/s/GPU of those that fit. runs: 20 runs of each with
    failures and checkpoints; total: what all ranks send together. Raises UserError.
    """
    from reports.tables.compare_runs import run_data
    from strategies.resilience.runs import run_training

    asked = [job_of(job) for job in jobs]
    rows: list[dict[str, Any]] = []
    keys = []
    for job in asked:
        summary, money = predict_with_interval(job, total), mean_rates(job.cluster, price)
        keys.append((rank(summary, dict(job.plan), job.hash), job))
        row = {"job": describe(job), **summary.to_dict(), "name": job.name}
        row["training"] = training_cost(summary, {"rates": money, "tokens": tokens}).to_dict()
        if runs and summary.fits:
            row["run"] = run_data(run_training(job, summary, tokens, money, seed))
        rows.append(row)
    fitting = [(key, job) for key, job in keys if not key[0]]
    best = min(fitting, key=lambda pair: pair[0])[1] if fitting else None
    title = f"{len(rows)} jobs: {best.name} has most {unit_of_job(best)}/s/GPU" if best else f"none of {len(rows)} jobs fits"
    return Result(title, tuple(rows), ("name", "step_seconds", "tokens_per_second_per_gpu", "mfu", "memory_peak", "fits"), best)


def buy(*offers: Asked, tokens: float = TOKENS, seed: int = 0, workers: int | None = None) -> Result:
    """Jobs on the clusters that may be bought, each at its own best plan and with its listed price, by one global batch: step,
    goodput, days and cost. Raises UserError.
    """
    from reports.tables.buy import as_data, verdict
    from strategies.planner.spending.purchase import Offer, crossovers, same_batch
    from strategies.planner.spending.purchase import buy as bought_of

    jobs = [stated(job_of(offer)) for offer in offers]
    said = not any(remark.startswith("global_batch: ") for remark in jobs[0].remarks)
    with engine_of(workers) as runs:
        bought = bought_of(same_batch([Offer(job.cluster.described, job) for job in jobs], said), tokens, runs, seed)
        data = as_data(bought, list(crossovers(bought, tokens, runs)))
    best = min((each for each in bought if each.training), key=lambda e: e.training.seconds if e.training else 0.0, default=None)
    shown = ("offer", "gpus", "plan", "refused")
    return Result(
        verdict(bought, tokens), tuple(data["offers"]), shown, best.job if best else None, "", (bought, data["crossovers"])
    )


def budget(
    models: Iterable[str] | str | None = None,
    *,
    cluster: str,
    nodes: int,
    days: float = 30.0,
    ratio: float = 20.0,
    price: float | None = None,
    seed: int = 0,
    workers: int | None = None,
) -> Result:
    """The largest of the models (by default all presets) that a cluster trains on `ratio` tokens per parameter in some days."""
    from reports.tables.budget import as_data
    from strategies.models.model import model_names
    from strategies.planner.spending.budget import budget as models_of
    from strategies.read_job import stated_job

    names = [models] if isinstance(models, str) else list(models or model_names())

    def read(name: str) -> Job:
        return stated_job(model=name, cluster=cluster, nodes=nodes)

    with engine_of(workers) as runs:
        found = models_of(names, read, days, ratio, price, runs.map, runs.map, seed)
    best = next((each for each in found if each.enough and each.plan), None)
    what = f"{read(names[0]).cluster.described} for {days:g} days"
    title = f"{what}: {best.model}" if best else f"{what}: no model is trained on {ratio:g} tokens per parameter"
    rows = tuple(as_data(each) for each in found)
    return Result(
        title, rows, ("model", "parameters", "enough", "refused"), best.plan.job if best and best.plan else None, "", found
    )
