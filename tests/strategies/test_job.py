"""Reading a job: what follows from a change, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardyard import predict, read_job
from strategies.frameworks.export import export
from topologies.reading import UserError

FILES = Path(__file__).parents[1] / "data" / "models"


def job(model: str, changes: dict[str, Any]) -> Any:
    overrides = {f"model.{field}": value for field, value in changes.items()}
    return read_job(model=model, cluster="dgx-h100", plan={}, overrides=overrides)


@pytest.mark.parametrize(
    ("model", "changes", "sizes", "note"),
    [
        (
            "llama-3.1-70b",
            {"heads": 128},
            (128, 8, 64, 28672),
            "model.heads=128: with it head_dim=64 (was 128); kv_heads=8 as llama-3.1-70b states",
        ),
        ("llama-2-7b", {"heads": 64}, (64, 64, 64, 11008), "model.heads=64: with it kv_heads=64 (was 32), head_dim=64 (was 128)"),
        (
            "gpt3-175b",
            {"heads": 48},
            (48, 48, 256, 49152),
            "model.heads=48: with it kv_heads=48 (was 96), head_dim=256 (was 128)",
        ),
        (
            "gpt3-175b",
            {"hidden": 6144},
            (96, 96, 64, 24576),
            "model.hidden=6144: with it head_dim=64 (was 128), ffn=24576 (was 49152)",
        ),
        ("llama-2-7b", {"heads": 64, "kv_heads": 8, "head_dim": 128}, (64, 8, 128, 11008), ""),
        (
            str(FILES / "qwen3-8b.json"),
            {"heads": 64},
            (64, 8, 128, 12288),
            "model.heads=64: kv_heads=8, head_dim=128 as qwen3-8b states",
        ),
    ],
)
def test_what_was_derived_from_a_size_follows_it(model: str, changes: dict[str, Any], sizes: tuple[int, ...], note: str) -> None:
    """head_dim is hidden / heads and ffn 4 · hidden unless the file states them; as many kv_heads as heads stay as many."""
    changed = job(model, changes)
    model = changed.model
    assert (model.heads, model.kv_heads, model.head_dim, model.ffn) == sizes
    assert [remark for remark in changed.notes if remark.startswith("model.")] == [note] * bool(note)


def test_heads_that_the_stated_key_value_heads_do_not_divide_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="--set model of 'llama-3.1-8b': kv_heads=8 must divide heads=36: 36 % 8 = 4"):
        job("llama-3.1-8b", {"heads": 36})


def test_a_model_with_fewer_heads_is_the_model_whose_file_has_them() -> None:
    fields = {"name": "small", "hidden": 64, "layers": 2, "heads": 8, "vocabulary": 512, "context": 32}
    inline = read_job(model=fields, cluster="dgx-h100", plan={}, overrides={"model.heads": 4})
    assert inline.model == read_job(model=fields | {"heads": 4}, cluster="dgx-h100", plan={}).model
    assert job("gpt3-175b", {"heads": 48}).model.parameters == job("gpt3-175b", {}).model.parameters


@pytest.mark.parametrize(
    ("model", "plan", "note"),
    [
        ("llama-2-7b", {"sequence": 8192}, "sequence=8,192 exceeds the context of 4,096 tokens: rotary positions go on beyond"),
        ("llama-2-7b", {"schedule": "zb-h1"}, "schedule=zb-h1 with pp=1: there is no pipeline"),
    ],
)
def test_what_a_plan_says_beyond_the_model_or_without_effect_is_noted(model: str, plan: dict[str, Any], note: str) -> None:
    plain = {"auto": False, "global_batch": 8, "sequence": 4096, "kernels": "megatron"}
    assert any(line.startswith(note) for line in read_job(model=model, cluster="dgx-h100", plan=plain | plan).notes)
    assert read_job(model=model, cluster="dgx-h100", plan=plain).notes == ()


@pytest.mark.parametrize(
    ("plan", "noted"),
    [
        ({}, True),
        ({"data_parallel": "fsdp"}, True),
        ({"kernels": "megatron"}, False),
        ({"kernels": "torch"}, False),
        ({"tp": 8}, False),
    ],
)
def test_whose_kernels_are_assumed_is_said_where_pytorch_alone_could_train_so(plan: dict[str, Any], noted: bool) -> None:
    said = {"auto": False, "global_batch": 8, "sequence": 4096} | plan
    notes = read_job(model="llama-2-7b", cluster="dgx-h100", plan=said).notes
    assert any(line.startswith("kernels: Megatron-LM's") for line in notes) == noted


def test_learned_positions_end_with_the_context() -> None:
    """An embedding of 1,024 rows has no row for token 1,025: PyTorch's lookup raises an IndexError."""
    with pytest.raises(UserError, match="sequence=2048 exceeds the 1024 learned positions of gpt2-1.5b"):
        read_job(model="gpt2-1.5b", cluster="dgx-h100", plan={"auto": False, "sequence": 2048}).resolve()


def test_megatron_is_told_of_as_many_positions_as_a_sequence_has() -> None:
    """It refuses --seq-length above --max-position-embeddings (megatron/training/arguments.py, validate_args)."""
    exported = export("megatron", read_job(model="llama-2-7b", cluster="dgx-h100", plan={"sequence": 8192, "tp": 8}))
    assert "--max-position-embeddings 8192" in exported.text


