"""Reads traces of the PyTorch profiler (Kineto), one file per rank, into the rows that nccl-tests gives.

An NCCL kernel is an event of category "kernel" whose arguments name its collective, its elements in and out, its dtype and group
("Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size": the names that github.com/facebookresearch/param
reads). A kernel of a rank that comes early lasts until the others have come: of the events that belong together, the n-th of its
kind in its group on each rank, the shortest is the transfer. Traces of old versions do not say how large messages were.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from calibration.collective_rows import Row
from topologies.reading import UserError

WIDTHS = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Int": 4, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1, "Short": 2,
    "Float8_e4m3fn": 1, "Float8_e5m2": 1, "ComplexFloat": 8,
}  # fmt: skip
NAMES = {
    "allreduce": "all_reduce", "_allgather_base": "all_gather", "allgather": "all_gather", "all_gather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather", "_reduce_scatter_base": "reduce_scatter", "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "all_to_all": "all_to_all", "all_to_allv": "all_to_all",
    "broadcast": "broadcast", "reduce": "reduce", "send": "send",
}  # fmt: skip
SKIPPED = ("recv", "barrier", "wait", "init")  # carry nothing of their own


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


def is_trace(text: str) -> bool:
    """Whether a JSON text is the profiler's."""
    return '"traceEvents"' in text


def read_text(path: Path) -> str:
    """The text of a file, unpacked when it is gzip. Raises UserError."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error, UnicodeDecodeError):
        raise UserError(f"{path}: cannot be read: broken gzip or not text") from None


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
        why = f"{bare} NCCL kernels do not say their collective and size (PyTorch before 2.3?)" if bare else "no NCCL kernel"
        raise UserError(f"{paths[0]}: no collective to learn from: {why}")
    found: dict[tuple[str, int, int, float], list[float]] = {}
    for events in _matched(ranks):
        first = events[0]
        nodes = len({rank // per_node for rank in first.ranks}) if first.ranks else -(-first.members // per_node)
        found.setdefault((first.operation, first.members, nodes, first.bytes), []).append(min(one.seconds for one in events))
    rows = [Row(f"{key[0]} {key[1]}", key[0], key[1], key[2], key[3], median(times)) for key, times in sorted(found.items())]
    notes = [f"{bare} NCCL kernels without collective and size were skipped"] if bare else []
    if len(ranks) == 1:
        notes.append("a trace of one rank: waiting for other ranks counts as transfer; give the traces of all")
    return Traces(rows, len(ranks), notes)


def _matched(ranks: Mapping[int, Sequence[_Event]]) -> list[list[_Event]]:
    """The n-th event of an operation in a group, on every rank that has it."""
    found: dict[tuple[str, str, tuple[int, ...], float, int], list[_Event]] = {}
    for events in ranks.values():
        count: dict[tuple[str, str, tuple[int, ...], float], int] = {}
        for event in events:
            key = event.operation, event.group, event.ranks, event.bytes
            count[key] = count.get(key, -1) + 1
            found.setdefault((*key, count[key]), []).append(event)
    return list(found.values())


def _read(path: Path) -> tuple[int, list[_Event], int]:
    """(rank, its collectives in order of time, NCCL kernels that do not say what they are)."""
    try:
        data = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: broken JSON: {error}") from None
    events = data.get("traceEvents") if isinstance(data, Mapping) else None
    if not isinstance(events, list):
        raise UserError(f"{path}: not a trace of the PyTorch profiler: no list 'traceEvents'")
    own = data.get("distributedInfo") or {}
    rank = own.get("rank") if isinstance(own, Mapping) else None
    if not isinstance(rank, int):
        raise UserError(f"{path}: does not say its rank: no 'distributedInfo' (was torch.distributed initialised?)")
    known = {str(one.get("pg_name")): one.get("ranks") for one in own.get("pg_config") or [] if isinstance(one, Mapping)}
    kernels = [
        one for one in events if isinstance(one, Mapping) and one.get("cat") == "kernel" and "nccl" in str(one.get("name", ""))
    ]
    kernels.sort(key=lambda one: float(one.get("ts", 0)))
    result, bare = [], 0
    for one in kernels:
        args: Any = one.get("args")
        args = args if isinstance(args, Mapping) else {}
        name = str(args.get("Collective name", ""))
        if name.removeprefix("nccl:") in SKIPPED:
            continue
        event = _event(name, args, float(one.get("dur", 0)), known)
        bare += event is None
        if event and event.members > 1 and event.bytes > 0 and event.seconds > 0:
            result.append(event)
    return rank, result, bare


def _event(name: str, args: Mapping[str, Any], micro: float, known: Mapping[str, Any]) -> _Event | None:
    """`dur` is in µs; the full buffer S is the larger side's elements times their width."""
    operation = NAMES.get(name.removeprefix("nccl:"))
    counts: list[Any] = [args.get("In msg nelems"), args.get("Out msg nelems")]
    width = WIDTHS.get(str(args.get("dtype", "")).removeprefix("at::"))
    size = args.get("Group size")
    if operation is None or width is None or not isinstance(size, int) or not all(isinstance(one, int) for one in counts):
        return None
    group = str(args.get("Process Group Name", ""))
    listed = known.get(group) or args.get("Process Group Ranks")
    if operation == "all_to_all" and len({*_numbers(args.get("In split size"))}) > 1:
        return None  # uneven: no one size says what it is
    return _Event(operation, group, size, _ranks(listed, size), float(width * max(counts)), 1e-6 * micro)


def _ranks(listed: Any, size: int) -> tuple[int, ...]:
    """A list, or its text. A long text ends in "...": then its ranks go on at the same distance, as every axis's do."""
    found = _numbers(listed)
    if len(found) != size and len(found) > 1 and "..." in str(listed):
        found = tuple(found[0] + place * (found[1] - found[0]) for place in range(size))
    return found if len(found) == size else ()


def _numbers(listed: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", str(listed)))
