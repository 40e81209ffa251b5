"""Plans and models with one field changed: what is refused, what else changes of the resolved plan or of the model's sizes."""

from __future__ import annotations

import hashlib
from itertools import groupby
from typing import Any

from shardyard import read_job
from strategies.job import Job
from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from tests.random_jobs import CPU, MODELS, RARE, USUAL
from tests.results.cases import MIXTURE, VISION
from tests.results.jobs import LLAMA, MORE, UNUSUAL
from tests.results.questions import question
from topologies.reading import UserError, build

USUALLY: list[Any] = [True, False, 2, 3, 0.5, None]
HYBRID = LLAMA | {"name": "hybrid", "mixer": "both", "state_space": {"heads": 16, "head_dim": 64, "state": 64, "groups": 4}}
BASES: dict[str, tuple[dict[str, Any] | str, dict[str, Any], int]] = {  # model, plan, nodes of 8 GPUs
    "stages": (MODELS[0], {"pp": 4, "tp": 2, "accumulation": 8, "recompute": "selective"}, 2),
    "experts": (MODELS[2], {"ep": 2, "tp": 2, "sequence_parallel": True, "accumulation": 2, "data_parallel": "zero1"}, 1),
    "pytorch": (MODELS[1], {"data_parallel": "zero3", "kernels": "torch", "global_batch": 16, "recompute": "full"}, 1),
    "deepspeed": (MODELS[0], {"data_parallel": "zero3", "deepspeed": {}, "global_batch": 32, "microbatch": 2}, 2),
    "interleaved": (MODELS[1], {"schedule": "interleaved", "pp": 2, "chunks": 2, "cp": 2, "accumulation": 4, "fp8": {}}, 1),
    "adapters": (LLAMA | {"name": "plain"}, {"lora": {"rank": 8, "targets": "attention"}, "accumulation": 2, "tp": 2}, 1),
    "hybrid": (HYBRID, {"kernels": "megatron", "accumulation": 2, "pp": 2, "data_parallel": "zero2"}, 1),
    "encoder and decoder": ("tests/data/models/t5-small.json", {"kernels": "torch", "accumulation": 2, "sequence": 128}, 1),
    "images": (VISION, {"tp": 2, "accumulation": 2, "sequence": 17}, 1),
    "offloaded": (MODELS[3], {"data_parallel": "zero2", "offload": {"optimizer": "cpu"}, "accumulation": 2}, 1),
    "experts by nodes": (
        MIXTURE,
        {"ep": 8, "ep_nodes": 2, "routed_nodes": 1, "tp": 2, "sequence_parallel": True, "accumulation": 2},
        2,
    ),
    "whole experts": (MIXTURE, {"ep": 2, "tp": 2, "expert_tp": 1, "sequence_parallel": True, "accumulation": 2}, 1),
    "split passes": (MODELS[1], {"schedule": "zb-v", "pp": 2, "accumulation": 8}, 1),
    "local steps": (MODELS[0], {"data_parallel": "diloco", "local_steps": 3, "accumulation": 1}, 1),
    "powersgd": (MODELS[0], {"data_parallel": "ddp_powersgd", "kernels": "torch", "accumulation": 2}, 1),
    "pieces": (MODELS[1], {"fp8": {}, "tp": 4, "sequence_parallel": True, "overlap_tp": "pieces", "accumulation": 2}, 1),
    "uneven": (MODELS[0], {"uneven_batch": "join", "global_batch": 27, "kernels": "torch"}, 1),
    "windows": ("tests/data/models/gemma-3-1b.json", {"kernels": "torch", "accumulation": 2}, 1),
}
SIZES: dict[str, dict[str, Any]] = {"mixture": MIXTURE, "hybrid": HYBRID, "images": VISION}
SIZE_VALUES: list[Any] = [0, 1, 7, 16, 64, "rotary", "rmsnorm", "post", {}, [1], -1, 10**9]
PROPERTIES = sorted(
    name for name in dir(Resolved) if name not in dir(Plan.__base__) and isinstance(getattr(Resolved, name, None), property)
)
SIZE_PROPERTIES = ("parameters", "active_parameters", "embedding_parameters", "head_parameters", "layer_kinds", "head_dim", "ffn")


@question
def plan(name: str) -> Any:
    """By field, what other values change: fields and properties of the resolved plan, and a hash of what to."""
    model, base, nodes = BASES[name]
    usual = _outcome(model, base, nodes)
    result: dict[str, Any] = {"usual": hashlib.sha256(str(usual).encode()).hexdigest()[:8]}
    for field in sorted(Plan.model_fields.keys() | RARE.keys()):
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


@question
def model(name: str) -> Any:
    """By field, what other values change of a model's sizes, or why they are refused."""
    base, result = SIZES[name], {"usual": _sizes(SIZES[name])}
    for field in sorted(Model.model_fields.keys() - {"module"}):
        values = [*USUALLY, *SIZE_VALUES, *(each[field] for each in (*UNUSUAL, *SIZES.values()) if field in each)]
        changed, digest = list[str](), hashlib.sha256()
        for value in {str(value): value for value in values}.values():
            outcome = _sizes(base | {field: value})
            names = sorted(key for key in outcome | result["usual"] if outcome.get(key) != result["usual"].get(key))
            changed.append("refused" if "refused" in outcome else " ".join(names) or "-")
            digest.update(str(sorted(outcome.items())).encode())
        named = [f"{text} ×{len(list(same))}" for text, same in groupby(changed)]
        result[field] = f"{', '.join(named)} {digest.hexdigest()[:8]}"
    return result


def _sizes(fields: dict[str, Any]) -> dict[str, str]:
    try:
        built = build(Model, fields, "model")
        sizes = {each: str(getattr(built, each)) for each in SIZE_PROPERTIES}
        return sizes | {"flops": f"{built.forward_flops(2, 16, True):.9g} {built.forward_flops(1, 16, False, head=False):.9g}"}
    except UserError as error:
        return {"refused": str(error)}


def _outcome(model: dict[str, Any] | str, fields: dict[str, Any], nodes: int) -> dict[str, str]:
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
