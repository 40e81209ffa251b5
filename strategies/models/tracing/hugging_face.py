"""Classes of transformers as modules to trace: made from a `config.json` alone, and run on one sequence without padding."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strategies.models.importers.unread import NOT_READ, OTHER_KERNELS, RECURRENT
from topologies.reading import UserError, load_yaml, shown

_DROPPED = ("quantization_config", "auto_map", "dtype", "torch_dtype")


def class_of(file: str) -> Any:
    """The module of the class that a `config.json` names; code that a file brings along does not run. Layers are never skipped
    (`layerdrop` is 0) and features are not masked (SpecAugment), as these draw random numbers.

    Raises UserError where transformers is not installed or knows no such class, and for layers that run other kernels on GPUs
    than those that it dispatches here.
    """
    data = load_yaml(Path(file), constants=True)
    kind, names = str(data.pop("model_type", "")), data.pop("architectures", None) or [""]
    _check_kernels(file, kind, data)
    try:
        import transformers
    except ImportError:
        raise UserError(
            f"{file}: --input traces transformers' own class, which is not installed: pip install 'shardyard[hf]'"
        ) from None
    known = getattr(transformers, str(names[0]), None)
    if known is None:
        what = f"architectures[0]={shown(names[0])} is no class of transformers {transformers.__version__}"
        raise UserError(f"{file}: {what}: write a function that makes the module, and name it as FILE.py:NAME (docs/models.md)")
    settings = {key: value for key, value in data.items() if key not in _DROPPED} | {"use_cache": False}
    config = transformers.AutoConfig.for_model(kind, **settings)
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        _without_chance(each)
    return known(config)


def _without_chance(config: Any) -> None:
    for key in list(vars(config)) if config is not None else ():
        if key.endswith("layerdrop"):
            setattr(config, key, 0.0)
    if hasattr(config, "apply_spec_augment"):
        config.apply_spec_augment = False


def _check_kernels(file: str, kind: str, data: Mapping[str, Any]) -> None:
    """Refuse what is recurrent, at the top of the file or in one of its parts."""
    kinds = [kind, *(str(each.get("model_type")) for each in data.values() if isinstance(each, Mapping))]
    for name in (each.removesuffix("_text") for each in kinds):
        if name in RECURRENT:
            raise UserError(f"{file}: model_type '{name}': {NOT_READ[name]}")
        if name in OTHER_KERNELS:
            why = "on GPUs its recurrent layers run other kernels than its class dispatches here"
            raise UserError(f"{file}: model_type '{name}': {why}; without --input the file is read, and they are simulated")


@contextmanager
def without_padding(source: str) -> Iterator[None]:
    """Classes of transformers look at masks and token ids for padding and for several sequences in a row; samples have neither,
    and no values to look at. Does nothing for other sources.
    """
    if not source.endswith(".json"):
        yield
        return
    masks = importlib.import_module("transformers.masking_utils")
    base = importlib.import_module("transformers.modeling_utils").PreTrainedModel

    def unpadded(name: str) -> Any:
        original = getattr(masks, name)
        return lambda padding_mask, *args, **kwargs: original(None, *args, **kwargs)

    stand_ins = {
        (masks, "find_packed_sequence_indices"): lambda position_ids: None,
        (masks, "_ignore_causal_mask_sdpa"): unpadded("_ignore_causal_mask_sdpa"),
        (masks, "_ignore_bidirectional_mask_sdpa"): unpadded("_ignore_bidirectional_mask_sdpa"),
        (base, "warn_if_padding_and_no_attention_mask"): lambda *args, **kwargs: None,
    }
    originals = {key: getattr(*key) for key in stand_ins}
    try:
        for key, stand_in in stand_ins.items():
            setattr(*key, stand_in)
        yield
    finally:
        for key, original in originals.items():
            setattr(*key, original)
