"""The chunks of a rank under PyTorch's pipelining.

Schedules that PyTorch has run in its own class; any other order of passes (naive, zero-bubble H1 and H2, a CSV file) in the
runtime that its classes are made of. Stages find out the shapes of what they exchange in the first step.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from calibration.execute.setup import SINGLE, Setup
from strategies.schedules.table import cells

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
Loss = Callable[[Any, Tensor], Tensor]


class Stage(PipelineStage):
    """Says which microbatch a forward pass is of."""

    begin: Callable[[int], None]

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        """PyTorch's own."""
        self.begin(fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)


def pipeline(setup: Setup, modules: Sequence[nn.Module], numbers: Sequence[int], loss: Loss, begin: Callable[[int], None]) -> Any:
    """A schedule of PyTorch over this rank's modules, whose virtual stages have these numbers. begin: called with the number of a
    microbatch before each of its forward passes.
    """
    name, count = setup.plan.schedule, len(setup.resolved.layers)
    group, microbatches = setup.group("pp"), setup.resolved.microbatches
    stages = [
        Stage(module, number, count, setup.device, group=group, get_mesh=lambda *_: setup.mesh["tp"])
        for module, number in zip(modules, numbers, strict=True)
    ]
    for stage in stages:
        stage.begin = begin
    # the mean over microbatches is the loss's matter: scaling gradients would scale a matrix that two stages share twice
    options = {"loss_fn": lambda output, label: loss(output, label) / microbatches, "scale_grads": False}
    if name in SINGLE:
        return getattr(schedules, CLASSES[name])(stages[0], microbatches, **options)
    if name in CLASSES:
        return getattr(schedules, CLASSES[name])(stages, microbatches, **options)
    runtime = schedules._PipelineScheduleRuntime(stages, microbatches, **options)  # type: ignore[no-untyped-call]
    runtime._prepare_schedule_with_comms(written(setup))
    return runtime


def written(setup: Setup) -> dict[int, list[Any]]:
    """The passes of every pipeline rank, as PyTorch reads them from a CSV file."""
    plan, resolved = setup.plan, setup.resolved
    rows, _ = cells(plan.schedule, plan.pp, resolved.microbatches, resolved.chunks)
    return {rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
