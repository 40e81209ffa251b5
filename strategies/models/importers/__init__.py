"""Readers of Hugging Face `config.json`: one function per model type, found in this folder without editing any other file.

An importer takes a `Reader` of the file and returns fields of `strategies.models.model.Model`. What it does not ask the reader
for is reported to the user as ignored, so the report is exact by construction, or refused where it may change the model's size
(`strategies.models.importers.unread`). Defaults of absent keys are those of the
configuration classes of transformers (github.com/huggingface/transformers, `models/*/configuration_*.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from strategies.models.importers.nested import PARTS, TIED, WRAPPER, completed, language_part
from strategies.models.importers.unread import NOT_READ, OTHERS, RECURRENT, may_change_sizes
from topologies.reading import UserError, shown
from topologies.registry import Registry

PREDICTION_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # of files whose classes ignore them
TOWERS = frozenset("vision visual audio speech video encoder tower projector perceiver qformer vit talker token2wav".split())
MOST = 10**15  # of a number of things


class Reader:
    """The keys of one `config.json`; remembers which were read. `where` is the file, for messages."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._data = data
        self.read: set[str] = set()
        self.known: set[str] = set()  # not read, and of no effect on sizes

    def harmless(self, *keys: str) -> None:
        """Name keys of a family that change neither parameters nor matrix products of the main model: they may be ignored."""
        self.known |= set(keys)

    def only(self, **expected: Any) -> None:
        """What all models of a family are, where files say it nevertheless. Raises UserError where one says otherwise."""
        for key, known in expected.items():
            if (value := self.value(key)) not in (None, known):
                raise UserError(f"{self.where}: {key}={shown(value)} is not read: known models of this type have {shown(known)}")

    def integer(self, key: str, absent: int | None = None) -> int:
        """A positive whole number that the file must have unless there is a default. Raises UserError when it is absent or
        something else.
        """
        if key not in self._data and absent is not None:
            self.read.add(key)
            return absent
        if key not in self._data:
            raise UserError(f"{self.where}: field '{key}' is required")
        value = self.optional(key)
        if not value:
            raise UserError(f"{self.where}: {key}={value} must be a positive whole number")
        return value

    def optional(self, key: str, absent: int | None = None) -> int | None:
        """A whole number or null; `absent` when the key is not there."""
        value = self.value(key, absent)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST):
            raise UserError(f"{self.where}: {key}={shown(value)} must be a whole number, not negative and at most {MOST:g}")
        return value

    def flag(self, key: str, absent: bool) -> bool:
        """true or false; `absent` when the key is not there or null."""
        value = self.value(key)
        if not isinstance(value, bool | None):
            raise UserError(f"{self.where}: {key}={shown(value)} must be true or false")
        return absent if value is None else value

    def rate(self, key: str, absent: float = 0.0) -> bool:
        """Whether a dropout probability is above zero."""
        value = self.value(key, absent)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise UserError(f"{self.where}: {key}={shown(value)} must be a number")
        return bool(value)

    def value(self, key: str, absent: Any = None) -> Any:
        """Whatever the file says, counted as read."""
        self.read.add(key)
        return self._data.get(key, absent)

    @property
    def architecture(self) -> str:
        """The first of `architectures`, or ''."""
        names = self.value("architectures") or [""]
        if not isinstance(names, list) or not isinstance(names[0], str):
            raise UserError(f"{self.where}: architectures={shown(names)} must be a list of names")
        return names[0]

    @property
    def labels(self) -> int:
        """Outputs of a classifier: as many as `id2label` names, or `num_labels`, or transformers' two."""
        names, number = self.value("id2label"), self.optional("num_labels")
        return number or (len(names) if isinstance(names, Mapping) and names else 2)

    @property
    def has_language_head(self) -> bool:
        """Whether the architecture predicts tokens (…ForCausalLM) or is the bare …Model. Raises UserError for other heads."""
        name = self.architecture
        if not name or name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
            return True
        if name.endswith("Model"):
            return False
        raise UserError(f"{self.where}: architectures[0]='{name}': only language models (…ForCausalLM) and bare …Model are read")


Importer = Callable[[Reader], dict[str, Any]]
model_type: Registry[Importer] = Registry("model type", package="strategies.models.importers")


def sizes(config: Reader, absent: Mapping[str, int] = MappingProxyType({})) -> dict[str, Any]:
    """Sizes that most families say with the same keys; absent: by key, defaults."""
    keys = {
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "ffn": "intermediate_size",
        "vocabulary": "vocab_size",
        "context": "max_position_embeddings",
    }
    return {field: config.integer(key, absent.get(key)) for field, key in keys.items()}


