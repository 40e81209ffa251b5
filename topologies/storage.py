"""Where checkpoints are written: a shared file system, an object store, with bandwidth per client and in all, from the catalogue
(`ls topologies/storages`) or a user's own description. Disks and memory of nodes are parts of nodes (`topologies.hardware.Cpu`).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from topologies.catalogue import Catalogue
from topologies.documents.durations import Duration
from topologies.documents.units import BytesPerSecond
from topologies.reading import Config


class Storage(Config):
    """Storage that all nodes share. A bandwidth that is absent is no limit."""

    name: str = "storage"  # what answers call it
    write: BytesPerSecond = Field(default=0.0, gt=0)  # of all nodes together, or of each unit of so many nodes
    read: BytesPerSecond = Field(default=0.0, gt=0)  # likewise, for loads
    unit: int = Field(default=0, ge=1, le=2**20)  # nodes of a scalable unit, of which there are as many as the job needs; 0: one
    node_write: BytesPerSecond = Field(default=0.0, gt=0)  # of one node
    node_read: BytesPerSecond = Field(default=0.0, gt=0)  # likewise, for loads
    latency: Duration = Field(default=0.0)  # seconds of each save or load besides: metadata, a barrier, the rename at its end
    shares_nics: bool = False  # whether traffic to it crosses the NICs that training uses
    source: str = ""  # where the numbers come from

    def in_all(self, rate: float, nodes: int) -> float:
        """Bytes per second for so many nodes together; infinite without a limit."""
        units = -(-nodes // self.unit) if self.unit else 1
        return rate * units if rate else float("inf")


_CATALOGUE = Catalogue(Storage, Path(__file__).parent / "storages", "storage")


def storage_names() -> list[str]:
    """Names in the catalogue, sorted."""
    return _CATALOGUE.names()


def load_storage(given: object, where: str) -> Storage:
    """Storage by its name in the catalogue, by a path, or by its fields. Raises UserError."""
    return _CATALOGUE.load(given, where)
