"""Sets of jobs that are validated together: one model and cluster, and variants of one plan by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt

from strategies.job import Job
from strategies.read_job import read_job, stated_job
from topologies.reading import Config, UserError, build, load_yaml, nearest

SHIPPED = Path(__file__).parent / "validation.yaml"


class ValidationSet(Config):
    """Model and cluster as in a job; `plan` holds what all variants have, each variant what only it has."""

    model: str | dict[str, Any]
    cluster: str | dict[str, Any]
    plan: dict[str, Any] = {}  # noqa: RUF012
    processes: PositiveInt = Field(2, le=2**20)  # that `global_batch` is for: it grows with them
    variants: dict[str, dict[str, Any]]
    quick: tuple[str, ...] = ()
    emulated: tuple[str, ...] = ()


def read_variants(path: str | None, processes: int) -> list[str]:
    """The names of a set's variants, by default the shipped one's, that cut a model among so many processes."""
    variants = _set(path or str(SHIPPED))
    return [name for name in variants.variants if processes % _split(variants, name) == 0]


def read_set(
    path: str | None,
    overrides: Iterable[str],
    only: Iterable[str] = (),
    part: Literal["", "quick", "emulated"] = "",
    processes: int | None = None,
    **given: Any,
) -> list[Job]:
    """The jobs of a set, by default of the shipped one; `only` those named, `part` those that the set calls so.

    processes: by default the cluster's. given: model, cluster, profile … in place of the set's. Raises UserError.
    """
    where = path or str(SHIPPED)
    variants = _set(where)
    names = list(only) or list(getattr(variants, part) if part else variants.variants) or list(variants.variants)
    for name in names:
        if name not in variants.variants:
            raise UserError(f"{where}: no variant '{name}'{nearest(name, variants.variants)}")
    fields: Mapping[str, Any] = {"model": variants.model, "cluster": variants.cluster} | {
        k: v for k, v in given.items() if v is not None
    }
    overrides = list(overrides)
    of_cluster = [each for each in overrides if each.startswith("cluster.")]
    gpus = processes or stated_job(None, of_cluster, **fields).cluster.gpus
    return [
        read_job(None, overrides, name=name, plan=_grown(variants, name, gpus), **fields)
        for name in names
        if only or gpus % _split(variants, name) == 0
    ]


def _set(where: str) -> ValidationSet:
    return build(ValidationSet, load_yaml(Path(where)), where)


def _grown(variants: ValidationSet, name: str, gpus: int) -> dict[str, Any]:
    """A variant's plan with as much work for each of `gpus` processes as the set has for each of its own."""
    plan = {"auto": False, **variants.plan, **variants.variants[name]}
    if _whole(plan.get("global_batch")):
        plan["global_batch"] = max(1, plan["global_batch"] * gpus // variants.processes)
    return plan


def _split(variants: ValidationSet, name: str) -> int:
    """Processes that a variant cuts a model among."""
    plan = {**variants.plan, **variants.variants[name]}
    return math.prod(plan[axis] for axis in ("tp", "pp", "cp") if _whole(plan.get(axis)))


def _whole(value: object) -> bool:
    """Whether a field of a plan is a number to count with; others are refused when the plan is read."""
    return isinstance(value, int) and value > 0
