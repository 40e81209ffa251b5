"""Plans with one field changed: what is refused, what else changes of the resolved plan."""

from __future__ import annotations

import hashlib
from itertools import groupby
from typing import Any

from shardyard import read_job
from strategies.job import Job
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from tests.random_jobs import CPU, MODELS, RARE, USUAL
from tests.results.jobs import LLAMA, MORE
from tests.results.questions import question
from topologies.reading import UserError

USUALLY: list[Any] = [True, False, 2, 3, 0.5, None]
HYBRID = LLAMA | {"name": "hybrid", "mixer": "both", "state_space": {"heads": 16, "head_dim": 64, "state": 64, "groups": 4}}
BASES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {  # model, plan, nodes of 8 GPUs
    "stages": (MODELS[0], {"pp": 4, "tp": 2, "accumulation": 8, "recompute": "selective"}, 2),
    "experts": (MODELS[2], {"ep": 2, "tp": 2, "sequence_parallel": True, "accumulation": 2, "data_parallel": "zero1"}, 1),
    "pytorch": (MODELS[1], {"data_parallel": "zero3", "kernels": "torch", "global_batch": 16, "recompute": "full"}, 1),
    "deepspeed": (MODELS[0], {"data_parallel": "zero3", "deepspeed": {}, "global_batch": 32, "microbatch": 2}, 2),
    "interleaved": (MODELS[1], {"schedule": "interleaved", "pp": 2, "chunks": 2, "cp": 2, "accumulation": 4, "fp8": {}}, 1),
    "adapters": (LLAMA | {"name": "plain"}, {"lora": {"rank": 8, "targets": "attention"}, "accumulation": 2, "tp": 2}, 1),
    "hybrid": (HYBRID, {"kernels": "megatron", "accumulation": 2, "pp": 2, "data_parallel": "zero2"}, 1),
}
PROPERTIES = sorted(
    name for name in dir(Resolved) if name not in dir(Plan.__base__) and isinstance(getattr(Resolved, name, None), property)
)


@question
def plan(name: str) -> Any:
    """By field, what other values change: fields and properties of the resolved plan, and a hash of what to."""
    model, base, nodes = BASES[name]
    usual = _outcome(model, base, nodes)
    result: dict[str, Any] = {"usual": hashlib.sha256(str(usual).encode()).hexdigest()[:8]}
    for field in sorted(Plan.model_fields):
        values = [*USUALLY, *USUAL.get(field, ()), *RARE.get(field, ()), *(each[field] for each in MORE if field in each)]
        changed, digest = list[str](), hashlib.sha256()
        for value in {str(value): value for value in values}.values():
            outcome = _outcome(model, base | {field: value}, nodes)
            names = sorted(key for key in outcome | usual if outcome.get(key) != usual.get(key))
            changed.append("refused" if "refused" in outcome else " ".join(names) or "-")
            digest.update(str(sorted(outcome.items())).encode())
        named = [f"{text} ×{len(list(same))}" for text, same in groupby(changed)]
        result[field] = f"{', '.join(named)} {digest.hexdigest()[:8]}"
    return result


def _outcome(model: dict[str, Any], fields: dict[str, Any], nodes: int) -> dict[str, str]:
    try:
        job: Job = read_job(
            None, {}, model=model, plan=fields, cluster={"based_on": "dgx-h100", "node": {"cpu": CPU}}, nodes=nodes
        )
        resolved = job.resolve()
    except UserError as error:
        return {"refused": str(error)}
    said = {field: str(getattr(resolved, field)) for field in Resolved.model_fields}
    for each in PROPERTIES:
        value = getattr(resolved, each)
        if isinstance(value, bool | int | float | str | tuple | frozenset | dict | None):
            said[each] = str(sorted(value) if isinstance(value, frozenset) else value)
    return said | {"notes": str(job.notes)}
