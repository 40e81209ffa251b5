"""Seconds of a collective: base + hops + bytes + fill, per protocol. One formula for every algorithm, operation and network.

NCCL moves data by three protocols (docs.nvidia.com NCCL_PROTO; github.com/NVIDIA/nccl src/graph/tuning.cc): LL sends a flag with
every 4 bytes, so it needs no fence and has the shortest hops and half the rate; LL128 a flag with every 120 bytes; Simple sends
whole chunks and synchronises between them: the slowest hops and the full rate. Grouped point-to-point operations ("p2p", of small
messages "p2p_ll"), single ones ("send", "send_ll": nothing comes back on the same links) and reductions in the switch
("in_switch") run in kernels with costs of their own. The time of one collective of S bytes is

    base + Σ hops·latency + T + √(Σ hops·fill · T) + S/n / copy,    T = Σ max over links of bytes / (capacity · efficiency)

with hops counted by kind of link on the longest path that data takes. The root is what pipelining costs: T cut in k pieces over h
hops takes (k + h)(a + T/k), least at T + 2√(h·a·T) + h·a; it makes small messages reach less of the rate than large ones, with no
table of sizes. The last term is a rank's own piece, which it copies without a link. Two things bound the sum:

* A step takes some time however few bytes it moves, and `overlap` of it passes while they do: Σ hops·overlap of T is not added.
  In LL each thread has 8 bytes at least (src/enqueue.cc): all-reduces of eight H100 take 18 to 20 us from 16 to 512 KiB, and
  25 of 1 MiB.
* NCCL runs a short message in LL by few threads of few channels; from some 16 KiB on the base takes longer by a part, `widening`,
  as all of them must meet, and so does a step inside a node that writes what it receives: of all-gathers each, of
  reduce-scatters none (src/device/all_gather.h, reduce_scatter.h), of all-reduces half. Eight A100 take 15 us for either up to
  8 KiB, for 64 to 256 KiB 21 and 18.

Point-to-point kernels inside a node move a channel's part of a message in chunks, each of which the receiver copies out when
it is there as a whole (src/device/sendrecv.h): the copy of one, `chunk`, hides behind nothing. See `nccl_tuning.chunks`.

Reductions in the switch go by loops instead of the root: see sim/pricing/transfers/switch_loops.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from operator import mul
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field

from sim.collectives import OPERATIONS
from sim.pricing.transfers.switch_loops import Loops, seconds
from topologies.documents.units import BytesPerSecond, Seconds
from topologies.fabric import nominal_latency
from topologies.links.topology import kind_of_link
from topologies.reading import Config, nearest

SIMPLE = "simple"
PROTOCOLS = ("ll", "ll128", SIMPLE)
IN_SWITCH, P2P = ("in_switch",), ("p2p_ll", "p2p")
SENDS = ("send_ll", "send")  # of one GPU to another while nothing comes back, where that was measured
COLLNET, IN_SWITCH_COLLNET = ("collnet",), ("in_switch_collnet",)
OWN_KERNEL = {  # algorithm or operation -> protocols of its kernel
    "in_switch": IN_SWITCH,
    "in_switch_tree": IN_SWITCH,
    "in_switch_collnet": IN_SWITCH_COLLNET,
    "collnet_direct": COLLNET,
    "collnet_chain": COLLNET,
    "send": SENDS,
    "all_to_all": P2P,
    "all_to_allv": P2P,
    "gather": P2P,
    "scatter": P2P,
}
NCCL = {  # what NCCL chooses from, where others exist too: github.com/NVIDIA/nccl src/graph/tuning.cc, topoGetAlgoInfo
    "all_reduce": ("ring", "tree", "in_switch", "in_switch_tree", "in_switch_collnet", "collnet_direct", "collnet_chain"),
    "all_gather": ("ring", "pat", "collnet_direct"),
    "reduce_scatter": ("ring", "pat", "collnet_direct"),
    "broadcast": ("chain",),
    "reduce": ("chain",),
    "all_to_all": ("direct",),
    "all_to_allv": ("direct",),
}
_FORMATS: dict[str, tuple[float, dict[str, float]]] = {  # part of a line that is data; seconds per step by kind of link
    "ll": (1 / 2, {"nvlink": 0.6e-6, "pcie": 1e-6, "host": 1e-6, "nic": 5e-6}),
    "ll128": (120 / 128, {"nvlink": 1.9e-6, "pcie": 2.5e-6, "host": 2.5e-6, "nic": 8.5e-6}),
}
SIMPLE_STEP = 9e-6  # more of a step between nodes in Simple, 14 us, than in LL, 5 (src/graph/tuning.cc)
RING = "ring_"  # before a protocol's name: its prices for rings
SWITCHED = 5  # fewest ranks of a node for which NCCL reduces in the switch (observed: 4 H100 form rings, 8 use the switch)
WIDE = 16 * 1024.0  # bytes at which half of `widening` has come
BETWEEN = ("nic", "leaf", "spine")  # kinds of links between nodes
WRITING = {"reduce_scatter": 0.0, "reduce": 0.0, "all_reduce": 0.5}  # part of the steps that write what they receive, of others 1
_WHOLE = ("send", "broadcast", "reduce", "barrier")  # operations in which no rank keeps a piece of S/n


class LinkPrice(Config):
    """One kind of link: the fraction of its nominal capacity that traffic reaches, and seconds per step over it."""

    efficiency: Annotated[float, Field(ge=1e-6, le=1)]
    latency: Seconds
    fill: Seconds = 0.0  # per step, of cutting the message in pieces: see the formula above
    overlap: Seconds = 0.0  # of a step, in which its bytes pass: see there


class Transport(Config):
    """How data are handed over: `base` seconds before the first step, then steps priced by their outermost link.

    Kinds of link that are not in `links` were not measured; `complete` prices them by rule.
    """

    base: Seconds
    links: dict[str, LinkPrice]
    copy_rate: Annotated[BytesPerSecond, Field(gt=0)] = inf  # at which a rank copies its own piece; inf: the profile's
    widening: Annotated[float, Field(ge=0, le=10)] = 0.0  # part by which base and steps that write take longer: see above
    chunk: Seconds = 0.0  # of copying a whole chunk of a channel out, which hides behind nothing: see above
    kernel: Seconds = inf  # of the base, which takes longer then, where a launch is in it that does not; inf: all of it
    handover: Seconds = 0.0  # for each member, in every loop of a reduction in the switch: sim/pricing/transfers/switch_loops.py


def complete(name: str, links: Mapping[str, LinkPrice], simple: Mapping[str, LinkPrice]) -> dict[str, LinkPrice]:
    """`links` of protocol `name` and, by rule, of every kind that Simple prices and `links` does not.

    The efficiency is Simple's less the format's overhead, the latency NCCL's own figure (src/graph/tuning.cc hwLat), on the spine
    more by what Simple has there more than on the NIC; kernels of their own cost what Simple costs.
    """
    share, steps = _FORMATS.get(name, (1.0, {}))
    further = simple["spine"].latency - simple["nic"].latency
    result = {}
    for kind, price in simple.items():
        own = links.get(kind)
        if own is None:
            latency = steps["nic"] + further if kind == "spine" and steps else steps.get(kind, price.latency)
            own = LinkPrice.model_construct(
                efficiency=price.efficiency * share,
                latency=min(latency, price.latency),
                fill=0.0 if name in IN_SWITCH else price.fill,  # whose loops cut messages
            )
        result[kind] = own
    return result


def with_rings(protocols: Mapping[str, Transport], rings: Mapping[str, LinkPrice], further: float) -> dict[str, Transport]:
    """`protocols` and, as "ring_ll" …, what they cost rings, whose step over a NIC `rings` prices by protocol.

    A ring's message is cut into as many pieces as it has members, and a step hands one on: nothing is pipelined further, as it
    is down a tree, where a step lasts as long as the piece that NCCL chose. Sends hand over as rings do. further: seconds of a
    step over the spine beyond one between NICs.
    """
    result = dict(protocols)
    for name, price in rings.items():
        network = between_nodes(price, further)
        result[RING + name] = _over(protocols[name], network)
        for own in (*P2P, *SENDS) if name == SIMPLE else ():
            if own in protocols:
                result[own] = _over(protocols[own], network)
    return result


def with_loops(protocols: Mapping[str, Transport], further: float) -> dict[str, Transport]:
    """`protocols` with what a step between nodes costs reductions in the switch, whose loops cut messages: by NCCL's own figures
    so much more than in LL.
    """
    result = dict(protocols)
    for name in IN_SWITCH if "ll" in result else ():
        if name in result:
            step, carried = result["ll"].links["nic"].latency + SIMPLE_STEP, result[SIMPLE].links["nic"].efficiency
            price = LinkPrice.model_construct(efficiency=carried, latency=step, fill=0.0)
            result[name] = _over(result[name], between_nodes(price, further))
    return result


def _over(protocol: Transport, network: Mapping[str, LinkPrice]) -> Transport:
    links = dict(protocol.links) | dict(network)
    return protocol.model_copy(update={"links": links})


def between_nodes(price: LinkPrice, further: float) -> dict[str, LinkPrice]:
    """A step over NICs, and one over the spine, which takes `further` seconds more."""
    return {"nic": price, "spine": price.model_copy(update={"latency": price.latency + further})}


def priced_as(name: str, protocol: str, priced: Mapping[str, Any]) -> str:
    """The entry of `priced` for `name` = "operation/algorithm" by `protocol`: rings have their own where they were measured."""
    own = RING + protocol if name.endswith("/ring") else protocol
    return own if own in priced else protocol


def with_collnet(protocols: Mapping[str, Transport], simple: Mapping[str, LinkPrice]) -> dict[str, Transport]:
    """`protocols` and, where NCCL's are among them, reductions in the fabric's switches, which nobody's sweep here measured.

    NCCL's own figures (src/graph/tuning.cc at 5067397c): CollNet has no base, 3.7 us per step over NVLink and 31 us over the
    network, up and down together; it reaches 0.85 of what rings do, which from 0.94 of a NIC leaves the 20 of 25 GB/s that a
    maintainer names (issue 320 of github.com/NVIDIA/nccl). NVLS with CollNet costs what NVLS does in the node.
    """
    result = dict(protocols)
    if "ll" not in protocols:
        return result
    network = {
        kind: LinkPrice.model_construct(efficiency=simple[kind].efficiency * 0.85, latency=latency, fill=0.0)
        for kind, latency in (("nic", 15.5e-6), ("spine", 0.0))
    }
    inside = {
        kind: LinkPrice.model_construct(efficiency=price.efficiency, latency=3.7e-6, fill=price.fill)
        for kind, price in simple.items()
    }
    result.setdefault("collnet", Transport.model_construct(base=0.0, links=inside | network))
    if "in_switch" in protocols:
        switch = protocols["in_switch"]
        result.setdefault("in_switch_collnet", _over(switch, network))
    return result


class Rates(NamedTuple):
    """A protocol's numbers by kind of link, in the order of a topology's kinds."""

    base: float
    latency: Sequence[float]  # beyond the wire's own, which the topology counts
    efficiency: Sequence[float]
    fill: Sequence[float]
    copy: float  # bytes per second
    widening: Sequence[float] = ()  # seconds more of the base and of a step by kind of link, once all channels are used
    handover: float = 0.0
    overlap: Sequence[float] = ()
    chunk: float = 0.0


class Shape(NamedTuple):
    """The load of an algorithm on links, per byte of S.

    hops: by kind of link; wire: seconds of links and switches on the longest path; loads: for each stretch, pairs of a kind and
    seconds per byte of S on its busiest link at nominal capacity; own: the part of S that is a rank's own; loops: of a reduction
    in the switch; writing: the part of the steps that write what they receive; chunks: of a channel, of point-to-point messages.
    """

    hops: Sequence[float]
    wire: float
    loads: Sequence[Sequence[tuple[int, float]]]
    own: float
    loops: Loops | None = None
    writing: float = 1.0
    chunks: float = 0.0


def rates(protocol: Transport, kinds: Sequence[str], copy: float) -> Rates:
    """`Rates` of a profile's numbers. A measured step includes the catalogue's wire latency; a cluster's own counts by link."""
    priced = [
        protocol.links.get(kind) or protocol.links[kind_of_link(kind)] for kind in kinds
    ]  # of a fleet's nodes by kind of GPU
    nominal = [nominal_latency(kind_of_link(kind)) for kind in kinds]
    latency = [max(0.0, price.latency - wire) for wire, price in zip(nominal, priced, strict=True)]
    inside = [step * (kind_of_link(kind) not in BETWEEN) for step, kind in zip(latency, kinds, strict=True)]
    widening = [protocol.widening * step for step in (min(protocol.base, protocol.kernel), *inside)] if protocol.widening else ()
    copy = copy if protocol.copy_rate == inf else protocol.copy_rate
    efficiency, fill = [price.efficiency for price in priced], [price.fill for price in priced]
    overlap = [min(price.overlap, step) for price, step in zip(priced, latency, strict=True)]
    return Rates(
        protocol.base,
        latency,
        efficiency,
        fill,
        copy,
        widening,
        protocol.handover,
        overlap if any(overlap) else (),
        protocol.chunk,
    )


