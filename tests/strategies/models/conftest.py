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
}

SMALL: dict[str, Any] = {"name": "small", "hidden": 48, "layers": 3, "heads": 6, "vocabulary": 101, "context": 40}


def hugging_face(tmp_path: Path, file: str, drop: tuple[str, ...] = (), **changes: Any) -> tuple[Model, list[str]]:
    """The model in a changed copy of one of the files of tests/data/models."""
    data = json.loads((FILES / f"{file}.json").read_text())
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({key: value for key, value in (data | changes).items() if key not in drop}))
    return load_model(str(path))
