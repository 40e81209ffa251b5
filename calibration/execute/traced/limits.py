"""What of a job with a module of the user's own PyTorch carries out. No torch is imported before the module is traced."""

from __future__ import annotations

from collections.abc import Iterator

from strategies.job import Job
from strategies.models.tracing.records import BUILDERS, Module
from strategies.models.tracing.tracer import structure_of

FIELDS = {"sync_norm"}  # of a plan, that are carried out of a module besides those of a transformer
OPTIONS = {"broadcast_buffers"}
# of synchronised norms on cores
EXCHANGED = (
    "SyncBatchNorm of PyTorch takes tensors of GPUs only: its all-gathers and all-reduces are executed, and its arithmetic, "
    "operator by operator, which takes longer than the kernels that are predicted"
)
EXACTLY = (
    "compared with one process in fp64: in fp32 ReLUs turn rounding into percents of a gradient; what is timed is the plan's"
)
DRAWING = ("dropout", "bernoulli", "rand")  # in names of operators that draw random numbers


def draws(module: Module) -> bool:
    """Whether its passes draw random numbers."""
    return any(word in op.name for op in structure_of(module).ops for word in DRAWING)


def reasons(job: Job) -> Iterator[str]:
    """Why a job of a traced module is not executed."""
    plan, module = job.plan, job.model.module
    if module is None:
        return
    if module.source in BUILDERS:
        name = module.source.partition(",")[0]
        yield f"model {name}, given from Python: processes of their own make the module: name it as FILE.py:NAME"
    for axis, degree in (("tp", plan.tp), ("pp", plan.pp)):
        if degree > 1:
            yield f"{axis}={degree}: a traced module is executed whole on every rank; its cuts are simulated"
    if plan.recompute != "none":
        yield f"recompute={plan.recompute}: a traced module keeps its activations; with batch statistics it would take them twice"
    trace = structure_of(module)
    if plan.sync_norm and draws(module):
        yield "sync_norm=true of a module that draws random numbers: one process draws of all ranks' samples at once"
    if plan.sync_norm and not trace.has_mean_loss:
        yield f"sync_norm=true, and {trace.loss}: one process has a batch of all ranks, whose sum is larger"
