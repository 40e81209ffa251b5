"""Layers that are not all alike, as `config.json` tells them apart: lists with an entry per layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from strategies.models.importers import Reader
from topologies.reading import UserError, shown

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def kinds_of(names: Sequence[str], kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Fields `pattern` and `kinds` of layers called `names`; kinds: by name, what they have otherwise than the model says. Where
    all layers are of one kind, its fields are the model's.
    """
    distinct = list(dict.fromkeys(names))
    if len(distinct) == 1 and not {"dense", "cross", "joins", "family"} & kinds[distinct[0]].keys():
        return dict(kinds[distinct[0]])
    period = next(p for p in range(1, len(names) + 1) if all(name == names[i % p] for i, name in enumerate(names)))
    return {"pattern": list(names[:period]), "kinds": [{"name": name, **kinds[name]} for name in distinct]}


def per_layer(config: Reader, key: str, layers: int, absent: Sequence[Any]) -> list[Any]:
    """A list with an entry per layer; `absent` when the file has none."""
    entries = config.value(key) or list(absent)
    if not isinstance(entries, list) or len(entries) != layers:
        raise UserError(f"{config.where}: {key}={shown(entries)} must be a list of num_hidden_layers={layers} entries")
    return entries


def attention_kinds(
    config: Reader, layers: int, every: int = 0, window: int | None = None, absent: Sequence[str] = (), **full: Any
) -> dict[str, Any]:
    """Fields of layers that `layer_types` calls full or sliding; without it, they are `absent`, or each `every`-th layer is full
    (0: all are). window: default of `sliding_window`; full: what full layers have besides.
    """
    default = absent or [SLIDING if every and (layer + 1) % every else FULL for layer in range(layers)]
    names = per_layer(config, "layer_types", layers, default)
    size = config.optional("sliding_window", window)
    kinds: dict[str, dict[str, Any]] = {FULL: full, SLIDING: {"window": size} if size else {}}
    return kinds_of(known(config, "layer_types", names, kinds), kinds)


def known(config: Reader, key: str, names: Sequence[Any], kinds: Iterable[str]) -> list[str]:
    """The names, all of which are known. Raises UserError for others."""
    for name in names:
        if not isinstance(name, str) or name not in kinds:
            raise UserError(f"{config.where}: {key} has {shown(name)}, which is not simulated; known: {', '.join(kinds)}")
    return [str(name) for name in names]
