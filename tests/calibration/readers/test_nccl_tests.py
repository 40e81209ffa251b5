"""Logs in nccl-tests' own grammar; the two files are made up, with times near published ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from calibration.bench import bench
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
    assert (log.operation, log.ranks, log.nodes, log.ignored, log.launches) == ("all_gather", 4, 1, [], 4)
    assert [row.seconds for row in log.rows] == pytest.approx([22.5e-6, 60.7e-6, 118.5e-6, 325.4e-6])


def test_log_of_rccl_tests(tmp_path: Path) -> None:
    """AMD's fork and its library print their versions without a #, and name AMD's GPUs; times are made up."""
    ranks = "".join(
        f"#  Rank  {rank} Group  0 Pid   {7085 + rank} on node-7 device  {rank} [0000:{rank}5:00] AMD Instinct MI300X\n"
        for rank in range(8)
    )
    head = "# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1\n#\n"
    columns = (
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n"
    )
    rows = (
        "    67108864      16777216     float     sum      -1   420.00  159.78  279.62      0   380.00  176.60  309.05      0\n"
    )
    versions = "RCCL version : 2.28.3-develop:360c5c6\nHIP version  : 7.3.53390\nROCm version : 7.12.0\nHostname     : node-7\n"
    versions += "Librccl path : /opt/rocm/lib/librccl.so.1\n"
    path = tmp_path / "all_reduce_perf.log"
    path.write_text(
        f"{head}rccl-tests: Version develop:a7809b3\n{versions}# Using devices\n{ranks}#\n{columns}{rows}"
        "# Out of bounds values : 0 OK\n"
    )
    log = read_nccl_tests(path)
    assert (log.operation, log.ranks, log.nodes, log.gpus) == ("all_reduce", 8, 1, ("AMD Instinct MI300X",))
    assert [(row.bytes, row.seconds) for row in log.rows] == [(67108864.0, pytest.approx(400e-6))]
    assert log.ignored == []


def test_json(tmp_path: Path) -> None:
    half = {"time": 40.0, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": 0}
    results = [
        {"size": 1024, "count": 256, "out_of_place": half, "in_place": half | {"time": 20.0}},
        {"size": 2048, "count": 512, "out_of_place": {"cpu_time": 50.0}, "in_place": None},
        {"size": 0, "count": 0, "out_of_place": {"time": 0}},
    ]
    devices = [{"rank": r, "hostname": f"n{r // 2}", "device": r % 2} for r in range(4)]
    path = tmp_path / "out.json"
    path.write_text(
        json.dumps({"version": 3, "args": "/opt/reduce_scatter_perf -b 1K -g 2", "devices": devices, "results": results})
    )
    log = read_nccl_tests(path)
    assert (log.operation, log.ranks, log.nodes, log.launches) == ("reduce_scatter", 4, 2, 2)
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
        ("alltoall.log", "1024 256 float none -1 9.0 1.0 1.0 0 9.0 1.0 1.0 0\n", "does not list its ranks"),
    ],
)
def test_what_is_no_log_is_one_clear_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=message) as raised:
        read_nccl_tests(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_log_of_one_thread_is_told_apart() -> None:
    log = FOLDER / "all_gather_perf.log"
    _, notes = bench("all_gather", "dgx-a100", nodes=1, ranks=4, measured=str(log))
    assert f"{log}: {read_nccl_tests(log).in_turn}" in notes
    assert "launched on 4 GPUs in turn" in read_nccl_tests(log).in_turn
    assert not read_nccl_tests(FOLDER / "all_reduce_2x8.log").in_turn


def test_an_all_to_all_says_that_its_host_is_not_counted() -> None:
    """A profile knows what a call by PyTorch takes."""
    _, notes = bench("all_to_all", "dgx-h100", nodes=1)
    assert any("waits for its host, 44.8 µs a call by PyTorch" in note for note in notes)
    assert not any("its host" in note for note in bench("all_gather", "dgx-h100", nodes=1)[1])
