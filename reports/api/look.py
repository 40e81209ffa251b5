"""`run`, `report`, `memory`, `checkpoint`, `sensitivity`, `variability`, `trace`, `export`, `explain`, figures as functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reports.api import PARTS, TRACES
from reports.api.jobs import Asked, engine_of, job_of, reader
from reports.api.result import Result
from reports.formatting import percent, unit_of_job
from topologies.reading import UserError, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from strategies.frameworks.export import Export
    from strategies.memory_by_layer import ByLayer
    from strategies.planner.variability import Variability


def run(
    job: Asked,
    *,
    tokens: float | None = None,
    days: float | None = None,
    price: float | None = None,
    seed: int = 0,
    runs: int = 20,
) -> Result:
    """What a job delivers over days, with failures and checkpoints: a row for each quantity with its mean, median and the range
    of 80 % of runs; `detail` has the runs. Give tokens or days. Raises UserError.
    """
    from strategies.resilience.runs import run_days

    asked = job_of(job)
    answer = run_days(asked, days, tokens, price=price, seed=seed, count=runs)
    names = ("days", "tokens", "goodput", "ettr", "failures", "kwh", *(["usd"] if answer.usd else []))
    rows = [(name, getattr(answer, name)) for name in names]
    plain = tuple({"quantity": name, "mean": e.mean, "median": e.median, "low": e.low, "high": e.high} for name, e in rows)
    delivered = f"{answer.tokens.mean:.3g} {unit_of_job(asked)} in {answer.days.mean:.3g} days"
    title = f"{asked.name}: {delivered}, goodput {percent(answer.goodput.mean)}"
    return Result(title, plain, ("quantity", "mean", "low", "high"), None, "", answer)


def report(
    job: Asked,
    folder: str | Path,
    *,
    without: Collection[str] = (),
    tokens: float | None = None,
    price: float | None = None,
    formats: Sequence[str] = ("png",),
    workers: int | None = None,
) -> list[Path]:
    """Write a page with everything about a job, and the files beside it; returns them, report.html first. without: parts that
    are left out (runs, scaling, clusters, sensitivity, published); formats: of figures, png and svg. Raises UserError.
    """
    from reports.page.job_report import Wanted, write_job_report
    from topologies.costs import rates

    for part in without:
        if part not in PARTS:
            raise UserError(f"without: unknown part '{part}'{nearest(part, PARTS)}")
    asked = job_of(job)
    wanted = Wanted(rates(asked.cluster.node.gpu, price), tokens, price, frozenset(without))
    with engine_of(workers) as runs:
        return write_job_report(Path(folder), asked, reader(asked), wanted, runs, formats=formats)[0]


def memory(job: Asked) -> ByLayer:
    """What each part of the model holds on the fullest rank, and the textbook's counts beside it. Raises UserError."""
    from strategies.memory_by_layer import memory_by_layer
    from strategies.predict import predict

    asked = job_of(job)
    return memory_by_layer(asked, predict(asked))


def checkpoint(job: Asked) -> dict[str, Any]:
    """What a job's checkpoint is: bytes, seconds, what GPUs wait, the best interval by each rule. Raises UserError."""
    from reports.tables.checkpoint import as_data
    from strategies.resilience.checkpoint_plan import checkpoint_plan
    from strategies.resilience.settings import RunSettings

    asked = job_of(job)
    return as_data(checkpoint_plan(asked, asked.run or RunSettings()))


def sensitivity(job: Asked, *, by: float = 0.1) -> Result:
    """The step with each price lower and higher by a fraction, the strongest first. Raises UserError."""
    from dataclasses import asdict

    from strategies.planner.sensitivity import PRICES, Play

    asked = job_of(job)
    play = Play.of(asked, expected=True)
    swings = play.swings({price.name: 1 + by for price in PRICES if price.name not in ("kernels", "clock")})
    rows = tuple(asdict(swing) for swing in swings)
    return Result(f"{asked.name}: prices changed by {by:.0%}", rows, tuple(rows[0]) if rows else (), None, "", swings)


def variability(job: Asked, *, gpus: float | None = None, samples: int = 1000, seed: int = 0) -> Variability:
    """How a step is spread when GPUs of one kind differ (gpus: by which standard deviation). Raises UserError."""
    from strategies.planner.variability import variability as spread

    return spread(job_of(job), gpus, samples=samples, seed=seed)


def trace(job: Asked, folder: str | Path, form: str = "perfetto") -> list[Path]:
    """Write a simulated step as a trace for tools that read those of real jobs; returns the files. form: perfetto (one file),
    kineto (a file of each rank, for HTA) or chakra (of every rank, for ASTRA-sim). Raises UserError.
    """
    from reports.chakra import write_chakra
    from reports.kineto import write_kineto
    from reports.trace import write_trace
    from strategies.predict import simulate

    if form not in TRACES:
        raise UserError(f"unknown format of traces '{form}'{nearest(form, TRACES)}")
    asked, into = job_of(job), Path(folder)
    timeline = simulate(asked, fold=form != "chakra")
    if form == "chakra":
        return write_chakra(timeline, into)
    if form == "kineto":
        return write_kineto(timeline, into, "Half" if asked.plan.precision == "fp16" else "BFloat16")
    into.mkdir(parents=True, exist_ok=True)
    return [write_trace(timeline, into / "trace.json.gz")]


def export(job: Asked, to: str) -> Export:
    """The settings that run a job's plan with a framework (`megatron`, `deepspeed`, …), and what they cannot express."""
    from strategies.frameworks.export import export as written

    return written(to, job_of(job))


def explain(term: str) -> str:
    """What a metric, a field or a word of distributed training means. Raises UserError."""
    from reports.glossary import explain as explained

    return explained(term)


def _png(drawn: Figure) -> bytes:
    from io import BytesIO

    picture = BytesIO()
    drawn.savefig(picture, format="png")
    return picture.getvalue()


def _in_notebooks(drawn: Figure) -> Figure:
    """The figure, which a notebook shows: IPython by itself shows figures only once pyplot, not used here, is imported."""
    drawn._repr_png_ = partial(_png, drawn)  # type: ignore[attr-defined]
    return drawn


class Figures:
    """Every registered figure by its name: `figures.gantt(timeline)` draws, `figures.gantt(timeline, "gantt.png")` saves it."""

    def __getattr__(self, name: str) -> Any:
        from reports.figures import figures as registered

        if name not in registered:
            raise AttributeError(f"no figure '{name}': there are {', '.join(sorted(registered))}")
        drawing = registered[name]

        def draw(data: Any, path: str | Path | None = None) -> Figure | Path:
            return drawing(data, Path(path)) if path is not None else _in_notebooks(drawing.figure(data))

        draw.__name__, draw.__doc__ = name, drawing.draw.__doc__
        return draw

    def __dir__(self) -> list[str]:
        from reports.figures import figures as registered

        return sorted(registered)


figures = Figures()