def is_hugging_face(data: Mapping[str, Any]) -> bool:
    """Whether a file is a `config.json` rather than fields of `Model`."""
    return any(key in data for key in ("model_type", "architectures", *PARTS))


def read_hugging_face(data: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Fields of `Model` in a `config.json`, and the keys that were ignored, sorted (nested ones as `text_config.key`). Of a
    multimodal file the language model is read (`strategies.models.importers.nested`).

    Raises UserError for an unknown model type, a missing key, or one that is not read and may change the model's size.
    """
    name, own = language_part(data, where)
    reader = Reader(completed(data, own) if name else data, where)
    fields = _importer(reader)(reader)
    if name and fields.get("family") == "encoder":
        two = f"{name} is an encoder ('{reader.value('model_type')}') beside another, and both train on one loss"
        raise UserError(
            f"{where}: {two}, which is not simulated: --input with the inputs of both traces transformers' class (docs/models.md)"
        )
    _all_alike(reader, fields)
    _all_known(reader, own)
    ignored = [_ignored(key, data[key]) for key in data if key not in reader.read and key not in (*PARTS, WRAPPER)]
    if name:
        unread = [key for key in own if key not in reader.read]
        ignored += [f"{name}.{_ignored(key, own[key])}" for key in unread]
        if TIED in own and own[TIED] != reader.value(TIED):
            ignored.append(f"{name}.{TIED} ({TIED} of the file itself holds)")
    return fields, sorted(ignored)


def _ignored(key: str, value: Any) -> str:
    """How an ignored key is listed: what a model has that transformers' class does not build can be asked for."""
    if key.endswith("_config") and isinstance(value, Mapping) and TOWERS & set(key.split("_")):
        return f"{key} (the language model alone is simulated)"
    return f"{key} (model.mtp={value} has them)" if key in PREDICTION_LAYERS and value else key


def _all_known(reader: Reader, data: Mapping[str, Any]) -> None:
    """Refuse what nobody read and may change the size of the model."""
    for key in data:
        if key not in reader.read and may_change_sizes(str(key), data, reader.read, reader.known):
            kind, value = reader.value("model_type") or reader.architecture, repr(data[key])
            rule = f"is not known of a '{kind}', and may change its size: check model_type, or describe the model in a YAML"
            raise UserError(f"{reader.where}: {key}={value if len(value) < 40 else value[:36] + ' …'} {rule}")


def _all_alike(reader: Reader, fields: Mapping[str, Any]) -> None:
    """Refuse layers that attend in different ways, or otherwise than the other keys say."""
    if "layer_types" in reader.read:  # the importer has
        return
    kinds = reader.value("layer_types") or []
    if not isinstance(kinds, list):
        raise UserError(f"{reader.where}: layer_types={shown(kinds)} must be a list of names")
    if any(kind != ("sliding_attention" if fields.get("window") else "full_attention") for kind in kinds):
        names = ", ".join(sorted({str(kind) for kind in kinds}))
        has = f"sliding_window={fields['window']}" if fields.get("window") else "no sliding window in use"
        raise UserError(f"{reader.where}: layer_types has {names}, with {has}: only layers that are all alike are read")


def _importer(reader: Reader) -> Importer:
    kind = reader.value("model_type")
    if kind is None:  # LlamaForCausalLM, GPT2LMHeadModel, DeepseekV3Model → llama, gpt2, deepseek_v3
        stem = re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", reader.architecture).lower()
        kind = next((name for name in model_type if name.replace("_", "") == stem), stem)
    name = str(kind).removesuffix("_text")
    if name in model_type:
        return model_type[name]
    import difflib

    close = difflib.get_close_matches(name[:40], model_type, n=1, cutoff=0.85)
    misspelt = close and re.sub(r"\D", "", close[0]) == re.sub(r"\D", "", name) and name not in {*NOT_READ, *OTHERS}
    hint = f"did you mean '{close[0]}'?" if misspelt else f"{_way(reader, name)}; read are: {', '.join(model_type)}"
    raise UserError(f"{reader.where}: unknown model type {shown(name)}{';' if misspelt else ':'} {hint}")


def _way(reader: Reader, name: str) -> str:
    """Why a model type is not read, and what to do."""
    why, described = NOT_READ.get(name, "no importer reads it"), "describe a model of its sizes in a YAML (docs/models.md)"
    if name in RECURRENT:
        return f"{why}; {described}"
    if reader.value("auto_map"):
        own = "its class is code that it brings along (auto_map), which does not run here"
        return f"{why}; {own}: name a function that makes the module as FILE.py:NAME with --input, or {described}"
    return f"{why}; --input 2048:int64 (images: 3x224x224) traces transformers' own class of it, or {described}"
