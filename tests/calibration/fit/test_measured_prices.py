"""Measured prices of collectives, of wrappers and of compute beside them in the simulation."""

from __future__ import annotations

from typing import Any

import pytest

import shardyard
from calibration.fit.machine.tables import tables
from sim.analysis.collective_sweep import lone, sweep
from sim.analysis.summary import summarise
from sim.engine.player import run
from sim.pricing.block_costs import fused
from sim.pricing.prices import Prices, Profile
from sim.pricing.shipped import load_profile
from sim.pricing.transfers.measured_tables import CollectiveTable, Wrapping
from sim.program import Collective
from strategies.lowering.lower import lower
from tests.calibration.conftest import MODEL, collective
from topologies.cluster_files import load_cluster
from topologies.reading import UserError, build


def with_tables(**more: Any) -> Profile:
    fitted_tables = tables(
        [*collective(lambda size: 1e-3 + size / 1e9), *collective(lambda size: 5e-3 + size / 1e9, "broadcast")]
    )
    return load_profile("cpu-gloo").model_copy(update={"tables": tuple(fitted_tables), "processes": 2} | more)


@pytest.mark.parametrize(("operation", "size"), [("all_reduce", 2.0**16), ("all_reduce", 3e6), ("broadcast", 2.0**12)])
def test_simulation_pays_the_price_in_a_step(operation: str, size: float) -> None:
    cluster, profile = load_cluster("cpu-gloo"), with_tables()
    (options,) = sweep(cluster.topology(), Prices(profile, cluster.node.gpu), operation, 2, [size])
    table = next(table for table in profile.tables if table.operation == operation)
    assert [option.algorithm for option in options] == [table.algorithm]
    assert options[0].seconds == pytest.approx(table.seconds(size), rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "operation", "size", "note"),
    [
        (2, "all_reduce", 1e6, ""),
        (2, "all_gather", 1e6, "all_gather among 2 ranks on 1 node: not measured for profile 'cpu-gloo', extrapolated"),
        (4, "all_reduce", 1e6, "all_reduce among 4 ranks on 1 node: not measured"),
        (4, "all_reduce", 1e6, "4 processes on a node: profile cpu-gloo was measured with 2"),
        (2, "all_reduce", 2.0**28, "bytes are 4 times the largest that was measured"),
    ],
)
def test_prediction_says_when_it_leaves_what_was_measured(ranks: int, operation: str, size: float, note: str) -> None:
    cluster = load_cluster("cpu-gloo", overrides={"node.gpus": ranks})
    pricing, (work,) = lone(cluster.topology(), Prices(with_tables(), cluster.node.gpu), operation, ranks, [size])
    pricing.collective(work, 0)
    assert any(note in text for text in pricing.notes) if note else not pricing.notes


def test_another_algorithm_than_the_measured_is_priced_by_the_formula() -> None:
    cluster = load_cluster("cpu-gloo")
    bare, measured = (Prices(profile, cluster.node.gpu) for profile in (load_profile("cpu-gloo"), with_tables()))
    asked = [sweep(cluster.topology(), price, "all_reduce", 2, [1e6], "direct")[0][0].seconds for price in (bare, measured)]
    if not load_profile("cpu-gloo").tables:
        assert asked[0] == asked[1]


def test_wrapper_costs_its_fixed_time_and_its_copies() -> None:
    job = shardyard.read_job(model=MODEL, cluster="cpu-gloo", plan={"tp": 2, "precision": "fp32", "global_batch": 1})
    steps = []
    for wrapping in ({}, {"tp/all_reduce": Wrapping.model_construct(fixed=1e-3, rate=1e9)}):
        prices = Prices(with_tables(wrapping=wrapping), job.cluster.node.gpu)
        steps.append(run(lower(job.model, job.resolve()), job.cluster.topology(), prices))
    reduced = [
        (times, work)
        for cohort in steps[0].program.cohorts
        for op in cohort.ops
        if hasattr(op.work, "items")
        for times, work in op.work.items()
        if getattr(work, "operation", "") == "all_reduce"
    ]
    more = sum(times * (1e-3 + work.bytes / 1e9) for times, work in reduced)
    assert len(reduced) > 4
    assert summarise(steps[1]).step_seconds - summarise(steps[0]).step_seconds == pytest.approx(more, rel=1e-6)


def test_wrapper_of_a_gpu_is_host_time() -> None:
    """A GPU that is busy hides it; one that waits for the host does not: launch 1 s, wrapper 5 s, collective 2 s."""
    cost = fused([(Collective("all_reduce", 1.0, "tp", "x"), 2.0)], 1.0, 1.0, [5.0])
    assert (cost.busy, cost.critical, cost.host) == (2.0, 8.0, 6.0)


def test_table_rows_must_ascend() -> None:
    row = {"step": "1 ms", "alone": "1 ms"}
    data = {"operation": "send", "algorithm": "direct", "ranks": 2, "prices": [row | {"bytes": "2 B"}, row | {"bytes": "1 B"}]}
    with pytest.raises(UserError, match="send of 2 ranks: bytes must ascend"):
        build(CollectiveTable, data, "p.yaml")


def test_compute_is_slowed_only_while_a_collective_works() -> None:
    """Of a collective that waits for others half of its time, compute beside it feels half."""
    profile = load_profile("cpu-gloo")
    job = shardyard.read_job("examples/demo.yaml", {"plan.microbatch": 4})

    def slowed(share: float) -> float:
        tables = [
            table.model_copy(update={"prices": tuple(e.model_copy(update={"alone": share * e.step}) for e in table.prices)})
            for table in profile.tables
        ]
        prices = Prices(profile.model_copy(update={"tables": tuple(tables)}), job.cluster.node.gpu)
        timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), prices)
        return summarise(timeline).breakdown["slowdown"] / summarise(timeline).step_seconds

    assert slowed(1.0) > 0.01
    assert slowed(2.0) == slowed(1.0)  # nothing works for longer than it takes
    half, whole = (1 - 1 / (1 + working * (profile.slowdown - 1)) for working in (0.5, 1.0))  # of the time, compute is lost
    assert slowed(0.5) / slowed(1.0) == pytest.approx(half / whole, rel=0.05)
    assert profile.tables[0].working(2.0**20) == pytest.approx(
        profile.tables[0].seconds(2.0**20, alone=True) / profile.tables[0].seconds(2.0**20)
    )
