"""Simulated plans on a page, as a search or a sweep leaves them: a table, heatmaps of two axes, and the Pareto front."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reports.figures.heatmap import Cell, Maps, heatmap
from reports.figures.pareto import Front, Plan, pareto
from reports.formatting import counted, tokens_text
from reports.page.page import Picture, Section, Sheet
from strategies.planner.ranking import rank_row
from topologies.costs import Rates
from topologies.reading import UserError

Row = Mapping[str, Any]  # of `strategies.planner.search.results`
PANELS = 6  # heatmaps that are shown
SHORT = {
    "plan.tp": "tp{}",
    "plan.pp": "pp{}",
    "plan.cp": "cp{}",
    "plan.ep": "ep{}",
    "plan.microbatch": "mb{}",
    "plan.chunks": "v{}",
    "plan.data_parallel": "{}",
    "plan.schedule": "{}",
    "plan.recompute": "recompute {}",
    "nodes": "{} nodes",
}
SILENT = ("plan.sequence_parallel", "plan.order", "plan.reshard", "plan.shard")  # left out of a plan's short name


@dataclass(frozen=True)
class Plans:
    """Rows, and what they have in common: the job's plan, the tokens that are paid for, the rates, memory of a GPU in bytes.
    named: how a row's plan is called; by default by what varies.
    """

    rows: Sequence[Row]
    plan: Mapping[str, Any]
    tokens: float
    rates: Rates
    capacity: float
    named: Callable[[Row], str] | None = None

    @property
    def unit(self) -> str:
        """What is counted of what they train on."""
        return counted(self.plan.get("sequence"))

    @cached_property
    def fitting(self) -> list[Row]:
        """Rows of plans that fit, the fastest per GPU first."""
        able = [row for row in self.rows if row["step"] and row["fits"]]
        return sorted(able, key=lambda row: rank_row(row, 1 / row["tokens_per_second_per_gpu"]))

    @cached_property
    def varied(self) -> list[str]:
        """Fields that are not the same in all rows."""
        names = dict.fromkeys(name for row in self.rows for name in row["changes"])
        return [name for name in names if len({str(self.value(row, name)) for row in self.rows}) > 1]

    @cached_property
    def money(self) -> str:
        """What a plan's GPUs are counted in: dollars when one price is known for all rows."""
        other = any(name.startswith("cluster") or name == "price" for row in self.rows for name in row["changes"])
        return "GPU-hours" if other or self.rates.usd is None else "$"

    def value(self, row: Row, name: str) -> Any:
        """A field's value in a row; what the row does not change is the job's."""
        return row["changes"].get(name, self.plan.get(name.removeprefix("plan.")))

    def hours(self, row: Row) -> float:
        """Hours to train the tokens."""
        return self.tokens / float(row["tokens_per_second"]) / 3600

    def spent(self, row: Row) -> float:
        """Money for the tokens."""
        return self.hours(row) * int(row["gpus"]) * (1.0 if self.money == "GPU-hours" else self.rates.usd or 1.0)

    def name(self, row: Row) -> str:
        """What is particular about a plan, in short: `tp8 pp2 zero1`."""
        if self.named is not None:
            return self.named(row)
        values = [(name, self.value(row, name)) for name in self.varied if name not in SILENT]
        parts = [SHORT.get(name, name.removeprefix("plan.") + "={}").format(v) for name, v in values if v not in (None, "none")]
        return " ".join(parts) or "the job's plan"


def section(plans: Plans, title: str) -> Section:
    """Heatmap, Pareto front and the table. Raises UserError when the table is empty."""
    if not plans.rows:
        raise UserError(f"{title}: the table of plans is empty")
    pictures = []
    maps = panels(plans)
    if maps:
        best = sorted(maps, key=lambda name: -max((c.value or 0.0 for c in maps[name].values() if c.fits), default=0.0))
        alt = f"{plans.unit.capitalize()} per second of a GPU by tp and pp, a map per setting of data parallelism"
        pictures.append(Picture("heatmap", alt, heatmap, Maps({name: maps[name] for name in best[:PANELS]}, plans.unit)))
    if plans.fitting:
        pictures.append(Picture("pareto", "Plans by time, cost and memory; the frontier is named", pareto, front(plans)))
    left = [f"The maps show the best {PANELS} of {len(maps)} settings."] if len(maps) > PANELS else []
    return Section(title, tuple(pictures), (counts_text(plans), *left), sheet=sheet(plans))


