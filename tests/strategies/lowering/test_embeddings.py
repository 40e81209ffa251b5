"""Embedding tables on parameter servers: volumes, times and memory by hand."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import shardyard
from strategies.lowering.embeddings import Embeddings, Table, tables_of
from strategies.lowering.parameter_servers import parameter_servers
from topologies.reading import UserError

DLRM = Path(__file__).parents[3] / "examples/modules/dlrm.py"


def test_distinct_rows_are_those_of_random_lookups() -> None:
    """Of 5 rows and 3 lookups: 5 · (1 − 0.8³) = 2.44. Drawn: within a hundredth. Of many rows no two are alike."""
    assert Table(5, 4, 3).distinct(1) == pytest.approx(2.44)
    drawn = np.random.default_rng(1).integers(0, 1000, (400, 60 * 20))
    mean = np.mean([len(np.unique(row)) for row in drawn])
    assert Table(1000, 4, 20).distinct(60) == pytest.approx(mean, rel=0.01)
    assert Table(10**12, 4, 1).distinct(1000) == pytest.approx(1000, rel=1e-6)
    assert Table(1, 4, 7).distinct(3) == 1


def test_what_a_step_sends() -> None:
    """A table of one row of 8 numbers and one of a trillion rows of 16, of which 10 samples look up 2 each, in 16 bits: 1 row of
    16 bytes and 20 of 32. Pushed are gradients, numbers of these rows and of the next step's, 8 bytes each.
    """
    embeddings = Embeddings((Table(1, 8, 1), Table(10**12, 16, 2)), "bf16")
    sent = embeddings.traffic(10)
    assert sent.rows == pytest.approx(21)
    assert sent.pulled == pytest.approx(16 + 20 * 32)
    assert sent.pushed == pytest.approx(16 + 20 * 32 + 21 * 16)
    assert embeddings.held == (16 + 4) + 10**12 * (32 + 4)


@pytest.mark.parametrize(("optimizer", "states"), [("rowwise_adagrad", 4), ("adagrad", 32), ("sgd", 0)])
def test_an_update_and_a_sum_of_rows_move_what_they_read_and_write(optimizer: str, states: int) -> None:
    """One row of 8 numbers in fp32, looked up 6 times: 32 bytes of gradient, row and new row, and states twice. A worker reads it
    6 times and writes 2 sums; backward it sets a gradient to zero, and for each lookup reads two numbers and writes one.
    """
    embeddings = Embeddings((Table(1, 8, 3),), optimizer=optimizer)
    assert embeddings.update(2).bytes == 3 * 32 + 2 * states
    assert [kernel.bytes for kernel in embeddings.pooling(2)] == [(6 + 2) * 32, 32 + 3 * 6 * 32]
    assert embeddings.held == 32 + states
    assert embeddings.buffers(2) == 2 * (32 + 2 * 32)


@pytest.mark.parametrize("servers", [1, 4])
def test_a_synchronous_step_with_tables(servers: int, toy_job, toy_prices) -> None:
    """Eight workers, links of 1 GB/s: the rows' bytes go with the model's, and rows of all workers are updated at once."""
    job, prices, tables = toy_job(4, 3, microbatch=3, accumulation=2), toy_prices(), Embeddings((Table(10**9, 64, 50),))
    without, has = (parameter_servers(job, prices, servers, steps=5, embeddings=each) for each in (None, tables))
    rows = 6 * 50  # of a worker: two of a billion are hardly ever the same
    more = 8 * rows * (2 * 256 + 2 * 8) / (servers * 1e9)
    more += sum(map(prices.seconds, tables.pooling(6))) + prices.seconds(tables.update(6 * 8)) / servers
    assert has.played.seconds / 5 == pytest.approx(without.played.seconds / 5 + more, rel=1e-6)
    assert has.server_memory - without.server_memory == pytest.approx(10**9 * (256 + 4) / servers)
    assert has.worker_memory - without.worker_memory == pytest.approx(2 * (rows * 256 + 6 * 256), rel=1e-6)
    assert "embeddings" not in without.to_dict()
    assert has.to_dict()["sparse"]["pulled"] == pytest.approx(rows * 256, rel=1e-6)


def test_an_asynchronous_server_updates_a_worker_s_rows(toy_job, toy_prices) -> None:
    job, prices, tables = toy_job(4, 3), toy_prices(), Embeddings((Table(10**9, 64, 50),))
    without, has = (parameter_servers(job, prices, 1, "async", steps=5, embeddings=each) for each in (None, tables))
    samples = job.resolve().global_batch // 12
    assert has.setting.update - without.setting.update == pytest.approx(prices.seconds(tables.update(samples)))


def test_tables_are_rows_width_and_lookups() -> None:
    assert tables_of(("100x8:20", "7x3")) == (Table(100, 8, 20), Table(7, 3, 1))
    for text in ("100", "x8", "0x8", "100x8:", "100x8:0", "9x9999999", "-1x8"):
        with pytest.raises(UserError, match=r"--embedding '?.*must be rows × width"):
            tables_of((text,))
    with pytest.raises(UserError, match="--embedding-type 'fp8': must be one of fp32, bf16, fp16"):
        Embeddings((Table(1, 1, 1),), "fp8")
    with pytest.raises(UserError, match="--embedding-optimizer 'adam': must be one of rowwise_adagrad"):
        Embeddings((Table(1, 1, 1),), optimizer="adam")


def test_the_command_has_them() -> None:
    asked = ["server", "--model", "gpt2-1.5b", "--cluster", "dgx-a100", "--nodes", "2", "--steps", "5"]
    tables = ["--embedding", "1000000x128:20", "--embedding", "5000x64"]
    shown = CliRunner().invoke(shardyard.main, asked + tables).stdout
    assert "2 tables, 1.00 M rows" in shown.replace("1.01 M", "1.00 M")
    assert "by all-reduce instead" not in shown
    data = json.loads(CliRunner().invoke(shardyard.main, [*asked, *tables, "--json"]).stdout)
    assert data["embeddings"]["tables"] == [[1000000, 128, 20], [5000, 64, 1]]
    refused = CliRunner().invoke(shardyard.main, [*asked, "--embedding-type", "bf16"])
    assert refused.exit_code != 0


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Samples per second grow with servers; 26 · 2,048 rows of 512 bytes and 9.5 MB of the dense model are pulled."""
    runpy.run_path(str(DLRM), run_name="__main__")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:2] for row in rows] == [["1", "async"], ["4", "async"], ["8", "async"], ["8", "sync"]]
    samples = [float(row[2].replace(",", "")) for row in rows]
    assert samples[0] < samples[1] < samples[2] > samples[3]
    assert {row[3] for row in rows} == {f"{(26 * 2048 * 512 + 4 * 2_368_897) / 1e6:.1f}"}
