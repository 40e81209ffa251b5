"""Reads what nccl-tests prints and writes: its text log, also that of rccl-tests, and its JSON (`-J`, version 3).

Text (github.com/NVIDIA/nccl-tests src/util.cu): lines that begin with # describe the run; a row is size, count, type, redop and
root, then, out of place and in place, time (µs), algbw, busbw (GB/s) and #wrong. Out of place may be blank, #wrong may be N/A;
with `-I 1` each half has four more columns, with `-S` a timestamp ends the row. `size` is the full buffer S.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from calibration.fit.published_collectives.rows import OPERATIONS, Row
from calibration.readers.stream import beginning_of
from topologies.reading import UserError, lines_of, load_text, nearest, parse_document

MOST = 64 * 2**20  # bytes of a log
LINE = 4096  # letters of a line that may be a row; nccl-tests' have 200
# what AMD's fork says of itself, and libraries of themselves (NCCL_DEBUG=VERSION)
VERSIONS = ("rccl-tests:", "NCCL version", "RCCL version", "HIP version", "ROCm version", "Hostname ", "Librccl path")
IGNORED = 200_000  # lines that are not understood: NCCL_DEBUG=INFO prints thousands
LARGEST = 1e15  # bytes of a message
SLOWEST = 1e10  # microseconds of one, some three hours
_HEAD = re.compile(r"\s*\d+\s+\d+\s+[a-z]\w*\s+[a-z]\w*\s+-?\d+\s", re.ASCII)
_DATE = re.compile(r"\d{4}-\d\d-\d\d(T\S+)?", re.ASCII)
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device(?:\s+\d+\s+\[[^\]]*\]\s+(.+))?")
_GPUS = re.compile(r"^#\s*nThread\s+\d+\s+nGpus\s+(\d{1,4})\b", re.ASCII)
_NAME = re.compile(r"^#\s*Collective test starting:\s*(\S+?)(?:_perf)?\s*$")
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "sendrecv": "send",
    "gather": "gather",
    "scatter": "scatter",
}


class Log(NamedTuple):
    """Rows of a log, the mean of both halves, and the lines that were not understood, with their numbers."""

    operation: str
    ranks: int
    nodes: int
    rows: list[Row]
    ignored: list[tuple[int, str]]
    wrong: int  # rows whose results nccl-tests found wrong
    gpus: tuple[str, ...] = ()  # what the driver calls them; empty where the log does not say
    launches: int = 1  # GPUs on which a thread launches in turn (-g)

    @property
    def in_turn(self) -> str:
        """A note where a thread launched on several GPUs, which small messages wait for."""
        what = f"a thread launched on {self.launches} GPUs in turn (-g), which small messages wait for"
        return f"{what}: prices are of a process for each GPU" if self.launches > 1 else ""


def read_nccl_tests(path: Path, operation: str = "", ranks: int = 0, nodes: int = 0) -> Log:
    """Read a text log or JSON; operation, ranks and nodes count where the log does not say its own. Raises UserError."""
    read = _json if beginning_of(path, 4096).lstrip().startswith("{") else _text
    name, hosts, gpus, halves, ignored, launches = read(path)
    operation = name or _operation(path.stem) or operation
    ranks, nodes = len(hosts) or ranks, len(set(hosts)) or nodes
    if not halves:
        raise UserError(f"{path}: not a log of nccl-tests: no row of size, count, type, redop, root and times")
    if not operation:
        raise UserError(f"{path}: does not name its collective: say which, as --collective all_reduce")
    if ranks < 2:
        listed = "lists one rank, which sends nothing" if hosts else "does not list its ranks: say how many, as --ranks 8"
        raise UserError(f"{path}: {listed}")
    rows = [Row(path.stem, operation, ranks, max(1, nodes), size, fmean(times)) for size, times, _ in halves if size and times]
    wrong = sum(wrong for *_, wrong in halves)
    return Log(operation, ranks, max(1, nodes), rows, ignored, wrong, tuple(dict.fromkeys(gpus)), launches)


def operation_named(name: str) -> str:
    """A collective as the user calls it: all_reduce, AllReduce, alltoall_perf. Raises UserError."""
    plain = re.sub(r"[^a-z]", "", name.lower()).removesuffix("perf")
    if plain in _NAMES:
        return _operation(plain)
    raise UserError(f"--collective {name}: unknown{nearest(name, _NAMES.values())}")


_Halves = list[tuple[float, list[float], bool]]  # size, seconds of each half, whether a result was wrong
_Read = tuple[str, list[str], list[str], _Halves, list[tuple[int, str]], int]


def _text(path: Path) -> _Read:
    name, hosts, gpus, halves, ignored = "", {}, [], [], []
    width, launches = 4, 1  # columns of a half, GPUs of a thread
    for number, line in lines_of(path, MOST):
        line = line.rstrip()
        if len(line) > LINE:
            ignored.append((number, line[:80]))
        elif match := _RANK.match(line):
            hosts[int(match[1])] = match[2]
            gpus += [match[3].strip()] if match[3] else []
        elif match := _GPUS.match(line):
            launches = int(match[1])
        elif match := _NAME.match(line):
            name = _operation(match[1])
        elif line.startswith(VERSIONS):
            continue
        elif line.lstrip().startswith("#"):
            width = 8 if "i_min" in line else width
        elif half := _row(line, width):
            halves.append(half)
        elif line.strip():
            ignored.append((number, line.strip()[:200]))
        if len(ignored) > IGNORED:
            raise UserError(f"{path}: not a log of nccl-tests: more than {IGNORED:,} lines are no rows of it")
    return name, list(hosts.values()), gpus, halves, ignored, launches


def _row(line: str, width: int) -> tuple[float, list[float], bool] | None:
    """Size, seconds of each half and whether a result was wrong; None when the line is no row."""
    if not _HEAD.match(line):
        return None
    size, _, _, _, _, *columns = line.split()
    stamp = next((count for count in (1, 2) if len(columns) >= count and _DATE.fullmatch(columns[-count])), 0)
    columns = columns[: len(columns) - stamp]
    halves = [columns[at : at + width] for at in range(0, len(columns), width)]
    try:
        micro = [float(half[0]) for half in halves]
        wrong = any(float(half[3]) > 0 for half in halves if half[3] != "N/A")
    except (IndexError, ValueError):
        return None
    if not (1 <= len(halves) <= 2 and float(size) <= LARGEST and all(0 <= time <= SLOWEST for time in micro)):
        return None
    return float(size), [1e-6 * time for time in micro if time > 0], wrong


def _json(path: Path) -> _Read:
    data = parse_document(load_text(path), path, ".json")
    results = data.get("results")
    if not isinstance(results, list):
        raise UserError(f"{path}: not nccl-tests' JSON: no list 'results'")
    halves: _Halves = []
    ignored = []
    for number, result in enumerate(results, 1):
        both = [result.get(half) for half in ("out_of_place", "in_place")] if isinstance(result, Mapping) else []
        times = [time for half in both if isinstance(half, Mapping) for time in _times(half)]
        if times and _number(result.get("size")) and result["size"] <= LARGEST:
            wrong = any(isinstance(half, Mapping) and _positive(half.get("nwrong")) for half in both)
            halves.append((float(result["size"]), times, wrong))
        else:
            ignored.append((number, "result without size or time"))
    args = data.get("args", "")
    program = args[0] if isinstance(args, list) and args else str(args).split(" ")[0]
    devices = [device for device in _listed(data.get("devices")) if isinstance(device, Mapping)]
    hosts = [str(device.get("hostname", "")) for device in devices]
    gpus = [str(device["device_info"]) for device in devices if device.get("device_info")]
    words = list(map(str, args)) if isinstance(args, list) else str(args).split()
    launches = next((int(word) for option, word in pairwise(words) if option == "-g" and re.fullmatch(r"\d{1,4}", word)), 1)
    return _operation(str(program)), hosts, gpus, halves, ignored, launches


def _times(half: Mapping[str, Any]) -> list[float]:
    time = half.get("time", half.get("cpu_time"))
    return [1e-6 * float(time)] if _positive(time) and time <= SLOWEST else []


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _operation(text: str) -> str:
    """The operation that a program's or file's name contains; "" when none."""
    plain = re.sub(r"[^a-z]", "", text.lower())
    for known in sorted(_NAMES, key=len, reverse=True):
        if known in plain:
            return OPERATIONS.get(known, _NAMES[known])
    return ""
