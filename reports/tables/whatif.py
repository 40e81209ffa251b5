"""Answers of what-ifs: a table against the base, a tornado, scaling, where the winner changes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from reports.formatting import (
    bar,
    count,
    digits,
    dollars,
    notes_of,
    percent,
    plural,
    rates_text,
    seconds,
    signed,
    size,
    step_of,
    tokens_text,
    unit_of_job,
)
from reports.tables.compare_runs import run_data
from strategies.plan.plan import Plan
from strategies.planner.arguments import as_arguments, stated_otherwise
from topologies.reading import UserError, argument, plain

if TYPE_CHECKING:
    from reports.figures.curve import Curve
    from sim.analysis.summary import Summary
    from strategies.job import Job
    from strategies.planner.whatif import Case
    from topologies.costs import Cost

NAMED = 3  # inputs that are named with a reason
HIDDEN = ("plan.accumulation", "plan.dp")


def overview(
    job: Job,
    base: Sequence[Case],
    cases: Sequence[Case],
    *,
    tornado: bool,
    scaling: str,
    tokens: float,
    remarks: Sequence[str] = (),
) -> RenderableType:
    """What moves, on one screen."""
    from strategies.planner.whatif import crossovers

    where = f"{job.model.name} on {job.cluster.described} ({plural(job.cluster.gpus, 'GPU')})"
    first = base[0]
    reason = first.refused
    if first.summary is not None:
        plan = job.resolve()
        where += f", {step_of(plan.global_batch, plan.sequence)}"
        reason = f"{seconds(first.summary.step_seconds)} per step, {_fit(first)}"
    lines: list[RenderableType] = [Text(f"{where}: {reason}", "bold"), ""]
    unit = unit_of_job(job)
    lines.append(_tornado(first, cases) if tornado else _table(base, cases, scaling, unit))
    if len(base) > 1:
        changes = crossovers(cases, lambda case: case.training.gpu_hours if case.training else float("inf"))
        lines += ["", *(Text(f"{_plan(a)} wins up to {_inputs(a)}, {_plan(b)} from {_inputs(b)}") for a, b in changes)]
        lines += [] if changes else [Text("one plan wins everywhere (fewest GPU-hours of those that fit)")]
    changed = "days, as batches differ" if _by_days(base, cases, scaling) else "step"
    about = f"days and cost are of {tokens_text(tokens, unit)}, change is of the {changed}"
    if runs := [case.run.runs for case in (*base, *cases) if case.run is not None]:
        each = f"failures and checkpoints included: {plural(runs[0], 'run')} each, with the same failures"
        about = f"days and cost are of {tokens_text(tokens, unit)}, {each}"
    about = about.partition(", change is of")[0] if tornado else about
    lines += ["", Text(f"{about}; ✗ does not fit in memory", "dim")]
    lines += [Text(line, "dim") for line in (*remarks, *_why_not(base, cases), *_arguments(job, cases))]
    return Group(*lines, *(Text(text, "dim") for text in (*_prices(base, cases), *_refused(cases))), *notes_of(job))


def _prices(base: Sequence[Case], cases: Sequence[Case]) -> Iterator[str]:
    """Prices of a GPU-hour, and where they differ of which inputs each is."""
    inputs: dict[str, dict[str, None]] = {}
    for case in (*base, *cases):
        if case.training:
            inputs.setdefault(rates_text(case.training.rates, power=False), {})[_inputs(case)] = None
    for price, of in inputs.items():
        yield price if len(inputs) == 1 else f"{_named(of)}: {price}"


def _named(inputs: Collection[str]) -> str:
    """The first few inputs."""
    more = f" and {plural(len(inputs) - NAMED, 'other')}" if len(inputs) > NAMED else ""
    return "; ".join(list(inputs)[:NAMED]) + more


def _refused(cases: Sequence[Case]) -> Iterator[str]:
    """What was refused, and why; each reason once."""
    reasons: dict[str, dict[str, None]] = {}
    for case in cases:
        if case.refused:
            reasons.setdefault(case.refused, {})[_inputs(case)] = None
    for reason, inputs in reasons.items():
        yield f"refused, {_named(inputs)}: {reason}"


def as_data(case: Case, job: Job) -> dict[str, Any]:
    """For machines, with stable keys."""
    return {
        "changes": dict(case.changes),
        "plan": case.plan,
        "arguments": as_arguments(stated_otherwise(job, {**case.changes, **_plain(case.found)})),
        "global_batch": case.batch or None,
        "refused": case.refused,
        "remarks": list(case.remarks),
        "summary": case.summary.to_dict() if case.summary else None,
        "training": case.training.to_dict() if case.training else None,
        **({"run": run_data(case.run)} if case.run else {}),
    }


def _inputs(case: Case, shown: Collection[str] | None = None) -> str:
    fields = {n: v for n, v in case.changes.items() if n not in HIDDEN and (shown is None or n in shown)}
    return ", ".join(argument(n, v) for n, v in fields.items()) or "the job"


def _arguments(job: Job, cases: Sequence[Case]) -> Iterator[str]:
    """What all cases change and no row names, or the plan that each has, as arguments: with them and a row's inputs, `simulate`
    gives the row's answer.
    """
    named = _varied(cases)
    for case in cases:
        if case.found:
            yield f"{_inputs(case, named)}: {as_arguments(stated_otherwise(job, {**case.changes, **_plain(case.found)}))}"
    rest = [{name: value for name, value in case.changes.items() if name not in named} for case in cases]
    if rest and not any(case.found for case in cases):
        changes = {name: value for name, value in stated_otherwise(job, rest[0]).items() if name not in named}
        if changes:
            yield f"every row also has {as_arguments(changes)}"


def _plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plain(value) for name, value in changes.items()}


def _why_not(base: Sequence[Case], cases: Sequence[Case]) -> Iterator[str]:
    """Why a change does nothing, or less than it says; what to do about a batch that is refused."""
    reference = {case.plan: case for case in base}
    said: dict[str, list[str]] = {}
    for case in cases:
        old = reference[case.plan]
        for remark in case.remarks:
            if remark not in old.remarks:
                said.setdefault(remark, []).append(_inputs(case))
        fields = [name for name in case.changes if name.startswith(("cluster.", "model."))]
        if fields and case.hash == old.hash:
            said.setdefault("what the job has already", []).append(_inputs(case))
        elif fields and case.summary and old.summary and case.summary.breakdown == old.summary.breakdown:
            said.setdefault("the step is the same to the bit: nothing in it waits for this", []).append(_inputs(case))
    yield from (f"{'; '.join(inputs)}: {remark}" for remark, inputs in said.items())
    if any("global_batch" in case.refused for case in cases):
        yield "--batch scale takes a batch that grows with the GPUs, in whole microbatches"


def _plan(case: Case) -> str:
    from strategies.planner.auto_plan import name_of

    if case.found:
        return name_of(Plan.model_validate({name.removeprefix("plan."): value for name, value in _plain(case.found).items()}))
    return case.plan or "the job's plan"


def _fit(case: Case) -> str:
    assert case.summary is not None
    worst, capacity = case.summary.worst.peak, case.summary.memory_capacity
    return f"{'fits' if case.summary.fits else 'too big'}: {size(worst)} of {size(capacity)}"


def _table(base: Sequence[Case], cases: Sequence[Case], scaling: str, unit: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    over_days = any(case.run is not None for case in (*base, *cases))
    replanned, batches = any(case.found for case in cases), _batches(base, cases)
    heads = [
        "inputs",
        *(["plan"] if len(base) > 1 or replanned else []),
        *(["batch"] if len(batches) > 1 else []),
        "step",
        "change",
        f"{unit}/s",
        "per GPU",
        "MFU",
        "memory",
        *(["goodput"] if over_days else []),
        "days",
        *(["80 % of runs"] if over_days else []),
        "cost",
    ]
    for head in [*heads, *(["efficiency"] if scaling else [])]:
        table.add_column(head, justify="left" if head in ("inputs", "plan") else "right", no_wrap=True)
    reference = {case.plan: case for case in base}
    first = _references(cases)
    shown = _varied(cases)
    by_days, planned = _by_days(base, cases, scaling), [case for case in cases if case.found and not set(case.changes) & shown]
    twins = {case.hash for case in planned}  # the job's own plan is what is found for it: one row for both
    for case in [*(case for case in base if case.hash not in twins), *cases]:
        start = [_inputs(case, shown), *([_plan(case)] if len(base) > 1 or replanned else [])]
        start += [f"{case.batch:,}" if case.batch else "–"] if len(batches) > 1 else []
        summary, whole = case.summary, case.training
        if summary is None or whole is None:
            table.add_row(*start, "refused")
            continue
        old, money = reference[case.plan].summary, "–" if whole.usd is None else dollars(whole.usd)
        if old is None or case in base or (case in planned and case.hash == reference[case.plan].hash):
            change = ""
        elif by_days:
            change = signed(old.tokens_per_second / summary.tokens_per_second - 1)
        else:
            change = signed(summary.step_seconds / old.step_seconds - 1)
        row = [
            seconds(summary.step_seconds),
            change,
            count(summary.tokens_per_second),
            count(summary.tokens_per_second_per_gpu),
            percent(summary.mfu),
            _memory(summary),
            *([percent(case.run.goodput.mean)] if case.run else []),
            digits(whole.seconds / 86400),
            *([f"{digits(case.run.days.low)}–{digits(case.run.days.high)}"] if case.run else []),
            money,
        ]
        if scaling and case not in base:
            row.append(percent(summary.tokens_per_second_per_gpu / first[case.plan]))
        table.add_row(*start, *row)
    return table


def _by_days(base: Sequence[Case], cases: Sequence[Case], scaling: str) -> bool:
    """Whether changes are of the days of a training without failures: steps of several batches are not to be compared."""
    return not scaling and len({case.batch for case in (*base, *cases) if case.batch}) > 1


def _batches(base: Sequence[Case], cases: Sequence[Case]) -> set[int]:
    """Global batches, where they differ and inputs do not say them."""
    if any("plan.global_batch" in case.changes for case in cases):
        return set()
    return {case.batch for case in (*base, *cases) if case.batch}


def _memory(summary: Summary) -> str:
    return size(summary.worst.peak) + ("" if summary.fits else " ✗")


def _references(cases: Sequence[Case]) -> dict[str, float]:
    """By plan the tokens/s/GPU of its first case that fits, or of its first: what efficiency is relative to."""
    able = [case for case in cases if case.summary is not None]
    able.sort(key=lambda case: not (case.summary and case.summary.fits))
    return {case.plan: case.summary.tokens_per_second_per_gpu for case in reversed(able) if case.summary}


def _varied(cases: Sequence[Case]) -> set[str]:
    """Fields that rows name: those that cases change, but a batch that is the same in all goes with its row."""
    names = {name for case in cases for name in case.changes} - set(HIDDEN)
    alike = {name for name in names if len({str(case.changes.get(name)) for case in cases}) == 1}
    return names - (alike & {"plan.global_batch"} if names - alike else set())


def _goes_with(cases: Sequence[Case]) -> bool:
    """Whether the batch is one of no input by itself: every case has one, beside what it varies."""
    return all("plan.global_batch" in case.changes for case in cases)


def _tornado(base: Case, cases: Sequence[Case]) -> RenderableType:
    """Each input alone: by how much the cost of the training moves (without prices its GPU-hours), the largest effect first."""
    if base.training is None:
        raise UserError(f"--one-at-a-time: the job itself is refused: {base.refused}")
    priced = all(case.training is None or case.training.usd is not None for case in (base, *cases))
    known = [(case, _spent(case.training, priced) / _spent(base.training, priced) - 1) for case in cases if case.training]
    known.sort(key=lambda pair: -abs(pair[1]))
    most = max((abs(effect) for _, effect in known), default=0.0) or 1.0
    over_days = f", failures and checkpoints included ({plural(base.run.runs, 'run')} each)" if base.run else ""
    title = f"{'cost' if priced else 'GPU-hours'} of the training, against the job{over_days}"
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    replanned, batches = any(case.found for case in cases), {case.batch for case in (base, *cases) if case.batch}
    shown = {name for case in cases for name in case.changes} - {*HIDDEN, *(["plan.global_batch"] if _goes_with(cases) else [])}
    heads = ["inputs", *(["plan"] if replanned else []), "change", "less", "more", *(["batch"] if len(batches) > 1 else [])]
    for head in (*heads, "step", "days", *(["cost"] if priced else []), "memory"):
        table.add_column(head, justify="left" if head in ("inputs", "plan", "more") else "right", no_wrap=True)
    known = [pair for pair in known if not (pair[0].found and pair[0].hash == base.hash)]  # planned anew, and the same
    for case, effect in [(base, 0.0), *known]:
        assert case.summary is not None
        assert case.training is not None
        strip = "" if case is base else bar(abs(effect) / most, 24)
        sides = (strip, "") if effect < 0 else ("", strip)
        table.add_row(
            _inputs(case, shown) if case is base or set(case.changes) & shown else "the job, planned anew",
            *([_plan(case)] if replanned else []),
            "" if case is base else signed(effect),
            *sides,
            *([f"{case.batch:,}"] if len(batches) > 1 else []),
            seconds(case.summary.step_seconds),
            digits(case.training.seconds / 86400),
            *([dollars(case.training.usd)] if priced and case.training.usd is not None else []),
            _memory(case.summary),
        )
    return Group(Text(title), table)


def _spent(training: Cost, priced: bool) -> float:
    return training.usd if priced and training.usd is not None else training.gpu_hours


def curves(cases: Sequence[Case], field: str, own: Sequence[Case] = (), of: str = "tokens") -> Curve:
    """tokens/s/GPU of what was not refused, over a field of numbers, by plan. own: the job as it is, with its value of the field,
    which is shown where it is a number in the unit of the others; of: what is counted of what the job trains on. Raises
    UserError.
    """
    from reports.figures.curve import Curve

    result: dict[str, list[tuple[float, float, bool]]] = {}
    units: dict[str, None] = {}
    for case in cases:
        number, unit = _number(case.changes[field], field)
        units[unit] = None
        if case.summary is not None:
            result.setdefault(_plan(case), []).append((number, _delivered(case), case.summary.fits))
    if len(units) > 1:
        raise UserError(f"--plot: {field} is given in {' and in '.join(unit or 'no unit' for unit in units)}: give all in one")
    (unit,) = units
    for case in own:
        with suppress(UserError):
            number, own_unit = _number(case.changes[field], field)
            if case.summary is not None and own_unit == unit:
                line = {x: (x, y, fits) for x, y, fits in result.get(_plan(case), ())}
                result[_plan(case)] = sorted((line | {number: (number, _delivered(case), case.summary.fits)}).values())
    over_days = any(case.run is not None for case in cases)
    label = f"{of}/s/GPU, failures included" if over_days else f"{of}/s/GPU"
    return Curve(f"{field} ({unit})" if unit else field, result, label)


def _delivered(case: Case) -> float:
    """tokens/s/GPU, over days where there are runs."""
    assert case.summary is not None
    if case.run is None or case.training is None:
        return case.summary.tokens_per_second_per_gpu
    return case.training.tokens / case.training.gpu_hours / 3600


def _number(value: Any, field: str) -> tuple[float, str]:
    """A number and its unit, as they were written."""
    text, _, unit = str(value).partition(" ")
    try:
        return float(text), unit
    except ValueError:
        raise UserError(f"--plot: {field}={value!r} is not a number, or has no space before its unit") from None
