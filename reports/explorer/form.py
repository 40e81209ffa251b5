"""The controls of the page, made from the descriptions of the fields themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from strategies.job import Job
from strategies.plan.computing import Computing
from strategies.plan.degrees import Degrees
from strategies.plan.plan import Plan
from strategies.resilience.settings import CheckpointSettings, RunSettings
from topologies.reading import plain

Control = dict[str, Any]
FIRST = ("tp", "pp", "cp", "ep", "data_parallel", "microbatch", "global_batch", "sequence", "schedule", "chunks", "recompute")
"""Fields of a plan that are always shown; the others are found by name."""
DOUBLING = ("tp", "pp", "cp", "ep", "shard", "microbatch", "global_batch", "accumulation", "chunks", "sequence")
HARDWARE: dict[str, tuple[str, Callable[[Job], str]]] = {
    "cluster.node.nic": ("rate of each NIC", lambda job: _rate(job.cluster.node.nic)),
    "cluster.node.nvlink": ("NVLink of each GPU", lambda job: _rate(job.cluster.node.nvlink)),
    "cluster.node.gpu.memory": ("memory of each GPU", lambda job: f"{job.cluster.node.gpu.memory / 2**30:.5g} GiB"),
    "cluster.node.gpu.memory_bandwidth": (
        "bandwidth of its memory",
        lambda job: f"{job.cluster.node.gpu.memory_bandwidth / 1e9:.5g} GB/s",
    ),
}
DAYS = ("spares", "recovery", "timeout", "allocation")


def form(job: Job) -> list[dict[str, Any]]:
    """Sections of controls: title and controls, each with field, kind, label, description, value and choices."""
    return [
        {"title": "Job", "controls": _job(job)},
        {"title": "Plan", "controls": [_of_plan(job, name) for name in FIRST]},
        {"title": "Everything else of the plan", "folded": True, "controls": list(_rest(job))},
        {"title": "What if the hardware were different", "folded": True, "controls": _hardware(job)},
        {"title": "Days of training", "folded": True, "controls": _days(job)},
    ]


def _job(job: Job) -> list[Control]:
    from sim.pricing.shipped import profile_names
    from strategies.models.model import model_names
    from topologies.cluster_files import cluster_names

    about = "standard deviation of ln(kernel seconds) among GPUs of one kind; 0: all alike; by default the profile's"
    return [
        _select("model", "model", _with(job.model.name, model_names()), job.model.name, "preset"),
        _select("cluster", "cluster", _with(job.cluster.name, cluster_names()), job.cluster.name, "node and network"),
        {**_number("nodes", "nodes of this kind", job.cluster.nodes), "doubling": True},
        _select("profile", "profile", ["", *profile_names()], job.profile or "", "prices; by default those of the GPU"),
        _text("variability", about, "" if job.variability is None else str(job.variability)),
        _text("tokens", "tokens of the whole training: days, cost, energy", "1e12"),
        _text("price", "US dollars per GPU-hour; by default as listed for the GPU", ""),
    ]


def _rest(job: Job) -> Iterable[Control]:
    every = [*Degrees.model_fields, *Computing.model_fields, *Plan.model_fields]
    yield from (_of_plan(job, name) for name in dict.fromkeys(every) if name not in FIRST)


def _of_plan(job: Job, name: str) -> Control:
    resolved = job.resolve()
    value = plain(getattr(job.plan, name))
    shown = getattr(resolved, name, None) if value is None else value
    control = _control(f"plan.{name}", name, Plan.model_fields[name], value, _named().get(name))
    if value is None and isinstance(shown, int | float | str) and not isinstance(shown, bool):
        control["derived"] = str(shown)
    return control | ({"doubling": True} if name in DOUBLING else {})


def _named() -> dict[str, list[str]]:
    """Names that registries know."""
    from strategies.data_parallel import hooks
    from strategies.frameworks import kernel_sets
    from strategies.optimizers import optimizers
    from strategies.schedules import schedules

    return {
        "schedule": list(schedules),
        "data_parallel": list(hooks),
        "kernels": list(kernel_sets),
        "optimizer": list(optimizers),
    }


def _hardware(job: Job) -> list[Control]:
    if len(job.cluster.gpu_kinds) > 1:
        return []
    values = {field: (about, value(job)) for field, (about, value) in HARDWARE.items()}
    return [_text(field, about, value) for field, (about, value) in values.items() if not value.startswith("0 ")]


def _days(job: Job) -> list[Control]:
    settings = job.run or RunSettings()
    controls = [_control(f"run.{name}", name, RunSettings.model_fields[name], getattr(settings, name)) for name in DAYS]
    interval = CheckpointSettings.model_fields["interval"]
    controls.insert(0, _control("run.checkpoint.interval", "checkpoint interval", interval, settings.checkpoint.interval))
    return controls


def _control(field: str, label: str, info: FieldInfo, value: Any, choices: list[str] | None = None) -> Control:
    """A control for a field by its type. Texts are read as `--set` reads them."""
    kinds = _kinds(info.annotation)
    about = info.description or ""
    literal = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    value = plain(value)
    if choices or literal:
        none = [""] if type(None) in kinds else []
        return _select(field, label, [*none, *(choices or literal)], "" if value is None else str(value), about)
    if bool in kinds:
        none = [""] if type(None) in kinds else []
        return _select(field, label, [*none, "true", "false"], "" if value is None else str(value).lower(), about)
    if int in kinds and str not in kinds:
        return _number(field, about, value, label)
    return _text(field, about, "" if value is None else _plain_text(value), label)


def _kinds(annotation: Any) -> list[Any]:
    """The alternatives of a type, without what annotates them."""
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    return [annotation.__origin__] if hasattr(annotation, "__metadata__") else [annotation]


def _plain_text(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)


def _select(field: str, label: str, choices: Iterable[str], value: str, about: str) -> Control:
    return {"field": field, "label": label, "kind": "select", "choices": list(choices), "value": value, "about": about}


def _number(field: str, about: str, value: Any, label: str | None = None) -> Control:
    text = "" if value is None else str(value)
    return {"field": field, "label": label or field, "kind": "number", "value": text, "about": about}


def _text(field: str, about: str, value: str, label: str | None = None) -> Control:
    return {"field": field, "label": label or field.removeprefix("cluster."), "kind": "text", "value": value, "about": about}


def _with(name: str, names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([name, *names]))


def _rate(bytes_per_second: float) -> str:
    return re.sub(r"\.?0+ ", " ", f"{bytes_per_second * 8 / 1e9:.6f} Gb/s")
