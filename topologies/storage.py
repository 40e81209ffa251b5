"""Where checkpoints are written: a shared file system, an object store, with bandwidth per client and in all, from the catalogue
(`ls topologies/storages`) or a user's own description. Disks and memory of nodes are parts of nodes (`topologies.hardware.Cpu`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from topologies.durations import Duration
from topologies.reading import Config, UserError, build, load_yaml, nearest, shown
from topologies.units import BytesPerSecond

_FOLDER = Path(__file__).parent / "storages"


class Storage(Config):
    """Storage that all nodes share. A bandwidth that is absent is no limit."""

    name: str = "storage"
    write: BytesPerSecond = Field(default=0.0, gt=0)  # of all nodes together, or of each unit of so many nodes
    read: BytesPerSecond = Field(default=0.0, gt=0)
    unit: int = Field(default=0, ge=1, le=2**20)  # nodes of a scalable unit, of which there are as many as the job needs; 0: one
    node_write: BytesPerSecond = Field(default=0.0, gt=0)  # of one node
    node_read: BytesPerSecond = Field(default=0.0, gt=0)
    latency: Duration = Field(default=0.0)  # seconds of each save or load besides: metadata, a barrier, the rename at its end
    shares_nics: bool = False  # whether traffic to it crosses the NICs that training uses
    source: str = ""

    def in_all(self, rate: float, nodes: int) -> float:
        """Bytes per second for so many nodes together; infinite without a limit."""
        units = -(-nodes // self.unit) if self.unit else 1
        return rate * units if rate else float("inf")


def storage_names() -> list[str]:
    """Names in the catalogue, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_storage(given: object, where: str) -> Storage:
    """Storage by its name in the catalogue, by a path, or by its fields. Raises UserError."""
    if isinstance(given, Storage):
        return given
    if isinstance(given, Mapping):
        own = {field: value for field, value in given.items() if field != "based_on"}
        base = _file(given["based_on"], where) if "based_on" in given else {}
        return build(Storage, {**base, **own}, where)
    if not isinstance(given, str):
        raise UserError(f"{where}={shown(given)}: must be a name, a file or fields; known: {', '.join(storage_names())}")
    return build(Storage, _file(given, where), where if given in storage_names() else given)


def _file(name: object, where: str) -> dict[str, Any]:
    """The fields behind a name or a path."""
    known = storage_names()
    if name in known:
        return {"name": name, **load_yaml(_FOLDER / f"{name}.yaml")}
    if isinstance(name, str) and ("/" in name or "." in name):
        return {"name": Path(name).stem, **load_yaml(Path(name))}
    raise UserError(f"{where}: unknown storage '{name}'{nearest(str(name), known)}")
