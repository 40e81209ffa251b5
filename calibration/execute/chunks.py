"""The parts of the model that this rank holds.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from calibration.execute.initial import is_spread, materialise
from calibration.execute.limits import shares_embedding
from calibration.execute.model import Transformer
from calibration.execute.model.context_parallel import ContextParallel
from calibration.execute.model.layer import Dropout, Shared
from calibration.execute.model.mixture import ExpertParallel, Routed
from calibration.execute.model.tensor_parallel import tensor_parallel
from calibration.execute.recomputation import Recomputation
from calibration.execute.setup import Setup
from calibration.execute.traced.batch_norm import synchronise
from calibration.execute.traced.net import Traced


@dataclass(eq=False)
class Chunk:
    """Virtual stage `number`, whose first layer is the model's layer `first`.

    cut: how tp or ep ranks hold a parameter. held: parameters by name, as they are once the data parallel strategy has them.
    """

    number: int
    first: int
    net: Transformer | Traced
    cut: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # name -> device mesh, placements
    held: dict[str, Tensor] = field(default_factory=dict)

    @property
    def trained(self) -> list[Tensor]:
        """Parameters with gradients, in the order of the module."""
        return [parameter for parameter in self.net.parameters() if parameter.requires_grad]

    def global_name(self, name: str) -> str:
        """The name that the whole model has for a parameter of this chunk."""
        return _shifted(name, self.first) if self.first else name

    def parts(self, name: str, tensor: Tensor) -> int:
        """In how many parts ranks hold a parameter or its gradient, which may be whole where the parameter is cut."""
        mesh, placements = self.cut.get(name, (None, ()))
        others = mesh.size() if is_spread(name, self.cut) and hasattr(tensor, "device_mesh") else 1  # and sharded besides
        mesh, placements = getattr(tensor, "device_mesh", mesh), getattr(tensor, "placements", placements)
        return int(others * math.prod(mesh.size(number) for number, how in enumerate(placements) if not how.is_replicate()))

    def materialise(self, device: torch.device) -> None:
        """Give what this rank holds memory and values; a tied head in a stage of its own has the embedding's. A traced module has
        its own.
        """
        if isinstance(self.net, Traced):
            self.net.to(device)
            return
        materialise(self.net, device, lambda name: original(self.net.tied, self.global_name(name)), self.cut)

    @property
    def spread(self) -> dict[str, Tensor]:
        """Parameters of routed experts of which other ep ranks have others, by name."""
        return {name: self.net.get_parameter(name) for name in self.cut if is_spread(name, self.cut)}

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter or gradient as one process has it, gathered from all who share it: each of them must call this."""
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
            if not is_spread(name, self.cut):
                return tensor
        if name not in self.cut:
            return tensor
        # DDP makes local tensors of DTensors; FSDP2 shards a part of the experts
        return DTensor.from_local(tensor, *self.cut[name], run_check=False).full_tensor()


def whole_model(setup: Setup) -> Transformer | Traced:
    """The model with the parameters that every execution of the job starts with."""
    if setup.job.model.module is not None:
        return _traced(setup, None).to(setup.device)
    net = _transformer(setup, None, True, True, Shared())
    materialise(net, setup.device, str)
    return net


def chunks(setup: Setup) -> list[Chunk]:
    """This rank's chunks, in the order of the schedule, cut over tp ranks, on the meta device: `Chunk.materialise`."""
    if setup.job.model.module is not None:
        return [Chunk(0, 0, _traced(setup, setup.copies))]
    stages, result = setup.resolved.layers, []
    for index in range(setup.resolved.chunks):
        number = setup.schedule.stage(setup.at["pp"], setup.plan.pp, index) if setup.plan.pp > 1 else 0
        first = sum(stages[:number])
        layers = range(first, first + stages[number])
        net = _transformer(setup, layers, number == 0, number == len(stages) - 1, shared(setup))
        chunk = Chunk(number, first, net)
        result.append(chunk)
        if setup.plan.kernel_set.compiled:  # layer by layer, in place, as torchtitan does; embedding, head and loss are not
            for layer in net.layers:
                layer.compile()
        if setup.plan.ep > 1:
            chunk.cut |= dict.fromkeys(_routed(net), (setup.mesh["ep"], (Shard(0),)))
        if setup.plan.tp > 1:
            tensor_parallel(net, setup.mesh["tp"], setup.plan.sequence_parallel)
            for name, parameter in net.named_parameters():
                chunk.cut[name] = (getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None))
            chunk.cut = {name: how for name, how in chunk.cut.items() if how[0] is not None}
    return result


def _traced(setup: Setup, group: Any) -> Traced:
    """A module of the user's own; group: of ranks over which batch normalisations are synchronised, None: one has all samples."""
    assert setup.job.model.module is not None
    net = Traced(setup.job.model.module, torch.float64 if setup.exact else torch.float32)
    if setup.plan.sync_norm and setup.resolved.copies > 1:
        synchronise(net, group, setup.place.compute.batch_norm)
    return net


def shared(setup: Setup) -> Shared:
    """What this rank shares of every layer."""
    plan, causal = setup.plan, setup.job.model.family == "decoder"
    tokens = experts = None
    if plan.cp > 1:
        flash = setup.place.compute.flash
        tokens = ContextParallel(setup.group("cp"), setup.at["cp"], plan.cp, plan.cp_method, causal, flash)
    if plan.ep > 1:
        experts = ExpertParallel(setup.group("ep"), plan.ep)
    return Shared(tokens, experts)


def _routed(net: Transformer) -> list[str]:
    """Names of the parameters of routed experts."""
    modules = {name for name, module in net.named_modules() if isinstance(module, Routed)}
    return [name for name, _ in net.named_parameters() if name.rpartition(".")[0] in modules]


def share(setup: Setup, every: list[Chunk]) -> None:
    """Make the matrices of embedding and head one where two stages of this rank have them."""
    nets = {chunk.number: chunk.net for chunk in every if isinstance(chunk.net, Transformer)}
    first, last = nets.get(0), nets.get(len(setup.resolved.layers) - 1)
    if shares_embedding(setup.job, setup.resolved) and first is not None and last is not None:
        assert first.embedding is not None
        assert last.head is not None
        assert last.head.logits is not None
        last.head.logits.weight = first.embedding.tokens.weight


def _transformer(setup: Setup, layers: range | None, embedding: bool, head: bool, shared: Shared) -> Transformer:
    job, plan = setup.job, setup.plan
    with torch.device("meta"):
        return Transformer(
            job.model,
            setup.resolved.sequence,
            layers,
            embedding=embedding,
            head=head,
            attention=plan.attention,
            dropout=Dropout.of(job.model, plan),
            recompute=Recomputation.of(plan),
            tuned=plan,
            shared=shared,
        )


def original(tied: bool, name: str) -> str:
    """The name under which one process has a parameter: a tied head has the embedding's matrix."""
    return "embedding.tokens.weight" if name == "head.logits.weight" and tied else name


def _shifted(name: str, first: int) -> str:
    """The name of a parameter `first` layers further on."""
    head, *rest = name.split(".")
    return ".".join([head, str(int(rest[0]) + first), *rest[1:]]) if head == "layers" else name
