"""A job as the settings of a training framework. What they cannot express is found by reading them as a plan again."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from strategies.frameworks.settings import ReadSettings, frameworks
from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from topologies.documents.writing import WriteError, write_whole
from topologies.reading import UserError, build

if TYPE_CHECKING:
    from strategies.job import Job

_RESOLVED = {
    "dp": "dp",
    "shard": "shards",
    "chunks": "chunks",
    "layers_per_stage": "layers",
    "sequence": "sequence",
    "global_batch": "global_batch",
    "accumulation": "microbatches",
}
_MEANT = {"gradient_sync": "syncs_gradients", "framework": "options"}  # fields of a plan with a default that depends on others
_ANOTHER_WAY = {"first_stage_layers", "last_stage_layers", "embedding_as_layer", "loss_as_layer"}  # to say layers_per_stage
_ASSUMED = {"imbalance", "expert_spread"}  # of what the data will be: nobody sets it
_UNTOLD = {"name", "source", "context", "vocabulary", "vocabulary_multiple"}  # of a model: what changes no layer's work


@dataclass(frozen=True)
class Export:
    """Settings of a framework: the usual name of their file, its text, and the line that starts it; unexpressed: what runs
    otherwise than the plan says, or has to be said elsewhere.
    """

    file: str
    text: str
    launch: str
    unexpressed: tuple[str, ...]


def export(name: str, job: Job) -> Export:
    """The settings of framework `name` for a job. Raises UserError where they make no plan that could run."""
    framework = frameworks[name]
    written = framework.write(job)
    filled = {"sequence": job.resolve().sequence, "accumulation": job.resolve().microbatches}
    script = {field: filled.get(field, getattr(job.plan, field)) for field in framework.script}
    try:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / framework.file
            write_whole(file, written.text)
            settings = framework.read(file)
        again = build(Plan, {**settings.plan, **_plain(script)}, name)
        theirs = Resolved.of(again, job.model, job.cluster.gpus, name, job.cluster.node.gpus)
    except WriteError:
        raise
    except UserError as error:
        said = str(error).replace(f"{folder}/", "")  # which is gone by now
        raise UserError(f"{name} cannot run this plan: {said}") from None
    unexpressed = (*_differences(job.resolve(), theirs), *_of_model(job.model, settings), *_beside(script), *written.more)
    return Export(framework.file, written.text, written.launch, unexpressed)


def _differences(own: Resolved, theirs: Resolved) -> Iterator[str]:
    """Fields of the plan that read otherwise."""
    for field in Plan.model_fields:
        if field not in _ANOTHER_WAY | _ASSUMED:
            at, name = _RESOLVED.get(field), _MEANT.get(field, field)
            own_value, other_value = (getattr(plan, at) if at else getattr(plan, name) for plan in (own, theirs))
            if field == "framework":  # whose class goes with the kernels
                own_value, other_value = (options.model_dump(exclude_defaults=True) for options in (own_value, other_value))
            if not _same(own_value, other_value):
                yield _difference(field, own_value, other_value)


def _of_model(model: Model, settings: ReadSettings) -> Iterator[str]:
    """Parts of the model that the settings, where they describe one, have otherwise."""
    if settings.model:
        theirs = build(Model, settings.model, settings.where)
        for field in (*Model.model_fields, "padded_vocabulary"):
            own_value, other_value = getattr(model, field), getattr(theirs, field)
            if field not in _UNTOLD and own_value != other_value:
                yield _difference(f"model.{field}", own_value, other_value)


def _beside(script: Mapping[str, Any]) -> Iterator[str]:
    """What has to be said in the training script."""
    said = [f"{field}={_shown(value)}" for field, value in script.items() if value != Plan.model_fields[field].get_default()]
    if said:
        yield f"to be said in the training script: {', '.join(said)}"


def _same(own_value: Any, other_value: Any) -> bool:
    if isinstance(own_value, float) and isinstance(other_value, float):
        return math.isclose(own_value, other_value, rel_tol=1e-6)  # a number of elements is whole, their bytes may not have been
    return bool(own_value == other_value)


def _difference(name: str, own_value: Any, other_value: Any) -> str:
    """A field that reads otherwise; of a group, the fields that differ."""
    if isinstance(own_value, BaseModel) and type(own_value) is type(other_value):
        pairs = [(field, getattr(own_value, field), getattr(other_value, field)) for field in type(own_value).model_fields]
        return "; ".join(_difference(f"{name}.{field}", a, b) for field, a, b in pairs if a != b)
    return f"{name}={_shown(own_value)}: it has {_shown(other_value)}"


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {field: list(value) if isinstance(value, tuple) else value for field, value in values.items()}


def _shown(value: Any) -> str:
    if value is None:
        return "the default"
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {part}' for name, part in value.items())}}}"
    if isinstance(value, tuple):  # [3, 14 × 4, 2]
        runs = [(layers, len(list(group))) for layers, group in groupby(value)]
        return f"[{', '.join(f'{times} × {layers}' if times > 1 else str(layers) for layers, times in runs)}]"
    if isinstance(value, float) and value.is_integer():
        return f"{value:.0f}"
    return str(value).lower() if isinstance(value, bool) else str(value)