@pytest.mark.parametrize(
    ("plan", "batch"),
    [
        ({}, 64),
        ({"tp": 8}, 64),
        ({"tp": 8, "pp": 2}, 64),
        ({"microbatch": 3}, 96),
        ({"global_batch": 48}, 48),
        ({"accumulation": 2}, 32),
        ({"tp": 2, "sequence_parallel": True, "accumulation": 2}, 16),
    ],
)
def test_one_default_batch_that_is_said(plan: dict[str, Any], batch: int) -> None:
    """4 sequences for each of 16 GPUs, whatever the degrees; whole microbatches of 16 dp ranks."""
    job = read_job(model="llama-3.1-8b", cluster="dgx-a100", nodes=2, plan=plan)
    assert job.resolve().global_batch == job.global_batch == batch
    said = [note for note in job.notes if note.startswith("global_batch: ")]
    assert bool(said) == (not {"global_batch", "accumulation"} & plan.keys())
    least = "at least " if batch > 4 * 16 else ""
    assert all(note.startswith(f"global_batch: {batch} sequences by default, {least}4 for each GPU") for note in said)


def test_a_frameworks_default_is_one_microbatch_of_each_dp_rank(tmp_path: Path) -> None:
    """deepspeed.ai/docs/config-json: gradient_accumulation_steps is 1 unless the file says more."""
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 2}')
    job = read_job(model="gpt2-1.5b", cluster="dgx-a100", nodes=2, from_deepspeed=file)
    assert job.resolve().global_batch == 2 * 16
    more = read_job(None, {"plan.global_batch": 64}, model="gpt2-1.5b", cluster="dgx-a100", from_deepspeed=file)
    assert more.global_batch == 64


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("plan.offload={optimizer: cpu}", {"optimizer": "cpu"}),
        ("plan.offload.optimizer=nvme", {"optimizer": "nvme", "parameters": "cpu"}),
    ],
)
def test_a_group_that_is_set_replaces_the_group_that_was_there(change: str, left: dict[str, str]) -> None:
    plan = {"data_parallel": "zero3", "offload": {"optimizer": "cpu", "parameters": "cpu"}}
    offload = read_job(model="llama-3.1-8b", cluster="dgx-h100", plan=plan, overrides=[change]).plan.offload
    assert offload is not None
    assert offload.model_dump(exclude_unset=True) == left


def test_a_step_that_is_too_good_is_doubted(toy_job: Any, toy_profile: Any) -> None:
    """Kernels at their peak, and nothing but large matrix products on one GPU."""
    large = {"hidden": 8192, "layers": 2, "heads": 64, "vocabulary": 32000, "context": 512}
    fast, slow = (predict(toy_job(1, model=large), toy_profile(launch=launch)) for launch in ("0 s", "200 ms"))
    assert fast.mfu > 0.9 > slow.mfu
    assert any(note.startswith("MFU above 90 %: no published training") for note in fast.notes)
    assert not any(note.startswith("MFU above") for note in slow.notes)


def test_a_job_that_was_read_with_texts_is_read_again_with_more() -> None:
    job = read_job(None, ["plan.microbatch=2", "plan.global_batch=32"], model="gpt2-1.5b", cluster="dgx-h100", plan={})
    assert job.source is not None
    again = job.source({"plan.tp": 2})
    assert (again.plan.microbatch, again.plan.global_batch, again.plan.tp) == (2, 32, 2)


def test_a_mistake_in_a_files_plan_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("{model: gpt2-1.5b, cluster: dgx-h100, plan: {tp: 0}}")
    with pytest.raises(UserError, match=r"mine\.yaml: plan: tp=0: input should be"):
        read_job(file)
    with pytest.raises(UserError, match=r"^plan: tp=0: input should be"):
        read_job(model="gpt2-1.5b", cluster="dgx-h100", plan={"tp": 0})


def test_a_sequence_that_was_not_asked_for_is_said() -> None:
    """Llama-3.1 reads 131,072 tokens, and is trained on 8,192 by default; GPT-3's 2,048 are all it reads."""

    def said(model: str, **plan: Any) -> bool:
        return any("tokens by default" in note for note in read_job(model=model, cluster="dgx-h100", plan=plan).notes)

    assert said("llama-3.1-8b")
    assert not said("llama-3.1-8b", sequence=4096)
    assert not said("gpt3-175b")


def test_a_model_may_be_said_by_overrides_alone() -> None:
    fields = {"name": "own", "hidden": 64, "layers": 2, "heads": 4, "vocabulary": 100, "context": 16}
    said = [{"model": fields}, {f"model.{field}": value for field, value in fields.items()}]
    expected = read_job(model=fields, cluster="dgx-h100", plan={}).model
    assert [read_job(cluster="dgx-h100", plan={}, overrides=overrides).model for overrides in said] == [expected, expected]
    with pytest.raises(UserError, match="model: field 'hidden' is required"):
        read_job(cluster="dgx-h100", overrides={"model.name": "own"})