def collective_seconds(price: Rates, shape: Shape, size: Any) -> tuple[Any, list[Any]]:
    """(seconds besides the links', seconds on the links by stretch) of one collective of `size` bytes without contention.

    `size` may be an array of sizes; then so are the answers.
    """
    efficiency = price.efficiency
    transfers = [size * max([load / efficiency[kind] for kind, load in stretch]) for stretch in shape.loads]
    hops = fill = 0.0
    for count, latency, each in zip(shape.hops, price.latency, price.fill, strict=True):
        hops, fill = hops + count * latency, fill + count * each
    rest = price.base + shape.wire + hops + (fill * sum(transfers)) ** 0.5 + size * shape.own / price.copy
    least = np.minimum if isinstance(size, np.ndarray) else min
    if price.chunk and shape.chunks:
        rest = rest + price.chunk * least(size * shape.chunks, 1.0)
    if price.overlap:
        within = sum(map(mul, shape.hops, price.overlap))
        rest = rest - least(sum(transfers), within)
    if shape.loops:
        on = {kind: sum(dict(stretch).get(kind, 0.0) for stretch in shape.loads) / efficiency[kind] for kind in shape.loops.kinds}
        further = sum(shape.hops[kind] * on[kind] for kind in shape.loops.across)
        inside = max([on[kind] for kind in shape.loops.inside], default=0.0)
        rest = rest + seconds(shape.loops, size, sum(transfers), size * inside, size * further, price.handover)
    if price.widening:
        more = price.widening[0] + shape.writing * sum(map(mul, shape.hops, price.widening[1:]))
        rest = rest + more * size**2 / (size**2 + WIDE**2)
    return rest, transfers


