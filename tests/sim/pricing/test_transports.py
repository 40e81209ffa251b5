"""What carries messages between nodes: prices of rings and of networks beside published sweeps."""

from __future__ import annotations

import pytest

from sim.analysis.collective_sweep import lone, sweep
from sim.analysis.notes import of_error, of_network
from sim.pricing.prices import Prices
from sim.pricing.shipped import load_profile, profile_for
from sim.pricing.transfers.protocols import LinkPrice, priced_as
from sim.pricing.transports import carried, load_transport, transport_names, with_steps
from strategies.job import Job
from strategies.models.model import load_model
from strategies.plan.plan import Plan
from strategies.predict import prices_of
from topologies.cluster import Cluster
from topologies.cluster_files import load_cluster
from topologies.reading import UserError

MIB = 2.0**20
PUBLISHED = [  # cluster, nodes, operation, ranks, bytes, seconds measured: nccl-tests, named in the transports' files
    ("aws-p4d", 2, "all_reduce", 16, 8, 163.8e-6),
    ("aws-p4d", 2, "all_reduce", 16, 2048 * MIB, 51406e-6),
    ("aws-p5", 2, "all_reduce", 16, 8, 70.8e-6),
    ("aws-p5", 2, "all_reduce", 16, MIB, 122.2e-6),
    ("gcp-a3-high", 2, "all_gather", 16, 4 * MIB, 939.3e-6),
    ("gcp-a3-high", 2, "all_gather", 16, 512 * MIB, 7076.5e-6),
    ("gcp-a3-mega", 2, "all_gather", 16, 1024, 86.0e-6),
    ("gcp-a3-mega", 2, "all_gather", 16, 8192 * MIB, 42649.7e-6),
    ("gcp-a3-ultra", 2, "all_gather", 16, 1024, 54.9e-6),
    ("aws-p6-b200", 4, "all_reduce", 32, 1024 * MIB, 5747.1e-6),
    ("alps", 2, "all_reduce", 8, 512, 19.6e-6),
    ("alps", 2, "all_reduce", 8, 128 * MIB, 1912.1e-6),
]


def prices_on(cluster: Cluster) -> Prices:
    return Prices(carried(profile_for(cluster.node.gpu.name), cluster.fabric.transport), cluster.node.gpu)


@pytest.mark.parametrize(("name", "nodes", "operation", "ranks", "size", "seconds"), PUBLISHED)
def test_networks_take_what_was_published(name: str, nodes: int, operation: str, ranks: int, size: float, seconds: float) -> None:
    cluster = load_cluster(name, nodes=nodes)
    ((first, *_),) = sweep(cluster.topology(), prices_on(cluster), operation, ranks, [size])
    assert first.seconds == pytest.approx(seconds, rel=0.15)


def test_every_transport_is_used_by_a_cluster_and_says_where_it_was_measured() -> None:
    from topologies.cluster_files import cluster_names

    used = {load_cluster(name).fabric.transport for name in cluster_names()}
    assert used - {""} == set(transport_names())
    for name in transport_names():
        transport = load_transport(name)
        assert "github.com" in transport.source
        assert any(key.endswith("nodes") for key in transport.errors)


def test_steps_of_rings_are_their_own() -> None:
    """16 GPUs of two nodes: a ring of 15 steps, two of them over NICs; eight bytes take base, steps and the wire."""
    cluster, profile = load_cluster("dgx-h100", nodes=2), load_profile("h100")
    step = LinkPrice(efficiency=profile.rings["simple"].efficiency, latency="100 us", fill="0.4636 us")
    slow = with_steps(profile, {}, {"ll": step, "ll128": step, "simple": step})
    topology = cluster.topology()

    def seconds(priced: object, algorithm: str, operation: str = "all_gather") -> float:
        pricing, (work,) = lone(topology, Prices(priced, cluster.node.gpu), operation, 16, [8.0], algorithm)
        return pricing.collective(work, 0).alone

    moved = seconds(slow, "ring/simple") - seconds(profile, "ring/simple")
    assert moved == pytest.approx(2 * (100e-6 - profile.rings["simple"].latency), rel=1e-3)
    assert seconds(slow, "tree", "all_reduce") == seconds(profile, "tree", "all_reduce")
    assert priced_as("all_gather/ring", "ll", slow.every_protocol()) == "ring_ll"
    assert priced_as("all_reduce/tree", "ll", slow.every_protocol()) == "ll"
    send = slow.every_protocol()["p2p"].links["nic"]
    assert send.latency == 100e-6  # sends hand over as rings do


