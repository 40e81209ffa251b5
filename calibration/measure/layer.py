"""A real transformer end to end, forward and backward: it checks the prices of its parts and is never fitted to.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from calibration.execute.model import Transformer
from calibration.execute.model import loss as cross_entropy
from calibration.measure.bench import Bench, Probe, Reading
from strategies.model import Model

BATCH, SEQUENCE = 4, 256
WIDTHS = (256, 512)
COUNTS = (1, 3)  # layers: the difference is that of two layers, without embedding and head


def described(width: int, layers: int) -> dict[str, Any]:
    """The fields of the model."""
    return {"family": "decoder", "name": f"check-{width}", "layers": layers, "hidden": width, "heads": width // 64, "vocabulary": 1024, "context": SEQUENCE}


def probes(device: str) -> list[Probe]:
    """Forward and backward of models of few layers."""
    return [Probe("layer", {"hidden": width, "layers": count}, _run(width, count)) for width in WIDTHS for count in COUNTS]


def _run(width: int, layers: int) -> Callable[[Bench], Reading]:
    def run(bench: Bench) -> Reading:
        net = Transformer(Model.model_validate(described(width, layers)), SEQUENCE).to(bench.device)
        tokens = torch.randint(1024, (BATCH, SEQUENCE), device=bench.device)

        def step() -> None:
            cross_entropy(net(tokens), tokens).backward()

        return bench.kernel(step)

    return run
