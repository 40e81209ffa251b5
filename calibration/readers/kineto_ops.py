"""Reads traces of the PyTorch profiler (Kineto), one file per rank, into what each GPU ran: kernels in the order of their
launches.

A kernel is launched when the CPU calls the runtime with its `correlation`; steps are the windows "ProfilerStep#N" on the CPU. A
collective names itself and its group ("Collective name", "Process Group Name", "Process Group Ranks"), a send also "Dst Rank" and
a receive "Src Rank" (torch/csrc/profiler/util.h).

Where nothing ran on a GPU, operators of the CPU are the kernels (those that call no other; their threads take turns) and gloo's
collectives, launched when the program called them. A trace of one process that knows no others is rank 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from calibration.readers import gloo
from calibration.readers.kineto_file import LAST, LONGEST, Scan
from topologies.reading import UserError, shown

KERNELS = 1_000_000  # of all traces together
CALLS = 4_000_000  # of the runtime, of a trace
STEP = "ProfilerStep#"
ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver")
NO_TRANSFER = ("wait", "init")
OWN = "own rank"


class Kernel(NamedTuple):
    """Times in seconds, of the clock of its rank. collective: "" for compute; peers: what names those that it meets, "" for
    unknown.
    """

    launched: float
    start: float
    end: float
    stream: int
    collective: str = ""
    peers: str = ""


class RankTrace(NamedTuple):
    """What a rank's GPU ran in each step, by its number, in the order of launches. Without windows all is step 0. world: ranks of
    the run, 0 where the trace does not say.
    """

    rank: int
    steps: dict[int, list[Kernel]]
    world: int = 0


def kineto_files(paths: Sequence[Path]) -> list[Path]:
    """Files as given, of folders the .json and .json.gz in them. Raises UserError when a folder has none."""
    result: list[Path] = []
    for path in paths:
        try:
            files = sorted(path.iterdir()) if path.is_dir() else [path]
        except (OSError, ValueError) as error:  # also a NUL in the name
            raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
        traces = [file for file in files if file.name.endswith((".json", ".json.gz"))] if path.is_dir() else files
        if not traces:
            raise UserError(f"{path}: has no .json or .json.gz: a folder of profiler traces has one per rank")
        result += traces
    return result


def read_ranks(paths: Sequence[Path]) -> list[RankTrace]:
    """The traces of a run's ranks. Raises UserError."""
    result: dict[int, RankTrace] = {}
    for path in paths:
        trace = _read(path, KERNELS - sum(len(kernels) for each in result.values() for kernels in each.steps.values()))
        if trace.rank in result:
            raise UserError(f"{path}: rank {trace.rank} has another trace already; give one file per rank, of one run")
        result[trace.rank] = trace
    return [result[rank] for rank in sorted(result)]


class _Scan(Scan):
    """Windows of steps, launches and kernels; times in microseconds."""

    texts_are = "the names of groups"

    def __init__(self, path: Path, most: int) -> None:
        super().__init__(path)
        self.most, self.base = most, 0.0
        self.windows: list[tuple[float, float, int]] = []  # begin, end, number
        self.launches: dict[int, float] = {}  # by correlation
        self.kernels: list[tuple[float, float, int, int, str, str]] = []  # start, end, correlation, stream, collective, peers
        self.operators: list[tuple[int, float, float, str]] = []  # of the CPU: thread, start, end, name
        self.of_gloo: list[tuple[float, float, str]] = []  # start, end, operation

    def add(self, number: int, event: Any) -> None:
        if not isinstance(event, Mapping) or event.get("ph") != "X":
            return
        kind, name = event.get("cat"), str(event.get("name", ""))
        args = event.get("args")
        args = args if isinstance(args, Mapping) else {}
        if kind in RUNTIME and isinstance(args.get("correlation"), int):
            self.launches[args["correlation"]] = self.microseconds(number, event, "ts", LAST)
            if len(self.launches) > CALLS:
                raise UserError(f"{self.path}: more than {CALLS:,} calls of the runtime: give a trace of fewer steps")
        elif name.startswith(STEP) and kind != "gpu_user_annotation" and name[len(STEP) :].isdecimal():
            begin = self.microseconds(number, event, "ts", LAST)
            self.windows.append((begin, begin + self.microseconds(number, event, "dur", LONGEST), int(name[len(STEP) :][:9])))
        elif kind == "cpu_op" or gloo.is_gloo(event):
            start = self.microseconds(number, event, "ts", LAST)
            end = start + self.microseconds(number, event, "dur", LONGEST)
            if len(self.operators) + len(self.of_gloo) == CALLS:
                raise UserError(f"{self.path}: more than {CALLS:,} operators: give a trace of fewer steps")
            if kind == "cpu_op":
                thread = event.get("tid")
                self.operators.append((thread if isinstance(thread, int) else -1, start, end, self.once(name)))
            else:
                self.of_gloo.append((start, end, self.once(name.removeprefix(gloo.PREFIX))))
        elif kind in ON_THE_GPU:
            if len(self.kernels) == self.most:
                raise UserError(f"{self.path}: more than {KERNELS:,} kernels with those before: give traces of fewer steps")
            start = self.microseconds(number, event, "ts", LAST)
            end = start + self.microseconds(number, event, "dur", LONGEST)
            collective, peers = _collective(args) if "nccl" in name.lower() else ("", "")
            ids = (args.get(field) for field in ("correlation", "stream"))
            correlation, stream = (value if isinstance(value, int) else -1 for value in ids)
            self.kernels.append((start, end, correlation, stream, collective, self.once(peers)))

    def beside(self, key: str, value: Any) -> None:
        if key == "baseTimeNanoseconds" and isinstance(value, int):
            self.base = 1e-3 * value


