"""What any word means that people meet in commands and answers: metrics, fields of a plan, schedules, strategies, algorithms, and
what is in the catalogues.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from reports import catalogues, metrics
from reports.fields import described
from reports.formatting import span
from sim.collectives import algorithms
from sim.engine.effects import effects
from strategies.data_parallel import hooks
from strategies.frameworks import kernel_sets
from strategies.models.model import Model
from strategies.optimizers import optimizers
from strategies.plan.framework_options import FIELD, all_options
from strategies.plan.plan import Plan
from strategies.resilience.checkpointing import policies
from strategies.resilience.intervals import intervals
from strategies.resilience.recovery import recoveries
from strategies.resilience.settings import RunSettings
from strategies.schedules import schedules
from topologies.board import wirings
from topologies.cluster import Cluster
from topologies.documents.durations import Spread
from topologies.documents.units import duration
from topologies.fabric import fabrics
from topologies.reading import Config, UserError, folded, load_yaml, nearest
from topologies.registry import Registry

REGISTRIES: list[Registry[Any]] = [schedules, hooks, kernel_sets, optimizers, algorithms, effects, policies, intervals]
REGISTRIES += [recoveries, fabrics, wirings]
_INPUTS: list[tuple[str, type[BaseModel]]] = [("model.", Model), ("cluster.", Cluster)]
_RENAMED: Mapping[str, type[Config]] = {"": Plan, "model.": Model}  # by section, what others call its fields
_INPUTS += [("cluster.fabric.", fabrics[name]) for name in fabrics]
CUTOFF = 0.8  # how alike a word is that is offered in place of one: what is less alike is another thing
OTHER_NAMES = {"adamw": "adam", "throttling": "throttle", "worldsize": "world size", "reshardafterforward": "reshard"}  # folded
OTHER_NAMES |= {"numworkers": "run.input.workers", "prefetchfactor": "run.input.prefetch"}


def explain(name: str) -> str:
    """The entries of `name`, a few lines each, the field's own meaning first; capitals and hyphens do not matter.

    Raises UserError with the nearest name.
    """
    word = OTHER_NAMES.get(folded(name), name.strip())
    key, entries = folded(word.removeprefix("plan.")), list(_entries())
    meanings = [text for known, text in _terms() if folded(known) == folded(word)]
    with suppress(UserError):
        meanings.append(metrics.explain(word))
        if len(meanings) == 1:  # a metric of that very name, and the field of a plan that makes it
            of_plan = (text for known, text in entries if folded(known) == key and text.startswith(f"plan.{known}\n"))
            return "\n\n".join(dict.fromkeys((*meanings, *of_plan)))
    meanings += [text for known, text in entries if folded(known) == key]
    if not meanings:
        fields = {f"{section}{kind.other_names[key]}" for section, kind in _RENAMED.items() if key in kind.other_names}
        meanings += [text for known, text in entries if known in fields]
    meanings += catalogues.entries(word, also_parts=not meanings)
    if not meanings:
        known = [*(name for name, _ in (*_terms(), *entries)), *catalogues.names()]
        raise UserError(f"nothing is known of '{name}'{_hint(word, known)}")
    return "\n\n".join(dict.fromkeys(meanings))


def _hint(word: str, entries: list[str]) -> str:
    hint = nearest(word.lower(), [*entries, *(metric.lower() for metric in metrics.metric_names())], cutoff=CUTOFF)
    return hint if "did you mean" in hint else "; `shardyard list` shows what there is"


@functools.cache
def terms() -> dict[str, dict[str, Any]]:
    """The words of `terms.yaml`: text, names, see."""
    return load_yaml(Path(__file__).with_name("terms.yaml"))


def _entries() -> Iterator[tuple[str, str]]:
    """Names of fields and of what is registered; a field of a group also by its own name, after all whole names."""
    fields = {
        field: f"plan.{field}\n  {info.description}\n  default   {_default(info, plain=True)}" for field, info in _fields(Plan)
    }
    for option, kind, sets in all_options():
        info = kind.model_fields[option]
        default = info.get_default(call_default_factory=True)
        of = "any kernels" if len(sets) == len(list(kernel_sets)) else f"kernels={' and '.join(sets)}"
        fields[f"framework.{option}"] = f"plan.framework.{option}\n  {info.description}\n  default   {default}\n  of        {of}"
    fields |= {
        f"run.{field}": f"run.{field}\n  {info.description}\n  default   {_default(info)}"
        for field, info in _fields(RunSettings)
        if info.description
    }
    yield from fields.items()
    for registry in REGISTRIES:
        for name in registry:
            yield name, f"{name} ({registry.sort})\n{_documentation(getattr(registry[name], 'order', registry[name]))}"
    for prefix, section in _INPUTS:
        for field, _, text in described(section):
            whole = f"{prefix}{field}\n  {text}"
            yield from ((name, whole) for name in dict.fromkeys((f"{prefix}{field}", field, field.rpartition(".")[2])))
    yield from ((field.rpartition(".")[2], text) for field, text in fields.items())


def _terms() -> Iterator[tuple[str, str]]:
    """Words of the field, each with its other names, and what they mean."""
    for term, entry in terms().items():
        see = f"\n  see       {entry['see']}" if "see" in entry else ""
        yield from ((word, f"{term}\n  {entry['text']}{see}") for word in (term, *entry["names"]))


def _default(info: FieldInfo, plain: bool = False) -> str:
    """The default of a field; of a run's with its unit, unless it is wanted as it is."""
    if info.is_required():
        return "none: it must be given"
    default = info.get_default(call_default_factory=True)
    if plain:
        return str(default)
    if isinstance(default, Spread):
        return f"{default.kind} {span(default.mean)}" if default.kind != "constant" else span(default.mean)
    if isinstance(default, BaseModel):
        return str(getattr(default, "name", "as its fields"))
    return span(default) if isinstance(default, float) and duration in _readers(info) else str(default)


def _readers(info: FieldInfo) -> list[object]:
    """The functions that read a field."""
    return [part.func for part in info.metadata if isinstance(part, BeforeValidator)]


def _fields(config: type[BaseModel], inside: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Fields of a plan, and of the groups in it, by their names with dots."""
    for name, info in config.model_fields.items():
        yield f"{inside}{name}", info
        if name == FIELD:  # whose options depend on kernels
            continue
        for kind in (info.annotation, *get_args(info.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _fields(kind, f"{inside}{name}.")


def _documentation(thing: object) -> str:
    """The documentation of the thing, then that of its file."""
    own, module = inspect.getdoc(thing) or "", inspect.getdoc(inspect.getmodule(thing)) or ""
    return "\n".join(f"  {line}" for line in f"{own}\n{module}".splitlines() if line)
