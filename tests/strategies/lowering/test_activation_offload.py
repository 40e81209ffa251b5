"""Activations in the CPUs' memory: bytes against what PyTorch's autograd keeps, peak and step against closed forms of Transformer
Engine's schedule (its documentation: with N of L layers offloaded, L − N layers' activations are on the GPU).
"""

from __future__ import annotations

from typing import Any

import pytest

from sim.analysis.summary import Summary, summarise
from sim.engine.player import run
from sim.timeline import Timeline
from strategies.layers.model_costs import parts
from strategies.lowering.lower import lower
from tests.strategies.data_parallel.test_offload import CPU
from topologies.reading import UserError

LAYERS = 6


@pytest.fixture
def job(toy_job):
    def make(offloaded: int | None = None, gpus: int = 1, **plan: Any):
        node = {"pcie": plan.pop("pcie", "1 GB/s"), "cpu": CPU}
        model = {"tied": False, "layers": LAYERS}
        return toy_job(gpus, 1, model, node, microbatch=64, offload_activations=offloaded, **plan)

    return make


@pytest.fixture
def played(job, toy_prices):
    def play(offloaded: int | None = None, fold: bool = True, **plan: Any) -> Timeline:
        mine = job(offloaded, **plan)
        return run(lower(mine.model, mine.resolve()), mine.cluster.topology(), toy_prices(), fold=fold)

    return play


def saved(mine) -> float:
    """Bytes that a layer keeps."""
    return parts(mine.model, mine.resolve()).layer(0).saved


def answer(timeline: Timeline) -> Summary:
    return summarise(timeline)


@pytest.mark.parametrize(("hook", "gpus"), [("ddp", 1), ("ddp", 4), ("zero1", 4), ("zero2", 4), ("zero3", 4)])
@pytest.mark.parametrize("kernels", ["megatron", "torch"])
def test_what_stays_on_the_gpu_and_what_crosses_pcie(played, job, hook, gpus, kernels) -> None:
    """L − N layers' activations at the peak; each offloaded layer goes out and back once per microbatch."""
    plan = {"data_parallel": hook, "gpus": gpus, "kernels": kernels, "accumulation": 2}
    each, whole = saved(job(**plan)), answer(played(**plan))
    for count in (1, 3, LAYERS - 1):
        summary = answer(played(count, **plan))
        assert summary.worst.kinds["activation"] == pytest.approx(whole.worst.kinds["activation"] - count * each, rel=1e-9)
        assert summary.volume["host"].bytes == pytest.approx(2 * 2 * count * each, rel=1e-9)
        assert summary.offloaded.memory == pytest.approx(gpus * count * each, rel=1e-9)


def test_all_but_one_layer_hides_nothing(played, job) -> None:
    """With N = L − 1 each copy stands between two layers, out and back: N copies each way are added to the step."""
    each, without = saved(job()), answer(played()).step_seconds
    assert answer(played(LAYERS - 1)).step_seconds - without == pytest.approx(2 * (LAYERS - 1) * each / 1e9, rel=1e-6)


def test_few_layers_cost_nothing_where_compute_is_longer(played) -> None:
    """Copies of two of six layers, on a bus that is fast enough, end before anything waits for them."""
    assert answer(played(2, pcie="1 TB/s")).step_seconds == pytest.approx(answer(played(pcie="1 TB/s")).step_seconds, rel=1e-9)
    assert answer(played(5, pcie="1 TB/s")).step_seconds > answer(played(pcie="1 TB/s")).step_seconds


def test_folded_is_unfolded(played) -> None:
    plan = {"data_parallel": "zero3", "gpus": 4, "accumulation": 2}
    assert answer(played(3, **plan)).step_seconds == answer(played(3, fold=False, **plan)).step_seconds


def test_bytes_of_a_layer_are_what_autograd_keeps(job) -> None:
    """torch.autograd.graph.saved_tensors_hooks, with which every framework offloads, sees as many bytes of a layer in PyTorch."""
    torch = pytest.importorskip("torch")
    hidden, batch, sequence = 64, 64, 32

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
            self.qkv, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
            self.up, self.down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

        def forward(self, x):
            q, k, v = (each.view(batch, sequence, 8, 8).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, -1))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
            return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))

    block, kept = Block(), dict[int, int]()
    weights = {weight.untyped_storage().data_ptr() for weight in block.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = block(torch.randn(batch, sequence, hidden, requires_grad=True))
    assert result.requires_grad
    mine = job(2, kernels="torch", precision="fp32", dropout=False)
    assert saved(mine) == pytest.approx(sum(kept.values()), rel=0.01)  # but for the attention's numbers per row


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"gpus": 2, "pp": 2}, "offload_activations=2 contradicts pp=2"),
        ({"recompute": "full"}, "offload_activations=2 contradicts recompute=full"),
        ({"offloaded": LAYERS}, f"offload_activations={LAYERS} must be less than layers={LAYERS}"),
        ({"data_parallel": "zero3", "deepspeed": {}}, "offload_activations=2 contradicts deepspeed"),
    ],
)
def test_refusals(job, plan, reason) -> None:
    given = {"offloaded": 2, **plan}
    with pytest.raises(UserError, match=reason):
        job(**given).resolve()