def test_a_ring_over_hundreds_of_nodes_waits_for_its_hops_once() -> None:
    """484 ranks, two on each of 242 nodes, gather 1 GB: 10.6 ms on two NICs at 47 GB/s, and 483 steps, for which
    NCCL's own figures make 1.4 ms (LL128: 4 us between nodes, 1.9 inside) to 4.2 ms (Simple: 14 and 3.4; src/graph/tuning.cc).
    """
    cluster = load_cluster("dgx-h100", nodes=242, overrides={"node.gpus": 2, "node.nics": 2})
    pricing, (work,) = lone(cluster.topology(), prices_on(cluster), "all_gather", 484, [1e9])
    assert 1.4e-3 < pricing.collective(work, 0).alone - 10.6e-3 < 4.2e-3


def test_where_the_network_was_not_measured_it_is_said() -> None:
    measured, other = load_cluster("aws-p5"), load_cluster("dgx-a100", overrides={"fabric.transport": "efa-v2"})
    assert not list(of_network(prices_on(measured), "all_reduce", ["nvlink", "nic"]))
    assert not list(of_network(prices_on(other), "all_reduce", ["nvlink"]))
    (note,) = of_network(prices_on(other), "all_reduce", ["nvlink", "nic"])
    assert note.startswith("between nodes nothing was measured")
    (note,) = of_network(prices_on(measured), "all_gather", ["nvlink", "nic"])
    assert note.startswith("between nodes only all_reduce was measured with profile 'h100' over this network")
    (note,) = of_network(prices_on(load_cluster("dgx-1v")), "all_reduce", ["nvlink"])
    assert note == "collectives: not measured for profile 'v100'"


@pytest.mark.parametrize(
    ("cluster", "nodes", "ranks", "node", "said"),
    [
        ("dgx-a100", 2, 16, {}, []),
        ("dgx-a100", 2, 16, {"nic": "12.5 GB/s"}, ["nic of 12.5 GB/s per GPU"]),
        ("dgx-a100", 2, 16, {"nics": 4}, ["nic of 12.5 GB/s per GPU"]),  # two GPUs share one
        ("dgx-a100", 2, 16, {"nics": 16, "nic": "12.5 GB/s"}, []),  # one GPU has two
        ("dgx-h100", 1, 8, {"nvlink": "200 GB/s"}, ["nvlink of 200 GB/s"]),
        ("perlmutter", 1, 4, {}, ["nvlink of 100 GB/s"]),  # four links to each of three others, where a switch has all for each
        ("alps", 1, 4, {}, ["nvlink of 150 GB/s"]),
        ("alps", 2, 8, {}, []),  # Slingshot was measured on it
        ("dgx-b300", 2, 16, {}, ["nic of 100 GB/s per GPU"]),
        ("pcie-l40s", 1, 2, {"pcie": "31.5 GB/s"}, []),  # the same generation in other round numbers
    ],
)
def test_links_of_another_rate_than_was_measured_are_said(cluster, nodes, ranks, node, said) -> None:
    place = load_cluster(cluster, nodes=nodes, overrides={f"node.{name}": value for name, value in node.items()})
    pricing, (work,) = lone(place.topology(), prices_on(place), "all_reduce", ranks, [MIB])
    pricing.collective(work, 0)
    notes = [note for note in pricing.notes if note.startswith("collectives over ")]
    assert [note.removeprefix("collectives over ").partition(" were not measured")[0] for note in notes] == said
    extent, links = pricing.transport(work, 0)
    assert not said or of_error(pricing.prices, "all_reduce", extent, links, [MIB]).endswith("its error is unknown")


def test_what_was_not_measured_moves_with_what_was() -> None:
    """EFA was measured by trees: its rings' steps are longer than InfiniBand's by as much as trees' of the smallest message."""
    profile = load_profile("h100")
    over = carried(profile, "efa-v2")
    further = load_transport("efa-v2").steps["ll"].latency - profile.protocols["ll"].links["nic"].latency
    assert over.rings["simple"].latency - profile.rings["simple"].latency == pytest.approx(further)
    assert over.tuner
    assert not profile.tuner


def test_an_unknown_transport_is_one_line() -> None:
    cluster = load_cluster("dgx-h100", nodes=2, overrides={"fabric.transport": "efa-v3"})
    job = Job(name="job", model=load_model("llama-3.1-8b"), cluster=cluster, plan=Plan(dp=16))
    with pytest.raises(UserError, match=r"^fabric.transport='efa-v3': unknown; did you mean 'efa-v"):
        prices_of(job)
