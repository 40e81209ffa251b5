"""The same steps in one process, and how far a parallel run is from them.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from calibration.execute.buckets import wide
from calibration.execute.chunks import Chunk, original, whole_model
from calibration.execute.clipping import Clipping, Held
from calibration.execute.data_parallel import hook_class
from calibration.execute.data_parallel.local import outer_update
from calibration.execute.model import Transformer
from calibration.execute.optimizers import RATE, Masters, make_optimizer
from calibration.execute.packing import documents, one_by_one
from calibration.execute.runner import Runner
from calibration.execute.setup import Setup
from calibration.execute.traced.buffers import Buffers, apart
from calibration.execute.traced.net import Traced
from strategies.data_parallel import hooks

# allowed distance, relative to the largest element of a gradient, to the loss, and to the norm of all updates: rounding in
# another order, with a margin; 16-bit gradients and weights have 8 to 11 bits
TOLERANCE = {"fp64": 1e-6, "fp32": 1e-3, "tf32": 1e-2, "fp16": 3e-2, "bf16": 1e-1}
SUBNORMAL = (
    2.0**-24
)  # the smallest fp16: gradients that travel in 16 bits are rounded to multiples of it, on each rank and summed
QUIET = 1e-5  # gradients this small beside the largest are rounding noise, which Adam divides by itself


@dataclass
class Expected:
    """What one process computes."""

    losses: list[float] = field(default_factory=list)  # of each step, mean over all tokens
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the last step; empty where ranks train by themselves
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[int, list[Tensor]] = field(default_factory=dict)  # of each dp rank
    norm: float | None = None  # of the last step's gradients; where ranks train by themselves, of this one's


def expected(setup: Setup, steps: int) -> Expected:
    """Carry out `steps` steps on the data of the whole job."""
    result = Expected()
    start = whole_model(setup)
    result.before = {name: wide(value.detach()).clone() for name, value in start.named_parameters()}
    local = hooks[setup.plan.data_parallel].local
    replicas = [start] if not local else [whole_model(setup) for _ in range(setup.resolved.dp)]
    replicas = [net.to(setup.device, setup.dtype) for net in replicas]
    optimizers = [make_optimizer(setup.plan, filter(trained, net.parameters())) for net in replicas]
    modules = [hook_class(setup.plan).reference(setup, net) for net in replicas]
    clippings = [Clipping(setup.plan) for _ in replicas]
    momentum = [torch.zeros_like(value) for value in result.before.values()]
    every = list(range(setup.resolved.dp))
    shares = [[rank] for rank in every] if local else [every]
    buffers = [Buffers(net.states(), mine, setup.broadcasts_buffers) for net, mine in zip(replicas, shares, strict=True)]
    for round in range(steps):
        before = [wide(value.detach()).clone() for value in replicas[0].parameters()]
        for local_step in range(setup.resolved.local_steps):
            number = round * setup.resolved.local_steps + local_step
            parts = zip(replicas, modules, optimizers, clippings, buffers, strict=True)
            losses = [_step(setup, number, *arguments) for arguments in parts]
        result.losses.append(sum(losses) / len(losses))
        if local and setup.resolved.dp > 1:
            _agree(replicas, before, momentum, setup.plan.data_parallel == "diloco")
    result.norm = clippings[setup.replica % len(clippings)].norm
    if not local or setup.resolved.dp == 1:
        factor = clippings[0].factor if isinstance(optimizers[0], Masters) else 1.0
        named = replicas[0].named_parameters()
        result.gradients = {name: wide(value.grad) * factor for name, value in named if value.grad is not None}
    result.after = {name: wide(value.detach()) for name, value in replicas[0].named_parameters()}
    result.buffers = {rank: values for each in buffers for rank, values in each.of.items()}
    return result


def _step(
    setup: Setup,
    step: int,
    net: Transformer | Traced,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    clipping: Clipping,
    buffers: Buffers,
) -> float:
    """One step on the data of the dp ranks that have these buffers; the loss. module: what is called in place of `net`.

    Ranks whose norms are synchronised pass as one batch.
    """
    tokens, labels = setup.data
    ranks = [[*buffers.of]] if setup.plan.sync_norm else [[rank] for rank in buffers.of]
    microbatches = [(together, number) for together in ranks for number in range(setup.resolved.microbatches)]
    total = 0.0
    optimizer.zero_grad(set_to_none=True)
    buffers.begin()
    for place in microbatches:
        together, number = place
        last = place == microbatches[-1]
        net.number = setup.number(step, together[0], number)
        with (
            module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext(),
            buffers.as_of(together),
        ):
            x, right = tokens[together, number].flatten(0, 1), labels[together, number].flatten(0, 1)
            packed = documents(setup, together[0], number)
            alone = net.loss(module(x), right) if packed is None else one_by_one(net, module, cast(Tensor, x), right, packed)
            part = alone / len(microbatches)
            (part * clipping.scale).backward()  # type: ignore[no-untyped-call]
        total += part.item()
    if clipping(map(Held, read_by(optimizer, net.parameters()))):
        optimizer.step()
    return total


def trained(parameter: Tensor) -> bool:
    """Whether it has a gradient."""
    return parameter.requires_grad


def read_by(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that an optimizer reads: its own copies where weights have 16 bits."""
    readers = optimizer.take() if isinstance(optimizer, Masters) else parameters
    return [reader.grad for reader in readers if reader.grad is not None]


