"""What PyTorch is asked to send: every operation of torch.distributed with its group and bytes, by the simulator's own rule.

Imports torch: import this module inside the function that needs it.

    with Counting() as counting:
        step()
    counting.moved                      # [Moved("all_reduce", (0, 1), 4096.0, 4096.0), …] in order
    counting.sent([(0, 1)])             # bytes that this rank sends over these groups

A dispatch mode sees the operations of every PyTorch strategy: DDP's reducer, FSDP2, DTensor, pipelines. It counts what was asked
of the library (logical volume), not what the library's algorithm puts on the wire (gloo's reduce-scatter is an all-reduce).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import comm
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

NAMES = {  # operator -> operation; coalesced and in-place forms have the same name
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "isend": "send",
}
SILENT = {  # no data is sent
    "recv_",
    "recv_any_source_",
    "irecv",
    "wait_tensor",
    "_wrap_tensor_autograd",
    "barrier",
    "monitored_barrier_",
    "check_for_nan",
}
COPIES = {  # of torch.nn.parallel.comm -> operation
    "broadcast_coalesced": "broadcast",
    "reduce_add_coalesced": "reduce",
    "scatter": "scatter",
    "gather": "gather",
}
NAMESPACES = ("c10d", "_c10d_functional")


class Moved(NamedTuple):
    """One operation. bytes: the full buffer S, as nccl-tests counts it; sent: by this rank, or the mean where ranks differ."""

    operation: str
    ranks: tuple[int, ...]  # global ranks of the group; of a send, the sender and the receiver
    bytes: float
    sent: float
    group: str = ""  # its name: of groups of equal ranks, which


def sent(operation: str, size: float, ranks: int) -> float:
    """Bytes that one of `ranks` ranks sends for a full buffer of `size` bytes.

    The mean over ranks of what bandwidth-optimal algorithms send; of a broadcast (a chain) every rank but the last sends it all.
    """
    if operation == "send":
        return size
    return size * (2.0 if operation == "all_reduce" else 1.0) * (ranks - 1) / ranks


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists every operation while it is active, and lets it run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved: list[Moved] = []

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Count `func` if it communicates. DTensors are left to their own dispatch, which comes back with plain tensors."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in NAMESPACES:
            self._count(func, args)
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: Sequence[Any]) -> None:
        name = func._schema.name.split("::")[1]
        if name in SILENT:
            return
        if name not in NAMES:
            raise NotImplementedError(f"operation {func._schema.name} is not counted")
        operation, given = NAMES[name], dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        group = _group(given)
        ranks = tuple(dist.get_process_group_ranks(group))
        size = _bytes(operation, given, len(ranks))
        if operation == "send":
            ranks = (ranks[group.rank()], ranks[given["dst"]])
        self.moved.append(Moved(operation, ranks, size, sent(operation, size, len(ranks)), group.group_name))

    def sent(self, groups: Iterable[tuple[int, ...]] | None = None) -> float:
        """Bytes that this rank sent over `groups` (their global ranks in any order); over all by default."""
        wanted = None if groups is None else {frozenset(group) for group in groups}
        return sum(operation.sent for operation in self.moved if wanted is None or frozenset(operation.ranks) in wanted)


@contextmanager
def copies_counted(counting: Counting) -> Iterator[None]:
    """Count what torch.nn.DataParallel moves between its GPUs as well: no operations of torch.distributed, and not dispatched."""
    before = {name: getattr(comm, name) for name in COPIES}

    def counted(name: str) -> Callable[..., Any]:
        def call(tensors: Any, *arguments: Any, **options: Any) -> Any:
            devices = arguments[0] if arguments else options.get("devices", ())
            operation = COPIES[name]
            result = before[name](tensors, *arguments, **options)
            if operation in ("broadcast", "scatter"):
                size, count = _size(tensors), len(devices)
            else:  # every GPU's tensors; of a sum each GPU has all of them
                size, count = _size(tensors), len(tensors)
                size //= count if operation == "reduce" else 1
            counting.moved.append(Moved(operation, tuple(range(count)), float(size), sent(operation, float(size), count)))
            return result

        return call

    try:
        for name in COPIES:
            setattr(comm, name, counted(name))
        yield
    finally:
        for name, function in before.items():
            setattr(comm, name, function)


@contextmanager
def threads_counted(counting: Counting) -> Iterator[None]:
    """Count also all-reduces that threads start without the dispatch mode: gloo's run what follows a reduction in DDP's PowerSGD
    hook. Autograd's, which run backward passes of GPUs and DDP's hooks with them, have the mode of their caller.
    """
    before = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if counting not in _get_current_dispatch_mode_stack():
            ranks = tuple(dist.get_process_group_ranks(options.get("group") or dist.group.WORLD))
            size = float(_size(tensor))
            counting.moved.append(Moved("all_reduce", ranks, size, sent("all_reduce", size, len(ranks))))
        return before(tensor, *arguments, **options)

    try:
        dist.all_reduce = all_reduce
        yield
    finally:
        dist.all_reduce = before


def _group(given: Mapping[str, Any]) -> Any:
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"])
    name = given["group_name"]
    resolve: Any = torch.distributed.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(name) if isinstance(name, str) else dist.ProcessGroup.unbox(name)


def _bytes(operation: str, given: Mapping[str, Any], ranks: int) -> float:
    """The full buffer: of an all-gather all outputs, otherwise all inputs (an operator names its tensors in many ways)."""
    inputs = ("input", "inputs", "input_tensor", "input_tensors", "input_list", "tensors", "tensor")
    if operation == "scatter":  # only the root has inputs
        return float(_size(given["output_tensors"]) * ranks)
    size = float(next(_size(given[name]) for name in inputs if name in given))
    return size * ranks if operation in ("all_gather", "gather") else size


def _size(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_size(tensor) for tensor in tensors)
