"""Logs, traces, journals and tables that nobody wrote in good faith: one line that names file, place and rule, and no more memory
or time than the file's size.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from calibration.readers import kineto, kineto_file, nccl_tests, stream
from calibration.readers.kineto import read_traces
from calibration.readers.nccl_tests import read_nccl_tests
from calibration.samples import read_journal
from strategies.planner.search.results import Results
from topologies.reading import UserError

# -- traces of the profiler --------------------------------------------------------------------------------------------------

ARGS = {"Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "Group size": 2, "dtype": "BFloat16"}
EVENT = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_x", "ts": 1.0, "dur": 50.0, "args": ARGS}
TRACE = {"distributedInfo": {"rank": 0}, "traceEvents": [EVENT]}


def trace(folder: Path, data: Any) -> Path:
    (path := folder / "t.json").write_text(json.dumps(data))
    return path


def test_a_plain_trace_is_read(tmp_path: Path) -> None:
    assert [(row.bytes, row.seconds) for row in read_traces([trace(tmp_path, TRACE)], 8).rows] == [(2048.0, pytest.approx(50e-6))]


@pytest.mark.parametrize("field", ["ts", "dur"])
@pytest.mark.parametrize("value", [{}, [1], "1e300 s", None, True, float("nan"), float("inf"), -1, 1e300, 10**400])
def test_times_of_a_trace_are_numbers(field: str, value: Any, tmp_path: Path) -> None:
    path = trace(tmp_path, TRACE | {"traceEvents": [EVENT, EVENT | {field: value}]})
    with pytest.raises(UserError, match=rf"t\.json: event 2: {field}=.*: must be microseconds from 0 to"):
        read_traces([path], 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"In msg nelems": 10**400}, "at most 1e[+]15 are meant"),
        ({"In msg nelems": -1}, "at most 1e[+]15 are meant"),
        ({"Group size": 10**9}, "of 1000000000 elements or ranks"),
        ({"Group size": True}, "do not say their collective"),
        ({"In msg nelems": [1]}, "do not say their collective"),
        ({"dtype": {}}, "do not say their collective"),
    ],
)
def test_sizes_of_a_trace_are_checked(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = trace(tmp_path, TRACE | {"traceEvents": [EVENT | {"args": ARGS | change}]})
    with pytest.raises(UserError, match=message):
        read_traces([path], 8)


@pytest.mark.parametrize("rank", [True, -1, 2**31, 10**400, "0", None, [0]])
def test_the_rank_of_a_trace_is_checked(rank: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rank"):
        read_traces([trace(tmp_path, TRACE | {"distributedInfo": {"rank": rank}})], 8)


@pytest.mark.parametrize("groups", [3, "x", {"a": 1}, [3], [{"pg_name": [], "ranks": {}}], None])
def test_groups_of_a_trace_may_be_anything(groups: Any, tmp_path: Path) -> None:
    path = trace(tmp_path, TRACE | {"distributedInfo": {"rank": 0, "pg_config": groups}})
    assert len(read_traces([path], 8).rows) == 1


@pytest.mark.parametrize(
    "event", [3, None, [], "x", {"cat": "kernel", "name": 3}, {"cat": [], "name": "nccl"}, EVENT | {"cat": {}}]
)
def test_what_is_no_event_is_passed_over(event: Any, tmp_path: Path) -> None:
    assert len(read_traces([trace(tmp_path, TRACE | {"traceEvents": [event, EVENT]})], 8).rows) == 1


def test_long_texts_of_ranks_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto_file, "TEXTS", 5000)
    events = [EVENT | {"args": ARGS | {"Process Group Ranks": "0, " * 1000 + end}} for end in ("1", "1", "1", "2")]
    assert read_traces([trace(tmp_path, TRACE | {"traceEvents": events[:3]})], 8).rows
    with pytest.raises(UserError, match="arguments are longer"):
        read_traces([trace(tmp_path, TRACE | {"traceEvents": events})], 8)


def test_a_trace_is_read_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in any order, an element that is longer than a piece, numbers at the end of one."""
    long = EVENT | {"args": ARGS | {"note": "é" * 100}}
    data = {"schemaVersion": 1, "empty": {}, "traceEvents": [EVENT, long, 12345, EVENT], "n": 1.5, "distributedInfo": {"rank": 7}}
    path = trace(tmp_path, data)
    whole = read_traces([path], 8).rows
    for chunk in (1, 7, 64):
        monkeypatch.setattr(stream, "CHUNK", chunk)
        assert list(stream.members(path, "n")) == list(data.items())
        assert read_traces([path], 8).rows == whole


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"traceEvents": [',
        '{"traceEvents": [1 2]}',
        '{"traceEvents": []',
        "{1: 2}",
        '{"a" 1}',
        "\0",
        "[" * 10**6,
        '{"a": ' + "[" * 10**6,
        '{"a": ' + "9" * 5000 + "}",
        '{"a": "',
        " " * 10**6,
    ],
    ids=lambda text: text[:20],
)
def test_broken_json_is_one_line(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "t.json").write_text(text)
    with pytest.raises(UserError, match=r"t\.json: (cannot be read|not a trace)"):
        read_traces([path], 8)


