"""What all ranks send together, against closed forms and the traffic between ranks."""

from __future__ import annotations

import pytest

from sim.analysis.link_load import matrix
from sim.analysis.summary import summarise
from strategies.predict import simulate
from strategies.read_job import read_job


@pytest.mark.parametrize(
    ("plan", "psi"),
    [
        ({"data_parallel": "ddp", "algorithm": "all_reduce/ring"}, 2.0),
        ({"data_parallel": "ddp", "algorithm": "all_reduce/tree"}, 2.0),  # though ranks inside a tree send more than its leaves
        ({"data_parallel": "zero3", "accumulation": 1}, 3.0),
        ({"data_parallel": "zero1", "tp": 2}, 2.0),  # and 1.3 % more: every tp rank has all norms and biases of rows
    ],
)
def test_data_parallelism_sends_its_share_of_the_parameters_to_all_but_one(plan: dict[str, object], psi: float) -> None:
    """2Ψ·(n−1), of ZeRO-3 3Ψ·(n−1) (Rajbhandari et al. 2020, section 7), n dp ranks, by whatever algorithm; and what is sent
    along all axes is what arrives.
    """
    job = read_job(
        overrides=["model.layers=4"],
        model="gpt-1.7b",
        cluster="dgx-a100",
        nodes=2,
        plan={"sequence": 1024, "microbatch": 1, **plan},
    )
    timeline = simulate(job)
    answer = summarise(timeline, total=True)
    assert answer.total is not None
    assert answer.total["dp"].psi == pytest.approx(psi * (job.resolve().dp - 1), rel=0.015)
    assert sum(sent.bytes for sent in answer.total.values()) == pytest.approx(matrix(timeline).sum())
    assert "total" not in summarise(timeline).to_dict()


@pytest.mark.parametrize("nodes", [4, 8])
def test_inner_ranks_of_two_trees_send_more_than_their_roots(nodes: int) -> None:
    """Two trees with half of the buffer each: 2 (n − 1) halves go up and as many down. A rank that is inner in one and a leaf in
    the other sends half a buffer up and two down there, and half up here: two buffers, of which n ranks would send 2n.
    """
    job = read_job(
        overrides=["model.layers=1", "cluster.node.gpus=1", "cluster.node.nics=1"],
        model="gpt-1.7b",
        cluster="dgx-a100",
        nodes=nodes,
        plan={"sequence": 1024, "microbatch": 1, "data_parallel": "ddp", "algorithm": "all_reduce/tree"},
    )
    answer = summarise(simulate(job), total=True)
    assert answer.total is not None
    assert answer.volume["dp"].psi == pytest.approx(2.0)
    assert answer.total["dp"].psi == pytest.approx(2.0 * (nodes - 1))
