"""One process that never holds more than one part of the model: the right result for models that fit no device whole.

Parts are the embedding, each layer and the head. Forward, each is made, run on all microbatches of all dp ranks, and given up;
backward each is made again, run again, and gives its gradients. So the loss, every gradient, their norm and the update of the
first step are exact, and held are one part with its gradients, and the inputs of all parts.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from calibration.execute.chunks import Chunk, original
from calibration.execute.clipping import Clipping, Held
from calibration.execute.initial import materialise
from calibration.execute.model import drawing
from calibration.execute.model.ends import Embedding, Head, loss
from calibration.execute.model.fine_tuning import tune
from calibration.execute.model.layer import Dropout, Layer
from calibration.execute.optimizers import make_optimizer
from calibration.execute.reference.compare import Comparison, Distance, read_by
from calibration.execute.runner import Runner
from calibration.execute.setup import Setup
from strategies.job import Job
from strategies.plan.fine_tuning import trained_parts
from topologies.reading import UserError

EMBEDDING = "embedding.tokens.weight"


@dataclass
class Part:
    """What one process knows of a part of the model after the first step, by the whole model's names."""

    gradients: dict[str, Tensor]  # clipped
    before: dict[str, Tensor]
    after: dict[str, Tensor]


class Streamed:
    """The first step of a job. loss, norm: known after the forward passes and after the last part."""

    def __init__(self, setup: Setup, norm: float | None) -> None:
        self.setup, self.model, self.given = setup, setup.job.model, norm
        tokens, labels = (part.flatten(0, 1) for part in cast(tuple[Tensor, Tensor], setup.data))
        self.labels, self.count = labels, len(tokens)
        self.inputs: list[list[Tensor]] = [list(tokens)]  # of each part, by microbatch
        self.squares = 0.0
        for number in range(self.model.layers + 1):
            part = self._part(number)
            with torch.no_grad():
                self.inputs.append([self._call(part, number, index, x) for index, x in enumerate(self.inputs[-1])])
        self.loss = 0.0

    @property
    def norm(self) -> float:
        """Of the gradients of all parts, before they were clipped."""
        return math.sqrt(self.squares)

    def _part(self, number: int) -> nn.Module:
        """Part 0 is the embedding, the last one the head."""
        setup, model, plan, last = self.setup, self.model, self.setup.plan, self.model.layers + 1
        dropped = Dropout.of(model, plan)
        with torch.device("meta"):
            if number in (0, last):
                part: nn.Module = Head(model) if number else Embedding(model, dropped.stream)
            else:
                part = Layer(model, number - 1, setup.resolved.sequence, plan.attention, dropped)
        if not plan.trains_all:
            tune(part, plan, model, number - 1)
        prefix = "embedding" if not number else "head" if number == last else f"layers.{number - 1}"
        materialise(part.to(setup.dtype), setup.device, lambda name: original(model.tied, f"{prefix}.{name}"))
        self.prefix = prefix
        return part

    def _call(self, part: nn.Module, number: int, index: int, x: Tensor) -> Any:
        """A part of the model on microbatch `index`, which drops what the run dropped."""
        return drawing(part, index if self.setup.dropout else None, number - 1)(x)

    def parts(self) -> Iterator[Part]:
        """From the head to the embedding."""
        upstream: list[Tensor] = []
        shared: Tensor | None = None  # gradient of the head's matrix where that is the embedding's
        clipping = Clipping(self.setup.plan)
        for number in reversed(range(self.model.layers + 2)):
            part, upstream = self._backward(number, upstream, clipping.scale)
            every = ((f"{self.prefix}.{name}", value) for name, value in part.named_parameters())
            named: dict[str, Tensor] = {name: value for name, value in every if value.requires_grad}
            tied = self.model.tied and self.model.head and trained_parts(self.setup.plan, self.model.layers).embedding.weights
            if tied and number == self.model.layers + 1:
                shared = named.pop("head.logits.weight").grad
            elif tied and not number:
                assert shared is not None
                gradient = named[EMBEDDING].grad
                assert gradient is not None
                gradient += shared
            yield self._updated(named, clipping)

    def _backward(self, number: int, upstream: list[Tensor], scale: float) -> tuple[nn.Module, list[Tensor]]:
        """Gradients of a part's parameters and of its inputs, summed over microbatches."""
        part, inputs, result = self._part(number), self.inputs.pop() if number else self.inputs[0], []
        for index, x in enumerate(inputs):
            x = x.detach().requires_grad_(bool(number))
            y = self._call(part, number, index, x)
            if number == self.model.layers + 1:
                value = loss(y, self.labels[index]) / self.count
                self.loss += value.item()
                (value * scale).backward()  # type: ignore[no-untyped-call]
            elif y.requires_grad:  # not of an embedding that is frozen
                y.backward(upstream[index])
            if x.grad is not None:
                result.append(x.grad)
        return part, result

    def _updated(self, named: dict[str, Tensor], clipping: Clipping) -> Part:
        """The norm that clips is that of the run, and compared with this one at the end: this process knows its own only then."""
        before = {name: value.detach().float().clone() for name, value in named.items()}
        if not named:
            return Part({}, {}, {})
        optimizer = make_optimizer(self.setup.plan, named.values())
        gradients = read_by(optimizer, named.values())
        finite = clipping(map(Held, gradients), given=self.given)
        self.squares += sum(float(gradient.double().square().sum()) for gradient in gradients) / clipping.clipped**2
        gradients_there = {name: gradient.detach().float().clone() for name, gradient in zip(named, gradients, strict=True)}
        if finite:
            optimizer.step()
        return Part(gradients_there, before, {name: value.detach().float() for name, value in named.items()})


def distance(runner: Runner, losses: list[float]) -> Distance:
    """Compare what is left of the first step with one process. Every rank must call it; all get the same."""
    setup, comparison = runner.setup, Comparison(runner)
    own = runner.hook.clipping
    if own.norm is not None and not math.isfinite(own.norm):
        raise UserError(
            f"{setup.job.name}: gradients of the first step are not finite in {setup.plan.precision}: nothing to compare"
        )
    streamed, scale = Streamed(setup, own.norm), 0.0
    held: dict[str, list[tuple[Chunk, str]]] = {}
    for chunk in runner.chunks:
        for name in chunk.held:
            held.setdefault(original(setup.job.model.tied, chunk.global_name(name)), []).append((chunk, name))
    for part in streamed.parts():
        scale = max([scale, *(float(gradient.abs().max()) for gradient in part.gradients.values())])
        for where, right in part.gradients.items():
            for chunk, name in held.get(where, ()):
                comparison.add(chunk, name, right, part.before[where], part.after[where], scale)
    norm = streamed.norm if own.norm is not None else None
    return comparison.distance(losses, [streamed.loss], norm, streamed=True)


def needed(job: Job) -> float:
    """Bytes that the process holds: the largest part with gradients, states and copies in fp32, and inputs of all parts."""
    resolved, model = job.resolve(), job.model
    edge = model.padded_vocabulary * model.hidden
    largest = max(edge, (model.parameters - edge) // max(1, model.layers))
    tokens = resolved.sequence * job.plan.microbatch
    inputs = (model.layers + 2) * resolved.dp * resolved.microbatches * tokens * model.hidden * job.plan.bytes_per_element
    logits = 3 * 4 * tokens * model.padded_vocabulary
    return float(largest * (sum(job.plan.bytes_of_states.values()) + 4 * 4) + inputs + logits)
