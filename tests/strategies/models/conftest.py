"""Files of models as the hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strategies.models.model import Model, load_model

FILES = Path(__file__).parents[2] / "data" / "models"

# Parameters of the weights on huggingface.co as transformers builds them, without buffers. deepseek-v3: the main model, "671B" of
# the 685B in its README (the rest is the prediction layer), with the router's correction bias, which its files hold too
HUB = {
    "gpt2": 124_439_808,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-8b": 8_190_735_360,
    "qwen3-0.6b": 596_049_920,
    "deepseek-v3": 671_026_419_200,
    "deepseek-v2-lite": 15_706_484_224,
    "bloom-7b1": 7_069_016_064,
    "c4ai-command-r": 34_980_831_232,
    "command-r7b": 8_028_033_024,
    "distilbert-base-uncased": 66_985_530,
    "falcon-40b": 41_303_293_952,
    "falcon-7b": 6_921_720_704,
    "flan-t5-base": 247_577_856,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gemma-3-27b": 27_009_346_304,
    "glm-4-9b-0414": 9_400_279_040,
    "glm-4.5-air": 106_852_245_504,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "gpt-oss-20b": 20_914_757_184,
    "granite-3.1-8b": 8_170_848_256,
    "kimi-k2": 1_026_408_232_448,
    "llama-4-maverick": 400_711_848_960,
    "llama-4-scout": 107_769_861_120,
    "mpt-7b": 6_649_286_656,
    "olmo-2-7b": 7_298_617_344,
    "olmo-3-7b": 7_298_011_136,
    "olmo-7b": 6_888_095_744,
    "olmoe-1b-7b": 6_919_161_856,
    "opt-125m": 125_239_296,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "pythia-1.4b": 1_414_647_808,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "roberta-base": 124_697_433,
    "smollm3-3b": 3_075_098_624,
    "stablelm-3b": 2_795_443_200,
    "starcoder": 15_517_456_384,
    "starcoder2-7b": 7_173_923_840,
    "t5-small": 60_506_624,
    "vit-base-patch16-224": 86_567_656,
}

SMALL: dict[str, Any] = {"name": "small", "hidden": 48, "layers": 3, "heads": 6, "vocabulary": 101, "context": 40}


def hugging_face(tmp_path: Path, file: str, drop: tuple[str, ...] = (), **changes: Any) -> tuple[Model, list[str]]:
    """The model in a changed copy of one of the files of tests/data/models."""
    data = json.loads((FILES / f"{file}.json").read_text())
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({key: value for key, value in (data | changes).items() if key not in drop}))
    return load_model(str(path))
