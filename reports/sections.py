"""Parts of the page besides the step itself: how it scales, what moves it, how far to trust it, how to run it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reports.figures.efficiency import Scaling, Size, efficiency
from reports.page import Launch, Picture, Section, Sheet
from reports.words import percent
from topologies.reading import UserError

if TYPE_CHECKING:
    from calibration.engines import Engine
    from calibration.validation import Compared
    from calibration.whatif import Case, Read
    from sim.prices import Profile
    from strategies.job import Job

NEAREST = 60  # published rows that are played, of the same kind of GPU
TABLE = ("source", "rows", "mean error", "median", "bias", "worst", "80 % interval holds")


def scaling(read: Read, job: Job, engine: Engine) -> Section:
    """Weak and strong scaling around the job's number of GPUs; what is refused is said."""
    from calibration import whatif

    axis, cases, told = whatif.sizes(job), dict[str, list[Any]](), []
    for weak in (True, False):
        try:
            cases[_kind(job, weak)] = whatif.scaling(read, axis, weak)
        except UserError as error:
            told.append(f"Weak scaling is left out: {error}")
    found = whatif.ask(read, [(one, name, {}) for name, inputs in cases.items() for one in inputs], engine, 1e9, None)
    lines = {name: [_size(case) for case in found if case.plan == name and case.summary] for name in cases}
    refused = {f"{case.changes['nodes']} nodes, {case.plan}: {case.refused}" for case in found if case.refused}
    told += [f"Not possible: {'; '.join(sorted(refused))}"] if refused else []
    lines = {name: line for name, line in lines.items() if line}
    if sum(len(line) > 1 for line in lines.values()) == 0:
        return Section("Scaling", text=(*told, "No other number of GPUs is possible with this plan."))
    inside = {"node": 1, "leaf": getattr(job.cluster.fabric, "leaf_nodes", 0), "pod": getattr(job.cluster.fabric, "pod_nodes", 0)}
    boundaries = {name: nodes * job.cluster.node.gpus for name, nodes in inside.items() if nodes}
    alt = "Tokens per second of one GPU against the number of GPUs, weak and strong scaling"
    picture = Picture("efficiency", alt, efficiency, Scaling(lines, boundaries))
    return Section("Scaling", (picture,), tuple(told))


def _kind(job: Job, weak: bool) -> str:
    batch = job.resolve().global_batch
    return "weak: the global batch grows" if weak else f"strong: global batch {batch:,}"


def _size(case: Case) -> Size:
    assert case.summary is not None
    return Size(case.summary.gpus, case.summary.tokens_per_second_per_gpu, case.summary.fits)


def sensitivity(job: Job, step: float, by: float = 0.1) -> Section:
    """What each price does to the job's step, of `step` seconds, when it is `by` lower and higher."""
    from calibration.sensitivity import PRICES, Effect, Play
    from reports.figures.tornado import tornado

    play = Play.of(job)
    effects = play.effects({price.name: 1 + by for price in PRICES if price.name not in ("kernels", "clock")})
    if not effects:
        return Section("What limits the step", text=("No price moves it.",))
    alt = f"The step with each price {percent(by)} lower and higher"
    scale = step / play.seconds  # a long step is played as two short ones, whose sum is not quite its own
    effects = [Effect(one.name, one.factor, one.low * scale, one.high * scale) for one in effects]
    picture = Picture("tornado", alt, tornado, (job.name, step, effects))
    return Section("What limits the step", (picture,), (f"Each price alone, divided and multiplied by {1 + by:g}.",))


def profile_errors(profile: Profile) -> Section:
    """Where the prices come from, and how far they are off on what was measured."""
    columns = ("prices of", "measured", "error, fitted", "error, held out", "measured range", "where they come from")
    rows = []
    for part, source in profile.provenance.items():
        errors = ["–" if error is None else percent(error) for error in (source.fit_error, source.heldout_error)]
        extent = ", ".join(f"{name} {low:g}–{high:g}" for name, (low, high) in source.measured_range.items() if low < high)
        origin = ", ".join(filter(None, (source.machine, source.date, source.source)))
        rows.append([part, "yes" if source.measured else "by rule", *errors, extent, origin])
    text = "Errors are medians over sizes; held out: of sizes that were kept out of the fit. Nothing is fitted to training steps."
    return Section(f"How far to trust it: prices of profile {profile.name}", text=(text,), table=Sheet(columns, rows))


def published(job: Job, engine: Engine) -> Section:
    """The published measurements on this kind of GPU whose numbers of GPUs are nearest, played now."""
    from calibration.published import published as rows_of
    from calibration.validation import compare

    gpu = job.cluster.node.gpu.name
    near = [(abs(math.log(row.gpus / job.cluster.gpus)), row.name, row) for row in rows_of() if _gpu(row) == gpu]
    near.sort(key=lambda entry: entry[:2])
    chosen = [row for _, _, row in near[:NEAREST]]
    title = f"How far to trust it: published training runs on {gpu}"
    found = [row for row in engine.map(compare, chosen) if row.error is not None]
    if not found:
        return Section(title, text=("None is known that can be expressed.",))
    of = (
        f"of the {len(chosen)} nearest in GPUs ({len(near)} can be expressed)"
        if len(near) > len(chosen)
        else "all that there are"
    )
    text = f"{len(found)} runs, {of}, predicted with the shipped prices. No price was fitted to any of them."
    return Section(title, (_scatter("published", found),), (text,), table=_errors(found))


def measured(rows: Sequence[Compared], name: str) -> Section:
    """What `shardyard validate` wrote."""
    found = [row for row in rows if row.error is not None]
    title = f"How far to trust it: {name}"
    if not found:
        return Section(title, text=("No row has a measured and a predicted step.",))
    return Section(title, (_scatter("measured", found),), table=_errors(found))


def _scatter(name: str, rows: Sequence[Compared]) -> Picture:
    from reports.figures.published import published as draw

    return Picture(name, "Predicted against measured step time with y = x and ±10 %, and how often error bars hold", draw, rows)


def _errors(rows: Sequence[Compared]) -> Sheet:
    from calibration.validation import Errors, grouped
    from reports.published import signed

    lines = []
    for name, group in [*sorted(grouped(rows, "source").items()), ("all", list(rows))]:
        errors = Errors.of(group)
        assert errors is not None
        lines.append([name, errors.rows, percent(errors.mean), percent(errors.median), signed(errors.bias), signed(errors.worst),
                      percent(errors.held)])  # fmt: skip
    return Sheet(TABLE, lines)


def _gpu(row: Any) -> str | None:
    """The GPU of a published row; None where it cannot be a job."""
    try:
        return str(row.job().cluster.node.gpu.name)
    except UserError:
        return None


def launches(job: Job) -> tuple[Launch, ...]:
    """How each framework that can express the plan runs it."""
    from strategies.frameworks import frameworks

    made = []
    for name in sorted(frameworks):
        try:
            written = frameworks[name].write(job)
        except UserError as error:
            made.append(Launch(name, "", "", f"cannot: {error}"))
            continue
        file = frameworks[name].file
        made.append(Launch(name, file, written.text, written.launch.replace("FILE", file), written.unexpressed))
    return tuple(made)
