"""Bytes on links: what goes out comes in, what is sent is carried, folded or not; the hot link is found."""

from __future__ import annotations

import pytest

from sim.analysis.link_load import carried, hottest, link_loads
from sim.analysis.volume import volumes
from sim.engine.player import run
from strategies.lowering.lower import lower

PLANS = [
    dict(data_parallel="ddp", algorithm="ring"),
    dict(data_parallel="zero3", tp=2, accumulation=2, algorithm="ring"),
    dict(pp=4, accumulation=3, data_parallel="zero1", algorithm="ring"),
    dict(pp=2, tp=4, sequence_parallel=True, accumulation=2, algorithm="ring"),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("nodes", [1, 2])
def test_bytes_are_conserved(plan, nodes, toy_job, toy_prices) -> None:
    """Every byte sent inside a node crosses two NVLink ports; between nodes two NICs and two PCIe slots."""
    job = toy_job(8, nodes, bucket="20 kB", **plan)
    timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
    total = dict.fromkeys(("nvlink", "pcie", "nic"), 0.0)
    for load in link_loads(timeline):
        total[load.kind] += load.count * load.bytes
    pairs = zip(timeline.lanes, volumes(timeline), strict=True)
    sent = sum(lane.ranks * sum(size for size, _ in volume.values()) for lane, volume in pairs)
    assert total["nic"] == pytest.approx(total["pcie"])
    assert total["nvlink"] / 2 + total["nic"] / 2 == pytest.approx(sent)
    assert (total["nic"] > 0) == (nodes > 1)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_single_links_carry_together_what_alike_links_carry(plan, toy_job, toy_prices) -> None:
    job = toy_job(8, 2, bucket="20 kB", **plan)
    timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
    each, topology = carried(timeline), job.cluster.topology()
    names = {topology.name(link): load for link, load in enumerate(each)}
    assert sum(load.count * load.bytes for load in link_loads(timeline)) == pytest.approx(each.sum())
    assert all(names[load.name] == pytest.approx(load.bytes) for load in link_loads(timeline))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_folded_and_unfolded_carry_the_same(plan, toy_job, toy_prices) -> None:
    job = toy_job(8, 2, bucket="20 kB", **plan)
    program = lower(job.model, job.resolve())
    loads = []
    for fold in (True, False):
        timeline = run(program, job.cluster.topology(), toy_prices(), fold=fold)
        carried: dict[str, float] = {}
        for load in link_loads(timeline):
            carried[load.kind] = carried.get(load.kind, 0.0) + load.count * load.bytes
        loads.append(carried)
    assert loads[0] == pytest.approx(loads[1])


def test_the_slow_nic_is_hot(toy_job, toy_prices) -> None:
    job = toy_job(8, 2, data_parallel="ddp", node={"nic": "10 MB/s"})
    timeline = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
    first = hottest(timeline)[0]
    assert first.kind == "nic"
    assert 0.5 < first.utilisation <= 1.0
