"""FLOPs of layers against torch.utils.flop_counter, and the rules of model FLOPs."""

from __future__ import annotations

from typing import Any

import pytest

from sim.program import Kernel
from strategies.layers.model_costs import parts
from strategies.models.model import Model, load_model
from tests.strategies.layers.conftest import GPT, LLAMA, Torch, flops, resolved


def torch_flops(model: Model, tp: int, batch: int, sequence: int, head: bool) -> tuple[int, int]:
    from torch.utils.flop_counter import FlopCounterMode

    net = Torch(model, tp, batch, sequence)
    x = net.tensor(batch, sequence, model.hidden)
    with FlopCounterMode(display=False) as forward:
        y = net.torch.nn.functional.linear(x, net.weights["head"]) if head else net.layer(x)
    with FlopCounterMode(display=False) as backward:
        y.backward(net.torch.empty_like(y))
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("fields", [GPT, LLAMA])
@pytest.mark.parametrize("tp", [1, 2])
def test_flops_as_torch_counts_them(fields: dict[str, Any], tp: int) -> None:
    model = Model(**fields)
    work = parts(model, resolved(model, tp=tp, microbatch=3, attention="materialised"))
    for part, head in ((work.layer(0), False), (work.head, True)):
        forward, backward = torch_flops(model, tp, 3, 32, head)
        assert flops(part.forward) == forward
        assert flops(part.input_gradient) + flops(part.weight_gradient) == backward == 2 * forward
        assert flops(part.input_gradient) > flops(part.weight_gradient) or head  # attention has no weights


@pytest.mark.parametrize("name", ["gpt3-175b", "llama-3.1-8b", "bert-large"])
@pytest.mark.parametrize("plan", [{}, {"tp": 4}, {"tp": 4, "sequence_parallel": True}, {"recompute": "full"}])
def test_model_flops_follow_the_rule(name: str, plan: dict[str, Any]) -> None:
    model, _ = load_model(name)
    work = parts(model, resolved(model, microbatch=2, sequence=512, **plan))
    total = work.embedding.model_flops + sum(work.layer(i).model_flops for i in range(model.layers)) + work.head.model_flops
    assert total == 3 * model.forward_flops(2, 512, causal=False)


def test_model_flops_of_megatron() -> None:
    """arXiv:2205.05198, appendix A: 72·B·L·s·h²·(1 + s/(6h) + v/(12hL))."""
    model, _ = load_model("gpt3-175b")
    work = parts(model, resolved(model, tp=8))
    s, h, layers, v = 2048, 12288, 96, 51200
    expected = 72 * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
    assert layers * work.layer(0).model_flops + work.head.model_flops == pytest.approx(expected, rel=1e-12)


def test_causal_flash_executes_half() -> None:
    model, encoder = Model(**GPT), Model(**GPT, family="encoder")
    kernels = {}
    for m in (model, encoder):
        part = parts(m, resolved(m, microbatch=2, tp=2)).layer(0)
        kernels[m.family] = [i for i in part.forward + part.backward if isinstance(i, Kernel) and i.kind.startswith("attention")]
    forward, backward = kernels["decoder"]
    assert (forward.kind, forward.shape, forward.flops) == (
        "attention_forward",
        (2, 4, 4, 32, 32, 8, 1),
        4 * 2 * 4 * 32 * 32 * 8 / 2,
    )
    assert backward.flops == 2.5 * forward.flops
    assert kernels["encoder"][0].flops == 2 * forward.flops
    assert kernels["encoder"][0].shape[-1] == 0
