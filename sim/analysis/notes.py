"""Notes on prices: where a prediction leaves the measured range, and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sim.collectives import Ids
from sim.pricing.prices import Prices, Profile
from sim.pricing.transfers.measured_tables import CollectiveTable
from topologies.documents.units import show
from topologies.hardware import AT
from topologies.links.topology import Topology, kind_of_link

ALIKE = 0.02  # by how much links may differ whose rates are said in round numbers: 31 and 31.5 GB/s of PCIe 4


class Note(NamedTuple):
    """A caveat of an operation, which stands for {} in the text: those with one text are a note together."""

    text: str
    operation: str


def joined(notes: Iterable[str | Note]) -> list[str]:
    """For the reader, in order of the first of each."""
    operations: dict[str, list[str]] = {}
    for note in notes:
        text, own = (note.text, [note.operation]) if isinstance(note, Note) else (note, [])
        operations.setdefault(text, []).extend(own)
    return [text.format(_listed(own)) if own else text for text, own in operations.items()]


def _listed(names: Sequence[str]) -> str:
    """Names as a sentence has them: "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


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
        yield "between sockets GPUs are taken to reach node.host, which was not measured: others' rings reach 1.2 to 28 GB/s"


def of_network(prices: Prices, operation: str, kinds: Iterable[str]) -> Iterator[str]:
    """A note where collectives were not measured, or not such ones between nodes with such GPUs over such a network."""
    profile = prices.profile
    note = profile.provenance.get("links")
    if profile.tables or operation == "copy":
        return
    if note is None or not note.measured:
        yield f"collectives: not measured for profile '{profile.name}'"
    elif "nic" in map(kind_of_link, kinds):
        over = f"with profile '{profile.name}' over this network"
        measured = list(dict.fromkeys(key.partition(" ")[0] for key in note.errors if key.endswith("nodes")))
        if "nic" not in note.transports or not measured:
            yield f"between nodes nothing was measured {over}: steps are others' or NCCL's"
        elif operation not in measured:
            yield f"between nodes only {_listed(measured)} was measured {over}: its steps and rates price other operations"


def of_rates(prices: Prices, rates: Mapping[str, float]) -> Iterator[str]:
    """Notes where links have other rates than those that collectives were measured over. rates: bytes per second by kind, of NICs
    for each GPU.
    """
    for kind, span in _unlike(prices, rates).items():
        what = f"collectives over {_of_rate(kind, rates[kind])} were not measured for profile '{prices.profile.name}'"
        yield f"{what}, only over {span}: priced by the same part of it"


def _of_rate(kind: str, rate: float) -> str:
    return f"{kind} of {_rate(rate)}" + " per GPU" * (kind == "nic")


@lru_cache(maxsize=1024)  # the collectives of all stages are on links of a few rates
def _rate(rate: float) -> str:
    return show(rate, "B/s")


def _unlike(prices: Prices, rates: Mapping[str, float]) -> dict[str, str]:
    """Kinds of links that have another rate than was measured, and which was."""
    note, result = prices.profile.provenance.get("links"), dict[str, str]()
    known = note.measured_range if note else {}
    for kind, rate in rates.items():
        low, high = known.get(f"{kind} between nodes" if "nic" in rates else kind, known.get(kind, (rate, rate)))
        if not low * (1 - ALIKE) <= rate <= high * (1 + ALIKE):
            result[kind] = " to ".join(dict.fromkeys(_rate(end) for end in (low, high)))
    return result


