"""ZeRO-3 by FSDP2 (`fully_shard`).

Groups as in the simulation: embedding, each layer, head. A tied matrix is in one group with the embedding. With `shard`
below dp the device mesh has two dimensions (HSDP). 16-bit plans keep fp32 shards and gather 16-bit copies, FSDP2's own way: the
masters are the parameters.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from calibration.execute import buckets
from calibration.execute.chunks import Chunk
from calibration.execute.data_parallel import Hook, executed
from calibration.execute.limits import blocking, shares_embedding, splits
from calibration.execute.model.mixture import Routed
from calibration.execute.setup import SINGLE
from strategies.job import Job
from strategies.plan.resolved import Resolved


class Around(nn.Module):
    """A module whose class a pipeline does not know: every microbatch gathers and reduces, as in the plan."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        """The inner module's."""
        return self.inner(x)


@executed("zero3")
class Zero3(Hook):
    """Parameters, gradients and optimizer states are sharded."""

    divided = experts = True

    @classmethod
    def check(cls, job: Job, resolved: Resolved) -> str | None:
        """What FSDP2 does not do."""
        if not job.plan.overlap and not blocking(job):
            return f"overlap=false contradicts data_parallel={job.plan.data_parallel}: on GPUs FSDP2 always gathers ahead"
        if shares_embedding(job, resolved):
            return f"schedule={job.plan.schedule} has {job.model.name}'s tied embedding twice on a rank, in two FSDP2 modules"
        if splits(job, resolved):
            schedule = job.plan.schedule
            return f"schedule={schedule} makes weight gradients in passes of their own, in which FSDP2 reduces nothing"
        if job.plan.syncs_gradients == "last" and job.plan.pp > 1 and job.plan.schedule not in SINGLE:
            which = f"gradient_sync=last with schedule={job.plan.schedule}"
            return f"{which}: PyTorch's pipeline runtime gathers whole stages ahead; {' and '.join(SINGLE)} do not"
        return None

    def prepare(self, chunk: Chunk) -> None:
        """Shards keep fp32, unless weights of 16 bits are updated, and get memory when they are shards."""
        if self.setup.plan.updates_16_bits:
            chunk.net.to(self.setup.dtype)

    def wrap(self, chunk: Chunk) -> nn.Module:
        """The chunk, sharded in place."""
        setup, net = self.setup, chunk.net
        if setup.resolved.copies == 1:
            super().prepare(chunk)
            return net
        mesh = setup.mesh["replica", "dp"] if setup.resolved.replicas > 1 else setup.copies_mesh
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": setup.plan.reshard, "mp_policy": self._precision()}
        if chunk.spread:
            self._spread(chunk, options)
        kernels = setup.plan.kernel_set
        units = [[layer] for layer in cast(Any, net).layers] if kernels.root_unit else net.units()
        last = net.units()[0] if kernels.keeps_last_unit and net.tied and not kernels.root_unit else units[-1]
        for unit in units:
            stays = {"reshard_after_forward": False} if kernels.keeps_last_unit and unit == last else {}
            fully_shard(unit if len(unit) > 1 else unit[0], **options | stays)
        if kernels.root_unit:  # FSDP2 keeps the root's unit, unless it is told otherwise
            options.pop("reshard_after_forward")
        fully_shard(net, **options)
        chunk.materialise(setup.device)
        if setup.plan.pp == 1:
            return net
        for number, unit in enumerate(units):  # by itself FSDP2 gathers ahead across microbatches, one too many
            cast(Any, unit[0]).set_modules_to_backward_prefetch(units[max(number - 1, 0)])
        return net if setup.plan.syncs_gradients == "last" else Around(net)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """As PyTorch's pipelines do it by themselves."""
        if self.setup.plan.syncs_gradients == "last" and self.setup.resolved.copies > 1:
            module = cast(FSDPModule, self.modules[0])
            module.set_requires_gradient_sync(last)
            module.set_reshard_after_backward(last or not self.setup.plan.keeps_parameters)
        return nullcontext()

    def _spread(self, chunk: Chunk, options: dict[str, Any]) -> None:
        """Routed experts are sharded over the ranks that have the same, or stay as they are; their gradients are means over all
        tokens (torchtitan's way).
        """
        setup = self.setup
        if setup.resolved.expert_copies == 1:
            options["ignored_params"] = set(chunk.spread.values())
            return
        for module in chunk.net.modules():
            if isinstance(module, Routed):
                fully_shard(module, **options | {"mesh": setup.mesh["dp"]})

    def reduce(self) -> None:
        """Gradients of experts become means over all tokens, where they are means over those of the ranks that have the same
        (FSDP2's set_gradient_divide_factor asks for a product that gloo does not have).
        """
        for chunk in self.chunks:
            if self.setup.resolved.expert_copies == 1:
                self.reduce_experts(chunk)
                continue
            for parameter in chunk.spread.values():
                if parameter.grad is not None:
                    buckets.local(parameter.grad).detach().div_(self.setup.plan.ep)

    def _precision(self) -> MixedPrecisionPolicy:
        dtype = self.setup.dtype
        if dtype in (torch.float32, torch.float64):
            return MixedPrecisionPolicy()
        reduce = torch.float32 if self.setup.plan.gradients == "fp32" else dtype
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce)
