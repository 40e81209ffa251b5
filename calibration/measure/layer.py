"""A real transformer end to end, forward and backward: it checks the prices of its parts (`calibration.measure.layer_check`).

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from calibration.execute.model import Transformer
from calibration.execute.model import loss as cross_entropy
from calibration.measure.bench import Bench, Probe, Reading
from calibration.measure.layer_check import BATCH, COUNTS, SEQUENCE, VOCABULARY, WIDTHS, model


def probes() -> list[Probe]:
    """Models of few layers, in the precision that they are priced in."""
    return [Probe("layer", {"hidden": width, "layers": count}, _run(width, count)) for width in WIDTHS for count in COUNTS]


def _run(width: int, layers: int) -> Callable[[Bench], Reading]:
    def run(bench: Bench) -> Reading:
        net = Transformer(model(width, layers), SEQUENCE).to(bench.device, bench.dtype)
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), device=bench.device)

        def step() -> None:
            cross_entropy(net(tokens), tokens).backward()  # type: ignore[no-untyped-call]
            for parameter in net.parameters():
                parameter.grad = None

        return bench.kernel(step)

    return run
