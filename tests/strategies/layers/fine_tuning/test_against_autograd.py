"""Adapters and frozen layers beside PyTorch: what autograd makes and keeps of a module written by hand is what a plan says."""

from __future__ import annotations

from typing import Any

import pytest

from shardyard import Job, read_job, simulate, summarise
from sim.program import Kernel
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import parts
from tests.strategies.layers.fine_tuning.small_decoder import CHOSEN, EXPERTS, FFN, HIDDEN, LAYERS, SIZES, Decoder, MixtureBlock

PLAN: dict[str, Any] = {"kernels": "torch", "microbatch": 2, "global_batch": 32}
ALL = ("q", "k", "v", "o", "up", "down")
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [  # of the module, of the plan
    ({"adapted": ("q", "v")}, {"lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}}),
    ({"adapted": ALL, "dropout": 0.1}, {"lora": {"r": 8, "lora_dropout": 0.1, "target_modules": "all-linear"}}),
    ({"adapted": ("up",), "rank": 4}, {"lora": {"rank": 4, "targets": ["linear_fc1"]}}),
    ({"adapted": ALL, "dora": True}, {"lora": {"r": 8, "use_dora": True, "target_modules": "all-linear"}}),
    (
        {"adapted": ("q", "down"), "dora": True, "dropout": 0.1},
        {"lora": {"rank": 8, "dora": True, "dropout": 0.1, "targets": ["q_proj", "down_proj"]}},
    ),
    ({"frozen_layers": 2}, {"freeze": {"layers": 2}}),
    ({"frozen_layers": LAYERS}, {"freeze": {"layers": LAYERS}}),
]


def both(module: dict[str, Any], plan: dict[str, Any], **more: Any) -> tuple[Job, Job]:
    """The module traced, and the same by its description."""
    traced = read_job(None, model=Decoder(**module), input="512:int64", cluster="dgx-a100", plan=PLAN | more)
    described = read_job(None, model=SIZES, cluster="dgx-a100", plan=PLAN | {"auto": False, "sequence": 512} | plan | more)
    return traced, described


def work(part: LayerCost, way: str) -> tuple[float, int]:
    """FLOPs and products of a pass."""
    products = [item for item in getattr(part, way) if isinstance(item, Kernel) and item.kind == "gemm"]
    return sum(item.flops for item in products), len(products)


@pytest.mark.parametrize(("module", "plan"), CASES, ids=str)
def test_layers_compute_and_keep_what_autograd_does(module: dict[str, Any], plan: dict[str, Any]) -> None:
    costs = [parts(job.model, job.resolve()) for job in both(module, plan)]
    layers = [[cost.embedding, *map(cost.layer, range(LAYERS)), cost.head] for cost in costs]
    for own, other in zip(*layers, strict=True):
        for way in ("forward", "backward"):
            assert work(other, way) == work(own, way)
        assert (other.parameters, other.frozen) == (own.parameters, own.frozen)
        outputs = 5 * HIDDEN + FFN if module.get("dora") else 0  # of which three vectors are kept and left out
        assert other.saved == pytest.approx(own.saved, abs=4 + 3 * 2 * outputs)  # of the head, the loss's own number
        assert other.model_flops == own.model_flops
        assert other.frozen_bytes == own.frozen_bytes


@pytest.mark.parametrize("hook", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(("module", "plan"), [CASES[0], CASES[3], CASES[5]], ids=str)
def test_states_and_volumes_are_of_what_is_trained(module: dict[str, Any], plan: dict[str, Any], hook: str) -> None:
    own, other = (summarise(simulate(job)) for job in both(module, plan, data_parallel=hook))
    assert {axis: sent.bytes for axis, sent in other.volume.items()} == {axis: sent.bytes for axis, sent in own.volume.items()}
    for kind in ("parameter", "gradient", "optimizer"):
        more = own.worst.kinds[kind] - other.worst.kinds[kind]
        # a module's loss is not told from its head: its peak may be there, with a gradient on its way to ZeRO-2's bucket
        assert more in ((0, 2 * HIDDEN * FFN) if (hook, kind) == ("zero2", "gradient") else (0,))
    assert other.worst.peak == pytest.approx(own.worst.peak, rel=0.01)
    assert other.step_seconds == pytest.approx(own.step_seconds, rel=0.02)


def test_flops_are_those_that_pytorch_counts() -> None:
    """FlopCounterMode counts the products of a real pass, forward and backward, of the module with adapters."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    net = Decoder(adapted=ALL)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        net(torch.zeros(2, 512, dtype=torch.long)).sum().backward()
    _, described = both(*CASES[1])
    costs = parts(described.model, described.resolve())
    every = [*map(costs.layer, range(LAYERS)), costs.head]
    assert counter.get_total_flops() == sum(part.model_flops for part in every)


def test_flops_of_adapted_experts_are_those_that_pytorch_counts() -> None:
    """A real pass, forward and backward, of a block whose tokens are spread evenly over experts, each with adapters of its own;
    and parameters that have gradients.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    net, tokens = MixtureBlock(("up", "down")), 512
    counter = FlopCounterMode(display=False)
    with counter:
        net(torch.randn(tokens, HIDDEN, requires_grad=True)).sum().backward()
    experts = {"experts": EXPERTS, "chosen": CHOSEN, "ffn": FFN, "shared": 1}
    plan = {"microbatch": 1, "sequence": tokens, "kernels": "torch", "lora": {"rank": 8, "targets": "mlp"}}
    job = read_job(None, model=SIZES | {"mixer": "none", "experts": experts}, cluster="dgx-a100", plan=plan)
    layer = parts(job.model, job.resolve()).layer(1)
    assert layer.model_flops == counter.get_total_flops()
    assert layer.parameters == sum(each.numel() for each in net.parameters() if each.requires_grad)
