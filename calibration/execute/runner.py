"""A rank that trains: its chunks, its hook, and one step.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from calibration.execute.buckets import local
from calibration.execute.chunks import chunks, shared
from calibration.execute.data_parallel import hook_class
from calibration.execute.limits import asynchronous
from calibration.execute.packing import documents
from calibration.execute.setup import Setup, group_of


class Runner:
    """Runs the steps of one rank of a job."""

    tokens: Any  # (microbatches, microbatch, sequence), or samples of a traced module's inputs
    labels: Tensor

    def __init__(self, setup: Setup) -> None:
        self.setup, self.resolved = setup, setup.resolved
        self.steps = 0  # that were begun, local ones too
        self.chunks = chunks(setup)
        self.hook = hook_class(setup.plan)(setup, self.chunks)
        if self.hook.one_process:  # which has the data of all dp ranks: (microbatches, dp · microbatch, sequence)
            self.tokens, self.labels = (part.transpose(0, 1).flatten(1, 2) for part in cast(tuple[Tensor, Tensor], setup.data))
        else:
            tokens, labels = setup.data
            self.tokens, self.labels = tokens[setup.replica], labels[setup.replica]
            if context := shared(setup).tokens:
                own = context.positions(self.resolved.sequence).to(setup.device)
                self.tokens, self.labels = self.tokens[..., own], self.labels[..., own]
        self.loss = self.chunks[0].net.loss
        self.versions = self._asynchronous() if asynchronous(setup.job) else None
        self.pipeline = self._pipeline() if setup.plan.pp > 1 and self.versions is None else None
        self.tied = self._tied_group()

    def _pipeline(self) -> Any:
        from calibration.execute.pipeline import pipeline

        def scaled(output: Any, label: Tensor) -> Tensor:
            return self.loss(output, label) * self.hook.clipping.scale

        return pipeline(self.setup, self.hook.modules, [chunk.number for chunk in self.chunks], scaled, self._begin)

    def _asynchronous(self) -> Any:
        from calibration.execute.asynchronous import Asynchronous

        (chunk,) = self.chunks

        def begin(step: int, microbatch: int) -> None:
            chunk.net.number = self.setup.number(step, self.setup.replica, microbatch)
            chunk.net.documents = documents(self.setup, self.setup.replica, microbatch)

        return Asynchronous(self.setup, chunk, self.hook, (self.tokens, self.labels), begin)

    def _begin(self, microbatch: int) -> None:
        """Tell the chunks which forward pass is the next."""
        for chunk in self.chunks:
            chunk.net.number = self.setup.number(self.steps - 1, self.setup.replica, microbatch)
            chunk.net.documents = documents(self.setup, self.setup.replica, microbatch)

    def _tied_group(self) -> Any:
        """The group of this rank in which two stages share an embedding. Every rank makes all such groups."""
        setup, pp = self.setup, self.setup.plan.pp
        self.ends = [chunk for chunk in self.chunks if chunk.number in (0, len(self.resolved.layers) - 1)]
        first, last = (setup.schedule.stage(0, pp, 0), len(self.resolved.layers) - 1)
        owner = {setup.schedule.stage(rank, pp, chunk): rank for rank in range(pp) for chunk in range(self.resolved.chunks)}
        if not setup.job.model.tied or pp == 1 or owner[first] == owner[last]:
            return None
        mine = None
        for ranks in setup.groups("pp"):
            pair = [ranks[owner[first]], ranks[owner[last]]]
            group = group_of(tuple(pair))
            mine = group if setup.place.rank in pair else mine
        return mine

    def step(self) -> list[Tensor]:
        """A step (or a round of local steps): the losses of the last one's microbatches, where this rank has them."""
        if self.versions is not None:
            return self.versions.step()  # type: ignore[no-any-return]
        for _ in range(self.resolved.local_steps):
            self.steps += 1
            self.hook.zero()
            with self._around():
                losses = self._passes() if self.pipeline is None else self._pipelined()
            self.hook.reduce()
            self._tie()
            self.hook.update()
        self.hook.synchronise()
        return losses

    def finish(self) -> None:
        """After the last step: nothing is left under way."""
        if self.versions is not None:
            self.versions.finish()

    def _around(self) -> AbstractContextManager[Any]:
        """Logits that are cut over the vocabulary stay so."""
        if self.setup.plan.tp == 1:
            return nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        context: AbstractContextManager[Any] = loss_parallel()
        return context

    def _passes(self) -> list[Tensor]:
        count, losses = self.resolved.microbatches, []
        for number in range(count):
            self._begin(number)
            with self.hook.accumulating(last=number == count - 1):
                value = self.loss(self.hook.modules[0](self.tokens[number]), self.labels[number])
                self.hook.backward(value, count, last=number == count - 1)
            losses.append(value.detach())
        return losses

    def _pipelined(self) -> list[Tensor]:
        last = len(self.resolved.layers) - 1
        numbers = [chunk.number for chunk in self.chunks]
        losses: list[Tensor] = []
        given = [self.tokens.flatten(0, 1)] if 0 in numbers else []
        labels = self.labels.flatten(0, 1) if last in numbers else None
        assert self.pipeline is not None
        self.pipeline.step(*given, target=labels, losses=losses if last in numbers else None, return_outputs=False)
        return [value.detach() * self.resolved.microbatches / self.hook.clipping.scale for value in losses]

    @torch.no_grad()
    def _tie(self) -> None:
        """First and last stage sum the gradients of the embedding that they share."""
        if self.tied is None:
            return
        for chunk in self.ends:
            net = chunk.net
            owner: Any = net.embedding.tokens if net.embedding is not None else net.head.logits  # type: ignore[union-attr]
            gradient: Any = owner.weight.grad
            if owner.weight.requires_grad:
                dist.all_reduce(local(gradient), group=self.tied)