def test_a_file_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "t.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [' + b"1," * 50_000 + b"1]}"))
    assert len(list(stream.members(path, "traceEvents"))) == 50_002
    monkeypatch.setattr(stream, "FREE", 50_000)
    monkeypatch.setattr(stream, "RATIO", 10)
    with pytest.raises(UserError, match="cannot be read: more than 10 times its size of text"):
        read_traces([path], 8)


def test_one_value_may_not_be_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CHUNK", 100)
    monkeypatch.setattr(stream, "VALUE", 10_000)
    (path := tmp_path / "t.json").write_text('{"a": [' + "1, " * 10_000 + "1]}")
    with pytest.raises(UserError, match="broken JSON, or a value of more than"):
        read_traces([path], 8)


def test_kernels_of_a_trace_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto, "EVENTS", 2)
    with pytest.raises(UserError, match="more than 2 NCCL kernels"):
        read_traces([trace(tmp_path, TRACE | {"traceEvents": [EVENT] * 3})], 8)


# -- logs of nccl-tests ------------------------------------------------------------------------------------------------------

ROW = "1024 256 float sum -1 9.0 1.0 1.0 0 9.0 1.0 1.0 0"
RANKS = "".join(f"#  Rank {rank} Pid 1 on node device {rank} [0x07] NVIDIA H100\n" for rank in range(2))


def log(folder: Path, *rows: str, name: str = "all_reduce.log") -> Path:
    (path := folder / name).write_text(RANKS + "\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("stamp", ["", " 2026-01-02 10:11:12", " 2026-01-02T10:11:12", " 2026-01-02"])
def test_a_row_may_end_in_a_time(stamp: str, tmp_path: Path) -> None:
    assert read_nccl_tests(log(tmp_path, ROW + stamp)).rows[0].seconds == pytest.approx(9e-6)


@pytest.mark.parametrize("time", ["inf", "nan", "1e999", "-9.0", "1e12", "9" * 400])
def test_rows_of_impossible_times_are_not_understood(time: str, tmp_path: Path) -> None:
    parsed = read_nccl_tests(log(tmp_path, ROW, ROW.replace(" 9.0", f" {time}", 1)))
    assert [row.seconds for row in parsed.rows] == [pytest.approx(9e-6)]
    assert [number for number, _ in parsed.ignored] == [4]


def test_rows_of_impossible_sizes_are_not_understood(tmp_path: Path) -> None:
    parsed = read_nccl_tests(log(tmp_path, ROW, ROW.replace("1024", "9" * 30, 1), ROW.replace("1024", "9" * 400, 1)))
    assert ([row.bytes for row in parsed.rows], len(parsed.ignored)) == ([1024.0], 2)


def test_long_lines_cost_their_length(tmp_path: Path) -> None:
    """180 kB of spaces took 87 s: a search that began at each of them ran to their end."""
    parsed = read_nccl_tests(log(tmp_path, ROW, ROW + " " * 900_000 + "x", "1 1 a a 1 " + "1 " * 100_000, "#" + " " * 900_000))
    assert (len(parsed.rows), len(parsed.ignored)) == (1, 2)
    assert max(len(text) for _, text in parsed.ignored) <= 200


def test_a_file_of_anything_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_tests, "IGNORED", 3)
    with pytest.raises(UserError, match="not a log of nccl-tests: more than 3 lines are no rows"):
        read_nccl_tests(log(tmp_path, ROW, *["x"] * 4))


@pytest.mark.parametrize("field", ["devices", "args"])
@pytest.mark.parametrize("value", [3, None, "x", {}, [3], [None]])
def test_fields_of_json_may_be_anything(field: str, value: Any, tmp_path: Path) -> None:
    half = {"time": 40.0, "nwrong": 0}
    data = {"args": ["all_reduce_perf"], "results": [{"size": 1024, "out_of_place": half}], field: value}
    (path := tmp_path / "all_reduce.json").write_text(json.dumps(data))
    assert [row.bytes for row in read_nccl_tests(path, "all_reduce", 2).rows] == [1024.0]


@pytest.mark.parametrize(
    "result",
    [
        3,
        {"size": True},
        {"size": "1"},
        {"size": 10**30},
        {"size": -1},
        {"out_of_place": {"time": 1e300}},
        {"out_of_place": {"time": "x"}},
        {"out_of_place": [1]},
    ],
)
def test_results_of_json_are_checked(result: Any, tmp_path: Path) -> None:
    good = {"size": 1024, "out_of_place": {"time": 40.0}}
    broken = good | result if isinstance(result, dict) else result
    (path := tmp_path / "all_reduce.json").write_text(json.dumps({"results": [good, broken]}))
    parsed = read_nccl_tests(path, "all_reduce", 2)
    assert (len(parsed.rows), len(parsed.ignored)) == (1, 1)


