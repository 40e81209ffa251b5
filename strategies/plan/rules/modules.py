"""What of a plan can be done to a traced module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strategies.models.model import Model
from strategies.models.tracing.records import Module
from strategies.models.tracing.tracer import structure_of, trace_of
from topologies.reading import UserError

if TYPE_CHECKING:
    from strategies.plan.plan import Plan


def traceable(plan: Plan, model: Model, sequence: int) -> Iterator[str]:
    """A module is whole on every rank unless it says how tp ranks cut it, and runs as eager PyTorch runs it; between its blocks a
    pipeline may cut.
    """
    if model.module is None:
        return
    for axis in ("cp", "ep"):
        if (degree := getattr(plan, axis)) > 1:
            yield f"{axis}={degree}: a traced module is not cut inside; dp, zero1 to zero3, shard and pp are simulated"
    yield from _cut(plan, model.module)
    if plan.kernels != "torch":
        yield f"kernels={plan.kernels}: a traced module runs PyTorch's own operators, kernels=torch"
    for field, only in (
        ("fp8", None),
        ("packing", None),
        ("deterministic", False),
        ("loss", None),
        ("dropout", None),
        ("sequence_parallel", False),
    ):
        if getattr(plan, field) != only:
            yield f"{field}={getattr(plan, field)}: is not done to a traced module, which says itself what it computes"
    if plan.recompute not in ("none", "full"):
        yield f"recompute={plan.recompute}: of a traced module whole blocks are recomputed: recompute=full"
    if sequence != model.context:
        yield f"sequence={sequence} contradicts a sample of {model.context} tokens: change --input"
    if plan.framework is not None and plan.framework.model_fields_set & {
        "joined_products",
        "complex_rotary",
        "repeated_keys",
        "unpad",
        "loss_metrics",
        "root_unit",
    }:
        yield "framework: options of how a model is written are not for a traced module"
    trace = structure_of(model.module)
    if plan.sync_norm and not trace.norms:
        yield f"sync_norm=true: {model.name} has no batch normalisation"
    if plan.pp > 1 and trace.shared:
        yield f"pp={plan.pp}: several blocks share '{trace.shared[0]}'; pipelines are simulated for embedding and head that do"
    alone = plan.loss_as_layer or (plan.layers_per_stage is not None and plan.layers_per_stage[-1] == 0)
    if plan.pp > 1 and alone and len(set(trace.handed_on)) > 1:
        yield f"pp={plan.pp}: a last stage without blocks is simulated where all blocks hand on as much, unlike {model.name}'s"


def _cut(plan: Plan, module: Module) -> Iterator[str]:
    """Whether the module can be cut over so many tp ranks: its user's function is tried."""
    if plan.tp == 1:
        return
    if not module.parallelize:
        how = "--parallelize FILE.py:NAME, a function (module, mesh) that calls torch's parallelize_module"
        yield f"tp={plan.tp}: how tp ranks cut a traced module has to be said: {how}"
        return
    try:
        trace_of(module, 1, "bf16", tp=plan.tp)
    except UserError as error:
        yield f"tp={plan.tp}: {error}"