def counts_text(plans: Plans) -> str:
    """How many plans, and what became of them."""
    refused = Counter(str(row["error"]).rpartition("yaml: ")[2] for row in plans.rows if row["error"])
    parts = [f"{len(plans.rows):,} plans: {len(plans.fitting):,} fit"]
    too_big = sum(not row["error"] and not row["fits"] for row in plans.rows)
    parts += [f"{too_big:,} run out of memory"] if too_big else []
    parts += [f"{refused.total():,} are refused (most often: {refused.most_common(1)[0][0]})"] if refused else []
    return f"{', '.join(parts)}."


def sheet(plans: Plans) -> Sheet:
    """A row per plan, those that fit first; refused ones say why."""
    names = plans.varied
    money = f"{plans.money} for {tokens_text(plans.tokens, plans.unit)}"
    columns = [
        *(name.removeprefix("plan.") for name in names),
        "step (s)",
        f"{plans.unit}/s/GPU",
        "MFU (%)",
        "memory (GB)",
        "bubble (%)",
        "exposed (%)",
        "days",
        money,
        "answer",
    ]
    rest = [row for row in plans.rows if not (row["step"] and row["fits"])]
    rest.sort(key=lambda row: (row["step"] is None, row["step"] or 0.0, str(row["changes"])))
    return Sheet(
        columns, [[*(_plain(plans.value(row, name)) for name in names), *_numbers(plans, row)] for row in (*plans.fitting, *rest)]
    )


def _numbers(plans: Plans, row: Row) -> list[Any]:
    if not row["step"]:
        return [*[None] * 8, row["error"]]
    numbers = (
        row["step"],
        row["tokens_per_second_per_gpu"],
        100 * row["mfu"],
        row["memory"] / 1e9,
        100 * row["bubble"],
        100 * row["exposed"],
        plans.hours(row) / 24,
        plans.spent(row),
    )
    return [*(float(f"{number:.4g}") for number in numbers), "fits" if row["fits"] else "out of memory"]


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def panels(plans: Plans) -> dict[str, dict[tuple[int, int], Cell]]:
    """Setting of data parallelism -> (tp, pp) -> the best plan there; nothing when neither varies."""
    if not {"plan.tp", "plan.pp"} & set(plans.varied):
        return {}
    others = [name for name in ("nodes", "cluster", "plan.reshard", "plan.shard") if name in plans.varied]
    maps: dict[str, dict[tuple[int, int], Cell]] = {}
    for row in plans.rows:
        more = [f"{name.removeprefix('plan.')} {plans.value(row, name)}" for name in others if plans.value(row, name) is not None]
        panel = maps.setdefault(", ".join([str(plans.value(row, "plan.data_parallel")), *more]), {})
        at = int(plans.value(row, "plan.tp") or 1), int(plans.value(row, "plan.pp") or 1)
        new = Cell(row["tokens_per_second_per_gpu"] if row["step"] else None, bool(row["step"] and row["fits"]))
        if at not in panel or _better(new, panel[at]):
            panel[at] = new
    return maps


def _better(cell: Cell, other: Cell) -> bool:
    return (cell.fits, cell.value or 0.0) > (other.fits, other.value or 0.0)


def front(plans: Plans) -> Front:
    """Plans that fit, and which of them nothing beats in time, cost and memory at once."""
    from strategies.planner.search.answer import pareto as unbeaten

    rows: list[dict[str, Any]] = [{**row, "pace": plans.hours(row), "spend": plans.spent(row)} for row in plans.fitting]
    best = list(unbeaten(rows))
    points = [Plan(plans.name(row), row["pace"] / 24, row["spend"], row["memory"], row in best) for row in rows]
    return Front(points, tokens_text(plans.tokens, plans.unit), plans.money, plans.capacity)
