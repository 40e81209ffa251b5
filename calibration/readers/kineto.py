"""Reads traces of the PyTorch profiler (Kineto), one file per rank, into the rows that nccl-tests gives.

An NCCL kernel is an event of category "kernel" whose arguments name its collective, its elements in and out, its dtype and group
("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size": the names that github.com/facebookresearch/param
reads). A kernel of a rank that comes early lasts until the others have come: of the events that belong together, the n-th of its
kind in its group on each rank, the shortest is the transfer. Traces of old versions do not say how large messages were. What gloo
says on CPUs is in `calibration.readers.gloo`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from calibration.fit.published_collectives.rows import Row
from calibration.readers import gloo
from calibration.readers.kineto_file import LAST, LONGEST, Scan
from calibration.readers.stream import beginning_of
from topologies.reading import UserError, shown

WIDTHS = {
    "Float": 4,
    "Double": 8,
    "Half": 2,
    "BFloat16": 2,
    "Int": 4,
    "Long": 8,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Short": 2,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
    "ComplexFloat": 8,
}
NAMES = {
    "allreduce": "all_reduce",
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "send": "send",
}
SKIPPED = ("recv", "barrier", "wait", "init")  # carry nothing of their own
# what is kept of a kernel's
ARGUMENTS = (
    "In msg nelems",
    "Out msg nelems",
    "dtype",
    "Group size",
    "Process Group Name",
    "Process Group Ranks",
    "In split size",
)
EVENTS = 500_000  # NCCL kernels of a trace
LARGEST = 1e15  # elements of a message
RANKS = 2**20


class _Event(NamedTuple):
    operation: str
    group: str
    members: int
    ranks: tuple[int, ...]
    bytes: float
    seconds: float


class Traces(NamedTuple):
    """Rows, the median over the events of a size; ranks: how many traces there were; and notes."""

    rows: list[Row]
    ranks: int
    notes: list[str]


def is_trace(path: Path) -> bool:
    """Whether a file, packed by gzip or not, is JSON of the profiler. Raises UserError when it cannot be read."""
    return '"traceEvents"' in beginning_of(path, 200_000)


def read_traces(paths: Sequence[Path], per_node: int) -> Traces:
    """The collectives in the traces of some or all ranks of a run on nodes of `per_node` GPUs. Raises UserError."""
    ranks: dict[int, list[_Event]] = {}
    bare = 0
    for path in paths:
        rank, events, without = _read(path)
        if rank in ranks:
            raise UserError(f"{path}: rank {rank} has another trace already; give one file per rank, of one run")
        ranks[rank], bare = events, bare + without
    if not any(ranks.values()):
        why = (
            f"{bare} do not say their collective, size or group (PyTorch before 2.3?)"
            if bare
            else "no collective of NCCL or gloo"
        )
        raise UserError(f"{paths[0]}: no collective to learn from: {why}")
    by_collective: dict[tuple[str, int, int, float], list[float]] = {}
    for events in _matched(ranks):
        first = events[0]
        nodes = len({rank // per_node for rank in first.ranks}) if first.ranks else -(-first.members // per_node)
        by_collective.setdefault((first.operation, first.members, nodes, first.bytes), []).append(
            min(event.seconds for event in events)
        )
    rows = [
        Row(f"{key[0]} {key[1]}", key[0], key[1], key[2], key[3], median(times)) for key, times in sorted(by_collective.items())
    ]
    notes = [f"{bare} collectives that do not say what they are, their size or group were skipped"] if bare else []
    if len(ranks) == 1:
        notes.append("a trace of one rank: waiting for other ranks counts as transfer; give the traces of all")
    return Traces(rows, len(ranks), notes)


def _matched(ranks: Mapping[int, Sequence[_Event]]) -> list[list[_Event]]:
    """The n-th event of an operation in a group, on every rank that has it."""
    by_group: dict[tuple[str, str, tuple[int, ...], float, int], list[_Event]] = {}
    for events in ranks.values():
        count: dict[tuple[str, str, tuple[int, ...], float], int] = {}
        for event in events:
            key = event.operation, event.group, event.ranks, event.bytes
            count[key] = count.get(key, -1) + 1
            by_group.setdefault((*key, count[key]), []).append(event)
    return list(by_group.values())


class _Scan(Scan):
    """The NCCL kernels of a trace."""

    texts_are = "the kernels' arguments"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.kernels: list[tuple[float, float, str, dict[str, Any]]] = []  # start, µs, name of the collective, arguments
        self.of_gloo: list[tuple[float, float, str, float | None]] = []  # start, µs, operation, bytes of its input

    def add(self, number: int, event: Any) -> None:
        """An event, if it is an NCCL kernel or a collective of gloo."""
        if not isinstance(event, Mapping):
            return
        if gloo.is_gloo(event):
            if str(event["name"]).removeprefix(gloo.PREFIX) in SKIPPED:
                return
            args = event.get("args")
            size = gloo.input_bytes(args) if isinstance(args, Mapping) else None
            start, micro = self.microseconds(number, event, "ts", LAST), self.microseconds(number, event, "dur", LONGEST)
            self._room()
            self.of_gloo.append((start, micro, str(event["name"]).removeprefix(gloo.PREFIX), size))
            return
        if event.get("cat") != "kernel" or "nccl" not in str(event.get("name", "")):
            return
        args = event.get("args")
        args = args if isinstance(args, Mapping) else {}
        name = str(args.get("Collective name", ""))
        if name.removeprefix("nccl:") in SKIPPED:
            return
        self._room()
        start, micro = self.microseconds(number, event, "ts", LAST), self.microseconds(number, event, "dur", LONGEST)
        self.kernels.append((start, micro, name, {key: self._kept(args[key]) for key in ARGUMENTS if key in args}))

    def _room(self) -> None:
        if len(self.kernels) + len(self.of_gloo) == EVENTS:
            raise UserError(f"{self.path}: more than {EVENTS:,} NCCL kernels: give a trace of fewer steps")

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, str | list):
            return value
        return self.once(value if isinstance(value, str) else str(value))


def _read(path: Path) -> tuple[int, list[_Event], int]:
    """(rank, its collectives in order of time, NCCL kernels that do not say what they are)."""
    trace = _Scan(path).read()
    rank = trace.own.get("rank")
    if rank is None and not trace.kernels and not trace.of_gloo:
        raise UserError(f"{path}: a trace of one process: it has no collectives, whose prices are made of traces")
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise UserError(f"{path}: does not say its rank: no 'distributedInfo' (was torch.distributed initialised?)")
    if not 0 <= rank < RANKS:
        raise UserError(f"{path}: distributedInfo.rank={shown(rank)}: must be from 0 to {RANKS - 1:,}")
    groups = trace.own.get("pg_config")
    listed = {
        str(group.get("pg_name")): str(group.get("ranks") or "")
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, Mapping)
    }
    trace.kernels.sort(key=lambda kernel: kernel[0])
    result, bare = [], 0
    for _, micro, name, args in trace.kernels:
        event = _event(path, name, args, micro, listed)
        bare += event is None
        if event and event.members > 1 and event.bytes > 0 and event.seconds > 0:
            result.append(event)
    of_gloo = [_gloo_event(micro, name, size, gloo.only_group(trace.own)) for _, micro, name, size in sorted(trace.of_gloo)]
    result += [event for event in of_gloo if event and event.members > 1 and event.seconds > 0]
    return rank, result, bare + of_gloo.count(None)


def _gloo_event(micro: float, operation: str, size: float | None, ranks: tuple[int, ...]) -> _Event | None:
    """A collective whose size and group are known; of an all-gather, S is the inputs of all ranks."""
    if operation not in NAMES.values() or not size or not ranks:
        return None
    whole = size * (len(ranks) if operation == "all_gather" else 1)
    return _Event(operation, gloo.PREFIX, len(ranks), ranks, whole, 1e-6 * micro)


def _event(path: Path, name: str, args: Mapping[str, Any], micro: float, listed: Mapping[str, str]) -> _Event | None:
    """The full buffer S is the larger side's elements times their width."""
    operation = NAMES.get(name.removeprefix("nccl:"))
    counts: list[Any] = [args.get("In msg nelems"), args.get("Out msg nelems")]
    width = WIDTHS.get(str(args.get("dtype", "")).removeprefix("at::"))
    size: Any = args.get("Group size")
    if operation is None or width is None or not all(type(number) is int for number in (size, *counts)):
        return None
    for value, most in ((size, RANKS), *((count, LARGEST) for count in counts)):
        if not 0 <= value <= most:
            raise UserError(f"{path}: a collective of {shown(value)} elements or ranks: at most {most:g} are meant")
    if operation == "all_to_all" and len({*_numbers(str(args.get("In split size")))}) > 1:
        return None  # uneven: no one size says what it is
    group = str(args.get("Process Group Name", ""))
    ranks = _ranks(listed.get(group) or str(args.get("Process Group Ranks")), size)
    return _Event(operation, group, size, ranks, float(width * max(counts)), 1e-6 * micro)


@lru_cache(maxsize=1024)
def _ranks(listed: str, size: int) -> tuple[int, ...]:
    """The ranks in a text. A long one ends in "...": then its ranks go on at the same distance, as every axis's do."""
    ranks = _numbers(listed)
    if len(ranks) != size and len(ranks) > 1 and "..." in listed:
        ranks = tuple(ranks[0] + place * (ranks[1] - ranks[0]) for place in range(size))
    return ranks if len(ranks) == size else ()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"[0-9]+", text) if len(number) < 10)
