"""Sets of jobs that are validated together: one model and cluster, and variants of one plan by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from strategies.job import Job
from strategies.read_job import read_job
from topologies.reading import Config, UserError, build, load_yaml, nearest

SHIPPED = Path(__file__).parent / "validation.yaml"


class ValidationSet(Config):
    """Model and cluster as in a job; `plan` holds what all variants have, each variant what only it has."""

    model: str | dict[str, Any]
    cluster: str | dict[str, Any]
    plan: dict[str, Any] = {}  # noqa: RUF012
    variants: dict[str, dict[str, Any]]
    quick: tuple[str, ...] = ()
    emulated: tuple[str, ...] = ()


def read_set(
    path: str | None,
    overrides: Iterable[str],
    only: Iterable[str] = (),
    part: Literal["", "quick", "emulated"] = "",
    **given: Any,
) -> list[Job]:
    """The jobs of a set, by default of the shipped one; `only` those named, `part` those that the set calls so.

    given: model, cluster, profile … in place of the set's. Raises UserError.
    """
    where = path or str(SHIPPED)
    variants = build(ValidationSet, load_yaml(Path(where)), where)
    names = list(only) or list(getattr(variants, part) if part else variants.variants) or list(variants.variants)
    for name in names:
        if name not in variants.variants:
            raise UserError(f"{where}: no variant '{name}'{nearest(name, variants.variants)}")
    fields: Mapping[str, Any] = {"model": variants.model, "cluster": variants.cluster} | {
        k: v for k, v in given.items() if v is not None
    }
    return [read_job(None, overrides, name=name, plan={**variants.plan, **variants.variants[name]}, **fields) for name in names]
