"""Any `torch.nn.Module` as a model: its forward and backward pass run on the meta device, where tensors have shapes and no data,
and every operator that PyTorch dispatches is written down.

What is recorded is what eager PyTorch launches. The module's file is the user's code: it runs when the user names it, with the
user's rights, and the answer says so. Everything here is data; torch is imported by `strategies.models.tracing.recorder` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import Field

from strategies.models.parts import unsaid
from strategies.models.tracing.inputs import InputSpec
from topologies.reading import Config

BATCH_NORMS = frozenset("native_batch_norm _native_batch_norm_legit cudnn_batch_norm _batch_norm_with_update".split())
LOSS = "(loss)"  # label of the operators of a loss that was made of the module's result
LOSS_IS_SUM = "the loss is the sum of"  # how a trace says what its loss is, where it grows with the batch
Builder = Callable[[], Any]  # makes the module
BUILDERS: dict[str, Builder] = {}  # by source: functions and modules that a program gave, which no file can name again


class Module(Config):
    """A module and what one sample of its input is."""

    source: str = Field(description="Function or class that makes the module, as FILE.py:NAME.")
    input: tuple[InputSpec, ...] = Field(description="Sizes of one sample of each input, without the batch.")
    digest: str = Field("", description="Of the file's contents: another file is another model.")
    parallelize: str = Field(
        "",
        exclude_if=unsaid,
        description="Function (module, mesh) that cuts the module over tp ranks by torch's parallelize_module, as FILE.py:NAME.",
    )


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that an operator reads or writes."""

    shape: tuple[int, ...]
    width: int  # bytes of an element
    bytes: float  # of what is stored: a broadcast tensor is less than its shape
    parameter: str = ""  # name, where it is a parameter or a view of one
    floating: bool = True

    @property
    def elements(self) -> int:
        """Numbers of its shape."""
        return math.prod(self.shape)


@dataclass(slots=True)
class TracedOp:
    """An operator that PyTorch dispatched."""

    name: str  # of aten without overload: "mm", "convolution_backward", …
    part: int  # 0: before the blocks; 1 … n: the blocks; n + 1: after them
    backward: bool
    node: int  # of autograd: the forward operator whose gradient it is part of
    label: str  # path of the module inside its block
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    arguments: tuple[Any, ...] = ()  # numbers and lists of numbers
    live: float = 0.0  # bytes of tensors that are there while it runs, without parameters, their gradients and what is kept
    synchronised: bool = False  # whether it is a SyncBatchNorm's
    recomputed: bool = False  # whether it is of the forward pass, and a checkpoint of the module's own runs it again

    @property
    def flops(self) -> float:
        """FLOPs of its products, attention in full also where a mask leaves less."""
        if self.name in ("mm", "addmm", "bmm", "baddbmm"):
            return 2.0 * self.outputs[0].elements * self.inputs[-1].shape[-2]
        if self.name == "_grouped_mm":  # each row by one group's matrix, or each group's part of the common dimension
            return 2.0 * self.inputs[0].elements * self.inputs[1].shape[-1]
        if self.name == "attention_forward":
            q, k, v = self.inputs
            return 2.0 * q.elements * k.shape[-2] * (1 + v.shape[-1] / q.shape[-1])
        if self.name == "convolution":
            weight, result = self.inputs[1], self.outputs[0]
            positions = self.inputs[0] if next((each for each in self.arguments if isinstance(each, bool)), False) else result
            return 2.0 * positions.elements * math.prod(weight.shape[1:])
        return 0.0


@dataclass
class Trace:
    """One microbatch's forward and backward pass."""

    ops: list[TracedOp]
    blocks: list[str]  # names of the repeated blocks, in the order of the forward pass
    parameters: dict[str, tuple[int, ...]]  # name -> shape
    saved: dict[int, list[tuple[str, float]]]  # by forward node: tensors that autograd keeps, and their bytes
    boundaries: list[float] = field(default_factory=list)  # bytes of each block's inputs
    handed_on: list[float] = field(default_factory=list)  # bytes of what is made before each block and read in it or after it
    kept_inputs: list[str] = field(default_factory=list)  # by block: the name under which its input is kept, or ""
    samples: int = 1  # of the microbatch
    loss: str = ""  # how a loss was made of the output
    result: float = 0.0  # bytes of all tensors that the module returns
    frozen: frozenset[str] = frozenset()  # parameters that require no gradient
    buffers: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> bytes of an element, elements
    replicated: frozenset[str] = frozenset()  # parameters that every tp rank has whole
    partial: set[str] = field(default_factory=set)  # those whose gradients tp ranks have each of its tokens, to be summed

    @cached_property
    def users(self) -> dict[str, list[int]]:
        """For each parameter the parts whose forward pass reads it, in order."""
        result: dict[str, list[int]] = {name: [] for name in self.parameters}
        for op in self.ops:
            for tensor in op.inputs:
                if tensor.parameter and not op.backward and op.part not in result[tensor.parameter]:
                    result[tensor.parameter].append(op.part)
        return result

    @property
    def norms(self) -> bool:
        """Whether it normalises over batches."""
        return any(op.name in BATCH_NORMS for op in self.ops)

    @property
    def has_mean_loss(self) -> bool:
        """Whether the loss of a batch is the mean of those of its parts."""
        return LOSS_IS_SUM not in self.loss

    @property
    def kept_by_loss(self) -> float:
        """Bytes that autograd keeps for a loss that was made of the module's result."""
        return sum(size for node, kept in self.saved.items() if node >= self.loss_begins for _, size in kept)

    @cached_property
    def loss_begins(self) -> float:
        """The first node of autograd of a loss that was made of the module's result; infinity where the module makes its own."""
        return min((op.node for op in self.ops if op.label == LOSS and not op.backward), default=math.inf)

    @property
    def synchronises(self) -> bool:
        """Whether it has a SyncBatchNorm, whose statistics are of all ranks."""
        return any(op.synchronised for op in self.ops)

    def part_of(self, name: str) -> int:
        """The part whose module has a parameter or buffer: what no block has counts with what is before the blocks."""
        return next((number for number, block in enumerate(self.blocks, 1) if name.startswith(f"{block}.")), 0)

    @property
    def tied(self) -> list[str]:
        """Parameters that both what is before the blocks and what is after them reads."""
        return [name for name, parts in self.users.items() if parts == [0, len(self.blocks) + 1]]

    @property
    def shared(self) -> list[str]:
        """Other parameters that several parts read."""
        return [name for name, parts in self.users.items() if len(parts) > 1 and name not in self.tied]

    @property
    def parts(self) -> int:
        """Blocks and both ends."""
        return len(self.blocks) + 2
