"""Repeated blocks of a module: what a pipeline cuts between, FSDP gathers and recomputation forgets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

WHOLE = ""  # the name of the module itself


def find_blocks(net: nn.Module, inputs: list[Any], named: Mapping[str, Any]) -> list[str]:
    """Names of the repeated blocks in the order in which a forward pass calls them: instances of the class that has most of the
    parameters, each called once and none inside another; of a module without any, the module itself.

    Classes that only hold others in a row (Sequential, ModuleList) and modules without parts of their own are no blocks.
    """
    called: list[str] = []

    def watch(name: str) -> Any:
        return lambda *_: called.append(name)

    candidates = {name: each for name, each in net.named_modules() if name and _may_be(each)}
    handles = [each.register_forward_pre_hook(watch(name)) for name, each in candidates.items()]
    try:
        with torch.no_grad():
            net(*inputs, **named)
    finally:
        for handle in handles:
            handle.remove()
    by_class: dict[type, list[str]] = defaultdict(list)
    for name in called:
        by_class[type(candidates[name])].append(name)
    best: tuple[int, list[str]] = (0, [])
    for names in by_class.values():
        alone = len(set(names)) == len(names) > 1 and not any(inner.startswith(f"{name}.") for name in names for inner in names)
        size = sum(each.numel() for name in names for each in candidates[name].parameters())
        if alone and size > best[0]:
            best = size, names
    return best[1] or [WHOLE]


def _may_be(module: nn.Module) -> bool:
    return not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict) and any(True for _ in module.children())
