"""A job with parameter servers on toy hardware, against closed forms."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import shardyard
from sim.analysis.breakdown import breakdown
from sim.engine.parameter_servers import Setting
from sim.engine.player import run
from strategies.job import Job
from strategies.lowering.lower import lower
from strategies.lowering.parameter_servers import _links, parameter_servers
from topologies.reading import UserError


@pytest.fixture
def answer(toy_job, toy_prices):
    """answer(nodes, servers, …): nodes of 4 GPUs, 1 GB/s per GPU and per NIC; bf16 gradients and weights."""

    def ask(nodes: int = 3, servers: int = 1, staleness: str = "sync", plan: dict | None = None, node: dict | None = None, **how):
        job: Job = toy_job(4, nodes, node=node, **(plan or {}))
        return parameter_servers(job, toy_prices(), servers, staleness, **{"steps": 5} | how)

    return ask


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_synchronous(answer, toy_job, toy_prices, servers) -> None:
    """n workers and k servers: a worker's step on one GPU, and n·S/(k·B) each way, with one k-th of the update."""
    asked = answer(3, servers)
    job = toy_job(1, 1)
    alone = run(lower(job.model, job.resolve()), job.cluster.topology(), toy_prices())
    update = breakdown(alone)["optimizer"]
    size = 2 * job.model.parameters
    assert asked.setting.workers == 8
    assert asked.played.seconds / 5 == pytest.approx(alone.step - update + update / servers + 2 * 8 * size / (servers * 1e9))
    assert asked.played.gradients_per_second < asked.most == pytest.approx(servers * 1e9 / size / 2)


def test_tokens(answer) -> None:
    """A gradient is of the worker's own batch: 32 tokens a sequence."""
    asked = answer(plan={"microbatch": 2, "accumulation": 3})
    assert asked.tokens_per_second == pytest.approx(asked.played.gradients_per_second * 2 * 3 * 32)
    whole = answer(plan={"microbatch": 2, "global_batch": 8 * 2 * 3})
    assert whole.played == asked.played


def test_asynchronous(answer) -> None:
    assert answer(staleness="async").played.staleness.histogram == {7: 8 * 4}
    assert answer(staleness="2", jitter=0.5, steps=50).played.staleness.ahead <= 2


def test_memory(answer, toy_job) -> None:
    """Servers keep all states, (2 + 2 + 12)Ψ over k; workers all but the optimizer's."""
    psi = toy_job(1, 1).model.parameters
    alone, four = answer(servers=1), answer(servers=4)
    assert (alone.server_memory, four.server_memory) == pytest.approx((16 * psi, 4 * psi))
    assert alone.worker_memory == four.worker_memory > 4 * psi
    assert alone.fits


def test_a_nic_of_two_gpus(answer) -> None:
    """Workers that share a NIC have half of it each: with many servers it is what limits."""
    own, shared = answer(3, 4), answer(3, 4, node={"nics": 2})
    assert own.setting.worker == pytest.approx(1e9)
    assert shared.setting.worker == pytest.approx(0.5e9)


def test_workers_that_share_nics(toy_job, toy_prices) -> None:
    """The four L40S of a socket share a NIC of 200 Gb/s, and the eight of a node the one before a server."""
    cluster = shardyard.read_job(model="gpt2-1.5b", cluster="pcie-l40s", nodes=2, plan={}).cluster
    setting = parameter_servers(replace(toy_job(1, 1), cluster=cluster), toy_prices(), 1, "sync", 5).setting
    assert setting.workers == cluster.node.gpus
    assert setting.worker == pytest.approx(25e9 / 4)
    assert setting.into == setting.out == pytest.approx(25e9)


