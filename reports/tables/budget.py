"""What a budget is good for: a table of models."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from reports.formatting import count, digits, dollars, percent, span
from strategies.planner.spending.budget import Budgeted, shown
from topologies.cluster import Cluster
from topologies.costs import Rates

if TYPE_CHECKING:
    from rich.console import RenderableType

COLUMNS = ("model", "parameters", "best plan", "step", "MFU", "goodput", "tokens", "per parameter", "80 % of runs", "enough")


def overview(
    models: Sequence[Budgeted], cluster: Cluster, days: float, ratio: float, money: Rates, asked: str = ""
) -> RenderableType:
    """The answer, and the models that were tried. asked: the cluster as it was named, if not by its own name."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("model", "best plan") else "right", no_wrap=True)
    for each in shown(models):
        table.add_row(*_row(each))
    spent = "" if money.usd is None else f", {dollars(cluster.gpus * days * 24 * money.usd)} at ${money.usd:.2f}/h"
    what = f"{cluster.described} ({cluster.gpus:,} GPUs) for {digits(days)} days{spent}"
    best = next((each for each in models if each.enough), None)
    first = f"{what}: no model is trained on {ratio:g} tokens per parameter"
    if best is not None and best.answer is not None:
        first = f"{what}: {best.model}, on {count(best.answer.tokens.mean)} tokens"
    refused = [Text(f"{each.model}: {each.refused}") for each in models if each.refused and each.most >= each.needed]
    place = f"--cluster {shlex.quote(asked or cluster.name)} --nodes {cluster.nodes}"
    said = [f"as arguments: --model {shlex.quote(each.model)} {place} {each.arguments}" for each in models if each.arguments]
    return Group(Text(first, "bold"), table, *refused, *(Text(line, "dim") for line in said))


def _row(each: Budgeted) -> list[str]:
    size = count(each.parameters)
    if each.plan is None or each.answer is None:
        return [each.model, size, f"(at most {count(each.most)} tokens)", *[""] * 6, "no"]
    tokens, psi, summary = each.answer.tokens, each.parameters, each.plan.summary
    return [
        each.model,
        size,
        each.plan.name,
        span(summary.step_seconds),
        percent(summary.mfu),
        percent(each.answer.goodput.mean),
        count(tokens.mean),
        digits(tokens.mean / psi),
        f"{digits(tokens.low / psi)}–{digits(tokens.high / psi)}",
        "yes" if each.enough else "no",
    ]


def as_data(each: Budgeted) -> dict[str, Any]:
    """Plain data with stable keys."""
    data: dict[str, Any] = {
        "model": each.model,
        "parameters": each.parameters,
        "tokens_needed": each.needed,
        "tokens_most": each.most,
        "enough": each.enough,
        "refused": each.refused,
        "arguments": each.arguments,
    }
    if each.plan is None or each.answer is None:
        return data
    answer = each.answer
    return data | {
        "plan": each.plan.job.plan.model_dump(mode="json", exclude_unset=True),
        "plan_name": each.plan.name,
        "step_seconds": each.plan.summary.step_seconds,
        "mfu": each.plan.summary.mfu,
        **{name: asdict(getattr(answer, name)) for name in ("tokens", "goodput", "failures", "kwh")},
        "usd": None if answer.usd is None else asdict(answer.usd),
    }
