"""A step as PyTorch's profiler would have written it: a file for each rank, which HTA and other readers of Kineto traces take.

Format: pytorch/kineto's JSON (libkineto/src/output_json.cpp): kernels have the category `kernel` and their stream, launches
`cuda_runtime` with the same `correlation`, collectives names that begin with `nccl`. Kernels of one operator in all layers of a
pass are one slice, in the order of a layer; a pipeline's receive lasts as long as its transfer, where NCCL's kernel also lasts
while it waits. Collectives have the arguments that PyTorch gives its kernels (torch/csrc/distributed/c10d/ParamCommsUtils.hpp and
autograd/profiler_kineto.cpp), so that readers of real traces, `shardyard calibrate --from` too, learn operation, size and group;
those that run beside the kernels of a block are shown as what these wait for them, without. Ranks that are alike are one file,
that of the first. HTA rounds to whole µs, which shortens every kernel by one,
unless HTA_DISABLE_NS_ROUNDING=1 is in its environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sim.analysis.breakdown import PHASES
from sim.analysis.host_launches import host_launches
from sim.grid import Grid
from sim.pricing.transfers.traffic import Traffic, members
from sim.pricing.transfers.transfer_cost import TransferCost
from sim.program import Block, Collective, Join, Send, Start
from sim.timeline import OpRow, Timeline, op_label
from topologies.documents.writing import whole_gzip

Event = dict[str, Any]
Work = Block | Collective | Send
_FIRST_STREAM = 7  # PyTorch's compute stream in its own traces
_NAMES = {"all_reduce": "AllReduce", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "broadcast": "Broadcast"}
_CALLS = {  # as torch.distributed's ProcessGroupNCCL.cpp names them
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_allv",
}
_TYPES = {1.0: "Byte", 2.0: "BFloat16", 4.0: "Float", 8.0: "Double"}  # c10::toString of types of so many bytes
_LISTED = 30  # ranks that an argument names (torch/csrc/distributed/c10d/ParamCommsUtils.hpp, kTruncatLength)
_COMPUTE = (*PHASES, "slowdown")


class Slice(NamedTuple):
    """A kernel: seconds, name, arguments of communication."""

    start: float
    end: float
    name: str
    arguments: Event


class Groups:
    """Process groups, numbered as ranks make them; half: the 16-bit type of the job."""

    def __init__(self, half: str) -> None:
        self.numbers: dict[tuple[str, tuple[int, ...]], int] = {}
        self.half = half

    def number(self, axis: str, ranks: tuple[int, ...]) -> int:
        """The number of the group along an axis that has these ranks."""
        return self.numbers.setdefault((axis, ranks), len(self.numbers) + 1)

    def of(self, rank: int) -> list[Event]:
        """Those that a rank is in, as `distributedInfo` lists them."""
        return [
            {"pg_name": str(number), "pg_desc": axis, "backend_config": "cuda:nccl", "pg_size": len(ranks), "ranks": list(ranks)}
            for (axis, ranks), number in self.numbers.items()
            if rank in ranks
        ]


def write_kineto(timeline: Timeline, folder: Path, half: str = "BFloat16") -> list[Path]:
    """Write `rank0.json.gz` and its like into a folder; returns the paths. half: the 16-bit type of the job, as PyTorch names it.
    The same timeline gives the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths, groups = [], Groups(half)
    for lane, actor in enumerate(timeline.lanes):
        listed = list(events(timeline, lane, groups))
        world = sum(each.ranks for each in timeline.lanes)
        about = {"rank": actor.rank, "world_size": world, "backend": "nccl", "pg_config": groups.of(actor.rank)}
        text = json.dumps(
            {
                "schemaVersion": 1,
                "deviceProperties": [],
                "distributedInfo": about,
                "displayTimeUnit": "ms",
                "traceEvents": listed,
            },
            separators=(",", ": "),  # HTA finds the rank by `"rank": `, with the space
        )
        path = folder / f"rank{actor.rank}.json.gz"
        with whole_gzip(path) as out:
            out.write(text.encode())
        paths.append(path)
    return paths


def events(timeline: Timeline, lane: int, groups: Groups) -> Iterator[Event]:
    """The step, kernels with their launches, and receives of one lane."""
    rank = timeline.lanes[lane].rank
    yield _event("user_annotation", "ProfilerStep#0", "host", 1, 0.0, timeline.step, {})
    launched = {id(op): (max(0.0, start), max(0.0, end)) for op, start, end in host_launches(timeline, lane)}
    numbers = count(1)
    streams = dict.fromkeys(op.stream for _, op in timeline.ops(lane))
    tids = {stream: _FIRST_STREAM + at for at, stream in enumerate(streams)}
    for row in timeline.rows_of(lane, timeline.ops(lane)):
        begin, end = launched.get(id(row.op), (row.start, row.start))
        kernels = list(_kernels(timeline, row, groups))
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


