"""The timeline as a Chrome trace (JSON, gzip) for ui.perfetto.dev: a process per rank or cohort, a thread per stream.

Format: "Trace Event Format", Google, 2016. Perfetto wants slices of one thread never to overlap. Times are in µs, multiples of
1/64 µs: sums of such numbers are exact, so that the end of one slice is the start of the next and no rounding of the reader makes
them overlap. Communication has PyTorch's names of arguments besides our own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from sim.analysis.host_launches import host_launches
from sim.analysis.memory import ledger
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.program import COMPUTE, HOST, MEMORY_KINDS, Block, Collective, Op, Send
from sim.timeline import OpRow, Timeline, op_label
from topologies.documents.writing import whole_gzip

_TICKS = 64  # per µs

Event = dict[str, Any]


def write_trace(timeline: Timeline, path: Path) -> Path:
    """Write the trace; event by event, because timelines can be long. The same timeline gives the same bytes."""
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    with whole_gzip(path) as out:
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(events(timeline)):
            out.write((",\n" if number else "").encode() + encode(event).encode())
        out.write(b"\n]}\n")
    return path


def events(timeline: Timeline) -> Iterator[Event]:
    """Names, slices, flows of sends, and memory counters of every lane."""
    threads = [_threads(timeline, lane) for lane in range(len(timeline.lanes))]
    flows = _Flows(timeline, threads)
    for lane in range(len(timeline.lanes)):
        yield from _names(timeline, lane, threads[lane])
        yield from _slices(timeline, lane, threads[lane])
        yield from _launches(timeline, lane)
        yield from flows.events(lane)
        yield from _counters(timeline, lane)


def _time(seconds: float) -> float:
    """µs, on the grid of ticks."""
    return round(seconds * 1e6 * _TICKS) / _TICKS


def _threads(timeline: Timeline, lane: int) -> dict[str, int]:
    """Thread ids by stream: the host, compute, then the others in the order in which the program uses them."""
    streams = dict.fromkeys((HOST, COMPUTE, *(row.op.stream for row in timeline.rows_of(lane, timeline.ops(lane)))))
    return {stream: number for number, stream in enumerate(streams)}


def _names(timeline: Timeline, lane: int, threads: dict[str, int]) -> Iterator[Event]:
    actor, grid = timeline.lanes[lane], timeline.program.grid
    coordinates = grid.coordinates(actor.rank).items()
    place = " · ".join(f"{axis} {at}" for axis, at in coordinates if grid.degree(axis) > 1 and axis != "pp")
    stage = timeline.program.cohorts[actor.cohort].at.get("pp", 0)
    alike = f" · for {actor.ranks} ranks alike" if actor.ranks > 1 else ""
    name = f"rank {actor.rank} · stage {stage}{f' · {place}' if place else ''}{alike}"
    meta: list[tuple[str, int, Event]] = [("process_name", 0, {"name": name}), ("process_sort_index", 0, {"sort_index": lane})]
    for stream, thread in threads.items():
        meta += [("thread_name", thread, {"name": stream}), ("thread_sort_index", thread, {"sort_index": thread})]
    for what, thread, args in meta:
        yield {"ph": "M", "name": what, "pid": actor.rank, "tid": thread, "args": args}


def _slice(pid: int, tid: int, start: float, end: float, name: str, cat: str, args: Event) -> Event:
    ts = _time(start)
    return {"ph": "X", "name": name, "cat": cat, "pid": pid, "tid": tid, "ts": ts, "dur": _time(end) - ts, "args": args}


def _slices(timeline: Timeline, lane: int, threads: dict[str, int]) -> Iterator[Event]:
    actor = timeline.lanes[lane]
    for row in timeline.rows_of(lane, timeline.ops(lane)):
        args = _arguments(timeline, row)
        yield _slice(actor.rank, threads[row.op.stream], row.start, row.end, _title(row.op), row.kind, args)


def _title(op: Op) -> str:
    if isinstance(op.work, Collective):
        return f"{op.work.operation} {op.work.label}"
    name = f"send {op_label(op)}" if isinstance(op.work, Send) else op_label(op)
    return name if op.microbatch < 0 else f"{name} {op.microbatch}"


def _arguments(timeline: Timeline, row: OpRow) -> Event:
    """What the reader sees when they click on a slice."""
    op, work = row.op, row.cost
    args: Event = {"microbatch": op.microbatch} if op.microbatch >= 0 else {}
    if not isinstance(work, TransferCost):
        args |= {f"{name} {what} (µs)": round(seconds * 1e6, 3) for (name, what), seconds in work.parts.items()}
        return args
    assert not isinstance(op.work, Block)
    args |= {"axis": op.work.axis, "algorithm": work.traffic.algorithm, "buffer bytes": op.work.bytes, "bytes": work.sent}
    if isinstance(op.work, Collective):
        size = 2 if op.work.cohorts else timeline.program.grid.size(op.work.axes)
        elements = round(op.work.bytes / op.work.width)
        args |= {
            "repeat": op.work.repeat,
            "Collective name": op.work.operation,
            "Group size": size,
            "In msg nelems": elements,
            "Process Group Name": op.work.axis,
        }
    return args


def _launches(timeline: Timeline, lane: int) -> Iterator[Event]:
    """The host's track: from when to when it launched each op. Empty where launching takes no time of its own (a CPU)."""
    for op, start, end in host_launches(timeline, lane):
        if end > max(0.0, start):  # of a steady state, some was launched before the step
            yield _slice(timeline.lanes[lane].rank, 0, max(0.0, start), end, f"launch {_title(op)}", "launch", {})


