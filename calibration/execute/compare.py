"""The same steps in one process, and how far a parallel run is from them.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from calibration.execute.chunks import whole_model
from calibration.execute.data_parallel.local import outer_update
from calibration.execute.model import Transformer, loss
from calibration.execute.optimizers import make_optimizer
from calibration.execute.runner import Runner
from calibration.execute.setup import Setup
from strategies.data_parallel import hooks

# allowed distance, relative to the largest element of a gradient, to the loss, and to the norm of all updates: rounding in
# another order, with a margin; 16-bit gradients and weights have 8 to 11 bits
TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 3e-2, "bf16": 1e-1}
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


def expected(setup: Setup, steps: int) -> Expected:
    """Carry out `steps` steps on the data of the whole job."""
    result = Expected()
    start = whole_model(setup)
    result.before = {name: value.detach().float().clone() for name, value in start.named_parameters()}
    local = hooks[setup.plan.data_parallel].local
    replicas = [start] if not local else [whole_model(setup) for _ in range(setup.resolved.dp)]
    replicas = [net.to(setup.device, setup.dtype) for net in replicas]
    optimizers = [make_optimizer(setup.plan, net.parameters()) for net in replicas]
    momentum = [torch.zeros_like(value) for value in result.before.values()]
    every = list(range(setup.resolved.dp))
    for _ in range(steps):
        before = [value.detach().float().clone() for value in replicas[0].parameters()]
        shares = [[rank] for rank in every] if local else [every]
        for _ in range(setup.resolved.local_steps):
            losses = [_step(setup, *arguments) for arguments in zip(replicas, optimizers, shares, strict=True)]
        result.losses.append(sum(losses) / len(losses))
        if local and setup.resolved.dp > 1:
            _agree(replicas, before, momentum, setup.plan.data_parallel == "diloco")
    if not local or setup.resolved.dp == 1:
        result.gradients = {name: value.grad.float() for name, value in replicas[0].named_parameters() if value.grad is not None}
    result.after = {name: value.detach().float() for name, value in replicas[0].named_parameters()}
    return result


def _step(setup: Setup, net: Transformer, optimizer: torch.optim.Optimizer, share: list[int]) -> float:
    """One step on the data of these dp ranks; the loss."""
    tokens, labels = setup.data
    count, total = len(share) * setup.resolved.microbatches, 0.0
    optimizer.zero_grad(set_to_none=True)
    for rank in share:
        for sequence, label in zip(tokens[rank], labels[rank], strict=True):
            part = loss(net(sequence), label) / count
            part.backward()  # type: ignore[no-untyped-call]
            total += part.item()
    optimizer.step()
    return total


@torch.no_grad()
def _agree(replicas: list[Transformer], start: list[Tensor], momentum: list[Tensor], outer: bool) -> None:
    """Average; for DiLoCo make the mean change an outer step. `start` are the parameters before the round."""
    means = [
        torch.stack([value.float() for value in same]).mean(0)
        for same in zip(*(net.parameters() for net in replicas), strict=True)
    ]
    if outer:
        outer_update(start, momentum, [old - new for old, new in zip(start, means, strict=True)])
        means = start
    for net in replicas:
        for value, mean in zip(net.parameters(), means, strict=True):
            value.copy_(mean)


@dataclass
class Distance:
    """Relative distances of a parallel run from one process; gradient: None where no rank keeps whole gradients."""

    loss: float
    gradient: float | None
    update: float
    worst: str  # parameter whose gradient is farthest
    losses: list[float]
    expected_losses: list[float]
    tolerance: float

    @property
    def wrong(self) -> str | None:
        """What is too far off."""
        for what, distance in (("loss", self.loss), ("gradient", self.gradient), ("update", self.update)):
            if distance is not None and not distance <= self.tolerance:
                where = f" of {self.worst}" if what == "gradient" else ""
                return f"the {what}{where} differs by {distance:.2g} from one process; at most {self.tolerance:g} is rounding"
        return None


def distance(runner: Runner, losses: list[float], steps: int) -> Distance:
    """Compare what is left of `steps` steps with one process. Every rank must call it; all get the same."""
    setup = runner.setup
    reference = expected(setup, steps)
    farthest, worst, off, all_of_it = 0.0, "", 0.0, 0.0
    known = bool(reference.gradients)
    compressed = setup.plan.data_parallel == "ddp_fp16"
    step = 2 * SUBNORMAL if compressed else 0.0
    scale = max((float(gradient.abs().max()) for gradient in reference.gradients.values()), default=0.0)
    for chunk in runner.chunks:
        for name, parameter in chunk.held.items():
            held = runner.hook.gradient(parameter)
            gradient = None if held is None else chunk.whole(name, held)
            value, where = chunk.whole(name, parameter.detach()).float(), _name(setup, chunk.global_name(name))
            steady = torch.ones_like(value, dtype=torch.bool)
            if where in reference.gradients:
                right = reference.gradients[where]
                steady = right.abs() > QUIET * scale
                if gradient is None:
                    known = False
                else:
                    apart = max(0.0, float((gradient.float() - right).abs().max()) - step)
                    far = apart / max(float(right.abs().max()), QUIET * scale)
                    farthest, worst = max((farthest, worst), (far, where))
            off += float(((value - reference.after[where]) * steady).square().sum())
            all_of_it += float(((reference.after[where] - reference.before[where].to(value)) * steady).square().sum())
    distances: list[tuple[float, str, float, float, bool]] = [(farthest, worst, off, all_of_it, known)]
    gathered: list[tuple[float, str, float, float, bool]] = distances * setup.place.world
    dist.all_gather_object(gathered, distances[0])
    farthest, worst = max((far, where) for far, where, *_ in gathered)
    update = (sum(g[2] for g in gathered) / sum(g[3] for g in gathered)) ** 0.5
    behind = max(abs(a - b) / abs(b) for a, b in zip(losses, reference.losses, strict=True))
    known = all(g[4] for g in gathered)
    allowed = TOLERANCE["fp16" if compressed else setup.plan.precision]
    return Distance(behind, farthest if known else None, update, worst, losses, reference.losses, allowed)


def _name(setup: Setup, name: str) -> str:
    """A tied head in a stage of its own has the embedding's matrix."""
    return "embedding.tokens.weight" if name == "head.logits.weight" and setup.job.model.tied else name


def mean_loss(setup: Setup, losses: list[Tensor]) -> float:
    """Mean over microbatches and dp ranks; every rank must call it."""
    from torch.distributed.tensor import DTensor

    values = [float(value.full_tensor() if isinstance(value, DTensor) else value) for value in losses]
    total = torch.tensor([sum(values), float(len(values))], dtype=torch.float64, device=setup.device)
    dist.all_reduce(total)
    return float(total[0] / total[1])
