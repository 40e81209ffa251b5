"""What stragglers cost a job: tables, and the same as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from calibration.stragglers.analysis import Analysis, Part, Worker
from reports.formatting import percent, plural, seconds, signed

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SHOWN = 5  # parts of a kind
EXACT = 0.01  # a larger gap between replay and measurement is said
ENOUGH = 0.5  # share of the slowdown from which on a part is the worst
UNEVEN, TOGETHER = 0.05, 0.9  # variation of passes, and correlation of forward and backward passes, from which on it is said
NEARLY = 0.9  # of the largest share: then the smaller part is named


def as_data(analysis: Analysis, source: str) -> dict[str, Any]:
    """Everything, with stable keys; times in seconds; steps, dp ranks and ranks as in the trace."""
    worst, last = worst_part(analysis), str(len(analysis.stages) - 1)
    return {
        "trace": source,
        "ops": analysis.ops,
        "dp": len(analysis.dp_ranks) or None,
        "pp": len(analysis.stages) or None,
        "workers": analysis.worker_count,
        "slowdown": analysis.slowdown,
        "step_seconds": {
            "measured": float(analysis.measured.mean()),
            "with_launch_delays": float(analysis.with_delays.mean()),
            "without_launch_delays": float(analysis.replayed.mean()),
            "without_stragglers": float(analysis.ideal.mean()),
        },
        "launch_slowdown": float(analysis.measured.mean() / analysis.replayed.mean()),
        "worst": None if worst is None else {"kind": worst[0], "name": worst[1].name} | worst[1].to_dict(),
        "by_op_type": {part.name: part.to_dict() for part in analysis.op_types},
        "by_dp_rank": {part.name: part.to_dict() for part in analysis.dp_ranks},
        "by_stage": {part.name: part.to_dict() for part in analysis.stages},
        "by_worker": [worker.to_dict() for worker in analysis.workers],
        "last_stage": next((part.to_dict() for part in analysis.stages if part.name == last), None),
        "slowest_workers": {"ranks": analysis.slowest} | analysis.slowest_part.to_dict(),
        "microbatches": None if analysis.microbatches is None else analysis.microbatches._asdict(),
        "spread": None if analysis.spread is None else analysis.spread._asdict(),
        "by_step": [_step(analysis, place) for place in range(len(analysis.steps))],
        "notes": _notes(analysis),
        "steps_left_out": {str(step): why for step, why in analysis.left_out.items()},
    }


def _step(analysis: Analysis, place: int) -> dict[str, Any]:
    kinds = {"op_type": analysis.op_types, "dp_rank": analysis.dp_ranks, "stage": analysis.stages}
    return {
        "step": int(analysis.steps[place]),
        "measured": float(analysis.measured[place]),
        "without_launch_delays": float(analysis.replayed[place]),
        "without_stragglers": float(analysis.ideal[place]),
        "slowdown": float(analysis.per_step[place]),
    } | {f"by_{kind}": {part.name: float(part.per_step[place]) for part in parts} for kind, parts in kinds.items()}


def worst_part(analysis: Analysis) -> tuple[str, Part] | None:
    """(kind, part) without whose excess a step is shortest; of parts that save nearly as much the smallest: a worker, then a
    stage, a dp rank, an op type. None when no part explains half of the slowdown.
    """
    best = [
        (kind, max(parts, key=lambda part: part.share or 0.0))
        for kind, parts in analysis.kinds.items()
        if len(parts) > 1 and any(part.share is not None for part in parts)
    ]
    most = max((part.share or 0.0 for _, part in best), default=0.0)
    return next((each for each in best if most >= ENOUGH and (each[1].share or 0.0) >= NEARLY * min(most, 1.0)), None)


def overview(analysis: Analysis, source: str) -> RenderableType:
    """What stragglers cost, what is to blame, and a table of parts."""
    from rich.console import Group
    from rich.text import Text

    measured, replayed, ideal = (float(times.mean()) for times in (analysis.measured, analysis.replayed, analysis.ideal))
    dp, pp = len(analysis.dp_ranks), len(analysis.stages)
    workers = f"dp {dp} × pp {pp}" if dp else plural(analysis.worker_count, "rank")
    size = f"{plural(len(analysis.steps), 'step')}, {workers}, {analysis.ops:,} ops"
    lines = [
        Text(f"{source}: {size}", "bold"),
        Text(f"a step takes {seconds(measured)}; {seconds(replayed)} without launch delays; {seconds(ideal)} without stragglers"),
        Text(f"stragglers make it {analysis.slowdown:.3f} times as long", "bold"),
        Text(_verdict(analysis)),
    ]
    return Group(*lines, _parts(analysis), *(Text(f"note: {note}", "yellow") for note in _notes(analysis)))


def _verdict(analysis: Analysis) -> str:
    worst = worst_part(analysis)
    if analysis.slowest_part.share is None:
        return "no rank is slower than others"
    if worst is None:
        return "no worker, stage, dp rank or op type explains half of it by itself"
    kind, part = worst
    alone = f"alone it makes a step {part.slowdown:.2f} times as long"
    return f"{_named(kind, part)}: {alone}; without its excess a step takes {seconds(part.fixed)}"


def _named(kind: str, part: Part) -> str:
    if isinstance(part, Worker) and part.stage is None:
        return f"rank {part.rank}"
    if isinstance(part, Worker):
        return f"rank {part.rank} (dp rank {part.dp_rank}, stage {part.stage})"
    return f"{kind} {part.name}"


def _parts(analysis: Analysis) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("part", "slowdown alone", "step without it", "change", "share of the slowdown"):
        table.add_column(column, justify="left" if column == "part" else "right", no_wrap=True)
    replayed = float(analysis.replayed.mean())
    for kind, parts in analysis.kinds.items():
        for part in parts[:SHOWN]:
            share = "" if part.share is None else signed(part.share)
            cells = (f"{part.slowdown:.3f}", seconds(part.fixed), signed(part.fixed / replayed - 1), share)
            table.add_row(_named(kind, part), *cells, end_section=part is parts[:SHOWN][-1])
    return table


def _notes(analysis: Analysis) -> list[str]:
    """What else is to be known."""
    result = list(analysis.notes)
    slowest = analysis.slowest_part
    if slowest.share is not None and analysis.worker_count > len(analysis.slowest):
        ranks = ", ".join(map(str, analysis.slowest[:SHOWN])) + (", …" if len(analysis.slowest) > SHOWN else "")
        result.append(f"the slowest 3 % of workers (rank {ranks}) explain {percent(slowest.share)} of the slowdown")
    passes = analysis.microbatches
    if passes is not None and passes.variation > UNEVEN and (passes.correlation or 0.0) > TOGETHER:
        unlike = f"a worker's forward passes by {percent(passes.variation)}, backward passes with them"
        result.append(
            f"microbatches differ in work, as sequences of unlike lengths do: {unlike} ({passes.correlation:.2f} correlated)"
        )
    apart = analysis.spread
    if apart is not None:
        means = f"{percent(apart.workers)} (standard deviation), for which a step is {percent(apart.cost)} longer"
        single = f"single passes of each by {percent(apart.ops)}: {percent(apart.cost_of_ops)}"
        result.append(f"workers with the same work, but stragglers, differ by {means}, {single}")
    gap = float(analysis.with_delays.mean() / analysis.measured.mean()) - 1
    if abs(gap) > EXACT:
        result.append(
            f"replayed with launch delays, steps are {signed(gap)} off what was measured: the rules may not fit this job"
        )
    if analysis.worker_count > len(analysis.workers):
        result.append(f"of {analysis.worker_count:,} workers those with the {len(analysis.workers)} highest scores were replayed")
    result += [f"step {step} is left out: {why}" for step, why in list(analysis.left_out.items())[:SHOWN]]
    if len(analysis.left_out) > SHOWN:
        result.append(f"and {len(analysis.left_out) - SHOWN} more steps are left out")
    return result


def every_step(analysis: Analysis) -> RenderableType:
    """A row per step, slowest first."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    named = {kind: parts for kind, parts in analysis.kinds.items() if len(parts) > 1}
    times = ("step", "measured", "without launch delays", "without stragglers", "slowdown")
    for column in (*times, *(f"worst {kind}" for kind in named)):
        table.add_column(column, justify="right", no_wrap=True)
    for place in analysis.per_step.argsort()[::-1].tolist():
        worst = [max(parts, key=lambda part: float(part.per_step[place])).name for parts in named.values()]
        cells = (float(each[place]) for each in (analysis.measured, analysis.replayed, analysis.ideal))
        table.add_row(str(analysis.steps[place]), *map(seconds, cells), f"{analysis.per_step[place]:.3f}", *worst)
    return table
