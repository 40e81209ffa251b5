"""A transformer layer end to end: measured, and predicted by the prices of its parts. It is never fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from calibration.samples import Merged
from sim.analysis.summary import summarise
from sim.engine.player import run
from sim.pricing.prices import Prices, Profile
from strategies.lowering.lower import lower
from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from topologies.cluster import Cluster

BATCH, SEQUENCE, VOCABULARY = 2, 256, 1024
WIDTHS = (256, 512)
COUNTS = (1, 3)  # layers: the difference is two layers without embedding and head


class Check(NamedTuple):
    """Seconds of forward and backward of one layer of `hidden` features."""

    hidden: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured − 1."""
        return self.predicted / self.measured - 1


def model(hidden: int, layers: int) -> Model:
    """A small decoder."""
    fields: dict[str, Any] = {
        "name": f"check-{hidden}",
        "layers": layers,
        "hidden": hidden,
        "heads": hidden // 64,
        "vocabulary": VOCABULARY,
        "context": SEQUENCE,
    }
    return Model.model_validate(fields)


def checks(merged: Sequence[Merged], profile: Profile, cluster: Cluster) -> list[Check]:
    """Of each width that was measured."""
    single = cluster.model_copy(update={"nodes": 1, "node": cluster.node.model_copy(update={"gpus": 1, "nics": 0, "nic": 0.0})})
    prices = Prices(profile, cluster.node.gpu)
    result = []
    for hidden in WIDTHS:
        by_layers = {
            int(sample.case["layers"]): sample.value
            for sample in merged
            if sample.part == "layer" and sample.case["hidden"] == hidden
        }
        if len(by_layers) == len(COUNTS) and by_layers[COUNTS[1]] > by_layers[COUNTS[0]]:
            few, many = (_passes(model(hidden, layers), single, prices) for layers in COUNTS)
            layers = COUNTS[1] - COUNTS[0]
            result.append(Check(hidden, (by_layers[COUNTS[1]] - by_layers[COUNTS[0]]) / layers, (many - few) / layers))
    return result


def _passes(of: Model, cluster: Cluster, prices: Prices) -> float:
    """Predicted seconds of a step without its update."""
    precision = "bf16" if cluster.node.gpu.sms else "fp32"
    fields = {"sequence": SEQUENCE, "microbatch": BATCH, "global_batch": BATCH, "precision": precision, "kernels": "torch"}
    plan = Plan.model_validate(fields)
    summary = summarise(run(lower(of, Resolved.of(plan, of, 1)), cluster.topology(), prices))
    return float(summary.step_seconds - summary.breakdown.get("optimizer", 0.0))
