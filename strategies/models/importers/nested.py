"""The language model of a multimodal `config.json`: its own keys, what the file says for it, and the defaults of its class.

transformers makes the inner configuration from `text_config` alone; the class around it has the head, and asks its own file
whether that is tied (`PreTrainedModel.tie_weights`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from topologies.reading import UserError, load_yaml, shown

PARTS = ("text_config", "llm_config", "language_config")  # of transformers; InternVL's; DeepSeek-VL2's
WRAPPER = "thinker_config"  # Qwen Omni: the part that reads and writes text
TIED = "tie_word_embeddings"
_OF_THE_FILE = ("architectures", "model_type", "vocab_size", TIED)  # which an inner configuration may leave to it


def language_part(data: Mapping[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
    """Name and contents of the language model's part of a file; no name and the file itself where it has no parts.

    Raises UserError where the part is no mapping.
    """
    outer, prefix = data, ""
    if isinstance(data.get(WRAPPER), Mapping):
        outer, prefix = data[WRAPPER], f"{WRAPPER}."
    name = next((each for each in PARTS if each in outer), "")
    if not name:
        return "", data
    inner = outer[name]
    if not isinstance(inner, Mapping):
        raise UserError(f"{where}: {prefix}{name}={shown(inner)} must be a mapping")
    return (prefix + name, inner) if inner else ("", data)


def completed(data: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of a language model: its own, those that its file says for it, and the defaults of its class."""
    shared = {key: data[key] for key in _OF_THE_FILE if data.get(key) is not None}
    names = shared.pop("architectures", None)
    if isinstance(names, list) and names and str(names[0]).endswith("Model"):  # without a head, and so is its part
        shared["architectures"] = names
    both = shared | {key: value for key, value in inner.items() if value is not None or key not in shared}
    if TIED in shared:
        both[TIED] = shared[TIED]
    kind = str(both.get("model_type")).removesuffix("_text")
    return _defaults().get(kind, {}) | both


@cache
def _defaults() -> dict[str, dict[str, int]]:
    return load_yaml(Path(__file__).with_name("nested_defaults.yaml"))
