"""Fits of collectives find what made the times, keep sizes out, and state the errors that they have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibration.fit.published_collectives.fit import errors, inside, network, search, series, summary
from calibration.fit.published_collectives.refit import CLUSTERS, in_switch
from calibration.fit.published_collectives.report import by_others
from calibration.fit.published_collectives.rows import EXCLUDED, Row, alternate, node_rows, sweep_rows, vtrain_rows
from sim.analysis.collective_sweep import sweep
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from topologies.cluster_files import load_cluster

RAW = Path(__file__).parents[4] / "shared" / "data"
raw = pytest.mark.skipif(not RAW.is_dir(), reason="the raw measurements are not shipped")
SIZES = [2.0**e for e in range(10, 31)]


def predicted(name: str, profile: str, ranks: int, nodes: int, operation: str) -> list[Row]:
    """Rows that are exactly what a profile predicts."""
    cluster = load_cluster(name).model_copy(update={"nodes": nodes})
    table = sweep(cluster.topology(), Prices(load_profile(profile), cluster.node.gpu), operation, ranks, SIZES)
    return [Row(f"{operation} {ranks}", operation, ranks, nodes, o[0].bytes, o[0].seconds) for o in table]


def test_fit_inside_a_node_finds_what_made_the_times() -> None:
    """Times made with the prices of H100, fitted from NCCL's constants on the links of an A100 node of that speed."""
    pytest.importorskip("scipy")
    cluster, start = load_cluster("dgx-h100"), load_profile("generic")
    rows = [
        row
        for n in (2, 4, 8)
        for operation in ("all_gather", "reduce_scatter", *["all_reduce"] * (n < 8))  # of eight the switch reduces
        for row in predicted("dgx-h100", "h100", n, 1, operation)
    ]
    free, kept = alternate(rows)
    numbers, profile = inside(start, ("nvlink",))
    fitted = profile(search(numbers, profile, series(free, cluster, start), cluster.topology().kinds, starts=16))
    assert max(summary(error)[1] for error in errors(kept, cluster, fitted).values()) < 0.04
    truth = load_profile("h100")
    assert fitted.links["nvlink"].efficiency == pytest.approx(truth.links["nvlink"].efficiency, rel=0.05)
    assert fitted.protocols["ll"].base == pytest.approx(truth.protocols["ll"].base, rel=0.3)


def test_fit_between_nodes_finds_what_made_the_times() -> None:
    pytest.importorskip("scipy")
    cluster, start = load_cluster("dgx-h100").model_copy(update={"nodes": 2}), load_profile("h100")
    rows = predicted("dgx-h100", "h100", 16, 2, "all_gather")
    numbers, profile = network(start, rings=True)
    fitted = profile(search(numbers, profile, series(rows, cluster, start), cluster.topology().kinds, starts=4))
    assert fitted.links["nic"].efficiency == pytest.approx(start.links["nic"].efficiency, rel=0.05)
    assert summary(errors(rows, cluster, fitted)["all_gather 16"])[1] < 0.03


def test_every_other_size_is_kept_out_but_never_the_ends() -> None:
    rows = [Row("a", "all_gather", 2, 1, size, 1.0) for size in SIZES]
    free, kept = alternate(rows)
    assert [row.bytes for row in kept] == SIZES[1:-1:2]
    assert sorted(row.bytes for row in (*free, *kept)) == SIZES


@raw
@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200"])
def test_stated_error_is_what_the_files_numbers_give(name: str) -> None:
    profile, cluster = load_profile(name), load_cluster(CLUSTERS[name])
    rows = [row for row in node_rows(RAW, name) if row.operation != "all_to_all" and not in_switch(row, name)]
    each = errors(alternate(rows)[1], cluster, profile)
    stated = profile.provenance["links"].errors
    for key, error in each.items():
        assert summary(error) == pytest.approx((stated[key], stated[f"{key} p90"]), abs=0.01)
    median, p90 = summary(np.concatenate(list(each.values())))
    assert median < 0.05
    assert p90 < 0.15


@raw
def test_a_machine_that_was_not_fitted_to() -> None:
    """All-reduce of 2, 4 and 8 A100 from 4 MiB up, another machine and another NCCL (vTrain's traces)."""
    rows = [row for row in vtrain_rows(RAW) if row.bytes >= 2**22]
    medians = errors(rows, load_cluster("dgx-a100"), load_profile("a100"))
    assert summary(np.concatenate(list(medians.values())))[0] < 0.08


@raw
def test_every_sweep_is_a_series_or_excluded_with_a_reason() -> None:
    rows = sweep_rows(RAW)
    assert set(EXCLUDED) <= set(rows)
    assert all(row.seconds > 0 and row.ranks >= 2 for several in rows.values() for row in several)


def test_a_thread_launches_on_its_gpus_in_turn() -> None:
    """Eight launches of 5 us; published sweeps of `nccl-tests -g 8` take 34 to 40 us of small messages."""
    size, cluster, profile = 1024.0, load_cluster("dgx-a100"), load_profile("a100")
    one, each = (Row(name, "all_gather", 8, 1, size, 40e-6) for name in ("S001", "S072"))
    assert errors([one], cluster, profile)["S001"] == pytest.approx([0.0])
    assert errors([each], cluster, profile)["S072"] < -0.5


def test_a_log_is_predicted_by_the_others_where_their_sizes_span_its_own() -> None:
    """Times of twice and four times as long, on a line in logarithms: the middle of 2 and 4 in the median; 8 KiB has no other."""
    first, *others = (
        [Row(name, "all_reduce", 8, 1, size, factor * size) for size in sizes]
        for name, factor, sizes in (("a", 1.0, (2e3, 8e3)), ("b", 2.0, (1e3, 4e3)), ("c", 4.0, (1e3, 4e3)))
    )
    off = by_others([first, *others])
    assert off[0] == pytest.approx(8**0.5 - 1)  # of `first`, at 2e3
    assert len(off) == 1 + 4