# -- journals of samples -----------------------------------------------------------------------------------------------------

HEAD = {"format": 1, "device": "cpu", "ranks": 2, "machine": "m", "versions": "v"}
SAMPLE: dict[str, Any] = {
    "part": "collective",
    "case": {"operation": "all_reduce", "ranks": 2, "nodes": 1, "bytes": 8},
    "value": 1e-5,
}


def journal(folder: Path, *lines: str) -> Path:
    (path := folder / "s.jsonl").write_text("\n".join(lines) + "\n")
    return path


def test_a_plain_journal_is_read(tmp_path: Path) -> None:
    assert len(read_journal(journal(tmp_path, json.dumps(HEAD), json.dumps(SAMPLE)))[1]) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("9" * 5000, "not JSON: a number of more than 64 digits"),
        ("[" * 100_000, "not JSON: more than 64"),
        ("3", "must be an object"),
        ('{"value": NaN}', "not JSON: NaN is no number"),
        (json.dumps(SAMPLE | {"part": "x"}), "part='x': must be one of gemm, attention"),
        (json.dumps(SAMPLE | {"case": {"operation": "all_reduce", "ranks": 2}}), "case.nodes=None: must be a number"),
        (json.dumps(SAMPLE | {"case": SAMPLE["case"] | {"ranks": "2"}}), "case.ranks='2': must be a number"),
        (json.dumps(SAMPLE | {"case": SAMPLE["case"] | {"bytes": -1}}), "case.bytes=-1.0: must be a number from 0"),
        (json.dumps(SAMPLE | {"case": SAMPLE["case"] | {"operation": 3}}), "case.operation=3.0: must be a text"),
        (json.dumps(SAMPLE | {"value": 0}), "value=0: must be from 1e-12 to 1e[+]06 seconds"),
        (json.dumps(SAMPLE | {"value": 1e12}), "value=1e[+]12: must be from 1e-12"),
        (json.dumps(SAMPLE | {"value": 1e300}), "value=1e[+]300: input should be less than or equal to"),
        (json.dumps(SAMPLE | {"round": 10**30}), "round="),
        (json.dumps(SAMPLE | {"case": 3}), "case=3"),
    ],
    ids=lambda value: value[:24],
)
def test_lines_of_a_journal_are_checked(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"s\.jsonl: line 2: {message}"):
        read_journal(journal(tmp_path, json.dumps(HEAD), line))


# -- tables of results -------------------------------------------------------------------------------------------------------

RESULT = {
    "hash": "0" * 12,
    "version": "x",
    "changes": {"plan.tp": 2},
    "step": 1.0,
    "error": None,
    "fits": True,
    "memory": 1e9,
    "mfu": 0.4,
    "gpus": 8,
    "tokens_per_second": 8.0,
    "tokens_per_second_per_gpu": 1.0,
    "bubble": 0.0,
    "exposed": 0.1,
}


@pytest.mark.parametrize(
    "change",
    [
        {"hash": [1]},
        {"hash": None},
        {"changes": [1]},
        {"changes": None},
        {"error": 3},
        {"error": "x"},
        {"step": "1"},
        {"step": 0},
        {"step": True},
        {"step": -1},
        {"fits": "yes"},
        {"memory": {}},
        {"mfu": None},
        {"gpus": [8]},
        {"tokens_per_second": 0},
    ],
    ids=str,
)
def test_rows_of_a_table_are_checked(change: dict[str, Any], tmp_path: Path) -> None:
    (path := tmp_path / "r.jsonl").write_text(json.dumps(RESULT) + "\n" + json.dumps(RESULT | {"hash": "1"} | change) + "\n")
    with pytest.raises(UserError, match=rf"r\.jsonl: is not a table of results: line 2: .*{next(iter(change))}="):
        Results(str(path))
    path.write_text(json.dumps(RESULT) + "\n")
    assert list(Results(str(path)).rows) == [RESULT["hash"]]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "9" * 5000, "3", '{"a": NaN}', "\0", "x" * (2**20 + 1)], ids=lambda text: text[:9]
)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_what_is_no_table_is_one_line(text: str, suffix: str, tmp_path: Path) -> None:
    (path := tmp_path / f"r{suffix}").write_text(text + "\n")
    with pytest.raises(UserError, match=rf"r\{suffix}: "):
        Results(str(path))


@pytest.mark.parametrize("name", ["a\0b.jsonl", "x" * 300 + ".jsonl", "nowhere/r.jsonl"])
def test_names_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--results"):
        Results(str(tmp_path / name)).add(RESULT)
