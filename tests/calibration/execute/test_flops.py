"""FLOPs of a whole training step against torch.utils.flop_counter."""

from __future__ import annotations

from typing import Any

import pytest

from strategies.lowering.lower import lower
from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from tests.calibration.execute.conftest import GPT, LLAMA


@pytest.mark.parametrize("fields", [GPT, LLAMA])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_flops_of_a_step(fields: dict[str, Any], recompute: str) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from calibration.execute.model import Transformer, loss
    from calibration.execute.recomputation import Recomputation

    model = Model(**fields)
    with torch.device("meta"):
        net = Transformer(model, 32, attention="materialised", recompute=Recomputation(recompute))
        tokens = torch.empty(3, 32, dtype=torch.long)
    assert sum(parameter.numel() for parameter in net.parameters()) == model.parameters
    with FlopCounterMode(display=False) as counter:
        loss(net(tokens), tokens).backward()
    ours, megatron = (
        lower(model, Resolved.of(Plan(microbatch=3, recompute=recompute, attention="materialised", kernels=kernels), model, 1))
        for kernels in ("torch", "megatron")
    )
    assert ours.hardware_flops == counter.get_total_flops()
    # PyTorch's checkpoint stops once it has what backward needs: the last product of a layer is not done again
    spared = model.layers * 2 * 3 * 32 * model.ffn * model.hidden if recompute == "full" else 0
    assert megatron.hardware_flops - ours.hardware_flops == spared
