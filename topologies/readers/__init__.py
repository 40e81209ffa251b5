"""Readers of what real machines print about themselves: a function in a file of this folder, from text to fields of a cluster.

A reader returns None when the text is not in its format, so that the format follows from the content. What a file does not say
(which GPU, how fast a NIC) the user adds, as to any description: `based_on: dump.xml` and the missing fields.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from topologies.reading import UserError
from topologies.registry import Registry


class ClusterDump(NamedTuple):
    """data: fields of a cluster as YAML would give them; notes: what was ignored, and what was assumed."""

    data: dict[str, Any]
    notes: tuple[str, ...] = ()


readers: Registry[Callable[[str], ClusterDump | None]] = Registry("reader", package="topologies.readers")

SOCKETS = "20 GB/s"  # between sockets where nothing is known: NCCL has 10 (Skylake) to 22 (Sapphire Rapids), src/graph/topo.h
NIC = "100 Gb/s"


def read_dump(text: str, where: str) -> ClusterDump | None:
    """The description by the first reader that knows the format; None when none does. Raises UserError for a broken file."""
    for name in readers:
        try:
            dump = readers[name](text)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None
        if dump is not None:
            return dump
    return None
