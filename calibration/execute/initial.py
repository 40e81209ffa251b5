"""Parameters that every execution of a job starts with: a rank makes those that it holds, and no others.

Modules are built on the meta device, where tensors have shapes and no memory, cut and sharded there, and given memory
(`to_empty`) and values last, which is how PyTorch initialises what no device could hold whole. Values follow from the name that
a parameter has in the whole model and from the place in it, in blocks of rows with random numbers of their own: ranks that hold
parts of a parameter make equal values, without communication and without the rest of it.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from calibration.execute.model import SEED, Transformer
from calibration.execute.model.attention import Attention

Cut = Mapping[str, tuple[Any, Any]]
BLOCK = 2**20  # elements that are made at a time, about
DEVIATION = 0.02  # of matrices, as in GPT-2, so that the loss starts near log(vocabulary)


def is_spread(name: str, cut: Cut) -> bool:
    """Whether a parameter is of routed experts of which other ep ranks have others."""
    return name in cut and cut[name][0].mesh_dim_names == ("ep",)


def materialise(net: nn.Module, device: torch.device, name_of: Callable[[str], str], cut: Cut | None = None) -> None:
    """Give memory and values to a module that was built on the meta device. name_of: names in the whole model; cut: device mesh
    and placements of plain parameters that are parts of the model's, by name.
    """
    net.to_empty(device=device)
    if isinstance(net, Transformer):
        net.tie()  # plain parameters that are given memory are new ones
    fill(net, name_of, cut or {})


@torch.no_grad()
def fill(net: nn.Module, name_of: Callable[[str], str], cut: Cut) -> None:
    """Set what this rank holds of all parameters, and the tables of attention."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for name, parameter in net.named_parameters():
        offset: Sequence[int] = [0] * parameter.dim()
        mine: Tensor = parameter
        shape, first = list(parameter.shape), 0
        if is_spread(name, cut):  # a part of the experts, which may be sharded besides
            mesh, _ = cut[name]
            first, shape[0] = mesh.get_local_rank() * shape[0], mesh.size() * shape[0]
        if isinstance(parameter, DTensor):
            mine = parameter.to_local()
            _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        if mine.numel():
            mine.copy_(values(name_of(name), shape, [first + offset[0], *offset[1:]], mine.shape, mine.device))
    for module in net.modules():
        if isinstance(module, Attention):
            module.fill_tables()


def values(
    name: str, shape: Sequence[int], offset: Sequence[int], size: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """The part of a parameter of that shape that begins at `offset` and has `size` elements along each dimension, in fp32. Made
    on the device: the one core of a GPU's rank takes 10 s and more for two billion random numbers.
    """
    if "norm" in name.split(".")[-2]:
        return torch.full(tuple(size), float(name.endswith("weight")), device=device)
    rows = max(1, BLOCK // math.prod(shape[1:]))
    begin, end = offset[0], offset[0] + size[0]
    parts = []
    for number in range(begin // rows, -(-end // rows)):
        first = number * rows
        block = torch.empty(min(rows, shape[0] - first), *shape[1:], device=device)
        seed = zlib.crc32(f"{SEED} {name} {number}".encode())
        block.normal_(0.0, DEVIATION, generator=torch.Generator(device).manual_seed(seed))
        parts.append(block[max(0, begin - first) : end - first])
    whole = torch.cat(parts)
    for dimension, (start, length) in enumerate(zip(offset[1:], size[1:], strict=True), 1):
        whole = whole.narrow(dimension, start, length)
    return whole
