"""Parameter servers over send and receive: workers push gradients and get parameters back, synchronously or not.

PyTorch has none. The last ranks are servers and share the model's parameters, as one flat tensor, equally; the others are workers
with the whole model. Synchronous: an update waits for the gradients of all workers and uses their mean (Li et al. 2014, OSDI).
Asynchronous: a server updates with each gradient as it comes; with a bound, a worker that is more than so many steps ahead of the
slowest waits for its parameters (Ho et al. 2013, stale synchronous parallel). The order in which gradients came is kept, and one
process replays it: so also an asynchronous run has one right result.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibration.execute.chunks import whole_model
from calibration.execute.measured.counting import Counting
from calibration.execute.model import SEED, loss
from calibration.execute.optimizers import make_optimizer
from calibration.execute.reference.compare import QUIET, TOLERANCE
from calibration.execute.setup import Setup
from calibration.launch.place import Place
from strategies.job import Job

Order = list[int]  # workers, as their gradients came


@dataclass
class Task:
    """What all ranks know. bound: 0 is synchronous, None unbounded."""

    place: Place
    job: Job
    servers: int
    bound: int | None
    steps: int
    started: float = 0.0
    ages: list[int] = field(default_factory=list)  # of a server's gradients: updates since their parameters were sent

    def __post_init__(self) -> None:
        self.workers = self.place.world - self.servers
        self.setup = Setup.of(self.place, self.job)
        self.net = whole_model(self.setup).to(self.setup.device, self.setup.dtype)
        self.parameters = list(self.net.parameters())
        self.size = -(-sum(parameter.numel() for parameter in self.parameters) // self.servers)  # elements of a server
        plan = self.setup.plan
        shape = (self.workers, self.setup.resolved.microbatches, plan.microbatch, self.setup.resolved.sequence + 1)
        tokens = torch.randint(self.job.model.vocabulary, shape, generator=torch.Generator().manual_seed(SEED))
        self.tokens = tokens.to(self.setup.device)

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors as one, with zeros up to a multiple of the servers."""
        result = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return nn.functional.pad(result, (0, self.size * self.servers - result.numel()))

    @torch.no_grad()
    def load(self, values: Tensor) -> None:
        """Parameters from one flat tensor."""
        offset = 0
        for parameter in self.parameters:
            parameter.copy_(values[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()

    def gradient(self, worker: int) -> tuple[Tensor, float]:
        """Of a worker's data at the loaded parameters, and the loss."""
        self.net.zero_grad(set_to_none=True)
        total, count = 0.0, len(self.tokens[worker])
        for tokens in self.tokens[worker]:
            part = loss(self.net(tokens[:, :-1]), tokens[:, 1:]) / count
            part.backward()  # type: ignore[no-untyped-call]
            total += part.item()
        return self.flat([cast(Tensor, parameter.grad) for parameter in self.parameters]), total


class Shard:
    """A server's part of the parameters, and its optimizer."""

    def __init__(self, task: Task, number: int) -> None:
        self.value = nn.Parameter(task.flat(task.parameters).split(task.size)[number].clone())  # type: ignore[no-untyped-call]
        self.optimizer = make_optimizer(task.setup.plan, [self.value])

    def update(self, gradient: Tensor) -> None:
        """One step of the optimizer."""
        self.value.grad = gradient
        self.optimizer.step()


def work(place: Place, job: Job, servers: int, bound: int | None, steps: int) -> dict[str, Any]:
    """Train for `steps` steps of every worker; plain data of this rank."""
    task = Task(place, job, servers, bound, steps)
    task.setup.barrier()
    task.started = time.perf_counter()
    with Counting() as counting:
        if place.rank < task.workers:
            result: Any = _worker(task)
        else:
            result = (_synchronous if bound == 0 else _asynchronous)(task, Shard(task, place.rank - task.workers))
    task.setup.barrier()
    seconds = time.perf_counter() - task.started
    everybody: list[Any] = [None] * place.world
    dist.all_gather_object(everybody, result)
    answer: dict[str, Any] = {
        "seconds": seconds,
        "sent": sum(operation.sent for operation in counting.moved) / steps,
        "ages": task.ages,
    }
    if place.rank == 0:
        answer |= _compare(task, everybody)
    dist.barrier()
    return answer


def _worker(task: Task) -> list[float]:
    """Gradient out, parameters in; the losses."""
    values, losses = task.flat(task.parameters), []
    for _ in range(task.steps):
        gradient, step_loss = task.gradient(task.place.rank)
        losses.append(step_loss)
        pieces = list(zip(gradient.split(task.size), values.split(task.size), strict=True))  # type: ignore[no-untyped-call]
        pushed = [dist.isend(out, task.workers + server) for server, (out, _) in enumerate(pieces)]
        pulled = [dist.irecv(into, task.workers + server) for server, (_, into) in enumerate(pieces)]
        for request in (*pushed, *pulled):
            assert request is not None
            request.wait()
        task.load(values)
    return losses


def _synchronous(task: Task, shard: Shard) -> tuple[Order, Tensor]:
    """The mean of everybody's gradients, then everybody's parameters."""
    gradients = torch.empty(task.workers, task.size, dtype=shard.value.dtype, device=shard.value.device)
    for _ in range(task.steps):
        requests = [dist.irecv(gradients[worker], worker) for worker in range(task.workers)]
        for request in requests:
            assert request is not None
            request.wait()
        shard.update(gradients.mean(0))
        task.ages += [0] * task.workers
        requests = [dist.isend(shard.value.detach(), worker) for worker in range(task.workers)]
        for request in requests:
            assert request is not None
            request.wait()
    return [], shard.value.detach().cpu()


def _asynchronous(task: Task, shard: Shard) -> tuple[Order, Tensor]:
    """Each gradient as it comes; parameters to all who are not too far ahead."""
    order: Order = []
    done, waiting, read = [0] * task.workers, list[int](), [0] * task.workers
    gradient = torch.empty(task.size, dtype=shard.value.dtype, device=shard.value.device)
    for _ in range(task.steps * task.workers):
        worker = dist.recv(gradient)
        shard.update(gradient.clone())
        task.ages.append(len(order) - read[worker])
        order.append(worker)
        done[worker] += 1
        waiting.append(worker)
        for worker in list(waiting):
            if task.bound is None or done[worker] - min(done) <= task.bound:
                waiting.remove(worker)
                read[worker] = len(order)
                dist.send(shard.value.detach(), worker)
    return order, shard.value.detach().cpu()


def _compare(task: Task, everybody: list[Any]) -> dict[str, Any]:
    """Replay in one process what came in which order."""
    task.load(task.flat(list(whole_model(task.setup).parameters())).to(task.setup.device))
    start = task.flat(task.parameters).cpu().float()
    orders = [order for order, _ in everybody[task.workers :]]
    replayed, losses, largest = _synchronous_replay(task) if task.bound == 0 else _replay(task, orders)
    final = torch.cat([value for _, value in everybody[task.workers :]]).float()
    steady = largest.cpu() > QUIET * float(largest.max())
    right = replayed.cpu().float()
    off = float(((final - right) * steady).norm() / ((right - start) * steady).norm())
    apart = max(
        abs(a - b) / b for mine, theirs in zip(everybody, losses, strict=False) for a, b in zip(mine, theirs, strict=True)
    )
    return {
        "update": off,
        "loss": apart,
        "tolerance": TOLERANCE[task.setup.plan.precision],
        "losses": [sum(step) / len(step) for step in zip(*everybody[: task.workers], strict=True)],
    }


Replayed = tuple[Tensor, list[list[float]], Tensor]  # parameters, losses of each worker, largest size of each gradient element


def _synchronous_replay(task: Task) -> Replayed:
    shards = [Shard(task, number) for number in range(task.servers)]
    losses: list[list[float]] = [[] for _ in range(task.workers)]
    largest = torch.zeros(task.size * task.servers, device=task.setup.device)
    for _ in range(task.steps):
        gradients = []
        for worker in range(task.workers):
            gradient, step_loss = task.gradient(worker)
            gradients.append(gradient)
            losses[worker].append(step_loss)
        mean = torch.stack(gradients).mean(0)
        largest = torch.maximum(largest, mean.abs().float())
        for shard, piece in zip(shards, mean.split(task.size), strict=True):  # type: ignore[no-untyped-call]
            shard.update(piece)
        task.load(torch.cat([shard.value.detach() for shard in shards]))
    return torch.cat([shard.value.detach() for shard in shards]), losses, largest


def _replay(task: Task, orders: list[Order]) -> Replayed:
    """Servers' orders differ: a gradient is made when its worker has the parameters of all servers.

    A server's bound may send parameters later than the gradient came; then others have updated them in between.
    """
    shards = [Shard(task, number) for number in range(task.servers)]
    begin = task.flat(task.parameters)
    held = [list(begin.split(task.size)) for _ in range(task.workers)]  # type: ignore[no-untyped-call]
    gradients: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    losses: list[list[float]] = [[] for _ in range(task.workers)]
    largest = torch.zeros(task.size * task.servers, device=task.setup.device)
    position = [0] * task.servers
    done = [[0] * task.workers for _ in range(task.servers)]
    answered = [[0] * task.workers for _ in range(task.servers)]
    while any(at < len(order) for at, order in zip(position, orders, strict=True)):
        for worker in range(task.workers):
            step = len(losses[worker])
            if step < task.steps and all(answers[worker] == step for answers in answered):
                task.load(torch.cat(held[worker]))
                gradient, step_loss = task.gradient(worker)
                losses[worker].append(step_loss)
                largest = torch.maximum(largest, gradient.abs().float())
                gradients[worker, step] = tuple(gradient.split(task.size))  # type: ignore[no-untyped-call]
        for number, shard in enumerate(shards):
            while position[number] < len(orders[number]):
                worker = orders[number][position[number]]
                if (worker, done[number][worker]) not in gradients:
                    break
                shard.update(gradients[worker, done[number][worker]][number])
                done[number][worker] += 1
                position[number] += 1
                for one_worker in range(task.workers):
                    ahead = done[number][one_worker] - min(done[number])
                    if answered[number][one_worker] < done[number][one_worker] and (task.bound is None or ahead <= task.bound):
                        answered[number][one_worker] += 1
                        held[one_worker][number] = shard.value.detach().clone()
    return torch.cat([shard.value.detach() for shard in shards]), losses, largest