def own_piece(operation: str, members: int) -> float:
    """The part of S that a member keeps for itself."""
    return 0.0 if operation in _WHOLE else 1 / members


def split(choice: str, operation: str = "") -> tuple[str, str]:
    """(names of algorithms, protocol) that a plan's choice asks of `operation`.

    A choice is "[operation/]algorithm[/protocol]", or several with commas: "ring/ll128", "all_reduce/tree, all_gather/ring/ll".
    What is not named is "auto". Raises ValueError for unknown protocols.
    """
    names, protocol = [], "auto"
    for part in choice.split(","):
        words = part.strip().split("/")
        last = words.pop() if len(words) > 1 and (words[-1] in PROTOCOLS or words[0] not in OPERATIONS) else "auto"
        if last not in ("auto", *PROTOCOLS):
            raise ValueError(f"unknown protocol '{last}'{nearest(last, PROTOCOLS)}")
        if last != "auto" and (len(words) == 1 or words[0] == operation):
            protocol = last
        names.append("/".join(words))
    return ", ".join(names), protocol


def considered(operation: str, names: Sequence[str], priced: Mapping[str, Any], each: int) -> tuple[str, ...]:
    """Algorithms of `names` that "auto" chooses from; with prices of NCCL's protocols, those that NCCL has.

    each: members of the group in its fullest node; the switch needs some of them, PAT only one.
    """
    if not {"ll", "ll128"} & set(priced):
        return tuple(names)
    known = NCCL.get(operation, tuple(names))
    fits = {"pat": each == 1} | dict.fromkeys(("in_switch", "in_switch_tree", "in_switch_collnet"), each >= SWITCHED)
    return tuple(name for name in names if name in known and fits.get(name, True)) or tuple(names)


def usable(name: str, asked: str, priced: Mapping[str, Any]) -> list[str]:
    """The protocols of `priced` that may run `name` = "operation/algorithm" when `asked` for a protocol or "auto".

    As NCCL_PROTO, the choice says nothing to grouped point-to-point operations; reduction in the switch is a kind of Simple, and
    needs a price: hardware without it has none.
    """
    operation, algorithm = name.split("/")
    own = OWN_KERNEL.get(algorithm, OWN_KERNEL.get(operation))
    if own is None:
        return [protocol for protocol in PROTOCOLS if protocol in priced and asked in ("auto", protocol)]
    able = [protocol for protocol in own if protocol in priced]
    if own == SENDS and not able:
        own, able = P2P, [protocol for protocol in P2P if protocol in priced]
    if own in (P2P, SENDS) or len(priced) == 1:  # a profile of Simple alone prices everything by it
        return able or [SIMPLE]
    return able if asked in ("auto", SIMPLE) else []
