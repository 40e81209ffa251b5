"""The model that a traced module is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from strategies.models.model import Model
from strategies.models.parts import WIDTH
from strategies.models.tracing.builders import module_of
from strategies.models.tracing.records import Module
from strategies.models.tracing.tracer import structure_of
from topologies.reading import UserError, build


def traced_model(source: Any, given: Any, name: str | None = None, parallelize: Any = None) -> Model:
    """The model of a module by FILE.py:NAME, by what makes it, or by itself; given: the sizes of one sample; parallelize: what
    cuts it over tp ranks. Runs the file.
    Raises UserError.

    A sample of one sequence of numbers (`2048:int64`) has as many tokens, any other sample has one.
    """
    module = module_of(source, given, parallelize)
    trace = structure_of(module)
    tokens = module.input[0].shape[0] if len(module.input[0].shape) == 1 and module.input[0].dtype != "float" else 1
    handed_on = max(trace.boundaries) / 2 / trace.samples  # elements of 16 bits
    if trace.frozen.issuperset(trace.parameters):
        raise UserError(f"model {module.source}: has no parameters to train")
    fields = {
        "name": name or _name(module),
        "source": module.source,
        "family": "encoder",
        "hidden": min(WIDTH, max(1, math.ceil(handed_on / tokens))),  # for people: what blocks hand on is in the trace
        "layers": len(trace.blocks),
        "heads": 1,
        "head_dim": 1,
        "vocabulary": 0,
        "context": tokens,
        "positions": "none",
        "head": False,
        "tied": bool(trace.tied),
        "final_norm": False,
        "module": module,
    }
    return build(Model, fields, f"model {module.source}")


def _name(module: Module) -> str:
    if module.source.endswith(".json"):
        path = Path(module.source)
        return path.resolve().parent.name if path.name == "config.json" else path.stem
    file, _, name = module.source.rpartition(":")
    return name if file else module.source.partition(",")[0]


def remarks_of(model: Model) -> list[str]:
    """What was run, what was found, and what was assumed."""
    assert model.module is not None
    trace = structure_of(model.module)
    inputs = ", ".join(f"{each.name} " * bool(each.name) + "×".join(map(str, each.shape)) for each in model.module.input)
    blocks = (
        f"{len(trace.blocks)} blocks, from '{trace.blocks[0]}' to '{trace.blocks[-1]}'"
        if len(trace.blocks) > 1
        else "no repeated blocks"
    )
    ran = f"transformers' class of {model.module.source} was made" if model.module.source.endswith(".json") else ""
    said = [
        f"{ran or f'{model.module.source} was run'}, and its passes on samples of {inputs} were traced: {blocks}; {trace.loss}"
    ]
    if unread := [name for name, parts in trace.users.items() if not parts]:
        count = sum(math.prod(trace.parameters[name]) for name in unread)
        others = f" and {len(unread) - 1} others" if len(unread) > 1 else ""
        said.append(f"{count:,} parameters are held, and read by none of these passes: '{unread[0]}'{others}")
    if trace.synchronises:
        said.append("SyncBatchNorm takes its statistics over all dp ranks")
    if any(op.name.startswith("convolution") for op in trace.ops):
        said.append("convolutions are priced as matrix products of their size: no profile has measured them")
    return said
