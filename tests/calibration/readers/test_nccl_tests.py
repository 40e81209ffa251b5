"""Logs in nccl-tests' own grammar; the two files are made up, with times near published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calibration.readers.nccl_tests import read_nccl_tests
from topologies.reading import UserError

FOLDER = Path(__file__).parents[2] / "data" / "nccl"


def test_log_with_timestamps_and_na() -> None:
    log = read_nccl_tests(FOLDER / "all_reduce_2x8.log")
    assert (log.operation, log.ranks, log.nodes, log.wrong) == ("all_reduce", 16, 2, 0)
    assert [row.bytes for row in log.rows] == [2.0**e for e in range(10, 29, 3)] + [2.0**30]
    assert log.rows[0].seconds == pytest.approx((31.52 + 31.09) / 2 * 1e-6)
    assert log.ignored == [(26, "node-0:81000:81000 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.4<0>")]


def test_log_with_interval_columns_blank_half_and_no_name() -> None:
    log = read_nccl_tests(FOLDER / "all_gather_perf.log")
    assert (log.operation, log.ranks, log.nodes, log.ignored) == ("all_gather", 4, 1, [])
    assert [row.seconds for row in log.rows] == pytest.approx([22.5e-6, 60.7e-6, 118.5e-6, 325.4e-6])


def test_json(tmp_path: Path) -> None:
    half = {"time": 40.0, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": 0}
    results = [
        {"size": 1024, "count": 256, "out_of_place": half, "in_place": half | {"time": 20.0}},
        {"size": 2048, "count": 512, "out_of_place": {"cpu_time": 50.0}, "in_place": None},
        {"size": 0, "count": 0, "out_of_place": {"time": 0}},
    ]
    devices = [{"rank": r, "hostname": f"n{r // 2}", "device": r % 2} for r in range(4)]
    path = tmp_path / "out.json"
    path.write_text(json.dumps({"version": 3, "args": "/opt/reduce_scatter_perf -b 1K", "devices": devices, "results": results}))
    log = read_nccl_tests(path)
    assert (log.operation, log.ranks, log.nodes) == ("reduce_scatter", 4, 2)
    assert [(row.bytes, row.seconds) for row in log.rows] == [(1024.0, pytest.approx(30e-6)), (2048.0, pytest.approx(50e-6))]
    assert len(log.ignored) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.log", "step 1 loss 2.3\n", "not a log of nccl-tests"),
        ("a.json", "{", "not valid JSON at line 1"),
        ("a.json", "{}", "no list 'results'"),
        (
            "a.log",
            "1024 256 float sum -1 9.0 1.0 1.0 0 9.0 1.0 1.0 0\n",
            "does not name its collective: say which, as --collective all_reduce",
        ),
        ("alltoall.log", "1024 256 float none -1 9.0 1.0 1.0 0 9.0 1.0 1.0 0\n", "lists 0 ranks"),
    ],
)
def test_what_is_no_log_is_one_clear_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=message) as raised:
        read_nccl_tests(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)