@torch.no_grad()
def _agree(replicas: Sequence[Transformer | Traced], start: list[Tensor], momentum: list[Tensor], outer: bool) -> None:
    """Average; for DiLoCo make the mean change an outer step. `start` are the parameters before the round."""
    means = [
        torch.stack([wide(value) for value in same]).mean(0) for same in zip(*(net.parameters() for net in replicas), strict=True)
    ]
    if outer:
        outer_update(start, momentum, [old - new for old, new in zip(start, means, strict=True)])
        means = start
    for net in replicas:
        for value, mean in zip(net.parameters(), means, strict=True):
            value.copy_(mean)


@dataclass
class Distance:
    """Relative distances of a parallel run from one process; gradient: None where no rank keeps whole gradients, norm: None where
    none is taken, buffers (running statistics): None where the model has none. streamed: the process had one layer at a time,
    and only the first step was compared.
    """

    loss: float
    gradient: float | None
    norm: float | None
    update: float
    worst: str  # parameter whose gradient is farthest
    losses: list[float]
    expected_losses: list[float]
    tolerance: float
    streamed: bool
    buffers: float | None = None

    @property
    def wrong(self) -> str | None:
        """What is too far off."""
        every = (
            ("loss", self.loss),
            ("gradient", self.gradient),
            ("norm of gradients", self.norm),
            ("update", self.update),
            ("running statistics", self.buffers),
        )
        for what, distance in every:
            if distance is not None and not distance <= self.tolerance:
                where = f" of {self.worst}" if what == "gradient" else ""
                return f"the {what}{where} differs by {distance:.2g} from one process; at most {self.tolerance:g} is rounding"
        return None


