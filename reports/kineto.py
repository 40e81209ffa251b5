"""A step as PyTorch's profiler would have written it: a file for each rank, which HTA and other readers of Kineto traces take.

Format: pytorch/kineto's JSON (libkineto/src/output_json.cpp): kernels have the category `kernel` and their stream, launches
`cuda_runtime` with the same `correlation`, collectives names that begin with `nccl`. Kernels of one operator in all layers of a
pass are one slice, in the order of a layer; a pipeline's receive lasts as long as its transfer, where NCCL's kernel also lasts
while it waits. Ranks that are alike are one file, that of the first. HTA rounds to whole µs, which shortens every kernel by one,
unless HTA_DISABLE_NS_ROUNDING=1 is in its environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from sim.analysis.breakdown import PHASES
from sim.analysis.host_launches import host_launches
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.program import Collective, Op, Send
from sim.timeline import OpRow, Timeline, op_label
from topologies.documents.writing import whole_gzip

Event = dict[str, Any]
_FIRST_STREAM = 7  # PyTorch's compute stream in its own traces
_NAMES = {"all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "broadcast": "Broadcast"}
_COMPUTE = (*PHASES, "slowdown")


class Slice(NamedTuple):
    """A kernel: seconds, name, arguments of communication."""

    start: float
    end: float
    name: str
    arguments: Event


def write_kineto(timeline: Timeline, folder: Path) -> list[Path]:
    """Write `rank0.json.gz` and its like into a folder; returns the paths. The same timeline gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for lane, actor in enumerate(timeline.lanes):
        about = {"rank": actor.rank, "world_size": sum(each.ranks for each in timeline.lanes), "backend": "nccl"}
        text = json.dumps(
            {
                "schemaVersion": 1,
                "deviceProperties": [],
                "distributedInfo": about,
                "displayTimeUnit": "ms",
                "traceEvents": list(events(timeline, lane)),
            },
            separators=(",", ": "),  # HTA finds the rank by `"rank": `, with the space
        )
        path = folder / f"rank{actor.rank}.json.gz"
        with whole_gzip(path) as out:
            out.write(text.encode())
        paths.append(path)
    return paths


def events(timeline: Timeline, lane: int) -> Iterator[Event]:
    """The step, kernels with their launches, and receives of one lane."""
    rank = timeline.lanes[lane].rank
    yield _event("user_annotation", "ProfilerStep#0", "host", 1, 0.0, timeline.step, {})
    launched = {id(op): (max(0.0, start), max(0.0, end)) for op, start, end in host_launches(timeline, lane)}
    numbers = count(1)
    streams = dict.fromkeys(op.stream for _, op in timeline.ops(lane))
    tids = {stream: _FIRST_STREAM + at for at, stream in enumerate(streams)}
    for row in timeline.rows_of(lane, timeline.ops(lane)):
        begin, end = launched.get(id(row.op), (row.start, row.start))
        kernels = list(_kernels(row))
        for at, kernel in enumerate(kernels):
            number = next(numbers)
            share = (end - begin) / len(kernels)
            launch = min(begin + at * share, kernel.start)
            arguments = {"correlation": number}
            yield _event("cuda_runtime", "cudaLaunchKernel", "host", 1, launch, launch + share, arguments)
            yield _kernel(kernel, rank, tids.setdefault(row.op.stream, _FIRST_STREAM + len(tids)), number)
    receiving = _FIRST_STREAM + len(tids)
    for kernel in _receives(timeline, lane):
        yield _kernel(kernel, rank, receiving, next(numbers))


def _kernel(kernel: Slice, rank: int, stream: int, number: int) -> Event:
    arguments = {"device": rank, "stream": stream, "correlation": number, "External id": number} | kernel.arguments
    return _event("kernel", kernel.name, rank, stream, kernel.start, kernel.end, arguments)


def _event(category: str, name: str, pid: int | str, tid: int, start: float, end: float, arguments: Event) -> Event:
    at = round(start * 1e6, 3)
    times = {"ts": at, "dur": round(round(end * 1e6, 3) - at, 3)}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": arguments}


def _kernels(row: OpRow) -> Iterator[Slice]:
    """What an op runs on its stream: a transfer, or the kernels and collectives of a block one behind the other, and gaps."""
    if isinstance(row.cost, TransferCost):
        yield Slice(row.start, row.end, _nccl(row.op), _communication(row.op))
        return
    parts = row.cost.parts
    total, at = sum(parts.values()), row.start
    for (name, what), seconds in parts.items():
        end = at + (row.end - row.start) * seconds / total if total else at
        if name in _COMPUTE:
            yield Slice(at, end, f"{what} ({name})", {})
        elif name != "launch":
            yield Slice(at, end, f"ncclDevKernel_{name}_{what.replace(' ', '_')}", {"Process Group Name": name})
        at = end


def _nccl(op: Op) -> str:
    if isinstance(op.work, Collective):
        return f"ncclDevKernel_{_NAMES.get(op.work.operation, op.work.operation)}"
    return "ncclDevKernel_SendRecv"


def _communication(op: Op) -> Event:
    if isinstance(op.work, Collective):
        elements = round(op.work.bytes / op.work.width)
        return {"Collective name": op.work.operation, "In msg nelems": elements, "Process Group Name": op.work.axis}
    return {"Collective name": "send", "label": op_label(op)}


def _receives(timeline: Timeline, lane: int) -> Iterator[Slice]:
    """What other lanes send to this one."""
    actor = timeline.lanes[lane]
    first: dict[int, int] = {}
    for number, each in enumerate(timeline.lanes):
        first.setdefault(each.cohort, number)
    for _, op in timeline.ops(lane):
        for ref in op.after:
            sender = timeline.program.cohorts[ref.cohort].ops[ref.op]
            if ref.cohort == actor.cohort or not isinstance(sender.work, Send):
                continue
            source = first[ref.cohort] + lane - first[actor.cohort]
            at = timeline.offset[source] + ref.op
            if 0.0 <= timeline.start[at] <= timeline.step:
                yield Slice(timeline.start[at], timeline.end[at], "ncclDevKernel_SendRecv", {"Collective name": "recv"})
