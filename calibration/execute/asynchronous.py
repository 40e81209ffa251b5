"""A pipeline that never drains, by plain sends: a rank goes on to later microbatches after an update, with other parameters.

PyTorch's pipelines end every step with a flush. Here a microbatch goes back through the parameters that it went forward with
(PipeDream's weight stashing, doi:10.1145/3341301.3359646), or all of a step's go through those of the step before
(double-buffered updates, arXiv:2006.09503): versions of the parameters are tensors of their own, which share memory with the
newest ones until an update writes these elsewhere. Each stage clips by the norm of its own gradients: no other one is waited for.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call

from calibration.execute.chunks import Chunk
from calibration.execute.data_parallel import Hook
from calibration.execute.setup import Setup

ENDLESS = 2**40  # microbatches


@dataclass
class Passing:
    """A microbatch between its passes here, and the version of the parameters that it goes through."""

    given: Tensor
    result: Tensor
    version: int
    leaves: dict[str, Tensor]


def version_of(setup: Setup, stage: int, microbatch: int) -> int:
    """Updates of a stage's parameters before those that microbatch goes through, counted from the first of all steps."""
    if setup.schedule.every_microbatch:
        return max(0, microbatch - (setup.plan.pp - 1 - stage))
    return max(0, microbatch // setup.resolved.microbatches - 1)


class Asynchronous:
    """This rank's stage. begin: called with the number of a microbatch in its step before each of its forward passes."""

    def __init__(
        self, setup: Setup, chunk: Chunk, hook: Hook, data: tuple[Tensor, Tensor], begin: Callable[[int, int], None]
    ) -> None:
        self.setup, self.chunk, self.hook, self.begin = setup, chunk, hook, begin
        self.inputs, self.labels = data
        pp, rank = setup.plan.pp, setup.at["pp"]
        ranks = dist.get_process_group_ranks(setup.group("pp"))
        self.before, self.behind = (ranks[each] if 0 <= each < pp else None for each in (rank - 1, rank + 1))
        self.count, self.every = (
            setup.resolved.microbatches,
            1 if setup.schedule.every_microbatch else setup.resolved.microbatches,
        )
        self.order = setup.schedule.order(rank, pp, ENDLESS, 1)
        self.played = 0  # actions
        self.updates = self.accumulated = 0
        self.versions = {0: self._leaves()}
        self.passing: dict[int, Passing] = {}
        self.sent: list[tuple[Any, Tensor]] = []

    def step(self) -> list[Tensor]:
        """Until so many microbatches as a step has are back: their losses, on the last stage."""
        losses, done = [], 0
        while done < self.count:
            action = next(self.order)
            self.played += 1
            if not self.accumulated:  # gradients of the last update are there until somebody goes on
                self.hook.zero()
            if action.kind == "F":
                self._forward(action.microbatch)
                continue
            losses += self._backward(action.microbatch)
            done += 1
            self.accumulated += 1
            if self.accumulated == self.every:
                self._update()
        return losses

    def finish(self) -> None:
        """Bring back what is under way, without updates: nothing that was sent is left."""
        setup, pp, rank = self.setup, self.setup.plan.pp, self.setup.at["pp"]
        backward = self.played - (pp - 1 - rank)
        total = backward // 2 + pp - 1
        for action in list(setup.schedule.order(rank, pp, total, 1))[self.played :]:
            (self._forward if action.kind == "F" else self._backward)(action.microbatch)
        for work, _ in self.sent:
            work.wait()

    def _leaves(self) -> dict[str, Tensor]:
        """The newest parameters, in the same memory, as tensors of which gradients are taken."""
        return {name: each.data.requires_grad_(each.requires_grad) for name, each in self.chunk.net.named_parameters()}

    def _forward(self, microbatch: int) -> None:
        plan, setup = self.setup.plan, self.setup
        number = microbatch % self.count
        if self.before is None:
            given = self.inputs[number]
        else:
            shape = (plan.microbatch, setup.resolved.sequence, setup.job.model.hidden)
            given = torch.empty(shape, dtype=setup.dtype, device=setup.device)
            dist.recv(given, self.before, setup.group("pp"))
            given.requires_grad_()
        version = version_of(setup, setup.at["pp"], microbatch)
        leaves = self.versions.get(version, self.versions[self.updates])  # there are no more updates in `finish`
        self.begin(microbatch // self.count, number)
        result = functional_call(self.chunk.net, leaves, (given,))
        if self.behind is None:
            result = self.chunk.net.loss(result, self.labels[number])
        else:
            self._send(result.detach(), self.behind)
        self.passing[microbatch] = Passing(given, result, version, leaves)

    def _backward(self, microbatch: int) -> list[Tensor]:
        """The loss, where this is the last stage."""
        passing = self.passing.pop(microbatch)
        result = passing.result
        if self.behind is None:
            (result / self.every).backward()  # type: ignore[no-untyped-call]
        else:
            upstream = torch.empty_like(result)
            dist.recv(upstream, self.behind, self.setup.group("pp"))
            result.backward(upstream)  # type: ignore[no-untyped-call]
        if self.before is not None:
            assert passing.given.grad is not None
            self._send(passing.given.grad, self.before)
        for name, parameter in self.chunk.held.items():
            gradient, passing.leaves[name].grad = passing.leaves[name].grad, None
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return [result.detach()] if self.behind is None else []

    def _send(self, tensor: Tensor, rank: int) -> None:
        self.sent = [(work, kept) for work, kept in self.sent if not work.is_completed()]
        work = dist.isend(tensor.contiguous(), rank, self.setup.group("pp"))
        self.sent.append((work, tensor))

    def _update(self) -> None:
        """Make the next version, and forget those that no later pass goes through."""
        self.hook.reduce()
        self.accumulated = 0
        kept = {} if self.setup.schedule.every_microbatch else {self.updates: self.versions[self.updates]}
        if kept or any(passing.version == self.updates for passing in self.passing.values()):
            for parameter in self.chunk.net.parameters():
                parameter.data = parameter.data.clone()
        if self.hook.clipping(self.hook.gradients()):
            self.hook.optimizer.step()
        self.updates += 1
        self.versions = kept | {self.updates: self._leaves()}
