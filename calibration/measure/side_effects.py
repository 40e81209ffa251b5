"""What work costs besides its own time: compute beside a collective, PyTorch's wrappers around modules, memory of the library.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibration.execute.model import Transformer
from calibration.execute.model.tensor_parallel import tensor_parallel
from calibration.launch.groups import new_group
from calibration.measure.bench import LEAST, Action, Bench, Probe, Reading
from calibration.measure.grid import Grid
from calibration.measure.layer_check import model

LAYERS = 8  # of the tiny module that wrappers are measured on
WIDTHS = (32, 1024)  # of its layers: what a wrapper costs at all, and what it costs per byte
WRAPPERS = ("ddp", "fsdp2")
CUT, DEPTHS = ((64, 16), (512, 256)), (1, 3)  # features and tokens, and layers, of transformers cut for a group of one
MICROBATCHES = 2  # whose backward passes are split, or not
PER_LAYER = 4  # collectives that a layer makes, forward and backward; and its matrices, of which query, key and value are one


def probes(grid: Grid, bench: Bench) -> list[Probe]:
    """Overlap where there is somebody to talk to, wrappers and footprints."""
    alone = bench.place.world == 1
    result = [Probe("overlap", {"kind": kind}, _overlap(kind, grid)) for kind in ("compute", "collective") if not alone]
    result += [
        Probe("wrapping", {"wrapper": name, "width": width}, _wrapping(name, width), rounds=1)
        for name in WRAPPERS
        for width in WIDTHS
    ]
    result += [
        Probe("wrapping", {"wrapper": "dtensor", "width": width, "tokens": tokens}, _tensor_parallel(width, tokens), rounds=1)
        for width, tokens in CUT
    ]
    result += [
        Probe("wrapping", {"wrapper": "split", "width": width, "tokens": tokens}, _split(width, tokens), rounds=1)
        for width, tokens in CUT
    ]
    return result + [
        Probe("footprint", {"kind": kind}, run) for kind, run in (("reserve", _reserve),) if bench.place.compute.ordered
    ]


def _overlap(kind: str, grid: Grid) -> Callable[[Bench], Reading]:
    """compute: by how much compute is slower while a collective runs, so that what is left of the overlap is right: with C alone,
    K a collective after compute, and B both at once, C + K − B of C's work is done during K. collective: B's over K.
    """

    def run(bench: Bench) -> Reading:
        left, right = (torch.randn(grid.side, grid.side, device=bench.device).to(bench.dtype) for _ in range(2))
        buffer = torch.zeros(grid.overlapped // 4, device=bench.device)

        def collective() -> None:
            dist.all_reduce(buffer)

        def product() -> Any:
            return left @ right

        seconds = bench.repetitions(product)[1]
        about = bench.repetitions(collective, seconds)[1]
        products = max(4, int(3 * about / seconds))

        def compute() -> None:
            for _ in range(products):
                product()

        def both() -> None:
            work = dist.all_reduce(buffer, async_op=True)
            compute()
            work.wait()

        def beside() -> None:
            work = dist.all_reduce(buffer, async_op=True)
            product()
            work.wait()

        count = max(5, int(2 * bench.budget / (3 * about + 1e-6)))
        rows = []
        for _ in range(min(count, 30)):  # one after the other, so that what changes meanwhile changes all
            bench.barrier()
            alone, after = bench.times(compute, 1)[0], bench.times(collective, 1, product)[0]
            rows.append((alone, after, bench.times(both, 1)[0], bench.times(beside, 1)[0]))
        c, k, b, s = (float(value) for value in np.median(bench.gather(np.median(rows, axis=0).tolist()), axis=0))
        during = max(c + k - b, 0.01 * k)  # of compute's work, done while the collective ran
        value = max(1.0, k / during) if kind == "compute" else max(1.0, s / k)
        return Reading(value, count=len(rows))

    return run


def _wrapping(name: str, width: int) -> Callable[[Bench], Reading]:
    """Seconds that a wrapper adds per collective it makes, in a group of this rank alone, forward and backward of tiny layers."""

    def run(bench: Bench) -> Reading:
        alone = _alone(bench)
        plain, wrapped = _chain(width, bench), _chain(width, bench)
        net, collectives = _wrapped(name, wrapped, alone, bench)
        x = torch.randn(1, width, device=bench.device)

        pair = _step(plain, x), _step(net, x)
        count = max(bench.repetitions(function)[0] for function in pair)
        count = int(np.clip(bench.gather([count]).max(), 10, 60))
        times = np.array([[_seconds(function, bench) for function in pair] for _ in range(count)])
        added = max(0.0, float(np.median(times[:, 1] - times[:, 0]))) / collectives
        both = bench.gather([added])
        return Reading(float(both.mean()), float(both.min()), 0.0, count)

    return run


def _seconds(action: Callable[[], None], bench: Bench) -> float:
    bench.finish()
    start = bench.clock()
    action()
    bench.finish()
    return bench.clock() - start


_ALONE: list[Any] = []  # the group of this rank alone: made once


def _alone(bench: Bench) -> Any:
    if not _ALONE:
        _ALONE.append(new_group([bench.place.rank], alone=True))
    return _ALONE[0]


def _chain(width: int, bench: Bench) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))).to(bench.device)


def _wrapped(name: str, chain: nn.Sequential, alone: Any, bench: Bench) -> tuple[nn.Module, int]:
    """The chain as PyTorch wraps it, and how many collectives a step of it makes."""
    if name == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        size = next(chain.parameters()).numel() * 4
        return DistributedDataParallel(chain, process_group=alone, bucket_cap_mb=size / 2**20), LAYERS
    from torch.distributed.fsdp import fully_shard

    mesh = _mesh(bench)
    for layer in chain:
        fully_shard(layer, mesh=mesh)
    fully_shard(chain, mesh=mesh)
    return chain, 3 * LAYERS  # gathered forward and backward, reduce-scattered


def _mesh(bench: Bench) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.tensor([bench.place.rank])
    return DeviceMesh.from_group(_alone(bench), bench.place.device, mesh=ranks, mesh_dim_names=("one",))


def _tensor_parallel(width: int, tokens: int) -> Callable[[Bench], Reading]:
    """Seconds that tensor parallelism adds for each collective, besides the collective: DTensor's dispatch of a layer's operators
    and its copies, as the difference of a transformer cut for a group of one, where it skips the collectives, and a plain one;
    and what the functional collective costs that it would have called.
    """

    def run(bench: Bench) -> Reading:
        from torch.distributed._functional_collectives import all_reduce

        group = _alone(bench)
        x = torch.randn(1, tokens, width, device=bench.device, requires_grad=True)

        def net(layers: int) -> Transformer:
            return Transformer(model(width, layers), tokens, embedding=False, head=False).to(bench.device)

        plain, cut = [net(layers) for layers in DEPTHS], [tensor_parallel(net(layers), _mesh(bench)) for layers in DEPTHS]

        def called() -> None:
            for _ in range(LAYERS):
                all_reduce(x.detach(), "sum", group).view(-1)  # which waits

        actions = (*(_step(each, x) for each in (*plain, *cut)), called)
        count = _few(bench, actions)
        times = np.median([[_seconds(action, bench) for action in actions] for _ in range(count)], axis=0)
        layer = (times[3] - times[2] - times[1] + times[0]) / (DEPTHS[1] - DEPTHS[0])
        both = bench.gather([max(0.0, float(layer)) / PER_LAYER + float(times[4]) / LAYERS])
        return Reading(float(both.mean()), float(both.min()), 0.0, count)

    return run


def _split(width: int, tokens: int) -> Callable[[Bench], Reading]:
    """Seconds that a backward pass in two halves takes longer for each matrix than one: of two microbatches of a transformer's
    layers, the second of which adds to the gradients of the first, by the functions that torch.distributed.pipelining calls.
    Autograd is asked for each parameter, and the gradients of outputs that are kept for it cannot make place for each other.
    """

    def run(bench: Bench) -> Reading:
        from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

        net = Transformer(model(width, DEPTHS[1]), tokens, embedding=False, head=False).to(bench.device)
        x, gradient = (torch.randn(1, tokens, width, device=bench.device) for _ in range(2))
        parameters = list(net.parameters())

        def step(halves: bool) -> float:
            seconds = 0.0
            for _ in range(MICROBATCHES):
                entered = x.clone().requires_grad_()
                left = net(entered)
                bench.finish()
                start = bench.clock()
                if halves:
                    _, groups = stage_backward_input([left], [gradient], [entered], iter(parameters))
                    stage_backward_weight(iter(parameters), groups)
                else:
                    stage_backward((left,), (gradient,), (entered,))
                bench.finish()
                seconds += bench.clock() - start
            for parameter in parameters:
                parameter.grad = None
            return seconds

        count = _few(bench, [lambda: step(True)])
        times = np.array([(step(True), step(False)) for _ in range(count)])
        added = max(0.0, float(np.median(times[:, 0] - times[:, 1]))) / (MICROBATCHES * DEPTHS[1] * PER_LAYER)
        both = bench.gather([added])
        return Reading(float(both.mean()), float(both.min()), 0.0, count)

    return run


def _few(bench: Bench, actions: Sequence[Action]) -> int:
    """How often whole steps are timed: 10 to 30 times, less where a calibration is late."""
    asked = bench.gather([max(bench.repetitions(action)[0] for action in actions)]).max()
    return int(np.clip(asked, max(LEAST, bench.pace * 10), 30))


def _step(net: nn.Module, x: Tensor) -> Callable[[], None]:
    def go() -> None:
        net(x).sum().backward()
        for parameter in net.parameters():
            parameter.grad = None

    return go


def _reserve(bench: Bench) -> Reading:
    """Memory that the allocator holds beyond its tensors at their peak, as a fraction, over a step of uneven layers."""
    with bench.place.compute.memory() as memory:
        _uneven(bench)
    return Reading(max(0.0, memory.reserved / memory.peak - 1))


def _uneven(bench: Bench) -> None:
    net = nn.Sequential(
        *(layer for width in (768, 3072, 1536, 2304) for layer in (nn.Linear(1024, width), nn.GELU(), nn.Linear(width, 1024)))
    )
    net = net.to(bench.device)
    for rows in (512, 2048, 1024):
        net(torch.randn(rows, 1024, device=bench.device)).sum().backward()


def footprints(bench: Bench) -> list[tuple[str, float]]:
    """Bytes of the process before tensors ("context") and what a communicator adds with its first collectives.

    Called before anything else is measured. One communicator of NCCL exists by then: its share is taken off the context.
    """
    torch.ones(1, device=bench.device)
    before = bench.place.compute.held()
    everybody = new_group(range(bench.place.world))
    held = torch.zeros(2**20 // 4, device=bench.device)
    here = bench.place.compute
    own = 0 if here.ordered else held.nbytes
    for _ in range(3):
        dist.all_reduce(held, group=everybody)
    bench.finish()
    added = max(0.0, bench.place.compute.held() - before - own)
    context = max(0.0, before - added) if here.communicates is not None else before  # a communicator is there by then
    worst = bench.gather([context, added]).max(axis=0)
    return [("context", float(worst[0])), ("communicator", float(worst[1]))]
