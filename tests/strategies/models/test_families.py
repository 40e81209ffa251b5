"""Families of Hugging Face against transformers' own classes: parameters, FLOPs, and what tells their layers apart."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardyard import read_job, simulate, summarise
from strategies.layers.model_costs import parts, saved_tensors
from strategies.models.model import load_model
from strategies.plan.resolved import Resolved
from tests.strategies.models.conftest import FILES, HUB, hugging_face
from topologies.reading import UserError

# What the class does not count, as it is a buffer that the files hold: a number per expert (e_score_correction_bias).
BUFFERS = {"deepseek-v3": 58 * 256, "kimi-k2": 60 * 384}
# transformers 5 ties the head of every T5 that is made from a config; published weights of v1.1 have one of their own.
UNTIED = {"flan-t5-base": 32128 * 768}
CLASSES = {"gemma3": "Gemma3ForCausalLM", "llama4": "Llama4ForCausalLM"}  # of the language model alone

SMALLER: dict[str, dict[str, Any]] = {  # sizes at which PyTorch counts the FLOPs of a step in no time
    "gemma-2-2b": {"num_hidden_layers": 2},
    "gemma-3-1b": {"num_hidden_layers": 6},
    "phi-3-mini": {"num_hidden_layers": 2},
    "phi-2": {"num_hidden_layers": 2},
    "gpt-neox-20b": {"num_hidden_layers": 2},
    "gpt-j-6b": {"n_layer": 2},
    "falcon-7b": {"num_hidden_layers": 2},
    "falcon-40b": {"num_hidden_layers": 2},
    "opt-125m": {"num_hidden_layers": 2},
    "glm-4-9b-0414": {"num_hidden_layers": 2},
    "olmo-2-7b": {"num_hidden_layers": 2},
    "olmo-7b": {"num_hidden_layers": 2},
    "c4ai-command-r": {"num_hidden_layers": 2},
    "starcoder2-7b": {"num_hidden_layers": 2},
    "roberta-base": {"num_hidden_layers": 2},
    "t5-small": {"num_layers": 2},
    "vit-base-patch16-224": {"num_hidden_layers": 2},
}


def built(data: dict[str, Any]) -> Any:
    """The module of transformers on the meta device."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = pytest.importorskip("transformers")
    import torch

    outer = data["model_type"]
    inner = dict(data.get("text_config", data))
    kind = {"kimi_k2": "deepseek_v3"}.get(outer, inner["model_type"])
    name = CLASSES.get(outer) or data["architectures"][0]
    dropped = ("model_type", "architectures", "quantization_config", "auto_map")
    config = transformers.AutoConfig.for_model(kind, **{key: value for key, value in inner.items() if key not in dropped})
    with torch.device("meta"):
        return getattr(transformers, name)(config)


def file_of(name: str) -> dict[str, Any]:
    """What a file of the hub says."""
    result: dict[str, Any] = json.loads((FILES / f"{name}.json").read_text())
    return result


@pytest.mark.parametrize("name", HUB)
def test_parameters_are_those_of_the_class(name: str) -> None:
    own = sum(parameter.numel() for parameter in built(file_of(name)).parameters())
    assert load_model(str(FILES / f"{name}.json"))[0].parameters == own + BUFFERS.get(name, 0) + UNTIED.get(name, 0)


@pytest.mark.parametrize("name", SMALLER)
def test_forward_flops_are_those_of_the_class(name: str, tmp_path: Path) -> None:
    """Attention counts in full, also where a window or causality leaves less; PyTorch counts it so."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    module, (model, _) = built(file_of(name) | SMALLER[name]), hugging_face(tmp_path, name, **SMALLER[name])
    tokens = torch.zeros(2, 64, dtype=torch.long, device="meta")
    if model.patches:
        inputs: dict[str, Any] = {"pixel_values": torch.zeros(2, 3, 224, 224, device="meta")}
    else:
        inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens[:, :48]} if model.family == "encoder_decoder" else {})
    model = model.model_copy(update={"targets": 48}) if model.family == "encoder_decoder" else model
    with FlopCounterMode(display=False) as counter:
        module.train()(**inputs)
    assert counter.get_total_flops() == model.forward_flops(2, model.context if model.patches else 64, causal=False)


@pytest.mark.parametrize("name", HUB)
def test_layer_work_has_the_parameters_and_flops_of_the_model(name: str) -> None:
    model, _ = load_model(str(FILES / f"{name}.json"))
    sequence = min(model.context, 2048)
    job = read_job(
        None,
        {"plan.auto": False, "plan.sequence": sequence, "plan.global_batch": 8},
        model=str(FILES / f"{name}.json"),
        cluster="dgx-h100",
    )
    work = parts(model, job.resolve())
    every = [work.embedding, work.head, *map(work.layer, range(model.layers))]
    assert sum(part.parameters for part in every) == model.parameters
    assert sum(part.model_flops for part in every) == pytest.approx(3 * model.forward_flops(1, sequence, False), rel=1e-12)


def resolved(name: str, **plan: Any) -> tuple[Any, Resolved]:
    """A file's model and a plan for it."""
    job = read_job(
        None,
        {"plan.auto": False} | {f"plan.{key}": value for key, value in plan.items()},
        model=str(FILES / f"{name}.json"),
        cluster="dgx-h100",
    )
    return job.model, job.resolve()


