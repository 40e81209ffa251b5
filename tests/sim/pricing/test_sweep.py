"""The collectives of a step, priced by size, are those that the step itself was charged for."""

from __future__ import annotations

import pytest

import shardyard
from calibration.bench import bench, by_ranks
from sim.analysis.collective_sweep import bus_factor, lone, of_step, sweep
from sim.analysis.notes import Note, joined
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile
from topologies.cluster_files import load_cluster
from topologies.reading import UserError


def played(**plan: object) -> shardyard.Timeline:
    return shardyard.simulate(
        shardyard.read_job(
            model="llama-3.1-8b",
            cluster="dgx-h100",
            nodes=2,
            overrides={"model.layers": 4},
            plan={"auto": False, "sequence": 2048} | plan,
        )
    )


def test_the_axes_that_send_most_are_swept_among_their_own_groups() -> None:
    timeline = played(tp=8, sequence_parallel=True, data_parallel="ddp", global_batch=32)
    first, second = of_step(timeline, [2.0**20, 2.0**30])
    assert [swept.where for swept in (first, second)] == ["tp, groups of 8 ranks", "dp, groups of 2 ranks"]
    assert second.operation == "all_reduce"
    assert [options[0].bytes for options in second.prices] == [2.0**20, 2.0**30]


def test_at_a_size_of_the_job_the_price_is_the_one_that_it_paid() -> None:
    timeline = played(data_parallel="ddp", global_batch=32)
    used = of_step(timeline, [1.0])[0].used
    ops = [(number, op.work) for number, op in timeline.ops(0) if op.stream == "dp"]
    assert ops
    paid = {work.bytes: timeline.cost[number].alone / work.repeat for number, work in ops}  # type: ignore[union-attr]
    swept = of_step(timeline, used)[0]
    assert {options[0].bytes: options[0].seconds for options in swept.prices} == pytest.approx(paid, rel=1e-6)


def test_one_gpu_has_no_collectives() -> None:
    alone = shardyard.read_job(
        model="gpt2-1.5b",
        cluster="dgx-h100",
        nodes=1,
        plan={"auto": False, "global_batch": 1},
        overrides={"model.layers": 2, "cluster.node.gpus": 1, "cluster.node.nics": 1},
    )
    assert of_step(shardyard.simulate(alone), [1e6]) == []


ONLY = (
    "between nodes only all_reduce was measured with profile 'h100' over this network: its steps and rates price other operations"
)


@pytest.mark.parametrize(
    ("operation", "ranks", "size", "said"),
    [
        ("all_reduce", 16, 2.0**20, []),
        ("all_reduce", 1024, 2.0**20, []),  # compared with published plots
        ("all_reduce", 1032, 2.0**20, ["not measured for profile 'h100': all_reduce among more than 1,024 ranks"]),
        ("all_reduce", 8, 2.0**34, []),
        ("all_reduce", 16, 2.0**34, ["not measured for profile 'h100': all_reduce of more than 8 GiB"]),
        ("broadcast", 8, 2.0**20, ["not measured for profile 'h100': broadcast in a node"]),
        ("reduce_scatter", 8, 2.0**20, []),
        ("reduce_scatter", 16, 2.0**20, [ONLY]),
        ("reduce_scatter", 24, 2.0**20, [ONLY]),
        ("all_gather", 8, 2.0**34, ["not measured for profile 'h100': all_gather of more than 0.5 GiB"]),
    ],
)
def test_what_was_not_measured_is_said(operation: str, ranks: int, size: float, said: list[str]) -> None:
    cluster = load_cluster("dgx-h100", nodes=-(-ranks // 8))
    pricing, (work,) = lone(cluster.topology(), Prices(load_profile("h100"), cluster.node.gpu), operation, ranks, [size])
    pricing.collective(work, 0)
    assert [note.partition(", priced")[0] for note in joined(pricing.notes)] == said


def test_operations_with_one_caveat_are_a_note_together() -> None:
    first, *more = (Note("not measured: {} of more than 1 GiB", name) for name in ("all_gather", "send", "all_to_all"))
    together = "not measured: all_gather, send and all_to_all of more than 1 GiB"
    assert joined([first, "of a machine", *more]) == [together, "of a machine"]


@pytest.mark.parametrize(
    ("nodes", "nics", "seconds"),
    [(1, 4, 1.0), (2, 4, 1.0), (2, 1, 4.0)],
    ids=["neighbours of a node", "each pair over NICs of its own", "four pairs over one NIC"],
)
def test_sends_take_their_bytes_over_the_link_that_they_share(toy_cluster, toy_prices, nodes, nics, seconds):
    """10⁹ bytes over links of 1 GB/s: from one GPU to the next, or from four of a node to those of another at once."""
    place = toy_cluster(gpus=4, nodes=nodes, nics=nics)
    (options,) = sweep(place.topology(), toy_prices(), "send", 2 if nodes == 1 else 8, [1e9])
    assert options[0].seconds == pytest.approx(seconds)
    assert bus_factor("send", 2) == 1.0


def test_the_command_has_sends_and_refuses_what_is_none():
    data, _ = bench("send", "dgx-h100", 2, sizes="1GiB:1GiB")
    (options,) = data.prices
    assert data.ranks == 16
    assert 0.8 * 50e9 < 2**30 / options[0].seconds < 50e9  # of a NIC's 400 Gb/s
    for given, message in (
        ({"nodes": 3}, "--nodes 3: a send is from one GPU of a node to the next"),
        ({"nodes": 1, "ranks": 4}, "--ranks 4: a send is from one GPU"),
        ({"nodes": 1, "measured": "log.txt"}, "sends are not compared with it"),
    ):
        with pytest.raises(UserError, match=message):
            bench("send", "dgx-h100", **given)
    with pytest.raises(UserError, match="--by-ranks: a send has two ranks"):
        by_ranks("send", "dgx-h100", 1)
