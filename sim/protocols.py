"""What a collective costs: base + hops + bytes + fill, per protocol. One formula for every algorithm, operation and network.

NCCL moves data by three protocols (docs.nvidia.com NCCL_PROTO; github.com/NVIDIA/nccl src/graph/tuning.cc): LL sends a flag with
every 4 bytes, so it needs no fence and has the shortest hops and half the rate; LL128 a flag with every 120 bytes; Simple sends
whole chunks and synchronises between them: the slowest hops and the full rate. Grouped point-to-point operations ("p2p") and
reductions in the switch ("in_switch") run in kernels with costs of their own. The time of one collective of S bytes is

    base + Σ hops·latency + T + √(Σ hops·fill · T) + S/n / copy,    T = Σ max over links of bytes / (capacity · efficiency)

with hops counted by kind of link on the longest path that data takes. The root is what pipelining costs: T cut in k pieces over h
hops takes (k + h)(a + T/k), least at T + 2√(h·a·T) + h·a; it makes small messages reach less of the rate than large ones, with no
table of sizes. The last term is a rank's own piece, which it copies without a link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from topologies.hardware import nominal_latency
from topologies.reading import Config, nearest
from topologies.units import Seconds

SIMPLE = "simple"
PROTOCOLS = ("ll", "ll128", SIMPLE)
OWN_KERNEL = {"in_switch": "in_switch", "send": "p2p", "all_to_all": "p2p", "gather": "p2p", "scatter": "p2p"}
_WHOLE = ("send", "broadcast", "reduce", "barrier")  # operations in which no rank keeps a piece of S/n


class LinkPrice(Config):
    """One kind of link: the fraction of its nominal capacity that traffic reaches, and seconds per step over it."""

    efficiency: Annotated[float, Field(gt=0, le=1)]
    latency: Seconds
    fill: Seconds = 0.0  # per step, of cutting the message in pieces: see the formula above


class Transport(Config):
    """How data are handed over: `base` seconds before the first step, then steps priced by their outermost link."""

    base: Seconds
    links: dict[str, LinkPrice]


class Rates(NamedTuple):
    """A protocol's numbers by kind of link, in the order of a topology's kinds; numbers, or free numbers of a fit."""

    base: Any
    latency: Sequence[Any]  # beyond the wire's own, which the topology counts
    efficiency: Sequence[Any]
    fill: Sequence[Any]
    copy: Any  # bytes per second


class Shape(NamedTuple):
    """What an algorithm asks of the links, per byte of S; numbers, or arrays over many collectives.

    hops: by kind of link; wire: seconds of links and switches on the longest path; loads: for each stretch, pairs of a kind and
    seconds per byte of S on its busiest link at nominal capacity; own: the part of S that is a rank's own.
    """

    hops: Sequence[Any]
    wire: Any
    loads: Sequence[Sequence[tuple[int, Any]]]
    own: Any


def rates(base: float, links: Mapping[str, LinkPrice], kinds: Sequence[str], copy: float) -> Rates:
    """`Rates` of a profile's numbers. A measured step includes the catalogue's wire latency; a cluster's own counts by link."""
    priced = [links[kind] for kind in kinds]
    latency = [max(0.0, price.latency - nominal_latency(kind)) for kind, price in zip(kinds, priced, strict=True)]
    return Rates(base, latency, [price.efficiency for price in priced], [price.fill for price in priced], copy)


def collective_seconds(price: Rates, shape: Shape, size: Any, most: Callable[..., Any] = max) -> tuple[Any, list[Any]]:
    """(seconds besides the links', seconds on the links by stretch) of one collective of `size` bytes without contention.

    Numbers, or arrays when `most` is a maximum of a list of arrays.
    """
    transfers = [size * most([load / price.efficiency[kind] for kind, load in stretch]) for stretch in shape.loads]
    hops = fill = 0.0
    for count, latency, each in zip(shape.hops, price.latency, price.fill, strict=True):
        hops, fill = hops + count * latency, fill + count * each
    rest = price.base + shape.wire + hops + (fill * sum(transfers)) ** 0.5 + size * shape.own / price.copy
    return rest, transfers


def own_piece(operation: str, members: int) -> float:
    """The part of S that a member keeps for itself."""
    return 0.0 if operation in _WHOLE else 1 / members


def split(choice: str) -> tuple[str, str]:
    """(algorithm, protocol) of a plan's "ring/ll128"; what is not named is "auto". Raises ValueError for unknown protocols."""
    algorithm, _, protocol = choice.partition("/")
    if protocol not in ("", "auto", *PROTOCOLS):
        raise ValueError(f"unknown protocol '{protocol}'{nearest(protocol, PROTOCOLS)}")
    return algorithm or "auto", protocol or "auto"


def usable(name: str, asked: str, priced: Mapping[str, Any]) -> list[str]:
    """Protocols, of those `priced`, that may run `name` = "operation/algorithm" when `asked` for a protocol or "auto".

    As NCCL_PROTO, the choice says nothing to grouped point-to-point operations; reduction in the switch is a kind of Simple.
    """
    operation, algorithm = name.split("/")
    own = OWN_KERNEL.get(algorithm, OWN_KERNEL.get(operation))
    if own is None:
        return [protocol for protocol in PROTOCOLS if protocol in priced and asked in ("auto", protocol)]
    return [] if own != "p2p" and asked not in ("auto", SIMPLE) else [own if own in priced else SIMPLE]
