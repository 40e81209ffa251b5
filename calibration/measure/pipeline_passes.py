"""What PyTorch's pipeline runtime takes of the host for each pass, besides the pass: Python, and looking after messages.

Imports torch: import this module inside the function that needs it.

Two ranks run 1F1B of a layer each, as large as in a step, so that Python comes back to cold caches as it does there. Only the
thread's own time on a core counts: waiting for the other stage is in the price of a send, and so are the calls that send and
receive, which are measured by themselves and taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from calibration.execute.model import Transformer
from calibration.launch.groups import new_group
from calibration.measure.bench import Bench, Probe, Reading, spread
from calibration.measure.layer_check import model
from calibration.measure.training import HIDDEN, TOKENS

MICROBATCHES = 8
STAGES = 2
PASSES = 2 * MICROBATCHES  # of a stage, for each of which it sends or receives once


def probes() -> list[Probe]:
    """One."""
    return [Probe("wrapping", {"wrapper": "pipeline", "width": HIDDEN, "tokens": TOKENS}, _run, rounds=2)]


def _timed(*arguments: Any, **options: Any) -> Any:
    """A stage that adds up the seconds of its thread that passes take."""
    from torch.distributed.pipelining import PipelineStage

    class Timed(PipelineStage):
        inside = 0.0

        def timed(self, action: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            begin = time.thread_time()
            result = action(*arguments, **options)
            self.inside += time.thread_time() - begin
            return result

        def forward_maybe_with_nosync(self, *arguments: Any, **options: Any) -> Any:
            """PyTorch's own."""
            return self.timed(super().forward_maybe_with_nosync, *arguments, **options)

        def backward_maybe_with_nosync(self, *arguments: Any, **options: Any) -> Any:
            """PyTorch's own."""
            return self.timed(super().backward_maybe_with_nosync, *arguments, **options)

    return Timed(*arguments, **options)


def _run(bench: Bench) -> Reading:
    """The mean over ranks; of an odd number the last one looks on."""
    rank, world = bench.place.rank, bench.place.world
    first = rank - rank % STAGES
    pair = [each for each in range(first, first + STAGES) if each < world]
    group = new_group(pair, alone=True)
    looks_on = len(pair) < STAGES
    step, calls = (_nothing, _nothing) if looks_on else (_step(bench, group, rank - first), _calls(bench, pair, group))
    count, _ = bench.repetitions(step)
    count = int(np.clip(bench.gather([count]).max(), 10, 30))
    bench.barrier()
    mine = np.array([step() - calls() for _ in range(count)])
    both = bench.gather([float(np.median(mine)), spread(mine)])[: world - world % STAGES]
    value = max(0.0, float(both[:, 0].mean()))
    return Reading(value, max(0.0, float(both[:, 0].min())), float(both[:, 1].max()), count)


def _nothing() -> float:
    return 0.0


def _step(bench: Bench, group: Any, stage: int) -> Callable[[], float]:
    """Runs a step; seconds of this thread for each pass, outside of it."""
    from torch.distributed.pipelining import Schedule1F1B

    net = Transformer(model(HIDDEN, 1), TOKENS, embedding=False, head=False).to(bench.device)
    timed = _timed(net, stage, STAGES, bench.device, group=group)
    schedule = Schedule1F1B(timed, MICROBATCHES, loss_fn=lambda output, _: timed.timed(torch.sum, output), scale_grads=False)
    inputs = torch.randn(MICROBATCHES, TOKENS, HIDDEN, device=bench.device)
    labels = torch.zeros(MICROBATCHES, device=bench.device)

    def step() -> float:
        timed.inside, begin = 0.0, time.thread_time()
        schedule.step(*([] if stage else [inputs]), target=labels if stage else None, return_outputs=False)
        seconds = time.thread_time() - begin - timed.inside
        net.zero_grad()
        return float(seconds / PASSES)

    return step


def _calls(bench: Bench, pair: list[int], group: Any) -> Callable[[], float]:
    """Runs as many sends and receives as a step has; seconds of this thread for each."""
    message, mine = torch.zeros(1, device=bench.device), bench.place.rank == pair[0]

    def send() -> None:
        dist.send(message, pair[mine], group)

    def receive() -> None:
        dist.recv(message, pair[mine], group)

    def calls() -> float:
        begin = time.thread_time()
        for action in ((send, receive) if mine else (receive, send)) * MICROBATCHES:
            action()
        return (time.thread_time() - begin) / PASSES

    return calls