class Comparison:
    """Gathers distances parameter by parameter; ranks that share a parameter must add it in the same order."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.setup = runner, runner.setup
        compressed = self.setup.plan.data_parallel == "ddp_fp16"
        self.rounding = 2 * SUBNORMAL if compressed else 0.0
        self.tolerance = TOLERANCE["fp16" if compressed else "fp64" if self.setup.exact else self.setup.plan.precision]
        self.farthest, self.worst, self.off, self.moved, self.known = 0.0, "", 0.0, 0.0, True

    def add(self, chunk: Chunk, name: str, right: Tensor | None, before: Tensor, after: Tensor, scale: float) -> None:
        """One parameter that this rank holds. right: one process's gradient; scale: the largest element of all gradients."""
        parameter = chunk.held[name]
        held = self.runner.hook.gradient(parameter)
        gradient = None if held is None else chunk.whole(name, held)
        value = wide(self.runner.hook.value(chunk, name))
        steady = torch.ones_like(value, dtype=torch.bool)
        if right is not None:
            steady = right.abs() > QUIET * scale
            if gradient is not None:
                apart = max(0.0, float((wide(gradient) - right).abs().max()) - self.rounding)
                far = apart / max(float(right.abs().max()), QUIET * scale)
                where = original(self.setup.job.model.tied, chunk.global_name(name))
                self.farthest, self.worst = max((self.farthest, self.worst), (far, where))
        self.known &= (right is not None and gradient is not None) or not parameter.requires_grad
        self.off += float(((value - after) * steady).square().sum())
        self.moved += float(((after - before.to(value)) * steady).square().sum())

    def distance(self, losses: list[float], expected_losses: list[float], norm: float | None, streamed: bool) -> Distance:
        """Of all ranks: every rank must call it; all get the same. losses: of all steps, the expected ones of the first."""
        mine = (self.farthest, self.worst, self.off, self.moved, self.known)
        gathered: list[tuple[float, str, float, float, bool]] = [mine] * self.setup.place.world
        dist.all_gather_object(gathered, mine)
        farthest, worst = max((far, where) for far, where, *_ in gathered)
        moved = sum(rank[3] for rank in gathered)
        update = (sum(rank[2] for rank in gathered) / moved) ** 0.5 if moved else 0.0
        largest = max(map(abs, expected_losses))  # a few images are learnt by heart: what is left then is rounding, too
        loss = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=False)) / largest
        own = self.runner.hook.clipping.norm
        of_norm = None if own is None or norm is None else abs(own - norm) / norm
        known = all(rank[4] for rank in gathered)
        gradient = farthest if known else None
        return Distance(loss, gradient, of_norm, update, worst, losses, expected_losses, self.tolerance, streamed)


def distance(runner: Runner, losses: list[float], steps: int, right: Callable[[Setup, int], Expected] = expected) -> Distance:
    """Compare what is left of `steps` steps with one process, which is `right`. Every rank must call it; all get the same."""
    setup, comparison = runner.setup, Comparison(runner)
    reference = right(setup, steps)
    scale = max((float(gradient.abs().max()) for gradient in reference.gradients.values()), default=0.0)
    for chunk in runner.chunks:
        for name in chunk.held:
            where = original(setup.job.model.tied, chunk.global_name(name))
            comparison.add(chunk, name, reference.gradients.get(where), reference.before[where], reference.after[where], scale)
    result = comparison.distance(losses, reference.losses, reference.norm, streamed=False)
    # a bias in front of a normalisation has no gradient but rounding, of which Adam makes whole steps; no loss sees them
    drifting = any(0 < float(gradient.abs().max()) <= QUIET * scale for gradient in reference.gradients.values())
    return replace(result, buffers=_buffers_apart(runner, reference, RATE * steps if drifting else 0.0))


def _buffers_apart(runner: Runner, reference: Expected, slack: float) -> float | None:
    """The largest distance of any rank's buffers, less what their own drift can be."""
    mine = [state for chunk in runner.chunks for state in chunk.net.states()]
    if not mine:
        return None
    every = [0.0] * runner.setup.place.world
    dist.all_gather_object(every, apart(mine, reference.buffers[runner.setup.replica], slack))
    return max(every)


def exactly(setup: Setup, steps: int, loss: float) -> Distance:
    """Carry out the steps of a traced module in fp64, and compare these; `loss`: of the first step in the plan's precision.

    In fp32 sums in another order let ReLUs pass other numbers than in one process, now and then, which moves a gradient by
    percents: there would be nothing to compare after the first step.
    """
    fine = replace(setup, exact=True)
    runner = Runner(fine)
    losses = [mean_loss(fine, runner.step()) for _ in range(steps)]
    rounded = abs(loss / losses[0] - 1) / TOLERANCE[setup.plan.precision]
    compared = distance(runner, losses, steps)
    return replace(compared, loss=max(compared.loss, rounded * compared.tolerance))


def mean_loss(setup: Setup, losses: list[Tensor]) -> float:
    """Mean over microbatches and dp ranks; every rank must call it."""
    from torch.distributed.tensor import DTensor

    values = [float(value.full_tensor() if isinstance(value, DTensor) else value) for value in losses]
    total = torch.tensor([sum(values), float(len(values))], dtype=torch.float64, device=setup.device)
    dist.all_reduce(total)
    return float(total[0] / total[1])
