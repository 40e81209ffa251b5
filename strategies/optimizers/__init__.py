"""Optimizers: what each keeps per parameter, and what its update runs. A function in a file of this folder is one more.

An update is priced by the bytes that it moves (and Muon's by its products): in one kernel where frameworks have one, otherwise an
operator at a time, as PyTorch's single-tensor loops and, with as many bytes, its foreach kernels run it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from topologies.registry import Registry

FLOAT = 4  # bytes of fp32


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What an optimizer keeps and runs for each parameter; masters of 16-bit weights are not among its states."""

    states: float  # bytes
    operators: tuple[tuple[str, int], ...]  # of an update in operators: name, fp32 numbers read and written
    fused: bool = True  # frameworks have the update in one kernel
    after: tuple[tuple[str, int], ...] = ()  # kernels after that one: name, bytes read and written
    whole_tensors: bool = False  # sums over whole tensors are part of it, which flat shards of them do not have
    iterations: int = 0  # of Newton–Schulz on every matrix between embedding and head (Muon); other parameters are Adam's


optimizers: Registry[Callable[[], Optimizer]] = Registry("optimizer", package="strategies.optimizers")


@lru_cache(maxsize=64)
def optimizer_called(name: str) -> Optimizer:
    """The optimizer of that name. Raises UserError for an unknown one."""
    return optimizers[name]()
