"""Prices between, below and above the sizes that were measured."""

from __future__ import annotations

import pytest

from shardyard import read_job
from sim.pricing.shipped import load_profile
from sim.pricing.transfers.measured_tables import CollectiveTable, Entry, Wrapping, interpolated
from strategies.predict import predict

TABLE = CollectiveTable(
    operation="all_reduce",
    algorithm="ring",
    ranks=4,
    prices=(Entry(bytes="100 B", step="2 s", alone="1 s"), Entry(bytes="400 B", step="8 s", alone="9 s")),
)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (1, 2.0),  # the latency
        (100, 2.0),
        (200, 4.0),  # halfway in logarithms
        (400, 8.0),
        (1200, 24.0),  # the last rate
    ],
)
def test_seconds_by_size(size: float, seconds: float) -> None:
    assert TABLE.seconds(size) == pytest.approx(seconds)
    assert interpolated([(100, 2.0), (400, 8.0)], size) == pytest.approx(seconds)


def test_from_no_bytes_on_sizes_are_linear() -> None:
    prices = [(0.0, 1.0), (100.0, 4.0)]
    assert interpolated(prices, 50.0) == pytest.approx(2.0)  # sqrt(1 · 4)
    assert interpolated(prices[:1], 50.0) == 1.0


def test_a_collective_in_a_step_waits_while_it_moves_nothing() -> None:
    """Back to back it takes half as long; never more than all of it."""
    assert TABLE.working(100) == pytest.approx(0.5)
    assert TABLE.working(400) == 1.0
    assert TABLE.working(100, more=1.0) == pytest.approx(2 / 3), "and adds up for a second more"
    assert TABLE.covers(400)
    assert not TABLE.covers(401)


def test_a_wrapper_copies_at_its_rate() -> None:
    assert Wrapping(fixed="2 s", rate="10 kB/s").seconds(30e3) == 5.0
    assert Wrapping(fixed="2 s").seconds(30.0) == 2.0


def test_numbers_of_16_bits_are_added_up_one_by_one() -> None:
    """Each of two ranks adds up half of the parameters; fp32 gradients cost what they did."""
    slow = load_profile("cpu-gloo").model_copy(update={"narrow_sum": 3e-9})
    model = {"name": "small", "hidden": 256, "layers": 2, "heads": 4, "vocabulary": 1000, "context": 64}

    def seconds(kind: str, more: bool) -> float:
        plan = {"data_parallel": kind, "overlap": False, "precision": "fp32", "dp": 2, "microbatch": 1}
        job = read_job(model=model, cluster="cpu-gloo", plan=plan, variability=0)
        return predict(job, slow if more else load_profile("cpu-gloo")).step_seconds

    parameters = read_job(model=model, cluster="cpu-gloo", plan={}).model.parameters
    assert seconds("ddp_fp16", True) - seconds("ddp_fp16", False) == pytest.approx(parameters / 2 * 3e-9, rel=1e-6)
    assert seconds("ddp", True) == seconds("ddp", False)
