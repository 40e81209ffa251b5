"""Notes on prices: where a prediction leaves the measured range, and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from sim.collectives import Ids
from sim.pricing.prices import Prices, Profile
from sim.pricing.transfers.measured_tables import CollectiveTable
from topologies.hardware import AT
from topologies.links.topology import Topology, kind_of_link


def of_machine(prices: Prices, topology: Topology, world: int) -> Iterator[str]:
    """Hardware other than the profile's, and processes that share cores."""
    profile, gpu = prices.profile, prices.gpu.name
    if gpu.partition(AT)[0] != profile.gpu:
        yield f"profile {profile.name} was made for {profile.gpu}, and is used here for {gpu}"
    most = int(np.bincount(topology.node_of(np.arange(world))).max()) if profile.processes else 0
    if most > profile.processes:
        yield (
            f"{most} processes on a node: profile {profile.name} was measured with {profile.processes}, each with a core of its "
            f"own; --effect 'all: cores {profile.processes}' has them share cores, but their collectives are another regime, "
            "several times slower, that is not priced here"
        )


def of_sockets(prices: Prices, kinds: Iterable[str]) -> Iterator[str]:
    """A note where GPUs reach each other through their CPUs. kinds: the kinds of links that a collective takes.

    Measured rings over eight GPUs of two sockets reach from 1.2 to 28 GB/s (profile l40s, provenance of links).
    """
    if "host" in kinds and not prices.profile.tables:
        yield "between sockets GPUs are taken to reach node.host, which was not measured: such nodes differ more than tenfold"


def of_network(prices: Prices, kinds: Iterable[str]) -> Iterator[str]:
    """A note where a collective leaves the node and no sweep between nodes was made with such GPUs over such a network."""
    profile = prices.profile
    note = profile.provenance.get("links")
    if note and note.measured and not profile.tables and "nic" in map(kind_of_link, kinds) and "nic" not in note.transports:
        yield f"between nodes nothing was measured with profile '{profile.name}' over this network: steps are others' or NCCL's"


def of_error(prices: Prices, operation: str, extent: tuple[int, int], kinds: set[str], sizes: Sequence[float]) -> str:
    """The error of the price of `operation` where equally many ranks on equally many nodes were measured over the same links, and
    of which sizes it is where others are asked for.

    extent: ranks and nodes; kinds: kinds of links; sizes: bytes.
    """
    note, (ranks, nodes) = prices.profile.provenance.get("links"), extent
    key = f"{operation} {ranks}" + (f" on {nodes} nodes" if nodes > 1 else "")
    what = f"{operation} among {ranks} ranks on {nodes} node{'s' * (nodes > 1)}"
    between = kinds - {"pcie"} if nodes > 1 else kinds  # across nodes PCIe only leads to the NIC
    error = note.errors.get(key) if note else None
    if note is None or error is None or not between <= set(note.transports):
        over = ", ".join(sorted(between))
        return f"{what} over {over} was not measured: its error is unknown"
    low, high = note.measured_range.get("bytes", (0.0, float("inf")))
    measured = f", of {low:g} B to {high / 2**20:g} MiB" if min(sizes) < low or max(sizes) > high else ""
    return f"{what} within {error:.1%} (median, held out{measured})"


def of_collective(
    prices: Prices, table: CollectiveTable | None, name: str, extent: tuple[int, int], size: float
) -> Iterator[str]:
    """A note where the measured range of a collective ends and the formula takes over.

    name: "all_reduce/ring"; extent: ranks and nodes of a group; size: bytes of the full buffer.
    """
    if "collnet" in name and not {"collnet", "in_switch_collnet"} & set(prices.profile.protocols):
        yield "sums in the fabric's switches (SHARP) are priced by NCCL's own figures, not by measurements"
    (operation, _, algorithm), (ranks, nodes) = name.partition("/"), extent
    if not prices.profile.tables:
        yield from _beyond(prices.profile, operation, ranks, size)
        return
    what = f"{operation} among {ranks} ranks on {nodes} node{'s' * (nodes > 1)}"
    if table is None or table.algorithm != algorithm:
        by = f" by {algorithm}" if table else ""
        yield f"{what}{by}: not measured for profile '{prices.profile.name}', extrapolated by its formula"
    elif not table.covers(size):
        yield f"{what}: {size:g} bytes are {size / max(table.prices[-1].bytes, 1.0):.3g} times the largest that was measured"


def _beyond(profile: Profile, operation: str, ranks: int, size: float) -> Iterator[str]:
    """Notes where more ranks or bytes take part than were measured, or compared with what others published."""
    note = profile.provenance.get("links")
    if note is None or not note.measured or operation == "send":
        return
    compared = [float(key.split()[1]) for key in note.errors if key.startswith(f"{operation} ") and " nodes" in key]
    most = max(note.measured_range.get("ranks", (0.0, float("inf")))[1], *compared, 0.0)
    if ranks > most:
        what = f"{operation} among more than {most:,.0f} ranks"
        yield f"{what} was not measured for profile '{profile.name}': priced by its schedule"
    largest = note.measured_range.get("bytes", (0.0, float("inf")))[1]
    if size > largest:
        what = f"{operation} of more than {largest / 2**30:.3g} GiB"
        yield f"{what} was not measured for profile '{profile.name}': priced at its highest rate"


def of_lanes(alike: bool, lane: Ids | None) -> Iterator[str]:
    """A note where the ranks of a stage are not alike. lane: the lane of each rank; None: one lane for all."""
    if alike:
        return
    what = "ranks of a stage are not alike on this cluster"
    if lane is None:
        yield f"{what}, in too many ways to play: each collective takes as long as in its slowest group, so steps are rather long"
    else:
        yield f"{what}: one of each kind is played, {int(lane.max()) + 1} per stage"
