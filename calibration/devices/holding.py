"""What a PyTorch step holds: bytes of all tensors that are alive, from operator to operator, on real or on fake tensors.

Imports torch: import this module inside the function that needs it.

    with Holding() as holding:
        holding.peak = holding.held         # forget the peak so far
        step()
    holding.peak                            # bytes, most that was held between two operators

Counts storages, as an allocator does, without its rounding; workspace inside one operator is not seen. What was made before the
mode was entered counts from when an operator first returns it or `add` is called. What the library of collectives holds meanwhile
is not counted, as NCCL's buffers are not: gloo takes a copy of what it reduce-scatters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Holding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The sum of all storages while it is active. `held`, `peak`: bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.peak = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}  # of each storage its size when last seen
        self._resize: Any = None
        self._wait: Any = None
        self._waiting = False  # for the library, which hands out its own memory
        self._mode: Any = None

    def __enter__(self) -> Holding:
        """FSDP2 gives parameters back by resizing their storage, which is no operator."""
        self._mode = torch._guards.detect_fake_mode()
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._see(storage)

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self._wait = wait = dist.Work.wait

        def waited(work: dist.Work, *arguments: Any) -> bool:
            self._waiting = True
            try:
                return bool(wait(work, *arguments))
            finally:
                self._waiting = False

        dist.Work.wait = waited  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop looking."""
        dist.Work.wait = self._wait  # type: ignore[method-assign]
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that no operator will return, such as parameters made before."""
        for tensor in map(_local, tensors):
            if tensor.is_meta and self._mode is None:  # has a shape and no memory
                continue
            if getattr(tensor, "fake_mode", None) is self._mode:  # DTensor asks for shapes with fake tensors of its own
                self._see(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Sequence[Any], args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run `func`, then look at what it returns."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if self._waiting:
            return result
        alone = isinstance(result, torch.Tensor)  # as of most operators: leaves of a tree take as long as an operator to find
        self.add([result] if alone else [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)])
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is None or known[0]() is None:
            self._known[key] = weakref.ref(storage, lambda _: self._gone(key)), size
            self.held += size
        else:
            self._known[key] = known[0], size
            self.held += size - known[1]
        self.peak = max(self.peak, self.held)

    def _gone(self, key: int) -> None:
        self.held -= self._known.pop(key)[1]


def _local(tensor: Any) -> torch.Tensor:
    """What a DTensor or the promise of a collective's result holds; these wrappers have no memory of their own."""
    for inside in ("_local_tensor", "elem"):
        tensor = getattr(tensor, inside, tensor)
    local: torch.Tensor = tensor
    return local
