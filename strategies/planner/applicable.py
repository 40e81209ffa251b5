"""A job with other degrees or another strategy: what its plan says that does not apply there is left out, and named.

A job that says `sequence_parallel: true` is no reason to refuse every plan with tp=1. Rules name the fields that they are about
(`strategies.plan.rules`), so what a reason names and the job says is left out, as long as that is no matter of what is trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from strategies.frameworks.options import Options
from strategies.job import Job
from strategies.layers.model_costs import check
from strategies.plan.computing import Computing
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from topologies.reading import UserError

Changes = dict[str, Any]  # fields of a plan
# What is never left out: degrees, how much is trained at a time, and what a rank computes but for how and where it does so.
HOW = frozenset(
    {
        "recompute",
        "recompute_method",
        "recompute_layers",
        "recompute_modules",
        "early_stop",
        "loss",
        "fused_optimizer",
        "offload_activations",
    }
)
KEPT = Computing.model_fields.keys() - HOW | {
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "sequence",
    "microbatch",
    "global_batch",
    "accumulation",
    "bucket",
    "sync_norm",
}
ONE_STAGE = ("schedule", "chunks")  # what means nothing without a pipeline
_NAME = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)?")


class Applied(NamedTuple):
    """A job with a changed plan, the plan with its defaults filled in, and what was left out of it, by its default."""

    job: Job
    resolved: Resolved
    dropped: Changes


def stated(plan: Plan) -> tuple[str, ...]:
    """Fields that a plan has at other values than their defaults, in their order."""
    return tuple(field for field in Plan.model_fields if getattr(plan, field) != default_of(field))


def applicable(job: Job, changes: Mapping[str, Any], own: Sequence[str] | None = None) -> Applied:
    """The job with `changes` of its plan, without fields of its own plan that do not apply to them.

    own: what the job's plan states, where that is known. Raises UserError where the changes themselves break a rule, or are not
    simulated for layers of the model.
    """
    fields = [field for field in (stated(job.plan) if own is None else own) if field not in changes]
    plan = job.plan.model_copy(update=dict(changes))
    dropped = {field: default_of(field) for field in ONE_STAGE if changes.get("pp") == 1 and field in fields}
    while True:
        asked = replace(job, plan=plan.model_copy(update=dropped) if dropped else plan)
        try:
            resolved = asked.resolve()
            check(asked.model, resolved)
            return Applied(asked, resolved, dropped)
        except UserError as error:
            less = next(without(asked.plan, str(error).removeprefix(job.where), fields), None) if fields else None
            if less is None:
                raise
            dropped |= less


def default_of(field: str) -> Any:
    """Of a plan."""
    return Plan.model_fields[field].get_default(call_default_factory=True)


def without(plan: Plan, reason: str, fields: list[str]) -> Iterator[Changes]:
    """What of these fields a reason names, without it: a field's default, or a group of fields without the one named."""
    for name in _NAME.findall(reason):
        field, _, part = name.partition(".")
        value = getattr(plan, field, None) if field in fields else None
        options = plan.framework if "framework" in fields else None
        if options is not None and name in options.model_fields_set & options.droppable:
            yield {"framework": _without_part(options, name)}
        if isinstance(value, BaseModel) and part in value.model_fields_set:
            yield {field: _without_part(value, part)}
        elif value is not None and not part and field not in KEPT and value != default_of(field):
            yield {field: default_of(field)}


def _without_part(group: BaseModel, part: str) -> BaseModel | None:
    rest = group.model_dump(exclude_unset=True, exclude={part})
    try:
        return type(group).model_validate(rest) if rest or not isinstance(group, Options) else None
    except ValidationError:  # of nothing else
        return None
