"""One process that trains as an asynchronous pipeline does: each stage of a microbatch by the version of its parameters that the
pipeline has there.

Which versions these are follows from the order of passes alone, and none is of a later microbatch: so microbatches can be taken
one after the other.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.func import functional_call

from calibration.execute.asynchronous import version_of
from calibration.execute.buckets import wide
from calibration.execute.chunks import whole_model
from calibration.execute.clipping import Clipping, Held
from calibration.execute.optimizers import make_optimizer
from calibration.execute.packing import documents
from calibration.execute.reference.compare import Expected, read_by
from calibration.execute.setup import Setup


class Stage:
    """Parameters of a stage by the model's names, their optimizer, and versions that are still gone through."""

    def __init__(self, setup: Setup, number: int, named: dict[str, Tensor]) -> None:
        self.setup, self.number, self.named = setup, number, named
        self.optimizer = make_optimizer(setup.plan, [each for each in named.values() if each.requires_grad])
        self.clipping = Clipping(setup.plan)
        self.versions = {0: self._copied()}

    def _copied(self) -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in self.named.items()}

    def version(self, microbatch: int) -> dict[str, Tensor]:
        """That the microbatch goes through; older ones are forgotten."""
        wanted = version_of(self.setup, self.number, microbatch)
        self.versions = {version: values for version, values in self.versions.items() if version >= wanted}
        return self.versions[wanted]

    def update(self, gradients: dict[str, Tensor]) -> None:
        """The newest version with the mean gradients of all ranks."""
        for name, each in self.named.items():
            each.grad = gradients.get(name)
        if self.clipping(map(Held, read_by(self.optimizer, self.named.values()))):
            self.optimizer.step()
        self.versions[max(self.versions) + 1] = self._copied()


def stale(setup: Setup, steps: int) -> Expected:
    """Carry out `steps` steps on the data of the whole job."""
    net: Any = whole_model(setup).to(setup.device, setup.dtype)
    named, ends = dict(net.named_parameters()), list(accumulate(setup.resolved.layers))
    stages = [Stage(setup, number, names) for number, names in enumerate(_by_stage(named, ends))]
    count, dp = setup.resolved.microbatches, setup.resolved.dp
    every = 1 if setup.schedule.every_microbatch else count
    result = Expected(before={name: wide(value.detach()).clone() for name, value in named.items()})
    (tokens, labels), summed, losses = setup.data, dict[str, Tensor](), list[float]()
    for microbatch in range(steps * count):
        versions = [stage.version(microbatch) for stage in stages]
        leaves = {name: value.requires_grad_(named[name].requires_grad) for part in versions for name, value in part.items()}
        for rank in range(dp):
            net.number = setup.number(microbatch // count, rank, microbatch % count)
            net.documents = documents(setup, rank, microbatch % count)
            loss = net.loss(functional_call(net, leaves, (tokens[rank, microbatch % count],)), labels[rank, microbatch % count])
            (loss / (dp * every)).backward()
            losses.append(loss.item())
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                summed[name] = summed[name] + leaf.grad if name in summed else leaf.grad
                leaf.grad = None
        if not (microbatch + 1) % every:
            for stage in stages:
                stage.update(summed)
            result.gradients = {name: wide(value).clone() for name, value in summed.items()}
            summed = {}
    size = count * dp
    result.losses = [sum(losses[begin : begin + size]) / size for begin in range(0, len(losses), size)]
    result.after = {name: wide(value.detach()) for name, value in named.items()}
    return result


def _by_stage(named: dict[str, Tensor], ends: list[int]) -> list[dict[str, Tensor]]:
    """Parameters by stage; ends: of each the first layer that is behind it."""
    result: list[dict[str, Tensor]] = [{} for _ in ends]
    for name, parameter in named.items():
        part, _, rest = name.partition(".")
        number = {"embedding": 0, "head": len(ends) - 1}.get(part)
        result[bisect_right(ends, int(rest.partition(".")[0])) if number is None else number][name] = parameter
    return result