class _Flows:
    """Arrows from each send to the op that waits for it on another lane."""

    def __init__(self, timeline: Timeline, threads: list[dict[str, int]]) -> None:
        self.timeline, self.threads, self.ids = timeline, threads, count(1)
        self.first: dict[int, int] = {}  # first lane of each cohort
        for lane, actor in enumerate(timeline.lanes):
            self.first.setdefault(actor.cohort, lane)

    def events(self, lane: int) -> Iterator[Event]:
        """Both ends of every arrow that ends on this lane."""
        timeline, actor = self.timeline, self.timeline.lanes[lane]
        for number, op in timeline.ops(lane):
            for ref in op.after:
                sender = timeline.program.cohorts[ref.cohort].ops[ref.op]
                if ref.cohort == actor.cohort or not isinstance(sender.work, Send):
                    continue
                source = self.first[ref.cohort] + lane - self.first[actor.cohort]
                sent, tid = timeline.start[timeline.offset[source] + ref.op], self.threads[source][sender.stream]
                begin, end = timeline.program.cohorts[ref.cohort].steady or (0, ref.op + 1)
                if sent < 0.0 or not begin <= ref.op < end:  # in the step before or after: it has no slice
                    continue
                used, to = timeline.start[number], self.threads[lane][op.stream]
                flow = {"name": op_label(sender), "cat": "send", "id": next(self.ids)}
                yield {"ph": "s", "pid": timeline.lanes[source].rank, "tid": tid, "ts": _time(sent), **flow}
                yield {"ph": "f", "bp": "e", "pid": actor.rank, "tid": to, "ts": _time(used), **flow}


def _counters(timeline: Timeline, lane: int) -> Iterator[Event]:
    """Bytes held by kind, whenever they change; kinds that a lane never holds are left out."""
    book, actor = ledger(timeline, lane), timeline.lanes[lane]
    kinds = [number for number in range(len(MEMORY_KINDS)) if book.held[:, number].any()]
    moments = [_time(max(0.0, float(moment))) for moment in book.times]
    for number, moment in enumerate(moments):
        if number + 1 < len(moments) and moments[number + 1] == moment:  # only the last change of a moment lasts
            continue
        args = {MEMORY_KINDS[index]: float(book.held[number, index]) for index in kinds}
        yield {"ph": "C", "name": "memory (bytes)", "pid": actor.rank, "ts": moment, "args": args}