def _kernels(timeline: Timeline, row: OpRow, groups: Groups) -> Iterator[Slice]:
    """What an op runs on its stream: a transfer, or the kernels and collectives of a block one behind the other, and gaps."""
    actor = timeline.lanes[row.lane]
    if isinstance(row.cost, TransferCost):
        times = _times(row.op.work)
        arguments = _communication(timeline.program.grid, row.op.work, row.cost, actor.rank, groups) or {}
        if arguments and isinstance(row.op.work, Send):
            arguments["label"] = op_label(row.op)
        yield from _repeated(row.start, row.end, _nccl(row.op.work), [(1.0, times, arguments)])
        return
    parts = row.cost.parts
    total, at = sum(parts.values()), row.start
    for (name, what), seconds in parts.items():
        end = at + (row.end - row.start) * seconds / total if total else at
        if name in _COMPUTE:
            yield Slice(at, end, f"{what} ({name})", {})
        elif name != "launch":
            each = _of_block(timeline, row, (name, what), groups)
            yield from _repeated(at, end, f"ncclDevKernel_{name}_{what.replace(' ', '_')}", each)
        at = end


def _of_block(timeline: Timeline, row: OpRow, part: tuple[str, str], groups: Groups) -> list[tuple[float, int, Event]]:
    """Collectives that a part of a block's time is, with their seconds and times; one of nothing where kernels wait for it."""
    actor, result = timeline.lanes[row.lane], []
    assert isinstance(row.op.work, Block)
    for times, items in row.op.work.runs:
        for item in items:
            work = item.collective if isinstance(item, Start | Join) else item
            if not isinstance(work, Collective) or (work.axis, work.label) != part:
                continue
            cost = timeline.op_costs.collective(work, actor.cohort)
            arguments = _communication(timeline.program.grid, work, cost, actor.rank, groups)
            if work is not item or arguments is None:
                return [(1.0, 1, {"Process Group Description": part[0]})]
            repeat = _times(work)
            result.append((cost.alone / repeat, times * repeat, arguments))
    return result


def _repeated(start: float, end: float, name: str, parts: list[tuple[float, int, Event]]) -> Iterator[Slice]:
    """Slices one behind the other that fill a time in the ratio of their seconds."""
    total, at = sum(seconds * times for seconds, times, _ in parts), start
    for seconds, times, arguments in parts:
        length = (end - start) * seconds / total if total else 0.0
        for _ in range(times):
            yield Slice(at, at + length, name, arguments)
            at += length


def _times(work: Work) -> int:
    """How many calls an op is."""
    return max(1, round(work.repeat)) if isinstance(work, Collective) else 1


def _nccl(work: Work) -> str:
    if isinstance(work, Collective):
        return f"ncclDevKernel_{_NAMES.get(work.operation, work.operation)}"
    return "ncclDevKernel_SendRecv"


def _communication(grid: Grid, work: Work, cost: TransferCost, rank: int, groups: Groups) -> Event | None:
    """The arguments of a call; None: a part of one (a round of a ring), a copy, or a group that the rank is not in."""
    assert isinstance(work, Collective | Send)
    if isinstance(work, Send) and work.route is not None:
        return None
    ranks = _group(grid, cost.traffic, rank)
    if rank not in ranks or (isinstance(work, Collective) and work.repeat < 1):
        return None
    width, operation = work.width, work.operation if isinstance(work, Collective) else "send"
    whole = round(work.bytes / (width if width in _TYPES else 1.0))
    part = round(whole / len(ranks))
    here, there = {"all_gather": (part, whole), "reduce_scatter": (whole, part)}.get(operation, (whole, whole))
    more = ", ..." if len(ranks) > _LISTED else ""
    return {
        "Collective name": _CALLS.get(operation, operation),
        "In msg nelems": here,
        "Out msg nelems": there,
        "Group size": len(ranks),
        "dtype": groups.half if width == 2 else _TYPES.get(width, "Byte"),
        "Process Group Name": str(groups.number(work.axis, ranks)),
        "Process Group Description": work.axis,
        "Process Group Ranks": f"[{', '.join(map(str, ranks[:_LISTED]))}{more}]",
    }


@lru_cache(maxsize=4096)
def _group(grid: Grid, traffic: Traffic, rank: int) -> tuple[int, ...]:
    """The ranks that communicate with a rank, in their order, itself too."""
    if traffic.to:
        pairs = members(grid, traffic._replace(groups=()))
        return tuple(pairs[(pairs == rank).any(axis=1)][:1].ravel().tolist())
    at = dict(traffic.at)
    number = int(grid.group_of(np.array([rank]), traffic.axes, at)[0])
    return tuple(grid.group(number, traffic.axes, at).tolist())


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
