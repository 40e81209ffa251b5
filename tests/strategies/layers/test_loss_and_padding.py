"""What computes the loss, and attention between gathers of tokens: kernels and bytes counted by hand."""

from __future__ import annotations

import pytest

from sim.program import Kernel
from strategies.layers.model_costs import parts
from topologies.reading import UserError

TOKENS, VOCABULARY = 32, 512  # of the toy job


def part(toy_job, name: str, **plan):
    job = toy_job(plan.get("tp", 1), model={"vocabulary": VOCABULARY}, kernels="torch", precision="bf16", **plan)
    costs = parts(job.model, job.resolve())
    return costs.head if name == "head" else costs.layer(0)


def moved(items, label: str) -> list[float]:
    return [item.bytes for item in items if isinstance(item, Kernel) and item.label == label]


def test_a_fused_loss_reads_logits_once_and_keeps_nothing_else(toy_job) -> None:
    head, logits = part(toy_job, "head", loss="fused"), 2 * TOKENS * VOCABULARY
    assert moved(head.forward, "loss") == [logits]
    assert moved(head.backward, "loss") == [2 * logits]
    own = part(toy_job, "head")
    assert own.saved - head.saved == 4 * TOKENS * VOCABULARY - logits  # log-probabilities in fp32 and no logits


def test_eager_models_have_pytorch_s_loss_unless_the_plan_names_another(toy_job) -> None:
    eager, torch, operators = part(toy_job, "head"), part(toy_job, "head", loss="torch"), part(toy_job, "head", loss="operators")
    assert eager == torch != operators


def test_layers_may_be_compiled_and_the_loss_not(toy_job) -> None:
    eager, mixed = (part(toy_job, "head", loss="torch"), toy_job(1, kernels="compiled", loss="torch"))
    assert moved(parts(mixed.model, mixed.resolve()).head.forward, "loss") == moved(eager.forward, "loss")


def test_unpadding_copies_queries_keys_values_and_the_result(toy_job) -> None:
    plain, copied = part(toy_job, "layer"), part(toy_job, "layer", unpad=True)
    size = 2 * TOKENS * 64
    assert moved(copied.forward, "unpad") == [2 * size] * 3
    assert moved(copied.forward, "pad") == moved(copied.backward, "unpad") == [2 * size]
    assert moved(copied.backward, "pad") == [2 * size] * 3
    assert copied.saved == plain.saved


def test_each_metric_casts_logits_and_takes_their_log_softmax_once_more(toy_job) -> None:
    head, logits = part(toy_job, "head", loss="fused", loss_metrics=2), TOKENS * VOCABULARY
    assert moved(head.forward, "loss metrics") == [(2 + 4) * logits, (4 + 4) * logits] * 2
    assert head.backward == part(toy_job, "head", loss="fused").backward


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (dict(loss_metrics=1, tp=2), "loss_metrics=1 with tp=2 is not simulated"),
        (dict(unpad=True, attention="materialised"), "unpad=true is for fused attention"),
        (dict(loss="fused", tp=2), "loss=fused with tp=2 is not simulated"),
    ],
)
def test_what_is_not_simulated_is_refused(toy_job, plan, why) -> None:
    with pytest.raises(UserError, match=why):
        part(toy_job, "layer", **plan)


def test_transformer_engine_turns_tensors_for_flash_attention_2(toy_job) -> None:
    """Tokens first to sequences first: queries, keys, values, and the result of more than one sequence, which is kept twice."""
    layers = {}
    for attention in ("flash", "flash2"):
        for batch in (1, 2):
            job = toy_job(1, precision="bf16", attention=attention, microbatch=batch, global_batch=2)
            layers[attention, batch] = parts(job.model, job.resolve()).layer(0)
    size = 2 * TOKENS * 64
    assert moved(layers["flash2", 1].forward, "attention copy") == [2 * size] * 3
    assert moved(layers["flash2", 2].forward, "attention copy") == [4 * size] * 4
    assert [layers["flash2", batch].saved - layers["flash", batch].saved for batch in (1, 2)] == [0, 2 * size]
    assert moved(layers["flash", 2].forward, "attention copy") == []
