"""A transformer layer end to end: measured, and predicted by the prices of its parts.

In a step kernels take longer than alone: caches and memory are shared with the other ranks and with the kernels before, and there
are small operators that no price covers. On a CPU, where this is several percent, layers of FITTED say by how much, pass by pass
(`Profile.crowding`); the one of CHECKED is never fitted to. A GPU's short layers are bound by its host: there all are checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from calibration.samples import Merged
from sim.analysis.summary import summarise
from sim.engine.player import run
from sim.pricing.prices import SDPA, Crowding, Prices, Profile
from strategies.lowering.lower import lower
from strategies.models.model import Model
from strategies.plan.defaults import with_precision
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from topologies.cluster import Cluster

BATCH, VOCABULARY = 2, 1024
FITTED = ((256, 128), (512, 64), (512, 256))  # features and tokens
CHECKED = ((384, 256),)
COUNTS = (1, 3)  # layers: the difference is two layers without embedding and head
PASSES = ("forward", "backward")
RATE = 1e9  # bytes per second, any


class Check(NamedTuple):
    """Seconds of the passes of one layer of `hidden` features over `tokens` tokens, forward and backward."""

    hidden: int
    tokens: int
    measured: tuple[float, float]
    predicted: tuple[float, float]

    @property
    def error(self) -> float:
        """Of both passes: predicted over measured − 1."""
        return sum(self.predicted) / sum(self.measured) - 1


def model(hidden: int, layers: int) -> Model:
    """A small decoder."""
    fields: dict[str, Any] = {
        "name": f"check-{hidden}",
        "layers": layers,
        "hidden": hidden,
        "heads": hidden // 64,
        "vocabulary": VOCABULARY,
        "context": 1024,
    }
    return Model.model_validate(fields)


def checks(
    merged: Sequence[Merged], profile: Profile, cluster: Cluster, shapes: Sequence[tuple[int, int]] = CHECKED
) -> list[Check]:
    """Of each shape that was measured."""
    single = cluster.model_copy(update={"nodes": 1, "node": cluster.node.model_copy(update={"gpus": 1, "nics": 0, "nic": 0.0})})
    prices, result, layers = Prices(profile, cluster.node.gpu), [], COUNTS[1] - COUNTS[0]
    seconds = {
        tuple(sample.case[name] for name in ("hidden", "tokens", "layers", "passes")): sample.value
        for sample in merged
        if sample.part == "layer" and {"tokens", "passes"} <= set(sample.case)
    }
    for hidden, tokens in shapes:
        every = [[seconds.get((hidden, tokens, count, passes), 0.0) for count in COUNTS] for passes in PASSES]
        forward, backward = ((many - few) / layers for few, many in every)
        if min(forward, backward) <= 0 or not all(map(all, every)):
            continue
        few, many = (_passes(model(hidden, count), tokens, single, prices) for count in COUNTS)
        predicted = tuple((after - before) / layers for before, after in zip(few, many, strict=True))
        result.append(Check(hidden, tokens, (forward, backward), (predicted[0], predicted[1])))
    return result


def crowding(merged: Sequence[Merged], profile: Profile, cluster: Cluster) -> tuple[dict[str, Crowding], list[Check]]:
    """By pass, the factor and the rate of products' bytes with which the layers of FITTED take what was measured, by least
    squares of relative errors; and these layers, as far as they were measured.
    """
    found = checks(merged, profile, cluster, FITTED)
    dearer = profile.model_copy(update={"crowding": dict.fromkeys(PASSES, Crowding.model_construct(factor=1.0, rate=RATE))})
    counted = checks(merged, dearer, cluster, FITTED)
    result = {}
    for number, name in enumerate(PASSES):
        rows = [
            ((plain.predicted[number], more.predicted[number] - plain.predicted[number]), plain.measured[number])
            for plain, more in zip(found, counted, strict=True)
        ]
        if len(rows) > 1:
            matrix = np.array([[seconds / measured for seconds in parts] for parts, measured in rows])
            factor, share = nnls(matrix, np.ones(len(rows)))[0].tolist()
            result[name] = Crowding.model_construct(factor=factor, rate=RATE / share if share else inf)
    return result, found


def _passes(of: Model, tokens: int, cluster: Cluster, prices: Prices) -> tuple[float, float]:
    """Predicted seconds of a step's forward and backward passes, in the precision that the device trains in."""
    gpu = cluster.node.gpu
    fields = {"microbatch": BATCH, "global_batch": BATCH, "kernels": "torch", "sequence": tokens // BATCH}
    own = {"attention": SDPA} if gpu.sms else {"precision": "fp32"}
    plan, _ = with_precision(Plan.model_validate(fields | own), [gpu])
    breakdown = summarise(run(lower(of, Resolved.of(plan, of, 1)), cluster.topology(), prices)).breakdown
    return breakdown["forward"], breakdown["backward"]
