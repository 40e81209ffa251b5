"""Offers beside each other: each at its best plan, what it takes and costs, and when another one would win."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from reports.formatting import (
    count,
    digits,
    dollars,
    notes_of,
    percent,
    rates_text,
    seconds,
    spread,
    step_of,
    tokens_text,
    unit_of_job,
)
from reports.tables.compare_runs import run_data
from strategies.planner.arguments import arguments_of
from strategies.planner.auto_plan import name_of
from strategies.planner.spending.purchase import Bought, Crossover
from strategies.resilience.settings import RunSettings

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = ("offer", "GPUs", "best plan", "step", "{}/s", "MFU", "goodput", "days", "80 % of runs", "$/h", "cost", "$ per 10⁹")


def overview(bought: Sequence[Bought], changes: Sequence[Crossover], tokens: float) -> RenderableType:
    """The answer in a sentence, the offers, where the winner changes, and how to ask for each."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    unit = unit_of_job(bought[0].offer.job)
    for column in COLUMNS:
        table.add_column(column.format(unit), justify="left" if column in ("offer", "best plan") else "right", no_wrap=True)
    for each in bought:
        table.add_row(*_row(each))
    lines = [Text(line) for line in (*_crossed(changes), *_refused(bought))]
    failures = (bought[0].offer.job.run or RunSettings()).failures.name
    below = [
        f"days and cost are of {tokens_text(tokens, unit)}, failures and checkpoints included: 20 runs each, with the same "
        f"failures ('{failures}') and the predicted step, so that the step's own interval is not in '80 % of runs'"
    ]
    rates = {each.training.rates: each.offer.name for each in bought if each.training is not None and each.offer.price is None}
    below += [f"{name}: {rates_text(rate, power=False)}" for rate, name in rates.items()]
    below += [f"{each.offer.name}: {_arguments(each)}" for each in bought if each.fits]
    notes = notes_of(bought[0].offer.job)
    return Group(Text(verdict(bought, tokens), "bold"), table, *lines, *(Text(line, "dim") for line in below), *notes)


def verdict(bought: Sequence[Bought], tokens: float) -> str:
    """Which is the quickest and which the cheapest, and by how much."""
    job = bought[0].job
    step = step_of(job.global_batch, job.plan.sequence_of(job.model))
    what = f"{job.model.name} on {tokens_text(tokens, unit_of_job(job))}, {step}"
    able = sorted((each for each in bought if each.training), key=lambda each: each.training.seconds if each.training else 0.0)
    if not able:
        return f"{what}: none of the offers can train it"
    quick, rest = able[0], able[1:]
    assert quick.training is not None
    text = f"{what}: {quick.offer.name} is the quickest, {digits(quick.training.seconds / 86400)} days"
    if rest and rest[0].training is not None:
        text += f" ({percent(1 - quick.training.seconds / rest[0].training.seconds)} less than {rest[0].offer.name})"
    priced = sorted((each.training.usd, each.offer.name) for each in able if each.training and each.training.usd is not None)
    if len(priced) < 2:
        return text
    cheap = "it is also the cheapest" if priced[0][1] == quick.offer.name else f"{priced[0][1]} is the cheapest"
    return f"{text}; {cheap}, {dollars(priced[0][0])} ({percent(1 - priced[0][0] / priced[1][0])} less than {priced[1][1]})"


def _row(each: Bought) -> list[str]:
    gpus, summary, run, whole = f"{each.job.cluster.gpus:,}", each.summary, each.run, each.training
    if summary is None or run is None or whole is None:
        return [each.offer.name, gpus, "cannot train it"]
    bar = summary.interval
    per = None if whole.usd is None else whole.usd / whole.tokens * 1e9
    return [
        each.offer.name,
        gpus,
        name_of(each.job.plan),
        seconds(summary.step_seconds) + (f" ({spread(bar)})" if bar else ""),
        count(summary.tokens_per_second),
        percent(summary.mfu),
        percent(run.goodput.mean),
        digits(whole.seconds / 86400),
        f"{digits(run.days.low)}–{digits(run.days.high)}",
        "–" if whole.rates.usd is None else f"{whole.rates.usd:.2f}",
        "–" if whole.usd is None else dollars(whole.usd),
        "–" if per is None else dollars(per),
    ]


def _crossed(changes: Sequence[Crossover]) -> Iterator[str]:
    """Where each offer becomes as good as another one."""
    for each in changes:
        if each.price is not None:
            yield f"{each.offer} costs as much as {each.other} at ${each.price:.2f} per GPU-hour"
        if each.nodes is not None and each.days is not None:
            money = "" if each.usd is None else f", for {dollars(each.usd)}"
            size = f"{each.nodes:,} × {each.offer.partition(' × ')[2]}"
            least = "the fewest nodes that share the batch evenly"
            yield f"{size} is at least as quick as {each.other}, {least}: {digits(each.days)} days{money}"


def _refused(bought: Sequence[Bought]) -> Iterator[str]:
    return (f"{each.offer.name}: {each.refused}" for each in bought if each.refused)


def _arguments(each: Bought) -> str:
    """What makes a job the offer's at its best plan."""
    cluster = each.job.cluster
    price = "" if each.offer.price is None else f" --price {each.offer.price:g}"
    name = shlex.quote(each.offer.cluster or cluster.name)
    return f"--cluster {name} --nodes {cluster.nodes} {arguments_of(each.offer.job, each.job)}{price}"


def as_data(bought: Sequence[Bought], changes: Sequence[Crossover]) -> dict[str, Any]:
    """For machines, with stable keys."""
    offers = [
        {
            "offer": each.offer.name,
            "gpus": each.job.cluster.gpus,
            "plan": name_of(each.job.plan) if each.fits else "",
            "arguments": _arguments(each) if each.fits else "",
            "refused": each.refused,
            "summary": each.summary.to_dict() if each.summary else None,
            "training": each.training.to_dict() if each.training else None,
            "run": run_data(each.run) if each.run else None,
        }
        for each in bought
    ]
    return {"offers": offers, "crossovers": [asdict(each) for each in changes]}