def test_windows_and_chunks_execute_what_they_leave() -> None:
    """A fused kernel over s tokens with a window of w sees s·w − w²/2 pairs; one in chunks of c sees s·c/2."""
    model, plan = resolved("gemma-3-1b", sequence=8192)
    shapes = {layer: attention_shape(model, plan, layer) for layer in (0, 5)}
    assert shapes[5] == (1, 4, 1, 8192, 8192, 256, 1)
    seen = 512 - 512**2 / 2 / 8192
    assert shapes[0] == (1, 4, 1, 8192, round(seen) + 128, 256, 0)
    model, plan = resolved("llama-4-scout", sequence=32768, microbatch=2)
    assert attention_shape(model, plan, 0) == (2 * 4, 40, 8, 8192, 8192, 128, 1)
    assert attention_shape(model, plan, 3) == (2, 40, 8, 32768, 32768, 128, 1)
    assert model.layer_models[3].positions == "none"


def attention_shape(model: Any, plan: Resolved, layer: int) -> tuple[int, ...]:
    """Of the forward kernel."""
    items = parts(model, plan).layer(layer).forward
    return next(item.shape for item in items if getattr(item, "kind", "") == "attention_forward")


def test_longer_windows_take_longer(tmp_path: Path) -> None:
    steps = []
    for window in (256, 1024, 4096, None):
        data = file_of("mistral-7b-v0.1") | {"sliding_window": window, "num_hidden_layers": 4}
        (tmp_path / "config.json").write_text(json.dumps(data))
        job = read_job(None, {"plan.sequence": 16384, "plan.tp": 8}, model=str(tmp_path), cluster="dgx-h100")
        steps.append(summarise(simulate(job)).step_seconds)
    assert steps == sorted(steps)
    assert steps[0] < 0.9 * steps[-1]


def test_parallel_blocks_keep_their_common_input_once() -> None:
    """Falcon 7B: one norm before both blocks; 40B: a norm each. Tokens × hidden in bf16 is what each input takes."""
    for name, inputs in (
        ("falcon-7b", {"layer input", "qkv input"}),
        ("falcon-40b", {"layer input", "qkv input", "mlp up input"}),
    ):
        model, plan = resolved(name, sequence=2048)
        saved = saved_tensors(model, plan)
        whole = {tensor for tensor, size in saved.items() if size == 2 * 2048 * model.hidden and "input" in tensor}
        assert whole - {"attention output input"} == inputs


def test_an_encoders_result_is_kept_once() -> None:
    model, plan = resolved("t5-small", sequence=512, microbatch=4)
    first, second = (saved_tensors(model, plan, layer) for layer in (6, 7))
    assert first["encoder result"] == 2 * 4 * 512 * 512
    assert "encoder result" not in second
    assert second["cross keys"] == 2 * 4 * 512 * 8 * 64
    assert model.layer_parameters(6) - model.layer_parameters(7) == 512  # the encoder's final norm


def test_fewer_targets_make_a_decoder_shorter(tmp_path: Path) -> None:
    """T5 was trained on 512 tokens and 114 targets (arXiv:1910.10683, section 3.1.4)."""
    file = str(FILES / "t5-small.json")
    model, _ = load_model(file)
    short = read_job(None, {"model.targets": 114}, model=file, cluster="dgx-h100", plan={}).model
    # what the decoder's tokens pass through: its own and the cross-attention's queries and output, its MLP, the head
    cut = 512 - 114
    weights = 6 * (4 * 512**2 + 2 * 512**2 + 2 * 512 * 2048) + 32128 * 512
    scores = 6 * 2 * 512 * (512**2 - 114**2 + 512 * cut)
    assert model.forward_flops(1, 512, False) - short.forward_flops(1, 512, False) == 2 * (cut * weights + scores)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("t5-small", {"plan.pp": 2}, "the encoder and decoder of t5-small with pp=2, cp=1 are not simulated"),
        ("t5-small", {"plan.cp": 2}, "the encoder and decoder of t5-small with pp=1, cp=2 are not simulated"),
        ("gemma-3-1b", {"plan.cp": 2}, "window=512 with cp=2: windows are simulated with cp_method=ulysses only"),
        ("olmo-2-7b", {"plan.tp": 2}, "tp=2 is not simulated for olmo-2-7b, which norms queries over all heads"),
        ("vit-base-patch16-224", {"plan.sequence": 100}, "sequence=100 contradicts the 197 tokens of an image"),
        ("falcon-7b", {"plan.tp": 2}, "tp=2 does not divide 71 attention heads"),
        ("falcon-7b", {"plan.kernels": "torch", "plan.recompute": "operators"}, "is written down for plain layers"),
    ],
)
def test_what_is_not_simulated_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        simulate(read_job(None, changes, model=str(FILES / f"{name}.json"), cluster="dgx-h100"))