def of_error(prices: Prices, operation: str, extent: tuple[int, int], links: Mapping[str, float], sizes: Sequence[float]) -> str:
    """The error of the price of `operation` where equally many ranks on equally many nodes were measured over the same links, and
    of which sizes it is where others are asked for.

    extent: ranks and nodes; links: kinds of links, with the rates of those that `wiring.link_rates` knows; sizes: bytes.
    """
    note, (ranks, nodes) = prices.profile.provenance.get("links"), extent
    key = f"{operation} {ranks}" + (f" on {nodes} nodes" if nodes > 1 else "")
    what = f"{operation} among {ranks} ranks on {nodes} node{'s' * (nodes > 1)}"
    between = set(links) - {"pcie"} if nodes > 1 else set(links)  # across nodes PCIe only leads to the NIC
    error, unlike = note.errors.get(key) if note else None, _unlike(prices, links)
    if note is None or error is None or unlike or not between <= set(note.transports):
        over = ", ".join(_of_rate(kind, links[kind]) if kind in unlike else kind for kind in sorted(between))
        return f"{what} over {over} was not measured: its error is unknown"
    low, high = note.measured_range.get(key, note.measured_range.get("bytes", (0.0, float("inf"))))
    measured = f", of {low:g} B to {high / 2**20:g} MiB" if min(sizes) < low or max(sizes) > high else ""
    measured += f", with {prices.profile.gpu}" * (prices.gpu.name.partition(AT)[0] != prices.profile.gpu)
    return f"{what} within {error:.1%} (median, held out{measured})"


def of_collective(
    prices: Prices, table: CollectiveTable | None, name: str, extent: tuple[int, int], size: float
) -> Iterator[str | Note]:
    """A note where the measured range of a collective ends and the formula takes over.

    name: "all_reduce/ring"; extent: ranks and nodes of a group; size: bytes of the full buffer.
    """
    if "collnet" in name and not {"collnet", "in_switch_collnet"} & set(prices.profile.protocols):
        yield "sums in the fabric's switches (SHARP) are priced by NCCL's own figures, not by measurements"
    (operation, _, algorithm), (ranks, nodes) = name.partition("/"), extent
    if not prices.profile.tables:
        yield from _beyond(prices.profile, operation, extent, size)
        return
    what = f"{operation} among {ranks} ranks on {nodes} node{'s' * (nodes > 1)}"
    if table is None or table.algorithm != algorithm:
        by = f" by {algorithm}" if table else ""
        yield f"{what}{by}: not measured for profile '{prices.profile.name}', extrapolated by its formula"
    elif not table.covers(size):
        yield f"{what}: {size:g} bytes are {size / max(table.prices[-1].bytes, 1.0):.3g} times the largest that was measured"


def _beyond(profile: Profile, operation: str, extent: tuple[int, int], size: float) -> Iterator[Note]:
    """Notes where more ranks or bytes take part than were measured, or compared with what others published."""
    note, (ranks, nodes) = profile.provenance.get("links"), extent
    if note is None or not note.measured or operation == "send":
        return
    measured = operation.removesuffix("v")  # unequal parts are priced as equal ones
    where = [key for key in note.errors if key.startswith(f"{measured} ") and key.endswith(" nodes") == (nodes > 1)]
    unmeasured = f"not measured for profile '{profile.name}': {{}}"
    if nodes == 1 and not where:
        yield Note(f"{unmeasured} in a node, priced by schedule", operation)
        return
    between = [float(key.split()[1]) for key in where if nodes > 1]
    most = max(between or [note.measured_range.get("ranks", (0.0, float("inf")))[1]])
    if ranks > most and (between or nodes == 1):
        where_ranks = f"among more than {most:,.0f} ranks" + " of a node" * (nodes == 1)
        yield Note(f"{unmeasured} {where_ranks}, priced by schedule", operation)
    ranges = [note.measured_range[key] for key in (*where, "bytes") if key in note.measured_range]
    largest = max((high for _, high in ranges), default=float("inf"))
    if size > largest:
        yield Note(f"{unmeasured} of more than {largest / 2**30:.3g} GiB, priced at the highest rate that was", operation)


def of_lanes(alike: bool, lane: Ids | None) -> Iterator[str]:
    """A note where the ranks of a stage are not alike. lane: the lane of each rank; None: one lane for all."""
    if alike:
        return
    what = "ranks of a stage are not alike on this cluster"
    if lane is None:
        yield f"{what}, in too many ways to play: each collective takes as long as in its slowest group, so steps are rather long"
    else:
        yield f"{what}: one of each kind is played, {int(lane.max()) + 1} per stage"