def _collective(args: Mapping[str, Any]) -> tuple[str, str]:
    """(name, peers) of an NCCL kernel; OWN stands for the own rank, which a trace may name at its end."""
    name = str(args.get("Collective name", "")).removeprefix("nccl:") or "nccl"
    group = f"{args.get('Process Group Name', '')} {args.get('Process Group Ranks', '')}".strip()
    if name in NO_TRANSFER or not group:
        return name, ""
    if name in ("send", "recv"):
        source, target = (args.get(field, OWN) for field in ("Src Rank", "Dst Rank"))
        return name, "" if source == target else f"{group}: {source} to {target}"
    return name, f"{group}: {name}"


def _read(path: Path, most: int) -> RankTrace:
    scan = _Scan(path, most).read()
    rank = scan.own.get("rank") if scan.own else 0
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise UserError(f"{path}: distributedInfo.rank={shown(rank)}: must be the number of the rank")
    if not scan.kernels:
        _on_the_cpu(scan, most)
    if not scan.kernels:
        raise UserError(f"{path}: has no kernels: was ProfilerActivity.CUDA recorded, or .CPU of what ran there?")
    world = scan.own.get("world_size")
    return RankTrace(rank, _steps(scan, rank), world if type(world) is int else 0)


def _on_the_cpu(scan: _Scan, most: int) -> None:
    """Operators that call no other, and collectives of gloo on a stream beside, each with the call that launched it."""
    group = gloo.only_group(scan.own)
    calls = sorted(start for _, start, _, name in scan.operators if name.startswith(gloo.CALLS))
    launched = calls if len(calls) == len(scan.of_gloo) else sorted(start for start, *_ in scan.of_gloo)
    for number, ((start, end, operation), call) in enumerate(zip(sorted(scan.of_gloo), launched, strict=True)):
        peers = f"{group}: {operation}" if group and operation not in ("send", "recv") else ""
        scan.launches[number] = min(start, call)
        scan.kernels.append((start, end, number, 1, operation, peers))
    ordered = sorted(scan.operators, key=lambda each: (each[0], each[1], -each[2]))
    for (thread, start, end, name), (other, begin, *_) in pairwise([*ordered, (-2, 0.0, 0.0, "")]):
        if not name.startswith(gloo.CALLS) and (other != thread or begin >= end):
            scan.kernels.append((start, end, -1, 0, "", ""))
    if len(scan.kernels) > most:
        raise UserError(f"{scan.path}: more than {KERNELS:,} kernels with those before: give traces of fewer steps")


def _steps(scan: _Scan, rank: int) -> dict[int, list[Kernel]]:
    windows = sorted(scan.windows)
    begins = [begin for begin, _, _ in windows]
    result: dict[int, list[Kernel]] = {}
    for start, end, correlation, stream, collective, peers in scan.kernels:
        launched = scan.launches.get(correlation, start)
        place = bisect_right(begins, launched) - 1
        if windows and (place < 0 or launched > windows[place][1]):
            continue
        launched, start, end = (1e-6 * (time + scan.base) for time in (launched, start, end))
        step = windows[place][2] if windows else 0
        if collective in ("send", "recv"):
            peers = scan.once(peers.replace(OWN, str(rank)))
        result.setdefault(step, []).append(Kernel(launched, start, end, stream, collective, peers))
    for kernels in result.values():
        kernels.sort()
    return result
