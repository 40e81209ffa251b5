"""A step as Chakra execution traces, one of each rank, which ASTRA-sim and others run on networks of their own.

Format: github.com/mlcommons/chakra schema/protobuf/et_def.proto at 6dc63e1, messages one behind the other with their lengths as
varints before them (src/third_party/utils/protolib.py), version 0.0.4; attributes as ASTRA-sim reads them
(github.com/astra-sim/astra-sim astra-sim/workload/Workload.cc and feeder_v3/et_feeder_node_attr.h). Groups of collectives are in
`comm_group.json`, by the number that is their `pg_name`. Protocol buffers are written by hand: three of their wire types do.

Nodes are kernels in a row between two collectives, collectives, sends and receives; they depend on what was before them on their
stream and on what they wait for. Durations are what was played, of collectives without contention inside blocks. Hosts are not
in it: what a GPU waits for launches is part of its kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from sim.analysis.breakdown import PHASES
from sim.grid import Grid
from sim.pricing.block_costs import SLOWDOWN, BlockCost
from sim.pricing.transfers.traffic import Traffic, members
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.program import CPU, Block, Collective, Join, Kernel, Ref, Send, SharedItems, Start
from sim.timeline import Timeline, op_label
from topologies.documents.writing import whole_file, write_whole
from topologies.reading import UserError

VERSION = "0.0.4"
MOST = 2_000_000  # nodes of all ranks
MEM_LOAD, MEM_STORE, COMP, SEND, RECEIVE, COLLECTIVE = 2, 3, 4, 5, 6, 7  # NodeType
TYPES = {  # CollectiveCommType
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "all_to_allv": 6,
    "reduce_scatter": 7,
    "barrier": 9,
}
_COMPUTE = (*PHASES, SLOWDOWN, "launch")


def write_chakra(timeline: Timeline, folder: Path) -> list[Path]:
    """Write `shardyard.RANK.et` of every rank and `comm_group.json`; returns the paths. timeline: of ranks that are not folded.

    The same timeline gives the same bytes. Raises UserError where that is more than MOST nodes.
    """
    if any(lane.ranks > 1 for lane in timeline.lanes):
        raise ValueError("ranks are folded: simulate with fold=False")
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[tuple[int, ...], int] = {}
    paths, nodes = [], 0
    for lane, actor in enumerate(timeline.lanes):
        rank = _Rank(timeline, lane, groups, MOST - nodes)
        path = folder / f"shardyard.{actor.rank}.et"
        with whole_file(path) as file:
            file.write(_delimited(_text(1, VERSION)))
            for node in rank.nodes():
                file.write(_delimited(node))
        nodes += rank.count
        paths.append(path)
    listed = {str(number): list(ranks) for ranks, number in groups.items()}
    write_whole(folder / "comm_group.json", json.dumps(listed) + "\n")
    return [*paths, folder / "comm_group.json"]


class _Part(NamedTuple):
    """A piece of a block: seconds of kernels in a row, then a collective that is run, started or joined, or the end."""

    seconds: float
    what: Collective | Start | Join | None


@dataclass
class _Rank:
    """The nodes of one rank. groups: numbers of groups by their ranks, shared by all; room: nodes that there may be."""

    timeline: Timeline
    lane: int
    groups: dict[tuple[int, ...], int]
    room: int
    count: int = 0
    owed: float = 0.0  # µs by which durations so far are shorter than what was played
    last: dict[str, int] = field(default_factory=dict)  # stream -> its newest node
    ends: dict[Ref, int] = field(default_factory=dict)  # an op -> the node with which it ends
    parts: dict[tuple[int, float], tuple[_Part, ...]] = field(default_factory=dict)

    def nodes(self) -> Iterator[bytes]:
        """In program order."""
        timeline, actor = self.timeline, self.timeline.lanes[self.lane]
        base = timeline.offset[self.lane]
        for number, op in timeline.ops(self.lane):
            after = []
            for ref in op.after:
                if ref.cohort != actor.cohort and ref not in self.ends:
                    yield from self._receive(ref)
                if ref in self.ends:  # not one of the step before
                    after.append(self.ends[ref])
            start, seconds, cost = timeline.start[number], timeline.end[number] - timeline.start[number], timeline.cost[number]
            if isinstance(op.work, Block):
                assert isinstance(cost, BlockCost)
                yield from self._block(op.work, op.stream, after, start, seconds, cost)
            else:
                assert isinstance(cost, TransferCost)
                yield from self._transfer(op.work, op.stream, after, start, seconds, cost, number - base)
            self.ends[Ref(actor.cohort, number - base)] = self.last[op.stream]

    def _node(self, stream: str, kind: int, name: str, after: Iterable[int], micros: tuple[int, int], more: bytes) -> bytes:
        """A node behind the newest of its stream. micros: start and duration."""
        if self.count == self.room:
            raise UserError(f"a trace of more than {MOST:,} nodes: take fewer layers, microbatches or ranks")
        self.count += 1
        deps = sorted({*after, *([self.last[stream]] if stream in self.last else [])})
        self.last[stream] = self.count
        data = _number(1, self.count) + _text(2, name) + _number(3, kind)
        if deps:
            data += _bytes(5, b"".join(map(_varint, deps)))
        return data + _number(6, micros[0]) + _number(7, micros[1]) + more

    def _computation(self, stream: str, name: str, after: Iterable[int], start: float, seconds: float) -> bytes:
        """Kernels; whole µs, of which as many are left over as are missing before."""
        self.owed += 1e6 * seconds
        whole = max(0, round(self.owed))
        self.owed -= whole
        return self._node(stream, COMP, name, after, (round(1e6 * start), whole), _flag("is_cpu_op", False))

    def _block(
        self, block: Block, stream: str, after: list[int], start: float, seconds: float, cost: BlockCost
    ) -> Iterator[bytes]:
        """Kernels between collectives, as long together as they were in the step."""
        exposed = sum(time for (part, _), time in cost.parts.items() if part not in _COMPUTE)
        prices = self.timeline.prices(self.lane)
        priced = sum(times * prices.seconds(item) for times, items in block.runs for item in items if isinstance(item, Kernel))
        factor = max(0.0, seconds - exposed) / priced if priced else 0.0
        for times, items in block.runs:
            parts = self._parts(items, factor)
            for _ in range(times):
                started: dict[Collective, list[int]] = {}
                for part in parts:
                    if part.seconds or (after and part.what is None):
                        yield self._computation(stream, block.name, after, start, part.seconds)
                        start, after = start + part.seconds, []
                    if isinstance(part.what, Join):
                        after = [*after, *started[part.what.collective][:1]]
                        del started[part.what.collective][0]
                    elif part.what is not None:
                        work = part.what.collective if isinstance(part.what, Start) else part.what
                        own = self.timeline.op_costs.collective(work, self.timeline.lanes[self.lane].cohort)
                        where = part.what.stream if isinstance(part.what, Start) else stream
                        before = [*after, *([self.last[stream]] if stream in self.last else [])]
                        yield from self._collective(work, where, before, start, own.alone, own)
                        if isinstance(part.what, Start):
                            started.setdefault(work, []).append(self.last[where])
                        else:
                            start, after = start + own.alone, []
        if after or stream not in self.last:
            yield self._computation(stream, block.name, after, start, 0.0)

    def _parts(self, items: SharedItems, factor: float) -> tuple[_Part, ...]:
        key = id(items), factor
        if key not in self.parts:
            prices, parts, seconds = self.timeline.prices(self.lane), [], 0.0
            for item in items:
                if isinstance(item, Kernel):
                    seconds += factor * prices.seconds(item)
                else:
                    parts.append(_Part(seconds, item))
                    seconds = 0.0
            self.parts[key] = (*parts, *([_Part(seconds, None)] if seconds else []))
        return self.parts[key]

    def _transfer(
        self, work: Collective | Send, stream: str, after: list[int], start: float, seconds: float, cost: TransferCost, tag: int
    ) -> Iterator[bytes]:
        """An op of its own. tag: its number in the program."""
        micros = round(1e6 * start), round(1e6 * seconds)
        if isinstance(work, Collective):
            yield from self._collective(work, stream, after, start, seconds, cost)
        elif work.route is None:
            rank = self.timeline.lanes[self.lane].rank
            receiver = _pairs(self.timeline.program.grid, cost.traffic)[rank]
            yield self._node(stream, SEND, work.label, after, micros, _between(rank, receiver, work.bytes, tag))
        elif work.axis == CPU:
            yield self._node(stream, COMP, work.label, after, micros, _flag("is_cpu_op", True))
        else:
            size = _flag("is_cpu_op", False) + _unsigned("tensor_size", work.bytes)
            yield self._node(stream, MEM_LOAD if work.route[1] == "gpu" else MEM_STORE, work.label, after, micros, size)

    def _collective(
        self, work: Collective, stream: str, after: list[int], start: float, seconds: float, cost: TransferCost
    ) -> Iterator[bytes]:
        """Of an all-gather ASTRA-sim counts what a rank puts in, not the n pieces together (its system/collective/Ring.cc)."""
        ranks = _group(self.timeline.program.grid, cost.traffic, self.timeline.lanes[self.lane].rank)
        number = self.groups.setdefault(ranks, len(self.groups) + 1)
        size = work.bytes * work.repeat / (len(ranks) if work.operation == "all_gather" else 1)
        more = _flag("is_cpu_op", False) + _signed("comm_type", TYPES[work.operation]) + _unsigned("comm_size", size)
        more += _attribute("pg_name", _text(29, str(number)))
        yield self._node(stream, COLLECTIVE, work.label, after, (round(1e6 * start), round(1e6 * seconds)), more)

    def _receive(self, ref: Ref) -> Iterator[bytes]:
        """What another rank sends to this one."""
        timeline, rank = self.timeline, self.timeline.lanes[self.lane].rank
        cohort = timeline.program.cohorts[ref.cohort]
        work, (first, last) = cohort.ops[ref.op].work, cohort.steady or (0, len(cohort.ops))
        if not isinstance(work, Send) or not first <= ref.op < last:
            return
        for lane, actor in enumerate(timeline.lanes):
            number = timeline.offset[lane] + ref.op
            cost = timeline.cost[number]
            if actor.cohort != ref.cohort or not isinstance(cost, TransferCost):
                continue
            if _pairs(timeline.program.grid, cost.traffic)[actor.rank] == rank:
                start, seconds = timeline.start[number], timeline.end[number] - timeline.start[number]
                micros, sent = (round(1e6 * start), round(1e6 * seconds)), _between(actor.rank, rank, work.bytes, ref.op)
                yield self._node(f"receive {ref}", RECEIVE, op_label(cohort.ops[ref.op]), (), micros, sent)
                self.ends[ref] = self.count
                return


@lru_cache
def _pairs(grid: Grid, traffic: Traffic) -> dict[int, int]:
    """Receivers of a send by their senders."""
    return {int(sender): int(receiver) for sender, receiver in members(grid, traffic._replace(groups=()))}


@lru_cache
def _all_groups(grid: Grid, traffic: Traffic) -> dict[int, tuple[int, ...]]:
    groups = [tuple(map(int, group)) for group in members(grid, traffic._replace(groups=()))]
    return {rank: group for group in groups for rank in group}


def _group(grid: Grid, traffic: Traffic, rank: int) -> tuple[int, ...]:
    """The ranks of a rank's group."""
    return _all_groups(grid, traffic)[rank]


def _between(source: int, destination: int, size: float, tag: int) -> bytes:
    """Attributes of a send and of its receive."""
    ends = _signed("comm_src", source) + _signed("comm_dst", destination) + _signed("comm_tag", tag)
    return _flag("is_cpu_op", False) + ends + _unsigned("comm_size", size)


# Protocol buffers (protobuf.dev/programming-guides/encoding): a field has its number and wire type (0: varint, 2: length, bytes)


def _varint(value: int) -> bytes:
    result = bytearray()
    while value > 127:
        result.append(value & 127 | 128)
        value >>= 7
    return bytes([*result, value])


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _delimited(value)


def _text(number: int, value: str) -> bytes:
    return _bytes(number, value.encode())


def _delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message


def _attribute(name: str, value: bytes) -> bytes:
    """AttributeProto, field 10 of a node; value: one of its fields 3 to 32."""
    return _bytes(10, _text(1, name) + value)


def _signed(name: str, value: int) -> bytes:
    return _attribute(name, _number(9, value))


def _unsigned(name: str, value: float) -> bytes:
    return _attribute(name, _number(13, round(value)))


def _flag(name: str, value: bool) -> bytes:
    return _attribute(name, _number(27, value))
