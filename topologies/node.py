"""A node whose description fits its wiring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import field_validator, model_validator

from topologies.board import Board, wirings
from topologies.hardware import Gpu, NodeParts


class Node(NodeParts):
    """One machine, or one NVLink domain: GPUs that reach each other without the fabric."""

    @model_validator(mode="before")
    @classmethod
    def _slots(cls, data: Any) -> Any:
        """Give a PCIe tree without a rate the rate of the GPU's slot."""
        if isinstance(data, Mapping) and data.get("wiring") == "pcie" and "pcie" not in data:
            gpu = data.get("gpu")
            rate = (
                gpu.get("pcie") if isinstance(gpu, Mapping) else f"{gpu.pcie} B/s" if isinstance(gpu, Gpu) and gpu.pcie else None
            )
            return data if rate is None else {**data, "pcie": rate}
        return data

    @field_validator("wiring")
    @classmethod
    def _known(cls, wiring: str) -> str:
        wirings[wiring]  # raises with the nearest name
        return wiring

    @model_validator(mode="after")
    def _consistent(self) -> Node:
        if self.wiring != "graph" and self.nics and self.gpus % self.nics and self.nics % self.gpus:
            raise ValueError(f"node.nics={self.nics} does not divide gpus={self.gpus}, nor the other way round")
        if self.edges and self.wiring != "graph":
            raise ValueError(f"node.edges contradicts wiring='{self.wiring}': they belong to wiring='graph'")
        if bool(self.nics) != bool(self.nic):
            raise ValueError(f"node.nics={self.nics} contradicts nic={self.nic:g} B/s: give both or neither")
        board = self.board()
        if self.integrated_nics and any(len(way) != 1 for way in board.ways_out):
            why = f"wiring='{self.wiring}', where NICs are behind PCIe" if self.nics else "nics=0"
            raise ValueError(f"node.integrated_nics=true contradicts {why}")
        used = {link.kind for link in board.links}
        for kind in ("nvlink", "host", "loopback"):
            rate = getattr(self, kind)
            if rate and kind not in used:
                raise ValueError(f"node.{kind}={rate:g} B/s contradicts wiring='{self.wiring}': there is no {kind} link here")
            if rate and self.edges:
                raise ValueError(f"node.{kind}={rate:g} B/s contradicts wiring='graph': its rates stand in node.edges")
        pairs = self.gpus * (self.gpus - 1)
        if board.joined not in (0, pairs):
            raise ValueError(f"node.wiring='{self.wiring}' joins {board.joined} of {pairs} pairs of gpus={self.gpus}")
        return self

    def at_clock(self, clock: float) -> Node:
        """The node with GPUs at a part of their clock."""
        return self.model_copy(update={"gpu": self.gpu.at_clock(clock)})

    def board(self) -> Board:
        """The links inside the node and the routes over them. Raises ValueError when a field that the wiring needs is missing."""
        board = wirings[self.wiring](self)
        board.attach()
        return board
