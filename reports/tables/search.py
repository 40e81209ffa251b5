"""What a search found: the winner first, the best plans, the Pareto front, and where the others went."""

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
    rates_text,
    seconds,
    size,
    spread,
    step_of,
    tie_rule,
    tokens_text,
    unit_of_job,
)
from strategies.planner.arguments import as_arguments, stated_otherwise
from topologies.costs import cost

if TYPE_CHECKING:
    from sim.analysis.summary import Interval
    from strategies.job import Job
    from strategies.planner.search.answer import Answer

SHOWN = 5


def overview(answer: Answer, job: Job, tokens: float | None, top: int, bar: Interval | None = None) -> RenderableType:
    """On one screen. bar: around the step of the best."""
    from strategies.planner.search.answer import pareto

    lines: list[RenderableType] = [Text(verdict(answer, job), "bold")]
    unit = unit_of_job(job)
    if answer.best is not None:
        if bar is not None:
            lines.append(Text(f"its step, {100 * bar.level:.0f} % interval: {spread(bar)}"))
        shown = answer.rows[: max(top, SHOWN)]
        lines += ["", _plans("the best plans that were simulated", shown, answer, tokens, unit)]
        lines += [Text(tie_rule(), "dim")] if any(_tied(row, answer) for row in shown[1:]) else []
        front = pareto(answer.rows)
        unproven = f"not proven: {answer.interrupted}" if answer.interrupted else "--front proves it"
        proven = "proven" if answer.front else f"of what was simulated; {unproven}"
        if len(front) > 1 or answer.front:
            lines += ["", _plans(f"Pareto front of time, cost and memory ({proven})", front, answer, tokens, unit)]
        lines += ["", Text(f"as arguments: {arguments(answer.best, job)}")]
    elif answer.interrupted:
        lines.append(Text("`shardyard simulate` with `--plan auto` and the same job finds the best of fewer plans, in seconds"))
    lines += ["", *map(Text, _where_they_went(answer)), *notes_of(job)]
    return Group(*lines)


def arguments(row: dict[str, Any], job: Job) -> str:
    """What makes `job` the job of a row, to the bit."""
    return as_arguments(stated_otherwise(job, row["changes"]))


def verdict(answer: Answer, job: Job) -> str:
    """The answer in a sentence, and how sure it is."""
    model, best = job.model.name, answer.best
    if best is None and answer.interrupted:
        left, every = answer.counts["open"], answer.counts["allowed"]
        if not every:
            return f"{model}: none found yet ({answer.interrupted}): all of {answer.combinations:,} combinations are open"
        return f"{model}: none found yet ({answer.interrupted}): {left:,} of {every:,} plans are open"
    if best is None:
        return f"{model}: none of {answer.counts['allowed']:,} plans keeps to everything"
    goal = answer.objective
    number, unit = goal.display(best["value"])
    unit = _in(unit, job)
    value = seconds(number) if unit == "s" else f"{digits(number, 4)} {unit}"
    if answer.proven:
        sure = f"proven best of {answer.combinations:,} combinations"
    else:
        gap = percent(answer.gap)
        sure = f"not proven ({answer.interrupted}): at most {gap} from the best of {answer.combinations:,} combinations"
    sequence = best["changes"].get("plan.sequence") or job.plan.sequence_of(job.model)
    batch = step_of(round(best["scale"].tokens_per_step / sequence), sequence)
    return f"{model} on {plural(best['gpus'], 'GPU')}, {batch}: {_name(best, job)}, {value} ({goal.meaning}), {sure}"


def _name(row: dict[str, Any], job: Job) -> str:
    """A row's plan as people say it."""
    from strategies.planner.auto_plan import name_of

    fields = {name.removeprefix("plan."): value for name, value in row["changes"].items() if name.startswith("plan.")}
    return name_of(job.plan.model_copy(update=fields))


def _in(unit: str, job: Job) -> str:
    """An objective's unit, of a job whose samples are no tokens in samples."""
    return unit.replace("token", unit_of_job(job).removesuffix("s"))


