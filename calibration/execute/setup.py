"""What every part of an execution needs to know: where this rank is, and the data that all of them train on.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from calibration.execute.limits import dropped, shares_embedding
from calibration.execute.model import SEED
from calibration.execute.traced.net import Inputs, samples
from calibration.launch.groups import new_group, patient
from calibration.launch.place import Place
from sim.grid import Grid
from strategies.data_parallel.buckets import limits
from strategies.job import Job
from strategies.plan.plan import Plan
from strategies.plan.resolved import Resolved
from strategies.schedules import schedules
from strategies.schedules.order import Schedule

COPIES = ("dp", "ep", "cp")  # axes whose ranks hold the same parameters, but for routed experts
SINGLE = ("gpipe", "1f1b")  # schedules with a stage on each rank, which PyTorch runs in classes of their own
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@cache
def mesh_of(kind: str, degrees: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """All ranks by axis, outermost first. Jobs of one layout share its process groups: a communicator of NCCL holds memory, and
    DTensor takes equal meshes for one and the same. They end with the process.
    """
    shape = tuple(degree for _, degree in degrees)
    names = tuple(axis for axis, _ in degrees)
    return patient(DeviceMesh(kind, torch.arange(math.prod(shape)).reshape(shape), mesh_dim_names=names))


@cache
def group_of(ranks: tuple[int, ...]) -> Any:
    """A process group of these ranks, in the same way. All ranks make it."""
    return new_group(ranks)


@dataclass(frozen=True, eq=False)
class Setup:
    """A rank's part of a job. The device mesh has the rank grid's axes of more than one rank, outermost first."""

    place: Place
    job: Job
    resolved: Resolved
    device: torch.device
    mesh: DeviceMesh
    copies_mesh: DeviceMesh | None  # ranks that hold the same parameters before any sharding, of one replica; None: only one does
    exact: bool = False  # in fp64, whatever the plan says, of a traced module

    @classmethod
    def of(cls, place: Place, job: Job) -> Setup:
        """Makes the process groups of all axes: every rank must call it."""
        resolved = job.resolve()
        grid = resolved.grid
        degrees = {axis: degree for axis, degree in reversed(grid.sizes) if degree > 1}
        if place.world == 1:  # also of DataParallel, whose dp ranks are threads
            degrees = {"dp": 1}
        place.compute.use_tf32(job.plan.precision == "tf32")
        mesh = mesh_of(place.device, tuple(degrees.items()))
        copies = mesh["dp"] if "dp" in degrees else None
        if grid.degree("cp") * grid.degree("ep") > 1:
            for ranks in grid.groups(COPIES).tolist():
                every = group_of(tuple(ranks))  # of other ranks than along dp, or of those along cp or ep for other messages
                if place.rank in ranks:
                    copies = DeviceMesh.from_group(every, place.device, mesh_dim_names=("copies",))
        return cls(place, job, resolved, place.compute.torch_device, mesh, copies)

    @property
    def plan(self) -> Plan:
        """As it was asked."""
        return self.job.plan

    @property
    def grid(self) -> Grid:
        """The rank grid."""
        return self.resolved.grid

    @cached_property
    def at(self) -> dict[str, int]:
        """Coordinates of this rank by axis."""
        return self.grid.coordinates(self.place.rank)

    @property
    def bucket(self) -> float:
        """Bytes that fill a bucket of gradients or parameters."""
        return limits(self.resolved).size * self.plan.bytes_per_gradient

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return torch.float64 if self.exact else TYPES[self.plan.precision]

    @property
    def schedule(self) -> Schedule:
        """Of the pipeline."""
        return schedules[self.plan.schedule]

    def group(self, axis: str) -> Any:
        """The process group of this rank along an axis."""
        return self.mesh.get_group(axis)

    @property
    def copies(self) -> Any:
        """The process group of `copies_mesh`."""
        return None if self.copies_mesh is None else self.copies_mesh.get_group()

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Every group along an axis, as ranks."""
        return [tuple(map(int, row)) for row in self.grid.groups((axis,))]

    @property
    def norms(self) -> int:
        """How many norms of gradients there are: one, or one of each dp rank where they train alone."""
        return self.resolved.dp if self.plan.hook.local else 1

    @property
    def tied_apart(self) -> bool:
        """Whether two pipeline ranks have the matrix that embedding and head share."""
        return self.job.model.tied and self.plan.pp > 1 and not shares_embedding(self.job, self.resolved)

    @property
    def replica(self) -> int:
        """Which of the dp replicas of the model this rank is part of."""
        number = self.at.get("replica", 0) * self.grid.degree("dp") + self.at["dp"]
        return number * self.grid.degree("ep") + self.at["ep"]

    @cached_property
    def data(self) -> tuple[Tensor | Inputs, Tensor]:
        """Tokens and labels of the whole job, both (dp, microbatches, microbatch, sequence) integers; alike on every rank. Of a
        traced module samples of its inputs, and a label for each.
        """
        if self.job.model.module is not None:
            leading = (self.resolved.dp, self.resolved.microbatches, self.plan.microbatch)
            return samples(self.job.model.module, self.dtype, leading, self.device)
        resolved, generator = self.resolved, torch.Generator().manual_seed(SEED)
        shape = (resolved.dp, resolved.microbatches, self.plan.microbatch, resolved.sequence + 1)
        tokens = torch.randint(self.job.model.vocabulary, shape, generator=generator).to(self.device)
        return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()

    @property
    def broadcasts_buffers(self) -> bool:
        """Whether a step begins with the first rank's buffers: DDP's of a traced module, unless the plan says not."""
        return self.job.model.module is not None and self.plan.hook.of_ddp and bool(self.plan.kernel_set.broadcast_buffers)

    @property
    def dropout(self) -> bool:
        """Whether the model drops anything."""
        return dropped(self.job)

    def number(self, step: int, replica: int, microbatch: int) -> int | None:
        """Of a forward pass, in the order in which one process would have them; None where nothing is dropped."""
        resolved = self.resolved
        return (step * resolved.dp + replica) * resolved.microbatches + microbatch if self.dropout else None

    def barrier(self) -> None:
        """Wait for the device and for all ranks."""
        self.synchronise()
        dist.barrier()

    def synchronise(self) -> None:
        """Wait for the device."""
        self.place.compute.synchronise()
