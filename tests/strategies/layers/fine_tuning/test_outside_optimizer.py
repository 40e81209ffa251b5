"""Parts whose gradients are reduced, but that the optimizer is not given: its bytes, states and checkpoints, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from shardyard import Job, read_job, simulate, summarise
from sim.program import Block, Kernel
from strategies.lowering.lower import lower
from strategies.memory_by_layer import memory_by_layer
from strategies.resilience.checkpoint_size import checkpoint_size
from topologies.reading import UserError

HIDDEN, VOCABULARY, LAYERS = 512, 32000, 4
MATRIX, NORM = VOCABULARY * HIDDEN, 2 * HIDDEN
SMALL: dict[str, Any] = {
    "name": "small",
    "source": "made up",
    "hidden": HIDDEN,
    "layers": LAYERS,
    "heads": 8,
    "ffn": 2048,
    "vocabulary": VOCABULARY,
    "vocabulary_multiple": 1,
    "context": 1024,
    "positions": "rotary",
    "tied": False,
}


def job(**plan: Any) -> Job:
    """On eight GPUs, in bf16 with fp32 masters and gradients by Megatron-LM: 12 bytes of states, 28 of an update by Adam."""
    size = {"auto": False, "sequence": 256, "global_batch": 16, "kernels": "megatron"}
    return read_job(None, model=SMALL, cluster="dgx-h100", nodes=1, plan=size | plan)


def updated(asked: Job) -> float:
    """Bytes that Adam's kernels move on the first rank."""
    works = [op.work for op in lower(asked.model, asked.resolve()).cohorts[0].ops]
    runs = [run for work in works if isinstance(work, Block) for run in work.runs]
    return sum(times * item.bytes for times, items in runs for item in items if isinstance(item, Kernel) and item.label == "adam")


@pytest.mark.parametrize("parts", [("head",), ("embedding",), ("embedding", "head")], ids=str)
def test_neither_updated_nor_with_states_but_reduced(parts: tuple[str, ...]) -> None:
    elements = sum({"head": MATRIX + NORM, "embedding": MATRIX}[part] for part in parts)
    usual, without = job(), job(outside_optimizer=list(parts))
    assert usual.model.parameters - elements > 0
    assert updated(usual) == pytest.approx(28 * usual.model.parameters)
    assert updated(usual) - updated(without) == pytest.approx(28 * elements)
    before, after = (summarise(simulate(asked)) for asked in (usual, without))
    assert before.worst.kinds["optimizer"] - after.worst.kinds["optimizer"] == pytest.approx(12 * elements)
    assert before.volume == after.volume
    assert after.step_seconds < before.step_seconds
    (state,) = [state for state in memory_by_layer(without, after).states if state.kind == "optimizer"]
    assert state.planned == pytest.approx(state.held)
    assert "the optimizer is not given the " in state.why
    sizes = [checkpoint_size(asked) for asked in (usual, without)]
    assert sizes[0].total - sizes[1].total == pytest.approx(12 * elements)
    assert sizes[0].read.sum() - sizes[1].read.sum() == pytest.approx(8 * 12 * elements)
    alone = [checkpoint_size(asked, parallel=False) for asked in (usual, without)]
    assert alone[0].write.sum() - alone[1].write.sum() == pytest.approx(12 * elements)


def test_of_a_tensor_parallel_rank() -> None:
    """Norms are on every rank and are saved once."""
    usual, without = job(tp=2), job(tp=2, outside_optimizer=["head"])
    assert updated(usual) - updated(without) == pytest.approx(28 * (MATRIX / 2 + NORM))
    for parallel in (True, False):
        sizes = [checkpoint_size(asked, parallel) for asked in (usual, without)]
        assert sizes[0].total - sizes[1].total == pytest.approx(12 * (MATRIX + NORM))
        assert sizes[0].write.sum() - sizes[1].write.sum() == pytest.approx(12 * (MATRIX + NORM))


def test_pytorch_makes_gradients_of_what_its_optimizer_lacks_and_no_states() -> None:
    import torch

    body, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 16, bias=False)
    optimizer = torch.optim.AdamW(body.parameters())
    head(body(torch.ones(2, 8))).sum().backward()
    before = head.weight.clone()
    optimizer.step()
    assert head.weight.grad is not None
    assert head.weight.equal(before)
    assert sum(tensor.numel() for state in optimizer.state.values() for tensor in state.values() if tensor.numel() > 1) == 2 * 72


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data_parallel": "zero1"}, "outside_optimizer=head is not simulated with data_parallel=zero1"),
        ({"optimizer": "muon"}, "outside_optimizer=head is not simulated with optimizer=muon"),
        ({"freeze": {"layers": 1}}, "outside_optimizer=head is not simulated with lora or freeze"),
        ({"outside_optimizer": ["logits"]}, "outside_optimizer"),
        ({"outside_optimizer": ["head"] * 3}, "outside_optimizer"),
    ],
    ids=str,
)
def test_what_it_excludes(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        simulate(job(**{"outside_optimizer": ["head"]} | fields))
    assert "\n" not in str(error.value)


def test_a_tied_matrix_is_both() -> None:
    tied = read_job(None, model=SMALL | {"tied": True}, cluster="dgx-h100", nodes=1, plan={"outside_optimizer": ["head"]})
    with pytest.raises(UserError, match="contradicts the tied embedding"):
        simulate(tied)