def as_data(answer: Answer, job: Job, tokens: float | None, bar: Interval | None = None) -> dict[str, Any]:
    """For machines, with stable keys. job: what the arguments are given to; bar: around the step of the best."""
    from strategies.planner.search.answer import pareto

    hashes = [row["hash"] for row in pareto(answer.rows)]
    return {
        "objective": answer.objective.name,
        "unit": _in(answer.objective.unit, job),
        "best": _plain(answer.best, tokens) if answer.best else None,
        "arguments": arguments(answer.best, job) if answer.best else None,
        "proven": answer.proven,
        "gap": answer.gap,
        "interrupted": answer.interrupted,
        "combinations": answer.combinations,
        "counts": answer.counts,
        "refused": dict(answer.refused),
        "pruned": dict(answer.pruned),
        "nearest": answer.nearest,
        "rows": [_plain(row, tokens) for row in answer.rows],
        "front": hashes,
        "front_proven": answer.front,
        "interval": asdict(bar) if bar else None,
    }


def pace(answer: Answer) -> str:
    """How long it took. Beside the answer, which is the same every time."""
    took = answer.seconds
    rate = answer.counts["allowed"] / took["all"] if took["all"] else 0.0
    return f"bounds took {took['bounds']:.1f} s, all of it {took['all']:.1f} s: {rate:,.0f} plans decided per second"


def _plain(row: dict[str, Any], tokens: float | None) -> dict[str, Any]:
    scale = row["scale"]
    whole = cost(scale.rates, scale.gpus, row["step"], scale.tokens_per_step, tokens or scale.tokens).to_dict()
    return {name: value for name, value in row.items() if name not in ("scale", "pace", "spend", "bound")} | {"training": whole}


def _plans(title: str, rows: Sequence[dict[str, Any]], answer: Answer, tokens: float | None, unit: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=None, padding=(0, 2, 0, 0))
    heads = [
        "",
        "step",
        f"{unit}/s/GPU",
        "MFU",
        "memory",
        *(["goodput"] if answer.objective.delivered else []),
        *(["days", "cost"] if tokens else [f"cost of {tokens_text(TOKENS, unit)}"]),
        "plan",
    ]
    for head in heads:
        table.add_column(head, justify="left" if head in ("", "plan") else "right", no_wrap=head != "plan")
    differing = _differing(answer.rows)
    for row in rows:
        scale = row["scale"]
        whole = cost(scale.rates, scale.gpus, row["step"], scale.tokens_per_step, tokens or TOKENS)
        days, usd, goodput = whole.seconds / 86400, whole.usd, list[str]()
        if answer.objective.delivered:
            days, goodput = row["run_days"], [percent(row["goodput"])]
            usd = None if scale.rates.usd is None else row["run_gpu_hours"] * scale.rates.usd
        money = "–" if usd is None else dollars(usd)
        training = [*goodput, *([digits(days), money] if tokens else [money])]
        plan = " ".join(f"{name.removeprefix('plan.')}={_shown(v)}" for name, v in _set(row) if name in differing)
        mark = "★" if row is answer.best else "≈" if _tied(row, answer) else ""
        numbers = seconds(row["step"]), digits(row["tokens_per_second_per_gpu"]), percent(row["mfu"]), size(row["memory"])
        table.add_row(mark, *numbers, *training, plan)
    return table


def _tied(row: dict[str, Any], answer: Answer) -> bool:
    from strategies.planner.uncertainty import tied

    return answer.best is not None and tied(row["value"], answer.best["value"])


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
        return f"{{{', '.join(f'{name}: {_shown(item)}' for name, item in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _where_they_went(answer: Answer) -> list[str]:
    """Why plans are not in the answer, and what it took."""
    same = answer.counts["same"]
    refused = answer.combinations - answer.counts["unseen"] - answer.counts["allowed"] - same
    lines = [f"{refused:,} combinations break a rule: " + _counted(answer)] if refused else []
    if same:
        lines.append(
            f"{same:,} combinations are left out: plans that are counted already (sharding on one rank, orders of one rank), "
            "and schedules of a pipeline at pp=1"
        )
    lines += [f"{plans:,} plans break {name}: {answer.nearest[name]}" for name, plans in answer.pruned.most_common()]
    counts = answer.counts
    known = f" and {counts['known']:,} known already" if counts["known"] else ""
    if counts["set aside"]:
        known += f" ({counts['set aside']:,} results by other prices or code set aside)"
    lines.append(
        f"{counts['allowed']:,} plans bounded, {counts['tightened']:,} bounds tightened, "
        f"{counts['simulated']:,} plans simulated{known}"
    )
    if answer.best is not None:
        lines.append(rates_text(answer.best["scale"].rates))
    return lines


def _counted(answer: Answer) -> str:
    """The rules that are broken most, each with an example."""
    return "; ".join(f"{plans:,} × {answer.examples.get(reason, reason)}" for reason, plans in answer.refused.most_common(3))
