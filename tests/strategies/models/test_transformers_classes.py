"""Classes of transformers, made from a config.json alone and traced: what no importer reads, and what one reads too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard import Job, read_job, simulate, summarise
from strategies.models.importers.unread import OTHER_KERNELS, RECURRENT
from strategies.models.tracing.inputs import parse_inputs
from tests.strategies.models.conftest import FILES
from topologies.reading import UserError

transformers = pytest.importorskip("transformers")


def traced(tmp_path: Path, data: dict[str, Any], sample: str, **plan: Any) -> Job:
    """A job of the class that a file with these contents names."""
    (tmp_path / "config.json").write_text(json.dumps(data))
    plan = {"data_parallel": "zero1", "microbatch": 1} | plan
    return read_job(None, model=str(tmp_path / "config.json"), input=sample, cluster="dgx-h100", plan=plan)


BART: dict[str, Any] = {
    "model_type": "bart",
    "architectures": ["BartForConditionalGeneration"],
    "vocab_size": 1000,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_layerdrop": 0.9,
    "decoder_layerdrop": 0.9,
}


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_a_mixture_has_the_products_that_are_described(name: str, tmp_path: Path) -> None:
    """Experts in one grouped product: FLOPs, parameters and the products' shapes are those of the described model."""
    data = json.loads((FILES / f"{name}.json").read_text()) | {"num_hidden_layers": 2}
    job = traced(tmp_path, data, "256:int64")
    read = read_job(None, model=str(tmp_path / "config.json"), cluster="dgx-h100", plan={"auto": False, "sequence": 256})
    assert job.model.parameters == read.model.parameters
    assert job.model.forward_flops(1, 256, False) == read.model.forward_flops(1, 256, False)


def test_an_encoder_and_a_decoder_have_inputs_by_name(tmp_path: Path) -> None:
    """Each product by hand. Layers are not dropped by chance, masks of samples without padding are not looked at."""
    job = traced(tmp_path, BART, "96:int64,decoder_input_ids=32:int64")
    attention, mlp = 4 * 64**2, 2 * 64 * 128
    encoder = 2 * (96 * (attention + mlp) + 2 * 96**2 * 64)
    decoder = 2 * (32 * (attention + mlp + 2 * 64**2) + 96 * 2 * 64**2 + 2 * (32**2 + 32 * 96) * 64)
    assert job.model.forward_flops(1, 96, False) == 2 * (encoder + decoder + 32 * 64 * 1000)
    assert any("samples of 96, decoder_input_ids 32 were traced" in note for note in job.notes)


def test_a_missing_input_is_asked_for_by_name(tmp_path: Path) -> None:
    """Whisper reads spectrograms, and its decoder what has been said before."""
    data = {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "encoder_layers": 1,
        "decoder_layers": 1,
    }
    with pytest.raises(UserError, match=r"other inputs have names, as --input 96:int64,decoder_input_ids=32:int64") as caught:
        traced(tmp_path, data, "80x3000")
    assert "\n" not in str(caught.value)
    job = traced(tmp_path, data | {"d_model": 48}, "input_features=80x3000,decoder_input_ids=448:int64")
    assert job.model.parameters > 0


def test_what_passes_do_not_read_is_said(tmp_path: Path) -> None:
    """A ViT whose images have no masked patches does not read the token that stands for these; its result is called otherwise."""
    data = {"model_type": "vit", "architectures": ["ViTForMaskedImageModeling"], "num_hidden_layers": 1, "image_size": 32}
    job = traced(tmp_path, data, "3x32x32")
    assert any(
        "the loss is the mean cross-entropy in fp32 over the last dimension of the result's reconstruction" in note
        for note in job.notes
    )
    assert any(
        "768 parameters are held, and read by none of these passes: 'vit.embeddings.mask_token'" in note for note in job.notes
    )


def test_large_activations_are_traced(tmp_path: Path) -> None:
    """EfficientNet B7 hands on more than 4 million numbers per image, which is no width of a transformer."""
    data = {"model_type": "efficientnet", "architectures": ["EfficientNetForImageClassification"], "depth_coefficient": 0.1}
    job = traced(tmp_path, data, "3x1200x1200")
    assert summarise(simulate(job)).step_seconds > 0


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("qwen3_next", "on GPUs its recurrent layers run other kernels"),
        ("qwen3_5", "on GPUs its recurrent layers run other kernels"),
        ("olmo_hybrid", "it has recurrent or state-space layers"),
    ],
)
def test_loops_over_tokens_are_refused_wherever_they_are(kind: str, why: str, tmp_path: Path) -> None:
    """On GPUs these layers are kernels of their own; nested in another model as well as alone."""
    data = {"model_type": kind, "architectures": ["Qwen3NextForCausalLM"]}
    for each in (data, {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": data}):
        with pytest.raises(UserError, match=f"config.json: model_type '{kind}': {why}") as caught:
            traced(tmp_path, each, "64:int64")
        assert "failed while it was made" not in str(caught.value)


def test_all_classes_that_loop_over_tokens_are_known() -> None:
    """Of the installed transformers: modules with a fallback of kernels for scans, or with recurrent layers."""
    words = """gated_delta_rule selective_scan mamba_chunk_scan rwkv_linear_attention mlstm lightningattention recurrent_scan
        rg_lru torch_chunk_""".split()
    folder = Path(transformers.__file__).parent / "models"
    own = {path.parent.name for path in folder.glob("*/modeling_*.py") if any(word in path.read_text().lower() for word in words)}
    known = RECURRENT | OTHER_KERNELS
    assert {"mamba", "qwen3_next", "jamba", "rwkv"} <= own
    assert own <= known


def test_inputs_by_name() -> None:
    first, second = parse_inputs("96:int64,decoder_input_ids=32:int64")
    assert (first.name, second.name, second.shape) == ("", "decoder_input_ids", (32,))
    for text, message in (
        ("a=3,4", "inputs without a name come first"),
        ("a=3,a=4", "two inputs are called a"),
        ("a b=3", "must be the sizes of one sample"),
    ):
        with pytest.raises(UserError, match=message):
            parse_inputs(text)
