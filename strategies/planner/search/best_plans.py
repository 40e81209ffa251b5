"""Simulated plans that fit and keep to every constraint: what another plan must beat."""

from __future__ import annotations

from dataclasses import dataclass, field

from strategies.planner.search.objective import Objective
from strategies.planner.search.results import Row
from strategies.planner.search.site import Site


@dataclass
class BestPlans:
    """Rows of simulated plans with their objective ("value"), time ("pace") and cost ("spend") per token.

    top: how many of them are to be proven.
    """

    objective: Objective
    top: int
    rows: list[Row] = field(default_factory=list)

    def add(self, site: Site, plan: int, row: Row) -> None:
        """A plan of a site that was simulated."""
        scale = site.scale(plan)
        value, per_token = self.objective.of(row, scale), row["step"] / scale.tokens_per_step
        spend = per_token * scale.gpus * (scale.rates.usd or 1.0)
        self.rows.append(row | {"value": value, "pace": per_token, "spend": spend, "scale": scale, "bound": None})

    @property
    def worst(self) -> float:
        """The objective that the next plan must beat: of the last of the top."""
        values = sorted(row["value"] for row in self.rows)
        return values[self.top - 1] if len(values) >= self.top else float("inf")

    def dominates(self, site: Site, plan: int, bound: float) -> bool:
        """Whether a simulated plan is at least as good in time, cost and memory as a plan with this bound can be."""
        step, scale = bound / self.objective.per_second(site.scale(plan)), site.scale(plan)
        pace, spend = step / scale.tokens_per_step, step * scale.gpus / scale.tokens_per_step * (scale.rates.usd or 1.0)
        memory = float(site.limits.memory[plan])
        return any(row["pace"] <= pace and row["spend"] <= spend and row["memory"] <= memory for row in self.rows)
