"""A module cut over tp ranks by PyTorch itself: a function of the user's calls `parallelize_module` on a mesh of a process
group that sends nothing, and what rank 0 then runs is traced.

Parameters become DTensors, and what DTensor dispatches on a rank has local shapes and real collectives (`_c10d_functional`),
forward and backward, as `torch.distributed.tensor.debug.CommDebugMode` sees them. Imports torch: import it inside a function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from strategies.models.tracing.builders import builder_of
from strategies.models.tracing.records import Module
from topologies.reading import UserError

COLLECTIVES = "_c10d_functional"  # the namespace of DTensor's collectives


@contextmanager
def cut(net: Any, module: Module, tp: int) -> Iterator[Any]:
    """The module as tp rank 0 of `tp` has it; without tp the module itself. Raises UserError."""
    if tp == 1:
        yield net
        return
    if distributed.is_initialized():
        raise UserError(f"model {module.source}: tp={tp}: cannot be traced in a process that has a process group of its own")
    parallelize = builder_of(module.model_copy(update={"source": module.parallelize}))
    distributed.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
        try:
            result = parallelize(net, mesh)  # type: ignore[call-arg]
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UserError(f"model.parallelize {module.parallelize}: failed on tp={tp} ranks: {why}") from error
        yield result if isinstance(result, torch.nn.Module) else net
    finally:
        distributed.destroy_process_group()


def local(tensor: Any) -> Any:
    """What this rank has of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_whole(parameter: Any) -> bool:
    """Whether every tp rank has all of a parameter."""
    return not isinstance(parameter, DTensor) or all(isinstance(each, Replicate) for each in parameter.placements)


def is_partial(gradient: Any) -> bool:
    """Whether a gradient is a rank's part of a sum, which DTensor leaves to the optimizer to add up."""
    return isinstance(gradient, DTensor) and any(isinstance(each, Partial) for each in gradient.placements)


def is_distributed(types: Any) -> bool:
    """Whether an operator is DTensor's, which dispatches what a rank runs."""
    return any(issubclass(each, DTensor) for each in types)


def name_of(func: Any) -> str:
    """The name of an operator; of a collective, and of one that is not PyTorch's own, with its namespace."""
    name = str(func.overloadpacket.__name__)
    if func.namespace != COLLECTIVES:
        return name if func.namespace in ("aten", "prims") else f"{func.namespace}::{name}"
    return "wait_tensor" if name.startswith(("wait_tensor", "_wrap_tensor")) else f"{COLLECTIVES}.{name.rstrip('_')}"
