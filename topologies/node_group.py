"""Nodes of one description, of which GPUs or NICs may be missing."""

from __future__ import annotations

import re
from functools import cached_property

from pydantic import Field, model_validator

from topologies.board import Board, Path
from topologies.node import Node
from topologies.reading import Config

_PART = re.compile(r"(gpu|nic) (\d{1,4})")


class NodeGroup(Config):
    """`count` nodes of one description.

    A GPU whose NIC is missing reaches other nodes through the NIC of the next GPU of its node that has one, over NVLink, as
    NCCL's PXN does (NVIDIA developer blog, "Doubling all2all Performance with NCCL 2.12"). The NIC of a missing GPU is not used.
    """

    count: int = Field(ge=1, le=2**20)
    node: Node
    missing: tuple[str, ...] = Field((), max_length=1024)  # of each of these nodes: "gpu 3", "nic 2"
    clock: float = Field(1.0, ge=0.1, le=1)  # of its GPUs, relative to that of their peaks (nvidia-smi --lock-gpu-clocks)

    @model_validator(mode="after")
    def _consistent(self) -> NodeGroup:
        node = self.node
        if not self.missing:
            return self
        for part in self.missing:
            match = _PART.fullmatch(part)
            if match is None:
                raise ValueError(f"nodes.missing='{part}': must be 'gpu 3' or 'nic 2'")
            there = {"gpu": node.gpus, "nic": node.nics}[match[1]]
            if int(match[2]) >= there:
                numbers = f"0 to {there - 1}" if there else "not there at all"
                raise ValueError(f"nodes.missing='{part}': the {match[1]}s of these nodes are numbered {numbers}")
        if not self.gpus:
            raise ValueError(f"nodes.missing={list(self.missing)}: no GPU is left")
        if node.nics:
            board = node.board()
            for gpu in self.gpus:
                self.through(board, gpu)
        return self

    def clocked(self) -> NodeGroup:
        """The group with its GPUs as they are at their clock: arithmetic is slower, memory and links are not."""
        return self if self.clock == 1 else self.model_copy(update={"clock": 1.0, "node": self.node.at_clock(self.clock)})

    @cached_property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs that are there, by their numbers in a whole node."""
        return tuple(gpu for gpu in range(self.node.gpus) if f"gpu {gpu}" not in self.missing)

    def through(self, board: Board, gpu: int) -> int:
        """The GPU whose NIC a GPU sends and receives by. Raises ValueError when no GPU has one left."""
        if not self.node.nics or self._has_nic(board, gpu):
            return gpu
        others = [other for other in self.gpus if self._has_nic(board, other) and board.route(gpu, other)]
        if not others:
            raise ValueError(f"nodes.missing={list(self.missing)}: gpu {gpu} has no way to other nodes left")
        return min(others, key=lambda other: (other - gpu) % self.node.gpus)

    def _has_nic(self, board: Board, gpu: int) -> bool:
        return all(f"nic {nic}" not in self.missing for nic in board.bundles[board.rail[gpu]])

    def way(self, board: Board, gpu: int) -> tuple[Path, Path]:
        """Links from a GPU to the fabric, and back."""
        other = self.through(board, gpu)
        out, into = board.way(other)
        if other == gpu:
            return out, into
        return (*board.route(gpu, other), *out), (*into, *board.route(other, gpu))
