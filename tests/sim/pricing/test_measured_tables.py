"""Prices between, below and above the sizes that were measured."""

from __future__ import annotations

import pytest

from sim.pricing.transfers.measured_tables import CollectiveTable, Entry, Wrapping, interpolated

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
    assert TABLE.covers(400)
    assert not TABLE.covers(401)


def test_a_wrapper_copies_at_its_rate() -> None:
    assert Wrapping(fixed="2 s", rate="10 kB/s").seconds(30e3) == 5.0
    assert Wrapping(fixed="2 s").seconds(30.0) == 2.0
