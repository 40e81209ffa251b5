"""torch.nn.DataParallel: one process drives all GPUs of one node with threads; only GPU 0 keeps and updates the model.

github.com/pytorch/pytorch torch/nn/parallel/{data_parallel,replicate,_functions}.py, torch/csrc/cuda/comm.cpp: every forward pass
scatters the inputs, broadcasts all parameters (NCCL, 10 MiB a piece) and gathers the outputs on GPU 0, where the loss is made;
the backward pass scatters the outputs' gradients and, once every GPU has all of its gradients, reduces them to GPU 0: nothing
hides behind compute. Each microbatch moves Ψ out and Ψ back; buffers of a traced module go out with the parameters. The threads
share the interpreter lock: what Python does before a launch of the forward pass adds up over the GPUs (`Program.threads`; also
before the few of GPU 0's loss). The backward pass is autograd's, which has a thread for each GPU and no Python. Copies of the
modules, made in Python (replicate), have no price. Replicas live from their broadcast to their reduction. A module that returns
its own loss makes it on every GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from sim.program import COMPUTE, Block, Cohort, Collective, Item, Kernel, Memory, Op, Program, Ref, Run
from strategies.data_parallel import hooks
from strategies.data_parallel.hook import Hook
from strategies.layers.layer_cost import LayerCost
from strategies.layers.model_costs import ModelCosts
from strategies.layers.tensor_overlap import Items
from strategies.lowering.stage import Stage
from strategies.models.model import Model
from strategies.models.tracing.inputs import WIDTHS
from strategies.models.tracing.records import LOSS, Module
from strategies.models.tracing.tracer import trace_of
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from topologies.reading import UserError

PIECE = 10 * 2**20  # bytes in one broadcast or reduction: comm.broadcast_coalesced, comm.reduce_add_coalesced
TOKEN, FLOAT = 8, 4  # bytes of a token's number, and of the loss's probabilities
STREAM = "dp"


@hooks("dataparallel")
class DataParallel(Hook):
    """One process drives the GPUs of a node by threads; GPU 0 keeps and updates the model."""

    needs_gpus = "without them torch.nn.DataParallel calls the module in one process; take ddp"

    @classmethod
    def check(cls, plan: Plan, nodes: int, where: str) -> None:
        """One process cannot reach another node, and drives whole replicas of the model."""
        what = f"{where}: data_parallel=dataparallel"
        if nodes > 1:
            raise UserError(f"{what} is one process, which drives the GPUs of 1 node, not of {nodes}; take data_parallel=ddp")
        for name, degree in (("tp", plan.tp), ("pp", plan.pp), ("cp", plan.cp), ("ep", plan.ep)):
            if degree > 1:
                raise UserError(f"{what} replicates the whole model on each GPU, which {name}={degree} contradicts")
        for name in {"bucket", "overlap"} & plan.model_fields_set:
            raise UserError(f"{what} has no {name}: gradients go in pieces of 10 MiB once the backward pass has ended")

    def program(self, model: Model, plan: Resolved, parts: ModelCosts) -> Program | None:
        """One cohort per GPU: all compute, the root does the rest."""
        if plan.dp == 1:
            return None
        replicas = [_Gpu(rank, model, plan, parts) for rank in range(plan.dp)]
        for gpu in replicas:
            gpu.step()
        tokens = float(plan.global_batch * plan.sequence)
        cohorts = [gpu.cohort for gpu in replicas]
        return Program(plan.grid, cohorts, 0.0, 0.0, plan.precision, tokens, model.parameters, threads=plan.dp)

    def backward(self, stage: Stage, microbatch: int, after: tuple[Ref, ...], last: bool, weights_only: bool = False) -> Ref:
        """On one GPU the module simply runs."""
        return stage.whole_backward(microbatch, after, weights_only)

    def update(self, stage: Stage) -> None:
        """On the only GPU."""
        stage.update(1, tuple(stage.reduced))


class _Gpu:
    """The program of GPU `rank`."""

    def __init__(self, rank: int, model: Model, plan: Resolved, parts: ModelCosts) -> None:
        self.root, self.plan, self.cohort = rank == 0, plan, Cohort({"dp": rank})
        sizes = _traced(model.module, plan) if model.module else _described(model, plan)
        layers = [parts.embedding, *parts.stage(0, sum(plan.layers)), _without_loss(parts.head, sizes.kept)]
        self.stage = Stage(0, rank, 0, self.cohort, layers, plan, model)
        width = plan.bytes_per_element
        self.inputs = self._rooted("scatter", "inputs", plan.dp * sizes.input, sizes.number)
        self.outputs = self._rooted("gather", "outputs", plan.dp * sizes.result, width)
        self.errors = self._rooted("scatter", "output gradients", plan.dp * sizes.result, width)
        buffers = sum(each * count for each, count in self.stage.module_buffers)
        self.parameters = self._in_pieces("broadcast", "parameters", width, buffers)
        self.gradients = self._in_pieces("reduce", "gradients", plan.bytes_per_gradient)
        self.probabilities: Memory = (("activation", plan.dp * sizes.kept),) if _loss(parts.head.forward) else ()
        self.loss = {
            name: Block(name, (Run(1, tuple(_times(item, plan.dp) for item in _loss(items))),))
            for name, items in (("forward", parts.head.forward), ("backward", parts.head.backward))
        }

    def step(self) -> None:
        """Every microbatch, then the root's update."""
        states = self.plan.bytes_that_stay
        if self.root:
            self.cohort.resident = tuple((kind, self.stage.parameters * width) for kind, width in states.items())
        reduced: tuple[Ref, ...] = ()
        for microbatch in range(self.plan.microbatches):
            reduced = (self._microbatch(microbatch, reduced),)
        if self.root:
            self.stage.update(1, reduced)

    def _microbatch(self, microbatch: int, after: tuple[Ref, ...]) -> Ref:
        """Scatter, broadcast, forward, gather, loss, scatter, backward, reduce."""
        add = self._adder(microbatch)
        model: Memory = () if self.root else (("parameter", self.parameters.bytes * self.parameters.repeat),)
        gradient: Memory = (("temporary" if self.root else "gradient", self.gradients.bytes * self.gradients.repeat),)
        everything: Memory = (("activation", self.outputs.bytes),) if self.root else ()
        error: Memory = (("temporary", self.errors.bytes),) if self.root else ()
        add(self.inputs, after)
        replicated = add(self.parameters, (), model)
        computed = self.stage.forward(microbatch, (replicated,))
        ref = add(self.outputs, (computed,), everything)
        if self.root:
            forward = self.stage.add(Op(COMPUTE, self.loss["forward"], (ref,), self.probabilities, (), microbatch))
            freed = self.probabilities + everything
            ref = self.stage.add(Op(COMPUTE, self.loss["backward"], (forward,), error, freed, microbatch))
        ref = add(self.errors, (ref,), (), error)
        ref = self.stage.backward(microbatch, (ref,), allocate=gradient)
        gradients = self.stage.new_gradients(self.stage.parameters) if self.root else ()
        self.stage.has_gradients = True
        return add(self.gradients, (ref,), gradients, model + gradient)

    def _adder(self, microbatch: int) -> Callable[..., Ref]:
        def add(work: Collective, after: tuple[Ref, ...], allocate: Memory = (), free: Memory = ()) -> Ref:
            return self.stage.add(Op(STREAM, work, after, allocate, free, microbatch))

        return add

    def _rooted(self, operation: str, label: str, size: float, width: int, count: int = 1) -> Collective:
        return Collective(operation, size / count, "dp", label, self.plan.algorithm, count, width)

    def _in_pieces(self, operation: str, label: str, width: int, more: int = 0) -> Collective:
        size = self.stage.parameters * width + more
        return self._rooted(operation, label, size, width, -int(-size // PIECE))


class _Sizes(NamedTuple):
    """Bytes of a GPU's microbatch: the input, and a number of it; the result; what the loss keeps of that."""

    input: float
    number: int
    result: float
    kept: float


def _described(model: Model, plan: Resolved) -> _Sizes:
    tokens = plan.microbatch * plan.sequence
    outputs = tokens * (model.padded_vocabulary if model.head else model.hidden)
    return _Sizes(float(tokens * TOKEN), TOKEN, float(outputs * plan.bytes_per_element), float(FLOAT * outputs))


def _traced(module: Module, plan: Resolved) -> _Sizes:
    widths = [WIDTHS[each.dtype] or plan.bytes_per_element for each in module.input]
    sample = sum(math.prod(each.shape) * width for each, width in zip(module.input, widths, strict=True))
    trace = trace_of(module, plan.microbatch, plan.precision, plan.fused_attention)
    return _Sizes(float(plan.microbatch * sample), widths[0], trace.result, trace.kept_by_loss)


def _loss(items: Items) -> Items:
    """The kernels of the loss."""
    return tuple(item for item in items if _of_loss(item))


def _without_loss(head: LayerCost, kept: float) -> LayerCost:
    """What every GPU does of the head: up to the logits. kept: bytes that the loss keeps."""
    if not _loss(head.forward):
        return head
    forward, gradient, backward = (
        tuple(item for item in items if not _of_loss(item)) for items in (head.forward, head.input_gradient, head.backward)
    )
    return replace(head, forward=forward, input_gradient=gradient, backward=backward, saved=head.saved - kept)


def _of_loss(item: Item) -> bool:
    return isinstance(item, Kernel) and item.label.startswith(("loss", LOSS))


def _times(item: Item, count: int) -> Item:
    """The kernel on as many times the data."""
    return replace(item, flops=item.flops * count, bytes=item.bytes * count) if isinstance(item, Kernel) else item
