"""`shardyard plan`."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reports.commands import end_interrupted
from reports.commands._common import (
    AS_JSON,
    changing,
    check_positive,
    engine_options,
    headroom_option,
    job_options,
    money_options,
    picture_options,
    quantity,
    report_folder,
    show,
    tokens_of,
)
from reports.terminal import echo, terminal, throttled

OF_TRAINING = ("time", "cost", "gpu-hours", "energy", "goodput", "goodput-cost")

if TYPE_CHECKING:
    from strategies.job import Job
    from strategies.planner.search.answer import Answer, Progress


@click.command("plan", epilog="Example: shardyard plan --model llama-3.1-8b --cluster dgx-h100 --nodes 2 --seconds 60")
@click.argument("job", required=False, metavar="[JOB.yaml]")
@job_options
@click.option("--space", metavar="FILE", help="YAML of what may vary: axis -> list of values. Otherwise the usual axes.")
@click.option(
    "--vary", multiple=True, metavar="FIELD=V,V,…", help="An axis in place of the usual one, or one more: nodes=64,128."
)
@click.option(
    "--objective",
    "goal",
    default="step",
    show_default=True,
    help="step, throughput, time, gpu-hours, cost, energy; goodput, goodput-cost: time and cost with failures and checkpoints.",
)
@money_options
@click.option("--max-gpus", type=int, help="Use no more GPUs.")
@click.option("--max-memory", metavar="SIZE", help="Leave memory free: at most so much per GPU, '70 GB'.")
@headroom_option
@click.option("--max-days", type=float, help="Train all --tokens in so many days.")
@click.option("--max-cost", type=float, help="Train all --tokens for so many dollars.")
@click.option("--max-power", metavar="POWER", help="Draw no more, '2 MW'.")
@click.option("--top", type=click.IntRange(1), default=1, show_default=True, help="Prove so many of the best.")
@click.option("--front", is_flag=True, help="Prove the Pareto front of time, cost and memory, too.")
@click.option(
    "--limit",
    "--seconds",
    "limit",
    type=click.FloatRange(0),
    default=float("inf"),
    metavar="SECONDS",
    help="Stop after so long, and say how far it got.",
)
@click.option(
    "--within",
    type=click.FloatRange(0, 1),
    default=0.0,
    metavar="PART",
    help="Stop when nothing that is left can be better by more than this: 0.03 is 3 %. [default: 0, proven best]",
)
@click.option(
    "--results", metavar="FILE", help="Keep every simulation in a .jsonl, .csv or .parquet; go on from one that exists."
)
@click.option("--window", type=click.IntRange(1), help="Simulations at a time, however many workers there are.")
@picture_options("plans by time, cost and memory")
@engine_options
@AS_JSON
def command(
    job: str | None,
    overrides: tuple[str, ...],
    space: str | None,
    vary: tuple[str, ...],
    goal: str,
    tokens: float | None,
    price: float | None,
    max_gpus: int | None,
    max_memory: str | None,
    headroom: float,
    max_days: float | None,
    max_cost: float | None,
    max_power: str | None,
    top: int,
    front: bool,
    limit: float,
    within: float,
    results: str | None,
    window: int | None,
    plot: str | None,
    report: str | None,
    workers: int | None,
    dask: str | None,
    ray: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """The best plan of a declared space, proven: bounds on all plans first, then simulations of the most promising.

    What the job says of its plan is kept where no axis varies it; --set FIELD=VALUE keeps a field that the usual axes would vary.
    The exit code is 2 when no plan keeps to everything, 1 when the time was up before one was found, 130 after Ctrl-C and 143
    after SIGTERM, with what was found until then.
    """
    began = time.perf_counter()
    from reports.formatting import TOKENS
    from reports.tables.search import pace
    from strategies.planner.search.deadline import Deadline, TimeUp
    from strategies.planner.search.objective import Limits, objective
    from strategies.planner.search.results import Results
    from strategies.planner.search.search import WINDOW, Search
    from strategies.planner.search.space import default_space, load_space, parse_axis
    from strategies.planner.search.workers.executors import engine
    from strategies.planner.uncertainty import predict_with_interval
    from topologies.documents.units import size, watts
    from topologies.reading import UserError

    check_positive(max_gpus=max_gpus, max_days=max_days, max_cost=max_cost, limit=None if limit == float("inf") else limit)
    if tokens is None and (max_days is not None or max_cost is not None or goal in OF_TRAINING):
        asked = "--max-days" if max_days is not None else "--max-cost" if max_cost is not None else f"--objective {goal}"
        raise UserError(f"{asked} is of a whole training: give its --tokens, such as --tokens 1e12")
    if any(text.partition("=")[0] == "price" for text in vary):
        raise UserError("--vary price: a search has one price, --price; `shardyard whatif --vary price=…` compares several")
    folder, read = report_folder(report), changing(job, overrides, given, find=False)
    axes = load_space(space) if space else default_space(read({}))
    axes = axes.without(text.partition("=")[0] for text in overrides).varied(parse_axis(text) for text in vary)
    limits = Limits(
        gpus=max_gpus,
        memory=quantity("--max-memory", max_memory, size),
        days=max_days,
        cost=max_cost,
        power=quantity("--max-power", max_power, watts),
        headroom=headroom,
    )
    kept, total = Results(results), tokens_of(tokens) or TOKENS
    with engine(workers, dask, ray) as runs, _progress() as tell:
        search = Search(
            read,
            axes,
            objective(goal),
            runs,
            limits,
            tokens=total,
            price=price,
            top=top,
            front=front,
            seconds=limit,
            within=within,
            results=kept,
            tell=tell,
            window=window or WINDOW,
            began=began,
        )
        answer = search.run()
    bar = None
    if answer.best and not answer.ended:
        with suppress(TimeUp), Deadline(limit, began).cut():
            bar = predict_with_interval(read(answer.best["changes"])).interval
    if as_json:
        from reports.tables.search import as_data

        echo(json.dumps(as_data(answer, read({}), tokens, bar), indent=2))
    else:
        from reports.tables.search import overview

        show(overview(answer, read({}), tokens, top, bar))
    if answer.rows and (plot is not None or folder is not None):
        _draw(answer, read, total, price, plot, folder, as_json)
    echo(pace(answer), err=True)
    if answer.ended:
        end_interrupted(
            answer.ended, f"simulations are kept in {results}; the same command goes on from there" if results else ""
        )
    if answer.best is None:
        sys.exit(1 if answer.interrupted else 2)


def _draw(
    answer: Answer,
    read: Callable[[dict[str, Any]], Job],
    tokens: float,
    price: float | None,
    plot: str | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """The figure and the page that were asked for."""
    from reports.figures.pareto import pareto
    from reports.page.chosen import BESIDE, write_chosen
    from reports.page.simulated_plans import Plans, front, section
    from reports.tables.search import arguments, verdict
    from strategies.predict import predict
    from topologies.costs import mean_rates

    own = read({})
    rates = mean_rates(own.cluster, price)
    fields = own.plan.model_dump(mode="json") | {"nodes": own.cluster.nodes, "sequence": own.plan.sequence_of(own.model)}
    names = {row["hash"]: _named(read(row["changes"]), own) for row in answer.rows}
    plans = Plans(answer.rows, fields, tokens, rates, own.cluster.node.gpu.memory, lambda row: names[row["hash"]])
    if plot is not None:
        echo(f"wrote {pareto(front(plans), Path(plot))}", err=as_json)
    if folder is not None:
        best = answer.rows[0]
        runs = {plans.name(row): predict(read(row["changes"])) for row in answer.rows[:BESIDE]}
        said = f"{verdict(answer, own)}. As arguments: {arguments(best, own)}"
        command, about = shlex.join(["shardyard", *sys.argv[1:]]), (section(plans, "Plans that were simulated"),)
        paths = write_chosen(folder, read(best["changes"]), runs, rates, tokens, command, about, said)
        echo(f"wrote {paths[0]} and {len(paths) - 1} files beside it", err=as_json)


def _named(job: Job, own: Job) -> str:
    """A plan in a few words, on how many nodes where they are not the job's."""
    from strategies.planner.auto_plan import name_of

    nodes = f" on {job.cluster.described}" if job.cluster.described != own.cluster.described else ""
    return name_of(job.plan) + nodes


@contextmanager
def _progress() -> Iterator[Callable[[Any], None]]:
    """A bar on the terminal: simulated of those that may have to be, the best so far, how many are ruled out.

    Elsewhere a line now and then.
    """
    console = terminal(stderr=True)
    if not console.is_terminal:
        line = throttled(lambda text: echo(text, err=True))
        yield lambda state: line(f"{_progress_text(state)}, {state.simulated:,} simulated, {state.open:,} open")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def tell(state: Any) -> None:
            total = state.simulated + state.open if state.simulated else None
            bar.update(task, description=_progress_text(state), completed=state.simulated, total=total)

        yield tell


def _progress_text(state: Progress) -> str:
    sure = f" (at most {state.gap:.1%} from the best)" if state.gap else ""
    number, unit = state.display(state.best) if state.best is not None else (0.0, "")
    best = f", best {number:.4g} {unit}{sure}" if state.best is not None else ""
    return f"{state.stage}{best}" + (f", {state.pruned:,} ruled out" if state.pruned else "")
