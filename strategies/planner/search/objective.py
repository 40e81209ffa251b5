"""What a search minimises and what it must keep to. Objectives are proportional to a plan's step, and so are their bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from strategies.planner.ranking import HEADROOM
from strategies.planner.search.results import Row
from topologies.costs import Rates
from topologies.reading import UserError, nearest


@dataclass(frozen=True)
class Scale:
    """What turns a step of a plan into an objective: GPUs, tokens per step, tokens of the training, prices."""

    gpus: int
    tokens_per_step: float
    tokens: float
    rates: Rates

    @property
    def hours(self) -> float:
        """GPU-hours of the training per second of a step."""
        return self.gpus * self.tokens / self.tokens_per_step / 3600


@dataclass(frozen=True)
class Objective:
    """A number to be minimised: `per_second(scale)` times the seconds of a step."""

    name: str
    unit: str
    per_second: Callable[[Scale], float]
    meaning: str
    inverse: str = ""  # unit of 1 / the number, where people think in that
    delivered: Callable[[Row, Scale], float] | None = None  # the number of a row that has runs; steps alone are its bound

    def display(self, value: float) -> tuple[float, str]:
        """A value as people think of it, and its unit."""
        return (1 / value, self.inverse) if self.inverse else (value, self.unit)

    def of(self, row: Row, scale: Scale) -> float:
        """The number of a simulated plan."""
        return self.delivered(row, scale) if self.delivered else row["step"] * self.per_second(scale)


def _price(scale: Scale) -> float:
    if scale.rates.usd is None:
        raise UserError(f"cost: {scale.rates.usd_source} (--price)")
    return scale.rates.usd


def _dollars(scale: Scale) -> float:
    return scale.hours * _price(scale)


OBJECTIVES = {
    goal.name: goal
    for goal in (
        Objective("step", "s", lambda scale: 1.0, "seconds of a step"),
        Objective("throughput", "GPU·s/token", lambda s: s.gpus / s.tokens_per_step, "throughput of a GPU", "tokens/s/GPU"),
        Objective("time", "days", lambda s: s.tokens / s.tokens_per_step / 86400, "days to train all tokens"),
        Objective("gpu-hours", "GPU-hours", lambda s: s.hours, "GPU-hours to train all tokens"),
        Objective("cost", "dollars", _dollars, "dollars to train all tokens"),
        Objective("energy", "kWh", lambda s: s.hours * s.rates.watts / 1000, "kWh to train all tokens"),
        Objective(
            "goodput",
            "days",
            lambda s: s.tokens / s.tokens_per_step / 86400,
            "days to train all tokens, failures and checkpoints included",
            delivered=lambda row, _: float(row["run_days"]),
        ),
        Objective(
            "goodput-cost",
            "dollars",
            _dollars,
            "dollars to train all tokens, failures, checkpoints and spares included",
            delivered=lambda row, scale: row["run_gpu_hours"] * _price(scale),
        ),
    )
}


def objective(name: str) -> Objective:
    """By name. Raises UserError."""
    if name not in OBJECTIVES:
        raise UserError(f"--objective {name}: unknown{nearest(name, OBJECTIVES)}")
    return OBJECTIVES[name]


@dataclass(frozen=True)
class Limits:
    """Constraints; None: none. Memory in bytes per GPU besides its capacity, power in watts of all GPUs; headroom: part of a
    GPU's memory that is kept free.
    """

    gpus: int | None = None
    memory: float | None = None
    days: float | None = None
    cost: float | None = None
    power: float | None = None
    headroom: float = HEADROOM

    def of_step(self, scale: Scale) -> dict[str, float]:
        """Longest step that each constraint allows: name -> seconds."""
        asked = {"days": self.days, "cost": self.cost}
        named = {"days": "time", "cost": "cost"}
        return {name: most / OBJECTIVES[named[name]].per_second(scale) for name, most in asked.items() if most is not None}

    def of_site(self, scale: Scale) -> str | None:
        """Which constraint rules out every plan on so many GPUs, and why; None when none does."""
        if self.gpus is not None and scale.gpus > self.gpus:
            return f"gpus ≤ {self.gpus:,}: {scale.gpus:,}"
        watts = scale.gpus * scale.rates.watts
        if self.power is not None and watts > self.power:
            return f"power ≤ {self.power / 1e3:,.1f} kW: {watts / 1e3:,.1f} kW"
        return None