def test_gpus_of_a_torus_without_nics(toy_job, toy_prices) -> None:
    """1 GB/s between neighbours. 4 × 2 GPUs: workers 0 … 3, a server at 7, above 3: towards it all pass 3 → 7, and 0 and 1 both
    0 → 3; back two go by 7 → 6, and no link is common to all. A ring of 6: two workers come to 5 from each side.
    """

    def setting(gpus: int, nodes: int, *dims: int) -> Setting:
        node = {"gpu": "h100-sxm", "gpus": gpus, "wiring": "switch", "nvlink": "1 TB/s", "pcie": "1 TB/s", "nics": 0}
        torus = {"kind": "torus", "dims": dims, "link": "1 GB/s", "hop_latency": "0 s"}
        wired = {"name": "torus", "node": node, "fabric": torus, "nodes": nodes}
        cluster = shardyard.read_job(model="gpt2-1.5b", cluster=wired, nodes=nodes, plan={}).cluster
        return parameter_servers(replace(toy_job(1, 1), cluster=cluster), toy_prices(), 1, "sync", 5).setting

    block, ring = setting(4, 2, 4, 2), setting(2, 3, 6)
    assert (block.workers, block.into, block.worker) == (4, pytest.approx(1e9), pytest.approx(0.5e9))
    assert (ring.workers, ring.worker) == (4, pytest.approx(0.5e9))
    for shared in (block.out, ring.into, ring.out):
        assert shared >= 4 * 0.5e9  # what workers have of their own is what limits


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"servers": 9}, "--servers 9: take 3 of 3 nodes and leave no workers"),
        ({"servers": 0}, "--servers 0: must be at least 1"),
        ({"staleness": "soon"}, "--staleness soon: expected sync, async or a number of steps"),
        ({"staleness": "-1"}, "--staleness -1"),
        ({"jitter": float("nan")}, "--jitter nan"),
        ({"steps": 10**6}, "8 workers · 1000000 steps are too many"),
        ({"plan": {"tp": 2}}, "tp=2: a worker of parameter servers is one GPU"),
        ({"plan": {"data_parallel": "zero1"}}, "data_parallel=zero1: parameter servers are in its place"),
        ({"plan": {"freeze": {"layers": 1}}}, "freeze: parameter servers hold and update all parameters"),
        ({"plan": {"outside_optimizer": ["head"]}}, "outside_optimizer: parameter servers hold and update all parameters"),
        ({"plan": {"dp": 3}}, "= 3 ≠ 8 GPUs"),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_refused(answer, how, message) -> None:
    with pytest.raises(UserError, match=message):
        answer(**how)


def test_command() -> None:
    """The screen and the JSON tell the same."""
    asked = ["server", "--model", "gpt2-1.5b", "--cluster", "dgx-a100", "--nodes", "2", "--staleness", "async", "--steps", "10"]
    assert "8 workers, 1 server, asynchronous; 10 steps each" in CliRunner().invoke(shardyard.main, asked).stdout
    assert "by all-reduce instead" in CliRunner().invoke(shardyard.main, asked).stdout
    data = json.loads(CliRunner().invoke(shardyard.main, [*asked, "--json"]).stdout)
    assert data["fits"]
    assert sum(data["played"]["staleness"]["histogram"].values()) == 8 * 9


@pytest.mark.parametrize(
    ("shape", "workers", "servers", "shared", "own"),
    [
        ((4, 1), [1, 2, 3], [0], 1.0, 1.0),  # three workers meet at the server's link
        ((4, 1), [0, 1], [2, 3], 2.0, 1.0),  # half of the model to each of two
        ((2, 2), [0, 1, 2], [3], 3000.0, 0.5),  # two of three share a NIC, the third is beside the server: all share nothing
        ((1, 4), [1, 2, 3], [0], 1.0, 1.0),
    ],
)
def test_links_between_workers_and_servers(toy_cluster, toy_prices, shape, workers, servers, shared, own) -> None:
    """GB/s of models that all workers get together, and one of them, by links of 1 GB/s."""
    topology = toy_cluster(*shape).topology()
    for back in (False, True):
        links = _links(topology, toy_prices(), np.array(workers), np.array(servers), back)
        assert (links.shared / 1e9, links.own / 1e9, links.latency) == (shared, own, 0.0)
