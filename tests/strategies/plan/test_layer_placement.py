"""Where layers are: given, or counted as Megatron-LM counts them."""

from __future__ import annotations

import pytest

from strategies.lowering.lower import lower
from topologies.reading import UserError


@pytest.mark.parametrize(
    ("layers", "plan", "expected"),
    [
        (10, {"pp": 4}, (2, 3, 3, 2)),
        (8, {"pp": 4, "layers_per_stage": [0, 4, 4, 0]}, (0, 4, 4, 0)),
        (12, {"pp": 4, "first_stage_layers": 1, "last_stage_layers": 3}, (1, 4, 4, 3)),
        (11, {"pp": 4, "first_stage_layers": 2}, (2, 3, 3, 3)),
        (10, {"pp": 4, "last_stage_layers": 1}, (3, 3, 3, 1)),
        (6, {"pp": 2, "first_stage_layers": 2, "last_stage_layers": 4}, (2, 4)),
        (10, {"pp": 4, "embedding_as_layer": True, "loss_as_layer": True}, (2, 3, 3, 2)),
        (11, {"pp": 4, "embedding_as_layer": True}, (2, 3, 3, 3)),
        (7, {"pp": 2, "chunks": 2, "schedule": "interleaved", "loss_as_layer": True, "accumulation": 2}, (2, 2, 2, 1)),
        (2, {"pp": 4, "embedding_as_layer": True, "loss_as_layer": True}, (0, 1, 1, 0)),
        (3, {"pp": 4, "embedding_as_layer": True}, (0, 1, 1, 1)),
    ],
)
def test_layers_of_each_stage(toy_job, layers, plan, expected) -> None:
    assert toy_job(plan["pp"], model={"layers": layers}, **plan).resolve().layers == expected


def test_embedding_and_head_can_stand_alone(toy_job) -> None:
    job = toy_job(4, model={"layers": 8, "tied": False}, pp=4, layers_per_stage=[0, 4, 4, 0])
    held = [cohort.resident[0][1] for cohort in lower(job.model, job.resolve()).cohorts]
    model = job.model
    layers = 4 * model.layer_parameters(0)
    assert held[1:3] == [2 * layers] * 2
    assert sum(held) == 2 * model.parameters


def test_llama_405b_over_16_stages_of_8_chunks(toy_job) -> None:
    """126 layers, the embedding and the loss are 128 stages of one each (arXiv:2407.21783, section 3.3.2)."""
    plan = {"pp": 16, "chunks": 8, "schedule": "interleaved", "accumulation": 16}
    counted = toy_job(16, model={"layers": 126}, embedding_as_layer=True, loss_as_layer=True, **plan).resolve().layers
    assert counted == (0, *[1] * 126, 0)
    assert counted == toy_job(16, model={"layers": 126}, layers_per_stage=counted, **plan).resolve().layers


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"layers_per_stage": [4, 0, 2, 2]}, "stage 1 has no layers; only the first"),
        ({"layers_per_stage": [2, 2, 2, 2], "loss_as_layer": True}, "layers_per_stage and loss_as_layer both say"),
        ({"first_stage_layers": 1, "embedding_as_layer": True}, "first_stage_layers and embedding_as_layer both say"),
        ({"first_stage_layers": 1}, "first_stage_layers=1 leaves 7 of 8 layers for 3 stages alike"),
        ({"first_stage_layers": 4, "last_stage_layers": 4}, "leaves 0 of 8 layers for 2 stages"),
        ({"loss_as_layer": True}, "loss_as_layer=true needs pp > 1 that divides 8 layers [+] 1, and has pp=4"),
        ({"embedding_as_layer": True, "schedule": "interleaved", "chunks": 3}, "pp·chunks=4·3 stages exceed 8 layers [+] 1"),
        ({"first_stage_layers": 1, "schedule": "interleaved"}, "one chunk per rank, not pp·chunks=4·2: give layers_per_stage"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(toy_job, plan, message) -> None:
    with pytest.raises(UserError, match=message):
        toy_job(4, model={"layers": 8}, pp=4, accumulation=4, **plan).resolve()
