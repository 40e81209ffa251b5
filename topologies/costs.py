"""Costs of training: dollars per GPU-hour and watts per GPU as data with date and source (`costs.yaml`), and sums of them.

Energy is an upper figure: every node at its maximum all the time. It is not far off while GPUs compute: large matrix products
draw 98 % of the board's limit on B200 and 99 % on H200 (medians of 4,485 bf16 products with m, n, k ≥ 2048 each,
ai-dynamo/aiconfigurator at 095f58a, Apache-2.0); waiting draws less. Cooling of the building is not in it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topologies.cluster import Cluster
from topologies.hardware import Gpu
from topologies.reading import UserError, load_yaml

_FILE = Path(__file__).parent / "costs.yaml"


@dataclass(frozen=True)
class Rates:
    """Dollars per GPU-hour (None: unknown) and watts per GPU, each with its source."""

    usd: float | None
    usd_source: str
    watts: float
    watts_source: str


@dataclass(frozen=True)
class Cost:
    """Costs of training on `tokens` tokens: seconds, GPU-hours, dollars (None: no price), joules."""

    tokens: float
    seconds: float
    gpu_hours: float
    usd: float | None
    joules: float
    rates: Rates

    def to_dict(self) -> dict[str, Any]:
        """Plain data with stable keys."""
        return {
            "tokens": self.tokens,
            "days": self.seconds / 86400,
            "gpu_hours": self.gpu_hours,
            "usd": self.usd,
            "kwh": self.joules / 3.6e6,
            "usd_per_gpu_hour": self.rates.usd,
            "price_source": self.rates.usd_source,
            "watts_per_gpu": self.rates.watts,
            "power_source": self.rates.watts_source,
        }


@functools.cache
def _data() -> dict[str, Any]:
    return load_yaml(_FILE)


def rates(gpu: Gpu, price: float | None = None, where: str = "--price") -> Rates:
    """Rates of a GPU; price: dollars per GPU-hour in place of the listed one. Raises UserError for one that is no price."""
    if price is not None and (not isinstance(price, int | float) or not 0 <= price < float("inf")):
        raise UserError(f"{where}={price}: must be dollars per GPU-hour, and not negative")
    data: Mapping[str, Any] = _data()
    offers, power = data["prices"].get(gpu.model), data["power"].get(gpu.model)
    usd, source = (price, "as given") if price is not None else (None, f"no price of {gpu.name} is listed: give one")
    if price is None and offers:
        usd, source = float(offers[0]["usd"]), f"{offers[0]['offer']}, {offers[0]['date']}: {offers[0]['source']}"
    watts = (float(power["watts"]), str(power["source"])) if power else (gpu.power, "the board's limit alone")
    return Rates(usd, source, *watts)


def mean_rates(cluster: Cluster, price: float | None = None, where: str = "--price") -> Rates:
    """Rates of a GPU of the cluster; the mean where they differ (no price where one of them has none)."""
    counts: dict[Gpu, int] = {}
    for group in cluster.groups:
        counts[group.node.gpu] = counts.get(group.node.gpu, 0) + group.count * len(group.gpus)
    each = [(rates(gpu, price, where), count) for gpu, count in counts.items()]
    if len(each) == 1 or price is not None:
        return each[0][0]
    total = sum(counts.values())
    usd = [rate.usd * count / total for rate, count in each if rate.usd is not None]
    prices, powers = ({getattr(rate, name): None for rate, _ in each} for name in ("usd_source", "watts_source"))
    watts = sum(rate.watts * count for rate, count in each) / total
    return Rates(
        sum(usd) if len(usd) == len(each) else None, f"mean of {' + '.join(prices)}", watts, f"mean of {' + '.join(powers)}"
    )


def cost(rates: Rates, gpus: int, step: float, tokens_per_step: float, tokens: float) -> Cost:
    """Costs of `tokens` tokens with steps of `step` seconds; a started step counts in part."""
    seconds = step * tokens / tokens_per_step
    hours = gpus * seconds / 3600
    return Cost(tokens, seconds, hours, None if rates.usd is None else hours * rates.usd, rates.watts * gpus * seconds, rates)
