"""A module of the user's own as ranks train it: made by its builder, called with samples of its inputs.

Every rank and the process that they are compared with make it from the same seed, whole, as its own code initialises it.

Imports torch: import this module inside the function that needs it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from calibration.execute.model import SEED
from strategies.models.tracing.losses import loss_of
from strategies.models.tracing.recorder import INPUTS, built
from strategies.models.tracing.records import Module, Trace
from strategies.models.tracing.tracer import structure_of


class Inputs:
    """Several tensors that are cut and called with as if they were one. by_place: how many have no names."""

    def __init__(self, tensors: Sequence[Tensor], names: Sequence[str]) -> None:
        self.tensors, self.names = list(tensors), names

    def _each(self, change: Any) -> Inputs:
        return Inputs([change(tensor) for tensor in self.tensors], self.names)

    def __getitem__(self, place: Any) -> Inputs:
        return self._each(lambda tensor: tensor[place])

    def flatten(self, first: int, last: int) -> Inputs:
        """All of them."""
        return self._each(lambda tensor: tensor.flatten(first, last))

    def call(self, net: nn.Module) -> Any:
        """A forward pass."""
        pairs = list(zip(self.names, self.tensors, strict=True))
        return net(*(tensor for name, tensor in pairs if not name), **{name: tensor for name, tensor in pairs if name})


def samples(module: Module, dtype: torch.dtype, leading: Sequence[int], device: torch.device) -> tuple[Inputs, Tensor]:
    """Random inputs and labels: (*leading, *sizes of a sample) and (*leading) integers. Alike on every rank.

    Floats are normally distributed; integers are less than the rows of every embedding, so that all of them can be looked up.
    """
    generator = torch.Generator().manual_seed(SEED)
    embeddings = [op.inputs[0].shape[0] for op in structure_of(module).ops if op.name == "embedding"]
    tensors = []
    for each in module.input:
        shape = (*leading, *each.shape)
        if each.dtype == "float":
            tensor = torch.randn(shape, generator=generator).to(dtype)
        else:
            most = 2 if each.dtype == "bool" else min([*embeddings, 256])
            tensor = torch.randint(most, shape, generator=generator).to(INPUTS[each.dtype])
        tensors.append(tensor.to(device))
    labels = torch.randint(2**40, tuple(leading), generator=generator).to(device)
    return Inputs(tensors, [each.name for each in module.input]), labels


def loss(output: Any, labels: Tensor) -> Tensor:
    """As the tracing takes it. labels: (batch); a sample with several rows of logits has labels that count on from its own."""

    def of_rows(rows: Tensor) -> Tensor:
        each = torch.arange(len(rows) // len(labels), device=rows.device)
        return (labels[:, None] + each).flatten() % rows.shape[-1]

    return loss_of(output, of_rows)[0]


class Traced(nn.Module):
    """The module, and what an execution asks of one.

    number: of the next forward pass, where it draws random numbers: they follow from it.
    """

    number: int | None = None
    documents: Sequence[int] | None = None  # nothing of it is packed
    tied = False  # parameters that it shares are its own matter: it is whole on every rank
    loss = staticmethod(loss)

    def __init__(self, module: Module, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.net = built(module, torch.float32, "cpu").to(dtype)
        self.trace: Trace = structure_of(module)

    def forward(self, x: Inputs) -> Any:
        """A microbatch to what the module returns."""
        if self.number is not None:
            torch.manual_seed(zlib.crc32(f"{SEED} {self.number}".encode()))
        return x.call(self.net)

    def states(self) -> list[Tensor]:
        """Buffers: what passes change besides gradients, such as running statistics."""
        return list(self.net.buffers())

    def units(self) -> list[list[nn.Module]]:
        """Modules whose parameters are gathered together: what is before the blocks, each block, what is after them."""
        parts: dict[int, list[nn.Module]] = {}
        for part, module in self._parts("", self.net):
            parts.setdefault(part, []).append(module)
        return [parts[part] for part in sorted(parts)]

    def _parts(self, name: str, module: nn.Module) -> Iterator[tuple[int, nn.Module]]:
        """The largest modules whose parameters one part reads first."""
        readers = self.trace.users
        read = {min(readers[key], default=0) for key in readers if key.startswith(f"{name}." if name else "")}
        within = name in self.trace.blocks or not any(block.startswith(f"{name}." if name else "") for block in self.trace.blocks)
        if len(read) == 1 and within:
            yield read.pop(), module
        else:
            for child, inner in module.named_children():
                yield from self._parts(f"{name}.{child}" if name else child, inner)
