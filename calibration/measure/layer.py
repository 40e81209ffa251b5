"""Real transformers end to end, pass by pass, on all ranks at once (`calibration.measure.layer_check`).

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from calibration.execute.model import Transformer
from calibration.execute.model import loss as cross_entropy
from calibration.measure.bench import Bench, Probe, Reading, spread
from calibration.measure.layer_check import BATCH, CHECKED, COUNTS, FITTED, PASSES, VOCABULARY, model


def probes() -> list[Probe]:
    """Models of few layers, in the precision that they are priced in."""
    return [
        Probe(
            "layer",
            {"hidden": hidden, "tokens": tokens, "layers": count, "passes": name},
            _run(hidden, tokens, count, name),
            rounds=3,
        )
        for hidden, tokens in FITTED + CHECKED
        for count in COUNTS
        for name in PASSES
    ]


def _run(hidden: int, tokens: int, layers: int, passes: str) -> Callable[[Bench], Reading]:
    """One pass of a step, timed within the step: "forward" or "backward"."""

    def run(bench: Bench) -> Reading:
        net = Transformer(model(hidden, layers), tokens // BATCH).to(bench.device, bench.dtype)
        words = torch.randint(VOCABULARY, (BATCH, tokens // BATCH), device=bench.device)
        values: list[Tensor] = []

        def forward() -> None:
            values.append(cross_entropy(net(words), words))

        def backward() -> None:
            values.pop().backward()  # type: ignore[no-untyped-call]
            for parameter in net.parameters():
                parameter.grad = None

        def step() -> None:
            forward()
            backward()

        count, _ = bench.repetitions(step)
        bench.barrier()
        if passes == "backward":
            mine = bench.times(backward, count, forward, clock=bench.clock)
        else:
            forward()
            mine = bench.times(forward, count, backward, clock=bench.clock)
        both = bench.gather([float(np.median(mine)), spread(mine)])
        return Reading(float(both[:, 0].mean()), float(both[:, 0].min()), float(both[:, 1].max()), count)

    return run
