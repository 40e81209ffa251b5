"""A plan's training step in PyTorch itself, as one of many ranks, the others fake: what it sends and what it holds.

Its tensors are real ones, which are tiny: to compute with them takes a tenth of what fake tensors take to find out their shapes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from strategies.models.model import Model
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from tests.conftest import LLAMA_LAYER

GPT: dict[str, Any] = {"name": "gpt", "hidden": 64, "layers": 2, "heads": 8, "vocabulary": 512, "context": 32}
LLAMA_FIELDS: dict[str, Any] = {
    "name": "llama",
    "kv_heads": 4,
    "ffn": 96,
    **LLAMA_LAYER,
}
LLAMA = GPT | LLAMA_FIELDS
UNITS = (("root_unit",), ("keep_last_unit",), ("root_unit", "keep_last_unit"))  # of FSDP2, options that keep some gathered
AXES = ("pp", "replica", "dp", "tp")  # outermost first
ZRO = "zero_redundancy_optimizer"


class Rehearsed(NamedTuple):
    """What one rank does in its second step."""

    sent: dict[str, float]  # bytes by axis
    operations: dict[tuple[str, str, float], int]  # (axis, operation, full buffer in bytes) -> how often
    peak: float  # bytes


def compiled_once(place: Any, *arguments: Any) -> None:
    """A rank's work in which Inductor compiles the layers of one job. Those of the others are traced and differentiated alike,
    and then run by PyTorch's own operators: C++ of theirs says nothing more.
    """
    from torch import nn

    from calibration.execute.worker import work

    left, compiled = ["inductor"], nn.Module.compile
    nn.Module.compile = lambda self: compiled(self, backend=left.pop() if left else "aot_eager")  # type: ignore[method-assign]
    work(place, *arguments)


@pytest.fixture(scope="session")
def rehearse() -> Callable[..., Rehearsed]:
    """rehearse(model, gpus, stage=0, **plan): one step of PyTorch's own parts, each as its documentation uses it."""

    def step(model: dict[str, Any], gpus: int, stage: int = 0, **fields: Any) -> Rehearsed:
        built, plan = Model(**model), Plan(**{"kernels": "torch"} | fields)
        resolved = Resolved.of(plan, built, gpus)
        with _ranks(gpus, stage * gpus // plan.pp):
            return _steps(built, resolved, _meshes(resolved), stage)

    return step


@contextlib.contextmanager
def _ranks(world: int, rank: int) -> Iterator[None]:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _meshes(plan: Resolved) -> Any:
    """The device mesh, and its slices by axis."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (plan.pp, plan.replicas, plan.dp // plan.replicas, plan.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    return mesh, {axis: mesh[axis] for axis in AXES} | {"hsdp": mesh["replica", "dp"]}


def _steps(model: Model, plan: Resolved, meshes: Any, stage: int) -> Rehearsed:
    import torch.distributed as dist

    from calibration.devices.holding import Holding
    from calibration.execute.measured.counting import Counting

    with Holding() as holding:
        train = _trainer(model, plan, meshes, stage)
        train()
        holding.peak = holding.held
        with Counting() as counting:
            train()
    mesh, by_axis = meshes
    axis_of = {
        frozenset(dist.get_process_group_ranks(by_axis[axis].get_group())): axis
        for axis in AXES
        if mesh.size(AXES.index(axis)) > 1
    }
    sent, operations = Counter[str](), Counter[tuple[str, str, float]]()
    for collective in counting.moved:
        axis = "pp" if collective.operation == "send" else axis_of[frozenset(collective.ranks)]
        sent[axis] += collective.sent
        operations[axis, collective.operation, collective.bytes] += 1
    return Rehearsed(dict(sent), dict(operations), holding.peak)


def _trainer(model: Model, plan: Resolved, meshes: Any, stage: int) -> Callable[[], None]:
    import torch
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import loss_parallel

    from calibration.execute.model import Transformer, loss
    from calibration.execute.model.tensor_parallel import tensor_parallel
    from calibration.execute.recomputation import Recomputation

    fields, (_, mesh) = plan, meshes
    first = sum(plan.layers[:stage])
    net = Transformer(
        model,
        plan.sequence,
        range(first, first + plan.layers[stage]),
        embedding=stage == 0,
        head=stage == fields.pp - 1,
        attention=fields.attention,
        recompute=Recomputation.of(plan),
    )
    if fields.tp > 1:
        tensor_parallel(net, mesh["tp"], fields.sequence_parallel)
    module = _data_parallel(net, plan, mesh)
    optimizer = _optimizer(module, plan, mesh)
    batch = plan.global_batch // plan.dp
    tokens = torch.randint(0, model.vocabulary, (batch, plan.sequence))
    passes = _pipeline(module, plan, mesh, stage, tokens, model) if fields.pp > 1 else None

    def train() -> None:
        with loss_parallel() if fields.tp > 1 else contextlib.nullcontext():
            if passes:
                passes()
            else:
                for number, part in enumerate(tokens.split(fields.microbatch)):
                    last = number == plan.microbatches - 1
                    if fields.syncs_gradients == "last":
                        module.set_requires_gradient_sync(last)
                        module.set_reshard_after_backward(last or bool(fields.reshard_after_backward))
                    with (
                        module.no_sync()
                        if fields.data_parallel in ("ddp", ZRO) and plan.dp > 1 and not last
                        else contextlib.nullcontext()
                    ):
                        loss(module(part), part).backward()
        if fields.sequence_parallel:  # once: an optimizer would sum partial gradients at each use
            for parameter in net.parameters():
                if isinstance(parameter.grad, DTensor) and parameter.grad.placements[-1].is_partial():
                    parameter.grad = parameter.grad.redistribute(placements=[*parameter.grad.placements[:-1], Replicate()])
        optimizer.step()
        optimizer.zero_grad(set_to_none=fields.kernel_set.frees_gradients)

    return train


def _data_parallel(net: Any, plan: Resolved, mesh: Any) -> Any:
    import torch
    import torch.distributed as dist

    if plan.dp == 1:
        return net
    if plan.data_parallel == "zero3":
        from torch.distributed.fsdp import fully_shard

        over = mesh["hsdp"] if plan.replicas > 1 else mesh["dp"]
        kernels = plan.kernel_set
        units = [part for part in (net.embedding, *net.layers, net.head) if part is not None]
        units = list(net.layers) if net.tied or kernels.root_unit else units
        for part in units:
            stays = kernels.keeps_last_unit and part is units[-1] and not (net.tied and not kernels.root_unit)
            fully_shard(part, mesh=over, reshard_after_forward=plan.reshard and not stays)
        if kernels.root_unit:
            return fully_shard(net, mesh=over)
        return fully_shard(net, mesh=over, reshard_after_forward=plan.reshard and not kernels.keeps_last_unit)
    group = mesh["dp"].get_group()
    ddp = torch.nn.parallel.DistributedDataParallel(
        net,
        device_mesh=mesh["dp"],
        init_sync=False,
        gradient_as_bucket_view=plan.kernel_set.bucket_views,
        broadcast_buffers=False,
        bucket_cap_mb=None if plan.bucket is None else plan.bucket / 2**20,
    )
    ddp.reducer = _Kept(ddp.reducer)

    def hook(_: Any, bucket: Any) -> Any:
        """What DDP does by itself, which needs real work objects."""
        dist.all_reduce(bucket.buffer(), group=group)
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__ = {}
    ddp.register_comm_hook(None, hook)
    return ddp


class _Kept:
    """DDP's reducer without the second look at the order of gradients, which reads values."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _optimizer(module: Any, plan: Resolved, mesh: Any) -> Any:
    import torch

    if plan.data_parallel == ZRO and plan.dp > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, mesh["dp"].get_group(), True)
    return torch.optim.Adam(module.parameters())


def _pipeline(module: Any, plan: Resolved, mesh: Any, stage: int, tokens: Any, model: Model) -> Callable[[], None]:
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    from calibration.execute.model import loss

    fields = plan
    features = torch.empty(fields.microbatch, plan.sequence, model.hidden, requires_grad=True)
    logits = torch.empty(fields.microbatch, plan.sequence, model.padded_vocabulary)

    class Voted(PipelineStage):  # stages vote whether shapes are known; here they are, and nobody else votes
        def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
            return SimpleNamespace(item=lambda: 1)

        _warmup_backward_result = _warmup_forward_vote

    schedule_of = Voted(
        module,
        stage,
        fields.pp,
        tokens.device,
        input_args=tokens[: fields.microbatch] if stage == 0 else features,
        output_args=logits if stage == fields.pp - 1 else features,
        group=mesh["pp"].get_group(),
    )
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[fields.schedule]
    schedule = kind(schedule_of, plan.microbatches, loss, scale_grads=False)
    given = (tokens,) if stage == 0 else ()
    target = {"target": tokens} if stage == fields.pp - 1 else {}
    return lambda: schedule.step(*given, **target, return_outputs=False)
