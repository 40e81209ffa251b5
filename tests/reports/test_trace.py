"""The trace obeys the rules of the format, and tells the same as the timeline."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reports.trace import events, write_trace
from sim.analysis.summary import summarise
from sim.program import Send
from sim.timeline import Timeline
from strategies.predict import simulate
from strategies.read_job import read_job

Events = list[dict[str, Any]]


@pytest.fixture(params=[True, False], ids=["folded", "unfolded"])
def played(request: pytest.FixtureRequest, timeline: Timeline, play: Callable[..., Timeline]) -> Timeline:
    return timeline if request.param else play(fold=False, tp=2, pp=2, dp=2, accumulation=4, recompute="full")


@pytest.fixture
def trace(played: Timeline, tmp_path: Path) -> Events:
    loaded = json.loads(gzip.decompress(write_trace(played, tmp_path / "trace.json.gz").read_bytes()))
    assert loaded["displayTimeUnit"] == "ms"
    return list(loaded["traceEvents"])


def slices(trace: Events) -> dict[tuple[int, int], list[tuple[float, float]]]:
    tracks = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    return tracks


def test_slices_of_a_track_do_not_overlap(trace: Events) -> None:
    for spans in slices(trace).values():
        spans.sort()
        assert all(end >= start >= 0 for start, end in spans)
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
        nanoseconds = [(int(start * 1000), int((end - start) * 1000)) for start, end in spans]  # as readers store them
        assert all(a + length <= b for (a, length), (b, _) in itertools.pairwise(nanoseconds))


EXAMPLES = Path(__file__).parents[2] / "examples"
BOTH_ON_DISK = {"plan.data_parallel": "zero3", "plan.offload": {"optimizer": "nvme", "parameters": "nvme"}}


@pytest.mark.parametrize(
    ("example", "changes", "streams"),
    [
        ("data_parallel/zero-offload", {}, {"cpu", "to host", "from host"}),
        ("data_parallel/zero-offload", BOTH_ON_DISK, {"cpu", "to host", "from host", "nvme read", "nvme write"}),
        ("data_parallel/hsdp", {}, {"dp", "replica"}),
        ("layers/async-tp", {}, set()),
        ("layers/ring-attention", {"model.layers": 2}, {"beside"}),
        ("schedules/1f1b-overlapped", {"model.layers": 8, "plan.accumulation": 4}, {"beside"}),
        ("schedules/interleaved-overlapped", {"model.layers": 16, "plan.global_batch": 64}, {"beside"}),
        ("schedules/dualpipe", {}, {"pp copies"}),
        ("schedules/pipedream", {}, set()),
    ],
)
def test_one_track_per_stream_and_no_slice_reaches_into_another(example: str, changes: Any, streams: set[str]) -> None:
    """A viewer puts slices that overlap in part on tracks of their own: here none do, not even nested."""
    inside = "beside" in streams  # of a block: shown where it is played item by item
    written = list(events(simulate(read_job(EXAMPLES / f"{example}.yaml", changes), fold=not inside)))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in written if e["ph"] == "M" and e["name"] == "thread_name"}
    of = {pid: [name for (other, _), name in names.items() if other == pid] for pid, _ in names}
    assert all(len(set(tracks)) == len(tracks) for tracks in of.values())
    assert {"host", "compute", *streams} <= set(names.values())
    for spans in slices(written).values():
        spans.sort()
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
    ends = {kind: {e["id"]: e["ts"] for e in written if e["ph"] == kind} for kind in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    assert all(start <= ends["f"][number] for number, start in ends["s"].items())
    tracks = slices(written)
    for event in written:
        if event["ph"] in ends:  # an arrow that ends beside every slice is not drawn
            assert any(start <= event["ts"] <= end for start, end in tracks[event["pid"], event["tid"]])


def faults(trace: Events) -> list[str]:
    """What breaks the rules of "Trace Event Format" (Google, 2016): types and fields of each phase, times of less than a day
    on a grid whose sums are exact, one name per process and thread, and flows that begin and end once, in that order, in a slice.
    """
    wrong = []
    spans, named, ends = slices(trace), dict[tuple[str, int, int], str](), defaultdict[tuple[str, int], list[float]](list)
    for event in trace:
        kind, place = event["ph"], (event["pid"], event.get("tid", 0))
        if not set(event) <= ALLOWED[kind] or not REQUIRED[kind] <= set(event):
            wrong.append(f"{kind}: fields {sorted(event)}")
        if not all(type(number) is int and 0 <= number < 2**31 for number in place):
            wrong.append(f"pid, tid {place}")
        times = [event[name] for name in ("ts", "dur") if name in event]
        if any(not 0 <= time < 86_400e6 or (time * 64) % 1 for time in times):
            wrong.append(f"times {times}")
        if kind == "M" and named.setdefault((event["name"], *place), str(event["args"])) != str(event["args"]):
            wrong.append(f"two of {event['name']} for {place}")
        if kind == "C" and not all(isinstance(value, float) and value >= 0 for value in event["args"].values()):
            wrong.append(f"counter {event['args']}")
        if kind in "sf":
            ends[kind, event["id"]].append(event["ts"])
            if not any(start <= event["ts"] <= end for start, end in spans[place]):
                wrong.append(f"flow {event['id']} outside of every slice")
    for number in {number for _, number in ends}:
        both = ends.get(("s", number), []), ends.get(("f", number), [])
        if [len(side) for side in both] != [1, 1] or both[0] > both[1]:
            wrong.append(f"flow {number}: {both}")
    return wrong


COMMON = {"ph", "name", "pid"}
REQUIRED = {
    "X": COMMON | {"tid", "ts", "dur", "cat"},
    "M": COMMON | {"args"},
    "C": COMMON | {"ts", "args"},
    "s": COMMON | {"tid", "ts", "id", "cat"},
    "f": COMMON | {"tid", "ts", "id", "cat", "bp"},
}
ALLOWED = {kind: fields | {"args", "tid"} for kind, fields in REQUIRED.items()}


def test_the_format_is_kept(trace: Events) -> None:
    assert faults(trace) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dur": -1.0}, "times"),
        ({"ts": 0.001}, "times"),  # not on the grid
        ({"tid": "compute"}, "pid, tid"),
        ({"ph": "s", "id": 10**6}, "fields"),
    ],
)
def test_the_check_of_the_format_finds_faults(change: dict[str, Any], says: str, timeline: Timeline) -> None:
    written = list(events(timeline))
    broken = next(event for event in written if event["ph"] == "X")
    broken |= change
    assert any(fault.startswith(says) or says in fault for fault in faults(written))


def test_every_op_is_a_slice_and_the_last_ends_with_the_step(trace: Events, played: Timeline) -> None:
    ops = [event for event in trace if event["ph"] == "X" and event["cat"] != "launch"]
    assert len(ops) == sum(1 for _ in played.rows())
    assert max(event["ts"] + event["dur"] for event in ops) == pytest.approx(played.step * 1e6, abs=1 / 64)


def test_every_process_and_thread_has_a_name_and_a_place(trace: Events, played: Timeline) -> None:
    names: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for event in trace:
        if event["ph"] == "M":
            names[event["name"]].add((event["pid"], event["tid"]))
    used = set(slices(trace))
    assert used <= names["thread_name"] == names["thread_sort_index"]
    assert {pid for pid, _ in names["process_name"]} == {lane.rank for lane in played.lanes}
    assert names["process_name"] == names["process_sort_index"]
    assert {event["args"]["name"] for event in trace if event["name"] == "thread_name"} >= {"host", "compute", "dp"}


def test_arrows_join_each_send_with_what_waits_for_it(trace: Events, played: Timeline) -> None:
    tracks = slices(trace)
    ends: dict[str, dict[int, dict[str, Any]]] = {"s": {}, "f": {}}
    for event in trace:
        if event["ph"] in ends:
            assert event["id"] not in ends[event["ph"]]
            ends[event["ph"]][event["id"]] = event
            assert any(start <= event["ts"] <= end for start, end in tracks[event["pid"], event["tid"]])
    sends = sum(isinstance(row.op.work, Send) for row in played.rows())
    assert len(ends["s"]) == sends  # 8 on each pair of lanes: four microbatches there and back
    assert set(ends["s"]) == set(ends["f"])
    for number, start in ends["s"].items():
        assert start["ts"] <= ends["f"][number]["ts"]
        assert start["pid"] != ends["f"][number]["pid"]


def test_communication_tells_bytes_axis_and_algorithm(trace: Events) -> None:
    reduced = [event for event in trace if event["ph"] == "X" and event["cat"] == "all_reduce" and event["args"]["axis"] == "dp"]
    assert reduced
    for event in reduced:
        args = event["args"]
        assert args["algorithm"].startswith("all_reduce/")
        assert args["Collective name"] == "all_reduce"
        assert args["Group size"] == 2
        assert args["In msg nelems"] == args["buffer bytes"] / 2  # bf16
        assert args["bytes"] == pytest.approx(args["repeat"] * args["buffer bytes"])  # 2(n − 1)/n = 1
    sends = [event for event in trace if event["ph"] == "X" and event["cat"] == "send"]
    assert {event["args"]["microbatch"] for event in sends} == {0, 1, 2, 3}


def test_memory_counters_reach_the_peak(trace: Events, played: Timeline) -> None:
    held: dict[int, list[float]] = defaultdict(list)
    for event in trace:
        if event["ph"] == "C":
            held[event["pid"]].append(sum(event["args"].values()))
    for entry in summarise(played).memory:
        assert max(held[entry.rank]) == pytest.approx(sum(entry.kinds.values()))


def test_the_host_launches_in_order(trace: Events) -> None:
    starts = [event["ts"] for event in trace if event["ph"] == "X" and event["cat"] == "launch" and event["pid"] == 0]
    assert starts == sorted(starts)
    assert starts


def test_the_same_timeline_gives_the_same_bytes(timeline: Timeline, tmp_path: Path) -> None:
    assert write_trace(timeline, tmp_path / "a").read_bytes() == write_trace(timeline, tmp_path / "b.json.gz").read_bytes()
    assert list(events(timeline)) == list(events(timeline))
