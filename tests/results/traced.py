"""What modules cost that are traced: their operators, what they keep, and a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardyard import read_job
from strategies.layers.model_costs import parts
from strategies.models.tracing.tracer import trace_of
from strategies.predict import predict
from tests.results.questions import question

MODULES = Path(__file__).parent / "modules.py"
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # the function that makes the module, of a sample, fields of the plan
    "images": ("3x16x16", {}),
    "images fp32 zero3": ("3x12x12", {"precision": "fp32", "data_parallel": "zero3"}),
    "images sync_norm": ("3x16x16", {"sync_norm": True, "precision": "fp16"}),
    "pixels": ("4x6x6", {"microbatch": 3}),
    "causal": ("24:int64", {"data_parallel": "zero1"}),
    "causal materialised": ("24:int64", {"attention": "materialised", "precision": "fp32"}),
    "causal full": ("24:int64", {"recompute": "full", "pp": 2, "accumulation": 3}),
    "masked": ("16:int64", {"recompute": "full", "data_parallel": "zero3"}),
    "crossed": ("16:int64", {"pp": 2, "accumulation": 3, "schedule": "zb-h1"}),
    "partly_frozen": ("16:int64", {"recompute": "full"}),
    "partly_frozen zero3": ("16:int64", {"data_parallel": "zero3"}),
    "operators": ("12x12, 12x12", {"data_parallel": "ddp_fp16", "gradients": "fp32"}),
    "statistics_of_all": ("6x20", {"recompute": "full"}),
    "bags": ("7:int64, 16", {"optimizer": "sgd"}),
}


@question
def traced(name: str) -> Any:
    """A module, what its parts cost, and a step."""
    sample, plan = CASES[name]
    usual: dict[str, Any] = {"microbatch": 4, "accumulation": 1, "kernels": "torch"}
    source = f"{MODULES}:{name.partition(' ')[0]}"
    job = read_job(None, model=source, input=sample, cluster="dgx-a100", plan=usual | plan)
    assert job.model.module is not None
    resolved, costs = job.resolve(), parts(job.model, job.resolve())
    trace = trace_of(job.model.module, resolved.microbatch, resolved.precision, resolved.fused_attention)
    every = [costs.embedding, *map(costs.layer, range(job.model.layers)), costs.head]
    model = job.model
    return {
        "sizes": (model.hidden, model.layers, model.context, model.parameters, model.forward_flops(2, model.context, True)),
        "loss": trace.loss,
        "notes": [note.replace(str(MODULES), "modules.py") for note in job.notes],
        "operators": [
            {"name": op.name, "part": op.part, "label": op.label, "flops": op.flops, "live": op.live}
            | {"read": sum(each.bytes for each in op.inputs), "written": sum(each.bytes for each in op.outputs)}
            for op in trace.ops
        ],
        "kept": [size for tensors in trace.saved.values() for _, size in tensors],
        "boundaries": trace.boundaries,
        "parts": every,
        "shared": trace.shared,
        "tied": trace.tied,
        "summary": predict(job).to_dict(),
    }
