"""A search told: the winner first, the best plans, the Pareto front, and where the others went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports.formatting import (
    TOKENS,
    digits,
    dollars,
    notes_of,
    percent,
    plural,
    rates_told,
    seconds,
    size,
    spread,
    step_of,
    tie_rule,
    tokens_text,
)
from strategies.planner.arguments import as_arguments, stated_otherwise
from topologies.costs import cost

if TYPE_CHECKING:
    from sim.analysis.summary import Interval
    from strategies.job import Job
    from strategies.planner.search.answer import Answer

SHOWN = 5


def overview(found: Answer, job: Job, tokens: float | None, top: int, bar: Interval | None = None) -> RenderableType:
    """On one screen. bar: around the step of the best."""
    from strategies.planner.search.answer import pareto

    lines: list[RenderableType] = [Text(verdict(found, job), "bold")]
    if found.best is not None:
        if bar is not None:
            lines.append(Text(f"its step, {100 * bar.level:.0f} % interval: {spread(bar)}"))
        shown = found.rows[: max(top, SHOWN)]
        lines += ["", _plans("the best plans that were simulated", shown, found, tokens)]
        lines += [Text(tie_rule(), "dim")] if any(_tied(row, found) for row in shown[1:]) else []
        front = pareto(found.rows)
        unproven = f"not proven: {found.interrupted}" if found.interrupted else "--front proves it"
        proven = "proven" if found.front else f"of what was simulated; {unproven}"
        if len(front) > 1 or found.front:
            lines += ["", _plans(f"Pareto front of time, cost and memory ({proven})", front, found, tokens)]
        lines += ["", Text(f"as arguments: {arguments(found.best, job)}")]
    lines += ["", *map(Text, _where_they_went(found)), *notes_of(job)]
    return Group(*lines)


def arguments(row: dict[str, Any], job: Job) -> str:
    """What makes `job` the job of a row, to the bit."""
    return as_arguments(stated_otherwise(job, row["changes"]))


def verdict(found: Answer, job: Job) -> str:
    """The answer in a sentence, and how sure it is."""
    model, best = job.model.name, found.best
    if best is None and found.interrupted:
        left, every = found.counts["open"], found.counts["allowed"]
        if not every:
            return f"{model}: none found yet ({found.interrupted}): all of {found.combinations:,} combinations are open"
        return f"{model}: none found yet ({found.interrupted}): {left:,} of {every:,} plans are open"
    if best is None:
        return f"{model}: none of {found.counts['allowed']:,} plans keeps to everything"
    goal = found.objective
    number, unit = goal.told(best["value"])
    value = seconds(number) if unit == "s" else f"{digits(number, 4)} {unit}"
    if found.proven:
        sure = f"proven best of {found.combinations:,} combinations"
    else:
        sure = (
            f"not proven ({found.interrupted}): at most {percent(found.gap)} from the best of {found.combinations:,} combinations"
        )
    sequence = best["changes"].get("plan.sequence") or job.plan.sequence_of(job.model)
    batch = step_of(round(best["scale"].tokens_per_step / sequence), sequence)
    return f"{model} on {plural(best['gpus'], 'GPU')}, {batch}: {value} ({goal.meaning}), {sure}"


def as_data(found: Answer, job: Job, tokens: float | None, bar: Interval | None = None) -> dict[str, Any]:
    """For machines, with stable keys. job: what the arguments are given to; bar: around the step of the best."""
    from strategies.planner.search.answer import pareto

    hashes = [row["hash"] for row in pareto(found.rows)]
    return {
        "objective": found.objective.name,
        "unit": found.objective.unit,
        "best": _plain(found.best, tokens) if found.best else None,
        "arguments": arguments(found.best, job) if found.best else None,
        "proven": found.proven,
        "gap": found.gap,
        "interrupted": found.interrupted,
        "combinations": found.combinations,
        "counts": found.counts,
        "refused": dict(found.refused),
        "pruned": dict(found.pruned),
        "nearest": found.nearest,
        "rows": [_plain(row, tokens) for row in found.rows],
        "front": hashes,
        "front_proven": found.front,
        "interval": asdict(bar) if bar else None,
    }


def pace(found: Answer) -> str:
    """How long it took. Beside the answer, which is the same every time."""
    took = found.seconds
    rate = found.counts["allowed"] / took["all"] if took["all"] else 0.0
    return f"bounds took {took['bounds']:.1f} s, all of it {took['all']:.1f} s: {rate:,.0f} plans decided per second"


def _plain(row: dict[str, Any], tokens: float | None) -> dict[str, Any]:
    scale = row["scale"]
    whole = cost(scale.rates, scale.gpus, row["step"], scale.tokens_per_step, tokens or scale.tokens).to_dict()
    return {name: value for name, value in row.items() if name not in ("scale", "pace", "spend", "bound")} | {"training": whole}


def _plans(title: str, rows: Sequence[dict[str, Any]], found: Answer, tokens: float | None) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=None, padding=(0, 2, 0, 0))
    heads = [
        "",
        "step",
        "tokens/s/GPU",
        "MFU",
        "memory",
        *(["days", "cost"] if tokens else [f"cost of {tokens_text(TOKENS)}"]),
        "plan",
    ]
    for head in heads:
        table.add_column(head, justify="left" if head in ("", "plan") else "right")
    differing = _differing(found.rows)
    for row in rows:
        scale = row["scale"]
        whole = cost(scale.rates, scale.gpus, row["step"], scale.tokens_per_step, tokens or TOKENS)
        money = "–" if whole.usd is None else dollars(whole.usd)
        training = [digits(whole.seconds / 86400), money] if tokens else [money]
        plan = " ".join(f"{name.removeprefix('plan.')}={_shown(v)}" for name, v in _set(row) if name in differing)
        mark = "★" if row is found.best else "≈" if _tied(row, found) else ""
        numbers = seconds(row["step"]), digits(row["tokens_per_second_per_gpu"]), percent(row["mfu"]), size(row["memory"])
        table.add_row(mark, *numbers, *training, plan)
    return table


def _tied(row: dict[str, Any], found: Answer) -> bool:
    from strategies.planner.uncertainty import tied

    return found.best is not None and tied(row["value"], found.best["value"])


def _set(row: dict[str, Any]) -> list[tuple[str, Any]]:
    """The fields that the plan sets to something."""
    return [(name, value) for name, value in row["changes"].items() if value is not None]


def _differing(rows: Iterable[dict[str, Any]]) -> set[str]:
    """Fields that are not the same in all rows; all of them when there is only one row."""
    every = [row["changes"] for row in rows]
    names = {name for changes in every for name in changes}
    return {n for n in names if len(every) == 1 or len({str(c.get(n)) for c in every}) > 1} or names


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_shown(one)}' for name, one in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _where_they_went(found: Answer) -> list[str]:
    """Why plans are not in the answer, and what it took."""
    same = found.counts["same"]
    refused = found.combinations - found.counts["unseen"] - found.counts["allowed"] - same
    lines = [f"{refused:,} combinations break a rule: " + _counted(found)] if refused else []
    if same:
        lines.append(
            f"{same:,} combinations are left out: others told differently (sharding on one rank, orders of one rank), "
            "and schedules of a pipeline at pp=1"
        )
    lines += [f"{plans:,} plans break {name}: {found.nearest[name]}" for name, plans in found.pruned.most_common()]
    counts = found.counts
    known = f" and {counts['known']:,} known already" if counts["known"] else ""
    if counts["set aside"]:
        known += f" ({counts['set aside']:,} results by other prices or code set aside)"
    lines.append(
        f"{counts['allowed']:,} plans bounded, {counts['tightened']:,} bounds tightened, "
        f"{counts['simulated']:,} plans simulated{known}"
    )
    if found.best is not None:
        lines.append(rates_told(found.best["scale"].rates))
    return lines


def _counted(found: Answer) -> str:
    """The rules that are broken most, each with an example."""
    return "; ".join(f"{plans:,} × {found.examples.get(one, one)}" for one, plans in found.refused.most_common(3))
