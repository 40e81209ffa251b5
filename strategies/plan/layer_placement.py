"""Which stage of the pipeline has how many layers."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from strategies.models.model import Model
from topologies.reading import UserError

if TYPE_CHECKING:
    from strategies.plan.plan import Plan

FIELDS = ("layers_per_stage", "first_stage_layers", "last_stage_layers", "embedding_as_layer", "loss_as_layer")


def placement(plan: Plan, stages: int, model: Model, where: str) -> tuple[int, ...]:
    """Layers of each virtual stage. Raises UserError when they cannot be laid out as asked."""
    which = f"pp={plan.pp}" if stages == plan.pp else f"pp·chunks={plan.pp}·{stages // plan.pp}"
    asked = [name for name in FIELDS if getattr(plan, name)]
    if plan.layers_per_stage is not None:
        if len(asked) > 1:
            raise UserError(f"{where}: layers_per_stage and {asked[1]} both say where layers are; give one of them")
        return _given(plan.layers_per_stage, stages, model, which, where)
    counted = plan.embedding_as_layer + plan.loss_as_layer  # which may stand on stages of their own
    if stages > model.layers + counted:
        raise UserError(f"{where}: {which} stages exceed {model.layers} layers{f' + {counted}' if counted else ''}")
    if plan.first_stage_layers or plan.last_stage_layers:
        if plan.embedding_as_layer or plan.loss_as_layer:
            raise UserError(f"{where}: {asked[0]} and {asked[-1]} both say where layers are; give one of them")
        return _ends(plan, stages, model, which, where)
    if plan.embedding_as_layer or plan.loss_as_layer:
        return _counted(plan, stages, model, which, where)
    return _even(model.layers, stages)


@lru_cache(maxsize=1024)
def _even(layers: int, stages: int) -> tuple[int, ...]:
    """The rest goes to the middle stages: the first also holds the embedding, the last the head (as Llama 3 405B was placed: 126
    layers over 16 stages with one layer fewer on the first and the last, arXiv:2407.21783 section 3.3.2).
    """
    each, rest = divmod(layers, stages)
    start = (stages - rest + 1) // 2
    return tuple(each + (start <= stage < start + rest) for stage in range(stages))


def _given(given: tuple[int, ...], stages: int, model: Model, which: str, where: str) -> tuple[int, ...]:
    if len(given) != stages or sum(given) != model.layers:
        has = f"layers_per_stage has {len(given)} stages and {sum(given)} layers"
        raise UserError(f"{where}: {has} ≠ {which}, {model.layers} layers")
    if 0 in given[1:-1]:
        place = given.index(0, 1)
        raise UserError(f"{where}: layers_per_stage: stage {place} has no layers; only the first (embedding) and last (head) can")
    return given


def _ends(plan: Plan, stages: int, model: Model, which: str, where: str) -> tuple[int, ...]:
    """Asked-for ends, and the stages between them alike."""
    first, last = plan.first_stage_layers, plan.last_stage_layers
    name = "first_stage_layers" if first else "last_stage_layers"
    if stages != plan.pp or stages < 2:
        raise UserError(
            f"{where}: {name}={first or last} is for pp > 1 and one chunk per rank, not {which}: give layers_per_stage"
        )
    alike = stages - bool(first) - bool(last)
    left = model.layers - (first or 0) - (last or 0)
    if left < alike or (left % alike if alike else left):
        raise UserError(f"{where}: {name}={first or last} leaves {left} of {model.layers} layers for {alike} stages alike")
    each = left // alike if alike else 0
    return (first or each, *(each,) * (stages - 2), last or each)


def _counted(plan: Plan, stages: int, model: Model, which: str, where: str) -> tuple[int, ...]:
    """All stages alike when the embedding, or head and loss, count as a layer."""
    names = [name for name in ("embedding_as_layer", "loss_as_layer") if getattr(plan, name)]
    each, rest = divmod(model.layers + len(names), stages)
    if stages == 1 or rest:
        total = f"{model.layers} layers + {len(names)}"
        raise UserError(f"{where}: {names[0]}=true needs pp > 1 that divides {total}, and has {which}")
    result = [each] * stages
    result[0] -= plan.embedding_as_layer
    result[-1] -= plan.loss_as_layer
    return tuple(result)
